"""A page that a known machine would have made gives that machine back. A real server's: tests/server/test_plan.py."""

from __future__ import annotations

import pytest

from twostroke.core.errors import BadRequestError
from twostroke.cost.config_shape import dimensions_from_config
from twostroke.cost.devices import find_device
from twostroke.cost.known_shapes import KNOWN_SHAPES
from twostroke.cost.roofline import decode_work
from twostroke.planner.deployment import Deployment
from twostroke.planner.efficiency import FloorShares
from twostroke.planner.estimate import phases_of
from twostroke.planner.live import calibrate, fetch_metrics, parse_metrics

DEPLOYMENT = Deployment("8B", dimensions_from_config(KNOWN_SHAPES["Llama-3.1-8B"].config), find_device("h200"))


def page(**changes: float) -> str:
    """A server at 60% of the prefill floor and 80% of the decode floor: 100 requests of 1,000 in, 101 out, 4 streams a
    step; 90 of the prompts were read in steps of their own, 10 beside a decode step."""
    real = phases_of(DEPLOYMENT, FloorShares("", "", prefill=0.6, decode=0.8))
    step_s = real.step_s(decode_work(4, 1050))
    read_s = real.prefill_s(0, 1000)
    values = {
        "requests": 100.0,
        "decode_count": 2490.0,
        "mixed_count": 10.0,
        "step_s": step_s,
        "read_s": read_s,
    } | changes
    lines = [
        f"twostroke_ttft_seconds_count {values['requests']}",
        f"twostroke_ttft_seconds_sum {100 * values['read_s']}",
        'twostroke_ttft_seconds_bucket{le="+Inf"} 100',
        f"twostroke_prefill_seconds_count {values['requests']}",
        f"twostroke_prefill_seconds_sum {100 * values['read_s']}",
        f"twostroke_tpot_seconds_count {values['requests']}",
        # In the 100 steps of an answer the three others' prompts are read.
        f"twostroke_tpot_seconds_sum {100 * (values['step_s'] + 3 * values['read_s'] / 100)}",
        "twostroke_prompt_tokens_total 100000.0",
        "twostroke_cached_prompt_tokens_total 0.0",
        "twostroke_output_tokens_total 10100.0",
        f'twostroke_step_seconds_count{{kind="decode"}} {values["decode_count"]}',
        f'twostroke_step_seconds_sum{{kind="decode"}} {values["decode_count"] * values["step_s"]}',
        f'twostroke_step_seconds_count{{kind="mixed"}} {values["mixed_count"]}',
        f'twostroke_step_seconds_sum{{kind="mixed"}} {10 * (values["step_s"] + values["read_s"])}',
        'twostroke_step_seconds_count{kind="prefill"} 90',
        f'twostroke_step_seconds_sum{{kind="prefill"}} {90 * values["read_s"]}',
    ]
    return "# HELP twostroke_ttft_seconds x\n" + "\n".join(lines) + "\n"


def test_the_machine_behind_a_page_is_found() -> None:
    metrics = parse_metrics(page())
    assert (metrics.mean_input, metrics.mean_output, metrics.mean_batch) == (1000, 101, 4.0)
    found = calibrate(DEPLOYMENT, metrics, "a page")
    assert found.shares.prefill == pytest.approx(0.6)
    assert found.shares.decode == pytest.approx(0.8)
    assert found.shares.source == "a page"
    assert metrics.mean_users == 4
    assert found.shares.error == "prefill +0%, TPOT +0% against the means of the 100 requests it has answered"


def test_a_batch_between_two_whole_ones() -> None:
    metrics = parse_metrics(page(decode_count=3990.0))  # 10,000 tokens in 4,000 steps
    assert metrics.mean_batch == 2.5
    assert 0.6 < calibrate(DEPLOYMENT, metrics, "a page").shares.decode < 0.8


def test_too_little_to_plan_from() -> None:
    with pytest.raises(BadRequestError, match="answered 2 requests"):
        calibrate(DEPLOYMENT, parse_metrics(page(requests=2.0)), "a page")
    with pytest.raises(BadRequestError, match="in 3 decode steps"):
        calibrate(DEPLOYMENT, parse_metrics(page(decode_count=3.0)), "a page")


@pytest.mark.parametrize("text", ["", "<html>hello</html>", "http_requests_total 7\n", "\x00\xff {{{ }}} nan"])
def test_other_pages_are_refused(text: str) -> None:
    with pytest.raises(BadRequestError, match="not the metrics page"):
        parse_metrics(text)


@pytest.mark.parametrize(
    "url", ["http://127.0.0.1:9", "127.0.0.1:9", "file:///etc/passwd", "http://[", "http://127.0.0.1:99999"]
)
def test_addresses_that_give_nothing(url: str) -> None:
    with pytest.raises(BadRequestError, match=r"cannot be read|not the address of a server"):
        fetch_metrics(url)
