"""OpenVINO GenAI through its continuous-batching pipeline, one `step` at a time, with prefix caching."""

from __future__ import annotations

import sys
from typing import Any

import numpy as np
import openvino
import openvino_genai
from adapter_loop import TokenTimes, serve

MAX_SEQUENCES = 32
STEP_TOKENS = 2048


class OpenVinoAdapter:
    def __init__(self, model: str, threads: int, kv_bytes: int) -> None:
        scheduler = openvino_genai.SchedulerConfig()
        scheduler.cache_size = kv_bytes >> 30
        scheduler.enable_prefix_caching = True
        scheduler.max_num_seqs = MAX_SEQUENCES
        scheduler.max_num_batched_tokens = STEP_TOKENS
        properties = {"INFERENCE_NUM_THREADS": threads, "PERFORMANCE_HINT": "LATENCY"}
        self._pipeline = openvino_genai.ContinuousBatchingPipeline(model, scheduler, "CPU", properties)
        self._num_requests = 0

    def facts(self) -> dict[str, Any]:
        versions = {
            "openvino-genai": openvino_genai.__version__,
            "openvino": openvino.__version__,
            "python": sys.version.split()[0],
        }
        return {"versions": versions}

    def generate(self, prompts: list[list[int]], max_tokens: int) -> list[tuple[list[int], list[float]]]:
        config = openvino_genai.GenerationConfig()
        config.max_new_tokens = max_tokens
        config.ignore_eos = True
        config.do_sample = False
        times = TokenTimes(len(prompts))
        handles = []
        for prompt in prompts:
            ids = openvino.Tensor(np.array([prompt], dtype=np.int64))
            handles.append(self._pipeline.add_request(self._num_requests, ids, config))
            self._num_requests += 1
        while self._pipeline.has_non_finished_requests():
            self._pipeline.step()
            for index, handle in enumerate(handles):
                while handle.can_read():
                    for output in handle.read().values():
                        times.add(index, *output.generated_ids)
        return times.outputs()


if __name__ == "__main__":
    serve(OpenVinoAdapter)
