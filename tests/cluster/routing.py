"""A real smg in a process of its own."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from twostroke.cluster.fleet import free_port
from twostroke.cluster.router_client import ROUTER_KEY_VARIABLE, RouterClient
from twostroke.cluster.routers import RouterPlan

LIMIT_S = 60.0


def until(is_so: Callable[[], object], limit_s: float = LIMIT_S, said: Callable[[], str] = str) -> None:
    end_s = time.monotonic() + limit_s
    while not is_so():
        assert time.monotonic() < end_s, f"not so after {limit_s} s\n{said()}"
        time.sleep(0.05)


@contextmanager
def running_smg(
    log: Path, port: int, key: str = "", *, has_roles: bool = False, more: tuple[str, ...] = ()
) -> Iterator[subprocess.Popen[bytes]]:
    plan = RouterPlan("smg", "127.0.0.1", port, free_port(), has_roles)
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path), ROUTER_KEY_VARIABLE: key}
    with log.open("ab") as file:
        process = subprocess.Popen([*plan.command({}), *more], stdout=file, stderr=file, env=environment)
    try:
        until(lambda: RouterClient(f"http://127.0.0.1:{port}").is_up(), said=log.read_text)
        yield process
    finally:
        process.kill()
        process.wait()


def is_alive(pid: int) -> bool:
    """A zombie is none."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def descendants(pid: int) -> set[int]:
    """Of a process, all that it started, and what those did (Linux)."""
    found: set[int] = set()
    for task in Path(f"/proc/{pid}/task").glob("*/children"):
        for child in map(int, task.read_text().split()):
            found |= {child} | descendants(child)
    return found
