"""Whether a grammar can be followed, found out before its request is queued, in a process that is ended when it takes
too long: nothing that a stranger writes as a schema can hold up the server or the engine."""

from __future__ import annotations

import subprocess
import threading
from collections import OrderedDict

from twostroke.core.errors import BadRequestError, ModelError
from twostroke.core.grammar import GrammarSpec
from twostroke.text.grammar import Vocabulary, check_size
from twostroke.text.side_process import Message, ProcessEndedError, end_process, exchange, set_up_process, start_process
from twostroke.text.tokenizer import Tokenizer

COMPILE_LIMIT_S = 1.0
START_LIMIT_S = 30.0
MAX_MEMORY_BYTES = 2**30
MAX_CPU_S = 10
"""A limit for when the parent, whose clock is shorter, is gone."""
NUM_REMEMBERED = 1024


class GrammarCheck:
    """One check at a time; safe to call from several threads."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._process: subprocess.Popen[bytes] | None = None
        self._sound: OrderedDict[GrammarSpec, None] = OrderedDict()
        self._lock = threading.Lock()

    def check(self, spec: GrammarSpec) -> None:
        """Raise BadRequestError, with a sentence about "it", where the grammar cannot be followed."""
        check_size(spec)
        with self._lock:
            if spec not in self._sound:
                reply = self._ask(spec)
                if "refused" in reply:
                    raise BadRequestError(reply["refused"])
                self._sound[spec] = None
                if len(self._sound) > NUM_REMEMBERED:
                    self._sound.popitem(last=False)
            self._sound.move_to_end(spec)

    def knows(self, spec: GrammarSpec) -> bool:
        """Whether it was found sound of late. Never waits, as for a check that is under way."""
        found = spec in self._sound
        if found and self._lock.acquire(blocking=False):
            try:
                if spec in self._sound:
                    self._sound.move_to_end(spec)
            finally:
                self._lock.release()
        return found

    def close(self) -> None:
        if self._process is not None:
            end_process(self._process)
        self._process = None

    def _ask(self, spec: GrammarSpec) -> dict[str, str]:
        if self._process is None or self._process.poll() is not None:
            self._process = self._start()
        message = Message({"kind": spec.kind, "text": spec.text, "thought": spec.thought})
        try:
            return exchange(self._process, message, COMPILE_LIMIT_S).fields
        except ProcessEndedError as ended:
            self.close()
            if ended.by_clock:
                return {"refused": f"it took longer than {COMPILE_LIMIT_S:g} s to compile"}
            return {"refused": "it needs too much time or memory to compile"}

    def _start(self) -> subprocess.Popen[bytes]:
        self.close()
        vocabulary = Vocabulary.of(self._tokenizer)
        setup = {
            "tokens": [token.hex() for token in vocabulary.tokens],
            "special_ids": vocabulary.special_ids,
            "eos_ids": vocabulary.eos_ids,
            "max_memory_bytes": MAX_MEMORY_BYTES,
            "max_cpu_s": MAX_CPU_S,
        }
        try:
            process = start_process("twostroke.text.grammar_worker")
        except OSError as error:
            raise ModelError(f"the process for grammars could not be started: {error}") from None
        set_up_process(process, setup, START_LIMIT_S, "grammars")
        return process
