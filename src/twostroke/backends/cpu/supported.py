"""Which models the CPU backend computes, and the sentence that it declines others by. Knows declarations alone."""

from __future__ import annotations

from dataclasses import replace

from twostroke.backends.cpu.recurrent_shape import unsupported_recurrent
from twostroke.backends.cpu.shape import activation_name, attended_widths, mlp_widths, mlps_of
from twostroke.models.checkpoint import Checkpoint
from twostroke.models.features import uncomputed
from twostroke.models.spec import (
    DenseMlp,
    GroupedAttention,
    LatentAttention,
    LayerSpec,
    ModelSpec,
    MoeSpec,
    expert_name,
    layer_name,
)

LAYERS_UNLIKE = (
    "its layers differ in their kind of attention, in their experts or activations, or within a KV group in their "
    "heads, and this backend has one of each"
)


def unsupported_shape(checkpoint: Checkpoint) -> str | None:
    spec = checkpoint.spec
    if (reason := uncomputed(spec, "cpu")) is not None:
        return reason
    if not _attentions(spec):
        return "none of its layers attends, and this backend needs one that does"
    if not _attend_alike(spec) or not _mlps_alike(spec):
        return LAYERS_UNLIKE
    if (reason := next(filter(None, map(_lacks_norm, spec.layers)), None)) is not None:
        return reason
    if (reason := unsupported_recurrent(spec)) is not None:
        return reason
    sizes = {name: max(found, key=lambda size: size % 32, default=0) for name, found in mlp_widths(spec).items()}
    sizes |= {"hidden size": spec.hidden_size}
    sizes |= {"size of a layer's input": 0 if spec.layer_input is None else spec.layer_input.width}
    for attention in _attentions(spec):
        if isinstance(attention, LatentAttention):
            if (reason := _unlike_latents(attention)) is not None:
                return reason
            sizes |= {"rank of latents": attention.rank, "rank of queries": attention.query_rank or 0}
        elif attention.head_dim % 16:
            return f"its attention needs a head size that is a multiple of 16, and this model's is {attention.head_dim}"
    sizes["attention width"] = max(attended_widths(spec), key=lambda size: size % 32)
    for name, size in sizes.items():
        if size % 32:
            return f"its tiles need sizes that are multiples of 32, and this model's {name} is {size}"
    return _unlike_experts(checkpoint)


def _attentions(spec: ModelSpec) -> list[GroupedAttention | LatentAttention]:
    found = (layer.attention for layer in spec.layers)
    return [one for one in found if isinstance(one, GroupedAttention | LatentAttention)]


def _attend_alike(spec: ModelSpec) -> bool:
    """Whether what layers differ in is told to code, or decides which code a layer has. Layers of one KV group have
    heads of one size."""
    attentions = _attentions(spec)
    grouped = [one for one in attentions if isinstance(one, GroupedAttention)]
    if len(grouped) < len(attentions):
        return len(set(attentions)) == 1  # latents
    if len({one.is_causal for one in grouped}) > 1 or len({layer.norms_after for layer in spec.layers}) > 1:
        return False
    if any(one.output_gate for one in grouped) and len({one.query_width for one in grouped}) > 1:
        return False
    groups = [group.layers for group in spec.kv_groups() if group.content != "state"]
    heads = [{(own.num_kv_heads, own.head_dim) for own in (spec.layers[i].grouped for i in one)} for one in groups]
    sources = [(one, spec.layers[spec.kv_source(index)].attention) for index, one in _sharing(spec)]
    return all(len(found) == 1 for found in heads) and all(
        isinstance(source, GroupedAttention) and source.kv_width == own.kv_width and source.head_dim == own.head_dim
        for own, source in sources
    )


def _lacks_norm(layer: LayerSpec) -> str | None:
    """Gemma 4's layers have these norms, and what follows them is computed with them. Hunyuan's are of one head."""
    own, moe = layer.attention, layer.moe
    if isinstance(own, GroupedAttention) and own.keys_are_values and not own.value_norm:
        return "its values that are made of keys pass a norm"
    if isinstance(own, GroupedAttention) and own.norms_rotated and own.norm_spans_heads:
        return "its norms behind a rotation are of one head each"
    if layer.has_scale and (layer.mlp is None or not layer.sandwich_norms):
        return "its layers that have a scale norm what their blocks give"
    is_beside = moe is not None and moe.shared is not None and not moe.shared_gate and layer.sandwich_norms
    if moe is not None and moe.has_own_norms and not is_beside:
        return "its experts with norms of their own stand beside an MLP, and a norm follows both"
    return None


def _sharing(spec: ModelSpec) -> list[tuple[int, GroupedAttention]]:
    """Layers that read another's keys and values."""
    found = ((index, layer.attention) for index, layer in enumerate(spec.layers))
    return [(i, one) for i, one in found if isinstance(one, GroupedAttention) and one.shares_kv_of is not None]


def _mlps_alike(spec: ModelSpec) -> bool:
    """Some layers may have experts, and others an MLP: each kind but for its widths the same, and one activation."""
    mlps = mlps_of(spec)
    moes = {replace(mlp, shared=_of_one_width(mlp.shared)) for mlp in mlps if isinstance(mlp, MoeSpec)}
    dense = {_of_one_width(mlp) for mlp in mlps if isinstance(mlp, DenseMlp)}
    inputs = {layer.layer_input for layer in spec.layers}
    if len(moes) > 1 or len(dense) > 1 or len(inputs) > 1:
        return False
    names = {activation_name(mlp) for mlp in mlps} | {one.activation for one in inputs if one is not None}
    return len(names) == 1


def _of_one_width(mlp: DenseMlp | None) -> DenseMlp | None:
    return None if mlp is None else replace(mlp, intermediate_size=1)


def _unlike_latents(attention: LatentAttention) -> str | None:
    for what, size in (("keys", attention.key_dim), ("values", attention.value_dim)):
        if size % 16:
            return f"its attention needs {what} of a multiple of 16 numbers, and this model's have {size}"
    if attention.plain_dim % 2 or attention.rotated_dim % 2:
        return "its latent attention takes the numbers of a key two at a time, and here some are left over"
    return None


def _unlike_experts(checkpoint: Checkpoint) -> str | None:
    """Gate and up are one product. Where their tiles differ, quantised ones are rounded to 8 bits; floats never are."""
    for index, layer in enumerate(checkpoint.spec.layers):
        for expert in layer.moe.held_experts if layer.moe is not None and layer.moe.is_gated else ():
            gate, up = (checkpoint.tensors[layer_name(index, expert_name(expert, part))] for part in ("gate", "up"))
            if gate.kind is not up.kind and not (gate.kind.is_quantised and up.kind.is_quantised):
                kinds = f"{gate.kind.name} and {up.kind.name}"
                return f"it reads an expert's gate and up in one kind, and here they are {kinds}"
    return None
