"""A server whose engine is several processes: it answers as one does, a rank that is killed is an error to those in
flight and a new engine to those who come after, and no rank outlives the server."""

from __future__ import annotations

import json
import os
import signal
import sys
from pathlib import Path

import pytest

from tests.engine.test_ranks import children, wait_until_ended
from tests.server.conftest import MODEL_OPTIONS
from tests.server.running import CLIENT, STOP_LIMIT_S, running_server
from twostroke import LLM, SamplingParams

LONG = {"prompt": "Count:", "temperature": 0, "max_tokens": 1500, "ignore_eos": True, "speculation": "off"}
SHORT = {"prompt": "The sea is", "temperature": 0, "max_tokens": 8}


@pytest.mark.slow
@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="reads /proc")
def test_a_rank_that_is_killed_is_mended_and_ctrl_c_ends_all(smollm2_path: Path, tmp_path: Path, offline: LLM) -> None:
    expected = offline.generate(SHORT["prompt"], SamplingParams(temperature=0.0, max_tokens=8))[0].text
    with running_server(tmp_path / "log", *MODEL_OPTIONS, "--tensor-parallel", "2") as server:
        assert server.post("/v1/completions", SHORT).json()["choices"][0]["text"] == expected
        (rank,) = children(server.engine_pid())
        body = {**LONG, "stream": True}
        with CLIENT.stream("POST", f"{server.base_url}/completions", json=body) as stream:
            lines = stream.iter_lines()
            assert next(lines).startswith("data: ")
            os.kill(rank, signal.SIGKILL)
            errors = [json.loads(line[6:])["error"] for line in lines if line.startswith('data: {"error"')]
        assert len(errors) == 1
        server.wait_until(lambda: "the engine ends: the cpu backend is lost: rank 1 of 2" in server.log())
        server.wait_until(lambda: server.metric("twostroke_engine_restarts_total", reason="died") == 1)
        server.wait_until(lambda: server.get("/health").status_code == 200)
        assert server.post("/v1/completions", SHORT).json()["choices"][0]["text"] == expected
        (rank,) = children(server.engine_pid())
        server.process.send_signal(signal.SIGINT)
        server.process.wait(STOP_LIMIT_S)
        wait_until_ended([rank])


@pytest.mark.slow
@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="reads /proc")
def test_no_rank_outlives_a_server_that_is_killed(smollm2_path: Path, tmp_path: Path) -> None:
    with running_server(tmp_path / "log", *MODEL_OPTIONS, "--tensor-parallel", "2") as server:
        processes = [server.engine_pid(), *children(server.engine_pid())]
        assert len(processes) == 2
        server.process.kill()
        wait_until_ended(processes)
