"""Turns, with engines that count instead of computing: real processes, real signals, no model."""

import json
import os
import sys
from pathlib import Path

import pytest

from bench.peers.crew import Crew
from bench.peers.engines import Engine
from bench.peers.guard import Guard
from bench.peers.home import Home
from bench.peers.install import RECORD, InstallError, ensure_installed, run_logged
from bench.peers.speed import Plan, measure_speed, rotated
from bench.peers.startup import measure_startup
from bench.peers.workloads import QUICK, PromptSource

FAKE = Path(__file__).parent / "fake_adapter.py"


def engine(name, **options):
    return Engine(name, "fake", str(FAKE), "as-is", True, options)


@pytest.fixture
def crew(tmp_path):
    home = Home(tmp_path)
    home.python("fake").parent.mkdir(parents=True)
    home.python("fake").symlink_to(sys.executable)
    (home.venv("fake") / RECORD).write_text(json.dumps({"venv_mb": 1.0}))
    crew = Crew(home, tmp_path / "some.gguf", 1, say=lambda message: None)
    yield crew
    crew.end()


def test_engines_take_turns_and_one_that_fails_leaves(crew):
    engines = crew.prepare([engine("first"), engine("second"), engine("broken", fails=True)])
    crew.start_all(engines)
    assert list(crew.absent) == ["broken"]
    samples, repetitions_done = [], []
    plan = Plan(list(QUICK), repetitions=2, retries=0)
    source = PromptSource(range(10_000))
    measure_speed(crew, engines, plan, source, Guard(1, 0.0), after=lambda: repetitions_done.append(1), samples=samples)
    assert [(s.repetition, s.workload, s.engine) for s in samples] == [
        (repetition, workload.name, name)
        for repetition, order in enumerate([("first", "second"), ("second", "first")])
        for workload in QUICK
        for name in order
    ]
    assert all(value > 0.0 for sample in samples for value in sample.values.values())
    assert len(repetitions_done) == 2


def test_a_start_is_a_fresh_process_and_the_first_round_is_not_counted(crew):
    engines = crew.prepare([engine("first"), engine("broken", fails=True)])
    samples = []
    plan = Plan([QUICK[0]], repetitions=2, retries=0)
    measure_startup(crew, engines, QUICK[0], plan, PromptSource(range(1_000)), Guard(1, 0.0), samples)
    assert [(s.engine, s.workload, s.repetition) for s in samples] == [("first", "start", 0), ("first", "start", 1)]
    assert all(0.0 < s.values["loaded_s"] <= s.values["first_token_s"] for s in samples)
    assert "no such model" in crew.absent["broken"]


def test_the_order_rotates():
    assert rotated(["a", "b", "c"], 1) == ["b", "c", "a"]
    assert rotated(["a", "b", "c"], 3) == ["a", "b", "c"]
    assert rotated([], 2) == []


def test_a_peer_that_cannot_be_installed_is_a_sentence(tmp_path):
    log = tmp_path / "install.log"
    with pytest.raises(InstallError, match=r"failed: the last word; see .*install\.log"):
        run_logged([sys.executable, "-c", "print('the last word'); raise SystemExit(1)"], log, dict(os.environ))
    run_logged([sys.executable, "-c", "pass"], log, dict(os.environ))


def test_what_is_installed_is_not_installed_again(crew):
    assert ensure_installed(crew.home, "fake", crew.say) == {"venv_mb": 1.0}
