"""Drafters on the device that raise while a step is launched: answers are those without them, and nobody asks again."""

from __future__ import annotations

import logging
from typing import Any

import pytest
from tests.backends.cuda.drafting_engines import F32, PROMPTS, SIZES, engine_of
from tests.backends.cuda.engines import play, request
from tests.models.tiny_checkpoints import make_tiny
from tests.speculation.tiny_heads import make_head

from twostroke.backends.cuda.backend import CudaBackend
from twostroke.backends.cuda.drafting import DeviceDrafter
from twostroke.backends.cuda.parts import Parts
from twostroke.backends.interface import Companion
from twostroke.backends.reference import FACTORY as REFERENCE
from twostroke.engine.companions import plan_head
from twostroke.models.checkpoint import Checkpoint
from twostroke.models.loading import load_checkpoint

pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning:triton.runtime.interpreter")
REQUESTS = [request(f"r{index}", prompt, max_tokens=8) for index, prompt in enumerate(PROMPTS)]


class Breaks:
    """Raises from its n-th call on once it is told to."""

    def __init__(self, drafter: DeviceDrafter, where: str, after: int) -> None:
        self._act, self._left, self.num_raised, self.is_armed = getattr(drafter, where), after, 0, False
        setattr(drafter, where, self._called)

    def _called(self, *given: Any) -> None:
        self._left -= self.is_armed
        if self._left < 0:
            self.num_raised += 1
            raise MemoryError("no room for drafts")
        self._act(*given)


@pytest.fixture(scope="module")
def one_layer(tmp_path_factory: pytest.TempPathFactory) -> Checkpoint:
    path, _ = make_tiny("llama", tmp_path_factory.mktemp("target"), num_hidden_layers=1)
    return load_checkpoint(path)


def companion(checkpoint: Checkpoint, method: str) -> Companion:
    if method == "draft":
        return Companion("draft", checkpoint, F32, 1)
    return plan_head(make_head(method, checkpoint.spec), 1, REFERENCE).companion


@pytest.mark.parametrize(
    ("method", "where", "after"),
    [
        ("eagle3", "draft", 0),
        ("eagle3", "follow", 5),
        ("medusa", "draft", 2),
        ("medusa", "follow", 0),
        ("draft", "draft", 1),
        ("draft", "follow", 3),
    ],
)
def test_requests_lose_nothing(
    one_layer: Checkpoint, method: str, where: str, after: int, device: str, caplog: pytest.LogCaptureFixture
) -> None:
    made: list[Breaks] = []
    engine = engine_of(one_layer, companion(one_layer, method), SIZES, device, drafts=False)
    plain = play(engine, REQUESTS)
    engine.close()

    def broken(drafter: DeviceDrafter, parts: Parts) -> None:
        made.append(Breaks(drafter, where, after))

    engine = engine_of(one_layer, companion(one_layer, method), SIZES, device, broken)
    backend = engine.backend
    assert isinstance(backend, CudaBackend)
    made[0].is_armed = True
    with caplog.at_level(logging.WARNING, "twostroke.speculation"):
        for _ in range(2):
            told = play(engine, REQUESTS)
            assert told.tokens == plain.tokens and told.ends == plain.ends
    engine.scheduler.check()
    engine.close()
    if device == "cuda" and where == "draft":
        return  # captured steps call it no more
    assert made[0].num_raised == 1, "nobody asks again"
    fault = f"the drafter {method} failed and is asked no more: MemoryError: no room for drafts"
    assert backend.unseen.fault == fault
    assert [record.message for record in caplog.records] == [fault]


def test_what_raises_at_start_is_not_hidden(one_layer: Checkpoint, device: str) -> None:
    def broken(drafter: DeviceDrafter, parts: Parts) -> None:
        def load() -> tuple[str, ...]:
            raise MemoryError("no room for weights")

        drafter.load = load  # type: ignore[method-assign]

    with pytest.raises(MemoryError, match="no room for weights"):
        engine_of(one_layer, companion(one_layer, "medusa"), SIZES, device, broken).close()
