"""What an operator is told of drafters: of one that belongs to another model, and of one that fails."""

from __future__ import annotations

import io
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from rich.console import Console

from bench.made_head import write_made_head
from tests.server.conftest import MODEL_OPTIONS
from tests.server.running import running_server
from tests.server.test_engine_process import running_loop
from tests.server.test_speculation import finished
from twostroke.cli.top import view
from twostroke.config import EngineConfig, KVConfig
from twostroke.core.speculation import DrafterState
from twostroke.engine.build import build
from twostroke.models.loading import load_checkpoint
from twostroke.server.metrics import Metrics
from twostroke.speculation.ngram import NgramDrafter
from twostroke.speculation.turn import MAX_FAULTS

NEVER_SAID = 256
"""The last tokens of its vocabulary, which SmolLM2 does not write by itself."""
MOST_ROUNDS = 40


def shown(snapshot: dict[str, Any]) -> str:
    file = io.StringIO()
    Console(file=file, width=200).print(view(snapshot, snapshot, 1.0))
    return file.getvalue()


def test_a_head_of_another_model_is_seen_by_whoever_operates_the_server(smollm2_path: Path, tmp_path: Path) -> None:
    """In the metrics, and in `twostroke top`. That one it says which: the log has its folder."""
    spec = load_checkpoint(smollm2_path).spec
    head = write_made_head(tmp_path / "head", spec, np.arange(spec.vocab_size - NEVER_SAID, spec.vocab_size))
    asked = {"prompt": "Once upon a time", "max_tokens": 64, "n": 8, "temperature": 0.8, "ignore_eos": True}
    with running_server(tmp_path / "log", *MODEL_OPTIONS, "--speculate", f"eagle3:{head}") as server:
        before = server.get("/v1/twostroke/top").json()
        assert server.metric("twostroke_drafter_doubted", method="eagle3") == 0
        assert "drafter  " not in shown(before)
        for _ in range(MOST_ROUNDS):
            assert server.post("/v1/completions", asked).status_code == 200
            if "hardly ever guesses right" in server.log():
                break
        server.wait_until(lambda: server.metric("twostroke_drafter_doubted", method="eagle3") == 1)
        assert server.metric("twostroke_drafter_doubted", method="grammar") == 0
        assert server.metric("twostroke_drafter_faults_total") == 0
        assert str(head) in server.log()
        text = server.get("/v1/twostroke/top").text
        assert str(head) not in text, "it is for whoever has a key"
        said = shown(server.get("/v1/twostroke/top").json())
        assert "drafter   eagle3 hardly ever guesses right: most likely it was made for another model\n" in said


def test_one_that_fails_is_counted(smollm2_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its words, which may quote a request, stay in the log."""

    def fail(self: NgramDrafter, asks: object) -> object:
        raise RuntimeError("a secret of the prompt")

    monkeypatch.setattr(NgramDrafter, "propose", fail)
    config = EngineConfig(
        backend="cpu", max_context=512, kv=KVConfig(memory_bytes=100 * 10**6), speculate="ngram", threads=1
    )
    built = build("smollm2", config)
    assert built.tokenizer is not None
    prompt = tuple(built.tokenizer.encode("red green blue " * 20))
    try:
        with running_loop(built) as api:
            stats = finished(api, "a", prompt)
    finally:
        built.engine.close()
    assert {state.name: state for state in stats.drafters} == {
        "grammar": DrafterState("grammar"),
        "ngram": DrafterState("ngram", MAX_FAULTS, is_out=True),
    }
    metrics = Metrics()
    metrics.engine = stats
    text = metrics.render().decode()
    assert f'twostroke_drafter_faults_total{{method="ngram"}} {MAX_FAULTS}.0' in text
    assert 'twostroke_drafter_out{method="ngram"} 1.0' in text
    assert "secret" not in text
