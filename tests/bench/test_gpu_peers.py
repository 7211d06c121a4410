"""The comparison on a GPU, as far as it goes without one: the checkpoint that both engines read, the workloads, the
driver over a tiny model, and the table."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path

import pytest
import torch
import transformers

from bench.peers.gpu.__main__ import ROOT, table
from bench.peers.gpu.checkpoint import write_checkpoint
from bench.peers.gpu.drive import ENGINES, MARK, Held
from bench.peers.gpu.workloads import SMALLER, WORKLOADS, run
from tests.lab.conftest import SHAPE
from tests.models.tiny_checkpoints import make_tiny
from twostroke.config import EngineConfig
from twostroke.models.loading import load_checkpoint

CPU = torch.device("cpu")


@pytest.mark.parametrize("variant", ["llama", "qwen2", "gemma3", "qwen3_moe", "phi3"])
def test_a_checkpoint_is_read_whole_by_transformers_and_by_us(variant: str, tmp_path: Path) -> None:
    make_tiny(variant, tmp_path / "shape")
    written = write_checkpoint(tmp_path / "shape", tmp_path / "weights", CPU)
    theirs, info = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "weights", output_loading_info=True)
    assert not info["missing_keys"] and not info["unexpected_keys"] and not info["mismatched_keys"]
    ours = load_checkpoint(str(tmp_path / "weights"))
    assert written == 2 * sum(parameter.numel() for parameter in theirs.parameters())
    norm = ours.tensors["final_norm"].to_float32()
    assert abs(norm.mean() - 1) < 0.1, "a norm multiplies by about one, however the family stores it"
    stamp = (tmp_path / "weights" / "config.json").stat().st_mtime_ns
    assert write_checkpoint(tmp_path / "shape", tmp_path / "weights", CPU) == written
    assert (tmp_path / "weights" / "config.json").stat().st_mtime_ns == stamp, "a whole folder is not written again"


class OneTokenAStep:
    """Every request gets one token a step; notes what it was asked for."""

    def __init__(self) -> None:
        self.asked: list[tuple[int, int]] = []
        self.left: dict[str, int] = {}

    def add(self, token_ids: Sequence[int], out_len: int) -> str:
        assert all(0 <= token < 32000 for token in token_ids)
        self.asked.append((len(token_ids), out_len))
        name = str(len(self.asked))
        self.left[name] = out_len
        return name

    def step(self) -> list[tuple[str, int, bool]]:
        outputs = [(name, 1, left == 1) for name, left in self.left.items()]
        self.left = {name: left - 1 for name, left in self.left.items() if left > 1}
        return outputs

    def busy(self) -> bool:
        return bool(self.left)

    def clear_prefix(self) -> None:
        assert not self.busy()


@pytest.mark.parametrize("name", [name for name in WORKLOADS if name not in ("online", "bursts")])
def test_a_workload_asks_for_the_same_work_every_time(name: str) -> None:
    engines = [OneTokenAStep(), OneTokenAStep()]
    results = [run(name, engine, 32000) for engine in engines]
    assert engines[0].asked == engines[1].asked and engines[0].asked
    assert results[0].keys() == results[1].keys()
    assert all(value >= 0 for value in results[0].values())


def test_nano_is_the_published_one() -> None:
    engine = OneTokenAStep()
    WORKLOADS["nano"](engine, 32000)
    assert sum(out_len for _, out_len in engine.asked) == 133_966


def test_every_smaller_version_is_of_a_workload() -> None:
    assert SMALLER.keys() <= WORKLOADS.keys()


def test_both_engines_are_told_alike_what_to_hold() -> None:
    assert Held().ours == Held().vllms == {}
    assert Held("fp8", "fp8").vllms == {"quantization": "fp8", "kv_cache_dtype": "fp8"}


def test_our_engine_is_made_with_what_it_is_told_to_hold(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    asked: list[EngineConfig] = []

    class AskedError(Exception):
        pass

    def build(model: str, config: EngineConfig, *, text: bool) -> None:
        asked.append(config)
        raise AskedError

    monkeypatch.setattr("twostroke.engine.build.build", build)
    for held in (Held(), Held(weights="fp8"), Held("fp8", "fp8")):
        with ExitStack() as closing, pytest.raises(AskedError):
            ENGINES["twostroke"](tmp_path, 1024, held, closing)
    usual = EngineConfig()
    assert [(one.quantise, one.kv.kind) for one in asked] == [
        (usual.quantise, usual.kv.kind),
        ("fp8", usual.kv.kind),
        ("fp8", "fp8"),
    ]


@pytest.mark.parametrize("held", [(), ("--quantise=fp8",)])
def test_the_driver_plays_a_tiny_model_and_goes_on_behind_a_failure(held: tuple[str, ...], tmp_path: Path) -> None:
    (tmp_path / "shape").mkdir()
    (tmp_path / "shape" / "config.json").write_text(json.dumps({**SHAPE, "max_position_embeddings": 1024}))
    write_checkpoint(tmp_path / "shape", tmp_path / "weights", CPU)
    # The prompts of `few` are longer than this model's context.
    command = [
        sys.executable,
        "-m",
        "bench.peers.gpu.drive",
        "twostroke",
        str(tmp_path / "weights"),
        "few,single",
        *held,
    ]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, cwd=ROOT)
    assert done.returncode == 0, done.stderr
    lines = [json.loads(line[len(MARK) :]) for line in done.stdout.splitlines() if line.startswith(MARK)]
    assert [next(iter(line)) for line in lines] == ["start", "few", "single"]
    assert lines[0]["start"]["ready_s"] > 0 and "error" in lines[1]["few"]
    assert lines[2]["single"]["ttft_ms"] > 0 and lines[2]["single"]["tpot_ms"] > 0


def test_the_table_has_medians_and_leads() -> None:
    ours = [{"single": {"tpot_ms": 2.0}, "nano": {"out_tok_s": 90.0}}, {"single": {"tpot_ms": 4.0}}]
    theirs = [{"single": {"tpot_ms": 6.0}, "nano": {"out_tok_s": 60.0}}, {"single": {"error": "it fell over"}}]
    head, rule, *rows = table({"twostroke": ours, "vllm": theirs})
    assert head == "| workload | figure | twostroke | vllm | twostroke / vllm |" and rule.count("---") == 5
    assert rows == ["| single | tpot_ms | 3 | 6 | 2.000 |", "| nano | out_tok_s | 90 | 60 | 1.500 |"]
    head, _, row = table({"twostroke": ours[1:], "before": ours[:1]})[:3]
    assert head.endswith("| twostroke / before |") and row == "| single | tpot_ms | 4 | 2 | 0.500 |"
