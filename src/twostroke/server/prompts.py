"""Text to token ids in front of the engine, off the event loop: tokenizing a long prompt or rendering a chat template
takes longer than a token may wait."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from queue import SimpleQueue
from typing import Any, TypeVar

from twostroke.core.errors import BadRequestError, ModelError
from twostroke.server.errors import bad_request
from twostroke.server.sampling import as_api_error
from twostroke.text.chat import ChatEncoder
from twostroke.text.tokenizer import Tokenizer

NUM_THREADS = 4
NUM_TEMPLATES = 2
"""Template processes: one render at a time each."""

Result = TypeVar("Result")


class PromptEncoder:
    def __init__(self, tokenizer: Tokenizer) -> None:
        self.tokenizer = tokenizer
        self._threads = ThreadPoolExecutor(NUM_THREADS, thread_name_prefix="prompts")
        self._chats: SimpleQueue[ChatEncoder] = SimpleQueue()
        if tokenizer.chat_template is not None:
            for _ in range(NUM_TEMPLATES):
                self._chats.put(ChatEncoder(tokenizer))

    async def chat(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        options: Mapping[str, Any] | None = None,
    ) -> tuple[int, ...]:
        if self.tokenizer.chat_template is None:
            raise bad_request("this model has no chat template, so it cannot chat: use /v1/completions", "messages")
        return await self._run(lambda: self._chat(messages, tools, options or {}))

    async def text(self, text: str, *, add_special_tokens: bool = True) -> tuple[int, ...]:
        return await self._run(lambda: tuple(self.tokenizer.encode(text, add_special_tokens=add_special_tokens)))

    async def decode(self, token_ids: Sequence[int], *, skip_special_tokens: bool) -> str:
        return await self._run(lambda: self.tokenizer.decode(token_ids, skip_special_tokens=skip_special_tokens))

    def close(self) -> None:
        self._threads.shutdown(wait=False, cancel_futures=True)
        while not self._chats.empty():
            self._chats.get().close()

    def _chat(
        self,
        messages: Sequence[Mapping[str, Any]],
        tools: Sequence[Mapping[str, Any]] | None,
        options: Mapping[str, Any],
    ) -> tuple[int, ...]:
        encoder = self._chats.get()
        try:
            return tuple(encoder.encode(messages, tools=tools, **options))
        finally:
            self._chats.put(encoder)

    async def _run(self, work: Callable[[], Result]) -> Result:
        try:
            return await asyncio.get_running_loop().run_in_executor(self._threads, work)
        except RecursionError:
            raise bad_request("messages are nested too deeply", "messages") from None
        except BadRequestError as error:
            raise as_api_error(error) from None
        except ModelError as error:  # a template that fails on these messages: others it may render
            raise bad_request(str(error), "messages") from None
