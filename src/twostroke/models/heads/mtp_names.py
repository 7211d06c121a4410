"""How files name the tensors of MTP blocks, by family and by kind of file; how many blocks settings declare; and what a
user is told of blocks that cannot draft, or that do not."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from twostroke.models.spec import ModelSpec

MTP = "mtp"
"""What it is asked for by."""
_CONFIG_NAMES = (
    "num_nextn_predict_layers",
    "mtp_num_hidden_layers",
    "num_mtp_layers",
    "mtp_num_layers",
    "num_mtp_modules",
)
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
    """The model's embedding and output once more."""

    def is_own(self, stored_name: str, spec: ModelSpec) -> bool:
        """Whether a tensor is the first block's."""
        return stored_name.startswith(self.prefix.format(spec.num_layers)) and not self.is_further(stored_name, spec)

    def is_further(self, stored_name: str, spec: ModelSpec) -> bool:
        """Whether it is a second block's."""
        if not self.layer:
            return stored_name.startswith(self.prefix.format(spec.num_layers + 1))
        return stored_name.startswith(f"{self.prefix}{self.layer.replace('0', '1')}")

    def in_block(self, stored_name: str, spec: ModelSpec) -> str:
        """Its name behind the prefix."""
        return stored_name.removeprefix(self.prefix.format(spec.num_layers))


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
_IN_GGUF = BlockNames(
    "blk.{}.",
    {"nextn.eh_proj.weight": "fc", "nextn.enorm.weight": "embedding_norm", "nextn.hnorm.weight": "hidden_norm"},
    "",
    "nextn.shared_head_norm.weight",
    ("nextn.embed_tokens.weight", "nextn.shared_head_head.weight"),
)
_IN_FOLDERS = dict.fromkeys(("qwen3_next", "qwen3_5", "qwen3_5_moe"), _BESIDE)
_IN_FOLDERS |= dict.fromkeys(("deepseek_v3", "glm4_moe", "glm4_moe_lite"), _BEHIND)
"""By family, of those whose blocks are read."""
_UNREAD = ("mtp.", "model.mtp.", "model.mtp_")
"""What tensors of blocks begin with in folders of families whose blocks are not read: ERNIE's, Nemotron-H's."""
_READ = "DeepSeek V3, GLM-4.5 and later, Qwen3-Next and Qwen3.5"


def block_names(family: str, *, is_gguf: bool) -> BlockNames | None:
    """None: blocks of this family are not read."""
    found = _IN_FOLDERS.get(family)
    return _IN_GGUF if is_gguf and found is not None else found


def mtp_blocks(settings: Mapping[str, Any]) -> int:
    """How many a config.json, or a GGUF file's fields, declare; 0: none, or nothing that could be meant so."""
    inner = settings.get("text_config")
    named = [settings.get(name) for name in _CONFIG_NAMES]
    named += [inner.get(name) for name in _CONFIG_NAMES] if isinstance(inner, Mapping) else []
    named += [value for name, value in settings.items() if isinstance(name, str) and name.endswith(_GGUF_SUFFIX)]
    return next((value for value in named if type(value) is int and value > 0), 0)


def holds_block(stored: Iterable[str], spec: ModelSpec, layer_prefix: str) -> bool:
    """Whether a file has a tensor of a block, of this family or another. `layer_prefix`: of the names in the model's
    layers."""
    beginnings = (*_UNREAD, layer_prefix.format(spec.num_layers))
    return any(name.startswith(beginnings) for name in stored)


def why_no_mtp(model: str, settings: Mapping[str, Any]) -> str:
    """Why `mtp` cannot draft for a model of a family whose blocks are not read."""
    blocks = mtp_blocks(settings)
    if not blocks:
        return f"{model} has no MTP blocks: its settings declare none; an EAGLE-3 head (eagle3:FOLDER) is another way"
    return (
        f"{model} declares {blocks} MTP block{'s' if blocks > 1 else ''}, and this engine computes none of them yet: "
        f"it has those of {_READ}"
    )


def mtp_line(family: str, num_blocks: int, *, can_draft: bool) -> str:
    """What a user is told of blocks that lie in a model's files while nobody asks for them."""
    blocks = "an MTP block, which is" if num_blocks == 1 else f"{num_blocks} MTP blocks, which are"
    if can_draft:
        return (
            f"mtp: its files hold {blocks} not used; --speculate {MTP} has {'it' if num_blocks == 1 else 'one'} draft"
        )
    return f"mtp: its files hold {blocks} not used: this engine computes those of {_READ}, and this is {family}"
