"""Measures, on the card under us, every kernel and tile that could multiply a model's matrices, at the numbers of rows
that steps have, and makes a table of the fastest. Every product is checked against float32 before it is timed."""

from __future__ import annotations

import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import replace
from itertools import pairwise
from statistics import median

import torch

from twostroke.backends.cuda.compile_ahead import compiled_ahead
from twostroke.backends.cuda.kernels.product import Product
from twostroke.backends.cuda.kernels.product_kernels import kernels_for
from twostroke.backends.cuda.stored_codes import AS_COMPUTED, Held
from twostroke.backends.cuda.tuned_table import NO_END, Choices, Forms, Table, TableLine, keep, text_of
from twostroke.backends.cuda.tuning_cases import Case, ExpertsCase, Trial
from twostroke.backends.cuda.tuning_pool import HeldProduct, Pool, held_products
from twostroke.backends.interface import TunedChange, TuningProgress, TuningReport
from twostroke.models.spec import ModelSpec

DECODE_COUNTS = (16, 1, 64, 128, 256, 8, 32, 192, 2, 4, 96, 160, 224)
LONG_COUNTS = (512, 2048, 1024, 8192, 768, 384, 1280, 1536, 640, 896, 1152, 1792, 4096)
"""Rows that are measured, what matters most first; a number between two is treated as the larger."""
FEW_REPLAYS, REPLAYS, FINALISTS = 3, 9, 3
LEAST_GAIN = 0.03
"""What is faster by less is as good: the table stays as it is. A product that gained 1.8% alone made a whole step 3%
slower: what overlaps between two products of a layer is not seen here."""


def tune(
    spec: ModelSpec,
    dtype: torch.dtype,
    seconds: float,
    progress: TuningProgress,
    held: Held = AS_COMPUTED,
    device: str = "cuda",
) -> TuningReport:
    """For about `seconds` seconds; what there was no time to measure stays as it is. The result is kept in the user's
    cache. `held`: how the model's matrices are held; each product is measured in every code that it has there."""
    started_s = time.perf_counter()
    measured = held_products(spec, held)
    pool = Pool(spec, measured, max(LONG_COUNTS), dtype, torch.device(device), held)
    before, faults = Choices.on(pool.card), []
    found: dict[Product, Forms] = {}
    changes: list[TunedChange] = []
    for number, each in enumerate(measured):
        progress(number, len(measured), str(each))
        tuner = Tuner(spec, each, pool, before, Choices(Table("so far", found), pool.card))
        share_s = (seconds - (time.perf_counter() - started_s)) / (len(measured) - number)
        forms = tuner.measure(counts_of(each, spec), time.perf_counter() + share_s)
        found[each.product] = {**found.get(each.product, {}), **forms}
        changes += tuner.changes
        faults += tuner.faults
    progress(len(measured), len(measured), "")
    kept = keep(pool.card.name, found)
    text = text_of(before.table.with_others(found))
    return TuningReport(pool.card.name, len(measured), changes, faults, time.perf_counter() - started_s, kept, text)


def counts_of(held: HeldProduct, spec: ModelSpec) -> list[int]:
    """Numbers of rows that are measured; of experts there are several a token."""
    moe = spec.layers[held.layer].moe if held.product.experts else None
    each = 1 if moe is None else moe.experts_per_token
    counts = DECODE_COUNTS if held.product.role == "head" else (*DECODE_COUNTS, *LONG_COUNTS)
    return [count * each for count in counts]


OTHERS_FIRST = ("packed",)
"""Forms that stand ahead of the others in a table: they have lines only where they are faster."""


