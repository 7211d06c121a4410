"""One rank's part of a model that several ranks hold together: a Checkpoint like any other, with fewer heads, narrower
MLPs, some of the experts and a part of the output matrix. What ranks find after attention's output projection, or that
of a layer that keeps a state, and after the MLP is summed over all of them; their logits lie side by side. Where a norm
is over heads of several ranks, their squares are summed, too.

Parts may be uneven (`shard_heads.py`). Experts are whole. Other norms, routers and the embedding are everybody's.
Little is copied: weights stay views of the files, and only quantised blocks bind where they are cut."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from math import lcm

import numpy as np

from twostroke.core.errors import ModelError
from twostroke.models.checkpoint import Checkpoint, FileTensors
from twostroke.models.shard_heads import HeadKind, HeadShare, share_heads, together
from twostroke.models.shard_heads import Shard as Shard
from twostroke.models.shard_states import TensorCuts, part_of_states
from twostroke.models.spec import (
    Attention,
    DenseMlp,
    GatedDeltaNet,
    GroupedAttention,
    LatentAttention,
    LayerSpec,
    Mamba2,
    Mlp,
    ModelSpec,
    ShortConvolution,
    WideNorms,
    layer_name,
)
from twostroke.models.weights.runs import Cut, cut_runs
from twostroke.models.weights.tensor import WeightTensor, from_float32


def shard_checkpoint(checkpoint: Checkpoint, shard: Shard, unit: int = 1) -> Checkpoint:
    """`unit`: widths of a rank's matrices are multiples of it, as a backend asks for. Raises ModelError, in one
    sentence, where the model cannot be shared like that."""
    if not checkpoint.spec.has_output:
        raise ModelError("a model that gives vectors is not shared by ranks")
    cutter = _Cutter(checkpoint, shard, unit)
    spec = cutter.spec()
    tensors = {name: cutter.tensor(name) for name in spec.tensor_shapes()}
    if isinstance(checkpoint.tensors, FileTensors):
        tensors = FileTensors(tensors, checkpoint.tensors.files, part=f"{shard.rank} of {shard.size} by {unit}")
    return replace(checkpoint, spec=spec, tensors=tensors)


@dataclass(frozen=True, slots=True)
class _LayerPart:
    """A rank's part of a layer, and how its tensors are cut."""

    spec: LayerSpec
    cuts: TensorCuts


