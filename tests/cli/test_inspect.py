"""`inspect` promises what an engine then takes."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from tests.cli.in_process import typed
from tests.cli.test_cli import twostroke
from tests.models.kind_files import tiny_model, write_of_kinds
from tests.models.tiny_checkpoints import make_tiny

from twostroke.cli.inspect import _memory_rows
from twostroke.cli.inspect_record import record
from twostroke.config import EngineConfig
from twostroke.engine.build import prepare
from twostroke.models.loading import load_checkpoint
from twostroke.models.weights.tensor import WeightKind

CPU = EngineConfig(backend="cpu")


def test_the_kv_that_is_promised_is_what_an_engine_takes(smollm2_path: Path) -> None:
    checkpoint = load_checkpoint(smollm2_path, name="smollm2")

    def taken_tokens() -> int:
        (group,) = (layout := prepare(checkpoint, CPU).resolved.layout).groups
        return group.num_blocks * layout.block_size

    for _ in range(10):  # until no other program has taken or given much memory meanwhile
        before = taken_tokens()
        found = json.loads(typed("inspect", str(smollm2_path), "--backend", "cpu", "--json").stdout)["here"]
        if abs(before - taken_tokens()) < 0.05 * before:
            break
    promised_bytes = found["kv_tokens"] * found["kv_bytes_per_token"]
    assert abs(found["kv_tokens"] - before) < 0.2 * before
    assert promised_bytes < 0.5 * found["free_beside_weights_bytes"]


def test_it_says_so_in_words(smollm2_path: Path) -> None:
    done = twostroke("inspect", str(smollm2_path), "--backend", "cpu", COLUMNS="200")
    tokens = record(load_checkpoint(smollm2_path, name="smollm2"), CPU)["here"]["kv_tokens"]
    assert "tokens by default (--kv-memory says otherwise): " in done.stdout and tokens > 0


def test_weights_that_take_more_in_memory_than_in_the_file_are_counted_so(tmp_path: Path) -> None:
    path = write_of_kinds(tiny_model(experts=False), tmp_path / "model.gguf", lambda _: WeightKind.IQ2_XXS)
    found = record(load_checkpoint(path), CPU)
    assert found["weights"]["stored_as"]["IQ2_XXS"]["tensors"] == 9
    assert found["here"]["held_weight_bytes"] > 1.5 * found["weights"]["bytes"]
    assert "repacked" in dict(_memory_rows(found))


@pytest.mark.parametrize(
    ("variant", "words"),
    [
        ("deepseek_v2", "over one latent of"),
        ("lfm2", "a convolution of"),
        ("qwen3_next", "a gated delta net of"),
        ("nemotron_h", "Mamba-2 of"),
        ("gemma4", "query heads"),
    ],
)
def test_every_kind_of_layer_is_described(variant: str, words: str, tmp_path: Path) -> None:
    folder, _ = make_tiny(variant, tmp_path)
    found = record(load_checkpoint(folder), CPU)
    assert sum(one["layers"] for one in found["mixers"]) == found["num_layers"]
    done = typed("inspect", str(folder), "--backend", "cpu")
    assert done.returncode == 0, done.stderr
    assert words in " ".join(done.stdout.split())


def test_it_says_what_an_engine_with_these_options_would_hold(smollm2_path: Path) -> None:
    plain = json.loads(typed("inspect", str(smollm2_path), "--backend", "cpu", "--json").stdout)["here"]
    small = json.loads(typed("inspect", str(smollm2_path), "--backend", "cpu", "--kv-type", "int8", "--json").stdout)
    assert small["here"]["kv_bytes_per_token"] < 0.6 * plain["kv_bytes_per_token"]
