"""Which of a model's matrices are held in few bits, and in which code: what was asked for, or what suits the numbers
and scales that a file has. A matrix of several tensors has one code that holds all of them, without an error. Knows no
torch: a plan asks here too."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Literal, NamedTuple

import numpy as np
import numpy.typing as npt

from twostroke.backends.cuda.kernels.packed_format import (
    FOUR_BITS,
    FP8,
    FP8_UNITS,
    GROUPED_CODES,
    INT4,
    LOW_BIT_DEPTH,
    MX_UNITS,
    Code,
    Grouping,
    Offset,
    ScaleType,
    Table,
    grouped_code,
)
from twostroke.backends.cuda.kernels.row_forms import HOLDS_ALL, MX, NVFP4, ROW_FORMS, RowForm, RowScale
from twostroke.core.formats import STORED, Formats
from twostroke.models.checkpoint import Checkpoint
from twostroke.models.weights.stored_forms import ScaledTensor, ScaleKind
from twostroke.models.weights.tensor import WeightKind, WeightTensor

QUANTISED_TO = {
    "fp8": FP8,
    "int4": INT4,
    "q8_0": grouped_code(32, Grouping(4, "f16")),
    "q4_1": grouped_code(32, Grouping(0, "f16", "added")),
}
"""What layers' matrices are brought to as they are loaded, by the name of `Formats.weights`."""
EXPERTS_TO = {
    "fp8": RowForm(8, "e4m3", 0, "f32").code,
    "int4": RowForm(4, "whole", INT4.group, "bf16").code,
    "q8_0": RowForm(8, "whole", 32, "f16").code,
    "q4_1": RowForm(4, "whole", 32, "f16", "added").code,
}
"""And experts'."""
SMALLER = ("fp8", "int4")
"""Of those, what is taken unasked where memory is short."""
BLOCKS: Mapping[WeightKind, tuple[int, Grouping]] = {
    WeightKind.Q8_0: (32, Grouping(4, "f16")),
    WeightKind.Q4_0: (32, Grouping(0, "f16")),
    WeightKind.Q4_1: (32, Grouping(0, "f16", "added")),
    WeightKind.Q5_0: (32, Grouping(1, "f16")),
    WeightKind.Q5_1: (32, Grouping(1, "f16", "added")),
    WeightKind.Q4_K: (32, Grouping(0, "two", "added")),
    WeightKind.Q5_K: (32, Grouping(1, "two", "added")),
    WeightKind.Q6_K: (16, Grouping(2, "two")),
    WeightKind.Q3_K: (16, Grouping(0, "two")),  # numbers of three bits and of two are held in four
    WeightKind.Q2_K: (16, Grouping(0, "two", "added")),
    WeightKind.IQ4_NL: (32, Grouping(0, "f16", table="iq4_nl")),
    WeightKind.IQ4_XS: (32, Grouping(0, "two", table="iq4_nl")),
    WeightKind.MXFP4: (32, Grouping(0, "bf16", table="e2m1")),
    WeightKind.MXFP4_PARTS: (32, Grouping(0, "bf16", table="e2m1")),
    WeightKind.NVFP4_PARTS: (16, Grouping(0, "f32", table="e2m1")),
}
"""Kinds that there is a code for, whatever a tensor is like: inputs that share a scale, and how numbers and scales are
held."""
ROW_KINDS: Mapping[WeightKind, RowForm] = {
    WeightKind.MXFP4: MX,
    WeightKind.MXFP4_PARTS: MX,
    WeightKind.NVFP4_PARTS: NVFP4,
    WeightKind.Q8_0: RowForm(8, "whole", 32, "f16"),
    WeightKind.Q4_0: RowForm(4, "whole", 32, "f16"),
    WeightKind.Q4_1: RowForm(4, "whole", 32, "f16", "added"),
    WeightKind.Q5_0: RowForm(5, "whole", 32, "f16"),
    WeightKind.Q5_1: RowForm(5, "whole", 32, "f16", "added"),
    WeightKind.Q2_K: RowForm(2, "whole", 16, "two", "added"),
    WeightKind.Q3_K: RowForm(3, "whole", 16, "two"),
    WeightKind.Q4_K: RowForm(4, "whole", 32, "two", "added"),
    WeightKind.Q5_K: RowForm(5, "whole", 32, "two", "added"),
    WeightKind.Q6_K: RowForm(6, "whole", 16, "two"),
    WeightKind.IQ4_NL: RowForm(4, "iq4_nl", 32, "f16"),
    WeightKind.IQ4_XS: RowForm(4, "iq4_nl", 32, "two"),
}
"""The same of experts, whose numbers lie by rows."""
_SCALE_TYPES: Mapping[ScaleKind, Literal["f16", "bf16"]] = {ScaleKind.F16: "f16", ScaleKind.BF16: "bf16"}


