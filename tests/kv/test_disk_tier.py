"""The disk tier against damage: cut anywhere, bits flipped, two processes, a full disk, a process killed while it
writes. Each time a block is what was written, or it is not there."""

from __future__ import annotations

import errno
import os
import random
import shutil
import signal
import stat
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from tests.scheduling.fake_backend import fake_format
from tests.scheduling.loop import Loop, layout, request
from twostroke.config import KVConfig
from twostroke.core.errors import BackendError
from twostroke.engine.tier_secret import tier_secret
from twostroke.kv.prefix_index import PrefixIndex, PrefixNode
from twostroke.kv.tiers import disk as disk_module
from twostroke.kv.tiers.disk import DiskTier
from twostroke.kv.tiers.disk_threads import DiskThreads
from twostroke.kv.tiers.files import SUFFIX
from twostroke.kv.tiers.host import HostTier

BLOCK_SIZE, BYTES = 4, 1000
LAYOUT = layout((None, 10))


def tier(folder: Path, limit_bytes: int = 1 << 20, identity: str = "model") -> DiskTier:
    return DiskTier(folder, limit_bytes, identity, BLOCK_SIZE)


def nodes(disk: DiskTier, count: int, salt: str = "") -> list[PrefixNode]:
    """A chain of blocks, named as an index with the folder's key names them."""
    index = PrefixIndex(1, key=disk.key)
    chain = [index.root(f"salt:{salt}")]
    for number in range(count):
        chain.append(index.child(chain[-1], tuple(range(number, number + BLOCK_SIZE))))
    return chain[1:]


def content(node: PrefixNode) -> bytes:
    return random.Random(node.tokens[0]).randbytes(BYTES)


def filled(folder: Path, count: int = 12) -> None:
    disk = tier(folder)
    for node in nodes(disk, count):
        assert disk.write(node, 0, memoryview(content(node)))
    disk.close()


def found_in(folder: Path, count: int = 12) -> int:
    """Blocks that are there; each of them is what was written."""
    disk, num_found = tier(folder), 0
    for node in nodes(disk, count):
        found, into = disk.find(node, 0), memoryview(bytearray(BYTES))
        if found is not None and disk.read(found, node, into):
            assert into == content(node)
            num_found += 1
    disk.close()
    return num_found


def only_segment(folder: Path) -> Path:
    (path,) = folder.glob(f"*{SUFFIX}")
    return path


def test_what_was_written_is_found_by_the_next_process(tmp_path: Path) -> None:
    filled(tmp_path)
    assert found_in(tmp_path) == 12
    disk = tier(tmp_path)
    assert all(disk.find(node, 1) is None for node in nodes(disk, 12)), "another group"
    assert all(disk.find(node, 0) is None for node in nodes(disk, 12, salt="other"))


def test_only_the_owner_may_look(tmp_path: Path) -> None:
    filled(tmp_path / "kv")
    assert stat.S_IMODE((tmp_path / "kv").stat().st_mode) == 0o700
    assert {stat.S_IMODE(path.stat().st_mode) for path in (tmp_path / "kv").iterdir()} == {0o600}


@pytest.mark.parametrize("change", ["model", "key"])
def test_kv_of_another_model_or_key_is_not_found(tmp_path: Path, change: str) -> None:
    filled(tmp_path)
    if change == "key":
        (tmp_path / "key").write_bytes(bytes(32))
        assert found_in(tmp_path) == 0
        return
    disk = tier(tmp_path, identity="another model")
    assert not len(disk)
    assert only_segment(tmp_path).exists(), "it is another's, and may be of use to it"
    disk.close()
    assert found_in(tmp_path) == 12


def test_tokens_are_compared(tmp_path: Path) -> None:
    """Names that collide, as if the hash were broken."""
    disk = tier(tmp_path)
    first = nodes(disk, 1)[0]
    assert disk.write(first, 0, memoryview(content(first)))
    forged = PrefixNode(first.digest, first.parent, (9, 9, 9, 9), first.namespace)
    found = disk.find(forged, 0)
    assert found is not None and not disk.read(found, forged, memoryview(bytearray(BYTES)))


