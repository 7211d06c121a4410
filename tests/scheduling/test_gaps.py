"""Streams that may write beside each other, on a virtual clock: promised gaps are kept under any load, a class that
refuses says when to come back, and nobody waits forever for it. A stream costs a millisecond, a prompt's token a tenth
of it."""

from __future__ import annotations

from dataclasses import replace
from math import inf

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.properties import examples
from tests.scheduling.fake_backend import fake_format
from tests.scheduling.test_policies import SPEC, Played
from twostroke.core.errors import PromiseError
from twostroke.core.handoff import Handoff
from twostroke.core.request import Request
from twostroke.core.sampling_params import SamplingParams
from twostroke.core.sequence import Sequence
from twostroke.core.service_level import STREAMS_SHARE, ServiceLevel, ServiceLevels, WhenLate, most_streams
from twostroke.cost.floor import StepWork
from twostroke.planner.simulate import Replica, ReplicaSpec
from twostroke.scheduling.policies import POLICIES
from twostroke.scheduling.scheduler import Scheduler

ITL_S = 0.02
FITTING = int(1e3 * ITL_S * STREAMS_SHARE)
"""Streams of a millisecond each."""


def play(levels: ServiceLevels, policy: str = "fair", **changes: object) -> Played:
    def seconds(work: StepWork) -> float:
        return 1e-3 * work.num_queries + 1e-4 * (work.num_tokens - work.num_queries)

    return Played(policy, levels=levels, step_seconds=seconds, **changes)


def levels_with(when_late: WhenLate = "queue", ttft_s: float | None = 1.0, **default: object) -> ServiceLevels:
    default_level = ServiceLevel("default", **default)  # type: ignore[arg-type]
    return ServiceLevels((default_level, ServiceLevel("chat", ttft_s, ITL_S, when_late=when_late)))


def measured(played: Played, answer: int) -> Played:
    """It knows how long answers of this class are."""
    for _ in range(8):
        played.add(0.0, 10, "chat", answer=answer)
    played.end()
    played.sequences.clear()
    return played


def arriving(played: Played, number: int, every_s: float = 0.05, answer: int = 200) -> tuple[list[Sequence], list[str]]:
    taken, refused, began_s = [], [], played.replica.now_s
    for place in range(number):
        try:
            taken.append(played.add(began_s + place * every_s, 10, "chat", answer=answer))
        except PromiseError as error:
            refused.append(str(error))
    return taken, refused


def test_a_class_that_refuses_takes_as_many_as_keep_their_gaps() -> None:
    """Sixty come within three seconds, of whom seventeen can write at a time, for three or four seconds each."""
    played = measured(play(levels_with("refuse")), 200)
    taken, refused = arriving(played, 60)
    played.end()
    assert len(taken) >= FITTING and len(refused) > 20
    assert all(one.timing.kept_itl is True and one.timing.kept_ttft is True for one in taken)
    unpromised = measured(play(levels_with("refuse"), "fifo"), 200)
    taken, _ = arriving(unpromised, 60)
    unpromised.end()
    assert not any(one.timing.kept_itl for one in taken), "whoever does not look at promises lets them pile up"


def test_whoever_is_told_when_to_come_back_is_in_time_then_and_not_much_before() -> None:
    played = measured(play(levels_with("refuse")), 400)
    began_s = played.replica.now_s
    for _ in range(FITTING):
        played.add(began_s, 10, "chat", answer=400)
    played.replica.play_until(began_s + 1.5)
    now_s = played.replica.now_s
    with pytest.raises(PromiseError, match="it would come in") as caught:
        played.add(now_s, 10, "chat", answer=5)
    assert caught.value.retry_after_s > 2.0
    with pytest.raises(PromiseError):
        played.add(now_s + 0.6 * caught.value.retry_after_s, 10, "chat", answer=5)
    served = played.add(now_s + caught.value.retry_after_s + 0.2, 10, "chat", answer=5)
    played.end()
    assert served.timing.kept_ttft is True and served.timing.kept_itl is True


def test_a_class_that_waits_keeps_its_gaps_and_everybody_is_served() -> None:
    played = play(levels_with())
    taken, refused = arriving(played, 60)
    played.end()
    assert not refused and all(one.timing.kept_itl is True for one in taken)
    waited = taken[-1].timing.queue
    assert waited.gaps_s == pytest.approx(taken[-1].timing.queue_s, abs=0.1) and waited.gaps_s > 0.9
    assert waited.slots_s == 0.0


