"""The commands as a user types them, in a process of their own."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest


def twostroke(*arguments: str, stdin: str | None = None, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", "from twostroke.cli import main; main()", *arguments],
        input=stdin if stdin is not None else "",
        capture_output=True,
        text=True,
        timeout=120,
        env={**os.environ, "COLUMNS": "140", "PYTHONPATH": os.pathsep.join(sys.path), **environment},
    )


def test_run_streams_an_answer_and_shows_both_phases(smollm2_path: Path) -> None:
    done = twostroke("run", "smollm2", "What is the capital of France?", "--max-tokens", "24")
    assert done.returncode == 0, done.stderr
    assert "Paris" in done.stdout
    assert "prefill (read)" in done.stderr
    assert "decode (write)" in done.stderr
    assert "TTFT" in done.stderr and "TPOT" in done.stderr and "%" in done.stderr


def test_run_reads_standard_input_and_writes_json(smollm2_path: Path) -> None:
    done = twostroke("run", str(smollm2_path), "-", "--json", "--max-tokens", "8", stdin="Say hello.")
    assert done.returncode == 0, done.stderr
    answer = json.loads(done.stdout)
    assert answer["text"]
    assert answer["timing"]["output_tokens"] == len(answer["token_ids"])
    assert 0 < answer["floor"]["prefill_s"] < answer["timing"]["prefill_s"]


def test_second_run_answers_within_three_seconds_of_process_start(smollm2_path: Path) -> None:
    twostroke("run", "smollm2", "Hello", "--max-tokens", "1")
    best_s = 60.0
    for _ in range(3):  # a shared machine: the best of three is what the program takes
        started_s = time.perf_counter()
        assert twostroke("run", "smollm2", "Hello", "--max-tokens", "1").returncode == 0
        best_s = min(best_s, time.perf_counter() - started_s)
    assert best_s < 3.0


def test_chat_shows_prefix_hits_turn_by_turn(smollm2_path: Path) -> None:
    turns = "My name is Ada and I write programs for the analytical engine.\nWhat is my name?\n/reset\n/exit\n"
    done = twostroke("chat", "smollm2", "--max-tokens", "16", "--temperature", "0", stdin=turns)
    assert done.returncode == 0, done.stderr
    lines = [line for line in done.stderr.splitlines() if line.startswith("read ")]
    assert len(lines) == 2
    assert "(0 cached)" in lines[0]
    assert "(0 cached)" not in lines[1]


def test_inspect_describes_the_model(smollm2_path: Path) -> None:
    done = twostroke("inspect", "smollm2")
    assert done.returncode == 0, done.stderr
    for text in ("134.5M", "Q4_1 210 tensors", "30 of 576 wide", "9 query heads, 3 KV heads of 64", "a token"):
        assert text in done.stdout


def test_pull_prints_where_the_model_is(smollm2_path: Path) -> None:
    done = twostroke("pull", "smollm2")
    assert done.returncode == 0
    assert Path(done.stdout.strip()) == smollm2_path


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (("run", "no-such-model", "hi"), "no-such-model"),
        (("run", "smollm2", ""), "empty"),
        (("run", "smollm2", "hi", "--temperature", "-1"), "temperature"),
        (("run", "smollm2", "hi", "--backend", "quantum"), "reference"),
        (("run", "smollm2", "hi", "--kv-memory", "lots"), "not a size"),
        (("run", "smollm2", "hi", "--max-context", "100000"), "8192"),
        (("inspect", "/etc/hostname"), "gguf"),
    ],
)
def test_bad_input_is_one_sentence_and_exit_code_2(arguments: tuple[str, ...], expected: str) -> None:
    done = twostroke(*arguments, HF_HUB_OFFLINE="1")
    assert done.returncode == 2
    assert "Traceback" not in done.stderr
    assert expected in done.stderr


def test_help_teaches_the_two_phases() -> None:
    done = twostroke("--help")
    assert done.returncode == 0
    assert "PREFILL" in done.stdout and "DECODE" in done.stdout
