"""A real server in processes of its own, as a user starts it."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import httpx

COMMAND = [sys.executable, "-c", "from twostroke.cli import main; main()", "serve"]
START_LIMIT_S = 120.0
ANSWER_LIMIT_S = 120.0
STOP_LIMIT_S = 60.0
"""Many times what a quiet machine takes."""

CLIENT = httpx.Client(
    timeout=ANSWER_LIMIT_S, limits=httpx.Limits(max_keepalive_connections=0), verify=False, trust_env=False
)
"""For everybody, with a connection for each request: to make one takes 20 ms, for certificates that nobody asks for."""


def cpu_s(pid: int) -> float:
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


@dataclass
class RunningServer:
    process: subprocess.Popen[bytes]
    address: str
    log_path: Path

    @property
    def base_url(self) -> str:
        return f"{self.address}/v1"

    def post(self, path: str, body: object, **options: object) -> httpx.Response:
        return CLIENT.post(self.address + path, json=body, **options)  # type: ignore[arg-type]

    def get(self, path: str, **options: object) -> httpx.Response:
        return CLIENT.get(self.address + path, **options)  # type: ignore[arg-type]

    def log(self) -> str:
        return self.log_path.read_text()

    def engine_pid(self) -> int:
        """The child whose command line names the engine process (Linux)."""
        pid = self.process.pid
        for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split():
            if b"engine_process" in Path(f"/proc/{child}/cmdline").read_bytes():
                return int(child)
        raise AssertionError("there is no engine process")

    def cpu_s(self) -> float:
        """What the API's process has worked so far: what others do to this machine is not in it (Linux)."""
        return cpu_s(self.process.pid)

    def metric(self, name: str, *, headers: dict[str, str] | None = None, **labels: str) -> float:
        """The sum of a metric's samples that carry these labels."""
        total = 0.0
        for line in self.get("/metrics", headers=headers).text.splitlines():
            match = re.fullmatch(rf"{name}(?:\{{(.*)\}})? (\S+)", line)
            if match and all(f'{key}="{value}"' in (match[1] or "") for key, value in labels.items()):
                total += float(match[2])
        return total

    def wait_until(self, is_so: Callable[[], bool], limit_s: float = ANSWER_LIMIT_S) -> None:
        end_s = time.monotonic() + limit_s
        while not is_so():
            assert time.monotonic() < end_s, f"not so after {limit_s} s:\n{self.log()[-3000:]}"
            time.sleep(0.02)

    @contextlib.contextmanager
    def held_engine(self) -> Iterator[None]:
        """The engine's process stands still: what is in flight stays so, however slow whoever looks is. Not for longer
        than `--engine-timeout`."""
        engine = self.engine_pid()
        os.kill(engine, signal.SIGSTOP)
        try:
            yield
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.kill(engine, signal.SIGCONT)

    def wait_until_idle(self, limit_s: float = ANSWER_LIMIT_S, headers: dict[str, str] | None = None) -> None:
        """Until the engine says that nothing runs, nothing waits and no block is held, and no request is answered but
        the one that asks."""
        end_s = time.monotonic() + limit_s
        while time.monotonic() < end_s:
            held = self.metric("twostroke_kv_blocks", headers=headers, state="used")
            busy = [self.metric(f"twostroke_{name}", headers=headers) for name in ("running", "waiting")]
            if held == sum(busy) == 0 and self.metric("twostroke_http_in_flight", headers=headers) == 1:
                return
            time.sleep(0.1)
        raise AssertionError(f"still busy after {limit_s} s:\n{self.get('/metrics').text[-3000:]}")


@contextlib.contextmanager
def running_server(
    log_path: Path, *arguments: str, stderr: int | None = None, **environment: str
) -> Iterator[RunningServer]:
    """`stderr` is a file to write to instead of the log (Linux: the server's port is looked up)."""
    settings = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path), "COLUMNS": "200", **environment}
    with log_path.open("wb") as log:
        process = subprocess.Popen(
            [*COMMAND, *arguments, "--port", "0"], stdout=log, stderr=log if stderr is None else stderr, env=settings
        )
    try:
        address = _announced(process, log_path) if stderr is None else _listening(process)
        yield RunningServer(process, address, log_path)
    finally:
        if process.poll() is None:
            process.send_signal(signal.SIGTERM)
        try:
            process.wait(STOP_LIMIT_S)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
            raise


def _announced(process: subprocess.Popen[bytes], log_path: Path) -> str:
    def address() -> str | None:
        match = re.search(r"ready at (http://\S+)/v1", log_path.read_text())
        return match and match[1]

    return _soon(process, address, log_path.read_text)


def _listening(process: subprocess.Popen[bytes]) -> str:
    """By the one socket of the process that waits for connections."""

    def address() -> str | None:
        own = set()
        for entry in Path(f"/proc/{process.pid}/fd").iterdir():
            with contextlib.suppress(FileNotFoundError):  # it has just been closed
                own.add(str(entry.readlink()))
        for fields in (line.split() for line in Path("/proc/net/tcp").read_text().splitlines()[1:]):
            if fields[3] == "0A" and f"socket:[{fields[9]}]" in own:
                return f"http://127.0.0.1:{int(fields[1].rpartition(':')[2], 16)}"
        return None

    return _soon(process, address, lambda: "(its words are lost)")


def _soon(process: subprocess.Popen[bytes], address: Callable[[], str | None], said: Callable[[], str]) -> str:
    end_s = time.monotonic() + START_LIMIT_S
    while time.monotonic() < end_s:
        if (found := address()) is not None:
            return found
        assert process.poll() is None, f"the server ended:\n{said()}"
        time.sleep(0.05)
    raise AssertionError(f"the server did not start:\n{said()}")
