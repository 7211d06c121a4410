"""Figures of weights in few bits, as `python -m bench.cuda.forms` recorded them, beside what the planner predicts."""

from __future__ import annotations

import re
from pathlib import Path

from twostroke.core.formats import find_weight_format
from twostroke.cost.config_shape import dimensions_from_config
from twostroke.cost.devices import find_device
from twostroke.cost.known_shapes import KNOWN_SHAPES
from twostroke.cost.model_shape import ModelShape
from twostroke.planner.efficiency import expected
from twostroke.planner.phases import Phases

RECORD = Path(__file__).resolve().parent / "results" / "cuda-forms.txt"
CASES = {
    "8b-fp8": ("Llama-3.1-8B", "fp8"),
    "8b-int4": ("Llama-3.1-8B", "int4"),
    "8b-q4_k_m": ("Llama-3.1-8B", "q4_k"),
    "30b-fp8": ("Qwen3-30B-A3B", "fp8"),
    "gpt-oss-20b": ("gpt-oss-20b", "mxfp4"),
}
FIGURES = {
    "single ttft_ms": lambda phases: phases.ttft_alone_s(0, 512),
    "single tpot_ms": lambda phases: phases.tpot_s(512, 256, 1),
    "prefill ttft_ms": lambda phases: phases.ttft_alone_s(0, 16384),
}
"""Those that a formula can predict, in seconds, of the workloads of `bench/peers/gpu`."""


def shape_in(model: str, weights: str) -> ModelShape:
    bits = find_weight_format(weights).bits
    dimensions = dimensions_from_config(KNOWN_SHAPES[model].config)
    return dimensions.shape(
        weight_bits=bits["weight_bits"] or 16.0,
        head_bits=bits["head_bits"],
        expert_bits=bits["expert_bits"],
        kv_bits=16.0,
    )


def phases_in(model: str, weights: str) -> Phases:
    shape, arithmetic = shape_in(model, weights), find_weight_format(weights).arithmetic
    efficiency = expected("H200", weights=weights, has_experts=shape.experts is not None, arithmetic=arithmetic)
    return Phases(shape, find_device("h200").ceilings(arithmetic), efficiency)


def form_points(record: Path = RECORD) -> list[tuple[str, str, float, float]]:
    """Case, figure, what was measured and what is predicted, in milliseconds; of several runs the last."""
    measured = {}
    for line in record.read_text().splitlines():
        match = re.match(r"\| (\S+) \| (\w+ \w+) \| ([\d,.]+) \|", line)
        if match and match[1] in CASES and match[2] in FIGURES:
            measured[match[1], match[2]] = float(match[3].replace(",", ""))
    return [
        (case, figure, took_ms, 1e3 * FIGURES[figure](phases_in(*CASES[case])))
        for (case, figure), took_ms in measured.items()
    ]


def report() -> str:
    lines = [f"{'case':<12} {'figure':<16} {'measured':>9} {'predicted':>10} {'error':>6}"]
    for case, figure, measured, predicted in form_points():
        lines.append(
            f"{case:<12} {figure:<16} {measured:>6.2f} ms {predicted:>7.2f} ms {predicted / measured - 1:>+6.0%}"
        )
    return "\n".join(lines)
