"""How far the planner's estimates are from what was measured: reads the H200 records in bench/results, predicts each
figure with the weights that it was measured with, prints both, and fits the efficiencies anew, also with each model
left out. Run: python -m bench.plan_error"""

from __future__ import annotations

import argparse
import json
import re
import statistics
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path

from bench.form_points import report as form_report
from twostroke.backends import load_factory
from twostroke.core.formats import Formats
from twostroke.cost.config_shape import shape_from_config
from twostroke.cost.devices import find_device
from twostroke.cost.model_shape import DecodeWeights, ModelShape
from twostroke.cost.roofline import decode_work
from twostroke.models.random_weights import random_checkpoint
from twostroke.models.weights.tensor import WeightKind
from twostroke.planner.efficiency import H200_RECORDS, Recorded
from twostroke.planner.phases import Phases

HERE = Path(__file__).resolve().parent
RECORDS = HERE / "results"
MODELS = {"8B": "llama-3.1-8b", "0.6B": "qwen3-0.6b", "30B": "qwen3-30b-a3b"}
H200 = find_device("h200")
CEILINGS = H200.ceilings("bf16")
UNITS_S = {"µs": 1e-6, "ms": 1e-3, "s": 1.0}
LEAST = {"weights_alone": 1 / 0.91, "weights": 1 / 0.91, "matmul": 1.29}
"""The best that was measured of the data sheet's numbers, which a fit must not pass: a kernel has read 4.37 of 4.8 TB/s
(cuda-packed.txt), products reached 767 of 989.5 TFLOP/s (lab-llama-3.1-8b-h200.json). Other factors are 1 at least."""
WORTH_A_STEP = 1 - 1e-5
"""Of the loss: without a bound, a term that no figure needs is made smaller for ever."""
FITTED = ("matmul", "weights_alone", "weights", "kv", "sampled", "layer_s", "expert_layer_s", "newcomer_s")
"""Not those that records of their own decide: attention, and the products of experts."""


@dataclass(frozen=True)
class Point:
    model: str
    figure: str
    """TTFT, TPOT, a decode step, or output tokens a second."""
    name: str
    measured: float
    predict: Callable[[ModelShape, Recorded], float]
    is_packed: bool = False
    """Whether decode read copies of weights in 12 bits."""

    def predicted(self, efficiency: Recorded) -> float:
        return self.predict(shape_of(self.model, self.is_packed), efficiency)

    def error(self, efficiency: Recorded) -> float:
        return self.predicted(efficiency) / self.measured - 1


@cache
def shape_of(model: str, is_packed: bool = False) -> ModelShape:
    folder = HERE / "shapes" / MODELS[model]
    plain = shape_from_config(json.loads((folder / "config.json").read_text()), weight_bits=16, kv_bits=16)
    if not is_packed:
        return plain
    copies = load_factory("cuda").decode_weights(
        random_checkpoint(folder, WeightKind.BF16), Formats.of("bf16"), on=H200
    )
    assert isinstance(copies, DecodeWeights), copies
    return replace(plain, decode_weights=copies)


def phases(shape: ModelShape, efficiency: Recorded) -> Phases:
    return Phases(shape, CEILINGS, efficiency)


def read_points(folder: Path = RECORDS) -> list[Point]:
    return [*profile_points(folder / "cuda-step-profile.txt"), *bench_points(folder / "cuda-bench.txt")]


def profile_points(path: Path) -> list[Point]:
    """Steps of streams at one context, replayed as a graph; of two records of one the later. An engine that has copies
    for decode says so before its steps."""
    found: dict[tuple[str, str], Point] = {}
    model, is_packed = "", False
    for line in path.read_text().splitlines():
        if match := re.match(r"== profile (\S+)", line):
            model, is_packed = match[1], False
        elif line.startswith("decode weights packed"):
            is_packed = True
        elif match := re.match(r"(\d+) rows at context (\d+): (\S+) ms a step", line):
            rows, context = int(match[1]), int(match[2])

            def step(shape: ModelShape, efficiency: Recorded, rows: int = rows, context: int = context) -> float:
                return efficiency.step_seconds(shape, decode_work(rows, context), CEILINGS)

            name = f"{rows} streams at {context}"
            found[model, name] = Point(model, "decode step", name, float(match[3]) / 1e3, step, is_packed)
    return list(found.values())


