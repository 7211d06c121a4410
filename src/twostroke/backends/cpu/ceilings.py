"""What this machine can do at most, measured with native code in a fraction of a second and kept on disk: the floors
that users are shown are counted from these numbers."""

from __future__ import annotations

import ctypes
import hashlib
import json
import math
import os
import tempfile
import threading
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import numpy as np

from twostroke.backends.cpu.compile import NativeCode, load_or_compile
from twostroke.backends.cpu.isa import InstructionSet
from twostroke.backends.cpu.memory import Arena, address_of
from twostroke.cache import cache_folder

_READ_BYTES = 128 << 20
"""Much larger than a last-level cache, small enough to touch quickly."""
_REPEATS = 5
_ROUNDS = 1_000_000
"""About ten milliseconds: threads start up to one apart, which must not count."""
_CHAINS_TIMES_UNROLL = 32  # as in kernels/ceilings.py
_VERSION = 2
_FRESH_S = 600.0


@dataclass(frozen=True, slots=True)
class MachineRates:
    read_bytes_per_s: float
    """All threads together, from memory."""
    dot_multiply_adds_per_s: float
    """In 8-bit integers, as quantised tiles multiply."""
    float_multiply_adds_per_s: float
    """In f32, as float tiles and attention multiply."""
    isa: str
    threads: int


def machine_rates(isa: InstructionSet, threads: int) -> MachineRates:
    """The best that was ever measured here: a busy moment must not pass for the machine's limit, so what is kept is
    measured again once it has aged, and only raised."""
    path = _entry_path(isa, threads)
    stored = _read(path)
    if stored is not None and (stored.isa, stored.threads) != (isa.name, threads):
        stored = None
    if stored is not None and _age_s(path) < _FRESH_S:
        return stored
    found = measure(isa, threads)
    if stored is not None:
        found = _best(stored, found)
    _write(path, found)
    return found


def _best(first: MachineRates, second: MachineRates) -> MachineRates:
    return replace(
        first,
        read_bytes_per_s=max(first.read_bytes_per_s, second.read_bytes_per_s),
        dot_multiply_adds_per_s=max(first.dot_multiply_adds_per_s, second.dot_multiply_adds_per_s),
        float_multiply_adds_per_s=max(first.float_multiply_adds_per_s, second.float_multiply_adds_per_s),
    )


def _age_s(path: Path) -> float:
    try:
        return time.time() - path.stat().st_mtime
    except OSError:
        return math.inf


def measure(isa: InstructionSet, threads: int, read_bytes: int = _READ_BYTES) -> MachineRates:
    code = load_or_compile({"ceilings": lambda: _module_text(isa)}, isa)
    share = read_bytes // threads // 4096 * 4096
    memory = Arena(threads * share).take(threads * share)
    memory.fill(1)  # untouched pages would all be the same page of zeros
    data = np.random.default_rng(0).integers(0, 16, (threads, 1024), dtype=np.uint8)  # small enough for every dot
    read = _function(code, "read_memory", 3)
    dots, multiply_adds = _function(code, "integer_dots", 2), _function(code, "float_multiply_adds", 2)
    read_s = _best_s(
        threads, lambda i: read(address_of(memory) + i * share, share, address_of(data) + 1024 * i), _REPEATS
    )
    dot_s = _best_s(threads, lambda i: dots(_ROUNDS, address_of(data) + 1024 * i), _REPEATS)
    float_s = _best_s(threads, lambda i: multiply_adds(_ROUNDS, address_of(data) + 1024 * i), _REPEATS)
    rounds = threads * _ROUNDS * _CHAINS_TIMES_UNROLL
    return MachineRates(threads * share / read_s, rounds * 64 / dot_s, rounds * 16 / float_s, isa.name, threads)


def _module_text(isa: InstructionSet) -> str:
    from twostroke.backends.cpu.kernels.ceilings import module_text

    return module_text(isa)


def _function(code: NativeCode, name: str, arguments: int) -> Callable[..., None]:
    return ctypes.CFUNCTYPE(None, *[ctypes.c_int64] * arguments)(code.address(name))


def _best_s(threads: int, work: Callable[[int], None], repeats: int) -> float:
    """Seconds of the fastest round in which all threads ran at once, from the first start to the last end."""
    gate = threading.Barrier(threads)
    spans = [[(0.0, 0.0)] * repeats for _ in range(threads)]

    def run(index: int) -> None:
        for repeat in range(repeats):
            gate.wait()
            started_s = time.perf_counter()
            work(index)
            spans[index][repeat] = (started_s, time.perf_counter())

    workers = [threading.Thread(target=run, args=(index,)) for index in range(threads)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    starts_s = [min(span[repeat][0] for span in spans) for repeat in range(repeats)]
    ends_s = [max(span[repeat][1] for span in spans) for repeat in range(repeats)]
    return min(end_s - start_s for start_s, end_s in zip(starts_s, ends_s, strict=True))


def _entry_path(isa: InstructionSet, threads: int) -> Path:
    key = hashlib.sha256("\0".join((isa.name, isa.cpu, isa.features, str(threads), str(_VERSION))).encode())
    return cache_folder() / "ceilings" / f"{key.hexdigest()[:40]}.json"


def _read(path: Path) -> MachineRates | None:
    try:
        fields = json.loads(path.read_text(encoding="utf-8"))
        found = MachineRates(**fields)
        rates = (found.read_bytes_per_s, found.dot_multiply_adds_per_s, found.float_multiply_adds_per_s)
        return found if all(math.isfinite(rate) and rate > 0 for rate in rates) else None
    except (OSError, ValueError, TypeError):
        return None


def _write(path: Path, found: MachineRates) -> None:
    try:
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        handle, temporary = tempfile.mkstemp(dir=path.parent, prefix=".writing-")
        with os.fdopen(handle, "w", encoding="utf-8") as file:
            json.dump(asdict(found), file)
        Path(temporary).replace(path)
    except OSError:
        return  # measured again next time
