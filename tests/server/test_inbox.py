"""One call's news: order, ends, errors, and what is aborted when it is left."""

from __future__ import annotations

import asyncio

import pytest

from twostroke.core.sequence import FinishReason
from twostroke.server.errors import ApiError
from twostroke.server.inbox import Inbox
from twostroke.server.messages import Output, Progress


def token(request_id: str, sample: int = 0, finish: FinishReason | None = None) -> Output:
    return Output(request_id, sample, (1,), "x", finish_reason=finish)


def test_news_come_in_order_with_the_prompt_they_belong_to() -> None:
    async def scenario() -> None:
        inbox = Inbox(["a", "b"], 1, lambda _: None)
        waiting = asyncio.create_task(inbox.take())
        await asyncio.sleep(0)
        assert inbox.num_waiting == 2
        inbox.push(Progress("b", 0, 4, 8))
        inbox.push(token("a"))
        assert await waiting == [(1, Progress("b", 0, 4, 8)), (0, token("a"))]
        assert inbox.num_waiting == 0 and not inbox.is_finished

    asyncio.run(scenario())


def test_a_request_is_finished_with_its_last_sample() -> None:
    inbox = Inbox(["a"], 2, lambda _: None)
    inbox.push(token("a", 0, FinishReason.STOP))
    assert inbox.unfinished == ["a"]
    inbox.push(token("a", 1, FinishReason.LENGTH))
    assert inbox.unfinished == [] and inbox.is_finished


def test_the_first_error_reaches_whoever_waits_and_whoever_comes_later() -> None:
    async def scenario() -> None:
        inbox = Inbox(["a"], 1, lambda _: None)
        waiting = asyncio.create_task(inbox.take())
        await asyncio.sleep(0)
        inbox.fail(ApiError(503, "gone"))
        inbox.fail(ApiError(504, "late"))
        for attempt in (waiting, inbox.take()):
            with pytest.raises(ApiError, match="gone"):
                await attempt

    asyncio.run(scenario())


def test_leaving_tells_what_is_unfinished() -> None:
    left: list[list[str]] = []
    inbox = Inbox(["a", "b"], 1, lambda inbox: left.append(inbox.unfinished))
    inbox.push(token("a", 0, FinishReason.STOP))
    inbox.close()
    assert left == [["b"]] and inbox.num_waiting == 0
