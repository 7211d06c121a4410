"""The protocol, both sides of it, over a real process."""

import os
import sys
import time
from pathlib import Path

import pytest

from bench.peers.worker import Worker, WorkerError

FAKE = Path(__file__).parent / "fake_adapter.py"


@pytest.fixture
def worker(tmp_path):
    with Worker("fake", [sys.executable, str(FAKE)], tmp_path / "fake.log", os.environ) as worker:
        yield worker


def process_state(pid):
    text = Path(f"/proc/{pid}/stat").read_text()
    return text[text.rindex(")") + 2]


def test_a_question_is_answered_and_stray_output_goes_to_the_log(worker):
    answer = worker.load(Path("some.gguf"), 2, {})
    assert answer["facts"] == {"model": "some.gguf", "threads": 2}
    assert answer["load_s"] >= 0.0
    outputs = worker.generate([[1, 2], [10]], 3)
    assert [output.token_ids for output in outputs] == [(3, 4, 5), (10, 11, 12)]
    for output in outputs:
        assert list(output.token_times_s) == sorted(output.token_times_s)
        assert output.token_times_s[0] >= 0.0
    log = worker.log.read_text()
    assert "a library that prints" in log
    assert "writes to the descriptor" in log


def test_texts_become_vectors_and_the_seconds_are_the_engines_own(worker):
    worker.load(Path("some folder"), 2, {})
    seconds, vectors = worker.embed(["a", "abc"])
    assert vectors == [[1.0, 0.0], [3.0, 0.0]]
    assert seconds >= 0.0


def test_an_error_is_a_sentence_and_the_worker_lives_on(worker):
    with pytest.raises(WorkerError, match="fake: RuntimeError: no such model"):
        worker.load(Path("some.gguf"), 2, {"fails": True})
    worker.load(Path("some.gguf"), 2, {})
    with pytest.raises(WorkerError, match="NotImplementedError: this adapter cannot score tokens"):
        worker.score([1, 2, 3])
    assert worker.generate([[1]], 1)[0].token_ids == (1,)


def test_a_worker_that_dies_is_noticed(worker):
    worker.load(Path("some.gguf"), 2, {})
    with pytest.raises(WorkerError, match="ended during 'generate'"):
        worker.generate([[1]], 999)
    with pytest.raises(WorkerError, match="ended during 'generate'"):
        worker.generate([[1]], 1)


def test_a_worker_that_hangs_is_killed(worker):
    worker.load(Path("some.gguf"), 2, {})
    started_s = time.perf_counter()
    with pytest.raises(WorkerError, match="no answer to 'generate'"):
        worker.ask(0.3, op="generate", prompts=[[1]], max_tokens=998)
    assert time.perf_counter() - started_s < 50.0  # it would hang for 60


@pytest.mark.skipif(not Path("/proc/self/stat").exists(), reason="reads the process's state from /proc")
def test_between_turns_the_worker_is_stopped(worker):
    worker.load(Path("some.gguf"), 2, {})
    worker.pause()
    deadline_s = time.perf_counter() + 60.0
    while process_state(worker._process.pid) != "T" and time.perf_counter() < deadline_s:
        time.sleep(0.01)
    assert process_state(worker._process.pid) == "T"
    worker.resume()
    assert worker.generate([[5]], 1)[0].token_ids == (5,)
