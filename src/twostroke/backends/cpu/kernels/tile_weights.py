"""Where a quantised tile reads its weights, group of 32 inputs by group: as they are packed in memory, or opened into
scratch once for many rows. What the bytes of each kind mean is written in `tile_kinds.py`."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Protocol

from llvmlite import ir

from twostroke.backends.cpu.arguments import BYTE_MIDDLE, HALF_OFFSET
from twostroke.backends.cpu.kernels.emitter import F32, F32X16, I8X16, I8X64, I32, I32X16, Emitter, Value
from twostroke.backends.cpu.kernels.lookup import look_up
from twostroke.backends.cpu.tile_kinds import BLOCK_GROUPS, STEPS, Scales, TileKind, TileLayout

TALL_ROWS, GROUPS_AHEAD = 16, 8
"""Tiles of TALL_ROWS rows fetch weights GROUPS_AHEAD groups early: they need them about half a microsecond later."""


class GroupedWeights(Protocol):
    kind: TileKind
    columns: int

    def steps(self, group: Value) -> Iterator[tuple[int, list[Value]]]:
        """Eight times: which byte of the 32 activations to start from, and [columns] of 64 weight bytes for them."""

    def step_of(self, group: Value, peak: Value) -> list[Value]:
        """[columns] of the 64 bytes that hold one place of the group, given as OperandField.PEAKS is."""

    def scales(self, group: Value) -> list[list[Value]]:
        """[one, or one for each half of the group][columns] of 16 floats; behind them, of kinds that have minimums for
        each half, those over HALF_OFFSET"""

    def minimum_pairs(self, group: Value, *, single: bool) -> list[Value]:
        """[columns] of 16 pairs of bf16, for kinds that have them: what an output's weights are in the middle of their
        range, in this group (even) and in the next, or 0 where this is the last."""


class PackedWeights:
    """As they lie in memory. Short tiles fetch nothing early: tiles lie in the order they are read, and hardware that
    sees that does better alone (36 GB/s against 31 with prefetches of any distance, on a Zen 4). Tall ones, which
    compute for longer than they read, do."""

    def __init__(self, emitter: Emitter, kind: TileKind, tiles: list[Value], rows: int = 1) -> None:
        """`rows` are those that meet each weight."""
        self._emitter, self._tiles, self._rows = emitter, tiles, rows
        self.kind, self.columns, self._layout = kind, len(tiles), kind.layout

    def _group(self, tile: Value, group: Value) -> Value:
        e, layout = self._emitter, self._layout
        place = e.mul(group, layout.group_bytes)
        if layout.shared_bytes:
            place = e.add(place, e.mul(e.div(group, BLOCK_GROUPS), layout.shared_bytes))
        return e.at(tile, place)

    def _shared(self, tile: Value, group: Value, index: int) -> Value:
        """Vector `index` of those of 16 f16 numbers that the groups of a block share."""
        e, layout = self._emitter, self._layout
        block_bytes = BLOCK_GROUPS * layout.group_bytes + layout.shared_bytes
        place = e.add(e.mul(e.div(group, BLOCK_GROUPS), block_bytes), BLOCK_GROUPS * layout.group_bytes)
        return e.load_halves(e.at(tile, place), 16 * index)

    def _load(self, place: Value, offset: int) -> Value:
        e = self._emitter
        return e.load(I8X64, e.at(place, offset), self._layout.alignment)

    def steps(self, group: Value) -> Iterator[tuple[int, list[Value]]]:
        places = [self._group(tile, group) for tile in self._tiles]
        if self._rows >= TALL_ROWS:
            self._fetch_ahead(places)
        if self._layout.planes == (8,):
            for step in range(STEPS):
                yield first_input(self._layout, step), [self._load(place, 64 * step) for place in places]
            return
        loaded: list[dict[int, Value]] = [{} for _ in places]
        for step in range(STEPS):
            numbers = [self._number(place, own, step) for place, own in zip(places, loaded, strict=True)]
            yield first_input(self._layout, step), numbers

    def _fetch_ahead(self, places: list[Value]) -> None:
        e, size = self._emitter, self._layout.group_bytes
        for place in places:
            for line in range(0, size, 64):
                e.prefetch(e.at(place, GROUPS_AHEAD * size + line))

    def _number(self, place: Value, loaded: dict[int, Value], step: int) -> Value:
        """The bits of a step from every plane, put together; vectors are loaded when they are first needed."""
        number, first, below = None, 0, 0
        for width in self._layout.planes:
            offset = first + 64 * (step * width // 8)
            if offset not in loaded:
                loaded[offset] = self._load(place, offset)
            part = self._bits(loaded[offset], below - step * width % 8, ((1 << width) - 1) << below)
            number = part if number is None else self._emitter.build.or_(number, part)
            first, below = first + 64 * width, below + width
        return self._weights(number)

    def _weights(self, numbers: Value) -> Value:
        if not self._layout.levels:
            return numbers
        table = [BYTE_MIDDLE + level for level in self._layout.levels]
        return look_up(self._emitter, table, numbers)

    def _bits(self, vector: Value, shift: int, mask: int) -> Value:
        """Moved up by `shift`, or down where it is negative."""
        e, build, kept = self._emitter, self._emitter.build, ir.Constant(I8X64, [mask] * 64)
        if shift == -4 and mask == 15:
            return high_nibbles(e, vector, two_steps=self._rows > 4)
        if shift == 0:
            return build.and_(vector, kept)
        amount = ir.Constant(I8X64, [abs(shift)] * 64)
        return build.and_(build.shl(vector, amount) if shift > 0 else build.lshr(vector, amount), kept)

    def step_of(self, group: Value, peak: Value) -> list[Value]:
        e, build = self._emitter, self._emitter.build
        places = [self._group(tile, group) for tile in self._tiles]
        if self._layout.planes == (8,):
            offset = e.mul(build.and_(peak, e.integer(28)), 16)  # 64 bytes for each four places
            return [e.load(I8X64, e.at(place, offset), self._layout.alignment) for place in places]
        step = build.lshr(peak, e.integer(5))
        return [self._weights(build.bitcast(self._number_at(place, step), I8X64)) for place in places]

    def _number_at(self, place: Value, step: Value) -> Value:
        """The same bits of each of 64 bytes, as words."""
        e, build = self._emitter, self._emitter.build
        number, first, below = e.ints(0), 0, 0
        for width in self._layout.planes:
            bit = e.mul(step, width)
            vector, place_in_byte = (e.mul(e.div(bit, 8), 64), e.rem(bit, 8)) if width > 1 else (e.integer(0), step)
            words = e.load(I32X16, e.at(place, e.add(vector, first)), self._layout.alignment)
            moved = build.lshr(words, e.splat(build.trunc(place_in_byte, I32)))
            part = build.and_(moved, e.ints(((1 << width) - 1) * 0x01010101))
            number = build.or_(number, build.shl(part, e.ints(below)))
            first, below = first + 64 * width, below + width
        return number

    def _halves(self, group: Value, index: int) -> list[Value]:
        """Vector `index` of those of 16 f16 numbers that end a group."""
        first = self._layout.number_bytes // 2
        return [self._emitter.load_halves(self._group(tile, group), first + 16 * index) for tile in self._tiles]

    def scales(self, group: Value) -> list[list[Value]]:
        sets = range(self._layout.scale_sets)
        match self._layout.scales:
            case Scales.HALVES:
                return [self._halves(group, index) for index in sets]
            case Scales.POWERS:
                return [[self._power(tile, group) for tile in self._tiles]]
            case Scales.SIGNED_BYTES:
                return [[self._scaled(tile, group, index) for tile in self._tiles] for index in sets]
        scales = [[self._scaled(tile, group, index, mask=15) for tile in self._tiles] for index in sets]
        return scales + [[self._scaled(tile, group, index, shift=4) for tile in self._tiles] for index in sets]

    def _own_bytes(self, tile: Value, group: Value, index: int) -> Value:
        e = self._emitter
        return e.load(I8X16, e.at(self._group(tile, group), self._layout.number_bytes + 16 * index))

    def _power(self, tile: Value, group: Value) -> Value:
        """Two to a power: an exponent put in its place. What would be subnormal is 0."""
        e, build = self._emitter, self._emitter.build
        stored = build.zext(self._own_bytes(tile, group, 0), I32X16)
        exponent = e.larger_integer(build.sub(stored, e.ints(1)), e.ints(0))
        return build.bitcast(build.shl(exponent, e.ints(23)), F32X16)

    def _scaled(self, tile: Value, group: Value, index: int, *, mask: int = 0, shift: int = 0) -> Value:
        """Small integers of the group times what its block shares: signed bytes, low nibbles (scales), or high ones
        (minimums, which are over HALF_OFFSET, as the sums that they meet are times it)."""
        e, build = self._emitter, self._emitter.build
        own = self._own_bytes(tile, group, index)
        if mask:
            own = build.zext(build.and_(own, ir.Constant(I8X16, [mask] * 16)), I32X16)
        elif shift:
            own = build.zext(build.lshr(own, ir.Constant(I8X16, [shift] * 16)), I32X16)
        else:
            own = build.sext(own, I32X16)
        shared = self._shared(tile, group, 1 if shift else 0)
        if shift:
            shared = build.fmul(shared, e.floats(1 / HALF_OFFSET))
        return build.fmul(build.sitofp(own, F32X16), shared)

    def minimum_pairs(self, group: Value, *, single: bool) -> list[Value]:
        e, build = self._emitter, self._emitter.build
        low = [build.lshr(bits, e.ints(16)) for bits in self._middles(group)]
        if single:
            return low
        high = [build.and_(bits, e.ints(-65536)) for bits in self._middles(e.add(group, 1))]
        return [build.or_(*pair) for pair in zip(low, high, strict=True)]

    def _middles(self, group: Value) -> list[Value]:
        """[columns] of 16 floats whose upper halves are the bits of bf16."""
        e, build = self._emitter, self._emitter.build
        found = []
        for scale, minimum in zip(self._halves(group, 0), self._halves(group, 1), strict=True):
            value = e.multiply_add(scale, e.floats(float(self._layout.middle)), minimum)
            found.append(build.add(build.bitcast(value, I32X16), e.ints(0x8000)))
        return found


class OpenedWeights:
    """A panel opened into scratch: bytes [groups][8][columns][64], then f32 [groups][scales][columns][16],
    then pairs of minimums, [pairs of groups][columns][16]."""

    def __init__(self, emitter: Emitter, kind: TileKind, scratch: Value, groups: Value) -> None:
        e = self._emitter = emitter
        self.kind, self.columns, self._layout = kind, emitter.isa.tile_columns, kind.layout
        self._numbers = opened_vectors(self._layout)
        self._bytes, self._floats = scratch, e.at(scratch, e.mul(groups, 64 * STEPS * self.columns))
        self._pairs = e.at(self._floats, e.mul(groups, 64 * self._numbers * self.columns))

    def _floats_of(self, group: Value, which: int, column: int) -> Value:
        e = self._emitter
        first = e.mul(group, 16 * self._numbers * self.columns)
        return e.at(self._floats, e.add(first, 16 * (which * self.columns + column)), F32)

    def fill(self, packed: PackedWeights, groups: Value) -> None:
        e = self._emitter
        with e.loop(0, groups) as group:
            place = e.at(self._bytes, e.mul(group, 64 * STEPS * self.columns))
            for step, (_, weights) in enumerate(packed.steps(group)):
                for column, weight in enumerate(weights):
                    e.store(weight, e.at(place, 64 * (step * self.columns + column)), 64)
            for which, values in enumerate(packed.scales(group)):
                for column, value in enumerate(values):
                    e.store_floats(value, self._floats_of(group, which, column))
        if self._layout.has_minimums:
            with e.loop(0, e.sub(groups, 1), 2) as group:
                self._store_pairs(group, packed.minimum_pairs(group, single=False))
            with e.when(e.is_nonzero(e.rem(groups, 2))):
                last = e.sub(groups, 1)
                self._store_pairs(last, packed.minimum_pairs(last, single=True))

    def _pair_place(self, group: Value, column: int) -> Value:
        e = self._emitter
        return e.at(self._pairs, e.add(e.mul(e.div(group, 2), 64 * self.columns), 64 * column))

    def _store_pairs(self, group: Value, pairs: list[Value]) -> None:
        for column, pair in enumerate(pairs):
            self._emitter.store(pair, self._pair_place(group, column), 64)

    def steps(self, group: Value) -> Iterator[tuple[int, list[Value]]]:
        e, columns = self._emitter, range(self.columns)
        place = e.at(self._bytes, e.mul(group, 64 * STEPS * self.columns))
        for step in range(STEPS):
            first = first_input(self._layout, step)
            yield first, [e.load(I8X64, e.at(place, 64 * (step * self.columns + column)), 64) for column in columns]

    def step_of(self, group: Value, peak: Value) -> list[Value]:
        e, build = self._emitter, self._emitter.build
        step = build.lshr(peak, e.integer(5))
        if self._layout.planes == (8,):
            step = build.lshr(build.and_(peak, e.integer(28)), e.integer(2))
        place = e.at(self._bytes, e.add(e.mul(group, 64 * STEPS * self.columns), e.mul(step, 64 * self.columns)))
        return [e.load(I8X64, e.at(place, 64 * column), 64) for column in range(self.columns)]

    def _numbers_of(self, group: Value, which: int) -> list[Value]:
        columns = range(self.columns)
        return [self._emitter.load_floats(self._floats_of(group, which, column)) for column in columns]

    def scales(self, group: Value) -> list[list[Value]]:
        return [self._numbers_of(group, index) for index in range(self._numbers)]

    def minimum_pairs(self, group: Value, *, single: bool) -> list[Value]:
        del single
        return [self._emitter.load(I32X16, self._pair_place(group, column), 64) for column in range(self.columns)]


def first_input(layout: TileLayout, step: int) -> int:
    """Which of a group's 32 inputs a step begins with."""
    return 4 * step if layout.planes == (8,) else 4 * (step // 2) + 16 * (step % 2)


def opened_vectors(layout: TileLayout) -> int:
    """Vectors of 16 floats that `scales` gives for a group and a column."""
    return layout.scale_sets * (2 if layout.has_half_minimums else 1)


def high_nibbles(emitter: Emitter, packed: Value, *, two_steps: bool) -> Value:
    """In one step where LLVM finds one (an affine map of bits); in two where its unit is busy with dot products."""
    if not two_steps:
        return emitter.build.lshr(packed, ir.Constant(I8X64, [4] * 64))
    moved = emitter.build.lshr(emitter.build.bitcast(packed, I32X16), emitter.ints(4))
    return emitter.build.bitcast(emitter.build.and_(moved, emitter.ints(0x0F0F0F0F)), I8X64)
