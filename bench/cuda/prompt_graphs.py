"""The first token of a short prompt, by a captured graph and launched kernel by kernel: plainly sampled, filtered,
penalised, with logprobs. Medians of prompts in turns, alone in the engine. Random weights of a config.json.

    PYTHONPATH=src python -m bench.cuda.prompt_graphs FOLDER [--tokens 512]"""

from __future__ import annotations

import argparse
import random
import time
from collections import defaultdict
from contextlib import nullcontext
from statistics import median
from unittest.mock import patch

from twostroke.backends.cuda.prefill import PrefillPath
from twostroke.config import EngineConfig
from twostroke.core.request import Request
from twostroke.core.sampling_params import SamplingParams
from twostroke.engine.build import build
from twostroke.engine.engine import Engine

SAMPLINGS = {
    "plain": SamplingParams(max_tokens=1, temperature=0.7),
    "top-p and top-k": SamplingParams(max_tokens=1, temperature=0.7, top_p=0.95, top_k=20),
    "a penalty": SamplingParams(max_tokens=1, temperature=0.7, repetition_penalty=1.1),
    "logprobs": SamplingParams(max_tokens=1, temperature=0.7, logprobs=5),
}
ROUNDS = 12


def first_token_s(engine: Engine, name: str, num_tokens: int, vocab_size: int, sampling: SamplingParams) -> float:
    prompt = tuple(random.choices(range(vocab_size), k=num_tokens))
    started_s = time.perf_counter()
    engine.add(Request(name, prompt, sampling))
    while engine.busy:
        engine.step()
    return time.perf_counter() - started_s


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder")
    parser.add_argument("--tokens", type=int, default=512, help="of a prompt")
    options = parser.parse_args()
    assembly = build(options.folder, EngineConfig(backend="cuda", load="random", max_context=8192))
    print(*assembly.notes[-2:], sep="\n")
    vocab_size = assembly.checkpoint.spec.vocab_size
    found: dict[tuple[str, str], list[float]] = defaultdict(list)
    ways = {"by graph": nullcontext, "kernel by kernel": lambda: patch.object(PrefillPath, "_captured_shape", nothing)}
    for turn in range(ROUNDS + 1):
        for way, changed in ways.items():
            for name, sampling in SAMPLINGS.items():
                with changed():
                    label = f"{name} {way} {turn}"
                    seconds = first_token_s(assembly.engine, label, options.tokens, vocab_size, sampling)
                if turn:  # the first compiles and captures
                    found[name, way].append(seconds)
    print(f"\nfirst token of {options.tokens}, ms: {', '.join(ways)}")
    for name in SAMPLINGS:
        print(f"  {name:18s}", *(f"{median(found[name, way]) * 1e3:8.2f}" for way in ways))


def nothing(*_: object) -> None: ...


if __name__ == "__main__":
    main()
