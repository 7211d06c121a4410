"""The worker's side of the protocol: a JSON object a line on stdin, its answer a line on stdout. Standard library only,
because it runs in every peer's own venv. Knows no engine: an adapter is a class with the methods named below."""

from __future__ import annotations

import ctypes
import json
import os
import signal
import sys
import time
from typing import Any, Protocol, TextIO

PR_SET_PDEATHSIG = 1


class Adapter(Protocol):
    """Made by `AdapterClass(model=path, threads=count, **options)`."""

    def facts(self) -> dict[str, Any]:
        """Versions and settings, for the record."""

    def generate(self, prompts: list[list[int]], max_tokens: int) -> list[tuple[list[int], list[float]]]:
        """Answer all prompts at once, greedily, past any end token. For each: its token ids, and when each was in the
        caller's hands, in seconds since the call."""

    def score(self, token_ids: list[int]) -> list[tuple[float, float]]:
        """For each token but the first: its log-probability given those before it, and that of the likeliest token."""

    def embed(self, texts: list[str]) -> list[list[float]]:
        """The vectors of texts, of length 1. An adapter has this, or the two above."""


class TokenTimes:
    """Collects one batch's tokens with the time each arrived at, from now on."""

    def __init__(self, num_prompts: int) -> None:
        self._started_s = time.perf_counter()
        self._token_ids: list[list[int]] = [[] for _ in range(num_prompts)]
        self._times_s: list[list[float]] = [[] for _ in range(num_prompts)]

    def add(self, index: int, *token_ids: int) -> None:
        now_s = time.perf_counter() - self._started_s
        self._token_ids[index].extend(int(token_id) for token_id in token_ids)
        self._times_s[index].extend([now_s] * len(token_ids))

    def outputs(self) -> list[tuple[list[int], list[float]]]:
        return list(zip(self._token_ids, self._times_s, strict=True))


def serve(adapter_class: Any) -> None:
    """Answer requests until stdin ends."""
    _end_with_parent()
    answers = _private_stdout()
    adapter: Any = None
    for line in sys.stdin:
        request = json.loads(line)
        try:
            if request["op"] == "load":
                started_s = time.perf_counter()
                adapter = adapter_class(model=request["model"], threads=request["threads"], **request["options"])
                answer = {"facts": adapter.facts(), "load_s": time.perf_counter() - started_s}
            elif request["op"] == "generate":
                outputs = adapter.generate(request["prompts"], request["max_tokens"])
                answer = {"outputs": [{"token_ids": ids, "token_times_s": times} for ids, times in outputs]}
            elif request["op"] == "embed":
                started_s = time.perf_counter()
                vectors = adapter.embed(request["texts"])
                answer = {"seconds": time.perf_counter() - started_s, "vectors": vectors}
            elif request["op"] == "score":
                if not hasattr(adapter, "score"):
                    raise NotImplementedError("this adapter cannot score tokens")
                answer = {"scores": adapter.score(request["token_ids"])}
            else:
                raise ValueError(f"unknown request {request['op']!r}")
        except Exception as error:
            answer = {"error": f"{type(error).__name__}: {error}"}
        answers.write(json.dumps(answer) + "\n")
        answers.flush()


def _private_stdout() -> TextIO:
    """Native libraries print to stdout as they like: keep the pipe, and let their output go to the log."""
    answers = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)
    return answers


def _end_with_parent() -> None:
    """A worker that waits, stopped, must not outlive a harness that was killed."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
