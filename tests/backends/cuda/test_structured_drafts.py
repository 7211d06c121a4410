"""Drafts of streams that have a grammar or want logprobs: a mask for each draft, logprobs of each token that came, and
answers as without drafts, whoever drafts and however many hold."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pytest
from tests.backends.cuda.drafting_engines import Helped, Room, engine_of
from tests.backends.cuda.engines import Answers, Sizes, play, request
from tests.backends.cuda.letters import CODE, EOS, JSON, grammars, held, written
from tests.backends.cuda.test_drafts import Told, check_same
from tests.backends.cuda.test_sampling_mask import Done
from tests.models.tiny_checkpoints import VOCAB_SIZE, make_tiny
from tests.speculation.tiny_heads import make_head

from twostroke.backends.cuda.backend import CudaBackend
from twostroke.backends.cuda.grammar_rows import GrammarRows, Stuck
from twostroke.backends.reference import FACTORY as REFERENCE
from twostroke.core.grammar import STUCK, GrammarSpec, GrammarStuckError
from twostroke.core.request import Request
from twostroke.core.sequence import Sequence as Stream
from twostroke.core.step import Drafts, RowJoin, SampledToken, Step, StepResult
from twostroke.engine.companions import plan_head
from twostroke.engine.engine import Engine
from twostroke.models.checkpoint import Checkpoint
from twostroke.models.loading import load_checkpoint
from twostroke.scheduling.config import SchedulerConfig
from twostroke.scheduling.plan import Drafting
from twostroke.scheduling.scheduler import Scheduler
from twostroke.speculation.budget import DraftBudget
from twostroke.speculation.grammar import GrammarDrafter
from twostroke.speculation.ngram import NgramDrafter
from twostroke.speculation.speculator import Speculator
from twostroke.text.grammar import GrammarCompiler
from twostroke.text.grammar_matcher import GrammarMatcher

pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning:triton.runtime.interpreter")

SIZES = Sizes(step_tokens=40, max_rows=4, max_context=64, num_blocks=20)
TIGHT = Sizes(step_tokens=20, max_rows=3, max_context=64, num_blocks=5)
"""Prompts come in chunks, and streams wait for each other's blocks."""
SAME = [7, *range(60, 80)]
"""A prompt that comes twice: its first block is found again."""
WORD = GrammarSpec("choice", json.dumps(["hello wonderful world", "hello wonderful city"]))


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Checkpoint:
    return load_checkpoint(make_tiny("llama", tmp_path_factory.mktemp("llama"), num_hidden_layers=1)[0])


@pytest.fixture(scope="module")
def compiler() -> GrammarCompiler:
    return grammars()


def mixed(count: int = 8) -> list[Request]:
    """Grammars, logprobs, both, neither; greedy, drawn and seeded; several answers; prefixes that are found again."""
    return [
        held("json", JSON, [40, 41] * 6, max_tokens=count, logit_bias=dict.fromkeys(b"\t\n\r ", -100.0), logprobs=2),
        held("code", CODE, SAME, max_tokens=count, temperature=1.0, top_p=0.9, seed=4, logprobs=0, n=2),
        request("logprobs", SAME, max_tokens=count, logprobs=3),
        held("late end", CODE, [8] * 12, max_tokens=count + 3, min_tokens=8, logit_bias={EOS: 50.0}),
        request("free", [9] * 13, max_tokens=count, temperature=0.8, seed=2, repetition_penalty=1.2),
    ]


def watched(
    sizes: Sizes, checkpoint: Checkpoint, backend: CudaBackend, drafting: Drafting, compiler: GrammarCompiler
) -> tuple[Engine, list[tuple[Step, StepResult]]]:
    backend.use_grammars(compiler)
    config = SchedulerConfig(
        max_context=sizes.max_context, max_tokens_per_step=sizes.step_tokens, max_running=sizes.max_rows
    )
    scheduler = Scheduler(config, sizes.layout(checkpoint), drafting=drafting, max_drafts=backend.max_drafts)
    engine = Engine(scheduler, backend, checkpoint.spec.vocab_size, grammars=compiler)
    steps: list[tuple[Step, StepResult]] = []
    engine.on_step = lambda step, result: steps.append((step, result))
    return engine, steps


def without_drafts(checkpoint: Checkpoint, requests: Sequence[Request], device: str, compiler: object) -> Answers:
    engine = SIZES.engine(checkpoint, SIZES.on_device(checkpoint, device), compiler)  # type: ignore[arg-type]
    found = play(engine, requests)
    engine.close()
    return found


