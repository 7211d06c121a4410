"""What is noted of an engine's steps, held against what the engine really did: random requests in little KV, so that
streams lose theirs and come back, steps that fail, requests that are aborted, and a watch that begins in the middle."""

from __future__ import annotations

import random
from collections import Counter
from itertools import pairwise

import pytest

from tests.engine.test_failures import VOCAB, Successor, engine_over
from twostroke.core.events import TokenEvent
from twostroke.core.request import Request
from twostroke.core.sampling_params import SamplingParams
from twostroke.engine.engine import Engine
from twostroke.kv.ledger import KVLedger
from twostroke.server import step_watch
from twostroke.server import watch_events as w
from twostroke.server.step_watch import MAX_RUNS, StepWatch, coarser


def blocks_one_by_one(ledger: KVLedger, rs: set[int]) -> list[tuple[str, set[int]]]:
    """The slow twin of a map: each block's state, and all who hold it."""
    [pool] = ledger.pools
    held: dict[int, set[int]] = {}
    for seq_id in rs:
        holding = ledger._holdings.get(seq_id)
        for block in holding.tables[0] if holding is not None else ():
            if block is not None:
                held.setdefault(block, set()).add(seq_id)
    states = []
    for block in range(pool.num_blocks):
        number = pool.references(block)
        state = "shared" if number > 1 else "used" if number else "cached" if pool.is_findable(block) else "free"
        states.append((state, held.get(block, set())))
    return states


class Run:
    def __init__(self, engine: Engine, seed: int) -> None:
        self.engine, self._draw = engine, random.Random(seed)
        self.watch: StepWatch | None = None
        self.events: list[w.EngineEvent] = []
        self.tokens: Counter[tuple[str, int]] = Counter()
        self.since: Counter[tuple[str, int]] = Counter()
        """Tokens that came while it was watched."""
        self.rs: set[int] = set()
        engine.on_launch = lambda step: self.watch and self.watch.launched(step, None)
        engine.on_step = lambda step, result: self.watch and self.watch.came_back(step, result)

    def add(self, name: str) -> None:
        draw = self._draw
        prompt = tuple(draw.randrange(VOCAB) for _ in range(draw.choice((1, 3, 9, 17))))
        if draw.random() < 0.5:
            prompt = tuple(range(8)) + prompt[:9]
        n, most = draw.choice((1, 1, 2)), draw.randrange(1, 14)
        self.engine.add(Request(name, prompt, SamplingParams(temperature=0.0, max_tokens=most, n=n)))
        self.rs |= {one.seq_id for one in self.engine.scheduler.unfinished(name)}
        if self.watch is not None:
            self.watch.added(self.engine.scheduler.unfinished(name)[0].request)

    def step(self) -> None:
        for event in self.engine.step():
            if isinstance(event, TokenEvent):
                self.tokens[event.request_id, event.sample_index] += len(event.token_ids)
                if self.watch is not None:
                    self.since[event.request_id, event.sample_index] += len(event.token_ids)
        if self.watch is not None:
            self.events += self.watch.take()

    def play(self, number: int = 24, watched_from: int = 0) -> None:
        for index in range(number):
            if index == watched_from:
                self.watch = StepWatch(self.engine)
            self.add(f"{index}")
            if self._draw.random() < 0.15:
                self.engine.abort(f"{self._draw.randrange(index + 1)}")
            for _ in range(self._draw.randrange(4)):
                self.step()
        while self.engine.busy:
            self.step()

    def of(self, kind: type[w.EngineEvent]) -> list[w.EngineEvent]:
        return [event for event in self.events if isinstance(event, kind)]


def told_tokens(run: Run) -> Counter[tuple[str, int]]:
    names = {one.r: (one.id, one.sample) for one in run.of(w.Arrived)}  # type: ignore[union-attr]
    told: Counter[tuple[str, int]] = Counter()
    for step in run.of(w.Stepped):
        assert isinstance(step, w.Stepped)
        for r, start, count, total in step.chunks:
            told[names[r]] += start + count == total
        for r, _, _, held in step.slots:
            assert r in names or held == -1, "it had ended before the watch began"
            told[names.get(r, ("", 0))] += 1 + held
    return +told


