"""Every field of SamplingParams is range-checked, and the message names the field."""

from __future__ import annotations

from typing import Any

import pytest

from twostroke.core.errors import BadRequestError
from twostroke.core.sampling_params import SamplingParams


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("max_tokens", 0),
        ("max_tokens", 1.5),
        ("max_tokens", True),
        ("min_tokens", -1),
        ("temperature", -0.1),
        ("temperature", float("nan")),
        ("temperature", float("inf")),
        ("temperature", 10**400),
        pytest.param("temperature", 10**5000, id="a temperature too long to write"),
        pytest.param("top_k", -(10**5000), id="an integer too long to write"),
        pytest.param("stop", [10**5000], id="a stop string too long to write"),
        pytest.param("stop_token_ids", 10**5000, id="stop ids too long to write"),
        pytest.param("logit_bias", {10**5000: 1000.0}, id="a biased id too long to write"),
        ("temperature", "hot"),
        ("top_k", 0),
        ("top_p", 0.0),
        ("top_p", 1.1),
        ("min_p", -0.1),
        ("repetition_penalty", 0.0),
        ("presence_penalty", 2.1),
        ("frequency_penalty", -2.1),
        ("seed", -1),
        ("seed", 2**64),
        ("n", 0),
        ("n", 10**6),
        ("logprobs", -1),
        ("logprobs", 1000),
        ("prompt_logprobs", -1),
        ("stop", ("",)),
        ("stop", 5),
        ("stop", ("x",) * 100),
        ("stop_token_ids", (-1,)),
        ("stop_token_ids", 5),
        ("stop_token_ids", None),
        ("logit_bias", [1, 2]),
        ("logit_bias", None),
        ("logit_bias", {-1: 1.0}),
        ("logit_bias", {1: float("nan")}),
        ("logit_bias", {1: 101.0}),
    ],
)
def test_out_of_range_is_refused_by_name(field: str, value: Any) -> None:
    with pytest.raises(BadRequestError, match=field):
        SamplingParams(**{field: value})


def test_min_tokens_cannot_exceed_max_tokens() -> None:
    with pytest.raises(BadRequestError, match="min_tokens"):
        SamplingParams(max_tokens=4, min_tokens=5)
    with pytest.raises(BadRequestError, match="min_tokens"):
        SamplingParams(max_tokens=10**5000, min_tokens=-1)


def test_lists_become_tuples_and_a_lone_stop_string_is_one_stop() -> None:
    params = SamplingParams(stop="END", stop_token_ids=[1, 2])  # type: ignore[arg-type]
    assert params.stop == ("END",)
    assert params.stop_token_ids == (1, 2)
