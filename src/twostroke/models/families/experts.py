"""Mixtures of experts as files describe them: config.json's settings, GGUF's keys, and the names of their tensors."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from twostroke.models.families.declaration import StoredTensor, TensorNames
from twostroke.models.families.fields import Fields, shown
from twostroke.models.spec import PLAIN_ROUTING, DenseMlp, Mlp, ModelSpec, MoeSpec, Routing

_MAX_EXPERTS = 4096
_MAX_EXPERTS_IN_ALL = 2**16
"""Over all layers: each expert is three tensors, and a hostile file must not make a list of billions."""
MAX_INTERMEDIATE = 2**20
COUNTS = ("num_experts", "num_local_experts", "n_routed_experts")
"""What config.json files call the number of experts."""

# Since transformers 5 these are a model's own tensors; what it saves, and the Hub holds, is mostly one file tensor
# for each expert.
HF_STACKED_EXPERTS = {"mlp.experts.gate_up_proj": ("gate", "up"), "mlp.experts.down_proj": ("down",)}


def each_by_itself(place: str) -> dict[str, tuple[str, ...]]:
    """A file tensor for each matrix of each expert, as tools that quantise write them where models stack them."""
    return {f"{place}.{{}}.{name}_proj.weight": (name,) for name in ("gate", "up", "down")}


def mlps_from_config(config: Fields, num_layers: int, dense: DenseMlp) -> tuple[Mlp, ...]:
    """Of each layer its experts, or the dense MLP where it has none. Whether shares are scaled to a sum of 1 is left to
    the family."""
    name = config.present(*COUNTS)
    num_experts = config.integer(name, 0, _MAX_EXPERTS, 0)
    if num_experts == 0:
        return (dense,) * num_layers
    # Qwen says num_experts and Mixtral num_local_experts; transformers 5 writes the latter for both.
    old, new = config.get("num_experts"), config.get("num_local_experts")
    if old is not None and new is not None and old != new:
        raise config.error("num_experts", f"is {shown(old)}, and num_local_experts is {shown(new)}")
    _check_total(config, name, num_experts, num_layers)
    size = config.integer("moe_intermediate_size", 1, MAX_INTERMEDIATE, dense.intermediate_size)
    shared = _shared_size(config, size)
    moe = MoeSpec(
        num_experts=num_experts,
        experts_per_token=config.integer(config.present("num_experts_per_tok", "experts_per_token"), 1, num_experts),
        expert_intermediate_size=size,
        activation=dense.activation,
        shared=replace(dense, intermediate_size=shared) if shared else None,
    )
    sparse = _sparse_layers(config, num_layers)
    return tuple(moe if index in sparse else dense for index in range(num_layers))


HANDLED = ("num_experts", "num_local_experts")
"""What a family reads that has experts."""


def required(spec: ModelSpec, config: Fields, *, normalise_weights: bool = True) -> ModelSpec:
    """The spec of a family that is nothing without experts; `normalise_weights`: in those of all layers."""
    if spec.moe is None:
        raise config.error(config.present("num_local_experts", "num_experts"), "must be 1 at least in some layer")
    return with_experts(spec, normalise_weights=normalise_weights)


def with_experts(spec: ModelSpec, **changes: Any) -> ModelSpec:
    """The spec with something else about the experts of every layer that has any."""
    layers = (
        layer if layer.moe is None else replace(layer, mlp=replace(layer.moe, **changes)) for layer in spec.layers
    )
    return replace(spec, layers=tuple(layers))


def with_routing(
    spec: ModelSpec,
    config: Fields,
    routing: Routing = PLAIN_ROUTING,
    *,
    groups: tuple[int, int] | None,
    normalise_weights: bool,
) -> ModelSpec:
    """DeepSeek's manner: experts in `n_group` groups, of which `topk_group` are chosen from (`groups` is what silence
    means; None: there are no groups), and a scale of all shares."""
    moe = spec.moe
    if moe is None:
        return spec
    number, chosen = 1, 1
    if groups is not None:
        number = config.integer("n_group", 1, moe.num_experts, groups[0])
        chosen = config.integer("topk_group", 1, number, min(groups[1], number))
    scale = config.number("routed_scaling_factor", 1e-6, 1e6, routing.share_scale)
    grouped = grouped_routing(replace(routing, share_scale=scale), moe, config, "n_group", number, chosen)
    return with_experts(spec, routing=grouped, normalise_weights=normalise_weights)


def grouped_routing(routing: Routing, moe: MoeSpec, fields: Fields, name: str, number: int, chosen: int) -> Routing:
    """With experts in `number` groups, of which `chosen` are chosen from; `name`: of the setting that says so."""
    if chosen == number:  # all groups are chosen from, which is as if there were none
        return replace(routing, num_groups=1, groups_per_token=1, ranked_by=1)
    if moe.num_experts % number:
        raise fields.error(name, f"is {number}, and the {moe.num_experts} experts are not a multiple of it")
    size = moe.num_experts // number
    if size < routing.ranked_by or chosen * size < moe.experts_per_token:
        raise fields.error(name, f"is {number}, too many for {moe.experts_per_token} of {moe.num_experts} experts")
    return replace(routing, num_groups=number, groups_per_token=chosen)


def _shared_size(config: Fields, expert_size: int) -> int:
    """How wide the MLP is that every token meets beside its experts; 0: there is none."""
    by_count = config.integer("n_shared_experts", 0, _MAX_EXPERTS, 0) * expert_size
    return config.integer("shared_expert_intermediate_size", 0, MAX_INTERMEDIATE, by_count)


def _sparse_layers(config: Fields, num_layers: int) -> set[int]:
    """Those that have experts."""
    if config.get("mlp_layer_types") is not None:
        kinds = config.strings("mlp_layer_types", num_layers)
        for kind in kinds:
            if kind not in ("dense", "sparse"):
                raise config.error("mlp_layer_types", f"holds {shown(kind)}, which is not supported")
        return {index for index, kind in enumerate(kinds) if kind == "sparse"}
    first = config.integer("first_k_dense_replace", 0, num_layers, 0)
    step = config.integer(config.present("moe_layer_freq", "decoder_sparse_step"), 1, 1024, 1)
    dense = config.integers("mlp_only_layers", 0, num_layers)
    # Qwen counts layers from 1 for its step, DeepSeek from 0; with a step of 1, all there is in use, they agree.
    return {index for index in range(first, num_layers) if (index + 1) % step == 0} - set(dense)


def has_experts(fields: Fields) -> bool:
    """Whether a GGUF file counts experts; most that have none say nothing of them."""
    return fields.get("expert_count") not in (None, 0)


def mlps_from_gguf(
    fields: Fields,
    tensors: Mapping[str, StoredTensor],
    num_layers: int,
    dense: DenseMlp,
    handled: Sequence[str] = (),
    ranked_by: int | None = None,
) -> tuple[Mlp, ...]:
    """llama.cpp scales the chosen shares to a sum of 1 in these architectures, unless a key says otherwise; of
    DeepSeek's it does where the key says so. `handled` names features that are refused unless the calling family has
    them. `ranked_by`: how many of its scores rank a group of experts, where the family has its own way."""
    num_experts = fields.integer("expert_count", 1, _MAX_EXPERTS)
    _check_total(fields, "expert_count", num_experts, num_layers)
    first = fields.integer("leading_dense_block_count", 0, num_layers, 0)
    if first < num_layers and f"blk.{first}.ffn_gate_inp.weight" not in tensors:
        raise fields.error("expert_count", f"is {num_experts}, and the file holds no router in its first layer")
    size = fields.integer("expert_feed_forward_length", 1, MAX_INTERMEDIATE, dense.intermediate_size)
    is_deepseek = fields.get("attention.kv_lora_rank") is not None
    if not is_deepseek and f"blk.{first}.exp_probs_b.bias" not in tensors:
        # 1 is a softmax, which is what these architectures have without a word, too.
        neutral = {"expert_gating_func": (0, 1), "expert_weights_scale": (0, 0.0, 1, 1.0)}
        neutral |= dict.fromkeys(("expert_shared_count", "expert_shared_feed_forward_length"), (0,))
        fields.refuse_unless({name: values for name, values in neutral.items() if name not in handled})
    by_count = fields.integer("expert_shared_count", 0, _MAX_EXPERTS, 0) * size
    shared = fields.integer("expert_shared_feed_forward_length", 0, MAX_INTERMEDIATE, by_count)
    moe = MoeSpec(
        num_experts=num_experts,
        experts_per_token=fields.integer("expert_used_count", 1, num_experts),
        expert_intermediate_size=size,
        normalise_weights=fields.flag("expert_weights_norm", default=not is_deepseek),
        activation=dense.activation,
        shared=replace(dense, intermediate_size=shared) if shared else None,
    )
    moe = replace(moe, routing=_routing_from_gguf(fields, tensors, moe, first, ranked_by))
    return (dense,) * first + (moe,) * (num_layers - first)


GGUF_SIGMOID = 2
"""As `expert_gating_func`. 1 is a softmax, which is DeepSeek V2's without a word, too."""


