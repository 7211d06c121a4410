"""A thread for what takes long to word, such as the logprobs of a whole prompt: the event loop goes on meanwhile. One
thread, because each that works makes the loop wait for Python's lock."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Protocol, TypeVar

import msgspec

from twostroke.core.sampling_params import SamplingParams
from twostroke.server import replies

Result = TypeVar("Result")


class WholeWriter(Protocol):
    def whole(self) -> replies.ChatReply | replies.CompletionReply: ...


class Aside:
    def __init__(self) -> None:
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="aside")

    async def run(self, work: Callable[[], Result]) -> Result:
        return await asyncio.get_running_loop().run_in_executor(self._thread, work)

    async def whole(self, writer: WholeWriter, sampling: SamplingParams) -> bytes:
        """An answer at once. Without logprobs it is worded sooner than a thread would begin."""
        if sampling.logprobs is None:
            return replies.encode(writer.whole())
        return await self.run(lambda: _encoded_by_choice(writer.whole()))

    def close(self) -> None:
        self._thread.shutdown(wait=False, cancel_futures=True)


def _encoded_by_choice(reply: replies.ChatReply | replies.CompletionReply) -> bytes:
    """The same as encoded at once, but the encoder, which keeps the lock, is left after every choice."""
    choices = [msgspec.Raw(replies.encode(choice)) for choice in reply.choices]
    return replies.encode(msgspec.structs.replace(reply, choices=choices))
