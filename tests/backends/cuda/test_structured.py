"""Answers held to grammars, through the scheduler, against the reference: the same tokens in float32, greedy and drawn,
beside streams that have no grammar, after preemption, and where a matcher gives up."""

from __future__ import annotations

import json
import re
from dataclasses import replace

import pytest
from tests.backends.cuda.engines import Sizes, mixed_requests, play, play_both, request
from tests.backends.cuda.letters import CODE, EOS, JSON, SCHEMA, follows_schema, grammars, held, written
from tests.models.tiny_checkpoints import make_tiny

from twostroke.backends.cuda.results import CudaTicket
from twostroke.core.grammar import STUCK, GrammarSpec, GrammarStuckError, TokenMatcher
from twostroke.core.step import PrefillChunk, RowJoin, Step, StepResult
from twostroke.models.checkpoint import Checkpoint
from twostroke.models.loading import load_checkpoint
from twostroke.text.grammar import GrammarCompiler

# A row without top-p has no weight to reach, which is infinite; the interpreter remarks on it, a device does not.
pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning:triton.runtime.interpreter")

SIZES = Sizes(step_tokens=16, max_rows=5, max_context=192)
NO_SPACES = dict.fromkeys(b"\t\n\r ", -100.0)
"""A model of random weights likes some of them, and JSON takes them everywhere."""


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Checkpoint:
    return load_checkpoint(make_tiny("llama", tmp_path_factory.mktemp("llama"), num_hidden_layers=1)[0])


@pytest.fixture(scope="module")
def compiler() -> GrammarCompiler:
    return grammars()


def follows(text: str, grammar: GrammarSpec) -> bool:
    if grammar is JSON:
        return follows_schema(text)
    return re.fullmatch(grammar.text, text) is not None


def test_the_check_is_jsonschemas() -> None:
    validator = pytest.importorskip("jsonschema").Draft202012Validator(SCHEMA)
    right = ['{"a": true, "b": "x"}', '{"b": "yy", "a": false}']
    wrong = [
        '{"a": 1, "b": "x"}',
        '{"a": true}',
        '{"a": true, "b": "y"}',
        '{"a": true, "b": "x", "c": 0}',
        "[]",
        "null",
    ]
    for text in (*right, *wrong):
        assert follows_schema(text) == validator.is_valid(json.loads(text)) == (text in right), text


def test_answers_follow_their_grammars_with_the_references_tokens(
    llama: Checkpoint, compiler: GrammarCompiler, device: str
) -> None:
    """A prompt in chunks among them, and free streams, which write what they write without such company."""
    free = mixed_requests((3, 19), (9, 20, 12), temperature=0.7)
    constrained = [
        held("greedy", JSON, [40, 41], max_tokens=140, logit_bias=NO_SPACES),
        held("drawn", JSON, range(30, 70), max_tokens=140, temperature=1.5, top_k=40, seed=3),
        held("code", CODE, [9], max_tokens=20, temperature=1.0, top_p=0.9, seed=4, logprobs=2),
        held("late end", CODE, [8], max_tokens=20, min_tokens=8, logit_bias={EOS: 50.0}),
        held("cut", JSON, [7], max_tokens=3, presence_penalty=1.0),
    ]
    requests = [constrained[0], free[0], *constrained[1:3], free[1], *constrained[3:], free[2]]
    ours, theirs = play_both(llama, requests, device, SIZES, grammars=compiler)
    assert (ours.tokens, ours.ends) == (theirs.tokens, theirs.ends)
    for asked in constrained:
        end, tokens = ours.ends[asked.request_id], ours.tokens[asked.request_id]
        assert end == ("length" if asked.request_id == "cut" else "stop", None)
        grammar = asked.sampling.grammar
        assert grammar is not None and (asked.request_id == "cut" or follows(written(tokens), grammar))
    assert len(written(ours.tokens["late end"])) == 8
    for mine, other in zip(ours.logprobs["code"], theirs.logprobs["code"], strict=True):
        assert mine.token_id == other.token_id and mine.logprob == pytest.approx(other.logprob, abs=1e-4)
        assert mine.top[0][0] == other.top[0][0]
    alone = play(SIZES.engine(llama, SIZES.on_reference(llama)), free)
    assert {name: ours.tokens[name] for name in alone.tokens} == alone.tokens


