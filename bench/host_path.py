"""Where a step's time goes outside its kernels: runs W1's prompt, W4's prefix hit and decodes through the engine, and
prints for each step the parts of its way, from the engine's call to the token, with the native code as one of them.

    python bench/host_path.py [MODEL] [--streams 16] [--runs 20] [--threads 2]

Timers are put around methods from outside, so a part's time has a microsecond or so of theirs in it. Steps are launched
one ahead: a decode's parts may be those of its neighbour, and one that waits for Python's lock looks long."""

from __future__ import annotations

import argparse
import random
import statistics
import time
from collections import defaultdict
from collections.abc import Callable
from typing import Any

import twostroke
from twostroke.backends.host.batch import Batch

PARTS = ("request", "add", "schedule", "rows", "batch", "slots", "embed", "record", "native", "sample", "apply")
"""In the order of a step's way; the first two belong to a request, not to a step."""
PREFIX_TOKENS = 1024


class Timers:
    """Seconds spent in each part since the last `take`."""

    def __init__(self) -> None:
        self._spent_s: dict[str, float] = defaultdict(float)

    def around(self, owner: Any, method: str, part: str) -> None:
        function = getattr(owner, method)
        object.__setattr__(owner, method, self.timed(function, part))

    def timed(self, function: Callable[..., Any], part: str) -> Callable[..., Any]:
        def measured(*arguments: Any, **options: Any) -> Any:
            started_s = time.perf_counter()
            try:
                return function(*arguments, **options)
            finally:
                self._spent_s[part] += time.perf_counter() - started_s

        return measured

    def take(self) -> dict[str, float]:
        spent, self._spent_s = dict(self._spent_s), defaultdict(float)
        return spent


class Probe:
    def __init__(self, model: str, threads: int) -> None:
        self.llm = twostroke.LLM(model, threads=threads, backend="cpu")
        self.timers = Timers()
        self._random = random.Random(0)
        engine, backend = self.llm.engine, self.llm.engine.backend
        for owner, method, part in (
            (self.llm, "request", "request"),
            (engine, "add", "add"),
            (engine.scheduler, "schedule", "schedule"),
            (engine.scheduler, "apply", "apply"),
            (backend.rows, "update", "rows"),  # type: ignore[attr-defined]
            (backend.model.kv, "slots", "slots"),  # type: ignore[attr-defined]
            (backend.model, "_embed", "embed"),
            (backend.model, "_step_record", "record"),
            (backend._pool, "_run_step", "native"),  # type: ignore[attr-defined]
            (backend, "_sample", "sample"),
        ):
            self.timers.around(owner, method, part)
        Batch.from_step = staticmethod(self.timers.timed(Batch.from_step, "batch"))  # type: ignore[method-assign]

    def tokens(self, count: int) -> list[int]:
        return [self._random.randrange(1000, 40000) for _ in range(count)]

    def first_token(self, prompt: list[int]) -> dict[str, float]:
        """The parts of a request from its tokens to the first of its answer."""
        self.timers.take()
        started_s = time.perf_counter()
        self._ask([prompt], 1)
        while not any(getattr(event, "token_ids", ()) for event in self.llm.engine.step()):
            pass
        found = self.timers.take() | {"whole": time.perf_counter() - started_s}
        self._finish()
        return found

    def decodes(self, streams: int, count: int) -> list[dict[str, float]]:
        """The parts of each of `count` steps."""
        self._ask([self.tokens(64) for _ in range(streams)], count + 8)
        for _ in range(4 + streams // 8):
            self.llm.engine.step()
        found = []
        for _ in range(count):
            self.timers.take()
            started_s = time.perf_counter()
            self.llm.engine.step()
            found.append(self.timers.take() | {"whole": time.perf_counter() - started_s})
        self._finish()
        return found

    def _ask(self, prompts: list[list[int]], max_tokens: int) -> None:
        sampling = twostroke.SamplingParams(max_tokens=max_tokens, temperature=0.0, ignore_eos=True)
        for prompt in prompts:
            self.llm.engine.add(self.llm.request(prompt, sampling))

    def _finish(self) -> None:
        while self.llm.engine.busy:
            self.llm.engine.step()


def report(title: str, steps: list[dict[str, float]]) -> None:
    """The medians; `other` is what no part has: waking threads, handing over, telling the caller."""
    others = [step["whole"] - sum(time_s for part, time_s in step.items() if part != "whole") for step in steps]
    outside = [step["whole"] - step.get("native", 0.0) for step in steps]
    print(f"{title}: {1e3 * statistics.median(step['whole'] for step in steps):.2f} ms,", end=" ")
    print(f"of it outside native code {1e6 * statistics.median(outside):.0f} us (least {1e6 * min(outside):.0f})")
    figures = {part: 1e6 * statistics.median(step.get(part, 0.0) for step in steps) for part in PARTS}
    figures["other"] = 1e6 * statistics.median(others)
    print("   " + "  ".join(f"{part} {figure:.0f}" for part, figure in figures.items() if figure >= 0.5))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", nargs="?", default="smollm2")
    parser.add_argument("--streams", type=int, default=16)
    parser.add_argument("--runs", type=int, default=20)
    parser.add_argument("--threads", type=int, default=2)
    options = parser.parse_args()
    probe = Probe(options.model, options.threads)
    try:
        prefix = probe.tokens(PREFIX_TOKENS)
        probe.first_token(prefix)
        probe.first_token(prefix + probe.tokens(32))
        report("W4, 32 tokens behind 1024", [probe.first_token(prefix + probe.tokens(32)) for _ in range(options.runs)])
        report("W1, 512 tokens", [probe.first_token(probe.tokens(512)) for _ in range(max(3, options.runs // 4))])
        for streams in (1, options.streams):
            report(f"a step of {streams} decodes", probe.decodes(streams, 5 * options.runs))
    finally:
        probe.llm.close()


if __name__ == "__main__":
    main()
