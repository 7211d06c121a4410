"""Arithmetic intensity: FLOPs for each byte that must move, of one matrix product, of a model's matrices, of a phase;
and what a machine makes of it. Below the ridge memory limits, above it arithmetic does."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from twostroke.cost.dimensions import Dimensions, Matrix, Part
from twostroke.cost.floor import StepWork, step_bytes_read, step_multiply_adds
from twostroke.cost.hardware import Ceilings
from twostroke.cost.model_shape import ModelShape

Side = Literal["memory", "arithmetic"]


def matmul_intensity(
    rows: float, outputs: int, inputs: int, *, activation_bytes: float = 2.0, weight_bytes: float = 2.0
) -> float:
    """FLOPs a byte of [rows, inputs] x [inputs, outputs], each operand moved once: 2 M N K over M K + K N + M N."""
    moved = activation_bytes * rows * (inputs + outputs) + weight_bytes * inputs * outputs
    return 2 * rows * outputs * inputs / moved


def ridge(ceilings: Ceilings) -> float:
    """FLOPs a byte at which both limits are reached at once."""
    return 2 * ceilings.multiply_adds_per_s / ceilings.read_bytes_per_s


def side(intensity: float, ceilings: Ceilings) -> Side:
    return "memory" if intensity < ridge(ceilings) else "arithmetic"


def attainable_flops(intensity: float, ceilings: Ceilings) -> float:
    """FLOPs a second, at most."""
    return min(2 * ceilings.multiply_adds_per_s, intensity * ceilings.read_bytes_per_s)


@dataclass(frozen=True, slots=True)
class MatmulPoint:
    matrix: Matrix
    rows: float
    """Tokens that one such matrix meets; of an expert, to be expected of one that is met at all."""
    intensity: float
    side: Side
    attainable_flops: float


def matmul_points(
    dimensions: Dimensions, num_tokens: int, num_sampled: int, ceilings: Ceilings, *, weight_bits: float = 16.0
) -> list[MatmulPoint]:
    """Each matrix of a model in a step of `num_tokens` tokens, of which `num_sampled` have their logits wanted."""
    points = []
    for matrix in dimensions.matrices:
        rows = _rows(dimensions, matrix.part, num_tokens, num_sampled)
        intensity = matmul_intensity(rows, matrix.outputs, matrix.inputs, weight_bytes=weight_bits / 8)
        points.append(
            MatmulPoint(matrix, rows, intensity, side(intensity, ceilings), attainable_flops(intensity, ceilings))
        )
    return points


def _rows(dimensions: Dimensions, part: Part, num_tokens: int, num_sampled: int) -> float:
    if part is Part.HEAD:
        return num_sampled
    if part is Part.LAYER:
        return num_tokens
    share = dimensions.experts_per_token / dimensions.num_experts
    return num_tokens * share / (1 - (1 - share) ** num_tokens)


@dataclass(frozen=True, slots=True)
class PhasePoint:
    """A whole step: weights, attention and the KV that it reads."""

    flops: float
    bytes_read: float
    side: Side
    attainable_flops: float

    @property
    def intensity(self) -> float:
        return self.flops / self.bytes_read


def phase_point(shape: ModelShape, work: StepWork, ceilings: Ceilings) -> PhasePoint:
    flops, bytes_read = 2 * step_multiply_adds(shape, work), step_bytes_read(shape, work)
    intensity = flops / bytes_read
    return PhasePoint(flops, bytes_read, side(intensity, ceilings), attainable_flops(intensity, ceilings))


def prefill_work(num_tokens: int, start: int = 0) -> StepWork:
    return StepWork(chunks=((start, num_tokens),), num_sampling_chunks=1)


def decode_work(batch: int, context_len: int) -> StepWork:
    return StepWork(contexts=(context_len,) * batch)


def crossover_batch(shape: ModelShape, context_len: int, ceilings: Ceilings, most: int = 1 << 14) -> int | None:
    """The smallest batch whose decode step is bound by arithmetic; None: none is, because each stream brings more KV
    bytes than it brings arithmetic."""

    def is_bound(batch: int) -> bool:
        return phase_point(shape, decode_work(batch, context_len), ceilings).side == "arithmetic"

    if not is_bound(most):
        return None
    low, high = 1, most
    while low < high:
        middle = (low + high) // 2
        low, high = (low, middle) if is_bound(middle) else (middle + 1, high)
    return low
