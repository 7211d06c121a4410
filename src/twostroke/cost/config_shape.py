"""From any config.json to a model's matrices and its ModelShape, without its weights. Counts what the families of
today's decoders multiply; a family it does not know is counted as a Llama-like decoder, and says so."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from twostroke.core.errors import ModelError
from twostroke.cost.config_fields import ConfigFields
from twostroke.cost.dimensions import Dimensions, Matrix, Part
from twostroke.cost.model_shape import LatentAttention, ModelShape

# Far above any model there is: what keeps a hostile file from asking for endless work.
MAX_LAYERS = 1024
_MAX_WIDTH = 2**20
_MAX_HEADS = 4096
_MAX_VOCAB = 2**22
_MAX_CONTEXT = 2**30
_MAX_EXPERTS = 4096

_GEMMA3 = {"vocab_size": 262_208, "num_attention_heads": 8, "num_key_value_heads": 4, "head_dim": 256}


@dataclass(frozen=True, slots=True)
class _Family:
    """Where a family departs from Llama."""

    qkv_bias: bool = False
    norms_per_layer: int = 2
    qk_norm: bool = False
    tied: bool = False
    has_gate: bool = True
    defaults: Mapping[str, Any] | None = None
    """What its config leaves out."""
    window_rule: str = "all"
    """Which layers slide where no `layer_types` says it: all, upper, every other one, or five in six."""


_FAMILIES = {
    "llama": _Family(window_rule="none"),
    "smollm3": _Family(window_rule="none"),
    "mistral": _Family(),
    "mixtral": _Family(),
    "qwen2": _Family(qkv_bias=True, window_rule="upper"),
    "qwen2_moe": _Family(qkv_bias=True, window_rule="upper"),
    "qwen3": _Family(qk_norm=True, window_rule="upper", defaults={"head_dim": 128}),
    "qwen3_moe": _Family(qk_norm=True, window_rule="upper", defaults={"head_dim": 128}),
    "gemma": _Family(tied=True, window_rule="none", defaults={"head_dim": 256}),
    "gemma2": _Family(norms_per_layer=4, tied=True, window_rule="alternate"),
    "gemma3": _Family(norms_per_layer=4, qk_norm=True, tied=True, window_rule="sixth", defaults=_GEMMA3),
    "phi3": _Family(),
    "phi": _Family(has_gate=False, window_rule="none"),
    "gpt_oss": _Family(window_rule="alternate", defaults={"attention_bias": True}),
    "deepseek_v2": _Family(window_rule="none"),
    "deepseek_v3": _Family(window_rule="none"),
}
_EXPERT_COUNTS = ("num_local_experts", "num_experts", "n_routed_experts")
_RECURRENT = ("linear_num_key_heads", "mamba_d_state", "ssm_state_size", "mamba_num_heads", "rwkv_hidden_size")


def shape_from_config(
    config: Mapping[str, Any],
    *,
    weight_bits: float,
    kv_bits: float,
    head_bits: float | None = None,
    expert_bits: float | None = None,
) -> ModelShape:
    """Of the text half of a model. What the bits are of: `Dimensions.shape`."""
    return dimensions_from_config(config).shape(
        weight_bits=weight_bits, kv_bits=kv_bits, head_bits=head_bits, expert_bits=expert_bits
    )


def dimensions_from_config(config: Mapping[str, Any]) -> Dimensions:
    if not isinstance(config, Mapping):
        raise ModelError("config.json must hold an object")
    config = _text_half(config)
    name = ConfigFields(config).text("model_type", _by_architecture(config)).removesuffix("_text")
    family = _FAMILIES.get(name)
    given = {key: value for key, value in config.items() if value is not None}
    fields = ConfigFields({**((family.defaults if family else None) or {}), **given})
    for key in _RECURRENT:
        if fields.get(key) is not None:
            raise ModelError(f"config.json: {key} tells of layers without attention, whose cost is not counted yet")
    known = family or _Family(window_rule="none")
    num_layers = fields.integer("num_hidden_layers", MAX_LAYERS)
    is_latent = fields.get("kv_lora_rank") is not None
    base = _latent_attention(fields, num_layers) if is_latent else _attention(fields, num_layers, known, name)
    matrices, vectors, experts = _mlps(fields, num_layers, known, name)
    head = Matrix("head", base.vocab_size, base.hidden_size, 1, Part.HEAD)
    is_phi = name == "phi"  # its head has a bias, its one norm a layer and the last one are LayerNorms with biases
    norms = base.hidden_size * (2 * (num_layers + 1) if is_phi else known.norms_per_layer * num_layers + 1)
    return replace(
        base,
        family=name,
        matrices=(*base.matrices, *matrices, head),
        vector_parameters=base.vector_parameters + vectors + norms + (base.vocab_size if is_phi else 0),
        windows=_windows(fields, num_layers, known, base.max_context),
        tied_embeddings=fields.flag("tie_word_embeddings", known.tied),
        num_experts=experts.num_experts,
        experts_per_token=experts.per_token,
        expert_vector_parameters=experts.vector_parameters,
        is_assumed=family is None,
    )


def _text_half(config: Mapping[str, Any]) -> Mapping[str, Any]:
    text = config.get("text_config")
    if not isinstance(text, Mapping):
        return config
    outer = {key: config[key] for key in ("tie_word_embeddings",) if config.get(key) is not None}
    return {**outer, **text}


def _by_architecture(config: Mapping[str, Any]) -> str:
    """From "Qwen3MoeForCausalLM" to "qwen3_moe", for configs that do not name their type."""
    names = config.get("architectures")
    first = names[0] if isinstance(names, list) and names and isinstance(names[0], str) else ""
    stem = first.split("For")[0]
    return "".join(f"_{char.lower()}" if char.isupper() and index else char.lower() for index, char in enumerate(stem))


def _attention(fields: ConfigFields, num_layers: int, family: _Family, name: str) -> Dimensions:
    hidden = fields.integer("hidden_size", _MAX_WIDTH)
    num_heads = fields.integer("num_attention_heads", _MAX_HEADS)
    num_kv_heads = fields.integer("num_key_value_heads", _MAX_HEADS, num_heads)
    head_dim = fields.integer("head_dim", _MAX_WIDTH, max(1, hidden // num_heads))
    if num_heads % num_kv_heads:
        raise ModelError(f"config.json: {num_heads} heads are not a multiple of num_key_value_heads, {num_kv_heads}")
    query, kv = num_heads * head_dim, num_kv_heads * head_dim
    matrices = (
        Matrix("q", query, hidden, num_layers),
        Matrix("k", kv, hidden, num_layers),
        Matrix("v", kv, hidden, num_layers),
        Matrix("o", hidden, query, num_layers),
    )
    has_bias = fields.flag("attention_bias", default=name == "phi")
    per_layer = query + 2 * kv if has_bias or family.qkv_bias else 0
    per_layer += hidden if has_bias else 0
    per_layer += 2 * head_dim if family.qk_norm else 0
    per_layer += num_heads if name == "gpt_oss" else 0  # attention sinks
    return Dimensions(
        family=name,
        hidden_size=hidden,
        vocab_size=fields.integer("vocab_size", _MAX_VOCAB),
        max_context=_max_context(fields),
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        matrices=matrices,
        vector_parameters=num_layers * per_layer,
        windows=(),
        kv_values_per_layer=2 * kv,
        tied_embeddings=False,
    )


def _latent_attention(fields: ConfigFields, num_layers: int) -> Dimensions:
    """DeepSeek's: q through a low rank or not, k and v from one latent vector and a small rotated part."""
    hidden = fields.integer("hidden_size", _MAX_WIDTH)
    num_heads = fields.integer("num_attention_heads", _MAX_HEADS)
    rank = fields.integer("kv_lora_rank", _MAX_WIDTH)
    plain, rotated = fields.integer("qk_nope_head_dim", _MAX_WIDTH), fields.integer("qk_rope_head_dim", _MAX_WIDTH)
    value = fields.integer("v_head_dim", _MAX_WIDTH)
    query = num_heads * (plain + rotated)
    query_rank = fields.integer("q_lora_rank", _MAX_WIDTH) if fields.get("q_lora_rank") is not None else None
    queries = (
        (Matrix("q", query, hidden, num_layers),)
        if query_rank is None
        else (Matrix("q_a", query_rank, hidden, num_layers), Matrix("q_b", query, query_rank, num_layers))
    )
    expansion = Matrix("kv_b", num_heads * (plain + value), rank, num_layers)
    return Dimensions(
        family="",
        hidden_size=hidden,
        vocab_size=fields.integer("vocab_size", _MAX_VOCAB),
        max_context=_max_context(fields),
        num_heads=num_heads,
        num_kv_heads=1,
        head_dim=plain + rotated,
        matrices=(
            *queries,
            Matrix("kv_a", rank + rotated, hidden, num_layers),
            expansion,
            Matrix("o", hidden, num_heads * value, num_layers),
        ),
        vector_parameters=num_layers * (rank + (query_rank or 0)),
        windows=(),
        kv_values_per_layer=rank + rotated,
        tied_embeddings=False,
        latent=LatentAttention(
            expanded_per_pair=plain + rotated + value,
            absorbed_per_pair=2 * rank + rotated,
            expansion_per_position=expansion.outputs * expansion.inputs,
        ),
    )


