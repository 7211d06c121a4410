"""What a sample waited for, as the scheduler's own moves bring it about, on a clock that the test moves."""

from __future__ import annotations

import pytest

from tests.scheduling.loop import Loop, layout, request

ROOM = layout((None, 64))


def test_slots() -> None:
    loop = Loop(ROOM, max_tokens_per_step=16, max_running=1)
    loop.add(request("first", range(4), max_tokens=5))
    loop.move()
    late = loop.add(request("second", range(10, 14), max_tokens=2, arrival_s=loop.now_s))[0]
    loop.run()
    queue = late.timing.queue
    assert (queue.running, queue.running_limit, queue.ahead) == (1, 1, 0)
    assert queue.slots_s == pytest.approx(late.timing.queue_s) and queue.slots_s > 0.0
    assert queue.blocks_s == queue.prompts_s == queue.sibling_s == 0.0


def test_blocks() -> None:
    loop = Loop(layout((None, 8)), max_tokens_per_step=16)
    loop.add(request("first", range(16), max_tokens=8))
    loop.move()
    late = loop.add(request("second", range(15, 31), max_tokens=2, arrival_s=loop.now_s))[0]
    loop.run()
    queue = late.timing.queue
    assert late.timing.queue_s is not None
    assert queue.blocks_s == late.timing.queue_s - 1.0 > 0.0  # the first look at it comes a second after it did
    assert queue.slots_s == 0.0 and queue.prompts_s == 1.0  # until then, behind a step full of the other's prompt
    assert queue.refused_s is not None and queue.short_blocks[0] > 0


def test_prompts_before_it() -> None:
    loop = Loop(ROOM, max_tokens_per_step=16)
    loop.add(request("first", range(31), max_tokens=2))
    late = loop.add(request("second", range(8, 16), max_tokens=2, arrival_s=loop.now_s))[0]
    loop.run()
    queue = late.timing.queue
    assert (queue.ahead, queue.ahead_tokens) == (1, 31)
    assert late.timing.queue_s is not None
    assert queue.prompts_s == late.timing.queue_s - 1.0 > 0.0
    assert queue.slots_s == queue.blocks_s == 0.0


def test_siblings() -> None:
    loop = Loop(ROOM, max_tokens_per_step=16)
    samples = loop.add(request("both", range(20), max_tokens=2, n=2))
    loop.run()
    assert samples[0].timing.queue.sibling_s == 0.0
    assert samples[1].timing.queue.sibling_s > 0.0


def test_an_idle_scheduler_makes_nobody_wait_for_what_is_over() -> None:
    loop = Loop(ROOM, max_tokens_per_step=16, max_running=1)
    loop.add(request("first", range(4), max_tokens=2))
    loop.run()
    late = loop.add(request("second", range(10, 14), max_tokens=2, arrival_s=loop.now_s))[0]
    loop.run()
    assert late.timing.queue.slots_s == 0.0
