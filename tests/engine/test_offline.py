"""The offline API's promises to callers: threads, streams left early or collected, several samples, bad arguments."""

from __future__ import annotations

import gc
import threading
from collections.abc import Iterator
from dataclasses import replace

import pytest
from tests.engine.conftest import WAYS, MakeLLM

from twostroke import SamplingParams
from twostroke.core.errors import BadRequestError
from twostroke.core.events import Event, TokenEvent
from twostroke.core.speculation import NO_DRAFTS
from twostroke.engine.offline import LLM

GREEDY = SamplingParams(temperature=0.0, max_tokens=16, ignore_eos=True)


@pytest.fixture
def llm(make_llm: MakeLLM) -> LLM:
    return make_llm(WAYS["plain"])


def assert_idle(llm: LLM) -> None:
    while llm.engine.busy:
        llm.engine.step()
    counts = llm.engine.scheduler.counts()
    assert counts.running_prefill == counts.running_decode == counts.blocks[0].used == 0
    llm.engine.scheduler.check()


def test_two_streams_move_side_by_side(llm: LLM) -> None:
    """The best of a few: a thread that others keep from running reads late what was told in time."""
    leads: list[int] = []
    while not leads or min(leads) > 12:  # one after the other it would be 24
        assert len(leads) < 20, leads
        order = order_of_two(llm)
        assert order.count("Ann") == order.count("Bob") == 24
        both = order[: min(len(order) - 1 - order[::-1].index(name) for name in ("Ann", "Bob"))]
        leads.append(abs(both.count("Ann") - both.count("Bob")))
    assert_idle(llm)


def order_of_two(llm: LLM) -> list[str]:
    order: list[str] = []
    start = threading.Barrier(2)

    def read(name: str) -> None:
        start.wait()
        stream = llm.stream(f"{name} counts: one, two,", replace(GREEDY, max_tokens=24, speculation=NO_DRAFTS))
        order.extend(name for event in stream if isinstance(event, TokenEvent))

    threads = [threading.Thread(target=read, args=(name,)) for name in ("Ann", "Bob")]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout=120)
    return order


def test_a_stream_collected_in_the_middle_of_a_step_ends_it_without_a_deadlock(
    llm: LLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Holder:
        """In a cycle with itself: only the garbage collector ends its stream."""

        def __init__(self, stream: Iterator[Event]) -> None:
            self.stream, self.itself = stream, self
            next(stream)

    step = llm.engine.step

    def collecting_step() -> list[Event]:
        monkeypatch.undo()  # once is enough: a collection takes a while in a process that has run many tests
        gc.collect()
        return step()

    Holder(llm.stream("Forgotten, but not gone:", replace(GREEDY, max_tokens=400)))
    monkeypatch.setattr(llm.engine, "step", collecting_step)
    answers: list[int] = []
    thread = threading.Thread(target=lambda: answers.extend(llm.generate("Next:", GREEDY)[0].token_ids), daemon=True)
    thread.start()
    thread.join(timeout=120)
    assert len(answers) == 16
    assert_idle(llm)


def test_samples_have_their_own_stop_strings_and_logprobs(llm: LLM) -> None:
    sampling = SamplingParams(temperature=0.9, seed=5, n=3, max_tokens=12, ignore_eos=True, logprobs=2)
    whole = llm.generate("Three ways to say it:", sampling)[0]
    stop = next(text for text in whole.samples[1].text[3:] if text.isalpha())
    cut = llm.generate("Three ways to say it:", replace(sampling, stop=(stop,)))[0]
    for before, after in zip(whole.samples, cut.samples, strict=True):
        if stop in before.text:
            assert after.finish_reason == "stop"
            assert after.text == before.text[: before.text.index(stop)]
        else:
            assert (after.finish_reason, after.text) == ("length", before.text)
        assert after.token_ids == before.token_ids[: len(after.token_ids)]
        assert [entry.token_id for entry in after.logprobs] == after.token_ids
        assert all(len(entry.top) == 2 for entry in after.logprobs)
    assert cut.samples[1].finish_reason == "stop"


def test_a_stop_string_in_the_last_token_that_fits_is_the_reason(llm: LLM) -> None:
    whole = llm.generate("The last token counts:", GREEDY)[0]
    for count in range(1, 17):
        before = llm.tokenizer.decode(whole.token_ids[: count - 1])
        piece = llm.tokenizer.decode(whole.token_ids[:count])[len(before) :]
        if piece.strip() and piece not in before:
            break
    cut = llm.generate("The last token counts:", replace(GREEDY, max_tokens=count, stop=(piece,)))[0]
    assert cut.finish_reason == "stop"
    assert cut.text == before
    assert len(cut.token_ids) == count


def test_the_same_seed_draws_the_same_answer_again(llm: LLM) -> None:
    sampling = SamplingParams(temperature=1.0, seed=11, max_tokens=10, ignore_eos=True)
    first, second = (llm.generate("Roll the dice:", sampling)[0].token_ids for _ in range(2))
    assert first == second
    assert llm.generate("Roll the dice:", replace(sampling, seed=12))[0].token_ids != first


@pytest.mark.parametrize("prompts", [3, 1.5, None, [None], [1.5], [["a", "b"]], [[1, None]], {"a": 1}])
def test_what_is_no_prompt_is_refused_in_a_sentence(llm: LLM, prompts: object) -> None:
    with pytest.raises(BadRequestError, match="prompt"):
        llm.generate(prompts, GREEDY)  # type: ignore[arg-type]


@pytest.mark.parametrize("messages", ["hello", {"role": "user", "content": "hello"}])
def test_what_is_no_conversation_is_refused_in_a_sentence(llm: LLM, messages: object) -> None:
    with pytest.raises(BadRequestError, match="messages must be a list"):
        llm.chat(messages, GREEDY)  # type: ignore[arg-type]


def test_numbers_of_sampling_parameters_and_prompts_must_agree(llm: LLM) -> None:
    with pytest.raises(BadRequestError, match="2 sampling parameters were given for 1 prompts"):
        llm.generate("one", [GREEDY, GREEDY])
    assert llm.generate([], GREEDY) == []


def test_a_closed_llm_says_so(make_llm: MakeLLM) -> None:
    llm = LLM.from_assembly(make_llm(WAYS["plain"]).assembly)
    llm._closed = True  # the backend itself is shared with other tests, and stays open
    with pytest.raises(BadRequestError, match="closed"):
        llm.generate("too late", GREEDY)
