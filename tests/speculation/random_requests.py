"""Requests with all features mixed at random, and how they are played: who arrives when, who is aborted."""

from __future__ import annotations

import json
import random
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from twostroke.core.events import TokenEvent
from twostroke.core.grammar import GrammarSpec
from twostroke.core.request import Request
from twostroke.core.sampling_params import SamplingParams
from twostroke.core.speculation import OFF, SpeculationParams
from twostroke.core.step import Drafted, Step, StepResult, TokenLogprobs
from twostroke.engine.engine import Engine
from twostroke.text import harmony
from twostroke.text.tokenizer import Tokenizer

SCHEMA = {
    "type": "object",
    "properties": {"name": {"enum": ["left", "right"]}, "is_true": {"type": "boolean"}},
    "required": ["name", "is_true"],
    "additionalProperties": False,
}
GRAMMARS = (
    GrammarSpec("json_schema", json.dumps(SCHEMA)),
    GrammarSpec("regex", r"id-[a-f]{2,6}-(true|false)"),
    GrammarSpec("choice", '["left turn", "left over", "right"]'),
    GrammarSpec("lark", 'start: "<" start ">" | /[0-9]+/'),
    GrammarSpec("regex", r"[a-c]+ is true", thought="open"),
    GrammarSpec("choice", '["right here", "left"]', thought="possible"),
    GrammarSpec("regex", r"left|right(, [a-f]{2})*", thought="harmony"),
)
CLOSING = "</think>"
HARMONY_TOKENS = 60
"""With fewer no thought comes to its end and leaves room for an answer."""
LONG = 40
"""Tokens of a long answer."""
SHORT = 20
"""Tokens of its prompt, at most."""


def random_requests(count: int, tokenizer: Tokenizer, seed: int = 1) -> list[Request]:
    rng = random.Random(seed)
    beginnings = [[rng.randrange(97, 123) for _ in range(40)] for _ in range(4)]
    requests: list[Request] = []
    for number in range(count):
        prompt = [rng.randrange(256) for _ in range(rng.randint(1, 12))]
        if rng.random() < 0.5:  # shared with others
            prompt = rng.choice(beginnings)[: rng.randint(1, 40)] + prompt
        if rng.random() < 0.4:
            prompt = prompt * rng.randint(2, 4)
        if requests and rng.random() < 0.2:  # one that was asked before
            prompt = list(rng.choice(requests).prompt_token_ids)
        sampling = _sampling(rng, tokenizer, number)
        assert sampling.max_tokens is not None
        is_long = sampling.max_tokens >= LONG  # in little KV, many such begin and some give way
        requests.append(
            Request(
                f"r{number}",
                tuple(prompt[: SHORT if is_long else 80]),
                sampling,
                priority=rng.choice((0, 0, 0, -1, 2)),
                eos_token_ids=tokenizer.eos_token_ids,
                cache_salt=rng.choice(("", "", "salt")),
            )
        )
    return requests


def _sampling(rng: random.Random, tokenizer: Tokenizer, number: int) -> SamplingParams:
    most = rng.randint(1, 24) if rng.random() < 0.5 else rng.randint(LONG, 60)
    asked: dict[str, Any] = {"seed": number, "max_tokens": most, "temperature": rng.choice((0.0, 0.0, 0.3, 0.8, 1.5))}
    some = rng.random

    def maybe(name: str, chance: float, value: Any) -> None:
        if some() < chance:
            asked[name] = value

    maybe("top_k", 0.2, rng.randint(1, 20))
    maybe("top_p", 0.2, rng.uniform(0.3, 1.0))
    maybe("min_p", 0.1, rng.uniform(0.0, 0.3))
    maybe("repetition_penalty", 0.15, rng.uniform(0.8, 1.5))
    maybe("presence_penalty", 0.1, rng.uniform(-1.0, 2.0))
    maybe("frequency_penalty", 0.1, rng.uniform(-1.0, 2.0))
    maybe("logit_bias", 0.15, {rng.randrange(300): rng.uniform(-5.0, 5.0) for _ in range(8)})
    maybe("logprobs", 0.4, rng.choice((0, 3)))
    maybe("prompt_logprobs", 0.1, 2)
    maybe("n", 0.15, rng.randint(2, 3))
    maybe("min_tokens", 0.15, rng.randint(0, most))
    maybe("skip_special_tokens", 0.2, False)
    if some() < 0.25:
        asked["grammar"] = spec = rng.choice(GRAMMARS)
        asked["max_tokens"] = max(most, 24)
        if spec.thought == "harmony":
            likely = {**dict.fromkeys(tokenizer.encode(harmony.END), 4.0), ord("f"): rng.choice((2.0, 6.0, 12.0))}
            asked |= {"max_tokens": HARMONY_TOKENS, "logit_bias": likely}  # a thought ends, and the last message comes
        elif spec.thought != "none":  # make it likely that a thought ends
            asked["logit_bias"] = dict.fromkeys(tokenizer.encode(CLOSING), 3.5)
    elif some() < (0.8 if most >= LONG else 0.3):
        asked["ignore_eos"] = True
    else:
        asked.setdefault("logit_bias", {next(iter(tokenizer.eos_token_ids)): 2.0})
    return SamplingParams(**asked)


