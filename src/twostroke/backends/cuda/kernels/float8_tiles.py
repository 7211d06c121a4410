"""Products in float8 of weights in few bits: which codes have numbers that are whole in float8, and how the products
are cut. A table says where they are taken, or whoever asked for them (`Card.prefers_float8`): rows are rounded for
them, and no rule does that unasked. Knows no torch: whoever plans for a card asks here too."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from twostroke.backends.cuda.kernels.expert_tiles import LEAST_UNPACKED_ROWS, NO_EXPERTS
from twostroke.backends.cuda.kernels.packed_format import (
    FOUR_BITS,
    FP8_UNITS,
    GROUPED_CODES,
    LOW_BIT_DEPTH,
    MX_UNITS,
    Code,
)
from twostroke.backends.cuda.kernels.product import Card, Product, Settings, settings_of
from twostroke.backends.cuda.kernels.row_forms import ROW_FORMS

ROW_GROUP: Final = 128
"""Inputs of a row that share a scale, and that are summed before sums are scaled."""
LEAST_GROUP: Final = 32
"""Inputs that a float8 instruction takes at a time."""
LIBRARY_ROWS: Final = 4
"""The library takes rows in fours, as its scales lie in sixteen bytes: up to three that are nobody's come along."""


@dataclass(frozen=True, slots=True)
class Float8Tile:
    """What a program takes: `rows` by `outputs` (of gate and of up, each)."""

    rows: int
    outputs: int
    num_warps: int
    num_stages: int
    sums: int = 0

    def stage_bytes(self, depth: int, *, gated: bool) -> int:
        return (self.rows + self.outputs * (2 if gated else 1)) * depth


@dataclass(frozen=True, slots=True)
class LibraryTile:
    """The library cuts by rules of its own."""

    sums: int = 0


TILES: Final = {
    True: (Float8Tile(64, 64, 4, 4), Float8Tile(128, 64, 8, 3), Float8Tile(64, 128, 8, 3)),
    False: (
        Float8Tile(64, 64, 4, 4),
        Float8Tile(64, 128, 4, 4),
        Float8Tile(128, 128, 8, 3),
        Float8Tile(128, 128, 8, 4),
        Float8Tile(64, 256, 8, 3),
    ),
}
"""For gates and for others."""
RULE: Final = {True: TILES[True][1], False: TILES[False][2]}
FEW_ROWS: Final = 64
"""Up to which tiles of 64 rows are taken where no table has a line."""