def damaged(original: Path, folder: Path, generator: random.Random, how: str) -> int:
    """A copy of a folder whose one file is cut, or has a bit flipped; returns where."""
    shutil.copytree(original, folder)
    path = only_segment(folder)
    data = bytearray(path.read_bytes())
    place = generator.randrange(len(data))
    if how == "cut":
        del data[place:]
    elif how == "flip":
        data[place] ^= 1 << generator.randrange(8)
    else:
        data[place : place + 300] = bytes(min(300, len(data) - place))
    path.write_bytes(data)
    return place


@pytest.mark.parametrize("how", ["cut", "flip", "hole"])
def test_damage_anywhere_is_a_miss(tmp_path: Path, how: str) -> None:
    filled(tmp_path / "kv")
    generator, counts = random.Random(11), set()
    size = only_segment(tmp_path / "kv").stat().st_size
    for number in range(200):
        folder = tmp_path / str(number)
        place = damaged(tmp_path / "kv", folder, generator, how)
        counts.add(num_found := found_in(folder))
        assert num_found < 12
        if how == "cut":
            assert num_found >= (place - 200) * 12 // size - 1, "what lies before the cut is there"
    assert len(counts) >= 2


def test_answers_over_a_folder_cut_at_200_places_or_with_200_flipped_bits(tmp_path: Path) -> None:
    """Whole requests: the backend looks at every key that is read, and every token is right."""

    def run(folder: Path) -> int:
        disk = DiskTier(folder, 1 << 20, fake_format(LAYOUT).described(), LAYOUT.block_size)
        loop = Loop(LAYOUT, host_slots=30, disk=disk)
        again = loop.add(request("again", range(22), max_tokens=4))[0]
        loop.run()
        loop.check_outputs()
        tiers = loop.scheduler.ledger.tiers
        assert tiers is not None and tiers._threads is not None
        tiers._threads.flush(10.0)
        for name in ("other", "third"):
            loop.add(request(name, range(28), salt=name, max_tokens=8))
            loop.run()
        tiers._threads.flush(10.0)
        tiers.close()
        return again.timing.tier_tokens.disk

    run(tmp_path / "kv")
    shutil.copytree(tmp_path / "kv", tmp_path / "whole")
    assert run(tmp_path / "whole") == 20
    generator, hits = random.Random(5), set()
    for number in range(200):
        folder = tmp_path / str(number)
        damaged(tmp_path / "kv", folder, generator, "cut" if number % 2 else "flip")
        hits.add(run(folder))
    assert {0, 20} < hits, "before the damage, behind it, and between"


def test_a_key_that_was_cut_short_costs_what_it_named(tmp_path: Path) -> None:
    filled(tmp_path)
    (tmp_path / "key").write_bytes(b"short")
    assert found_in(tmp_path) == 0
    filled(tmp_path)
    assert found_in(tmp_path) == 12


def test_what_is_not_to_be_trusted_is_not_there_after_a_restart(tmp_path: Path) -> None:
    filled(tmp_path)
    disk = tier(tmp_path)
    other = tier(tmp_path)
    wrong = nodes(disk, 12)[5]
    found = other.find(wrong, 0)
    disk.forget(wrong, 0)
    assert disk.find(wrong, 0) is None
    assert found is not None and not other.read(found, wrong, memoryview(bytearray(BYTES))), "nor in another process"
    other.close()
    again = tier(tmp_path)
    assert again.find(nodes(again, 12)[5], 0) is None
    assert disk.write(wrong, 0, memoryview(content(wrong))), "it was computed anew"
    disk.close()
    again.close()
    assert found_in(tmp_path) == 12


def test_what_lies_beside_a_block_that_is_not_to_be_trusted_stays(tmp_path: Path) -> None:
    """One client's fault costs no other its blocks: neither now nor after a restart."""
    disk = tier(tmp_path)
    own, others = nodes(disk, 12, "own"), nodes(disk, 12)
    for one, other in zip(own, others, strict=True):
        assert disk.write(one, 0, memoryview(content(one))) and disk.write(other, 0, memoryview(content(other)))
    for one in own:
        disk.forget(one, 0)
    assert all(disk.find(other, 0) is not None for other in others)
    assert disk.write(own[0], 0, memoryview(content(own[0])))
    disk.close()
    assert found_in(tmp_path) == 12
    again = tier(tmp_path)
    assert [again.find(one, 0) is not None for one in nodes(again, 12, "own")] == [True] + [False] * 11
    again.close()


