"""Workloads that any engine can be driven through, so that two engines get the same work. An engine has four methods
(`DrivenEngine`); output lengths are exact, at temperature 0.6, and end tokens count for nothing."""

from __future__ import annotations

import itertools
import random
import statistics
import time
from collections.abc import Callable, Iterable, Sequence
from typing import Protocol

TEMPERATURE = 0.6
SPECIAL_IDS = 1000
"""A vocabulary's last ids are left alone: special tokens lie there."""

Result = dict[str, float]
Arrivals = dict[str, list[float]]
"""When each request's tokens came, in seconds."""


class DrivenEngine(Protocol):
    def add(self, token_ids: Sequence[int], out_len: int) -> str:
        """Queue a request. Returns its name."""

    def step(self) -> list[tuple[str, int, bool]]:
        """Each request that got tokens, how many they were, and whether it has ended."""

    def busy(self) -> bool: ...

    def clear_prefix(self) -> None:
        """Forget every cached prefix."""


def random_ids(count: int, vocab_size: int, draw: random.Random) -> list[int]:
    bound = vocab_size - SPECIAL_IDS if vocab_size > 2 * SPECIAL_IDS else vocab_size
    return [draw.randrange(0, bound) for _ in range(count)]


def percentile(values: Iterable[float], fraction: float) -> float:
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(fraction * len(ordered)))]


def milliseconds(seconds: float) -> float:
    return round(1e3 * seconds, 3)


def step_once(engine: DrivenEngine, arrivals: Arrivals) -> None:
    outputs = engine.step()
    now_s = time.perf_counter()
    for request, count, _ in outputs:
        if count:
            arrivals.setdefault(request, []).extend([now_s] * count)


def drain(engine: DrivenEngine) -> Arrivals:
    arrivals: Arrivals = {}
    while engine.busy():
        step_once(engine, arrivals)
    return arrivals


def gaps(arrivals: Arrivals) -> list[float]:
    return [after - before for times in arrivals.values() for before, after in itertools.pairwise(times)]


def latencies(ttft_s: Sequence[float], gap_s: Sequence[float]) -> Result:
    return {
        "ttft_p50_ms": milliseconds(percentile(ttft_s, 0.5)),
        "ttft_p99_ms": milliseconds(percentile(ttft_s, 0.99)),
        "itl_p50_ms": milliseconds(percentile(gap_s, 0.5)),
        "itl_p99_ms": milliseconds(percentile(gap_s, 0.99)),
    }


def send_at_once(engine: DrivenEngine, work: Sequence[tuple[list[int], int]]) -> Result:
    start_s = time.perf_counter()
    for prompt, out_len in work:
        engine.add(prompt, out_len)
    arrivals = drain(engine)
    duration_s = time.perf_counter() - start_s
    written = sum(map(len, arrivals.values()))
    ttft_s = [times[0] - start_s for times in arrivals.values()]
    return {"out_tok_s": round(written / duration_s, 1), **latencies(ttft_s, gaps(arrivals))}


def nano(engine: DrivenEngine, vocab_size: int, n: int = 256) -> Result:
    """nano-vLLM's benchmark: 256 requests, prompts and answers of 100 to 1,024 tokens; 133,966 tokens are written."""
    draw = random.Random(0)
    prompts = [[draw.randint(0, 10000) for _ in range(draw.randint(100, 1024))] for _ in range(n)]
    return send_at_once(engine, [(prompt, draw.randint(100, 1024)) for prompt in prompts])


def single(engine: DrivenEngine, vocab_size: int, prompt_len: int = 512, out_len: int = 256, reps: int = 3) -> Result:
    """One stream alone."""
    draw = random.Random(1)
    ttft_s, tpot_s = [], []
    for _ in range(reps):
        prompt = random_ids(prompt_len, vocab_size, draw)
        start_s = time.perf_counter()
        engine.add(prompt, out_len)
        (times,) = drain(engine).values()
        ttft_s.append(times[0] - start_s)
        tpot_s.append((times[-1] - times[0]) / (len(times) - 1))
    return {"ttft_ms": milliseconds(statistics.median(ttft_s)), "tpot_ms": milliseconds(statistics.median(tpot_s))}


