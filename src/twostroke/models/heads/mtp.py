"""MTP blocks: a layer behind a model's last that its own files hold and that guesses the tokens to come. They become a
declaration and tensors here, from folders, quantised or not, and from GGUF files. How they are named there, and which
families have some, is in `mtp_names.py`."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from math import prod
from typing import Any

import numpy as np
import numpy.typing as npt

from twostroke.core.errors import BadRequestError, ModelError
from twostroke.models.canonical import canonical_tensors
from twostroke.models.checkpoint import Checkpoint
from twostroke.models.families import family_of_gguf
from twostroke.models.families.declaration import Adjustment, TensorNames
from twostroke.models.families.fields import Fields
from twostroke.models.heads.mtp_names import (
    BlockNames,
    block_names,
    holds_block,
    mtp_blocks,
    mtp_line,
    why_no_mtp,
)
from twostroke.models.loading import read_config, read_folder_spec, roles_of
from twostroke.models.quantised.scheme import Quantisation, Role
from twostroke.models.spec import GroupedAttention, LatentAttention, LayerSpec, ModelSpec, Shapes, layer_name
from twostroke.models.weights.gguf import open_gguf
from twostroke.models.weights.quantised_folder import Folder
from twostroke.models.weights.safetensors import open_folder, read_folder
from twostroke.models.weights.tensor import WeightTensor, from_float32

Stored = Mapping[str, WeightTensor]
EXPERTS = "experts."
"""What the names of experts' tensors begin with."""
KEPT_TIMES = 4
"""A host that expands the experts that tokens meet keeps this many times those that one token meets."""


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
    has_further: bool = False
    """Whether the files hold more blocks, which are not computed: this one makes all drafts."""


def kept_experts(spec: MtpSpec) -> int:
    """Of those that a host expands, the most that it keeps."""
    moe = spec.layer.moe
    return 0 if moe is None else min(moe.num_experts, KEPT_TIMES * moe.experts_per_token)


def expanded_values(head: MtpHead) -> int:
    """Numbers that a host keeps of it, expanded: all but those of experts that are not kept."""
    experts = sum(prod(one.shape) for name, one in head.tensors.items() if name.startswith(EXPERTS))
    others = sum(prod(one.shape) for name, one in head.tensors.items() if not name.startswith(EXPERTS))
    moe = head.spec.layer.moe
    return others if moe is None else others + experts * kept_experts(head.spec) // moe.num_experts


def load_mtp(checkpoint: Checkpoint) -> MtpHead:
    """The first block of a model's own files. Raises BadRequestError where they have none that is computed, ModelError
    where it is damaged."""
    spec, own = checkpoint.spec, _names_of_block(checkpoint)
    if own is None or not _has_files(checkpoint):
        raise BadRequestError(why_no_mtp(checkpoint.name, _settings(checkpoint)))
    names = _names_of_model(checkpoint)
    # Its layer is as the model's last that attends: others keep states, which no draft could be taken from.
    layer = next(one for one in reversed(spec.layers) if isinstance(one.attention, GroupedAttention | LatentAttention))
    block = _Block(checkpoint, names, own, layer)
    stored, has_further = _stored(block)
    if not stored:
        place = own.prefix.format(spec.num_layers)
        raise BadRequestError(f"{checkpoint.name} has no MTP block: its files hold no tensor named {place}*")
    found = MtpSpec(layer, spec.hidden_size, spec.vocab_size, (spec.num_layers,), spec.norm_eps, spec.max_context)
    tensors = _input_tensors(block, found, stored) | _layer_tensors(block, stored)
    return MtpHead(str(checkpoint.path), found, tensors, np.arange(spec.vocab_size, dtype=np.int64), has_further)


def unused_blocks(checkpoint: Checkpoint) -> str | None:
    """A line about blocks that lie in a model's files while nobody asked for them; None: there are none. Files are
    looked through where settings declare blocks."""
    blocks = mtp_blocks(_settings(checkpoint))
    if not blocks or not _has_files(checkpoint):
        return None
    if checkpoint.gguf_metadata is not None:
        stored: Iterable[str] = open_gguf(checkpoint.path).tensors
    else:
        stored = read_folder(checkpoint.path)
    names = _names_of_model(checkpoint)
    if not holds_block(map(names.plain, stored), checkpoint.spec, names.layer_prefix):
        return None
    return mtp_line(checkpoint.spec.family, blocks, can_draft=_names_of_block(checkpoint) is not None)


def _has_files(checkpoint: Checkpoint) -> bool:
    """False: its weights are drawn at random, perhaps."""
    path = checkpoint.path
    return path.is_file() if checkpoint.gguf_metadata is not None else path.is_dir() and any(path.glob("*.safetensors"))


def _settings(checkpoint: Checkpoint) -> Mapping[str, Any]:
    if checkpoint.gguf_metadata is not None:
        return checkpoint.gguf_metadata
    return read_config(checkpoint.path) if (checkpoint.path / "config.json").is_file() else {}


def _names_of_block(checkpoint: Checkpoint) -> BlockNames | None:
    return block_names(checkpoint.spec.family, is_gguf=checkpoint.gguf_metadata is not None)


