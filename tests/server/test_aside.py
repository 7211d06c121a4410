"""What takes long to word is worded aside, with the same bytes, while the event loop goes on."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable

from twostroke.server import replies
from twostroke.server.aside import Aside


class Writer:
    """An answer of many choices, each with logprobs."""

    def __init__(self, num_choices: int, num_tokens: int) -> None:
        self._num_choices, self._num_tokens = num_choices, num_tokens

    def whole(self) -> replies.Chunk:
        choices = []
        for index in range(self._num_choices):
            tokens = [f"token {number}" for number in range(self._num_tokens)]
            top = [{other: -0.5 * number for number, other in enumerate(tokens[:64])} for _ in tokens]
            logprobs = replies.CompletionLogprobs(tokens, [-0.25] * len(tokens), top, list(range(len(tokens))))  # type: ignore[arg-type]
            choices.append(replies.CompletionChoice(index, "text", "stop", logprobs))
        return replies.Chunk("cmpl-1", "text_completion", 1, "small", choices)


def longest_gap_s(work: Callable[[Aside], object]) -> float:
    """Between two rounds of the loop, while something is worded."""

    async def scenario() -> float:
        aside, longest_s = Aside(), 0.0
        working = asyncio.ensure_future(work(aside))  # type: ignore[arg-type]
        seen_s = time.perf_counter()
        while not working.done():
            await asyncio.sleep(0.001)
            now_s = time.perf_counter()
            longest_s, seen_s = max(longest_s, now_s - seen_s), now_s
        aside.close()
        return longest_s

    return asyncio.run(scenario())


def test_it_is_the_same_answer() -> None:
    writer, aside = Writer(3, 5), Aside()
    in_parts = asyncio.run(aside.run(lambda: replies.encode_in_parts(writer.whole())))
    assert in_parts == replies.encode(writer.whole())
    assert replies.encode_in_parts(writer.whole().choices[0]) == replies.encode(writer.whole().choices[0])
    aside.close()


def test_the_loop_goes_on() -> None:
    """It would be kept for all of it otherwise, some seconds' tenths; the best of many, as others use this machine."""
    writer = Writer(16, 300)
    began_s = time.thread_time()
    replies.encode(writer.whole())
    on_the_loop_s = time.thread_time() - began_s
    gaps_s: list[float] = []
    while not gaps_s or min(gaps_s) >= 0.5 * on_the_loop_s:
        assert len(gaps_s) < 20, f"the loop was kept for {gaps_s} s each time, and for {on_the_loop_s} s by all of it"
        gaps_s.append(longest_gap_s(lambda aside: aside.run(lambda: replies.encode_in_parts(writer.whole()))))