def prefill(engine: DrivenEngine, vocab_size: int, prompt_len: int = 16384) -> Result:
    """One long prompt."""
    return single(engine, vocab_size, prompt_len=prompt_len, out_len=8)


def batch(engine: DrivenEngine, vocab_size: int, n: int = 128, prompt_len: int = 1024, out_len: int = 256) -> Result:
    """Requests of one length, all at once."""
    draw = random.Random(2)
    return send_at_once(engine, [(random_ids(prompt_len, vocab_size, draw), out_len) for _ in range(n)])


def prefix(engine: DrivenEngine, vocab_size: int, n: int = 32, shared: int = 8192, unique: int = 64) -> Result:
    """One after another behind the same long prefix: TTFT of the first, and the median of the others."""
    draw = random.Random(3)
    head = random_ids(shared, vocab_size, draw)
    ttft_s = []
    for _ in range(n):
        prompt = head + random_ids(unique, vocab_size, draw)
        start_s = time.perf_counter()
        engine.add(prompt, 16)
        (times,) = drain(engine).values()
        ttft_s.append(times[0] - start_s)
    return {"ttft_cold_ms": milliseconds(ttft_s[0]), "ttft_hit_ms": milliseconds(statistics.median(ttft_s[1:]))}


def noisy(
    engine: DrivenEngine, vocab_size: int, streams: int = 32, long_prompt: int = 32768, warm_steps: int = 150
) -> Result:
    """Streams decode, and a long prompt comes: their ITL before it and while it is read."""
    draw = random.Random(4)
    for _ in range(streams):
        engine.add(random_ids(256, vocab_size, draw), 600)
    prompt = random_ids(long_prompt, vocab_size, draw)
    arrivals: Arrivals = {}
    for _ in range(warm_steps):
        step_once(engine, arrivals)
    start_s = time.perf_counter()
    long_one = engine.add(prompt, 4)
    while engine.busy():
        step_once(engine, arrivals)
    first_s = arrivals.pop(long_one)[0]
    pairs = [pair for times in arrivals.values() for pair in itertools.pairwise(times)]
    before = [after - last for last, after in pairs if after <= start_s]
    during = [after - last for last, after in pairs if start_s < after <= first_s]
    return {
        "itl_p50_before_ms": milliseconds(percentile(before, 0.5)),
        "itl_p99_during_ms": milliseconds(percentile(during, 0.99)),
        "long_ttft_ms": milliseconds(first_s - start_s),
    }


def play_arrivals(engine: DrivenEngine, due: list[tuple[float, list[int], int]]) -> Result:
    """Requests that come at times of their own, in seconds from the start."""
    waiting = sorted(due, key=lambda request: request[0], reverse=True)
    start_s = time.perf_counter()
    born: dict[str, float] = {}
    arrivals: Arrivals = {}
    while waiting or engine.busy():
        now_s = time.perf_counter() - start_s
        while waiting and waiting[-1][0] <= now_s:
            due_s, prompt, out_len = waiting.pop()
            born[engine.add(prompt, out_len)] = start_s + due_s
        if engine.busy():
            step_once(engine, arrivals)
        else:
            time.sleep(max(0.0, waiting[-1][0] - now_s))
    ttft_s = [times[0] - born[request] for request, times in arrivals.items()]
    return latencies(ttft_s, gaps(arrivals))


def online(engine: DrivenEngine, vocab_size: int, n: int = 300, rate: float = 20.0) -> Result:
    """Requests that come at random (Poisson)."""
    draw = random.Random(5)
    due, clock_s = [], 0.0
    for _ in range(n):
        clock_s += draw.expovariate(rate)
        due.append((clock_s, random_ids(draw.randint(200, 2000), vocab_size, draw), draw.randint(50, 300)))
    return play_arrivals(engine, due)


