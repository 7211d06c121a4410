"""Compiles the layer's kernels for sm_80 or sm_90 without a card, and says what came out. A program of its own: in a
process with the interpreter on, kernels cannot be compiled."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from typing import Any

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from twostroke.backends.cuda.attention import Attention
from twostroke.backends.cuda.kernels import (
    activation,
    decode_attention,
    decode_cuts,
    drafts,
    eight_bits,
    embedding,
    four_bits,
    gemv,
    grouped_numbers,
    head_states,
    norms,
    packing,
    prefill_attention,
    rope,
    sampling_edits,
    target,
)
from twostroke.backends.cuda.kernels.gemv_config import GemvConfig
from twostroke.backends.cuda.kernels.packed_format import FOUR_BITS, GROUPED_CODES
from twostroke.backends.cuda.kernels.packing import PackedMatrix
from twostroke.backends.cuda.kernels.paged import PagedKV, Scoring
from twostroke.backends.cuda.kernels.prefill_tiles import PrefillWork
from twostroke.backends.cuda.kernels.sampling_filters import Summaries
from twostroke.backends.cuda.one_byte_kv import OneByteKV

OF_EVERY_SORT = ("int4_32ka", "int6_16k", "int4_128hz", "fp8_128", "e2m1_32b", "iq4_nl_32k")
SHARED_KIB = {80: 163, 90: 227}
architecture = GPUTarget("cuda", 90, 32)
POINTERS = {
    torch.bfloat16: "*bf16",
    torch.float16: "*fp16",
    torch.float32: "*fp32",
    torch.int32: "*i32",
    torch.int64: "*i64",
    torch.int16: "*i16",
    torch.uint8: "*u8",
    torch.int8: "*i8",
    torch.float8_e4m3fn: "*fp8e4nv",
}


class Recorder:
    """Stands where a kernel stands in its module, and compiles what it would have launched."""

    def __init__(self, kernel: Any) -> None:
        self.kernel = kernel
        self.ptx: list[str] = []

    def __getitem__(self, grid: object) -> Any:
        return self.compile

    def compile(self, *values: Any, **keywords: Any) -> None:
        kernel = self.kernel
        names = kernel.arg_names
        arguments = dict(zip(names, values, strict=False)) | {n: v for n, v in keywords.items() if n in names}
        options = {name: value for name, value in keywords.items() if name not in names}
        signature, constants, attributes = {}, {}, {}
        for index, parameter in enumerate(kernel.params):
            value = arguments[parameter.name]
            if isinstance(value, tuple):  # of tensors, all of them aligned
                signature[parameter.name] = type(value)(*(POINTERS[tensor.dtype] for tensor in value))
                attributes |= {(index, place): [["tt.divisibility", 16]] for place in range(len(value))}
                continue
            if isinstance(value, torch.Tensor):
                signature[parameter.name] = POINTERS[value.dtype]
                is_aligned = not parameter.do_not_specialize_on_alignment
            elif parameter.is_constexpr or value is None:
                signature[parameter.name] = "constexpr"
                constants[(index,)] = value
                continue
            else:
                signature[parameter.name] = "fp32" if isinstance(value, float) else "i32"
                is_aligned = isinstance(value, int) and not parameter.do_not_specialize and value % 16 == 0
            if is_aligned:
                attributes[(index,)] = [["tt.divisibility", 16]]
        source = ASTSource(kernel, signature, constexprs=constants, attrs=attributes)
        self.ptx.append(triton.compile(source, target=architecture, options=options).asm["ptx"])


def record(module: Any, name: str) -> Recorder:
    recorder = Recorder(getattr(module, name))
    setattr(module, name, recorder)
    return recorder


def calls() -> Iterator[tuple[str, str]]:
    """Every kernel's name and code, as its wrapper would launch it on tensors of a real model's sizes."""
    half, ints = torch.bfloat16, torch.zeros(4, dtype=torch.int32)
    hidden, x, weight = 2560, torch.empty(4, 2560, dtype=half), torch.empty(2560, dtype=half)

    recorder = record(embedding, "_gather")
    words = torch.zeros(4, 17, dtype=torch.int64)
    for positions in (None, embedding.Positions(ints, words, ints)):
        embedding.gather(torch.empty(8, hidden, dtype=half), ints, ints, ints, x, scale=2.0, positions=positions)
    yield from (("gather", ptx) for ptx in recorder.ptx)

    recorder = record(norms, "_norm")
    norms.rms_norm(x, weight, x, eps=1e-6)
    norms.add_rms_norm(x, x, weight, x, eps=1e-6)
    norms.add_rms_norm(x, x, weight, x, eps=1e-6, post_weight=weight)
    norms.add_rms_norm(x, x, None, None, eps=1e-6, post_weight=weight)
    yield from (("norm", ptx) for ptx in recorder.ptx)

    recorder = record(activation, "_gated")
    activation.gated(torch.empty(4, 19456, dtype=half), torch.empty(4, 9728, dtype=half), kind="gelu_tanh")
    yield "gated", recorder.ptx[0]

    recorder = record(rope, "_rope_and_store")
    for head_dim, rope_dim, norm in ((128, 128, None), (128, 128, weight), (96, 72, weight)):
        cache = torch.empty(3, 8, 64, head_dim, dtype=half)
        rope.rope_and_store(
            torch.empty(4, 48 * head_dim, dtype=half), torch.empty(64, rope_dim), ints, ints,
            PagedKV(cache, cache, ints[:, None]), norm, norm,
        )  # fmt: skip
    for kv in one_byte_caches(64, 128):
        heads = torch.empty(4, 48 * 128, dtype=half)
        rope.rope_and_store(heads, torch.empty(64, 128), ints, ints, kv, weight, weight)
    yield from (("rope", ptx) for ptx in recorder.ptx)

    yield from attention_calls()

    recorder = record(sampling_edits, "_mask")
    sampling_edits.mask(torch.empty(4, 151936), ints, torch.zeros(4, 4748, dtype=torch.int32), block=4096)
    yield "mask", recorder.ptx[0]
    yield from draft_calls()
    yield from head_calls()
    yield from gemv_calls()
    yield from packing_calls()
    yield from low_bit_calls()


def one_byte_caches(page: int, head_dim: int) -> Iterator[PagedKV]:
    """Of both kinds, with scales of tokens and of heads; float8 where the chip has it."""
    table, of_heads = torch.zeros(4, 1, dtype=torch.int32), torch.empty(8)
    for name in ("int8", "fp8") if architecture.arch >= 89 else ("int8",):
        for one_byte in (OneByteKV(name), OneByteKV(name, {0: (of_heads, of_heads)})):
            width = head_dim + (0 if one_byte.of_heads else 4)
            parts = torch.empty(2, 3, 8, page * width, dtype=torch.uint8)
            yield one_byte.paged(0, parts[0], parts[1], page, table)


def attention_calls() -> Iterator[tuple[str, str]]:
    """Every head size, page, type and scoring, of a batch and of a token alone."""
    decode, cut = record(decode_attention, "_decode_kernel"), record(decode_cuts, "_cut_kernel")
    prefill, join = record(prefill_attention, "_prefill_kernel"), record(prefill_attention, "_join_kernel")
    half, ints = torch.bfloat16, torch.zeros(4, dtype=torch.int32)
    decode_names = []
    for head_dim, page, dtype, scoring in (
        (128, 64, half, Scoring(0.1)),
        (96, 16, half, Scoring(0.1, window=100)),
        (256, 64, half, Scoring(0.1, window=1024, first=1)),
        (256, 64, torch.float16, Scoring(0.1, window=100, softcap=50.0)),
        (512, 64, half, Scoring(0.1)),
        (64, 64, torch.float32, Scoring(0.1)),
    ):
        heads = torch.empty(4, 48, head_dim, dtype=dtype)[:, :32]
        cache = torch.empty(3, 8, page, head_dim, dtype=dtype)
        kv, out = PagedKV(cache, cache, ints[:, None]), torch.empty(4, 32 * head_dim, dtype=dtype)
        attention = Attention(kv.shape_for(heads, 8), "cpu", max_decode_tokens=4, max_queries=32)
        for count, width in ((None, 1), (ints[:1], 1), (None, 2)):
            attention.cut_decodes(ints, [scoring.window], count=count, width=width)
        for tokens in (4, 1):
            attention.decode(heads[:tokens], kv, ints[:tokens], ints[:tokens], out[:tokens], scoring)
            decode_names.append("decode in float32" if dtype == torch.float32 else "decode")
        for width, streams in ((5, 1), (5, 4), (8, 4)):
            tokens = width * streams
            places, many = (
                torch.zeros(tokens, dtype=torch.int32),
                torch.empty(tokens, 48, head_dim, dtype=dtype)[:, :32],
            )
            rows_out = torch.empty(tokens, 32 * head_dim, dtype=dtype)
            attention.decode(many, kv, places, places, rows_out, scoring, width)
            decode_names.append("decode in float32" if dtype == torch.float32 else "decode")
        for tile_rows in (64, 128) if head_dim <= 128 else (attention.tiling(2000).tile_rows,):
            work = PrefillWork(torch.zeros(1, 8, dtype=torch.int32), tile_rows, part_items=1, longest_context=2000)
            attention.prefill(heads, kv, work, out, scoring)
    for head_dim, page, scoring in (
        (128, 64, Scoring(0.1)),
        (64, 16, Scoring(0.1, window=100)),
        (256, 64, Scoring(0.1, window=1024, softcap=50.0)),
    ):
        heads = torch.empty(4, 48, head_dim, dtype=half)[:, :32]
        out = torch.empty(4, 32 * head_dim, dtype=half)
        for kv in one_byte_caches(page, head_dim):
            attention = Attention(kv.shape_for(heads, 8), "cpu", max_decode_tokens=4, max_queries=32)
            attention.cut_decodes(ints, [scoring.window])
            for tokens in (4, 1):
                attention.decode(heads[:tokens], kv, ints[:tokens], ints[:tokens], out[:tokens], scoring)
                decode_names.append("decode of bytes")
            for tile_rows in (64, 128) if head_dim <= 128 else (64,):
                work = PrefillWork(torch.zeros(1, 8, dtype=torch.int32), tile_rows, part_items=1, longest_context=2000)
                attention.prefill(heads, kv, work, out, scoring)
    yield from zip(decode_names, decode.ptx, strict=True)
    for name, recorder in {"cut": cut, "plain prefill": prefill, "join": join}.items():
        yield from ((name, ptx) for ptx in recorder.ptx)


def draft_calls() -> Iterator[tuple[str, str]]:
    """Both ends of a step that verifies drafts."""
    begin, accept = record(drafts, "_begin"), record(drafts, "_accept")
    rows, lines = (
        torch.zeros(20, dtype=torch.int32),
        drafts.Lines(
            torch.zeros(4, 17, dtype=torch.int64),
            torch.zeros(4, dtype=torch.int32),
            torch.zeros(4, 7, dtype=torch.int32),
        ),
    )
    drafts.begin_drafts(rows, rows.view(2, 10), lines, torch.zeros(20, 17, dtype=torch.int64), rows, width=5)
    for forced in (None, rows):
        drafts.accept_drafts(rows, rows, lines, rows, rows, rows, width=5, forced=forced)
    yield from (("drafts", ptx) for ptx in (*begin.ptx, *accept.ptx))


def head_calls() -> Iterator[tuple[str, str]]:
    """What an EAGLE-3 head reads and keeps."""
    names = ("_read_inputs", "_keep_states", "_begin_chain", "_go_on", "_name_drafts")
    recorders = {name: record(head_states, name) for name in names}
    hidden, ints = 4096, torch.zeros(4, dtype=torch.int32)
    x, weight, inputs = (torch.empty(size, dtype=torch.bfloat16) for size in ((4, hidden), (hidden,), (4, 2 * hidden)))
    inputs_norms = head_states.InputNorms(torch.empty(8, hidden, dtype=torch.bfloat16), weight, weight)
    kept = torch.empty(5, head_states.KEPT, hidden, dtype=torch.bfloat16)
    states = head_states.StateStore(kept, x, torch.zeros(5, 3, dtype=torch.int32))
    head_states.read_inputs(inputs_norms, states, ints, ints, ints, ints, x, inputs, page=64, eps=1e-5)
    head_states.keep_states(states, ints, ints, x, page=64)
    steps = torch.zeros(7, 4, dtype=torch.int32)
    words, rows, best = torch.zeros(5, 17, dtype=torch.int64), torch.zeros(20, dtype=torch.int32), torch.empty(4, 8)
    for is_normed in (False, True):
        flags: Any = {"normed_residual": is_normed, "eps": 1e-5}
        head_states.begin_chain(inputs_norms, states, words, ints, rows, steps, steps, inputs, x, steps=4, **flags)
        head_states.go_on(inputs_norms, steps, ints, x, inputs, x, step=2, **flags)
    head_states.name_drafts(Summaries(best, best.to(torch.int32), best), ints, ints, steps, step=1)
    for name, recorder in recorders.items():
        yield from (("drafts" if name == "_name_drafts" else "head", ptx) for ptx in recorder.ptx)


def packing_calls() -> Iterator[tuple[str, str]]:
    recorders = {"row factors": record(packing, "_row_factors"), "codes": record(packing, "_codes")}
    for is_gated in (False, True):
        weight = torch.empty(2, 80, 256, dtype=torch.bfloat16)
        packing.pack_by_kernel(weight, PackedMatrix.empty(tuple(weight.shape), "cpu", is_gated=is_gated))
    for name, recorder in recorders.items():
        yield from ((name, ptx) for ptx in recorder.ptx)


def low_bit_calls() -> Iterator[tuple[str, str]]:
    recorder = record(four_bits, "_dequantise")
    for code in FOUR_BITS:
        weight = four_bits.FourBitMatrix.empty((80, 256), code, "cpu", is_gated=code.has_offsets)
        four_bits.dequantise_into(weight, torch.empty(80, 256, dtype=torch.bfloat16))
    yield from (("dequantise", ptx) for ptx in recorder.ptx)
    recorder = record(grouped_numbers, "_dequantise_grouped")
    for grouped in (code for code in GROUPED_CODES if code.name in OF_EVERY_SORT):
        held = grouped_numbers.GroupedMatrix.empty((80, 256), grouped, "cpu")
        grouped_numbers.dequantise_grouped_into(held, torch.empty(80, 256, dtype=torch.bfloat16))
    yield from (("dequantise", ptx) for ptx in recorder.ptx)
    if architecture.arch < 89:
        return
    recorder = record(eight_bits, "_quantise_rows")
    x = torch.empty(4, 14336, dtype=torch.bfloat16)
    eight_bits.quantise_rows(x, torch.empty(4, 14336, dtype=torch.uint8), torch.empty(4))
    yield "quantise rows", recorder.ptx[0]


def gemv_calls() -> Iterator[tuple[str, str]]:
    half, hidden = torch.bfloat16, 2560
    weight, norm_weight = torch.empty(512, hidden, dtype=half), torch.empty(hidden, dtype=half)
    recorders = {"fma": record(gemv, "_fma_rows"), "dot": record(gemv, "_dot_rows")}
    fma = GemvConfig("fma", 4, 512, 4, prefetch_tiles=2, early_trigger=False)
    dot = GemvConfig("dot", 16, 64, 4)
    for rows, config in ((1, fma), (4, fma), (4, dot), (8, dot)):
        x, y = torch.empty(rows, hidden, dtype=half), torch.empty(rows, 512, dtype=half)
        gemv.linear_few(x, weight, y, residual=y, bias=norm_weight, config=config)
        gate = torch.empty(rows, 256, dtype=half)
        gemv.linear_few(x, weight, gate, norm_weight=norm_weight, gated="silu", config=config)
        logits = torch.empty(rows, 512)
        gemv.linear_few(x, weight, logits, norm_weight=norm_weight, config=config)
    half = torch.float16
    x, y = torch.empty(4, hidden, dtype=half), torch.empty(4, 512, dtype=half)
    gemv.linear_few(x, weight.to(half), y, norm_weight=norm_weight.to(half), config=dot)
    for name, recorder in recorders.items():
        yield from ((name, ptx) for ptx in recorder.ptx)


def main(capability: int) -> None:
    """As on a card of this compute capability, 80 or 90."""
    global architecture
    architecture = GPUTarget("cuda", capability, 32)
    card = target.Target(False, divmod(capability, 10), num_sms=132, shared_bytes=SHARED_KIB[capability] << 10)
    target._target = lambda device: card
    facts = [
        {
            "kernel": name,
            "waits": ptx.count("griddepcontrol.wait"),
            "triggers": ptx.count("griddepcontrol.launch_dependents"),
            "tensor_core_products": ptx.count("mma.sync"),
            "asynchronous_copies": ptx.count("cp.async.cg"),
            "wide_loads": ptx.count(".v4.b32"),
            "prefetches": ptx.count("prefetch.global.L2"),
        }
        for name, ptx in calls()
    ]
    print(json.dumps(facts))


if __name__ == "__main__":
    main(int(sys.argv[1]))
