"""One replica of a pool: it owns a `twostroke serve` child, which adds itself to the router, and says how the child is.
Requests go from router to child: none passes here. Ray makes these and removes them; nothing here imports Ray, so that
a replica can be tried without."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import time
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from typing import Any
from urllib.request import ProxyHandler, Request, build_opener

from twostroke.cluster.endpoints import LOOPBACK
from twostroke.cluster.router_client import ROUTER_KEY_VARIABLE, RouterClient
from twostroke.core.errors import BackendError

START_S = 1800.0
LOOK_S = 0.2
ANSWER_S = 5.0
MARGIN_S = 5.0
MAX_BYTES = 2**20

_open = build_opener(ProxyHandler({})).open


class Child:
    """A process that ends with this one, or when it is told."""

    def __init__(self, command: Sequence[str], environment: Mapping[str, str], drain_s: float) -> None:
        path = os.pathsep.join(entry for entry in sys.path if entry)
        self._limit_s = drain_s + MARGIN_S
        self._process = subprocess.Popen(
            [sys.executable, "-P", "-m", "twostroke.cluster.lifeline", f"{self._limit_s:g}", *command],
            stdin=subprocess.PIPE,
            env={**os.environ, "PYTHONPATH": path, **environment},
        )

    def check(self) -> None:
        """Raises BackendError where it has ended."""
        if (code := self._process.poll()) is not None:
            raise BackendError(f"the process has ended with exit code {code}")

    def end(self) -> None:
        """Returns when it has ended, its answers before it."""
        assert self._process.stdin is not None
        with suppress(OSError):
            self._process.stdin.close()
        with suppress(subprocess.TimeoutExpired):
            self._process.wait(self._limit_s + MARGIN_S)
        self._process.kill()


def ways_of_kv(host: str, machines: Iterable[str]) -> list[str]:
    """Options of `twostroke serve`: where others take this worker's KV, and from which machines and networks it takes
    theirs. On a machine's own address nobody else is reached."""
    if host == LOOPBACK:
        return []
    return ["--transfer-host", host, *(part for machine in sorted({*machines}) for part in ("--peer", machine))]


class WorkerReplica:
    def __init__(
        self,
        serve: Sequence[str],
        router_url: str,
        environment: Mapping[str, str],
        *,
        drain_s: float,
        host: str = "127.0.0.1",
        start_s: float = START_S,
    ) -> None:
        """`serve`: the model and options of `twostroke serve`; `host`: this machine, as the router reaches it. Returns
        when the child takes requests."""
        port = _free_port(host)
        self.url = f"http://{host}:{port}"
        command = [sys.executable, "-P", "-c", "from twostroke.cli import main; main()", "serve", *serve]
        command += ["--host", host, "--port", str(port), "--drain", f"{drain_s:g}", "--register", router_url]
        self._keys = [key for key in os.environ.get("TWOSTROKE_API_KEYS", "").split(",") if key]
        self._router = RouterClient(router_url, environment.get(ROUTER_KEY_VARIABLE))
        self._child = Child(command, environment, drain_s)
        self._is_over = False
        until_s = time.monotonic() + start_s
        while True:
            self._child.check()
            with suppress(OSError, ValueError):
                self.get("/health")
                return
            if time.monotonic() >= until_s:
                self._child.end()
                raise BackendError(f"the server did not start within {start_s:g} s")
            time.sleep(LOOK_S)

    def address(self) -> str:
        return self.url

    def check_health(self) -> None:
        """Raises where the child has ended, or does not answer. One that starts its engine anew mends itself."""
        try:
            self._child.check()
        except BackendError:
            self._forget()
            raise
        self.get("/version")

    def signals(self) -> dict[str, Any]:
        """As `/autoscale` has them."""
        found = self.get("/autoscale")["signals"]
        assert isinstance(found, dict)
        return found

    def end(self) -> None:
        """The child leaves the router, lets its answers end, and ends."""
        if not self._is_over:
            self._is_over = True
            self._child.end()
            self._forget()

    def _forget(self) -> None:
        """A child that was killed could not leave the router itself."""
        with suppress(BackendError):
            for worker in self._router.workers():
                if worker.url.rstrip("/") == self.url and worker.worker_id is not None and not worker.is_leaving:
                    self._router.remove(worker.worker_id)

    def get(self, path: str) -> dict[str, Any]:
        """Raises OSError where it does not answer, or not well."""
        headers = {"Authorization": f"Bearer {self._keys[0]}"} if self._keys else {}
        with _open(Request(self.url + path, headers=headers), timeout=ANSWER_S) as response:
            answer = json.loads(response.read(MAX_BYTES))
        return answer if isinstance(answer, dict) else {}


def _free_port(host: str) -> int:
    with socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET) as probe:
        probe.bind((host, 0))
        port: int = probe.getsockname()[1]
        return port
