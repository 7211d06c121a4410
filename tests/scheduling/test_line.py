"""Whose turn it is: by tenant, by call, by priority and arrival."""

from __future__ import annotations

from tests.scheduling.loop import Loop, layout, request
from twostroke.core.sequence import Sequence, SequenceState
from twostroke.core.service_level import ServiceLevels
from twostroke.scheduling.forecast import Forecast
from twostroke.scheduling.line import Line
from twostroke.scheduling.policies import policy_named
from twostroke.scheduling.shares import AGAIN_AFTER_TOKENS, Shares

AGING_S = 30.0


class Admissions:
    def __init__(self) -> None:
        self.shares = Shares()
        self.policy = policy_named("fair", Forecast(), AGING_S, ServiceLevels())
        self.line = Line(self.policy, self.shares)
        self.now_s = 0.0
        self._next_id = 0

    def add(self, tenant: str = "", call: str = "", priority: int = 0, number: int = 1) -> list[Sequence]:
        added = []
        for _ in range(number):
            asked = request(f"{self._next_id}", [1], priority=priority, arrival_s=self.now_s, tenant=tenant, call=call)
            added.append(Sequence(self._next_id, asked, 0, 10))
            self.policy.enter(added[-1])
            self.line.add(added[-1])
            self._next_id += 1
        return added

    def take(self) -> Sequence:
        self.now_s += 1.0
        head = self.line.first(lambda sequence: True, self.now_s)
        assert head is not None
        self.line.take(head, self.now_s)
        self.policy.note_reading(head, 1.0, self.now_s)
        return head

    def order(self) -> list[str]:
        """Tenant and call of each, as they are let in."""
        taken = [self.take() for _ in range(len(self.line))]
        return [f"{sequence.request.tenant}{sequence.request.call}" for sequence in taken]


def test_tenants_take_turns_whatever_came_first_and_however_urgent_it_is_called() -> None:
    line = Admissions()
    line.add("a", "1", priority=-100, number=5)
    line.add("b", "2", number=3)
    line.add("c", "3", priority=100)
    assert line.order() == ["a1", "b2", "c3", "a1", "b2", "a1", "b2", "a1", "a1"]


def test_calls_of_a_tenant_take_turns_and_a_newcomer_waits_for_one_round() -> None:
    line = Admissions()
    line.add(call="1", number=4)
    line.add(call="2", number=4)
    assert [line.take().request.call for _ in range(3)] == ["1", "2", "1"]
    line.add(call="3")
    assert line.order() == ["2", "1", "3", "2", "1", "2"]


def test_priority_orders_the_calls_of_a_tenant_and_ages() -> None:
    line = Admissions()
    line.add("a", "low", priority=1, number=2)
    line.add("a", "high", priority=0, number=2)
    assert line.order() == ["ahigh", "ahigh", "alow", "alow"]
    line.add("a", "low", priority=1)
    line.now_s += AGING_S + 1.0
    line.add("a", "high", priority=0)
    assert line.order() == ["alow", "ahigh"]


def test_who_took_least_comes_first_and_who_comes_back_has_what_it_lent() -> None:
    line = Admissions()
    line.add("a", "1", number=4)
    line.add("b", "2", number=2)
    assert [line.take().request.tenant for _ in range(3)] == ["a", "b", "a"]
    line.add("c", "3", number=3)
    assert line.order() == ["c3", "b2", "c3", "a1", "c3", "a1"]


def test_a_call_that_has_nothing_running_comes_first_unless_another_is_more_urgent() -> None:
    line = Admissions()
    line.shares.add(line.add("a", "runs")[0])
    line.take()
    line.add("a", "runs", priority=-1)
    line.add("a", "none")
    line.add("a", "low", priority=1)
    assert line.order() == ["aruns", "anone", "alow"]
    line.add("a", "runs")
    line.add("a", "none")
    assert line.order() == ["anone", "aruns"]


def test_requests_without_a_call_keep_their_order_of_arrival() -> None:
    line = Admissions()
    first, second, third = line.add()[0], line.add(priority=1)[0], line.add()[0]
    assert [line.take() for _ in range(3)] == [first, third, second]


def test_an_endless_stream_of_new_calls_does_not_starve_the_second_sample_of_one() -> None:
    line = Admissions()
    first, second = line.add(call="patient", number=2)
    assert line.take() is first
    passed = 0
    while second in list(line.line):
        line.add(call=f"new{passed}", number=2)
        passed += line.take() is not second
        assert passed < 5


def test_one_that_lost_its_kv_comes_before_its_tenants_newcomers_and_in_its_tenants_turn() -> None:
    line = Admissions()
    line.add("a", "1", number=2)
    (lost,) = line.add("b", "2")
    assert [line.take().request.tenant for _ in range(2)] == ["a", "b"]
    line.line.resume(lost, line.policy.rank(lost))
    line.add("b", "4", number=2)
    line.add("c", "3")
    assert line.order() == ["c3", "a1", "b2", "b4", "b4"]


