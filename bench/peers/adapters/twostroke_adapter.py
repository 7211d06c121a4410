"""Twostroke through its public API: an LLM, token ids in, the engine's events out."""

from __future__ import annotations

import sys
from typing import Any

from adapter_loop import TokenTimes, serve

import twostroke


class TwostrokeAdapter:
    def __init__(self, model: str, threads: int, kv_bytes: int | None, speculate: str = "auto") -> None:
        kv = twostroke.KVConfig(memory_bytes=kv_bytes)
        self._llm = twostroke.LLM(model, threads=threads, kv=kv, speculate=speculate)

    def facts(self) -> dict[str, Any]:
        assembly = self._llm.assembly
        versions = {"twostroke": twostroke.__version__, "python": sys.version.split()[0]}
        return {"versions": versions, "backend": assembly.backend_name, "notes": list(assembly.notes)}

    def generate(self, prompts: list[list[int]], max_tokens: int) -> list[tuple[list[int], list[float]]]:
        sampling = twostroke.SamplingParams(max_tokens=max_tokens, temperature=0.0, ignore_eos=True)
        times = TokenTimes(len(prompts))
        engine = self._llm.engine
        index_of = {engine.add(self._llm.request(prompt, sampling)): index for index, prompt in enumerate(prompts)}
        while engine.busy:
            for event in engine.step():
                if getattr(event, "error", None):
                    raise RuntimeError(event.error)
                if getattr(event, "token_ids", None):
                    times.add(index_of[event.request_id], *event.token_ids)
        return times.outputs()

    def score(self, token_ids: list[int]) -> list[tuple[float, float]]:
        sampling = twostroke.SamplingParams(max_tokens=1, temperature=0.0, prompt_logprobs=1)
        (result,) = self._llm.generate([token_ids], sampling)
        if result.error:
            raise RuntimeError(result.error)
        return [(entry.logprob, entry.top[0][1]) for entry in result.prompt_logprobs]

    def embed(self, texts: list[str]) -> list[list[float]]:
        return self._llm.embed(texts)


if __name__ == "__main__":
    serve(TwostrokeAdapter)
