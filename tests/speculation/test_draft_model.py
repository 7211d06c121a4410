"""A smaller model drafts: answers are those without it, whatever it says; and a model that drafts for itself is always
right, which shows that its tokens, positions and KV are, in every way that a stream can take."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from itertools import cycle
from pathlib import Path
from typing import Any

import pytest

from tests.models.tiny_checkpoints import make_tiny
from twostroke import LLM, SamplingParams
from twostroke.backends.host.batch import Batch
from twostroke.backends.host.scores import Scores
from twostroke.config import EngineConfig, KVConfig
from twostroke.core.events import TokenEvent
from twostroke.core.sequence import Sequence
from twostroke.core.speculation import NO_DRAFTS, SpeculationParams
from twostroke.core.step import Drafts
from twostroke.engine.build import assemble
from twostroke.engine.offline import GenerationResult
from twostroke.models.loading import load_checkpoint
from twostroke.scheduling.plan import Drafting
from twostroke.speculation.drafter import Ask, Proposal

BACKENDS = ("reference", "cpu")
MODELS = ("llama", "mistral")
"""The second has windows of 16 tokens."""
CONFIG = EngineConfig(threads=1, max_context=160, quantise="none", kv=KVConfig(memory_bytes=4 << 20))
LITTLE_KV = 7
"""Blocks of each group: two of the longest prompts below do not fit side by side."""
CHUNKED = replace(CONFIG, max_tokens_per_step=24)
WAYS = {
    "plain": ("llama", CONFIG),
    "step by step": ("llama", replace(CONFIG, run_ahead=False)),
    "chunked, with windows": ("mistral", CHUNKED),
}
GREEDY = SamplingParams(temperature=0.0, max_tokens=30, ignore_eos=True)
SEEDED = SamplingParams(temperature=0.8, top_p=0.9, seed=11, max_tokens=30, ignore_eos=True, repetition_penalty=1.1)
PROMPTS = [
    [3 + (17 * place) % 240 for place in range(50)],
    [5, 9, 5, 9, 5],
    [3 + (31 * place) % 250 for place in range(37)],
]


@dataclass
class Room(Drafting):
    """Room for this many drafts in turn, whoever asks: whether they pay is nobody's question."""

    turns: tuple[int, ...]

    def __post_init__(self) -> None:
        self._turns = cycle(self.turns)

    def drafts(self, sequence: Sequence, most: int) -> Drafts | None:
        asked = sequence.request.sampling.speculation
        most = min(most, next(self._turns))
        return Drafts(most) if most > 0 and (asked is None or not asked.is_off) else None


ALWAYS, AT_TIMES = (4,), (3, 0, 7, 1, 0, 0, 2)


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    found = {name: make_tiny(name, tmp_path_factory.mktemp(name))[0] for name in MODELS}
    smaller = {"num_hidden_layers": 1, "num_attention_heads": 2, "hidden_size": 32, "intermediate_size": 64}
    found["small"] = make_tiny("llama", tmp_path_factory.mktemp("small"), **smaller)[0]
    return found


MakeLLM = Callable[..., LLM]


@pytest.fixture(scope="module", params=BACKENDS)
def make_llm(request: pytest.FixtureRequest, folders: dict[str, Path]) -> Iterator[MakeLLM]:
    made: dict[tuple[str, EngineConfig], LLM] = {}

    def make(model: str, draft: str | None, way: EngineConfig = CONFIG, turns: tuple[int, ...] = AT_TIMES) -> LLM:
        """The same again where the same is asked for: it has forgotten all prompts."""
        method = "off" if draft is None else f"draft:{folders[draft]}"
        config = replace(way, backend=request.param, speculate=method)
        if request.param == "reference":
            config = replace(config, quantise=None)
        llm = made.get((model, config))
        if llm is None:
            llm = made[model, config] = LLM.from_assembly(assemble(load_checkpoint(folders[model]), None, config))
        llm.engine.scheduler.clear_prefixes()
        llm.engine.scheduler.draft(None if draft is None else Room(turns))
        return llm

    yield make
    for llm in made.values():
        llm.close()


