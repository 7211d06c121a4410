"""Medusa heads as they are published: head k guesses the token k + 1 places behind the next one from the target's last
hidden state alone, through residual blocks and an output matrix of its own. Read with the names of Medusa's own files
(`0.0.linear.weight`, `0.1.weight`) and with vLLM's (`blocks.0.layers.0.weight`, `lm_heads.0.weight`)."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt

from twostroke.core.errors import ModelError
from twostroke.models.families.fields import Fields
from twostroke.models.heads.files import canonical, check_shapes, head_config, head_tensors, refuse_foreign
from twostroke.models.spec import ModelSpec, Shapes
from twostroke.models.weights.tensor import WeightTensor

FILE = "medusa_lm_head.safetensors"
_MAX_HEADS = 64
_MAX_BLOCKS = 16
_MAX_SIZE = 2**22
_OWN_NAME = re.compile(r"(?:medusa_heads?\.)?(\d{1,3})\.(\d{1,3})\.(linear\.)?(weight|bias)")
_BLOCK_NAME = re.compile(r"blocks\.(\d{1,3})\.layers\.(\d{1,3})\.(weight|bias)")
_OUTPUT_NAME = re.compile(r"lm_heads\.(\d{1,3})\.weight")


@dataclass(frozen=True, slots=True)
class MedusaSpec:
    num_heads: int
    num_blocks: int
    """Residual blocks of each head."""
    hidden_size: int
    draft_vocab_size: int

    @staticmethod
    def block_name(head: int, block: int) -> str:
        """Its bias, where it has one, is named `_bias` behind that."""
        return f"{head}.blocks.{block}"

    @staticmethod
    def output_name(head: int) -> str:
        return f"{head}.output"

    @staticmethod
    def head_of(name: str) -> int:
        """Whose tensor it is."""
        return int(name.partition(".")[0])

    def tensor_shapes(self) -> Shapes:
        shapes: Shapes = {}
        for head in range(self.num_heads):
            for block in range(self.num_blocks):
                shapes[self.block_name(head, block)] = (self.hidden_size, self.hidden_size)
            shapes[self.output_name(head)] = (self.draft_vocab_size, self.hidden_size)
        return shapes

    def optional_shapes(self) -> Shapes:
        heads, blocks = range(self.num_heads), range(self.num_blocks)
        return {f"{self.block_name(head, block)}_bias": (self.hidden_size,) for head in heads for block in blocks}


@dataclass(frozen=True, slots=True)
class MedusaHeads:
    source: str
    spec: MedusaSpec
    tensors: Mapping[str, WeightTensor]
    target_ids: npt.NDArray[np.int64]  # [draft vocab]


def load_medusa(folder: Path | str, target: ModelSpec) -> MedusaHeads:
    """Raises ModelError where they cannot be read, or were not made for such a target."""
    folder = Path(folder)
    config, source = head_config(folder, "folder of Medusa heads"), str(folder)
    num_heads = config.integer(config.present("medusa_num_heads", "num_heads"), 1, _MAX_HEADS)
    num_blocks = config.integer(config.present("medusa_num_layers", "num_hidden_layers"), 0, _MAX_BLOCKS, 1)
    _check_target(config, target)
    stored, tables = head_tensors(folder, (FILE,))
    tensors = canonical(source, stored, lambda name: _canonical_name(name, num_blocks))
    token_map = tables.get("token_map")
    draft_vocab = target.vocab_size if token_map is None else len(token_map)
    # Medusa's own config.json names no sizes: its matrices do.
    first = tensors.get("0.output")
    if first is not None and len(first.shape) == 2:
        refuse_foreign(source, "hidden size", first.shape[1], target.hidden_size)
        refuse_foreign(source, "vocabulary", first.shape[0], draft_vocab)
    spec = MedusaSpec(num_heads, num_blocks, target.hidden_size, draft_vocab)
    check_shapes(source, tensors, spec.tensor_shapes(), spec.optional_shapes())
    target_ids = np.arange(draft_vocab, dtype=np.int64)
    if token_map is not None:
        if token_map.ndim != 1 or token_map.dtype.kind != "i" or not len(token_map):
            raise ModelError(f"{source}: token_map must be a list of token ids")
        target_ids = token_map.astype(np.int64)
        if target_ids.min() < 0 or target_ids.max() >= target.vocab_size:
            raise ModelError(f"{source}: token_map leads outside the model's vocabulary of {target.vocab_size}")
    return MedusaHeads(source, spec, tensors, target_ids)


def _check_target(config: Fields, target: ModelSpec) -> None:
    for name, what, own in (
        ("hidden_size", "hidden size", target.hidden_size),
        ("vocab_size", "vocabulary", target.vocab_size),
    ):
        if config.get(name) is not None:
            refuse_foreign(config.source, what, config.integer(name, 1, _MAX_SIZE), own)


def _canonical_name(name: str, num_blocks: int) -> str | None:
    name = name.removeprefix("model.")
    if (match := _OUTPUT_NAME.fullmatch(name)) is not None:
        return f"{int(match[1])}.output"
    if (match := _BLOCK_NAME.fullmatch(name)) is not None:
        return f"{int(match[1])}.blocks.{int(match[2])}" + ("_bias" if match[3] == "bias" else "")
    match = _OWN_NAME.fullmatch(name)
    if match is None:
        return None
    place = int(match[2])
    if match[3] is None:  # the matrix behind the blocks
        return f"{int(match[1])}.output" if place == num_blocks and match[4] == "weight" else None
    return f"{int(match[1])}.blocks.{place}" + ("_bias" if match[4] == "bias" else "")
