"""What `twostroke tune` finds for a shape on the card, beside what was chosen before, and all that it keeps: the lines
of products and the rows of attention, as text. So they outlive a machine that is only lent.

    PYTHONPATH=src:. python -m bench.cuda.tune_kept FOLDER [--seconds 120] [--quantise fp8]"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path

from bench.cuda.clock import say
from twostroke import backends
from twostroke.backends.cuda.attention_table import user_path
from twostroke.backends.interface import TunableFactory, TuningReport
from twostroke.core.formats import Formats, FormatWish
from twostroke.models.random_weights import random_checkpoint
from twostroke.models.weights.tensor import WeightKind


def tuned(folder: Path, quantise: str | None, seconds: float) -> TuningReport:
    checkpoint, last = random_checkpoint(folder, WeightKind.BF16), ""

    def progress(done: int, total: int, product: str) -> None:
        nonlocal last
        if product != last:
            say(f"{done} of {total}: {product}")
        last = product

    factory, _ = backends.choose("cuda", checkpoint)
    assert isinstance(factory, TunableFactory)
    formats = factory.formats(checkpoint, FormatWish(quantise))
    if not isinstance(formats, Formats):
        raise SystemExit(formats)
    return factory.tune(checkpoint, formats, seconds, progress)


def told(report: TuningReport) -> list[str]:
    """Each choice that changed, what is kept, and a line that sums it up."""
    gains = sorted(report.changes, key=lambda change: change.after_us / change.before_us)
    lines = [
        f"{one.product}, {one.rows} rows: {one.before_us:.1f} us by {one.before}, {one.after_us:.1f} by {one.after}"
        for one in gains
    ]
    path = user_path(report.device)
    attention = path.read_text() if path.is_file() else "none: nothing was faster than what the package has"
    kept = [f"lines of products for {report.device}:", report.table, "rows of attention:", attention]
    saved_us = sum(one.before_us - one.after_us for one in gains)
    summed = f"{report.num_products} products in {report.seconds:.0f} s, {len(gains)} choices changed"
    return [*lines, *report.faults, *kept, f"{summed}, {saved_us:.0f} us less, {len(report.faults)} faults"]


def options_of(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path, help="with a model's config.json")
    parser.add_argument("--seconds", type=float, default=120.0, help="about how long to tune (default: %(default)s)")
    parser.add_argument("--quantise", help="the kind that weights are brought to; default: bf16")
    return parser.parse_args(arguments)


def main() -> None:
    options = options_of()
    print("\n".join(told(tuned(options.folder, options.quantise, options.seconds))))


if __name__ == "__main__":
    main()
