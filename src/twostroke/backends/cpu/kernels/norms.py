"""RMSNorm, and writing rows as the input of a matrix product. A row is one thread's work."""

from __future__ import annotations

from enum import IntEnum

from twostroke.backends.cpu.arguments import ColumnsField, NormField, StepField
from twostroke.backends.cpu.kernels.emitter import F32, F32X16, I32, I64, Emitter, Value
from twostroke.backends.cpu.kernels.operation import OperandWriter, Operation, operation


def inverse_rms(e: Emitter, values: Value, width: Value, epsilon: Value) -> Value:
    """1 / sqrt(mean of squares + epsilon), in all lanes; the width is a multiple of 16."""
    total = e.variable(F32X16, e.floats(0.0))
    with e.loop(0, width, 16) as index:
        value = e.load_floats(values, index)
        total.value = e.multiply_add(value, value, total.value)
    mean = e.build.fdiv(e.reduce_sum(total.value), e.build.sitofp(width, F32))
    return e.splat(e.build.fdiv(F32(1.0), e.square_root(e.build.fadd(mean, epsilon))))


def source_row(op: Operation, row: Value, gather: IntEnum = NormField.GATHER) -> Value:
    """The row itself, or, where the field `gather` says so, the one whose logits come out as this row."""
    e = op.emitter
    source = e.variable(I64, row)
    with e.when(e.is_nonzero(op.integer(gather))):
        source.value = e.build.sext(e.load_at(I32, op.step_address(StepField.LOGIT_ROWS), row), I64)
    return source.value


def _source(op: Operation, row: Value) -> Value:
    """Where that row's numbers are."""
    e = op.emitter
    stride = op.integer(NormField.STRIDE)
    stride = e.build.select(e.is_nonzero(stride), stride, op.integer(NormField.WIDTH))
    return e.at(op.address(NormField.INPUT), e.mul(source_row(op, row), stride), F32)


def emit_norm(e: Emitter) -> None:
    """operand[row] = norm(input[row]) * weight; the rows are all, or those whose logits are wanted."""
    with operation(e, "norm") as op:
        width, weight = op.integer(NormField.WIDTH), op.address(NormField.WEIGHT)
        first, last = op.share_rows(op.rows_in(NormField.ROWS))
        with e.loop(first, last) as row:
            values = _source(op, row)
            inverse = inverse_rms(e, values, width, op.float(NormField.EPSILON))
            writer = OperandWriter(op, row, width)
            with e.loop(0, e.div(width, 32)) as group:
                halves = []
                for offset in (0, 16):
                    place = e.add(e.mul(group, 32), offset)
                    normed = e.build.fmul(e.load_floats(values, place), inverse)
                    halves.append(e.build.fmul(normed, e.load_floats(weight, place)))
                writer.write_group(group, *halves)


def emit_norm_add(e: Emitter) -> None:
    """add_to[row] = (add_to[row] + norm(input[row]) * weight) * factor: a block's output joining the residual."""
    with operation(e, "norm_add") as op:
        width, weight = op.integer(NormField.WIDTH), op.address(NormField.WEIGHT)
        factor = e.splat(op.float(NormField.FACTOR))
        first, last = op.own_rows(op.step_integer(op.integer(NormField.ROWS)))
        with e.loop(first, last) as row:
            values = e.at(op.address(NormField.INPUT), e.mul(row, width), F32)
            target = e.at(op.address(NormField.ADD_TO), e.mul(row, width), F32)
            inverse = inverse_rms(e, values, width, op.float(NormField.EPSILON))
            with e.loop(0, width, 16) as place:
                normed = e.build.fmul(e.load_floats(values, place), inverse)
                product = e.build.fmul(normed, e.load_floats(weight, place))
                total = e.build.fadd(e.load_floats(target, place), product)
                e.store_floats(e.build.fmul(total, factor), target, place)


def emit_norm_columns(e: Emitter) -> None:
    """output[row][part] = norm(input[row][part]) * weight, in place or elsewhere; or added to what is there."""
    with operation(e, "norm_columns") as op:
        width, weight = op.integer(ColumnsField.WIDTH), op.address(ColumnsField.WEIGHT)
        adds = e.is_nonzero(op.integer(ColumnsField.ACCUMULATE))
        first, last = op.own_rows(op.step_integer(op.integer(ColumnsField.ROWS)))
        with e.loop(first, last) as row, e.loop(0, op.integer(ColumnsField.COUNT)) as part:
            start = e.mul(part, width)
            values, target = (
                e.at(op.address(array), e.add(e.mul(row, op.integer(stride)), start), F32)
                for array, stride in (
                    (ColumnsField.INPUT, ColumnsField.STRIDE),
                    (ColumnsField.OUTPUT, ColumnsField.OUTPUT_STRIDE),
                )
            )
            inverse = inverse_rms(e, values, width, op.float(ColumnsField.EPSILON))
            with e.loop(0, width, 16) as place:
                normed = e.build.fmul(e.load_floats(values, place), inverse)
                normed = e.build.fmul(normed, e.load_floats(weight, place))
                held = e.build.select(adds, e.load_floats(target, place), e.floats(0.0))
                e.store_floats(e.build.fadd(normed, held), target, place)


def emit_layer_norm(e: Emitter) -> None:
    """input[row] = (input[row] - mean) / spread * weight + bias, in place: an encoder's, behind each block."""
    with operation(e, "layer_norm") as op:
        width, weight, bias = op.integer(NormField.WIDTH), op.address(NormField.WEIGHT), op.address(NormField.BIAS)
        first, last = op.own_rows(op.step_integer(op.integer(NormField.ROWS)))
        with e.loop(first, last) as row:
            values = e.at(op.address(NormField.INPUT), e.mul(row, width), F32)
            total = e.variable(F32X16, e.floats(0.0))
            with e.loop(0, width, 16) as place:
                total.value = e.build.fadd(total.value, e.load_floats(values, place))
            mean = e.splat(e.build.fdiv(e.reduce_sum(total.value), e.build.sitofp(width, F32)))
            with e.loop(0, width, 16) as place:
                e.store_floats(e.build.fsub(e.load_floats(values, place), mean), values, place)
            inverse = inverse_rms(e, values, width, op.float(NormField.EPSILON))
            with e.loop(0, width, 16) as place:
                normed = e.build.fmul(e.load_floats(values, place), inverse)
                scaled = e.multiply_add(normed, e.load_floats(weight, place), e.load_floats(bias, place))
                e.store_floats(scaled, values, place)


def emit_prepare(e: Emitter) -> None:
    """operand[row] = input[row], as it is; the rows are all, or those whose logits are wanted."""
    with operation(e, "prepare") as op:
        width = op.integer(NormField.WIDTH)
        first, last = op.share_rows(op.rows_in(NormField.ROWS))
        with e.loop(first, last) as row:
            values = _source(op, row)
            writer = OperandWriter(op, row, width)
            with e.loop(0, e.div(width, 32)) as group:
                place = e.mul(group, 32)
                writer.write_group(group, e.load_floats(values, place), e.load_floats(values, e.add(place, 16)))
