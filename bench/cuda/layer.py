"""The layer's kernels beside attention, on the card: each against float32, then timed by CUDA graph replay. Few-row
products go over enough copies of their weights that L2 serves none, beside cuBLAS, in several configurations: the
default's choice and the best are printed side by side.

    PYTHONPATH=src python bench/cuda/layer.py [--models qwen3-0.6b,llama-3.1-8b] [--rows 1,2,4,8] [--only gemv,rest]
        [--threads 12] [--json FILE]"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from torch.nn import functional

from twostroke.backends.cuda.kernels.gemv import linear_few
from twostroke.backends.cuda.kernels.gemv_config import FMA_ROWS, GemvConfig, choose, fit, l2_width

if __package__:
    from bench.cuda.layer_rest import rest
else:
    from layer_rest import rest

EPS = 1e-6
POOL_BYTES = 3 * 2**30
PASS_BYTES = 400 * 2**20
"""Read between two uses of the same weights: several times what L2 holds."""
TOLERANCE = 1.5e-2
STARTED = time.monotonic()


@dataclass(frozen=True)
class Matrix:
    model: str
    name: str
    outputs: int
    width: int
    normed: bool = False
    gated: bool = False
    is_head: bool = False

    @property
    def num_weights(self) -> int:
        return self.outputs * self.width * (2 if self.gated else 1)


def matrices(model: str, hidden: int, heads: int, qkv: int, intermediate: int, vocabulary: int) -> list[Matrix]:
    return [
        Matrix(model, "qkv", qkv, hidden, normed=True),
        Matrix(model, "o", hidden, heads),
        Matrix(model, "gate_up", intermediate, hidden, normed=True, gated=True),
        Matrix(model, "down", hidden, intermediate),
        Matrix(model, "head", vocabulary, hidden, normed=True, is_head=True),
    ]


MODELS = {
    "qwen3-0.6b": matrices("qwen3-0.6b", 1024, 2048, 4096, 3072, 151936),
    "llama-3.1-8b": matrices("llama-3.1-8b", 4096, 4096, 6144, 14336, 128256),
}


def say(*words: object) -> None:
    print(f"[{time.monotonic() - STARTED:6.1f} s]", *words, flush=True)


def candidates(matrix: Matrix, rows: int) -> list[GemvConfig]:
    """Configurations worth a try; the default is among them."""
    cuts = {
        1: [(2, 1024, 4, 3), (4, 1024, 4, 3), (4, 2048, 8, 2), (2, 2048, 4, 2), (2, 1024, 2, 2), (8, 1024, 4, 1)],
        2: [(4, 1024, 4, 2), (8, 1024, 4, 1), (4, 2048, 8, 1)],
        4: [(4, 1024, 4, 1), (8, 1024, 4, 1)],
    }
    ahead = l2_width(matrix.outputs, matrix.width, matrix.gated)
    products = [GemvConfig("fma", n, k, warps, prefetch_tiles=tiles) for n, k, warps, tiles in cuts.get(rows, [])]
    if rows > 1:
        dots = [(16, 64, 4, 4), (16, 128, 4, 4), (32, 64, 4, 4), (16, 64, 8, 4), (32, 128, 4, 3)]
        products += [GemvConfig("dot", n, k, warps, stages, prefetch_width=ahead) for n, k, warps, stages in dots]
    default = choose(rows, matrix.outputs, matrix.width, matrix.gated)
    fitted = [fit(replace(config, early_trigger=default.early_trigger), matrix.width) for config in products]
    other_trigger = replace(default, early_trigger=not default.early_trigger)
    other_prefetch = replace(default, prefetch_width=0 if default.prefetch_width else ahead)
    usable = [default, other_trigger, other_prefetch, *fitted]
    return list(dict.fromkeys(config for config in usable if config.method == "dot" or rows <= FMA_ROWS))


@dataclass
class Case:
    """One matrix with a number of rows, its inputs, and as many copies of its weights as it takes to leave L2."""

    matrix: Matrix
    rows: int
    pool: torch.Tensor
    copies: list[torch.Tensor] = field(init=False)

    def __post_init__(self) -> None:
        matrix, device = self.matrix, self.pool.device
        wanted = max(8, -(-PASS_BYTES // (2 * matrix.num_weights)))
        count = min(wanted, self.pool.numel() // matrix.num_weights)
        parts = self.pool[: count * matrix.num_weights].view(count, -1, matrix.width)
        self.copies = list(parts.unbind(0))
        half = {"dtype": torch.bfloat16, "device": device}
        self.x = torch.randn(self.rows, matrix.width, **half)
        self.norm_weight = torch.rand(matrix.width, **half) + 0.5 if matrix.normed else None
        self.has_residual = matrix.name in ("o", "down")
        self.start = torch.randn(self.rows, matrix.outputs, **half)
        self.out = torch.empty_like(self.start, dtype=torch.float32 if matrix.is_head else torch.bfloat16)

    def call(self, weight: torch.Tensor, config: GemvConfig | None) -> None:
        linear_few(
            self.x,
            weight,
            self.out,
            norm_weight=self.norm_weight,
            eps=EPS,
            residual=self.out if self.has_residual else None,
            gated="silu" if self.matrix.gated else None,
            config=config,
        )

    def expected(self) -> torch.Tensor:
        x = self.x.float()
        if self.norm_weight is not None:
            x = functional.rms_norm(x, x.shape[1:], self.norm_weight.float(), EPS)
        y = functional.linear(x, self.copies[0].float())
        if self.matrix.gated:
            gate, up = y.chunk(2, dim=1)
            y = functional.silu(gate) * up
        return y + self.start.float() if self.has_residual else y

    def error(self, config: GemvConfig, expected: torch.Tensor) -> float:
        self.out.fill_(float("nan"))
        if self.has_residual:
            self.out.copy_(self.start)
        self.call(self.copies[0], config)
        return float((self.out.float() - expected).norm() / expected.norm())


def graph_seconds(run: Callable[[], Any], repeats: int = 8) -> float:
    """Seconds of one replay of a captured run, the median of several."""
    run()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        run()
    graph.replay()
    times = []
    for _ in range(repeats):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        graph.replay()
        end.record()
        torch.cuda.synchronize()
        times.append(begin.elapsed_time(end) / 1e3)
    return sorted(times)[repeats // 2]


def warm_up(cases: list[Case], threads: int) -> None:
    """Compile all variants in threads: the compiler leaves Python's lock for most of its work."""
    calls: dict[tuple[Matrix, GemvConfig, int], Case] = {}
    for case in cases:
        for config in candidates(case.matrix, case.rows):
            # A dot's code is the same for 1 to 8 rows.
            calls.setdefault((case.matrix, config, 8 if config.method == "dot" else case.rows), case)

    def compile_one(call: tuple[Matrix, GemvConfig, int]) -> None:
        torch.cuda.set_device(0)
        case, (_, config, _) = calls[call], call
        try:
            case.call(case.copies[0], config)
        except Exception as error:
            say("does not run:", case.matrix.model, case.matrix.name, case.rows, short(config), repr(error)[:160])

    with ThreadPoolExecutor(threads) as executor:
        list(executor.map(compile_one, calls))
    torch.cuda.synchronize()
    say(f"compiled {len(calls)} variants for {len(cases)} products")


