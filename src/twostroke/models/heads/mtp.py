"""MTP blocks: a layer behind a model's last that its own file holds and that guesses the tokens to come. They become a
declaration and tensors here: Qwen3-Next's and Qwen3.5's (`mtp.*`), DeepSeek V3's and GLM's from 4.5 on, which are a
further layer. Of other models it is said why theirs cannot draft."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import numpy.typing as npt

from twostroke.core.errors import BadRequestError, ModelError
from twostroke.models.canonical import canonical_tensors
from twostroke.models.checkpoint import Checkpoint
from twostroke.models.families.declaration import Adjustment, Family
from twostroke.models.loading import read_config, read_folder_spec
from twostroke.models.spec import GroupedAttention, LatentAttention, LayerSpec, ModelSpec, Shapes, layer_name
from twostroke.models.weights.safetensors import open_folder
from twostroke.models.weights.tensor import WeightTensor, from_float32

MTP = "mtp"
"""What it is asked for by."""
_CONFIG_NAMES = ("num_nextn_predict_layers", "mtp_num_hidden_layers", "num_mtp_layers", "mtp_num_layers")
_GGUF_SUFFIX = ".nextn_predict_layers"


@dataclass(frozen=True, slots=True)
class BlockNames:
    """How files name a block's tensors, behind a prefix."""

    prefix: str
    """`{}`: how many layers the model has."""
    inputs: Mapping[str, str]
    """What makes the block's input."""
    layer: str
    """What stands before the names of its one layer."""
    final_norm: str
    unused: tuple[str, ...] = ()
    """The model's own once more."""


_BESIDE = BlockNames(
    "mtp.",
    {"fc.weight": "fc", "pre_fc_norm_embedding.weight": "embedding_norm", "pre_fc_norm_hidden.weight": "hidden_norm"},
    "layers.0.",
    "norm.weight",
)
_BEHIND = BlockNames(
    "model.layers.{}.",
    {"eh_proj.weight": "fc", "enorm.weight": "embedding_norm", "hnorm.weight": "hidden_norm"},
    "",
    "shared_head.norm.weight",
    ("embed_tokens.weight", "shared_head.head.weight"),
)
_NAMES = dict.fromkeys(("qwen3_next", "qwen3_5", "qwen3_5_moe"), _BESIDE)
_NAMES |= dict.fromkeys(("deepseek_v3", "glm4_moe", "glm4_moe_lite"), _BEHIND)
"""By family, of those whose blocks are read."""


@dataclass(frozen=True, slots=True)
class MtpSpec:
    layer: LayerSpec
    hidden_size: int
    draft_vocab_size: int
    """The model's."""
    taps: tuple[int, ...]
    """Hidden states of the model that are read: what leaves its last layer, before the last norm."""
    norm_eps: float
    max_context: int

    def input_shapes(self) -> Shapes:
        hidden = self.hidden_size
        return {"fc": (hidden, 2 * hidden), "embedding_norm": (hidden,), "hidden_norm": (hidden,)}


@dataclass(frozen=True, slots=True)
class MtpHead:
    source: str
    spec: MtpSpec
    tensors: Mapping[str, WeightTensor]
    """By the names that they have in a layer, `final_norm` and those of `MtpSpec.input_shapes`."""
    target_ids: npt.NDArray[np.int64]  # [vocab]: every token is itself


def mtp_blocks(settings: Mapping[str, Any]) -> int:
    """How many a config.json, or a GGUF file's fields, declare; 0: none, or nothing that could be meant so."""
    inner = settings.get("text_config")
    named = [settings.get(name) for name in _CONFIG_NAMES]
    named += [inner.get(name) for name in _CONFIG_NAMES] if isinstance(inner, Mapping) else []
    named += [value for name, value in settings.items() if isinstance(name, str) and name.endswith(_GGUF_SUFFIX)]
    return next((value for value in named if type(value) is int and value > 0), 0)


def why_no_mtp(model: str, settings: Mapping[str, Any]) -> str:
    """Why `mtp` cannot draft for a model of another family, or from another kind of file."""
    blocks = mtp_blocks(settings)
    if not blocks:
        return f"{model} has no MTP blocks: its settings declare none; an EAGLE-3 head (eagle3:FOLDER) is another way"
    return (
        f"{model} declares {blocks} MTP block{'s' if blocks > 1 else ''}, and this engine computes none of them yet: "
        "it has those of DeepSeek V3, GLM-4.5 and later, Qwen3-Next and Qwen3.5, from folders that are not quantised"
    )


