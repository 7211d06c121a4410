"""Models that give vectors, on a device: their steps are chunks of prompts alone, whose last states become vectors
there. `backends/host/pooling.py` has the same on a host. Knows no scheduler: which chunks are pooled, a step says."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch

from twostroke.backends.cuda.captured_sizes import CapturedSizes
from twostroke.backends.cuda.kernels.pooling import pool_states
from twostroke.backends.cuda.parts import Parts
from twostroke.backends.cuda.prefill import PrefillPath, StagedBatch
from twostroke.backends.cuda.results import NONE, PromptLogprobReader, VectorReader
from twostroke.backends.cuda.staging import Staging
from twostroke.core.step import Step
from twostroke.models.pooling import DenseStep, Pooling
from twostroke.models.spec import StepActivation

ACTIVATIONS: Mapping[StepActivation, Callable[[torch.Tensor], torch.Tensor]] = {
    "identity": lambda x: x,
    "tanh": torch.tanh,
    "gelu": torch.nn.functional.gelu,
    "relu": torch.relu,
    "sigmoid": torch.sigmoid,
}


@dataclass(frozen=True, slots=True, eq=False)
class _Matrix:
    """A small one behind the pooling, in float32."""

    weight: torch.Tensor  # [outputs, inputs]
    bias: torch.Tensor | None
    activation: StepActivation

    @staticmethod
    def of(step: DenseStep, device: torch.device) -> _Matrix:
        bias = None if step.bias is None else torch.from_numpy(step.bias.to_float32()).to(device)
        return _Matrix(torch.from_numpy(step.weight.to_float32()).to(device), bias, step.activation)

    def apply(self, x: torch.Tensor) -> torch.Tensor:
        return ACTIVATIONS[self.activation](torch.nn.functional.linear(x, self.weight, self.bias))


class VectorPath(PrefillPath):
    def __init__(self, pooling: Pooling, parts: Parts, max_rows: int, max_context: int) -> None:
        like = parts.buffers.residual
        self._takes_all, self._normalises = pooling.wanted == "all", pooling.normalises
        self.takes_first = pooling.wanted == "first"
        self._kinds = pooling.all_states
        self._matrices = [_Matrix.of(step, like.device) for step in pooling.steps]
        most = len(like) if self._takes_all else len(parts.buffers.selected)
        self._states = torch.zeros(most, like.shape[1], dtype=torch.float32, device=like.device)
        width = len(self._kinds) * like.shape[1]
        self._pooled = torch.zeros(max_rows if self._takes_all else 0, width, device=like.device)
        self._staging = Staging(2 * max_rows + 8, like.device)
        self._vectors: torch.Tensor | None = None
        super().__init__(parts, max_rows, max_context)

    def launch(
        self, step: Step, wait: Callable[[int | None], None] | None = None
    ) -> tuple[list[int], dict[int, PromptLogprobReader]]:
        """Start the step, which samples nothing: what it gives is told by `readers`."""
        self._vectors = None
        super().launch(step, wait)
        return [], {}

    def readers(self, step: Step) -> Mapping[int, VectorReader]:
        """Of the step that was launched last: how its vectors are read when it is done."""
        vectors = self._vectors
        if vectors is None:
            return NONE
        pooled = [chunk.seq_id for chunk in step.prefills if chunk.pools]
        return {seq_id: _reader(vectors, place) for place, seq_id in enumerate(pooled)}

    def prepare(self, *, rehearses: bool) -> None:
        super().prepare(rehearses=rehearses)
        self._pool([(0, 1)])

    def _captured(self, room: int, max_rows: int) -> CapturedSizes:
        """Nothing is decoded beside the chunks."""
        return replace(super()._captured(room, max_rows), decodes=(0,))

    def _wanted(self, staged: StagedBatch) -> torch.Tensor | None:
        return None if self._takes_all else staged.sampled_tokens

    def _finish(self, residual: torch.Tensor) -> None:
        self._parts.decoder.states(residual, self._states[: len(residual)])

    def _sample(self, step: Step, sampled_rows: torch.Tensor, rows: list[int]) -> None:
        ends = np.cumsum([len(chunk.token_ids) for chunk in step.prefills])
        chunks = zip(step.prefills, ends.tolist(), strict=True)
        texts = [(end - len(one.token_ids), len(one.token_ids)) for one, end in chunks if one.pools]
        vectors = self._pool(texts)
        if vectors.is_cuda:
            room = torch.empty(vectors.shape, dtype=vectors.dtype, pin_memory=True)
            vectors = room.copy_(vectors, non_blocking=True)
        self._vectors = vectors

    def _pool(self, texts: Sequence[tuple[int, int]]) -> torch.Tensor:
        """By the first token of each text, and the number of its tokens  # float32 [texts, numbers]"""
        count = len(texts)
        pooled = self._states[:count]
        if self._takes_all:
            firsts, counts = np.array(texts, dtype=np.int32).T
            self._staging.send((firsts, counts))
            pooled = self._pooled[:count]
            staged_firsts, staged_counts = self._staging.views((count, count))
            for kind, part in zip(self._kinds, pooled.split(self._states.shape[1], dim=1), strict=True):
                pool_states(kind, self._states, staged_firsts, staged_counts, part)
        for matrix in self._matrices:
            pooled = matrix.apply(pooled)
        return torch.nn.functional.normalize(pooled, dim=1) if self._normalises else pooled.clone()


def _reader(vectors: torch.Tensor, place: int) -> VectorReader:
    def read() -> bytes | None:
        vector = vectors[place].numpy()
        return vector.astype("<f4").tobytes() if np.isfinite(vector).all() else None

    return read
