"""bench/cuda/float8_products.py: it computes and checks what it times. In the interpreter, with a clock of its own."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import pytest

pytest.importorskip("torch")
from bench.cuda import float8_products
from bench.cuda.float8_products import BLOCKS, Bench, Found, add, forms_of, measure_all, options_of, report
from tests.backends.cuda import conftest
from tests.models.tiny_checkpoints import make_tiny
from twostroke.backends.cuda import tuning_pool
from twostroke.backends.cuda.kernels import float8_tiles
from twostroke.backends.cuda.kernels.float8_tiles import Float8Tile, in_float8
from twostroke.backends.cuda.kernels.packed_format import FP8_UNITS, INT4, Code
from twostroke.backends.cuda.kernels.product import Card, Product
from twostroke.backends.cuda.product_launches import LAUNCHES
from twostroke.backends.cuda.products import card_of
from twostroke.backends.cuda.tuned_table import NO_END, Choices, Table, parse, table_for, text_of
from twostroke.backends.cuda.tuning_cases import Trial
from twostroke.backends.cuda.tuning_pool import HeldProduct
from twostroke.models.loading import load_checkpoint

assert conftest, "which has kernels interpreted where there is no card"


@pytest.mark.parametrize(
    ("variant", "code"),
    [("llama", BLOCKS), pytest.param("llama", INT4, marks=pytest.mark.slow), ("qwen3_moe", FP8_UNITS)],
)
def test_every_way_is_right_and_told(
    variant: str, code: Code, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """And makes lines that are followed where the package's table gets them."""
    monkeypatch.setattr(tuning_pool, "card_of", lambda *of: replace(card_of(*of), has_float8=True))
    monkeypatch.setattr(
        float8_products, "graph_us", lambda case, trials, replays: [1.0 + (trials[0].form == code.name)]
    )
    monkeypatch.setattr(float8_products, "LONG_ROWS", 8)
    monkeypatch.setattr(float8_products, "LEAST_UNPACKED_ROWS", 4)
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
    (tmp_path / "found.json").write_text(text_of(Table("cpu", forms_of(found))))
    monkeypatch.setattr(float8_products, "FOLDER", tmp_path)
    package = table_for("NVIDIA H200")
    (tmp_path / "cpu.json").write_text(text_of(replace(package, device="cpu")))
    table = parse(add(tmp_path / "found.json").read_text())
    assert package.products.items() <= table.products.items()
    choices = Choices(table, Card("cpu", 132, has_hopper_kernels=False, has_float8=True))
    own_forms = (in_float8(code), code.name)
    for product in {one.held.product for one in found if one.held.code is not None}:
        rows = 40 if product.experts else 20
        least = 16 if product.experts else 9
        assert list(table.products[product]) == list(own_forms)
        for count, form in ((least - 1, 1), (least, 0), (rows, 0), (rows + 1, 1)):
            assert choices.of(product, count, own_forms).kernel.form == own_forms[form], count


def test_what_is_hardly_faster_makes_no_line() -> None:
    """But says that it was measured: whoever asks for float8 does not get it there then. What is wrong is no line."""
    held = HeldProduct(Product("gated", 64, 64), BLOCKS)
    slow, fast = Trial(BLOCKS.name, "fp8_128_unpacked", ()), Trial(in_float8(BLOCKS), "fp8_128_float8", (("rows", 64),))

    def found(rows: int, trial: Trial, us: float, *, is_right: bool = True) -> Found:
        return Found(held, rows, trial, us, 1.0, 0.0, is_right)

    results = [
        found(512, slow, 10.0), found(512, fast, 9.9), found(2048, fast, 5.0, is_right=False), found(2048, slow, 40.0),
        found(8192, fast, 50.0), found(8192, slow, 90.0), found(1024, fast, 12.0), found(1024, slow, 20.0),
    ]  # fmt: skip
    (forms,) = forms_of(results).values()
    lines = [(one.first, one.last, one.measured_us) for one in forms[in_float8(BLOCKS)]]
    assert lines == [(513, 1024, 12.0), (2049, 8192, 50.0)]
    (line,) = forms[BLOCKS.name]
    assert (line.first, line.last, line.measured_us) == (257, NO_END, 90.0)
    assert forms_of(results[:2])[held.product][in_float8(BLOCKS)] == ()
    cut_short = [replace(one, held=HeldProduct(Product("join", 64, 64), BLOCKS)) for one in results[:2]]
    assert set(forms_of([*results, *cut_short])) == {held.product}
    assert forms_of(results[1:2]) == {}


def test_a_line_takes_no_rows_from_a_kernel_that_was_not_tried_beside_it() -> None:
    """Experts in units take up to 256 rows each: what was measured beyond says nothing of those."""
    held = HeldProduct(Product("join", 64, 64, experts=8), FP8_UNITS)
    units, floats = (Trial(FP8_UNITS.name, name, ()) for name in ("fp8_units_experts", "fp8_units_unpacked_experts"))
    tried = ((512, units, 5.0), (512, floats, 9.0), (1024, units, 8.0), (1024, floats, 10.0), (4096, floats, 30.0))
    results = [Found(held, rows, trial, us, 1.0, 0.0, is_right=True) for rows, trial, us in tried]
    lines = forms_of(results)[held.product][FP8_UNITS.name]
    assert [(one.first, one.last, one.kernel) for one in lines] == [
        (512, 1024, "fp8_units_experts"),
        (8 * 256 + 1, NO_END, "fp8_units_unpacked_experts"),
    ]


def test_a_way_that_fails_ends_no_other(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Neither where it is rehearsed nor where it is measured."""
    monkeypatch.setattr(tuning_pool, "card_of", lambda *of: replace(card_of(*of), has_float8=True))
    monkeypatch.setattr(float8_products, "graph_us", lambda case, trials, replays: [1.0])
    monkeypatch.setattr(float8_products, "compiled_ahead", rehearsed)
    monkeypatch.setattr(float8_tiles, "TILES", {is_gated: (Float8Tile(16, 32, 4, 2),) for is_gated in (True, False)})
    monkeypatch.setattr(float8_tiles, "FEW_ROWS", 16)

    def fails(call: object) -> None:
        raise RuntimeError("the library has no such products")

    monkeypatch.setitem(LAUNCHES, "fp8_128_unpacked", fails)
    sizes = {"hidden_size": 64, "intermediate_size": 96, "num_attention_heads": 2, "num_key_value_heads": 1}
    spec = load_checkpoint(make_tiny("llama", tmp_path / "model", **sizes)[0]).spec
    found: list[Found] = []
    measure_all(Bench(spec, BLOCKS, 20, "cpu"), (20,), time.perf_counter() + 600, found)
    assert {one.kernel.split()[0] for one in found if one.held.code} == {"fp8_128_float8"}
    assert "by fp8_128_unpacked: RuntimeError: the library has no such products" in capsys.readouterr().out


@contextmanager
def rehearsed(rehearse: Callable[[], object], *, wanted: bool) -> Iterator[None]:
    """As on a card, where what is torch's runs in a rehearsal."""
    rehearse()
    yield


def test_no_time_is_said(capsys: pytest.CaptureFixture[str]) -> None:
    float8_products.run(["blocks"], (16,), time.perf_counter() - 1, [])
    assert "no time was left for blocks" in capsys.readouterr().out
    assert options_of([]).only == "blocks,experts,int4"
