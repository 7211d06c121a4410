"""Long products of weights in few bits on a card: in float8, by every tile and by the library, beside the same weights
brought to bf16 and beside bf16 weights. Each is checked against float64 over the weights as they are held. A table
comes last; what there was no time for is missing from it.

    PYTHONPATH=src:. python -m bench.cuda.float8_products [--only blocks,experts,int4] [--rows 512,2048,8192]
        [--write TABLE.json]
    PYTHONPATH=src:. python -m bench.cuda.float8_products --add TABLE.json

Experts are timed in their block, with the other product as without a table; they have no products in float8 of fewer
than 64 rows each. What --write keeps, --add puts into the package's table of that card."""

from __future__ import annotations

import argparse
import os
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from math import prod
from pathlib import Path
from threading import Timer

import torch

from bench.cuda.clock import BEGAN_S, say
from twostroke.backends.cuda import tuning_cases
from twostroke.backends.cuda.compile_ahead import compiled_ahead
from twostroke.backends.cuda.kernels.expert_tiles import LEAST_UNPACKED_ROWS, MOST_UNPACKED_ROWS
from twostroke.backends.cuda.kernels.float8_tiles import in_float8
from twostroke.backends.cuda.kernels.packed_format import FP8_UNITS, GROUPED_CODES, INT4, Code
from twostroke.backends.cuda.kernels.product import Product
from twostroke.backends.cuda.kernels.product_kernels import BY_FLOATS
from twostroke.backends.cuda.layer_matrices import layer_matrices
from twostroke.backends.cuda.products import LONG_ROWS, card_of
from twostroke.backends.cuda.stored_codes import Held
from twostroke.backends.cuda.tuned_table import (
    FOLDER,
    NO_END,
    Choices,
    Forms,
    Table,
    TableLine,
    file_name,
    parse,
    text_of,
)
from twostroke.backends.cuda.tuning import LEAST_GAIN, Tuner, extend, graph_us
from twostroke.backends.cuda.tuning_cases import TOLERANCE, TOLERANCES, Case, ExpertsCase, Trial
from twostroke.backends.cuda.tuning_pool import HeldProduct, Pool, held_products
from twostroke.models.loading import read_folder_spec
from twostroke.models.spec import ModelSpec

SHAPES = Path(__file__).parents[1] / "shapes"
BLOCKS = next(code for code in GROUPED_CODES if code.name == "fp8_128")
SETS: dict[str, tuple[str, Code]] = {
    "blocks": ("llama-3.1-8b", BLOCKS),
    "experts": ("qwen3-30b-a3b", FP8_UNITS),
    "int4": ("llama-3.1-8b", INT4),
}
IN_FLOAT8 = {kernel.name for kernel in tuning_cases.IN_FLOAT8}
REPLAYS, CHECKED_ROWS = 5, 64
GRACE_S = 12.0
"""Beyond the time that was given, after which a card that hangs is left alone."""


@dataclass(frozen=True, slots=True)
class Found:
    held: HeldProduct
    rows: int
    trial: Trial
    us: float
    tflops: float
    error: float
    is_right: bool

    @property
    def what(self) -> str:
        return str(self.held) if self.held.code else f"{self.held} in bf16"

    @property
    def kernel(self) -> str:
        return str(self.trial)

    @property
    def is_in_float8(self) -> bool:
        return self.trial.kernel in IN_FLOAT8

    @property
    def line(self) -> str:
        verdict = "" if self.is_right else "WRONG"
        figures = f"{self.us:.1f} | {self.tflops:.0f} | {self.error:.1e} | {verdict}"
        return f"| {self.what} | {self.rows} | {self.kernel} | {figures} |"