@pytest.mark.parametrize("watched_from", [0, 9])
@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize("run_ahead", [True, False])
def test_the_steps_tell_every_token_and_everybody_who_lost_its_kv(
    seed: int, run_ahead: bool, watched_from: int
) -> None:
    engine = engine_over(Successor(), run_ahead=run_ahead)
    run = Run(engine, seed)
    run.play(watched_from=watched_from)
    told, got = told_tokens(run), +run.since
    # An aborted sample's last token may have been computed, and dropped.
    aborted = {key for key in told | got if told[key] != got[key]}
    assert all(told[key] - got[key] in (0, 1) for key in told | got) and len(aborted) <= 6
    if watched_from == 0:
        arrived = run.of(w.Arrived)
        assert {one.r for one in arrived} == run.rs  # type: ignore[union-attr]
        preempted = sum(len(step.preempted) for step in run.of(w.Stepped))  # type: ignore[union-attr]
        never_told = engine.scheduler.counts().preemptions - preempted
        assert 0 <= never_told <= 2, "one that is aborted before the next step leaves like any that ended"
        admitted = [one.r for one in run.of(w.Admitted)]  # type: ignore[union-attr]
        assert len(admitted) == len(set(admitted)) and set(admitted) <= run.rs
    assert not run.watch._rows or len(run.watch._rows) <= 6  # type: ignore[union-attr]
    assert len(run.watch._launched) == 0  # type: ignore[union-attr]


def test_some_lose_their_kv_in_these_runs() -> None:
    """Else the test above would say nothing of it."""
    preempted = 0
    for seed in range(6):
        run = Run(engine_over(Successor()), seed)
        run.play()
        preempted += sum(len(step.preempted) for step in run.of(w.Stepped))  # type: ignore[union-attr]
    assert preempted > 3


@pytest.mark.parametrize("seed", range(4))
def test_a_step_that_fails_is_not_told_and_those_after_it_are(seed: int) -> None:
    engine = engine_over(Successor(broken_forwards=frozenset({3, 9, 10}), broken_launches=frozenset({6})))
    run = Run(engine, seed)
    run.play()
    ids = [step.id for step in run.of(w.Stepped)]  # type: ignore[union-attr]
    assert ids == sorted(set(ids)) and len(ids) > 20
    assert len(run.watch._launched) <= 1  # type: ignore[union-attr]


@pytest.mark.parametrize("seed", range(4))
def test_a_map_says_of_every_block_what_its_pool_and_tables_say(seed: int) -> None:
    engine = engine_over(Successor())
    run = Run(engine, seed)
    states: Counter[str] = Counter()
    for index in range(20):
        run.add(f"{index}")
        for _ in range(4):
            run.step()
            [runs] = engine.scheduler.ledger.block_runs()
            told = [(one.state, one.seq_id) for one in runs for _ in range(one.length)]
            slow = blocks_one_by_one(engine.scheduler.ledger, run.rs)
            assert [one.first for one in runs] == [sum(before.length for before in runs[:n]) for n in range(len(runs))]
            assert all(a[2:] != b[2:] for a, b in pairwise(runs)), "runs are as long as they can be"
            for (state, holder), (true_state, holders) in zip(told, slow, strict=True):
                assert state == true_state and (holder == -1 if not holders else holder in holders)
            states.update(state for state, _ in told)
    assert set(states) == {"free", "cached", "used", "shared"}


def test_a_map_of_very_many_pieces_is_told_in_fewer_that_cover_the_same_blocks() -> None:
    draw, runs, first = random.Random(5), list[w.Run](), 0
    for index in range(9000):
        length = draw.randrange(1, 4)
        runs.append((first, length, ("used", "free", "cached")[index % 3], index if index % 3 == 0 else -1))
        first += length
    assert coarser(runs, 9000) == runs
    fewer = coarser(runs, MAX_RUNS)
    assert (
        MAX_RUNS // 2 <= len(fewer) <= MAX_RUNS
        and len(w.encode_json(w.KVMap(0.0, [w.GroupMap(fewer)], 0.5, []))) < 60_000
    )
    ends = [at + length for at, length, _, _ in fewer]
    assert [at for at, _, _, _ in fewer] == [0, *ends[:-1]] and ends[-1] == first
    assert all((holder >= 0) == (state == "used") for _, _, state, holder in fewer)
    assert coarser([(0, 2, "free", -1), (2, 5, "used", 7), (7, 2, "free", -1)], 1) == [(0, 9, "used", 7)]


