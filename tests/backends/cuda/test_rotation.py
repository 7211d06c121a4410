"""Decode attention that turns heads and stores keys itself: as the two kernels one after the other, and as transformers
and plain arithmetic have it. The caches hold NaN where the new keys and values go, and everywhere they do not."""

import numpy as np
import pytest
import torch
from tests.backends.cuda.closeness import assert_close, random
from tests.backends.cuda.paged import PagedCache, assert_near, attend
from tests.backends.cuda.turned import EPS, angles, expected

from twostroke.backends.cuda.kernels.decode_attention import DecodeScratch, attend_decode
from twostroke.backends.cuda.kernels.decode_cuts import DecodeConfig, SplitPlan
from twostroke.backends.cuda.kernels.rope import rope_and_store
from twostroke.backends.cuda.kernels.rotation import Rotation

PLAIN = DecodeConfig(block=16, warps=4, stages=3, keys_first=False)
WIDE = DecodeConfig(block=32, warps=4, stages=3, keys_first=True)
CONTEXTS = [1, 16, 17, 50, 33, 80]
"""Of a key alone, to the end of a block, and with a new one begun; the longest are cut."""
FINE = SplitPlan(target_items=12, smallest_tokens=16, max_items=32)


def slots(cache, rows, positions):
    block_size = cache.k.shape[2]
    blocks = [int(cache.table[row, position // block_size]) for row, position in zip(rows, positions, strict=True)]
    return blocks, [position % block_size for position in positions]


def check(
    device, contexts=CONTEXTS, *, heads=4, kv_heads=2, head_dim=32, rope_dim=None, normed=False,
    dtype=torch.float32, block_size=16, config=PLAIN, plan=FINE, window=None, softcap=None, padding=0,
):  # fmt: skip
    rope_dim, scale = rope_dim or head_dim, head_dim**-0.5
    rng = np.random.default_rng(0)
    cache = PagedCache.random(rng, contexts, kv_heads, block_size, head_dim, dtype, device)
    order = rng.permutation(len(contexts)).tolist()
    rows, positions = order + [len(contexts)] * padding, [contexts[row] - 1 for row in order] + [0] * padding
    scratch_block, num_tokens = cache.k.shape[0] - 1, len(rows)
    blocks, places = slots(cache, order, positions[: len(order)])
    for part in (cache.k, cache.v):
        part[blocks, :, places] = float("nan")
    before = cache.k.clone(), cache.v.clone()
    on_device = [torch.tensor(numbers, dtype=torch.int32, device=device) for numbers in (rows, positions)]
    qkv = random(num_tokens, (heads + 2 * kv_heads) * head_dim, dtype=dtype, device=device)
    norms = [random(head_dim, dtype=dtype, device=device, seed=s) + 1 if normed else None for s in (1, 2)]
    cos_sin = angles(rope_dim, device, max(contexts))
    raw = qkv.clone()
    scratch = DecodeScratch(num_tokens, heads, kv_heads, head_dim, device, 16)
    options = {"scale": scale, "window": window, "softcap": softcap, "scratch": scratch, "config": config, "plan": plan}

    def attention(queries, **more):
        queries = queries.view(num_tokens, -1, head_dim)[:, :heads]
        out = torch.full((num_tokens, heads * head_dim), float("nan"), dtype=dtype, device=device)
        attend_decode(queries, cache.k, cache.v, cache.table, *on_device, out, **options, **more)
        assert int(scratch.arrivals.abs().sum()) == 0
        return out

    fused = attention(raw, rotation=Rotation(cos_sin, *norms, EPS))
    stored = cache.k.clone(), cache.v.clone()
    for part, old in zip((cache.k, cache.v), before, strict=True):
        part.copy_(old)
    rope_and_store(
        qkv, cos_sin, on_device[1], on_device[0], cache.table, cache.k, cache.v, num_heads=heads, num_kv_heads=kv_heads,
        head_dim=head_dim, rope_dim=rope_dim, q_norm=norms[0], k_norm=norms[1], eps=EPS,
    )  # fmt: skip
    apart = attention(qkv)
    assert_close(fused[: len(order)], apart[: len(order)].float())
    for ours, theirs in zip(stored, (cache.k, cache.v), strict=True):
        # Of padding tokens, which share a slot, any may be the last.
        kept, wanted = ours[:scratch_block], theirs[:scratch_block]
        assert torch.equal(kept.isnan(), wanted.isnan()), "what was written"
        if normed:  # squares are added up in another order
            assert_close(kept.nan_to_num(0.0), wanted.float().nan_to_num(0.0))
        else:
            assert torch.equal(kept.nan_to_num(0.0), wanted.nan_to_num(0.0))
        others = torch.ones(ours.shape[2], dtype=torch.bool, device=device)
        others[0] = padding == 0
        assert ours[scratch_block][:, others].isnan().all(), "a slot was written that is no token's"
        assert padding == 0 or ours[scratch_block][:, 0].isfinite().all()

    queries, keys, values = expected(raw, cos_sin, on_device[1], heads, kv_heads, head_dim, rope_dim, *norms)
    cache.k[blocks, :, places] = keys[: len(order)].to(dtype)
    cache.v[blocks, :, places] = values[: len(order)].to(dtype)
    for token, row in enumerate(order):
        query = queries[token].to(torch.float64).cpu().numpy()
        assert_near(fused[token], attend(query, cache, row, positions[token], scale, window, softcap), dtype)


@pytest.mark.parametrize("normed", [False, True])
@pytest.mark.parametrize("config", [PLAIN, WIDE], ids=["queries first", "keys first"])
def test_turned_and_stored_on_the_way(device, normed, config):
    check(device, normed=normed, config=config)


@pytest.mark.parametrize("normed", [False, True])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_precision(device, dtype, normed):
    if device == "cpu" and dtype == torch.bfloat16:
        pytest.skip("the interpreter multiplies the bits of bfloat16")
    check(device, dtype=dtype, normed=normed)


@pytest.mark.parametrize("normed", [False, True])
@pytest.mark.parametrize(("head_dim", "rope_dim"), [(80, 80), (96, 72), (64, 32), (128, 128)])
def test_heads_of_any_size_turned_in_part(device, head_dim, rope_dim, normed):
    check(device, [17, 20, 70], heads=3, kv_heads=1, head_dim=head_dim, rope_dim=rope_dim, normed=normed)


@pytest.mark.parametrize(("heads", "kv_heads"), [(2, 2), (6, 2), (16, 1)])
def test_groups(device, heads, kv_heads):
    check(device, [1, 33, 40], heads=heads, kv_heads=kv_heads)


@pytest.mark.parametrize("window", [1, 2, 16, 40])
@pytest.mark.parametrize("config", [PLAIN, WIDE], ids=["queries first", "keys first"])
def test_windows(device, window, config):
    check(device, window=window, config=config)


def test_soft_cap(device):
    check(device, softcap=2.0, normed=True)


@pytest.mark.parametrize("block_size", [32, 64])
def test_page_sizes(device, block_size):
    check(device, block_size=block_size, padding=3)


@pytest.mark.parametrize("context", [1, 2, 16, 17, 65, 130])
def test_a_token_alone(device, context):
    check(device, [context], plan=SplitPlan(target_items=8, smallest_tokens=16, max_items=9), normed=True)


def test_the_last_item_may_have_the_new_key_alone(device):
    """Each block its own item: the new token begins one."""
    check(device, [33, 65], plan=SplitPlan(target_items=64, smallest_tokens=16, max_items=66))


def test_queries_without_their_keys_are_refused(device):
    cache = PagedCache.random(np.random.default_rng(0), [4], 1, 16, 32, torch.float32, device)
    queries, index = torch.zeros((1, 1, 32), device=device), torch.zeros(1, dtype=torch.int32, device=device)
    scratch, rotation = DecodeScratch(1, 1, 1, 32, device, 4), Rotation(angles(32, device, 8))
    with pytest.raises(ValueError, match="behind its queries"):
        attend_decode(
            queries, cache.k, cache.v, cache.table, index, index, queries[:, 0], scale=1.0, scratch=scratch,
            rotation=rotation,
        )  # fmt: skip
