"""Compiles the kernels of latent attention for Hopper, and for chips with less shared memory, at the shapes of
published models, which needs no GPU, and prints a JSON object a line of what came out. A process of its own: where the
interpreter is on, nothing compiles."""

from __future__ import annotations

from typing import Any

import torch
from tests.backends.cuda.compile_moe import HOPPER, SHARED_BYTES, compile_kernel

from twostroke.backends.cuda.attention_table import settings_for
from twostroke.backends.cuda.kernels import head_products, latent_decode, latent_prefill, latent_store
from twostroke.backends.cuda.kernels.paged import WalkConfig
from twostroke.backends.cuda.kernels.whole_numbers import next_power_of_2

MODELS = {"DeepSeek-V2-Lite": (16, 512, 128, 64, 128), "DeepSeek-V3": (128, 512, 128, 64, 128)}
MODELS |= {"GLM-4.7-Flash": (20, 512, 192, 64, 256)}
"""Heads, rank, plain, rotated and value dimensions."""
TYPES = {
    **dict.fromkeys(("positions", "rows", "table", "items", "arrivals"), "*i32"),
    **dict.fromkeys(("partials", "log_sums", "cos_sin"), "*fp32"),
    **dict.fromkeys(("table_stride", "query_stride", "kept_stride", "expanded_stride"), "i32"),
    **dict.fromkeys(("num_tokens", "x_stride", "out_stride"), "i32"),
    **dict.fromkeys(("factor", "eps"), "fp32"),
}


def main() -> None:
    for model, sizes in MODELS.items():
        for capability in SHARED_BYTES:
            compile_attention(f"{model} sm_{capability}", *sizes, capability)
        compile_rest(model, *sizes)


def compiled(name: str, kernel: Any, warps: int, capability: int = HOPPER, stages: int = 3, **constants: Any) -> None:
    options = {"num_warps": warps, "num_stages": stages}
    compile_kernel(name, kernel, options, TYPES, capability, **constants, PDL=capability == HOPPER)


def compile_attention(name: str, heads: int, rank: int, plain: int, rotated: int, value: int, capability: int) -> None:
    room = SHARED_BYTES[capability]
    shape = latent_decode.latent_shape(heads, rank, 64, torch.bfloat16, room)
    config = WalkConfig(**settings_for("latent decode", rows=shape.walker_rows, tokens=64, shared_bytes=room))
    of_walk = {"SHAPE": shape, "ROTATED": rotated, "FIRST": 0}
    compiled(f"decode {name}", latent_decode._latent_decode_kernel, config.warps, capability, CONFIG=config, **of_walk)
    reading = latent_prefill.ContextConfig(**settings_for("latent context", shared_bytes=room))
    compiled(
        f"context {name}", latent_prefill._context_kernel, reading.warps, capability, CONFIG=reading,
        TOKENS=reading.tokens(shape), ROWS=reading.padded_rows(shape), BLOCKS=shape.kv_heads, **of_walk,
    )  # fmt: skip
    chunk = latent_prefill.ChunkShape(heads, plain, rotated, value, torch.bfloat16)
    widest = max(chunk.plain_width, chunk.value_width)
    if capability == HOPPER and widest > 128:
        return  # wider heads leave some of their sums in memory there, until somebody finds a better tile
    for tile_rows in (64, 128) if capability == HOPPER else (64,):
        config = WalkConfig(**settings_for("latent chunk", head_dim=widest, tile_rows=tile_rows, shared_bytes=room))
        compiled(
            f"chunk {tile_rows} {name}", latent_prefill._chunk_kernel, config.warps, capability, SHAPE=chunk,
            CONFIG=config, TILE=tile_rows,
        )  # fmt: skip


def compile_rest(name: str, heads: int, rank: int, plain: int, rotated: int, value: int) -> None:
    of_heads = {"x_head": plain + rotated, "weight_head": (plain + value) * rank, "PRECISION": "tf32"}
    for tokens in (1, 512):
        tile = head_products.head_tile(tokens)
        sizes = {"TOKENS": tile.tokens, "OUTPUTS": tile.outputs, "DEPTH": tile.depth, "ROW": rank}
        compiled(
            f"absorb {tokens} {name}", head_products._head_kernel, tile.warps, HOPPER, tile.stages, num_inputs=plain,
            num_outputs=rank, out_head=rank + rotated, INPUTS_LAST=False, **of_heads, **sizes,
        )  # fmt: skip
        compiled(
            f"values {tokens} {name}", head_products._head_kernel, tile.warps, HOPPER, tile.stages, num_inputs=rank,
            num_outputs=value, out_head=value, INPUTS_LAST=True, **of_heads | {"x_head": rank}, **sizes,
        )  # fmt: skip
    compiled(
        f"store {name}", latent_store._turn_and_keep, 4, HEADS=heads, PLAIN=plain, HALF=rotated // 2, RANK=rank,
        PAGE=64, NEIGHBOURS=True, PROGRAM_HEADS=8, GROUPS=3, HALF_BLOCK=rotated // 2, RANK_BLOCK=512, growth=None,
        PLAIN_BLOCK=next_power_of_2(plain),
    )  # fmt: skip


if __name__ == "__main__":
    main()
