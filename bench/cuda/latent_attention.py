"""Latent attention on the card, kernel by kernel: each is checked against float32 on random inputs, then timed by graph
replay over latents that no cache holds. A table tells what the default choice gives and what would have been best.

    PYTHONPATH=src python -m bench.cuda.latent_attention [--model DeepSeek-V2-Lite] [--only decode,prefill] [--quick]"""

from __future__ import annotations

import argparse
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import torch

from bench.cuda.attention_cases import Result, say, try_each
from twostroke.backends.cuda.attention import INTERPRETED_SMS
from twostroke.backends.cuda.attention_cases import COLD_BYTES, graph_seconds, relative_error
from twostroke.backends.cuda.kernels.decode_attention import DecodeScratch
from twostroke.backends.cuda.kernels.decode_cuts import cut_contexts, split_plan
from twostroke.backends.cuda.kernels.latent_decode import attend_latent_decode, latent_config, latent_shape
from twostroke.backends.cuda.kernels.latent_prefill import (
    ChunkShape,
    ContextConfig,
    attend_chunks,
    attend_context,
    chunk_tiling,
    context_config,
)
from twostroke.backends.cuda.kernels.latent_store import LatentKV
from twostroke.backends.cuda.kernels.paged import AttentionShape, WalkConfig
from twostroke.backends.cuda.kernels.prefill_tiles import PrefillTiles, PrefillWork
from twostroke.backends.cuda.kernels.target import target_of

DECODE_CONFIGS = [
    WalkConfig(*each) for each in ((32, 4, 5), (32, 8, 5), (32, 4, 7), (64, 4, 3), (64, 8, 5), (16, 4, 5))
]
HEADS_A_PROGRAM = (16, 32, 64)
CONTEXT_CONFIGS = [ContextConfig(*each) for each in ((64, 32, 8, 2), (64, 64, 8, 2), (128, 32, 8, 2), (32, 32, 4, 2))]
CHUNK_CONFIGS = [WalkConfig(*each) for each in ((64, 8, 2), (64, 4, 2), (32, 4, 3), (128, 8, 2), (32, 8, 2))]


@dataclass(frozen=True)
class Sizes:
    heads: int
    rank: int
    plain: int
    rotated: int
    value: int
    page: int = 64
    dtype: torch.dtype = torch.bfloat16
    device: str = "cuda"

    @property
    def width(self) -> int:
        return self.rank + self.rotated

    @property
    def num_sms(self) -> int:
        return target_of(self.device).num_sms if self.device == "cuda" else INTERPRETED_SMS


MODELS = {
    "DeepSeek-V2-Lite": Sizes(16, 512, 128, 64, 128),
    "DeepSeek-V3": Sizes(128, 512, 128, 64, 128),
    "GLM-4.7-Flash": Sizes(20, 512, 192, 64, 256),
}


