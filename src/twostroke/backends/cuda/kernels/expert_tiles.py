"""How the experts' products are cut by each of the kernels that compute them. Rows are pairs of a token and one of its
experts, all of a step's. Which kernel a product gets is a table's to say; where it says nothing that a card can follow,
`GroupedExperts` has a rule. Knows no torch: whoever plans for a card asks here too."""

from __future__ import annotations

from dataclasses import dataclass, replace
from math import sqrt
from typing import Final

from twostroke.backends.cuda.kernels.packed_format import Code, can_pack, units_of
from twostroke.backends.cuda.kernels.packed_tiles import LEAST_STAGES, WHOLE_ROUND_ROWS, PackedTile
from twostroke.backends.cuda.kernels.product import DEPTH, Card, Product, Settings, declines, settings_of
from twostroke.backends.cuda.kernels.row_forms import RowForm
from twostroke.models.mlp_spec import ClampedGate

NO_EXPERTS: Final = "it takes experts' matrices"
MAX_PACKED_EXPERTS: Final = 256
"""Whose rows' places find room beside the packed kernel's ring."""
GLUON_SHARED_BYTES: Final = 226 * 1024
THOUSANDTHS: Final = 1000
PLAIN_TILE_ROWS: Final = 64
"""The most where matrix instructions do not read shared memory: more sums would spill the registers that hold them."""


def in_thousandths(gate: ClampedGate) -> tuple[int, int] | None:
    """A gate's limit and slope, as kernels in CUDA C++ are told them; None: they are not exact then."""
    limit, alpha = round(gate.limit * THOUSANDTHS), round(gate.alpha * THOUSANDTHS)
    return (limit, alpha) if (limit / THOUSANDTHS, alpha / THOUSANDTHS) == (gate.limit, gate.alpha) else None


@dataclass(frozen=True, slots=True)
class FewTile:
    """What a program takes for a few tokens: `outputs` outputs, read in pieces of `depth` inputs."""

    outputs: int = 4
    depth: int = 1024
    num_warps: int = 4
    sums: int = 0


@dataclass(frozen=True, slots=True)
class GroupedTile:
    """What a program takes: `rows` by `outputs` (of gate and of up, each), `depth` inputs at a time."""

    rows: int
    outputs: int
    depth: int
    num_warps: int
    num_stages: int
    weights_first: bool = False
    """Multiply weights by rows, not rows by weights: of few rows only this fills Hopper's matrix instruction."""
    bulk: bool = True
    """Weights (and rows that lie in order) come by the bulk copy engine, where the device and the shape allow."""
    sums: int = 0

    def stage_bytes(self, *, gated: bool, element_size: int) -> int:
        return (self.rows + self.outputs * (2 if gated else 1)) * self.depth * element_size


@dataclass(frozen=True, slots=True)
class HopperTile:
    """What a program takes at a time: `rows` by `outputs` (of gate and of up, each)."""

    rows: int
    outputs: int
    stages: int
    num_warps: int = 8
    rows_in_bulk: bool = False
    """Rows that lie in order come by TMA, too: all of a tile's, whether the expert has them or not."""
    pieces: int = 1
    """Results are stored in this many pieces, each by way of shared memory, which is the ring's otherwise."""
    sums: int = 0

    def shared_bytes(self, *, gated: bool) -> int:
        ring = self.stages * DEPTH * 2 * (self.rows + self.outputs * (2 if gated else 1))
        return ring + 2 * self.rows * self.outputs // self.pieces + 8 * self.stages

    def unfit(self, num_inputs: int, num_outputs: int, *, gated: bool) -> str | None:
        """Why it cannot compute such a product, or None."""
        if num_inputs % DEPTH or num_outputs % self.outputs:
            return f"{num_inputs} inputs and {num_outputs} outputs are no multiples of {DEPTH} and {self.outputs}"
        if not 2 <= self.stages <= num_inputs // DEPTH:
            return f"{self.stages} stages are fewer than 2 or more than the {num_inputs // DEPTH} rounds"
        if self.shared_bytes(gated=gated) > GLUON_SHARED_BYTES:
            return f"its {self.shared_bytes(gated=gated)} bytes of shared memory are too many"
        return None


