"""The first token of an answer comes with its prompt from the engine that read it: it is told before any step, it is
the token that one engine alone would have drawn, and all that follows is what follows there. Where it cannot be that
token, whoever writes draws it."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any

import pytest
from tests.engine.test_handoff import KEY, everything_pays, has_leases, play, settle
from tests.speculation import random_requests
from tests.speculation.oracle import Oracle
from tests.speculation.random_requests import Sample, Told
from tests.speculation.test_composition import Always, Scene, scene
from tests.speculation.tiny import VOCAB_SIZE

from twostroke.backends.interface import SpeculatingBackend
from twostroke.config import EngineConfig, KVConfig
from twostroke.core.events import TokenEvent
from twostroke.core.handoff import ENDED, Handoff
from twostroke.core.request import Request
from twostroke.core.sampling_params import SamplingParams
from twostroke.core.step import Step, StepResult
from twostroke.core.timing import SequenceTiming
from twostroke.engine.build import Assembly, assemble
from twostroke.engine.engine import Engine
from twostroke.engine.explaining import engine_facts
from twostroke.engine.fleet import FleetSettings
from twostroke.explain.explanation import Explainer
from twostroke.explain.handoff import handoff_sentence
from twostroke.kv.tiers import peers
from twostroke.speculation.speculator import Speculator

assert everything_pays and scene  # fixtures of theirs are ours, too
NUM_REQUESTS = 80


@dataclass
class Pair:
    reads: Assembly
    writes: Assembly
    alone: Assembly

    @property
    def reader(self) -> Engine:
        return self.reads.engine

    @property
    def writer(self) -> Engine:
        return self.writes.engine


@contextmanager
def made(scene: Scene, backend: str, **changes: Any) -> Iterator[Pair]:
    config = EngineConfig(
        backend=backend,
        threads=1,
        max_context=256,
        speculate="off",
        kv=KVConfig(block_size=16, memory_bytes=8_000_000, host_gb=0.02),
    )
    fleets = [FleetSettings(KEY, "sockets", engine_id=name) for name in ("reads", "writes")]
    reads = assemble(scene.checkpoint, scene.tokenizer, config, fleets[0])
    writes = assemble(scene.checkpoint, scene.tokenizer, replace(config, **changes), fleets[1])
    alone = assemble(scene.checkpoint, scene.tokenizer, config)
    yield Pair(reads, writes, alone)
    for one in (reads, writes, alone):
        one.engine.close()


@pytest.fixture(scope="module", params=["cpu", "reference"])
def pair(request: pytest.FixtureRequest, scene: Scene) -> Iterator[Pair]:
    with made(scene, request.param) as pair:
        yield pair


def read(reader: Engine, request: Request) -> Handoff:
    """As a server does it whom a router asks for one token."""
    sampling = replace(request.sampling, max_tokens=1, min_tokens=min(1, request.sampling.min_tokens))
    name = f"read {request.request_id}"
    lease_id = "".join(filter(str.isalnum, name))
    asked = replace(request, request_id=name, sampling=sampling, lease_id=lease_id)
    handoff = play(reader, requests=[(reader, asked)]).last[f"{name}.0"].handoff
    assert handoff is not None and not handoff.unread
    return handoff


def asked(name: str, length: int = 70, **sampling: Any) -> Request:
    drawn = random.Random(name)
    prompt = tuple(drawn.randrange(97, 123) for _ in range(length))
    return Request(name, prompt, SamplingParams(**{"max_tokens": 6, "ignore_eos": True, "seed": 5, **sampling}))


def tell(engine: Engine, requests: Sequence[Request]) -> tuple[Told, dict[str, SequenceTiming]]:
    """One joins a step."""
    told, timings, waiting = Told(), dict[str, SequenceTiming](), list(requests)

    def note(step: Step, result: StepResult) -> None:
        told.num_steps += 1
        told.note(step, result)

    engine.on_step = note
    while waiting or engine.busy:
        if waiting:
            engine.add(waiting.pop(0))
        for event in engine.step():
            if isinstance(event, TokenEvent):
                told.take(event)
                if event.timing is not None:
                    timings[event.request_id] = event.timing
        engine.scheduler.check()
    return told, timings


def first_of(told: Told, request: Request) -> int:
    return told.samples[request.request_id, 0].token_ids[0]


def long_requests(scene: Scene) -> list[Request]:
    """Of all kinds of sampling, mixed at random, with prompts of a block at least."""
    drawn, found = random.Random(3), []
    for request in random_requests.random_requests(NUM_REQUESTS, scene.tokenizer, seed=11):
        before = tuple(drawn.randrange(97, 123) for _ in range(drawn.randint(17, 90)))
        found.append(replace(request, prompt_token_ids=before + request.prompt_token_ids))
    return found


def test_answers_of_every_kind_are_those_of_one_engine(pair: Pair, scene: Scene) -> None:
    """Penalties, biases, grammars, thoughts, stops of both kinds, logprobs, least lengths, several samples."""
    requests = long_requests(scene)
    requests = random_requests.with_stops(requests, tell(pair.alone.engine, requests)[0])
    pair.alone.engine.clear_prefixes()
    plain, _ = tell(pair.alone.engine, requests)
    handed = [replace(request, handoff=read(pair.reader, request)) for request in requests]
    told, timings = tell(pair.writer, handed)
    settle(pair.reader, pair.writer)
    assert told.samples.keys() == plain.samples.keys()
    for key, sample in plain.samples.items():
        assert _near(told.samples[key]) == _near(sample), key
    came = {request.request_id for request in requests if timings[request.request_id].first_came}
    one_sample = {r.request_id for r in requests if r.sampling.n == 1 and r.sampling.prompt_logprobs is None}
    assert came == one_sample and len(came) > NUM_REQUESTS / 2
    ended = [name for name in came if timings[name].handoff.why_not == ENDED]  # type: ignore[union-attr]
    assert ended and all(len(plain.samples[name, 0].token_ids) == 1 for name in ended)


def _near(sample: Sample) -> Any:
    """The reference's sums depend on what is computed beside: its log-probabilities do, too, in the last digits."""
    logprobs = [(one.token_id, round(one.logprob, 3), [i for i, _ in one.top]) for one in sample.logprobs]
    return sample.token_ids, sample.text, logprobs, len(sample.prompt_logprobs), sample.end


