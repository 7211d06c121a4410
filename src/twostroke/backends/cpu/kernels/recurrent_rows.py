"""What layers that keep a state do row by row: how far a state fades at a token, keys of length 1, norms and their
gates. A row is one thread's work."""

from __future__ import annotations

from twostroke.backends.cpu.kernels.emitter import F32, F32X16, LANES, Emitter, Value
from twostroke.backends.cpu.kernels.norms import inverse_rms, source_row
from twostroke.backends.cpu.kernels.operation import OperandWriter, Operation, operation
from twostroke.backends.cpu.recurrent_arguments import DecayField, GatedNormField

_LENGTH_EPSILON = 1e-6
_LINEAR_FROM = 20.0
"""From here on the softplus of x is x."""


def emit_decays(e: Emitter, *, is_delta: bool) -> None:
    """What a state is multiplied by at each token, e^(-rate * step), and what values are: by the delta rule the sigmoid
    of a number, else the step. A step is a softplus, held within limits."""
    with operation(e, "decays_delta" if is_delta else "decays") as op:
        heads = op.integer(DecayField.NUM_HEADS)
        padded = e.mul(e.div(e.add(heads, LANES - 1), LANES), LANES)
        stride = op.integer(DecayField.STRIDE)
        first, last = op.share(op.step_integer(op.integer(DecayField.ROWS)))
        with e.loop(first, last) as row:
            output = e.at(op.address(DecayField.OUTPUT), e.mul(row, e.mul(padded, 2)), F32)
            with e.loop(0, heads, LANES) as head:
                place = e.add(e.mul(row, stride), head)
                step = e.load_floats(op.address(DecayField.STEPS), place)
                step = _softplus(e, e.build.fadd(step, e.load_floats(op.address(DecayField.STEP_BIAS), head)))
                shortest, longest = (e.splat(op.float(limit)) for limit in (DecayField.SHORTEST, DecayField.LONGEST))
                step = e.build.select(e.build.fcmp_ordered("<", step, shortest), shortest, step)
                step = e.build.select(e.build.fcmp_ordered(">", step, longest), longest, step)
                rate = e.load_floats(op.address(DecayField.RATES), head)
                e.store_floats(e.exponential(e.build.fneg(e.build.fmul(rate, step))), output, head)
                strength = step
                if is_delta:
                    strength = e.sigmoid_product(e.floats(1.0), e.load_floats(op.address(DecayField.STRENGTHS), place))
                e.store_floats(strength, output, e.add(padded, head))
            if is_delta:
                _bring_to_length(op, row)


def _softplus(e: Emitter, value: Value) -> Value:
    """log(1 + e^x)"""
    build = e.build
    bounded = build.select(build.fcmp_ordered(">", value, e.floats(_LINEAR_FROM)), e.floats(_LINEAR_FROM), value)
    power = e.exponential(bounded)
    # Where e^x is below the last bit of 1, the logarithm of the sum is 0, and e^x itself is right.
    found = e.external("llvm.log.v16f32", F32X16, [F32X16], [build.fadd(e.floats(1.0), power)])
    found = build.select(build.fcmp_ordered("<", power, e.floats(1e-4)), _small_log(e, power), found)
    return build.select(build.fcmp_ordered(">", value, e.floats(_LINEAR_FROM)), value, found)


def _small_log(e: Emitter, value: Value) -> Value:
    """log(1 + x) of x next to 0: x - x^2 / 2"""
    return e.multiply_add(e.build.fmul(value, value), e.floats(-0.5), value)


