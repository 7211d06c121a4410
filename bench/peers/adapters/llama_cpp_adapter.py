"""llama.cpp through llama-cpp-python: one prompt by `Llama.generate`, which reuses the prefix it last held; several at
once by `llama_decode` over one sequence each, as llama.cpp's own server does, since the package has no such call."""

from __future__ import annotations

import ctypes
import sys
from itertools import pairwise
from typing import Any

import llama_cpp
import numpy as np
from adapter_loop import TokenTimes, serve

MAX_CONTEXT = 4608
BATCH_TOKENS = 2048
MICRO_BATCH_TOKENS = 512
TOKENS_PER_SEQUENCE = 1024
"""Room for the longest prompt and answer of a batch."""


class LlamaCppAdapter:
    def __init__(self, model: str, threads: int) -> None:
        self._threads = threads
        self._llama = llama_cpp.Llama(
            model,
            n_ctx=MAX_CONTEXT,
            n_batch=BATCH_TOKENS,
            n_ubatch=MICRO_BATCH_TOKENS,
            n_threads=threads,
            n_threads_batch=threads,
            flash_attn=True,
            verbose=False,
        )
        self._batches: dict[int, SequenceBatch] = {}

    def facts(self) -> dict[str, Any]:
        versions = {"llama-cpp-python": llama_cpp.__version__, "python": sys.version.split()[0]}
        return {"versions": versions, "system": llama_cpp.llama_print_system_info().decode().strip()}

    def generate(self, prompts: list[list[int]], max_tokens: int) -> list[tuple[list[int], list[float]]]:
        if len(prompts) > 1:
            return self._batch(len(prompts)).generate(prompts, max_tokens)
        times = TokenTimes(1)
        tokens = self._llama.generate(prompts[0], temp=0.0, top_k=1, top_p=1.0, min_p=0.0, repeat_penalty=1.0)
        for _, token in zip(range(max_tokens), tokens, strict=False):
            times.add(0, token)
        return times.outputs()

    def score(self, token_ids: list[int]) -> list[tuple[float, float]]:
        return self._batch(1).score(token_ids)

    def _batch(self, num_sequences: int) -> SequenceBatch:
        """A context for so many sequences, made when first asked for: a start must not pay for it."""
        if num_sequences not in self._batches:
            self._batches[num_sequences] = SequenceBatch(self._llama.model, num_sequences, self._threads)
        return self._batches[num_sequences]


class SequenceBatch:
    """A context of its own over a loaded model, where several sequences advance together."""

    def __init__(self, model: Any, num_sequences: int, threads: int) -> None:
        parameters = llama_cpp.llama_context_default_params()
        parameters.n_ctx = num_sequences * TOKENS_PER_SEQUENCE if num_sequences > 1 else MAX_CONTEXT
        parameters.n_batch, parameters.n_ubatch = BATCH_TOKENS, MICRO_BATCH_TOKENS
        parameters.n_seq_max = num_sequences
        parameters.n_threads = parameters.n_threads_batch = threads
        parameters.flash_attn_type = llama_cpp.LLAMA_FLASH_ATTN_TYPE_ENABLED
        self._context = llama_cpp.llama_init_from_model(model, parameters)
        if not self._context:
            raise RuntimeError("llama.cpp gave no context")
        self._vocab_size = llama_cpp.llama_vocab_n_tokens(llama_cpp.llama_model_get_vocab(model))
        self._batch = llama_cpp.llama_batch_init(BATCH_TOKENS, 0, 1)

    def generate(self, prompts: list[list[int]], max_tokens: int) -> list[tuple[list[int], list[float]]]:
        times = TokenTimes(len(prompts))
        self._clear()
        entries = [
            (token, position, sequence, position == len(prompt) - 1)
            for sequence, prompt in enumerate(prompts)
            for position, token in enumerate(prompt)
        ]
        newest: dict[int, int] = {}
        for start in range(0, len(entries), BATCH_TOKENS):
            part = entries[start : start + BATCH_TOKENS]
            self._decode(part)
            for row, (_, _, sequence, wanted) in enumerate(part):
                if wanted:
                    newest[sequence] = int(self._logits(row).argmax())
                    times.add(sequence, newest[sequence])
        for count in range(1, max_tokens):
            self._decode([(newest[s], len(prompt) + count - 1, s, True) for s, prompt in enumerate(prompts)])
            for sequence in range(len(prompts)):
                newest[sequence] = int(self._logits(sequence).argmax())
                times.add(sequence, newest[sequence])
        return times.outputs()

    def score(self, token_ids: list[int]) -> list[tuple[float, float]]:
        self._clear()
        scores: list[tuple[float, float]] = []
        targets = [following for _, following in pairwise(token_ids)]
        for start in range(0, len(targets), MICRO_BATCH_TOKENS):
            part = targets[start : start + MICRO_BATCH_TOKENS]
            self._decode([(token_ids[start + row], start + row, 0, True) for row in range(len(part))])
            for row, target in enumerate(part):
                logits = self._logits(row).astype(np.float64)
                total = logits.max() + np.log(np.exp(logits - logits.max()).sum())
                scores.append((float(logits[target] - total), float(logits.max() - total)))
        return scores

    def _clear(self) -> None:
        llama_cpp.llama_memory_clear(llama_cpp.llama_get_memory(self._context), True)

    def _decode(self, entries: list[tuple[int, int, int, bool]]) -> None:
        """Each entry: token, position, sequence, whether its logits are wanted."""
        batch = self._batch
        batch.n_tokens = len(entries)
        for row, (token, position, sequence, wanted) in enumerate(entries):
            batch.token[row], batch.pos[row], batch.logits[row] = token, position, wanted
            batch.n_seq_id[row], batch.seq_id[row][0] = 1, sequence
        status = llama_cpp.llama_decode(self._context, batch)
        if status:
            raise RuntimeError(f"llama_decode returned {status}")

    def _logits(self, row: int) -> np.ndarray:
        pointer = llama_cpp.llama_get_logits_ith(self._context, row)
        return np.ctypeslib.as_array(ctypes.cast(pointer, ctypes.POINTER(ctypes.c_float)), shape=(self._vocab_size,))


if __name__ == "__main__":
    serve(LlamaCppAdapter)
