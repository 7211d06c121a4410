"""The kernels as LLVM modules, one for each part of a model's code (`code.py`)."""

from __future__ import annotations

from llvmlite import ir

from twostroke.backends.cpu.isa import InstructionSet
from twostroke.backends.cpu.kernels.activation import emit_gated_activation, emit_plain_activation, emit_soft_cap
from twostroke.backends.cpu.kernels.attention import emit_attention
from twostroke.backends.cpu.kernels.emitter import Emitter
from twostroke.backends.cpu.kernels.highest import emit_highest
from twostroke.backends.cpu.kernels.latent_decode import emit_latent_decode
from twostroke.backends.cpu.kernels.latent_prefill import emit_latent_prefill
from twostroke.backends.cpu.kernels.latent_products import emit_latent_products
from twostroke.backends.cpu.kernels.latent_store import emit_latent_store
from twostroke.backends.cpu.kernels.matmul import emit_gated_matmul, emit_join, emit_matmul
from twostroke.backends.cpu.kernels.norms import (
    emit_layer_norm,
    emit_norm,
    emit_norm_add,
    emit_norm_columns,
    emit_prepare,
)
from twostroke.backends.cpu.kernels.rank_norms import emit_scale, emit_squares
from twostroke.backends.cpu.kernels.recurrent import emit_convolution, emit_recurrence
from twostroke.backends.cpu.kernels.recurrent_rows import emit_decays, emit_gated_norm, emit_prepare_gated
from twostroke.backends.cpu.kernels.rope_kv import emit_rope_and_store
from twostroke.backends.cpu.kernels.routing import emit_routing
from twostroke.backends.cpu.kernels.share import emit_share
from twostroke.backends.cpu.kernels.threads import emit_threads
from twostroke.backends.cpu.kernels.tile_calls import emit_tiles
from twostroke.backends.cpu.shape import KernelShape, RecurrentShape
from twostroke.backends.cpu.tile_kinds import TileKind


def attention_text(shape: KernelShape, isa: InstructionSet) -> str:
    emitter = _emitter(isa)
    if shape.latent is not None:
        emit_latent_store(emitter, shape)
        emit_latent_products(emitter, shape)
        emit_latent_decode(emitter, shape)
        emit_latent_prefill(emitter, shape)
        return str(emitter.module)
    emit_rope_and_store(emitter, shape)
    emit_attention(emitter, shape)
    return str(emitter.module)


def products_text(kind: TileKind, isa: InstructionSet) -> str:
    emitter = _emitter(isa)
    emit_tiles(emitter, kind)
    emit_matmul(emitter, kind)
    emit_gated_matmul(emitter, kind)
    return str(emitter.module)


def rows_text(activation: str, isa: InstructionSet) -> str:
    emitter = _emitter(isa)
    emit_join(emitter, activation)
    emit_norm(emitter)
    emit_norm_add(emitter)
    emit_norm_columns(emitter)
    emit_prepare(emitter)
    emit_share(emitter)
    emit_prepare_gated(emitter)
    emit_gated_activation(emitter, activation)
    emit_soft_cap(emitter)
    emit_highest(emitter)
    return str(emitter.module)


def routing_text(isa: InstructionSet) -> str:
    emitter = _emitter(isa)
    emit_routing(emitter)
    return str(emitter.module)


def plain_text(activation: str, isa: InstructionSet) -> str:
    """Of MLPs without a gate; encoders' norms with it."""
    emitter = _emitter(isa)
    emit_layer_norm(emitter)
    emit_plain_activation(emitter, activation)
    return str(emitter.module)


def recurrent_text(shape: RecurrentShape, isa: InstructionSet) -> str:
    emitter = _emitter(isa)
    emit_convolution(emitter, shape.taps, is_gated=shape.rule is None)
    if shape.rule is not None:
        emit_decays(emitter, is_delta=shape.rule == "delta")
        emit_recurrence(emitter, is_delta=shape.rule == "delta")
        emit_gated_norm(emitter, gate_first=shape.rule != "delta")
    return str(emitter.module)


def rank_norms_text(isa: InstructionSet) -> str:
    emitter = _emitter(isa)
    emit_squares(emitter)
    emit_scale(emitter)
    return str(emitter.module)


def threads_text(isa: InstructionSet) -> str:
    emitter = _emitter(isa)
    emit_threads(emitter)
    return str(emitter.module)


def _emitter(isa: InstructionSet) -> Emitter:
    return Emitter(ir.Module("twostroke_cpu"), isa)
