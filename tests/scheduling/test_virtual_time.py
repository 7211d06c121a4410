"""Shares by virtual time: none gets less than its share, less one piece, while it has work."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.properties import examples
from twostroke.scheduling.virtual_time import CREDIT_S, MOST_IDLE, VirtualTime

PIECE_S = 1.0
NAMES = "abcde"


@examples(20)
@given(
    data=st.data(),
    weights=st.lists(st.floats(0.1, 20.0), min_size=2, max_size=5),
    num_pieces=st.integers(1, 120),
)
def test_none_gets_less_than_its_share_less_a_piece_while_it_has_work(
    data: st.DataObject, weights: list[float], num_pieces: int
) -> None:
    """The first has work all the time. Others come and go, some have nothing to be chosen for a while, and some write
    beside what is chosen, which nobody can refuse them. Whatever is chosen goes to whoever is next."""
    time = VirtualTime()
    weight = dict(zip(NAMES, weights, strict=False))
    given_s = dict.fromkeys(weight, 0.0)
    active, chosen_s = {"a"}, 0.0
    time.begin("a", weight["a"])
    for _ in range(num_pieces):
        for name in data.draw(st.sets(st.sampled_from(list(weight)))) - {"a"}:
            (time.end if name in active else time.begin)(name, weight[name])
            active ^= {name}
        writes = data.draw(st.sampled_from(sorted(active)))
        written_s = data.draw(st.sampled_from([0.0, 0.0, 0.3, 5.0]))
        time.charge(writes, written_s, weight[writes])
        given_s[writes] += written_s if writes == "a" else 0.0
        only_write = data.draw(st.sets(st.sampled_from(list(weight)))) - {"a"}
        following = time.in_turn(sorted(active - only_write), PIECE_S)[0]
        seconds = data.draw(st.floats(0.0, PIECE_S))
        time.charge(following, seconds, weight[following])
        given_s[following] += seconds
        chosen_s += seconds
        share = weight["a"] / sum(weight.values())
        assert given_s["a"] >= share * chosen_s - PIECE_S - 1e-6


@examples(40)
@given(data=st.data(), num_flows=st.integers(2, 5), num_before=st.integers(0, 60))
def test_the_same_for_one_that_comes_later_but_for_what_others_have_lent(
    data: st.DataObject, num_flows: int, num_before: int
) -> None:
    time, names = VirtualTime(), NAMES[1:num_flows]
    for name in names:
        time.begin(name)
    for _ in range(num_before):
        name = data.draw(st.sampled_from(names))
        time.charge(name, data.draw(st.floats(0.0, PIECE_S)))
    time.begin("a")
    lent_s = sum(max(0.0, time.due("a") - time.due(name)) for name in names)
    assert lent_s <= len(names) * (CREDIT_S + 2 * CREDIT_S)
    own_s = chosen_s = 0.0
    for _ in range(80):
        following = time.in_turn(["a", *names], PIECE_S)[0]
        seconds = data.draw(st.floats(0.5, PIECE_S))
        time.charge(following, seconds)
        chosen_s += seconds
        own_s += seconds if following == "a" else 0.0
        assert own_s >= (chosen_s - lent_s) / num_flows - PIECE_S - 1e-6


def test_weights_divide_what_is_given() -> None:
    time = VirtualTime()
    weight = {"light": 1.0, "heavy": 3.0}
    for name in weight:
        time.begin(name, weight[name])
    taken = []
    for _ in range(400):
        taken.append(time.in_turn(["light", "heavy"], 1.0)[0])
        time.charge(taken[-1], 1.0, weight[taken[-1]])
    assert taken.count("heavy") == pytest.approx(300, abs=2)
    assert time.share("heavy") == 0.75


@pytest.mark.parametrize("light", [1.0, 0.1])
def test_weights_divide_what_is_given_also_beside_one_that_takes_nothing_and_others_that_come_and_go(
    light: float,
) -> None:
    time = VirtualTime()
    weight = {"idle": 1.0, "light": light, "heavy": 2.0}
    for name in weight:
        time.begin(name, weight[name])
    taken = []
    for _ in range(2000):
        taken.append(time.in_turn(["light", "heavy"], 1.0)[0])
        time.charge(taken[-1], 1.0, weight[taken[-1]])
        time.begin("guest")
        time.end("guest")
    assert taken.count("light") == pytest.approx(2000 * light / (light + 2.0), rel=0.05)


def test_work_of_another_weight_changes_nobodys_share_but_by_what_it_takes() -> None:
    time = VirtualTime()
    for _ in range(9):
        time.begin("heavy", 3.0)
    time.begin("light")
    time.begin("heavy", 1.0)
    assert time.share("heavy") == pytest.approx(2.8 / 3.8)
    taken = []
    for _ in range(400):
        taken.append(time.in_turn(["light", "heavy"], 1.0)[0])
        time.charge(taken[-1], 1.0, 3.0 if taken[-1] == "heavy" else 1.0)
    assert taken.count("heavy") == pytest.approx(300, abs=2)
    time.end("heavy", 1.0)
    assert time.share("heavy") == 0.75
    for _ in range(9):
        time.end("heavy", 3.0)
    assert time.num_active == 1 and time.share("light") == 1.0


def test_of_two_that_are_always_busy_neither_is_before_the_other() -> None:
    time = VirtualTime()
    for name in "ab":
        time.begin(name)
    for _ in range(100):
        time.charge(time.in_turn("ab", 1.0)[0], 1.0)
    assert max(time.lead_s("a"), time.lead_s("b")) <= 1.0


def test_who_was_away_has_what_it_lent_and_not_more() -> None:
    time = VirtualTime()
    time.begin("quiet")
    time.end("quiet")
    time.begin("flood")
    for _ in range(1000):
        time.charge("flood", 1.0)
    time.begin("quiet")
    passed = 0
    while time.in_turn(["flood", "quiet"])[0] == "quiet":
        time.charge("quiet", 1.0)
        passed += 1
    assert passed == pytest.approx(CREDIT_S, abs=1)


def test_what_was_taken_while_nobody_wanted_it_is_not_held_against_one_forever() -> None:
    time = VirtualTime()
    time.begin("writes little")
    time.begin("flood")
    time.charge("flood", 10_000.0)
    time.begin("third")
    assert time.lead_s("flood") == CREDIT_S


def test_flows_that_have_gone_are_forgotten_in_time() -> None:
    time = VirtualTime()
    for number in range(3 * MOST_IDLE):
        time.begin(str(number))
        time.charge(str(number), 0.01)
        time.end(str(number))
    assert len(time._time_s) <= MOST_IDLE + 1 and time.num_active == 0
    time.charge("0", 1.0)  # what still comes in for one that is forgotten is nobody's