def _names_of_model(checkpoint: Checkpoint) -> TensorNames:
    if checkpoint.gguf_metadata is None:
        return read_folder_spec(checkpoint.path)[0].hf_names
    fields = Fields(checkpoint.path.name, checkpoint.gguf_metadata)
    return family_of_gguf(fields.text("general.architecture")).gguf_names


@dataclass(frozen=True, slots=True)
class _Block:
    """Whose it is, what the model's tensors are called in its files, and what the block's are."""

    checkpoint: Checkpoint
    names: TensorNames
    own: BlockNames
    layer: LayerSpec

    @property
    def as_model(self) -> ModelSpec:
        """A model of this layer alone."""
        return replace(self.checkpoint.spec, layers=(self.layer,))

    def in_model(self, name: str) -> str:
        """What a tensor of the block, named behind its prefix, is called in such a model's files."""
        if name == self.own.final_norm:
            return stored_name_of(self.names, "final_norm")
        return f"{self.names.layer_prefix.format(0)}{name.removeprefix(self.own.layer)}"


def stored_name_of(names: TensorNames, target: str) -> str:
    """Of a tensor that belongs to no layer."""
    return next(name for name, targets in names.whole.items() if targets == (target,))


def _stored(block: _Block) -> tuple[Stored, bool]:
    """The block's tensors by their names behind its prefix, and whether the files hold a further block."""
    checkpoint, own, spec = block.checkpoint, block.own, block.checkpoint.spec
    everything: Stored
    if checkpoint.gguf_metadata is not None:
        everything = open_gguf(checkpoint.path).tensors
    elif checkpoint.quantisation is None:
        everything = open_folder(checkpoint.path)
    else:
        return _stored_quantised(block, checkpoint.quantisation)
    kept = {own.in_block(name, spec): one for name, one in everything.items() if own.is_own(name, spec)}
    return kept, any(own.is_further(name, spec) for name in everything)


def _stored_quantised(block: _Block, quantisation: Quantisation) -> tuple[Stored, bool]:
    """Its matrices are as they are stored, which is often otherwise than the model's."""
    checkpoint, own, spec = block.checkpoint, block.own, block.checkpoint.spec
    raw, in_layer = read_folder(checkpoint.path), roles_of(block.names, block.as_model)

    def role_of(stored_name: str) -> Role | None:
        name = own.in_block(stored_name, spec)
        if name in own.inputs:
            return Role.LINEAR if own.inputs[name] == "fc" else None
        return in_layer(block.in_model(name))

    def is_unused(stored_name: str) -> bool:
        return own.in_block(stored_name, spec) in own.unused

    kept = {name: one for name, one in raw.items() if own.is_own(name, spec)}
    plain, source = block.names.plain, str(checkpoint.path)
    found = Folder(source, kept, quantisation, role_of, plain, is_unused, takes_floats=True).tensors().tensors
    in_block = {own.in_block(name, spec): one for name, one in found.items()}
    return in_block, any(own.is_further(name, spec) for name in raw)


def _layer_tensors(block: _Block, stored: Stored) -> dict[str, WeightTensor]:
    """Named, split and put right as those of a model of one layer, which has the model's embedding and output."""
    checkpoint, own, spec = block.checkpoint, block.own, block.as_model
    source, model = f"{checkpoint.name}'s MTP block", {}
    for name, tensor in stored.items():
        if name in own.unused:
            _check_shared(source, tensor, spec)
        elif name not in own.inputs:
            model[block.in_model(name)] = tensor
    for target in ("embedding", "output"):
        if target in checkpoint.tensors:
            model[stored_name_of(block.names, target)] = checkpoint.tensors[target]
    found = canonical_tensors(source, model, block.names, spec)
    kept = {name.removeprefix(layer_name(0, "")): one for name, one in found.items() if name.startswith("layers.")}
    return kept | {"final_norm": found["final_norm"]}


def _check_shared(source: str, tensor: WeightTensor, spec: ModelSpec) -> None:
    """What the files hold of the model's once more, and is not used, tells whose block this is."""
    shape = (spec.vocab_size, spec.hidden_size)
    if tensor.shape != shape:
        had = f"{tensor.name[:80]} has shape {tensor.shape}, and the model's has {shape}"
        raise ModelError(f"{source} belongs to another model: {had}")


def _input_tensors(block: _Block, spec: MtpSpec, stored: Stored) -> dict[str, WeightTensor]:
    adds_one = block.names.adjust.get("final_norm") is Adjustment.ADD_ONE
    own, shapes, found = block.own, spec.input_shapes(), {}
    for stored_name, name in own.inputs.items():
        tensor = stored.get(stored_name)
        if tensor is None or tensor.shape != shapes[name]:
            had = "is missing" if tensor is None else f"has shape {tensor.shape}, and {shapes[name]} is needed"
            place = own.prefix.format(block.checkpoint.spec.num_layers)
            raise ModelError(f"{block.checkpoint.name}: the tensor {place}{stored_name} of its MTP block {had}")
        is_norm = len(shapes[name]) == 1
        found[name] = from_float32(name, tensor.to_float32() + np.float32(1)) if is_norm and adds_one else tensor
    return found