@pytest.mark.parametrize("mostly_right", [False, True])
def test_drafts_go_on_behind_it(scene: Scene, mostly_right: bool) -> None:
    """As engines are built, with drafts on the one that writes; and with a drafter that is mostly right."""
    requests = [one for one in long_requests(scene) if one.sampling.n == 1][:40]
    with made(scene, "cpu", speculate="auto") as pair:
        plain, _ = tell(pair.alone.engine, requests)
        if mostly_right:
            assert isinstance(pair.writer.backend, SpeculatingBackend)
            pair.writer.backend.use_speculator(Speculator([Oracle(plain.answers(), 0.8)], VOCAB_SIZE))
            pair.writer.scheduler.draft(Always(most=6))
        told, timings = tell(pair.writer, [replace(one, handoff=read(pair.reader, one)) for one in requests])
        settle(pair.reader, pair.writer)
    assert told.samples == plain.samples
    assert sum(timing.first_came for timing in timings.values()) > 20
    assert not mostly_right or sum(held for _, held in told.held["oracle"]) > 50


def test_it_is_told_before_any_step(pair: Pair) -> None:
    """With its log-probability and its text; the rest follows when its KV is there."""
    request = asked("soon", temperature=0.9, logprobs=2)
    plain, _ = tell(pair.alone.engine, [request])
    handoff = read(pair.reader, request)
    assert handoff.first is not None and handoff.first.token_id == first_of(plain, request)
    pair.writer.add(replace(request, handoff=handoff))
    [event] = pair.writer.take_events()
    assert isinstance(event, TokenEvent) and event.token_ids == (handoff.first.token_id,)
    assert event.finish_reason is None and event.logprobs[0].token_id == handoff.first.token_id
    assert len(event.logprobs[0].top) == 2
    told, timings = tell(pair.writer, [])
    assert [*event.token_ids, *told.samples["soon", 0].token_ids] == plain.samples["soon", 0].token_ids
    assert timings["soon"].handoff is not None and timings["soon"].handoff.why_not is None
    assert timings["soon"].tier_tokens.peer == handoff.num_tokens == 64
    settle(pair.reader, pair.writer)