def bench_points(path: Path) -> list[Point]:
    """Each figure that a formula can predict, of its latest run: no percentile of a mixture of steps, no
    workload that drains (nano), no section that is not named for a model. What steps read says whether decode has
    copies."""
    sizes: dict[str, dict[str, int]] = {}
    latest: dict[tuple[str, str, str], tuple[float, bool]] = {}
    packed: dict[str, bool] = {}
    model = workload = ""
    for line in path.read_text().splitlines():
        if match := re.match(r"== (\S+)", line):
            model = match[1]
        elif match := re.search(r"GB a step( \(\S+ GB of (?:few tokens|decodes alone)\))?, on cuda", line):
            packed[model] = match[1] is not None
        elif match := re.match(r"(\w+): .*\(((?:\w+=\d+ ?)+)\)$", line):
            sizes[match[1]] = {key: int(value) for key, value in re.findall(r"(\w+)=(\d+)", match[2])}
        elif match := re.match(r"(\w*) +(\w[\w ]*?)  +([\d.,]+) (µs|ms|s|tok/s|tokens) ", line):
            workload = match[1] or workload
            if match[4] == "tokens":
                continue
            value = float(match[3].replace(",", "")) * UNITS_S.get(match[4], 1.0)
            latest[model, workload, match[2]] = value, packed.get(model, False)
    points = []
    for (model, workload, figure), (value, is_packed) in latest.items():
        made = _bench_point(workload, figure, sizes.get(workload, {}))
        if made is not None and model in MODELS:
            kind, name, predict = made
            points.append(Point(model, kind, name, value, predict, is_packed))
    return points


Made = tuple[str, str, Callable[[ModelShape, Recorded], float]]


def _bench_point(workload: str, figure: str, sizes: dict[str, int]) -> Made | None:
    prompt, out = sizes.get("prompt_len", 0), sizes.get("out_len", 0)
    if workload in ("single", "prefill") and figure == "TTFT":
        return "TTFT", f"{prompt} tokens", lambda shape, e: phases(shape, e).ttft_alone_s(0, prompt)
    if workload in ("single", "prefill") and figure == "TPOT":
        return "TPOT", f"{prompt} in, {out} out", lambda shape, e: phases(shape, e).tpot_s(prompt, out, 1)
    if workload == "prefix" and figure == "TTFT cold":
        total = sizes["shared"] + sizes["unique"]
        return "TTFT", f"{total} tokens", lambda shape, e: phases(shape, e).ttft_alone_s(0, total)
    if workload == "noisy" and figure == "ITL p50 before":
        # The streams have written half of warm_steps when the median gap is.
        context = prompt + sizes["warm_steps"] // 2
        name = f"{sizes['streams']} streams at {context}"
        return "decode step", name, lambda shape, e: phases(shape, e).step_s(decode_work(sizes["streams"], context))
    if workload == "batch" and figure == "ITL p50":
        context = prompt + out // 2
        name = f"{sizes['n']} streams at {context}"
        return "decode step", name, lambda shape, e: phases(shape, e).step_s(decode_work(sizes["n"], context))
    if workload == "batch" and figure == "output":
        name = f"{sizes['n']} x {prompt} in, {out} out"
        return (
            "tokens/s",
            name,
            lambda shape, e: phases(shape, e).loaded(prompt, out, 0, sizes["n"]).output_tokens_per_s,
        )
    return None


def mean_error(points: Sequence[Point], efficiency: Recorded) -> float:
    return statistics.fmean(abs(point.error(efficiency)) for point in points)


