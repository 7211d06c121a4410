"""Refusals are truthful: within the error of the costs that they go by, and for every sample of a request. On a virtual
clock."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import replace
from math import inf

import pytest

from tests.scheduling.test_gaps import FITTING, ITL_S
from tests.scheduling.test_gaps import play as playing_streams
from tests.scheduling.test_policies import SHAPE, SPEC, Played
from twostroke.core.errors import PromiseError
from twostroke.core.handoff import unread
from twostroke.core.kv_layout import KVGroup, KVLayout
from twostroke.core.request import Request
from twostroke.core.sampling_params import SamplingParams
from twostroke.core.sequence import Sequence
from twostroke.core.service_level import ServiceLevel, ServiceLevels
from twostroke.core.step import Step
from twostroke.cost.floor import StepWork, work_of
from twostroke.cost.hardware import Ceilings
from twostroke.cost.step_cost import Coefficients, StepCost
from twostroke.cost.trust import TRUSTED_ERROR, at_least_s, error_of
from twostroke.planner.simulate import Replica
from twostroke.scheduling.advance import SequenceAdvance
from twostroke.scheduling.scheduler import Scheduler

TIMES_TOO_MUCH = 10.0


class Learning(Replica):
    """Its scheduler goes by costs that begin far from what steps take, and learn."""

    def __init__(self, levels: ServiceLevels, noise: Callable[[], float] = lambda: 1.0) -> None:
        """`noise`: how many times as long as it should a step is measured to take."""
        truth = StepCost(SHAPE, Ceilings(1e9, 1e9, "a test"), Coefficients(step_s=1e-3))
        super().__init__(replace(SPEC, levels=levels, step_seconds=truth.seconds))
        assumed = Ceilings(1e9 / TIMES_TOO_MUCH, 1e9 / TIMES_TOO_MUCH, "assumed")
        self.truth, self.cost = truth, StepCost(SHAPE, assumed, Coefficients(step_s=1e-3 * TIMES_TOO_MUCH))
        self.scheduler = Scheduler(
            SPEC.scheduler,
            SPEC.layout,
            levels=levels,
            step_seconds=self.cost.seconds,
            step_error=lambda: error_of(self.cost),
        )
        self._noise = noise

    def _take_in(self, step: Step, seconds: float, now_s: float, num_tokens: int = 1) -> list[SequenceAdvance]:
        for _ in range(num_tokens):
            self.cost.observe(work_of(step), self._noise() * seconds / num_tokens)
        return super()._take_in(step, seconds, now_s, num_tokens)

    def ask(
        self, number: int, level: str, num_tokens: int = 60, answer: int = 4, gone_s: float = 0.0
    ) -> list[Sequence]:
        request = Request(
            f"asked-{number}",
            (number, *range(1, num_tokens)),
            SamplingParams(max_tokens=answer, ignore_eos=True),
            arrival_s=self.now_s,
            service_level=level,
            handoff=unread("in vain", gone_s) if gone_s else None,
        )
        self.add(request)
        return self.scheduler._samples[request.request_id]


def strict(ttft_s: float | None = None, itl_s: float | None = None) -> ServiceLevels:
    return ServiceLevels((ServiceLevel("default"), ServiceLevel("strict", ttft_s, itl_s, when_late="refuse")))


@pytest.mark.parametrize("promise", ["ttft_s", "itl_s"])
def test_costs_of_which_nothing_is_known_refuse_nobody_and_those_learnt_refuse_truthfully(
    promise: str,
) -> None:
    """Twice of what it takes is promised, a fifth of what is predicted at first. Were it refused, nothing would run,
    and so nothing be learnt."""
    prompt, stream = StepWork(((0, 60),), 1), StepWork(contexts=[61])
    truth = Learning(strict()).truth.seconds(prompt if promise == "ttft_s" else stream)
    replica = Learning(strict(**{promise: 2.0 * truth}))
    predicted = replica.cost.seconds(prompt if promise == "ttft_s" else stream)
    assert predicted > 4.0 * truth and error_of(replica.cost) is None
    for number in range(100):
        (served,) = replica.ask(number, "strict")
        replica.play_until(inf)
        assert served.is_finished
    assert error_of(replica.cost) is not None
    # What can never be in time is refused now.
    late = Learning(strict(**{promise: 0.5 * truth}))
    for number in range(100):
        late.ask(number, "default", 20 + number * 37 % 80)
        late.play_until(inf)
    with pytest.raises(PromiseError, match="another class may take it") as refused:
        late.ask(number + 1, "strict")
    assert refused.value.retry_after_s == inf


# Costs that are off


class Doubted(Replica):
    """Its scheduler goes by costs that are too long by their error."""

    def __init__(self, error: float, ttft_s: float) -> None:
        super().__init__(replace(SPEC, levels=strict(ttft_s)))
        self.scheduler = Scheduler(
            SPEC.scheduler,
            SPEC.layout,
            levels=strict(ttft_s),
            step_seconds=lambda work: (1.0 + error) * SPEC.step_seconds(work),
            step_error=lambda: error,
        )

    def ask(self, name: str, num_tokens: int, level: str = "strict", gone_s: float = 0.0) -> Sequence:
        """A token takes a millisecond to read. `gone_s`: what went by at another engine, which read it in vain."""
        request = Request(
            name,
            (len(name), *range(1, num_tokens)),
            SamplingParams(max_tokens=1, ignore_eos=True),
            arrival_s=self.now_s,
            service_level=level,
            priority=-100 * (level == "default"),
            handoff=unread("in vain", gone_s) if gone_s else None,
        )
        self.add(request)
        return self.scheduler._samples[name][0]


@pytest.mark.parametrize("error", [0.1, 0.5, 3.0])
def test_a_request_is_refused_only_where_it_is_late_whatever_the_error(error: float) -> None:
    """What takes as long as was promised is predicted to be late. A little more is refused, however far costs are off:
    there is no error from which on nobody is."""
    replica = Doubted(error, 0.1)
    served = replica.ask("served", 98)
    replica.play_until(inf)
    assert served.timing.kept_ttft
    with pytest.raises(PromiseError, match="reading this prompt alone takes") as refused:
        replica.ask("refused", 103)
    assert refused.value.retry_after_s == inf


@pytest.mark.parametrize("error", [0.1, 0.5])
def test_seconds_to_come_back_in_are_those_predicted(error: float) -> None:
    """A prompt of half a second goes before it, and has been read then."""
    replica = Doubted(error, 0.3)
    assert replica.ask("first", 500, "default")
    with pytest.raises(PromiseError, match="it would come in") as refused:
        replica.ask("refused", 100)
    assert refused.value.retry_after_s == pytest.approx((1.0 + error) * 0.6 - 0.3)
    replica.play_until(replica.now_s + refused.value.retry_after_s)
    served = replica.ask("served", 100)
    replica.play_until(inf)
    assert served.timing.kept_ttft


def test_a_class_on_a_noisy_host_refuses_what_cannot_be_in_time_all_the_same() -> None:
    """Every other step takes twice as long as it should, or half: costs are further off than would explain anything."""
    generator = random.Random(1)
    prompt_s = Learning(strict()).truth.seconds(StepWork(((0, 60),), 1))
    replica = Learning(strict(ttft_s=0.2 * prompt_s), lambda: generator.choice((0.5, 1.0, 2.0)))
    for number in range(200):
        replica.ask(number, "default", 20 + number * 37 % 80)
        replica.play_until(inf)
    error = error_of(replica.cost)
    assert error is not None and TRUSTED_ERROR < error < 1.0
    with pytest.raises(PromiseError, match="another class may take it"):
        replica.ask(1000, "strict")


def test_nothing_is_known_of_costs_that_were_not_measured() -> None:
    assert at_least_s(5.0, None) == 0.0
    assert at_least_s(5.0, 0.0) == 5.0 and at_least_s(3.0, 0.5) == 2.0


@pytest.mark.parametrize("error", [0.0, 0.5])
def test_of_what_was_promised_to_a_request_of_another_engine_what_is_left_counts(error: float) -> None:
    """It would be in time, had it come here at once."""
    replica = Doubted(error, 0.3)
    replica.ask("first", 100, "default")
    told = r"it would come in \d+ \(150 of it went by at another engine\): what is before it takes that long"
    with pytest.raises(PromiseError, match=told) as refused:
        replica.ask("refused", 100, gone_s=0.15)
    assert refused.value.retry_after_s == pytest.approx(0.15 + (1.0 + error) * 0.2 - 0.3)
    assert replica.ask("at once", 100)
    replica.play_until(inf)
    served = replica.ask("served", 100, gone_s=0.15)
    replica.play_until(inf)
    assert served.timing.kept_ttft


def test_nobody_is_refused_for_time_that_is_gone_where_nothing_is_known() -> None:
    assert Learning(strict(1.0)).ask(1, "strict", gone_s=2.0)


# Several samples

STRICT = ServiceLevel("strict", 1.0, ITL_S, when_late="refuse")
LEVELS = ServiceLevels((ServiceLevel("default"), ServiceLevel("even", itl_s=ITL_S), STRICT))


def ask(replica: Replica, at_s: float, num_samples: int, answer: int = 20, prompt_len: int = 10) -> list[Sequence]:
    replica.play_until(at_s)
    sampling = SamplingParams(max_tokens=answer, ignore_eos=True, n=num_samples)
    name = f"asked-{at_s}-{num_samples}"
    prompt = tuple(range(1, prompt_len + 1))
    replica.add(Request(name, prompt, sampling, arrival_s=at_s, call=name, service_level="strict"))
    return list(replica.scheduler._samples[name])


def measured(answer: int, own_answer: int = 20, **changes: object) -> Played:
    """It knows how long answers are, and nobody is there."""
    played = playing_streams(LEVELS, **changes)
    for _ in range(8):
        played.add(played.replica.now_s, 10, "even", answer=answer)
        played.add(played.replica.now_s, 10, "strict", answer=own_answer)
        played.end()
    return played


def in_time_when_told(replica: Replica, at_s: float, num_samples: int) -> None:
    """It is refused, is in time with every sample when it comes back as told, and would not have been much before."""
    with pytest.raises(PromiseError, match="it would come in") as refused:
        ask(replica, at_s, num_samples)
    assert 0.5 < refused.value.retry_after_s < inf
    with pytest.raises(PromiseError, match="it would come in"):
        ask(replica, at_s + 0.5 * refused.value.retry_after_s, num_samples)
    served = ask(replica, at_s + refused.value.retry_after_s + 0.2, num_samples)
    replica.play_until(inf)
    assert [one.timing.kept_ttft for one in served] == [True] * num_samples


def test_gaps_are_foreseen_for_every_sample() -> None:
    """Of seventeen streams that fit, sixteen write: there is place for one of eight samples."""
    played = measured(400)
    began_s = played.replica.now_s
    for _ in range(FITTING - 1):
        played.add(began_s, 10, "even", answer=400)
    assert len(ask(played.replica, began_s + 1.0, 1)) == 1
    in_time_when_told(played.replica, began_s + 2.0, 8)


def test_slots_are_foreseen_for_every_sample() -> None:
    """One of four slots is free every 0.4 seconds: one sample is in time, four are not."""
    played = measured(400, scheduler=replace(SPEC.scheduler, max_running=4))
    began_s = played.replica.now_s
    for answer in (100, 200, 300, *[400] * 16):
        played.add(began_s, 10, "even", answer=answer)
    while len(played.replica.scheduler._admission.waiting):
        played.replica.step()
    now_s = played.replica.now_s
    assert len(ask(played.replica, now_s, 1)) == 1
    in_time_when_told(played.replica, now_s + 0.02, 4)


def test_kv_is_foreseen_for_every_sample() -> None:
    """Each sample has blocks of its own beside the prompt's."""
    played = measured(1000, layout=KVLayout(16, (KVGroup((0,), None, 180),)))
    began_s = played.replica.now_s
    for _ in range(2):
        played.add(began_s, 400, "even", answer=1000)
    assert len(ask(played.replica, began_s + 0.2, 1)) == 1
    in_time_when_told(played.replica, began_s + 0.3, 12)


@pytest.mark.parametrize("changes", [{"scheduler": replace(SPEC.scheduler, max_running=4)}, {}])
def test_samples_that_can_never_begin_together_are_not_told_to_come_back(changes: dict[str, object]) -> None:
    """They have too few slots, or their gaps would be too long."""
    most = 4 if changes else FITTING
    replica = measured(20, 400, **changes).replica
    assert ask(replica, replica.now_s, most, 400)
    replica.play_until(inf)
    with pytest.raises(PromiseError, match=f"beginning {most + 1} answers alone takes") as refused:
        ask(replica, replica.now_s, most + 1, 400)
    assert refused.value.retry_after_s == inf
