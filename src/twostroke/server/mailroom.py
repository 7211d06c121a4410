"""Who waits for what of the engine: an inbox a call, by the ids of its requests. Deals out what a step brought. Knows
neither sockets nor processes."""

from __future__ import annotations

from collections.abc import Callable
from itertools import chain, count
from typing import TYPE_CHECKING

from twostroke.core.errors import BadRequestError
from twostroke.core.events import PrefillProgress, VectorEvent
from twostroke.core.sequence import FinishReason
from twostroke.server.errors import ApiError, cannot_keep_promise, failed_answer
from twostroke.server.inbox import Inbox
from twostroke.server.messages import Refused, StepOutputs
from twostroke.server.metrics import Metrics
from twostroke.server.sampling import as_api_error

if TYPE_CHECKING:
    from twostroke.server.tracing import Tracing

MAX_LEFT = 1024


class Mailroom:
    def __init__(self, metrics: Metrics, tracing: Tracing | None) -> None:
        self._metrics = metrics
        self._tracing = tracing
        self._inboxes: dict[str, Inbox] = {}
        self._numbers = count()
        self._left: dict[str, str] = {}
        """Names of the latest requests that were given up: the engine may be yet to tell that they came."""

    @property
    def num_waiting(self) -> int:
        """Requests handed over of which nothing was heard yet."""
        return sum(inbox.num_waiting for inbox in set(self._inboxes.values()))

    @property
    def num_in_flight(self) -> int:
        return len(self._inboxes)

    def names(self) -> set[str]:
        """Of the calls in flight."""
        return {inbox.name for inbox in self._inboxes.values()}

    def name_of(self, request_id: str) -> str:
        inbox = self._inboxes.get(request_id)
        return self._left.get(request_id, "") if inbox is None else inbox.name

    def open(self, num_prompts: int, num_samples: int, on_close: Callable[[Inbox], None]) -> Inbox:
        """For a call whose requests are yet to be handed over; then `expect` it."""
        return Inbox([f"{next(self._numbers)}" for _ in range(num_prompts)], num_samples, on_close)

    def expect(self, inbox: Inbox) -> None:
        self._inboxes.update(dict.fromkeys(inbox.unfinished, inbox))

    def forget(self, inbox: Inbox) -> list[str]:
        """Its requests that are not finished, if there are any."""
        left = [request_id for request_id in inbox.unfinished if self._inboxes.pop(request_id, None) is not None]
        self._left.update(dict.fromkeys(left, inbox.name))
        while len(self._left) > MAX_LEFT:
            del self._left[next(iter(self._left))]
        return left

    def deal_out(self, step: StepOutputs) -> None:
        """Each call is told once, of all that the step brought it."""
        inboxes, told = self._inboxes, dict[Inbox, None]()
        for news in chain[PrefillProgress | VectorEvent](step.progress, step.vectors):
            if (inbox := inboxes.get(news.request_id)) is not None:
                inbox.push(news)
                told[inbox] = None
        for output in step.outputs:
            if output.finish_reason is not None:
                self._metrics.finished(output)
                if self._tracing is not None:
                    self._tracing.finished(output)
            inbox = inboxes.get(output.request_id)
            if inbox is None:
                continue
            if output.finish_reason is FinishReason.ERROR:
                inbox.fail(failed_answer(output.error or "the request failed"))
            inbox.push(output)
            told[inbox] = None
            if output.finish_reason is not None and output.request_id not in inbox.unfinished:
                del inboxes[output.request_id]
        for inbox in told:
            inbox.tell()

    def refuse(self, message: Refused) -> None:
        if self._tracing is not None:
            self._tracing.refused(message.request_id)
        inbox = self._inboxes.pop(message.request_id, None)
        if message.retry_after_s is not None:
            self._metrics.rejected.labels("promise").inc()
        if inbox is not None:
            inbox.fail(_refusal(message))

    def end_all(self, error: ApiError) -> None:
        """Every call in flight ends with this error, and is closed."""
        for inbox in set(self._inboxes.values()):
            inbox.fail(error)
            inbox.close()

    def fail_all(self, error: ApiError) -> None:
        """What they wait for will not come: the engine is gone."""
        inboxes, self._inboxes = set(self._inboxes.values()), {}
        self._metrics.failed(sum(inbox.num_unfinished_samples for inbox in inboxes))
        for inbox in inboxes:
            inbox.fail(error)


def _refusal(message: Refused) -> ApiError:
    if message.retry_after_s is not None:
        return cannot_keep_promise(message.message, message.retry_after_s)
    if message.is_bad_request:
        return as_api_error(BadRequestError(message.message))
    return ApiError(500, message.message, code="engine_error")
