"""Long texts to token ids in a process beside this one (`tokenizer_worker.py`), which can be stopped in the middle and
takes its memory along."""

from __future__ import annotations

import subprocess
import threading
from array import array
from collections.abc import Sequence

from twostroke.core.errors import BadRequestError, ModelError
from twostroke.text.side_process import Message, ProcessEndedError, end_process, exchange, start_process
from twostroke.text.tokenizer import Tokenizer

START_LIMIT_S = 60.0
ENCODE_LIMIT_S = 600.0
MAX_CPU_S = 300
MAX_MEMORY_BYTES = 2 * 2**30


class TokenizerProcess:
    """One text, or one list of them, at a time. The process is started when the first comes."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._lock = threading.Lock()
        self._process: subprocess.Popen[bytes] | None = None

    def encode(
        self, texts: Sequence[bytes], *, is_guarded: bool = False, max_tokens: int | None = None
    ) -> list[tuple[int, array[int]]]:
        """Of each text in UTF-8, how many tokens it is, and their ids; of one that has more than `max_tokens` none, and
        of those behind it nothing."""
        request = Message({"is_guarded": is_guarded, "max_tokens": max_tokens}, texts)
        with self._lock:
            try:
                process = self._process
                if process is None or process.poll() is not None:
                    process = self._start()
                reply = exchange(process, request, ENCODE_LIMIT_S)
            except ProcessEndedError as ended:
                self.close()  # and wait for its end, so that the next text does not meet it
                reason = "time" if ended.by_clock else "time or memory"
                num_bytes = sum(map(len, texts))
                raise BadRequestError(f"a text of {num_bytes} bytes takes too much {reason} to be read here") from None
        results = []
        for count, raw in zip(reply.fields["counts"], reply.texts, strict=True):
            ids = array("I")
            ids.frombytes(raw)
            results.append((count, ids))
        return results

    def stop(self) -> None:
        """End what is under way, if anything is; may be called from another thread. The next text starts anew."""
        process = self._process
        if process is not None:
            process.kill()

    def close(self) -> None:
        process, self._process = self._process, None
        if process is not None:
            end_process(process)

    def _start(self) -> subprocess.Popen[bytes]:
        self.close()
        try:
            process = self._process = start_process("twostroke.text.tokenizer_worker")
        except OSError as error:
            raise ModelError(f"the process for long texts could not be started: {error}") from None
        limits = {"max_memory_bytes": MAX_MEMORY_BYTES, "max_cpu_s": MAX_CPU_S}
        tokenizers = [self._tokenizer.serialised.encode(), self._tokenizer.guarded.serialised.encode()]
        exchange(process, Message(limits, tokenizers), START_LIMIT_S)
        return process