@dataclass(frozen=True, slots=True)
class _Experts:
    num_experts: int = 0
    per_token: int = 0
    vector_parameters: int = 0


def _mlps(fields: ConfigFields, num_layers: int, family: _Family, name: str) -> tuple[list[Matrix], int, _Experts]:
    """The matrices of all layers' MLPs and experts, the vectors that every token meets, and the experts' count."""
    hidden = fields.integer("hidden_size", _MAX_WIDTH)
    intermediate = fields.integer("intermediate_size", _MAX_WIDTH)
    num_experts = fields.first(_EXPERT_COUNTS, _MAX_EXPERTS, 0, low=0)
    sparse = _sparse_layers(fields, num_layers) if num_experts else 0
    matrices = _mlp("", hidden, intermediate, num_layers - sparse, Part.LAYER, family.has_gate)
    vectors = 0 if family.has_gate else num_layers * (intermediate + hidden)
    if fields.flag("mlp_bias", default=False):
        vectors += (num_layers - sparse) * (2 * intermediate + hidden)
    if not sparse:
        return matrices, vectors, _Experts()
    size = fields.integer("moe_intermediate_size", _MAX_WIDTH, intermediate)
    matrices += _mlp("expert ", hidden, size, sparse * num_experts, Part.EXPERT, family.has_gate)
    matrices.append(Matrix("router", num_experts, hidden, sparse))
    if (shared := _shared_size(fields, size)) > 0:
        matrices += _mlp("shared expert ", hidden, shared, sparse, Part.LAYER, family.has_gate)
    if name == "qwen2_moe":
        matrices.append(Matrix("shared expert gate", 1, hidden, sparse))
    expert_vectors = 0
    if name == "gpt_oss":
        vectors += sparse * num_experts  # the router's bias
        expert_vectors = sparse * num_experts * (2 * size + hidden)
    if name == "deepseek_v3":
        vectors += sparse * num_experts  # the router's correction, which balances the experts
    per_token = fields.first(("num_experts_per_tok", "experts_per_token"), num_experts)
    return matrices, vectors, _Experts(num_experts, per_token, expert_vectors)