class _Cutter:
    def __init__(self, checkpoint: Checkpoint, shard: Shard, unit: int) -> None:
        self._whole, self._tensors, self._shard, self._unit = checkpoint.spec, checkpoint.tensors, shard, unit
        layers = range(checkpoint.spec.num_layers)
        # One for all layers: those of one size stay so.
        self._output_unit = self._unit_of([layer_name(layer, "o") for layer in layers])
        self._mlp_unit = self._unit_of([name for layer in layers for name in self._downs(layer)])
        self._vocab = shard.of(checkpoint.spec.vocab_size, what="tokens of the vocabulary")
        kinds = dict.fromkeys(checkpoint.spec.layers)
        by_kind = {layer: self._layer(layer) for layer in kinds}
        self._layers = [by_kind[layer] for layer in checkpoint.spec.layers]

    def _downs(self, layer: int) -> Iterator[str]:
        """The matrices of a layer whose inputs are shared."""
        for name in ("down", "shared.down"):
            if layer_name(layer, name) in self._tensors:
                yield layer_name(layer, name)

    def _unit_of(self, names: list[str]) -> int:
        return lcm(self._unit, *{self._tensors[name].column_unit for name in names if name in self._tensors})

    def spec(self) -> ModelSpec:
        first, last = self._vocab
        layers = tuple(layer.spec for layer in self._layers)
        return replace(self._whole, layers=layers, tied_embeddings=False, head_rows=last - first)

    def tensor(self, name: str) -> WeightTensor:
        if name == "output":
            found = self._tensors["embedding" if self._whole.tied_embeddings else "output"]
            return found.cut(0, *self._vocab)
        if not name.startswith("layers."):
            return self._tensors[name]
        _, index, own_name = name.split(".", 2)
        found, cut = self._tensors[name], self._layers[int(index)].cuts.get(own_name)
        if cut is not None:
            return cut_runs(found, *cut)
        is_added_once = own_name in ("o_bias", "down_bias", "shared.down_bias")
        return _zeros(found) if is_added_once and self._shard.rank else found

    def _layer(self, layer: LayerSpec) -> _LayerPart:
        """Of a layer of one block, the other is not there."""
        attention, cuts = (None, {}) if layer.attention is None else self._attention(layer.attention)
        mlp, own_cuts = (None, {}) if layer.mlp is None else self._mlp(layer.mlp)
        return _LayerPart(replace(layer, attention=attention, mlp=mlp), {**cuts, **own_cuts})

    def _attention(self, own: Attention) -> tuple[Attention, TensorCuts]:
        if isinstance(own, GroupedAttention):
            return self._grouped(own)
        if isinstance(own, LatentAttention):
            return self._latent(own)
        return part_of_states(own, self._shard, self._unit, self._output_unit)

    def _grouped(self, own: GroupedAttention) -> tuple[Attention, TensorCuts]:
        share, width = self._grouped_heads(own), own.head_dim
        (first, last), (first_kv, last_kv) = share.served(own.queries_per_kv_head), share.serving
        queries: Cut = (first * width, last * width)
        kv: Cut = (first_kv * width, last_kv * width)
        cuts: TensorCuts = dict.fromkeys(("q", "q_bias", "q_gate"), (0, (queries,)))
        cuts |= dict.fromkeys(("k", "k_bias", "v", "v_bias"), (0, (kv,)))
        cuts |= {"o": (1, (queries,)), "sinks": (0, ((first, last),))}
        if own.norm_spans_heads:
            cuts |= {"q_norm": (0, (queries,)), "k_norm": (0, (kv,))}
        part = replace(
            own, num_heads=last - first, num_kv_heads=last_kv - first_kv, wide_norms=self._wide_norms(own, share)
        )
        return part, cuts

    def _grouped_heads(self, own: GroupedAttention) -> HeadShare:
        kind = HeadKind(
            many="KV heads",
            one="a KV head",
            served="heads",
            of_one="queries",
            count=own.num_kv_heads,
            each=own.queries_per_kv_head,
            width=own.head_dim,
        )
        return share_heads(self._shard, kind, self._output_unit)

    def _wide_norms(self, own: GroupedAttention, share: HeadShare) -> WideNorms | None:
        if not own.norm_spans_heads or self._shard.size == 1:
            return None
        return WideNorms(own.query_width, own.kv_width, counts_keys=share.place.rank == 0)

    def _latent(self, own: LatentAttention) -> tuple[Attention, TensorCuts]:
        first, last = self._shard.of(own.num_heads, together(self._output_unit, own.value_dim), "heads")
        widths = {"q": own.key_dim, "q_b": own.key_dim, "kv_b": own.plain_dim + own.value_dim, "o": own.value_dim}
        cuts: TensorCuts = {
            name: (int(name == "o"), ((first * width, last * width),)) for name, width in widths.items()
        }
        return replace(own, num_heads=last - first), cuts

    def _mlp(self, own: Mlp) -> tuple[Mlp, TensorCuts]:
        if isinstance(own, DenseMlp):
            return self._dense(own)
        held = self._shard.of(own.num_experts, what="experts")
        shared, cuts = (None, {}) if own.shared is None else self._dense(own.shared, "shared.")
        return replace(own, held=held, shared=shared), cuts

    def _dense(self, own: DenseMlp, prefix: str = "") -> tuple[DenseMlp, TensorCuts]:
        first, last = columns = self._shard.of(own.intermediate_size, self._mlp_unit, "columns of an MLP")
        cuts: TensorCuts = {f"{prefix}{name}": (0, (columns,)) for name in ("gate", "up", "gate_bias", "up_bias")}
        return replace(own, intermediate_size=last - first), cuts | {f"{prefix}down": (1, (columns,))}


def _zeros(tensor: WeightTensor) -> WeightTensor:
    return from_float32(tensor.name, np.zeros(tensor.shape, dtype=np.float32))


def described(parts: list[ModelSpec]) -> str:
    """What each rank holds of a layer, for a user to read: of each kind of layers, the last."""
    counts = [_counts(spec) for spec in parts]
    return ", ".join(f"{what} {' + '.join(str(one[what]) for one in counts)}" for what in counts[0])


def _counts(spec: ModelSpec) -> dict[str, int]:
    counts: dict[str, int] = {}
    for layer in spec.layers:
        match layer.attention:
            case GroupedAttention() as own:
                counts |= {"heads": own.num_heads, "KV heads": own.num_kv_heads}
            case LatentAttention() as own:
                counts["heads"] = own.num_heads
            case GatedDeltaNet() as own:
                counts |= {"heads of states": own.num_value_heads, "their key heads": own.num_key_heads}
            case Mamba2() as own:
                counts |= {"heads of states": own.num_heads, "their groups": own.num_groups}
            case ShortConvolution() as own:
                counts["channels of convolutions"] = own.channels
        if layer.moe is not None:
            counts["experts"] = len(layer.moe.held_experts)
        if layer.dense is not None:
            counts["MLP columns"] = layer.dense.intermediate_size
    order = ("heads", "KV heads", "heads of states", "their key heads", "their groups", "channels of convolutions")
    return {what: counts[what] for what in (*order, "experts", "MLP columns") if what in counts}