@pytest.mark.parametrize("ends_by", ["id", "text", "length"])
def test_where_it_ends_the_answer_nothing_is_fetched(pair: Pair, ends_by: str) -> None:
    name = f"ends by {ends_by}"
    free = asked(name, temperature=0.0)
    plain, _ = tell(pair.alone.engine, [free])
    token_id = first_of(plain, free)
    change: dict[str, Any] = {"stop_token_ids": (token_id,)} if ends_by == "id" else {"max_tokens": 1}
    if ends_by == "text":
        text = plain.samples[name, 0].text[:1]
        assert text
        change = {"stop": (text,)}
    request = replace(free, sampling=replace(free.sampling, **change))
    expected, _ = tell(pair.alone.engine, [request])
    told, timings = tell(pair.writer, [replace(request, handoff=read(pair.reader, request))])
    assert told.samples == expected.samples and told.num_steps == 0
    assert told.samples[name, 0].end == ("length" if ends_by == "length" else "stop", None, *change.get("stop", [None]))
    timing = timings[name]
    assert timing.handoff is not None and timing.handoff.why_not == ENDED and not timing.handoff.num_bytes
    assert "read again" not in handoff_sentence(timing.handoff, first_came=True)
    facts = engine_facts(pair.writes)
    verdict = Explainer(lambda: facts, lambda: None).explain(timing).verdict
    assert "70 tokens" in verdict.sentence or "handoff" in verdict.sentence, verdict.sentence
    settle(pair.reader, pair.writer)
    assert not has_leases(pair.reader), "it was given back, not waited for"


