"""The loop and the offline API over real weights: events, stop conditions, errors, concurrency. Determinism has a
file of its own."""

from __future__ import annotations

import threading
from dataclasses import replace

import pytest
from tests.engine.conftest import WAYS, MakeLLM

from twostroke import SamplingParams
from twostroke.core.errors import BadRequestError
from twostroke.core.events import PrefillProgress, TokenEvent
from twostroke.core.request import Request
from twostroke.core.step import Step
from twostroke.engine.offline import LLM

CHAT = [{"role": "user", "content": "What is the capital of France? Answer in one short sentence."}]
GREEDY = SamplingParams(temperature=0.0, max_tokens=32)


@pytest.fixture
def llm(make_llm: MakeLLM) -> LLM:
    return make_llm(WAYS["plain"])


def test_chat_answers_and_stops_by_itself(smollm2_llm: LLM) -> None:
    llm = smollm2_llm
    result = llm.chat(CHAT, GREEDY)[0]
    assert "Paris" in result.text
    assert result.finish_reason == "stop"
    assert result.token_ids[-1] in llm.tokenizer.eos_token_ids
    assert "<|im_end|>" not in result.text


def test_stream_gives_the_same_text_piece_by_piece(llm: LLM) -> None:
    ids = llm.chat_token_ids(CHAT)
    events = list(llm.stream(ids, GREEDY))
    tokens = [event for event in events if isinstance(event, TokenEvent)]
    assert "".join(event.text for event in tokens) == llm.generate(ids, GREEDY)[0].text
    assert len(tokens) > 3
    assert [event.finish_reason is not None for event in tokens] == [False] * (len(tokens) - 1) + [True]


def test_timing_adds_up(llm: LLM) -> None:
    timing = llm.generate("Timing: one two three four", replace(GREEDY, max_tokens=6, ignore_eos=True))[0].timing
    assert timing.prompt_tokens > 0
    assert len(timing.token_times_s) == 6
    assert timing.ttft_s == pytest.approx((timing.queue_s or 0) + (timing.prefill_s or 0))
    assert timing.tpot_s is not None and timing.decode_s == pytest.approx(timing.tpot_s * 5)
    assert timing.finished_s is not None and timing.finished_s >= timing.token_times_s[-1]
    assert timing.token_times_s == sorted(timing.token_times_s)
    assert timing.prefill_compute_s > 0 and timing.decode_compute_s > 0


def test_long_prompts_report_progress(make_llm: MakeLLM) -> None:
    llm = make_llm(WAYS["chunked"])
    events = list(llm.stream("A prompt that is longer than seven tokens, to be read in parts. " * 2, GREEDY))
    progress = [event for event in events if isinstance(event, PrefillProgress)]
    assert len(progress) > 1
    assert [event.computed_tokens for event in progress] == sorted(event.computed_tokens for event in progress)


