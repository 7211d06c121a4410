"""The prompts: lengths as published, no stretch used twice."""

import pytest

from bench.peers.workloads import FULL, QUICK, PromptSource, choose_workloads, library_text


@pytest.mark.parametrize("workload", [*FULL, *QUICK], ids=lambda workload: workload.title)
def test_prompts_have_the_lengths_that_the_workload_says(workload):
    source = PromptSource(range(100_000))
    low, high = workload.prompt_tokens
    prompts = source.prompts(workload)
    assert len(prompts) == workload.num_requests
    prefix = workload.shared_prefix_tokens
    assert all(low + prefix <= len(prompt) <= high + prefix for prompt in prompts)
    assert len({tuple(prompt[:prefix]) for prompt in prompts}) == 1
    own = [token for prompt in prompts for token in prompt[prefix:]]
    assert len(own) == len(set(own))
    again = source.prompts(workload)
    assert [len(prompt) for prompt in again] == [len(prompt) for prompt in prompts]
    assert {token for prompt in again for token in prompt}.isdisjoint(token for prompt in prompts for token in prompt)


def test_the_batch_is_uneven():
    (batch,) = choose_workloads(["w3"], quick=False)
    assert len(set(batch.lengths())) > 8


def test_a_text_too_short_is_refused():
    with pytest.raises(ValueError, match="the text has 100 tokens"):
        PromptSource(range(100)).prompts(FULL[0])


def test_an_unknown_workload_is_refused_and_order_is_kept():
    assert [workload.name for workload in choose_workloads(["w3", "w1"], quick=False)] == ["w1", "w3"]
    with pytest.raises(ValueError, match="no workload w9"):
        choose_workloads(["w9"], quick=False)


def test_the_text_is_long_enough_for_a_full_run():
    per_attempt = sum(workload.tokens_per_attempt for workload in FULL)
    assert len(library_text()) / 5 > 10 * per_attempt  # five characters a token is more than code takes


def test_the_fingerprint_follows_the_tokens():
    assert PromptSource([1, 2, 3]).fingerprint == PromptSource([1, 2, 3]).fingerprint
    assert PromptSource([1, 2, 3]).fingerprint != PromptSource([12, 3]).fingerprint