def is_low_bit(formats: Formats) -> bool:
    """Whether layers' matrices are held in fewer bits than they are computed with."""
    return formats.weights == STORED or formats.weights in QUANTISED_TO


@dataclass(frozen=True, slots=True)
class Held:
    """How layers' matrices are held, by their names; one that is not there, in the type that is computed in."""

    codes: Mapping[str, Code] = field(default_factory=dict)
    with_order: frozenset[str] = frozenset()
    """Those whose inputs have an order of their own."""
    experts: frozenset[str] = frozenset()
    """Those of experts."""
    declined: Mapping[str, str] = field(default_factory=dict)
    """Why one that is stored in few bits is not held so."""
    in_float8: frozenset[str] = frozenset()
    """Those whose rows may be rounded to float8: the file's makers meant it, or somebody asked for it."""

    @property
    def dense_codes(self) -> set[Code]:
        """Of matrices that every token meets."""
        return {code for name, code in self.codes.items() if name not in self.experts}

    @property
    def float8_codes(self) -> set[Code]:
        """Of dense matrices whose rows may be rounded to float8."""
        return {self.codes[name] for name in self.in_float8 if name not in self.experts}

    @property
    def notes(self) -> tuple[str, ...]:
        """What is held as stored and what is not, for a user to read."""
        found = Counter(code.name for code in self.codes.values())
        told = [f"{count} matrices in {name}" for name, count in found.most_common()]
        reasons = Counter(self.declined.values())
        return tuple(told) + tuple(f"{count} brought to bf16: {why}" for why, count in reasons.most_common())


AS_COMPUTED = Held()


def all_held_in(code: Code | None) -> Held:
    """Of one matrix that stands for all; None: in the type that is computed in."""
    return AS_COMPUTED if code is None else Held({"": code})


class Stored(NamedTuple):
    """Of the layers' matrices: its name, those of its tensors, and whether it is experts'."""

    name: str
    tensors: tuple[str, ...]
    is_experts: bool = False


def stored_held(checkpoint: Checkpoint, matrices: Iterable[Stored]) -> Held:
    codes, with_order, experts, declined = {}, set(), set(), {}
    for name, tensors, is_experts in matrices:
        if is_experts:
            experts.add(name)
        found = (experts_code if is_experts else code_for)([checkpoint.tensors[tensor] for tensor in tensors])
        if isinstance(found, str):
            declined[name] = found
            continue
        codes[name] = found
        if order_of(checkpoint.tensors[tensors[0]]) is not None:
            with_order.add(name)
    return Held(codes, frozenset(with_order), frozenset(experts), declined)


def experts_code(tensors: Sequence[WeightTensor]) -> Code | str:
    """As `code_for`, of experts: kernels that take several matrices read one form of rows."""
    found: dict[RowForm, WeightTensor] = {}
    for tensor in tensors:
        form = _row_form(tensor)
        if isinstance(form, str):
            return form
        found[form] = tensor
    first, *others = found
    if not others:
        return first.code
    if any(form.levels not in ("whole", "iq4_nl") for form in found):
        return f"experts of {' and '.join(sorted({one.kind.name for one in found.values()}))} have no form together"
    return replace(HOLDS_ALL, group=min(32, *(form.group or 32 for form in found))).code


def as_units(form: RowForm) -> Code | None:
    """The code that holds the same numbers and scales in units; None: there is none."""
    group = form.group or LOW_BIT_DEPTH
    if form == MX:
        return MX_UNITS
    if form.levels == "e4m3":
        return grouped_code(group, Grouping(4, "f32", is_float8=True)) if form.group else FP8_UNITS
    if form.levels == "e2m1" or form.scale not in ("f16", "bf16", "f32", "two"):
        return None
    if form.levels == "whole" and (form.bits, form.scale, form.offset) == (4, "bf16", "none"):
        return next((code for code in FOUR_BITS if code.group == group and not code.has_offsets), None)
    table: Table | None = "iq4_nl" if form.levels == "iq4_nl" else None
    code = grouped_code(group, Grouping(max(0, form.bits - 4), form.scale, form.offset, table=table))
    return code if code in GROUPED_CODES else None


def _row_form(tensor: WeightTensor) -> RowForm | str:
    name = tensor.kind.name.removesuffix("_PARTS")
    if (form := ROW_KINDS.get(tensor.kind)) is not None:
        return form
    if not isinstance(tensor, ScaledTensor):
        what = "experts have no form on this backend" if tensor.kind.is_quantised else "is not in few bits"
        return f"{name} {what}"
    parts = tensor.outline
    if parts.group_of_input is not None:
        return "experts whose inputs have an order of their own have no form on this backend"
    scale: RowScale = "f32" if parts.global_scale is not None else _SCALE_TYPES.get(parts.scale_kind, "f32")
    group = 0 if parts.group_size >= parts.shape[1] else parts.group_size
    offset: Offset = "none" if parts.zeros is None else "zero"
    if tensor.kind is WeightKind.FP8:
        found = RowForm(8, "e4m3", group, "f32")
    else:
        found = RowForm(4 if tensor.kind is WeightKind.INT4 else 8, "whole", group, scale, offset)
    return found if found in ROW_FORMS else f"groups of {group} inputs have no form for experts on this backend"


