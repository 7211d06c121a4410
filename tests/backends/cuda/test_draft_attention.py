"""Several queries of a sequence in one walk over its keys, against plain float64 arithmetic and against the same tokens
as decodes of their own; all that no query may read is NaN."""

import numpy as np
import pytest
import torch
from tests.backends.cuda.paged import PagedCache, assert_near, attend, random_queries, random_sinks

from twostroke.backends.cuda.attention import Attention
from twostroke.backends.cuda.kernels.decode_attention import DecodeScratch, attend_decode
from twostroke.backends.cuda.kernels.decode_cuts import SplitPlan, cut_contexts, decode_config, split_plan
from twostroke.backends.cuda.kernels.paged import AttentionShape, Scoring, WalkConfig

SMALL = WalkConfig(block=16, warps=4, stages=3)
NUM_SMS = 4


def check(
    device, contexts, used, width, *, heads=4, kv_heads=2, head_dim=64, page=16, config=SMALL, dtype=torch.float32,
    window=None, softcap=None, plan=None, padding=0, seed=0, has_sinks=False,
):  # fmt: skip
    """`contexts`: keys of each sequence, its queries' among them; `used`: how many of `width` queries it has."""
    rng = np.random.default_rng(seed)
    shape, sinks = AttentionShape(heads, kv_heads, head_dim, page, dtype), None
    if has_sinks:
        sinks = random_sinks(rng, heads, device)
    scoring = Scoring(head_dim**-0.5, window, softcap, sinks=sinks)
    cache = PagedCache.random(rng, contexts, shape, device)
    nobody, streams = len(contexts), len(contexts) + padding
    order = rng.permutation(len(contexts)).tolist()
    rows = np.full((streams, width), nobody, dtype=np.int32)
    positions = np.zeros((streams, width), dtype=np.int32)
    for stream, row in enumerate(order):
        rows[stream, : used[row]] = row
        positions[stream, : used[row]] = np.arange(contexts[row] - used[row], contexts[row])
        if window is not None:  # what no query can read is given back
            cache.table[row, : max(0, contexts[row] - used[row] - window + 1) // page] = cache.k.shape[0] - 1
    queries = random_queries(rng, streams * width, shape, device)
    rows, positions = (torch.from_numpy(array.reshape(-1)).to(device) for array in (rows, positions))
    out = attended(queries, cache, rows, positions, scoring, shape, width, config, plan)
    for stream, row in enumerate(order):
        for number in range(used[row]):
            token = stream * width + number
            query = queries[token].to(torch.float64).cpu().numpy()
            assert_near(out[token], attend(query, cache, row, int(positions[token]), scoring), dtype)
            assert int(positions[token]) == contexts[row] - used[row] + number
    return out, cache, queries, rows, positions, scoring, shape


def attended(queries, cache, rows, positions, scoring, shape, width, config, plan=None):
    streams, device = len(queries) // width, queries.device
    scratch = DecodeScratch(streams, with_queries(shape, width), device, NUM_SMS, max_queries=streams * width)
    scratch.partials.fill_(float("nan"))
    plan = plan or split_plan(streams, shape.kv_heads, NUM_SMS, window=scoring.window)
    config = config or decode_config(shape.head_dim, streams, device, window=scoring.window)
    items = None
    if streams > 1:
        items = scratch.new_items()
        cut_contexts(positions, items, plan, config, window=scoring.window, queries=width)
    out = torch.full((len(queries), shape.heads * shape.head_dim), float("nan"), dtype=shape.dtype, device=device)
    attend_decode(
        queries, cache.kv, rows, positions, out, scoring, scratch, items, width=width, config=config, plan=plan
    )
    assert int(scratch.arrivals.abs().sum()) == 0, "counters are left as they were found"
    return out


def with_queries(shape, width):
    return AttentionShape(shape.heads, shape.kv_heads, shape.head_dim, shape.page, shape.dtype, width)


@pytest.mark.parametrize("width", [2, 3, 5, 8])
@pytest.mark.parametrize("heads, kv_heads", [(2, 2), (6, 2), (4, 1), (16, 1)])
def test_every_query_reads_up_to_its_own_place(device, width, heads, kv_heads):
    check(device, [width, 37, 80], [width, width, 1], width, heads=heads, kv_heads=kv_heads)


@pytest.mark.parametrize("window", [None, 20])
def test_every_query_has_its_heads_sinks(device, window):
    check(device, [3, 150, 80], [3, 2, 1], 3, heads=6, kv_heads=2, window=window, has_sinks=True)


@pytest.mark.parametrize("context", [5, 16, 17, 70])
def test_one_sequence_alone_is_cut_by_the_grid(device, context):
    check(device, [context], [5], 5)
    check(device, [context], [2], 5)


@pytest.mark.parametrize("window", [1, 3, 5, 16, 40, 1000])
def test_windows_are_each_querys_own(device, window):
    """The first of several parts may hold no key that the last query reads."""
    fine = SplitPlan(12, 16, max_items=16)
    check(device, [90, 20, 41], [5, 2, 4], 5, window=window)
    check(device, [90, 20, 41], [5, 2, 4], 5, window=window, plan=fine)


def test_soft_caps_pages_and_padding(device):
    check(device, [50, 9], [3, 2], 3, softcap=2.0)
    check(device, [130, 64, 66], [3, 3, 1], 3, page=64, config=WalkConfig(block=32, warps=4, stages=3, ahead=1))
    check(device, [50, 20, 3], [2, 1, 2], 2, padding=2)


def test_half_precision(device):
    check(device, [100, 33], [5, 4], 5, dtype=torch.float16)


def test_they_are_decodes_of_their_own(device):
    """The slow twin: a walk for each query."""
    width, used = 5, [5, 3, 1]
    out, cache, queries, rows, positions, scoring, shape = check(device, [90, 17, 3], used, width)
    alone = attended(queries, cache, rows, positions, scoring, shape, 1, SMALL)
    real = rows != len(used)
    torch.testing.assert_close(out[real], alone[real], atol=2e-6, rtol=2e-6)


def test_cuts_count_the_queries_behind_the_first(device):
    """One that ends in the next block of keys has that block, too."""
    positions = torch.tensor([14, 15, 16, 14, 0, 0], dtype=torch.int32, device=device)
    items = torch.full((8, 4), 77, dtype=torch.int32, device=device)
    plan = SplitPlan(target_items=4, smallest_tokens=16, max_items=6)
    cut_contexts(positions, items, plan, SMALL, queries=3)
    assert items[:3, :3].tolist() == [[0, 0, 2], [0, 1, 2], [1, 0, 1]]
    assert bool((items[3:6, 0] == -1).all())


def test_scratch_that_is_too_small_is_refused(device):
    shape = AttentionShape(2, 1, 64, 16, torch.float32)
    cache = PagedCache.random(np.random.default_rng(0), [4, 4], shape, device)
    queries, index = torch.zeros((8, 2, 64), device=device), torch.zeros(8, dtype=torch.int32, device=device)
    scratch = DecodeScratch(2, shape, device, NUM_SMS)
    with pytest.raises(ValueError, match="of 4 queries"):
        attend_decode(
            queries, cache.kv, index, index, queries[:, 0], Scoring(1.0), scratch, scratch.new_items(), width=4
        )


@pytest.mark.parametrize("streams", [1, 3, 4])
def test_queries_of_few_sequences_walk_apart_and_find_the_same(device, streams):
    """Up to 16 queries go apart; what a layer gets is the same either way, queries that are not used aside."""
    contexts, used = [70, 33, 50, 21][:streams], [5, 1, 3, 5][:streams]
    together, cache, queries, rows, positions, scoring, shape = check(device, contexts, used, 5)
    attention = Attention(with_queries(shape, 5), device, max_decode_tokens=32, max_queries=32)
    assert attention._walking_together(5 * streams, 5) == (1 if streams < 4 else 5)
    out = torch.full_like(together, float("nan"))
    attention.cut_decodes(positions, [scoring.window], width=5)
    attention.decode(queries, cache.kv, rows, positions, out, scoring, 5)
    entered = rows < len(contexts)
    torch.testing.assert_close(out[entered], together[entered], rtol=1e-4, atol=1e-5)