def fit(points: Sequence[Point], start: Recorded) -> Recorded:
    """Coordinate descent on the mean squared relative error: few parameters, few points, no library."""

    def loss(efficiency: Recorded) -> float:
        return statistics.fmean(point.error(efficiency) ** 2 for point in points)

    best, best_loss, stride = start, loss(start), 0.2
    while stride > 0.002:
        improved = False
        for name in FITTED:
            for factor in (1 + stride, 1 / (1 + stride)):
                value = getattr(best, name) * factor
                if name.endswith("_s") or value >= LEAST.get(name, 1.0):
                    tried = replace(best, **{name: value})
                    if (tried_loss := loss(tried)) < WORTH_A_STEP * best_loss:
                        best, best_loss, improved = tried, tried_loss, True
        if not improved:
            stride /= 2
    return best


def report(points: Sequence[Point], efficiency: Recorded) -> str:
    heads = f"{'model':<6} {'bits':<5} {'figure':<12} {'of':<24}"
    lines = [f"{heads} {'measured':>12} {'predicted':>12} {'error':>7}"]
    for point in points:
        scale, unit = (1.0, "tok/s") if point.figure == "tokens/s" else (1e3, "ms")
        measured, predicted = scale * point.measured, scale * point.predicted(efficiency)
        error = f"{point.error(efficiency):+.0%}"
        head = f"{point.model:<6} {12 if point.is_packed else 16:<5} {point.figure:<12} {point.name:<24}"
        lines.append(f"{head} {measured:>6,.2f} {unit:<5} {predicted:>6,.2f} {unit:<5} {error:>7}")
    for figure in dict.fromkeys(point.figure for point in points):
        some = [point for point in points if point.figure == figure]
        worst = max(abs(point.error(efficiency)) for point in some)
        lines.append(
            f"{figure}: mean error {mean_error(some, efficiency):.1%}, worst {worst:.1%} ({len(some)} figures)"
        )
    lines.append(f"all: mean error {mean_error(points, efficiency):.1%} ({len(points)} figures)")
    return "\n".join(lines)


def left_out_errors(points: Sequence[Point]) -> dict[str, float]:
    """Of each model, predicted by a fit to the others."""
    errors = {}
    for model in MODELS:
        fitted = fit([point for point in points if point.model != model], H200_RECORDS)
        errors[model] = mean_error([point for point in points if point.model == model], fitted)
    return errors


def sentence(points: Sequence[Point], efficiency: Recorded, left_out: Iterable[float]) -> str:
    """What `H200_RECORDS.error` should say."""
    by_figure = ", ".join(
        f"{figure} {mean_error([point for point in points if point.figure == figure], efficiency):.1%}"
        for figure in dict.fromkeys(point.figure for point in points)
    )
    worst = max(abs(point.error(efficiency)) for point in points)
    low, high = min(left_out), max(left_out)
    return (
        f"{mean_error(points, efficiency):.1%} on average over {len(points)} figures measured there ({by_figure}), the "
        f"worst {worst:.0%}; {low:.0%} to {high:.0%} on a model that was left out of the fit"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--records", type=Path, default=RECORDS)
    points = read_points(parser.parse_args().records)
    print("predictions with the efficiencies that the planner has\n")
    print(report(points, H200_RECORDS))
    fitted = fit(points, H200_RECORDS)
    print("\nfitted anew:", ", ".join(f"{name} {getattr(fitted, name):.4g}" for name in FITTED))
    print(f"mean error {mean_error(points, fitted):.1%}")
    left_out = left_out_errors(points)
    for model, error in left_out.items():
        print(f"fitted without {model}: mean error on it {error:.1%}")
    print("\nin a sentence:", sentence(points, H200_RECORDS, left_out.values()))
    print("\nweights in few bits, by factors that were chosen by these figures\n")
    print(form_report())


if __name__ == "__main__":
    main()
