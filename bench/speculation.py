"""What drafts bring on the CPU: the same greedy requests with and without, in turns, on one engine.

    python -m bench.speculation [--model smollm2] [--turns 5] [--workloads edit,again,summary,chat,random,noise,streams]
        [--speculate auto] [--method NAME] [--threads 2] [--cpu-time]

A turn runs every request of a workload plain and with drafts, one right after the other, the order changing from turn
to turn, and gives the ratio of their seconds a token; the figure is the median of the ratios. No request can learn from
another: each has a salt of its own. `edit` asks for a file with a change, and what holds is up to the model; `again` is
the same with the salt of the turn before. The texts are `bench/speculation_texts`: files and pages of this repository
as they were once, so that a later run has the same work. `random` goes on behind random tokens, `noise` draws
at a high temperature. `streams` is 16 requests at once.

On a busy machine, `--threads 1 --cpu-time` counts what this process computed, not how long it waited for a core."""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from random import Random

from twostroke import LLM, SamplingParams
from twostroke.core.events import TokenEvent
from twostroke.core.speculation import NO_DRAFTS, SpeculationParams
from twostroke.core.timing import SequenceTiming

TEXTS = Path(__file__).resolve().parent / "speculation_texts"
EDITED = ("edit-attention_table.txt", "edit-compiled_kernels.txt", "edit-pulse.txt")
SUMMARISED = ("summary-speculation.txt", "summary-two-phases.txt", "summary-architecture.txt")
QUESTIONS = (
    "Explain in a few sentences why the sky is blue.",
    "Write a short story about a dog that learns to swim.",
    "List five things to pack for a week in the mountains, and say why.",
)
NOISE_TEMPERATURE = 1.5
SUMMARY_TOKENS, CHAT_TOKENS, RANDOM_PROMPT, RANDOM_TOKENS, STREAM_TOKENS, NUM_STREAMS = 160, 160, 300, 128, 64, 16


@dataclass(frozen=True, slots=True)
class Asked:
    prompt: list[int]
    max_tokens: int
    temperature: float = 0.0


@dataclass(slots=True)
class Played:
    token_s: float
    """Seconds for each token behind the first of each request."""
    tokens: list[list[int]]
    draft_steps: int = 0
    drafts: int = 0
    held: int = 0
    num_tokens: int = 0


class Bench:
    def __init__(self, llm: LLM, method: str | None, clock: Callable[[], float], max_drafts: int | None = None) -> None:
        self._llm, self._clock = llm, clock
        self._drafted = SpeculationParams(method, max_drafts)
        self._num_requests = 0

    def chat(self, text: str, answer: str = "") -> list[int]:
        begun = self._llm.tokenizer.encode(answer) if answer else []
        return [*self._llm.chat_token_ids([{"role": "user", "content": text}]), *begun]

    def edits(self) -> list[Asked]:
        """The answer is begun: a model this small otherwise writes about the file."""
        found = []
        for name in EDITED:
            text = (TEXTS / name).read_text()
            begun = "# Edited.\n" + "\n".join(text.split("\n")[:2]) + "\n"
            prompt = self.chat(f"{text}\n\nWrite the file above again with a new first line.", begun)
            found.append(Asked(prompt, len(self._llm.tokenizer.encode(text))))
        return found

    def summaries(self) -> list[Asked]:
        prompts = [self.chat(f"{(TEXTS / name).read_text()}\n\nSummarise the text above.") for name in SUMMARISED]
        return [Asked(prompt, SUMMARY_TOKENS) for prompt in prompts]

    def chats(self) -> list[Asked]:
        return [Asked(self.chat(question), CHAT_TOKENS) for question in QUESTIONS]

    def random(self, temperature: float = 0.0) -> list[Asked]:
        draw, most = Random(0), self._llm.tokenizer.vocab_size - 1
        prompts = [[draw.randint(100, most) for _ in range(RANDOM_PROMPT)] for _ in range(3)]
        return [Asked(prompt, RANDOM_TOKENS, temperature) for prompt in prompts]

    def streams(self) -> list[Asked]:
        asked = [*self.chats(), *self.summaries()]
        return [replace(asked[number % len(asked)], max_tokens=STREAM_TOKENS) for number in range(NUM_STREAMS)]

    def play(self, asked: list[Asked], *, drafts: bool, salt: str) -> Played:
        """At once. The time is that of decode: from the step in which the last prompt was read to the end."""
        engine = self._llm.engine
        engine.clear_prefixes()
        for number, one in enumerate(asked):
            sampling = SamplingParams(
                temperature=one.temperature,
                seed=number,
                max_tokens=one.max_tokens,
                ignore_eos=True,
                speculation=self._drafted if drafts else NO_DRAFTS,
            )
            self._num_requests += 1
            request = replace(self._llm.request(one.prompt, sampling), request_id=f"bench-{self._num_requests}")
            engine.add(replace(request, cache_salt=f"{salt}-{number}"))
        first = self._num_requests - len(asked) + 1
        tokens: list[list[int]] = [[] for _ in asked]
        timings: list[SequenceTiming] = []
        began_s, num_before = 0.0, 0
        while engine.busy:
            for event in engine.step():
                if isinstance(event, TokenEvent):
                    tokens[int(event.request_id.removeprefix("bench-")) - first] += event.token_ids
                    if event.timing is not None:
                        timings.append(event.timing)
            if not began_s and all(tokens):
                began_s, num_before = self._clock(), sum(map(len, tokens))
        count = sum(map(len, tokens)) - num_before
        played = Played((self._clock() - began_s) / max(1, count), tokens, num_tokens=count)
        for timing in timings:
            played.draft_steps += timing.draft_steps
            played.drafts += timing.drafts_computed
            played.held += timing.drafts_held
        return played


