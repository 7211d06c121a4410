"""Whether a process answers, asked of real ones: one that is well, starts, stands still, goes on, and is gone."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.cluster.routing import descendants, is_alive, until
from twostroke.cluster.children import Child
from twostroke.cluster.fleet import free_port
from twostroke.cluster.pulse import LOOK_S, Pulse

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="processes are looked up in /proc")
SERVER = """
import sys
from http.server import BaseHTTPRequestHandler, HTTPServer

class Handler(BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(int(self.path[1:]))
        self.end_headers()

HTTPServer(("127.0.0.1", int(sys.argv[1])), Handler).serve_forever()
"""


@pytest.fixture
def served() -> Iterator[tuple[int, subprocess.Popen[bytes]]]:
    port = free_port()
    process = subprocess.Popen([sys.executable, "-c", SERVER, str(port)], stderr=subprocess.DEVNULL)
    ready = Pulse(f"http://127.0.0.1:{port}/200")
    until(lambda: ready._ask() is True)
    yield port, process
    process.kill()
    process.wait()


def looked_at(pulse: Pulse) -> Pulse:
    pulse.look()
    return pulse


def test_only_one_that_was_well_and_stands_still_is_silent(served: tuple[int, subprocess.Popen[bytes]]) -> None:
    port, process = served
    well, unwell = (Pulse(f"http://127.0.0.1:{port}/{status}") for status in (200, 503))
    for pulse in (well, unwell):
        pulse.look()
        assert pulse.silent_s == 0.0
    process.send_signal(signal.SIGSTOP)
    for times in (1, 2):
        well.look()
        assert well.silent_s == times * LOOK_S
    unwell.look()
    assert unwell.silent_s == 0.0, "it may take long to start"
    process.send_signal(signal.SIGCONT)
    until(lambda: looked_at(well).silent_s == 0.0)
    process.send_signal(signal.SIGSTOP)
    well.look()
    assert well.silent_s == LOOK_S
    well.begin()
    well.look()
    assert well.silent_s == 0.0, "another process is at this address, and has not been well yet"


def test_one_that_is_gone_is_not_silent(served: tuple[int, subprocess.Popen[bytes]]) -> None:
    """Whoever started it knows that it has ended."""
    port, process = served
    pulse = Pulse(f"http://127.0.0.1:{port}/200")
    pulse.look()
    process.kill()
    process.wait()
    pulse.look()
    assert pulse.silent_s == 0.0


PARENT = """
import subprocess, sys, time
child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"], start_new_session=True)
time.sleep(600)
"""


def test_what_is_killed_takes_its_own_children_along_though_they_stand_still(tmp_path: Path) -> None:
    child = Child("worker-0", [sys.executable, "-c", PARENT], {}, tmp_path / "log")
    child.start()
    assert child.pid is not None
    until(lambda: child.pid is not None and descendants(child.pid))
    [own] = descendants(child.pid)
    for pid in (own, child.pid):
        os.kill(pid, signal.SIGSTOP)
    child.tell(signal.SIGKILL)
    assert child.wait(time.monotonic() + 10.0)
    until(lambda: not is_alive(own), 10.0)
