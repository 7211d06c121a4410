"""Codes to what they stand for: 64 looked up at once in a table of 16 bytes, in whatever way an instruction set has."""

from __future__ import annotations

from collections.abc import Sequence

from llvmlite import ir

from twostroke.backends.cpu.kernels.dot import join_parts, split_vector
from twostroke.backends.cpu.kernels.emitter import I8, I8X64, Emitter, Value

_TABLE_ENTRIES = 16


def look_up(emitter: Emitter, table: Sequence[int], codes: Value) -> Value:
    """# codes [64] u8 below 16, to [64] u8"""
    entries = [*table, *[0] * (_TABLE_ENTRIES - len(table))]
    if emitter.isa.name == "avx512-vnni":
        held = ir.Constant(I8X64, entries * 4)
        return emitter.external("llvm.x86.avx512.pshuf.b.512", I8X64, [I8X64] * 2, [held, codes])
    if emitter.isa.name in ("avx2", "avx2-vnni"):
        return _by_parts(emitter, "llvm.x86.avx2.pshuf.b", 2, entries, codes)
    if emitter.isa.architecture == "aarch64":
        return _by_parts(emitter, "llvm.aarch64.neon.tbl1.v16i8", 4, entries, codes)
    return _by_choices(emitter, entries, codes)


def _by_parts(emitter: Emitter, name: str, parts: int, entries: list[int], codes: Value) -> Value:
    kind = ir.VectorType(I8, 64 // parts)
    held = ir.Constant(kind, entries * (kind.count // _TABLE_ENTRIES))
    found = [emitter.external(name, kind, [kind] * 2, [held, part]) for part in split_vector(emitter, codes, parts)]
    return join_parts(emitter, found)


def _by_choices(emitter: Emitter, entries: list[int], codes: Value) -> Value:
    """Without an instruction for it: each bit of a code chooses between two halves of what is left of the table."""
    build = emitter.build
    left = [ir.Constant(I8X64, [entry] * 64) for entry in entries]
    for bit in range(4):
        is_set = build.and_(codes, ir.Constant(I8X64, [1 << bit] * 64))
        chosen = build.icmp_unsigned("!=", is_set, ir.Constant(I8X64, [0] * 64))
        left = [build.select(chosen, odd, even) for even, odd in zip(left[::2], left[1::2], strict=True)]
    return left[0]
