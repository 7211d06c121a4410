"""Decode attention against plain float64 arithmetic; all that a query must not read is NaN."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from tests.backends.cuda.paged import PagedCache, assert_near, attend, random_queries, random_sinks

from twostroke.backends.cuda.kernels import decode_cuts
from twostroke.backends.cuda.kernels.decode_attention import DecodeScratch, attend_decode
from twostroke.backends.cuda.kernels.decode_cuts import (
    MOST_PROGRAMS_PER_SM,
    SplitPlan,
    cut_contexts,
    decode_config,
    most_items,
    split_plan,
)
from twostroke.backends.cuda.kernels.paged import AttentionShape, Scoring, WalkConfig
from twostroke.backends.cuda.kernels.target import Target

SMALL = WalkConfig(block=16, warps=4, stages=3)
WIDE = WalkConfig(block=32, warps=4, stages=3, ahead=1)


def check(
    device, contexts, *, heads=4, kv_heads=2, head_dim=64, page=16, config=SMALL, dtype=torch.float32,
    window=None, softcap=None, padding=0, num_sms=4, plan=None, seed=0, calls=1, has_sinks=False, one_byte=None,
):  # fmt: skip
    rng = np.random.default_rng(seed)
    sinks = random_sinks(rng, heads, device) if has_sinks else None
    shape = AttentionShape(heads, kv_heads, head_dim, page, dtype)
    scoring = Scoring(head_dim**-0.5, window, softcap, sinks=sinks)
    cache = PagedCache.random(rng, contexts, shape, device, one_byte=one_byte)
    num_tokens = len(contexts) + padding
    # Rows in any order; padding reads the scratch page, which its own result alone may show.
    order = rng.permutation(len(contexts)).tolist()
    rows = order + [len(contexts)] * padding
    positions = [contexts[row] - 1 for row in order] + [0] * padding
    if window is not None:
        for row, position in zip(order, positions, strict=False):
            cache.table[row, : max(0, position - window + 1) // page] = cache.k.shape[0] - 1
    queries = random_queries(rng, num_tokens, shape, device)
    scratch = DecodeScratch(num_tokens, shape, device, num_sms)
    scratch.partials.fill_(float("nan"))
    rows, positions = (torch.tensor(numbers, dtype=torch.int32, device=device) for numbers in (rows, positions))
    for _ in range(calls):
        items = cut(positions, scratch, shape, window=window, plan=plan, config=config)
        out = torch.full((num_tokens, heads * head_dim), float("nan"), dtype=dtype, device=device)
        attend_decode(
            queries, cache.kv, rows, positions, out, scoring, scratch, items, config=config, plan=plan
        )  # fmt: skip
        for token, row in enumerate(order):
            query = queries[token].to(torch.float64).cpu().numpy()
            assert_near(out[token], attend(query, cache, row, int(positions[token]), scoring), dtype)
        assert int(scratch.arrivals.abs().sum()) == 0, "counters are left as they were found"


def cut(positions, scratch, shape, *, window=None, plan=None, config=None, count=None):
    """A batch's items; a kernel must follow before they are read. None of a token alone."""
    if len(positions) == 1:
        return None
    items = scratch.new_items()
    plan = plan or split_plan(len(positions), shape.kv_heads, scratch.num_sms, window=window)
    config = config or decode_config(shape.head_dim, len(positions), positions.device, window=window)
    cut_contexts(positions, items, plan, config, window=window, count=count)
    return items


@pytest.mark.parametrize("heads, kv_heads", [(2, 2), (6, 2), (4, 1), (8, 1), (16, 1)])
@pytest.mark.parametrize("config", [SMALL, WIDE], ids=["small", "wide"])
def test_groups(device, heads, kv_heads, config):
    check(device, [1, 37, 80], heads=heads, kv_heads=kv_heads, head_dim=64, page=16, config=config)


@pytest.mark.parametrize("head_dim", [64, 80, 96, 128, 256, 512])
def test_head_sizes(device, head_dim):
    check(device, [70], heads=2, kv_heads=1, head_dim=head_dim, page=16, config=SMALL)


@pytest.mark.parametrize("page", [16, 64])
@pytest.mark.parametrize("config", [SMALL, WIDE], ids=["small", "wide"])
def test_page_sizes(device, page, config):
    check(device, [16, 64, 65, 130], heads=4, kv_heads=2, head_dim=64, page=page, config=config)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_precision(device, dtype):
    if device == "cpu" and dtype == torch.bfloat16:
        pytest.skip("the interpreter multiplies the bits of bfloat16")
    check(device, [100, 33], dtype=dtype)


@pytest.mark.parametrize("window", [1, 5, 16, 40, 1000])
def test_windows(device, window):
    check(device, [90, 3, 41], window=window)


def test_soft_cap(device):
    check(device, [50, 9], softcap=2.0)


@pytest.mark.parametrize("contexts, window", [([150], None), ([90, 3, 41], None), ([90, 3, 41], 20)])
@pytest.mark.parametrize("heads, kv_heads", [(6, 2), (8, 1)])
def test_sinks_take_their_share_once_however_keys_are_cut(device, contexts, window, heads, kv_heads):
    check(device, contexts, heads=heads, kv_heads=kv_heads, window=window, has_sinks=True)


