"""Whether a prompt is read where its answer is written: by one rule, at the edges of each of its reasons."""

from __future__ import annotations

from dataclasses import replace

import pytest

from tests.planner.test_simulate import COST, SPEC
from twostroke.core.service_level import DEFAULT_LEVEL, ServiceLevel, ServiceLevels
from twostroke.cost.floor import StepWork
from twostroke.planner.fleet.link import Link
from twostroke.planner.fleet.member import FleetReplica, Member
from twostroke.planner.fleet.routing import Choice, Router
from twostroke.planner.trace import TraceRequest
from twostroke.scheduling.pace import PROMISED_SHARE
from twostroke.scheduling.staying import GAP_GROWTH, Staying, Writer

NEVER_S = 1e9
LONG_S, SHORT_S = (COST.seconds(StepWork(((0, num_tokens),), 1, contexts=(400,))) for num_tokens in (300, 200))
"""Steps that read so many tokens beside a stream."""


def rule(itl_s: float | None = None, target_s: float | None = None) -> Staying:
    levels = ServiceLevels() if itl_s is None else ServiceLevels((ServiceLevel(DEFAULT_LEVEL, itl_s=itl_s),))
    return Staying(COST.seconds, 512, 16, levels, target_s)


def writer(prompt_tokens: int, num_cached: int = 0, contexts: tuple[int, ...] = (), ahead_s: float = 0.0) -> Writer:
    reading_s = COST.seconds(StepWork(((num_cached, prompt_tokens - num_cached),), 1))
    return Writer(num_cached, reading_s, contexts, ahead_s)


def longest(staying: Staying, contexts: tuple[int, ...], num_cached: int = 0) -> int:
    """The longest prompt that stays beside these streams, however long the other way takes."""
    lengths = range(num_cached + 1, 3000)
    return max((n for n in lengths if staying.stays(n, writer(n, num_cached, contexts), NEVER_S)), default=0)


def test_where_nobody_writes_the_sooner_way_is_taken() -> None:
    here = writer(600)
    assert rule().stays(600, here, here.reading_s) and not rule().stays(600, here, here.reading_s - 1e-9)
    busy = writer(600, ahead_s=0.5)
    assert rule().stays(600, busy, here.reading_s + 0.5) and not rule().stays(600, busy, here.reading_s + 0.499)


@pytest.mark.parametrize(
    ("staying", "limit_s"),
    [
        (rule(), GAP_GROWTH * COST.seconds(StepWork(contexts=(400,)))),
        (rule(target_s=LONG_S), LONG_S),
        (rule(itl_s=SHORT_S), PROMISED_SHARE * SHORT_S),
        (rule(itl_s=LONG_S, target_s=SHORT_S), PROMISED_SHARE * LONG_S),
    ],
    ids=["nothing said", "aimed at", "promised", "both"],
)
def test_beside_a_stream_short_prompts_stay_as_far_as_its_gap_goes(staying: Staying, limit_s: float) -> None:
    most = longest(staying, (400,))
    assert 0 < most < 512
    for num_tokens, fits in ((most, True), (most + 1, False)):
        step_s = COST.seconds(StepWork(((0, num_tokens),), 1, contexts=(400,)))
        assert (step_s <= limit_s) is fits


@pytest.mark.parametrize(("promised_s", "limit_s"), [(1e6, None), (SHORT_S, PROMISED_SHARE * SHORT_S)])
def test_a_promised_gap_is_no_room_where_nobody_says_how_many_streams_share_it(
    promised_s: float, limit_s: float | None
) -> None:
    staying = rule(itl_s=promised_s)
    lengths = range(1, 3000)
    most = max(n for n in lengths if staying.stays(n, writer(n)._replace(contexts=None), NEVER_S))
    for num_tokens, fits in ((most, True), (most + 1, False)):
        step_s = COST.seconds(StepWork(((0, num_tokens),), 1, contexts=(num_tokens,)))
        doubled_s = GAP_GROWTH * COST.seconds(StepWork(contexts=(num_tokens,)))
        assert (step_s <= min(doubled_s, limit_s or doubled_s)) is fits


def test_of_what_is_there_already_only_the_rest_counts() -> None:
    staying = rule(itl_s=LONG_S)
    assert longest(staying, (400,), 1600) - 1600 == pytest.approx(longest(staying, (400,)), rel=0.1)


def test_whose_whole_blocks_are_there_stays_however_tight_the_gap() -> None:
    """A handoff would bring no more: the rest is read beside the same streams."""
    staying = rule(itl_s=1e-6)
    for num_cached, is_at_home in ((1600, True), (1584, False)):
        assert staying.stays(1616, writer(1616, num_cached, (400,)), NEVER_S) is is_at_home
    first_s = staying.first_step_s(1616, (400,))
    assert first_s == COST.seconds(StepWork(((1600, 16),), 1, contexts=(400,)))
    assert not staying.stays(1616, writer(1616, 1600, (400,)), first_s - 1e-9)


def test_a_simulated_router_decides_by_it() -> None:
    spec = replace(SPEC, levels=ServiceLevels((ServiceLevel(DEFAULT_LEVEL, itl_s=LONG_S),)))
    link, router = Link(100e9, "fast", 1e-4), Router(spec, "least-backlog")
    choice = Choice(spec, link, router)
    reads, writes = (Member(number, role, FleetReplica(spec)) for number, role in enumerate(("prefill", "decode")))
    writes.journeys["one"], writes.kv_tokens = None, 400  # type: ignore[assignment]
    staying = Staying(spec.step_seconds, spec.scheduler.max_tokens_per_step, 16, spec.levels, spec.itl_target_s)
    decided = []
    for num_tokens in range(20, 520, 20):
        asked = TraceRequest(0.0, num_tokens, 4)
        elsewhere_s = router.first_token_s(reads, asked) + choice.handoff_s(reads, writes, asked, 0.0)
        decided.append(choice.stays(reads, writes, asked, 0.0))
        assert decided[-1] is staying.stays(num_tokens, writer(num_tokens, 0, (400,)), elsewhere_s)
    assert decided[0] and not decided[-1]
