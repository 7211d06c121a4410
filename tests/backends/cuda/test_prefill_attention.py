"""Prefill attention in plain Triton against plain float64 arithmetic; all that a query must not read is NaN."""

import numpy as np
import pytest
import torch
from tests.backends.cuda.paged import random_sinks
from tests.backends.cuda.prefill_case import PrefillCase

from twostroke.backends.cuda.kernels.paged import AttentionShape, Scoring, WalkConfig
from twostroke.backends.cuda.kernels.prefill_attention import attend

SMALL = WalkConfig(block=16, warps=4, stages=2)


def check(
    device, counts, starts, *, heads=4, kv_heads=2, head_dim=64, page=16, dtype=torch.float32,
    window=None, softcap=None, seed=0, config=SMALL, has_sinks=False, **tiling,
):  # fmt: skip
    rng, shape = np.random.default_rng(seed), AttentionShape(heads, kv_heads, head_dim, page, dtype)
    scoring = Scoring(head_dim**-0.5, window, softcap, sinks=random_sinks(rng, heads, device) if has_sinks else None)
    case = PrefillCase.random(rng, counts, starts, shape, device, window=window, **tiling)
    case.run(attend, scoring, config=config)
    case.check(scoring)
    return case


@pytest.mark.parametrize("heads, kv_heads", [(2, 2), (6, 2), (4, 1), (8, 1), (16, 1)])
def test_groups(device, heads, kv_heads):
    check(device, [9, 20], [0, 13], heads=heads, kv_heads=kv_heads)


@pytest.mark.parametrize("head_dim", [64, 80, 96, 128, 256, 512])
def test_head_sizes(device, head_dim):
    check(device, [11], [7], heads=2, kv_heads=1, head_dim=head_dim)


@pytest.mark.parametrize("window", [None, 1, 9, 40, 1000])
@pytest.mark.parametrize("block", [16, 32])
def test_tokens_of_a_chunk_see_each_other_both_ways(device, window, block):
    check_both_ways(device, [1, 70, 33], window, block)


@pytest.mark.parametrize("window", [None, 100])
def test_both_ways_in_parts(device, window):
    case = check_both_ways(device, [1000], window, 64, num_sms=64, tile_rows=64)
    assert case.work.part_items > 0


def check_both_ways(device, counts, window, block, **tiling):
    """Against plain arithmetic, whatever tiles and blocks the texts are cut into."""
    rng, shape = np.random.default_rng(2), AttentionShape(4, 2, 32, 16, torch.float32, is_causal=False)
    case = PrefillCase.random(rng, counts, [0] * len(counts), shape, device, **tiling)
    scoring = Scoring(0.3, window, is_causal=False)
    case.run(attend, scoring, config=WalkConfig(block, warps=4, stages=2))
    keys, values = (gathered(case, cache) for cache in (case.cache.k, case.cache.v))
    for number, (first, count) in enumerate(zip(case.first_tokens, counts, strict=True)):
        places = torch.arange(count, device=device)
        near = (places[:, None] - places).abs() < (count if window is None else window)
        query = case.queries[first : first + count].transpose(0, 1)  # [heads, tokens, head_dim]
        key, value = (part[number].repeat_interleave(2, 0) for part in (keys, values))
        scores = (query @ key.transpose(1, 2) * 0.3).masked_fill(~near, float("-inf"))
        expected = (scores.softmax(-1) @ value).transpose(0, 1).flatten(1)
        torch.testing.assert_close(case.out[first : first + count], expected, rtol=1e-4, atol=1e-5)
    return case


def gathered(case, cache):
    """Of each segment, what its row's pages hold  # [kv_heads, tokens, head_dim]"""
    found = []
    for count, row in zip(case.counts, case.rows, strict=True):
        pages = case.cache.kv.table[row, : -(-count // 16)].long()
        found.append(cache[pages].transpose(0, 1).flatten(1, 2)[:, :count])
    return found


@pytest.mark.parametrize("page", [16, 64])
@pytest.mark.parametrize("block", [16, 32])
def test_page_sizes(device, page, block):
    check(device, [1, 33, 16], [40, 0, 64], page=page, config=WalkConfig(block, warps=4, stages=2))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_precision(device, dtype):
    if device == "cpu" and dtype == torch.bfloat16:
        pytest.skip("the interpreter multiplies the bits of bfloat16")
    check(device, [20, 7], [0, 30], dtype=dtype)


@pytest.mark.parametrize("window", [1, 5, 16, 30, 1000])
def test_windows(device, window):
    check(device, [25, 3], [40, 0], window=window)


@pytest.mark.parametrize("counts, starts, window", [([12, 3], [0, 20], None), ([9], [600], None), ([9], [600], 70)])
def test_sinks_take_their_share_once_however_keys_are_cut(device, counts, starts, window):
    case = check(device, counts, starts, heads=4, kv_heads=1, num_sms=6, window=window, has_sinks=True)
    assert (case.work.part_items > 0) == (starts == [600])


def test_soft_cap(device):
    check(device, [12, 3], [0, 20], softcap=2.0)


@pytest.mark.parametrize("window", [None, 70, 3])
def test_keys_of_a_tile_are_shared_out_where_tiles_are_few(device, window):
    """As if there were no window: with one, parts may be left without keys."""
    case = check(device, [9], [600], heads=4, kv_heads=1, num_sms=6, window=window)
    assert case.work.part_items > 1


def test_cut_and_whole_tiles_side_by_side_and_padded(device):
    case = check(device, [5, 3, 2], [900, 0, 30], heads=3, kv_heads=1, num_sms=3, padding=4)
    assert {0, 1} < set(case.work.items[:, 6].tolist())


def test_shapes_at_random(device):
    rng = np.random.default_rng(11)
    for seed in range(8):
        group, kv_heads, segments = int(rng.choice([1, 3, 4, 8])), int(rng.integers(1, 3)), int(rng.integers(1, 4))
        check(
            device,
            rng.integers(1, 24, size=segments).tolist(),
            [int(rng.integers(0, 300)) if rng.random() < 0.5 else 0 for _ in range(segments)],
            heads=group * kv_heads,
            kv_heads=kv_heads,
            head_dim=int(rng.choice([64, 96])),
            page=int(rng.choice([16, 64])),
            window=int(rng.integers(1, 60)) if rng.random() < 0.4 else None,
            softcap=float(rng.uniform(1, 30)) if rng.random() < 0.3 else None,
            padding=int(rng.integers(0, 3)),
            num_sms=int(rng.integers(1, 4)),
            tile_rows=int(rng.choice([16, 32])),
            seed=seed,
        )


def test_too_small_a_scratch_is_refused(device):
    rng = np.random.default_rng(0)
    shape = AttentionShape(1, 1, 64, 16, torch.float32)
    case = PrefillCase.random(rng, [4], [3000], shape, device, num_sms=8)
    case.scratch = PrefillCase.random(rng, [4], [3000], shape, device, num_sms=1).scratch
    with pytest.raises(ValueError, match=r"Prefill scratch for \d parts"):
        case.run(attend, Scoring(1.0))
