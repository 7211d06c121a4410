"""The README's transcripts are records of commands, and the commands still answer so."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import llvmlite.binding
import pytest

from bench.readme import README, ROOT, TRANSCRIPTS, Facts, Transcript, block_of, facts_of, provenance, readme_block


def record_of(transcript: Transcript) -> str:
    return transcript.record.read_text(encoding="utf-8")


def readme() -> str:
    return README.read_text(encoding="utf-8")


@pytest.mark.parametrize("transcript", TRANSCRIPTS, ids=lambda transcript: transcript.name)
def test_the_readme_shows_the_record(transcript: Transcript) -> None:
    assert readme_block(readme(), transcript.name) == block_of(transcript, record_of(transcript))


def test_the_readme_says_when_and_where_it_was_recorded() -> None:
    assert provenance(record_of(TRANSCRIPTS[0])) in readme()


def answered_now(transcript: Transcript) -> Facts:
    """The command of a transcript, run today. Answers are what is on standard output."""
    command = [sys.executable, "-c", "from twostroke.cli import main; main()", *transcript.arguments]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path), "COLUMNS": "100", "CUDA_VISIBLE_DEVICES": ""}
    done = subprocess.run(
        command, input=transcript.stdin, env=environment, capture_output=True, text=True, timeout=120, check=True
    )
    answers = [answer.strip() for answer in re.split(r"^> ?", done.stdout, flags=re.MULTILINE)]
    return Facts(tuple(" ".join(answer.split()) for answer in answers if answer), facts_of(done.stderr).counts)


@pytest.mark.parametrize("transcript", TRANSCRIPTS, ids=lambda transcript: transcript.name)
def test_the_command_still_answers_so(smollm2_path: Path, transcript: Transcript) -> None:
    """Word for word on the processor it was recorded on. Another one's arithmetic rounds otherwise, and a near-tie of
    two tokens may turn: there, as many answers are given, and the first prompt has as many tokens."""
    shown, now = facts_of(readme_block(readme(), transcript.name)), answered_now(transcript)
    assert len(shown.answers) == max(1, len(transcript.typed)) and shown.counts
    if f"cpu       {llvmlite.binding.get_host_cpu_name()} " in record_of(transcript):
        assert now == shown
    else:
        assert (len(now.answers), len(now.counts)) == (len(shown.answers), len(shown.counts))
        assert now.counts[0][:3] == shown.counts[0][:3]


def test_what_changes_from_run_to_run_is_left_out() -> None:
    transcript = TRANSCRIPTS[1]
    block = readme_block(readme(), transcript.name)
    slower = re.sub(r"\d+(\.\d+)? (ms|s)\b", "9.99 s", block)
    assert slower != block and facts_of(slower) == facts_of(block)
    assert facts_of(block.replace("sea", "lake")) != facts_of(block)
    assert facts_of(re.sub(r"wrote \d+", "wrote 1", block)) != facts_of(block)


@pytest.mark.skipif(shutil.which("make") is None, reason="no make")
def test_make_run_says_where_the_command_is(smollm2_path: Path, tmp_path: Path) -> None:
    """With an environment in which everything is installed."""
    (tmp_path / "bin").mkdir()
    command = tmp_path / "bin" / "twostroke"
    command.write_text(f"#!{sys.executable}\nfrom twostroke.cli import main\nmain()\n")
    command.chmod(0o755)
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    make = ["make", "-C", str(ROOT), "-o", f"{tmp_path}/.core", f"VENV={tmp_path}", "PROMPT=Hi"]
    done = subprocess.run([*make, "run"], env=environment, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
    assert f"The command is {command}. Try: {command} chat smollm2" in done.stdout
    assert f"source {tmp_path}/bin/activate" in done.stdout


@pytest.mark.skipif(shutil.which("make") is None, reason="no make")
def test_make_serve_installs_the_server_and_starts_it(tmp_path: Path) -> None:
    make = ["make", "-n", "-C", str(ROOT), f"VENV={tmp_path}/venv", "serve", "SERVE_OPTIONS=--port 8001"]
    shown = subprocess.run(make, capture_output=True, text=True, timeout=60, check=True).stdout
    assert "-e '.[server]'" in shown and f"{tmp_path}/venv/bin/twostroke serve smollm2 --port 8001" in shown