def answers(results: list[GenerationResult]) -> list[list[list[int]]]:
    return [[sample.token_ids for sample in result.samples] for result in results]


def shares(llm: LLM, results: list[GenerationResult]) -> tuple[int, int]:
    """Drafts computed and drafts that held; and nothing went wrong on the way."""
    assert llm.engine.backend.speculator.faults == []  # type: ignore[attr-defined]
    llm.engine.scheduler.check()
    timings = [sample.timing for result in results for sample in result.samples]
    return sum(timing.drafts_computed for timing in timings), sum(timing.drafts_held for timing in timings)


def all_held(llm: LLM, results: list[GenerationResult], at_least: int = 10) -> bool:
    computed, held = shares(llm, results)
    assert computed >= at_least
    return held == computed


@pytest.mark.parametrize("way", list(WAYS))
def test_answers_are_those_without_a_drafter(make_llm: MakeLLM, way: str) -> None:
    model, config = WAYS[way]
    sampling = [GREEDY, replace(SEEDED, n=2), replace(SEEDED, logprobs=2, seed=3)]
    plain = make_llm(model, None, config).generate(PROMPTS, sampling)
    llm = make_llm(model, "small", config)
    for _ in range(2):  # the second time prompts are found again
        drafted = llm.generate(PROMPTS, sampling)
        assert answers(drafted) == answers(plain)
        assert shares(llm, drafted)[0] >= 40
    assert drafted[0].samples[0].timing.cached_tokens == 48


@pytest.mark.parametrize("way", list(WAYS))
@pytest.mark.parametrize("turns", [ALWAYS, AT_TIMES])
def test_a_model_that_drafts_for_itself_is_always_right(make_llm: MakeLLM, way: str, turns: tuple[int, ...]) -> None:
    model, config = WAYS[way]
    llm = make_llm(model, model, config, turns)
    for _ in range(2):
        results = llm.generate(PROMPTS, [GREEDY, replace(GREEDY, n=3), GREEDY])
        assert all_held(llm, results, at_least=60)
    assert results[0].samples[0].timing.cached_tokens == 48


@pytest.mark.parametrize("model", MODELS)
def test_blocks_that_nobody_drafted_for_are_caught_up_with(make_llm: MakeLLM, model: str) -> None:
    """A request that wants no drafts leaves blocks without the drafter's KV; another finds them by their prefix."""
    llm = make_llm(model, model, CHUNKED)
    for prompt in PROMPTS[0], PROMPTS[2]:
        llm.generate([prompt], replace(GREEDY, speculation=NO_DRAFTS))
        longer = [*prompt, 7, 8, 9]
        results = llm.generate([longer, longer], [GREEDY, replace(GREEDY, speculation=SpeculationParams("draft"))])
        assert results[0].samples[0].timing.cached_tokens >= 32
        assert all_held(llm, results)


@pytest.mark.parametrize("model", MODELS)
def test_a_reused_block_holds_no_ones_drafts(make_llm: MakeLLM, model: str) -> None:
    """Few blocks, many prompts: what a block held before is never taken for its new tokens' KV."""
    llm = make_llm(model, model, _little_kv(make_llm, model))
    for start in range(8):
        prompt = [3 + (start * 13 + 7 * place) % 240 for place in range(40)]
        llm.generate([prompt], replace(GREEDY, speculation=NO_DRAFTS if start % 2 else None))
        results = llm.generate([[*prompt, 5]], GREEDY)
        assert results[0].samples[0].timing.cached_tokens == 32
        assert all_held(llm, results)