@dataclass(frozen=True, slots=True)
class UnpackedTile:
    """Weights are brought to the type that is computed in first, all experts' of the matrix."""

    inner: HopperTile | GroupedTile
    sums: int = 0


class FewExperts:
    """Reads the weights of every token's own experts, and neither sorts nor shares: both products of a layer. The
    table says so of the first."""

    name, form, fuses = "few_experts", "plain", False

    def tile(self, product: Product, rows: int, card: Card, settings: Settings) -> FewTile | str:
        return FewTile(**settings) if product.experts and product.is_gated else f"{NO_EXPERTS}, gates first"

    def candidates(self, product: Product, rows: int, card: Card) -> list[Settings]:
        """While an expert seldom has two tokens."""
        return [{}] if 2 * rows <= product.experts else []


class StoredFewExperts(FewExperts):
    """The same of weights in few bits. No table has lines for it yet: while an expert seldom has two tokens."""

    def __init__(self, form: RowForm) -> None:
        self.name, self.form = f"{form.name}_few_experts", form.name

    def tile(self, product: Product, rows: int, card: Card, settings: Settings) -> FewTile | str:
        if not settings and rows > self.last_rows(product):
            return "its tokens share no weights"
        return super().tile(product, rows, card, settings)

    @staticmethod
    def last_rows(product: Product) -> int:
        """That it takes by its rule."""
        return product.experts // 2


RULE: Final = {
    True: {
        12: GroupedTile(16, 64, 128, num_warps=4, num_stages=3, weights_first=True),
        24: GroupedTile(32, 128, 64, num_warps=8, num_stages=5, weights_first=True),
        64: GroupedTile(64, 128, 64, num_warps=8, num_stages=5, weights_first=True),
        256: GroupedTile(128, 128, 64, num_warps=8, num_stages=4),
    },
    False: {
        12: GroupedTile(16, 128, 128, num_warps=4, num_stages=3, weights_first=True),
        24: GroupedTile(32, 128, 64, num_warps=4, num_stages=3, weights_first=True),
        64: GroupedTile(64, 128, 64, num_warps=4, num_stages=4, weights_first=True),
        256: GroupedTile(128, 256, 64, num_warps=8, num_stages=4),
    },
}
"""For gates and for others, by the most rows an expert should have on average: what a card without a table goes by."""


class GroupedExperts:
    """Rows sorted by expert, in Triton: for every card and shape."""

    name, form, fuses = "grouped_experts", "plain", False

    def tile(self, product: Product, rows: int, card: Card, settings: Settings) -> GroupedTile | str:
        if not product.experts:
            return NO_EXPERTS
        tile = GroupedTile(**settings) if settings else self._by_rule(product, rows, card)
        if tile.rows > PLAIN_TILE_ROWS and not card.has_hopper_kernels:
            return f"tiles of more than {PLAIN_TILE_ROWS} rows need Hopper's matrix instructions"
        return tile

    def _by_rule(self, product: Product, rows: int, card: Card) -> GroupedTile:
        fitting = [
            (average, tile)
            for average, tile in RULE[product.is_gated].items()
            if card.has_hopper_kernels or tile.rows <= PLAIN_TILE_ROWS
        ]
        return next((tile for average, tile in fitting if rows <= average * product.experts), fitting[-1][1])

    def beginnings(self, product: Product) -> list[int]:
        """The numbers of rows from which on the rule has another tile."""
        return [1, *(average * product.experts + 1 for average in RULE[product.is_gated])]

    def candidates(self, product: Product, rows: int, card: Card) -> list[Settings]:
        """The rule's tile and its neighbours."""
        tiles = list(RULE[product.is_gated].values())
        place = tiles.index(self._by_rule(product, rows, card))
        near = tiles[max(0, place - 1) : place + 2]
        return [settings_of(replace(tile, num_stages=stages)) for tile in near for stages in {tile.num_stages, 3}]


