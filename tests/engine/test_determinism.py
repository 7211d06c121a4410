"""Greedy tokens do not depend on company, chunking, caching, preemption or run-ahead: each pair is a test, on the
reference and on the CPU backend, over SmolLM2's real weights."""

from __future__ import annotations

from dataclasses import replace

import pytest
from tests.engine.conftest import WAYS, MakeLLM

from twostroke import SamplingParams
from twostroke.config import KVConfig
from twostroke.core.events import TokenEvent
from twostroke.engine.offline import LLM

NUM_TOKENS = 18
GREEDY = SamplingParams(temperature=0.0, max_tokens=NUM_TOKENS, ignore_eos=True)
PROMPTS = [
    "The two phases of a request are",
    "In the beginning the engine read the whole prompt, token after token, and only then did it",
    "def fibonacci(n):\n    ",
    "Once upon a time, in a small village by the sea, there lived a lighthouse keeper who",
]


@pytest.fixture(scope="module")
def alone(make_llm: MakeLLM) -> dict[str, list[int]]:
    """Each prompt by itself on a fresh cache: what every other way must give."""
    llm = make_llm(WAYS["uncached"])
    return {prompt: llm.generate(prompt, GREEDY)[0].token_ids for prompt in PROMPTS}


def check(llm: LLM) -> None:
    """Nothing is left over, and no block is lost."""
    while llm.engine.busy:
        llm.engine.step()
    llm.engine.scheduler.check()


def test_answers_are_of_the_asked_length_and_differ(alone: dict[str, list[int]]) -> None:
    assert all(len(tokens) == NUM_TOKENS for tokens in alone.values())
    assert len({tuple(tokens) for tokens in alone.values()}) == len(PROMPTS)


@pytest.mark.parametrize("way", list(WAYS))
def test_in_a_batch(make_llm: MakeLLM, alone: dict[str, list[int]], way: str) -> None:
    llm = make_llm(WAYS[way])
    for result in llm.generate(PROMPTS, GREEDY):
        assert result.prompt is not None
        assert result.token_ids == alone[result.prompt]
    check(llm)


def test_chunked(make_llm: MakeLLM, alone: dict[str, list[int]]) -> None:
    llm = make_llm(replace(WAYS["chunked"], kv=replace(WAYS["chunked"].kv, prefix_caching=False)))
    result = llm.generate(PROMPTS[1], GREEDY)[0]
    assert result.timing.prefill_chunks > 1
    assert result.token_ids == alone[PROMPTS[1]]


def test_on_a_prefix_hit(make_llm: MakeLLM, alone: dict[str, list[int]]) -> None:
    llm = make_llm(WAYS["plain"])
    llm.generate(PROMPTS[3], GREEDY)
    again = llm.generate(PROMPTS[3], GREEDY)[0]
    assert again.timing.cached_tokens > 0
    assert again.token_ids == alone[PROMPTS[3]]


def test_preempted_and_resumed(make_llm: MakeLLM, alone: dict[str, list[int]]) -> None:
    plain = make_llm(WAYS["plain"])
    bytes_per_block = plain.assembly.resolved.kv_bytes // plain.assembly.resolved.layout.groups[0].num_blocks
    # Seven blocks hold every prompt, any one of the answers, and not the four answers together.
    llm = make_llm(replace(WAYS["plain"], max_context=7 * 16, kv=KVConfig(memory_bytes=7 * bytes_per_block)))
    results = llm.generate(PROMPTS, GREEDY)
    assert sum(result.timing.preemptions for result in results) > 0
    for result in results:
        assert result.prompt is not None
        assert result.token_ids == alone[result.prompt]
    check(llm)


@pytest.mark.parametrize("abort_after", [1, 3, 9])
def test_beside_an_aborted_neighbour(make_llm: MakeLLM, alone: dict[str, list[int]], abort_after: int) -> None:
    llm = make_llm(WAYS["plain"])
    kept = llm.request(PROMPTS[0], GREEDY)
    aborted = llm.request(PROMPTS[1] + " and so on", replace(GREEDY, max_tokens=400))  # too long for drafts to end it
    for request in (aborted, kept):
        llm.engine.add(request)
    tokens: list[int] = []
    steps = 0
    reasons = {}
    while llm.engine.busy:
        for event in llm.engine.step():
            if isinstance(event, TokenEvent):
                if event.request_id == kept.request_id:
                    tokens.extend(event.token_ids)
                if event.finish_reason is not None:
                    reasons[event.request_id] = event.finish_reason.value
        steps += 1
        if steps == abort_after:
            llm.engine.abort(aborted.request_id)
    assert tokens == alone[PROMPTS[0]]
    assert reasons == {kept.request_id: "length", aborted.request_id: "abort"}
    check(llm)


def test_seeded_samples_depend_on_their_own_seed_only(make_llm: MakeLLM) -> None:
    sampling = SamplingParams(temperature=0.9, top_p=0.95, seed=7, max_tokens=12, ignore_eos=True)
    llm = make_llm(WAYS["plain"])
    alone_tokens = llm.generate(PROMPTS[2], sampling)[0].token_ids
    others = SamplingParams(temperature=1.3, seed=8, max_tokens=12, ignore_eos=True)
    together = llm.generate([PROMPTS[0], PROMPTS[2], PROMPTS[3]], [others, sampling, others])
    assert together[1].token_ids == alone_tokens


def test_n_samples_share_the_prompt_and_differ(make_llm: MakeLLM) -> None:
    llm = make_llm(WAYS["uncached"])
    sampling = SamplingParams(temperature=1.0, seed=3, n=3, max_tokens=8, ignore_eos=True)
    result = llm.generate(PROMPTS[3] + " " + PROMPTS[1], sampling)[0]
    assert len({tuple(sample.token_ids) for sample in result.samples}) == 3
    assert result.samples[0].timing.cached_tokens == 0
    assert all(sample.timing.cached_tokens >= 16 for sample in result.samples[1:])
    check(llm)