def test_a_guess_that_was_wrong_leaves_nothing_behind(make_llm: MakeLLM, monkeypatch: pytest.MonkeyPatch) -> None:
    """Seeded answers are seldom what the model finds likeliest. Whatever was guessed before, the first guess of each
    turn is the likeliest token behind those that came."""
    llm = make_llm("llama", "llama")
    (drafter,) = llm.engine.backend.companion_drafters  # type: ignore[attr-defined]
    firsts: list[tuple[int, int]] = []
    propose = drafter.propose

    def recorded(asks: list[Ask]) -> list[Proposal]:
        found: list[Proposal] = propose(asks)
        firsts.extend(
            (len(drafter._rows[ask.seq_id].tokens), one.token_ids[0]) for ask, one in zip(asks, found, strict=True)
        )
        return found

    monkeypatch.setattr(drafter, "propose", recorded)
    for seed in range(4):
        firsts.clear()
        results = llm.generate([PROMPTS[2]], replace(SEEDED, seed=seed, temperature=1.0, logprobs=1, max_tokens=60))
        computed, held = shares(llm, results)
        assert held < computed and len(firsts) > 10
        likeliest = [position.top[0][0] for position in results[0].samples[0].logprobs]
        assert [first for _, first in firsts] == [likeliest[known - len(PROMPTS[2])] for known, _ in firsts]