def test_a_document_waits_for_streams_that_were_promised_gaps_and_is_not_passed() -> None:
    """Chats come without end. The context of a document counts as a stream's, and whoever comes later is later."""
    played = play(levels_with(ttft_s=30.0), "slack")
    for _ in range(FITTING):
        played.add(0.0, 10, "chat", answer=100)
    document = played.add(0.1, 300, "default", answer=20)
    for number in range(1500):
        played.add(0.2 + 0.11 * number, 10, "chat", answer=100)
        if document.is_finished:
            break
    assert document.is_finished and document.timing.queue.gaps_s > 0.0
    assert (document.timing.ttft_s or inf) < 65.0
    played.end()


@pytest.mark.parametrize("default", [{}, {"is_derived": True}])
def test_who_was_promised_no_gap_by_name_waits_for_no_stream(default: dict[str, object]) -> None:
    """Nobody without a file of classes is held, or refused, for what is derived."""
    played = play(levels_with(**default))
    streams = [played.add(0.0, 10, "default", answer=500) for _ in range(60)]
    played.replica.play_until(2.0)
    assert all(one.num_output for one in streams)
    played.end()
    assert all(one.timing.queue.gaps_s == 0.0 for one in streams)


def test_a_promise_that_the_hardware_cannot_keep_holds_nobody() -> None:
    chat = ServiceLevel("chat", ttft_s=1.0, itl_s=0.0005)
    played = play(ServiceLevels((ServiceLevel("default"), chat)))
    streams = [played.add(0.0, 10, "chat", answer=200) for _ in range(30)]
    played.replica.play_until(1.0)
    assert all(one.num_output for one in streams)
    refusing = ServiceLevels((ServiceLevel("default"), replace(chat, when_late="refuse")))
    with pytest.raises(PromiseError, match=r"gaps of 0.5 ms, and a token of this answer takes 1 with nobody") as caught:
        play(refusing).add(0.0, 10, "chat", answer=200)
    assert caught.value.retry_after_s == inf
    served = play(refusing).add(0.0, 10, "chat", answer=1)
    assert served.max_total_tokens == 11, "an answer of one token has no gap"


def test_whose_own_gaps_alone_are_at_stake_waits_no_longer_than_its_first_token_may() -> None:
    """Sixty streams that were promised nothing write for a long time. A chat keeps one of its two promises, rather than
    none; it does not then hold up others for the one that is lost."""
    played = play(levels_with())
    for _ in range(40):
        played.add(0.0, 10, "default", answer=2000)
    played.replica.play_until(2.0)
    chat = played.add(2.0, 10, "chat", answer=100)
    played.replica.play_until(4.0)
    assert chat.timing.kept_ttft is True and (chat.timing.ttft_s or 0.0) > 0.5
    later = played.add(4.0, 10, "default", answer=10)
    played.replica.play_until(5.0)
    assert (later.timing.ttft_s or inf) < 0.5
    played.end()
    assert chat.timing.kept_itl is False


def test_prompts_without_an_answer_to_write_wait_for_no_gap() -> None:
    played = play(levels_with())
    for _ in range(FITTING):
        played.add(0.0, 10, "chat", answer=400)
    played.replica.play_until(1.0)
    one_token = played.add(1.0, 5, "chat", answer=1)
    played.replica.play_until(1.5)
    assert one_token.is_finished
    played.end()


def test_a_tenant_whose_streams_fill_the_steps_gives_one_up_for_another_tenant() -> None:
    played = play(levels_with("refuse"))
    for _ in range(FITTING):
        played.add(0.0, 10, "chat", "flood", answer=2000)
    played.replica.play_until(3.0)
    quiet = played.add(3.0, 10, "chat", "quiet", answer=50)
    played.replica.play_until(5.0)
    assert quiet.timing.kept_ttft is True and quiet.timing.kept_itl is True
    assert sum(one.timing.gave_way for one in played.sequences) == 1
    played.end()


def test_how_many_fit() -> None:
    assert most_streams(ITL_S, 100, lambda number: 1e-3 * number) == FITTING
    assert most_streams(ITL_S, 5, lambda number: 1e-3 * number) == 5
    assert most_streams(ITL_S, 100, lambda number: 1.0) == 0


promised = st.none() | st.sampled_from([0.001, 0.01, ITL_S, 0.1])


