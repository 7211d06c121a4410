"""However a stream of tokens is cut into advances, what the caller is told is what he is told of one token at a time:
text, stop strings and ids, limits, logprobs, errors, timing; and the same blocks become findable."""

from __future__ import annotations

from dataclasses import dataclass, field

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.properties import examples

from twostroke.backends.interface import refuse_drafts
from twostroke.core.events import Event, TokenEvent
from twostroke.core.kv_layout import KVGroup, KVLayout
from twostroke.core.request import Request
from twostroke.core.sampling_params import SamplingParams
from twostroke.core.sequence import FinishReason, Sequence
from twostroke.core.step import Drafts, SampledToken, Step, StepResult, TokenLogprobs
from twostroke.engine.engine import Engine
from twostroke.models.checkpoint import Checkpoint
from twostroke.scheduling.config import SchedulerConfig
from twostroke.scheduling.plan import Drafting
from twostroke.scheduling.scheduler import Scheduler
from twostroke.text.tokenizer import Tokenizer

PROMPT_TOKENS, MAX_TOKENS, BLOCK_SIZE = 5, 40, 4
TEXTS = ("the end of a line.\nAnother", " naïve café", "🙂👩‍🚀!", "aaaaab", "\n\n", " 42, 43, 44", "stop", "日本語")


@dataclass
class Script:
    """What a row samples, and where its logits break."""

    tokens: list[int]
    cuts: list[int]
    breaks_at: int | None = None
    num_given: int = 0

    def next(self, most: int) -> tuple[tuple[SampledToken, ...], bool]:
        """At most so many tokens, and whether the next one fails."""
        first = self.num_given
        cut = self.cuts[first % len(self.cuts)] if self.cuts else 1
        end = first + min(cut, most)
        if self.breaks_at is not None:
            end = min(end, self.breaks_at)
        self.num_given = end
        tokens = tuple(
            SampledToken(token, TokenLogprobs(token, -float(first + index)))
            for index, token in enumerate(self.tokens[first:end])
        )
        return tokens, end == self.breaks_at


@dataclass
class ScriptedBackend:
    """Says what the scripts of its requests say; each is a ticket of its own, done."""

    scripts: dict[str, Script]
    name: str = "scripted"
    max_drafts: int = 7
    names: dict[int, str] = field(default_factory=dict)

    def launch(self, step: Step) -> ReadyTicket:
        refuse_drafts(self, step)
        self.names |= {join.seq_id: join.request.request_id for join in step.joins}
        due = {slot.seq_id: slot.num_queries for slot in step.decodes}
        due |= {chunk.seq_id: 1 for chunk in step.prefills if chunk.samples}
        sampled, errors = {}, {}
        for seq_id, most in due.items():
            tokens, fails = self.scripts[self.names[seq_id]].next(most)
            if tokens:
                sampled[seq_id] = tokens
            if fails:
                errors[seq_id] = "not finite"
        return ReadyTicket(StepResult(step.step_id, sampled, errors=errors, compute_s=0.5))

    def close(self) -> None:
        pass


@dataclass
class ReadyTicket:
    outcome: StepResult
    ready: bool = True

    def result(self) -> StepResult:
        return self.outcome


class Always(Drafting):
    def drafts(self, sequence: Sequence, most: int) -> Drafts | None:
        return Drafts(min(7, most))


@dataclass
class Told:
    events: dict[str, list[TokenEvent]]
    token_times: dict[str, int]
    findable: set[tuple[int, ...]]


def play(
    tokenizer: Tokenizer, requests: list[Request], scripts: dict[str, Script], *, run_ahead: bool, drafts: bool
) -> Told:
    layout = KVLayout(BLOCK_SIZE, (KVGroup((0,), None, 64),))
    config = SchedulerConfig(max_context=120, max_tokens_per_step=64)
    scheduler = Scheduler(config, layout, drafting=Always() if drafts else None, policy="fifo")
    engine = Engine(scheduler, ScriptedBackend(scripts), tokenizer.vocab_size, tokenizer, run_ahead=run_ahead)
    for request in requests:
        engine.add(request)
    told = Told({}, {}, set())
    while engine.busy:
        events: list[Event] = engine.step()
        scheduler.check()
        for event in events:
            if isinstance(event, TokenEvent):
                if event.timing is not None:
                    told.token_times[event.request_id] = len(event.timing.token_times_s)
                told.events.setdefault(event.request_id, []).append(event._replace(timing=None))
    told.findable = {entry.node.tokens for entry in scheduler.ledger.index.entries()}
    return told


