"""A quantised folder's raw tensors to the tensors that families know: the parts of each matrix are brought together
under the matrix's own name, and held against what the config says of it. What the two say differently is an error."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from math import prod
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from twostroke.core.errors import ModelError
from twostroke.models.quantised.name_patterns import UnreadablePatternError
from twostroke.models.quantised.scheme import Expected, Layout, Quantisation, Role
from twostroke.models.weights.mapped_file import quoted
from twostroke.models.weights.safetensors import RawTensor
from twostroke.models.weights.stored_layouts import read_stored
from twostroke.models.weights.stored_module import Stored
from twostroke.models.weights.tensor import WeightKind, WeightTensor

_LAYOUT_PARTS = {
    Layout.PACKED_INTEGERS: ("weight_packed", "weight_scale", "weight_shape", "weight_zero_point", "weight_g_idx"),
    Layout.PLAIN_INTEGERS: ("weight", "weight_scale", "weight_zero_point"),
    Layout.FLOATS_OF_8: ("weight", "weight_scale", "weight_scale_inv"),
    Layout.PACKED_FP4: ("weight_packed", "weight_scale", "weight_global_scale"),
    Layout.GPTQ: ("qweight", "qzeros", "scales", "g_idx"),
    Layout.AWQ: ("qweight", "qzeros", "scales"),
    Layout.MXFP4_BLOCKS: ("blocks", "scales"),
    Layout.MODELOPT_FP4: ("weight", "weight_scale", "weight_scale_2"),
}
_INPUT_PARTS = ("input_scale", "input_zero_point", "input_global_scale", "activation_scale")
"""Of what a matrix is multiplied with: they may stand beside any layout."""
_PARTS = ({part for parts in _LAYOUT_PARTS.values() for part in parts} | set(_INPUT_PARTS)) - {"weight", "blocks"}
_STACKED_PARTS = {
    "_blocks": "blocks",
    "_scales": "scales",
    "_packed": "weight_packed",
    "_shape": "weight_shape",
    "_scale_inv": "weight_scale_inv",
    "_scale": "weight_scale",
    "_zero_point": "weight_zero_point",
    "_global_scale": "weight_global_scale",
    **{f"_{part}": part for part in _INPUT_PARTS},
}
"""How names of stacked experts end, which have no `.weight`."""
_KV_NAMES = {
    "k": (".k_scale", ".k_proj.output_scale", ".kv_scale"),
    "v": (".v_scale", ".v_proj.output_scale", ".kv_scale"),
}
_UNUSED_SCALES = (".q_scale", ".prob_scale", ".q_proj.output_scale")
"""Of attention that is computed in 8 bits throughout."""
_LAYER = re.compile(r"(?:^|\.)(?:layers|h|blocks)\.(\d{1,6})\.")


@dataclass(frozen=True, slots=True, eq=False)
class KVScales:
    """What keys and values were meant to be divided by before they are rounded, by layer: a number, or one a head."""

    keys: Mapping[int, npt.NDArray[np.float32]]
    values: Mapping[int, npt.NDArray[np.float32]]


class FolderTensors(NamedTuple):
    tensors: dict[str, WeightTensor]
    kv_scales: KVScales | None
    unnamed_experts: frozenset[WeightKind]
    """What stacked experts are stored in that are floats, though the config names no module of theirs to be left."""


@dataclass(frozen=True)
class Folder:
    """Who asks: the raw tensors, what the config says, and what the family knows of names."""

    source: str
    raw: Mapping[str, RawTensor]
    quantisation: Quantisation
    role_of: Callable[[str], Role | None]
    """Of a tensor by its stored name; None: it is no matrix of this model."""
    plain_name: Callable[[str], str]
    """A stored name without what a larger model put around it."""
    is_left_out: Callable[[str], bool]
    takes_floats: bool = False
    """Of blocks beside the model, which many tools leave as they were and few configs tell of: a matrix that is stored
    as floats is one, whatever is said of it."""

    def tensors(self) -> FolderTensors:
        raw, kv_scales = self._without_kv_scales()
        found: dict[str, WeightTensor] = {}
        unnamed: set[WeightKind] = set()
        for owner, parts in self._by_owner(raw).items():
            if not self.is_left_out(owner):
                tensor, expected = self._tensor(owner, parts)
                found[owner] = tensor
                if expected is Expected.AS_STORED and self.role_of(owner) is Role.EXPERTS:
                    unnamed.add(tensor.kind)
        return FolderTensors(found, kv_scales, frozenset(kind for kind in unnamed if not kind.is_quantised))

    def _by_owner(self, raw: Mapping[str, RawTensor]) -> dict[str, dict[str, RawTensor]]:
        """Raw tensors by the matrix they belong to, and what they are of it."""
        found: dict[str, dict[str, RawTensor]] = {}
        for name, tensor in raw.items():
            owner, part = self._place(name)
            found.setdefault(owner, {})[part] = tensor
        return found

    def _place(self, name: str) -> tuple[str, str]:
        module, _, last = name.rpartition(".")
        if last in _PARTS:
            return f"{module}.weight", last
        for ending, part in _STACKED_PARTS.items():
            stem = name.removesuffix(ending)
            if stem != name and self.role_of(stem) is Role.EXPERTS:
                return stem, part
        return name, "weight"

    def _tensor(self, owner: str, parts: Mapping[str, RawTensor]) -> tuple[WeightTensor, Expected]:
        """With what the config says of it."""
        role, weight = self.role_of(owner), parts.get("weight")
        is_quantised = weight is None or not weight.is_float or bool(parts.keys() - {"weight", *_INPUT_PARTS})
        if role is None:
            if is_quantised or weight is None:
                what = f"is no matrix of this model, and has a quantised part {quoted(next(iter(parts)))}"
                raise ModelError(f"{self.source}: {quoted(owner)} {what}")
            return weight.as_weights(), Expected.NO
        stored_as = "quantised" if weight is None else weight.dtype
        module, by = owner.removesuffix(".weight"), self.quantisation.source
        names = [module, self.plain_name(owner).removesuffix(".weight")]
        if not owner.endswith(".weight"):  # a stack that has no module of its own goes by its owner's name, too
            names += [name.rpartition(".")[0] for name in names]
        try:
            scheme, expected = self.quantisation.scheme_of(names, role)
        except UnreadablePatternError as error:
            raise ModelError(f"{by} holds a pattern that {error}") from None
        if is_quantised and role is Role.EMBEDDING:
            raise ModelError(f"{self.source}: {quoted(owner)} is a quantised embedding, which is not read")
        if is_quantised and expected is Expected.NO:
            raise ModelError(f"{self.source}: {quoted(owner)} is stored quantised, and {by} says that it is not")
        if not is_quantised and expected is Expected.YES and not self.takes_floats:
            raise ModelError(f"{self.source}: {quoted(owner)} is stored as {stored_as}, and {by} says it is quantised")
        if not is_quantised:
            assert weight is not None
            return weight.as_weights(), expected
        assert scheme is not None
        others = sorted(parts.keys() - {*_LAYOUT_PARTS[scheme.layout], *_INPUT_PARTS})
        if others:
            raise ModelError(f"{self.source}: {quoted(owner)} has a {others[0]}, which {by} says nothing of")
        return read_stored(Stored(self.source, owner, parts, scheme)), expected

    def _without_kv_scales(self) -> tuple[dict[str, RawTensor], KVScales | None]:
        rest: dict[str, RawTensor] = {}
        found: dict[str, dict[int, npt.NDArray[np.float32]]] = {"k": {}, "v": {}}
        for name, tensor in self.raw.items():
            kinds = [kind for kind, endings in _KV_NAMES.items() if name.endswith(endings)]
            kinds = [] if kinds and self.is_left_out(name) else kinds  # a block that drafts counts its own layers
            for kind in kinds:
                self._take_kv_scale(name, tensor, found[kind])
            if not kinds and not name.endswith(_UNUSED_SCALES):
                rest[name] = tensor
        if not found["k"] and not found["v"]:
            return rest, None
        if found["k"].keys() != found["v"].keys():
            raise ModelError(f"{self.source}: k_scale and v_scale are not there for the same layers")
        return rest, KVScales(found["k"], found["v"])

    def _take_kv_scale(self, name: str, tensor: RawTensor, found: dict[int, npt.NDArray[np.float32]]) -> None:
        match = _LAYER.search(name)
        what = f"{self.source}: {quoted(name)}"
        if match is None or not tensor.is_float or not 0 < prod(tensor.shape) <= 2**16:
            raise ModelError(f"{what}, {tensor.dtype} of shape {tensor.shape}, is no scale of a layer's keys or values")
        values = tensor.as_weights().to_float32().reshape(-1)
        if not np.isfinite(values).all() or (values <= 0).any():
            raise ModelError(f"{what} must be positive")
        if int(match[1]) in found:
            raise ModelError(f"{what} gives a layer's scale a second time")
        found[int(match[1])] = values