def test_who_leaves_gives_up_its_place_and_no_other() -> None:
    line = Admissions()
    gone, stays = line.add("a", "1", number=2)
    other = line.add("b", "2")[0]
    line.line.drop(gone)
    assert len(line.line) == 2 and line.line.num_prompt_tokens == 2
    assert [line.take(), line.take()] == [stays, other]
    assert len(line.line) == 0 and list(line.line) == []


def test_it_knows_about_how_many_go_before_a_newcomer() -> None:
    line = Admissions()
    line.add("a", "1", number=100)
    line.add("a", "2", number=50)
    asked = request("new", [1], tenant="b", call="3", arrival_s=line.now_s)
    assert line.line.add(Sequence(1000, asked, 0, 10)) == 1
    asked = request("new2", [1], tenant="a", call="4", arrival_s=line.now_s)
    assert line.line.add(Sequence(1001, asked, 0, 10)) == 3


# Slots


def test_many_prompts_of_one_tenant_do_not_keep_anothers_two_tokens_waiting() -> None:
    """All slots hold long answers of one, and more of it wait: the other's is written at once."""
    loop = Loop(layout((None, 100)), max_running=4, max_tokens_per_step=32)
    for number in range(16):
        call = f"call{number // 8}"
        loop.add(request(f"{number}", range(4), tenant="greedy", call=call, max_tokens=50, seed=number))
    for _ in range(6):
        loop.turn()
    assert loop.scheduler.counts().running_decode == 4
    short = loop.add(request("short", range(8, 13), tenant="other", call="short", arrival_s=loop.now_s, max_tokens=2))[
        0
    ]
    num_turns = 0
    while not short.is_finished:
        loop.turn()
        num_turns += 1
        assert num_turns <= 4
    gave_way = [sequence for sequence in loop.records if sequence.timing.gave_way]
    assert len(gave_way) == 1 and gave_way[0].timing.preemptions == 1
    while gave_way[0].state is SequenceState.WAITING:
        loop.turn()
    assert gave_way[0].timing.recomputed_tokens <= 4  # its blocks were still there
    loop.run()
    loop.check_outputs()


def test_calls_of_many_samples_do_not_keep_a_short_chat_waiting() -> None:
    loop = Loop(layout((None, 100)), max_running=6, max_tokens_per_step=32)
    for number in range(3):
        loop.add(request(f"{number}", range(4), call=f"call{number}", max_tokens=50, n=4, seed=number))
    for _ in range(8):
        loop.turn()
    assert loop.scheduler.counts().running_decode == 6 and loop.scheduler.counts().waiting == 6
    chat = loop.add(request("chat", range(8, 13), call="chat", arrival_s=loop.now_s, max_tokens=2))[0]
    num_turns = 0
    while not chat.is_finished:
        loop.turn()
        num_turns += 1
        assert num_turns <= 4
    loop.run()
    loop.check_outputs()


def test_nobody_gives_way_to_who_has_a_slot_or_from_the_only_one_it_has() -> None:
    loop = Loop(layout((None, 60)), max_running=2)
    for tenant in ("a", "b"):
        loop.add(request(tenant, range(4), tenant=tenant, call=tenant, max_tokens=30))
    loop.turn()
    third = loop.add(request("c", range(8), tenant="c", call="c", max_tokens=2, arrival_s=1.0))[0]
    second = loop.add(request("a2", range(8), tenant="a", call="a2", max_tokens=2, arrival_s=1.0))[0]
    for _ in range(20):
        loop.turn()
    assert third.state is second.state is SequenceState.WAITING
    assert loop.scheduler.counts().preemptions == 0
    loop.run()
    loop.check_outputs()


def test_a_stream_is_not_sent_away_again_before_it_has_gone_on() -> None:
    """Short requests one after the other: what they cost the long ones is bounded."""
    loop = Loop(layout((None, 120)), max_running=2, max_context=200)
    long = [loop.add(request(f"{i}", range(4), tenant="a", call="a", max_tokens=150, seed=i))[0] for i in range(2)]
    number = 0
    while any(not sequence.is_finished for sequence in long):
        if number % 5 == 4 and all(sequence.is_finished or sequence in long for sequence in loop.records):
            asked = request(f"s{number}", range(3), tenant="b", call=f"s{number}", arrival_s=loop.now_s, max_tokens=2)
            loop.add(asked)
        number += 1
        loop.turn()
    assert 2 <= sum(sequence.timing.gave_way for sequence in long) <= 2 * (1 + 150 // AGAIN_AFTER_TOKENS)
    loop.run()
    loop.check_outputs()
