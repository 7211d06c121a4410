"""One attention for both phases: chunks of prompts beside a decode token, one scratch, against plain arithmetic."""

import numpy as np
import pytest
import torch
from tests.backends.cuda.paged import PagedCache, assert_near, attend, random_queries

from twostroke.backends.cuda import attention as attention_module
from twostroke.backends.cuda.attention import Attention, AttentionShape
from twostroke.backends.cuda.kernels import flash_prefill, hopper_prefill
from twostroke.backends.cuda.kernels.prefill_tiles import PrefillWork

SHAPE = AttentionShape(heads=6, kv_heads=2, head_dim=64, block_size=16, dtype=torch.float32)


@pytest.mark.parametrize("window, softcap", [(None, None), (20, None), (None, 5.0)])
def test_both_phases_of_one_step(device, window, softcap):
    rng = np.random.default_rng(4)
    cache = PagedCache.random(rng, [70, 33, 90], 2, 16, 64, torch.float32, device)
    attention = Attention(SHAPE, device, max_decode_tokens=4)
    queries = random_queries(rng, 2 + 12 + 7, 6, 2, 64, torch.float32, device)
    out = torch.full((21, 6 * 64), float("nan"), device=device)
    rows, positions = [2, 1], [89, 25]
    positions_on_device = torch.tensor(positions, dtype=torch.int32, device=device)
    attention.cut_decodes(positions_on_device, [window])
    attention.decode(
        queries[:2], cache.k, cache.v, cache.table,
        torch.tensor(rows, dtype=torch.int32, device=device), positions_on_device,
        out[:2], scale=0.125, window=window, softcap=softcap,
    )  # fmt: skip
    tiles = attention.tiles([2, 14], [12, 7], [58, 26], [0, 1], window=window)
    work = PrefillWork.of(tiles, device)
    attention.prefill(queries, cache.k, cache.v, cache.table, work, out, scale=0.125, window=window, softcap=softcap)
    rows += [0] * 12 + [1] * 7
    positions += [*range(58, 70), *range(26, 33)]
    for token, (row, position) in enumerate(zip(rows, positions, strict=True)):
        query = queries[token].to(torch.float64).cpu().numpy()
        assert_near(out[token], attend(query, cache, row, position, 0.125, window, softcap), torch.float32)


def test_the_choice_says_why(device):
    attention = Attention(SHAPE, device, max_decode_tokens=1)
    assert attention.prefill_choice.startswith("prefill attention: plain Triton, as ")


def test_high_tiles_run_in_cuda_cpp_where_it_compiles(monkeypatch):
    shape = AttentionShape(heads=8, kv_heads=2, head_dim=128, block_size=64, dtype=torch.bfloat16)
    called = []
    for module, name in ((flash_prefill, "attend_prefill_flash"), (hopper_prefill, "attend_prefill_hopper")):
        monkeypatch.setattr(module, name, lambda *_, name=name, **__: called.append(name))
    monkeypatch.setattr(flash_prefill, "why_not", lambda: "NVRTC is not there")
    attend, choice = attention_module._hopper_or_reason(shape, (9, 0))
    assert choice.endswith("Gluon for Hopper, as NVRTC is not there")
    monkeypatch.setattr(flash_prefill, "why_not", lambda: None)
    attend, choice = attention_module._hopper_or_reason(shape, (9, 0))
    assert "CUDA C++ for Hopper" in choice
    for tile_rows in (64, 128):
        work = PrefillWork(torch.zeros((1, 8), dtype=torch.int32), tile_rows, 0, 1)
        attend(None, None, None, None, work, None, scale=1.0, scratch=None)
    assert called == ["attend_prefill_hopper", "attend_prefill_flash"]


def test_a_graph_has_room_for_any_chunks_of_its_size(device):
    attention = Attention(SHAPE, device, max_decode_tokens=1)
    room = attention.capacity(64, 4, tile_rows=64)
    for counts in ([64], [1, 1, 1, 61], [16, 16, 16, 16], [20]):
        first_tokens = np.cumsum([0, *counts[:-1]]).tolist()
        starts, rows = [5000] * len(counts), list(range(len(counts)))
        tiles = attention.tiles(first_tokens, counts, starts, rows, tile_rows=64, pad_items=room)
        assert len(tiles.items) == room and tiles.part_items <= attention.max_part_items
        assert tiles.longest_context == 5000 + max(counts)