def test_stop_string_across_tokens_ends_the_text_before_it(llm: LLM) -> None:
    whole = llm.chat(CHAT, GREEDY)[0].text
    stop = whole[len(whole) // 2 : len(whole) // 2 + 5]
    cut = llm.chat(CHAT, replace(GREEDY, stop=(stop,)))[0]
    assert cut.finish_reason == "stop"
    assert cut.text == whole[: whole.index(stop)]
    kept = llm.chat(CHAT, replace(GREEDY, stop=(stop,), include_stop_string=True))[0]
    assert kept.text == whole[: whole.index(stop) + len(stop)]


def test_the_last_event_names_the_stop_string(llm: LLM) -> None:
    ids = llm.chat_token_ids(CHAT)
    whole = llm.generate(ids, GREEDY)[0].text
    stop = whole[len(whole) // 2 : len(whole) // 2 + 5]
    for stops, found in ((("never written", stop), stop), (("never written",), None)):
        *earlier, last = [e for e in llm.stream(ids, replace(GREEDY, stop=stops)) if isinstance(e, TokenEvent)]
        assert last.stop_string == found and all(event.stop_string is None for event in earlier)


def test_min_tokens_keeps_it_writing(smollm2_llm: LLM) -> None:
    llm = smollm2_llm
    short = llm.chat(CHAT, GREEDY)[0]
    longer = llm.chat(CHAT, replace(GREEDY, min_tokens=len(short.token_ids) + 5, max_tokens=64))[0]
    assert len(longer.token_ids) >= len(short.token_ids) + 5


def test_logprobs_of_chosen_and_top_tokens(llm: LLM) -> None:
    result = llm.generate("The capital of France is", replace(GREEDY, max_tokens=4, logprobs=3))[0]
    assert len(result.samples[0].logprobs) == 4
    for token_id, logprobs in zip(result.token_ids, result.samples[0].logprobs, strict=True):
        assert logprobs.token_id == token_id
        assert logprobs.top[0] == (token_id, pytest.approx(logprobs.logprob))
        assert [value for _, value in logprobs.top] == sorted((value for _, value in logprobs.top), reverse=True)


def test_prompt_logprobs_are_the_same_however_the_prompt_is_chunked(make_llm: MakeLLM) -> None:
    sampling = SamplingParams(temperature=0.0, max_tokens=1, prompt_logprobs=2)
    prompt = "The quick brown fox jumps over the lazy dog, and the dog sleeps on."
    whole = make_llm(WAYS["plain"]).generate(prompt, sampling)[0]
    parts = make_llm(WAYS["chunked"]).generate(prompt, sampling)[0]
    assert [entry.token_id for entry in whole.prompt_logprobs] == list(whole.prompt_token_ids[1:])
    assert [entry.logprob for entry in parts.prompt_logprobs] == pytest.approx(
        [entry.logprob for entry in whole.prompt_logprobs], abs=1e-3
    )


def test_bad_requests_are_refused_before_anything_runs(llm: LLM) -> None:
    with pytest.raises(BadRequestError, match="prompt"):
        llm.generate("", GREEDY)
    with pytest.raises(BadRequestError, match=str(llm.assembly.resolved.max_context)):
        llm.generate([1] * 5000, GREEDY)
    with pytest.raises(BadRequestError):
        llm.generate([llm.assembly.checkpoint.spec.vocab_size], GREEDY)
    with pytest.raises(BadRequestError, match="already in use"):
        request = Request("twice", (1, 2, 3), GREEDY)
        try:
            llm.engine.add(request)
            llm.engine.add(request)
        finally:
            llm.engine.abort("twice")
    assert llm.generate("Still here:", replace(GREEDY, max_tokens=2))[0].token_ids


def test_a_bad_prompt_in_a_batch_leaves_nothing_behind(llm: LLM) -> None:
    with pytest.raises(BadRequestError):
        llm.generate(["fine", [1] * 5000], GREEDY)
    while llm.engine.busy:
        llm.engine.step()
    llm.engine.scheduler.check()


def test_leaving_a_stream_early_frees_its_blocks(llm: LLM) -> None:
    for _ in llm.stream("Count: one, two, three, four,", replace(GREEDY, max_tokens=400, ignore_eos=True)):
        break
    while llm.engine.busy:
        llm.engine.step()
    assert not llm.engine.scheduler.has_work
    llm.engine.scheduler.check()


def test_threads_share_the_engine(llm: LLM) -> None:
    sampling = replace(GREEDY, max_tokens=8, ignore_eos=True)
    prompts = ["One fish", "Two fish", "Red fish"]
    expected = [result.token_ids for result in llm.generate(prompts, sampling)]
    answers: dict[int, list[int]] = {}

    def answer(index: int) -> None:
        answers[index] = llm.generate(prompts[index], sampling)[0].token_ids

    threads = [threading.Thread(target=answer, args=(index,)) for index in range(len(prompts))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert [answers[index] for index in range(len(prompts))] == expected


def test_a_backend_that_fails_a_step_fails_its_requests_only(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    launch = llm.engine.backend.launch
    broken = {"left": 1}

    def failing(step: Step) -> object:
        ticket = launch(step)
        if not broken["left"]:
            return ticket
        broken["left"] -= 1

        class Failing:
            ready = True

            def result(self) -> object:
                ticket.result()
                raise RuntimeError("out of luck")

        return Failing()

    monkeypatch.setattr(llm.engine.backend, "launch", failing)
    result = llm.generate("This one fails", GREEDY)[0]
    assert result.finish_reason == "error"
    assert "out of luck" in (result.error or "")
    assert llm.generate("This one does not", replace(GREEDY, max_tokens=3))[0].finish_reason in ("length", "stop")
    llm.engine.scheduler.check()
