"""The server's engine process, but a step computes nothing: it sleeps, and draws tokens blindly. What is left of the
processor time is what the host does for each step, so small parts of it show on any machine. Beside the processes
that `bench.watching --paced-ms` measures."""

from __future__ import annotations

import os
import random
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np

from twostroke.backends.cpu.backend import CpuBackend
from twostroke.backends.host.batch import Batch
from twostroke.backends.host.scores import Scores
from twostroke.server import engine_process

PACE = "TWOSTROKE_BENCH_PACE_MS"
LAUNCHED = f"""
import asyncio, sys
sys.path.append({str(Path.cwd())!r})
spawn, usual = asyncio.create_subprocess_exec, "twostroke.server.engine_process"
def paced(*words, **options):
    return spawn(*["bench.paced_engine" if word == usual else word for word in words], **options)
asyncio.create_subprocess_exec = paced
"""
"""In the API's process, before the server: it starts this engine."""


def blind(pace_s: float) -> Any:
    """No two streams write the same, or lookup would draft."""
    draw, kept = random.Random(1), dict[int, Any]()

    def score(backend: CpuBackend, batch: Batch) -> Scores:
        time.sleep(pace_s)
        rows, vocab_size = len(batch.logit_rows), backend.model.spec.vocab_size
        if rows not in kept:
            kept[rows] = np.zeros((rows, vocab_size), dtype=np.float32)
        return Scores(kept[rows], [draw.randrange(1000, vocab_size) for _ in range(rows)])

    return score


if __name__ == "__main__":
    CpuBackend.score = blind(float(os.environ[PACE]) / 1e3)  # type: ignore[method-assign]
    sys.exit(engine_process.main(sys.argv[1], int(sys.argv[2])))
