"""How attention is set by what was measured: on a clock of the test's own, with every setting computed and compared."""

from __future__ import annotations

import time
from pathlib import Path

import pytest
import torch
from tests.models.tiny_checkpoints import make_tiny

from twostroke.backends.cuda import attention_table, attention_tuning
from twostroke.backends.cuda.attention import Attention
from twostroke.backends.cuda.attention_cases import Model
from twostroke.backends.cuda.attention_table import keep, settings_for, user_path
from twostroke.backends.cuda.attention_tuning import models_of, tune_attention
from twostroke.backends.cuda.kernels import decode_cuts, prefill_attention
from twostroke.backends.cuda.kernels.paged import AttentionShape, WalkConfig
from twostroke.core.errors import BackendError
from twostroke.models.loading import load_checkpoint
from twostroke.models.spec import ModelSpec

AN_HOUR = 3600.0
CARD = "A Card"
FEW = (WalkConfig(16, 2, 3), WalkConfig(32, 4, 3))


@pytest.fixture
def spec(tmp_path: Path) -> ModelSpec:
    return load_checkpoint(make_tiny("llama", tmp_path / "model")[0]).spec


@pytest.fixture(autouse=True)
def few_sizes(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("TWOSTROKE_CACHE", str(tmp_path / "cache"))
    for name, value in {"STREAMS": ((1, 64), (3, 64)), "CHUNKS": (80,), "WALKS": FEW, "PROMPT_WALKS": FEW}.items():
        monkeypatch.setattr(attention_tuning, name, value)
    monkeypatch.setattr(attention_tuning, "CUTS", attention_tuning.CUTS[:2])
    attention_table._own_rows.cache_clear()


def measured(spec: ModelSpec, monkeypatch: pytest.MonkeyPatch, device: str, fast: object) -> attention_tuning.Found:
    """`fast` takes half of what all others take."""
    now: list[object] = []
    made = attention_tuning.Trial.__init__

    def noted(self: object, setting: object, launches: object, out: object) -> None:
        now.append(setting)
        made(self, setting, launches, out)  # type: ignore[arg-type]

    monkeypatch.setattr(attention_tuning.Trial, "__init__", noted)
    monkeypatch.setattr(attention_tuning, "graph_seconds", lambda launches: 1.0 if now[-1] == fast else 2.0)
    until_s = time.perf_counter() + AN_HOUR
    return tune_attention(spec, torch.float32, until_s, device=device, pool_tokens=1024)


def test_the_fastest_of_each_number_of_streams_becomes_a_row(
    spec: ModelSpec, device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = measured(spec, monkeypatch, device, FEW[0])
    assert not found.faults, "every setting was computed, and right"
    (model,) = models_of(spec, torch.float32, device)
    own = [model.shape.head_dim] * 2
    assert [row["when"] for row in found.rows["decode"]] == [
        {"head_dim": own, "tokens": [1, 1], "window": [0, 0]},
        {"head_dim": own, "tokens": [2, None], "window": [0, 0]},
    ]
    assert {row["use"]["block"] for row in found.rows["decode"]} == {16} and "decode cuts" not in found.rows
    (row,) = found.rows["plain prefill"]
    assert row["when"]["head_dim"] == own and row["use"] == {"block": 16, "warps": 2, "stages": 3, "ahead": 0}
    assert {change.rows for change in found.changes} == {1, 3, 80}


def test_cuts_are_found_too(spec: ModelSpec, device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    found = measured(spec, monkeypatch, device, attention_tuning.CUTS[1])
    (row,) = found.rows["decode cuts"]
    assert row["use"]["smallest_tokens"] == attention_tuning.CUTS[1].smallest_tokens and set(found.rows) == {
        "decode cuts"
    }
    (model,) = models_of(spec, torch.float32, device)
    facts = {"tokens": 3, "programs_per_sm": 3 * model.shape.kv_heads // model.num_sms}
    further = {name: value for name, value in settings_for("decode cuts", **facts).items() if name.startswith("long_")}
    assert further["long_tokens"] and further.items() <= row["use"].items(), "contexts beyond those that were measured"


def test_cuts_of_long_contexts_stay_with_the_counts_that_have_them(
    spec: ModelSpec, device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A row is for several numbers of programs: it ends where long items are cut otherwise."""
    if device == "cuda":
        pytest.skip("the streams that fill a card have no room in this pool")
    (model,) = models_of(spec, torch.float32, device)
    monkeypatch.setattr(attention_tuning, "STREAMS", ((6 * model.num_sms // model.shape.kv_heads, 64),))
    found = measured(spec, monkeypatch, device, attention_tuning.CUTS[1])
    (row,) = found.rows["decode cuts"]
    assert row["when"]["programs_per_sm"] == [4, 6] and row["use"]["long_tokens"] == 0


def test_a_setting_that_is_wrong_is_never_chosen(spec: ModelSpec, device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    right = prefill_attention.attend

    def wrong(queries, kv, work, out, scoring, scratch, *, config=None):  # type: ignore[no-untyped-def]
        right(queries, kv, work, out, scoring, scratch, config=config)
        if config == FEW[0]:
            out[-1] += 1

    monkeypatch.setattr(prefill_attention, "attend", wrong)
    found = measured(spec, monkeypatch, device, FEW[0])
    assert "plain prefill" not in found.rows and any("prompt attention" in fault for fault in found.faults)


def test_what_there_is_no_time_for_stays_as_it_is(spec: ModelSpec, device: str) -> None:
    found = tune_attention(spec, torch.float32, time.perf_counter(), device=device, pool_tokens=1024)
    assert not found.rows and not found.faults


def test_rows_of_a_card_go_first_there_alone() -> None:
    facts = {"head_dim": 128, "tokens": 4}
    packaged = settings_for("decode", **facts)
    row = {"when": {"head_dim": [128, 128], "tokens": [2, 4]}, "use": {"block": 16, "warps": 8, "stages": 1}}
    path = keep(CARD, {"decode": [row]})
    assert path == user_path(CARD) and settings_for("decode", CARD, **facts) == row["use"] != packaged
    assert settings_for("decode", **facts) == settings_for("decode", "Another", **facts) == packaged
    assert settings_for("decode", CARD, head_dim=64, tokens=4) == settings_for("decode", head_dim=64, tokens=4)
    newer = {"when": dict(row["when"]), "use": {**row["use"], "warps": 4}}
    keep(CARD, {"decode": [newer], "plain prefill": []})
    assert settings_for("decode", CARD, **facts) == newer["use"], "the last measurement counts"


def test_a_broken_file_is_named() -> None:
    user_path(CARD).parent.mkdir(parents=True)
    user_path(CARD).write_text('{"decode": [{"when": 3}]}')
    with pytest.raises(BackendError, match=r"a-card-attention\.json cannot be read"):
        settings_for("decode", CARD, head_dim=128, tokens=4)


def test_each_kind_of_attention_is_measured_once(tmp_path: Path) -> None:
    windowed = load_checkpoint(make_tiny("gemma3", tmp_path / "model")[0]).spec
    found = models_of(windowed, torch.float32, "cpu")
    assert all(isinstance(model, Model) for model in found)
    assert len(found) == len({(model.shape, model.scoring.window) for model in found}) == 2


def test_layers_with_a_window_are_set_by_their_own_measurements(
    tmp_path: Path, device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Gemma 3 has layers of both kinds, with heads of one size: what is fastest for the one leaves the other be."""
    spec = load_checkpoint(make_tiny("gemma3", tmp_path / "model")[0]).spec
    full, windowed = sorted(models_of(spec, torch.float32, device), key=lambda model: model.scoring.window or 0)
    assert full.shape == windowed.shape and full.scoring.window is None
    window = windowed.scoring.window
    assert window is not None
    for kind, fast in (("walks", FEW[0]), ("cuts", attention_tuning.CUTS[1])):
        with monkeypatch.context() as patched:
            patched.setattr(attention_tuning, "models_of", lambda *given: [windowed])
            found = measured(spec, patched, device, fast)
        assert not found.faults and found.rows, kind
        assert {tuple(row["when"]["window"]) for rows in found.rows.values() for row in rows} == {(window, window)}
        assert all(f"window {window}" in change.product for change in found.changes)
        for kernel, rows in found.rows.items():
            keep(CARD, {kernel: rows})
            for row in rows:
                facts = {name: low for name, (low, _) in row["when"].items()}
                assert settings_for(kernel, CARD, **facts) == row["use"]
                full_facts = facts | {"window": 0}
                assert settings_for(kernel, CARD, **full_facts) == settings_for(kernel, **full_facts)


def test_a_step_cuts_the_keys_of_each_window_by_its_own_row(device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []

    def noted(name: str, card: str = "", **facts: int) -> dict[str, object]:
        asked.append((name, facts["window"]))
        return settings_for(name, card, **facts)

    decode_cuts.split_plan.cache_clear()
    decode_cuts.decode_config.cache_clear()
    monkeypatch.setattr(decode_cuts, "settings_for", noted)
    shape = AttentionShape(4, 2, 16, 64, torch.float32)
    attention = Attention(shape, device, 4)
    attention.cut_decodes(torch.tensor([70, 90], dtype=torch.int32, device=device), (None, 16))
    assert set(asked) == {(name, window) for name in ("decode", "decode cuts") for window in (0, 16)}
