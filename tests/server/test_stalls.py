"""No request, however it is made, holds up the streams of others: the API's event loop is never away for long, and what
a stream waits beyond its plain waits is not the API's doing."""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.server import hostile
from tests.server.conftest import MODEL_OPTIONS
from tests.server.running import RunningServer, running_server

ROOT = Path(__file__).parents[2]
LIMIT_S = 0.05
NUM_STREAMS = 16
TRIES = 5
"""Other programs run on this machine too: what is the server's own fault happens every time."""


QUICK = ("floats at most", "tiny chunks", "tiny requests", "the worst bodies at once")


@pytest.mark.parametrize("name", QUICK)
def test_the_loop_is_not_kept(server: RunningServer, name: str) -> None:
    send = hostile.TRAFFIC.get(name) or (lambda address: hostile.post(address, *hostile.body_named(name)))
    tries: list[float] = []
    for _ in range(10):
        tries.append(hostile.stall(server, send).work_s)
        if tries[-1] <= LIMIT_S:
            return
    raise AssertionError(f"{name} kept the event loop for up to {tries} s")


@dataclass
class Streams:
    process: subprocess.Popen[str]

    def longest_wait_s(self) -> float:
        """Of all streams, since it was last asked."""
        assert self.process.stdin is not None and self.process.stdout is not None
        self.process.stdin.write("\n")
        self.process.stdin.flush()
        return float(self.process.stdout.readline())


@contextmanager
def streams_of(server: RunningServer) -> Iterator[Streams]:
    command = [sys.executable, "-m", "tests.server.stream_gaps", server.address, str(NUM_STREAMS)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, cwd=ROOT) as process:
        streams = Streams(process)
        try:
            time.sleep(5)  # until all of them run
            streams.longest_wait_s()
            yield streams
        finally:
            assert process.stdin is not None
            process.stdin.close()
            process.wait(20)


@pytest.fixture(scope="module")
def crowded(smollm2_path: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[RunningServer, Streams]]:
    """A server of its own, with 16 streams running."""
    with running_server(tmp_path_factory.mktemp("crowded") / "log", *MODEL_OPTIONS) as server, streams_of(server) as s:
        yield server, s


def hold_up(server: RunningServer, streams: Streams, name: str, send: Callable[[str], hostile.Statuses]) -> None:
    """A try is sound where the loop kept to its limit, and no stream waited longer than in plain times and the limit
    together; or where it did, but the API was not late, so that it waited for the engine."""
    said = []
    for _ in range(TRIES):
        streams.longest_wait_s()
        time.sleep(2)
        plain_s = streams.longest_wait_s()
        found = hostile.stall(server, send)
        more_s = streams.longest_wait_s() - plain_s
        said.append(f"{found}, and {more_s:.3f} s above {plain_s:.3f} s between tokens")
        print(name, said[-1], flush=True)
        if found.work_s <= LIMIT_S and (more_s <= LIMIT_S or found.lag_s <= LIMIT_S):
            return
    raise AssertionError(f"{name} held up the streams: {said}")


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_nothing_holds_up_sixteen_streams(crowded: tuple[RunningServer, Streams]) -> None:
    for name, send in hostile.everything():
        hold_up(*crowded, name, send)


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_long_prompts_hold_up_no_stream(crowded: tuple[RunningServer, Streams]) -> None:
    hold_up(*crowded, "long prompts", hostile.long_prompts)