def load_mtp(checkpoint: Checkpoint) -> MtpHead:
    """The block of a model's own folder. Raises BadRequestError where it has none that is computed, ModelError where it
    is damaged."""
    is_folder = checkpoint.gguf_metadata is None and checkpoint.path.is_dir()
    if not is_folder or checkpoint.quantisation is not None or checkpoint.spec.family not in _NAMES:
        settings = checkpoint.gguf_metadata or (read_config(checkpoint.path) if is_folder else {})
        raise BadRequestError(why_no_mtp(checkpoint.name, settings))
    names, spec = _NAMES[checkpoint.spec.family], checkpoint.spec
    everything, prefix = open_folder(checkpoint.path), names.prefix.format(spec.num_layers)
    stored = {name.removeprefix(prefix): own for name, own in everything.items() if name.startswith(prefix)}
    if not stored:
        raise BadRequestError(f"{checkpoint.name} has no MTP block: its files hold no tensor named {prefix}*")
    if further := _further(everything, names, spec):
        raise BadRequestError(f"{checkpoint.name} has several MTP layers ({further}), and one is computed")
    family, _ = read_folder_spec(checkpoint.path)
    # Its layer is as the model's last that attends: others keep states, which no draft could be taken from.
    layer = next(own for own in reversed(spec.layers) if isinstance(own.attention, GroupedAttention | LatentAttention))
    own = MtpSpec(layer, spec.hidden_size, spec.vocab_size, (spec.num_layers,), spec.norm_eps, spec.max_context)
    tensors = _input_tensors(checkpoint, family, own, stored) | _layer_tensors(checkpoint, family, layer, stored)
    return MtpHead(str(checkpoint.path), own, tensors, np.arange(spec.vocab_size, dtype=np.int64))


def _further(everything: Iterable[str], names: BlockNames, spec: ModelSpec) -> str | None:
    """A tensor of a second block, if there is one."""
    second = "mtp.layers.1." if names is _BESIDE else names.prefix.format(spec.num_layers + 1)
    return next((name for name in everything if name.startswith(second)), None)


def _layer_tensors(
    checkpoint: Checkpoint, family: Family, layer: LayerSpec, stored: Mapping[str, WeightTensor]
) -> dict[str, WeightTensor]:
    """Named, split and put right as those of a model of one layer, which has the model's embedding and output."""
    names, own, block = family.hf_names, _NAMES[checkpoint.spec.family], replace(checkpoint.spec, layers=(layer,))
    model = {}
    for name, tensor in stored.items():
        if name == own.final_norm:
            model["model.norm.weight"] = tensor
        elif name not in own.inputs and name not in own.unused:
            model[f"{names.layer_prefix.format(0)}{name.removeprefix(own.layer)}"] = tensor
    for target in ("embedding", "output"):
        if target in checkpoint.tensors:
            stored_name = next(name for name, targets in names.whole.items() if targets == (target,))
            model[stored_name] = checkpoint.tensors[target]
    found = canonical_tensors(f"{checkpoint.name}'s MTP block", model, names, block)
    kept = {name.removeprefix(layer_name(0, "")): own for name, own in found.items() if name.startswith("layers.")}
    return kept | {"final_norm": found["final_norm"]}


def _input_tensors(
    checkpoint: Checkpoint, family: Family, spec: MtpSpec, stored: Mapping[str, WeightTensor]
) -> dict[str, WeightTensor]:
    adds_one = family.hf_names.adjust.get("final_norm") is Adjustment.ADD_ONE
    own, shapes, found = _NAMES[checkpoint.spec.family], spec.input_shapes(), {}
    for stored_name, name in own.inputs.items():
        tensor = stored.get(stored_name)
        if tensor is None or tensor.shape != shapes[name]:
            had = "is missing" if tensor is None else f"has shape {tensor.shape}, and {shapes[name]} is needed"
            place = own.prefix.format(checkpoint.spec.num_layers)
            raise ModelError(f"{checkpoint.name}: the tensor {place}{stored_name} of its MTP block {had}")
        is_norm = len(shapes[name]) == 1
        found[name] = from_float32(name, tensor.to_float32() + np.float32(1)) if is_norm and adds_one else tensor
    return found