def test_what_is_forgotten_on_its_way_to_disk_does_not_arrive(tmp_path: Path) -> None:
    """The write was queued when the block was found to be wrong."""
    disk, host = tier(tmp_path), HostTier([4])
    threads = DiskThreads(disk, lambda group, slot: memoryview(bytes(BYTES)))
    node = nodes(disk, 1)[0]
    kept = host.take(node, 0)
    assert kept is not None and host.show(kept)
    may_write = threading.Event()
    threads._writer.submit(may_write.wait)
    threads.write(kept)
    host.forget(kept)
    disk.forget(node, 0)
    may_write.set()
    assert threads.flush(60.0) and threads.written() == [(kept, False)]
    assert disk.find(node, 0) is None
    threads.close()


def test_two_engines_share_a_folder(tmp_path: Path) -> None:
    """Each writes to a file of its own; neither removes what the other writes to; each takes a file that is gone as
    a miss."""
    first, second = tier(tmp_path, 30_000), tier(tmp_path, 30_000)
    assert first.key == second.key
    chains = nodes(first, 12, "a"), nodes(second, 12, "b")
    for one, two in zip(*chains, strict=True):
        first.write(one, 0, memoryview(content(one)))
        second.write(two, 0, memoryview(content(two)))
    assert sum(path.stat().st_size for path in tmp_path.glob(f"*{SUFFIX}")) <= 30_000
    third = tier(tmp_path, 30_000)
    into = memoryview(bytearray(BYTES))
    assert len(third) > 0
    first.clear()
    for disk in (first, second, third):
        for node in (*chains[0], *chains[1]):
            found = disk.find(node, 0)
            if found is not None and disk.read(found, node, into):
                assert into == content(node)
    for one in chains[0]:
        first.write(one, 0, memoryview(content(one)))
    assert first.find(chains[0][-1], 0) is not None
    for disk in (first, second, third):
        disk.close()


def test_a_full_folder_gives_up_what_was_used_longest_ago(tmp_path: Path) -> None:
    disk = tier(tmp_path, limit_bytes=20_000)
    chain = nodes(disk, 60)
    for node in chain:
        assert disk.write(node, 0, memoryview(content(node)))
        assert sum(path.stat().st_size for path in tmp_path.glob(f"*{SUFFIX}")) <= 20_000
    assert disk.find(chain[0], 0) is None and disk.find(chain[-1], 0) is not None
    disk.close()


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EIO, errno.EDQUOT])
def test_a_full_disk_costs_what_was_not_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int) -> None:
    disk = tier(tmp_path)
    chain, write = nodes(disk, 6), os.pwritev
    assert disk.write(chain[0], 0, memoryview(content(chain[0])))

    def fails(descriptor: int, parts: list[memoryview], offset: int) -> int:
        write(descriptor, [parts[0], parts[1][:100]], offset)  # some of it arrives, as it does
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(os, "pwritev", fails)
    assert not disk.write(chain[1], 0, memoryview(content(chain[1])))
    monkeypatch.setattr(os, "pwritev", write)
    assert disk.is_paused and not disk.write(chain[2], 0, memoryview(content(chain[2]))), "it is not tried at once"
    monkeypatch.setattr(disk_module, "PAUSE_S", 0.0)
    disk._paused_until_s = 0.0
    assert disk.write(chain[3], 0, memoryview(content(chain[3])))
    disk.close()
    assert found_in(tmp_path) == 2


def test_a_folder_that_vanishes_is_a_miss_and_no_crash(tmp_path: Path) -> None:
    disk = tier(tmp_path / "kv")
    chain = nodes(disk, 4)
    assert disk.write(chain[0], 0, memoryview(content(chain[0])))
    shutil.rmtree(tmp_path / "kv")
    assert not disk.write(chain[1], 0, memoryview(content(chain[1])))
    found = disk.find(chain[0], 0)
    assert found is None or not disk.read(found, chain[0], memoryview(bytearray(BYTES)))
    disk.close()


def test_a_folder_that_cannot_be_made_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(BackendError, match="--kv-disk"):
        tier(tmp_path / "file")