def code_for(tensors: Sequence[WeightTensor]) -> Code | str:
    """What holds these tensors, joined by rows, as they are; or why nothing does."""
    if all(_is_by_row(tensor) for tensor in tensors):
        return FP8
    orders = [order_of(tensor) for tensor in tensors]
    if not all(_are_equal(orders[0], order) for order in orders):
        return "parts of one matrix have inputs in different orders"
    found = []
    for tensor in tensors:
        nature = _nature(tensor)
        if isinstance(nature, str):
            return nature
        found.append(nature)
    plain = Grouping(0, "bf16")
    if orders[0] is None and all(grouping == plain for _, grouping in found):
        group = min(size for size, _ in found)
        return next(code for code in FOUR_BITS if code.group == group and not code.has_offsets)
    return _joined(found)


Order = npt.NDArray[np.intp]


def _are_equal(one: Order | None, other: Order | None) -> bool:
    return one is other if one is None or other is None else np.array_equal(one, other)


def means_float8(tensor: WeightTensor) -> bool:
    """Whether the file's makers meant its inputs to be float8."""
    return isinstance(tensor, ScaledTensor) and tensor.activations is not None and tensor.activations.kind == "fp8"


def order_of(tensor: WeightTensor) -> Order | None:
    """Inputs in the order of their groups, where groups do not follow one another."""
    if not isinstance(tensor, ScaledTensor) or (groups := tensor.outline.group_of_input) is None:
        return None
    return np.argsort(groups, kind="stable")


def _is_by_row(tensor: WeightTensor) -> bool:
    """Float8 with a scale a row or fewer, whose inputs are meant to be float8 as well."""
    if not isinstance(tensor, ScaledTensor) or tensor.kind is not WeightKind.FP8 or tensor.activations is None:
        return False
    return tensor.outline.scales.shape[1] == 1


def _nature(tensor: WeightTensor) -> tuple[int, Grouping] | str:
    if tensor.kind in BLOCKS:
        return BLOCKS[tensor.kind]
    if not isinstance(tensor, ScaledTensor):
        what = "has no form on this backend" if tensor.kind.is_quantised else "is not in few bits"
        return f"{tensor.kind.name} {what}"
    if tensor.kind not in (WeightKind.FP8, WeightKind.INT8, WeightKind.INT4):
        return f"{tensor.kind.name.removesuffix('_PARTS')} has no form on this backend"
    parts = tensor.outline
    group = LOW_BIT_DEPTH if parts.group_size >= parts.shape[1] else parts.group_size
    group = LOW_BIT_DEPTH if group % LOW_BIT_DEPTH == 0 else group
    if group not in (128, 64, 32):
        return f"groups of {group} inputs have no form on this backend, those of 32, 64 and 128 have"
    if parts.group_of_input is not None and (np.bincount(parts.group_of_input) != parts.group_size).any():
        return "an order of inputs leaves groups of different sizes"
    if tensor.kind is WeightKind.FP8:
        return group, Grouping(4, "f32", is_float8=True)
    scale: ScaleType = "f32" if parts.global_scale is not None else _SCALE_TYPES.get(parts.scale_kind, "f32")
    return group, Grouping(0 if tensor.kind is WeightKind.INT4 else 4, scale, "none" if parts.zeros is None else "zero")


def _joined(found: Sequence[tuple[int, Grouping]]) -> Code | str:
    """The code of fewest bits that holds all of them."""
    group, groupings = min(size for size, _ in found), {grouping for _, grouping in found}
    if len({grouping.is_float8 for grouping in groupings}) > 1:
        return "parts of one matrix are float8 and whole numbers"
    tables = {grouping.table for grouping in groupings}
    highs, scales = {grouping.high_bits for grouping in groupings}, {grouping.scale for grouping in groupings}
    offsets = {grouping.offset for grouping in groupings}
    offset: Offset = "zero" if "zero" in offsets else "added"
    if len(offsets) == len(highs) == 1:
        offset = next(iter(offsets))
    scale = next(iter(scales)) if len(scales) == 1 else "f32"
    is_float8 = any(grouping.is_float8 for grouping in groupings)
    code = grouped_code(group, Grouping(max(highs), scale, offset, is_float8, next(iter(tables))))
    if len(tables) == 1 and code in GROUPED_CODES:
        return code
    return grouped_code(min(group, 32), Grouping(4, "f32", "added"))
