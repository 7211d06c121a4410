"""Matrix tiles: a few rows of activations times a few columns of 16 outputs, over the whole depth, in registers.
A tile is described by the kind of its weights, where it reads them, and its rows and columns; the arithmetic of one
output is the same sequence of operations in every tile, so its value never depends on the batch."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Protocol

from llvmlite import ir

from twostroke.backends.cpu.arguments import TileKind
from twostroke.backends.cpu.kernels.dot import dot_biased, dot_small, unbiases_itself
from twostroke.backends.cpu.kernels.emitter import (
    F32,
    F32X16,
    I8X64,
    I16,
    I16X16,
    I32,
    I32X16,
    I64,
    Emitter,
    Value,
    Variable,
)

Tile = list[list[Variable]]
"""[rows][columns] of 16 outputs"""
PREFETCH_BYTES = 1280


@dataclass(frozen=True, slots=True)
class InputRow:
    """One row of activations: quantised, or floats in `values` alone."""

    values: Value
    scales: Value = None
    sums: Value = None
    offsets: Value = None
    peaks: Value = None
    peak_digits: Value = None


class GroupedWeights(Protocol):
    """Where a quantised tile reads its weights, group by group."""

    columns: int
    biased: bool

    def steps(self, group: Value) -> Iterator[tuple[int, list[Value]]]:
        """Eight times: which byte of the 32 activations to start from, and [columns] of 64 weight bytes for them."""

    def step_of(self, group: Value, peak: Value) -> list[Value]:
        """[columns] of the 64 bytes that hold a place of the group, given as OperandField.PEAKS is."""

    def scales(self, group: Value) -> list[Value]: ...

    def minimums(self, group: Value) -> list[Value] | None: ...


class PackedQ4:
    """Q4_1 as it lies in memory: byte 4j + b of an output holds values 4j + b (low) and 16 + 4j + b (high)."""

    biased = False

    def __init__(self, emitter: Emitter, tiles: list[Value], *, prefetch: bool = False) -> None:
        self._emitter, self._tiles, self._prefetch = emitter, tiles, prefetch
        self.columns = len(tiles)

    def _group(self, tile: Value, group: Value) -> Value:
        return self._emitter.at(tile, self._emitter.mul(group, TileKind.Q4_1.group_bytes))

    def steps(self, group: Value) -> Iterator[tuple[int, list[Value]]]:
        e = self._emitter
        places = [self._group(tile, group) for tile in self._tiles]
        if self._prefetch:
            for place in places:
                for line in range(0, TileKind.Q4_1.group_bytes, 64):
                    e.prefetch(e.at(place, PREFETCH_BYTES + line))
        for quarter in range(4):
            packed = [e.load(I8X64, e.at(place, 64 * quarter), 64) for place in places]
            yield 4 * quarter, [low_nibbles(e, value) for value in packed]
            yield 16 + 4 * quarter, [high_nibbles(e, value) for value in packed]

    def step_of(self, group: Value, peak: Value) -> list[Value]:
        e, build = self._emitter, self._emitter.build
        offset = e.mul(build.and_(peak, e.integer(12)), 16)  # 64 bytes for each four places
        shift = e.splat(build.trunc(build.lshr(build.and_(peak, e.integer(16)), e.integer(2)), I32))
        words = [e.load(I32X16, e.at(self._group(tile, group), offset), 64) for tile in self._tiles]
        return [low_nibbles(e, build.bitcast(build.lshr(word, shift), I8X64)) for word in words]

    def scales(self, group: Value) -> list[Value]:
        return [self._emitter.load_halves(self._group(tile, group), 128) for tile in self._tiles]

    def minimums(self, group: Value) -> list[Value] | None:
        return [self._emitter.load_halves(self._group(tile, group), 144) for tile in self._tiles]


class PackedQ8:
    """Q8_0 as it lies in memory: byte 4j + b of an output is value 4j + b, plus 128."""

    biased = True

    def __init__(self, emitter: Emitter, tiles: list[Value], *, prefetch: bool = False) -> None:
        self._emitter, self._tiles, self._prefetch = emitter, tiles, prefetch
        self.columns = len(tiles)

    def _group(self, tile: Value, group: Value) -> Value:
        return self._emitter.at(tile, self._emitter.mul(group, TileKind.Q8_0.group_bytes))

    def steps(self, group: Value) -> Iterator[tuple[int, list[Value]]]:
        e = self._emitter
        places = [self._group(tile, group) for tile in self._tiles]
        if self._prefetch:
            for place in places:
                for line in range(0, TileKind.Q8_0.group_bytes, 64):
                    e.prefetch(e.at(place, PREFETCH_BYTES + line))
        for eighth in range(8):
            yield 4 * eighth, [e.load(I8X64, e.at(place, 64 * eighth), 32) for place in places]

    def step_of(self, group: Value, peak: Value) -> list[Value]:
        e = self._emitter
        offset = e.mul(e.build.and_(peak, e.integer(28)), 16)
        return [e.load(I8X64, e.at(self._group(tile, group), offset), 32) for tile in self._tiles]

    def scales(self, group: Value) -> list[Value]:
        return [self._emitter.load_halves(self._group(tile, group), 256) for tile in self._tiles]

    def minimums(self, group: Value) -> list[Value] | None:
        return None


class UnpackedQ4:
    """A panel of Q4_1 tiles opened once into scratch, for many rows: bytes [groups][8][columns][64], then
    f32 [groups][scale, minimum][columns][16]."""

    biased = False

    def __init__(self, emitter: Emitter, scratch: Value, groups: Value, columns: int) -> None:
        e = self._emitter = emitter
        self.columns = columns
        self._bytes, self._floats = scratch, e.at(scratch, e.mul(groups, 512 * columns))

    def _floats_of(self, group: Value, which: int, column: int) -> Value:
        e = self._emitter
        return e.at(self._floats, e.add(e.mul(group, 32 * self.columns), 16 * (which * self.columns + column)), F32)

    def fill(self, packed: PackedQ4, groups: Value) -> None:
        e = self._emitter
        with e.loop(0, groups) as group:
            place = e.at(self._bytes, e.mul(group, 512 * self.columns))
            for index, (_, weights) in enumerate(packed.steps(group)):
                for column, weight in enumerate(weights):
                    e.store(weight, e.at(place, 64 * (index * self.columns + column)), 64)
            for which, values in enumerate((packed.scales(group), packed.minimums(group) or [])):
                for column, value in enumerate(values):
                    e.store_floats(value, self._floats_of(group, which, column))

    def steps(self, group: Value) -> Iterator[tuple[int, list[Value]]]:
        e = self._emitter
        place = e.at(self._bytes, e.mul(group, 512 * self.columns))
        for index in range(8):
            start = 4 * (index // 2) + 16 * (index % 2)
            columns = range(self.columns)
            yield start, [e.load(I8X64, e.at(place, 64 * (index * self.columns + column)), 64) for column in columns]

    def step_of(self, group: Value, peak: Value) -> list[Value]:
        e = self._emitter
        offset = e.mul(e.build.and_(peak, e.integer(7 << 5)), 2 * self.columns)  # the step lies from bit 5 on
        place = e.at(e.at(self._bytes, e.mul(group, 512 * self.columns)), offset)
        return [e.load(I8X64, e.at(place, 64 * column), 64) for column in range(self.columns)]

    def scales(self, group: Value) -> list[Value]:
        return [self._emitter.load_floats(self._floats_of(group, 0, column)) for column in range(self.columns)]

    def minimums(self, group: Value) -> list[Value] | None:
        return [self._emitter.load_floats(self._floats_of(group, 1, column)) for column in range(self.columns)]


def low_nibbles(emitter: Emitter, packed: Value) -> Value:
    return emitter.build.and_(packed, ir.Constant(I8X64, [15] * 64))


def high_nibbles(emitter: Emitter, packed: Value) -> Value:
    return emitter.build.lshr(packed, ir.Constant(I8X64, [4] * 64))


def quantised_tile(e: Emitter, weights: GroupedWeights, rows: list[InputRow], groups: Value) -> Tile:
    """For each group of 32: an exact integer dot product; then, in this order, times the row's scale, times the
    column's scale added to the total, and the column's minimum times the row's sum added to that."""
    dot = dot_biased if weights.biased else dot_small
    totals = [[e.variable(F32X16, e.floats(0.0)) for _ in range(weights.columns)] for _ in rows]
    with e.loop(0, groups) as group:
        integers = _starting_integers(e, weights, rows, group)
        places = [e.at(row.values, e.mul(group, 32)) for row in rows]
        for first, columns in weights.steps(group):
            for index, place in enumerate(places):
                four = e.load(I32, e.at(place, first), 4)
                integers[index] = [dot(e, t, w, four) for t, w in zip(integers[index], columns, strict=True)]
        scales, minimums = weights.scales(group), weights.minimums(group)
        for row, total, counts in zip(rows, totals, integers, strict=True):
            row_scale = e.broadcast(row.scales, group)
            row_sum = e.broadcast(row.sums, group) if minimums is not None else None
            for column, count in enumerate(counts):
                scaled = e.build.fmul(e.build.sitofp(count, F32X16), row_scale)
                value = e.multiply_add(scaled, scales[column], total[column].value)
                if minimums is not None:
                    value = e.multiply_add(minimums[column], row_sum, value)
                total[column].value = value
    return totals


