"""Where a step's time goes: runs one shape of step many times on the CPU backend and prints, for each kind of
operation, its time, what of it was waiting for other threads, and the rates it reached, beside this machine's ceilings.

    python bench/step_profile.py MODEL [--decodes 1] [--context 512] [--prefill 0] [--threads 2] [--runs 50]

A step is `decodes` sequences of `context` tokens each, and a chunk of `prefill` tokens behind `prefix` known ones."""

from __future__ import annotations

import argparse
import atexit
import os
import tempfile
import time

import numpy as np

from twostroke.backends.cpu import FACTORY
from twostroke.backends.cpu.arguments import TimeField
from twostroke.backends.cpu.backend import CpuBackend
from twostroke.backends.cpu.kernels import operation
from twostroke.backends.cpu.tape import Tape
from twostroke.backends.host.batch import Batch
from twostroke.backends.interface import BackendSettings
from twostroke.core.kv_layout import KVGroup, KVLayout
from twostroke.core.request import Request
from twostroke.core.step import BlockGrant, DecodeSlot, PrefillChunk, RowJoin, Step
from twostroke.models.checkpoint import Checkpoint
from twostroke.models.loading import load_checkpoint
from twostroke.models.resolve import resolve

BLOCK_SIZE = 16


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", help="a GGUF file, a folder, or a name that `twostroke run` knows")
    parser.add_argument("--decodes", type=int, default=None, help="1 by default, and none beside a chunk")
    parser.add_argument("--context", type=int, default=512)
    parser.add_argument("--prefill", type=int, default=0)
    parser.add_argument("--prefix", type=int, default=0)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--runs", type=int, default=50)
    parser.add_argument("--isa", default=None)
    parser.add_argument("--peak-ratio", type=float, default=None, help="compile with another PEAK_RATIO")
    options = parser.parse_args()
    checkpoint = load_checkpoint(resolve(options.model))
    if options.peak_ratio is not None:
        folder = tempfile.TemporaryDirectory()
        atexit.register(folder.cleanup)
        os.environ["TWOSTROKE_CACHE"] = folder.name
        operation.PEAK_RATIO = options.peak_ratio
    decodes = options.decodes if options.decodes is not None else int(not options.prefill)
    lengths = [options.context] * decodes + ([options.prefix + options.prefill] if options.prefill else [])
    backend, batch = prepare(checkpoint, lengths, decodes, options.prefix, options.threads, options.isa)
    try:
        report(backend, batch, FACTORY.ceilings(checkpoint, options.threads, FACTORY.formats(checkpoint)), options.runs)
    finally:
        backend.close()


