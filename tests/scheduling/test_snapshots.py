"""Where snapshots of states are taken: at the ends of chunks and in answers, under what is left of the slots; and what
they are good for: the next turn, samples, resumption. The fake backend checks every state that is read."""

from __future__ import annotations

import pytest

from tests.scheduling.loop import Loop, layout, request
from twostroke.core.sequence import FinishReason, Sequence
from twostroke.core.step import Drafts, Step
from twostroke.scheduling.plan import Drafting


def chunks(loop: Loop, sequence: Sequence) -> list[tuple[int, int]]:
    work = [chunk for step in loop.backend.steps for chunk in step.prefills if chunk.seq_id == sequence.seq_id]
    return [(chunk.start, chunk.end) for chunk in work]


def saves(loop: Loop, sequence: Sequence) -> list[int]:
    """The lengths at which its states were to be kept."""
    return sorted({one.length for step in loop.backend.steps for one in step.saves if one.seq_id == sequence.seq_id})


def run_one(loop: Loop, name: str, prompt: list[int] | range, **options: object) -> Sequence:
    (sequence,) = loop.add(request(name, prompt, **{"max_tokens": 1, **options}))  # type: ignore[arg-type]
    loop.run()
    loop.check_output(sequence)
    return sequence


@pytest.mark.parametrize("depth", [0, 1])
def test_the_last_chunk_is_cut_where_a_follow_up_can_begin(depth: int) -> None:
    loop = Loop(layout((None, 40), states=6), depth=depth, snapshot_tokens=4)
    first = run_one(loop, "first", range(15))
    assert chunks(loop, first) == [(0, 12), (12, 15)] and saves(loop, first) == [12]
    again = run_one(loop, "again", range(15))
    assert again.timing.cached_tokens == 12 and chunks(loop, again) == [(12, 15)] and saves(loop, again) == []
    follow_up = run_one(loop, "follow-up", range(39))
    assert follow_up.timing.cached_tokens == 12 and saves(loop, follow_up) == [36]


def test_a_short_prompt_is_not_cut() -> None:
    """A chunk more is a step more: it pays for so many tokens only."""
    loop = Loop(layout((None, 40), states=6), snapshot_tokens=16)
    sequence = run_one(loop, "short", range(18))
    assert chunks(loop, sequence) == [(0, 16), (16, 18)] and saves(loop, sequence) == [16]
    sequence = run_one(loop, "shorter", range(40, 55))
    assert chunks(loop, sequence) == [(0, 15)] and saves(loop, sequence) == []


def test_chunks_end_with_blocks_and_snapshots_keep_their_distance() -> None:
    loop = Loop(layout((None, 40), states=9), snapshot_tokens=8, max_tokens_per_step=7)
    sequence = run_one(loop, "long", range(30))
    assert chunks(loop, sequence) == [(0, 4), (4, 8), (8, 12), (12, 16), (16, 20), (20, 24), (24, 28), (28, 30)]
    assert saves(loop, sequence) == [8, 16, 24, 28]
    # Steps that are shorter than a block still bring it on.
    loop = Loop(layout((None, 40), states=9), snapshot_tokens=4, max_tokens_per_step=3)
    assert chunks(loop, run_one(loop, "long", range(10)))[-1] == (8, 10)


def test_where_prompts_part_a_state_is_kept_for_the_third() -> None:
    """The first is kept at its own end, which the second does not share: it reads all, and is kept where they part."""
    loop = Loop(layout((None, 60), states=9), snapshot_tokens=4)
    system = list(range(22))
    run_one(loop, "first", [*system, *range(100, 110)])
    second = run_one(loop, "second", [*system, *range(200, 209)])
    assert second.timing.cached_tokens == 0
    assert second.timing.prefix is not None and second.timing.prefix[:] == (0, "state", 20)
    assert saves(loop, second) == [20, 28]
    third = run_one(loop, "third", [*system, *range(300, 309)])
    assert third.timing.cached_tokens == 20 and third.timing.prefix is not None
    assert third.timing.prefix.kind == "differs"


@pytest.mark.parametrize("depth", [0, 2])
@pytest.mark.parametrize("drafts", [0, 3])
def test_the_next_turn_finds_the_answer(depth: int, drafts: int) -> None:
    """With drafts about, nobody knows at first which step comes to the end of a block; whichever does keeps the
    state."""
    loop = Loop(layout((None, 60), states=9), depth=depth, drafts=drafts, snapshot_tokens=4, seed=5)
    first = run_one(loop, "first", range(10), max_tokens=23)
    lengths = saves(loop, first)
    assert lengths[0] == 8 and lengths[-1] == 32 and set(lengths) <= set(range(8, 36, 4))
    turn = run_one(loop, "turn", [*first.tokens, *range(5)])
    assert turn.timing.cached_tokens == 32


