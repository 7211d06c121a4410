"""The tensors of layers that keep a state, as float32 arrays. Matrices are [outputs, inputs], vectors [outputs]."""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Any

import numpy as np
import numpy.typing as npt

from twostroke.models.spec import GatedDeltaNet, Mamba2, Recurrent, ShortConvolution

Array = npt.NDArray[np.float32]


@dataclass(frozen=True, slots=True)
class ConvolutionWeights:
    b: Array  # [channels, hidden]: what gates a channel's input
    c: Array  # and its output
    x: Array
    conv: Array  # [channels, taps]
    o: Array


@dataclass(frozen=True, slots=True)
class DeltaWeights:
    """Of a gated delta net."""

    q: Array  # [key heads * key_dim, hidden]
    k: Array
    v: Array  # [value heads * value_dim, hidden]
    z: Array  # [value heads * value_dim, hidden]: what the gated norm opens by
    beta: Array  # [value heads, hidden]
    dt: Array  # [value heads, hidden]
    dt_bias: Array  # [value heads]
    decay: Array  # [value heads], below 0
    conv: Array  # [all of q, k and v, taps]
    gated_norm: Array  # [value_dim]
    o: Array


@dataclass(frozen=True, slots=True)
class MambaWeights:
    """Of a Mamba-2."""

    z: Array  # [heads * head_dim, hidden]: what the gated norm opens by
    x: Array  # [heads * head_dim, hidden]
    b: Array  # [groups * state_size, hidden]
    c: Array
    dt: Array  # [heads, hidden]
    dt_bias: Array  # [heads]
    decay: Array  # [heads], below 0
    skip: Array  # [heads]: how much of x is found without the state
    conv: Array  # [all of x, b and c, taps]
    gated_norm: Array  # [heads * head_dim]
    o: Array
    conv_bias: Array | None = None


RecurrentWeights = ConvolutionWeights | DeltaWeights | MambaWeights
_KINDS: dict[type[Recurrent], type[Any]] = {
    ShortConvolution: ConvolutionWeights,
    GatedDeltaNet: DeltaWeights,
    Mamba2: MambaWeights,
}


def recurrent_weights(arrays: dict[str, Array], mixer: Recurrent) -> RecurrentWeights:
    kind = _KINDS[type(mixer)]
    names = (field.name for field in fields(kind))
    found: RecurrentWeights = kind(**{name: arrays[name] for name in names if name in arrays})
    return found
