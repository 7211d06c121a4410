"""How numbers of few bits lie by rows, as files have them, for experts: planes of bits, what a number stands for, and
what scales a group of inputs has. A form is data: one pair of kernels reads them all. Knows no torch."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import product as all_of
from typing import Final, Literal

from twostroke.backends.cuda.kernels.packed_format import LOW_BIT_DEPTH, Code, Offset

Levels = Literal["whole", "e2m1", "e4m3", "iq4_nl"]
"""What a number stands for: itself, less the middle one where there is no offset; a float of four or eight bits; or an
entry of llama.cpp's table."""
RowScale = Literal["f16", "bf16", "f32", "two", "e8m0", "e4m3"]
"""What a group's scale is held in: a float; a signed byte beside a float16 of 256 inputs; a power of two; or a float8
beside a float32 of the row."""
PLANES: Final = {2: (2, 0), 3: (2, 1), 4: (4, 0), 5: (4, 1), 6: (4, 2), 8: (8, 0)}
"""Bits of a number in the first plane and in the second, whose numbers lie above; a byte has the first one lowest."""
SCALE_BYTES: Final[dict[RowScale, int]] = {"f16": 2, "bf16": 2, "f32": 4, "two": 1, "e8m0": 1, "e4m3": 1}
TOP_INPUTS: Final = 256
"""That share a float16 where scales are in two levels."""
ROWS: Final = 6
"""The number of all codes that lie by rows: no kernel in CUDA C++ reads one."""


@dataclass(frozen=True, slots=True)
class RowForm:
    """A constant of kernels in Triton, which read its properties too."""

    bits: int
    levels: Levels
    group: int
    """Inputs that share a scale; 0: all of a row do."""
    scale: RowScale
    offset: Offset = "none"

    @property
    def low_bits(self) -> int:
        return PLANES[self.bits][0]

    @property
    def high_bits(self) -> int:
        return PLANES[self.bits][1]

    @property
    def middle(self) -> int:
        return 1 << (self.bits - 1)

    @property
    def kinds(self) -> int:
        """Of values that a group has."""
        return 1 if self.offset == "none" else 2

    @property
    def least_inputs(self) -> int:
        """That kernels take at a time."""
        return max(32, 8 // max(1, self.high_bits))

    @property
    def name(self) -> str:
        if (self.levels, self.scale) == ("e2m1", "e8m0"):
            return "mxfp4"
        kind = f"int{self.bits}" if self.levels == "whole" else self.levels
        letters = {"f16": "h", "bf16": "b", "f32": "f", "two": "k", "e8m0": "m", "e4m3": "e"}
        group = self.group or "row"
        return f"experts_{kind}_{group}{letters[self.scale]}{self.offset.replace('none', '')[:1]}"

    def groups(self, width: int) -> int:
        return -(-width // self.group) if self.group else 1

    def tops(self, width: int) -> int:
        """Of a row, of each kind."""
        return {"two": -(-width // TOP_INPUTS), "e4m3": 1}.get(self.scale, 0)

    def row_bytes(self, width: int) -> int:
        numbers = width * self.low_bits // 8 + width * self.high_bits // 8
        top_bytes = 2 if self.scale == "two" else 4
        scales = self.kinds * (self.groups(width) * SCALE_BYTES[self.scale] + self.tops(width) * top_bytes)
        return numbers + scales

    @property
    def code(self) -> Code:
        return Code(self.name, ROWS, LOW_BIT_DEPTH, 0, by_rows=self)


MX: Final = RowForm(4, "e2m1", 32, "e8m0")
MXFP4: Final = MX.code
NVFP4: Final = RowForm(4, "e2m1", 16, "e4m3")
HOLDS_ALL: Final = RowForm(8, "whole", 16, "f32", "added")
"""Any whole numbers, of groups of any size."""


def _row_forms() -> Iterator[RowForm]:
    yield from (MX, NVFP4)
    floats: tuple[RowScale, ...] = ("f16", "bf16", "f32")
    offsets: tuple[Offset, ...] = ("none", "zero")
    for bits, group, scale, offset in all_of((4, 8), (0, 128, 64, 32), floats, offsets):  # folders
        yield RowForm(bits, "whole", group, scale, offset)
    for group in (0, 128, 64, 32):
        yield RowForm(8, "e4m3", group, "f32")
    yield RowForm(5, "whole", 32, "f16")  # GGUF's blocks of 32: those of four and eight bits are above
    for bits in (4, 5):
        yield RowForm(bits, "whole", 32, "f16", "added")
    yield RowForm(4, "iq4_nl", 32, "f16")
    for bits, group in ((4, 32), (5, 32), (2, 16)):  # and of 256
        yield RowForm(bits, "whole", group, "two", "added")
    for bits in (6, 3):
        yield RowForm(bits, "whole", 16, "two")
    yield RowForm(4, "iq4_nl", 32, "two")
    for group in (64, 32, 16):  # which hold what parts of one matrix have between them
        yield replace(HOLDS_ALL, group=group)


ROW_FORMS: Final = tuple(_row_forms())
"""What experts that are stored in few bits are held in."""
