"""What a viewer is told of the tiers that KV blocks lie in, held against the tiers themselves, slot by slot."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from tests.engine.test_tiers import SHAPES, catch_up, conversations, make_engine
from tests.speculation.tiny import _SIZES
from twostroke.config import KVConfig
from twostroke.engine.engine import Engine
from twostroke.kv.tiers.tiers import KVTiers
from twostroke.kv.tiers.worth import Worth
from twostroke.models.random_weights import random_checkpoint
from twostroke.models.weights.tensor import WeightKind
from twostroke.server import watch_events as w
from twostroke.server.step_watch import StepWatch

Made = Callable[[bool], Engine]


@pytest.fixture
def made(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Made]:
    """Engines of two KV groups with 16 blocks each. What they give up goes to host memory, and from there to disk, if
    there is one."""
    monkeypatch.setattr(Worth, "loads", lambda *_: True)
    monkeypatch.setattr(Worth, "may_spill", lambda *_: True)
    (tmp_path / "config.json").write_text(json.dumps({**_SIZES, **SHAPES["full and window"]}))
    checkpoint, engines = random_checkpoint(tmp_path, WeightKind.F32, seed=3), list[Engine]()

    def make(has_disk: bool) -> Engine:
        disk = KVConfig(disk=str(tmp_path / "kv"), disk_gb=0.1) if has_disk else KVConfig()
        engines.append(make_engine(checkpoint, "reference", "auto", 16, replace(disk, host_gb=0.003)))
        return engines[-1]

    yield make
    for engine in engines:
        engine.close()


def slots_one_by_one(tiers: KVTiers, group: int) -> list[str]:
    """The slow twin of a map of host memory."""
    states = ["free"] * tiers.host.num_slots[group]
    for kept in [*tiers.host.kept(), *tiers.host._hidden]:
        if kept.group == group:
            assert states[kept.slot] == "free", "a slot holds one block"
            on_disk = tiers.disk is not None and tiers.disk.find(kept.node, group)
            states[kept.slot] = "moving" if kept.pins else "written" if on_disk else "kept"
    return states


def spread(runs: list[w.Run]) -> list[str]:
    ends = [first + count for first, count, _, _ in runs]
    assert [first for first, _, _, _ in runs] == [0, *ends[:-1]], "they cover every slot"
    assert all(holder == -1 for _, _, _, holder in runs)
    return [state for _, count, state, _ in runs for _ in range(count)]


@pytest.mark.parametrize("has_disk", [True, False])
def test_the_map_says_of_every_slot_what_the_tiers_say(made: Made, has_disk: bool) -> None:
    engine = made(has_disk)
    tiers, seen = engine.scheduler.ledger.tiers, set[str]()
    assert tiers is not None and (tiers.disk is not None) == has_disk
    for request in conversations():
        engine.add(request)
        while engine.busy:
            engine.step()
            [told] = [one for one in StepWatch(engine).take() if isinstance(one, w.KVMap)]
            for number, group in enumerate(told.groups):
                slow = slots_one_by_one(tiers, number)
                assert spread(group.host) == slow
                seen |= set(slow)
            host, *disks = told.tiers
            assert host.blocks == len(tiers.host) and len(disks) == has_disk
            assert all(disk.blocks <= len(tiers.disk or ()) for disk in disks), "a thread writes on meanwhile"
            catch_up(engine)  # else what it has no time for is kept here alone
    assert seen >= {"free", "moving"} and ("kept" in seen) != has_disk


def test_a_block_that_reaches_the_disk_is_told_without_a_step(made: Made) -> None:
    engine, now_s = made(True), 0.0
    watch = StepWatch(engine, clock=lambda: now_s)
    for request in conversations():
        engine.add(request)
    while engine.busy:
        engine.step()
    watch.released()
    states, blocks, end_s = set[str](), 0, time.monotonic() + 120
    while watch.map_due_in_s is not None and time.monotonic() < end_s:
        now_s += 1.0
        engine.scheduler.settle_tiers()
        for event in watch.take():
            assert isinstance(event, w.KVMap)
            states = {state for group in event.groups for _, _, state, _ in group.host}
            blocks = event.tiers[1].blocks
    tiers = engine.scheduler.ledger.tiers
    assert tiers is not None and tiers.disk is not None
    assert "written" in states and "moving" not in states and blocks == len(tiers.disk) > 20


def test_without_tiers_a_map_has_none(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({**_SIZES, **SHAPES["full"]}))
    engine = make_engine(random_checkpoint(tmp_path, WeightKind.F32, seed=3), "reference", "auto", 16, KVConfig())
    [told] = [one for one in StepWatch(engine).take() if isinstance(one, w.KVMap)]
    assert told.tiers == [] and [group.host for group in told.groups] == [[]]
    engine.close()