def bursts(engine: DrivenEngine, vocab_size: int, n: int = 6, size: int = 24, pause_s: float = 2.0) -> Result:
    """Bursts of requests, each while the last burst's answers are still being written."""
    draw = random.Random(9)
    due = [
        (pause_s * burst, random_ids(draw.randint(200, 1500), vocab_size, draw), draw.randint(150, 400))
        for burst in range(n)
        for _ in range(size)
    ]
    return play_arrivals(engine, due)


def conversations(engine: DrivenEngine, vocab_size: int, n: int = 24, turns: int = 5) -> Result:
    """Chats side by side: each turn's prompt is all that was said before, and a question."""
    draw = random.Random(10)
    said = {index: random_ids(draw.randint(200, 600), vocab_size, draw) for index in range(n)}
    ttft_s: list[float] = []
    gap_s: list[float] = []
    for _ in range(turns):
        requests, born = {}, {}
        for index, words in said.items():
            words += random_ids(draw.randint(50, 300), vocab_size, draw)
            request = engine.add(words, out_len := draw.randint(60, 200))
            born[request] = time.perf_counter()
            requests[request] = (index, out_len)
        arrivals = drain(engine)
        ttft_s += [times[0] - born[request] for request, times in arrivals.items()]
        gap_s += gaps(arrivals)
        # The engines' own answers differ; each goes on behind an answer of the same length and the same ids.
        for index, out_len in requests.values():
            said[index] += random_ids(out_len, vocab_size, draw)
    return latencies(ttft_s, gap_s)


def mixed_lengths(
    vocab_size: int, seed: int, n: int, prompt_len: tuple[int, int], out_len: tuple[int, int]
) -> list[tuple[list[int], int]]:
    draw = random.Random(seed)
    return [(random_ids(draw.randint(*prompt_len), vocab_size, draw), draw.randint(*out_len)) for _ in range(n)]


def documents(engine: DrivenEngine, vocab_size: int, n: int = 48) -> Result:
    """Long prompts and short answers, all at once."""
    return send_at_once(engine, mixed_lengths(vocab_size, 6, n, (5000, 7000), (100, 200)))


def answers(engine: DrivenEngine, vocab_size: int, n: int = 48) -> Result:
    """Short prompts and long answers, all at once."""
    return send_at_once(engine, mixed_lengths(vocab_size, 7, n, (150, 700), (900, 1600)))


def few(engine: DrivenEngine, vocab_size: int, n: int = 7) -> Result:
    """A handful of prompts at once: the median first token matters more than the last."""
    return send_at_once(engine, mixed_lengths(vocab_size, 8, n, (1500, 3000), (200, 300)))


Workload = Callable[..., Result]
WORKLOADS: dict[str, Workload] = {
    workload.__name__: workload
    for workload in (
        single,
        prefill,
        batch,
        prefix,
        noisy,
        online,
        nano,
        documents,
        answers,
        few,
        bursts,
        conversations,
    )
}
SMALLER: dict[str, dict[str, int]] = {
    "nano": {"n": 16},
    "batch": {"n": 16},
    "single": {"reps": 1},
    "documents": {"n": 4},
    "answers": {"n": 4},
    "few": {"n": 2},
    "bursts": {"n": 1},
    "conversations": {"n": 4, "turns": 1},
}
"""What is played before the workload is timed, so that nobody's first step is measured."""


def run(name: str, engine: DrivenEngine, vocab_size: int) -> Result:
    workload = WORKLOADS[name]
    engine.clear_prefix()
    if name in SMALLER:
        workload(engine, vocab_size, **SMALLER[name])
    engine.clear_prefix()
    return workload(engine, vocab_size)
