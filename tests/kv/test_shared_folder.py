"""A folder of KV that several processes use at once: what one writes, another finds without a restart, as soon as it
looks; whoever is killed while it writes, or clears the folder, costs misses and nothing else."""

from __future__ import annotations

import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from tests.kv.test_disk_tier import BYTES, WRITER, content, nodes, only_segment, tier
from tests.scheduling.fake_backend import fake_format
from tests.scheduling.loop import Loop, layout, request
from twostroke.kv.tiers import disk_threads
from twostroke.kv.tiers.disk import DiskTier
from twostroke.kv.tiers.disk_threads import DiskThreads

LAYOUT = layout((None, 10))
TURN_BY_TURN = """
import sys
from pathlib import Path
from tests.kv.test_disk_tier import content, nodes, tier
disk = tier(Path(sys.argv[1]), 1 << 28)
chain = nodes(disk, 1000, sys.argv[2])
for line in sys.stdin:
    for node in chain[: int(line)]:
        assert disk.write(node, 0, memoryview(content(node)))
    print("written", flush=True)
"""


@contextmanager
def process(script: str, *arguments: str) -> Iterator[subprocess.Popen[str]]:
    command = [sys.executable, "-c", script, *arguments]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as running:
        try:
            yield running
        finally:
            running.kill()


def say(other: subprocess.Popen[str], line: str) -> None:
    """And wait until it has done so."""
    assert other.stdin is not None and other.stdout is not None
    other.stdin.write(f"{line}\n")
    other.stdin.flush()
    assert other.stdout.readline()


def num_found(disk: DiskTier, count: int, salt: str) -> int:
    """Blocks that are there; each of them is what was written."""
    found_blocks = 0
    for node in nodes(disk, count, salt):
        found, into = disk.find(node, 0), memoryview(bytearray(BYTES))
        if found is not None and disk.read(found, node, into):
            assert into == content(node)
            found_blocks += 1
    return found_blocks


def test_what_another_process_writes_is_found_while_both_run(tmp_path: Path) -> None:
    disk = tier(tmp_path)
    assert disk.look() == 0
    with process(TURN_BY_TURN, str(tmp_path), "a") as other:
        say(other, "20")
        assert num_found(disk, 40, "a") == 0, "nobody looked"
        assert disk.look() == 20 and num_found(disk, 40, "a") == 20
        say(other, "40")  # its file grows
        assert disk.look() == 20 and num_found(disk, 40, "a") == 40
        assert disk.look() == 0
        for node in nodes(disk, 40, "a"):
            assert disk.write(node, 0, memoryview(content(node))), "it is there"
        own = nodes(disk, 30, "b")
        for node in own:
            assert disk.write(node, 0, memoryview(content(node)))
        assert len(list(tmp_path.glob("*.kvsegment"))) == 2
        assert disk.look() == 0, "its own file is not read once more"
        assert disk.used_bytes == sum(path.stat().st_size for path in tmp_path.glob("*.kvsegment"))
    disk.close()


def test_a_file_of_another_model_is_not_read_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    disk = tier(tmp_path, identity="another model")
    with process(TURN_BY_TURN, str(tmp_path), "a") as other:
        say(other, "20")
        assert disk.look() == 0
        entered: list[Path] = []
        monkeypatch.setattr(disk, "_enter", lambda path, **_: entered.append(path))
        assert disk.look() == 0 and entered == []
    disk.close()


