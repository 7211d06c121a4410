"""Hugging Face transformers on torch: `generate`, prompts of a batch padded on the left. In float32 it is the oracle
of the quality table."""

from __future__ import annotations

import sys
from typing import Any

import torch
import transformers
from adapter_loop import TokenTimes, serve
from transformers import AutoModelForCausalLM, GenerationConfig, StoppingCriteria

PAD_TOKEN = 2
"""Any token: padding is masked."""


class TransformersAdapter:
    def __init__(self, model: str, threads: int, dtype: str) -> None:
        torch.set_num_threads(threads)
        transformers.logging.set_verbosity_error()
        self._model = AutoModelForCausalLM.from_pretrained(model, dtype=getattr(torch, dtype)).eval()
        self._model.generation_config.eos_token_id = None

    def facts(self) -> dict[str, Any]:
        versions = {
            "transformers": transformers.__version__,
            "torch": torch.__version__,
            "python": sys.version.split()[0],
        }
        return {"versions": versions, "threads": torch.get_num_threads()}

    @torch.inference_mode()
    def generate(self, prompts: list[list[int]], max_tokens: int) -> list[tuple[list[int], list[float]]]:
        times = TokenTimes(len(prompts))
        longest = max(len(prompt) for prompt in prompts)
        padded = [[PAD_TOKEN] * (longest - len(prompt)) + prompt for prompt in prompts]
        mask = [[0] * (longest - len(prompt)) + [1] * len(prompt) for prompt in prompts]
        self._model.generate(
            input_ids=torch.tensor(padded),
            attention_mask=torch.tensor(mask),
            generation_config=GenerationConfig(
                max_new_tokens=max_tokens, do_sample=False, eos_token_id=None, pad_token_id=PAD_TOKEN
            ),
            stopping_criteria=[Recorder(times)],
        )
        return times.outputs()

    @torch.inference_mode()
    def score(self, token_ids: list[int]) -> list[tuple[float, float]]:
        logits = self._model(input_ids=torch.tensor([token_ids])).logits[0, :-1]  # [num_tokens - 1, vocab]
        logprobs = torch.log_softmax(logits.double(), dim=-1)
        chosen = logprobs.gather(1, torch.tensor(token_ids[1:])[:, None])[:, 0]
        return list(zip(chosen.tolist(), logprobs.max(dim=-1).values.tolist(), strict=True))


class Recorder(StoppingCriteria):
    """Asked after each token whether to stop: it never says so, and takes the time."""

    def __init__(self, times: TokenTimes) -> None:
        self._times = times

    def __call__(self, input_ids: torch.Tensor, scores: Any, **_: Any) -> torch.Tensor:
        for index, token in enumerate(input_ids[:, -1].tolist()):
            self._times.add(index, token)
        return torch.zeros(len(input_ids), dtype=torch.bool)


if __name__ == "__main__":
    serve(TransformersAdapter)
