"""Does `twostroke tune` find kernels as good as those of the package's table? It starts with an empty table, as on a
card that nobody measured. What it finds, what the package says and what an empty table falls back to then take turns
over the same matrices.

    PYTHONPATH=src:. python -m bench.cuda.tune_from_nothing FOLDER [--seconds 60] [--rows 1,16,64,128,256,512,2048]"""

from __future__ import annotations

import argparse
import time
from collections.abc import Sequence
from pathlib import Path

import torch

from bench.cuda.clock import say
from twostroke.backends.cuda.kernels.product import Product
from twostroke.backends.cuda.tuned_table import Choices, Forms, Table
from twostroke.backends.cuda.tuning import Tuner, graph_us
from twostroke.backends.cuda.tuning_cases import Trial
from twostroke.backends.cuda.tuning_pool import HeldProduct, Pool, held_products
from twostroke.models.loading import read_folder_spec
from twostroke.models.spec import ModelSpec

ROWS = "1,16,64,128,256,512,2048"
REPLAYS = 15
NAMES = ("found", "package", "empty")


class Comparison:
    def __init__(
        self, spec: ModelSpec, counts: Sequence[int], device: str = "cuda", dtype: torch.dtype = torch.bfloat16
    ) -> None:
        self._spec, self._counts = spec, counts
        self.products = held_products(spec)
        self._pool = Pool(spec, self.products, max(counts), dtype, torch.device(device))
        self._empty = Choices(Table("nothing", {}), self._pool.card)
        self._package = Choices.on(self._pool.card)
        self._found: dict[Product, Forms] = {}
        self.sums_us: dict[int, dict[str, float]] = {count: dict.fromkeys(NAMES, 0.0) for count in counts}

    def run(self, seconds: float) -> None:
        began_s = time.perf_counter()
        for number, product in enumerate(self.products):
            left_s = seconds - (time.perf_counter() - began_s)
            share_s = left_s / (len(self.products) - number)
            self._compare(product, time.perf_counter() + share_s)

    def _compare(self, held: HeldProduct, until_s: float) -> None:
        product = held.product
        tuner = Tuner(self._spec, held, self._pool, self._empty, self._so_far)
        each = self._spec.moe.experts_per_token if self._spec.moe is not None and product.experts else 1
        rows_of = {count: count * each for count in self._counts if product.role != "head" or count <= 256}
        self._found[product] = tuner.measure(list(rows_of.values()), until_s)
        for fault in tuner.faults:
            say(fault)
        for count, rows in rows_of.items():
            case = tuner.case(rows)
            sources = dict(zip(NAMES, (self._so_far, self._package, self._empty), strict=True))
            trials = {name: self._trial(choices, held, rows) for name, choices in sources.items()}
            distinct = list(dict.fromkeys(trials.values()))
            times = dict(zip(distinct, graph_us(case, distinct, REPLAYS), strict=True))
            for name, trial in trials.items():
                self.sums_us[count][name] += times[trial]
            taken = ", ".join(f"{name} {times[trial]:.1f} {trial}" for name, trial in trials.items())
            say(f"{product.role} {product.outputs} x {product.width}, {rows} rows, us: {taken}")

    @property
    def _so_far(self) -> Choices:
        return Choices(Table("found", dict(self._found)), self._pool.card)

    def _trial(self, choices: Choices, held: HeldProduct, rows: int) -> Trial:
        choice = choices.of(held.product, rows, self._pool.matrices(held)[0].form_names)
        return Trial(choice.kernel.form, choice.kernel.name, tuple(choice.settings.items()))


def table_of(sums_us: dict[int, dict[str, float]]) -> list[str]:
    """Of each distinct product one, summed, by the tokens of a step."""
    lines = ["| tokens | found us | package us | empty us | package / found | empty / found |", "|---" * 6 + "|"]
    for count, times in sums_us.items():
        found, package, empty = (times[name] for name in NAMES)
        lines.append(
            f"| {count} | {found:.1f} | {package:.1f} | {empty:.1f} | {package / found:.3f} | {empty / found:.3f} |"
        )
    return lines


def options_of(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", help="with a model's config.json")
    parser.add_argument("--seconds", type=float, default=60.0, help="about how long to tune (default: %(default)s)")
    parser.add_argument("--rows", default=ROWS, help="tokens of a step (default: %(default)s)")
    return parser.parse_args(arguments)


def main() -> None:
    options = options_of()
    spec = read_folder_spec(Path(options.folder))[1]
    comparison = Comparison(spec, [int(count) for count in options.rows.split(",")])
    comparison.run(options.seconds)
    print("\n".join(table_of(comparison.sums_us)))


if __name__ == "__main__":
    main()
