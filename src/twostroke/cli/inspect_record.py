"""What `twostroke inspect` knows of a model, as plain numbers: `--json` prints them, the table puts them into words."""

from __future__ import annotations

from collections import Counter
from typing import Any

from twostroke import machine
from twostroke.config import EngineConfig
from twostroke.core.errors import TwostrokeError
from twostroke.core.kv_layout import KVGroupNeed
from twostroke.cost.dimensions import heads_of
from twostroke.engine.build import choose, prepare
from twostroke.models.checkpoint import Checkpoint
from twostroke.models.spec import Attention, GatedDeltaNet, GroupedAttention, LatentAttention, Mamba2, ModelSpec


def record(checkpoint: Checkpoint, config: EngineConfig) -> dict[str, Any]:
    spec = checkpoint.spec
    moe, attention = spec.moe, _attention(spec)
    return {
        "model": checkpoint.name,
        "file": str(checkpoint.path),
        "family": spec.family,
        "num_parameters": checkpoint.num_parameters,
        "num_layers": spec.num_layers,
        "hidden_size": spec.hidden_size,
        "intermediate_size": spec.dense_width or None,
        "experts": None
        if moe is None
        else {
            "number": moe.num_experts,
            "a_token": moe.experts_per_token,
            "intermediate_size": moe.expert_intermediate_size,
        },
        "num_heads": heads_of(spec)[0],
        "num_kv_heads": 1 if attention is None else attention.num_kv_heads,
        "head_dim": heads_of(spec)[1],
        "mixers": _mixers(spec),
        "layers_that_share_kv": sum(spec.kv_source(index) != index for index in range(spec.num_layers)),
        "vocab_size": spec.vocab_size,
        "max_context": spec.max_context,
        "short_rope_context": spec.short_rope_context,
        "tied_embeddings": spec.tied_embeddings,
        "layer_groups": [
            {"content": group.content, "window": group.window, "layers": list(group.layers)}
            for group in spec.kv_groups()
        ],
        "weights": _weights(checkpoint),
        "here": _here(checkpoint, config),
    }


def _mixers(spec: ModelSpec) -> list[dict[str, Any]]:
    """How tokens meet each other, each kind with the number of its layers, in the order in which they come first."""
    counted = Counter(tuple(_numbers(layer.attention).items()) for layer in spec.layers)
    return [{**dict(kind), "layers": count} for kind, count in counted.items()]


def _numbers(own: Attention | None) -> dict[str, Any]:
    if own is None:
        return {"kind": "none"}
    if isinstance(own, GroupedAttention):
        heads = {"num_heads": own.num_heads, "num_kv_heads": own.num_kv_heads, "head_dim": own.head_dim}
        return {"kind": "grouped", **heads}
    if isinstance(own, LatentAttention):
        kept = {"latent": own.rank, "rotated": own.rotated_dim}
        return {"kind": "latent", "num_heads": own.num_heads, "head_dim": own.key_dim, **kept}
    if isinstance(own, GatedDeltaNet):
        return {
            "kind": "gated delta net",
            "num_heads": own.num_value_heads,
            "key_heads": own.num_key_heads,
            "key_dim": own.key_dim,
            "value_dim": own.value_dim,
        }
    if isinstance(own, Mamba2):
        heads = {"num_heads": own.num_heads, "head_dim": own.head_dim, "state_size": own.state_size}
        return {"kind": "mamba-2", **heads}
    return {"kind": "short convolution", "channels": own.channels, "taps": own.taps}


def _weights(checkpoint: Checkpoint) -> dict[str, Any]:
    tensors: Counter[str] = Counter()
    sizes: Counter[str] = Counter()
    for tensor in checkpoint.tensors.values():
        tensors[tensor.kind.name] += 1
        sizes[tensor.kind.name] += tensor.nbytes
    return {
        "bytes": checkpoint.weight_bytes,
        "bits_a_parameter": 8 * checkpoint.weight_bytes / checkpoint.num_parameters,
        "stored_as": {name: {"tensors": tensors[name], "bytes": sizes[name]} for name in tensors},
    }


def _here(checkpoint: Checkpoint, config: EngineConfig) -> dict[str, Any]:
    """On this machine, with the backend that would be taken."""
    found = machine.detect()
    choice = choose(checkpoint, config, found)
    factory, formats, needs, memory = choice.factory, choice.formats, choice.kv_needs, choice.memory
    context = checkpoint.spec.max_context
    return {
        "backend": factory.name,
        "reason": choice.backend_reason,
        "formats": formats.line,
        "threads": found.threads,
        "memory_of": memory.owner,
        "memory_bytes": memory.total_bytes,
        "held_weight_bytes": sum(factory.held_bytes(checkpoint, name, formats) for name in checkpoint.tensors),
        "free_beside_weights_bytes": memory.free_beside_weights_bytes,
        "kv_tokens": _kv_tokens(checkpoint, config),
        "kv_bytes_per_token": sum(need.bytes_per_token for need in needs if need.content != "state"),
        "state_bytes": sum(need.bytes_per_token for need in needs if need.content == "state"),
        "kv_bytes_of_context": sum(_tokens_kept(need, context) * need.bytes_per_token for need in needs),
    }


def _tokens_kept(need: KVGroupNeed, context: int) -> int:
    """A state counts as one."""
    if need.content == "state":
        return 1
    return context if need.window is None else min(context, need.window)


def _attention(spec: ModelSpec) -> GroupedAttention | None:
    """Of the first layer that has keys and values of each head."""
    attentions = (layer.attention for layer in spec.layers)
    return next((one for one in attentions if isinstance(one, GroupedAttention)), None)


def _kv_tokens(checkpoint: Checkpoint, config: EngineConfig) -> int:
    """Tokens of all sequences together that an engine has KV for unless told otherwise; 0: the model does not fit."""
    try:
        layout = prepare(checkpoint, config).resolved.layout
    except TwostrokeError:
        return 0
    return layout.block_size * max((group.num_blocks for group in layout.groups if not group.is_state), default=0)
