"""Parts of a tensor that are several runs of its rows or inputs, one behind the other: what one rank of several holds
of a convolution over queries, keys and values, say."""

from __future__ import annotations

from functools import reduce
from math import prod

import numpy as np
import numpy.typing as npt

from twostroke.models.weights.tensor import WeightTensor

Cut = tuple[int, int]
"""The first, and the one behind the last."""
Runs = tuple[Cut, ...]


def joined_runs(*runs: Cut) -> Runs:
    """The same, with those that follow each other made one."""

    def add(found: Runs, run: Cut) -> Runs:
        if found and found[-1][1] == run[0]:
            return (*found[:-1], (found[-1][0], run[1]))
        return (*found, run)

    return reduce(add, runs, ())


def cut_runs(tensor: WeightTensor, axis: int, runs: Runs) -> WeightTensor:
    """One run is a view. More are a copy, made when it is read. `tensor` is of a kind whose rows hold all they need."""
    parts = [tensor.cut(axis, *run) for run in runs]
    return parts[0] if len(parts) == 1 else RunsTensor(parts, axis)


class RunsTensor(WeightTensor):
    """Made when it is first read, and kept."""

    __slots__ = ("_axis", "_made", "_parts")
    _parts: list[WeightTensor]
    _axis: int
    _made: npt.NDArray[np.uint8] | None

    def __init__(self, parts: list[WeightTensor], axis: int) -> None:
        first, is_vector = parts[0], len(parts[0].shape) == 1
        assert not first.kind.has_parts
        lengths = list(first.shape)
        lengths[0 if is_vector else axis] = sum(part.shape[0 if is_vector else axis] for part in parts)
        fields = {"name": first.name, "kind": first.kind, "shape": tuple(lengths)}
        for field, value in (fields | {"_parts": parts, "_axis": 1 if is_vector else axis, "_made": None}).items():
            object.__setattr__(self, field, value)

    @property
    def data(self) -> npt.NDArray[np.uint8]:
        made = self._made
        if made is None:
            made = np.concatenate([part.data for part in self._parts], axis=self._axis)
            object.__setattr__(self, "_made", made)
        return made

    @property
    def nbytes(self) -> int:
        return prod(self.shape[:-1]) * self.kind.row_bytes(self.shape[-1])
