"""Drafters on the device beside layers that keep states: answers are those without them, and what they draft, behind
chunks, prefixes and drafts that did not hold, is what transformers says of the whole text."""

from __future__ import annotations

from pathlib import Path

import pytest
from tests.backends.cuda.drafting_engines import PROMPTS, WAYS, drafts_made
from tests.backends.cuda.engines import Sizes, request
from tests.backends.cuda.test_device_drafters import draft_model, medusa
from tests.backends.cuda.test_eagle3_engine import make
from tests.models.tiny_checkpoints import make_tiny

from twostroke.models.loading import load_checkpoint

pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning:triton.runtime.interpreter")
METHODS = ("eagle3", "medusa", "draft")
TIGHT = Sizes(step_tokens=24, max_rows=2, max_context=48, num_blocks=6)


def check(variant: str, method: str, sizes: Sizes, folder: Path, device: str, count: int) -> None:
    if method == "eagle3":
        made = make(variant, folder)
        checkpoint, companion, chain = made.checkpoint, made.companion, made.chain
    else:
        path, model = make_tiny(variant, folder / "target")
        checkpoint = load_checkpoint(path)
        of = medusa(checkpoint, model) if method == "medusa" else draft_model(checkpoint, folder / "draft")
        companion, chain = of.companion, of.chain
    requests = [request(f"r{index}", prompt, max_tokens=count) for index, prompt in enumerate(PROMPTS)]
    drafts = drafts_made(checkpoint, companion, requests, sizes, device)
    assert len(drafts) >= 2 * len(PROMPTS)
    for known, length, found in drafts:
        assert found == chain(known[:length], len(found)), length


@pytest.mark.parametrize("method", METHODS)
def test_beside_delta_nets(method: str, tmp_path: Path, device: str) -> None:
    check("qwen3_5", method, TIGHT, tmp_path, device, 6)


@pytest.mark.slow
@pytest.mark.parametrize("way", list(WAYS))
@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("variant", ["qwen3_next", "lfm2", "granite_hybrid"])
def test_beside_every_kind_of_state(variant: str, method: str, way: str, tmp_path: Path, device: str) -> None:
    check(variant, method, WAYS[way], tmp_path, device, 8)
