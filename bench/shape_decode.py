"""Decode of a model's shape at batch 1, with random weights, as a share of the read bandwidth that this machine shows:
(weights + KV bytes of a token) / (time of a token) / bandwidth. Both are measured here and now, in turns.

    python bench/shape_decode.py bench/shapes/llama-3.2-1b [--quantise q4_1] [--context 512] [--tokens 64]"""

from __future__ import annotations

import argparse
import os
import statistics
import time

from twostroke import LLM, EngineConfig, KVConfig, SamplingParams
from twostroke.backends.cpu import isa
from twostroke.backends.cpu.ceilings import measure
from twostroke.core.events import TokenEvent


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folder")
    parser.add_argument("--quantise", default="q4_1")
    parser.add_argument("--context", type=int, default=512)
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--threads", type=int)
    options = parser.parse_args()
    started_s = time.perf_counter()
    config = EngineConfig(
        load="random",
        quantise=options.quantise,
        threads=options.threads,
        backend="cpu",
        max_context=options.context + options.tokens + 16,
        max_running=1,
        kv=KVConfig(memory_bytes=1 << 30, prefix_caching=False),
    )
    with LLM(options.folder, config) as llm:
        spec, threads, shape = llm.assembly.checkpoint.spec, llm.assembly.resolved.threads, llm.assembly.shape
        load = " ".join(f"{value:.1f}" for value in os.getloadavg())
        print(f"{options.folder}: {llm.assembly.checkpoint.num_parameters / 1e9:.2f}B parameters, random "
              f"{options.quantise}, {shape.weight_bytes_read(1) / 1e6:.0f} MB of weights, {threads} threads, "
              f"built in {time.perf_counter() - started_s:.1f} s; load average {load}")  # fmt: skip
        prompt = [index * 7919 % spec.vocab_size for index in range(options.context)]
        token_bytes = shape.weight_bytes_read(1) + shape.kv_bytes_read(options.context + options.tokens // 2)
        gaps_s: list[float] = []
        bandwidths = [measure(isa.choose(), threads).read_bytes_per_s]
        for _ in range(options.rounds):
            now_s = _token_gaps_s(llm, prompt, options.tokens)
            bandwidths.append(measure(isa.choose(), threads).read_bytes_per_s)
            gaps_s += now_s
            token_s = statistics.median(now_s)
            print(
                f"  {1 / token_s:6.1f} tok/s (best {1 / min(now_s):.1f}), {token_bytes / token_s / 1e9:5.1f} GB/s; "
                f"bandwidth before and after {bandwidths[-2] / 1e9:.1f} and {bandwidths[-1] / 1e9:.1f} GB/s"
            )
        # A bandwidth measured in a busy moment would flatter: the share is of the best of all of them.
        rate, best = token_bytes / statistics.median(gaps_s), token_bytes / min(gaps_s)
        most = max(bandwidths)
        print(f"  {rate / most:.0%} of the bandwidth, {best / most:.0%} in the best eight tokens")


def _token_gaps_s(llm: LLM, prompt: list[int], tokens: int) -> list[float]:
    """Means over runs of eight tokens: a single delivery may be early or late."""
    events = llm.stream(prompt, SamplingParams(max_tokens=tokens, temperature=0.0, ignore_eos=True))
    times_s = [time.perf_counter() for event in events if isinstance(event, TokenEvent) and event.token_ids]
    return [(late_s - early_s) / 8 for early_s, late_s in zip(times_s[::8], times_s[8::8], strict=False)]


if __name__ == "__main__":
    main()
