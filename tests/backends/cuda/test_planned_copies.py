"""What a plan counts of a card that is not here, against what this backend states of itself on one: copies and floors,
by the engine's own way from a checkpoint to a shape."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from tests.cli.test_plan_decode import planned_on

from twostroke.backends import cuda
from twostroke.backends.cuda import cards, products
from twostroke.backends.cuda.kernels.target import target_of
from twostroke.config import EngineConfig
from twostroke.cost.devices import find_device
from twostroke.cost.floor import step_floor_s
from twostroke.cost.roofline import decode_work, prefill_work
from twostroke.engine.build import Preparation, prepare
from twostroke.machine import MemorySpace
from twostroke.models.random_weights import random_checkpoint
from twostroke.models.weights.tensor import WeightKind

SHAPES = Path(__file__).parents[3] / "bench" / "shapes"


def prepared_on(name: str, model: str, monkeypatch: pytest.MonkeyPatch, **settings: object) -> Preparation:
    """As a start on that card prepares, which only asks the card for its name, its chip and its free memory."""
    device, checkpoint = find_device(name), random_checkpoint(SHAPES / model, WeightKind.BF16)
    free = device.memory_bytes - 3 * 10**9 - 2 * checkpoint.num_parameters
    target = replace(target_of("cpu"), interpreted=False, capability=(9, 0), num_sms=device.hopper_sms or 0)
    monkeypatch.setattr(products, "target_of", lambda device: target)
    monkeypatch.setattr(products, "why_not", lambda: None)
    monkeypatch.setattr(products.torch.cuda, "get_device_name", lambda of: device.name)
    monkeypatch.setattr(cuda.CudaFactory, "supports", lambda self, checkpoint: None)
    memory = MemorySpace(device.name, device.memory_bytes, free, cards.KV_SHARE_OF_DEVICE)
    monkeypatch.setattr(cuda.CudaFactory, "memory", lambda self, checkpoint, here, formats, sizes: memory)
    return prepare(checkpoint, EngineConfig(backend="cuda", **settings))  # type: ignore[arg-type]


@pytest.mark.parametrize("model", ["llama-3.1-8b", "qwen3-30b-a3b", "qwen3-0.6b"])
@pytest.mark.parametrize("device", ["h200", "h100", "h100pcie"])
def test_a_plan_has_the_shape_that_the_backend_would_have(
    device: str, model: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    prepared, planned = prepared_on(device, model, monkeypatch), planned_on(str(SHAPES / model), device)
    engine, plan = prepared.shape, planned.shape
    assert plan.decode_weights == engine.decode_weights
    has_copies = {"llama-3.1-8b": True, "qwen3-30b-a3b": device == "h200", "qwen3-0.6b": True}[model]
    assert (plan.decode_weights is not None) == has_copies
    # Vectors are drawn in 32 bits, and planned in 16: nothing else is apart.
    assert planned.kv_space_bytes == pytest.approx(prepared.resolved.kv_bytes, rel=2e-4)
    for work in (*(decode_work(streams, 700) for streams in (1, 32, 256, 300)), prefill_work(9), prefill_work(900)):
        floor_s = step_floor_s(engine, work, planned.ceilings)
        assert step_floor_s(plan, work, planned.ceilings) == pytest.approx(floor_s, rel=2e-3)


def test_what_is_asked_for_is_asked_of_both(monkeypatch: pytest.MonkeyPatch) -> None:
    prepared = prepared_on("h200", "llama-3.1-8b", monkeypatch, decode_weights="plain")
    planned = planned_on(str(SHAPES / "llama-3.1-8b"), "h200", EngineConfig(decode_weights="plain"))
    assert prepared.shape.decode_weights is planned.shape.decode_weights is None
    assert planned.decode_note == prepared.formats.reasons[-1] == "decode weights plain (asked for)"
    assert any(str(planned.decode_note) in reason for reason in prepared.reasons)
