"""EAGLE-3 heads as published: one decoder layer that reads the embedding of a token beside hidden states of the target,
which `fc` joins into one. Read in EAGLE's own form (`midlayer.*`), in that of the speculators library
(`transformer_layer_config`, `layers.0.*`), and with the norms that later versions added."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt

from twostroke.core.errors import ModelError
from twostroke.models.families import llama, qwen3
from twostroke.models.families.fields import Fields, shown
from twostroke.models.heads.files import canonical, check_shapes, head_config, head_tensors, refuse_foreign
from twostroke.models.spec import LayerSpec, ModelSpec, Shapes
from twostroke.models.weights.safetensors import Tables
from twostroke.models.weights.tensor import WeightTensor

_MAX_SIZE = 2**22
_LAYER_FAMILIES = {"llama": llama.FAMILY, "qwen3": qwen3.FAMILY}
_SPECULATORS_DEFAULTS = {"rms_norm_eps": 1e-6, "hidden_act": "silu"}
"""What the library leaves out of a config where it is as transformers has it."""
_WHOLE = {
    "fc.weight": "fc",
    "norm.weight": "final_norm",
    "lm_head.weight": "output",
    "embed_tokens.weight": "embedding",
    "input_norm.weight": "input_norm",
}
_LAYER = {
    "input_layernorm.weight": "embedding_norm",
    "hidden_norm.weight": "hidden_norm",
    "post_attention_layernorm.weight": "mlp_norm",
    "self_attn.q_norm.weight": "q_norm",
    "self_attn.k_norm.weight": "k_norm",
    **{f"self_attn.{name}_proj.weight": name for name in "qkvo"},
    **{f"self_attn.{name}_proj.bias": f"{name}_bias" for name in "qkvo"},
    **{f"mlp.{name}_proj.weight": name for name in ("gate", "up", "down")},
}
_LAYER_PREFIXES = ("midlayer.", "layers.0.")
_UNUSED = ("verifier_norm.weight", "verifier_lm_head.weight", "rotary_emb.inv_freq")


@dataclass(frozen=True, slots=True)
class Eagle3Spec:
    layer: LayerSpec
    hidden_size: int
    target_hidden_size: int
    vocab_size: int
    """Of the target."""
    draft_vocab_size: int
    taps: tuple[int, ...]
    """Hidden states of the target that are read: what enters its layer of this index, as a residual."""
    norm_eps: float
    max_context: int
    norm_before_residual: bool = False
    """What attention's output joins is the normed hidden state."""
    norm_before_fc: bool = False
    """One norm over all hidden states together, before `fc`."""
    fc_norm: bool = False
    """A norm for each of them."""
    norm_output: bool = False
    """What the layer gives is normed before it is read again."""

    def tensor_shapes(self) -> Shapes:
        hidden, joined = self.hidden_size, len(self.taps) * self.target_hidden_size
        shapes = self.layer.tensor_shapes(hidden)
        del shapes["attention_norm"]
        shapes |= {name: (shapes[name][0], 2 * hidden) for name in "qkv"}
        shapes |= {"fc": (hidden, joined), "embedding_norm": (hidden,), "hidden_norm": (hidden,)}
        if self.norm_before_fc:
            shapes["input_norm"] = (joined,)
        if self.fc_norm:
            shapes |= {f"fc_norm.{index}": (self.target_hidden_size,) for index in range(len(self.taps))}
        return shapes | {"final_norm": (hidden,)}

    def shared_shapes(self) -> Shapes:
        """What a head may leave to its target."""
        return {
            "embedding": (self.vocab_size, self.hidden_size),
            "output": (self.draft_vocab_size, self.hidden_size),
        }


@dataclass(frozen=True, slots=True)
class Eagle3Head:
    source: str
    spec: Eagle3Spec
    tensors: Mapping[str, WeightTensor]
    """By canonical name; without `embedding` or `output` where the target's are meant."""
    target_ids: npt.NDArray[np.int64]  # [draft vocab] the target's token for each of the head's


def load_eagle3(folder: Path | str, target: ModelSpec) -> Eagle3Head:
    """Raises ModelError where it cannot be read, or was not made for such a target."""
    folder = Path(folder)
    config = head_config(folder, "EAGLE-3 head")
    spec = _spec(config, target)
    stored, tables = head_tensors(folder)
    source = str(folder)
    kept = {name: tensor for name, tensor in stored.items() if name.removeprefix("model.") not in _UNUSED}
    tensors = canonical(source, kept, _canonical_name)
    check_shapes(source, tensors, spec.tensor_shapes(), spec.shared_shapes())
    if "embedding" not in tensors and spec.hidden_size != target.hidden_size:
        raise ModelError(f"{source}: it has no embedding, and the model's is not as wide as the head's hidden state")
    is_shared = spec.draft_vocab_size == target.vocab_size and spec.hidden_size == target.hidden_size
    if "output" not in tensors and not is_shared:
        raise ModelError(f"{source}: the tensor output is missing, and the model's cannot stand for it")
    return Eagle3Head(source, spec, tensors, _target_ids(source, spec, tables))


def _canonical_name(stored_name: str) -> str | None:
    name = stored_name.removeprefix("model.")
    if name.startswith("fc_norm.") and name.endswith(".weight"):
        return name.removesuffix(".weight")
    for prefix in _LAYER_PREFIXES:
        if name.startswith(prefix):
            return _LAYER.get(name.removeprefix(prefix))
    return _WHOLE.get(name)


