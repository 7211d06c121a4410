"""A whole server whose engine is made to misbehave from inside its own process: a loop that stands still is ended, a
step that takes as long as was predicted is not."""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path

import pytest

from tests.server.conftest import MODEL_OPTIONS
from tests.server.running import running_server

STUCK_TOKENS, SLOW_TOKENS, SLOW_S = 13, 14, 8.0

FAULT = f"""
import sys
if "twostroke.server.engine_process" in sys.orig_argv:
    import time
    from twostroke.cost.step_cost import StepCost
    from twostroke.engine.engine import Engine
    real_launch, real_seconds, asked = Engine._launch, StepCost.seconds, [0]

    def launch(self):
        waiting = [sequence.request.sampling.max_tokens for sequence in self.scheduler._admission.waiting]
        asked[0] = 1 if {SLOW_TOKENS} in waiting else 0
        if {STUCK_TOKENS} in waiting:
            time.sleep(3600)
        real_launch(self)
        if asked[0]:
            time.sleep({SLOW_S})

    def seconds(self, work):
        return 2.0 if asked[0] else real_seconds(self, work)

    Engine._launch, StepCost.seconds = launch, seconds
"""


@pytest.mark.slow
def test_a_stuck_loop_is_ended_and_a_long_step_is_not(smollm2_path: Path, tmp_path: Path) -> None:
    (tmp_path / "sitecustomize.py").write_text(FAULT)
    path = os.pathsep.join([str(tmp_path), *sys.path])
    options = (*MODEL_OPTIONS, "--engine-timeout", "2")  # a loop may then stand still for 6 s
    body = {"prompt": "The sea is", "temperature": 0, "ignore_eos": True}
    with running_server(tmp_path / "log", *options, PYTHONPATH=path) as server:
        engine = server.engine_pid()
        began_s = time.monotonic()
        answer = server.post("/v1/completions", {**body, "max_tokens": SLOW_TOKENS})
        assert answer.status_code == 200 and time.monotonic() - began_s > SLOW_S
        assert server.engine_pid() == engine
        began_s = time.monotonic()
        answer = server.post("/v1/completions", {**body, "max_tokens": STUCK_TOKENS})
        assert answer.status_code == 503 and "the engine hung" in answer.json()["error"]["message"]
        assert 4 < time.monotonic() - began_s < 40
        assert "its loop has not moved for" in server.log()
        end_s = time.monotonic() + 60
        while server.get("/health").status_code != 200:
            assert time.monotonic() < end_s
            time.sleep(0.1)
        assert server.post("/v1/completions", {**body, "max_tokens": 4}).status_code == 200