def test_a_soft_cap_far_below_the_scores_does_not_overflow(device):
    check(device, [50], softcap=1e-3)


def test_padding_tokens_disturb_nobody(device):
    check(device, [50, 20, 3], padding=3)


def test_scratch_serves_call_after_call(device):
    check(device, [150, 30], calls=3)


def test_what_lies_behind_the_count_is_passed_over(device):
    """A graph has room for more decodes than a step has: the tokens behind them are somebody else's to attend."""
    rng = np.random.default_rng(3)
    shape, scoring = AttentionShape(4, 2, 64, 16, torch.float32), Scoring(0.1)
    cache = PagedCache.random(rng, [70, 33, 9], shape, device)
    queries = random_queries(rng, 6, shape, device)
    rows = torch.tensor([2, 0, 1, 0, 0, 0], dtype=torch.int32, device=device)
    positions = torch.tensor([8, 69, 32, 5, 6, 7], dtype=torch.int32, device=device)
    scratch = DecodeScratch(6, shape, device, 4)
    for count in (3, 1, 0):
        counted = torch.tensor([count], dtype=torch.int32, device=device)
        items = cut(positions, scratch, shape, count=counted)
        out = torch.full((6, 4 * 64), 7.0, device=device)
        attend_decode(queries, cache.kv, rows, positions, out, scoring, scratch, items)
        assert bool((out[count:] == 7.0).all())
        for token in range(count):
            query = queries[token].to(torch.float64).cpu().numpy()
            assert_near(
                out[token], attend(query, cache, int(rows[token]), int(positions[token]), scoring), torch.float32
            )


def test_one_long_context_among_short_ones(device):
    check(device, [3, 200, 5, 9], heads=2, kv_heads=1, head_dim=64, page=16, config=SMALL, num_sms=8)


def test_shapes_at_random(device):
    rng = np.random.default_rng(5)
    for seed in range(10):
        group, kv_heads, padding = int(rng.choice([1, 3, 4, 8])), int(rng.integers(1, 3)), int(rng.integers(0, 3))
        contexts = rng.integers(1, 140, size=int(rng.integers(1, 5))).tolist()
        fine = SplitPlan(4, 16, max_items=8 + len(contexts) + padding, fine_items=8, long_tokens=32)
        check(
            device,
            contexts,
            heads=group * kv_heads,
            kv_heads=kv_heads,
            head_dim=int(rng.choice([64, 96])),
            page=int(rng.choice([16, 64])),
            config=SMALL if rng.random() < 0.5 else WIDE,
            window=int(rng.integers(1, 80)) if rng.random() < 0.4 else None,
            softcap=float(rng.uniform(1, 30)) if rng.random() < 0.3 else None,
            padding=padding,
            plan=None if rng.random() < 0.5 else fine,
            seed=seed,
        )