def _routing_from_gguf(
    fields: Fields, tensors: Mapping[str, StoredTensor], moe: MoeSpec, first: int, ranked_by: int | None
) -> Routing:
    fields.refuse_unless({"expert_gating_func": (0, 1, GGUF_SIGMOID)})
    has_correction = f"blk.{first}.exp_probs_b.bias" in tensors
    routing = Routing(
        scoring="sigmoid" if fields.get("expert_gating_func") == GGUF_SIGMOID else "softmax",
        has_correction=has_correction,
        ranked_by=ranked_by or (2 if has_correction else 1),
        share_scale=fields.number("expert_weights_scale", 0.0, 1e6, 1.0) or 1.0,
    )
    number = fields.integer("expert_group_count", 0, moe.num_experts, 1) or 1
    chosen = fields.integer("expert_group_used_count", 0, number, 1) or 1
    return grouped_routing(routing, moe, fields, "expert_group_count", number, chosen)


def with_gguf_experts(names: TensorNames) -> TensorNames:
    """Files hold a layer's experts in three stacks, or gates and ups in one; those of early 2024 a tensor for each."""
    return replace(
        names,
        layer={
            **names.layer,
            "ffn_gate_inp.weight": ("router",),
            "exp_probs_b.bias": ("router_correction",),
            **{f"ffn_latent_{name}.weight": (f"latent_{name}",) for name in ("down", "up")},
            **{f"ffn_{name}_shexp.weight": (f"shared.{name}",) for name in ("gate", "up", "down")},
        },
        experts={f"ffn_{name}.{{}}.weight": (name,) for name in ("gate", "up", "down")},
        stacked_experts={
            "ffn_gate_up_exps.weight": ("gate", "up"),
            **{f"ffn_{name}_exps.weight": (name,) for name in ("gate", "up", "down")},
        },
    )


def _check_total(fields: Fields, name: str, num_experts: int, num_layers: int) -> None:
    if num_experts * num_layers > _MAX_EXPERTS_IN_ALL:
        raise fields.error(name, f"is {num_experts}, too many for {num_layers} layers")