def advanced(steps: list[tuple[Step, StepResult]], *, logprobs: bool) -> int:
    """The longest advance of a stream that wants logprobs, or of one that does not."""
    came = [tokens for _, result in steps for tokens in result.sampled.values()]
    return max((len(tokens) for tokens in came if (tokens[0].logprobs is not None) is logprobs), default=0)


@pytest.mark.parametrize("sizes", [TIGHT, pytest.param(SIZES, marks=pytest.mark.slow)], ids=["tight", "ample"])
def test_answers_are_those_without_drafts(
    llama: Checkpoint, compiler: GrammarCompiler, device: str, sizes: Sizes
) -> None:
    requests = mixed(24) if sizes is SIZES else mixed(8)[:4]
    plain = without_drafts(llama, requests, device, compiler)
    engine, steps = watched(sizes, llama, sizes.on_device(llama, device), Told(plain), compiler)
    check_same(play(engine, requests), plain)
    engine.close()
    assert advanced(steps, logprobs=True) >= 3 and advanced(steps, logprobs=False) >= 3
    assert len(written(plain.tokens["late end"])) == 8


@pytest.mark.slow
def test_a_preempted_answer_goes_on_where_it_was(llama: Checkpoint, compiler: GrammarCompiler, device: str) -> None:
    sizes = Sizes(step_tokens=16, max_rows=3, max_context=48, num_blocks=4)
    bias = dict.fromkeys(b"\t\n\r ", -100.0)
    requests = [
        held(f"json {number}", JSON, [6 + number] * 12, max_tokens=18, logit_bias=bias, logprobs=number)
        for number in range(2)
    ]
    requests.append(request("free", [9] * 14, logprobs=1, max_tokens=18))
    plain = without_drafts(llama, requests, device, compiler)
    engine, steps = watched(sizes, llama, sizes.on_device(llama, device), Told(plain), compiler)
    check_same(play(engine, requests), plain)
    assert engine.scheduler.counts().preemptions > 0 and advanced(steps, logprobs=True) >= 2
    engine.close()


def test_what_a_grammar_forces_is_drafted(llama: Checkpoint, compiler: GrammarCompiler, device: str) -> None:
    """One step late, as all guesses of the host; a model that never wrote such words needs few steps for them."""
    requests = [held(name, WORD, [place, 5], max_tokens=30) for place, name in enumerate(("one", "two"))]
    plain = without_drafts(llama, requests, device, compiler)
    backend = SIZES.on_device(llama, device)
    backend.use_speculator(Speculator([GrammarDrafter(), NgramDrafter()], VOCAB_SIZE))
    budget = DraftBudget(lambda work: 1e4, backend.max_drafts, ["grammar", "ngram"])
    engine, steps = watched(SIZES, llama, backend, budget, compiler)
    check_same(play(engine, requests), plain)
    engine.close()
    drafted = [(one, result.sampled[seq_id]) for _, result in steps for seq_id, one in result.drafted.items()]
    forced = [len(came) for one, came in drafted if one.method == "grammar"]
    assert max(forced) >= 4 and len(steps) < len(plain.tokens["one"])


@pytest.mark.slow
def test_drafts_of_the_device_are_shown_to_grammars(llama: Checkpoint, compiler: GrammarCompiler, device: str) -> None:
    """Whatever they are: most break the grammar, and those that were helped hold."""
    if device == "cuda":
        pytest.skip("what is drafted in a graph cannot be helped")
    requests = [replace(one, request_id=f"r{place}") for place, one in enumerate(mixed()[:1] + mixed()[2:4])]
    plain = without_drafts(llama, requests, device, compiler)
    answers = [[*one.prompt_token_ids, *plain.tokens[one.request_id], *[9] * 8] for one in requests]
    companion = plan_head(make_head("medusa", llama.spec), 1, REFERENCE).companion
    helped: list[Helped] = []
    engine = engine_of(
        llama,
        companion,
        replace(TIGHT, num_blocks=20),
        device,
        lambda drafter, parts: helped.append(Helped(drafter, parts, answers)),
        drafting=Room((3, 2, 1, 3)),
        grammars=compiler,
    )
    told: list[int] = []
    engine.on_step = lambda step, result: told.extend(len(came) for came in result.sampled.values())
    check_same(play(engine, requests), plain)
    engine.close()
    assert helped[0].made and max(told) >= 3