def test_a_preempted_answer_goes_on_where_it_was(llama: Checkpoint, compiler: GrammarCompiler, device: str) -> None:
    sizes = Sizes(step_tokens=16, max_rows=3, max_context=48, num_blocks=4)
    requests = [
        held(f"code {number}", CODE, [6 + number] * 12, max_tokens=20, temperature=1.0, seed=number)
        for number in range(3)
    ]
    requests.append(request("free", [9] * 14, max_tokens=20))
    roomy = replace(sizes, num_blocks=40)
    expected = play(roomy.engine(llama, roomy.on_reference(llama), compiler), requests)
    backend = sizes.on_device(llama, device)
    engine = sizes.engine(llama, backend, compiler)
    ours = play(engine, requests)
    assert engine.scheduler.counts().preemptions > 0
    assert (ours.tokens, ours.ends) == (expected.tokens, expected.ends)
    play(engine, [request("last", [9], max_tokens=1)])  # it takes with it the rows that were left
    assert len(backend._parts.rows.grammars) == 0


def test_only_steps_with_a_grammar_wait_for_the_step_before(
    llama: Checkpoint, compiler: GrammarCompiler, device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    backend = SIZES.on_device(llama, device)
    launch, result = backend.launch, CudaTicket.result
    under_way: list[Step] = []
    held_ids: set[int] = set()
    has_grammar, has_waited = [], []

    def watched_launch(step: Step) -> CudaTicket:
        held_ids.update(join.seq_id for join in step.joins if join.request.sampling.grammar is not None)
        has_grammar.append(any(slot.seq_id in held_ids for slot in step.decodes))
        has_waited.append(False)
        under_way.append(step)
        ticket = launch(step)
        under_way.pop()
        return ticket

    def watched_result(ticket: CudaTicket) -> StepResult:
        if under_way:
            has_waited[-1] = True
        return result(ticket)

    monkeypatch.setattr(backend, "launch", watched_launch)
    monkeypatch.setattr(CudaTicket, "result", watched_result)
    engine = SIZES.engine(llama, backend, compiler)
    free = [request(name, [9, 8], max_tokens=16, top_p=0.9, temperature=1.0, seed=1) for name in ("one", "two")]
    play(engine, [*free, held("code", CODE, [7], max_tokens=12)])
    assert has_waited == has_grammar
    assert True in has_grammar and has_grammar.count(False) > 4


class GivesUp:
    """Grammars whose matchers reach a limit after so many tokens."""

    def __init__(self, grammars: GrammarCompiler, after: int) -> None:
        self._grammars, self._after = grammars, after
        self.check = grammars.check

    def matcher(self, spec: GrammarSpec) -> TokenMatcher:
        return Limited(self._grammars.matcher(spec), self._after)


class Limited:
    def __init__(self, matcher: TokenMatcher, left: int) -> None:
        self._matcher, self._left = matcher, left

    def allowed(self) -> bytes:
        if self._left == 0:
            raise GrammarStuckError("the limit is reached")
        return self._matcher.allowed()

    def advance(self, token_id: int) -> None:
        self._left -= 1
        self._matcher.advance(token_id)


@pytest.mark.parametrize("after", [0, 3])
def test_a_matcher_that_gives_up_ends_its_answer_alone(
    after: int, llama: Checkpoint, compiler: GrammarCompiler, device: str
) -> None:
    requests = [held("stuck", CODE, [7, 8], max_tokens=12), request("free", [9], max_tokens=8)]
    ours, theirs = play_both(llama, requests, device, SIZES, grammars=GivesUp(compiler, after))
    assert ours == theirs
    assert ours.ends == {"stuck": ("error", f"{STUCK}: the limit is reached"), "free": ("length", None)}
    assert len(ours.tokens["stuck"]) == after


def test_a_backend_that_was_given_no_grammars_says_so(llama: Checkpoint, device: str) -> None:
    backend = SIZES.on_device(llama, device)
    asked = held("code", CODE, [7], max_tokens=2)
    step = Step(0, prefills=(PrefillChunk(0, 0, (7,), samples=True),), joins=(RowJoin(0, asked),))
    with pytest.raises(ValueError, match="was given none"):
        backend.launch(step)
    assert len(backend._parts.rows) == 0
