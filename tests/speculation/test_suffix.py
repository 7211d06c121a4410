"""The drafters that look tokens up: what they guess, whom they learn from, what they keep."""

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from twostroke.core.request import Request
from twostroke.speculation.drafter import NOTHING, Ask
from twostroke.speculation.ngram import NgramDrafter
from twostroke.speculation.suffix import FORGOTTEN_AT_ONCE, LEAST_CHANCE, MAX_SHARES, SuffixDrafter, Trust

PATH = list(range(50, 90))


def opened(drafter, seq_id, tokens, tenant="", salt=""):
    drafter.open(seq_id, Request(str(seq_id), tuple(tokens), tenant=tenant, cache_salt=salt), tuple(tokens))
    return seq_id


def guess(drafter, seq_id, most=8):
    return drafter.propose([Ask(seq_id, most)])[0]


@pytest.mark.parametrize("drafter", [SuffixDrafter(), NgramDrafter()], ids=["suffix", "ngram"])
def test_an_edit_is_drafted_from_the_text_that_is_edited(drafter):
    opened(drafter, 0, [*PATH, 1])
    assert guess(drafter, 0) == NOTHING
    drafter.extend(0, PATH[:6])
    first = guess(drafter, 0)
    assert first.token_ids == tuple(PATH[6:14])
    drafter.extend(0, PATH[6:21])
    longer = guess(drafter, 0)
    assert longer.token_ids == tuple(PATH[21:29])
    assert longer.chances[0] > first.chances[0], "a longer context is worth more"


def test_a_repetition_goes_on_behind_the_end():
    drafter = SuffixDrafter()
    opened(drafter, 0, [9, 1, 2, 3, 1, 2, 3, 1, 2])
    assert guess(drafter, 0, 7).token_ids == (3, 1, 2, 3, 1, 2, 3)


def test_the_path_taken_most_often_is_followed_and_its_share_is_the_chance():
    drafter = SuffixDrafter()
    for number, follower in enumerate([7, 8, 7, 7, 8]):
        opened(drafter, number, [20 + number, 1, 2, 3, 4, follower, 30 + number])
        guess(drafter, number)
    opened(drafter, 9, [1, 2, 3, 4])
    found = guess(drafter, 9)
    assert found.token_ids[0] == 7
    trusted = Trust().after(4)
    assert found.chances[0] == pytest.approx((3 - 1 + trusted) / 5)
    assert found.token_ids[1] == 33, "of equally many the latest"


@pytest.mark.parametrize(
    ("one", "other", "learns"),
    [
        ({}, {}, True),
        ({"tenant": "a"}, {"tenant": "a"}, True),
        ({"tenant": "a", "salt": "s"}, {"tenant": "a", "salt": "s"}, True),
        ({"tenant": "a"}, {"tenant": "b"}, False),
        ({"salt": "s"}, {"salt": "t"}, False),
        ({"salt": "s"}, {}, False),
        ({"tenant": "s"}, {"salt": "s"}, False),
        ({"tenant": "a", "salt": "s"}, {"tenant": "b", "salt": "s"}, False),
    ],
)
@pytest.mark.parametrize("ends", [True, False])
def test_requests_learn_from_those_of_their_tenant_and_salt_alone(one, other, learns, ends):
    drafter = SuffixDrafter()
    opened(drafter, 0, PATH, **one)
    guess(drafter, 0)
    if ends:
        drafter.close(0)
    opened(drafter, 1, [1, *PATH[:6]], **other)
    assert (guess(drafter, 1).token_ids == tuple(PATH[6:14])) is learns
    drafter.extend(1, PATH[6:10])
    assert (guess(drafter, 1) != NOTHING) is learns


def test_ngram_learns_from_nobody():
    drafter = NgramDrafter()
    opened(drafter, 0, PATH)
    guess(drafter, 0)
    opened(drafter, 1, [1, *PATH[:6]])
    assert guess(drafter, 1) == NOTHING
    drafter.close(0)
    drafter.close(1)
    assert drafter.num_tokens == 0
    assert not drafter._shares_of


