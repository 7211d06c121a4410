"""Text to token ids in front of the engine, off the event loop and without Python's lock: rendering a chat template or
tokenizing a prompt takes longer than a token may wait. What cannot fit into the context is refused by its length."""

from __future__ import annotations

import asyncio
import os
from array import array
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from queue import SimpleQueue
from typing import Any, NamedTuple, TypeVar

import msgspec

from twostroke.core.errors import BadRequestError, ModelError
from twostroke.server.errors import ApiError, bad_request
from twostroke.server.long_texts import SHORT_BYTES, LongTexts
from twostroke.server.sampling import as_api_error, beyond_context, beyond_model
from twostroke.text.chat import ChatEncoder, is_faithful, not_faithful, spellings
from twostroke.text.chat_template import Rendering
from twostroke.text.tokenizer import Tokenizer, utf8_of

NUM_THREADS = 4
NUM_TEMPLATES = 2
"""Template processes: one render at a time each."""
JSON_SLICE = 32 * 1024
"""Token ids that are written as JSON at once, a millisecond's worth."""

Result = TypeVar("Result")


class Room(NamedTuple):
    """What a prompt has to fit into, and the field that it came in."""

    max_context: int
    param: str
    is_answered: bool = True
    """A token at least is left for the answer."""

    @property
    def most(self) -> int:
        """Tokens of a prompt."""
        return self.max_context - self.is_answered

    def too_long(self, num_tokens: str) -> ApiError:
        if self.is_answered:
            return beyond_context(num_tokens, self.max_context, self.param)
        return beyond_model(num_tokens, self.max_context, self.param)


class PromptEncoder:
    def __init__(self, tokenizer: Tokenizer) -> None:
        """Makes what the first odd request would otherwise wait for, in part of a second."""
        # Threads of its own would take the engine's cores, and are not safe beside processes that are forked.
        os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
        self.tokenizer = tokenizer
        _ = tokenizer.guarded, tokenizer.fewest
        self._threads = ThreadPoolExecutor(NUM_THREADS, thread_name_prefix="prompts")
        self._long_texts = LongTexts(tokenizer)
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
        room: Room | None = None,
    ) -> Sequence[int]:
        """Without `room` however many tokens there are, as a `Sequence`; with it a tuple that may go to the engine."""
        if self.tokenizer.chat_template is None:
            raise bad_request("this model has no chat template, so it cannot chat: use /v1/completions", "messages")
        rendering = await self.beside(lambda: self._render(messages, tools, options or {}))
        if room is not None:
            await self.beside(lambda: self._refuse_too_long([rendering.text], room, is_framed=False))
        for text, is_guarded in spellings(rendering, self.tokenizer):
            (ids,) = await self._encode([text], room, is_guarded=is_guarded)
            if await self.beside(lambda ids=ids: is_faithful(ids, rendering, self.tokenizer)):  # type: ignore[misc]
                return ids
        raise as_api_error(not_faithful())

    async def text(self, text: str, *, add_special_tokens: bool = True, room: Room | None = None) -> Sequence[int]:
        (ids,) = await self.texts([text], add_special_tokens=add_special_tokens, room=room)
        return ids

    async def texts(
        self,
        texts: Sequence[str],
        *,
        add_special_tokens: bool = True,
        parse_special: bool = True,
        room: Room | None = None,
    ) -> list[Sequence[int]]:
        """All texts of one request, together."""
        if room is not None:
            await self.beside(lambda: self._refuse_too_long(texts, room, is_framed=add_special_tokens))
        return await self._encode(texts, room, is_guarded=not parse_special, is_framed=add_special_tokens)

    async def decode(self, token_ids: Sequence[int], *, skip_special_tokens: bool) -> str:
        return await self.beside(lambda: self.tokenizer.decode(token_ids, skip_special_tokens=skip_special_tokens))

    async def as_json(self, token_ids: Sequence[int]) -> bytes:
        return await self.beside(lambda: _json_list(token_ids, list))

    async def token_texts(self, token_ids: Sequence[int]) -> bytes:
        """Each token on its own, as JSON."""
        text = self.tokenizer.token_text
        return await self.beside(lambda: _json_list(token_ids, lambda part: [text(token_id) for token_id in part]))

    def close(self) -> None:
        self._threads.shutdown(wait=False, cancel_futures=True)
        self._long_texts.close()
        while not self._chats.empty():
            self._chats.get().close()

    def _render(
        self,
        messages: Sequence[Mapping[str, Any]],
        tools: Sequence[Mapping[str, Any]] | None,
        options: Mapping[str, Any],
    ) -> Rendering:
        encoder = self._chats.get()
        try:
            return encoder.render(messages, tools=tools, **options)
        finally:
            self._chats.put(encoder)

    def _refuse_too_long(self, texts: Sequence[str], room: Room, *, is_framed: bool) -> None:
        for text in texts:
            if len(text) < room.max_context:
                continue  # most are: nothing need be counted
            fewest = self.tokenizer.fewest.of(text, is_framed=is_framed)
            if fewest > room.most:
                raise room.too_long(f"at least {fewest}")

    async def _encode(
        self, texts: Sequence[str], room: Room | None, *, is_guarded: bool = False, is_framed: bool = False
    ) -> list[Sequence[int]]:
        frame = (self.tokenizer.prefix_ids, self.tokenizer.suffix_ids) if is_framed else ((), ())
        max_tokens = None if room is None else max(0, room.most - len(frame[0]) - len(frame[1]))

        def encode_short() -> list[tuple[int, Sequence[int]]] | list[bytes]:
            raws = [utf8_of(text) for text in texts]
            if sum(map(len, raws)) > SHORT_BYTES:
                return raws
            encode = self.tokenizer.encode_unlocked
            return [encode(text, is_guarded=is_guarded, max_tokens=max_tokens) for text in texts]

        found: Any = await self.beside(encode_short)
        if found and isinstance(found[0], bytes):
            found = await self._long_texts.encode(found, is_guarded=is_guarded, max_tokens=max_tokens)

        def finish() -> list[Sequence[int]]:
            finished: list[Sequence[int]] = []
            for count, ids in found:
                if room is not None and len(ids) < count:
                    num_tokens = count + len(frame[0]) + len(frame[1])
                    raise room.too_long(str(num_tokens))
                own = self.tokenizer.guarded.translate(ids) if is_guarded else ids
                framed = array("I", frame[0]) + array("I", own) + array("I", frame[1])
                finished.append(framed if room is None else tuple(framed))
            return finished

        return await self.beside(finish)

    async def beside(self, work: Callable[[], Result]) -> Result:
        """Off the event loop; what is wrong with a prompt becomes a 400."""
        try:
            return await asyncio.get_running_loop().run_in_executor(self._threads, work)
        except RecursionError:
            raise bad_request("messages are nested too deeply", "messages") from None
        except BadRequestError as error:
            raise as_api_error(error) from None
        except ModelError as error:  # a template that fails on these messages: others it may render
            raise bad_request(str(error), "messages") from None


def _json_list(token_ids: Sequence[int], words: Callable[[Sequence[int]], list[Any]]) -> bytes:
    """A list of any length, a slice at a time: nobody waits for the whole of it."""
    starts = range(0, len(token_ids), JSON_SLICE)
    slices = [msgspec.json.encode(words(token_ids[start : start + JSON_SLICE]))[1:-1] for start in starts]
    return b"[" + b",".join(slices) + b"]"