class Limited(GrammarMatcher):
    """Reaches a limit after so many tokens."""

    left = 5

    def allowed(self) -> bytes:
        if self.left == 0:
            raise GrammarStuckError("the limit is reached")
        return super().allowed()

    def advance(self, token_id: int) -> None:
        self.left -= 1
        super().advance(token_id)

    def copy(self) -> Limited:
        other = Limited(self._matcher.deep_copy(), self._end_mask, self._num_tokens)
        other.left = self.left
        return other


class GivesUp:
    def __init__(self, compiler: GrammarCompiler) -> None:
        self._compiler, self.check = compiler, compiler.check

    def matcher(self, spec: GrammarSpec) -> Limited:
        found = self._compiler.matcher(spec)
        assert isinstance(found, GrammarMatcher)
        return Limited(found._matcher, found._end_mask, found._num_tokens)


class Right(Drafting):
    """As many as there is room for; what follows the answer is anything."""

    def __init__(self, answer: Sequence[int]) -> None:
        self._answer = [*answer, *b"0000000000000000000"]

    def drafts(self, stream: Stream, most: int) -> Drafts | None:
        known = len(stream.tokens) - stream.prompt_len
        return Drafts(most, tuple(self._answer[known : known + 15]), len(stream.tokens)) if most else None


def test_a_matcher_that_gives_up_behind_drafts_ends_the_answer_there(
    llama: Checkpoint, compiler: GrammarCompiler, device: str
) -> None:
    asked, stuck = held("stuck", CODE, [7, 8], max_tokens=12), GivesUp(compiler)
    plain = without_drafts(llama, [asked], device, stuck)
    assert plain.ends == {"stuck": ("error", f"{STUCK}: the limit is reached")} and len(plain.tokens["stuck"]) == 5
    engine, steps = watched(SIZES, llama, SIZES.on_device(llama, device), Right(plain.tokens["stuck"]), stuck)  # type: ignore[arg-type]
    check_same(play(engine, [asked]), plain)
    engine.close()
    assert len(steps) < 5


def opened(compiler: object, asked: Request) -> GrammarRows:
    rows = GrammarRows(VOCAB_SIZE)
    rows.use(compiler)  # type: ignore[arg-type]
    rows.open(RowJoin(3, asked))
    return rows


def bits(words: np.ndarray) -> list[set[int]]:
    unpacked = np.unpackbits(words.view(np.uint8), axis=1, bitorder="little")
    return [set(np.flatnonzero(line).tolist()) for line in unpacked]


def test_each_draft_has_the_mask_of_the_text_before_it(compiler: GrammarCompiler) -> None:
    rows = opened(compiler, held("r", CODE, [7, 8], max_tokens=9))
    letters, digits = set(b"ABCDEF"), set(b"0123456789")
    lengths = []

    def drafts_of(place: int, length: int) -> list[int]:
        lengths.append((place, length))
        return list(b"AB-9") if length == 2 else list(b"C-12")

    masks = rows.masks([9, 3], 5, drafts_of)
    assert masks is not None and masks.entries.tolist() == [5, 6, 7, 8, 9]
    assert bits(masks.words)[:3] == [letters] * 3, "what stands behind a draft that is forbidden is never told"
    rows.expect([3], Done({3: (SampledToken(ord("A")), SampledToken(ord("B")))}))
    masks = rows.masks([3], 5, drafts_of)
    assert masks is not None and bits(masks.words) == [letters, {ord("-")}, digits, digits, digits | {EOS}]
    assert lengths == [(1, 2), (0, 4)] and rows.stuck([3]) == {}


def test_an_answer_ends_where_its_matcher_would_behind_drafts(compiler: GrammarCompiler) -> None:
    rows = opened(GivesUp(compiler), held("r", CODE, [7, 8], max_tokens=9))
    rows.masks([3], 8, lambda place, length: list(b"ABC-12"))
    assert rows.stuck([3]) == {3: Stuck(5, f"{STUCK}: the limit is reached")}
    rows.expect([3], Done({3: (SampledToken(ord("A")), SampledToken(ord("F")))}))
    rows.masks([3], 3, lambda place, length: list(b"BZ"))
    assert rows.stuck([3]) == {}, "drafts that did not hold leave nothing behind"


def test_a_draft_below_min_tokens_does_not_end_an_answer(compiler: GrammarCompiler) -> None:
    rows = opened(compiler, held("r", CODE, [7], max_tokens=20, min_tokens=7))
    masks = rows.masks([3], 8, lambda place, length: list(b"ABC-123"))
    assert masks is not None
    digits = set(b"0123456789")
    assert bits(masks.words)[-2:] == [digits, digits | {EOS}]