def prepare(
    checkpoint: Checkpoint, lengths: list[int], decodes: int, prefix: int, threads: int, isa: str | None
) -> tuple[CpuBackend, Batch]:
    """A backend whose KV is full of something finite, and the step."""
    blocks = [-(-length // BLOCK_SIZE) for length in lengths]
    spec = checkpoint.spec
    groups = tuple(KVGroup(one.layers, one.window, sum(blocks), one.content, one.values) for one in spec.kv_groups())
    layout = KVLayout(BLOCK_SIZE, groups)
    tokens = decodes + sum(lengths[decodes:])
    backend = FACTORY.create(
        checkpoint,
        layout,
        BackendSettings(max_context=max(lengths), max_tokens_per_step=tokens, threads=threads),
        isa_name=isa,
    )
    for place in backend.model.kv.places.values():
        place.memory[:] = 1  # memory that was never written is one page of zeros, read from the nearest cache
    order = np.random.default_rng(0).permutation(sum(blocks))
    joins, grants, first = [], [], 0
    for seq_id, count in enumerate(blocks):
        joins.append(RowJoin(seq_id, Request(str(seq_id), (1,))))
        ids = tuple(int(block) for block in order[first : first + count])
        grants += [
            BlockGrant(seq_id, number, 0, ids[:1] if group.is_state else ids) for number, group in enumerate(groups)
        ]
        first += count
    slots = tuple(DecodeSlot(seq_id, length - 1) for seq_id, length in enumerate(lengths[:decodes]))
    chunks = tuple(
        PrefillChunk(decodes + index, prefix, tuple(range(5, 5 + length - prefix)), True)
        for index, length in enumerate(lengths[decodes:])
    )
    backend.rows.update(Step(0, joins=tuple(joins), grants=tuple(grants)))
    for seq_id in range(decodes):
        backend.rows[seq_id].length, backend.rows[seq_id].last_token = lengths[seq_id], 5 + seq_id
    return backend, Batch.from_step(Step(1, decodes=slots, prefills=chunks), backend.rows)


def report(backend: CpuBackend, batch: Batch, ceilings: object, runs: int) -> None:
    for _ in range(3):
        backend.forward(batch)
    wall_s, ticks = [], []
    tape = None
    for _ in range(runs):
        started_s = time.perf_counter()
        backend.forward(batch)
        wall_s.append(time.perf_counter() - started_s)
        tape, times = backend.profile(batch)
        ticks.append(times)
    assert tape is not None
    all_ticks = np.stack(ticks).astype(np.float64)  # [runs, threads, entries, fields]
    seconds_a_tick = _seconds_a_tick(backend, batch)
    leave, begin, done = (all_ticks[..., field] for field in (TimeField.LEAVE, TimeField.BEGIN, TimeField.DONE))
    whole_s = (leave[:, 0, -1] - begin[:, 0, 0]) * seconds_a_tick
    print(f"{backend.isa.name}, {all_ticks.shape[1]} threads, {batch.num_tokens} tokens, {runs} runs, {ceilings}")
    print(
        f"forward: min {1e3 * min(wall_s):.2f} ms, median {1e3 * np.median(wall_s):.2f} ms;"
        f" tape: min {1e3 * whole_s.min():.2f} ms, median {1e3 * np.median(whole_s):.2f} ms"
    )
    labels = [_label(name, matrix) for name, matrix in zip(tape.names, tape.matrices, strict=True)]
    print(f"{'operation':34} {'count':>5} {'min ms':>8} {'median':>8} {'waiting':>8} {'Gmac/s':>8} {'GB/s':>7}")
    total_min_s = 0.0
    for label in dict.fromkeys(labels):
        entries = [index for index, other in enumerate(labels) if other == label]
        per_entry_s = (leave[:, 0] - begin[:, 0])[:, entries] * seconds_a_tick  # thread 0's view, its waiting included
        # Other threads may note the end of the last entry only after thread 0 has returned.
        waiting = np.maximum(leave - done, 0).mean(axis=1)[:, entries]
        waiting_s = np.median(waiting.sum(axis=1)) * seconds_a_tick
        # The minimum of each entry over all runs: what an undisturbed machine would have taken.
        best_s, median_s = per_entry_s.min(axis=0).sum(), np.median(per_entry_s.sum(axis=1))
        total_min_s += best_s
        line = f"{label:34} {len(entries):5} {1e3 * best_s:8.3f} {1e3 * median_s:8.3f} {1e3 * waiting_s:8.3f}"
        matrices = [matrix for matrix in (tape.matrices[index] for index in entries) if matrix is not None]
        if matrices:
            multiply_adds = sum(
                _rows(tape, index, batch) * 16 * matrix.num_tiles * matrix.depth
                for index, matrix in zip(entries, matrices, strict=True)
            )
            line += f" {1e-9 * multiply_adds / best_s:8.1f} {1e-9 * sum(m.data.nbytes for m in matrices) / best_s:7.1f}"
        print(line)
    print(f"{'sum of the minima':34} {'':5} {1e3 * total_min_s:8.3f}")


def _seconds_a_tick(backend: CpuBackend, batch: Batch) -> float:
    """By the clock of the machine, over two profiles a while apart."""
    _, before = backend.profile(batch)
    started_s = time.perf_counter()
    time.sleep(0.2)
    _, after = backend.profile(batch)
    elapsed_s = time.perf_counter() - started_s
    ticks = after[0, -1, TimeField.LEAVE] - before[0, -1, TimeField.LEAVE]
    return float(elapsed_s / ticks)


def _label(name: str, matrix: object) -> str:
    return name if matrix is None else f"{name} {matrix.depth} to {matrix.outputs}"  # type: ignore[attr-defined]


def _rows(tape: Tape, entry: int, batch: Batch) -> int:
    """From the last layer's attention on, only the rows whose logits are wanted are computed."""
    last_attention = max((index for index, name in enumerate(tape.names) if name == "attention"), default=-1)
    return len(batch.logit_rows) if entry > last_attention else batch.num_tokens


if __name__ == "__main__":
    main()