class Case:
    """Sequences of some lengths, over as many pools of latents as no cache holds."""

    def __init__(self, sizes: Sizes, contexts: Sequence[int]) -> None:
        self.sizes, self.contexts = sizes, list(contexts)
        pages = [-(-context // sizes.page) for context in contexts]
        shape = (sum(pages) + 1, sizes.page, sizes.width)
        copies = (
            max(1, min(32, COLD_BYTES // (shape[0] * sizes.page * sizes.width * 2))) if sizes.device == "cuda" else 1
        )
        table, given = torch.full((len(pages) + 1, max(pages)), sum(pages), dtype=torch.int32), 0
        for row, count in enumerate(pages):
            table[row, :count] = torch.arange(given, given + count, dtype=torch.int32)
            given += count
        self.kv = [
            LatentKV(torch.randn(shape, dtype=sizes.dtype, device=sizes.device), table.to(sizes.device))
            for _ in range(copies)
        ]

    def latents(self, row: int) -> torch.Tensor:
        """Of the first pool, float32 [context, rank + rotated]"""
        pages = self.kv[0].table[row, : -(-self.contexts[row] // self.sizes.page)].long()
        return self.kv[0].cache[pages].flatten(0, 1)[: self.contexts[row]].float()

    def drawn(self, *shape: int) -> torch.Tensor:
        return torch.randn(shape, dtype=self.sizes.dtype, device=self.sizes.device)

    def decode(self, shape: AttentionShape, config: WalkConfig) -> tuple[float, list[Callable[[], None]]]:
        """The error, and what is timed."""
        sizes, tokens = self.sizes, len(self.contexts)
        queries, out = self.drawn(tokens, sizes.heads, sizes.width), self.drawn(tokens, sizes.heads, sizes.rank)
        rows = torch.arange(tokens, dtype=torch.int32, device=sizes.device)
        positions = torch.tensor(self.contexts, dtype=torch.int32, device=sizes.device) - 1
        scratch, plan = DecodeScratch(tokens, shape, sizes.device, sizes.num_sms), None
        items = None
        if tokens > 1:
            items, plan = scratch.new_items(), split_plan(tokens, shape.kv_heads, sizes.num_sms, window=None)
            cut_contexts(positions, items, plan, config)
        scale = (sizes.plain + sizes.rotated) ** -0.5

        def launch(kv: LatentKV) -> None:
            attend_latent_decode(
                queries, kv, rows, positions, out, scale, scratch, items, shape=shape, config=config, plan=plan
            )

        launch(self.kv[0])
        errors = []
        for token in random.sample(range(tokens), min(3, tokens)):
            kept = self.latents(token)
            shares = (queries[token].float() @ kept.T * scale).softmax(-1)
            errors.append(relative_error(out[token], shares @ kept[:, : sizes.rank]))
        return max(errors), [lambda kv=kv: launch(kv) for kv in self.kv]

    def prefill(
        self, count: int, reading: ContextConfig | None, config: WalkConfig | None
    ) -> tuple[float, list[Callable[[], None]]]:
        """The last `count` tokens of each sequence are a chunk: against what lies before them, or, without `reading`,
        among themselves."""
        sizes, number = self.sizes, len(self.contexts)
        starts = [context - count for context in self.contexts]
        first_tokens = [count * row for row in range(number)]
        tiling = chunk_tiling(sizes.heads, count * number, target_of(sizes.device), sizes.num_sms)
        tiles = PrefillTiles.build(first_tokens, [count] * number, starts, range(number), tiling)
        work, tokens = PrefillWork.of(tiles, sizes.device), count * number
        scale, row = (sizes.plain + sizes.rotated) ** -0.5, random.randrange(number)
        token = first_tokens[row] + random.randrange(count)
        if reading is not None:
            queries, out = self.drawn(tokens, sizes.heads, sizes.width), self.drawn(tokens, sizes.heads, sizes.rank)
            log_sums = torch.zeros(tokens, sizes.heads, device=sizes.device)
            shape = shape_of(sizes)

            def read(kv: LatentKV) -> None:
                attend_context(queries, kv, work, out, log_sums, scale, shape=shape, config=reading)

            read(self.kv[0])
            kept = self.latents(row)[: starts[row]]
            shares = (queries[token].float() @ kept.T * scale).softmax(-1)
            return relative_error(out[token], shares @ kept[:, : sizes.rank]), [
                lambda kv=kv: read(kv) for kv in self.kv
            ]
        chunk = ChunkShape(sizes.heads, sizes.plain, sizes.rotated, sizes.value, sizes.dtype)
        queries, rotated = self.drawn(tokens, sizes.heads, chunk.key), self.drawn(tokens, sizes.rotated)
        expanded, out = self.drawn(tokens, sizes.heads * chunk.expanded), self.drawn(tokens, sizes.heads * sizes.value)

        def attend() -> None:
            attend_chunks(queries, expanded, rotated, work, out, None, scale, shape=chunk, config=config)

        attend()
        seen = slice(first_tokens[row], token + 1)
        keys, values = expanded[seen].float().view(-1, sizes.heads, chunk.expanded).split([sizes.plain, sizes.value], 2)
        query = queries[token].float()
        scores = (
            torch.einsum("hd,nhd->hn", query[:, : sizes.plain], keys)
            + query[:, sizes.plain :] @ rotated[seen].float().T
        )
        expected = torch.einsum("hn,nhd->hd", (scores * scale).softmax(-1), values)
        return relative_error(out[token], expected), [attend]


def shape_of(sizes: Sizes) -> AttentionShape:
    return latent_shape(sizes.heads, sizes.rank, sizes.page, sizes.dtype, target_of(sizes.device).shared_bytes)


def timed(case: Callable[[], tuple[float, list[Callable[[], None]]]]) -> Callable[[], tuple[float, float]]:
    def measure() -> tuple[float, float]:
        error, launches = case()
        return error, graph_seconds([launches[i % len(launches)] for i in range(max(16, len(launches)))])

    return measure


def decode_results(name: str, sizes: Sizes, contexts: list[int], quick: bool) -> list[Result]:
    case, own = Case(sizes, contexts), shape_of(sizes)
    default = latent_config(own, len(contexts), torch.device(sizes.device))
    choices = {"default": timed(lambda: case.decode(own, default))}
    for most in HEADS_A_PROGRAM:
        blocks = next(n for n in range(1, sizes.heads + 1) if sizes.heads % n == 0 and sizes.heads // n <= most)
        for config in DECODE_CONFIGS[: 2 if quick else None]:
            label = f"{sizes.heads // blocks} heads {config.block}/{config.warps}w/{config.stages}s"
            shape = replace(own, kv_heads=blocks)
            choices[label] = timed(lambda shape=shape, config=config: case.decode(shape, config))
    read = sum(contexts) * sizes.width * 2 / 1e12
    multiplied = 2 * sum(contexts) * sizes.heads * (sizes.width + sizes.rank) / 1e12
    found = try_each(name, choices, read, "TB/s")
    rate = multiplied / read
    arithmetic = replace(found, default=found.default * rate, best=found.best * rate, unit="TFLOP/s")
    return [found, arithmetic]


def prefill_result(name: str, sizes: Sizes, count: int, start: int, quick: bool) -> Result:
    case = Case(sizes, [start + count])
    limit = 2 if quick else None
    if start:
        configs = {"default": context_config(torch.device(sizes.device))}
        configs |= {f"{each}": each for each in CONTEXT_CONFIGS[:limit]}
        readings = {name: timed(lambda each=each: case.prefill(count, each, None)) for name, each in configs.items()}
        amount = 2 * count * start * sizes.heads * (sizes.width + sizes.rank) / 1e12
        return try_each(name, readings, amount, "TFLOP/s")
    choices = {"default": timed(lambda: case.prefill(count, None, None))}
    for config in CHUNK_CONFIGS[:limit]:
        choices[f"{config}"] = timed(lambda config=config: case.prefill(count, None, config))
    amount = count * count * sizes.heads * (sizes.plain + sizes.rotated + sizes.value) / 1e12
    return try_each(name, choices, amount, "TFLOP/s")


def options_of(arguments: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--model", choices=MODELS, default="DeepSeek-V2-Lite")
    parser.add_argument("--only", default="decode,prefill")
    parser.add_argument("--quick", action="store_true", help="fewer choices")
    return parser.parse_args(arguments)


def main() -> None:
    options = options_of()
    sizes, results = MODELS[options.model], []
    random.seed(1)
    say(f"{torch.cuda.get_device_name()}, torch {torch.__version__}, {options.model} {sizes}")
    if "decode" in options.only:
        for number, context in ((1, 512), (1, 32768), (8, 8192), (64, 4096), (256, 900)):
            results += decode_results(f"decode {number} x {context}", sizes, [context] * number, options.quick)
    if "prefill" in options.only:
        for count, start in ((512, 0), (6144, 0), (8192, 0), (512, 8192), (2048, 8192)):
            what = "context" if start else "chunk"
            results.append(prefill_result(f"{what} {start} + {count}", sizes, count, start, options.quick))
    print(f"\n{'shape':<22} {'default':>9} {'us':>9} {'best':>9} {'us':>9}  unit     error   best by")
    for r in results:
        print(
            f"{r.name:<22} {r.default:9.2f} {r.default_us:9.1f} {r.best:9.2f} {r.best_us:9.1f}  {r.unit:<7}"
            f"  {r.error:.1e} {r.best_choice}"
        )


if __name__ == "__main__":
    main()