class Bench:
    """One layer's products of a model, in one code."""

    def __init__(self, spec: ModelSpec, code: Code, most_tokens: int, device: str = "cuda") -> None:
        names = [one.name for one in layer_matrices(spec, 0) if bool(one.product.experts) == (code is FP8_UNITS)]
        held = Held(
            dict.fromkeys(names, code),
            experts=frozenset(names if code is FP8_UNITS else ()),
            in_float8=frozenset(names),
        )
        layer = replace(spec, layers=spec.layers[:1])
        self._spec, self._code = layer, code
        coded = [one for one in held_products(layer, held) if one.code is not None]
        plain = [] if code is FP8_UNITS else [HeldProduct(one.product) for one in coded]
        self._measured = [*coded, *plain]
        self._pool = Pool(layer, self._measured, most_tokens, torch.bfloat16, torch.device(device), held)
        nothing = Choices(Table("nothing", {}), self._pool.card)
        self._tuners = {one: Tuner(layer, one, self._pool, nothing, nothing) for one in self._measured}

    @property
    def is_on_card(self) -> bool:
        return self._pool.device.type == "cuda"

    def cases(self, tokens: Sequence[int]) -> list[tuple[HeldProduct, Case]]:
        moe = self._spec.moe
        each = 1 if moe is None else moe.experts_per_token
        by_product = sorted(self._measured, key=lambda one: (one.product.width, one.product.outputs, one.code is None))
        counts = [(one, count * (each if one.product.experts else 1)) for one in by_product for count in tokens]
        return [(one, self._tuners[one].case(rows)) for one, rows in counts]

    def trials(self, held: HeldProduct, case: Case) -> list[Trial]:
        """Of weights in few bits those by float8, what brings them to bf16, and first what a card without a table would
        take; none where no tile in float8 is."""
        found = self._tuners[held].trials(case)
        if held.code is None:
            return found[:1]
        others = [trial for trial in found[1:] if trial.kernel in BY_FLOATS or trial.kernel in IN_FLOAT8]
        return [found[0], *others] if any(trial.kernel in IN_FLOAT8 for trial in others) else []

    def measure(self, held: HeldProduct, case: Case, until_s: float, results: list[Found]) -> None:
        matrix = self._pool.matrices(held)[0]
        case.matrices = self._pool.matrices(held)
        trials = self.trials(held, case)
        if not trials or time.perf_counter() > until_s:
            return
        expected = expected_of(case)
        products = [held.product, *([] if held.beside is None else [held.beside.product])]
        weights = sum(prod(product.shape[-2:]) for product in products)
        for trial in trials:
            if time.perf_counter() > until_s:
                return
            try:
                case.out.zero_()
                case.run(case.choices(trial), matrix)
                found = case.out[: len(expected)].double()
                error = float((found - expected).norm() / expected.norm())
                (us,) = graph_us(case, [trial], REPLAYS)
            except Exception as fault:
                say(f"FAILED: {held}, {case.rows} rows by {trial}: {type(fault).__name__}: {str(fault)[:300]}")
                continue
            tflops = 2 * case.rows * weights / us / 1e6
            is_right = error < TOLERANCES.get(trial.kernel, TOLERANCE)
            results.append(Found(held, case.rows, trial, us, tflops, error, is_right))
            say(results[-1].line)


def expected_of(case: Case) -> torch.Tensor:
    """float64, of the first rows; of a block of experts float32 over all of them."""
    if isinstance(case, ExpertsCase):
        return case.expected(case.matrices[0]).double()
    whole, case.x = case.x, case.x[:CHECKED_ROWS]
    try:
        return case.expected(case.matrices[0], torch.float64).double()
    finally:
        case.x = whole


def report(results: Sequence[Found]) -> None:
    print("\n| product | rows | kernel | us | TFLOP/s | error | |\n|---|---|---|---|---|---|---|")
    for key in dict.fromkeys((one.what, one.rows) for one in results):
        tried = sorted((one for one in results if (one.what, one.rows) == key), key=lambda one: one.us)
        first_by_kernel = {one.kernel.split()[0]: one for one in reversed(tried)}
        for one in sorted(first_by_kernel.values(), key=lambda one: one.us):
            print(one.line)
    wrong = sum(not one.is_right for one in results)
    print(f"{len(results)} measured, {wrong} wrong; of each kernel its fastest tile is shown", flush=True)


