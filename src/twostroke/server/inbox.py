"""What one API call hears from the engine: the events of all its prompts and samples, in the order they came. Filled by
the client's reader, emptied by the route; whoever leaves early aborts what is unfinished."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable

from twostroke.server.errors import ApiError
from twostroke.server.messages import Output, Progress

News = tuple[int, Output | Progress]
"""Which of the call's prompts, and what happened."""


class Inbox:
    def __init__(self, request_ids: list[str], num_samples: int, on_close: Callable[[Inbox], None]) -> None:
        self._prompt_index = {request_id: index for index, request_id in enumerate(request_ids)}
        self._unfinished = dict.fromkeys(request_ids, num_samples)
        self._waiting = set(request_ids)
        self._news: deque[News] = deque()
        self.error: ApiError | None = None
        """What ended the call early."""
        self._waker: asyncio.Future[None] | None = None
        self._on_close = on_close

    @property
    def unfinished(self) -> list[str]:
        """Request ids that the engine still works on."""
        return list(self._unfinished)

    @property
    def is_finished(self) -> bool:
        return not self._unfinished

    @property
    def num_unfinished_samples(self) -> int:
        return sum(self._unfinished.values())

    @property
    def num_waiting(self) -> int:
        """Requests of which nothing was heard yet."""
        return len(self._waiting)

    def push(self, event: Output | Progress) -> None:
        request_id = event.request_id
        self._waiting.discard(request_id)
        if isinstance(event, Output) and event.finish_reason is not None:
            self._unfinished[request_id] -= 1
            if not self._unfinished[request_id]:
                del self._unfinished[request_id]
        self._news.append((self._prompt_index[request_id], event))
        self._wake()

    def fail(self, error: ApiError) -> None:
        """Whoever takes next gets this error; the first one stays."""
        if self.error is None:
            self.error = error
            self._wake()

    async def take(self) -> list[News]:
        """All the news there are, at least one; raises the error that ended the call."""
        while not self._news and self.error is None:
            self._waker = asyncio.get_running_loop().create_future()
            await self._waker
        if self.error is not None:
            raise self.error
        news = list(self._news)
        self._news.clear()
        return news

    def close(self) -> None:
        """Abort what is unfinished; may be called twice."""
        self._waiting.clear()
        self._on_close(self)

    def _wake(self) -> None:
        if self._waker is not None and not self._waker.done():
            self._waker.set_result(None)
