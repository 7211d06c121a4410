"""Sampling on the device against the host's sampler, which is its oracle: the same tokens from the same logits."""

import numpy as np
import pytest
import torch
import triton
import triton.language as tl
from tests.backends.cuda.plain_launches import plain_launches

from twostroke.backends.cuda.kernels import sampling_state
from twostroke.backends.cuda.kernels.sampling_search import SearchShape
from twostroke.backends.cuda.sampling import SamplingFeatures, SamplingRows
from twostroke.backends.host.random_stream import philox4x32, uniform
from twostroke.backends.host.sampler import RowSampler
from twostroke.core.request import Request
from twostroke.core.sampling_params import SamplingParams
from twostroke.core.step import RowJoin

# Overflow and NaN are meant where they occur; a device says nothing of them.
pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning:triton.runtime.interpreter")

VOCAB = 1003
BLOCK = 512
# Few wide rounds are quick under the interpreter.
SMALL = {"column": 32, "list_size": 128, "search": SearchShape(chunk=256, part=256, fan=256)}


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
    _uniforms[(len(seeds),)](machine.rows.records, out)
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
    ours, theirs = both(device, joins, [stream(3, len(joins))])
    assert dict(zip(FILTERS, ours[0], strict=True)) == dict(zip(FILTERS, theirs[0], strict=True))


def test_filters_break_ties_by_id_as_the_host_does(device):
    parameters = [{"top_k": 7}, {"top_p": 0.4}, {"top_k": 300, "top_p": 0.5}, {"min_p": 0.9}, {"top_p": 0.3}]
    joins = [join(SamplingParams(**each), seed) for seed, each in enumerate(parameters)]
    tied = np.round(stream(5, len(joins), spread=1.0))
    tied[-1] = 2.5  # all alike: more candidates than a list holds
    ours, theirs = both(device, joins, [tied])
    assert ours == theirs


PENALTIES = {"repetition_penalty": 1.3, "presence_penalty": 0.4, "frequency_penalty": 0.5}
EDITS = [
    {"temperature": 0.0, **PENALTIES},
    {"temperature": 0.0, "frequency_penalty": 2.0},
    {"temperature": 0.0, "repetition_penalty": 0.5},
    {"temperature": 0.0, "logit_bias": {7: 60.0, VOCAB - 1: 59.0}},
    {"temperature": 0.0, "min_tokens": 2, "stop_token_ids": (8, 600), "logit_bias": {8: 70.0, 600: 95.0, 9: 50.0}},
    {"temperature": 0.9, "top_k": 30, "logit_bias": {5: 3.0}, "min_tokens": 2, "stop_token_ids": (5,), **PENALTIES},
    {},
]


def peaked(seed, count, num_tokens=8):
    """Logits that some tokens lead, the same in every position: penalties have something to do."""
    logits = stream(seed, 1)[0]
    logits[:num_tokens] += 10
    return np.tile(logits, (count, 1))


def test_edits_are_the_hosts_over_several_steps(device):
    joins = [join(SamplingParams(**each), seed, prompt=(1, 2, 3, 3)) for seed, each in enumerate(EDITS)]
    ours, theirs = both(device, joins, [peaked(seed % 2, len(joins)) for seed in range(4)])
    assert ours == theirs
    assert [step[4] for step in ours] == [9, 9, 600, 600]


def test_a_reopened_row_goes_on_as_if_it_had_never_stopped(device):
    sampling = SamplingParams(**EDITS[5])
    steps = [peaked(seed % 2, 1) for seed in range(4)]
    whole = [step[0] for step in both(device, [join(sampling, 6)], steps)[0]]
    machine = Device(device)
    # The row was another's before, who saw other tokens.
    machine.open(join(SamplingParams(**EDITS[0]), 1, prompt=range(50)), first=2)
    machine.step(steps[0], [2])
    machine.rows.close(2)
    machine.open(join(sampling, 6, output=whole[:2]), first=2)
    assert [machine.step(logits, [2])[0] for logits in steps[2:]] == whole[2:]


def test_extreme_temperatures_and_penalties_do_as_the_host_does(device):
    largest = float(np.finfo(np.float32).max)
    logits = np.zeros((5, 40), dtype=np.float32)
    logits[:, :4] = [largest, -largest, 1.0, 30.0]
    everything = {"repetition_penalty": 5e-324, "presence_penalty": 2.0, "frequency_penalty": 2.0}
    parameters = [
        {"temperature": 5e-324},
        {"temperature": 100.0, "top_p": 0.5},
        {"temperature": 1e-6, "top_k": 3},
        {"temperature": 0.0, **everything},
        {"temperature": 0.0, **everything, "repetition_penalty": 100.0, "logit_bias": {0: 100.0, 1: -100.0}},
    ]
    joins = [join(SamplingParams(**each), seed, prompt=(0, 1, 2, 3)) for seed, each in enumerate(parameters)]
    lowest = np.full_like(logits, -largest)
    ours, theirs = both(device, joins, [logits, logits, lowest], vocab=40)
    assert ours == theirs


def test_stops_masked_down_to_one_token_or_none(device):
    stops = tuple(i for i in range(10) if i != 4)
    filters = {"top_k": 3, "top_p": 0.5}
    kept = [join(SamplingParams(min_tokens=2, stop_token_ids=stops, **each)) for each in ({}, filters)]
    none = join(SamplingParams(min_tokens=2, stop_token_ids=tuple(range(10))))
    machine = Device(device, vocab=10)
    machine.open(*kept, none)
    tokens = machine.step(stream(1, 3, 10), [0, 1, 2])
    assert tokens[:2] == [4, 4]
    assert 0 <= tokens[2] < 10


