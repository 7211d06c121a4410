import pytest

from twostroke.core.errors import BadRequestError
from twostroke.core.request import Request
from twostroke.core.request_check import check_request
from twostroke.core.sampling_params import SamplingParams


@pytest.mark.parametrize(
    ("field", "prompt", "sampling"),
    [
        ("prompt_token_ids", (1, 100), SamplingParams()),
        ("prompt_token_ids holds the token id -1;", (5, -1, 3), SamplingParams()),
        (f"prompt_token_ids holds the token id {2**32 + 1};", (1, 2**32 + 1), SamplingParams()),
        (f"prompt_token_ids holds the token id {2**70};", (1, 2**70, 3), SamplingParams()),
        ("logit_bias", (1,), SamplingParams(logit_bias={100: 1.0})),
        ("stop_token_ids", (1,), SamplingParams(stop_token_ids=(2, 10**9))),
        ("min_tokens", (1,), SamplingParams(min_tokens=1, stop_token_ids=tuple(range(100)))),
    ],
)
def test_ids_beyond_the_vocabulary_are_refused_by_name(field, prompt, sampling):
    with pytest.raises(BadRequestError, match=field):
        check_request(Request("r", prompt, sampling), vocab_size=100)


def test_the_whole_vocabulary_is_accepted():
    sampling = SamplingParams(logit_bias={99: 1.0}, stop_token_ids=(0, 99), min_tokens=2, top_k=10**6)
    check_request(Request("r", tuple(range(100)), sampling, eos_token_ids=frozenset({500})), vocab_size=100)
