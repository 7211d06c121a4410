"""One call's news: order, ends, errors, and what is aborted when it is left."""

from __future__ import annotations

import asyncio

import pytest

from twostroke.core.events import PrefillProgress, TokenEvent
from twostroke.core.sequence import FinishReason
from twostroke.server.errors import ApiError
from twostroke.server.inbox import Inbox, News


def token(request_id: str, sample: int = 0, finish: FinishReason | None = None) -> TokenEvent:
    return TokenEvent(request_id, sample, (1,), "x", finish_reason=finish)


def test_news_come_in_order_with_the_prompt_they_belong_to() -> None:
    async def scenario() -> None:
        inbox = Inbox(["a", "b"], 1, lambda _: None)
        waiting = asyncio.create_task(inbox.take())
        await asyncio.sleep(0)
        assert inbox.num_waiting == 2
        inbox.push(PrefillProgress("b", 0, 4, 8))
        inbox.push(token("a"))
        inbox.tell()
        assert await waiting == [(1, PrefillProgress("b", 0, 4, 8)), (0, token("a"))]
        assert inbox.num_waiting == 0 and not inbox.is_finished

    asyncio.run(scenario())


def test_a_request_is_finished_with_its_last_sample() -> None:
    inbox = Inbox(["a"], 2, lambda _: None)
    inbox.push(token("a", 0, FinishReason.STOP))
    assert inbox.unfinished == ["a"]
    inbox.push(token("a", 1, FinishReason.LENGTH))
    assert inbox.unfinished == [] and not inbox.is_finished  # nobody has heard of it yet
    assert len(asyncio.run(inbox.take())) == 2 and inbox.is_finished


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


def test_who_follows_is_handed_a_steps_news_at_once_and_together() -> None:
    async def scenario() -> None:
        inbox, dealt = Inbox(["a"], 2, lambda _: None), []

        def deal(news: list[News]) -> bool:
            dealt.append([event for _, event in news])
            return not inbox.is_finished

        inbox.push(token("a"))  # before anybody follows
        following = asyncio.create_task(inbox.follow(deal))
        await asyncio.sleep(0)
        assert dealt == [[token("a")]]
        inbox.push(token("a", 0))
        inbox.push(token("a", 1))
        assert len(dealt) == 1
        inbox.tell()
        assert dealt[1:] == [[token("a", 0), token("a", 1)]]  # no task has run in between
        inbox.push(token("a", 0, FinishReason.STOP))
        inbox.push(token("a", 1, FinishReason.STOP))
        inbox.tell()
        await following

    asyncio.run(scenario())


def test_a_bug_in_who_follows_is_its_own() -> None:
    async def scenario() -> None:
        inbox = Inbox(["a"], 1, lambda _: None)

        def deal(news: list[News]) -> bool:
            raise KeyError("a bug")

        following = asyncio.create_task(inbox.follow(deal))
        await asyncio.sleep(0)
        inbox.push(token("a"))
        inbox.tell()  # as the client's reader does, for everybody
        with pytest.raises(KeyError):
            await following
        inbox.push(token("a"))
        inbox.tell()

    asyncio.run(scenario())


def test_leaving_tells_what_is_unfinished() -> None:
    left: list[list[str]] = []
    inbox = Inbox(["a", "b"], 1, lambda inbox: left.append(inbox.unfinished))
    inbox.push(token("a", 0, FinishReason.STOP))
    inbox.close()
    assert left == [["b"]] and inbox.num_waiting == 0
