"""A row's choices from step to step: greedy, determinism, resuming, extremes, logprobs."""

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from twostroke.backends.host.sampler import RowSampler, candidates, token_logprobs
from twostroke.core.request import Request
from twostroke.core.sampling_params import SamplingParams

VOCAB = 300


def stream(seed, count=24, vocab=VOCAB):
    """Logits for each position of an answer, [count, vocab]."""
    return (3 * np.random.default_rng(seed).standard_normal((count, vocab))).astype(np.float32)


def row(sampling, seed=0, sample_index=0, output=(), prompt=(1, 2, 3), vocab=VOCAB, eos=()):
    request = Request("r", prompt, sampling, seed=seed, eos_token_ids=frozenset(eos))
    return RowSampler(request, sample_index, output, vocab)


def take(sampler, logits):
    return [sampler.sample(position).token_id for position in logits]


EVERYTHING = SamplingParams(
    temperature=0.9,
    top_k=50,
    top_p=0.95,
    min_p=0.01,
    repetition_penalty=1.2,
    presence_penalty=0.3,
    frequency_penalty=0.4,
    logit_bias={5: 3.0},
    min_tokens=4,
    stop_token_ids=(5,),
)


@given(seed=st.integers(0, 10**6))
def test_greedy_is_the_highest_logit(seed):
    logits = stream(seed, 3)
    assert take(row(SamplingParams(temperature=0.0)), logits) == torch.from_numpy(logits).argmax(dim=1).tolist()


def test_greedy_takes_the_lowest_id_of_equals_and_top_k_1_agrees():
    logits = np.zeros((1, 8), dtype=np.float32)
    logits[0, [3, 6]] = 2.0
    for sampling in (SamplingParams(temperature=0.0), SamplingParams(top_k=1), SamplingParams(top_p=1e-6)):
        assert {take(row(sampling, seed, vocab=8), logits)[0] for seed in range(20)} == {3}


def test_greedy_feels_penalties_and_bias():
    logits = np.array([1.0, 3.0, 2.9, 0.0], dtype=np.float32)
    repeating = row(SamplingParams(temperature=0.0, frequency_penalty=0.5), vocab=4, prompt=(0,))
    assert take(repeating, [logits] * 6) == [1, 2, 1, 2, 1, 2]
    assert take(row(SamplingParams(temperature=0.0, logit_bias={3: 100.0}), vocab=4, prompt=(0,)), [logits]) == [3]


@given(seed=st.integers(0, 10**6), temperature=st.floats(1e-6, 3), top_k=st.integers(1, 40), top_p=st.floats(0.05, 1))
def test_the_chosen_token_is_a_kept_one(seed, temperature, top_k, top_p):
    sampling = SamplingParams(temperature=temperature, top_k=top_k, top_p=top_p)
    logits = stream(seed, 1)[0]
    ids, weights = candidates(logits, sampling)
    chosen = row(sampling, seed).sample(logits).token_id
    assert len(ids) <= top_k
    assert weights[ids.tolist().index(chosen)] > 0


def test_a_seed_gives_one_answer_and_another_seed_another():
    logits = stream(1)
    first, again, other = (take(row(EVERYTHING, seed), logits) for seed in (9, 9, 10))
    assert first == again != other


def test_samples_of_one_request_differ():
    logits = stream(1)
    assert take(row(EVERYTHING, sample_index=0), logits) != take(row(EVERYTHING, sample_index=1), logits)


def test_rows_do_not_touch_each_other():
    logits = stream(1)
    alone = take(row(EVERYTHING, 4), logits)
    interleaved, beside = row(EVERYTHING, 4), row(EVERYTHING, 5)
    tokens = []
    for position in logits:
        tokens.append(interleaved.sample(position).token_id)
        beside.sample(position)
    assert tokens == alone


@pytest.mark.parametrize("stopped_at", [1, 3, 4, 23])
def test_a_rebuilt_row_continues_the_same_answer(stopped_at):
    logits = stream(2)
    whole = take(row(EVERYTHING, 6), logits)
    resumed = row(EVERYTHING, 6, output=tuple(whole[:stopped_at]))
    assert take(resumed, logits[stopped_at:]) == whole[stopped_at:]