def forms_of(results: Sequence[Found]) -> dict[Product, Forms]:
    """Lines as `twostroke tune` makes them: from each number of rows that was measured down to the one before, the
    fastest of the form that the weights are held in, and one in float8 where that is faster by more than nothing. Of
    few rows, of which none was measured, a table says nothing; nor of a product that was cut short. A line of experts
    does not reach down to rows that the kernel in units takes, where that one was not measured beside it."""
    found: dict[Product, Forms] = {}
    for held in dict.fromkeys(one.held for one in results if one.held.code is not None):
        assert held.code is not None
        own = [one for one in results if one.held == held and one.is_right]
        base, rounded = list[TableLine](), list[TableLine]()
        before = LEAST_UNPACKED_ROWS * held.product.experts - 1 if held.product.experts else LONG_ROWS
        for rows in sorted({one.rows for one in own}):
            tried = sorted((one for one in own if one.rows == rows), key=lambda one: one.us)
            plain = next((one for one in tried if not one.is_in_float8), None)
            if plain is None:
                continue
            fast = next((one for one in tried if one.is_in_float8), None)
            last_in_units = MOST_UNPACKED_ROWS * held.product.experts
            before = max(before, last_in_units) if rows > last_in_units else before
            extend(base, plain.trial.line(before + 1, rows, plain.us))
            if fast is not None and fast.us * (1 + LEAST_GAIN) < plain.us:
                extend(rounded, fast.trial.line(before + 1, rows, fast.us))
            before = rows
        are_experts = bool(held.product.experts)
        if base and before == max(one.rows for one in results if bool(one.held.product.experts) == are_experts):
            base[-1] = replace(base[-1], last=NO_END)
            own_forms = {in_float8(held.code): tuple(rounded), held.code.name: tuple(base)}
            found[held.product] = {**found.get(held.product, {}), **own_forms}
    return found


def add(path: Path) -> Path:
    """To the package's table; what it says of other forms stays."""
    new = parse(path.read_text())
    target = Path(str(FOLDER)) / f"{file_name(new.device)}.json"
    target.write_text(text_of(parse(target.read_text()).with_others(new.products)))
    return target


def run(sets: Sequence[str], tokens: Sequence[int], until_s: float, results: list[Found]) -> None:
    for name in sets:
        if time.perf_counter() > until_s:
            say(f"no time was left for {name}")
            continue
        folder, code = SETS[name]
        bench = Bench(read_folder_spec(SHAPES / folder)[1], code, max(tokens))
        measure_all(bench, tokens, until_s, results)
        del bench
        torch.cuda.empty_cache()


def measure_all(bench: Bench, tokens: Sequence[int], until_s: float, results: list[Found]) -> None:
    cases = bench.cases(tokens)

    def rehearse() -> None:
        for held, case in cases:
            for trial in bench.trials(held, case):
                with suppress(Exception):  # said where it is measured
                    case.run(case.choices(trial), case.matrices[0])

    with compiled_ahead(rehearse, wanted=bench.is_on_card):
        for held, case in cases:
            bench.measure(held, case, until_s, results)


def options_of(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default=",".join(SETS), help="which of them (default: %(default)s)")
    parser.add_argument("--rows", default="512,2048,8192", help="tokens of a step (default: %(default)s)")
    parser.add_argument("--seconds", type=float, default=35.0, help="about how long (default: %(default)s)")
    parser.add_argument("--write", type=Path, help="where lines for a table are kept")
    parser.add_argument("--add", type=Path, help="put such lines into the package's table, and measure nothing")
    return parser.parse_args(arguments)


def main() -> None:
    options, results = options_of(), list[Found]()
    if options.add is not None:
        print(add(options.add))
        return
    card = card_of(torch.device("cuda"), torch.bfloat16)

    def tell() -> None:
        report(results)
        if options.write is not None:
            options.write.write_text(text_of(Table(card.name, forms_of(results))))

    def give_up() -> None:
        tell()
        print("given up: the card did not answer in time", flush=True)
        os._exit(1)

    watch = Timer(options.seconds + GRACE_S, give_up)
    watch.daemon = True
    watch.start()
    say(card)
    run(options.only.split(","), [int(each) for each in options.rows.split(",")], BEGAN_S + options.seconds, results)
    watch.cancel()
    tell()


if __name__ == "__main__":
    main()