def count_tokens(drafter: Any, monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Of each pass that the drafter makes from now on, the tokens."""
    score, sizes = drafter._model.score, []

    def counted(batch: Batch) -> Scores:
        sizes.append(batch.num_tokens)
        found: Scores = score(batch)
        return found

    monkeypatch.setattr(drafter._model, "score", counted)
    return sizes


def test_what_is_found_again_is_not_computed_again(make_llm: MakeLLM, monkeypatch: pytest.MonkeyPatch) -> None:
    llm = make_llm("llama", "llama", turns=ALWAYS)
    (drafter,) = llm.engine.backend.companion_drafters  # type: ignore[attr-defined]
    sizes, totals = count_tokens(drafter, monkeypatch), []
    for _ in range(2):
        sizes.clear()
        llm.generate([PROMPTS[0]], GREEDY)
        totals.append(sum(sizes))
    assert totals[0] - totals[1] == 48  # of 50 tokens, those in whole blocks


@pytest.mark.parametrize("model", MODELS)
def test_with_little_kv_streams_give_way_and_return(make_llm: MakeLLM, model: str) -> None:
    little = _little_kv(make_llm, model)
    sampling = replace(GREEDY, max_tokens=60)
    plain = make_llm(model, None).generate(PROMPTS, sampling)
    llm = make_llm(model, model, little)
    results = llm.generate(PROMPTS, sampling)
    assert answers(results) == answers(plain)
    assert sum(result.samples[0].timing.preemptions for result in results) >= 1
    assert all_held(llm, results)
    other = make_llm(model, "small", little).generate(PROMPTS, [replace(SEEDED, max_tokens=60)] * 3)
    assert answers(other) == answers(make_llm(model, None).generate(PROMPTS, [replace(SEEDED, max_tokens=60)] * 3))


def _little_kv(make_llm: MakeLLM, model: str) -> EngineConfig:
    """So little that one of the longest contexts fits, and not much more. Whoever comes first is read first, whatever
    the clock says: all of them are there before the first ends."""
    config = replace(CONFIG, max_context=112, max_tokens_per_step=16, policy="fifo")
    layout, resolved = (llm := make_llm(model, model, config)).assembly.resolved.layout, llm.assembly.resolved
    blocks = sum(group.num_blocks for group in layout.groups)
    a_block = resolved.kv_bytes // blocks
    return replace(config, kv=KVConfig(memory_bytes=LITTLE_KV * a_block * len(layout.groups) + a_block))


def test_a_long_lag_is_caught_up_with_over_several_turns(make_llm: MakeLLM) -> None:
    """Nobody asks for drafts for a long time: prompts are then not read along with, and later caught up with."""
    llm = make_llm("llama", "llama", replace(CONFIG, max_tokens_per_step=16), (0,))
    llm.generate([PROMPTS[1]] * 2, replace(GREEDY, max_tokens=100))
    llm.engine.scheduler.draft(Room(ALWAYS))
    results = llm.generate([list(range(3, 120))], replace(GREEDY, max_tokens=40))
    timing = results[0].samples[0].timing
    assert timing.cached_tokens == 0 and timing.prefill_chunks >= 8
    assert all_held(llm, results)
    assert timing.draft_steps <= 40 - 7  # the first turns went by with catching up


def test_a_stream_beyond_the_drafters_context_gets_no_drafts(
    make_llm: MakeLLM, folders: dict[str, Path], tmp_path: Path
) -> None:
    shorter = make_tiny("llama", tmp_path / "short", max_position_embeddings=48)[0]
    folders["shorter"] = shorter
    llm = make_llm("llama", "shorter", turns=ALWAYS)
    results = llm.generate(PROMPTS, GREEDY)
    assert answers(results) == answers(make_llm("llama", None).generate(PROMPTS, GREEDY))
    computed, _ = shares(llm, results)
    assert computed and results[0].samples[0].timing.drafts_computed == 0


def test_nobodys_first_token_waits_for_the_drafter(make_llm: MakeLLM, monkeypatch: pytest.MonkeyPatch) -> None:
    """It reads a prompt's last chunk when the next step begins; of an answer of one token, never."""
    llm = make_llm("llama", "llama", replace(CONFIG, run_ahead=False))
    (drafter,) = llm.engine.backend.companion_drafters  # type: ignore[attr-defined]
    sizes = count_tokens(drafter, monkeypatch)
    stream = llm.stream(PROMPTS[0], replace(GREEDY, max_tokens=3))
    next(event for event in stream if isinstance(event, TokenEvent))
    assert sizes == []
    assert len([event for event in stream if isinstance(event, TokenEvent)]) == 2
    assert sizes[0] == len(PROMPTS[0])
    sizes.clear()
    for prompt in PROMPTS[1:]:
        llm.generate([prompt], replace(GREEDY, max_tokens=1))
    assert sizes == []


def test_a_drafter_that_fails_takes_nothing_with_it(make_llm: MakeLLM, monkeypatch: pytest.MonkeyPatch) -> None:
    plain = make_llm("llama", None).generate(PROMPTS, GREEDY)
    llm = make_llm("llama", "small", replace(CONFIG, max_context=144))
    (drafter,) = llm.engine.backend.companion_drafters  # type: ignore[attr-defined]
    score, num_calls = drafter._model.score, 0

    def failing(batch: Batch) -> Scores:
        nonlocal num_calls
        num_calls += 1
        if num_calls % 3 == 0:
            raise MemoryError("no room for the draft")
        scores: Scores = score(batch)
        return replace(scores, highest=[None] * len(scores.highest)) if num_calls % 3 == 1 else scores

    monkeypatch.setattr(drafter._model, "score", failing)
    for _ in range(2):
        assert answers(llm.generate(PROMPTS, GREEDY)) == answers(plain)
    faults = llm.engine.backend.speculator.faults  # type: ignore[attr-defined]
    assert faults[0].startswith("the drafter draft failed: ") and faults[-1] == "the drafter draft is asked no more"
    llm.engine.scheduler.check()


@pytest.mark.slow
def test_smollm2_drafts_for_itself(smollm2_path: Path) -> None:
    """Real weights, quantised, and a real tokenizer: no draft fails."""
    prompts = ["The two phases of a request are", "def fibonacci(n):\n    ", "Once upon a time " * 60]
    config = replace(CONFIG, backend="cpu", max_context=512, max_tokens_per_step=128, quantise=None, kv=KVConfig())
    with LLM(str(smollm2_path), replace(config, speculate="off")) as llm:
        plain = llm.generate(prompts, GREEDY)
    with LLM(str(smollm2_path), replace(config, speculate=f"draft:{smollm2_path}")) as llm:
        llm.engine.scheduler.draft(Room(ALWAYS))
        results = llm.generate(prompts, GREEDY)
        assert all_held(llm, results, at_least=60)
        assert answers(results) == answers(plain)
