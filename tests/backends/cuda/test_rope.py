import pytest
import torch
from tests.backends.cuda.closeness import DTYPES, assert_close, random
from transformers.models.llama.modeling_llama import LlamaRMSNorm, apply_rotary_pos_emb

from twostroke.backends.cuda.kernels.paged import PagedKV
from twostroke.backends.cuda.kernels.rope import HeadRules, rope_and_store

EPS = 1e-6
BLOCK_SIZE = 16
SCRATCH = 6  # the last of 7 blocks
MAX_CONTEXT = 48


def angles(rope_dim, device):
    """[MAX_CONTEXT, rope_dim]: cosines, then sines."""
    frequencies = 100.0 ** -(torch.arange(rope_dim // 2, device=device) / (rope_dim // 2))
    turns = torch.arange(MAX_CONTEXT, device=device)[:, None] * frequencies
    return torch.cat([turns.cos(), turns.sin()], 1)


def expected(qkv, cos_sin, positions, heads, kv_heads, head_dim, rope_dim, q_norm, k_norm):
    """Queries, keys and values as transformers turns and norms them, in float32: [tokens, heads, head_dim] each."""
    parts = qkv.float().view(len(qkv), -1, head_dim).split([heads, kv_heads, kv_heads], 1)
    q, k, v = (part.clone() for part in parts)
    for part, weight in ((q, q_norm), (k, k_norm)):
        if weight is not None:
            norm = LlamaRMSNorm(head_dim, eps=EPS).to(qkv.device)
            norm.weight.data = weight.float()
            part.copy_(norm(part))
    if not rope_dim:
        return q, k, v
    cos, sin = cos_sin[positions.long()].chunk(2, dim=1)
    cos, sin = cos.repeat(1, 2)[None], sin.repeat(1, 2)[None]
    turned = apply_rotary_pos_emb(q[None, ..., :rope_dim], k[None, ..., :rope_dim], cos, sin, unsqueeze_dim=2)
    q[..., :rope_dim], k[..., :rope_dim] = turned[0][0], turned[1][0]
    return q, k, v


def check(device, dtype, heads, kv_heads, head_dim, rope_dim, normed=False, heads_per_program=None, grows=False):
    """Two rows and the padding row, at positions on both sides of a block's end, against transformers."""
    width = (heads + 2 * kv_heads) * head_dim
    positions = torch.tensor([0, 15, 16, 33, 0, 5], dtype=torch.int32, device=device)
    rows = torch.tensor([1, 1, 1, 0, 2, 2], dtype=torch.int32, device=device)
    table = torch.tensor([[SCRATCH, SCRATCH, 4], [2, 0, SCRATCH], [SCRATCH] * 3], dtype=torch.int32, device=device)
    qkv = random(len(positions), width, dtype=dtype, device=device)
    caches = [torch.full((7, kv_heads, BLOCK_SIZE, head_dim), 99.0, dtype=dtype, device=device) for _ in range(2)]
    norms = [random(head_dim, dtype=dtype, device=device, seed=s) + 1 if normed else None for s in (1, 2)]
    cos_sin = angles(rope_dim, device)
    q, k, v = expected(qkv, cos_sin, positions, heads, kv_heads, head_dim, rope_dim, *norms)
    before = qkv.clone()
    growth = torch.linspace(1, 2, MAX_CONTEXT, device=device) if grows else None
    if growth is not None:
        q = q * growth[positions.long()][:, None, None]
    rope_and_store(
        qkv, cos_sin, positions, rows, PagedKV(*caches, table), *norms, eps=EPS, heads_per_program=heads_per_program,
        growth=growth,
    )  # fmt: skip
    assert_close(qkv[:, : heads * head_dim], q.flatten(1))
    assert torch.equal(qkv[:, heads * head_dim :], before[:, heads * head_dim :])
    for cache, values in zip(caches, (k, v), strict=True):
        for token, (block, slot) in enumerate([(2, 0), (2, 15), (0, 0), (4, 1)]):
            assert_close(cache[block, :, slot], values[token])
            cache[block, :, slot] = 99.0
        cache[SCRATCH] = 99.0
        assert (cache == 99.0).all(), "a slot was written that is no token's"


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("normed", [False, True])
def test_rope_is_transformers(device, dtype, normed):
    check(device, dtype, heads=4, kv_heads=2, head_dim=32, rope_dim=32, normed=normed)


@pytest.mark.parametrize("rope_dim", [32, 16])
def test_queries_grow_and_keys_do_not(device, rope_dim):
    check(device, torch.float32, heads=4, kv_heads=2, head_dim=32, rope_dim=rope_dim, grows=True)


@pytest.mark.parametrize(
    ("heads", "kv_heads", "head_dim"), [(9, 3, 64), (2, 1, 80), (3, 3, 96), (8, 1, 128), (2, 1, 256)]
)
def test_heads_of_every_size_and_count(device, heads, kv_heads, head_dim):
    check(device, torch.float32, heads, kv_heads, head_dim, rope_dim=head_dim)


@pytest.mark.parametrize("normed", [False, True])
@pytest.mark.parametrize(("head_dim", "rope_dim"), [(64, 32), (80, 32), (96, 72), (48, 0)])
def test_dimensions_beyond_the_turned_ones_pass(device, normed, head_dim, rope_dim):
    check(device, torch.float32, 4, 2, head_dim, rope_dim, normed)


@pytest.mark.parametrize("heads_per_program", [1, 4, 32])
def test_any_number_of_heads_a_program(device, heads_per_program):
    check(device, torch.float32, 5, 2, 32, 32, normed=True, heads_per_program=heads_per_program)


def test_caches_that_share_an_allocation(device):
    both = torch.zeros(3, 2, 1, BLOCK_SIZE, 32, device=device)
    table = torch.tensor([[1]], dtype=torch.int32, device=device)
    zero = torch.zeros(1, dtype=torch.int32, device=device)
    qkv = random(1, 96, dtype=torch.float32, device=device)
    rope_and_store(qkv, angles(32, device), zero, zero, PagedKV(both[:, 0], both[:, 1], table))
    assert torch.equal(both[1, 0, 0, 0], qkv[0, 32:64]) and torch.equal(both[1, 1, 0, 0], qkv[0, 64:])
    assert both.count_nonzero() == 64


def normed(part, weight):
    norm = LlamaRMSNorm(part.shape[-1], eps=EPS).to(part.device)
    norm.weight.data = torch.ones(part.shape[-1], device=part.device) if weight is None else weight.float()
    return norm(part.float()).detach()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("rope_dim", [32, 16])
@pytest.mark.parametrize(
    "rules",
    [
        HeadRules(norms_turned=True),
        HeadRules(norms_values=True),
        HeadRules(norms_values=True, made=2),
        HeadRules(made=2),
        HeadRules(norms_values=True, made=1),
    ],
    ids=str,
)
def test_rules_of_heads(device, dtype, rope_dim, rules):
    """Norms behind the turn, of values too; values that are keys as they were made; queries alone."""
    heads, kv_heads, head_dim, tokens = 4, 2, 32, 3
    parts = [random(tokens, n, head_dim, dtype=dtype, device=device, seed=n) for n in (heads, kv_heads, kv_heads)]
    q_norm, k_norm = (random(head_dim, dtype=dtype, device=device, seed=s) + 1 for s in (1, 2))
    qkv = torch.cat([part.flatten(1) for part in parts[: rules.made]], 1)
    positions = torch.tensor([0, 5, 17], dtype=torch.int32, device=device)
    rows, table = torch.zeros_like(positions), torch.tensor([[2, 1]], dtype=torch.int32, device=device)
    caches = [torch.full((3, kv_heads, BLOCK_SIZE, head_dim), 99.0, dtype=dtype, device=device) for _ in range(2)]
    cos_sin = angles(rope_dim, device)

    def turned(part):
        out, (cos, sin) = part.clone(), cos_sin[positions.long()].chunk(2, dim=1)
        cos, sin = cos.repeat(1, 2)[None], sin.repeat(1, 2)[None]
        own = part[None, ..., :rope_dim]
        out[..., :rope_dim] = apply_rotary_pos_emb(own, own, cos, sin, unsqueeze_dim=2)[0][0]
        return out

    values = parts[1] if rules.made == 2 else parts[2]
    want_v = normed(values, None) if rules.norms_values else values.float()
    if rules.norms_turned:
        want_q, want_k = normed(turned(parts[0].float()), q_norm), normed(turned(parts[1].float()), k_norm)
    else:
        want_q, want_k = turned(normed(parts[0], q_norm)), turned(normed(parts[1], k_norm))
    keys_norm = None if rules.made == 1 else k_norm
    rope_and_store(qkv, cos_sin, positions, rows, PagedKV(*caches, table), q_norm, keys_norm, eps=EPS, rules=rules)
    assert_close(qkv[:, : heads * head_dim], want_q.flatten(1))
    for cache, want in zip(caches, (want_k, want_v), strict=True):
        if rules.made == 1:
            assert (cache == 99.0).all(), "others have stored these"
            continue
        for token, (block, slot) in enumerate([(2, 0), (2, 5), (1, 1)]):
            assert_close(cache[block, :, slot], want[token])
