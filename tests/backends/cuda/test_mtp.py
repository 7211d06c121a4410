"""A model's own MTP block that drafts on the device: answers are those without it, also beside layers that keep states;
and what it drafts, in every way that a stream can take, is what transformers says of the whole text."""

from __future__ import annotations

from pathlib import Path

import pytest
from tests.backends.cuda.drafting_engines import PROMPTS, WAYS, drafts_made
from tests.backends.cuda.engines import Sizes, request
from tests.speculation.mtp_files import in_gguf, quantised
from tests.speculation.test_mtp import BEHIND, BESIDE, Made, with_block

from twostroke.backends.reference import FACTORY as REFERENCE
from twostroke.engine.companions import plan_head
from twostroke.models.heads.mtp import load_mtp
from twostroke.models.loading import load_checkpoint

pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning:triton.runtime.interpreter")
TIGHT = Sizes(step_tokens=16, max_rows=2, max_context=48, num_blocks=4)
"""Prompts come in chunks, and two streams do not fit side by side."""


def drafts_of(model: Path, sizes: Sizes, device: str, count: int) -> list[tuple[list[int], int, list[int]]]:
    checkpoint = load_checkpoint(model)
    companion = plan_head(load_mtp(checkpoint), 1, REFERENCE).companion
    requests = [request(f"r{index}", prompt, max_tokens=count) for index, prompt in enumerate(PROMPTS)]
    return drafts_made(checkpoint, companion, requests, sizes, device)


def check(made: Made, sizes: Sizes, device: str, count: int) -> None:
    drafts = drafts_of(made.folder, sizes, device, count)
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


@pytest.mark.slow
def test_out_of_a_quantised_folder_and_a_gguf_file(tmp_path: Path, device: str) -> None:
    """Its matrices are brought to what is computed in: drafts are those of the floats that are meant."""
    made = with_block("deepseek_v3", tmp_path / "folder")
    found, meant = quantised(made, tmp_path, "fp8_block", lambda name: "eh_proj" in name)
    assert drafts_of(found, TIGHT, device, 5) == drafts_of(meant, TIGHT, device, 5)
    made = with_block("qwen3_next", tmp_path / "another")
    path = in_gguf(made, tmp_path / "tiny.gguf")
    for known, length, drafts in drafts_of(path, TIGHT, device, 5):
        assert drafts == made.chain(known[:length], len(drafts), least_survival=0.0)
