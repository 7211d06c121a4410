"""The matrices of latent attention that are multiplied head by head, with latents: no tiles, but numbers as latents
are multiplied in."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from twostroke.backends.cpu.kv_kind import KVKind
from twostroke.backends.cpu.memory import Arena, Floats, Scalar
from twostroke.backends.cpu.shape import expanded_bytes
from twostroke.models.checkpoint import Checkpoint
from twostroke.models.spec import LatentAttention
from twostroke.models.weights.tensor import WeightTensor
from twostroke.models.weights.write_safetensors import bfloat16

if TYPE_CHECKING:
    from twostroke.backends.cpu.layer_weights import Projection


@dataclass(frozen=True, slots=True, eq=False)
class LatentWeights:
    """Beside `attention_in`, which makes queries, or what these are made of, and what is kept of a token."""

    latent_norm: Floats
    key_b: npt.NDArray[np.generic]  # [heads, plain_dim, rank] f32, or the bits of bf16
    value_b: npt.NDArray[np.generic]  # [heads, rank, value_dim] f32, or [heads, rank / 2, value_dim, 2] of bf16
    query_norm: Floats | None
    query_b: Projection | None


def is_plain(name: str) -> bool:
    """Whether a matrix is multiplied head by head, with latents, and so held in their numbers."""
    return name.endswith(".kv_b")


def plain_bytes(checkpoint: Checkpoint, name: str, kv_kind: KVKind) -> int:
    """What such a matrix takes."""
    return math.prod(checkpoint.tensors[name].shape) * expanded_bytes(kv_kind)


def latent_matrices(
    tensor: WeightTensor, own: LatentAttention, kv_kind: KVKind
) -> tuple[npt.NDArray[np.generic], npt.NDArray[np.generic]]:
    """What makes keys, and what makes values, as `LatentWeights` has them."""
    by_head = tensor.to_float32().reshape(own.num_heads, own.plain_dim + own.value_dim, own.rank)
    key_b, value_b = by_head[:, : own.plain_dim], by_head[:, own.plain_dim :].swapaxes(1, 2)
    if kv_kind is not KVKind.BF16:
        return _in_memory(key_b), _in_memory(value_b)
    pairs = value_b.reshape(own.num_heads, own.rank // 2, 2, own.value_dim).swapaxes(2, 3)
    return _in_memory(bfloat16(key_b)), _in_memory(bfloat16(pairs))


def _in_memory(array: npt.NDArray[Scalar]) -> npt.NDArray[Scalar]:
    held = Arena(array.nbytes).take(array.nbytes).view(array.dtype).reshape(array.shape)
    held[...] = array
    return held
