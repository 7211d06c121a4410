"""Loops that do nothing but one thing, as fast as this instruction set can: read memory, multiply and add."""

from __future__ import annotations

from llvmlite import ir

from twostroke.backends.cpu.isa import InstructionSet
from twostroke.backends.cpu.kernels.dot import dot_small
from twostroke.backends.cpu.kernels.emitter import F32, F32X16, I8X64, I32, I32X16, I64, POINTER, Emitter

READ_STEP_BYTES = 512
CHAINS = 8
"""Independent sums: enough to hide the latency of an addition."""
UNROLL = 4


def module_text(isa: InstructionSet) -> str:
    emitter = Emitter(ir.Module("twostroke_ceilings"), isa)
    _emit_read(emitter)
    _emit_dots(emitter)
    _emit_multiply_adds(emitter)
    return str(emitter.module)


def _emit_read(e: Emitter) -> None:
    """Reads `count` bytes, a multiple of the step; the result keeps the loads from being optimised away."""
    with e.function("read_memory", (("memory", POINTER), ("count", I64), ("result", POINTER))) as (
        memory,
        count,
        result,
    ):
        chains = [e.variable(I32X16, e.ints(0)) for _ in range(READ_STEP_BYTES // 64)]
        with e.loop(0, count, READ_STEP_BYTES) as offset:
            place = e.at(memory, offset)
            e.prefetch(e.at(place, 4096))
            for index, chain in enumerate(chains):
                chain.value = e.build.xor(chain.value, e.load(I32X16, e.at(place, 64 * index), 64))
        total = chains[0].value
        for chain in chains[1:]:
            total = e.build.xor(total, chain.value)
        e.store(total, result)


def _emit_dots(e: Emitter) -> None:
    """`count` rounds of CHAINS * UNROLL dot products of 64 bytes. No two have the same operands: a compiler would
    otherwise compute one and add it many times. `data` holds the activations, and the weights after them."""
    with e.function("integer_dots", (("count", I64), ("data", POINTER))) as (count, data):
        weights = [e.load(I8X64, e.at(data, 64 * (1 + index))) for index in range(CHAINS)]
        chains = [e.variable(I32X16, e.ints(0)) for _ in range(CHAINS)]
        with e.loop(0, count) as number:
            for offset in range(UNROLL):
                place = e.rem(e.add(e.mul(number, UNROLL), offset), 16)
                activations = e.load_at(I32, data, place)
                for chain, weight in zip(chains, weights, strict=True):
                    chain.value = dot_small(e, chain.value, weight, activations)
        for index, chain in enumerate(chains):
            e.store(chain.value, e.at(data, 64 * index))


def _emit_multiply_adds(e: Emitter) -> None:
    """`count` rounds of CHAINS * UNROLL multiply-adds of 16 floats."""
    with e.function("float_multiply_adds", (("count", I64), ("data", POINTER))) as (count, data):
        factor = e.broadcast(data)
        chains = [e.variable(F32X16, e.load_floats(e.at(data, 16 * index, F32))) for index in range(CHAINS)]
        with e.loop(0, count):
            for _ in range(UNROLL):
                for chain in chains:
                    chain.value = e.multiply_add(factor, factor, chain.value)
        for index, chain in enumerate(chains):
            e.store_floats(chain.value, data, 16 * index)
