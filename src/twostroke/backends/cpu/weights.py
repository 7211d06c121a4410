"""A checkpoint's tensors as kernels read them: packed matrices joined into projections, vectors in f32."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass

import numpy as np

from twostroke.backends.cpu.arguments import PANEL_OUTPUTS, TileKind
from twostroke.backends.cpu.memory import LINE_BYTES, Arena, Floats, float_zeros, padded
from twostroke.backends.cpu.packing import PackedMatrix, pack, packed_bytes, repacking_note, tile_kind
from twostroke.models.checkpoint import Checkpoint
from twostroke.models.spec import layer_name
from twostroke.models.weights.tensor import WeightKind, WeightTensor


@dataclass(frozen=True, slots=True, eq=False)
class ProjectionPart:
    matrix: PackedMatrix
    column: int
    """Where its outputs begin in the projection's."""
    bias: Floats | None


@dataclass(frozen=True, slots=True, eq=False)
class Projection:
    """Matrices that read the same input: q, k and v, or gate and up. Neighbours of one kind are one matrix."""

    parts: tuple[ProjectionPart, ...]
    columns: tuple[int, ...]
    """Where each named matrix begins in the outputs."""
    width: int
    """Outputs, padding included."""

    @property
    def is_one_matrix(self) -> bool:
        """Of one kind throughout, and without biases: what a gated product asks of gate and up."""
        return len(self.parts) == 1 and self.parts[0].bias is None


@dataclass(frozen=True, slots=True, eq=False)
class LayerWeights:
    attention_norm: Floats
    attention_in: Projection
    attention_out: Projection
    mlp_norm: Floats
    mlp_in: Projection
    mlp_out: Projection
    q_norm: Floats | None
    k_norm: Floats | None
    post_attention_norm: Floats | None
    post_mlp_norm: Floats | None


@dataclass(frozen=True, slots=True, eq=False)
class Weights:
    embedding: WeightTensor
    layers: tuple[LayerWeights, ...]
    final_norm: Floats
    head: Projection
    notes: tuple[str, ...]

    @staticmethod
    def from_checkpoint(checkpoint: Checkpoint) -> Weights:
        return _Packer(checkpoint).pack()


def tile_kinds(checkpoint: Checkpoint) -> tuple[TileKind, ...]:
    """The kinds of tile that a model needs, in a fixed order."""
    found = {tile_kind(tensor.kind) for name, tensor in checkpoint.tensors.items() if _is_projection(checkpoint, name)}
    return tuple(kind for kind in TileKind if kind in found)


def _is_projection(checkpoint: Checkpoint, name: str) -> bool:
    tied_head = name == "embedding" and checkpoint.spec.tied_embeddings
    return len(checkpoint.tensors[name].shape) == 2 and (name != "embedding" or tied_head)


class _Packer:
    def __init__(self, checkpoint: Checkpoint) -> None:
        self._spec, self._tensors = checkpoint.spec, checkpoint.tensors
        self._repacked: Counter[WeightKind] = Counter()
        matrices = [tensor for name, tensor in self._tensors.items() if _is_projection(checkpoint, name)]
        sizes = [packed_bytes(tile_kind(t.kind), t.shape[0], t.shape[1]) + 2 * LINE_BYTES for t in matrices]
        self._arena = Arena(sum(sizes))

    def pack(self) -> Weights:
        layers = tuple(self._layer(index) for index in range(self._spec.num_layers))
        head = self._projection(["embedding" if self._spec.tied_embeddings else "output"])
        final_norm = self._vector("final_norm")
        assert final_norm is not None
        notes = tuple(
            f"{count} tensors {kind.name} {repacking_note(kind)}" for kind, count in sorted_counts(self._repacked)
        )
        return Weights(self._tensors["embedding"], layers, final_norm, head, notes)

    def _layer(self, index: int) -> LayerWeights:
        def name(part: str) -> str:
            return layer_name(index, part)

        attention_norm, mlp_norm = self._vector(name("attention_norm")), self._vector(name("mlp_norm"))
        assert attention_norm is not None and mlp_norm is not None
        return LayerWeights(
            attention_norm=attention_norm,
            attention_in=self._projection([name("q"), name("k"), name("v")]),
            attention_out=self._projection([name("o")]),
            mlp_norm=mlp_norm,
            mlp_in=self._projection([name("gate"), name("up")]),
            mlp_out=self._projection([name("down")]),
            q_norm=self._vector(name("q_norm")),
            k_norm=self._vector(name("k_norm")),
            post_attention_norm=self._vector(name("post_attention_norm")),
            post_mlp_norm=self._vector(name("post_mlp_norm")),
        )

    def _vector(self, name: str) -> Floats | None:
        if name not in self._tensors:
            return None
        values = self._tensors[name].to_float32()
        vector = float_zeros(padded(len(values), PANEL_OUTPUTS))
        vector[: len(values)] = values
        return vector

    def _projection(self, names: list[str]) -> Projection:
        runs: list[list[str]] = []
        for name in names:
            before = self._tensors[runs[-1][-1]] if runs else None
            kind = tile_kind(self._tensors[name].kind)
            if before is not None and tile_kind(before.kind) is kind and before.shape[0] % PANEL_OUTPUTS == 0:
                runs[-1].append(name)
            else:
                runs.append([name])
            if repacking_note(self._tensors[name].kind):
                self._repacked[self._tensors[name].kind] += 1
        parts, columns, column = [], [], 0
        for run in runs:
            tensors = [self._tensors[name] for name in run]
            start = column
            for tensor in tensors:
                columns.append(column)
                column += padded(tensor.shape[0], PANEL_OUTPUTS)
            parts.append(ProjectionPart(pack(tensors, self._arena), start, self._bias(run, column - start)))
        return Projection(tuple(parts), tuple(columns), column)

    def _bias(self, names: list[str], width: int) -> Floats | None:
        vectors = [self._vector(f"{name}_bias") for name in names]
        present = [vector for vector in vectors if vector is not None]
        if not present:
            return None
        if len(present) != len(vectors):
            raise AssertionError("a projection has biases on all its matrices or on none")
        bias = float_zeros(width)
        bias[:] = np.concatenate(present)
        return bias


def sorted_counts(counts: Counter[WeightKind]) -> list[tuple[WeightKind, int]]:
    return sorted(counts.items(), key=lambda item: item[0].name)
