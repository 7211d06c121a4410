"""Attention on the card, kernel by kernel: each is checked against float32 on fresh random inputs, then timed by graph
replay over KV that no cache holds. A table tells what the default choice gives and what would have been best.

    PYTHONPATH=src python -m bench.cuda.attention [--only decode,prefill] [--heads 32] [--kv-heads 8] [--quick]"""

from __future__ import annotations

import argparse
import random

import torch

from bench.cuda.attention_cases import Result, say, try_each
from bench.cuda.prefill_attention import prefill_result
from twostroke.backends.cuda.attention_cases import Model, Pool, graph_seconds, relative_error
from twostroke.backends.cuda.kernels.decode_attention import DecodeScratch, attend_decode
from twostroke.backends.cuda.kernels.decode_cuts import SplitPlan, cut_contexts, decode_config, split_plan
from twostroke.backends.cuda.kernels.paged import AttentionShape, PagedKV, Scoring, WalkConfig

DECODE_CONFIGS = [
    WalkConfig(64, 2, 5),
    WalkConfig(32, 2, 5),
    WalkConfig(64, 4, 3),
    WalkConfig(64, 4, 5),
    WalkConfig(32, 2, 7),
]


def decode_result(name: str, contexts: list[int], model: Model, pool: Pool, quick: bool) -> Result:
    tokens = len(contexts)
    tables = pool.tables(contexts)
    queries = torch.randn(
        (tokens, model.shape.heads + 2 * model.shape.kv_heads, model.shape.head_dim),
        dtype=model.shape.dtype,
        device="cuda",
    )
    queries = queries[:, : model.shape.heads]
    out = torch.empty((tokens, model.shape.heads * model.shape.head_dim), dtype=model.shape.dtype, device="cuda")
    rows = torch.arange(tokens, dtype=torch.int32, device="cuda")
    positions = torch.tensor(contexts, dtype=torch.int32, device="cuda") - 1
    scratch = DecodeScratch(tokens, model.shape, "cuda", model.num_sms)

    def measure(config: WalkConfig, plan: SplitPlan) -> tuple[float, float]:
        items = None
        if tokens > 1:  # cut once, as a step does for all its layers
            items = scratch.new_items()
            cut_contexts(positions, items, plan, config, window=model.scoring.window)

        def launch(table: torch.Tensor) -> None:
            kv = PagedKV(pool.k, pool.v, table)
            attend_decode(queries, kv, rows, positions, out, model.scoring, scratch, items, config=config, plan=plan)

        out.fill_(float("nan"))
        launch(tables[0])
        chosen = random.sample(range(tokens), min(4, tokens))
        error = max(relative_error(out[t], pool.reference(tables[0], t, queries[t], contexts[t] - 1)) for t in chosen)
        cycle = [tables[i % len(tables)] for i in range(max(16, len(tables)))]
        return error, graph_seconds([lambda table=table: launch(table) for table in cycle])

    default_config = decode_config(model.shape.head_dim, tokens, positions.device, window=model.scoring.window)
    default_plan = split_plan(tokens, model.shape.kv_heads, model.num_sms, window=model.scoring.window)
    choices = {"default": lambda: measure(default_config, default_plan)}
    for config in DECODE_CONFIGS[: 2 if quick else None]:
        for per_sm in (1, 2) if quick else (1, 2, 4):
            for smallest in (32, 128) if max(contexts) * tokens <= 16384 else (128,):
                target = max(1, per_sm * model.num_sms // model.shape.kv_heads)
                plan = SplitPlan(target, smallest, tokens + target)
                label = f"{config.block}/{config.warps}w/{config.stages}s"
                choices[f"{label} {per_sm} an SM, from {smallest}"] = lambda c=config, p=plan: measure(c, p)
    return try_each(name, choices, sum(contexts) * model.token_bytes / 1e12, "TB/s")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--only", default="decode,prefill")
    parser.add_argument("--heads", type=int, default=32)
    parser.add_argument("--kv-heads", type=int, default=8)
    parser.add_argument("--head-dim", type=int, default=128)
    parser.add_argument("--page", type=int, default=64)
    parser.add_argument("--window", type=int, default=0, help="newest keys that a query reads; 0: all")
    parser.add_argument("--softcap", type=float, default=0.0, help="of scores; 0: none")
    parser.add_argument("--dtype", choices=["bfloat16", "float16"], default="bfloat16")
    parser.add_argument("--pool-tokens", type=int, default=1 << 20)
    parser.add_argument("--shapes", default="", help="only shapes whose name has one of these, by commas")
    parser.add_argument("--quick", action="store_true", help="fewer decode configurations")
    options = parser.parse_args()
    properties = torch.cuda.get_device_properties(0)
    model = Model(
        AttentionShape(options.heads, options.kv_heads, options.head_dim, options.page, getattr(torch, options.dtype)),
        Scoring(options.head_dim**-0.5, options.window or None, options.softcap or None),
        properties.multi_processor_count,
    )
    random.seed(1)
    say(f"{properties.name}, torch {torch.__version__}, {model}")
    pool = Pool(model, options.pool_tokens)
    mixed = [random.randint(100, 2000) for _ in range(256)]
    decodes = {
        "decode 1 x 32768": [32768], "decode 8 x 8192": [8192] * 8, "decode 64 x 4096": [4096] * 64,
        "decode 256 x 2048": [2048] * 256, "decode 256 mixed": mixed, "decode 1 x 512": [512],
        "decode 8 x 1024": [1024] * 8, "decode 256 x 900": [900] * 256, "decode 128 x 1150": [1150] * 128,
        "decode 64 x 800": [800] * 64,
    }  # fmt: skip
    prefills = {
        "prefill 8192": ([8192], 0), "prefill 32768": ([32768], 0), "prefill 8192 + 8192": ([8192], 8192),
        "prefill 16384": ([16384], 0), "prefill 8192 + 512": ([512], 8192), "prefill 8 x 1024": ([1024] * 8, 0),
        "prefill 8192 + 64": ([64], 8192),
    }  # fmt: skip
    if options.shapes:
        parts = options.shapes.split(",")
        decodes = {name: sizes for name, sizes in decodes.items() if any(part in name for part in parts)}
        prefills = {name: sizes for name, sizes in prefills.items() if any(part in name for part in parts)}
    results = []
    if "decode" in options.only:
        results += [decode_result(name, contexts, model, pool, options.quick) for name, contexts in decodes.items()]
    if "prefill" in options.only:
        results += [prefill_result(name, *sizes, model, pool) for name, sizes in prefills.items()]
    print(f"\n{'shape':<22} {'default':>9} {'us':>9} {'best':>9} {'us':>9}  unit     error   best by")
    for r in results:
        print(
            f"{r.name:<22} {r.default:9.2f} {r.default_us:9.1f} {r.best:9.2f} {r.best_us:9.1f}  {r.unit:<7}"
            f"  {r.error:.1e} {r.best_choice}"
        )


if __name__ == "__main__":
    main()
