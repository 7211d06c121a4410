"""Tuning where something goes wrong: what is right elsewhere is kept. And experts whose products in float8 win, on a
card that has them."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from tests.backends.cuda.test_tuning import SMALL, quick
from tests.models.tiny_checkpoints import make_tiny

from twostroke.backends.cuda import FACTORY, attention_table, attention_tuning, moe, tuning, tuning_pool
from twostroke.backends.cuda import products as cuda_products
from twostroke.backends.cuda.kernels.float8_tiles import in_float8
from twostroke.backends.cuda.layer_matrices import matrices_of
from twostroke.backends.cuda.matrix import Matrix
from twostroke.backends.cuda.model_matrices import held_of
from twostroke.backends.cuda.products import card_of
from twostroke.backends.cuda.stored_codes import Held
from twostroke.backends.cuda.tuned_table import NO_END, parse
from twostroke.backends.cuda.tuning import tune
from twostroke.backends.cuda.tuning_cases import Case, ExpertsCase, Trial
from twostroke.backends.cuda.tuning_pool import held_products
from twostroke.backends.interface import TuningReport
from twostroke.core.formats import Formats
from twostroke.models.loading import load_checkpoint
from twostroke.models.spec import ModelSpec


@pytest.fixture
def float8_experts(
    device: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> Callable[[], tuple[ModelSpec, Held, TuningReport]]:
    """Tunes experts in float8 on a card whose tensor cores multiply it, by a clock that prefers those products."""
    quick(monkeypatch, tmp_path / "cache", (1,), 64)
    card = replace(card_of(torch.device(device), torch.bfloat16), has_hopper_kernels=False, has_float8=True)
    monkeypatch.setattr(tuning_pool, "card_of", lambda *device_and_type: card)

    def clock(case: Case, trials: Sequence[Trial], replays: int) -> list[float]:
        assert isinstance(case, ExpertsCase)
        for trial in trials:
            own = case.choices(trial).of(case.product, case.rows, case.matrices[0].form_names)
            assert (own.kernel.name, own.settings) == (trial.kernel, dict(trial.settings)), "another one is timed"
            other = case.choices(trial).of(case._other.product, case.rows, case._other.form_names)
            assert not other.kernel.name.endswith("_float8_experts")
        return [1.0 if trial.kernel.endswith("_float8_experts") else 10.0 for trial in trials]

    few = {"num_hidden_layers": 1, "num_experts": 2, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
    checkpoint = load_checkpoint(make_tiny("qwen3_moe", tmp_path / "moe", **SMALL, **few)[0])
    spec, held = checkpoint.spec, held_of(checkpoint, Formats("fp8", "bf16", "bf16"))
    held = replace(held, codes={name: code for name, code in held.codes.items() if name in held.experts})
    experts = [one for one in held_products(spec, held) if one.product.experts]
    monkeypatch.setattr(tuning, "graph_us", clock)
    monkeypatch.setattr(tuning, "held_products", lambda *spec_and_held: experts)
    return lambda: (spec, held, tune(spec, torch.bfloat16, 600.0, lambda *progress: None, held, device))


def test_experts_that_win_in_float8_are_tuned_twice(
    float8_experts: Callable[[], tuple[ModelSpec, Held, TuningReport]],
) -> None:
    """What wins for the first product neither stands beside the second when that is checked, nor ahead of the form that
    serves all numbers of rows when they are measured again."""
    for _ in range(2):
        spec, held, report = float8_experts()
        assert not report.faults, report.faults
        found = parse(report.kept.read_text()).products
        for one in (each for each in matrices_of(spec) if each.name in held.experts):
            base = held.codes[one.name].name
            assert list(found[one.product]) == [in_float8(held.codes[one.name]), base]
            rounded, plain = found[one.product].values()
            assert rounded[-1].measured_us == 1.0 and rounded[-1].last == 2 * 64
            assert plain[-1].measured_us == 10.0 and (plain[0].first, plain[-1].last) == (1, NO_END)


def test_where_no_trial_is_right_all_stays_as_it_is(
    float8_experts: Callable[[], tuple[ModelSpec, Held, TuningReport]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A fault is told, and other products keep their lines."""
    right = ExpertsCase.fault

    def fault(case: ExpertsCase, trial: Trial, matrix: Matrix, expected: torch.Tensor) -> str | None:
        is_wrong = case.product.adds_parts and not trial.kernel.endswith("_float8_experts")
        return "error 0.0400" if is_wrong else right(case, trial, matrix, expected)

    monkeypatch.setattr(ExpertsCase, "fault", fault)
    spec, held, report = float8_experts()
    assert any("rows: no trial of" in text for text in report.faults), report.faults
    assert not any(change.product.startswith("join") for change in report.changes)
    found = parse(report.kept.read_text()).products
    for one in (each for each in matrices_of(spec) if each.name in held.experts):
        (*_, lines) = found[one.product].values()
        assert (lines[-1].measured_us is None) == one.product.adds_parts and lines[-1].last == NO_END


def test_a_trial_that_fails_where_it_is_rehearsed_is_a_fault(
    float8_experts: Callable[[], tuple[ModelSpec, Held, TuningReport]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """On a card what is torch's runs in a rehearsal: a library that lacks a product raises there."""

    @contextmanager
    def rehearsed(rehearse: Callable[[], object], *, wanted: bool) -> Iterator[None]:
        rehearse()
        yield

    def fails(*product: object, **how: object) -> None:
        raise RuntimeError("the library has no such product")

    monkeypatch.setattr(tuning, "compiled_ahead", rehearsed)
    monkeypatch.setattr(moe, "float8_matmul", fails)
    spec, held, report = float8_experts()
    assert report.faults and all(
        text.endswith("RuntimeError: the library has no such product") for text in report.faults
    )
    found = parse(report.kept.read_text()).products
    for one in (each for each in matrices_of(spec) if each.name in held.experts):
        assert found[one.product][in_float8(held.codes[one.name])] == ()
        assert found[one.product][held.codes[one.name].name][-1].last == NO_END


def test_what_attention_found_outlives_a_failure_of_products(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("TWOSTROKE_CACHE", str(tmp_path / "cache"))
    row = {"when": {"tokens": [1, 1]}, "use": {"block": 32}}
    card = card_of(torch.device("cpu"), torch.bfloat16)

    def fails(*of_a_model: object) -> TuningReport:
        raise RuntimeError("the card fell off the bus")

    monkeypatch.setattr(attention_tuning, "tune_attention", lambda *of: attention_tuning.Found(rows={"decode": [row]}))
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "a test's")
    monkeypatch.setattr(cuda_products, "card_of", lambda *device_and_type: card)
    monkeypatch.setattr(tuning, "tune", fails)
    checkpoint = load_checkpoint(make_tiny("llama", tmp_path / "model", **SMALL)[0])
    with pytest.raises(RuntimeError, match="fell off"):
        FACTORY.tune(checkpoint, Formats("bf16", "bf16", "bf16"), 1.0, lambda *progress: None)
    assert json.loads(attention_table.user_path("a test's").read_text()) == {"decode": [row]}