def whole_fours(rows: int) -> int:
    """The rows that the library multiplies for this many."""
    return -(-rows // LIBRARY_ROWS) * LIBRARY_ROWS


def is_whole_in_float8(code: Code) -> bool:
    """Whether numbers of this code are float8 as they are, or come to be without an error: whole ones up to sixteen."""
    if code.by_rows is not None:
        return code.by_rows.levels == "e4m3"  # those lie as products read them
    if code in (FP8_UNITS, MX_UNITS) or (code in FOUR_BITS and not code.has_offsets):
        return True
    own = code.grouping
    if own is None or code.group < LEAST_GROUP:
        return False
    if own.is_float8 or own.table == "e2m1":
        return True
    return own.table is None and own.high_bits == 0 and own.scale != "two" and own.offset in ("none", "zero")


DENSE_FLOAT8: Final = tuple(code for code in (*FOUR_BITS, *GROUPED_CODES) if is_whole_in_float8(code))
UNITS_FLOAT8: Final = (FP8_UNITS, MX_UNITS, *DENSE_FLOAT8)
ROWS_FLOAT8: Final = tuple(form.code for form in ROW_FORMS if is_whole_in_float8(form.code))


def in_float8(code: Code) -> str:
    """The name of the form of which products in float8 may be made."""
    return f"{code.name}_in_float8"


def scale_group(code: Code) -> int:
    """Inputs that share a scale; 0: all of a row do."""
    if code.by_rows is not None:
        return code.by_rows.group
    return 0 if code.has_factors else code.group


def scale_groups(code: Code, width: int) -> int:
    """Of a row, as they lie for a product: of whole rounds."""
    group = scale_group(code)
    return code.rounds(width) * LOW_BIT_DEPTH // group if group else 1


def float8_bytes(shape: tuple[int, ...], code: Code) -> int:
    """Of a matrix, or of all experts', that lies as products in float8 read it, scales and all."""
    if code.by_rows is not None:
        return 0
    *experts, rows, width = shape
    each = rows * (code.rounds(width) * LOW_BIT_DEPTH + 4 * scale_groups(code, width))
    return each * (experts[0] if experts else 1)


class Float8Products:
    """Rows with a scale for 128 inputs, by weights of one code, in Triton: 128 inputs at most are summed by the matrix
    instruction, and those sums are scaled and added up in float32."""

    fuses = False

    def __init__(self, code: Code) -> None:
        self.name, self.form = f"{code.name}_float8", in_float8(code)

    def tile(self, product: Product, rows: int, card: Card, settings: Settings) -> Float8Tile | str:
        if product.experts or product.role == "head":
            return "it takes one matrix of a layer"
        return _tile(product, rows, card, settings, FEW_ROWS)

    def candidates(self, product: Product, rows: int, card: Card) -> list[Settings]:
        return _candidates(product, rows)


class LibraryFloat8Products:
    """The same by the library, where it has such products."""

    fuses = False

    def __init__(self, code: Code) -> None:
        self.name, self.form, self._code = f"{code.name}_float8_library", in_float8(code), code

    def tile(self, product: Product, rows: int, card: Card, settings: Settings) -> LibraryTile | str:
        if not card.has_hopper_kernels or not card.has_float8:
            return "it needs a Hopper GPU"
        if card.lacks_group_scales:
            return "it needs a torch built for CUDA 12.9 or newer"
        if product.experts or product.role == "head" or scale_group(self._code) != ROW_GROUP:
            return f"it takes one matrix of a layer, with a scale for {ROW_GROUP} inputs"
        return "it takes outputs in sixteens" if product.shape[-2] % 16 else LibraryTile()

    def candidates(self, product: Product, rows: int, card: Card) -> list[Settings]:
        return [{}] if rows >= FEW_ROWS else []


class Float8Experts:
    """Rows sorted by expert, as `Float8Products`."""

    fuses = False

    def __init__(self, code: Code) -> None:
        self.name, self.form = f"{code.name}_float8_experts", in_float8(code)
        self._is_read_as_it_lies = code.by_rows is not None

    def tile(self, product: Product, rows: int, card: Card, settings: Settings) -> Float8Tile | str:
        if not product.experts:
            return NO_EXPERTS
        if rows < LEAST_UNPACKED_ROWS * product.experts and (not settings or self._has_no_room(card)):
            return "of few rows weights are read as they are held"
        return _tile(product, rows, card, settings, FEW_ROWS * product.experts)

    @staticmethod
    def beginnings(product: Product) -> list[int]:
        """The numbers of rows from which on there is a tile by rule, and from which on it is another."""
        return [LEAST_UNPACKED_ROWS * product.experts, FEW_ROWS * product.experts + 1]

    def _has_no_room(self, card: Card) -> bool:
        """To bring weights to, which short steps have none of."""
        return not self._is_read_as_it_lies and card.has_hopper_kernels

    def candidates(self, product: Product, rows: int, card: Card) -> list[Settings]:
        return _candidates(product, rows) if rows >= LEAST_UNPACKED_ROWS * product.experts else []


def _tile(product: Product, rows: int, card: Card, settings: Settings, few: int) -> Float8Tile | str:
    if not card.has_float8:
        return "it needs tensor cores that multiply float8"
    if settings:
        return Float8Tile(**settings)
    if not card.prefers_float8:
        return "rows are rounded for it, which nobody asked for"
    return TILES[product.is_gated][0] if rows <= few else RULE[product.is_gated]


def _candidates(product: Product, rows: int) -> list[Settings]:
    """Of few rows, those that do not multiply many that are not there."""
    tiles = TILES[product.is_gated]
    return [settings_of(tile) for tile in tiles if rows >= FEW_ROWS and (tile.rows <= FEW_ROWS or rows > FEW_ROWS)]
