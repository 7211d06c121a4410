"""What each kind of KV costs in quality: the perplexity of a fixed text, every kind over the same weights, against f16.
Also how often the likeliest next token stays the same, and how far log probabilities move.

    PYTHONPATH=src python bench/kv_quality.py TEXT_FILE [--model smollm2] [--tokens 2000] [--kinds f16,bf16,int8]"""

from __future__ import annotations

import argparse
import hashlib
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from twostroke import LLM, SamplingParams
from twostroke.config import KVConfig


@dataclass(frozen=True)
class Scores:
    log_probabilities: np.ndarray  # [tokens - 1] of the text's own next token
    likeliest: np.ndarray  # [tokens - 1]

    @property
    def perplexity(self) -> float:
        return float(np.exp(-self.log_probabilities.mean()))


def score(model: str, kind: str, text: str, num_tokens: int) -> Scores:
    with LLM(model, backend="cpu", max_context=num_tokens + 16, kv=KVConfig(kind=kind)) as llm:
        token_ids = llm.tokenizer.encode(text)[:num_tokens]
        sampling = SamplingParams(temperature=0.0, max_tokens=1, prompt_logprobs=1)
        found = llm.generate(token_ids, sampling)[0].prompt_logprobs
        assert found is not None
        return Scores(np.array([x.logprob for x in found]), np.array([x.top[0][0] for x in found]))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("text", type=Path)
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--tokens", type=int, default=2000)
    parser.add_argument("--kinds", default="f16,bf16,int8")
    options = parser.parse_args()
    text = options.text.read_text(encoding="utf-8")
    digest = hashlib.sha256(text.encode()).hexdigest()[:16]
    print(f"{options.model}, the first {options.tokens} tokens of {options.text.name} (sha256 {digest}...)")
    first: Scores | None = None
    for kind in options.kinds.split(","):
        found = score(options.model, kind, text, options.tokens)
        first = first or found
        moved = np.abs(found.log_probabilities - first.log_probabilities)
        print(
            f"{kind:5} perplexity {found.perplexity:8.4f}  {found.perplexity / first.perplexity - 1:+8.3%}  "
            f"log probability moved {moved.mean():.5f} on average, {moved.max():.4f} at most; "
            f"same likeliest token {(found.likeliest == first.likeliest).mean():.2%}  ({len(moved)} tokens)",
            flush=True,
        )


if __name__ == "__main__":
    main()
