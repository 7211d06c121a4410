"""Verdicts on drafts: a drafter that knows the answer, and is wrong as often as a test wants, in a real engine whose
clock is virtual. What was gained is what the same request takes longer without drafts."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

import pytest

from tests.explain.stage import Ask, Stage, prompt
from twostroke.core.events import TokenEvent
from twostroke.core.request import Request
from twostroke.core.sampling_params import SamplingParams
from twostroke.core.speculation import expected_tokens
from twostroke.core.timing import SequenceTiming
from twostroke.cost.floor import StepWork
from twostroke.explain.verdict import Cause
from twostroke.speculation import speculator, turn
from twostroke.speculation.drafter import Ask as DraftAsk
from twostroke.speculation.drafter import Proposal

PROMPT, WRITTEN = prompt(1, 40), 120


class Knowing:
    """Has the answer, and is right where it is told to be."""

    name = "knowing"

    def __init__(self, answer: Sequence[int], is_right: Callable[[int], bool], chance: float = 0.9) -> None:
        self._answer, self._is_right, self._chance = tuple(answer), is_right, chance
        self._known: dict[int, int] = {}

    def open(self, seq_id: int, request: Request, token_ids: Sequence[int]) -> None:
        self._known[seq_id] = len(token_ids) - len(request.prompt_token_ids)

    def extend(self, seq_id: int, token_ids: Sequence[int]) -> None:
        self._known[seq_id] += len(token_ids)

    def close(self, seq_id: int) -> None:
        del self._known[seq_id]

    def propose(self, asks: Sequence[DraftAsk]) -> list[Proposal]:
        return [self._proposal(self._known[seq_id], min(most, 4)) for seq_id, most in asks]

    def _proposal(self, first: int, most: int) -> Proposal:
        places = range(first, min(first + most, len(self._answer)))
        tokens = [self._answer[place] ^ (not self._is_right(place)) for place in places]
        return Proposal(tuple(tokens), (self._chance,) * len(tokens))


@pytest.fixture(autouse=True)
def no_drafter_is_slow(monkeypatch: pytest.MonkeyPatch) -> None:
    """The clock is virtual, and a busy machine must not take a drafter's turn."""
    monkeypatch.setattr(speculator, "SLOW_SHARE", 1e9)
    monkeypatch.setattr(turn, "CHEAP_SHARE", 1e9)


def tokens_of(stage: Stage, sampling: SamplingParams | None = None) -> tuple[list[int], SequenceTiming]:
    greedy = SamplingParams(temperature=0.0, max_tokens=WRITTEN, ignore_eos=True)
    stage.engine.add(Request("a", PROMPT, sampling or greedy))
    tokens: list[int] = []
    timing = None
    while stage.engine.busy:
        for event in stage.engine.step():
            if isinstance(event, TokenEvent):
                tokens += event.token_ids
                timing = event.timing or timing
    assert timing is not None
    return tokens, timing


@pytest.fixture(scope="module")
def plain(folder: Path) -> tuple[list[int], SequenceTiming]:
    return tokens_of(Stage(folder))


@pytest.mark.parametrize("wrong_each", [1000, 5])
def test_what_was_gained_is_what_it_would_have_taken_more(
    folder: Path, plain: tuple[list[int], SequenceTiming], wrong_each: int
) -> None:
    stage = Stage(folder, drafter=Knowing(plain[0], lambda place: place % wrong_each > 0))
    tokens, timing = tokens_of(stage)
    assert tokens == plain[0]
    assert timing.decode_s is not None and plain[1].decode_s is not None
    assert timing.speculation_gain_s == pytest.approx(plain[1].decode_s - timing.decode_s, rel=0.05)
    assert timing.speculation_gain_s > 0.3 * plain[1].decode_s  # it was worth the test
    verdict = stage.explain(timing).verdict
    assert (verdict.cause, verdict.slow_to) == (Cause.DECODE_COMPUTE, None)
    assert verdict.stream is not None and verdict.stream.floor_s < timing.decode_s  # several tokens a step share it
    gained, a_step = verdict.sentence.partition("; speculation gained about ")[2].split(" (")
    assert gained.endswith("ms") and a_step == f"{timing.tokens_per_step:.1f} tokens a step)"
    assert "speculation gained about" in verdict.stream.sentence
    assert "each of which reads" not in verdict.stream.sentence  # several tokens read them together


def test_few_that_held_are_named_and_a_better_drafter_gains_what_is_said(
    folder: Path, plain: tuple[list[int], SequenceTiming], monkeypatch: pytest.MonkeyPatch
) -> None:
    """One draft in four is right, and all are computed, whether that pays or not."""
    monkeypatch.setattr(speculator, "drafts_that_pay", lambda survivals, *_: [len(chances) for chances in survivals])
    stage = Stage(folder, drafter=Knowing(plain[0], lambda place: place % 4 == 1))
    tokens, timing = tokens_of(stage)
    assert tokens == plain[0] and timing.drafts_held > 10 and timing.drafts_computed >= 16
    verdict = stage.explain(timing).verdict
    assert verdict.sentence.startswith(f"slow to stream: {timing.tokens_per_step:.1f} tokens a step were accepted (")
    assert f"({timing.drafts_held} of {timing.drafts_computed} drafts held)" in verdict.sentence
    assert verdict.change is not None and "a drafter trained on such text, if 70% of its drafts" in verdict.change.text
    # Four drafts a step, of which as many hold as the advice supposes: 2.77 tokens a step.
    cost, num_steps = stage.cost, (WRITTEN - 1) / expected_tokens(0.7, 4)
    context = len(PROMPT) + WRITTEN // 2
    better_s = num_steps * cost.seconds(StepWork(contexts=[context + 4], queries=[5]))
    assert timing.decode_s is not None
    assert verdict.change.gain_s == pytest.approx(timing.decode_s - better_s, rel=0.1)
    assert stage.explain(timing, fitted=False).verdict.change is None  # floors say that drafts are free


def test_drafts_that_cost_more_than_they_brought(folder: Path) -> None:
    stage = Stage(folder)
    timing = stage.play({"a": Ask(0.0, PROMPT, WRITTEN)})["a"]
    assert timing.decode_s is not None
    lost = replace(timing, speculation_gain_s=-0.2 * timing.decode_s)
    assert "; its neighbours' drafts cost it about " in stage.explain(lost).verdict.sentence
    assert "drafts" not in stage.explain(timing).verdict.sentence
    slight = replace(timing, speculation_gain_s=0.01 * timing.decode_s)
    assert "speculation" not in stage.explain(slight).verdict.sentence


def test_why_there_were_none(folder: Path, plain: tuple[list[int], SequenceTiming]) -> None:
    stage = Stage(folder, drafter=Knowing(plain[0], lambda place: True))
    off = SamplingParams(temperature=0.0, max_tokens=WRITTEN, ignore_eos=True, speculation="off")  # type: ignore[arg-type]
    tokens, timing = tokens_of(stage, off)
    assert tokens == plain[0] and not timing.draft_steps
    stream = stage.explain(timing).verdict.stream
    assert stream is not None and "; speculation was off, as the request asked" in stream.sentence
    stage.facts = replace(stage.facts, drafts_nothing="the engine was started with --speculate off")
    stream = stage.explain(plain[1]).verdict.stream
    assert stream is not None
    assert "; speculation was off: the engine was started with --speculate off" in stream.sentence