class StoredGroupedExperts(GroupedExperts):
    """The same of weights in few bits, which are brought to floats on their way to the matrix instruction."""

    def __init__(self, form: RowForm) -> None:
        self.name, self.form, self._form = f"{form.name}_grouped_experts", form.name, form

    def tile(self, product: Product, rows: int, card: Card, settings: Settings) -> GroupedTile | str:
        tile = super().tile(product, rows, card, settings)
        return tile if isinstance(tile, str) or settings else self._bounded(tile)

    def candidates(self, product: Product, rows: int, card: Card) -> list[Settings]:
        """The rule's tile and its neighbours, of few enough registers."""
        near = (GroupedTile(**settings) for settings in super().candidates(product, rows, card))
        found = [settings_of(self._bounded(tile)) for tile in near]
        return [each for at, each in enumerate(found) if each not in found[:at]]

    def _bounded(self, tile: GroupedTile) -> GroupedTile:
        tile = replace(tile, rows=min(tile.rows, 64), outputs=min(tile.outputs, 64), depth=64, bulk=False)
        return self._without_spills(tile) if tile.weights_first else tile

    def _without_spills(self, tile: GroupedTile) -> GroupedTile:
        """Of weights with offsets, which are made in registers and multiplied out of them: they need the most. Of 64
        outputs a second four warps would make all weights again. Where a block of inputs shares one zero of four bits,
        only half a block fits."""
        form = self._form
        if form.offset == "none":
            return tile
        has_one_zero = form.bits == 4 and form.offset == "zero" and form.group not in range(1, DEPTH)
        return replace(tile, num_warps=4, depth=DEPTH // 2 if has_one_zero else DEPTH)


class HopperExperts:
    """Rows sorted by expert, for Hopper (`hopper_grouped.py`, in Gluon): programs walk from tile to tile."""

    name, form, fuses = "hopper_experts", "plain", False

    def tile(self, product: Product, rows: int, card: Card, settings: Settings) -> HopperTile | str:
        if not product.experts:
            return NO_EXPERTS
        if (reason := declines(product, card)) is not None:
            return reason
        tile = HopperTile(**settings)
        tile = replace(tile, stages=min(tile.stages, product.width // DEPTH))
        return tile.unfit(product.width, product.outputs, gated=product.is_gated) or tile

    def candidates(self, product: Product, rows: int, card: Card) -> list[Settings]:
        """Where experts fill a tile's rows more or less."""
        if rows < 32 * product.experts:
            return []
        widths = (64, 128) if product.is_gated else (128, 256)
        found: list[Settings] = [
            {"rows": high, "outputs": wide, "stages": stages, "num_warps": high // 16}
            for high in (64, 128)
            for wide in widths
            for stages in (3, 4)
        ]
        if not product.is_gated:
            found += [{**each, "rows_in_bulk": True, "pieces": 2} for each in found]
        return found


class UnitExperts:
    """The same of weights in few bits that lie in units, in CUDA C++. It has a rule, as the package's table has no
    lines for it."""

    fuses = False

    def __init__(self, code: Code) -> None:
        self.name, self.form, self._code = f"{code.name}_experts", code.name, code

    def tile(self, product: Product, rows: int, card: Card, settings: Settings) -> PackedTile | str:
        if not 0 < product.experts <= MAX_PACKED_EXPERTS:
            return f"{NO_EXPERTS}, of {MAX_PACKED_EXPERTS} at most"
        if not card.has_hopper_kernels:
            return "it needs a Hopper GPU, a 16-bit type and CUDA's compiler"
        if not settings and rows > MOST_UNPACKED_ROWS * product.experts:
            return "of more rows an expert than that, weights are brought to floats once"
        tile = PackedTile(**(settings or self._by_rule(product, rows, card)), code=self._code)
        return tile if tile.held_stages >= tile.least_stages else "it does not fit on a multiprocessor"

    def _by_rule(self, product: Product, rows: int, card: Card) -> Settings:
        """Where few experts are met, more programs have something to read if each takes half as much."""
        high = next((high for high in TILE_ROWS if rows <= most_rows(product, high)), TILE_ROWS[-1])
        groups, units = (2, 2) if product.is_gated else (4, 1)
        if min(rows, product.experts) < rows_of_large_tiles(product, card):
            groups, units = 2, 1
        return {"rows": high, "groups": groups, "units": units}

    @staticmethod
    def beginnings(product: Product, card: Card) -> list[int]:
        """The numbers of rows from which on the rule has another tile, and from which on it has none."""
        higher = (most_rows(product, high) + 1 for high in TILE_ROWS[:-1])
        return [rows_of_large_tiles(product, card), *higher, MOST_UNPACKED_ROWS * product.experts + 1]

    def candidates(self, product: Product, rows: int, card: Card) -> list[Settings]:
        """From the average on, until most experts' rows have room."""
        average = min(rows / product.experts, TILE_ROWS[-1])
        if rows > MOST_UNPACKED_ROWS * product.experts:
            return []
        return [
            {"rows": high, "groups": groups, "units": units}
            for high in TILE_ROWS
            if average <= high <= max(32, 2.5 * average)
            for groups, units in ((2, 2), (4, 1), (2, 1))
        ]


TILE_ROWS: Final = tuple(range(8, WHOLE_ROUND_ROWS + 1, 8))
MOST_UNPACKED_ROWS: Final = 256
"""An expert's, on average, up to which weights are unpacked for each tile of rows anew, where no table has a line."""
LEAST_UNPACKED_ROWS: Final = 64
"""An expert's, on average, from which on it is worth measuring whether weights are brought to floats first."""


def rows_of_large_tiles(product: Product, card: Card) -> int:
    """From how many on, of an expert each, there is a tile of four units for every multiprocessor."""
    return -(-card.num_sms // -(-units_of(product.shape[-2]) // 4))


def most_rows(product: Product, high: int) -> int:
    """Of all experts together, so that most experts' rows have room in a tile: an expert's average, and one and a half
    times its root, are no more than the tile has."""
    root = (sqrt(2.25 + 4 * high) - 1.5) / 2
    return int(root * root * product.experts)


class UnpackedExperts:
    """The same of many rows: weights are brought to floats first."""

    fuses = False

    def __init__(self, code: Code) -> None:
        self.name, self.form = f"{code.name}_unpacked_experts", code.name

    def tile(self, product: Product, rows: int, card: Card, settings: Settings) -> UnpackedTile | str:
        if not product.experts:
            return NO_EXPERTS
        if card.has_hopper_kernels and rows < LEAST_UNPACKED_ROWS * product.experts:
            return "of few rows weights are read as they are held"  # and there may be no room to bring them to
        for outputs in (256, 128, 64):
            more = {} if product.is_gated else {"rows_in_bulk": True, "pieces": 2}
            wide = {"rows": 128, "outputs": min(outputs, 128) if product.is_gated else outputs, "stages": 4, **more}
            if not isinstance(tile := HopperExperts().tile(product, rows, card, wide), str):
                return UnpackedTile(tile)
        plain = GroupedExperts().tile(product, rows, card, {})
        return plain if isinstance(plain, str) else UnpackedTile(plain)

    def candidates(self, product: Product, rows: int, card: Card) -> list[Settings]:
        """Where weights are read often enough."""
        return [{}] if rows >= LEAST_UNPACKED_ROWS * product.experts else []


class PackedExperts:
    """Rows sorted by expert, with weights in twelve bits, in CUDA C++."""

    name, form, fuses = "packed_experts", "packed", False

    def tile(self, product: Product, rows: int, card: Card, settings: Settings) -> PackedTile | str:
        if not 0 < product.experts <= MAX_PACKED_EXPERTS:
            return f"{NO_EXPERTS}, of {MAX_PACKED_EXPERTS} at most"
        if not can_pack(product.shape, is_gated=product.is_gated):
            return "its weights have no packed form"
        tile = PackedTile(**settings)
        beyond = tile.splits > 1 or tile.shared or tile.at_once > 1
        if tile.rows > WHOLE_ROUND_ROWS or tile.held_stages < LEAST_STAGES or beyond:
            return "it does not fit on a multiprocessor"
        return declines(product, card) or tile

    def candidates(self, product: Product, rows: int, card: Card) -> list[Settings]:
        """From the average on, until most experts' rows have room. Of gates, whose rows come from anywhere, fewer warps
        wait less often."""
        average = rows / product.experts
        return [
            {"rows": high, "groups": groups, "units": units}
            for high in range(8, WHOLE_ROUND_ROWS + 1, 8)
            if average <= high <= max(32, 2.5 * average)
            for groups, units in ((2, 2), (4, 1))
        ]