class InTurn(Drafting):
    """Always three drafts, guessed by the backend."""

    def drafts(self, sequence: Sequence, most: int) -> Drafts | None:
        return Drafts(min(3, most))


@pytest.mark.parametrize("held", [0, 1, 2, 3])
def test_a_save_goes_with_every_step_that_may_make_it(held: int) -> None:
    loop = Loop(layout((None, 60), states=9), depth=1, drafting=InTurn(), snapshot_tokens=8)
    loop.backend.num_holding = lambda most: min(held, most)
    sequence = run_one(loop, "first", range(3), max_tokens=30)
    carried = [step for step in loop.backend.steps if any(save.length == 16 for save in step.saves)]
    assert len(carried) >= (2 if held < 3 else 1)
    assert len({save.slot for step in carried for save in step.saves if save.length == 16}) == 1
    assert run_one(loop, "turn", [*sequence.tokens, 1]).timing.cached_tokens == 32


def test_samples_begin_from_the_prompts_state() -> None:
    loop = Loop(layout((None, 60), states=9), snapshot_tokens=100)
    samples = loop.add(request("several", range(15), n=3, max_tokens=6))
    loop.run()
    loop.check_outputs()
    assert saves(loop, samples[0]) == [12] and [one.timing.cached_tokens for one in samples] == [0, 12, 12]
    targets = [restore.target for step in loop.backend.steps for restore in step.restores]
    assert len(targets) == 2


def test_without_a_prefix_cache_only_samples_share() -> None:
    loop = Loop(layout((None, 60), states=9), snapshot_tokens=4, prefix_caching=False)
    alone = run_one(loop, "alone", range(15), max_tokens=20)
    assert chunks(loop, alone) == [(0, 15)] and saves(loop, alone) == []
    loop.add(request("several", range(15), n=2, max_tokens=2))
    loop.run()
    loop.check_outputs()
    assert run_one(loop, "again", range(15)).timing.cached_tokens == 0


def test_a_preempted_sequence_goes_on_from_its_last_state() -> None:
    loop = Loop(layout((None, 12), states=9), depth=1, snapshot_tokens=4, kv_watermark=0.0)
    old = loop.add(request("old", range(9), max_tokens=20))[0]
    young = loop.add(request("young", range(20, 29), max_tokens=20))[0]
    loop.run()
    loop.check_outputs()
    assert young.timing.preemptions and not old.timing.preemptions
    resumed = [restore for step in loop.backend.steps for restore in step.restores if restore.seq_id == young.seq_id]
    assert len(resumed) == young.timing.preemptions


def test_whoever_runs_goes_before_snapshots() -> None:
    loop = Loop(layout((None, 60), states=3), snapshot_tokens=4)
    for number in range(2):
        run_one(loop, f"before{number}", range(20 * number, 20 * number + 10))
    assert loop.scheduler.counts().blocks[1].cached == 2
    for number in range(3):
        loop.add(request(f"now{number}", range(100 + 20 * number, 110 + 20 * number), max_tokens=12))
    steps = [loop.move() for _ in range(4)]
    assert max(len(step.decodes) for step in steps if step is not None) == 3
    assert not any(step.saves for step in steps[-2:] if isinstance(step, Step)), "every slot is somebody's own"
    loop.run()
    loop.check_outputs()


def test_nothing_is_found_of_a_step_that_failed() -> None:
    loop = Loop(layout((None, 60), states=6), depth=1, snapshot_tokens=4)
    loop.add(request("first", range(15), max_tokens=4))
    step = loop.launch()
    assert step is not None and step.saves
    loop.in_flight.clear()
    (advance,) = loop.scheduler.fail(step, "the device is gone", loop.now_s)
    assert advance.sequence.finish_reason is FinishReason.ERROR
    loop.scheduler.check()
    assert loop.scheduler.counts().blocks[1].free == 6
    assert run_one(loop, "again", range(15)).timing.cached_tokens == 0


def test_an_abort_gives_back_what_was_to_be_kept() -> None:
    loop = Loop(layout((None, 60), states=6), depth=1, snapshot_tokens=4)
    loop.add(request("first", range(15), max_tokens=4))
    step = loop.launch()
    assert step is not None and step.saves
    loop.scheduler.abort("first")
    loop.scheduler.check()
    assert loop.scheduler.counts().blocks[1].free == 6
    loop.run()
    assert run_one(loop, "again", range(15)).timing.cached_tokens == 0
