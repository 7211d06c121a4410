"""Sampling on the device against the host's sampler, which is its oracle: the same tokens from the same logits."""

import numpy as np
import torch
import triton
import triton.language as tl

from twostroke.backends.cuda.kernels import sampling_state
from twostroke.backends.cuda.kernels.sampling_search import SearchShape
from twostroke.backends.cuda.sampling import SamplingRows
from twostroke.backends.host.random_stream import philox4x32, uniform
from twostroke.backends.host.sampler import RowSampler
from twostroke.core.request import Request
from twostroke.core.sampling_params import SamplingParams
from twostroke.core.step import RowJoin

VOCAB = 1003
BLOCK = 512
# Few wide rounds are quick under the interpreter.
SMALL = {"column": 32, "list_size": 128, "search": SearchShape(chunk=64, part=64, fan=64)}


def stream(seed, count, vocab=VOCAB, spread=3.0):
    """Logits for each position of an answer, [count, vocab]."""
    return (spread * np.random.default_rng(seed).standard_normal((count, vocab))).astype(np.float32)


def join(sampling, seed=0, sample_index=0, output=(), prompt=(1, 2, 3), eos=()):
    request = Request("r", tuple(prompt), sampling, seed=seed, eos_token_ids=frozenset(eos))
    return RowJoin(0, request, sample_index, tuple(output))


def host(row_join, vocab=VOCAB):
    return RowSampler(row_join.request, row_join.sample_index, row_join.output_token_ids, vocab)


class Device:
    """Rows on the device, driven a step at a time."""

    def __init__(self, device, max_rows=8, vocab=VOCAB, block=BLOCK):
        self.device, self.max_rows = device, max_rows
        self.rows = SamplingRows(max_rows, vocab, device, block=block, **SMALL)
        self.last = torch.full((max_rows + 1,), -7, dtype=torch.int32, device=device)

    def open(self, *joins, first=0):
        for row, row_join in enumerate(joins, first):
            self.rows.open(row, row_join)
        self.rows.flush()

    def step(self, logits, rows, features=None):
        """Sample logits [batch, vocab] for rows; the tokens."""
        logits = torch.as_tensor(logits, device=self.device)
        out = torch.full((len(rows),), -9, dtype=torch.int32, device=self.device)
        row_ids = torch.tensor(rows, dtype=torch.int32, device=self.device)
        self.rows.sample(logits, row_ids, self.last, out, features or self.rows.features(rows))
        return out.tolist()


def both(device, joins, steps, vocab=VOCAB):
    """Tokens of `steps` [num_steps, batch, vocab] on the device and on the host."""
    machine = Device(device, len(joins), vocab)
    machine.open(*joins)
    samplers = [host(row_join, vocab) for row_join in joins]
    rows = list(range(len(joins)))
    ours = [machine.step(logits, rows) for logits in steps]
    theirs = [[s.sample(row).token_id for s, row in zip(samplers, logits, strict=True)] for logits in steps]
    return ours, theirs


@triton.jit
def _words(counters, keys, out):
    entry = tl.program_id(0)
    first, second = sampling_state.philox4x32(
        tl.load(counters + 2 * entry).to(tl.uint32),
        tl.load(counters + 2 * entry + 1).to(tl.uint32),
        tl.load(keys + 2 * entry).to(tl.uint32),
        tl.load(keys + 2 * entry + 1).to(tl.uint32),
    )
    tl.store(out + 2 * entry, first.to(tl.int64))
    tl.store(out + 2 * entry + 1, second.to(tl.int64))


@triton.jit
def _uniforms(state, out):
    row = tl.program_id(0)
    tl.store(out + row, sampling_state.uniform(state + row * sampling_state.NUM_WORDS))


def test_random_words_are_the_hosts(device):
    drawn = np.random.default_rng(0).integers(0, 2**32, (20, 4))
    drawn[0], drawn[1] = 0, 2**32 - 1
    counters, keys = (torch.tensor(part.copy(), device=device) for part in (drawn[:, :2], drawn[:, 2:]))
    out = torch.zeros(20, 2, dtype=torch.int64, device=device)
    _words[(20,)](counters, keys, out)
    expected = [list(philox4x32((c0, c1, 0, 0), (k0, k1))[:2]) for c0, c1, k0, k1 in drawn.tolist()]
    assert out.tolist() == expected


def test_random_numbers_are_the_hosts_from_a_rows_record(device):
    seeds = [0, 1, 2**32 - 1, 2**32, 2**63, 2**64 - 1, 0xDEADBEEF12345678]
    machine = Device(device, len(seeds))
    machine.open(*(join(SamplingParams(), seed, i, range(3 * i)) for i, seed in enumerate(seeds)))
    out = torch.zeros(len(seeds), dtype=torch.float64, device=device)
    _uniforms[(len(seeds),)](machine.rows._state, out)
    assert out.tolist() == [uniform(seed, i, 3 * i) for i, seed in enumerate(seeds)]


def test_greedy_takes_the_lowest_id_of_the_best(device):
    logits = stream(1, 6)
    logits[1, [900, 40, 300]] = 50.0
    logits[2] = 0.0
    logits[3] = -3e38
    logits[4, VOCAB - 1] = 99.0
    ours, theirs = both(device, [join(SamplingParams(temperature=0.0))] * 6, [logits])
    assert ours == theirs
    assert ours[0][1:5] == [40, 0, 0, VOCAB - 1]


def test_draws_are_the_hosts_over_several_steps(device):
    joins = [join(SamplingParams(temperature=t), seed) for seed, t in enumerate((1.0, 0.7, 1.5, 0.3, 0.0, 100.0))]
    steps = [stream(seed, len(joins)) for seed in range(8)]
    ours, theirs = both(device, joins, steps)
    assert ours == theirs


FILTERS = {
    "top_k": {"top_k": 20},
    "top_k_1": {"top_k": 1},
    "more_than_columns": {"top_k": 40},
    "more_than_a_list": {"top_k": 500},
    "top_p": {"top_p": 0.9},
    "top_p_small": {"top_p": 1e-6},
    "top_p_flat": {"top_p": 0.95, "temperature": 8.0},
    "min_p": {"min_p": 0.02},
    "min_p_1": {"min_p": 1.0},
    "min_p_flat": {"min_p": 0.3, "temperature": 20.0},
    "k_and_p": {"top_k": 30, "top_p": 0.8},
    "wide_k_and_p": {"top_k": 600, "top_p": 0.7, "temperature": 4.0},
    "p_and_min_p": {"top_p": 0.95, "min_p": 0.1},
    "min_p_within_p": {"top_p": 0.5, "min_p": 0.001},
    "all": {"top_k": 25, "top_p": 0.9, "min_p": 0.05, "temperature": 0.8},
}


def test_filters_are_the_hosts(device):
    joins = [join(SamplingParams(**parameters), seed) for seed, parameters in enumerate(FILTERS.values())]
    for seed in range(2):
        logits = stream(seed, len(joins))
        ours, theirs = both(device, joins, [logits])
        assert dict(zip(FILTERS, ours[0], strict=True)) == dict(zip(FILTERS, theirs[0], strict=True))
