"""Latent attention's kernels against plain float64 arithmetic: decode over latents, however they are cut; a chunk's own
keys, expanded, joined with the context before it; what is kept of a token. All that must not be read is NaN."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import pytest
import torch

from bench.cuda import latent_attention as latent_bench
from twostroke.backends.cuda.kernels.decode_attention import DecodeScratch
from twostroke.backends.cuda.kernels.decode_cuts import SplitPlan, cut_contexts, split_plan
from twostroke.backends.cuda.kernels.head_products import HeadTile, multiply_heads
from twostroke.backends.cuda.kernels.latent_decode import attend_latent_decode, latent_shape
from twostroke.backends.cuda.kernels.latent_prefill import ChunkShape, ContextConfig, attend_chunks, attend_context
from twostroke.backends.cuda.kernels.latent_store import LatentKV, Turning, turn_and_keep
from twostroke.backends.cuda.kernels.paged import WalkConfig
from twostroke.backends.cuda.kernels.prefill_tiles import PrefillTiles, PrefillWork, Tiling
from twostroke.backends.host.arithmetic import rms_norm, rotate

PAGE, PLAIN, VALUE = 16, 24, 16
CONFIG = WalkConfig(block=16, warps=4, stages=2)
TOLERANCE = {torch.float32: 2e-5, torch.float16: 4e-3}


@dataclass
class Latents:
    """A cache in which every context has its own pages, in random order, and all else is NaN."""

    kv: LatentKV
    contexts: list[np.ndarray]  # of each row, [context, rank + rotated]

    @classmethod
    def random(cls, rng, lengths, width, dtype, device):
        pages = [-(-length // PAGE) for length in lengths]
        order, given = rng.permutation(sum(pages) + 1), 0
        table = np.full((len(lengths) + 1, max(pages) + 2), len(order), dtype=np.int32)
        cache = np.full((len(order) + 1, PAGE, width), np.nan, dtype=np.float32)
        contexts = []
        for row, (length, count) in enumerate(zip(lengths, pages, strict=True)):
            table[row, :count] = order[given : given + count]
            given += count
            own = torch.from_numpy(rng.standard_normal((length, width)).astype(np.float32)).to(dtype)
            contexts.append(own.double().numpy())
            for page, block in enumerate(table[row, :count]):
                part = own[page * PAGE : (page + 1) * PAGE].float().numpy()
                cache[block, : len(part)] = part
        kv = LatentKV(torch.from_numpy(cache).to(device, dtype), torch.from_numpy(table).to(device))
        return cls(kv, contexts)


def drawn(rng, *shape, dtype=torch.float32, device="cpu"):
    return torch.from_numpy(rng.standard_normal(shape).astype(np.float32)).to(device, dtype)


def softmax(scores):
    weights = np.exp(scores - scores.max(-1, keepdims=True))
    return weights / weights.sum(-1, keepdims=True)


def near(found, expected, dtype):
    np.testing.assert_allclose(found.double().cpu().numpy(), expected, atol=TOLERANCE[dtype], rtol=TOLERANCE[dtype])


@pytest.mark.parametrize(
    "lengths, heads, rank, rotated, dtype, plan",
    [
        ([1, 37, 80], 4, 32, 8, torch.float32, None),
        ([150], 16, 64, 16, torch.float32, None),  # cut in the kernel
        ([90, 3, 41], 20, 24, 8, torch.float32, SplitPlan(12, 16, 15)),
        ([60, 5], 128, 32, 16, torch.float32, None),  # several blocks of heads
        ([70, 20], 16, 64, 16, torch.float16, SplitPlan(6, 16, 8)),
    ],
)
def test_decode(device, lengths, heads, rank, rotated, dtype, plan):
    rng = np.random.default_rng(heads)
    latents = Latents.random(rng, lengths, rank + rotated, dtype, device)
    shape, scale = latent_shape(heads, rank, PAGE, dtype), (rank + rotated) ** -0.5
    order = rng.permutation(len(lengths)).tolist()
    rows = torch.tensor(order, dtype=torch.int32, device=device)
    positions = torch.tensor([lengths[row] - 1 for row in order], dtype=torch.int32, device=device)
    queries = drawn(rng, len(order), heads, rank + rotated, dtype=dtype, device=device)
    scratch = DecodeScratch(len(order), shape, device, num_sms=4)
    scratch.partials.fill_(float("nan"))
    items = None
    if len(order) > 1:
        items = scratch.new_items()
        cut_contexts(positions, items, plan or split_plan(len(order), shape.kv_heads, 4, window=None), CONFIG)
    out = torch.full((len(order), heads, rank), float("nan"), dtype=dtype, device=device)
    for _ in range(2):  # counters are left as they were found
        attend_latent_decode(
            queries, latents.kv, rows, positions, out, scale, scratch, items, shape=shape, config=CONFIG, plan=plan
        )
    for token, row in enumerate(order):
        kept = latents.contexts[row]
        shares = softmax(queries[token].double().cpu().numpy() @ kept.T * scale)
        near(out[token], shares @ kept[:, :rank], dtype)


@pytest.mark.parametrize(
    "counts, starts, heads, tile_rows",
    [([20, 7], [0, 0], 2, 16), ([9, 33, 1], [40, 0, 17], 4, 16), ([40], [5], 20, 64)],
)
def test_chunks_and_what_lies_before_them(device, counts, starts, heads, tile_rows):
    """As a model goes: queries brought to latents for the context, keys expanded for the chunk."""
    rank, rotated, before, dtype = 32, 8, 2, torch.float32
    rng = np.random.default_rng(sum(counts))
    lengths = [start + count for start, count in zip(starts, counts, strict=True)]
    latents = Latents.random(rng, lengths, rank + rotated, dtype, device)
    first_tokens = (before + np.cumsum([0, *counts[:-1]])).tolist()
    num_tokens = before + sum(counts) + 3
    tiling = Tiling(tile_rows, 1, heads, 1, tells_start=True)
    capacity = tiling.capacity(sum(counts), len(counts))
    tiles = PrefillTiles.build(first_tokens, counts, starts, range(len(counts)), tiling, capacity)
    work = PrefillWork.of(tiles, device)
    assert work.has_prefix == any(starts) and work.part_items == 0
    matrices = drawn(rng, heads, PLAIN + VALUE, rank, device=device)
    queries = drawn(rng, num_tokens, heads, PLAIN + rotated, device=device)
    own = np.full((num_tokens, rank + rotated), np.nan, dtype=np.float32)
    for row, (first, count, start) in enumerate(zip(first_tokens, counts, starts, strict=True)):
        own[first : first + count] = latents.contexts[row][start:]
    kept = torch.from_numpy(own).to(device)
    expanded = torch.einsum("tr,her->the", kept[:, :rank], matrices).flatten(1).contiguous()
    absorbed = torch.full((num_tokens, heads, rank + rotated), float("nan"), device=device)
    multiply_heads(queries[..., :PLAIN], matrices[:, :PLAIN], absorbed[..., :rank], tile=HeadTile(16, 16, 16, 4, 2))
    absorbed[..., rank:] = queries[..., PLAIN:]
    mixed = torch.full((num_tokens, heads, rank), float("nan"), device=device)
    log_sums = torch.full((num_tokens, heads), float("nan"), device=device)
    scale, shape = (PLAIN + rotated) ** -0.5, latent_shape(heads, rank, PAGE, dtype)
    out = torch.full((num_tokens, heads, VALUE), float("nan"), device=device)
    if work.has_prefix:
        reading = ContextConfig(16, 16, 4, 2)
        attend_context(absorbed, latents.kv, work, mixed, log_sums, scale, shape=shape, config=reading)
        multiply_heads(mixed, matrices[:, PLAIN:].transpose(1, 2), out)
    chunk = ChunkShape(heads, PLAIN, rotated, VALUE, dtype)
    rotated_keys = kept[:, rank:].contiguous()
    attend_chunks(
        queries, expanded, rotated_keys, work, out.flatten(1), log_sums if work.has_prefix else None, scale,
        shape=chunk, config=CONFIG,
    )  # fmt: skip
    weights = matrices.double().cpu().numpy()
    for row, (first, count, start) in enumerate(zip(first_tokens, counts, starts, strict=True)):
        for number in range(count):
            context = latents.contexts[row][: start + number + 1]
            query = queries[first + number].double().cpu().numpy()
            keys = np.einsum("cr,hpr->hcp", context[:, :rank], weights[:, :PLAIN])
            scores = np.einsum("hp,hcp->hc", query[:, :PLAIN], keys) + query[:, PLAIN:] @ context[:, rank:].T
            values = np.einsum("cr,hvr->hcv", context[:, :rank], weights[:, PLAIN:])
            near(out[first + number], np.einsum("hc,hcv->hv", softmax(scores * scale), values), dtype)
    assert out[:before].isnan().all() and out[before + sum(counts) :].isnan().all(), "a query of nobody was written"


@pytest.mark.parametrize("neighbours", [False, True])
@pytest.mark.parametrize("grows", [False, True])
def test_what_is_kept_of_a_token(device, neighbours, grows):
    """Against the host's norm and rotation."""
    heads, rank, rotated, eps = 3, 40, 8, 1e-6
    rng = np.random.default_rng(1)
    positions = torch.tensor([0, 15, 16, 33], dtype=torch.int32, device=device)
    rows = torch.tensor([1, 1, 1, 0], dtype=torch.int32, device=device)
    table = torch.tensor([[6, 6, 4], [2, 0, 6]], dtype=torch.int32, device=device)
    cache = torch.full((7, PAGE, rank + rotated), 99.0, device=device)
    turns = np.arange(48)[:, None] * 100.0 ** -(np.arange(rotated // 2) / (rotated // 2))
    cos, sin = np.cos(turns).astype(np.float32), np.sin(turns).astype(np.float32)
    growth = torch.linspace(1, 2, 48, device=device) if grows else None
    turning = Turning(torch.from_numpy(np.concatenate([cos, sin], 1)).to(device), neighbours, growth)
    width = heads * (PLAIN + rotated)
    first = drawn(rng, 4, width + rank + rotated, device=device)
    norm = drawn(rng, rank, device=device)
    before = first.cpu().numpy().copy()
    queries, kept = first[:, :width].unflatten(1, (heads, -1)), first[:, width:]
    latents, turned = torch.zeros(4, rank, device=device), torch.zeros(4, rotated, device=device)
    absorbed = torch.full((4, heads, rank + rotated), 7.0, device=device)
    kv = LatentKV(cache, table)
    turn_and_keep(queries, kept, norm, turning, positions, rows, kv, latents, turned, absorbed, eps=eps)
    places = positions.cpu().numpy()

    def expected(x):
        return rotate(x, cos[places], sin[places], neighbours=neighbours)

    query = before[:, :width].reshape(4, heads, -1)
    grown = np.ones(4) if growth is None else growth.cpu().numpy()[places]
    query = np.concatenate([query[..., :PLAIN], expected(query[..., PLAIN:])], -1) * grown[:, None, None]
    near(queries, query, torch.float32)
    near(absorbed[..., rank:], query[..., PLAIN:], torch.float32)
    assert (absorbed[..., :rank] == 7.0).all()
    near(latents, rms_norm(before[:, width : width + rank], norm.cpu().numpy(), eps), torch.float32)
    near(turned, expected(before[:, None, width + rank :])[:, 0], torch.float32)
    for token, (block, slot) in enumerate([(2, 0), (2, 15), (0, 0), (4, 1)]):
        assert torch.equal(cache[block, slot], torch.cat([latents[token], turned[token]]))
        cache[block, slot] = 99.0
    assert (cache == 99.0).all(), "a slot was written that is no token's"


def test_what_the_bench_measures_is_right(device):
    """Its inputs and its references, at sizes that the interpreter is done with soon."""
    sizes = latent_bench.Sizes(4, 32, 24, 8, 16, page=PAGE, dtype=torch.float32, device=device)
    case = latent_bench.Case(sizes, [37, 37, 37])
    shape = latent_bench.shape_of(sizes)
    for error, launches in (
        case.decode(shape, CONFIG),
        case.prefill(9, ContextConfig(16, 16, 4, 2), None),
        case.prefill(9, None, CONFIG),
    ):
        assert error < 1e-4
        assert launches
    assert latent_bench.options_of(["--model", "GLM-4.7-Flash"]).model in latent_bench.MODELS


@pytest.mark.parametrize("inputs_last", [False, True])
@pytest.mark.parametrize("num_tokens", [1, 37])
def test_products_of_heads(device, num_tokens, inputs_last):
    rng = np.random.default_rng(num_tokens)
    x = drawn(rng, num_tokens, 3, 50, device=device)[..., :40]
    weights = (
        drawn(rng, 3, 24, 40, device=device).transpose(1, 2) if inputs_last else drawn(rng, 3, 40, 24, device=device)
    )
    room = torch.full((num_tokens, 3, 30), 7.0, device=device)
    multiply_heads(x, weights, room[..., :24], tile=HeadTile(16, 16, 16, 4, 2))
    near(room[..., :24], torch.einsum("thk,hkn->thn", x.double(), weights.double()).cpu().numpy(), torch.float32)
    assert (room[..., 24:] == 7.0).all()