class Tuner:
    """One product, at every number of rows."""

    def __init__(self, spec: ModelSpec, held: HeldProduct, pool: Pool, before: Choices, so_far: Choices) -> None:
        self._spec, self._held, self._pool, self._before, self._so_far = spec, held, pool, before, so_far
        self._product = held.product
        self.changes: list[TunedChange] = []
        self.faults: list[str] = []

    def measure(self, counts: Sequence[int], until_s: float) -> Forms:
        """`until_s`: when to stop, by the clock of `time.perf_counter`; one number of rows is measured in any case."""
        cases = [self.case(rows) for rows in counts]
        best: dict[int, dict[Trial, float]] = {}

        def rehearse() -> None:
            for case in cases:
                for trial in self.trials(case):
                    with suppress(Exception):  # a fault where it is measured: what is torch's runs here, too
                        case.run(case.choices(trial), case.matrices[0])

        with compiled_ahead(rehearse, wanted=self._pool.stream is not None):
            for number, case in enumerate(cases):
                if number and time.perf_counter() > until_s:
                    break
                if found := self._best(case):
                    best[case.rows] = found
        return self._lines(cases[0].matrices[0].form_names, sorted(counts), best)

    def _lines(self, forms: tuple[str, ...], counts: Sequence[int], best: dict[int, dict[Trial, float]]) -> Forms:
        """From each number of rows that was measured down to the one before; what was not is as it was. A form that was
        looked at and won nothing has no line, which is told from a form that was not looked at."""
        base, lines = base_of(forms), dict[str, list[TableLine]]({form: [] for form in (*OTHERS_FIRST, *forms)})
        for before, count in pairwise((0, *counts)):
            for trial, took_us in best.get(count, {}).items():
                extend(lines[trial.form], trial.line(before + 1, count, took_us))
            for rows in range(before + 1, count + 1) if count not in best else ():
                for trial in {self._now(rows, forms), self._now(rows, (base,))}:
                    extend(lines[trial.form], trial.line(rows, rows))
        lines[base][-1] = replace(lines[base][-1], last=NO_END)
        return {form: tuple(found) for form, found in lines.items() if found or form in forms}

    def case(self, rows: int) -> Case:
        if self._product.experts:
            known = Choices(self._before.table.with_others(self._so_far.table.products), self._pool.card)
            return ExpertsCase(self._spec, self._held, rows, self._pool, known)
        readers = [product for product in self._so_far.table.products if product.role in ("plain", "gated")]
        chosen = (self._so_far.of(reader, rows, self._pool.forms_of(reader)) for reader in readers)
        fuses = all(choice.kernel.fuses for choice in chosen)
        return Case(self._spec, self._held, rows, self._pool, next_fuses=fuses and bool(readers))

    def trials(self, case: Case) -> list[Trial]:
        """What the table has now, first."""
        forms = case.matrices[0].form_names
        kernels = [kernel for kernel in kernels_for(case.product) if kernel.form in forms]
        found = [
            Trial(kernel.form, kernel.name, tuple(settings.items()))
            for kernel in kernels
            for settings in kernel.candidates(case.product, case.rows, case.card)
            if not isinstance(kernel.tile(case.product, case.rows, case.card, settings), str)
        ]
        # Of a copy for decode the table may say nothing: then it says what is read instead.
        known = [self._now(case.rows, tuple(dict.fromkeys((form, base_of(forms))))) for form in forms]
        return list(dict.fromkeys([*known, *found]))

    def _now(self, rows: int, forms: tuple[str, ...]) -> Trial:
        choice = self._before.of(self._product, rows, forms)
        return Trial(choice.kernel.form, choice.kernel.name, tuple(choice.settings.items()))

    def _best(self, case: Case) -> dict[Trial, float]:
        """The fastest of the form that serves all numbers of rows, and of another where that is faster still, with what
        they take. Nothing where no trial of that form is right: then all stays as it is."""
        matrix, forms = case.matrices[0], case.matrices[0].form_names
        expected, now, tried = case.expected(matrix), self._now(case.rows, forms), dict[Trial, float]()
        for trial in self.trials(case):
            try:
                fault = case.fault(trial, matrix, expected)
                if fault is None:
                    tried[trial] = graph_us(case, [trial], FEW_REPLAYS)[0]
            except Exception as error:
                fault = f"{type(error).__name__}: {error}"
            self.faults += [f"{case.product} of {case.rows} rows by {trial}: {fault}"] if fault else []
        if not any(trial.form == base_of(forms) for trial in tried):
            self.faults.append(f"{case.product} of {case.rows} rows: no trial of {base_of(forms)} is right")
            return {}
        ranked = sorted(tried, key=tried.__getitem__)
        finalists = [trial for form in forms for trial in [one for one in ranked if one.form == form][:FINALISTS]]
        finalists += [now] if now in tried and now not in finalists else []
        times = dict(zip(finalists, graph_us(case, finalists, REPLAYS), strict=True))

        def as_compared(trial: Trial) -> float:
            return times[trial] / (1 + LEAST_GAIN if trial == now else 1)

        best = min(times, key=as_compared)
        base = min((trial for trial in times if trial.form == base_of(forms)), key=as_compared)
        if best != now and now in times:
            names = f"{case.product.role} {case.product.outputs} x {case.product.width}", case.rows
            self.changes.append(TunedChange(*names, str(now), times[now], str(best), times[best]))
        return {best: times[best], base: times[base]}


def base_of(forms: tuple[str, ...]) -> str:
    """The form that takes any number of rows: a copy for decode does not, nor do products in float8."""
    return "plain" if "plain" in forms else forms[-1]


def extend(lines: list[TableLine], line: TableLine) -> None:
    """Lines beside each other that say the same are one."""
    last = lines[-1] if lines else None
    if last and last.last == line.first - 1 and (last.kernel, last.settings) == (line.kernel, line.settings):
        line = replace(line, first=lines.pop().first)
    lines.append(line)


def graph_us(case: Case, trials: Sequence[Trial], replays: int) -> list[float]:
    """Microseconds of each trial's product over matrices that L2 does not hold: the median of graph replays, taken in
    turns, since a card's clock moves."""
    graphs = [_captured(case, trial) for trial in trials]
    times: list[list[float]] = [[] for _ in trials]
    for _ in range(replays):
        for graph, taken in zip(graphs, times, strict=True):
            begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            begin.record()
            graph.replay()
            end.record()
            end.synchronize()
            taken.append(begin.elapsed_time(end) * 1e3 / len(case.matrices))
    return [median(taken) for taken in times]


def _captured(case: Case, trial: Trial) -> torch.cuda.CUDAGraph:
    """Without torch.cuda.graph(), which collects garbage: tens of milliseconds each time."""
    choices, graph = case.choices(trial), torch.cuda.CUDAGraph()
    case.run(choices, case.matrices[0])
    torch.cuda.synchronize()
    with torch.cuda.stream(case.stream):
        graph.capture_begin(capture_error_mode="thread_local")
        try:
            for matrix in case.matrices:
                case.run(choices, matrix)
        finally:
            graph.capture_end()
    return graph
