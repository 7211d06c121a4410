"""How many replicas a load asks for: each reason by itself, against arithmetic done by hand, and what always holds."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.properties import examples
from twostroke.cluster.demand import (
    LevelSignals,
    Signals,
    Wish,
    fitting_streams,
    once_read,
    wanted,
)
from twostroke.core.service_level import STREAMS_SHARE

GAP_S = 0.05 / STREAMS_SHARE
"""Promised, so that a step may take 50 ms."""


def prefill(**given: object) -> Wish:
    return wanted(Signals(**given)).prefill  # type: ignore[arg-type]


def decode(horizon_s: float = 60.0, **given: object) -> Wish:
    return wanted(Signals(**given), horizon_s).decode  # type: ignore[arg-type]


def test_an_idle_server_wants_no_more_than_itself() -> None:
    wishes = wanted(Signals(max_running=8))
    assert (wishes.prefill.replicas, wishes.prefill.load) == (wishes.decode.replicas, wishes.decode.load) == (1, 0.0)
    assert "nothing to read" in wishes.prefill.why and "no stream runs" in wishes.decode.why


def test_prompts_are_read_in_time_by_as_many_as_the_backlog_holds_promises() -> None:
    chat = LevelSignals("chat", waiting=20, prefill_backlog_s=1.25, ttft_s=0.5)
    wish = prefill(waiting=20, levels=(chat,))
    assert (wish.load, wish.replicas) == (2.5, 3)
    assert "1.25 s of prompts" in wish.why and "chat promises a first token in 500 ms" in wish.why


def test_a_class_waits_for_those_that_are_promised_earlier_and_not_for_the_others() -> None:
    chat = LevelSignals("chat", prefill_backlog_s=0.4, ttft_s=0.5)
    slow = LevelSignals("documents", prefill_backlog_s=9.6, ttft_s=5.0)
    never = LevelSignals("batch", prefill_backlog_s=1000.0)
    wish = prefill(waiting=50, levels=(never, slow, chat))
    assert wish.load == 2.0 and "documents promises a first token in 5 s" in wish.why  # (0.4 + 9.6) / 5


def test_no_more_replicas_than_there_are_prompts() -> None:
    one = LevelSignals("chat", prefill_backlog_s=30.0, ttft_s=0.5)
    assert prefill(waiting=2, running_prefill=1, levels=(one,)).load == 3.0


def test_who_will_be_late_is_in_time_where_that_much_less_is_read_before() -> None:
    late = LevelSignals("default", waiting=4, ttft_headroom_s=-3.0)
    wish = prefill(waiting=9, prefill_backlog_s=4.0, levels=(late,))
    assert wish.load == 4.0 and "of default is expected 3 s late, behind 4 s of prompts" in wish.why
    wish = prefill(waiting=9, prefill_backlog_s=2.0, levels=(late,))
    assert wish.load == 1.0 and "would not bring it in time" in wish.why


def test_a_replica_that_reads_most_of_the_time_is_not_given_more() -> None:
    wish = prefill(prefill_busy=0.45)
    assert wish.load == 0.5 and wish.replicas == 1 and "45% of the last minute" in wish.why
    assert prefill(prefill_busy=0.95).replicas == 2


def test_kv_that_fills_up_is_looked_at_ahead() -> None:
    given = {"running_decode": 10, "kv_occupancy": 0.45}
    assert decode(**given).load == 0.5 and "not filling up" in decode(**given).why
    wish = decode(horizon_s=30.0, kv_full_s=20.0, **given)
    assert wish.load == pytest.approx((0.45 + 0.55 * 1.5) / 0.9, abs=1e-3) and wish.replicas == 2
    assert "45% of KV, and it should be full in 20 s; looked 30 s ahead" in wish.why
    assert decode(horizon_s=0.0, kv_full_s=20.0, **given).load == 0.5
    assert decode(kv_full_s=0.0, **given).load == 10.0  # a replica for each, and no more


def test_streams_that_find_no_slot() -> None:
    wish = decode(running_decode=8, waiting=12, max_running=8)
    assert wish.load == 2.5 and wish.why == "all 8 running slots are taken, and 12 wait"
    assert decode(running_decode=4, waiting=12, max_running=8).load == 0.5  # what they wait for is something else


def test_gaps_shrink_with_streams_down_to_that_of_one() -> None:
    chat = LevelSignals("chat", running=8, itl_s=GAP_S)
    given = {"running_decode": 8, "max_running": 64, "levels": (chat,)}
    wish = decode(stream_step_s=0.11, alone_step_s=0.01, **given)
    assert wish.load == 2.5 and "a step of 8 streams takes 110 ms, a single one 10 ms" in wish.why
    assert decode(stream_step_s=0.1, **given).load == 2.0  # nothing is known of a single one
    wish = decode(stream_step_s=0.11, alone_step_s=0.06, **given)
    assert wish.load == 1.0 and "replicas would not help" in wish.why
    idle = {**given, "levels": (LevelSignals("chat", itl_s=GAP_S),)}
    assert decode(stream_step_s=0.11, alone_step_s=0.01, **idle).load == 0.125  # nobody of that class runs


def test_where_steps_are_short_enough_the_tokens_a_second_count() -> None:
    """With 10 ms and 1 ms a stream, 40 streams make steps of 50 ms and 800 tokens a second: that is one replica."""
    chat = LevelSignals("chat", running=8, itl_s=GAP_S)

    def load(streams: int) -> float:
        step_s = 0.01 + 0.001 * streams
        given = {"stream_step_s": step_s, "alone_step_s": 0.01, "levels": (chat,)}
        return decode(running_decode=streams, max_running=1000, **given).load

    for streams in (10, 20, 40):
        assert load(streams) == pytest.approx(streams / (0.01 + 0.001 * streams) / 800, abs=1e-3)
    assert load(80) == pytest.approx(80 / 40, abs=1e-3)  # it does not keep up: each of its streams needs a place
    # The same tokens a second on one replica or on two: 40 streams in steps of 50 ms, or twice 6.67 of 16.7 ms.
    assert 2 * load(7) == pytest.approx(load(40), abs=0.04)


def test_streams_that_fit_are_counted_where_costs_are_known() -> None:
    chat = LevelSignals("chat", running=8, itl_s=GAP_S)
    assert fitting_streams((chat,), 64, lambda number: 0.02 + 0.001 * number) == 30
    assert fitting_streams((chat,), 16, lambda number: 0.02 + 0.001 * number) == 16
    assert fitting_streams((chat,), 64, lambda number: 1.0) == 0
    assert fitting_streams((replace(chat, running=0),), 64, lambda number: 0.0) is None
    given = {"running_decode": 15, "max_running": 64, "alone_step_s": 0.02, "fitting_streams": 30, "levels": (chat,)}
    wish = decode(stream_step_s=0.04, **given)
    assert wish.load == 0.625 and "15 streams takes 40 ms and 30 would fit" in wish.why  # 15 / 30 * 50 / 40
    assert decode(stream_step_s=0.06, **given).load == 1.333  # too long, whatever it should take: 40 / 30


def test_replicas_that_do_both_follow_the_larger() -> None:
    wishes = wanted(Signals(running_decode=8, waiting=8, max_running=8, prefill_busy=0.4))
    assert wishes.both == wishes.decode and wishes.decode.load > wishes.prefill.load


seconds = st.none() | st.floats(0.0, 1e6)
levels = st.builds(
    LevelSignals,
    name=st.sampled_from(["a", "b"]),
    waiting=st.integers(0, 50),
    running=st.integers(0, 50),
    prefill_backlog_s=seconds,
    ttft_s=st.none() | st.floats(1e-3, 1e4),
    itl_s=st.none() | st.floats(1e-4, 1e3),
    ttft_headroom_s=st.none() | st.floats(-1e5, 1e5),
    itl_headroom_s=st.none() | st.floats(-1e3, 1e3),
)
anything = st.builds(
    Signals,
    waiting=st.integers(0, 50),
    running_prefill=st.integers(0, 50),
    running_decode=st.integers(0, 50),
    max_running=st.none() | st.integers(1, 50),
    prefill_backlog_s=seconds,
    prefill_busy=st.none() | st.floats(0.0, 1.0),
    kv_occupancy=st.floats(0.0, 1.0),
    kv_full_s=seconds,
    stream_step_s=st.none() | st.floats(0.0, 1e3),
    alone_step_s=st.none() | st.floats(0.0, 1e3),
    fitting_streams=st.none() | st.integers(0, 50),
    levels=st.lists(levels, max_size=3).map(tuple),
)


@pytest.mark.hypothesis
@given(signals=anything, horizon_s=st.floats(0.0, 86400.0))
@examples(200)
def test_whatever_is_signalled_the_wish_is_finite_and_has_a_sentence(signals: Signals, horizon_s: float) -> None:
    wishes = wanted(signals, horizon_s)
    work = signals.waiting + signals.running_prefill + signals.running_decode
    for wish in (wishes.prefill, wishes.decode):
        assert math.isfinite(wish.load) and wish.load >= 0.0 and wish.why
        assert wish.replicas == max(1, math.ceil(wish.load))
        assert wish.load <= max(2.0, work), "more replicas than there is work"
    assert wishes.both.load == max(wishes.prefill.load, wishes.decode.load)


def test_what_is_read_before_another_replica_is_there_asks_for_none() -> None:
    chat = LevelSignals("chat", waiting=20, prefill_backlog_s=12.0, ttft_s=0.5, ttft_headroom_s=-3.0)
    burst = Signals(waiting=20, prefill_backlog_s=12.0, prefill_busy=0.2, levels=(chat,))
    assert wanted(burst).prefill.load > 10.0
    ahead = once_read(burst, 30.0)  # it reads 24 of the 30 seconds for them
    assert ahead.prefill_backlog_s == 0.0 and wanted(ahead).prefill.load == pytest.approx(0.2 / 0.9, abs=1e-3)
    some = once_read(burst, 10.0)
    assert some.prefill_backlog_s == pytest.approx(4.0) and some.levels[0].prefill_backlog_s == pytest.approx(4.0)
    full = once_read(replace(burst, prefill_busy=1.0), 60.0)
    assert full.prefill_backlog_s == 12.0 and wanted(full).prefill.load == 20.0  # one a prompt
