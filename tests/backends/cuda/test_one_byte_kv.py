"""Keys and values of one byte a number: as they are stored, beside plain torch, and as both kernels of attention read
them, beside float64 over what the bytes stand for; what lies behind a context is NaN."""

import numpy as np
import pytest
import torch
from tests.backends.cuda.closeness import random
from tests.backends.cuda.paged import LARGEST, PagedCache, as_bytes, attend, random_queries, rounded
from tests.backends.cuda.test_decode_attention import WIDE
from tests.backends.cuda.test_decode_attention import check as check_decode
from tests.backends.cuda.test_prefill_attention import check as check_prefill
from tests.backends.cuda.test_rope import angles, expected

from twostroke.backends.cuda.attention import choose_prefill
from twostroke.backends.cuda.kernels.decode_attention import DecodeScratch, attend_decode
from twostroke.backends.cuda.kernels.paged import TOKEN_SCALES, AttentionShape, Scoring
from twostroke.backends.cuda.kernels.rope import rope_and_store
from twostroke.backends.cuda.kernels.target import Target
from twostroke.backends.cuda.one_byte_kv import NUMBERS, OneByteKV

KINDS = ("fp8", "int8")
BLOCK_SIZE = 16
EPS = 1e-6


def by_heads(name, kv_heads, device, layers=1):
    """Scales as a checkpoint gives them: some too small for what is stored, which is then as large as it can be."""
    rng = np.random.default_rng(7)

    def scales():
        found = rng.uniform(1.5, 4.0, kv_heads) / LARGEST[name]
        return torch.from_numpy(found.astype(np.float32)).to(device)

    return OneByteKV(name, {layer: (scales(), scales()) for layer in range(layers)})


def kept(name, way, kv_heads, device):
    return OneByteKV(name) if way == "token" else by_heads(name, kv_heads, device)


@pytest.mark.parametrize("way", ["token", "head"])
@pytest.mark.parametrize("name", KINDS)
@pytest.mark.parametrize(
    ("heads", "kv_heads", "head_dim", "rope_dim", "normed"),
    [(4, 2, 64, 64, False), (2, 1, 256, 64, True), (3, 1, 80, 80, True)],
)
def test_what_is_stored(device, name, way, heads, kv_heads, head_dim, rope_dim, normed):
    positions = torch.tensor([0, 15, 16, 33], dtype=torch.int32, device=device)
    rows = torch.tensor([1, 1, 1, 0], dtype=torch.int32, device=device)
    table = torch.tensor([[6, 6, 4], [2, 0, 6]], dtype=torch.int32, device=device)
    qkv = random(4, (heads + 2 * kv_heads) * head_dim, dtype=torch.float32, device=device)
    qkv[1, heads * head_dim : (heads + 1) * head_dim] = 0.0  # a key of zeros has a scale, too
    norms = [random(head_dim, dtype=torch.float32, device=device, seed=s) + 1 if normed else None for s in (1, 2)]
    cos_sin = angles(rope_dim, device)
    q, k, v = expected(qkv, cos_sin, positions, heads, kv_heads, head_dim, rope_dim, *norms)
    one_byte = kept(name, way, kv_heads, device)
    width = head_dim + (4 if way == "token" else 0)
    parts = [torch.full((7, kv_heads, BLOCK_SIZE * width), 0x55, dtype=torch.uint8, device=device) for _ in range(2)]
    before = [part.clone() for part in parts]
    kv = one_byte.paged(0, *parts, BLOCK_SIZE, table)
    rope_and_store(qkv, cos_sin, positions, rows, kv, *norms, eps=EPS)
    torch.testing.assert_close(qkv[:, : heads * head_dim], q.flatten(1), atol=1e-5, rtol=1e-5)
    for number, (numbers, scales, values) in enumerate(((kv.keys, kv.key_scales, k), (kv.values, kv.value_scales, v))):
        assert numbers.dtype == NUMBERS[name]
        for token, (block, slot) in enumerate([(2, 0), (2, 15), (0, 0), (4, 1)]):
            scale = scales[block, :, slot] if way == "token" else scales  # [kv_heads]
            found = numbers[block, :, slot].float() * scale[:, None]
            wanted = rounded(values[token][None, :, None], one_byte, number)[0, :, 0]
            # A product that lies between two numbers may go to either: half a step of float8, a step of int8.
            step = scale[:, None] if name == "int8" else wanted.abs() / 8 + scale[:, None] / 512
            assert bool(((found - wanted).abs() <= 1.01 * step).all())
            assert float((found - wanted).abs().mean()) <= 1e-3 * float(wanted.abs().mean()) + 1e-6
    written = {(2, 0), (2, 15), (0, 0), (4, 1)}
    for part, other in zip(parts, before, strict=True):
        page = one_byte._numbers(part, BLOCK_SIZE).view(torch.uint8)
        old = one_byte._numbers(other, BLOCK_SIZE).view(torch.uint8)
        for block in range(7):
            for slot in range(BLOCK_SIZE):
                same = torch.equal(page[block, :, slot], old[block, :, slot])
                assert same == ((block, slot) not in written), "and nothing else is written"


@pytest.mark.parametrize("name", KINDS)
def test_a_tokens_own_scale_lets_its_largest_number_through_whole(device, name):
    values = torch.tensor([[[[3.0, -1.5, 0.7] + [0.0] * 61]]])
    assert float(rounded(values, OneByteKV(name), 0)[0, 0, 0, 0]) == pytest.approx(3.0, rel=1e-6)


