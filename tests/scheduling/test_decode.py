from __future__ import annotations

import pytest

from tests.scheduling.fake_backend import expected_output
from tests.scheduling.loop import VOCAB_SIZE, Loop, layout, request
from twostroke.core.sequence import FinishReason


def test_every_stream_gets_its_slot_and_prefill_what_is_left() -> None:
    loop = Loop(layout((None, 60)), max_tokens_per_step=8)
    for name in ("a", "b", "c"):
        loop.add(request(name, [ord(name)], max_tokens=12))
    loop.turn()
    loop.add(request("d", range(20), max_tokens=2))
    loop.run()
    for step in loop.backend.steps[1:5]:  # while d is read, 5 tokens at a time, nobody stalls
        assert len(step.decodes) == 3
        assert step.num_prefill_tokens == 5
    loop.check_outputs()


@pytest.mark.parametrize("depth", [0, 1])
def test_max_tokens_are_never_passed(depth: int) -> None:
    """Also one step ahead, when the host does not know the last token yet."""
    loop = Loop(layout((None, 20)), depth=depth)
    sequence = loop.add(request("a", range(3), max_tokens=5))[0]
    loop.run()
    assert sequence.finish_reason is FinishReason.LENGTH
    assert sequence.num_output == 5
    assert sum(len(step.decodes) for step in loop.backend.steps) == 4, "no slot was wasted"


def third_token(prompt: range) -> int:
    """A stop id for a request over this prompt: what it samples third, and not before."""
    output = expected_output(request("a", prompt), 0, len(prompt) + 3, VOCAB_SIZE)
    assert output[2] not in output[:2]
    return output[2]


@pytest.mark.parametrize(("depth", "wasted"), [(0, 0), (1, 1)])
def test_a_stop_id_ends_the_answer_and_run_ahead_costs_one_slot(depth: int, wasted: int) -> None:
    stop = third_token(range(4))
    loop = Loop(layout((None, 20)), depth=depth)
    sequence = loop.add(request("a", range(4), max_tokens=9, stop_token_ids=(stop,)))[0]
    loop.run()
    assert sequence.finish_reason is FinishReason.STOP
    assert sequence.output_token_ids[-1] == stop and sequence.num_output == 3
    assert sum(len(step.decodes) for step in loop.backend.steps) == 2 + wasted
    loop.check_outputs()


def test_eos_stops_unless_it_is_ignored() -> None:
    stop = third_token(range(4))
    loop = Loop(layout((None, 20)))
    obeys = loop.add(request("a", range(4), max_tokens=9, eos=frozenset({stop})))[0]
    ignores = loop.add(request("b", range(4), max_tokens=9, eos=frozenset({stop}), ignore_eos=True))[0]
    loop.run()
    assert (obeys.finish_reason, obeys.num_output) == (FinishReason.STOP, 3)
    assert (ignores.finish_reason, ignores.num_output) == (FinishReason.LENGTH, 9)


def test_a_stop_token_before_min_tokens_does_not_stop() -> None:
    stop = third_token(range(4))
    loop = Loop(layout((None, 20)))
    sequence = loop.add(request("a", range(4), max_tokens=9, min_tokens=5, stop_token_ids=(stop,)))[0]
    loop.backend._sample = lambda row, drafts: [stop]  # type: ignore[method-assign]  # a sampler that does not care
    loop.run()
    assert (sequence.finish_reason, sequence.num_output) == (FinishReason.STOP, 5)


def test_a_step_ahead_never_holds_a_token_that_is_being_sampled() -> None:
    loop = Loop(layout((None, 20)), depth=1)
    loop.add(request("a", range(3), max_tokens=6))
    first = loop.launch()
    second = loop.launch()
    assert first is not None and second is not None
    assert [chunk.samples for chunk in first.prefills] == [True]
    assert [slot.position for slot in second.decodes] == [3] and not second.prefills
    loop.run()
    loop.check_outputs()


def test_timing_tells_the_phases_apart() -> None:
    loop = Loop(layout((None, 20)), max_tokens_per_step=4)
    loop.now_s = 10.0
    sequence = loop.add(request("a", range(7), max_tokens=3, arrival_s=10.0))[0]
    loop.run()
    timing = sequence.timing
    assert (timing.arrival_s, timing.scheduled_s, timing.finished_s) == (10.0, 11.0, 18.0)
    assert timing.token_times_s == [14.0, 16.0, 18.0]
    assert (timing.prompt_tokens, timing.cached_tokens, timing.recomputed_tokens) == (7, 0, 0)
    assert (timing.prefill_chunks, timing.prefill_compute_s, timing.decode_compute_s) == (2, 0.5, 0.5)