def test_logits_are_left_as_they_were():
    logits = stream(3, 1)[0]
    before = logits.copy()
    logits.setflags(write=False)
    row(EVERYTHING).sample(logits)
    assert np.array_equal(logits, before)


def test_min_tokens_holds_the_end_back_until_it_is_reached():
    logits = np.zeros((6, 10), dtype=np.float32)
    logits[:, 7] = 50.0
    logits[:, 2] = 10.0
    # 10**6 stands for an end-of-text id that the model declares beyond its logits.
    greedy = row(SamplingParams(temperature=0.0, min_tokens=3), eos=(7, 10**6), vocab=10)
    assert take(greedy, logits) == [2, 2, 2, 7, 7, 7]
    ignoring = row(SamplingParams(temperature=0.0, min_tokens=3, ignore_eos=True), eos=(7,), vocab=10)
    assert take(ignoring, logits) == [7] * 6


def test_one_token_left_unmasked():
    stops = tuple(i for i in range(10) if i != 4)
    for parameters in ({}, {"top_k": 3}, {"top_p": 0.5}, {"min_p": 0.1}, {"temperature": 0.0}):
        sampling = SamplingParams(min_tokens=2, stop_token_ids=stops, **parameters)
        assert take(row(sampling, vocab=10), stream(1, 2, 10)) == [4, 4]


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize("temperature", [5e-324, 1e-300, 1e-6, 100.0])
def test_extreme_temperatures_neither_overflow_nor_warn(temperature):
    logits = stream(5, 20) * 1e3
    tokens = take(row(SamplingParams(temperature=temperature)), logits)
    if temperature <= 1e-6:
        assert tokens == logits.argmax(axis=1).tolist()


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize("repetition", [5e-324, 1e-300, 100.0])
def test_extreme_penalties_and_logits_stay_finite(repetition):
    largest = np.finfo(np.float32).max
    logits = np.array([largest, -largest, 1.0, -1.0, 0.0], dtype=np.float32)
    sampling = SamplingParams(
        repetition_penalty=repetition, presence_penalty=2.0, frequency_penalty=2.0, logit_bias={0: 100.0, 1: -100.0}
    )
    sampler = row(sampling, prompt=(0, 1, 2, 3, 4), vocab=5)
    for _ in range(10):
        assert np.isfinite(sampler.scores(logits)).all()
        sampler.sample(logits)


@pytest.mark.parametrize("scale", [1.0, 30.0, 1e4])
def test_logprobs_are_the_log_softmax_of_the_raw_logits(scale):
    logits = stream(8, 1)[0] * np.float32(scale)
    expected = torch.log_softmax(torch.from_numpy(logits).double(), dim=-1)
    values, ids = expected.topk(5)
    logprobs = token_logprobs(logits, 42, 5)
    assert logprobs.token_id == 42
    assert logprobs.logprob == pytest.approx(float(expected[42]), abs=1e-9)
    assert [token_id for token_id, _ in logprobs.top] == ids.tolist()
    assert [value for _, value in logprobs.top] == pytest.approx(values.tolist(), abs=1e-9)


def test_logprobs_of_the_whole_vocabulary_sum_to_one_and_ties_rank_by_id():
    logits = np.array([0.5, 2.0, 0.5, 2.0], dtype=np.float32)
    top = token_logprobs(logits, 0, 64).top
    assert [token_id for token_id, _ in top] == [1, 3, 0, 2]
    assert sum(np.exp(value) for _, value in top) == pytest.approx(1.0)


def test_sampled_logprobs_ignore_how_the_token_was_chosen():
    logits = stream(4, 1)[0]
    sampling = SamplingParams(temperature=0.3, top_k=2, logit_bias={7: 100.0}, logprobs=3)
    sampled = row(sampling).sample(logits)
    assert sampled.token_id == 7
    assert sampled.logprobs == token_logprobs(logits, 7, 3)
    assert row(SamplingParams()).sample(logits).logprobs is None
    assert row(SamplingParams(logprobs=0)).sample(logits).logprobs.top == ()
