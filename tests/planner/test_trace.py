from __future__ import annotations

import json
from collections import Counter
from itertools import pairwise

import pytest

from twostroke.core.errors import BadRequestError
from twostroke.planner.trace import Lengths, TraceRequest, bursts, poisson, read_trace


def test_poisson_has_its_rate_its_spread_and_its_lengths() -> None:
    trace = poisson(5.0, 20_000, Lengths(100, 300), Lengths(7, 7))
    gaps = [later.arrival_s - earlier.arrival_s for earlier, later in pairwise(trace)]
    mean = sum(gaps) / len(gaps)
    assert mean == pytest.approx(1 / 5.0, rel=0.03)
    variance = sum((gap - mean) ** 2 for gap in gaps) / len(gaps)
    assert variance == pytest.approx(mean**2, rel=0.06)  # of an exponential: its mean, squared
    assert {request.output_tokens for request in trace} == {7}
    prompts = [request.prompt_tokens for request in trace]
    assert (min(prompts), max(prompts)) == (100, 300)
    assert sum(prompts) / len(prompts) == pytest.approx(200, rel=0.01)
    assert trace == poisson(5.0, 20_000, Lengths(100, 300), Lengths(7, 7))
    assert trace != poisson(5.0, 20_000, Lengths(100, 300), Lengths(7, 7), seed=1)


def test_bursts_arrive_together_at_the_same_rate() -> None:
    trace = bursts(4.0, 8000, Lengths(10, 10), Lengths(1, 1), burst=8)
    assert set(Counter(request.arrival_s for request in trace).values()) == {8}
    assert len(trace) / trace[-1].arrival_s == pytest.approx(4.0, rel=0.1)


@pytest.mark.parametrize(("text", "found"), [("500", Lengths(500, 500)), (" 200 - 2000 ", Lengths(200, 2000))])
def test_lengths_are_read(text: str, found: Lengths) -> None:
    assert Lengths.parse(text) == found


@pytest.mark.parametrize("text", ["", "0", "-5", "5-", "9-5", "1e3", "5 6", "99999999999", "9" * 400, "½"])
def test_what_is_no_length_is_refused(text: str) -> None:
    with pytest.raises(BadRequestError):
        Lengths.parse(text)


def test_a_file_of_requests_is_read_in_the_order_of_arrival() -> None:
    late = {"arrival_s": 2, "prompt_tokens": 5, "output_tokens": 6, "prefix": "system", "prefix_tokens": 3}
    early = {"arrival_s": 0.5, "prompt_tokens": 7, "output_tokens": 8}
    trace = read_trace([json.dumps(late), "\n", json.dumps(early) + "\n"])
    assert trace == [TraceRequest(0.5, 7, 8), TraceRequest(2, 5, 6, "system", 3)]


@pytest.mark.parametrize(
    "line",
    [
        "not json",
        "[1, 2, 3]",
        "null",
        "[" * 10_000,
        "{}",
        '{"arrival_s": 0, "prompt_tokens": 5}',
        '{"arrival_s": 0, "prompt_tokens": 5, "output_tokens": 5, "speed": 1}',
        '{"arrival_s": -1, "prompt_tokens": 5, "output_tokens": 5}',
        '{"arrival_s": NaN, "prompt_tokens": 5, "output_tokens": 5}',
        '{"arrival_s": "0", "prompt_tokens": 5, "output_tokens": 5}',
        '{"arrival_s": 0, "prompt_tokens": 0, "output_tokens": 5}',
        '{"arrival_s": 0, "prompt_tokens": 5.5, "output_tokens": 5}',
        '{"arrival_s": 0, "prompt_tokens": 5, "output_tokens": true}',
        '{"arrival_s": 0, "prompt_tokens": 5, "output_tokens": 99999999999}',
        '{"arrival_s": 0, "prompt_tokens": 5, "output_tokens": 5, "prefix": 7, "prefix_tokens": 2}',
        '{"arrival_s": 0, "prompt_tokens": 5, "output_tokens": 5, "prefix": "a", "prefix_tokens": 6}',
    ],
)
def test_a_bad_line_is_named(line: str) -> None:
    good = '{"arrival_s": 0, "prompt_tokens": 5, "output_tokens": 5}'
    with pytest.raises(BadRequestError, match="line 2"):
        read_trace([good, line])


def test_an_empty_trace_and_impossible_rates_are_refused() -> None:
    with pytest.raises(BadRequestError):
        read_trace(["", "  "])
    for rate, count, burst in ((0.0, 5, 1), (-1.0, 5, 1), (float("nan"), 5, 1), (1.0, 0, 1), (1.0, 5, 6), (1.0, 5, 0)):
        with pytest.raises(BadRequestError):
            bursts(rate, count, Lengths(1, 1), Lengths(1, 1), burst=burst)
