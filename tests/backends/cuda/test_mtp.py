"""A model's own MTP block that drafts on the device: answers are those without it, also beside layers that keep states;
and what it drafts, in every way that a stream can take, is what transformers says of the whole text."""

from __future__ import annotations

from pathlib import Path

import pytest
from tests.backends.cuda.drafting_engines import PROMPTS, WAYS, drafts_made
from tests.backends.cuda.engines import Sizes, request
from tests.speculation.test_mtp import BEHIND, BESIDE, Made, with_block

from twostroke.backends.reference import FACTORY as REFERENCE
from twostroke.engine.companions import plan_head
from twostroke.models.heads.mtp import load_mtp
from twostroke.models.loading import load_checkpoint

pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning:triton.runtime.interpreter")
TIGHT = Sizes(step_tokens=16, max_rows=2, max_context=48, num_blocks=4)
"""Prompts come in chunks, and two streams do not fit side by side."""


def check(made: Made, sizes: Sizes, device: str, count: int) -> None:
    checkpoint = load_checkpoint(made.folder)
    companion = plan_head(load_mtp(checkpoint), 1, REFERENCE).companion
    requests = [request(f"r{index}", prompt, max_tokens=count) for index, prompt in enumerate(PROMPTS)]
    drafts = drafts_made(checkpoint, companion, requests, sizes, device)
    assert len(drafts) >= 2 * len(PROMPTS)
    for known, length, found in drafts:
        assert found == made.chain(known[:length], len(found), least_survival=0.0), length


@pytest.mark.parametrize("variant", ["qwen3_5", "glm4_moe", "deepseek_v3"])
def test_answers_are_those_without_and_drafts_those_of_the_whole_text(
    variant: str, tmp_path: Path, device: str
) -> None:
    """Beside delta nets; with experts; with latents."""
    check(with_block(variant, tmp_path), TIGHT, device, 7)


@pytest.mark.slow
@pytest.mark.parametrize("way", list(WAYS))
@pytest.mark.parametrize("variant", [*BESIDE, *BEHIND])
def test_in_every_way(variant: str, way: str, tmp_path: Path, device: str) -> None:
    check(with_block(variant, tmp_path), WAYS[way], device, 8)
