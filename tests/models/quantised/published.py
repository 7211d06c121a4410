"""A tiny checkpoint of any family as tools publish it quantised: every linear layer packed, and what each tool leaves
as it is. Experts that a model stacks are written one by one, as a stack, or left."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from tests.models.quantised.folders import FORMATS, Format, Packed, Tensors, write_folder

_STACK = re.compile(r"(.*\.)(?:experts\.)?(gate_up_proj|up_proj|down_proj|input_linear\.weight|output_linear\.weight)$")
_NO_LINEAR = re.compile(r"embed_tokens|embeddings|embedding\.|pos_embed|norm|conv1d|conv\.conv")
_USUALLY_KEPT = re.compile(r"lm_head|router|gate\.weight$|\.wg\.|shared_expert_gate")
_UNIT = 32
"""Of inputs: all formats here have groups of as many, or of fewer."""
ROW_UNIT = 8
"""Of rows: AWQ has as many in a word."""


@dataclass(frozen=True)
class Publisher:
    """How a tool writes folders."""

    form: str
    experts: str
    """apart, stacked or left."""

    @property
    def format(self) -> Format:
        return FORMATS[self.form]

    def config(self, kept: list[str]) -> dict[str, Any]:
        """Its own, with the modules that it left as they were."""
        config = dict(self.format.config)
        match config.get("quant_method"):
            case "compressed-tensors":
                return config | {"ignore": kept}
            case "gptq":
                return config | {"dynamic": {f"-:^{re.escape(name)}$": {} for name in kept}}
            case "modelopt":
                return config | {"exclude_modules": kept}
            case _:
                return config | {"modules_to_not_convert": kept}


PUBLISHERS = {
    "ct_int4_asym": Publisher("ct_int4_asym", "apart"),
    "ct_int4_stacks": Publisher("ct_int4", "stacked"),
    "ct_nvfp4": Publisher("ct_nvfp4", "apart"),
    "ct_fp8_channel": Publisher("ct_fp8_channel", "left"),
    "ct_mxfp4_stacks": Publisher("ct_mxfp4", "stacked"),
    "fp8_block": Publisher("fp8_block", "stacked"),
    "fp8_ragged_block": Publisher("fp8_ragged_block", "apart"),
    "gptq_order": Publisher("gptq_order", "apart"),
    "awq": Publisher("awq", "left"),
    "modelopt_nvfp4": Publisher("modelopt_nvfp4", "apart"),
}


@dataclass
class _Writer:
    publisher: Publisher
    inputs_first: bool
    """Of stacks: whether they are as gpt-oss has them, which has gates and ups in turn, too."""
    stored: Tensors
    meant: Tensors
    kept: list[str]

    def matrix(self, name: str, weight: torch.Tensor) -> torch.Tensor:
        """Write it packed, under names that end in the parts' own; what it then stands for."""
        packed = self.publisher.format.pack(weight.float().contiguous())
        self.stored |= {f"{name.removesuffix('weight')}{part}": value for part, value in packed.tensors.items()}
        return packed.meant

    def tensor(self, name: str, tensor: torch.Tensor) -> None:
        found = _STACK.match(name)
        if found is not None and (tensor.ndim == 3 or "_bias" in name):
            self.stack(name, tensor, found[1].removesuffix("experts."), found[2])
        elif tensor.ndim == 2 and name.endswith(".weight") and not _NO_LINEAR.search(name):
            fits = tensor.shape[1] % _UNIT == 0 and tensor.shape[0] % ROW_UNIT == 0
            if fits and not _USUALLY_KEPT.search(name):
                self.meant[name] = self.matrix(name, tensor)
            else:
                self.stored[name] = self.meant[name] = tensor
                self.kept.append(name.removesuffix(".weight"))
        else:
            self.stored[name] = self.meant[name] = tensor

    def stack(self, name: str, tensor: torch.Tensor, place: str, what: str) -> None:
        if self.publisher.experts == "left":
            self.stored[name] = self.meant[name] = tensor
            return
        turned = tensor.transpose(1, 2) if self.inputs_first else tensor
        if self.publisher.experts == "apart":
            self.meant[name] = torch.stack([self.apart(place, i, one, what) for i, one in enumerate(turned)])
        else:
            keeps_order = self.publisher.format.kind == "FP8"  # blocks hold outputs first
            self.meant[name] = self.stacked(name, tensor if keeps_order else turned)
            if keeps_order:
                return
        if self.inputs_first:
            self.meant[name] = self.meant[name].transpose(1, 2).contiguous()

    def apart(self, place: str, index: int, weight: torch.Tensor, what: str) -> torch.Tensor:
        meant = torch.empty(weight.shape)
        for own, rows in _rows_of(what, len(weight), in_turn=self.inputs_first):
            meant[rows] = self.matrix(f"{place}experts.{index}.{own}_proj.weight", weight[rows])
        return meant

    def stacked(self, name: str, tensor: torch.Tensor) -> torch.Tensor:
        """One tensor for each part of all experts, whose name follows the stack's."""
        packed: list[Packed] = [self.publisher.format.pack(one.float().contiguous()) for one in tensor]
        for part in packed[0].tensors:
            whole = torch.stack([one.tensors[part] for one in packed])
            if part == "weight_shape":
                whole = torch.tensor(tensor.shape)
            own = f"{name}_{part.removeprefix('weight_')}" if part != "weight" else name
            self.stored[name.removesuffix("weight") + part if name.endswith("weight") else own] = whole
        return torch.stack([one.meant for one in packed])


def _rows_of(what: str, rows: int, in_turn: bool) -> Iterator[tuple[str, slice]]:
    if what not in ("gate_up_proj", "input_linear.weight"):
        yield ("up" if what == "up_proj" else "down"), slice(0, rows)
    elif in_turn:
        yield from (("gate", slice(0, rows, 2)), ("up", slice(1, rows, 2)))
    else:
        yield from (("gate", slice(0, rows // 2)), ("up", slice(rows // 2, rows)))


def publish(folder: Path, target: Path, publisher: Publisher) -> tuple[Path, Path]:
    """The folder's model quantised, and beside it in floats: (quantised, meant)."""
    config = json.loads((folder / "config.json").read_text())
    writer = _Writer(publisher, config["architectures"] == ["GptOssForCausalLM"], {}, {}, [])
    for name, tensor in load_file(folder / "model.safetensors").items():
        if writer.inputs_first and name.endswith("_proj_bias") and publisher.experts == "apart":
            _biases_apart(writer, name, tensor)
        else:
            writer.tensor(name, tensor)
    meant = write_folder(target / "meant", config, writer.meant)
    config |= {"quantization_config": publisher.config(writer.kept)}
    return write_folder(target / "quantised", config, writer.stored), meant


def _biases_apart(writer: _Writer, name: str, tensor: torch.Tensor) -> None:
    writer.meant[name] = tensor
    place, _, what = name.removesuffix("_bias").rpartition(".")
    for index, one in enumerate(tensor):
        for own, rows in _rows_of(what, len(one), in_turn=True):
            writer.stored[f"{place}.{index}.{own}_proj.bias"] = one[rows]
