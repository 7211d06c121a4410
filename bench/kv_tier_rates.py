"""What loading blocks from host memory and fetching them from disk reach, beside plain copies and reads of as many
bytes. Part of `bench.kv_tiers`."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np

from twostroke.backends.interface import BlockBackend
from twostroke.core.kv_blocks import KeptBlocks
from twostroke.core.step import BlockCopy, Step
from twostroke.engine.build import Assembly
from twostroke.engine.engine import Engine
from twostroke.kv.tiers.disk_threads import DiskThreads


def drop_cached_pages(folder: Path) -> None:
    """What the system keeps of these files in memory, so that the disk is read."""
    for path in folder.glob("*.kvsegment"):
        descriptor = os.open(path, os.O_RDONLY)
        os.fsync(descriptor)
        os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
        os.close(descriptor)


def best_rate(copy: Callable[[], int], repeats: int = 7) -> float:
    """Bytes a second of the best of several."""
    rates = []
    for _ in range(repeats):
        started_s = time.perf_counter()
        num_bytes = copy()
        rates.append(num_bytes / (time.perf_counter() - started_s))
    return max(rates)


def plain_copy(num_bytes: int, *, to_card: bool) -> Callable[[], int]:
    """From memory to memory; or, from memory that does not move, to a card."""
    if to_card:
        import torch

        pinned = torch.ones(num_bytes, dtype=torch.uint8, pin_memory=True)
        on_card = torch.empty_like(pinned, device="cuda")

        def send() -> int:
            on_card.copy_(pinned, non_blocking=True)
            torch.cuda.synchronize()
            return num_bytes

        return send
    source = np.ones(num_bytes, dtype=np.uint8)
    target = np.ones_like(source)

    def copy() -> int:
        np.copyto(target, source)
        return num_bytes

    return copy


def rates(assembly: Assembly, folder: Path, num_tokens: int) -> None:
    """Loads as a step makes them, beside one plain copy of as many bytes; fetches as a waiting request has them, beside
    plain reads of the same files. `folder`: of its disk tier."""
    engine, backend = assembly.engine, assembly.engine.backend
    assert isinstance(backend, BlockBackend)
    tiers = engine.scheduler.ledger.tiers
    assert tiers is not None and tiers.disk is not None
    kept: KeptBlocks = tiers.blocks
    block_bytes = tiers.block_bytes[0]
    num_blocks = min(num_tokens // engine.scheduler.ledger.layout.block_size, tiers.host.num_slots[0])
    copies = tuple(BlockCopy(0, number, number) for number in range(num_blocks))
    kept.start(Step(0, spills=copies))  # type: ignore[attr-defined]
    _wait_for(kept)

    def load() -> int:
        kept.start(Step(1, loads=copies))  # type: ignore[attr-defined]
        _wait_for(kept)
        return block_bytes * num_blocks

    is_on_card = assembly.backend_name == "cuda"
    plain = plain_copy(block_bytes * num_blocks, to_card=is_on_card)
    plain_rate, load_rate = best_rate(plain), best_rate(load)
    print(f"loading {block_bytes * num_blocks / 1e6:.0f} MB in blocks of {block_bytes / 1e3:.0f} kB")
    print(f"  a plain copy           {plain_rate / 1e9:8.2f} GB/s{' to the card' if is_on_card else ''}")
    print(f"  loads of a step        {load_rate / 1e9:8.2f} GB/s  {load_rate / plain_rate:.0%}")
    _disk_rates(engine, folder, num_blocks)
    engine.close()


def _wait_for(kept: KeptBlocks) -> None:
    """Until its copies are made, by whoever makes them on this backend."""
    while not kept.is_idle:
        time.sleep(1e-5)


def _disk_rates(engine: Engine, folder: Path, num_blocks: int) -> None:
    from twostroke.kv.tiers.host import Kept

    tiers = engine.scheduler.ledger.tiers
    assert tiers is not None and tiers.disk is not None
    disk, index = tiers.disk, engine.scheduler.ledger.index
    block_size = engine.scheduler.ledger.layout.block_size
    node, blocks = index.root("salt:rates"), []
    for number in range(num_blocks):
        node = index.child(node, tuple(range(number, number + block_size)))
        payload = memoryview(np.random.default_rng(number).bytes(tiers.block_bytes[0]))
        assert disk.write(node, 0, payload)
        found = disk.find(node, 0)
        assert found is not None
        blocks.append((Kept(node, 0, number, pins=1), found))
    threads = DiskThreads(disk, tiers.blocks.view)
    files = {found.segment.path: found.segment for _, found in blocks}

    def fetch() -> int:
        drop_cached_pages(folder)
        started_s = time.perf_counter()
        threads.fetch(0, blocks)
        fetched = []
        while not fetched:
            threads.wait(1.0)
            fetched = threads.fetched()
        assert all(fetched[0].arrived)
        nonlocal took_s
        took_s = time.perf_counter() - started_s
        return fetched[0].arrived_bytes

    def read() -> int:
        drop_cached_pages(folder)
        nonlocal took_s
        started_s, num_bytes = time.perf_counter(), 0
        for path in files:
            with path.open("rb", buffering=0) as file:
                while part := file.readinto(buffer):
                    num_bytes += part
        took_s = time.perf_counter() - started_s
        return num_bytes

    buffer, took_s = memoryview(bytearray(8 << 20)), 1.0
    found_rates: dict[str, list[float]] = {"plain reads": [], "fetches": []}
    for _ in range(5):
        for name, way in (("plain reads", read), ("fetches", fetch)):
            num_bytes = way()
            found_rates[name].append(num_bytes / took_s)
    plain = max(found_rates["plain reads"])
    print(f"fetching {num_blocks * tiers.block_bytes[0] / 1e6:.0f} MB from disk, every byte checked")
    for name, found in found_rates.items():
        print(f"  {name:22} {max(found) / 1e9:8.2f} GB/s  {max(found) / plain:.0%}")
    threads._readers.shutdown()
    threads._writer.shutdown()
