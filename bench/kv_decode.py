"""Decode at one context with each kind of KV, in turns: one engine for each kind, the same prompt, a few tokens of each
in every round. Prints tokens a second (of the median and of the fastest run of eight tokens) beside the first kind's.

    PYTHONPATH=src python bench/kv_decode.py [--model smollm2] [--context 4000] [--kinds bf16,int8] [--rounds 8]"""

from __future__ import annotations

import argparse
import os
import time
from statistics import median

from twostroke import LLM, SamplingParams
from twostroke.config import EngineConfig, KVConfig
from twostroke.core.events import TokenEvent

RUN_TOKENS = 8
"""A single delivery may be early or late: gaps are means over this many."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--context", type=int, default=4000)
    parser.add_argument("--tokens", type=int, default=64, help="of each round")
    parser.add_argument("--kinds", default="bf16,int8", help="the first is what others are compared with")
    parser.add_argument("--rounds", type=int, default=8)
    parser.add_argument("--threads", type=int)
    options = parser.parse_args()
    engines = {kind: make(options, kind) for kind in options.kinds.split(",")}
    gaps_s: dict[str, list[float]] = {kind: [] for kind in engines}
    vocabulary = next(iter(engines.values())).assembly.checkpoint.spec.vocab_size
    prompt = [index * 7919 % vocabulary for index in range(options.context - options.tokens)]
    for llm in engines.values():
        decode_gaps_s(llm, prompt, RUN_TOKENS + 1)  # the prompt's KV is kept from here on
    print(f"load average {os.getloadavg()[0]:.1f}; context {options.context - options.tokens} to {options.context}")
    for _ in range(options.rounds):
        for kind, llm in engines.items():
            gaps_s[kind] += decode_gaps_s(llm, prompt, options.tokens)
    first = next(iter(gaps_s.values()))
    for kind, found in gaps_s.items():
        kv_bytes = engines[kind].assembly.shape.kv_bytes_read(options.context)
        ratio = median(first) / median(found)
        print(
            f"{kind:5} {1 / median(found):6.1f} tok/s (best {1 / min(found):.1f}), {ratio:.2f} x "
            f"{next(iter(gaps_s))}'s (best {min(first) / min(found):.2f} x), {kv_bytes / 1e6:.0f} MB of KV a token"
        )
    for llm in engines.values():
        llm.close()


def make(options: argparse.Namespace, kind: str) -> LLM:
    config = EngineConfig(
        backend="cpu",
        threads=options.threads,
        max_context=options.context + 16,
        max_running=1,
        speculate="off",
        kv=KVConfig(kind=kind, memory_bytes=1 << 28),
    )
    return LLM(options.model, config)


def decode_gaps_s(llm: LLM, prompt: list[int], tokens: int) -> list[float]:
    events = llm.stream(prompt, SamplingParams(max_tokens=tokens, temperature=0.0, ignore_eos=True))
    # With one thread the process's own CPU time is the time of a token, whatever else the machine does.
    clock = time.process_time if llm.assembly.resolved.threads == 1 else time.perf_counter
    times_s = [clock() for event in events if isinstance(event, TokenEvent) and event.token_ids]
    late = times_s[RUN_TOKENS::RUN_TOKENS]
    return [(after_s - before_s) / RUN_TOKENS for before_s, after_s in zip(times_s[::RUN_TOKENS], late, strict=False)]


if __name__ == "__main__":
    main()
