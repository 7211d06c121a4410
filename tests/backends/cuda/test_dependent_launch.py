"""A chain of dependent launches must give what the same kernels give one after another: a kernel that read before it
waited, or a neighbour that did not wait at all, would show."""

from functools import partial

import pytest
import torch
from tests.backends.cuda.closeness import random
from tests.backends.cuda.plain_launches import plain_launches

from twostroke.backends.cuda.attention import Attention
from twostroke.backends.cuda.kernels import gemv
from twostroke.backends.cuda.kernels.activation import gated
from twostroke.backends.cuda.kernels.embedding import FROM_ROW, Positions, gather
from twostroke.backends.cuda.kernels.gemv_config import GemvConfig
from twostroke.backends.cuda.kernels.norms import add_rms_norm, rms_norm
from twostroke.backends.cuda.kernels.paged import AttentionShape, PagedKV, Scoring
from twostroke.backends.cuda.kernels.rope import rope_and_store
from twostroke.backends.cuda.kernels.sampling_state import NUM_WORDS, PROMPT_LEN
from twostroke.backends.cuda.kernels.target import target_of

HIDDEN, INTERMEDIATE, HEADS, KV_HEADS, HEAD_DIM = 256, 384, 4, 2, 64
EPS = 1e-5
linear_few = partial(gemv.linear_few, config=GemvConfig("fma", block_n=4, block_k=256, num_warps=1))


class Chain:
    """Every kernel of the layer, each reading what the one before wrote."""

    def __init__(self, device, rows):
        kinds = {"dtype": torch.bfloat16, "device": device}
        self.rows = rows
        self.embedding = random(50, HIDDEN, **kinds)
        self.qkv_weight = random((HEADS + 2 * KV_HEADS) * HEAD_DIM, HIDDEN, **kinds) / 16
        self.o_weight = random(HIDDEN, HEADS * HEAD_DIM, **kinds) / 16
        self.gate_up_weight = random(2 * INTERMEDIATE, HIDDEN, **kinds) / 16
        self.down_weight = random(HIDDEN, INTERMEDIATE, **kinds) / 16
        self.norm_weight = random(HIDDEN, **kinds) / 4 + 1
        self.residual, self.x = (torch.empty(rows, HIDDEN, **kinds) for _ in range(2))
        self.qkv = torch.empty(rows, len(self.qkv_weight), **kinds)
        self.gate_up, self.between = (torch.empty(rows, n * INTERMEDIATE, **kinds) for n in (2, 1))
        self.mixed = torch.empty(rows, HEADS * HEAD_DIM, **kinds)
        self.caches = [random(rows, KV_HEADS, 16, HEAD_DIM, **kinds) for _ in range(2)]
        self.ids = torch.arange(rows, dtype=torch.int32, device=device)
        records = torch.zeros(rows, NUM_WORDS.value, dtype=torch.int64, device=device)
        self.positions = Positions(torch.full_like(self.ids, FROM_ROW), records, torch.zeros_like(self.ids))
        self.table = self.ids[:, None].contiguous()
        self.kv = PagedKV(*self.caches, self.table)
        shape = AttentionShape(HEADS, KV_HEADS, HEAD_DIM, 16, kinds["dtype"])
        self.attention = Attention(shape, device, max_decode_tokens=rows)
        self.cos_sin = random(16, HEAD_DIM, dtype=torch.float32, device=device)

    def run(self, layers=6):
        norm, own = {"eps": EPS}, self.norm_weight
        gather(self.embedding, self.ids, self.ids, self.ids, self.residual, positions=self.positions)
        self.attention.cut_decodes(self.positions.found, [None])
        for _ in range(layers):
            linear_few(self.residual, self.qkv_weight, self.qkv, norm_weight=own, **norm)
            self.turn()
            linear_few(self.attend(), self.o_weight, self.residual, residual=self.residual)
            linear_few(self.residual, self.gate_up_weight, self.between, norm_weight=own, gated="silu", **norm)
            linear_few(self.between, self.down_weight, self.x)
            add_rms_norm(self.x, self.residual, own, self.x, **norm, post_weight=own)
            linear_few(self.x, self.gate_up_weight, self.gate_up)
            gated(self.gate_up, self.between, kind="gelu_tanh")
            linear_few(self.between, self.down_weight, self.x)
            add_rms_norm(self.x, self.residual, own, self.x, **norm)
        rms_norm(self.residual, own, self.x, **norm)
        return self.x

    def stand_at(self, first):
        """Rows from this position on: what the step before left, had it sampled as much."""
        self.positions.records[:, PROMPT_LEN.value] = 1 + first + self.ids

    def turn(self):
        rope_and_store(self.qkv, self.cos_sin, self.positions.found, self.ids, self.kv)

    def attend(self):
        heads = self.qkv.view(self.rows, -1, HEAD_DIM)[:, :HEADS]
        self.attention.decode(heads, self.kv, self.ids, self.positions.found, self.mixed, Scoring(HEAD_DIM**-0.5))
        return self.mixed


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no card")
@pytest.mark.parametrize("rows", [1, 2, 4, 8])
def test_a_chain_of_dependent_launches_in_a_graph(device, rows):
    if not target_of(device).has_pdl:
        pytest.skip("the card has no dependent launches")
    chain = Chain(device, rows)
    firsts, expected = (0, 5, 2), {}
    for first in firsts:
        chain.stand_at(first)
        chain.run()  # keys are written where it stands: from now on they are the same whenever it does
    with plain_launches(device):
        for first in firsts:
            chain.stand_at(first)
            expected[first] = chain.run().clone()
    assert all(torch.isfinite(each).all() for each in expected.values())
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        chain.run()
    for turn in range(30):
        first = firsts[turn % len(firsts)]
        chain.stand_at(first)
        chain.x.fill_(float("nan"))
        graph.replay()
        torch.cuda.synchronize()
        assert torch.equal(chain.x, expected[first])
