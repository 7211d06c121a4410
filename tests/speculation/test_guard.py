"""What a drafter that is broken costs: its turns, and no stream anything."""

import pytest

from tests.speculation.scripted import Scripted, begun, turn
from twostroke.core.step import Step
from twostroke.speculation.drafter import Proposal
from twostroke.speculation.turn import MAX_FAULTS


class Raises(Scripted):
    def __init__(self, where):
        super().__init__()
        setattr(self, where, self.fail)
        self.num_calls = 0

    def fail(self, *_):
        self.num_calls += 1
        raise RuntimeError(f"broken {self.num_calls}")


@pytest.mark.parametrize("where", ["open", "extend", "propose", "close"])
def test_one_that_raises_loses_its_turn_and_then_all_turns(where):
    broken, sound = Raises(where), Scripted(name="sound")
    speculator = begun(broken, sound, rows=4)
    for _ in range(10):
        draft, told = turn(speculator, [1, 2, 3, 4, 9], rows=4)
    for row in range(4):
        speculator.update(Step(2, leaves=(row,)))
    assert told == (draft.method, 4)
    assert 1 <= broken.num_calls <= MAX_FAULTS
    told = ["the drafter scripted failed: RuntimeError: broken 1", "the drafter scripted is asked no more"]
    assert speculator.faults == told[: 1 + (broken.num_calls == MAX_FAULTS)]
    assert not sound.open_rows


def test_one_that_fails_for_one_stream_goes_on_for_others():
    class FailsOnce(Scripted):
        def extend(self, seq_id, token_ids):
            if seq_id == 1:
                raise ValueError("no such row")
            super().extend(seq_id, token_ids)

    drafter = FailsOnce()
    speculator = begun(drafter, rows=3)
    for _ in range(10):
        turn(speculator, [1, 2, 3, 4, 9], rows=3)
    assert [ask.seq_id for ask in drafter.asks[-1]] == [0, 2]
    assert drafter.open_rows == {0, 2}
    assert speculator.faults == ["the drafter scripted failed: ValueError: no such row"]


RUBBISH = [
    None,
    "text",
    [],
    [None],
    [Proposal((5000,), (0.9,))],
    [Proposal((-1,), (0.9,))],
    [Proposal((1,), (float("nan"),))],
    [Proposal((1,), (2.0,))],
    [Proposal((1, 2), (0.9,))],
    [Proposal(("a",), (0.9,))],
    [Proposal((1.0,), (0.9,))],
    [7],
    [Proposal((1,), (0.9,))] * 2,
    {0: (1,)},
]


@pytest.mark.parametrize("rubbish", RUBBISH, ids=repr)
def test_rubbish_is_never_computed(rubbish):
    drafter = Scripted()
    asked = []
    drafter.propose = lambda asks: asked.append(asks) or rubbish
    speculator = begun(drafter)
    for _ in range(6):
        assert turn(speculator, [9]) == (None, None)
    if rubbish is not None:
        assert len(asked) == MAX_FAULTS
        assert speculator.faults


def test_more_than_was_asked_for_is_cut():
    drafter = Scripted()
    drafter.propose = lambda asks: [Proposal((1, 2, 3, 4), (0.9,) * 4)]
    speculator = begun(drafter)
    draft, _ = turn(speculator, [1, 2, 9], most=2)
    assert draft.token_ids == (1, 2)
