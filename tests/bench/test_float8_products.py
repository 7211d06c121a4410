"""bench/cuda/float8_products.py: it computes and checks what it times. In the interpreter, with a clock of its own."""

from __future__ import annotations

import time
from dataclasses import replace
from pathlib import Path

import pytest

pytest.importorskip("torch")
from bench.cuda import float8_products
from bench.cuda.float8_products import BLOCKS, Bench, Found, measure_all, options_of, report
from tests.backends.cuda import conftest
from tests.models.tiny_checkpoints import make_tiny
from twostroke.backends.cuda import tuning_pool
from twostroke.backends.cuda.kernels import float8_tiles
from twostroke.backends.cuda.kernels.float8_tiles import Float8Tile
from twostroke.backends.cuda.kernels.packed_format import FP8_UNITS, INT4, Code
from twostroke.backends.cuda.products import card_of
from twostroke.models.loading import load_checkpoint

assert conftest, "which has kernels interpreted where there is no card"


@pytest.mark.parametrize(
    ("variant", "code"),
    [("llama", BLOCKS), pytest.param("llama", INT4, marks=pytest.mark.slow), ("qwen3_moe", FP8_UNITS)],
)
def test_every_way_is_right_and_told(
    variant: str, code: Code, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(tuning_pool, "card_of", lambda *of: replace(card_of(*of), has_float8=True))
    monkeypatch.setattr(float8_products, "graph_us", lambda case, trials, replays: [1.0 + len(str(trials[0]))])
    small = {is_gated: (Float8Tile(16, 32, 4, 2),) for is_gated in (True, False)}
    monkeypatch.setattr(float8_tiles, "TILES", small)
    monkeypatch.setattr(float8_tiles, "LEAST_UNPACKED_ROWS", 4)
    monkeypatch.setattr(float8_tiles, "FEW_ROWS", 16)
    sizes = {"num_experts": 4, "num_experts_per_tok": 2} if variant == "qwen3_moe" else {}
    sizes |= {"hidden_size": 64, "intermediate_size": 96, "num_attention_heads": 2, "num_key_value_heads": 1}
    spec = load_checkpoint(make_tiny(variant, tmp_path / "model", **sizes)[0]).spec
    found: list[Found] = []
    measure_all(Bench(spec, code, 20, "cpu"), (20,), time.perf_counter() + 600, found)
    report(found)
    told = capsys.readouterr().out
    assert "FAILED" not in told and "WRONG" not in told and f"{len(found)} measured, 0 wrong" in told
    kernels = {one.kernel.split()[0] for one in found}
    own = f"{code.name}_float8" + ("_experts" if variant == "qwen3_moe" else "")
    assert own in kernels and any("unpacked" in name for name in kernels)
    errors = [one.error for one in found if one.kernel.startswith(own)]
    assert all(0.005 < error < 0.06 for error in errors), "rows are rounded, and to no less than float8"


def test_no_time_is_said(capsys: pytest.CaptureFixture[str]) -> None:
    float8_products.run(["blocks"], (16,), time.perf_counter() - 1, [])
    assert "no time was left for blocks" in capsys.readouterr().out
    assert options_of([]).only == "blocks,experts,int4"