def _starting_integers(e: Emitter, weights: GroupedWeights, rows: list[InputRow], group: Value) -> list[list[Value]]:
    """Where a group's integers start from: 128 times its peak's upper digit times the weights there, and for biased
    weights what they are too large by. Few groups have a peak: where no row does, it is passed by  # [rows][columns]"""
    build, dot = e.build, dot_biased if weights.biased else dot_small
    digits = [e.load_at(I32, row.peak_digits, group) for row in rows]
    either = digits[0]
    for digit in digits[1:]:
        either = build.or_(either, digit)
    starts = [[e.variable(I32X16, e.ints(0)) for _ in range(weights.columns)] for _ in rows]
    with e.when(build.icmp_signed("!=", either, I32(0))):
        for row, digit, start in zip(rows, digits, starts, strict=True):
            step = weights.step_of(group, build.zext(e.load_at(I32, row.peaks, group), I64))
            for cell, weight in zip(start, step, strict=True):
                cell.value = build.shl(dot(e, e.ints(0), weight, digit), e.ints(7))
    values = [[cell.value for cell in start] for start in starts]
    if weights.biased and not unbiases_itself(e):
        offsets = [e.splat(e.load_at(I32, row.offsets, group)) for row in rows]
        values = [[build.add(v, offset) for v in start] for start, offset in zip(values, offsets, strict=True)]
    return values


def float_tile(e: Emitter, kind: TileKind, tiles: list[Value], rows: list[InputRow], depth: Value) -> Tile:
    """Weights widened in registers, activations in f32, one product after the other."""
    totals = [[e.variable(F32X16, e.floats(0.0)) for _ in tiles] for _ in rows]
    with e.loop(0, depth) as index:
        columns = [_load_floats(e, kind, tile, index) for tile in tiles]
        for row, total in zip(rows, totals, strict=True):
            activation = e.broadcast(row.values, index)
            for column, weight in enumerate(columns):
                total[column].value = e.multiply_add(weight, activation, total[column].value)
    return totals


def _load_floats(e: Emitter, kind: TileKind, tile: Value, index: Value) -> Value:
    place = e.mul(index, 16)
    if kind is TileKind.F32:
        return e.load_floats(tile, place)
    if kind is TileKind.F16:
        return e.load_halves(tile, place)
    bits = e.build.zext(e.load(I16X16, e.at(tile, place, I16), 2), I32X16)
    return e.build.bitcast(e.build.shl(bits, e.ints(16)), F32X16)
