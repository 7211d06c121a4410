"""Decode of one stream while other programs keep cores busy: median time per token beside 0, 1, 2, ... busy loops, for
each number of threads, all taking turns. Steal time, what a hypervisor took, stands beside each.

    python bench/beside_others.py [--threads auto,1,2] [--loops 0,1,2] [--rounds 3] [--tokens 100]

With `--llama PYTHON`, an interpreter that has llama_cpp, llama.cpp takes its turns too, on the same file and all cores.
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

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


TokenTimes = Callable[[int], list[float]]
"""So many tokens of one answer: the seconds between one token and the next."""


@contextlib.contextmanager
def twostroke_engine(model: str, threads: int | None) -> Iterator[TokenTimes]:
    from twostroke import LLM, SamplingParams
    from twostroke.core.events import TokenEvent

    with LLM(model, max_context=2048, threads=threads) as llm:

        def run(tokens: int) -> list[float]:
            params = SamplingParams(temperature=0.0, max_tokens=tokens, ignore_eos=True)
            events = (event for event in llm.stream(PROMPT, params) if isinstance(event, TokenEvent))
            times_s = [time.perf_counter() for _ in events]
            return [later - earlier for earlier, later in itertools.pairwise(times_s)]

        yield run


LLAMA = """
import json, sys, time
from llama_cpp import Llama
llm = Llama(sys.argv[1], n_ctx=2048, n_threads=int(sys.argv[2]), verbose=False)
for line in sys.stdin:
    times, tokens = [], llm.tokenize(sys.argv[3].encode())
    for token in llm.generate(tokens, temp=0.0, reset=True):
        times.append(time.perf_counter())
        if len(times) > int(line):
            break
    print(json.dumps([b - a for a, b in zip(times, times[1:])]), flush=True)
"""


@contextlib.contextmanager
def llama_engine(python: str, model: str) -> Iterator[TokenTimes]:
    from twostroke.models.resolve import resolve

    command = [python, "-c", LLAMA, str(resolve(model)), str(os.cpu_count()), PROMPT]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdin is not None and process.stdout is not None

        def run(tokens: int) -> list[float]:
            print(tokens, file=process.stdin, flush=True)
            return list(json.loads(process.stdout.readline()))

        yield run
        process.stdin.close()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--threads", default="auto,1,2", help="numbers of threads, or auto")
    parser.add_argument("--loops", default="0,1,2", help="how many busy loops beside it")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--tokens", type=int, default=100)
    parser.add_argument("--llama", metavar="PYTHON", help="an interpreter that has llama_cpp")
    options = parser.parse_args()
    print("loops    engine   p10 ms   median ms   p90 ms   tok/s   steal %")
    with contextlib.ExitStack() as stack:
        engines: dict[str, TokenTimes] = {}
        for choice in options.threads.split(","):
            threads = None if choice == "auto" else int(choice)
            engines[choice] = stack.enter_context(twostroke_engine(options.model, threads))
        if options.llama:
            engines["llama.cpp"] = stack.enter_context(llama_engine(options.llama, options.model))
        for run in engines.values():
            run(16)
        for count in map(int, options.loops.split(",")):
            measure(engines, count, options.rounds, options.tokens)


def measure(engines: dict[str, TokenTimes], loops: int, rounds: int, tokens: int) -> None:
    found: dict[str, list[float]] = {name: [] for name in engines}
    stolen_s: dict[str, float] = dict.fromkeys(engines, 0.0)
    with busy_loops(loops):
        for _ in range(rounds):
            for name, run in engines.items():
                before_s = steal_s()
                found[name] += run(tokens)
                stolen_s[name] += steal_s() - before_s
    for name, times_s in found.items():
        deciles, total_s = statistics.quantiles(times_s, n=10), sum(times_s)
        share = 100 * stolen_s[name] / total_s / (os.cpu_count() or 1)
        print(
            f"{loops:5} {name:>9} {deciles[0] * 1e3:8.2f} {statistics.median(times_s) * 1e3:11.2f}"
            f" {deciles[-1] * 1e3:8.2f} {len(times_s) / total_s:7.1f} {share:9.1f}",
            flush=True,
        )


if __name__ == "__main__":
    main()
