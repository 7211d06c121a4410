"""A text is the same tokens wherever it is encoded; other threads run meanwhile, and what it took is given back."""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from twostroke.core.errors import BadRequestError
from twostroke.text import tokenizer_process
from twostroke.text.tokenizer import Tokenizer
from twostroke.text.tokenizer_process import TokenizerProcess

from .sample_strings import SAMPLES

LONG = "The quick brown fox jumps over the lazy dog, number 12345.\n" * 4000


@pytest.fixture(scope="module")
def process(smollm2_tokenizer: Tokenizer) -> Iterator[TokenizerProcess]:
    process = TokenizerProcess(smollm2_tokenizer)
    yield process
    process.close()


def test_other_threads_run_while_a_text_is_encoded(smollm2_tokenizer: Tokenizer, monkeypatch: Any) -> None:
    """A thread that only counts: of a library that keeps Python's lock it would see next to nothing."""
    monkeypatch.setenv("TOKENIZERS_PARALLELISM", "false")
    text, turns, done = LONG[:200_000], [], threading.Event()

    def count() -> None:
        while not done.is_set():
            turns.append(0)
            time.sleep(0)

    def turns_during(encode: Any) -> int:
        before = len(turns)
        encode()
        return len(turns) - before

    thread = threading.Thread(target=count)
    thread.start()
    try:
        free = max(turns_during(lambda: smollm2_tokenizer.encode_unlocked(text)) for _ in range(3))
        locked = min(turns_during(lambda: smollm2_tokenizer.encode(text)) for _ in range(3))
    finally:
        done.set()
        thread.join()
    assert free > 500 and free > 10 * locked


def test_every_way_gives_the_same_tokens(smollm2_tokenizer: Tokenizer, process: TokenizerProcess) -> None:
    texts = [*SAMPLES, LONG[:100_000], "<|im_end|> as text"]
    for is_guarded in (False, True):
        found = process.encode([text.encode() for text in texts], is_guarded=is_guarded)
        for text, (count, ids) in zip(texts, found, strict=True):
            expected = smollm2_tokenizer.encode(text, add_special_tokens=False, parse_special=not is_guarded)
            assert list(ids) == expected and count == len(expected)
            assert smollm2_tokenizer.encode_unlocked(text, is_guarded=is_guarded) == (count, expected)


def test_too_many_tokens_are_counted_and_not_sent(smollm2_tokenizer: Tokenizer, process: TokenizerProcess) -> None:
    ((count, ids),) = process.encode([LONG[:9000].encode(), b"never looked at"], max_tokens=1000)
    assert count > 1000 and not ids
    assert smollm2_tokenizer.encode_unlocked(LONG[:9000], max_tokens=1000) == (count, [])


def test_it_can_be_stopped_and_goes_on_with_the_next(process: TokenizerProcess) -> None:
    process.encode([b"warm"])
    text, is_stopped = (LONG * 30).encode(), False
    for _ in range(10):  # on a busy machine it may be stopped before it begins
        stopper = threading.Timer(0.2, process.stop)
        stopper.start()
        try:
            process.encode([text])
        except BadRequestError as error:
            is_stopped = "bytes takes too much" in str(error)
        stopper.join()
        if is_stopped:
            break
    assert is_stopped
    assert process.encode([b"a"])[0][0] == 1


def test_a_text_that_takes_too_long_is_refused(process: TokenizerProcess, monkeypatch: pytest.MonkeyPatch) -> None:
    process.encode([b"warm"])
    monkeypatch.setattr(tokenizer_process, "ENCODE_LIMIT_S", 0.2)
    with pytest.raises(BadRequestError, match="too much time"):
        process.encode([(LONG * 30).encode()])


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_memory_is_given_back(process: TokenizerProcess) -> None:
    def resident_bytes() -> int:
        pid = process._process.pid  # type: ignore[union-attr]
        lines = Path(f"/proc/{pid}/status").read_text().splitlines()
        return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("VmRSS"))

    process.encode([b"warm"])
    before_bytes = resident_bytes()
    process.encode([(LONG * 4).encode()])  # of 1 MB: some 100 MB while it lasts
    process.encode([b"after"])
    assert resident_bytes() - before_bytes < 40e6