@settings(max_examples=40, deadline=None)
@given(st.integers(0, 2**32), st.integers(200, 3000))
def test_no_more_is_kept_than_allowed_and_the_oldest_go_first(seed, max_tokens):
    """Long and short requests of three tenants, some of which begin alike. In pieces: while one that takes many tokens
    is taken in, there may be more for a moment."""
    draw, drafter = random.Random(seed), SuffixDrafter(max_tokens)
    beginning = [draw.randrange(500) for _ in range(100)]
    for number in range(30):
        tokens = (beginning if draw.random() < 0.5 else []) + [draw.randrange(500) for _ in range(draw.randint(1, 200))]
        opened(drafter, number, tokens, tenant=str(number % 3))
        for _ in range(draw.randint(0, 4)):
            guess(drafter, number)
            drafter.extend(number, [draw.randrange(500)])
        drafter.close(number)
        drafter.close(number)
        assert drafter.num_tokens <= max_tokens
        assert list(drafter._closed) == [] or max(drafter._closed) <= number
    texts = [text for share in drafter._shares_of.values() for text in share.texts.values()]
    assert sum(share.num_tokens for share in drafter._shares_of.values()) == drafter.num_tokens
    assert {number for share in drafter._resting.values() for number in share.ended} == set(drafter._closed)
    assert sum(text.size for text in texts) == sum(text.counted for text in texts) == drafter.num_tokens
    assert sum(map(len, drafter._shares_of.values())) <= 4 * drafter.num_tokens


def test_a_request_that_nothing_shares_with_goes_before_one_in_use():
    drafter = SuffixDrafter(max_tokens=400)
    shared = list(range(100))
    opened(drafter, 0, shared)
    guess(drafter, 0)
    drafter.close(0)
    for number in range(1, 12):
        opened(drafter, 2 * number, [1000 * number + place for place in range(100)])
        guess(drafter, 2 * number)
        drafter.close(2 * number)
        opened(drafter, 2 * number + 1, [*shared, 5000 + number])
        drafter.close(2 * number + 1)
    opened(drafter, 99, [7, *shared[:20]])
    assert guess(drafter, 99).token_ids == tuple(shared[20:28])


def served(drafter, first, count, size, **whose):
    """This many requests come and end, each with tokens of its own."""
    for number in range(first, first + count):
        opened(drafter, number, [1000 * number + place for place in range(size)], **whose)
        guess(drafter, number)
        drafter.close(number)


@pytest.mark.parametrize("busy", [{"tenant": "busy"}, {"tenant": "quiet", "salt": "busy"}], ids=["tenant", "salt"])
@pytest.mark.parametrize("runs", [False, True], ids=["ends", "runs"])
def test_a_busy_tenant_does_not_push_out_what_a_quiet_one_said(busy, runs):
    drafter = SuffixDrafter(max_tokens=2000)
    opened(drafter, 0, PATH, tenant="quiet")
    guess(drafter, 0)
    drafter.close(0)
    served(drafter, 1, 50, 100, **busy)
    if runs:
        opened(drafter, 100, range(10_000, 14_000), **busy)
        for _ in range(20):
            guess(drafter, 100)
    assert 1000 < drafter.num_tokens <= 2000
    opened(drafter, 99, [7, *PATH[:6]], tenant="quiet")
    assert guess(drafter, 99).token_ids == tuple(PATH[6:14])


def test_those_who_hold_most_of_the_room_share_it_evenly():
    drafter = SuffixDrafter(max_tokens=3000)
    for turn in range(30):
        served(drafter, 100 * turn, 1, 60, tenant="a")
        served(drafter, 100 * turn + 1, 5, 60, tenant="b")
        served(drafter, 100 * turn + 6, 20, 60, tenant="c")
    held = [share.num_tokens for share in drafter._shares_of.values()]
    assert len(held) == 3 and min(held) >= 900 and max(held) <= 1100


def test_those_who_do_not_come_back_give_way_at_last():
    """Else salts that are used once would take the room of everybody."""
    drafter = SuffixDrafter(max_tokens=2000)
    for number in range(500):
        served(drafter, number, 1, 20, salt=f"once {number}")
    assert len(drafter._resting) <= 100
    assert [key[1] for key in drafter._resting][-1] == "once 499"
    served(drafter, 1000, 30, 60, tenant="regular")
    assert len(drafter._resting) <= MAX_SHARES + 1
    assert drafter._shares_of["regular", ""].num_tokens > 1000


def test_one_stream_longer_than_what_is_kept_forgets_its_beginning():
    drafter = SuffixDrafter(max_tokens=300)
    opened(drafter, 0, [*PATH, 1])
    guess(drafter, 0)
    for place in range(600):
        drafter.extend(0, [1000 + place])
    assert drafter.num_tokens <= 300
    drafter.extend(0, [1500, 1501, 1502])
    assert guess(drafter, 0).token_ids[:2] == (1503, 1504)
    drafter.extend(0, PATH[:5])
    assert guess(drafter, 0) == NOTHING
    drafter.close(0)
    assert drafter.num_tokens <= 300


