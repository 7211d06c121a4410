"""A checkpoint's tensors as kernels read them: packed matrices joined into projections, vectors in f32."""

from __future__ import annotations

import math
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from twostroke.backends.cpu import packed_cache
from twostroke.backends.cpu.arguments import PANEL_OUTPUTS
from twostroke.backends.cpu.experts import Expert, ExpertNorms, LatentPair, LayerExperts
from twostroke.backends.cpu.held_kinds import block_of, held_bytes, is_rounded, packed_names
from twostroke.backends.cpu.kv_kind import KVKind
from twostroke.backends.cpu.latent_weights import LatentWeights, latent_matrices
from twostroke.backends.cpu.layer_weights import (
    NO_PROJECTION,
    LayerInputs,
    LayerInputWeights,
    LayerWeights,
    Projection,
    ProjectionPart,
    SharedExpert,
)
from twostroke.backends.cpu.memory import Arena, Floats, float_zeros, padded
from twostroke.backends.cpu.packing import PackedMatrix, fill, place, rounded_note, tensor_note, tile_kind
from twostroke.backends.cpu.recurrent import RecurrentVectors
from twostroke.backends.cpu.recurrent_shape import projected_names
from twostroke.backends.cpu.tile_kinds import TileKind
from twostroke.core.formats import STORED
from twostroke.models.checkpoint import Checkpoint
from twostroke.models.spec import DenseMlp, LatentAttention, Recurrent, expert_name, layer_name
from twostroke.models.weights.tensor import WeightTensor


@dataclass(frozen=True, slots=True, eq=False)
class Weights:
    embedding: WeightTensor
    layers: tuple[LayerWeights, ...]
    final_norm: Floats
    """Empty: there is none."""
    head: Projection | None
    """None: it scores no tokens."""
    notes: tuple[str, ...]
    join: Projection | None = None
    """Of a head: what joins the hidden states that it reads."""
    layer_inputs: LayerInputs | None = None
    kept_at: Path | None = None
    """The entry of the cache of packed weights that they were mapped from; None: they were packed now."""

    @staticmethod
    def from_checkpoint(
        checkpoint: Checkpoint, threads: int = 1, weights: str = STORED, kv_kind: KVKind = KVKind.F16
    ) -> Weights:
        """From the cache of packed weights, or packed now by `threads` threads, and put there. `kv_kind`: what latents
        are kept in, and multiplied with."""
        num_bytes = sum(held_bytes(checkpoint, name, weights) for name in packed_names(checkpoint))
        path = packed_cache.entry_path(checkpoint, weights)
        notes, kept = [], None
        if path is not None:
            try:
                kept = packed_cache.read(path, num_bytes, threads)
            except packed_cache.DamagedEntryError:
                notes.append(f"the packed weights kept in {path} were damaged: packed again")
        arena = Arena(num_bytes) if kept is None else Arena.over(kept)
        layout = _Layout(checkpoint, arena, weights, kv_kind)
        placed = layout.weights()
        if kept is not None:
            return replace(placed, kept_at=path)
        layout.fill(threads)
        if path is not None and (refused := packed_cache.write(path, arena.memory, threads)) is not None:
            notes.append(f"the packed weights are not kept for the next start: {refused}")
        return replace(placed, notes=(*placed.notes, *notes))