def _spec(config: Fields, target: ModelSpec) -> Eagle3Spec:
    inner = config.section("transformer_layer_config")
    layer_config = config if inner is None else inner.over(_SPECULATORS_DEFAULTS)
    _refuse_other_kinds(config)
    kind = layer_config.text("model_type", "llama")
    family = _LAYER_FAMILIES.get(kind, llama.FAMILY)
    # A head's config may name the target's special tokens, tie nothing and so on: only its layer is read.
    own = family.spec_from_config(layer_config.without("tie_word_embeddings"))
    if own.num_layers != 1:
        raise config.error("num_hidden_layers", f"is {own.num_layers}, and heads of one layer are read")
    target_hidden = config.get("target_hidden_size")
    target_size = own.hidden_size if target_hidden is None else config.integer("target_hidden_size", 1, _MAX_SIZE)
    refuse_foreign(config.source, "hidden size", target_size, target.hidden_size)
    refuse_foreign(config.source, "vocabulary", own.vocab_size, target.vocab_size)
    norm_before_fc, fc_norm = config.flag("norm_before_fc", False), config.flag("fc_norm", False)
    if norm_before_fc and fc_norm:
        raise config.error("fc_norm", "and norm_before_fc are both true, and one of them can hold")
    return Eagle3Spec(
        layer=own.layers[0],
        hidden_size=own.hidden_size,
        target_hidden_size=target_size,
        vocab_size=own.vocab_size,
        draft_vocab_size=config.integer("draft_vocab_size", 1, own.vocab_size, own.vocab_size),
        taps=_taps(config, target.num_layers),
        norm_eps=own.norm_eps,
        max_context=own.max_context,
        norm_before_residual=config.flag("norm_before_residual", False),
        norm_before_fc=norm_before_fc,
        fc_norm=fc_norm,
        norm_output=config.flag("norm_output", False),
    )


def _refuse_other_kinds(config: Fields) -> None:
    algorithm = config.get("speculators_model_type")
    if algorithm is not None and algorithm != "eagle3":
        raise config.error("speculators_model_type", f"is {shown(algorithm)}, and an EAGLE-3 head is asked for")
    for name in ("mask_token_id", "pard_token", "block_size"):
        if config.get(name) is not None:
            raise config.error(name, "tells of a head that drafts several tokens at once, which is not computed yet")
    medusa = [name for name in ("medusa_num_heads", "num_lookahead_tokens") if config.get(name) is not None]
    if medusa:
        raise config.error(medusa[0], "tells of another kind of head than EAGLE-3's")


def _taps(config: Fields, num_layers: int) -> tuple[int, ...]:
    """At the top of a config, an id is of what enters a layer (0 is the embedding). Nested under `eagle_config`, as
    SpecForge writes it for SGLang, it is of what leaves a layer."""
    name = "eagle_aux_hidden_state_layer_ids"
    taps = config.integers(name, 0, num_layers)
    nested = config.section("eagle_config")
    if not taps and nested is not None:
        if not nested.flag("use_aux_hidden_state", True):
            raise nested.error("use_aux_hidden_state", "is false, and EAGLE-3 heads read hidden states of three layers")
        taps = tuple(layer + 1 for layer in nested.integers(name, 0, num_layers - 1))
    if not taps:
        taps = default_taps(num_layers)
    if len(set(taps)) < len(taps):
        raise config.error(name, "names a layer twice")
    return taps


def default_taps(num_layers: int) -> tuple[int, ...]:
    """Early, middle and late, as EAGLE-3 has them; of a model with few layers, what is left of that."""
    early, middle, late = 2, num_layers // 2, num_layers - 3
    if early < middle < late:
        return early, middle, late
    return tuple(sorted({1, max(1, num_layers // 2), max(1, num_layers - 1)}))


def _target_ids(source: str, spec: Eagle3Spec, tables: Tables) -> npt.NDArray[np.int64]:
    """`d2t` holds how far each of the head's tokens lies behind its own number in the target's vocabulary; `t2d` marks
    those that the head has."""
    offsets, marks = tables.get("d2t"), tables.get("t2d")
    own_ids = np.arange(spec.draft_vocab_size, dtype=np.int64)
    if offsets is None:
        if spec.draft_vocab_size != spec.vocab_size:
            raise ModelError(f"{source}: the table d2t is missing, and its vocabulary is not the model's")
        return own_ids
    if offsets.shape != (spec.draft_vocab_size,) or offsets.dtype.kind != "i":
        raise ModelError(
            f"{source}: d2t has shape {offsets.shape} of {offsets.dtype}, and {spec.draft_vocab_size} whole "
            "numbers are needed"
        )
    found = own_ids + offsets.astype(np.int64)
    if found.min() < 0 or found.max() >= spec.vocab_size or len(np.unique(found)) < len(found):
        raise ModelError(f"{source}: d2t leads outside the model's vocabulary, or twice to one token")
    if marks is not None:
        if marks.shape != (spec.vocab_size,):
            raise ModelError(f"{source}: t2d has shape {marks.shape}, and the model's vocabulary is {spec.vocab_size}")
        if not np.array_equal(np.flatnonzero(marks), np.sort(found)):
            raise ModelError(f"{source}: d2t and t2d name different tokens")
    return found
