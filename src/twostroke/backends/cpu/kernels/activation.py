"""What joins an MLP's gate and up, and the soft cap of logits."""

from __future__ import annotations

import math

from twostroke.backends.cpu.arguments import ActivationField
from twostroke.backends.cpu.kernels.emitter import F32, Emitter, Value
from twostroke.backends.cpu.kernels.numbers import power_of_two
from twostroke.backends.cpu.kernels.operation import OperandWriter, operation
from twostroke.backends.cpu.shape import CLAMPED, RELU_SQUARED


def _silu(e: Emitter, value: Value) -> Value:
    return e.sigmoid_product(value, value)


def _gelu_tanh(e: Emitter, value: Value) -> Value:
    """x / 2 * (1 + tanh(u)) is x * sigmoid(2u), with u = sqrt(2 / pi) * (x + 0.044715 x^3)."""
    build = e.build
    cube = build.fmul(build.fmul(value, value), value)
    inner = e.multiply_add(cube, e.floats(0.044715), value)
    return e.sigmoid_product(value, build.fmul(inner, e.floats(2 * math.sqrt(2 / math.pi))))


_ERF = (1.061405429, -1.453152027, 1.421413741, -0.284496736, 0.254829592)
_ERF_SLOPE, _SERIES_DEGREE = 0.3275911, 6


def _gelu(e: Emitter, value: Value) -> Value:
    """x / 2 * (1 + erf(x / sqrt(2))), with Abramowitz and Stegun's 7.1.26 for the error function."""
    build = e.build
    z = build.fmul(value, e.floats(math.sqrt(0.5)))
    size = e.larger_float(z, build.fneg(z))
    t = build.fdiv(e.floats(1.0), e.multiply_add(size, e.floats(_ERF_SLOPE), e.floats(1.0)))
    series = e.floats(_ERF[0])
    for factor in _ERF[1:]:
        series = e.multiply_add(series, t, e.floats(factor))
    square = build.fmul(size, build.fmul(size, e.floats(-1 / math.log(2))))
    rest = build.fmul(build.fmul(series, t), power_of_two(e, square, _SERIES_DEGREE))  # 1 - erf(|z|)
    is_below = build.fcmp_ordered("<", value, e.floats(0.0))
    doubled = build.select(is_below, rest, build.fsub(e.floats(2.0), rest))  # 1 + erf(z)
    return build.fmul(build.fmul(value, e.floats(0.5)), doubled)


def _relu_squared(e: Emitter, value: Value) -> Value:
    """What is above zero, squared; what is no number stays so."""
    build = e.build
    above = build.select(build.fcmp_unordered(">", value, e.floats(0.0)), value, e.floats(0.0))
    return build.fmul(above, above)


_ACTIVATIONS = {"silu": _silu, "gelu_tanh": _gelu_tanh, "gelu": _gelu, RELU_SQUARED: _relu_squared}


def joined(e: Emitter, activation: str, gate: Value, up: Value) -> Value:
    """activation(gate) * up; of a clamped one (`shape.activation_name`), gate * sigmoid(alpha * gate) * (up + 1), both
    held within its limit."""
    build = e.build
    if not activation.startswith(CLAMPED):
        return build.fmul(_ACTIVATIONS[activation](e, gate), up)
    limit, alpha = (e.floats(float(number)) for number in activation.removeprefix(CLAMPED).split("_"))
    gate = build.select(build.fcmp_ordered(">", gate, limit), limit, gate)
    up = build.select(build.fcmp_ordered(">", up, limit), limit, up)
    up = build.select(build.fcmp_ordered("<", up, build.fneg(limit)), build.fneg(limit), up)
    return build.fmul(e.sigmoid_product(gate, build.fmul(gate, alpha)), build.fadd(up, e.floats(1.0)))


def emit_gated_activation(e: Emitter, activation: str) -> None:
    """operand[row] = activation(gate[row]) * up[row]"""
    with operation(e, f"gated_{activation}") as op:
        width, stride = op.integer(ActivationField.WIDTH), op.integer(ActivationField.STRIDE)
        first, last = op.share_rows(op.rows_in(ActivationField.ROWS))
        with e.loop(first, last) as row:
            gate = e.at(op.address(ActivationField.INPUT), e.mul(row, stride), F32)
            up = e.at(op.address(ActivationField.UP), e.mul(row, op.integer(ActivationField.UP_STRIDE)), F32)
            writer = OperandWriter(op, row, width)
            with e.loop(0, e.div(width, 32)) as group:
                places = [e.add(e.mul(group, 32), offset) for offset in (0, 16)]
                halves = [
                    joined(e, activation, e.load_floats(gate, place), e.load_floats(up, place)) for place in places
                ]
                writer.write_group(group, *halves)


def emit_plain_activation(e: Emitter, activation: str) -> None:
    """operand[row] = activation(input[row])"""
    with operation(e, f"plain_{activation}") as op:
        width, stride = op.integer(ActivationField.WIDTH), op.integer(ActivationField.STRIDE)
        first, last = op.share_rows(op.rows_in(ActivationField.ROWS))
        with e.loop(first, last) as row:
            values = e.at(op.address(ActivationField.INPUT), e.mul(row, stride), F32)
            writer = OperandWriter(op, row, width)
            with e.loop(0, e.div(width, 32)) as group:
                places = [e.add(e.mul(group, 32), offset) for offset in (0, 16)]
                halves = [_ACTIVATIONS[activation](e, e.load_floats(values, place)) for place in places]
                writer.write_group(group, *halves)


def emit_soft_cap(e: Emitter) -> None:
    """input[row] = cap * tanh(input[row] / cap), in place; threads share the columns of all rows."""
    with operation(e, "soft_cap") as op:
        stride = op.integer(ActivationField.STRIDE)
        cap = e.splat(op.float(ActivationField.CAP))
        values = op.address(ActivationField.INPUT)
        first, last = op.share(e.div(e.mul(op.step_integer(op.integer(ActivationField.ROWS)), stride), 16))
        with e.loop(first, last) as index:
            place = e.mul(index, 16)
            e.store_floats(e.soft_cap(e.load_floats(values, place), cap), values, place)
