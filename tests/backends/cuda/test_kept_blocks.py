"""Blocks of the device as bytes, and copies of them in host memory: what is spilled and loaded is what was there, layer
by layer, and an engine with tiers says what one without says. Streams and events are tried on a card alone."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
from tests.backends.cuda.engines import Sizes, play, request
from tests.models.tiny_checkpoints import make_tiny

from twostroke.backends.cuda.backend import CudaBackend
from twostroke.backends.cuda.kept_blocks import BATCH_BLOCKS, CudaKeptBlocks, _Job
from twostroke.backends.interface import BlockBackend
from twostroke.core.errors import BackendError
from twostroke.core.kv_layout import KVLayout
from twostroke.core.request import Request
from twostroke.core.step import BlockCopy, BlockGrant, Step
from twostroke.engine.engine import Engine
from twostroke.kv.ledger import KVLedger
from twostroke.kv.tiers.host import HostTier
from twostroke.kv.tiers.tiers import KVTiers
from twostroke.models.checkpoint import Checkpoint
from twostroke.models.loading import load_checkpoint
from twostroke.scheduling.config import SchedulerConfig
from twostroke.scheduling.scheduler import Scheduler

SIZES = Sizes(step_tokens=16, max_rows=2, max_context=48, num_blocks=4)


@pytest.fixture(scope="module")
def gemma(tmp_path_factory: pytest.TempPathFactory) -> Checkpoint:
    """Two groups: full attention, and a window."""
    return load_checkpoint(make_tiny("gemma2", tmp_path_factory.mktemp("gemma2"), num_hidden_layers=2)[0])


@pytest.fixture(scope="module")
def backend(gemma: Checkpoint, device: str) -> CudaBackend:
    return replace(SIZES, num_blocks=24).on_device(gemma, device)


def randomise(backend: CudaBackend, seed: int) -> None:
    torch.manual_seed(seed)
    for part in (*backend._kv.keys, *backend._kv.values):
        part.copy_(torch.randn(part.shape, dtype=torch.float32))


def test_blocks_are_read_out_and_written_in(backend: CudaBackend) -> None:
    assert isinstance(backend, BlockBackend)
    assert [form.window is None for form in backend.block_format.groups].count(True) == 1
    for group, form in enumerate(backend.block_format.groups):
        randomise(backend, 3)
        blocks = [5, 0, 23, *range(7, 7 + BATCH_BLOCKS)]
        buffer = memoryview(bytearray(form.num_bytes * len(blocks)))
        backend.read_blocks(group, blocks, buffer)
        layer = form.layers[0]
        first = torch.frombuffer(buffer, dtype=torch.float32, count=backend._kv.keys[layer][5].numel())
        assert torch.equal(first, backend._kv.keys[layer][5].cpu().reshape(-1)), "layer order, keys first"
        randomise(backend, 4)
        others = torch.clone(backend._kv.values[layer][6])
        backend.write_blocks(group, blocks, buffer)
        again = memoryview(bytearray(buffer.nbytes))
        backend.read_blocks(group, blocks, again)
        assert again == buffer
        assert torch.equal(backend._kv.values[layer][6], others), "and no other block"
        with pytest.raises(BackendError, match="bytes each"):
            backend.read_blocks(group, blocks[1:], buffer)
        with pytest.raises(BackendError, match="blocks 0 to 23"):
            backend.read_blocks(group, [24], memoryview(bytearray(form.num_bytes)))


def test_what_is_spilled_comes_back_in_other_blocks(backend: CudaBackend, device: str) -> None:
    kept = CudaKeptBlocks(backend._kv, [30, 30], torch.device(device))
    randomise(backend, 5)
    spills = tuple(BlockCopy(group, block, 20 - block) for group in (0, 1) for block in range(11))
    before = {}
    for group, form in enumerate(backend.block_format.groups):
        before[group] = memoryview(bytearray(form.num_bytes * 11))
        backend.read_blocks(group, range(11), before[group])
    kept.start(Step(0, spills=spills))
    randomise(backend, 6)
    kept.start(
        Step(1, loads=tuple(BlockCopy(group, block + 12, 20 - block) for group in (0, 1) for block in range(11)))
    )
    kept.wait(kept.awaited((BlockGrant(0, 0, 0, (12, 13)),)))
    for group, form in enumerate(backend.block_format.groups):
        after = memoryview(bytearray(before[group].nbytes))
        backend.read_blocks(group, range(12, 23), after)
        assert after == before[group]
        assert kept.view(group, 20) == before[group][: form.num_bytes]


@pytest.mark.parametrize("kv", ["fp8", "int8"])
def test_narrow_kv_comes_back_with_its_scales(gemma: Checkpoint, device: str, kv: str) -> None:
    """Every byte of a block, whatever it means, by way of host memory."""
    narrow = replace(SIZES, num_blocks=24).on_device(gemma, device, kv=kv)
    kept, generator = CudaKeptBlocks(narrow._kv, [30, 30], torch.device(device)), np.random.default_rng(7)
    assert narrow.block_format != SIZES.on_device(gemma, device).block_format
    for group, form in enumerate(narrow.block_format.groups):
        before = memoryview(bytearray(generator.bytes(form.num_bytes * 11)))
        narrow.write_blocks(group, range(11), before)
        kept.start(Step(2 * group, spills=tuple(BlockCopy(group, block, 20 - block) for block in range(11))))
        narrow.write_blocks(group, range(11), memoryview(bytearray(before.nbytes)))
        kept.start(Step(2 * group + 1, loads=tuple(BlockCopy(group, block + 12, 20 - block) for block in range(11))))
        kept.wait(kept.awaited((BlockGrant(0, group, 0, (12, 13)),)))
        after = memoryview(bytearray(before.nbytes))
        narrow.read_blocks(group, range(12, 23), after)
        assert after == before
        assert kept.view(group, 20) == before[: form.num_bytes]


def tiered(checkpoint: Checkpoint, backend: CudaBackend, layout: KVLayout, slots: int) -> Engine:
    config = SchedulerConfig(max_context=48, max_tokens_per_step=16, max_running=2)
    num_slots = [slots] * len(layout.groups)
    blocks = backend.keep_blocks(num_slots) if slots else None
    tiers = None if blocks is None else KVTiers(HostTier(num_slots), backend.block_format, blocks)
    return Engine(Scheduler(config, layout, ledger=KVLedger(layout, tiers=tiers)), backend, checkpoint.spec.vocab_size)


@pytest.mark.slow
@pytest.mark.parametrize("kv", [None, "fp8", "int8"])
def test_an_engine_with_tiers_says_what_one_without_says(
    gemma: Checkpoint, device: str, kv: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And a step that reads blocks on their way is told to wait for them: for all, where a graph computes it, else
    layer by layer, as one does that wants prompt logprobs."""
    waited: list[int] = []
    waited_whole: list[int] = []

    def awaited(kept: CudaKeptBlocks, grants: tuple[BlockGrant, ...]) -> list[_Job]:
        return [_Job(set(), 0, is_load=True)] if grants else []  # as on a card, where none is known to be over

    monkeypatch.setattr(CudaKeptBlocks, "awaited", awaited)
    monkeypatch.setattr(CudaKeptBlocks, "wait", lambda kept, jobs: waited_whole.append(len(jobs)))
    monkeypatch.setattr(CudaKeptBlocks, "wait_for_layer", lambda kept, jobs, layer: waited.append(layer))
    prompts = [[number * 7 + place for place in range(34)] for number in (1, 2, 1, 3, 2, 1)]
    requests: list[Request] = [
        replace(request(f"r{number}", prompt, max_tokens=3), seed=1) for number, prompt in enumerate(prompts)
    ]
    requests.append(request("logprobs", range(20), max_tokens=1, prompt_logprobs=0))
    answers = []
    for slots in (0, 20):
        engine = tiered(gemma, SIZES.on_device(gemma, device, kv=kv), SIZES.layout(gemma), slots)
        answers.append(play(engine, requests).tokens)
        assert waited == ([0, 1] * (len(waited) // 2) if slots else [])
        hits = engine.scheduler.counts().tier_hit_tokens
        assert (hits.host > 0) == bool(slots)
        engine.close()
    assert answers[0] == answers[1]
    assert waited and waited_whole
