"""Random schedules of requests, family by family: whatever company a request has, however it is cut, cached, preempted
or left alone by aborted neighbours, its greedy tokens are those of the request by itself. Tiny random checkpoints.
Nothing is timed. The kernels of a card are interpreted where there is none.

    python -m bench.family_schedules                              # 200 schedules of every variant on reference and cpu
    TRITON_INTERPRET=1 python -m bench.family_schedules --backend cuda --minutes 20    # as many as that brings
"""

from __future__ import annotations

import argparse
import contextlib
import io
import os
import sys
import tempfile
from pathlib import Path

from tests.engine.family_schedules import Maker, hold
from tests.models.tiny_checkpoints import make_tiny, variants

from twostroke.models.checkpoint import Checkpoint
from twostroke.models.loading import load_checkpoint

BACKENDS = ("reference", "cpu", "cuda")


def maker_of(backend: str) -> Maker:
    if backend == "cuda":
        import torch

        device = "cuda" if torch.cuda.is_available() else "cpu"
        if device == "cpu":
            if os.environ.get("TRITON_INTERPRET") != "1":  # which Triton reads when torch brings it in
                raise SystemExit("here is no card: set TRITON_INTERPRET=1, and its kernels are interpreted")
            from tests.backends.cuda.interpreter import adapt

            adapt()
        from tests.backends.cuda.test_family_schedules import DeviceMaker

        return DeviceMaker(device)
    from tests.engine.test_family_schedules import ON_REFERENCE, ON_THE_CPU

    return {"reference": ON_REFERENCE, "cpu": ON_THE_CPU}[backend]


def variants_of(backend: str) -> list[str]:
    """All; of the interpreter, those that it has in a smaller form."""
    if backend != "cuda":
        return variants()
    from tests.backends.cuda.test_family_schedules import SMALLER

    return list(SMALLER)


def checkpoint_of(variant: str, backend: str, folder: Path) -> Checkpoint:
    """Interpreted kernels take smaller models."""
    changes = {}
    if backend == "cuda":
        from tests.backends.cuda.test_family_schedules import SMALLER

        changes = SMALLER.get(variant, {})
    with contextlib.redirect_stderr(io.StringIO()):
        return load_checkpoint(make_tiny(variant, folder, **changes)[0])


def row(variant: str, backend: str, maker: Maker, count: int, seconds: float | None) -> tuple[str, bool]:
    """Of the table, and whether the variant holds."""
    with tempfile.TemporaryDirectory() as folder:
        try:
            tally = hold(checkpoint_of(variant, backend, Path(folder)), maker, count, seconds)
        except AssertionError as error:  # of a schedule that brought a request other tokens
            return f"| `{variant}` | {backend} | | not the same: {str(error)[:80]} | | | |", False
    found = f"{tally.cached} | {tally.preempted} | {tally.aborted}"
    return f"| `{variant}` | {backend} | {tally.schedules} | the same | {found} |", True


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--schedules", type=int, default=200, help="of each variant, at most")
    parser.add_argument("--minutes", type=float, help="on each backend, all its variants together; each gets its part")
    parser.add_argument("--backend", action="append", choices=BACKENDS)
    parser.add_argument("variant", nargs="*", help="all, if none is named")
    asked = parser.parse_args(arguments)
    print("| variant | backend | schedules | tokens | found a prefix | preempted | aborted |")
    print("|---|---|---|---|---|---|---|")
    all_hold = True
    for backend in asked.backend or ("reference", "cpu"):
        maker, names = maker_of(backend), asked.variant or variants_of(backend)
        seconds = None if asked.minutes is None else 60 * asked.minutes / len(names)
        for variant in names:
            line, holds = row(variant, backend, maker, asked.schedules, seconds)
            print(line, flush=True)
            all_hold &= holds
    return 0 if all_hold else 1


if __name__ == "__main__":
    sys.exit(main())