def test_a_long_prompt_is_taken_in_pieces():
    """No turn files more than its share, and the prompt of a request that ended before is taken in by later turns."""
    drafter = SuffixDrafter()
    draw = random.Random(0)
    prompt = [draw.randrange(40_000) for _ in range(3000)]
    opened(drafter, 0, prompt)
    window = drafter._streams[0].window
    before = len(window)
    assert before == 0, "opening a row files nothing"
    while drafter._streams[0].num_waiting:
        guess(drafter, 0)
        assert 0 < len(window) - before <= 4 * 512
        before = len(window)
    opened(drafter, 1, [1, *reversed(prompt)])
    drafter.close(1)
    opened(drafter, 2, [2, *prompt[100:90:-1]])
    for _ in range(10):
        found = guess(drafter, 2)
    assert found.token_ids == tuple(prompt[90:82:-1])


def test_trust_follows_what_happens():
    """Guesses behind short contexts that never hold are soon said to be unlikely; those that hold, likely."""
    drafter = SuffixDrafter()
    opened(drafter, 0, [1, 2, 3])
    for _ in range(60):
        drafter.extend(0, [1, 2])
        found = guess(drafter, 0)
        drafter.extend(0, [5])  # in a loop of its own
    assert found.chances[0] > 0.9
    doubtful = SuffixDrafter()
    for number in range(60):
        opened(doubtful, number, [1000 + number, 1, 2, 2000 + number])
        guess(doubtful, number)
        doubtful.extend(number, [3000 + number, 1, 2])
        chances = guess(doubtful, number).chances
        doubtful.extend(number, [4000 + number])
    assert not chances or chances[0] < 0.2


@settings(max_examples=60, deadline=None)
@given(st.lists(st.integers(0, 4), min_size=1, max_size=60), st.integers(1, 32))
def test_guesses_are_sound(tokens, most):
    drafter = SuffixDrafter()
    opened(drafter, 0, tokens)
    found = guess(drafter, 0, most)
    assert len(found.token_ids) == len(found.chances) <= most
    assert all(token in tokens for token in found.token_ids)
    survival = 1.0
    for chance in found.chances:
        assert 0.0 < chance <= 1.0
        survival *= chance
    assert survival >= LEAST_CHANCE * 0.999


def test_texts_that_nobody_ever_asks_for_are_not_kept_for_ever():
    for drafter in (SuffixDrafter(max_tokens=1000), NgramDrafter()):
        for number in range(200):
            drafter.open(number, Request(str(number), tuple(range(number, number + 50))), range(number, number + 50))
            drafter.close(number)
        assert drafter.num_tokens <= 1000 + 2 * FORGOTTEN_AT_ONCE
        assert len(drafter._waiting) <= len(drafter._closed) <= 1000 // 50 + 2


def test_what_ended_is_forgotten_when_that_is_asked_for_and_what_runs_is_not():
    drafter = SuffixDrafter()
    for number, text in enumerate((tuple(range(100, 140)), tuple(range(40)))):
        drafter.open(number, Request(str(number), text), text)
    drafter.propose([Ask(0, 4), Ask(1, 4)])
    drafter.close(0)
    drafter.forget()
    drafter.open(2, Request("2", (5, 6, 7, 8)), (5, 6, 7, 8))
    drafter.open(3, Request("3", (105, 106, 107, 108)), (105, 106, 107, 108))
    found, lost = drafter.propose([Ask(2, 3), Ask(3, 3)])
    assert found.token_ids == (9, 10, 11) and lost == NOTHING
    drafter.close(3)
    drafter.close(1)
    drafter.close(2)
    drafter.forget()
    assert drafter.num_tokens == 0 and not drafter._shares_of
    drafter.open(3, Request("3", (5, 6, 7, 8)), (5, 6, 7, 8))
    assert drafter.propose([Ask(3, 3)]) == [NOTHING]


def test_without_sharing_each_request_learns_from_itself_alone():
    drafter, text = SuffixDrafter(shares=False), tuple(range(40))
    drafter.open(0, Request("0", text), text)
    drafter.propose([Ask(0, 4)])
    drafter.close(0)
    drafter.open(1, Request("1", (5, 6, 7, 8)), (5, 6, 7, 8))
    assert drafter.propose([Ask(1, 3)]) == [NOTHING]
    assert drafter.num_tokens <= 4
