"""`twostroke serve` as it is typed: what it teaches, what it prints, how it refuses."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest
from tests.cli.in_process import typed
from tests.server.running import running_server

from twostroke.cli.serve import KEYS_VARIABLE, api_keys
from twostroke.core.errors import BadRequestError

COMMAND = [sys.executable, "-c", "from twostroke.cli import main; main()", "serve"]


def serve(*arguments: str) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path), "COLUMNS": "160"}
    return subprocess.run([*COMMAND, *arguments], capture_output=True, text=True, timeout=240, env=environment)


def test_help_teaches() -> None:
    shown = typed("serve", "--help").stdout
    for words in (
        "/v1/chat/completions",
        "timing",
        "prefill",
        "decode",
        "Ctrl-C",
        "--api-key-file",
        "--max-queue",
        "--max-tokens-per-key",
        "--share-prefixes",
        "--service-levels",
        "--no-vllm-metrics",
        "--engine-timeout",
        "429",
        "response_format",
        "tool_choice",
        "include_progress",
        "/health",
    ):
        assert words in shown


def test_start_says_what_was_chosen_and_the_line_that_it_prints_works(smollm2_path: Path, tmp_path: Path) -> None:
    options = ("smollm2", "--backend", "cpu", "--max-context", "256", "--threads", "1", "--name", "it's small")
    options += ("--max-per-key", "2")
    with running_server(tmp_path / "log", *options) as server:
        server.wait_until(lambda: "curl " in server.log())
        shown = server.log()
        asked_for = ("backend cpu: asked for", "context 256: asked for", "1 threads: asked for")
        for words in (*asked_for, "KV ", "at a time", "--max-per-key limits nobody"):
            assert words in shown
        line = next(line for line in shown.splitlines() if line.strip().startswith("curl "))
        done = subprocess.run(["bash", "-c", f"{line} -s"], capture_output=True, text=True, timeout=240)
        answer = json.loads(done.stdout)["choices"][0]
        assert answer["finish_reason"] == "stop", "it ends by itself"
        assert "sky" in answer["message"]["content"] and "scatter" in answer["message"]["content"]


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("smollm2", "--port", "70000"), "--port must be an integer from 0 to 65535"),
        (("smollm2", "--max-body", "lots"), "is not a size, as --max-body takes it"),
        (("smollm2", "--api-key-file", "/nowhere/keys"), "cannot read the API keys"),
        (("smollm2", "--max-queue", "0"), "--max-queue must be an integer of at least 1"),
        (("smollm2", "--max-per-key", "0"), "--max-per-key must be an integer of at least 1"),
        (("smollm2", "--max-tokens-per-key", "0"), "--max-tokens-per-key must be an integer of at least 1"),
        (("smollm2", "--engine-timeout", "nan"), "--engine-timeout must be a number of at least 1, not nan"),
        (("smollm2", "--drain", "nan"), "--drain must be a number of at least 0, not nan"),
    ],
)
def test_an_option_that_cannot_be_is_one_sentence(smollm2_path: Path, arguments: tuple[str, ...], words: str) -> None:
    done = typed("serve", *arguments)
    assert done.returncode == 2 and words in done.stderr and done.stderr.count("\n") == 1, done.stderr


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("no-such-model",), "cannot find the model"),
        (("smollm2", "--load", "random"), "random weights have no tokenizer"),
        (("smollm2", "--host", "256.1.1.1"), "cannot listen on"),
    ],
)
def test_what_cannot_be_is_one_sentence(smollm2_path: Path, arguments: tuple[str, ...], words: str) -> None:
    done = typed("serve", *arguments)
    assert done.returncode == 2 and words in done.stderr and "Traceback" not in done.stderr, done.stderr


def test_what_the_engine_s_process_finds_out_is_one_sentence(smollm2_path: Path) -> None:
    done = serve("smollm2", "--max-context", "10000000", "--port", "0")
    assert done.returncode == 2 and "this model was made for" in done.stderr and "Traceback" not in done.stderr


def test_a_port_that_is_taken_is_said_before_a_model_is_loaded(smollm2_path: Path) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        done = typed("serve", "smollm2", "--port", str(taken.getsockname()[1]))
    assert done.returncode == 2 and "cannot listen on 127.0.0.1" in done.stderr


def test_an_empty_key_file_lets_nobody_in_by_mistake(smollm2_path: Path, tmp_path: Path) -> None:
    keys = tmp_path / "keys"
    keys.write_text("# none yet\n")
    done = typed("serve", "smollm2", "--api-key-file", str(keys))
    assert done.returncode == 2 and "holds no API key" in done.stderr


def test_a_name_may_stand_before_a_key(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    keys = tmp_path / "keys"
    keys.write_text("# who may ask\nalice sk-1\nsk-2\n\n  bob\tsk-3  \n")
    monkeypatch.setenv(KEYS_VARIABLE, "carol sk-4, sk-5,")
    found = api_keys(keys)
    assert found == {"sk-4": "carol", "sk-5": "", "sk-1": "alice", "sk-2": "", "sk-3": "bob"}


@pytest.mark.parametrize(
    ("lines", "complaint"),
    [
        ("alice my secret", "line 1 of .* has 3 words"),
        ("alice secret\nalice other", "line 2 of .* gives the name 'alice' to a second API key"),
        ("alice secret\nbob secret", "line 2 of .* gives a second name, 'bob', to the API key 'alice'"),
    ],
)
def test_a_slip_in_a_file_of_keys_is_said_and_no_key_with_it(tmp_path: Path, lines: str, complaint: str) -> None:
    keys = tmp_path / "keys"
    keys.write_text(lines)
    with pytest.raises(BadRequestError, match=complaint) as refused:
        api_keys(keys)
    assert "secret" not in str(refused.value) and "other" not in str(refused.value)


def test_a_class_for_a_key_that_is_not_there_ends_the_start(smollm2_path: Path, tmp_path: Path) -> None:
    levels = tmp_path / "levels.toml"
    levels.write_text('[levels.chat]\nttft_ms = 500\n[keys]\nalise = "chat"\n')
    done = typed("serve", "smollm2", "--port", "0", "--service-levels", str(levels))
    assert done.returncode == 2 and "bind a key 'alise', and no API key has that name" in done.stderr
