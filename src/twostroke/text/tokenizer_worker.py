"""Cuts long texts into tokens in a process of its own: it takes a second and some hundred megabytes for each megabyte
of text, and whoever waits for something else should feel neither. Reads requests from stdin (first the tokenizer) and
answers each, as `side_process.py` has it."""

from __future__ import annotations

import ctypes
import os
from array import array
from contextlib import suppress
from functools import partial

from tokenizers import Tokenizer as Backend

from twostroke.text.side_process import Message, answer_requests

NICENESS = 5
"""Tokens that are being written go before texts that are yet to be read."""
TRIM_BYTES = 256 * 1024
"""After a text this long, what the library no longer needs is given back to the system."""


class Backends:
    def __init__(self, serialised: list[bytes]) -> None:
        """The tokenizer's own and its guarded copy; each is built when it is first asked for."""
        self._serialised = serialised
        self._built: dict[bool, Backend] = {}

    def get(self, is_guarded: bool) -> Backend:
        if is_guarded not in self._built:
            self._built[is_guarded] = Backend.from_str(self._serialised[is_guarded].decode())
        return self._built[is_guarded]


def answer(backends: Backends, message: Message) -> Message:
    """How many tokens each text is, and which; none is looked at behind one that is too many."""
    max_tokens = message.fields["max_tokens"]
    backend = backends.get(message.fields["is_guarded"])
    counts: list[int] = []
    ids: list[bytes] = []
    for text in message.texts:
        encoding = backend.encode_batch_fast([text.decode()], add_special_tokens=False)[0]
        counts.append(len(encoding))
        if max_tokens is not None and len(encoding) > max_tokens:
            ids.append(b"")
            break
        ids.append(array("I", encoding.ids).tobytes())
    return Message({"counts": counts}, ids)


def _trim(num_bytes: int) -> None:
    if num_bytes >= TRIM_BYTES:
        with suppress(OSError, AttributeError):  # glibc alone has it
            ctypes.CDLL(None).malloc_trim(0)


def main() -> None:
    os.environ["TOKENIZERS_PARALLELISM"] = "false"  # one core at most, whatever comes
    if hasattr(os, "nice"):
        os.nice(NICENESS)
    answer_requests(lambda first: partial(answer, Backends(list(first.texts))), tidy=_trim)


if __name__ == "__main__":
    main()