@examples(40)
@given(
    data=st.data(),
    policy=st.sampled_from(sorted(POLICIES)),
    itls=st.tuples(promised, promised, promised),
    max_running=st.sampled_from([2, 8, 64]),
    fixed_s=st.sampled_from([0.0, 0.005]),
    factor=st.sampled_from([1.0, 0.3, 5.0]),
)
def test_nobody_starves_whatever_gaps_were_promised(
    data: st.DataObject,
    policy: str,
    itls: tuple[float | None, ...],
    max_running: int,
    fixed_s: float,
    factor: float,
) -> None:
    """Any classes, tenants and lengths, and costs that are foreseen wrongly: everybody ends, in about the time that all
    of it takes one by one."""
    names = ("default", "one", "other")
    ttfts = [data.draw(st.none() | st.sampled_from([0.05, 2.0])) for _ in names]
    classes = [ServiceLevel(name, ttft, itl) for name, ttft, itl in zip(names, ttfts, itls, strict=True)]
    played = Played(
        policy,
        levels=ServiceLevels(tuple(classes)),
        step_seconds=lambda work: factor * (fixed_s + 1e-3 * work.num_tokens) if work.num_tokens else 0.0,
        scheduler=replace(SPEC.scheduler, max_running=max_running),
    )
    at_s = whole_s = 0.0
    for _ in range(data.draw(st.integers(2, 40))):
        at_s += data.draw(st.sampled_from([0.0, 0.01, 0.3]))
        num_tokens, answer = data.draw(st.integers(1, 300)), data.draw(st.integers(1, 60))
        tenant, level = data.draw(st.sampled_from(["", "a", "b"])), data.draw(st.sampled_from(names))
        played.add(at_s, num_tokens, level, tenant, answer)
        whole_s += factor * ((fixed_s + 1e-3) * answer + (num_tokens // 16 + 1) * fixed_s + 1e-3 * num_tokens)
    played.end()
    given_way = sum(one.timing.recomputed_tokens for one in played.sequences)
    assert all(one.is_finished for one in played.sequences)
    assert played.replica.now_s <= at_s + whole_s + factor * (fixed_s + 1e-3) * given_way + 1.0


class Off(Replica):
    """Its scheduler expects steps to take so many times what they do."""

    def __init__(self, spec: ReplicaSpec, factor: float) -> None:
        super().__init__(spec)
        self.scheduler = Scheduler(
            spec.scheduler,
            spec.layout,
            policy=spec.policy,
            levels=spec.levels,
            step_seconds=lambda work: factor * spec.step_seconds(work),
        )


@pytest.mark.parametrize("run_ahead", [False, True])
@pytest.mark.parametrize("factor", [0.9, 1.0, 1.1])
@pytest.mark.parametrize("policy", ["slack", "fair"])
def test_whoever_waits_for_its_own_gaps_is_let_in_while_its_first_token_is_in_time(
    policy: str, factor: float, run_ahead: bool
) -> None:
    """Whenever it comes, in whatever part of a step, and with predictions a tenth off. Forty streams that were promised
    nothing write longer than it may wait."""
    for place in range(20):
        played = play(levels_with(), policy, run_ahead=run_ahead)
        played.replica = Off(played.replica._spec, factor)
        for _ in range(40):
            played.add(0.0, 10, "default", answer=300)
        at_s = 2.0 + 0.0137 * place
        chats = [played.add(at_s, num_tokens, "chat", answer=5) for num_tokens in (10, 10, (10, 100, 300)[place % 3])]
        played.replica.play_until(at_s + 2.0)
        assert [one.timing.kept_ttft for one in chats] == [True] * 3, (place, [one.timing.ttft_s for one in chats])
        assert min(one.timing.ttft_s or 0.0 for one in chats) > 0.5, "it does wait"


@pytest.mark.parametrize("gone_s", [0.0, 0.7, 0.9])
def test_what_went_by_at_another_engine_counts_against_how_long_it_may_be_held(gone_s: float) -> None:
    """Of the second that its first token may take, most is over when it is handed over."""
    played = play(levels_with())
    for _ in range(40):
        played.add(0.0, 10, "default", answer=300)
    played.replica.play_until(2.0)
    handoff = Handoff("lease", "a reader", 0, (), "a model", fake_format(SPEC.layout), 60.0, read_s=gone_s)
    sampling = SamplingParams(max_tokens=100, ignore_eos=True)
    request = Request("chat", (1,) * 10, sampling, arrival_s=2.0, service_level="chat", handoff=handoff)
    played.replica.add(request)
    (chat,) = played.replica.scheduler._samples["chat"]
    played.replica.play_until(4.0)
    assert chat.request.asked_s == pytest.approx(2.0 - gone_s) and chat.timing.kept_ttft is True
