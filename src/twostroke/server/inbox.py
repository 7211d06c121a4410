"""What one API call hears from the engine: the events of all its prompts and samples, in the order they came. Filled by
the client's reader, dealt with on the spot or by a task that takes; whoever leaves early aborts what is unfinished."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from twostroke.core.events import Event, TokenEvent
from twostroke.server.errors import ApiError

News = tuple[int, Event]
"""Which of the call's prompts, and what happened."""


class Inbox:
    def __init__(self, request_ids: list[str], num_samples: int, on_close: Callable[[Inbox], None]) -> None:
        self._prompt_index = {request_id: index for index, request_id in enumerate(request_ids)}
        self._unfinished = dict.fromkeys(request_ids, num_samples)
        self._waiting = set(request_ids)
        self._news: list[News] = []
        self.error: ApiError | None = None
        """What ended the call early."""
        self.name = ""
        """What the client calls the call: the answer's x-request-id."""
        self._on_news: Callable[[], None] | None = None
        self._on_close = on_close

    @property
    def unfinished(self) -> list[str]:
        """Request ids that the engine still works on."""
        return list(self._unfinished)

    @property
    def is_finished(self) -> bool:
        """Whether everything has ended and was taken from here."""
        return not self._unfinished and not self._news

    @property
    def num_unfinished_samples(self) -> int:
        return sum(self._unfinished.values())

    @property
    def num_waiting(self) -> int:
        """Requests of which nothing was heard yet."""
        return len(self._waiting)

    def push(self, event: Event) -> None:
        """Nobody is told yet: `tell` follows once all that a step brought is in."""
        request_id = event.request_id
        if self._waiting:
            self._waiting.discard(request_id)
        if isinstance(event, TokenEvent) and event.finish_reason is not None:
            self._unfinished[request_id] -= 1
            if not self._unfinished[request_id]:
                del self._unfinished[request_id]
        self._news.append((self._prompt_index[request_id], event))

    def tell(self) -> None:
        if self._on_news is not None:
            self._on_news()

    def fail(self, error: ApiError) -> None:
        """End the call with an error, which `take` raises. A second error is dropped."""
        if self.error is None:
            self.error = error
            self.tell()

    async def take(self) -> list[News]:
        """All the news there are, at least one; raises the error that ended the call."""
        taken: list[News] = []

        def take_all(news: list[News]) -> bool:
            taken.extend(news)
            return False

        await self.follow(take_all)
        return taken

    async def follow(self, deal: Callable[[list[News]], bool]) -> None:
        """Hands all news to `deal` as they are told, within the reader's own callback: a step of the engine has news
        for every stream there is, and a switch to a task for each would cost more than the news. Returns when `deal`
        says False, that it wants no more for now; raises what it raises, and the error that ended the call."""
        enough: asyncio.Future[None] = asyncio.get_running_loop().create_future()

        def on_news() -> None:
            if enough.done() or not (self._news or self.error):
                return
            news, self._news = self._news, []
            try:
                if self.error is not None:
                    raise self.error
                if not deal(news):
                    enough.set_result(None)
            except Exception as error:
                enough.set_exception(error)

        on_news()  # of what came before
        self._on_news = on_news
        try:
            await enough
        finally:
            self._on_news = None

    def close(self) -> None:
        """Abort what is unfinished; may be called twice."""
        self._waiting.clear()
        self._on_close(self)
