"""Matrix tiles: a few rows of activations times a few columns of 16 outputs, over the whole depth, in registers.
A tile is described by the kind of its weights, where it reads them, and its rows and columns; the arithmetic of one
output is the same sequence of operations in every tile, so its value never depends on the batch."""

from __future__ import annotations

from dataclasses import dataclass

from twostroke.backends.cpu.arguments import BYTE_MIDDLE, HALF_OFFSET, START_MIDDLE
from twostroke.backends.cpu.kernels.dot import dot_biased, dot_small, unbiases_itself
from twostroke.backends.cpu.kernels.emitter import (
    F32X16,
    I16,
    I16X16,
    I32,
    I32X16,
    I64,
    Emitter,
    Value,
    Variable,
)
from twostroke.backends.cpu.kernels.numbers import dot_pairs
from twostroke.backends.cpu.kernels.tile_weights import GroupedWeights
from twostroke.backends.cpu.tile_kinds import TileKind

Tile = list[list[Variable]]
"""[rows][columns] of 16 outputs"""


@dataclass(frozen=True, slots=True)
class InputRow:
    """One row of activations: quantised (values and what goes with them), or floats in `values` alone."""

    values: Value
    origins: Value = None
    sums: Value = None
    starts: Value = None
    byte_starts: Value = None
    half_offsets: Value = None
    peaks: Value = None
    peak_digits: Value = None


def quantised_tile(e: Emitter, weights: GroupedWeights, rows: list[InputRow], groups: Value) -> Tile:
    """Group by group, `_add_group`; and after every second group, the minimums of both times the row's sums added to
    the total: one product of pairs of bf16."""
    totals = [[e.variable(F32X16, e.floats(0.0)) for _ in range(weights.columns)] for _ in rows]
    if not weights.kind.layout.has_minimums:
        with e.loop(0, groups) as group:
            _add_group(e, weights, rows, group, totals)
        return totals
    with e.loop(0, e.sub(groups, 1), 2) as group:
        _add_group(e, weights, rows, group, totals)
        _add_group(e, weights, rows, e.add(group, 1), totals)
        _add_minimums(e, weights, rows, group, totals, single=False)
    with e.when(e.is_nonzero(e.rem(groups, 2))):
        _add_group(e, weights, rows, e.sub(groups, 1), totals)
        _add_minimums(e, weights, rows, e.sub(groups, 1), totals, single=True)
    return totals


def _add_group(e: Emitter, weights: GroupedWeights, rows: list[InputRow], group: Value, totals: Tile) -> None:
    """For a group of 32, or for each half of it that has a scale: an exact integer dot product, counted up from the
    bits of the row's origin. Read as a float and lowered by the origin, that is the dot product times the row's scale,
    exactly and with no multiplication; times the column's scale it is added to the total. So is the sum of each half
    times its minimum, in kinds that have such."""
    layout = weights.kind.layout
    dot, sets = dot_biased if layout.is_biased else dot_small, layout.scale_sets
    integers = _starts(e, weights, rows, group)
    places = [e.at(row.values, e.mul(group, 32)) for row in rows]
    for first, columns in weights.steps(group):
        half = first // 16 if sets == 2 else 0
        for sums, place in zip(integers, places, strict=True):
            four = e.load(I32, e.at(place, first), 4)
            sums[half] = [dot(e, t, w, four) for t, w in zip(sums[half], columns, strict=True)]
    scales = weights.scales(group)
    for row, total, sums in zip(rows, totals, integers, strict=True):
        origin = e.broadcast(row.origins, group)
        halves = [_half_sum(e, row, group, half) for half in range(sets if layout.has_half_minimums else 0)]
        for column in range(weights.columns):
            value = total[column].value
            for counts, column_scales in zip(sums, scales[:sets], strict=True):
                scaled = e.build.fsub(e.build.bitcast(counts[column], F32X16), origin)
                value = e.multiply_add(scaled, column_scales[column], value)
            for half_sum, minimums in zip(halves, scales[sets:], strict=True):
                value = e.multiply_add(half_sum, minimums[column], value)
            total[column].value = value


def _half_sum(e: Emitter, row: InputRow, group: Value, half: int) -> Value:
    """-HALF_OFFSET times the sum of the row's values in half a group: exactly, as integers are scaled above."""
    origin = e.broadcast(row.origins, group)
    offset = e.splat(e.load_at(I32, row.half_offsets, e.add(e.mul(group, 2), half)))
    return e.build.fsub(e.build.bitcast(e.build.add(e.build.bitcast(origin, I32X16), offset), F32X16), origin)