def with_stops(requests: Sequence[Request], told: Told, seed: int = 2) -> list[Request]:
    """Some of them end at a text or a token of their own answer, so that the end lies anywhere in it."""
    rng, found = random.Random(seed), []
    for request in requests:
        answer = told.samples[request.request_id, 0]
        if rng.random() < 0.4 and request.sampling.grammar is None and len(answer.token_ids) > 2:
            start = rng.randrange(1, max(2, len(answer.text)))
            text = answer.text[start : start + rng.randint(1, 4)].replace("\ufffd", "")
            change: dict[str, Any] = {"stop": (text,), "include_stop_string": rng.random() < 0.5}
            if not text or rng.random() < 0.2:
                change = {"stop_token_ids": (rng.choice(answer.token_ids[1:]),)}
            request = replace(request, sampling=replace(request.sampling, **change))
        found.append(request)
    return found


def with_wishes(requests: Sequence[Request], methods: Iterable[str], seed: int = 5) -> list[Request]:
    """About half of them say something of drafts: none, a method by its name, how many at most, or both."""
    rng = random.Random(seed)
    names = [None, None, OFF, *methods]

    def wish() -> SpeculationParams | None:
        most = rng.choice((None, None, 0, 1, 3, 9))
        return SpeculationParams(rng.choice(names), most) if rng.random() < 0.5 else None

    return [replace(each, sampling=replace(each.sampling, speculation=wish())) for each in requests]


@dataclass
class Sample:
    token_ids: list[int] = field(default_factory=list)
    text: str = ""
    logprobs: list[TokenLogprobs] = field(default_factory=list)
    prompt_logprobs: list[TokenLogprobs] = field(default_factory=list)
    end: tuple[str, str | None, str | None] | None = None
    """Finish reason, error, stop string."""


@dataclass
class Told:
    samples: dict[tuple[str, int], Sample] = field(default_factory=dict)
    num_steps: int = 0
    num_preemptions: int = 0
    num_cached_tokens: int = 0
    held: dict[str, list[tuple[int, int]]] = field(default_factory=dict)
    """Of each drafter: how many drafts were computed for a slot, and how many of them held."""
    cached: dict[str, int] = field(default_factory=dict)
    """Of each request, tokens of its prompt that were found."""
    _requests: dict[int, Request] = field(default_factory=dict)
    """By the row."""

    def take(self, event: TokenEvent) -> None:
        sample = self.samples.setdefault((event.request_id, event.sample_index), Sample())
        assert sample.end is None, "an event behind the last"
        sample.token_ids += event.token_ids
        sample.text += event.text
        sample.logprobs += event.logprobs
        sample.prompt_logprobs += event.prompt_logprobs
        if event.finish_reason is not None:
            assert event.timing is not None
            sample.end = (event.finish_reason.value, event.error, event.stop_string)
            self.num_preemptions += event.timing.preemptions
            self.num_cached_tokens += event.timing.cached_tokens
            self.cached[event.request_id] = self.cached.get(event.request_id, 0) + event.timing.cached_tokens

    def note(self, step: Step, result: StepResult) -> None:
        """What was drafted, which is what its request wishes."""
        self._requests |= {join.seq_id: join.request for join in step.joins}
        for seq_id, drafted in result.drafted.items():
            assert is_as_wished(self._requests[seq_id], drafted), (self._requests[seq_id].sampling.speculation, drafted)
            held = len(result.sampled.get(seq_id, ())) - 1
            self.held.setdefault(drafted.method, []).append((drafted.num_drafts, held))

    def num_drafts(self, method: str) -> int:
        return sum(count for count, _ in self.held.get(method, ()))

    def answers(self) -> dict[str, list[list[int]]]:
        found: dict[str, list[list[int]]] = {}
        for (request_id, _), sample in sorted(self.samples.items()):
            found.setdefault(request_id, []).append(sample.token_ids)
        return found


def is_as_wished(request: Request, drafted: Drafted) -> bool:
    """What a grammar forces is drafted whichever method is wished for."""
    wish, method = request.sampling.speculation, drafted.method
    if wish is None:
        return True
    most_is_kept = wish.max_drafts is None or drafted.num_drafts <= wish.max_drafts
    by_name = wish.method in (None, method) or (method == "grammar" and request.sampling.grammar is not None)
    return most_is_kept and by_name and wish.method != OFF


def play(engine: Engine, requests: Sequence[Request], aborts: Mapping[str, int] | None = None) -> Told:
    """A few are there from the start, the others join one a step. `aborts`: how many of a request's own steps it sees.
    The books are proven after every step, and nothing is left in the end. The engine is closed."""
    told, waiting, left = Told(), list(requests), dict(aborts or {})
    engine.on_step = told.note
    while waiting or engine.busy:
        for _ in range(min(len(waiting), 4 if told.num_steps == 0 else 1)):
            engine.add(waiting.pop(0))
        for event in engine.step():
            if isinstance(event, TokenEvent):
                told.take(event)
        live = {request.request_id for request in requests} - {request.request_id for request in waiting}
        for request_id in [name for name in left if name in live]:
            left[request_id] -= 1
            if left[request_id] <= 0:
                del left[request_id]
                engine.abort(request_id)
        engine.scheduler.check()
        told.num_steps += 1
        assert told.num_steps < 100 * len(requests) + 1000, "it goes round and round"
    counts = engine.scheduler.counts()
    assert all(group.used == 0 for group in counts.blocks)
    assert all(sample.end is not None for sample in told.samples.values())
    engine.close()
    return told
