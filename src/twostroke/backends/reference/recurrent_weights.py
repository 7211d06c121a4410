"""The tensors of layers that keep a state, as float32 arrays. Matrices are [outputs, inputs], vectors [outputs]."""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Any

import numpy as np
import numpy.typing as npt

from twostroke.models.spec import Recurrent, ShortConvolution

Array = npt.NDArray[np.float32]


@dataclass(frozen=True, slots=True)
class ConvolutionWeights:
    b: Array  # [channels, hidden]: what gates a channel's input
    c: Array  # and its output
    x: Array
    conv: Array  # [channels, taps]
    o: Array


RecurrentWeights = ConvolutionWeights
_KINDS: dict[type[Recurrent], type[Any]] = {ShortConvolution: ConvolutionWeights}


def recurrent_weights(arrays: dict[str, Array], mixer: Recurrent) -> RecurrentWeights:
    kind = _KINDS[type(mixer)]
    names = (field.name for field in fields(kind))
    found: RecurrentWeights = kind(**{name: arrays[name] for name in names if name in arrays})
    return found
