"""What each kind of KV costs in quality: the perplexity of fixed texts, every kind over the same weights, against f16.
Also how often the likeliest next token stays the same, and how far log probabilities move.

    PYTHONPATH=src:. python -m bench.kv_quality TEXT_FILE... [--model smollm2] [--tokens 2000] [--kinds f16,bf16,int8]
    on a card: --backend cuda --kinds bf16,fp8,int8"""

from __future__ import annotations

import argparse
import hashlib
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from twostroke import LLM, SamplingParams
from twostroke.config import EngineConfig, KVConfig


@dataclass(frozen=True)
class Scores:
    log_probabilities: np.ndarray  # [tokens - 1] of the text's own next token
    likeliest: np.ndarray  # [tokens - 1]

    @property
    def perplexity(self) -> float:
        return float(np.exp(-self.log_probabilities.mean()))


def score(llm: LLM, text: str, num_tokens: int) -> Scores:
    token_ids = llm.tokenizer.encode(text)[:num_tokens]
    sampling = SamplingParams(temperature=0.0, max_tokens=1, prompt_logprobs=1)
    found = llm.generate(token_ids, sampling)[0].prompt_logprobs
    assert found is not None
    return Scores(np.array([x.logprob for x in found]), np.array([x.top[0][0] for x in found]))


def together(parts: list[Scores]) -> Scores:
    return Scores(
        np.concatenate([part.log_probabilities for part in parts]), np.concatenate([part.likeliest for part in parts])
    )


def report(kind: str, name: str, found: Scores, first: Scores) -> None:
    moved = np.abs(found.log_probabilities - first.log_probabilities)
    print(
        f"{kind:5} {name:12} {len(moved):6} tokens  perplexity {found.perplexity:8.4f} "
        f"{found.perplexity / first.perplexity - 1:+8.3%}  log probability moved {moved.mean():.4f} on average, "
        f"{moved.max():.2f} at most; same likeliest token {(found.likeliest == first.likeliest).mean():.2%}",
        flush=True,
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("texts", type=Path, nargs="+")
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--tokens", type=int, default=2000, help="the first so many of each text")
    parser.add_argument("--kinds", default="f16,bf16,int8", help="the first is what others are compared with")
    parser.add_argument("--backend", default="cpu")
    options = parser.parse_args()
    texts = {path.name: path.read_text(encoding="utf-8") for path in options.texts}
    for name, text in texts.items():
        print(f"{name}: sha256 {hashlib.sha256(text.encode()).hexdigest()}")
    first: list[Scores] | None = None
    for kind in options.kinds.split(","):
        config = EngineConfig(backend=options.backend, max_context=options.tokens + 16, kv=KVConfig(kind=kind))
        with LLM(options.model, config) as llm:
            found = [score(llm, text, options.tokens) for text in texts.values()]
        first = first or found
        for name, its, base in zip(texts, found, first, strict=True):
            report(kind, name, its, base)
        report(kind, "all", together(found), together(first))


if __name__ == "__main__":
    main()
