"""BERT: an encoder. Tokens see each other both ways, positions are looked up, norms with biases stand behind blocks."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from twostroke.core.errors import ModelError
from twostroke.models.families import decoder
from twostroke.models.families.declaration import Family, StoredTensor, TensorNames
from twostroke.models.families.experts import MAX_INTERMEDIATE
from twostroke.models.families.fields import Fields, shown
from twostroke.models.rope_spec import RopeSpec
from twostroke.models.spec import DenseMlp, GroupedAttention, LayerSpec, LearntPlaces, ModelSpec

_EXACT, _ACTIVATIONS = "gelu", ("gelu", "gelu_new", "gelu_pytorch_tanh")
_NEUTRAL = {
    "position_embedding_type": ("absolute",),
    "is_decoder": (False,),
    "add_cross_attention": (False,),
    "is_encoder_decoder": (False,),
}
_NO_ROPE = RopeSpec(1.0, 0)
_MAX_POSITIONS = 2**22


def encoder_spec(config: Fields, family: str, first_position: int = 0) -> ModelSpec:
    """`first_position`: the row of the table that the first token's is."""
    decoder.refuse_quantised(config)
    config.refuse_unless(_NEUTRAL)
    activation = config.text("hidden_act", "gelu")
    if activation not in _ACTIVATIONS:
        config.refuse("hidden_act", f"is {shown(activation)}; the supported ones are {', '.join(_ACTIVATIONS)}")
    hidden = config.integer("hidden_size", 1, decoder.MAX_HIDDEN)
    num_heads = config.integer("num_attention_heads", 1, decoder.MAX_HEADS)
    if hidden % num_heads:
        raise config.error("num_attention_heads", f"is {num_heads}, which the hidden size {hidden} is no multiple of")
    attention = GroupedAttention(
        num_heads, num_heads, hidden // num_heads, _NO_ROPE, qkv_bias=True, output_bias=True, is_causal=False
    )
    mlp = DenseMlp(
        config.integer("intermediate_size", 1, MAX_INTERMEDIATE),
        "gelu_tanh",
        is_gated=False,
        has_bias=True,
        is_exact=activation == _EXACT,
    )
    places = LearntPlaces(
        config.integer("max_position_embeddings", first_position + 1, _MAX_POSITIONS),
        first_position,
        config.integer("type_vocab_size", 1, 2**10),
    )
    layer = LayerSpec(attention, mlp, norm_bias=True, norms_after=True)
    return ModelSpec(
        family=family,
        vocab_size=config.integer("vocab_size", 1, decoder.MAX_VOCAB),
        hidden_size=hidden,
        max_context=places.max_context,
        layers=(layer,) * config.integer("num_hidden_layers", 1, decoder.MAX_LAYERS),
        norm_eps=config.number("layer_norm_eps", 0.0, 1.0),
        has_output=False,
        has_final_norm=False,
        places=places,
    )


def _from_config(config: Fields) -> ModelSpec:
    return encoder_spec(config.over({"layer_norm_eps": 1e-12, "type_vocab_size": 2}), "bert")


_GGUF_KEYS = {
    "hidden_size": "embedding_length",
    "num_attention_heads": "attention.head_count",
    "intermediate_size": "feed_forward_length",
    "num_hidden_layers": "block_count",
    "layer_norm_eps": "attention.layer_norm_epsilon",
    "is_decoder": "attention.causal",
}
_GGUF_TABLES = {
    "vocab_size": "token_embd.weight",
    "type_vocab_size": "token_types.weight",
    "max_position_embeddings": "position_embd.weight",
}
"""Sizes that files have as the rows of tensors."""


def _from_gguf(fields: Fields, tensors: Mapping[str, StoredTensor]) -> ModelSpec:
    rows = {}
    for name, tensor in _GGUF_TABLES.items():
        if tensor not in tensors or len(tensors[tensor].shape) != 2:
            raise ModelError(f"{fields.source}: the tensor {tensor} is missing, or no matrix")
        rows[fields.prefix + name] = tensors[tensor].shape[0]
    return encoder_spec(replace(fields, values={**fields.values, **rows}, names=_GGUF_KEYS), "bert")


def _with_parts(stored: str, canonical: str, weight: str = "weight", bias: str = "bias") -> dict[str, tuple[str, ...]]:
    return {f"{stored}.{weight}": (canonical,), f"{stored}.{bias}": (f"{canonical}_bias",)}


def _norm(stored: str, canonical: str) -> dict[str, tuple[str, ...]]:
    """The oldest files have TensorFlow's names for it."""
    return _with_parts(stored, canonical) | _with_parts(stored, canonical, "gamma", "beta")


ENCODER_NAMES = TensorNames(
    layer_prefix="encoder.layer.{}.",
    whole={
        "embeddings.word_embeddings.weight": ("embedding",),
        "embeddings.position_embeddings.weight": ("position_embedding",),
        "embeddings.token_type_embeddings.weight": ("text_embedding",),
        **_norm("embeddings.LayerNorm", "embedding_norm"),
    },
    layer={
        **_with_parts("attention.self.query", "q"),
        **_with_parts("attention.self.key", "k"),
        **_with_parts("attention.self.value", "v"),
        **_with_parts("attention.output.dense", "o"),
        **_norm("attention.output.LayerNorm", "attention_norm"),
        **_with_parts("intermediate.dense", "up"),
        **_with_parts("output.dense", "down"),
        **_norm("output.LayerNorm", "mlp_norm"),
    },
    # Heads of other uses; a classifier's matrices are read where it is one.
    ignored_prefixes=("pooler.", "bert.pooler.", "roberta.pooler.", "cls.", "lm_head.", "classifier."),
    renamed_prefixes={"bert.": "", "roberta.": ""},
)
_GGUF_NAMES = TensorNames(
    layer_prefix="blk.{}.",
    whole={
        "token_embd.weight": ("embedding",),
        "position_embd.weight": ("position_embedding",),
        "token_types.weight": ("text_embedding",),
        **_with_parts("token_embd_norm", "embedding_norm"),
    },
    layer={
        **_with_parts("attn_q", "q"),
        **_with_parts("attn_k", "k"),
        **_with_parts("attn_v", "v"),
        **_with_parts("attn_output", "o"),
        **_with_parts("attn_output_norm", "attention_norm"),
        **_with_parts("ffn_up", "up"),
        **_with_parts("ffn_down", "down"),
        **_with_parts("layer_output_norm", "mlp_norm"),
    },
    ignored_prefixes=("cls.", "pooler."),
)
_HF = ("BertModel", "BertForMaskedLM", "BertForSequenceClassification")
FAMILY = Family(
    "bert",
    _HF,
    ("bert",),
    _from_config,
    _from_gguf,
    hf_names=ENCODER_NAMES,
    gguf_names=_GGUF_NAMES,
    classifiers={"BertForSequenceClassification": (("bert.pooler.dense", "tanh"), ("classifier", "identity"))},
)
