"""Which models the CUDA backend's kernels take: their layers' kinds and sizes, declined with a sentence. Knows no torch
and no device at hand: a plan asks here too."""

from __future__ import annotations

from dataclasses import replace

from twostroke.models.features import LAYERS_DIFFER, uncomputed
from twostroke.models.spec import (
    GatedDeltaNet,
    GroupedAttention,
    LatentAttention,
    LayerSpec,
    Mamba2,
    ModelSpec,
    Recurrent,
)

MAX_HEAD_DIM = 512
MAX_RANK, MAX_ROTATED, MAX_LATENT_HEAD = 512, 128, 256
"""Of latent attention; its keys but for what is rotated, and its values, are heads."""
MAX_STATE_DIM = 128
"""Of what a head keeps, each way: a program has all of it in registers."""
LATENT_UNIT = 8
"""Its sizes are multiples of it: sixteen bytes of 16-bit numbers."""


def unsupported_layers(spec: ModelSpec) -> str | None:
    """Why its kernels do not take a model, or None."""
    if (reason := uncomputed(spec, "cuda")) is not None:
        return reason
    attentions = list(dict.fromkeys(layer.attention for layer in spec.layers))
    attending = [one for one in attentions if isinstance(one, GroupedAttention | LatentAttention)]
    if not attending:
        return "it has no models whose layers all keep states"
    latents = [one for one in attending if isinstance(one, LatentAttention)]
    if (latents and len(attending) > 1) or not _alike_around(spec) or not _blocks_alike(spec):
        return LAYERS_DIFFER
    if (reason := _unsupported_mlps(spec) or _unsupported_mixers(spec)) is not None:
        return reason
    reasons = (
        _unsupported_latent(own) if isinstance(own, LatentAttention) else _unsupported_grouped(own) for own in attending
    )
    return next((reason for reason in reasons if reason is not None), None)


def _unsupported_grouped(own: GroupedAttention) -> str | None:
    if own.rope.pairs_neighbours:
        return "it turns pairs of dimensions half a head apart, and this model's are neighbours"
    if own.head_dim > MAX_HEAD_DIM or own.head_dim % 16:
        return f"its attention needs a head size of a multiple of 16 up to {MAX_HEAD_DIM}, not {own.head_dim}"
    if own.output_gate and own.qkv_bias:
        return "its attention has biases or a gate on its output, not both"
    if own.value_norm and (not own.qk_norm or own.norm_spans_heads):
        return "it norms values beside queries and keys alone, head by head"
    if own.norms_rotated and own.norm_spans_heads:
        return "norms behind its rotary embedding are of one head each"
    if own.queries_per_kv_head > 16:
        return f"its attention shares a key among 16 queries at most, not {own.queries_per_kv_head}"
    return None


def _alike_around(spec: ModelSpec) -> bool:
    """Whether all layers, states or none, have the same norms around their blocks."""
    return len({replace(layer, attention=None, mlp=None) for layer in spec.layers}) == 1


def _blocks_alike(spec: ModelSpec) -> bool:
    """Whether a KV group's layers have blocks of one shape."""
    for group in spec.kv_groups():
        attentions = (spec.layers[layer].attention for layer in group.layers)
        heads = {(own.num_kv_heads, own.head_dim) for own in attentions if isinstance(own, GroupedAttention)}
        if len(heads) > 1:
            return False
    return True


def _unsupported_mixers(spec: ModelSpec) -> str | None:
    mixers = {layer.attention for layer in spec.layers if isinstance(layer.attention, Recurrent)}
    if len(mixers) > 1:
        return "its layers keep states of several kinds, and this backend has room for one"
    mixer = next(iter(mixers), None)
    if isinstance(mixer, GatedDeltaNet) and max(mixer.key_dim, mixer.value_dim) > MAX_STATE_DIM:
        return f"its delta nets have keys and values of up to {MAX_STATE_DIM} numbers a head"
    if isinstance(mixer, Mamba2) and mixer.head_dim * mixer.state_size > MAX_STATE_DIM**2:
        return f"its Mamba-2 layers keep up to {MAX_STATE_DIM**2} numbers a head"
    return None


def _is_odd_mixture(layer: LayerSpec) -> bool:
    if layer.moe is None:
        return False
    if layer.moe.has_own_norms:
        return layer.moe.shared is None
    return layer.sandwich_norms or not layer.input_norms


def has_latents(spec: ModelSpec) -> bool:
    return any(isinstance(layer.attention, LatentAttention) for layer in spec.layers)


def _unsupported_latent(own: LatentAttention) -> str | None:
    sizes = {
        "rank": (own.rank, MAX_RANK),
        "unrotated part of a key": (own.plain_dim, MAX_LATENT_HEAD),
        "rotated part of a key": (own.rotated_dim, MAX_ROTATED),
        "value": (own.value_dim, MAX_LATENT_HEAD),
    }
    for name, (size, most) in sizes.items():
        if size > most or size % LATENT_UNIT:
            return f"its latent attention takes a {name} of a multiple of {LATENT_UNIT} up to {most}, not {size}"
    return None


def _unsupported_mlps(spec: ModelSpec) -> str | None:
    """Layers may have experts or none, and MLPs of any widths."""
    mixtures = {layer.moe for layer in spec.layers if layer.moe is not None}
    if len(mixtures) > 1:
        return "its layers have experts of several kinds, and this backend has room for one"
    dense = [layer.dense for layer in spec.layers] + [moe.shared for moe in mixtures]
    if any(mlp is not None and (mlp.clamp is not None or (mlp.has_bias and mlp.is_gated)) for mlp in dense):
        return "MLPs that every token meets have a plain gate without biases, or none, here"
    if len({mlp.alone for mlp in dense if mlp is not None and not mlp.is_gated}) > 1:
        return "its MLPs without gates have several activations, and this backend has one for all of them"
    every = [mlp for mlp in (*dense, *(moe.expert for moe in mixtures)) if mlp is not None]
    if any(mlp.is_gated and (mlp.squared_relu or mlp.is_exact) for mlp in every):
        return "gates of its MLPs pass SiLU, or GELU by tanh"
    if len({mlp.activation for mlp in every if mlp.is_gated}) > 1:
        return "its MLPs have several activations, and this backend has one for all of them"
    if any(_is_odd_mixture(layer) for layer in spec.layers):
        return "its experts have a norm before them and none behind, or norms of their own beside an MLP that has them"
    if any(layer.has_scale and not (layer.sandwich_norms or layer.layer_input) for layer in spec.layers):
        return "it has scales of layers that norm what they give"
    return None