def _mlp(prefix: str, hidden: int, size: int, count: int, part: Part, has_gate: bool) -> list[Matrix]:
    if count == 0:
        return []
    names = ("gate", "up") if has_gate else ("up",)
    matrices = [Matrix(f"{prefix}{name}", size, hidden, count, part) for name in names]
    return [*matrices, Matrix(f"{prefix}down", hidden, size, count, part)]


def _shared_size(fields: ConfigFields, expert_size: int) -> int:
    """How wide the MLP is that every token meets beside its experts; 0: there is none."""
    if (size := fields.get("shared_expert_intermediate_size")) is not None:
        return fields.integer("shared_expert_intermediate_size", _MAX_WIDTH, low=0) if size else 0
    return fields.integer("n_shared_experts", _MAX_EXPERTS, 0, low=0) * expert_size


def _sparse_layers(fields: ConfigFields, num_layers: int) -> int:
    dense_first = fields.integer("first_k_dense_replace", num_layers, 0, low=0)
    frequency = fields.first(("moe_layer_freq", "decoder_sparse_step"), MAX_LAYERS, 1)
    dense = set(fields.integers("mlp_only_layers", num_layers))
    # Qwen counts layers from 1 for its step, DeepSeek from 0; with a step of 1, all there is in use, they agree.
    return sum(1 for index in range(dense_first, num_layers) if index not in dense and (index + 1) % frequency == 0)


def _max_context(fields: ConfigFields) -> int | None:
    if fields.get("max_position_embeddings") is None:
        return None
    return fields.integer("max_position_embeddings", _MAX_CONTEXT)


def _windows(
    fields: ConfigFields, num_layers: int, family: _Family, max_context: int | None
) -> tuple[tuple[int | None, int], ...]:
    kinds = fields.strings("layer_types", num_layers)
    width = fields.integer("sliding_window", _MAX_CONTEXT) if fields.get("sliding_window") else None
    if kinds is not None:
        for kind in kinds:
            if kind not in ("full_attention", "sliding_attention"):
                raise ModelError(f"config.json: layer_types holds {kind[:40]!r}, whose cost is not counted yet")
        num_sliding = kinds.count("sliding_attention")
    else:
        num_sliding = _sliding_by_rule(fields, num_layers, family.window_rule) if width is not None else 0
    if num_sliding and width is None:
        raise ModelError("config.json: sliding_window is missing, and some layers slide")
    if width is not None and max_context is not None and width >= max_context:
        num_sliding = 0  # a window that no context outgrows is full attention
    groups = [(None, num_layers - num_sliding), (width, num_sliding)]
    return tuple((window, count) for window, count in groups if count)


def _sliding_by_rule(fields: ConfigFields, num_layers: int, rule: str) -> int:
    if rule == "all":
        return num_layers
    if rule == "alternate":
        return num_layers - num_layers // 2  # the first slides
    if rule == "sixth":
        return num_layers - num_layers // fields.integer("sliding_window_pattern", MAX_LAYERS, 6)
    if rule == "upper" and fields.flag("use_sliding_window", default=False):
        return max(0, num_layers - fields.integer("max_window_layers", MAX_LAYERS, 28, low=0))
    return 0
