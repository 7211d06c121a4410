"""Weights of few bits by their sizes alone: how each code lies, what a matrix must be like to be held in it, and what
it takes then. Knows no torch: whoever plans for a card asks here too."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from itertools import product as all_of
from math import prod
from typing import TYPE_CHECKING, Final, Literal

if TYPE_CHECKING:
    from twostroke.backends.cuda.kernels.row_forms import RowForm

UNIT_ROWS: Final = 64
"""Rows lie in units, as many as a warp group multiplies at a time."""
DEPTH: Final = 64
"""Inputs of a unit that lie together, in twelve bits: what a round of a product takes."""
ROUND_BYTES: Final = UNIT_ROWS * DEPTH * 3 // 2


LOW_BIT_DEPTH: Final = 128
"""As DEPTH, of codes of eight bits and fewer."""


ScaleType = Literal["f16", "bf16", "f32", "two"]
"""What a group's scale is held in: a float, or a signed byte beside a float16 that the groups of a round share."""
Offset = Literal["none", "added", "zero"]
"""Of a group: the middle number stands for nothing; a float is added; a number of its own stands for nothing."""


Table = Literal["e2m1", "iq4_nl"]


@dataclass(frozen=True, slots=True)
class Levels:
    """What the sixteen numbers of four bits stand for, as whole numbers that have the middle one added."""

    number: int  # of the kernels
    entries: tuple[int, ...]
    middle: int

    @property
    def words(self) -> tuple[int, ...]:
        """Four entries each."""
        return tuple(int.from_bytes(bytes(self.entries[at : at + 4]), "little") for at in range(0, 16, 4))


_E2M1: Final = (0, 1, 2, 3, 4, 6, 8, 12)
_IQ4_NL: Final = (-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113)
TABLES: Final[dict[Table, Levels]] = {
    "e2m1": Levels(1, (*(16 + one for one in _E2M1), *(16 - one for one in _E2M1)), 16),
    "iq4_nl": Levels(2, tuple(128 + one for one in _IQ4_NL), 128),
}
"""Floats of four bits, twice as large as they are, so that scales are half as large; and llama.cpp's table."""


@dataclass(frozen=True, slots=True)
class Grouping:
    """Of codes that hold numbers and scales as a file has them: weights are made in float32 and rounded once, to what
    the file's weights are in bfloat16 (grouped_numbers.py)."""

    high_bits: int
    """Of a number, above the lowest four: 0, 1, 2 or 4."""
    scale: ScaleType
    offset: Offset = "none"
    is_float8: bool = False
    """Numbers are the bits of an e4m3."""
    table: Table | None = None
    """Numbers of four bits are places in it."""

    @property
    def middle(self) -> int:
        """The number that stands for nothing, where there is no offset."""
        return TABLES[self.table].middle if self.table is not None else 8 << self.high_bits

    @property
    def kinds(self) -> int:
        """Of values that a group has."""
        return 1 if self.offset == "none" else 2

    @property
    def number_bytes(self) -> int:
        """Of a round of a unit."""
        return UNIT_ROWS * LOW_BIT_DEPTH * (4 + self.high_bits) // 8

    def scale_bytes(self, scales: int) -> int:
        if self.scale == "two":
            return self.kinds * UNIT_ROWS * (2 + scales)
        return self.kinds * UNIT_ROWS * scales * (4 if self.scale == "f32" else 2)