@pytest.mark.parametrize("number", [0, *(pytest.param(number, marks=pytest.mark.slow) for number in (1, 2, 3))])
def test_a_writer_that_is_killed_leaves_what_was_whole(tmp_path: Path, number: int) -> None:
    """This process looks again and again while the other writes, and after it was killed at any byte."""
    disk = tier(tmp_path, 1 << 28)
    with process(WRITER, str(tmp_path)) as other:
        assert other.stdout is not None and other.stdout.readline()
        until_s = time.monotonic() + 60.0
        while len(disk) < 150 + 61 * number:
            disk.look()
            assert time.monotonic() < until_s
        other.send_signal(signal.SIGKILL)
        other.wait()
    disk.look()
    whole = len(disk)
    assert num_found(disk, whole + 50, "") == whole
    path = only_segment(tmp_path)
    with path.open("r+b") as file:
        file.truncate(path.stat().st_size - BYTES // 2)  # as if the last block had never been whole
    disk.look()
    assert num_found(disk, whole + 50, "") in (whole - 1, whole)
    disk.close()


def test_what_another_process_removed_is_forgotten(tmp_path: Path) -> None:
    disk = tier(tmp_path)
    with process(TURN_BY_TURN, str(tmp_path), "a") as other:
        say(other, "20")
        assert disk.look() == 20
    third = tier(tmp_path)
    third.clear()
    disk.look()
    assert len(disk) == 0 and not list(tmp_path.glob("*.kvsegment"))
    third.close()
    disk.close()


@pytest.mark.parametrize("has_looked", [False, True])
def test_after_clearing_only_what_is_written_later_is_found(tmp_path: Path, has_looked: bool) -> None:
    """Another process holds its file: it stays, and what was in it is forgotten here, or never found."""
    disk = tier(tmp_path)
    with process(TURN_BY_TURN, str(tmp_path), "a") as other:
        say(other, "20")
        assert not has_looked or disk.look() == 20
        disk.clear()
        assert only_segment(tmp_path).exists()
        assert disk.look() == 0 and num_found(disk, 20, "a") == 0
        say(other, "30")
        assert disk.look() == 10
        chain = nodes(disk, 30, "a")
        assert [disk.find(node, 0) is not None for node in chain] == [False] * 20 + [True] * 10
    disk.close()


def test_a_request_finds_what_another_process_wrote_since_the_start(tmp_path: Path) -> None:
    """Whole requests, by two schedulers over one folder: the second began before there was anything."""
    identity = fake_format(LAYOUT).described()

    def began() -> Loop:
        return Loop(LAYOUT, host_slots=30, disk=DiskTier(tmp_path, 1 << 20, identity, LAYOUT.block_size))

    second, first = began(), began()
    for name, salt in (("a", ""), ("b", "other"), ("c", "third")):
        first.add(request(name, range(22), salt=salt, max_tokens=4))
        first.run()
    tiers = first.scheduler.ledger.tiers
    assert tiers is not None and tiers._threads is not None and tiers._threads.flush(10.0)
    again = second.add(request("again", range(22), max_tokens=4))[0]
    second.run()
    second.check_outputs()
    assert again.timing.tier_tokens.disk == 20
    for loop in (first, second):
        assert loop.scheduler.ledger.tiers is not None
        loop.scheduler.ledger.tiers.close()


def test_looks_are_shared_rare_and_never_waited_for_long(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    disk = tier(tmp_path)
    threads = DiskThreads(disk, lambda group, slot: memoryview(bytes(BYTES)))
    may_look, looked = threading.Event(), list[float]()

    def slow_look() -> int:
        looked.append(time.monotonic())
        may_look.wait()
        return 0

    monkeypatch.setattr(disk, "look", slow_look)
    monkeypatch.setattr(disk_threads, "LOOK_WAIT_S", 0.2)
    one, two = threads.look(), threads.look()
    assert one is not None and one is two and not one.is_over
    time.sleep(0.25)
    assert one.is_over and not one.is_done, "who waits goes on"
    assert threads.look() is None, "and the next one is not at once"
    may_look.set()
    monkeypatch.setattr(disk_threads, "LOOK_EVERY_S", 0.0)
    threads._next_look_s = 0.0
    three = threads.look()
    assert three is not None and three is not one
    while not three.is_done:
        threads.wait(0.1)
    assert len(looked) == 2
    threads.close()