@pytest.mark.parametrize("fault", ["lost", "another's", "late", pytest.param("gone", marks=pytest.mark.slow)])
def test_where_its_kv_does_not_come_it_stands_and_the_prompt_is_read(
    pair: Pair, fault: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    request = asked(f"kv is {fault}", temperature=0.7, logprobs=1)
    plain, _ = tell(pair.alone.engine, [request])
    handoff = read(pair.reader, request)
    own = pair.reader.scheduler.ledger.tiers.peers  # type: ignore[union-attr]
    assert own is not None and handoff.first is not None
    if fault == "lost":
        own.drop(handoff.lease_id)
    elif fault == "another's":
        handoff = replace(handoff, slots=(tuple(slot + 1 for slot in handoff.slots[0]), *handoff.slots[1:]))
    elif fault == "late":
        monkeypatch.setattr(peers, "FETCH_S", 0.0)
    else:
        handoff = replace(handoff, peer=handoff.peer.replace('"reads"', '"nobody"'))
    told, timings = tell(pair.writer, [replace(request, handoff=handoff)])
    assert told.samples == plain.samples
    timing = timings[request.request_id]
    assert timing.handoff is not None and timing.handoff.why_not and timing.first_came and not timing.tier_tokens.peer
    assert timing.ttft_s == pytest.approx(handoff.before_s), "it came all the same"
    own.drop(handoff.lease_id)
    settle(pair.reader, pair.writer)


def test_one_that_would_not_be_drawn_here_is_not_believed(pair: Pair) -> None:
    """It was drawn for another request, by another model, or is no token at all: it is drawn here, as ever."""
    base = asked("base", temperature=0.8, logprobs=1)
    handoff = read(pair.reader, base)
    first = handoff.first
    assert first is not None
    others = {
        "warmer": (base, replace(base.sampling, temperature=0.9)),
        "another seed": (base, replace(base.sampling, seed=6)),
        "no seed": (base, replace(base.sampling, seed=None, temperature=0.0)),
        "several": (base, replace(base.sampling, n=2)),
        "of the prompt": (base, replace(base.sampling, prompt_logprobs=1)),
        "at least": (base, replace(base.sampling, min_tokens=2)),
        "biased": (base, replace(base.sampling, logit_bias={5: 1.0})),
        "no logprobs": (base, replace(base.sampling, logprobs=None)),
        "more logprobs": (base, replace(base.sampling, logprobs=3)),
    }
    for name, (request, sampling) in others.items():
        changed = replace(request, request_id=name, sampling=sampling)
        expected, _ = tell(pair.alone.engine, [changed])
        told, timings = tell(pair.writer, [replace(changed, handoff=handoff)])
        assert told.answers() == expected.answers() and not timings[name].first_came, name
    strange = {
        "below": first._replace(token_id=-1),
        "beyond": first._replace(token_id=VOCAB_SIZE),
        "unknown": first._replace(drawn_as=""),
        "without": first._replace(logprob=None),
    }
    for name, given in strange.items():
        told, timings = tell(pair.writer, [replace(base, request_id=name, handoff=replace(handoff, first=given))])
        assert not timings[name].first_came, name
    model = replace(handoff, model="other")
    told, timings = tell(pair.writer, [replace(base, request_id="model", handoff=model)])
    assert not timings["model"].first_came
    settle(pair.reader, pair.writer)


def test_what_says_nothing_of_the_draw_does_not_matter(pair: Pair) -> None:
    """Nor does who draws it, where no seed is given: any draw is as good as another."""
    base = asked("whatever", temperature=0.8, seed=None)
    for number, change in enumerate(({"max_tokens": 3}, {"stop": ("zzz",)}, {"skip_special_tokens": False})):
        request = replace(base, request_id=f"w{number}", sampling=replace(base.sampling, **change))
        handoff = read(pair.reader, base)
        _, timings = tell(pair.writer, [replace(request, handoff=handoff)])
        assert timings[request.request_id].first_came
    settle(pair.reader, pair.writer)


def test_where_its_time_went_is_told_by_both_engines(pair: Pair) -> None:
    """The first token counts when it came; what the stream waited for behind it is no part of that."""
    request = asked("seen", 150, max_tokens=2, temperature=0.0)
    handoff = replace(read(pair.reader, request), way_s=0.25)
    _, timings = tell(pair.writer, [replace(request, handoff=handoff)])
    timing = timings["seen"]
    assert timing.ttft_s == pytest.approx(handoff.read_s + 0.25) and timing.first_came
    assert timing.queue_s is not None and timing.prefill_s is not None and timing.decode_s is not None
    assert timing.queue_s >= 0.0 and timing.prefill_s > 0.0
    assert timing.stream_s == pytest.approx(timing.queue_s + timing.prefill_s), "both lie behind the first token"
    assert timing.total_s == pytest.approx(timing.elsewhere_s + timing.queue_s + timing.prefill_s + timing.decode_s)
    assert timing.cached_tokens == 144 and timing.prefix is None and timing.recomputed_tokens == 0
    facts = engine_facts(pair.writes)
    explanation = Explainer(lambda: facts, lambda: None).explain(timing)
    assert explanation.verdict.start is not None and explanation.verdict.stream is not None
    assert explanation.verdict.start.seconds == timing.ttft_s
    assert "taking over what another engine had read" in explanation.verdict.stream.what
    spans = explanation.spans
    assert {"way", "handoff", "prefill"} <= {span.kind for span in spans}
    assert any(span.kind == "handoff" and "the first token was told before" in span.note for span in spans)
    for before, after in pairwise(spans):
        assert after.start_s == pytest.approx(before.start_s + before.seconds, abs=1e-5)
    settle(pair.reader, pair.writer)
