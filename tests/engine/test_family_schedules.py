"""Whatever company a request has, and however it is cut, cached, preempted or left alone by aborted neighbours, its
greedy tokens are those of the request by itself: random schedules, for every variant of every family, on every host
backend. A few in each run; 200 a family with the marker `slow`."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
from tests.engine.family_schedules import MAX_CONTEXT, Schedule, check_met, hold
from tests.models.tiny_checkpoints import make_tiny, variants

from twostroke.backends.cpu import FACTORY as CPU
from twostroke.backends.interface import Backend, BackendFactory, BackendSettings
from twostroke.backends.reference import FACTORY as REFERENCE
from twostroke.core.formats import FormatWish
from twostroke.core.kv_layout import KVLayout
from twostroke.models.checkpoint import Checkpoint
from twostroke.models.loading import load_checkpoint

FEW, MANY = 2, 200


@dataclass(frozen=True)
class HostMaker:
    factory: BackendFactory
    block_sizes: tuple[int, ...]
    most_more: int

    def backend(self, checkpoint: Checkpoint, layout: KVLayout, schedule: Schedule) -> Backend:
        # A token that was decoded and is read again in a chunk, after a preemption say, goes another way over latents:
        # in f16 the two are near enough for greedy tokens to be the same.
        is_latent = any(group.content == "latent" for group in layout.groups)
        formats = self.factory.formats(checkpoint, FormatWish(kv="f16" if is_latent and self.factory is CPU else None))
        assert not isinstance(formats, str), formats
        settings = BackendSettings(
            max_context=MAX_CONTEXT, max_tokens_per_step=schedule.step_tokens, formats=formats, threads=2
        )
        return self.factory.create(checkpoint, layout, settings)


ON_REFERENCE = HostMaker(REFERENCE, (4, 8, 16), 3)
ON_THE_CPU = HostMaker(CPU, (16,), 1)
MAKERS = {"reference": ON_REFERENCE, "cpu": ON_THE_CPU}


@pytest.fixture(scope="module", params=variants())
def family(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Checkpoint:
    folder, _ = make_tiny(request.param, tmp_path_factory.mktemp(request.param))
    return load_checkpoint(folder)


@pytest.mark.parametrize("maker", MAKERS)
def test_a_few_schedules(family: Checkpoint, maker: str) -> None:
    hold(family, MAKERS[maker], FEW)


@pytest.mark.slow
@pytest.mark.parametrize("maker", MAKERS)
def test_many_schedules(family: Checkpoint, maker: str) -> None:
    check_met(hold(family, MAKERS[maker], MANY), family.spec)
