"""One API call on its way through the engine: its inbox, the watch over its client, its deadline. However it ends, what
the engine still works on for it is aborted."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import TYPE_CHECKING

from starlette.types import Receive

from twostroke.core.events import TokenEvent
from twostroke.core.handoff import Handoff
from twostroke.core.sequence import FinishReason
from twostroke.core.step import TokenLogprobs
from twostroke.core.timing import SequenceTiming
from twostroke.server.errors import CLIENT_GONE, ApiError
from twostroke.server.inbox import Inbox, News
from twostroke.server.messages import Ready
from twostroke.server.parsing import AnswerParser, Parts, finished_calls
from twostroke.server.phases import Timing, timing_report
from twostroke.server.replies import CompletionDetails, PromptDetails, RunningUsage, Usage
from twostroke.server.settings import Limits

if TYPE_CHECKING:
    from twostroke.server.explaining import Watch


def too_late(timeout_s: float) -> ApiError:
    message = f"the request took longer than the {timeout_s:g} s that this server allows"
    return ApiError(504, message, code="timeout")


def client_gone() -> ApiError:
    return ApiError(CLIENT_GONE, "the client went away")


class ClientWatch:
    """Whether a request's client is still there, from when its body was read."""

    def __init__(self, receive: Receive) -> None:
        self.is_gone = False
        self.on_gone: Callable[[], None] | None = None
        self._task = asyncio.create_task(self._listen(receive))

    def close(self) -> None:
        self._task.cancel()

    async def _listen(self, receive: Receive) -> None:
        while (await receive())["type"] != "http.disconnect":
            pass
        self.is_gone = True
        if self.on_gone is not None:
            self.on_gone()


class Call:
    def __init__(
        self,
        inbox: Inbox,
        watch: ClientWatch,
        deadline_s: float,
        limits: Limits,
        on_close: Callable[[ApiError | None], None],
    ) -> None:
        """It has until `deadline_s`, the limit after its request arrived. `on_close` is told what ended the call early,
        if anything did."""
        loop = asyncio.get_running_loop()
        self._inbox = inbox
        self.take, self.follow = inbox.take, inbox.follow
        self._on_close: Callable[[ApiError | None], None] | None = on_close
        self.deadline_s = deadline_s
        self.reader_timeout_s = limits.reader_timeout_s
        self._timer = loop.call_at(deadline_s, inbox.fail, too_late(limits.request_timeout_s))
        self._watch = watch
        watch.on_gone = self._client_gone

    @property
    def is_finished(self) -> bool:
        return self._inbox.is_finished

    def close(self) -> None:
        """May be called twice."""
        self._watch.close()
        self._timer.cancel()
        self._inbox.close()
        on_close, self._on_close = self._on_close, None
        if on_close is not None:
            on_close(self._inbox.error)

    def _client_gone(self) -> None:
        self._inbox.fail(client_gone())
        self._inbox.close()  # at once: its blocks are wanted by others


class Answer:
    """One sample as it comes together."""

    __slots__ = (
        *("finish_reason", "logprobs", "num_tokens", "parser", "parts", "prompt_logprobs", "stop_string", "text"),
        *("handoff", "timing"),
    )

    def __init__(self) -> None:
        self.text: list[str] = []
        self.parser: AnswerParser | None = None
        self.parts: list[Parts] = []
        """What the parser found, where there is one: an entry for each output."""
        self.logprobs: list[TokenLogprobs] = []
        self.prompt_logprobs: list[TokenLogprobs] = []
        self.finish_reason: str | None = None
        self.stop_string: str | None = None
        self.num_tokens = 0
        self.timing = SequenceTiming()
        self.handoff: Handoff | None = None

    def absorb(self, output: TokenEvent) -> None:
        self.num_tokens += len(output.token_ids)
        if output.text:
            self.text.append(output.text)
        if self.parser is not None:
            is_last = output.finish_reason is not None
            is_cut = output.finish_reason is FinishReason.LENGTH or output.stop_string is not None
            parts = self.parser.push(output.text, len(output.token_ids), is_last=is_last, is_cut=is_cut)
            parts.logprobs = output.logprobs
            self.parts.append(parts)
        if output.logprobs:
            self.logprobs.extend(output.logprobs)
        if output.prompt_logprobs:
            self.prompt_logprobs.extend(output.prompt_logprobs)
        if output.finish_reason is not None:
            self.finish_reason, self.stop_string = output.finish_reason.value, output.stop_string
            if self.finish_reason == "stop" and self.parser is not None and self.parser.finished:
                self.finish_reason = "tool_calls"
            self.handoff = output.handoff
            if output.timing is not None:
                self.timing = output.timing

    def finished_calls(self) -> list[tuple[str, str]]:
        """Of a whole answer: name and arguments of each call that came to its end. One that was cut is left out."""
        return [] if self.parser is None else finished_calls(self.parts, self.parser.finished)


class Answers:
    """All samples of a call, prompt after prompt: `choices[i]` is sample `i % n` of prompt `i // n`."""

    def __init__(self, num_prompts: int, num_samples: int) -> None:
        self.num_samples = num_samples
        self.choices = [Answer() for _ in range(num_prompts * num_samples)]
        self.watch: Watch | None = None
        """Told of every answer that ends."""

    def absorb(self, prompt_index: int, output: TokenEvent) -> int:
        """Take an output in. Returns the choice that it belongs to."""
        index = prompt_index * self.num_samples + output.sample_index
        self.choices[index].absorb(output)
        if output.finish_reason is not None and self.watch is not None:
            self.watch.ended(self, index)
        return index

    async def collect(self, call: Call) -> None:
        """Until all are finished."""

        def absorb_all(news: list[News]) -> bool:
            for prompt_index, event in news:
                if isinstance(event, TokenEvent):
                    self.absorb(prompt_index, event)
            return not call.is_finished

        await call.follow(absorb_all)

    def running_usage(self, prompt_tokens: int) -> RunningUsage:
        """So far; what was cached is only known of answers that have ended."""
        output_tokens = sum(answer.num_tokens for answer in self.choices)
        return RunningUsage(prompt_tokens, output_tokens, prompt_tokens + output_tokens)

    def usage(self) -> Usage:
        firsts = self.choices[:: self.num_samples]
        prompt_tokens = sum(answer.timing.prompt_tokens for answer in firsts)
        output_tokens = sum(len(answer.timing.token_times_s) for answer in self.choices)
        cached = sum(answer.timing.cached_tokens for answer in firsts)
        thought = sum(answer.parser.reasoning_tokens for answer in self.choices if answer.parser is not None)
        details = CompletionDetails(thought)
        return Usage(prompt_tokens, output_tokens, prompt_tokens + output_tokens, PromptDetails(cached), details)

    def timing(self, index: int, facts: Ready) -> Timing:
        explanation = None if self.watch is None else self.watch.explanation(index)
        return timing_report(self.choices[index].timing, facts, explanation)

    def own_timing(self, index: int, facts: Ready) -> Timing | None:
        """A choice says its own where there are several; a single one's is the answer's."""
        return self.timing(index, facts) if len(self.choices) > 1 else None