@dataclass(frozen=True, slots=True)
class Code:
    """How weights are held that a product brings to bfloat16 in registers."""

    name: str
    """That of the form, and of the kernel that reads it."""
    number: int
    """CODE of the kernels."""
    depth: int
    unit_bytes: int
    """Of a round of a unit."""
    scales: int = 0
    """Of a row in a round; 0: a row has one factor, or none."""
    has_offsets: bool = False
    grouping: Grouping | None = None
    """None: scales are held in bfloat16, and weights are made in it."""
    by_rows: RowForm | None = None
    """Of experts, whose numbers lie by rows, as files have them; no other field but the name means anything then."""

    @property
    def group(self) -> int:
        """Inputs that share a scale."""
        return self.depth // self.scales

    @property
    def has_factors(self) -> bool:
        return self.scales == 0

    def constants(self) -> dict[str, int]:
        found = {"CODE": self.number, "SCALES": self.scales, "OFFSETS": int(self.has_offsets)}
        if (own := self.grouping) is not None:
            found |= {"OFFSETS": OFFSETS[own.offset], "HIGH": own.high_bits}
            found |= {"SCALE_TYPE": SCALE_TYPES[own.scale], "FLOAT8": int(own.is_float8), "MIDDLE": own.middle}
            words = (0, 0, 0, 0) if own.table is None else TABLES[own.table].words
            found |= {"TABLE": int(own.table is not None), **{f"ENTRIES_{at}": word for at, word in enumerate(words)}}
        return found

    def rounds(self, width: int) -> int:
        """The last one may be partly of inputs that are not there."""
        return -(-width // self.depth)

    def num_bytes(self, shape: tuple[int, ...]) -> int:
        """Of a matrix, [..., rows, width]; one held by rows has no more of them than it has."""
        *experts, rows, width = shape
        if self.by_rows is not None:
            return prod(experts) * rows * self.by_rows.row_bytes(width)
        held = rows if self.number == FP8.number else units_of(rows) * UNIT_ROWS
        own = self.rounds(width) * self.unit_bytes * held // UNIT_ROWS
        factors = (units_of(rows) * UNIT_ROWS + (rows if self.number == FP8.number else 0)) * 4
        return prod(experts) * (own + (factors if self.has_factors else 0))


def _four_bits(group: int, has_offsets: bool) -> Code:
    scales = LOW_BIT_DEPTH // group
    unit_bytes = UNIT_ROWS * (LOW_BIT_DEPTH // 2 + scales * (4 if has_offsets else 2))
    return Code(f"int4_{group}{'z' * has_offsets}", 4, LOW_BIT_DEPTH, unit_bytes, scales, has_offsets)


TWELVE: Final = Code("packed", 12, DEPTH, ROUND_BYTES)
FP8: Final = Code("fp8", 8, LOW_BIT_DEPTH, UNIT_ROWS * LOW_BIT_DEPTH)
FOUR_BITS: Final = tuple(_four_bits(group, has) for group in (128, 64, 32) for has in (False, True))
INT4: Final = FOUR_BITS[0]
"""What a bfloat16 matrix becomes when it is brought to four bits as it is loaded."""
FP8_UNITS: Final = Code("fp8_units", 7, LOW_BIT_DEPTH, UNIT_ROWS * LOW_BIT_DEPTH)
MX_GROUP: Final = 32
MX_SCALES: Final = LOW_BIT_DEPTH // MX_GROUP
MX_UNITS: Final = Code("mxfp4_units", 6, LOW_BIT_DEPTH, UNIT_ROWS * (LOW_BIT_DEPTH // 2 + MX_SCALES), MX_SCALES)
"""Those two are of experts alone (expert_units.py)."""
LOW_BIT_CODES: Final = (FP8, *FOUR_BITS)
"""What a matrix may be brought to as it is loaded."""
SCALE_TYPES: Final[dict[ScaleType, int]] = {"f16": 0, "bf16": 1, "f32": 2, "two": 3}
OFFSETS: Final[dict[Offset, int]] = {"none": 0, "added": 1, "zero": 2}
GROUPED: Final = 5
"""The kernels' number for all that has a `Grouping`."""


@cache
def grouped_code(group: int, grouping: Grouping) -> Code:
    """Of numbers as a file has them, with a scale for `group` inputs."""
    scales = LOW_BIT_DEPTH // group
    bits, letters = 4 + grouping.high_bits, {"f16": "h", "bf16": "b", "f32": "f", "two": "k"}
    name = f"int{bits}_{group}{letters[grouping.scale]}{grouping.offset.replace('none', '')[:1]}"
    unit_bytes = grouping.number_bytes + grouping.scale_bytes(scales)
    if grouping.is_float8:
        name = f"fp8_{group}"
    elif grouping.table is not None:
        name = f"{grouping.table}_{group}{letters[grouping.scale]}"
    return Code(name, GROUPED, LOW_BIT_DEPTH, unit_bytes, scales, grouping.offset != "none", grouping)


def _grouped_codes() -> Iterator[Code]:
    floats: tuple[ScaleType, ...] = ("f16", "bf16", "f32")
    offsets: tuple[Offset, ...] = ("none", "zero")
    for group, scale, offset, high in all_of((128, 64, 32), floats, offsets, (0, 4)):  # folders
        yield grouped_code(group, Grouping(high, scale, offset))
    for group in (128, 64, 32):
        yield grouped_code(group, Grouping(4, "f32", is_float8=True))
    for high in (0, 1, 4):  # GGUF's blocks of 32, of which those without a minimum are above, but for five bits
        yield grouped_code(32, Grouping(high, "f16", "added"))
    yield grouped_code(32, Grouping(1, "f16"))
    for group, high, offset in ((32, 0, "added"), (32, 1, "added"), (16, 2, "none"), (16, 2, "added")):  # of 256
        yield grouped_code(group, Grouping(high, "two", offset))
    yield grouped_code(16, Grouping(0, "two"))  # of three bits
    yield grouped_code(16, Grouping(0, "two", "added"))  # and of two
    yield grouped_code(32, Grouping(0, "bf16", table="e2m1"))
    yield grouped_code(16, Grouping(0, "f32", table="e2m1"))
    yield grouped_code(32, Grouping(0, "f16", table="iq4_nl"))
    yield grouped_code(32, Grouping(0, "two", table="iq4_nl"))
    for group in (32, 16):  # which hold all of those
        yield grouped_code(group, Grouping(4, "f32", "added"))


GROUPED_CODES: Final = tuple(_grouped_codes())
"""What weights that are stored in few bits are held in."""
UNIT_CODES: Final = (MX_UNITS, FP8_UNITS, *FOUR_BITS, *GROUPED_CODES)
"""What experts are held in where they lie in units."""


def units_of(rows: int) -> int:
    return -(-rows // UNIT_ROWS)


def packed_bytes(rows: int, depth: int) -> int:
    return units_of(rows) * (depth // DEPTH * ROUND_BYTES + UNIT_ROWS * 4)


def can_be_units(shape: tuple[int, ...], *, is_gated: bool) -> bool:
    """Whether experts' matrices can lie in units: products copy sixteen bytes of a row of inputs at a time, and gates
    and ups take turns of eight."""
    rows, width = shape[-2:]
    return width % 8 == 0 and rows % (16 if is_gated else 8) == 0


def can_pack(shape: tuple[int, ...], *, is_gated: bool = False) -> bool:
    """Whether a matrix of bfloat16 has a form for it. Products take two rounds of inputs at a time."""
    rows, depth = shape[-2:]
    return depth % (2 * DEPTH) == 0 and rows % (16 if is_gated else 8) == 0