@pytest.fixture(scope="module")
def tokenizer(smollm2: tuple[Checkpoint, Tokenizer]) -> Tokenizer:
    return smollm2[1]


@st.composite
def cases(draw: st.DrawFn) -> tuple[dict[str, object], list[str], list[int], int | None]:
    """Sampling parameters, pieces of the answer, how it is cut, where it breaks."""
    pieces = draw(st.lists(st.sampled_from(TEXTS), min_size=1, max_size=12))
    text = "".join(pieces)
    stops = []
    for _ in range(draw(st.integers(0, 2))):
        start = draw(st.integers(0, len(text) - 1))
        stops.append(text[start : start + draw(st.integers(1, 6))])
    max_tokens = draw(st.one_of(st.none(), st.integers(1, MAX_TOKENS)))
    sampling = {
        "stop": tuple(stops),
        "include_stop_string": draw(st.booleans()),
        "max_tokens": max_tokens,
        "min_tokens": 0 if max_tokens is None else draw(st.integers(0, min(6, max_tokens))),
        "logprobs": draw(st.sampled_from([None, 0])),
        "skip_special_tokens": draw(st.booleans()),
    }
    cuts = draw(st.lists(st.integers(1, 8), min_size=1, max_size=8))
    return sampling, pieces, cuts, draw(st.one_of(st.none(), st.integers(1, 20)))


@examples(60)
@given(data=st.data(), run_ahead=st.booleans())
def test_an_answer_is_told_alike_however_its_tokens_come(
    tokenizer: Tokenizer, data: st.DataObject, run_ahead: bool
) -> None:
    eos = min(tokenizer.eos_token_ids)
    prompt = tuple(range(100, 100 + PROMPT_TOKENS))
    requests, scripts = [], {}
    for name in ("first", "second"):
        sampling, pieces, cuts, breaks_at = data.draw(cases())
        tokens = [token for piece in pieces for token in tokenizer.encode(piece)]
        if data.draw(st.booleans()):
            tokens.insert(data.draw(st.integers(0, len(tokens))), eos)
        tokens = (tokens * 120)[:120]
        stop_ids = data.draw(st.sampled_from([(), (), (tokens[7],)]))
        params = SamplingParams(**sampling, stop_token_ids=stop_ids)  # type: ignore[arg-type]
        requests.append(Request(name, prompt, params, eos_token_ids=frozenset({eos}), cache_salt=name))
        scripts[name] = (tokens, cuts, breaks_at)

    def fresh(cut: bool) -> dict[str, Script]:
        return {name: Script(tokens, cuts if cut else [], at) for name, (tokens, cuts, at) in scripts.items()}

    one_by_one = play(tokenizer, requests, fresh(False), run_ahead=run_ahead, drafts=False)
    several = play(tokenizer, requests, fresh(True), run_ahead=run_ahead, drafts=True)
    assert several.events == one_by_one.events
    assert several.token_times == one_by_one.token_times
    # A row that broke may have been over before: then only a step that ran ahead met what broke, and it depends on
    # the cuts whether one did.
    broken = [name for name, (_, _, breaks_at) in scripts.items() if breaks_at is not None]
    untrusted = {block for name in broken for block in blocks_of(prompt, scripts[name][0])}
    assert several.findable ^ one_by_one.findable <= untrusted


def blocks_of(prompt: tuple[int, ...], answer: list[int]) -> set[tuple[int, ...]]:
    tokens = (*prompt, *answer)
    return {tokens[start : start + BLOCK_SIZE] for start in range(0, len(tokens), BLOCK_SIZE)}


def test_a_stop_string_in_the_middle_of_an_advance_drops_the_rest(tokenizer: Tokenizer) -> None:
    tokens = tokenizer.encode("One. Two. Three. Four. Five. Six. Seven.")
    request = Request("a", (1, 2, 3), SamplingParams(stop=(" Four",), max_tokens=MAX_TOKENS, logprobs=0))
    told = play(tokenizer, [request], {"a": Script(tokens, [1, 8])}, run_ahead=True, drafts=True)
    events = told.events["a"]
    assert "".join(event.text for event in events) == "One. Two. Three."
    assert [len(event.token_ids) for event in events] == [1] * len(events), "an event a token"
    assert [event.logprobs[0].token_id for event in events] == [event.token_ids[0] for event in events]
    assert (events[-1].finish_reason, events[-1].stop_string) == (FinishReason.STOP, " Four")
    assert told.token_times["a"] == len(events) == len(tokenizer.encode("One. Two. Three. Four"))
