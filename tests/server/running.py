"""A real server in processes of its own, as a user starts it."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import httpx

COMMAND = [sys.executable, "-c", "from twostroke.cli import main; main()", "serve"]
START_LIMIT_S = 60.0


@dataclass
class RunningServer:
    process: subprocess.Popen[bytes]
    address: str
    log_path: Path

    @property
    def base_url(self) -> str:
        return f"{self.address}/v1"

    def post(self, path: str, body: object, **options: object) -> httpx.Response:
        return httpx.post(self.address + path, json=body, timeout=60, **options)  # type: ignore[arg-type]

    def get(self, path: str, **options: object) -> httpx.Response:
        return httpx.get(self.address + path, timeout=20, **options)  # type: ignore[arg-type]

    def log(self) -> str:
        return self.log_path.read_text()

    def engine_pid(self) -> int:
        """The child whose command line names the engine process (Linux)."""
        pid = self.process.pid
        for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split():
            if b"engine_process" in Path(f"/proc/{child}/cmdline").read_bytes():
                return int(child)
        raise AssertionError("there is no engine process")

    def metric(self, name: str, *, headers: dict[str, str] | None = None, **labels: str) -> float:
        """The sum of a metric's samples that carry these labels."""
        total = 0.0
        for line in self.get("/metrics", headers=headers).text.splitlines():
            match = re.fullmatch(rf"{name}(?:\{{(.*)\}})? (\S+)", line)
            if match and all(f'{key}="{value}"' in (match[1] or "") for key, value in labels.items()):
                total += float(match[2])
        return total

    def wait_until_idle(self, limit_s: float = 15.0, headers: dict[str, str] | None = None) -> None:
        """Until the engine says that nothing runs, nothing waits and no block is held."""
        end_s = time.monotonic() + limit_s
        while time.monotonic() < end_s:
            held = self.metric("twostroke_kv_blocks", headers=headers, state="used")
            busy = [self.metric(f"twostroke_{name}", headers=headers) for name in ("running", "waiting")]
            if held == sum(busy) == 0:
                return
            time.sleep(0.1)
        raise AssertionError(f"still busy after {limit_s} s:\n{self.get('/metrics').text[-3000:]}")


@contextmanager
def running_server(
    log_path: Path, *arguments: str, stderr: int | None = None, address: str | None = None, **environment: str
) -> Iterator[RunningServer]:
    """`stderr` is a file to write to instead of the log; then `address` says where the server will be."""
    settings = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path), "COLUMNS": "200", **environment}
    port = ["--port", "0"] if address is None else ["--port", address.rpartition(":")[2]]
    with log_path.open("wb") as log:
        process = subprocess.Popen(
            [*COMMAND, *arguments, *port], stdout=log, stderr=log if stderr is None else stderr, env=settings
        )
    try:
        yield RunningServer(process, address or _announced(process, log_path), log_path)
    finally:
        if process.poll() is None:
            process.send_signal(signal.SIGTERM)
        try:
            process.wait(20)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
            raise


def _announced(process: subprocess.Popen[bytes], log_path: Path) -> str:
    end_s = time.monotonic() + START_LIMIT_S
    while time.monotonic() < end_s:
        if match := re.search(r"ready at (http://\S+)/v1", log_path.read_text()):
            return match[1]
        if process.poll() is not None:
            raise AssertionError(f"the server ended:\n{log_path.read_text()}")
        time.sleep(0.05)
    raise AssertionError(f"the server did not start:\n{log_path.read_text()}")
