"""Tuning: every candidate is checked, the fastest makes a table's line, and what is no faster changes nothing."""

from __future__ import annotations

import time
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch
from tests.backends.cuda.tables import table_of
from tests.models.tiny_checkpoints import make_tiny

from bench.cuda import tune_from_nothing
from twostroke.backends.cuda import tuning
from twostroke.backends.cuda.kernels.expert_numbers import ExpertMatrix
from twostroke.backends.cuda.kernels.expert_units import ExpertUnits
from twostroke.backends.cuda.kernels.float8_tiles import in_float8
from twostroke.backends.cuda.kernels.packed_format import GROUPED_CODES
from twostroke.backends.cuda.kernels.product import Card, Product
from twostroke.backends.cuda.kernels.product_kernels import KERNELS
from twostroke.backends.cuda.kernels.row_forms import ROW_FORMS, RowForm
from twostroke.backends.cuda.layer_matrices import layer_matrices, matrices_of, products_of
from twostroke.backends.cuda.model_matrices import MLP_KINDS, held_of, held_on
from twostroke.backends.cuda.products import Products, card_of
from twostroke.backends.cuda.stored_codes import QUANTISED_TO, Held, as_units
from twostroke.backends.cuda.tuned_table import NO_END, Choices, Table, TableLine, parse, table_for
from twostroke.backends.cuda.tuning import Tuner, extend, tune
from twostroke.backends.cuda.tuning_cases import Case, Trial
from twostroke.backends.cuda.tuning_pool import Pool, held_products
from twostroke.core.formats import Formats
from twostroke.models.loading import load_checkpoint
from twostroke.models.spec import ModelSpec

F32 = torch.float32
SMALL = {"hidden_size": 32, "num_attention_heads": 2, "num_key_value_heads": 1, "vocab_size": 96}
"""Every candidate of every product is computed, in the interpreter mostly."""
AN_HOUR = time.perf_counter() + 3600


@pytest.fixture
def path_of(tmp_path: Path) -> Path:
    return make_tiny("llama", tmp_path / "model", **SMALL)[0]


@pytest.fixture
def spec(path_of: Path) -> ModelSpec:
    return load_checkpoint(path_of).spec


@pytest.fixture
def moe_spec(tmp_path: Path) -> ModelSpec:
    return load_checkpoint(make_tiny("qwen3_moe", tmp_path / "moe", **SMALL)[0]).spec


def lines_of(
    times_us: dict[tuple[str, int], float],
    spec: ModelSpec,
    device: str,
    monkeypatch: pytest.MonkeyPatch,
    role: str = "gated",
) -> Tuner:
    """A tuner whose clock says what each method and number of rows takes; 100 us: all others."""

    def clock(case: Case, trials: Sequence[Trial], replays: int) -> list[float]:
        return [
            times_us.get((str(dict(trial.settings).get("method", trial.kernel)), case.rows), 100.0) for trial in trials
        ]

    monkeypatch.setattr(tuning, "graph_us", clock)
    products = held_products(spec)
    product = next(one for one in reversed(products) if one.product.role == role)
    pool = Pool(spec, products, 4, F32, torch.device(device))
    now = Choices(table_of({"plain": (TableLine(1, NO_END, "cublas"),)}), pool.card)
    return Tuner(spec, product, pool, now, Choices(Table("so far", {}), pool.card))


