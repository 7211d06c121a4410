"""All kernels of a model shape as one LLVM module."""

from __future__ import annotations

from llvmlite import ir

from twostroke.backends.cpu.isa import InstructionSet
from twostroke.backends.cpu.kernels.activation import emit_gated_activation, emit_soft_cap
from twostroke.backends.cpu.kernels.attention import emit_attention
from twostroke.backends.cpu.kernels.emitter import Emitter
from twostroke.backends.cpu.kernels.highest import emit_highest
from twostroke.backends.cpu.kernels.matmul import emit_gated_matmul, emit_join, emit_matmul
from twostroke.backends.cpu.kernels.norms import emit_norm, emit_norm_add, emit_prepare
from twostroke.backends.cpu.kernels.rope_kv import emit_rope_and_store
from twostroke.backends.cpu.kernels.threads import emit_threads
from twostroke.backends.cpu.kernels.tile_calls import emit_tiles
from twostroke.backends.cpu.shape import KernelShape


def module_text(shape: KernelShape, isa: InstructionSet) -> str:
    module = ir.Module("twostroke_cpu")
    emitter = Emitter(module, isa)
    emit_join(emitter, shape.activation)
    for kind in shape.tile_kinds:
        emit_tiles(emitter, kind)
        emit_matmul(emitter, kind)
        emit_gated_matmul(emitter, kind, shape.activation)
    emit_norm(emitter)
    emit_norm_add(emitter)
    emit_prepare(emitter)
    emit_gated_activation(emitter, shape.activation)
    emit_soft_cap(emitter)
    emit_highest(emitter)
    emit_rope_and_store(emitter, shape)
    emit_attention(emitter, shape)
    emit_threads(emitter)
    return str(module)
