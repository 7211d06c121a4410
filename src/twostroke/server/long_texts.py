"""Long prompts to token ids, in processes beside this one: two lanes, so that a book does not hold up a chapter, and
one text at a time in each, which bounds what they take of the machine. A client that leaves ends its text's work."""

from __future__ import annotations

import asyncio
from array import array
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor

from twostroke.core.errors import BadRequestError, ModelError
from twostroke.server.errors import ApiError
from twostroke.server.sampling import as_api_error
from twostroke.text.tokenizer import Tokenizer
from twostroke.text.tokenizer_process import TokenizerProcess

SHORT_BYTES = 64 * 1024
"""Up to here a text is encoded in this process, in less than a tenth of a second and without Python's lock."""
VERY_LONG_BYTES = 2**20


class LongTexts:
    def __init__(self, tokenizer: Tokenizer) -> None:
        self._long, self._very_long = _Lane(tokenizer), _Lane(tokenizer)

    async def encode(
        self, texts: Sequence[bytes], *, is_guarded: bool, max_tokens: int | None
    ) -> list[tuple[int, array[int]]]:
        """As `TokenizerProcess.encode` has it."""
        lane = self._long if sum(map(len, texts)) <= VERY_LONG_BYTES else self._very_long
        return await lane.encode(texts, is_guarded, max_tokens)

    def close(self) -> None:
        self._long.close()
        self._very_long.close()


class _Lane:
    def __init__(self, tokenizer: Tokenizer) -> None:
        self._process = TokenizerProcess(tokenizer)
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="long texts")
        self._turn = asyncio.Lock()

    async def encode(
        self, texts: Sequence[bytes], is_guarded: bool, max_tokens: int | None
    ) -> list[tuple[int, array[int]]]:
        async with self._turn:
            work = asyncio.get_running_loop().run_in_executor(
                self._thread, lambda: self._process.encode(texts, is_guarded=is_guarded, max_tokens=max_tokens)
            )
            try:
                return await asyncio.shield(work)
            except asyncio.CancelledError:
                self._process.stop()
                await asyncio.wait([work])  # it sees at once that nobody answers any more
                raise
            except BadRequestError as error:
                raise as_api_error(error) from None
            except ModelError as error:
                raise ApiError(503, str(error), code="tokenizer_unavailable", headers={"Retry-After": "1"}) from None

    def close(self) -> None:
        self._process.stop()
        self._thread.shutdown(wait=True, cancel_futures=True)
        self._process.close()
