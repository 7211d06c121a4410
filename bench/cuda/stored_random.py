"""A model's shape whose matrices hold random blocks of the kind that a file would store them in: what a card makes of
such a file can be measured without one. Knows no torch."""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache
from math import log2
from pathlib import Path
from typing import Literal

import numpy as np
import numpy.typing as npt

from bench.gguf_shape import drawn_blocks
from twostroke.backends.cuda.layer_matrices import matrices_of
from twostroke.models.checkpoint import Checkpoint
from twostroke.models.quantised.scheme import Activations
from twostroke.models.random_weights import random_checkpoint
from twostroke.models.spec import ModelSpec
from twostroke.models.weights.small_floats import E4M3_VALUES
from twostroke.models.weights.stored_forms import Parts, ScaledTensor, ScaleKind
from twostroke.models.weights.tensor import WeightKind, WeightTensor

StoredAs = Literal["q4_k_m", "mxfp4", "fp8_block"]
Bytes = npt.NDArray[np.uint8]

BLOCK = 128
"""Rows, and inputs, that share a scale of float8."""
POOL_BLOCKS = 1 << 18
"""Blocks that are drawn of a kind; a larger matrix repeats them."""
E2M1_SPREAD = 2.93
"""Of floats of four bits whose codes are uniform."""
LARGER_EVERY = 8
"""llama.cpp holds some of the values' and the last matrices of an MLP in Q6_K where the rest is Q4_K: those of the
first and the last eighth of the layers, and every third between."""


def stored_checkpoint(folder: Path, stored_as: StoredAs) -> Checkpoint:
    """The model that config.json describes. `q4_k_m`: all matrices but the embedding as llama.cpp's file of that name
    has them; `mxfp4`: experts alone, as gpt-oss has them; `fp8_block`: layers' matrices with a scale for 128 x 128, as
    Qwen publishes them. The rest is bf16."""
    drawn = random_checkpoint(folder, WeightKind.BF16)
    if stored_as == "fp8_block":
        matrices = (name for matrix in matrices_of(drawn.spec) if matrix.kind != "head" for name in matrix.tensors)
        blocks = {name: _fp8_blocks(name, drawn.tensors[name].shape) for name in matrices}
        return Checkpoint(drawn.name, folder, drawn.spec, {**drawn.tensors, **blocks})
    kinds = dict(_q4_k_m(drawn.spec) if stored_as == "q4_k_m" else _experts(drawn.spec))
    shapes = drawn.spec.tensor_shapes()
    stored = {name: WeightTensor(name, kind, shapes[name], _blocks(kind, shapes[name])) for name, kind in kinds.items()}
    return Checkpoint(drawn.name, folder, drawn.spec, {**drawn.tensors, **stored})


def _q4_k_m(spec: ModelSpec) -> Iterator[tuple[str, WeightKind]]:
    yield "output", WeightKind.Q6_K
    last = spec.num_layers
    for index in range(last):
        is_larger = index < last // LARGER_EVERY or index >= 7 * last // LARGER_EVERY
        is_larger = is_larger or (index - last // LARGER_EVERY) % 3 == 2
        for name in ("q", "k", "v", "o", "gate", "up", "down"):
            yield (
                f"layers.{index}.{name}",
                WeightKind.Q6_K if is_larger and name in ("v", "down") else WeightKind.Q4_K,
            )


def _experts(spec: ModelSpec) -> Iterator[tuple[str, WeightKind]]:
    for name, shape in spec.tensor_shapes().items():
        if ".experts." in name and len(shape) == 2:
            yield name, WeightKind.MXFP4


def _fp8_blocks(name: str, shape: tuple[int, ...]) -> ScaledTensor:
    rows, width = shape
    pool = _float8_pool()
    scale = np.float32(width**-0.5 / E4M3_VALUES[pool].std())
    scales = np.full((-(-rows // BLOCK), -(-width // BLOCK)), scale, dtype=np.float32)
    empty = np.empty((rows, 0), dtype=np.uint8)
    frame = Parts(WeightKind.FP8, (rows, width), empty, scales, ScaleKind.F32, BLOCK, BLOCK)

    def codes_of(start: int, stop: int) -> Bytes:
        return np.resize(pool, (stop - start, width))

    inputs = Activations("fp8", "group", is_dynamic=True, group_size=BLOCK)
    return ScaledTensor(name, (rows, width), rows * width + scales.nbytes, frame, codes_of, inputs)


@cache
def _float8_pool() -> Bytes:
    rng = np.random.default_rng(8)
    numbers = rng.integers(0, 120, POOL_BLOCKS * 8 + 1, dtype=np.uint8)
    signed: Bytes = numbers | rng.integers(0, 2, len(numbers), dtype=np.uint8) << np.uint8(7)
    return signed


def _blocks(kind: WeightKind, shape: tuple[int, ...]) -> Bytes:
    pool = _pool(kind, shape[-1])
    count = shape[0] * shape[-1] // kind.block_values
    return np.resize(pool, (count, pool.shape[1])).reshape(shape[0], -1)


@cache
def _pool(kind: WeightKind, width: int) -> Bytes:
    """Blocks of a matrix whose spread is 1 / sqrt(width)."""
    rng = np.random.default_rng(width)
    if kind is not WeightKind.MXFP4:
        return drawn_blocks(kind.name.lower(), (POOL_BLOCKS, kind.block_values), rng, width)
    blocks: Bytes = rng.integers(0, 256, (POOL_BLOCKS, kind.block_bytes), dtype=np.uint8)
    blocks[:, 0] = 127 + round(log2(width**-0.5 / E2M1_SPREAD))
    return blocks
