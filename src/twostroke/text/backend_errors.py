"""The `tokenizers` library reports bad data with plain exceptions and, from its depths, with panics that are not even
`Exception`s; here both become one sentence for the user."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from twostroke.core.errors import ModelError, TwostrokeError


@contextmanager
def backend_errors_as(sentence: str) -> Iterator[None]:
    try:
        yield
    except (TwostrokeError, KeyboardInterrupt, SystemExit, GeneratorExit, MemoryError):
        raise
    except BaseException as error:  # a panic derives from BaseException
        reason = " ".join(str(error).split())
        raise ModelError(f"{sentence}: {reason[:200]}") from None
