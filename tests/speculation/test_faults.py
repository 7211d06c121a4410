"""A drafter that raises, returns rubbish or is slow loses its turn, and in time all turns: every answer is what it is
without drafts, another drafter's still hold, and what went wrong is told once."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from decimal import Decimal
from typing import Any

import pytest

from tests.speculation.oracle import Oracle
from tests.speculation.random_requests import Told, play, random_requests
from tests.speculation.tiny import VOCAB_SIZE, Room, Sizes, make_checkpoint, make_engine, make_tokenizer
from twostroke.backends.host.host_backend import HostBackend
from twostroke.core.request import Request
from twostroke.core.step import DraftCosts
from twostroke.engine.engine import Engine
from twostroke.models.checkpoint import Checkpoint
from twostroke.speculation import guard, speculator, turn
from twostroke.speculation.drafter import Ask, Drafter, Proposal
from twostroke.speculation.speculator import MAX_SLOW
from twostroke.speculation.turn import MAX_FAULTS
from twostroke.text.tokenizer import Tokenizer

NUM_REQUESTS = 16
SIZES = Sizes()


@dataclass
class Scene:
    checkpoint: Checkpoint
    tokenizer: Tokenizer
    requests: list[Request]
    plain: Told

    def engine(self, drafters: list[Drafter] | None, room: Room | None = None) -> Engine:
        return make_engine("cpu", self.checkpoint, self.tokenizer, SIZES, drafters, room=room)

    def play(self, *drafters: Drafter, room: Room | None = None) -> tuple[Told, list[str]]:
        """What the requests are told, which is what they are told without drafts; and the faults."""
        engine = self.engine(list(drafters), room)
        told = play(engine, self.requests)
        assert told.samples == self.plain.samples
        assert isinstance(engine.backend, HostBackend) and engine.backend.speculator is not None
        return told, engine.backend.speculator.faults


@pytest.fixture(scope="module")
def scene(tmp_path_factory: pytest.TempPathFactory) -> Scene:
    checkpoint, tokenizer = make_checkpoint(tmp_path_factory.mktemp("tiny")), make_tokenizer()
    requests = random_requests(NUM_REQUESTS, tokenizer)
    scene = Scene(checkpoint, tokenizer, requests, Told())
    scene.plain = play(scene.engine(None), requests)
    return scene


@dataclass
class Raises(Oracle):
    """Raises in one method, from the given call on, or at that call alone."""

    name: str = "broken"
    method: str = "propose"
    first: int = 0
    once: bool = False
    calls: dict[str, int] = field(default_factory=dict)

    def _call(self, method: str) -> None:
        count = self.calls[method] = self.calls.get(method, 0) + 1
        if method == self.method and (count == self.first + 1 or (count > self.first and not self.once)):
            raise RuntimeError(f"call {count}")

    def open(self, seq_id: int, request: Request, token_ids: Sequence[int]) -> None:
        self._call("open")
        super().open(seq_id, request, token_ids)

    def extend(self, seq_id: int, token_ids: Sequence[int]) -> None:
        self._call("extend")
        super().extend(seq_id, token_ids)

    def propose(self, asks: Sequence[Ask]) -> list[Proposal]:
        self._call("propose")
        return super().propose(asks)

    def close(self, seq_id: int) -> None:
        self._call("close")
        super().close(seq_id)


@pytest.mark.parametrize("first", [0, 7])
@pytest.mark.parametrize("method", ["open", "extend", "propose", "close"])
def test_one_that_raises(scene: Scene, method: str, first: int) -> None:
    broken = Raises(scene.plain.answers(), method=method, first=first)
    told, faults = scene.play(broken, Oracle(scene.plain.answers(), 0.95))  # as good as it, and surer of itself
    assert faults[0].startswith("the drafter broken failed: RuntimeError: call ")
    assert len(faults) <= 2 and len(set(faults)) == len(faults)
    assert sum(held for _, held in told.held["oracle"]) > 0
    if method == "propose":
        assert faults[1:] == ["the drafter broken is asked no more"]
        assert broken.calls["propose"] == first + MAX_FAULTS


def test_one_that_raises_once_goes_on(scene: Scene, monkeypatch: pytest.MonkeyPatch) -> None:
    logged: list[str] = []
    monkeypatch.setattr(speculator.logger, "warning", logged.append)
    told, faults = scene.play(Raises(scene.plain.answers(), method="propose", first=3, once=True))
    assert faults == ["the drafter broken failed: RuntimeError: call 4"]
    assert logged == faults
    assert len(told.held["broken"]) > MAX_FAULTS


class Unshowable:
    def __getitem__(self, place: object) -> object:
        raise RuntimeError("nothing here")

    def __repr__(self) -> str:
        raise RuntimeError("nor here")


@dataclass
class Rubbish(Oracle):
    """Says the same to every question."""

    name: str = "broken"
    make: Callable[[int], Any] = field(kw_only=True)
    num_asked: int = 0

    def propose(self, asks: Sequence[Ask]) -> list[Proposal]:
        self.num_asked += 1
        return self.make(len(asks))  # type: ignore[no-any-return]


def each(proposal: Any) -> Callable[[int], Any]:
    return lambda count: [proposal] * count


RUBBISH: dict[str, Callable[[int], Any]] = {
    "nothing": lambda count: None,
    "a number": lambda count: 7,
    "a text": lambda count: "x" * count,
    "a generator": lambda count: (Proposal((1,), (0.5,)) for _ in range(count)),
    "too few": lambda count: [Proposal((1,), (0.5,))] * (count - 1),
    "too many": lambda count: [Proposal((1,), (0.5,))] * (count + 1),
    "no proposals": each(None),
    "numbers": each(3),
    "one part": each(((1,),)),
    "fewer chances": each(Proposal((1, 2), (0.5,))),
    "more chances": each(Proposal((1,), (0.5, 0.5))),
    "negative ids": each(Proposal((-1,), (0.5,))),
    "ids beyond the vocabulary": each(Proposal((VOCAB_SIZE,), (0.5,))),
    "huge ids": each(Proposal((10**30,), (0.5,))),
    "ids that are floats": each(Proposal((1.5,), (0.5,))),  # type: ignore[arg-type]
    "ids that are texts": each(Proposal(("a",), (0.5,))),  # type: ignore[arg-type]
    "chances that are no numbers": each(Proposal((1,), (math.nan,))),
    "infinite chances": each(Proposal((1,), (math.inf,))),
    "negative chances": each(Proposal((1,), (-0.1,))),
    "chances above one": each(Proposal((1,), (1.1,))),
    "chances that are texts": each(Proposal((1,), ("b",))),  # type: ignore[arg-type]
    "what raises when it is looked at": each(Unshowable()),
    "what raises inside": each(Proposal((Unshowable(),), (0.5,))),  # type: ignore[arg-type]
}


@pytest.mark.parametrize("what", RUBBISH)
def test_one_that_returns_rubbish(scene: Scene, what: str) -> None:
    broken = Rubbish({}, make=RUBBISH[what])
    told, faults = scene.play(broken, Oracle(scene.plain.answers()))
    assert faults[0].startswith("the drafter broken returned ")
    assert faults[1:] == ["the drafter broken is asked no more"]
    assert broken.num_asked <= MAX_FAULTS
    assert "broken" not in told.held
    assert sum(held for _, held in told.held["oracle"]) > 0


def test_more_than_was_asked_for_is_cut_and_other_numbers_are_taken(scene: Scene) -> None:
    told, faults = scene.play(Rubbish({}, make=each(([5] * 1000, [Decimal("0.5")] * 1000))))
    assert not faults
    assert max(count for count, _ in told.held["broken"]) <= 32


@dataclass
class Clock:
    """Time that passes when somebody says so."""

    now_s: float = 0.0

    def perf_counter(self) -> float:
        return self.now_s


class Costed(Room):
    """A plain step takes a second, and drafts nothing more."""

    def costs(self) -> DraftCosts:
        return DraftCosts((0, 1000), (1.0, 1.0))


@dataclass
class Slow(Raises):
    """Takes its time in one method."""

    clock: Clock = field(default_factory=Clock)
    takes_s: float = 0.6
    others_take_s: float = 0.0

    def _call(self, method: str) -> None:
        self.calls[method] = self.calls.get(method, 0) + 1
        self.clock.now_s += self.takes_s if method == self.method else self.others_take_s


@pytest.mark.parametrize(
    ("takes_s", "chance", "sits_out"), [(0.001, 0.0, False), (0.4, 0.0, True), (0.6, 0.0, True), (0.6, 1.0, False)]
)
def test_one_that_takes_more_time_than_its_drafts_bring_sits_turns_out(
    scene: Scene, takes_s: float, chance: float, sits_out: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = Clock()
    monkeypatch.setattr(guard, "time", clock)
    monkeypatch.setattr(speculator, "MAX_REST", 0)
    slow = Slow(scene.plain.answers(), chance, clock=clock, takes_s=takes_s, others_take_s=0.001)
    told, faults = scene.play(slow, room=Costed())
    assert not faults
    if sits_out:
        assert told.num_steps > 40
        assert slow.calls["propose"] < 8
    else:
        assert slow.calls["propose"] > told.num_steps / 3


@pytest.mark.parametrize(("takes_s", "is_slow"), [(0.01, False), (0.6, True)])
def test_one_that_is_slow_to_hear_of_tokens_has_a_pause(
    scene: Scene, takes_s: float, is_slow: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = Clock()
    monkeypatch.setattr(guard, "time", clock)
    slow = Slow(scene.plain.answers(), 0.0, method="extend", clock=clock, takes_s=takes_s)
    _, faults = scene.play(slow, room=Costed())
    if is_slow:
        assert faults == ["the drafter broken takes too long to hear of tokens: it has a pause of 256 steps"]
        assert MAX_SLOW <= slow.calls["extend"] < 200
    else:
        assert not faults


def test_behind_its_pause_it_is_asked_for_new_streams(scene: Scene, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever held it up has passed meanwhile; streams that it did not hear of go without it."""
    clock = Clock()
    monkeypatch.setattr(guard, "time", clock)
    monkeypatch.setattr(speculator, "MAX_SLOW", 2)
    monkeypatch.setattr(turn, "FIRST_PAUSE", 4)
    slow = Slow(scene.plain.answers(), 0.8, method="extend", clock=clock, takes_s=0.6)
    opened: list[int] = []

    def pause(own: turn.Turn) -> int:
        slow.takes_s = 0.0
        opened.append(slow.calls["open"])
        return whole_pause(own)

    whole_pause = turn.Turn.pause
    monkeypatch.setattr(turn.Turn, "pause", pause)
    told, faults = scene.play(slow, room=Costed())
    assert faults == ["the drafter broken takes too long to hear of tokens: it has a pause of 4 steps"]
    assert len(opened) == 1 and opened[0] < slow.calls["open"]
    assert slow.calls["propose"] > 10 and told.held["broken"]
