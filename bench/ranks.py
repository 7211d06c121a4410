"""What several ranks for one copy of a model bring on this machine, and what meeting costs: a prompt read and tokens
written by one process and by several, in turns. On a machine with one socket, ranks cannot be faster than one process
with as many threads: the difference is the price of meeting.

    python bench/ranks.py [--model smollm2] [--ranks 1,2] [--prompt 512] [--tokens 64] [--turns 5] [--threads 2]
"""

from __future__ import annotations

import argparse
import random
import statistics
import time

from twostroke import LLM, SamplingParams


def timed(llm: LLM, prompt: list[int], tokens: int) -> tuple[float, float]:
    """Seconds to the first token, and of each further one."""
    sampling = SamplingParams(temperature=0.0, max_tokens=tokens, ignore_eos=True, speculation="off")
    started_s, arrivals_s = time.perf_counter(), list[float]()
    llm.engine.add(llm.request(prompt, sampling))
    while llm.engine.busy:
        events = llm.engine.step()
        arrivals_s += [time.perf_counter() for event in events if getattr(event, "token_ids", ())]
    return arrivals_s[0] - started_s, (arrivals_s[-1] - arrivals_s[0]) / (len(arrivals_s) - 1)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--ranks", default="1,2")
    parser.add_argument("--prompt", type=int, default=512)
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--turns", type=int, default=5)
    parser.add_argument("--threads", type=int, default=2)
    options = parser.parse_args()
    sizes = [int(size) for size in options.ranks.split(",")]
    engines = {
        size: LLM(options.model, backend="cpu", threads=options.threads, tensor_parallel=size, max_context=2048)
        for size in sizes
    }
    draw, times_s = random.Random(0), {size: list[tuple[float, float]]() for size in sizes}
    try:
        for turn in range(options.turns + 1):  # the first is a rehearsal
            prompt = [draw.randrange(1000, 20000) for _ in range(options.prompt)]
            for size, llm in engines.items():
                took = timed(llm, prompt, options.tokens)
                times_s[size] += [took] if turn else []
    finally:
        for llm in engines.values():
            llm.close()
    print(f"{options.model}, {options.threads} threads in all, medians of {options.turns} turns\n")
    print("ranks   TTFT of the prompt   TPOT")
    for size, found in times_s.items():
        ttft_s, tpot_s = (statistics.median(one) for one in zip(*found, strict=True))
        print(f"{size:5}   {1e3 * ttft_s:15.1f} ms   {1e3 * tpot_s:.2f} ms")


if __name__ == "__main__":
    main()
