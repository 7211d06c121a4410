"""How much of the model each engine keeps: where its greedy tokens leave those of transformers in float32 over the same
weights, how near a tie that was, and its perplexity on a fixed text."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from bench.peers.crew import Crew
from bench.peers.engines import ENGINES, ORACLE, OURS, Engine
from bench.peers.worker import Worker, WorkerError

FIXED_TEXT = Path(__file__).resolve().parent / "fixed_text.txt"
NEAR_TIE_NATS = 0.25
"""A token that float32 finds this much less likely than its own choice, or less, is a tie broken by rounding."""


@dataclass(frozen=True, slots=True)
class Departure:
    """Where an engine's tokens first differ from the oracle's."""

    position: int | None
    """None: they never do."""
    gap_nats: float | None = None
    """How much less likely the oracle finds the engine's token than its own."""


@dataclass(frozen=True, slots=True)
class Quality:
    departures: list[Departure]
    perplexity: float | None
    perplexity_ratio: float | None
    """Over the oracle's."""

    @property
    def first_positions(self) -> str:
        return ", ".join("-" if at.position is None else str(at.position) for at in self.departures)

    @property
    def worst_gap_nats(self) -> float | None:
        gaps = [at.gap_nats for at in self.departures if at.gap_nats is not None]
        return max(gaps) if gaps else None

    def as_json(self) -> dict[str, Any]:
        return {**asdict(self), "worst_gap_nats": self.worst_gap_nats}


def first_difference(ours: Sequence[int], theirs: Sequence[int]) -> int | None:
    for position, (a, b) in enumerate(zip(ours, theirs, strict=True)):
        if a != b:
            return position
    return None


def perplexity(scores: Sequence[tuple[float, float]]) -> float:
    return math.exp(-sum(logprob for logprob, _ in scores) / len(scores))


def measure_quality(
    crew: Crew, engines: list[Engine], prompts: list[list[int]], max_tokens: int, text_ids: list[int]
) -> dict[str, Quality]:
    """By engine. Each runs in a process of its own, one after another: time does not matter here."""
    oracle = ENGINES[ORACLE]
    if not crew.prepare([oracle]):
        crew.say(f"quality: skipped, because the oracle is not there: {crew.absent[ORACLE]}")
        return {}
    found: dict[str, Quality] = {}
    try:
        with crew.start(oracle) as judge:
            crew.load(oracle, judge)
            expected = _answers(judge, prompts, max_tokens)
            oracle_perplexity = perplexity(judge.score(text_ids))
            found[ORACLE] = Quality([Departure(None) for _ in prompts], oracle_perplexity, 1.0)
            crew.say(f"quality {ORACLE:<20} perplexity {oracle_perplexity:.4f} over {len(text_ids)} tokens")
            for engine in crew.present(engines):
                with crew.failing_leaves(engine), crew.start(engine) as worker:
                    crew.load(engine, worker)
                    answers = _answers(worker, prompts, max_tokens)
                    departures = [_departure(judge, *case) for case in zip(prompts, expected, answers, strict=True)]
                    own = _perplexity(worker, text_ids)
                    ratio = None if own is None else own / oracle_perplexity
                    found[engine.name] = Quality(departures, own, ratio)
                    crew.say(_describe(engine.name, found[engine.name]))
    except WorkerError as error:
        crew.say(f"quality: the oracle failed: {error}")
    return found


def _answers(worker: Worker, prompts: list[list[int]], max_tokens: int) -> list[tuple[int, ...]]:
    return [worker.generate([prompt], max_tokens)[0].token_ids for prompt in prompts]


def _departure(judge: Worker, prompt: list[int], expected: Sequence[int], found: Sequence[int]) -> Departure:
    position = first_difference(expected, found)
    if position is None:
        return Departure(None)
    logprob, best = judge.score([*prompt, *found[: position + 1]])[-1]
    return Departure(position, best - logprob)


def _perplexity(worker: Worker, text_ids: list[int]) -> float | None:
    try:
        return perplexity(worker.score(text_ids))
    except WorkerError as error:
        if "NotImplementedError" in str(error) and worker.name != OURS:
            return None  # this peer's API gives no log-probabilities of a prompt
        raise


def _describe(name: str, quality: Quality) -> str:
    ratio = quality.perplexity_ratio
    against = "" if ratio is None else f", perplexity {quality.perplexity:.4f} ({ratio - 1.0:+.2%} against float32)"
    gap = quality.worst_gap_nats
    nearness = "" if gap is None else f" (at worst {gap:.2f} nats from float32's choice)"
    return f"quality {name:<20} first differences at {quality.first_positions}{nearness}{against}"
