"""Whatever company a request has, and however it is cut, cached, preempted or left alone by aborted neighbours, its
greedy tokens are those of the request by itself: random schedules, for every family, on every host backend that has
it. A few in each run; 200 a family with the marker `slow`."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import pytest
from tests.engine.family_schedules import MAX_CONTEXT, Schedule, hold
from tests.models.tiny_checkpoints import make_tiny, variants

from twostroke.backends.cpu import FACTORY as CPU
from twostroke.backends.interface import Backend, BackendFactory, BackendSettings
from twostroke.backends.reference import FACTORY as REFERENCE
from twostroke.core.formats import FormatWish
from twostroke.core.kv_layout import KVLayout
from twostroke.models.checkpoint import Checkpoint
from twostroke.models.loading import load_checkpoint

OTHERS_ON_CPU = ("qwen3_moe", "mixtral", "gpt_oss", "qwen2_moe", "glm4_moe", "ministral3", "lfm2", "lfm2_moe")
ON_CPU = (*OTHERS_ON_CPU, "deepseek_v2", "deepseek_v3", "glm4_moe_lite", "mistral4", "olmo3", "minimax_m2")
ON_CPU += ("gemma4", "gemma4_moe", "nemotron_h")
FAMILIES = ("deepseek_v2", "deepseek_v2_lite", "deepseek_v3", "glm4_moe_lite", "mistral4", "gpt_oss", "gemma4")
FAMILIES += ("gemma4_moe", "lfm2_moe", "qwen3_next", "qwen3_5", "granite_hybrid", "nemotron_h")
FEW, MANY = 3, 200


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


@pytest.fixture(scope="module", params=FAMILIES)
def family(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Checkpoint]:
    folder, _ = make_tiny(request.param, tmp_path_factory.mktemp(request.param))
    yield load_checkpoint(folder)


@pytest.fixture(scope="module", params=ON_CPU)
def cpu_family(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Checkpoint:
    folder, _ = make_tiny(request.param, tmp_path_factory.mktemp(request.param))
    return load_checkpoint(folder)


def test_a_few_schedules_on_the_cpu(cpu_family: Checkpoint) -> None:
    hold(cpu_family, ON_THE_CPU, FEW)


@pytest.mark.slow
def test_many_schedules_on_the_cpu(cpu_family: Checkpoint) -> None:
    tally = hold(cpu_family, ON_THE_CPU, MANY)
    assert min(tally.cached, tally.aborted) > 10 and tally.preempted > 1, tally


def test_a_few_schedules(family: Checkpoint) -> None:
    hold(family, ON_REFERENCE, FEW)


@pytest.mark.slow
def test_many_schedules(family: Checkpoint) -> None:
    tally = hold(family, ON_REFERENCE, MANY)
    assert min(tally.cached, tally.preempted, tally.aborted) > 10, tally


def test_the_families_are_variants() -> None:
    assert set(FAMILIES) <= set(variants())
