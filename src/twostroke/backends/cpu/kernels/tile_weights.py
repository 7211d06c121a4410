"""Where a quantised tile reads its weights, group of 32 inputs by group: as they are packed in memory, or opened into
scratch once for many rows. What the bytes of each kind mean is written here and in `packing.py`, nowhere else."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Protocol

from llvmlite import ir

from twostroke.backends.cpu.arguments import TileKind
from twostroke.backends.cpu.kernels.emitter import F32, I8X64, I32, I32X16, Emitter, Value

STEPS = 8
"""Times 64 weight bytes (four inputs of 16 outputs) in a group."""
NIBBLE_BYTES = 256
TALL_ROWS, GROUPS_AHEAD = 16, 8
"""Tiles of so many rows fetch weights so early: they come to them about half a microsecond later."""


class GroupedWeights(Protocol):
    kind: TileKind
    columns: int

    def steps(self, group: Value) -> Iterator[tuple[int, list[Value]]]:
        """Eight times: which byte of the 32 activations to start from, and [columns] of 64 weight bytes for them."""

    def step_of(self, group: Value, peak: Value) -> list[Value]:
        """[columns] of the 64 bytes that hold one place of the group, given as OperandField.PEAKS is."""

    def scales(self, group: Value) -> list[list[Value]]:
        """[one, or one for each half of the group][columns] of 16 floats"""

    def minimum_pairs(self, group: Value, *, single: bool) -> list[Value]:
        """[columns] of 16 pairs of bf16, for kinds that have them: what an output's weights are in the middle of their
        range, in this group (even) and in the next, or 0 where this is the last."""


def middle(kind: TileKind) -> int:
    """The integer that stands for the middle of a weight's range. Integer sums count from there, so that minimums,
    moved there too, are small: their rounding matters little."""
    return {TileKind.Q4_1: 8, TileKind.Q4_0: 8, TileKind.Q5_K: 16, TileKind.Q6_K: 32, TileKind.Q8_0: 128}[kind]


def scale_sets(kind: TileKind) -> int:
    """How many scales an output has in a group: one, or one for each half."""
    return 2 if kind is TileKind.Q6_K else 1


def has_minimums(kind: TileKind) -> bool:
    return kind in (TileKind.Q4_1, TileKind.Q5_K)


class PackedWeights:
    """As they lie in memory. In kinds of nibbles, byte 4j + b of an output holds values 4j + b (low) and 16 + 4j + b
    (high); in Q8_0, byte 4j + b is value 4j + b. Short tiles fetch nothing early: tiles lie in the order they are
    read, and hardware that sees that does better alone (36 GB/s against 31 with prefetches of any distance, on a
    Zen 4). Tall ones, which compute for longer than they read, do."""

    def __init__(self, emitter: Emitter, kind: TileKind, tiles: list[Value], rows: int = 1) -> None:
        """`rows` are those that meet each weight."""
        self._emitter, self._tiles, self._rows = emitter, tiles, rows
        self.kind, self.columns = kind, len(tiles)

    def _group(self, tile: Value, group: Value) -> Value:
        return self._emitter.at(tile, self._emitter.mul(group, self.kind.group_bytes))

    def steps(self, group: Value) -> Iterator[tuple[int, list[Value]]]:
        e = self._emitter
        places = [self._group(tile, group) for tile in self._tiles]
        if self._rows >= TALL_ROWS:
            self._fetch_ahead(places)
        if self.kind is TileKind.Q8_0:
            for step in range(STEPS):
                yield 4 * step, [e.load(I8X64, e.at(place, 64 * step), 32) for place in places]
            return
        planes = [self._planes(place) for place in places]
        for quarter in range(STEPS // 2):
            packed = [e.load(I8X64, e.at(place, 64 * quarter), 32) for place in places]
            low = [low_nibbles(e, value) for value in packed]
            above = [high_nibbles(e, value, two_steps=self._rows > 4) for value in packed]
            for high, weights in enumerate((low, above)):
                step = 2 * quarter + high
                yield (
                    4 * quarter + 16 * high,
                    [self._with_high_bits(w, own, step) for w, own in zip(weights, planes, strict=True)],
                )

    def _fetch_ahead(self, places: list[Value]) -> None:
        e, size = self._emitter, self.kind.group_bytes
        for place in places:
            for line in range(0, size, 64):
                e.prefetch(e.at(place, GROUPS_AHEAD * size + line))

    def step_of(self, group: Value, peak: Value) -> list[Value]:
        e, build = self._emitter, self._emitter.build
        places = [self._group(tile, group) for tile in self._tiles]
        if self.kind is TileKind.Q8_0:
            offset = e.mul(build.and_(peak, e.integer(28)), 16)  # 64 bytes for each four places
            return [e.load(I8X64, e.at(place, offset), 32) for place in places]
        step = build.lshr(peak, e.integer(5))
        offset = e.mul(build.and_(peak, e.integer(12)), 16)
        nibbles = [self._field(e.at(place, offset), e.mul(build.and_(step, e.integer(1)), 4), 15) for place in places]
        if self.kind is TileKind.Q5_K:
            high = [self._field(e.at(place, NIBBLE_BYTES), step, 1) for place in places]
        elif self.kind is TileKind.Q6_K:
            plane = e.add(e.mul(e.div(step, 4), 64), NIBBLE_BYTES)
            high = [self._field(e.at(place, plane), e.mul(e.rem(step, 4), 2), 3) for place in places]
        else:
            return [build.bitcast(value, I8X64) for value in nibbles]
        joined = [build.or_(low, build.shl(top, e.ints(4))) for low, top in zip(nibbles, high, strict=True)]
        return [build.bitcast(value, I8X64) for value in joined]

    def _field(self, place: Value, shift: Value, mask: int) -> Value:
        """The same few bits of each of 64 bytes, as words."""
        e, build = self._emitter, self._emitter.build
        moved = build.lshr(e.load(I32X16, place, 32), e.splat(build.trunc(shift, I32)))
        return build.and_(moved, e.ints(mask * 0x01010101))

    def _planes(self, place: Value) -> list[Value]:
        """The high bits of a group's weights: Q5_K has a bit for each of the eight steps in a byte, Q6_K two for each
        of four steps."""
        count = {TileKind.Q5_K: 1, TileKind.Q6_K: 2}.get(self.kind, 0)
        e = self._emitter
        return [e.load(I8X64, e.at(place, NIBBLE_BYTES + 64 * index), 32) for index in range(count)]

    def _with_high_bits(self, nibbles: Value, planes: list[Value], step: int) -> Value:
        if not planes:
            return nibbles
        build = self._emitter.build
        if self.kind is TileKind.Q5_K:
            plane, shift, mask = planes[0], 4 - step, 0x10
        else:
            plane, shift, mask = planes[step // 4], 4 - 2 * (step % 4), 0x30
        amount = ir.Constant(I8X64, [abs(shift)] * 64)
        moved = plane if shift == 0 else build.shl(plane, amount) if shift > 0 else build.lshr(plane, amount)
        return build.or_(nibbles, build.and_(moved, ir.Constant(I8X64, [mask] * 64)))

    def _halves(self, group: Value, index: int) -> list[Value]:
        """Vector `index` of those of 16 f16 numbers that end a group."""
        numbers = scale_sets(self.kind) + has_minimums(self.kind)
        first = self.kind.group_bytes // 2 - 16 * numbers
        return [self._emitter.load_halves(self._group(tile, group), first + 16 * index) for tile in self._tiles]

    def scales(self, group: Value) -> list[list[Value]]:
        return [self._halves(group, index) for index in range(scale_sets(self.kind))]

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
            value = e.multiply_add(scale, e.floats(float(middle(self.kind))), minimum)
            found.append(build.add(build.bitcast(value, I32X16), e.ints(0x8000)))
        return found


class OpenedWeights:
    """A panel opened into scratch: bytes [groups][8][columns][64], then f32 [groups][sets of scales][columns][16],
    then pairs of minimums, [pairs of groups][columns][16]."""

    def __init__(self, emitter: Emitter, kind: TileKind, scratch: Value, groups: Value) -> None:
        e = self._emitter = emitter
        self.kind, self.columns = kind, emitter.isa.tile_columns
        self._bytes, self._floats = scratch, e.at(scratch, e.mul(groups, 64 * STEPS * self.columns))
        self._pairs = e.at(self._floats, e.mul(groups, 64 * scale_sets(kind) * self.columns))

    def _floats_of(self, group: Value, which: int, column: int) -> Value:
        e = self._emitter
        first = e.mul(group, 16 * scale_sets(self.kind) * self.columns)
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
        if has_minimums(self.kind):
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
            first = 4 * step if self.kind is TileKind.Q8_0 else 4 * (step // 2) + 16 * (step % 2)
            yield first, [e.load(I8X64, e.at(place, 64 * (step * self.columns + column)), 64) for column in columns]

    def step_of(self, group: Value, peak: Value) -> list[Value]:
        e, build = self._emitter, self._emitter.build
        step = build.lshr(build.and_(peak, e.integer(28)), e.integer(2))
        if self.kind is not TileKind.Q8_0:
            step = build.lshr(peak, e.integer(5))
        place = e.at(self._bytes, e.add(e.mul(group, 64 * STEPS * self.columns), e.mul(step, 64 * self.columns)))
        return [e.load(I8X64, e.at(place, 64 * column), 64) for column in range(self.columns)]

    def _numbers_of(self, group: Value, which: int) -> list[Value]:
        columns = range(self.columns)
        return [self._emitter.load_floats(self._floats_of(group, which, column)) for column in columns]

    def scales(self, group: Value) -> list[list[Value]]:
        return [self._numbers_of(group, index) for index in range(scale_sets(self.kind))]

    def minimum_pairs(self, group: Value, *, single: bool) -> list[Value]:
        del single
        return [self._emitter.load(I32X16, self._pair_place(group, column), 64) for column in range(self.columns)]


def low_nibbles(emitter: Emitter, packed: Value) -> Value:
    return emitter.build.and_(packed, ir.Constant(I8X64, [15] * 64))


def high_nibbles(emitter: Emitter, packed: Value, *, two_steps: bool) -> Value:
    """In one step where LLVM finds one (an affine map of bits); in two where its unit is busy with dot products."""
    if not two_steps:
        return emitter.build.lshr(packed, ir.Constant(I8X64, [4] * 64))
    moved = emitter.build.lshr(emitter.build.bitcast(packed, I32X16), emitter.ints(4))
    return emitter.build.bitcast(emitter.build.and_(moved, emitter.ints(0x0F0F0F0F)), I8X64)
