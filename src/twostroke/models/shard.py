"""One rank's part of a model that several ranks hold together: a Checkpoint like any other, with fewer heads, narrower
MLPs, some of the experts and a part of the output matrix. What ranks find after attention's output projection and after
the MLP is summed over all of them; their logits lie side by side.

Parts may be uneven. A KV head goes with all its queries; where there are fewer KV heads than ranks, several ranks hold
the same one, with some of its queries each. Experts are whole. Norms, routers and the embedding are everybody's.
Nothing is copied: weights stay views of the files, and only quantised blocks bind where they are cut."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from math import gcd, lcm

import numpy as np

from twostroke.core.errors import ModelError
from twostroke.models.checkpoint import Checkpoint, FileTensors
from twostroke.models.spec import (
    Attention,
    DenseMlp,
    GroupedAttention,
    LatentAttention,
    LayerSpec,
    Mlp,
    ModelSpec,
    MoeSpec,
    layer_name,
)
from twostroke.models.weights.tensor import WeightTensor, from_float32

Cut = tuple[int, int]
"""The first, and the one behind the last."""


@dataclass(frozen=True, slots=True)
class Shard:
    """One rank of several."""

    rank: int
    size: int

    def of(self, total: int, unit: int = 1, what: str = "rows") -> Cut:
        """Its run of `total` things, cut at multiples of `unit`; the first ranks have one unit more where they do not
        come out even. Raises ModelError where there is not one for each."""
        units = -(-total // unit)
        if units < self.size:
            apart = "" if unit == 1 else f", which stay together in runs of {unit},"
            raise ModelError(f"{total} {what}{apart} cannot be shared by {self.size} ranks")
        each, more = divmod(units, self.size)
        first = self.rank * each + min(self.rank, more)
        return min(first * unit, total), min((first + each + (self.rank < more)) * unit, total)


def shard_checkpoint(checkpoint: Checkpoint, shard: Shard, unit: int = 1) -> Checkpoint:
    """`unit`: widths of a rank's matrices are multiples of it, as a backend asks for. Raises ModelError, in one
    sentence, where the model cannot be shared like that."""
    cutter = _Cutter(checkpoint, shard, unit)
    spec = cutter.spec()
    tensors = {name: cutter.tensor(name) for name in spec.tensor_shapes()}
    if isinstance(checkpoint.tensors, FileTensors):
        tensors = FileTensors(tensors, checkpoint.tensors.files, part=f"{shard.rank} of {shard.size} by {unit}")
    return replace(checkpoint, spec=spec, tensors=tensors)


class _Cutter:
    def __init__(self, checkpoint: Checkpoint, shard: Shard, unit: int) -> None:
        self._whole, self._tensors, self._shard = checkpoint.spec, checkpoint.tensors, shard
        layers = range(checkpoint.spec.num_layers)
        # One for all layers: those of one size stay so.
        self._output_unit = self._unit([layer_name(layer, "o") for layer in layers], unit)
        self._mlp_unit = self._unit([name for layer in layers for name in self._downs(layer)], unit)
        self._vocab = shard.of(checkpoint.spec.vocab_size, what="tokens of the vocabulary")

    def _downs(self, layer: int) -> Iterator[str]:
        """The matrices of a layer whose inputs are shared."""
        for name in ("down", "shared.down"):
            if layer_name(layer, name) in self._tensors:
                yield layer_name(layer, name)

    def _unit(self, names: list[str], unit: int) -> int:
        return lcm(unit, *{self._tensors[name].column_unit for name in names if name in self._tensors})

    def spec(self) -> ModelSpec:
        first, last = self._vocab
        layers = tuple(self._layer(layer) for layer in self._whole.layers)
        return replace(self._whole, layers=layers, tied_embeddings=False, head_rows=last - first)

    def _layer(self, layer: LayerSpec) -> LayerSpec:
        if layer.attention is None or layer.mlp is None:
            raise ModelError("layers of attention alone, or of an MLP alone, cannot be shared by ranks")
        return replace(layer, attention=self._attention(layer.attention), mlp=self._mlp(layer.mlp))

    def _attention(self, own: Attention) -> Attention:
        if isinstance(own, GroupedAttention) and own.norm_spans_heads:
            raise ModelError("queries that are normed over all heads together cannot be shared by ranks")
        if isinstance(own, GroupedAttention):
            (first, last), (first_kv, last_kv) = self._grouped_heads(own)
            return replace(own, num_heads=last - first, num_kv_heads=last_kv - first_kv)
        if isinstance(own, LatentAttention):
            first, last = self._latent_heads(own)
            return replace(own, num_heads=last - first)
        raise ModelError("layers that keep a state in place of keys and values cannot be shared by ranks")

    def _mlp(self, own: Mlp) -> Mlp:
        if isinstance(own, DenseMlp):
            return self._dense(own)
        shared = None if own.shared is None else self._dense(own.shared)
        return replace(own, held=self._experts(own), shared=shared)

    def _dense(self, own: DenseMlp) -> DenseMlp:
        first, last = self._columns(own)
        return replace(own, intermediate_size=last - first)

    def _columns(self, own: DenseMlp) -> Cut:
        return self._shard.of(own.intermediate_size, self._mlp_unit, "columns of an MLP")

    def _experts(self, own: MoeSpec) -> Cut:
        return self._shard.of(own.num_experts, what="experts")

    def _latent_heads(self, own: LatentAttention) -> Cut:
        return self._shard.of(own.num_heads, _together(self._output_unit, own.value_dim), "heads")

    def _grouped_heads(self, own: GroupedAttention) -> tuple[Cut, Cut]:
        """Of queries, and of keys and values."""
        shard, each = self._shard, own.queries_per_kv_head
        if own.num_kv_heads >= shard.size:
            unit = _together(self._output_unit, each * own.head_dim)
            first_kv, last_kv = shard.of(own.num_kv_heads, unit, "KV heads")
            return (first_kv * each, last_kv * each), (first_kv, last_kv)
        kv_head, own_place = next(
            (head, Shard(shard.rank - first, last - first))
            for head in range(own.num_kv_heads)
            for first, last in (Shard(head, own.num_kv_heads).of(shard.size),)
            if first <= shard.rank < last
        )
        start = kv_head * each
        if start * own.head_dim % self._output_unit:
            raise ModelError(
                f"{own.num_kv_heads} KV heads cannot be shared by {shard.size} ranks: between two of them, the output "
                f"projection cannot be cut, since {self._output_unit} of its columns stay together"
            )
        unit = _together(self._output_unit, own.head_dim)
        if -(-each // unit) < own_place.size:
            apart = "" if unit == 1 else f", of which {unit} stay together,"
            raise ModelError(
                f"{own.num_heads} heads cannot be shared by {shard.size} ranks: a KV head has {each} queries{apart} "
                f"for {own_place.size} ranks"
            )
        first, last = own_place.of(each, unit)
        return (start + first, start + last), (kv_head, kv_head + 1)

    def tensor(self, name: str) -> WeightTensor:
        if name == "output":
            found = self._tensors["embedding" if self._whole.tied_embeddings else "output"]
            return found.cut(0, *self._vocab)
        if not name.startswith("layers."):
            return self._tensors[name]
        _, index, own_name = name.split(".", 2)
        layer, found = self._whole.layers[int(index)], self._tensors[name]
        cut = None if layer.attention is None else self._in_attention(layer.attention, own_name)
        if cut is None and layer.mlp is not None:
            cut = self._in_mlp(layer.mlp, own_name)
        if cut is not None:
            axis, bounds = cut
            return found.cut(axis, *bounds)
        is_added_once = own_name in ("o_bias", "down_bias", "shared.down_bias")
        return _zeros(found) if is_added_once and self._shard.rank else found

    def _in_attention(self, own: Attention, name: str) -> tuple[int, Cut] | None:
        """The axis that a tensor is cut along, and where; None: all ranks have it."""
        if isinstance(own, GroupedAttention):
            queries, kv = self._grouped_heads(own)
            by_head = dict.fromkeys(("q", "q_bias", "q_gate", "o"), queries)
            by_head |= dict.fromkeys(("k", "k_bias", "v", "v_bias"), kv)
            if name == "sinks":
                return 0, queries
            width = own.head_dim
        elif isinstance(own, LatentAttention):
            heads = self._latent_heads(own)
            by_head = dict.fromkeys(("q", "q_b", "kv_b", "o"), heads)
            width = {"kv_b": own.plain_dim + own.value_dim, "o": own.value_dim}.get(name, own.key_dim)
        else:
            return None
        if name not in by_head:
            return None
        first, last = by_head[name]
        return int(name == "o"), (first * width, last * width)

    def _in_mlp(self, own: Mlp, name: str) -> tuple[int, Cut] | None:
        prefix, _, last_name = name.rpartition(".")
        if prefix.startswith("experts."):
            return None  # whole
        dense = own if isinstance(own, DenseMlp) else own.shared
        if dense is None or last_name not in ("gate", "up", "down", "gate_bias", "up_bias"):
            return None
        return int(last_name == "down"), self._columns(dense)


def _together(unit: int, width: int) -> int:
    """Of things of this width, how many stay together so that cuts are multiples of `unit`."""
    return unit // gcd(unit, width)


def _zeros(tensor: WeightTensor) -> WeightTensor:
    return from_float32(tensor.name, np.zeros(tensor.shape, dtype=np.float32))


def described(parts: list[ModelSpec]) -> str:
    """What each rank holds of a layer, for a user to read; of the last layer, which has experts if any has."""
    counts: dict[str, list[int]] = {}
    for spec in parts:
        layer = spec.layers[-1]
        if isinstance(layer.attention, GroupedAttention):
            counts.setdefault("heads", []).append(layer.attention.num_heads)
            counts.setdefault("KV heads", []).append(layer.attention.num_kv_heads)
        elif isinstance(layer.attention, LatentAttention):
            counts.setdefault("heads", []).append(layer.attention.num_heads)
        if layer.moe is not None:
            counts.setdefault("experts", []).append(len(layer.moe.held_experts))
        if layer.dense is not None:
            counts.setdefault("MLP columns", []).append(layer.dense.intermediate_size)
    return ", ".join(f"{what} {' + '.join(map(str, found))}" for what, found in counts.items())