def test_a_row_that_is_not_finite_fails_alone_and_does_not_advance(device):
    plain, filtered = SamplingParams(), SamplingParams(top_k=5, top_p=0.9)
    edited = SamplingParams(min_tokens=3, stop_token_ids=(4, 7), repetition_penalty=1.2)
    joins = [join(sampling, 3) for sampling in (plain, filtered, edited, edited, plain, edited)]
    logits = stream(2, 6)
    good = Device(device)
    good.open(*joins)
    expected = good.step(logits, range(6))
    broken = logits.copy()
    broken[0, 17], broken[1, VOCAB - 1], broken[2, 7], broken[3, 4] = np.nan, np.inf, np.inf, -np.inf
    machine = Device(device)
    machine.open(*joins)
    assert machine.step(broken, range(6)) == [-1] * 4 + expected[4:]
    assert machine.last.tolist() == [-7] * 4 + expected[4:] + [-7] * 3
    assert machine.step(logits, range(6))[:4] == expected[:4]


def test_a_row_draws_alike_in_any_company_and_padding_keeps_nothing(device):
    rows = [join(SamplingParams(**each), 40) for each in ({}, {"top_p": 0.8}, {"temperature": 0.0}, EDITS[5])]
    logits = stream(4, 4)
    machine = Device(device)
    alone = []
    for row, row_join in enumerate(rows):
        machine.open(row_join, first=row)
        alone += machine.step(logits[row : row + 1], [row])
    machine.open(*rows)
    wide = torch.full((6, VOCAB + 37), float("nan"), device=device)  # the rows of wider logits lie apart
    wide[:4, :VOCAB] = torch.tensor(logits[::-1].copy())
    wide[4, :VOCAB] = 0.0
    padding = machine.max_rows
    tokens = machine.step(wide[:, :VOCAB], [3, 2, 1, 0, padding, padding])
    assert tokens == [*alone[::-1], 0, -1]
    assert machine.last.tolist() == [*alone, -7, -7, -7, -7, -7]
    assert not machine.rows.records[padding].any()


def test_features_name_what_a_batch_needs(device):
    machine = Device(device)
    greedy = {"temperature": 0.0}
    parameters = [greedy, {}, {"top_p": 0.9}, {"top_k": VOCAB}, {**greedy, "top_k": 5}, {**greedy, "min_tokens": 1}]
    machine.open(*(join(SamplingParams(**each)) for each in parameters))
    assert machine.rows.features([0, 4]) == SamplingFeatures()
    assert machine.rows.features([0, 1, 3]) == SamplingFeatures(draws=True)
    assert machine.rows.features([2]) == SamplingFeatures(draws=True, filters=True)
    assert machine.rows.features([5]) == SamplingFeatures(edits=True)
    machine.rows.close(5)
    assert machine.rows.features(range(6)) == SamplingFeatures(draws=True, filters=True)


def test_logprobs_wanted_belongs_to_the_open_row(device):
    machine = Device(device)
    machine.open(join(SamplingParams(logprobs=3)), join(SamplingParams()))
    assert [machine.rows.logprobs_wanted(row) for row in (0, 1)] == [3, None]
    machine.rows.close(0)
    assert machine.rows.logprobs_wanted(0) is None


def test_tokens_come_as_often_as_they_are_likely(device):
    # The interpreter takes hundredths of a second for a draw, the card next to nothing.
    count, batch = (20_000, 200) if device == "cuda" else (80, 40)
    probabilities = np.array([0.35, 0.05, 0.25, 0.15, 0.2])
    logits = np.tile(np.log(probabilities).astype(np.float32), (batch, 1))
    machine = Device(device, batch, vocab=5, block=16)
    machine.open(*(join(SamplingParams(), seed) for seed in range(batch)))
    tokens = [token for _ in range(count // batch) for token in machine.step(logits, range(batch))]
    expected = count * probabilities
    chi_square = float((((np.bincount(tokens, minlength=5) - expected) ** 2) / expected).sum())
    assert chi_square < 18.5  # 4 degrees of freedom: exceeded once in a thousand seeds


@pytest.mark.gpu
def test_a_replayed_graph_chooses_what_eager_calls_choose(device):
    if device != "cuda":
        pytest.skip("graphs need a CUDA device")
    joins = [join(SamplingParams(**each), seed) for seed, each in enumerate([*FILTERS.values(), *EDITS])]
    steps = [torch.tensor(stream(seed, len(joins)), device=device) for seed in range(3)]
    rows = list(range(len(joins)))
    eager, captured = Device(device, len(joins)), Device(device, len(joins))
    eager.open(*joins)
    captured.open(*joins)
    logits, out = steps[0].clone(), torch.zeros(len(joins), dtype=torch.int32, device=device)
    row_ids = torch.tensor(rows, dtype=torch.int32, device=device)
    features = captured.rows.features(rows)
    captured.rows.sample(logits, row_ids, captured.last, out, features)  # compiles and allocates
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured.rows.sample(logits, row_ids, captured.last, out, features)
    captured.open(*joins)  # their counts and lists lie elsewhere now: the graph follows the records
    for step in steps:
        logits.copy_(step)
        graph.replay()
        with plain_launches(device):
            assert out.tolist() == eager.step(step, rows)
