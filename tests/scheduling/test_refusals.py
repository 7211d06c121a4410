"""Refusals are truthful: by costs that are trusted, and for every sample of a request. On a virtual clock."""

from __future__ import annotations

from dataclasses import replace
from math import inf

import pytest

from tests.scheduling.test_gaps import FITTING, ITL_S
from tests.scheduling.test_gaps import play as playing_streams
from tests.scheduling.test_policies import SHAPE, SPEC, Played
from twostroke.core.errors import PromiseError
from twostroke.core.kv_layout import KVGroup, KVLayout
from twostroke.core.request import Request
from twostroke.core.sampling_params import SamplingParams
from twostroke.core.sequence import Sequence
from twostroke.core.service_level import ServiceLevel, ServiceLevels
from twostroke.core.step import Step
from twostroke.cost.floor import StepWork, work_of
from twostroke.cost.hardware import Ceilings
from twostroke.cost.step_cost import Coefficients, StepCost
from twostroke.cost.trust import doubt_of
from twostroke.planner.simulate import Replica
from twostroke.scheduling.advance import SequenceAdvance
from twostroke.scheduling.scheduler import Scheduler

TIMES_TOO_MUCH = 10.0


class Learning(Replica):
    """Its scheduler goes by costs that begin far from what steps take, and learn."""

    def __init__(self, levels: ServiceLevels) -> None:
        truth = StepCost(SHAPE, Ceilings(1e9, 1e9, "a test"), Coefficients(step_s=1e-3))
        super().__init__(replace(SPEC, levels=levels, step_seconds=truth.seconds))
        assumed = Ceilings(1e9 / TIMES_TOO_MUCH, 1e9 / TIMES_TOO_MUCH, "assumed")
        self.truth, self.cost = truth, StepCost(SHAPE, assumed, Coefficients(step_s=1e-3 * TIMES_TOO_MUCH))
        self.scheduler = Scheduler(
            SPEC.scheduler,
            SPEC.layout,
            levels=levels,
            step_seconds=self.cost.seconds,
            is_trusted=lambda: doubt_of(self.cost) is None,
        )

    def _take_in(self, step: Step, seconds: float, now_s: float, num_tokens: int = 1) -> list[SequenceAdvance]:
        for _ in range(num_tokens):
            self.cost.observe(work_of(step), seconds / num_tokens)
        return super()._take_in(step, seconds, now_s, num_tokens)

    def ask(self, number: int, level: str, num_tokens: int = 60, answer: int = 4) -> list[Sequence]:
        request = Request(
            f"asked-{number}",
            (number, *range(1, num_tokens)),
            SamplingParams(max_tokens=answer, ignore_eos=True),
            arrival_s=self.now_s,
            service_level=level,
        )
        self.add(request)
        return self.scheduler._samples[request.request_id]


def strict(ttft_s: float | None = None, itl_s: float | None = None) -> ServiceLevels:
    return ServiceLevels((ServiceLevel("default"), ServiceLevel("strict", ttft_s, itl_s, when_late="refuse")))


@pytest.mark.parametrize("promise", ["ttft_s", "itl_s"])
def test_costs_that_nobody_trusts_yet_refuse_nobody_and_those_that_were_learnt_refuse_truthfully(promise: str) -> None:
    """Twice of what it takes is promised, a fifth of what is predicted at first. Were it refused, nothing would run,
    and so nothing be learnt."""
    prompt, stream = StepWork(((0, 60),), 1), StepWork(contexts=[61])
    truth = Learning(strict()).truth.seconds(prompt if promise == "ttft_s" else stream)
    replica = Learning(strict(**{promise: 2.0 * truth}))
    predicted = replica.cost.seconds(prompt if promise == "ttft_s" else stream)
    assert predicted > 4.0 * truth and doubt_of(replica.cost) is not None
    number = 0
    while doubt_of(replica.cost) is not None:
        (served,) = replica.ask(number := number + 1, "strict")
        replica.play_until(inf)
        assert served.is_finished and number < 100
    replica.ask(number + 1, "strict")
    replica.play_until(inf)
    # What can never be in time is refused now.
    late = Learning(strict(**{promise: 0.5 * truth}))
    for number in range(100):
        late.ask(number, "default", 20 + number * 37 % 80)
        late.play_until(inf)
    assert doubt_of(late.cost) is None
    with pytest.raises(PromiseError, match="another class may take it") as refused:
        late.ask(number + 1, "strict")
    assert refused.value.retry_after_s == inf


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