@pytest.mark.parametrize(
    "files",
    [
        {"key": b"a user's own"},
        {"key": b"a user's own", ".key-0123abcd": bytes(32)},
        {"holiday.jpg": b"picture", ".begun-0123abcd": b""},
        {".key-of-mine": b""},
    ],
)
def test_a_folder_with_a_users_own_files_is_refused_and_left_as_it_was(tmp_path: Path, files: dict[str, bytes]) -> None:
    folder = tmp_path / "home"
    folder.mkdir()
    folder.chmod(0o755)
    for name, data in files.items():
        (folder / name).write_bytes(data)
        os.utime(folder / name, (1e9, 1e9))  # as if it had lain there for long
    with pytest.raises(BackendError, match=r"holds other files .*choose a folder that is empty or not there yet"):
        tier(folder)
    assert tier_secret(KVConfig(disk=str(folder))) is None
    assert {path.name: path.read_bytes() for path in folder.iterdir()} == files
    assert stat.S_IMODE(folder.stat().st_mode) == 0o755


def test_an_empty_folder_is_used_and_keeps_its_mode(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """A disk that is empty has a folder of its own; what was begun and not named is an engine's."""
    for mode, is_warned in ((0o755, False), (0o777, True)):
        folder = tmp_path / f"{mode:o}"
        (folder / "lost+found").mkdir(parents=True)
        (folder / ".key-0123abcd").write_bytes(bytes(32))
        folder.chmod(mode)
        filled(folder)
        (folder / "note").write_text("a user's")
        assert found_in(folder) == 12, "it is ours by now"
        assert stat.S_IMODE(folder.stat().st_mode) == mode and (folder / "note").exists()
        assert ("every user of this machine may write" in caplog.text) == is_warned


def test_a_folder_is_known_by_its_key_after_it_was_cleared(tmp_path: Path) -> None:
    filled(tmp_path)
    disk = tier(tmp_path)
    disk.clear()
    disk.close()
    (tmp_path / "note").write_text("a user's")
    assert not list(tmp_path.glob(f"*{SUFFIX}")) and tier(tmp_path).key == disk.key
    assert tier_secret(KVConfig(disk=str(tmp_path))) is not None


def test_clearing_does_not_wait_until_the_folder_is_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A thread of the lowest priority reads what lies in a large folder, and the scheduler waits for the clearing."""
    filled(tmp_path, 100)
    original = only_segment(tmp_path)
    for number in range(5):
        shutil.copy(original, tmp_path / f"{number}{SUFFIX}")
    read, num_reads, is_reading, may_read = os.pread, 0, threading.Event(), threading.Event()

    def slow_read(descriptor: int, count: int, offset: int) -> bytes:
        nonlocal num_reads
        num_reads += 1
        if num_reads > 20:
            is_reading.set()
            assert may_read.wait(60.0)
        return read(descriptor, count, offset)

    monkeypatch.setattr(disk_module, "SCAN_S", -1.0)
    disk = tier(tmp_path)
    monkeypatch.setattr(os, "pread", slow_read)
    threads = DiskThreads(disk, lambda group, slot: memoryview(bytes(BYTES)))
    assert is_reading.wait(60.0) and not disk.is_scanned
    clearing = threading.Thread(target=threads.clear)
    clearing.start()
    while not disk._stops_reading:
        time.sleep(0.001)
    may_read.set()
    clearing.join(60.0)
    assert not clearing.is_alive() and num_reads < 25
    assert disk.is_scanned and not len(disk) and not list(tmp_path.glob(f"*{SUFFIX}"))
    node = nodes(disk, 1)[0]
    assert disk.write(node, 0, memoryview(content(node))), "and what is written later is found"
    other = tier(tmp_path)
    other.scan()
    assert other.find(node, 0) is not None
    other.close()
    threads.close()


WRITER = """
import sys
from pathlib import Path
from tests.kv.test_disk_tier import content, nodes, tier
disk = tier(Path(sys.argv[1]), 1 << 28)
print("begun", flush=True)
for node in nodes(disk, 100_000):
    disk.write(node, 0, memoryview(content(node)))
"""


def test_a_process_that_is_killed_while_it_writes_leaves_whole_blocks(tmp_path: Path) -> None:
    process = subprocess.Popen([sys.executable, "-c", WRITER, str(tmp_path)], stdout=subprocess.PIPE)
    assert process.stdout is not None and process.stdout.readline()
    while not any(path.stat().st_size > 300_000 for path in tmp_path.glob(f"*{SUFFIX}")):
        assert process.poll() is None
        time.sleep(0.001)
    process.send_signal(signal.SIGKILL)
    process.wait()
    process.stdout.close()
    count = only_segment(tmp_path).stat().st_size // BYTES
    assert found_in(tmp_path, count) > 200
    filled(tmp_path, 12)