def short(config: GemvConfig) -> str:
    stages = f" x{config.num_stages}" if config.method == "dot" else f" p{config.prefetch_tiles}"
    flags = (f" l2:{config.prefetch_width}" if config.prefetch_width else "") + (
        " early" if config.early_trigger else ""
    )
    return f"{config.method} {config.block_n}x{config.block_k} w{config.num_warps}{stages}{flags}"


def measure(case: Case) -> dict[str, Any]:
    """Microseconds a product: cuBLAS, the default and every candidate."""
    expected = case.expected()
    count = len(case.copies)

    def microseconds(config: GemvConfig) -> float:
        return graph_seconds(lambda: [case.call(weight, config) for weight in case.copies]) / count * 1e6

    times: dict[GemvConfig, float] = {}
    for config in candidates(case.matrix, case.rows):
        try:
            error = case.error(config, expected)
            if not error < TOLERANCE:
                say("WRONG:", case.matrix.model, case.matrix.name, case.rows, short(config), f"error {error:.1e}")
                continue
            times[config] = microseconds(config)
        except Exception as error:
            say("failed:", case.matrix.model, case.matrix.name, case.rows, short(config), repr(error)[:160])
    default = choose(case.rows, case.matrix.outputs, case.matrix.width, case.matrix.gated)
    best = min(times, key=lambda config: times[config])
    cublas = graph_seconds(lambda: [functional.linear(case.x, weight) for weight in case.copies]) / count * 1e6
    terabytes = case.matrix.num_weights * 2 / 1e6  # over microseconds
    return {
        "model": case.matrix.model, "matrix": case.matrix.name, "rows": case.rows,
        "cublas_us": cublas, "default_us": times.get(default),
        "best_us": times[best], "default": short(default), "best": short(best),
        "default_tb_s": terabytes / times[default] if default in times else None, "best_tb_s": terabytes / times[best],
        "all": {short(config): took for config, took in sorted(times.items(), key=lambda item: item[1])},
        "best_config": asdict(best),
    }  # fmt: skip


