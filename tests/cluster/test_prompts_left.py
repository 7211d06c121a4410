"""Real servers: what is not worth a handoff is left to the worker that writes, which is told why."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.cluster.fleets import NOBODY, first_leg, read, servers, told, write
from tests.cluster.test_fleet import prompt_of
from tests.server.running import RunningServer
from twostroke.scheduling.newcomers import SOONER_THERE, TOO_SHORT

pytestmark = [pytest.mark.fleet, pytest.mark.timeout(600)]
PATH = "/v1/completions"
WORTH = ("--kv-host-gb", "0.3", "--drain", "2")


@pytest.fixture(scope="module")
def fleet(
    smollm2_path: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[tuple[RunningServer, RunningServer, RunningServer]]:
    with servers(tmp_path_factory.mktemp("left"), "prefill", "decode", "alone", of_fleet=WORTH) as (
        reads,
        writes,
        alone,
    ):
        yield reads, writes, alone


def asked(text: str) -> dict[str, Any]:
    return {"model": "smollm2", "prompt": text, "max_tokens": 6, "temperature": 0.0}


def test_a_short_prompt_is_read_where_it_is_written(fleet: tuple[RunningServer, ...]) -> None:
    reads, writes, alone = fleet
    body = asked("Why is the sky blue?")
    leg = first_leg(reads, PATH, body)
    params = leg["kv_transfer_params"]
    assert params["do_remote_prefill"] is False and leg["usage"]["completion_tokens"] == 0
    answer = write(writes, PATH, body, params)
    assert told(answer) == told(alone.post(PATH, body))
    handoff = answer.json()["timing"]["handoff"]
    assert (handoff["why_not"], handoff["tokens"], handoff["read_by"]) == (TOO_SHORT, 0, "")
    assert handoff["sentence"] == f"{TOO_SHORT}: the prompt was read here"
    reads.wait_until(lambda: reads.metric("twostroke_handoffs_total", outcome="left") == 1)
    assert reads.metric("twostroke_kv_leases") == 0
    assert reads.metric("twostroke_prompt_tokens_total") == reads.metric("twostroke_promises_total") == 0


def test_a_long_one_is_handed_over(fleet: tuple[RunningServer, ...]) -> None:
    reads, writes, alone = fleet
    body = prompt_of(80)
    answer = write(writes, PATH, body, read(reads, PATH, body))
    assert told(answer) == told(alone.post(PATH, body))
    assert answer.json()["timing"]["handoff"]["why_not"] is None


def test_what_the_named_writer_was_sent_counts_as_there(fleet: tuple[RunningServer, ...]) -> None:
    """vllm-router names the writer in its id of the request: what goes there again is not worth a handoff, once this
    worker has it no more than the other one."""
    reads, writes, alone = fleet
    body = prompt_of(81, 300)
    legs = []
    for prompt in (body["prompt"], body["prompt"] + " So"):
        params = read(reads, PATH, {**body, "prompt": prompt}, NOBODY)
        answer = write(writes, PATH, {**body, "prompt": prompt}, params)
        assert told(answer) == told(alone.post(PATH, {**body, "prompt": prompt}))
        legs.append(answer.json()["timing"]["handoff"]["why_not"])
    assert legs == [None, SOONER_THERE]