def test_the_engines_own_maps_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(step_watch, "MAX_RUNS", 3)
    run = Run(engine_over(Successor()), 1)
    longest = 0
    for index in range(12):
        run.add(f"{index}")
        run.step()
        longest = max(longest, len(run.engine.scheduler.ledger.block_runs()[0]))
        [told] = [one for one in StepWatch(run.engine).take() if isinstance(one, w.KVMap)]
        assert sum(len(group.runs) for group in told.groups) <= 3
    assert longest > 3


def test_maps_come_when_something_moved_and_four_times_a_second_at_most() -> None:
    now_s = 50.0
    engine = engine_over(Successor())
    run = Run(engine, 1)
    run.watch = StepWatch(engine, clock=lambda: now_s)
    assert len([one for one in run.watch.take() if isinstance(one, w.KVMap)]) == 1
    assert run.watch.map_due_in_s is None and run.watch.take() == []
    run.add("one")
    run.step()
    assert run.of(w.KVMap) == [] and run.watch.map_due_in_s == pytest.approx(0.25)
    now_s += 0.3
    assert [type(one) for one in run.watch.take()] == [w.KVMap] and run.watch.map_due_in_s is None
    run.watch.released()
    now_s += 0.3
    assert run.watch.take() == [], "nothing has changed"


def test_fast_steps_are_told_together_and_nobody_waits_for_a_slow_one() -> None:
    now_s = 50.0
    engine = engine_over(Successor())
    watch = StepWatch(engine, clock=lambda: now_s)
    engine.on_launch = lambda step: watch.launched(step, 0.2 if step.prefills else 0.001)
    engine.on_step = watch.came_back

    def told(after_s: float) -> list[str]:
        nonlocal now_s
        engine.step()
        now_s += after_s
        return [type(one).__name__ for one in watch.take(is_asked_again=engine.busy) if not isinstance(one, w.KVMap)]

    def add(name: str, first: int) -> None:
        prompt = tuple(range(first, first + 9))
        engine.add(Request(name, prompt, SamplingParams(temperature=0.0, max_tokens=14)))
        watch.added(engine.scheduler.unfinished(name)[0].request)

    add("one", 0)
    assert "Arrived" in told(0.01), "an end may follow at once"
    told(0.06)
    assert [told(0.012) for _ in range(5)] == [[], [], [], [], 5 * ["Stepped"]]
    assert told(0.012) == []
    add("two", 9)
    assert told(0.012) == ["Stepped", "Arrived", "Admitted", "Stepped"], "with what had waited"
    assert told(0.012) == ["Stepped"], "the chunk in flight takes longer than steps may wait"
    while engine.busy:
        last = told(0.012)
    assert last, "nothing waits for an engine that is done"


def test_an_engine_that_is_not_watched_has_no_watch_and_does_no_more() -> None:
    engine = engine_over(Successor())
    run = Run(engine, 2)
    run.play(watched_from=1000)
    assert run.watch is None and run.events == [] and sum(run.tokens.values()) > 50


def test_without_running_ahead_a_step_is_back_before_the_next_is_launched() -> None:
    engine = engine_over(Successor())
    run = Run(engine, 3)
    for index in range(3):
        run.add(f"{index}")
    run.step()
    assert engine.num_in_flight == 1
    engine.run_ahead(False)
    run.step()
    assert engine.num_in_flight == 0
    before = sum(run.tokens.values())
    run.step()
    assert engine.num_in_flight == 0 and sum(run.tokens.values()) > before
    engine.run_ahead(True)
    run.step()
    assert engine.num_in_flight == 1
    engine.abort("0")
    assert {event.request_id for event in engine.take_events()} == {"0"} and engine.take_events() == []
