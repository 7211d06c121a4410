"""The harness's side of the protocol: one long-lived process an engine, asked a question at a time. Between its turns
it is stopped by a signal, so that a waiting engine can neither spin nor tidy up on cores that another one is measured
on."""

from __future__ import annotations

import contextlib
import json
import os
import queue
import signal
import subprocess
import threading
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import IO, Any

from bench.peers.metrics import Output

ANSWER_LIMIT_S = 900.0
ENDING_LIMIT_S = 5.0


class WorkerError(Exception):
    """One sentence on what went wrong in an engine's process."""


class Worker:
    def __init__(self, name: str, command: Sequence[str], log: Path, environment: Mapping[str, str]) -> None:
        self.name = name
        self.log = log
        self._lines: queue.Queue[str | None] = queue.Queue()
        with log.open("wb") as file:
            # A session of its own: signals reach the children that the engine starts, and no one else.
            self._process = subprocess.Popen(
                command,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=file,
                env=dict(environment),
                text=True,
                encoding="utf-8",
                start_new_session=True,
            )
        assert self._process.stdout is not None
        self._reader = threading.Thread(target=self._read, args=(self._process.stdout,), daemon=True)
        self._reader.start()

    def _read(self, answers: IO[str]) -> None:
        for line in answers:
            self._lines.put(line)
        self._lines.put(None)

    def ask(self, limit_s: float = ANSWER_LIMIT_S, **request: Any) -> dict[str, Any]:
        assert self._process.stdin is not None
        try:
            self._process.stdin.write(json.dumps(request) + "\n")
            self._process.stdin.flush()
            line = self._lines.get(timeout=limit_s)
        except queue.Empty:
            self.end()
            raise WorkerError(f"{self.name} gave no answer to {request['op']!r} in {limit_s:.0f} s") from None
        except OSError:
            line = None
        if line is None:
            self._lines.put(None)  # whoever asks next must learn it too
            raise WorkerError(f"{self.name} ended during {request['op']!r}: {self._last_words()}")
        answer: dict[str, Any] = json.loads(line)
        if "error" in answer:
            raise WorkerError(f"{self.name}: {answer['error']}")
        return answer

    def load(self, model: Path, threads: int, options: Mapping[str, Any]) -> dict[str, Any]:
        return self.ask(op="load", model=str(model), threads=threads, options=dict(options))

    def generate(self, prompts: Sequence[Sequence[int]], max_tokens: int) -> list[Output]:
        answer = self.ask(op="generate", prompts=[list(prompt) for prompt in prompts], max_tokens=max_tokens)
        return [Output(tuple(out["token_ids"]), tuple(out["token_times_s"])) for out in answer["outputs"]]

    def score(self, token_ids: Sequence[int]) -> list[tuple[float, float]]:
        answer = self.ask(op="score", token_ids=list(token_ids))
        return [(chosen, best) for chosen, best in answer["scores"]]

    def embed(self, texts: Sequence[str]) -> tuple[float, list[list[float]]]:
        """The seconds it took in the engine's process, and the vectors."""
        answer = self.ask(op="embed", texts=list(texts))
        return float(answer["seconds"]), answer["vectors"]

    def pause(self) -> None:
        self._signal(signal.SIGSTOP)

    def resume(self) -> None:
        self._signal(signal.SIGCONT)

    def end(self) -> None:
        """Kill it: an engine that hangs must not keep the run from going on."""
        self._signal(signal.SIGKILL)
        try:
            self._process.wait(timeout=ENDING_LIMIT_S)
        except subprocess.TimeoutExpired:
            raise WorkerError(f"{self.name} (process {self._process.pid}) does not end") from None
        self._reader.join(timeout=ENDING_LIMIT_S)
        for pipe in (self._process.stdin, self._process.stdout):
            if pipe is not None:
                with contextlib.suppress(OSError):  # what was not yet sent to it goes nowhere
                    pipe.close()

    def _signal(self, number: int) -> None:
        if self._process.poll() is None:
            try:
                os.killpg(self._process.pid, number)
            except ProcessLookupError:
                return

    def _last_words(self) -> str:
        lines = self.log.read_text(encoding="utf-8", errors="replace").splitlines()
        words = [line.strip() for line in lines if line.strip()]
        return f"{words[-1] if words else 'it said nothing'} (see {self.log})"

    def __enter__(self) -> Worker:
        return self

    def __exit__(self, *failure: object) -> None:
        self.end()
