"""Decode of one stream while other programs keep cores busy: median time per token beside 0, 1, 2, ... busy loops, for
each number of threads, all taking turns. Steal time, what a hypervisor took, stands beside each.

    python bench/beside_others.py [--threads auto,1,2] [--loops 0,1,2] [--rounds 3] [--tokens 100]
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

from twostroke import LLM, SamplingParams
from twostroke.core.events import TokenEvent

PROMPT = "Write a long story about a lighthouse keeper and the sea."


@contextlib.contextmanager
def busy_loops(count: int) -> Iterator[None]:
    """Programs that never yield."""
    loops = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(count)]
    time.sleep(1.0 if count else 0.0)
    try:
        yield
    finally:
        for loop in loops:
            loop.kill()
            loop.wait()


def steal_s() -> float:
    """Of all cores together, since the machine started; 0 where the system does not tell."""
    try:
        fields = Path("/proc/stat").read_text(encoding="ascii").splitlines()[0].split()
        return int(fields[8]) / os.sysconf("SC_CLK_TCK")
    except (OSError, IndexError, ValueError):
        return 0.0


def token_times_s(llm: LLM, tokens: int) -> list[float]:
    """Between one token and the next, of one answer."""
    params = SamplingParams(temperature=0.0, max_tokens=tokens, ignore_eos=True)
    times_s = [time.perf_counter() for event in llm.stream(PROMPT, params) if isinstance(event, TokenEvent)]
    return [later - earlier for earlier, later in itertools.pairwise(times_s)]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--threads", default="auto,1,2", help="numbers of threads, or auto")
    parser.add_argument("--loops", default="0,1,2", help="how many busy loops beside it")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--tokens", type=int, default=100)
    options = parser.parse_args()
    choices = options.threads.split(",")
    print("loops threads   p10 ms   median ms   p90 ms   tok/s   steal %")
    with contextlib.ExitStack() as stack:
        engines = {
            choice: stack.enter_context(
                LLM(options.model, max_context=2048, threads=None if choice == "auto" else int(choice))
            )
            for choice in choices
        }
        for llm in engines.values():
            token_times_s(llm, 16)
        for count in map(int, options.loops.split(",")):
            found: dict[str, list[float]] = {choice: [] for choice in choices}
            stolen: dict[str, float] = dict.fromkeys(choices, 0.0)
            with busy_loops(count):
                for _ in range(options.rounds):
                    for choice, llm in engines.items():
                        before_s = steal_s()
                        found[choice] += token_times_s(llm, options.tokens)
                        stolen[choice] += steal_s() - before_s
            for choice in choices:
                deciles = statistics.quantiles(found[choice], n=10)
                median_s, total_s = statistics.median(found[choice]), sum(found[choice])
                share = 100 * stolen[choice] / total_s / (os.cpu_count() or 1)
                print(
                    f"{count:5} {choice:>7} {deciles[0] * 1e3:8.2f} {median_s * 1e3:11.2f} {deciles[-1] * 1e3:8.2f}"
                    f" {len(found[choice]) / total_s:7.1f} {share:9.1f}",
                    flush=True,
                )


if __name__ == "__main__":
    main()