@pytest.mark.parametrize(
    "case",
    [
        {"contexts": [90, 3, 41]},
        {"contexts": [70], "head_dim": 128, "heads": 2, "kv_heads": 1},
        {"contexts": [70, 5], "head_dim": 256, "heads": 2, "kv_heads": 1},
        {"contexts": [40, 9], "head_dim": 96},
        {"contexts": [90, 3, 41], "window": 20, "has_sinks": True},
        {"contexts": [50, 9], "softcap": 2.0},
        {"contexts": [16, 64, 65, 130], "page": 64, "config": WIDE},
        {"contexts": [50, 20, 3], "config": WIDE, "padding": 3},
    ],
    ids=["64", "128", "256", "96", "window and sinks", "cap", "pages", "padding"],
)
@pytest.mark.parametrize(("name", "way"), [("fp8", "token"), ("int8", "token"), ("fp8", "head"), ("int8", "head")])
def test_decode_reads_it(device, name, way, case):
    if way == "head" and case.get("head_dim", 64) != 64:
        pytest.skip("scales of heads do not depend on their size")
    check_decode(device, one_byte=kept(name, way, case.get("kv_heads", 2), device), **case)


@pytest.mark.parametrize(
    "case",
    [
        {"counts": [9, 20], "starts": [0, 13]},
        {"counts": [11], "starts": [7], "head_dim": 128, "heads": 2, "kv_heads": 1},
        {"counts": [11], "starts": [7], "head_dim": 256, "heads": 2, "kv_heads": 1},
        {"counts": [25, 3], "starts": [40, 0], "window": 16, "has_sinks": True},
        {"counts": [12, 3], "starts": [0, 20], "softcap": 2.0},
        {"counts": [1, 33, 16], "starts": [40, 0, 64], "page": 64},
        {"counts": [9], "starts": [600], "heads": 4, "kv_heads": 1, "num_sms": 6},
    ],
    ids=["64", "128", "256", "window and sinks", "cap", "pages", "parts"],
)
@pytest.mark.parametrize(("name", "way"), [("fp8", "token"), ("int8", "token"), ("fp8", "head")])
def test_prefill_reads_it_behind_what_is_stored(device, name, way, case):
    if way == "head" and case.get("head_dim", 64) != 64:
        pytest.skip("scales of heads do not depend on their size")
    check_prefill(device, one_byte=kept(name, way, case.get("kv_heads", 2), device), **case)


def test_prompts_are_attended_in_plain_triton_and_that_is_said():
    hopper = Target(False, (9, 0), 132, 227 << 10)
    shape = AttentionShape(32, 8, 128, 64, torch.bfloat16, scaled=TOKEN_SCALES)
    kernel, choice = choose_prefill(shape, hopper)
    assert kernel.NAME == "plain Triton" and "keys and values of one byte" in choice


@pytest.mark.parametrize("num_keys", [4096, pytest.param(32768, marks=pytest.mark.slow)])
@pytest.mark.parametrize("name", [None, *KINDS])
def test_many_keys_add_up(device, name, num_keys):
    """Over a long context errors of single keys average out, and sums are of float32: others' answers fell apart where
    sums had 14 bits. Of scores that are near each other, and of some that stand out."""
    rng = np.random.default_rng(11)
    shape = AttentionShape(2, 1, 64, 64, torch.float32)
    exact = PagedCache.random(rng, [num_keys], shape, device)
    cache = exact
    if name is not None:
        one_byte = OneByteKV(name)
        parts = [rounded(part, one_byte, number) for number, part in enumerate((exact.k, exact.v))]
        cache = PagedCache(*parts, exact.table, exact.contexts, one_byte)
    queries = random_queries(rng, 1, shape, device)
    position = torch.tensor([num_keys - 1], dtype=torch.int32, device=device)
    row = torch.zeros(1, dtype=torch.int32, device=device)
    scratch = DecodeScratch(1, shape, device, 4)
    for sharpness, most in (
        (1.0, {None: 1e-4, "int8": 0.02, "fp8": 0.06}),
        (4.0, {None: 1e-4, "int8": 0.03, "fp8": 0.15}),
    ):
        scoring, out = Scoring(sharpness * 64**-0.5), torch.zeros(1, 2 * 64, device=device)
        attend_decode(queries, cache.kv, row, position, out, scoring, scratch, None)
        wanted = attend(queries[0].double().cpu().numpy(), exact, 0, num_keys - 1, scoring)
        error = out.double().cpu().numpy().reshape(wanted.shape) - wanted
        assert np.sqrt((error**2).mean() / (wanted**2).mean()) < most[name]


def test_a_cache_of_other_strides_is_refused(device):
    one_byte, table = OneByteKV("int8"), torch.zeros((1, 1), dtype=torch.int32, device=device)
    parts = [as_bytes(torch.ones(2, 2, 16, 64), one_byte, number).to(device) for number in (0, 1)]
    kv = one_byte.paged(0, *parts, 16, table)
    queries = torch.zeros((1, 2, 64), device=device)
    assert kv.shape_for(queries).scaled == TOKEN_SCALES
    amiss = type(kv)(kv.keys.contiguous(), kv.values, table, kv.key_scales, kv.value_scales)
    with pytest.raises(ValueError, match="contiguous caches"):
        amiss.shape_for(queries)