class _Layout:
    """Where every tensor goes, found without reading a matrix; then `fill` packs them, if nobody did before."""

    def __init__(self, checkpoint: Checkpoint, arena: Arena, weights: str, kv_kind: KVKind) -> None:
        self._arena, self._kv_kind = arena, kv_kind
        self._checkpoint, self._formats = checkpoint, weights
        self._held = {name: checkpoint.held_kind(name, weights) for name in checkpoint.tensors}
        self._spec, self._tensors = checkpoint.spec, checkpoint.tensors
        self._changed: Counter[str] = Counter()
        self._to_fill: list[tuple[PackedMatrix, list[str]]] = []

    def weights(self) -> Weights:
        layers = tuple(self._layer(index) for index in range(self._spec.num_layers))
        head = None
        if self._spec.has_output:
            head = self._projection(["embedding" if self._spec.tied_embeddings else "output"])
        final_norm = self._vector("final_norm") if self._spec.has_final_norm else float_zeros(0)
        assert final_norm is not None
        notes = tuple(f"{count} tensors {change}" for change, count in sorted(self._changed.items()))
        join = self._projection(["fc"]) if "fc" in self._tensors else None
        return Weights(self._tensors["embedding"], layers, final_norm, head, notes, join, self._layer_inputs())

    def _layer_inputs(self) -> LayerInputs | None:
        if self._spec.layer_input is None:
            return None
        norm = self._present("layer_projection_norm") * np.float32(2**-0.5)  # half of a vector is looked up
        return LayerInputs(self._tensors["layer_embedding"], self._projection(["layer_projection"]), norm)

    def _layer_input(self, index: int) -> LayerInputWeights | None:
        if self._spec.layers[index].layer_input is None:
            return None
        gate, out, norm = (layer_name(index, part) for part in ("input_gate", "input_projection", "post_input_norm"))
        return LayerInputWeights(self._projection([gate]), self._projection([out]), self._present(norm))

    def fill(self, threads: int) -> None:
        def fill_one(item: tuple[PackedMatrix, list[str]]) -> None:
            matrix, names = item
            held = {self._held[name] for name in names if not self._tensors[name].kind.is_quantised}
            fill(matrix, [self._tensors[name] for name in names], held.pop() if held else None)

        largest_first = sorted(self._to_fill, key=lambda item: -item[0].data.nbytes)
        with ThreadPoolExecutor(threads, thread_name_prefix="pack") as pool:
            list(pool.map(fill_one, largest_first))  # numpy lets go of Python's lock for what takes long here

    def _layer(self, index: int) -> LayerWeights:
        def name(part: str) -> str:
            return layer_name(index, part)

        moe = self._spec.layers[index].moe
        mlps = [] if self._spec.layers[index].mlp is None else [""]
        mlps = mlps if moe is None else [expert_name(expert, "") for expert in moe.held_experts]
        attention, latent, recurrent = self._spec.layers[index].attention, None, None
        if attention is None:
            attention_in = NO_PROJECTION
        elif isinstance(attention, LatentAttention):
            into = "q" if attention.query_rank is None else "q_a"
            attention_in = self._projection([name(into), name("kv_a")])
            latent = self._latent(index, attention)
        elif isinstance(attention, Recurrent):
            # What is called a bias there is added to a step's length, and by the operation that makes it.
            attention_in = self._projection([name(part) for part in projected_names(attention)], has_biases=False)
            recurrent = RecurrentVectors.of(self._tensors, index, attention)
        else:
            parts = (name(part) for part in ("q", "k", "v", "q_gate"))
            attention_in = self._projection([part for part in parts if part in self._tensors])
        attention_out = NO_PROJECTION if attention is None else self._projection([name("o")])
        inner = self._inner(self._spec.layers[index].dense if moe is None else moe.expert)
        pairs = [
            (self._projection([name(f"{own}{part}") for part in inner]), self._projection([name(f"{own}down")]))
            for own in mlps
        ]
        shared = None if moe is None or moe.shared is None else self._shared_expert(index, moe.shared)
        return LayerWeights(
            attention_norm=self._vector(name("attention_norm")),
            attention_in=attention_in,
            attention_out=attention_out,
            mlp_norm=self._vector(name("mlp_norm")),
            mlp_in=pairs[0][0] if pairs else NO_PROJECTION,
            mlp_out=pairs[0][1] if pairs else NO_PROJECTION,
            q_norm=self._vector(name("q_norm")),
            k_norm=self._vector(name("k_norm")),
            post_attention_norm=self._vector(name("post_attention_norm")),
            post_mlp_norm=self._vector(name("post_mlp_norm")),
            attention_norm_bias=self._vector(name("attention_norm_bias")),
            mlp_norm_bias=self._vector(name("mlp_norm_bias")),
            sinks=self._sinks(name("sinks")),
            experts=None if moe is None else self._experts(index, pairs),
            shared=shared,
            latent=latent,
            recurrent=recurrent,
            has_output_gate=name("q_gate") in self._tensors,
            layer_input=self._layer_input(index),
            scale=float(self._present(name("layer_scale"))[0]) if name("layer_scale") in self._tensors else 1.0,
        )

    def _latent(self, index: int, own: LatentAttention) -> LatentWeights:
        latent_norm = self._present(layer_name(index, "kv_a_norm"))
        key_b, value_b = latent_matrices(self._tensors[layer_name(index, "kv_b")], own, self._kv_kind)
        query_b = None if own.query_rank is None else self._projection([layer_name(index, "q_b")])
        return LatentWeights(latent_norm, key_b, value_b, self._vector(layer_name(index, "q_a_norm")), query_b)

    def _shared_expert(self, index: int, own: DenseMlp) -> SharedExpert:
        inner = [layer_name(index, f"shared.{part}") for part in self._inner(own)]
        down, router = (layer_name(index, f"shared.{part}") for part in ("down", "router"))
        own_router = self._tensors[router].to_float32().reshape(-1) if router in self._tensors else None
        return SharedExpert(self._projection(inner), self._projection([down]), own_router)

    @staticmethod
    def _inner(mlp: DenseMlp | None) -> list[str]:
        """The matrices that an MLP's input is multiplied by."""
        return ["gate", "up"] if mlp is None or mlp.is_gated else ["up"]

    def _sinks(self, name: str) -> Floats | None:
        found = self._vector(name)
        return None if found is None else found * np.float32(1 / math.log(2))

    def _experts(self, index: int, pairs: list[tuple[Projection, Projection]]) -> LayerExperts:
        router = self._projection([layer_name(index, "router")])
        if any(len(into.parts) != 1 or len(out.parts) != 1 for into, out in pairs):
            raise AssertionError("an expert's gate and up lie in one matrix")
        parts = [(into.parts[0], out.parts[0]) for into, out in pairs]
        experts = tuple(Expert(into.matrix, out.matrix, into.bias, out.bias) for into, out in parts)
        correction, scales = (self._vector(layer_name(index, part)) for part in ("router_correction", "expert_scale"))
        return LayerExperts(router, experts, correction, scales, self._expert_norms(index), self._latent_pair(index))

    def _latent_pair(self, index: int) -> LatentPair | None:
        moe = self._spec.layers[index].moe
        if moe is None or moe.latent_size is None:
            return None
        return LatentPair(*(self._projection([layer_name(index, f"latent_{part}")]) for part in ("down", "up")))

    def _expert_norms(self, index: int) -> ExpertNorms | None:
        moe = self._spec.layers[index].moe
        if moe is None or not moe.has_own_norms:
            return None
        names = ("router_norm", "experts_norm", "post_experts_norm", "post_shared_norm")
        router, *others = (self._present(layer_name(index, name)) for name in names)
        return ExpertNorms(router * np.float32(self._spec.hidden_size**-0.5), *others)

    def _present(self, name: str) -> Floats:
        found = self._vector(name)
        assert found is not None
        return found

    def _vector(self, name: str) -> Floats | None:
        if name not in self._tensors:
            return None
        values = self._tensors[name].to_float32()
        vector = float_zeros(padded(len(values), PANEL_OUTPUTS))
        vector[: len(values)] = values
        return vector

    def _projection(self, names: list[str], *, has_biases: bool = True) -> Projection:
        runs: list[list[str]] = []
        for name in names:
            if runs and self._kind(runs[-1][-1]) is self._kind(name) and self._has_whole_panels(runs[-1][-1]):
                runs[-1].append(name)
            else:
                runs.append([name])
            self._count_change(name)
        parts, columns, column = [], [], 0
        for run in runs:
            start = column
            for name in run:
                columns.append(column)
                column += padded(self._tensors[name].shape[0], PANEL_OUTPUTS)
            outputs = sum(self._tensors[name].shape[0] for name in run)
            matrix = place(self._kind(run[0]), outputs, self._tensors[run[0]].shape[1], self._arena)
            self._to_fill.append((matrix, run))
            parts.append(ProjectionPart(matrix, start, self._bias(run, column - start) if has_biases else None))
        return Projection(tuple(parts), tuple(columns), column)

    def _kind(self, name: str) -> TileKind:
        return tile_kind(block_of(self._checkpoint, name, self._formats))

    def _has_whole_panels(self, name: str) -> bool:
        return self._tensors[name].shape[0] % PANEL_OUTPUTS == 0

    def _count_change(self, name: str) -> None:
        """For the notes: what is held otherwise than it is stored."""
        if is_rounded(self._checkpoint, name, self._formats):
            self._changed[rounded_note(self._tensors[name])] += 1
        elif change := tensor_note(self._tensors[name], self._held[name]):
            self._changed[change] += 1

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