def test_the_fastest_of_each_number_of_rows_becomes_a_line(
    spec: ModelSpec, device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    times = {("fma", 1): 5.0, ("cublas", 1): 9.0, ("dot", 2): 6.0, ("cublas", 2): 7.0, ("cublas", 4): 8.0}
    tuner = lines_of(times, spec, device, monkeypatch)
    (few, two, more) = tuner.measure((4, 1, 2), AN_HOUR)["plain"]
    assert (few.first, few.last, few.kernel, few.settings["method"], few.measured_us) == (1, 1, "gemv", "fma", 5.0)
    assert (two.first, two.last, two.settings["method"]) == (2, 2, "dot")
    assert (more.first, more.last, more.kernel) == (3, NO_END, "cublas")
    assert not tuner.faults, "every candidate was computed, and right"
    assert [(change.rows, change.before) for change in tuner.changes] == [(1, "cublas"), (2, "cublas")]
    assert tuner.changes[0].after.startswith("gemv method=fma") and tuner.changes[0].after_us == 5.0


def test_what_is_hardly_faster_changes_nothing(spec: ModelSpec, device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    tuner = lines_of({("fma", 1): 9.95, ("cublas", 1): 10.0}, spec, device, monkeypatch)
    (line,) = tuner.measure((1,), AN_HOUR)["plain"]
    assert line.kernel == "cublas" and not tuner.changes


def test_what_there_is_no_time_for_stays_as_it_is(
    spec: ModelSpec, device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    tuner = lines_of({("fma", 1): 5.0, ("dot", 4): 6.0}, spec, device, monkeypatch)
    few, more = tuner.measure((1, 4), time.perf_counter())["plain"]
    assert (few.last, few.kernel, few.measured_us) == (1, "gemv", 5.0)
    assert (more.first, more.kernel, more.measured_us) == (2, "cublas", None), "not measured"


def test_what_is_wrong_is_never_chosen(spec: ModelSpec, device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    tuner = lines_of({("fma", 1): 1.0, ("cublas", 1): 10.0}, spec, device, monkeypatch)
    right = Products.multiply

    def wrong(self, stream, norm, matrix, out):  # type: ignore[no-untyped-def]
        right(self, stream, norm, matrix, out)
        if self._choice(matrix, len(out)).kernel.name == "gemv":
            out[0, 0] += 100 * out.abs().max()

    monkeypatch.setattr(Products, "multiply", wrong)
    (line,) = tuner.measure((1,), AN_HOUR)["plain"]
    assert line.kernel == "cublas" and tuner.faults and "error" in tuner.faults[0]


@pytest.mark.parametrize("role", ["activated", "join", "plain"])
def test_experts_without_gates_that_read_fewer_numbers(
    role: str, tmp_path: Path, device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They come ahead of the shared expert's, and of what brings tokens to them."""
    kinds = ["linear_attention", "full_attention", "moe"]
    folder, _ = make_tiny("nemotron_h_latent", tmp_path, layers_block_type=kinds, n_routed_experts=4)
    spec = load_checkpoint(folder).spec
    products = held_products(spec)
    for held in products:
        if held.product.role == role:
            pool = Pool(spec, products, 4, F32, torch.device(device))
            now = Choices(table_of({"plain": (TableLine(1, NO_END, "cublas"),)}), pool.card)
            tuner = Tuner(spec, held, pool, now, Choices(Table("so far", {}), pool.card))
            monkeypatch.setattr(tuning, "graph_us", lambda case, trials, replays: [1.0 for _ in trials])
            each = spec.moe.experts_per_token if spec.moe is not None and held.product.experts else 1
            assert tuner.measure((each, 4 * each), AN_HOUR)["plain"]
            assert not tuner.faults, held


@pytest.mark.parametrize("role", ["gated", "join"])
def test_experts_are_measured_in_their_block(
    role: str, moe_spec: ModelSpec, device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rows are tokens' experts. What few tokens have computes both products, and is an answer for the first alone."""
    assert moe_spec.moe is not None
    each = moe_spec.moe.experts_per_token
    tuner = lines_of({("few_experts", each): 5.0}, moe_spec, device, monkeypatch, role)
    lines = tuner.measure((each, 4 * each), AN_HOUR)["plain"]
    assert not tuner.faults, "every candidate was computed, and right"
    if role == "gated":
        assert [(line.last, line.kernel) for line in lines] == [(each, "few_experts"), (NO_END, "grouped_experts")]
    else:
        assert [(line.last, line.kernel) for line in lines] == [(NO_END, "grouped_experts")]


def test_lines_that_say_the_same_are_one() -> None:
    lines: list[TableLine] = []
    for first, last, kernel in ((1, 1, "gemv"), (2, 2, "gemv"), (3, 8, "cublas"), (9, 16, "gemv"), (25, 32, "gemv")):
        extend(lines, TableLine(first, last, kernel, {}, float(last)))
    assert [(line.first, line.last, line.kernel, line.measured_us) for line in lines] == [
        (1, 2, "gemv", 2.0),
        (3, 8, "cublas", 8.0),
        (9, 16, "gemv", 16.0),
        (25, 32, "gemv", 32.0),
    ], "nothing is said of 17 to 24"


@pytest.mark.parametrize("variant", [pytest.param("spec", marks=pytest.mark.slow), "moe_spec"])
def test_a_model_is_tuned(
    variant: str, request: pytest.FixtureRequest, device: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On a card by its clock, for bf16; elsewhere everything but the clock."""
    spec: ModelSpec = request.getfixturevalue(variant)
    monkeypatch.setenv("TWOSTROKE_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(tuning, "DECODE_COUNTS", (32, 1, 8) if device == "cuda" else (4, 1))
    monkeypatch.setattr(tuning, "LONG_COUNTS", (384,) if device == "cuda" else (20,))
    dtype = torch.bfloat16 if device == "cuda" else F32
    if device == "cpu":
        monkeypatch.setattr(
            tuning, "graph_us", lambda case, trials, replays: [1.0 + len(str(trial)) for trial in trials]
        )
    told: list[tuple[int, int]] = []
    seconds = 60.0 if device == "cuda" else 600.0
    report = tune(spec, dtype, seconds, lambda done, total, _: told.append((done, total)), device=device)
    products = products_of(spec)
    assert told[-1] == (len(products), len(products)) and not report.faults
    kept = table_for(report.device)
    choices = Choices(kept, card_of(torch.device(device), dtype))
    assert all(product in parse(report.kept.read_text()).products for product in products)
    assert all(parse(report.table).products[product] == kept.products[product] for product in products)
    for product in products:
        for rows in (1, 5, 8, 20, 32, 300, 384, 1000):
            line_of = kept.products[product]["plain"]
            assert line_of[0].measured_us and choices.of(product, rows, ("plain",)).kernel.form == "plain"
    assert Product("plain", 1, 1) not in kept.products


def test_what_is_found_from_nothing_takes_turns_with_the_package(
    spec: ModelSpec, device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """bench/cuda/tune_from_nothing.py: where the found choice is the fastest there is, nothing else is faster."""

    def by_name(case: Case, trials: Sequence[Trial], replays: int) -> list[float]:
        return [1.0 + len(str(trial)) for trial in trials]

    monkeypatch.setattr(tuning, "graph_us", by_name)
    monkeypatch.setattr(tune_from_nothing, "graph_us", by_name)
    dtype = torch.bfloat16 if device == "cuda" else F32
    comparison = tune_from_nothing.Comparison(spec, (1, 4), device, dtype)
    comparison.run(600.0)
    for times in comparison.sums_us.values():
        assert 0 < times["found"] <= min(times["package"], times["empty"])
    assert len(tune_from_nothing.table_of(comparison.sums_us)) == 2 + 2


def quick(monkeypatch: pytest.MonkeyPatch, folder: Path, few: tuple[int, ...], long: int) -> None:
    """A cache of its own, a clock that prefers short names, and few numbers of rows."""
    monkeypatch.setenv("TWOSTROKE_CACHE", str(folder))
    monkeypatch.setattr(tuning, "graph_us", lambda case, trials, replays: [10.0 + len(str(one)) for one in trials])
    monkeypatch.setattr(tuning, "DECODE_COUNTS", few)
    monkeypatch.setattr(tuning, "LONG_COUNTS", (long,))


@pytest.mark.parametrize("name", ["fp8", "int4"])
def test_weights_of_few_bits_are_tuned_as_they_are_held(
    name: str, path_of: Path, device: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """The head stays plain; a layer's matrices get lines of their form, and those of other forms stay."""
    quick(monkeypatch, tmp_path / "cache", (1, 4), 16)
    checkpoint = load_checkpoint(path_of)
    spec, code = checkpoint.spec, QUANTISED_TO[name]
    held = held_of(checkpoint, Formats(name, "bf16", "bf16"))
    report = tune(spec, torch.bfloat16, 60.0, lambda *progress: None, held, device)
    assert not report.faults, report.faults
    found = parse(report.kept.read_text()).products
    for product in products_of(spec):
        assert set(found[product]) == ({"plain"} if product.role == "head" else {code.name})
        lines = next(iter(found[product].values()))
        assert (lines[0].first, lines[-1].last) == (1, NO_END)
        if product.role != "head":
            assert {KERNELS[line.kernel].form for line in lines} == {code.name}
            if device == "cpu":
                assert {line.kernel for line in lines} == {f"{code.name}_unpacked"}, "a host has no other"


def test_every_form_of_a_file_is_tuned(
    spec: ModelSpec, device: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """As Q4_K_M has them: numbers that were drawn, in two forms. A product is measured in those that it has, alone."""
    quick(monkeypatch, tmp_path / "cache", (1,), 4)
    four, six = (code for code in GROUPED_CODES if code.name in ("int4_32ka", "int6_16k"))
    matrices = [one for index in range(spec.num_layers) for one in layer_matrices(spec, index)]
    codes = {one.name: six if one.kind == "down" and one.name == matrices[-1].name else four for one in matrices}
    held = Held({name: code for name, code in codes.items() if not name.endswith(".o")})
    report = tune(spec, torch.bfloat16, 60.0, lambda *progress: None, held, device)
    assert not report.faults, report.faults
    found = parse(report.kept.read_text()).products
    forms: dict[Product, set[str]] = {product: set() for product in products_of(spec)}
    for one in matrices_of(spec):
        code = held.codes.get(one.name)
        forms[one.product].add("plain" if code is None else code.name)
    assert max(len(names) for names in forms.values()) == 2
    assert {product: set(found[product]) for product in forms} == forms
    assert report.num_products == sum(len(names) for names in forms.values())


HOPPER = Card("a test's", 132, has_hopper_kernels=True, has_float8=True)


@pytest.mark.parametrize(
    "name, in_units",
    [
        ("fp8", False),
        ("int4", True),
        pytest.param("fp8", True, marks=pytest.mark.slow),
        pytest.param("int4", False, marks=pytest.mark.slow),
        pytest.param("q8_0", True, marks=pytest.mark.slow),
    ],
)
def test_experts_of_few_bits_are_tuned_as_they_are_held(
    name: str, in_units: bool, device: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """By rows, as most cards have them, and in units, as Hopper has them."""
    if in_units and device == "cuda" and not card_of(torch.device(device), torch.bfloat16).has_hopper_kernels:
        pytest.skip("units are Hopper's")
    quick(monkeypatch, tmp_path / "cache", (4, 1), 20)
    checkpoint = load_checkpoint(make_tiny("qwen3_moe", tmp_path / "moe", **SMALL, num_hidden_layers=1)[0])
    spec = checkpoint.spec
    held = held_of(checkpoint, Formats(name, "bf16", "bf16"))
    if in_units:
        held = held_on(held, spec, HOPPER)
    report = tune(spec, torch.bfloat16, 60.0, lambda *progress: None, held, device)
    assert not report.faults, report.faults
    found = parse(report.kept.read_text()).products
    for one in matrices_of(spec):
        code = held.codes.get(one.name)
        form, forms = "plain" if code is None else code.name, found[one.product]
        rounded = [in_float8(code)] if code is not None and one.name in held.in_float8 else []
        assert list(forms) == [*rounded, form]
        assert (forms[form][0].first, forms[form][-1].last) == (1, NO_END)
        assert {KERNELS[line.kernel].form for line in forms[form]} == {form}
    assert bool(held.in_float8) == (name == "fp8")


@pytest.mark.parametrize("form", ROW_FORMS, ids=lambda form: form.name)
def test_drawn_experts_are_about_as_large_as_weights(form: RowForm, device: str) -> None:
    """In every form that there is, and in units where there are some."""
    matrix = ExpertMatrix.empty((2, 32, 256), form, torch.device(device))
    matrix.draw()
    found = [matrix.dequantised()]
    if (code := as_units(form)) is not None:
        units = ExpertUnits.empty((2, 32, 256), code, device, is_gated=True)
        units.draw()
        found.append(units.dequantised())
    for weights in found:
        assert weights.isfinite().all() and 0.001 < float(weights.abs().max()) < 0.2


def test_what_stays_in_16_bits_is_not_measured_in_fewer(tmp_path: Path) -> None:
    """Matrices around states, and around latent attention."""
    spec = load_checkpoint(make_tiny("qwen3_next", tmp_path / "model")[0]).spec
    inner = [one for one in matrices_of(spec) if one.kind in MLP_KINDS]
    held = Held({one.name: GROUPED_CODES[0] for one in inner})
    measured = held_products(spec, held)
    few = {one.product for one in measured if one.code is not None}
    assert few == {one.product for one in inner}
    assert {one.product for one in measured if one.code is None} == {one.product for one in matrices_of(spec)} - few
