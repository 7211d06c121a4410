"""A plan, a simulation and the machine under us plan one model alike: the same bits, arithmetic and factors."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import pytest
from tests.models.quantised.folders import make_quantised
from tests.models.tiny_checkpoints import make_tiny

from twostroke.cli.plan_table import kinds_to_try
from twostroke.cli.simulate_device import on_device
from twostroke.config import EngineConfig
from twostroke.core.formats import STORED, Formats
from twostroke.cost.devices import find_device
from twostroke.cost.roofline import decode_work, prefill_work
from twostroke.models.checkpoint import Checkpoint
from twostroke.planner.asked import here
from twostroke.planner.asked.model import read_model
from twostroke.planner.asked.wish import DeploymentWish, Wish
from twostroke.planner.deployment import Deployment
from twostroke.planner.estimate import expected_of, phases_of

Model = Callable[[], Path]
WORKS = (decode_work(1, 500), decode_work(64, 900), prefill_work(700))


@pytest.fixture(params=["gguf", "modelopt_fp8", "ct_int4", "bf16"])
def model(request: pytest.FixtureRequest, smollm2_path: Path, tmp_path: Path) -> tuple[Path, str, str]:
    """Its file or folder, what it is kept in, and what an H200 multiplies it in."""
    form = request.param
    if form == "gguf":
        return smollm2_path, "q4_1", "bf16"
    if form == "bf16":
        folder, _ = make_tiny("llama", tmp_path)
        return folder, "f32", "bf16"
    folder, _ = make_quantised(form, tmp_path)
    return folder, *{"modelopt_fp8": ("fp8", "fp8"), "ct_int4": ("int4", "bf16")}[form]


def planned_by_plan(path: Path) -> Deployment:
    deployment, _ = Wish(read_model(str(path)), DeploymentWish(), EngineConfig()).on("h200")
    return deployment


def test_plan_and_simulate_agree(model: tuple[Path, str, str]) -> None:
    path, kept, arithmetic = model
    planned = planned_by_plan(path)
    efficiency = expected_of(planned)
    assert (planned.kept, planned.arithmetic) == (kept, arithmetic)
    simulated = on_device(str(path), "h200", 1, EngineConfig())
    assert f" in {kept} on H200" in simulated.title and efficiency.error in simulated.source
    phases = phases_of(planned, efficiency)
    for work in WORKS:
        assert simulated.spec.step_seconds(work) == phases.step_s(work)


def test_this_machine_is_planned_as_the_same_device_elsewhere(
    model: tuple[Path, str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    path, kept, arithmetic = model
    planned, device = read_model(str(path)), find_device("h200")
    assert planned.checkpoint is not None
    elsewhere = planned_by_plan(path)

    def chosen(checkpoint: Checkpoint, *rest: object) -> SimpleNamespace:
        factory = SimpleNamespace(name="cuda", ceilings=lambda *given: device.ceilings(arithmetic))
        memory = SimpleNamespace(
            owner="H200", total_bytes=device.memory_bytes, free_beside_weights_bytes=10**9, kv_share=0.9
        )
        formats = Formats(STORED, "bf16", "bf16")
        return SimpleNamespace(factory=factory, memory=memory, formats=formats, shape=elsewhere.shape)

    monkeypatch.setattr(here, "choose", chosen)
    monkeypatch.setattr(here, "_prepared", lambda *given: None)
    found, _ = here.here(planned, None, "bf16", 1, EngineConfig())
    assert (found.kept, found.arithmetic) == (kept, arithmetic)
    assert expected_of(found) == expected_of(elsewhere)
    for work in WORKS:
        assert phases_of(found, expected_of(found)).step_s(work) == phases_of(elsewhere, expected_of(elsewhere)).step_s(
            work
        )


def test_a_search_leaves_few_bits_as_they_are(smollm2_path: Path, tmp_path: Path) -> None:
    folder, _ = make_quantised("modelopt_fp8", tmp_path)
    for path in (smollm2_path, folder):
        assert kinds_to_try(read_model(str(path))) == [None]
    assert kinds_to_try(read_model("Llama-3.1-8B")) == [None, "fp8", "int4"]