def _bring_to_length(op: Operation, row: Value) -> None:
    """Queries and keys of each head to length 1, queries scaled besides."""
    e = op.emitter
    width, heads = op.integer(DecayField.KEY_DIM), op.integer(DecayField.NUM_KEY_HEADS)
    rows = e.at(op.address(DecayField.KEYS), e.mul(row, op.integer(DecayField.KEYS_STRIDE)), F32)
    with e.loop(0, e.mul(heads, 2)) as head:
        values = e.at(rows, e.mul(head, width), F32)
        total = e.variable(F32X16, e.floats(0.0))
        with e.loop(0, width, LANES) as place:
            value = e.load_floats(values, place)
            total.value = e.multiply_add(value, value, total.value)
        squared = e.build.fadd(e.reduce_sum(total.value), F32(_LENGTH_EPSILON))
        inverse = e.build.fdiv(F32(1.0), e.square_root(squared))
        scaled = e.build.fmul(inverse, op.float(DecayField.QUERY_SCALE))
        factor = e.splat(e.build.select(e.build.icmp_signed("<", head, heads), scaled, inverse))
        with e.loop(0, width, LANES) as place:
            e.store_floats(e.build.fmul(e.load_floats(values, place), factor), values, place)


def emit_gated_norm(e: Emitter, *, gate_first: bool) -> None:
    """operand[row] = norm(input[row]) * weight * silu(gate[row]); with `gate_first`, norm(input[row] * silu(gate[row]))
    * weight. Each part of the width is normed by itself. Every thread may do all rows, for a copy of its own: the input
    stays as it is, and a row is made in scratch."""
    with operation(e, "norm_gated" if gate_first else "gated_norm") as op:
        width, part = op.integer(GatedNormField.WIDTH), op.integer(GatedNormField.PART)
        first, last = op.share_rows(op.rows_in(GatedNormField.ROWS))
        with e.loop(first, last) as row:
            values = e.at(op.address(GatedNormField.INPUT), e.mul(row, width), F32)
            gates = e.at(op.address(GatedNormField.GATE), e.mul(row, op.integer(GatedNormField.GATE_STRIDE)), F32)
            with e.loop(0, width, part) as start:
                source, gate, made = (e.at(one, start, F32) for one in (values, gates, op.scratch))
                with e.loop(0, part, LANES) as place:
                    value = e.load_floats(source, place)
                    value = _silu_product(e, value, e.load_floats(gate, place)) if gate_first else value
                    e.store_floats(value, made, place)
                inverse = inverse_rms(e, made, part, op.float(GatedNormField.EPSILON))
                with e.loop(0, part, LANES) as place:
                    normed = e.build.fmul(e.load_floats(made, place), inverse)
                    weight = e.load_floats(op.address(GatedNormField.WEIGHT), e.add(start, place))
                    normed = e.build.fmul(normed, weight)
                    normed = normed if gate_first else _silu_product(e, normed, e.load_floats(gate, place))
                    e.store_floats(normed, made, place)
            _write_row(op, row, width, op.scratch)


def _silu_product(e: Emitter, value: Value, gate: Value) -> Value:
    return e.sigmoid_product(e.build.fmul(value, gate), gate)


def _write_row(op: Operation, row: Value, width: Value, values: Value) -> None:
    e = op.emitter
    writer = OperandWriter(op, row, width)
    with e.loop(0, e.div(width, 32)) as group:
        place = e.mul(group, 32)
        writer.write_group(group, e.load_floats(values, place), e.load_floats(values, e.add(place, 16)))


def emit_prepare_gated(e: Emitter) -> None:
    """operand[row] = input[row] * sigmoid(gate[row]); the rows are all, or those whose logits are wanted."""
    with operation(e, "prepare_gated") as op:
        width, stride = op.integer(GatedNormField.WIDTH), op.integer(GatedNormField.GATE_STRIDE)
        first, last = op.share_rows(op.rows_in(GatedNormField.ROWS))
        with e.loop(first, last) as row:
            source = source_row(op, row, GatedNormField.GATHER)
            values = e.at(op.address(GatedNormField.INPUT), e.mul(source, width), F32)
            gates = e.at(op.address(GatedNormField.GATE), e.mul(source, stride), F32)
            writer = OperandWriter(op, row, width)
            with e.loop(0, e.div(width, 32)) as group:
                places = [e.add(e.mul(group, 32), offset) for offset in (0, 16)]
                halves = [e.sigmoid_product(e.load_floats(values, at), e.load_floats(gates, at)) for at in places]
                writer.write_group(group, *halves)