def _add_minimums(
    e: Emitter, weights: GroupedWeights, rows: list[InputRow], group: Value, totals: Tile, *, single: bool
) -> None:
    minimums = weights.minimum_pairs(group, single=single)
    for row, total in zip(rows, totals, strict=True):
        sums = e.splat(e.load_at(I32, row.sums, e.div(group, 2)))
        for cell, minimum in zip(total, minimums, strict=True):
            cell.value = dot_pairs(e, cell.value, minimum, sums)


def _starts(e: Emitter, weights: GroupedWeights, rows: list[InputRow], group: Value) -> list[list[list[Value]]]:
    """What integer sums start from: the row's origin, the bias of the weights taken away, and 128 times a peak's upper
    digit times the weights there. Few groups have a peak: where no row does, it is passed by
    # [rows][sets of scales][columns]"""
    build, sets = e.build, weights.kind.layout.scale_sets
    cells = []
    for row in rows:
        starts = [_start(e, weights.kind, row, group, half) for half in range(sets)]
        cells.append([[e.variable(I32X16, start) for _ in range(weights.columns)] for start in starts])
    digits = [e.load_at(I32, row.peak_digits, group) for row in rows]
    either = digits[0]
    for digit in digits[1:]:
        either = build.or_(either, digit)
    with e.when(build.icmp_signed("!=", either, I32(0))):
        for row, digit, own in zip(rows, digits, cells, strict=True):
            with e.when(build.icmp_signed("!=", digit, I32(0))):
                _add_peak(e, weights, row, digit, own, group)
    return [[[cell.value for cell in half] for half in own] for own in cells]


def _add_peak(
    e: Emitter, weights: GroupedWeights, row: InputRow, digit: Value, cells: list[list[Variable]], group: Value
) -> None:
    build, dot = e.build, dot_biased if weights.kind.layout.is_biased else dot_small
    peak = build.zext(e.load_at(I32, row.peaks, group), I64)
    step = weights.step_of(group, peak)
    for half, own in enumerate(cells):
        at_half = digit
        if len(cells) == 2:  # places 0 to 15, and 16 to 31
            in_half = build.icmp_signed("==", build.lshr(build.and_(peak, I64(16)), I64(4)), I64(half))
            at_half = build.select(in_half, digit, I32(0))
        for cell, weight in zip(own, step, strict=True):
            raised = build.shl(dot(e, e.ints(0), weight, at_half), e.ints(7))
            cell.value = build.add(cell.value, raised)


def _start(e: Emitter, kind: TileKind, row: InputRow, group: Value, half: int) -> Value:
    """Weights are stored as they count from the lowest, and sums count from the middle."""
    build, layout = e.build, kind.layout
    origin = build.bitcast(e.broadcast(row.origins, group), I32X16)
    middle = BYTE_MIDDLE if layout.is_biased else layout.middle
    if middle == 0 or (layout.is_biased and unbiases_itself(e)):
        return origin
    if layout.scale_sets == 2:
        offset = e.splat(e.load_at(I32, row.half_offsets, e.add(e.mul(group, 2), half)))
        return build.add(origin, _times(e, offset, middle, HALF_OFFSET))
    if middle in (START_MIDDLE, BYTE_MIDDLE):
        return e.splat(e.load_at(I32, row.starts if middle == START_MIDDLE else row.byte_starts, group))
    to_middle = build.sub(e.splat(e.load_at(I32, row.starts, group)), origin)
    return build.add(origin, _times(e, to_middle, middle, START_MIDDLE))


def _times(e: Emitter, values: Value, middle: int, counted_from: int) -> Value:
    """Multiples of `counted_from` as the same multiples of `middle`; one is a power of two times the other."""
    if middle >= counted_from:
        return values if middle == counted_from else e.build.mul(values, e.ints(middle // counted_from))
    return e.build.ashr(values, e.ints((counted_from // middle).bit_length() - 1))


def float_tile(e: Emitter, kind: TileKind, tile: Value, rows: list[InputRow], depth: Value) -> Tile:
    """One column: weights widened in registers, activations in f32, one product after the other."""
    totals = [[e.variable(F32X16, e.floats(0.0))] for _ in rows]
    with e.loop(0, depth) as index:
        weight = _load_floats(e, kind, tile, index)
        for row, (total,) in zip(rows, totals, strict=True):
            total.value = e.multiply_add(weight, e.broadcast(row.values, index), total.value)
    return totals


def _load_floats(e: Emitter, kind: TileKind, tile: Value, index: Value) -> Value:
    place = e.mul(index, 16)
    if kind is TileKind.F32:
        return e.load_floats(tile, place)
    if kind is TileKind.F16:
        return e.load_halves(tile, place)
    bits = e.build.zext(e.load(I16X16, e.at(tile, place, I16), 2), I32X16)
    return e.build.bitcast(e.build.shl(bits, e.ints(16)), F32X16)
