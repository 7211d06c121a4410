"""The planner's arithmetic, worked out by hand: every formula that the page shows comes to the number beside it."""

from __future__ import annotations

import json
import shutil
import subprocess
from pathlib import Path

import pytest

from twostroke.cost.known_shapes import KNOWN_SHAPES
from twostroke.planner.asked.model import read_model
from twostroke.planner.asked.plan import plan_json

NODE = shutil.which("node")
QUESTIONS: tuple[dict[str, object], ...] = ({}, {"cached": 800}, {"users": 1}, {"users": 64, "count": 2, "accept": 0.7})
LEAST = {"TTFT expected", "TPOT expected", "Whole answer", "Throughput"}


@pytest.mark.skipif(NODE is None, reason="needs node")
def test_each_formula_comes_to_its_result() -> None:
    asked = [
        {"model": model, **QUESTIONS[(place + turn) % len(QUESTIONS)]}
        for place, model in enumerate(KNOWN_SHAPES)
        for turn in (0, 1)
    ]
    plans = [json.loads(plan_json(one, read_model)) for one in asked]
    fitting = [plan for plan in plans if plan["memory"]["max_users"] > 0]
    assert len(fitting) > len(plans) / 2
    file = Path(__file__).with_name("arithmetic_test.mjs")
    command = [str(NODE), "--no-warnings", str(file)]
    done = subprocess.run(command, input=json.dumps(fitting), capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-2000:]
    shown = json.loads(done.stdout)
    for plan, names in zip(fitting, shown, strict=True):
        assert set(names) >= LEAST, plan["model"]
    for name in ("KV of a user", "Users that fit", "Requests a second", "Cost"):
        assert any(name in names for names in shown), name
