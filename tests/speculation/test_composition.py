"""Drafts beside all else that happens to a stream: what it wrote is found again, and nothing that did not hold; it
gives way, is aborted and ends in the middle of drafts; its samples share a prompt; an engine as users build it."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field, replace

import pytest

from tests.speculation.oracle import Oracle
from tests.speculation.random_requests import Told, play, random_requests
from tests.speculation.tiny import Room, Sizes, make_checkpoint, make_engine, make_tokenizer
from twostroke.config import EngineConfig, KVConfig
from twostroke.core.events import TokenEvent
from twostroke.core.request import Request
from twostroke.core.sampling_params import SamplingParams
from twostroke.core.sequence import Sequence
from twostroke.core.speculation import NO_DRAFTS
from twostroke.core.step import Drafts, Step
from twostroke.engine.build import assemble
from twostroke.engine.engine import Engine
from twostroke.models.checkpoint import Checkpoint
from twostroke.speculation.drafter import Drafter
from twostroke.text.tokenizer import Tokenizer

AMPLE = Sizes(num_blocks=400, step_tokens=256)
BACKENDS = ["cpu", "reference"]


class Always(Room):
    """Room for as many as there may be, up to `most`."""

    def drafts(self, sequence: Sequence, most: int) -> Drafts | None:
        return Drafts(min(most, self.most))


@dataclass
class Scene:
    checkpoint: Checkpoint
    tokenizer: Tokenizer = field(default_factory=make_tokenizer)

    def engine(
        self, backend: str, sizes: Sizes, drafters: list[Drafter] | None = None, room: Room | None = None
    ) -> Engine:
        return make_engine(backend, self.checkpoint, self.tokenizer, sizes, drafters, room=room)

    def requests(self, count: int, max_tokens: int = 40, **sampling: object) -> list[Request]:
        """Short prompts, long answers."""
        asked = {"temperature": 0.7, "max_tokens": max_tokens, "ignore_eos": True, "logprobs": 1, **sampling}
        return [
            Request(f"r{n}", (n, n + 1, n + 2), SamplingParams(seed=n, **asked))  # type: ignore[arg-type]
            for n in range(count)
        ]


@pytest.fixture(scope="module")
def scene(tmp_path_factory: pytest.TempPathFactory) -> Scene:
    return Scene(make_checkpoint(tmp_path_factory.mktemp("tiny")))


def findable(engine: Engine) -> set[tuple[int, ...]]:
    return {entry.node.tokens for entry in engine.scheduler.ledger.index.entries()}


def test_only_what_was_accepted_is_found_again(scene: Scene) -> None:
    """The same blocks as without drafts; and who finds them goes on as if it had read all of it."""
    requests = scene.requests(12)
    engine = scene.engine("cpu", AMPLE)
    plain = play(engine, requests)
    engine_with = scene.engine("cpu", AMPLE, [Oracle(plain.answers(), 0.7)], Always(most=6))
    close, engine_with.backend.close = engine_with.backend.close, lambda: None  # type: ignore[method-assign]
    told = play(engine_with, requests)
    assert told.samples == plain.samples
    assert findable(engine_with) == findable(engine)
    assert sum(count - held for count, held in told.held["oracle"]) > 50, "many did not hold"

    answers = plain.answers()
    further = [
        replace(
            request,
            request_id=f"further {request.request_id}",
            prompt_token_ids=(*request.prompt_token_ids, *answers[request.request_id][0]),
        )
        for request in requests
    ]
    again = play(engine_with, further)
    assert again.num_cached_tokens == 32 * len(requests)
    assert again.samples == play(scene.engine("cpu", replace(AMPLE, prefix_caching=False)), further).samples
    close()


@pytest.mark.parametrize("backend", BACKENDS)
def test_samples_share_their_prompt(scene: Scene, backend: str) -> None:
    request = replace(scene.requests(1, n=4)[0], prompt_token_ids=tuple(range(40)))
    plain = play(scene.engine(backend, AMPLE), [request])
    assert len({tuple(sample.token_ids) for sample in plain.samples.values()}) == 4
    told = play(scene.engine(backend, AMPLE, [Oracle(plain.answers(), 0.8)], Always(most=8)), [request])
    assert told.samples == plain.samples
    assert told.num_cached_tokens == plain.num_cached_tokens == 3 * 32
    assert told.num_steps < plain.num_steps


@dataclass
class Rows:
    """Which rows gave way while drafts of theirs were in flight."""

    steps: list[Step] = field(default_factory=list)

    def gave_way(self) -> set[int]:
        found = set()
        for place, (before, step) in enumerate(zip(self.steps, self.steps[1:], strict=False)):
            drafted = {slot.seq_id for slot in before.decodes if slot.drafts is not None}
            later = {join.seq_id for after in self.steps[place + 1 :] for join in after.joins}
            found |= drafted & set(step.leaves) & later
        return found


@pytest.mark.parametrize("backend", BACKENDS)
def test_who_gives_way_in_the_middle_of_drafts_resumes(scene: Scene, backend: str) -> None:
    requests = scene.requests(8, 60)
    plain = play(scene.engine(backend, AMPLE), requests)
    tight = Sizes(num_blocks=11, max_context=96)
    engine, rows = scene.engine(backend, tight, [Oracle(plain.answers(), 0.6)], Always(most=4)), Rows()
    engine.on_launch = rows.steps.append
    told = play(engine, requests)
    assert told.num_preemptions > 0
    assert rows.gave_way()
    assert told.answers() == plain.answers()
    assert backend != "cpu" or told.samples == plain.samples


@pytest.mark.parametrize("run_ahead", [True, False])
def test_aborted_at_any_moment(scene: Scene, run_ahead: bool) -> None:
    requests = scene.requests(3)
    plain = play(scene.engine("cpu", AMPLE), requests)
    for moment in range(1, 12):
        sizes = replace(AMPLE, run_ahead=run_ahead)
        engine = scene.engine("cpu", sizes, [Oracle(plain.answers(), 0.8)], Always(most=5))
        told = play(engine, requests, aborts={"r1": moment})
        for key, sample in told.samples.items():
            expected = plain.samples[key]
            if key == ("r1", 0):
                assert sample.token_ids == expected.token_ids[: len(sample.token_ids)]
            else:
                assert sample == expected


@pytest.mark.parametrize("include", [True, False])
def test_a_stop_string_inside_a_run_of_accepted_tokens(scene: Scene, include: bool) -> None:
    request = replace(scene.requests(1)[0], prompt_token_ids=tuple(b"abc"))
    free = play(scene.engine("cpu", AMPLE), [request]).samples["r0", 0]
    letters = [place for place, token in enumerate(free.token_ids) if 32 < token < 127 and place > 4]
    place = letters[0]
    text = chr(free.token_ids[place])
    sampling = replace(request.sampling, stop=(text,), include_stop_string=include)
    stopping = replace(request, sampling=sampling)
    plain = play(scene.engine("cpu", AMPLE), [stopping])
    told = play(scene.engine("cpu", AMPLE, [Oracle({"r0": [free.token_ids]}, 1.0)], Always(most=32)), [stopping])
    assert told.samples == plain.samples
    (sample,) = told.samples.values()
    assert sample.end == ("stop", None, text)
    assert sample.text.endswith(text) is include
    assert 1 + sum(held + 1 for _, held in told.held["oracle"]) > len(sample.token_ids), "more had held"


def test_a_request_may_be_left_alone(scene: Scene) -> None:
    requests = scene.requests(2)
    plain = play(scene.engine("cpu", AMPLE), requests)
    alone = [replace(request, sampling=replace(request.sampling, speculation=NO_DRAFTS)) for request in requests]
    told = play(scene.engine("cpu", AMPLE, [Oracle(plain.answers(), 1.0)]), alone)
    assert told.samples == plain.samples
    assert not told.held
    assert told.num_steps == plain.num_steps


@pytest.fixture
def built(scene: Scene) -> Iterator[list[Engine]]:
    """With and without drafts, as a user builds them: the cost model says what is drafted."""
    config = EngineConfig(max_context=160, backend="cpu", threads=1, kv=KVConfig(memory_bytes=4 * 10**6))
    assemblies = [
        assemble(scene.checkpoint, scene.tokenizer, replace(config, speculate=asked)) for asked in ("auto", "off")
    ]
    yield [assembly.engine for assembly in assemblies]


def test_as_engines_are_built(scene: Scene, built: list[Engine]) -> None:
    requests = random_requests(60, scene.tokenizer, seed=9)
    told, plain = (play(engine, requests) for engine in built)
    assert told.samples == plain.samples
    assert not plain.held


def test_tokens_come_one_by_one_however_many_a_step_brought(scene: Scene) -> None:
    requests = scene.requests(2)
    plain = play(scene.engine("cpu", AMPLE), requests)
    engine = scene.engine("cpu", AMPLE, [Oracle(plain.answers(), 1.0)], Always(most=8))
    for request in requests:
        engine.add(request)
    events = [event for _ in iter(lambda: engine.busy, False) for event in engine.step()]
    engine.close()
    tokens = [event for event in events if isinstance(event, TokenEvent)]
    assert all(len(event.token_ids) == 1 for event in tokens)
    last = [event.timing for event in tokens if event.timing is not None]
    for timing in last:
        assert timing.drafts_held > 20
        assert timing.draft_steps < 12
        assert len(timing.token_times_s) == 40
    told = Told()
    for event in tokens:
        told.take(event)
    assert told.samples == plain.samples
