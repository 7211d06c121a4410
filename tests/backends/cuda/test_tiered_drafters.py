"""Drafters on the device beside host memory for their KV: prefixes come back from there, answers are those without, and
what is drafted behind them is what transformers says of the whole text. A head's block as bytes is all it keeps."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from tests.backends.cuda.drafting_engines import PROMPTS, WAYS, drafts_made, engine_of
from tests.backends.cuda.engines import Sizes, request
from tests.backends.cuda.test_device_drafters import draft_model
from tests.backends.cuda.test_eagle3_engine import make
from tests.models.tiny_checkpoints import make_tiny
from tests.speculation.test_mtp import with_block

from twostroke.backends.cuda.backend import CudaBackend
from twostroke.backends.interface import Companion
from twostroke.backends.reference import FACTORY as REFERENCE
from twostroke.core.step import BlockGrant, PrefillChunk, Step
from twostroke.engine.companions import plan_head
from twostroke.models.checkpoint import Checkpoint
from twostroke.models.heads.mtp import load_mtp
from twostroke.models.loading import load_checkpoint

pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning:triton.runtime.interpreter")
TIGHT = Sizes(step_tokens=24, max_rows=2, max_context=48, num_blocks=4)
METHODS = ("draft", "eagle3", "mtp", "mtp with latents")
Chain = Callable[[Sequence[int], int], list[int]]


def made(method: str, folder: Path) -> tuple[Checkpoint, Companion, Chain]:
    if method == "eagle3":
        head = make("llama", folder)
        return head.checkpoint, head.companion, head.chain
    if method == "draft":
        checkpoint = load_checkpoint(make_tiny("llama", folder / "target", num_hidden_layers=1)[0])
        model = draft_model(checkpoint, folder / "draft", num_hidden_layers=3)  # more layers than its target
        return checkpoint, model.companion, model.chain
    block = with_block("deepseek_v3" if method.endswith("latents") else "qwen3_5", folder)
    checkpoint = load_checkpoint(block.folder)
    companion = plan_head(load_mtp(checkpoint), 1, REFERENCE).companion
    return checkpoint, companion, lambda known, count: block.chain(known, count, least_survival=0.0)


def check(method: str, sizes: Sizes, folder: Path, device: str, count: int) -> None:
    checkpoint, companion, chain = made(method, folder)
    requests = [request(f"r{index}", prompt, max_tokens=count) for index, prompt in enumerate(PROMPTS)]
    drafts = drafts_made(checkpoint, companion, requests, sizes, device, slots=30)
    assert len(drafts) >= 2 * len(PROMPTS)
    for known, length, found in drafts:
        assert found == chain(known[:length], len(found)), length


def test_drafts_behind_kv_that_came_back(tmp_path: Path, device: str) -> None:
    check("eagle3", TIGHT, tmp_path, device, 6)


@pytest.mark.slow
@pytest.mark.parametrize("method", METHODS)
def test_in_little_kv(method: str, tmp_path: Path, device: str) -> None:
    check(method, replace(WAYS["little KV"], num_blocks=4, max_rows=2, max_context=48), tmp_path, device, 8)


@pytest.mark.parametrize("method", METHODS)
def test_a_block_as_bytes_is_all_that_a_drafter_keeps(method: str, tmp_path: Path, device: str) -> None:
    checkpoint, companion, _ = made(method, tmp_path)
    engine = engine_of(checkpoint, companion, TIGHT, device)
    backend = engine.backend
    assert isinstance(backend, CudaBackend) and backend._drafter is not None
    store = backend._drafter.blocks
    assert store is not None
    group = len(backend.block_format.groups) - 1
    (form,) = store.block_formats()
    assert backend.block_format.groups[group] == form
    parts = getattr(store, "_parts", None) or [part for parts in getattr(store, "parts", ()) for part in parts]
    assert form.num_bytes == sum(part[0].nbytes for part in parts)
    torch.manual_seed(2)
    for part in parts:
        part.copy_(torch.randn(part.shape))
    before, (blocks, others) = [part.clone() for part in parts], ([2, 0], [1, 3])
    buffer = memoryview(bytearray(2 * form.num_bytes))
    backend.read_blocks(group, blocks, buffer)
    backend.write_blocks(group, others, buffer)
    for part, old in zip(parts, before, strict=True):
        assert torch.equal(part[others], old[blocks]) and torch.equal(part[blocks], old[blocks])
    engine.close()


def test_a_step_that_reads_layer_by_layer_waits_for_all_before_who_drafts(
    tmp_path: Path, device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With its last layer: whoever drafts comes behind it."""
    checkpoint, companion, _ = made("eagle3", tmp_path)
    engine = engine_of(checkpoint, companion, TIGHT, device, slots=8)
    backend = engine.backend
    assert isinstance(backend, CudaBackend) and backend._kept is not None
    told: list[int | None] = []
    monkeypatch.setattr(backend._kept, "awaited", lambda grants: [object()])
    monkeypatch.setattr(backend._kept, "wait", lambda jobs: told.append(None))
    monkeypatch.setattr(backend._kept, "wait_for_layer", lambda jobs, layer: told.append(layer))
    step = Step(0, prefills=(PrefillChunk(0, 0, (5, 6), samples=False),), grants=(BlockGrant(0, 0, 0, (1,)),))
    wait = backend._copies(backend._kept, step)
    assert wait is not None
    for layer in range(checkpoint.spec.num_layers):
        wait(layer)
    assert told == [*range(checkpoint.spec.num_layers - 1), None]
    engine.close()
