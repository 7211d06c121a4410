"""One attention for both phases: chunks of prompts beside a decode token, one scratch, against plain arithmetic."""

import numpy as np
import pytest
import torch
from tests.backends.cuda.paged import PagedCache, assert_near, attend, random_queries

from twostroke.backends.cuda import attention as attention_module
from twostroke.backends.cuda.attention import Attention
from twostroke.backends.cuda.kernels import flash_prefill, prefill_attention
from twostroke.backends.cuda.kernels.paged import AttentionShape, Scoring
from twostroke.backends.cuda.kernels.prefill_tiles import PrefillTiles, PrefillWork
from twostroke.backends.cuda.kernels.target import Target

SHAPE = AttentionShape(heads=6, kv_heads=2, head_dim=64, page=16, dtype=torch.float32)


@pytest.mark.parametrize("window, softcap", [(None, None), (20, None), (None, 5.0)])
def test_both_phases_of_one_step(device, window, softcap):
    rng = np.random.default_rng(4)
    scoring = Scoring(0.125, window, softcap)
    cache = PagedCache.random(rng, [70, 33, 90], SHAPE, device)
    attention = Attention(SHAPE, device, max_decode_tokens=4)
    queries = random_queries(rng, 2 + 12 + 7, SHAPE, device)
    rows, positions = [2, 1], [89, 25]
    rows_on_device = torch.tensor(rows, dtype=torch.int32, device=device)
    positions_on_device = torch.tensor(positions, dtype=torch.int32, device=device)
    attention.cut_decodes(positions_on_device, [window])
    out = torch.full((21, 6 * 64), float("nan"), device=device)
    attention.decode(queries[:2], cache.kv, rows_on_device, positions_on_device, out[:2], scoring)
    tiles = PrefillTiles.build([2, 14], [12, 7], [58, 26], [0, 1], attention.tiling(19))
    attention.prefill(queries, cache.kv, PrefillWork.of(tiles, device), out, scoring)
    rows += [0] * 12 + [1] * 7
    positions += [*range(58, 70), *range(26, 33)]
    for token, (row, position) in enumerate(zip(rows, positions, strict=True)):
        query = queries[token].to(torch.float64).cpu().numpy()
        assert_near(out[token], attend(query, cache, row, position, scoring), torch.float32)


def test_the_choice_says_why(device):
    attention = Attention(SHAPE, device, max_decode_tokens=1)
    assert attention.prefill_choice.startswith("prefill attention: plain Triton, as ")


def test_the_first_kernel_that_takes_a_model_attends_its_prompts(monkeypatch):
    shape = AttentionShape(heads=8, kv_heads=2, head_dim=128, page=64, dtype=torch.bfloat16)
    hopper, ampere = Target(False, (9, 0), 132), Target(False, (8, 0), 108)
    monkeypatch.setattr(flash_prefill, "why_not", lambda: None)
    assert attention_module.choose_prefill(shape, hopper) == (flash_prefill, "prefill attention: CUDA C++ for Hopper")
    kernel, choice = attention_module.choose_prefill(shape, ampere)
    assert kernel is prefill_attention and "need a Hopper device (CUDA C++ for Hopper)" in choice
    monkeypatch.setattr(flash_prefill, "why_not", lambda: "NVRTC is not there")
    kernel, choice = attention_module.choose_prefill(shape, hopper)
    assert kernel is prefill_attention
    assert choice == "prefill attention: plain Triton, as NVRTC is not there (CUDA C++ for Hopper)"


def test_a_graph_has_room_for_any_chunks_of_its_size(device):
    attention = Attention(SHAPE, device, max_decode_tokens=1)
    tiling = attention.tiling(64)
    room = tiling.capacity(64, 4)
    for counts in ([64], [1, 1, 1, 61], [16, 16, 16, 16], [20]):
        first_tokens = np.cumsum([0, *counts[:-1]]).tolist()
        starts, rows = [5000] * len(counts), list(range(len(counts)))
        tiles = PrefillTiles.build(first_tokens, counts, starts, rows, tiling, room)
        assert len(tiles.items) == room and tiles.part_items <= tiling.most_parts
        assert tiles.longest_context == 5000 + max(counts)
