"""The part of `layer.py` that is no matrix product: rope and KV write, norms, gate, embedding gather. Each is checked
against float32 and timed; bytes are what must be read and written at least."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch.nn import functional

from twostroke.backends.cuda.kernels.activation import gated
from twostroke.backends.cuda.kernels.embedding import FROM_ROW, gather
from twostroke.backends.cuda.kernels.norms import add_rms_norm, rms_norm
from twostroke.backends.cuda.kernels.paged import PagedKV
from twostroke.backends.cuda.kernels.rope import rope_and_store

EPS = 1e-6
TOLERANCE = 1e-2
LAUNCHES = 20
"""In a graph, so that a launch's own cost is seen as it is in a step."""


@dataclass
class Kernel:
    name: str
    tokens: int
    num_bytes: int
    run: Callable[[], None]
    error: Callable[[], float]
    """After one run on fresh inputs."""


def half(*shape: int) -> torch.Tensor:
    return torch.randn(shape, dtype=torch.bfloat16, device="cuda")


def ints(values: torch.Tensor) -> torch.Tensor:
    return values.to(torch.int32).cuda()


def relative(actual: torch.Tensor, expected: torch.Tensor) -> float:
    return float((actual.float() - expected).norm() / expected.norm())


def normed(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    return functional.rms_norm(x.float(), x.shape[-1:], weight.float(), EPS)


def rope_kernel(tokens: int, heads: int, kv_heads: int, with_norm: bool, heads_per_program: int | None) -> Kernel:
    """Sequences of at most 1024 tokens in blocks of 64; head_dim 128."""
    head_dim, block_size, length = 128, 64, min(tokens, 1024)
    num_rows = -(-tokens // length)
    blocks_each = -(-length // block_size)
    positions, rows = ints(torch.arange(tokens) % length), ints(torch.arange(tokens) // length)
    table = ints(torch.randperm(num_rows * blocks_each).view(num_rows, blocks_each))
    qkv = half(tokens, (heads + 2 * kv_heads) * head_dim)
    caches = [torch.zeros(num_rows * blocks_each + 1, kv_heads, block_size, head_dim).bfloat16().cuda() for _ in "kv"]
    turns = torch.arange(length)[:, None] * 10000.0 ** -(torch.arange(head_dim // 2) / (head_dim // 2))
    cos_sin = torch.cat([turns.cos(), turns.sin()], 1).cuda()
    norms = [half(head_dim) + 1 if with_norm else None for _ in "qk"]

    def run() -> None:
        rope_and_store(
            qkv, cos_sin, positions, rows, PagedKV(*caches, table), *norms, eps=EPS, heads_per_program=heads_per_program
        )

    def error() -> float:
        qkv.normal_()
        q, k, v = qkv.float().view(tokens, -1, head_dim).split([heads, kv_heads, kv_heads], 1)
        if with_norm:
            q, k = normed(q, norms[0]), normed(k, norms[1])
        cos, sin = cos_sin[positions.long()][:, None].chunk(2, dim=-1)
        first, second = torch.cat([q, k], 1).chunk(2, dim=-1)
        turned = torch.cat([first * cos - second * sin, second * cos + first * sin], -1)
        run()
        at = table[rows.long(), positions.long() // block_size].long(), positions.long() % block_size
        k_written, v_written = (cache[at[0], :, at[1]] for cache in caches)
        actual = torch.cat([qkv.view(tokens, -1, head_dim)[:, :heads], k_written, v_written], 1)
        return relative(actual, torch.cat([turned, v], 1))

    shape = f"rope {heads}+2x{kv_heads} heads{', normed' if with_norm else ''}"
    name = shape if heads_per_program is None else f"{shape}, {heads_per_program} a program"
    return Kernel(name, tokens, qkv.numel() * 4, run, error)


def norm_kernels(tokens: int, hidden: int) -> Iterator[Kernel]:
    x, residual, out, weight, post_weight = (
        half(tokens, hidden),
        half(tokens, hidden),
        half(tokens, hidden),
        *half(2, hidden),
    )
    row_bytes = x.numel() * 2

    def plain_error() -> float:
        rms_norm(x, weight, out, eps=EPS)
        return relative(out, normed(x, weight))

    def add_error() -> float:
        total = x.float() + residual.float()
        add_rms_norm(x, residual, weight, out, eps=EPS)
        return max(relative(residual, total), relative(out, normed(residual, weight)))

    def sandwich_error() -> float:
        total = residual.float() + normed(x, post_weight)
        add_rms_norm(x, residual, weight, out, eps=EPS, post_weight=post_weight)
        return max(relative(residual, total), relative(out, normed(residual, weight)))

    def plain() -> None:
        rms_norm(x, weight, out, eps=EPS)

    def add() -> None:
        add_rms_norm(x, residual, weight, out, eps=EPS)

    def both() -> None:
        add_rms_norm(x, residual, weight, out, eps=EPS, post_weight=post_weight)

    yield Kernel(f"rms_norm {hidden}", tokens, 2 * row_bytes, plain, plain_error)
    yield Kernel(f"add_rms_norm {hidden}", tokens, 4 * row_bytes, add, add_error)
    yield Kernel(f"sandwich {hidden}", tokens, 4 * row_bytes, both, sandwich_error)


def gated_kernel(tokens: int, intermediate: int) -> Kernel:
    gate_up, out = half(tokens, 2 * intermediate), half(tokens, intermediate)

    def error() -> float:
        gated(gate_up, out, kind="silu")
        gate, up = gate_up.float().chunk(2, dim=1)
        return relative(out, functional.silu(gate) * up)

    return Kernel(f"gated {intermediate}", tokens, out.numel() * 6, lambda: gated(gate_up, out, kind="silu"), error)


def gather_kernel(tokens: int, hidden: int) -> Kernel:
    embedding, out = half(32000, hidden), half(tokens, hidden)
    token_ids, rows = ints(torch.randint(0, 32000, (tokens,))), ints(torch.arange(tokens))
    last_tokens = ints(torch.randint(0, 32000, (tokens,)))
    token_ids[::2] = FROM_ROW

    def run() -> None:
        gather(embedding, token_ids, rows, last_tokens, out)

    def error() -> float:
        run()
        return relative(out, embedding[torch.where(token_ids < 0, last_tokens, token_ids).long()].float())

    return Kernel(f"gather {hidden}", tokens, out.numel() * 4, run, error)


def kernels() -> Iterator[Callable[[], Kernel]]:
    for tokens in (1, 256, 8192):
        for heads_per_program in (None, 4, 8, 16, 32):
            yield lambda t=tokens, h=heads_per_program: rope_kernel(t, 32, 8, False, h)
        yield lambda t=tokens: rope_kernel(t, 16, 8, True, None)
    for tokens in (1, 256, 8192):
        for hidden in (1024, 4096):
            for index in range(3):
                yield lambda t=tokens, h=hidden, i=index: list(norm_kernels(t, h))[i]
        yield lambda t=tokens: gated_kernel(t, 3072)
        yield lambda t=tokens: gated_kernel(t, 14336)
        yield lambda t=tokens: gather_kernel(t, 4096)


def rest(graph_seconds: Callable[[Callable[[], Any]], float], say: Callable[..., None]) -> Iterator[dict[str, Any]]:
    for make in kernels():
        try:
            kernel = make()
            error = kernel.error()
            if not error < TOLERANCE:
                say("WRONG:", kernel.name, kernel.tokens, f"error {error:.1e}")
            took_s = graph_seconds(lambda run=kernel.run: [run() for _ in range(LAUNCHES)]) / LAUNCHES
        except Exception as failure:
            say("failed:", repr(failure)[:200])
            continue
        yield {
            "name": kernel.name, "tokens": kernel.tokens, "us": took_s * 1e6,
            "gb_s": kernel.num_bytes / took_s / 1e9, "error": error,
        }  # fmt: skip