def cuts(contexts, plan, block):
    """The device's cut of a batch, in plain Python: how many items each context gets. One alone is cut by the grid."""
    blocks = [-(-context // block) for context in contexts]
    is_long = plan.fine_items and sum(blocks) // max(plan.target_items, len(contexts)) >= plan.long_tokens // block
    items = plan.fine_items if is_long else plan.target_items
    chunk = max(-(-sum(blocks) // items), -(-plan.smallest_tokens // block))
    return [max(1, (count + chunk * 3 // 4) // chunk) for count in blocks]


def test_the_grid_holds_every_cut():
    rng = np.random.default_rng(1)
    for _ in range(500):
        contexts = rng.integers(1, 10 ** int(rng.integers(1, 6)), size=int(rng.integers(1, 300))).tolist()
        kv_heads, num_sms = int(rng.integers(1, 33)), int(rng.integers(1, 200))
        block = int(rng.choice([16, 32, 64, 128]))
        plan = split_plan(len(contexts), kv_heads, num_sms, window=None)
        parts = cuts(contexts, plan, block)
        assert sum(parts) <= plan.max_items <= len(contexts) + most_items(kv_heads, num_sms, MOST_PROGRAMS_PER_SM)
        assert all(part <= -(-context // block) for part, context in zip(parts, contexts, strict=True))


def test_cuts_for_known_batches():
    def known(contexts):
        return cuts(contexts, split_plan(len(contexts), 8, 132, window=None), 64)

    assert known([4096] * 64) == [3] * 64  # an SM has room for three programs: the last quarter of them would run alone
    assert known([2048] * 48) == [1] * 48
    assert known([4096] * 94) == [1] * 94
    assert known([2048] * 256) == [1] * 256
    assert known([1024] * 24 + [2048] * 24) == [1] * 24 + [2] * 24  # all run at once: the long ones would be the last
    assert known([1024] * 48 + [2048] * 48) == [1] * 96  # the short ones follow on the long
    assert set(known([8192] * 8)) == {12}
    assert set(known([4096] * 8)) == {4}
    assert known([512]) == [8]
    assert 25 <= known([32768])[0] <= 34
    assert max(known([1024] * 63 + [32768])) > 8, "a long context among short ones is cut"


ROUGH = SplitPlan(target_items=12, smallest_tokens=32, max_items=20)
FINE = replace(ROUGH, max_items=28, fine_items=20, long_tokens=64)


@pytest.mark.parametrize("window", [None, 50])
@pytest.mark.parametrize(("count", "plan"), [(None, ROUGH), (5, ROUGH), (0, ROUGH), (None, FINE), (5, FINE)])
def test_items_lie_longest_first_and_those_of_a_token_side_by_side(device, window, count, plan):
    contexts = [40, 300, 17, 300, 90, 1, 1000, 64]
    items = torch.full((32, 4), 77, dtype=torch.int32, device=device)
    positions = torch.tensor(contexts, dtype=torch.int32, device=device) - 1
    counted = None if count is None else torch.tensor([count], dtype=torch.int32, device=device)
    cut_contexts(positions, items, plan, SMALL, window=window, count=counted)
    contexts = contexts[:count]
    # The blocks a window touches: from that of the oldest key to that of the newest.
    blocks = [(c - 1) // 16 + 1 - max(0, c - (window or c)) // 16 for c in contexts]
    parts = cuts([16 * count for count in blocks], plan, 16)
    is_cut_further = sum(parts) > sum(cuts([16 * count for count in blocks], ROUGH, 16))
    assert is_cut_further == (plan is FINE and window is None)
    order = sorted(range(len(contexts)), key=lambda token: (-blocks[token] // parts[token], token))
    expected = [[token, split, parts[token]] for token in order for split in range(parts[token])]
    assert items[: len(expected), :3].tolist() == expected
    nobodys = items[len(expected) : plan.max_items, 0]
    assert len(contexts) < 8 or window or max(parts) > 1
    assert bool((nobodys == -1).all()) and bool((items[plan.max_items :] == 77).all())


def test_what_it_cannot_take_is_refused(device):
    shape = AttentionShape(1, 1, 64, 16, torch.float32)
    cache = PagedCache.random(np.random.default_rng(0), [4, 4], shape, device)
    queries = torch.zeros((2, 1, 64), device=device)
    index = torch.zeros(2, dtype=torch.int32, device=device)
    small, large = (DecodeScratch(tokens, shape, device, 4) for tokens in (1, 2))
    refused = {"scratch for 1 tokens": (small, small.new_items()), "wants the cuts of a batch": (large, None)}
    for reason, (scratch, items) in refused.items():
        with pytest.raises(ValueError, match=reason):
            attend_decode(queries, cache.kv, index, index, queries[:, 0], Scoring(1.0), scratch, items)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_one_captured_graph_serves_every_context():
    """Captured with short contexts, replayed with long ones: the cuts are made on the device."""
    rng = np.random.default_rng(9)
    contexts, shape, scoring = [3000, 17, 900, 1], AttentionShape(8, 2, 128, 64, torch.bfloat16), Scoring(0.1)
    cache = PagedCache.random(rng, contexts, shape, "cuda")
    queries = random_queries(rng, 4, shape, "cuda")
    scratch = DecodeScratch(4, shape, "cuda", 132)
    rows = torch.arange(4, dtype=torch.int32, device="cuda")
    positions = torch.zeros(4, dtype=torch.int32, device="cuda")
    out = torch.empty((4, 8 * 128), dtype=torch.bfloat16, device="cuda")

    def launch():
        items = cut(positions, scratch, shape)
        out.fill_(float("nan"))
        attend_decode(queries, cache.kv, rows, positions, out, scoring, scratch, items)

    launch()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        launch()
    for share in (1.0, 0.3, 0.7, 1.0):
        reached = [max(1, int(context * share)) for context in contexts]
        positions.copy_(torch.tensor(reached, dtype=torch.int32) - 1)
        out.fill_(float("nan"))
        graph.replay()
        for token, context in enumerate(reached):
            query = queries[token].to(torch.float64).cpu().numpy()
            assert_near(out[token], attend(query, cache, token, context - 1, scoring), torch.bfloat16)


@pytest.mark.parametrize(("shared_kib", "block"), [(227, 64), (163, 64), (99, 32), (None, 64)])
def test_rounds_are_large_where_two_programs_of_them_fit(monkeypatch, shared_kib, block):
    """227: Hopper, 163: A100, 99: A10 and the like; None: the interpreter."""
    shared_bytes = None if shared_kib is None else shared_kib << 10
    target = Target(interpreted=False, capability=(8, 0), num_sms=80, shared_bytes=shared_bytes)
    monkeypatch.setattr(decode_cuts, "target_of", lambda device: target)
    device, choose = torch.device("cpu"), decode_cuts.decode_config.__wrapped__  # nothing remembered
    assert choose(128, 2, device, window=None).block == block
    assert choose(128, 1, device, window=None).block == 32, "a sequence alone is cut finer"
    assert choose(256, 2, device, window=None).block == 32