def compare(bench: Bench, name: str, asked: list[Asked], turns: int, *, at_once: bool, again: bool) -> str:
    groups = [asked] if at_once else [[one] for one in asked]
    plain_s: list[float] = []
    ratios: list[float] = []
    drafts = held = steps = num_tokens = 0
    for turn in range(turns):
        spent = {False: 0.0, True: 0.0}
        for number, group in enumerate(groups):
            salt = f"{name}-{number}" if again else f"{name}-{turn}-{number}"
            played = {
                with_drafts: bench.play(group, drafts=with_drafts, salt=salt)
                for with_drafts in ((False, True) if turn % 2 else (True, False))
            }
            if played[False].tokens != played[True].tokens:
                raise SystemExit(f"{name}: the answers differ with drafts")
            for with_drafts, one in played.items():
                spent[with_drafts] += one.token_s * one.num_tokens
            seen = played[True]
            drafts, held = drafts + seen.drafts, held + seen.held
            steps, num_tokens = steps + seen.num_tokens - seen.held, num_tokens + seen.num_tokens
            plain_s.append(played[False].token_s)
        if turn or not again:
            ratios.append(spent[False] / spent[True])
    low, high = min(ratios), max(ratios)
    share = held / drafts if drafts else 0.0
    return (
        f"{name:8} plain {1e3 * statistics.median(plain_s):6.2f} ms a token; with drafts "
        f"{statistics.median(ratios):5.2f} x as fast ({low:.2f} to {high:.2f}); "
        f"{num_tokens / max(1, steps):5.2f} tokens a step, {share:4.0%} of {drafts} drafts held"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--turns", type=int, default=5)
    parser.add_argument("--workloads", default="edit,again,summary,chat,random,noise,streams")
    parser.add_argument("--speculate", default="auto")
    parser.add_argument("--method", default=None, help="of those that the engine has, the one to measure")
    parser.add_argument("--threads", type=int, default=None)
    parser.add_argument("--cpu-time", action="store_true", help="of this process, in place of the clock")
    options = parser.parse_args()
    clock = time.process_time if options.cpu_time else time.perf_counter
    with LLM(options.model, max_context=2048, speculate=options.speculate, threads=options.threads) as llm:
        bench = Bench(llm, options.method, clock)
        makers: dict[str, Callable[[], list[Asked]]] = {
            "edit": bench.edits,
            "again": bench.edits,
            "summary": bench.summaries,
            "chat": bench.chats,
            "random": bench.random,
            "noise": partial(bench.random, NOISE_TEMPERATURE),
            "streams": bench.streams,
        }
        warm = bench.chats()[:1]
        for drafts in (False, True):
            bench.play(warm, drafts=drafts, salt="warm")
        for name in options.workloads.split(","):
            line = compare(bench, name, makers[name](), options.turns, at_once=name == "streams", again=name == "again")
            print(line, flush=True)


if __name__ == "__main__":
    main()
