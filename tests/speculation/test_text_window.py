"""The index of a window against a search through all its texts."""

from hypothesis import given, settings
from hypothesis import strategies as st

from twostroke.speculation.text_window import LENGTHS, LONGEST, MAX_SIGHTINGS, Window, keys_at

TOKENS = st.integers(0, 3)
PIECES = st.lists(st.tuples(st.integers(0, 2), st.lists(TOKENS, min_size=1, max_size=40)), min_size=1, max_size=12)
LONG = st.lists(st.integers(0, 1), min_size=60, max_size=120)


class Slow:
    """The same window, which remembers every place and looks through all of them."""

    def __init__(self):
        self.tokens = {}
        self.places = []  # (number, place), in the order of filing

    def sightings(self, number):
        tail = self.tokens[number]
        for length in reversed(LENGTHS):
            if len(tail) < length:
                continue
            found = [
                (other, place + 1)
                for other, place in reversed(self.places)
                if place + 1 >= length and self.tokens[other][place + 1 - length : place + 1] == tail[-length:]
            ]
            if found:
                other, follows = found[0]
                before = self.tokens[other][:follows]
                alike = [count for count in range(LONGEST + 1) if before[-count:] == tail[-count:] and count <= follows]
                return max(count for count in alike if count <= len(tail)), found[:MAX_SIGHTINGS]
        return 0, []


def seen(window, text):
    length, sightings = window.sightings(text)
    return length, [(sighting.text.number, sighting.follows) for sighting in sightings]


@settings(max_examples=150, deadline=None)
@given(PIECES)
def test_finds_what_a_search_through_everything_finds(pieces):
    """Three streams of one window, which grow by turns; each begins with a token that tells it from the others, so
    that no prefix is shared."""
    window, slow, texts = Window(), Slow(), {}
    for number, tokens in pieces:
        if number not in texts:
            slow.tokens[number] = [100 + number, *tokens]
            texts[number] = window.open(number, slow.tokens[number])
        else:
            slow.tokens[number] += tokens
            texts[number].tokens += tokens
        text = texts[number]
        start = text.num_filed
        window.file(text, len(text.tokens))
        slow.places += [(number, place) for place in range(start, text.num_filed)]
        assert text.num_waiting == 0
        for other in texts:
            assert seen(window, texts[other]) == slow.sightings(other)


@settings(max_examples=60, deadline=None)
@given(LONG, st.integers(1, 50))
def test_many_tokens_are_filed_as_they_are_one_by_one(tokens, piece):
    slow, quick, mixed = Window(), Window(), Window()
    texts = [window.open(7, tokens) for window in (slow, quick, mixed)]
    while slow.file(texts[0], 1):
        pass
    quick.file(texts[1], len(tokens))
    while mixed.file(texts[2], piece):
        pass
    assert slow._latest == quick._latest == mixed._latest
    assert texts[0].previous == texts[1].previous == texts[2].previous


@settings(max_examples=60, deadline=None)
@given(LONG, LONG, st.integers(1, 70))
def test_what_is_forgotten_leaves_nothing_behind(first, second, piece):
    """With the first text forgotten, in pieces, the window is as if it had only held the second."""
    window, alone = Window(), Window()
    gone = window.open(0, [8, *first])
    window.file(gone, len(first) + 1)
    stays = window.open(1, [9, *second])
    window.file(stays, len(second) + 1)
    while window.forget(gone, piece):
        assert all(place >= gone.floor for number, place in seen(window, stays)[1] if number == 0)
    window.drop(gone)
    other = alone.open(1, [9, *second])
    alone.file(other, len(second) + 1)
    assert window._latest == alone._latest
    assert window.forget(stays, 1000) == len(second)
    assert len(window) == 0


def test_a_conversation_is_filed_once():
    """The next turn's prompt is the last turn with something behind it: only that is new."""
    window = Window()
    first = window.open(0, list(range(100)))
    window.file(first, 1000)
    first.tokens += range(100, 120)
    window.file(first, 1000)
    first.close()
    second = window.open(1, [*range(120), 500, 501, 502])
    assert second.donor == first.number
    assert second.num_waiting == 3  # what follows 119 is new, and so are the two behind it
    window.file(second, 1000)
    assert len(second.tokens) < 30
    second.tokens += [17, 18]
    window.file(second, 1000)
    assert seen(window, second) == (2, [(0, 19)])
    second.tokens += range(19, 40)
    assert seen(window, second)[0] == 23


def test_what_followed_differently_is_filed_though_it_begins_alike():
    window = Window()
    first = window.open(0, [1, 2, 3, 4, 5])
    window.file(first, 1000)
    second = window.open(1, [1, 2, 3, 9])
    window.file(second, 1000)
    assert second.donor == first.number
    third = window.open(2, [7, 2, 3])
    window.file(third, 1000)
    assert seen(window, third) == (2, [(1, 3 - second.base), (0, 3)])


def test_equal_keys_of_different_tokens_are_told_apart():
    """Keys are sums: a collision can be made, and must not become a guess."""
    window = Window()
    text = window.open(0, [5, 6, 7, 1, 2])
    window.file(text, 1000)
    asked = window.open(1, [40, 41])
    place = window._latest[0][keys_at(text.tokens, 2)[0]]
    window._latest[0][keys_at(asked.tokens, 2)[0]] = place
    assert window.sightings(asked) == (0, [])