def gemv(models: list[str], rows: list[int], threads: int) -> Iterator[dict[str, Any]]:
    pool = torch.empty(POOL_BYTES // 2, dtype=torch.bfloat16, device="cuda").normal_(0, 0.02)
    cases = [Case(matrix, count, pool) for model in models for matrix in MODELS[model] for count in rows]
    warm_up(cases, threads)
    for case in cases:
        try:
            result = measure(case)
        except Exception as error:
            say("failed:", case.matrix.model, case.matrix.name, case.rows, repr(error)[:200])
            continue
        ranking = ", ".join(f"{name} {took:.2f}" for name, took in list(result["all"].items())[:6])
        say(f"{case.matrix.model} {case.matrix.name} rows {case.rows}: {ranking}")
        yield result


def print_gemv(results: list[dict[str, Any]]) -> None:
    print("\n| model, matrix | rows | cuBLAS us | default us | TB/s | configuration | best us | TB/s | best |")
    print("|---|---|---|---|---|---|---|---|---|")
    for r in results:
        default = "failed |" if r["default_us"] is None else f"{r['default_us']:.2f} | {r['default_tb_s']:.2f}"
        print(
            f"| {r['model']} {r['matrix']} | {r['rows']} | {r['cublas_us']:.2f}",
            f"| {default} | {r['default']} | {r['best_us']:.2f} | {r['best_tb_s']:.2f} | {r['best']} |",
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", default=",".join(MODELS))
    parser.add_argument("--rows", default="1,2,4,8")
    parser.add_argument("--only", default="gemv,rest")
    parser.add_argument("--threads", type=int, default=12)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    torch.manual_seed(0)
    parts = options.only.split(",")
    records: dict[str, Any] = {"device": torch.cuda.get_device_name()}
    say(records["device"])
    records["rest"] = list(rest(graph_seconds, say)) if "rest" in parts else []
    if "gemv" in parts:
        rows = [int(count) for count in options.rows.split(",")]
        records["gemv"] = list(gemv(options.models.split(","), rows, options.threads))
    print("\n| kernel | tokens | us | GB/s | error |\n|---|---|---|---|---|")
    for r in records["rest"]:
        print(f"| {r['name']} | {r['tokens']} | {r['us']:.2f} | {r['gb_s']:.0f} | {r['error']:.1e} |")
    print_gemv(records.get("gemv", []))
    if options.json is not None:
        options.json.write_text(json.dumps(records, indent=1))
    say("done")


if __name__ == "__main__":
    main()
