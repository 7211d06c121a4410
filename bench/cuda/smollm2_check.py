"""A model's greedy tokens on the card against the reference backend's in float32. Where they part, both gaps between
the two likeliest tokens are printed: a near-tie is decided by rounding, anything else is a fault.

    python bench/cuda/smollm2_check.py MODEL --write FILE      # on any machine: the reference's tokens
    python bench/cuda/smollm2_check.py MODEL --against FILE    # on the card"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path

from twostroke.config import EngineConfig, KVConfig
from twostroke.core.events import TokenEvent
from twostroke.core.request import Request
from twostroke.core.sampling_params import SamplingParams
from twostroke.engine.build import build

PROMPTS = 8
PROMPT_TOKENS, OUTPUT_TOKENS = 48, 48
NEAR_TIE = 0.15
"""Nats between the two likeliest tokens that 16-bit arithmetic may turn round."""


def generate(model: str, backend: str, prompts: list[list[int]]) -> list[list[tuple[int, float]]]:
    """Each prompt's tokens, with the gap between the two likeliest at each."""
    config = EngineConfig(backend=backend, max_context=1024, max_running=PROMPTS, kv=KVConfig(memory_bytes=1 << 30))
    engine = build(model, config, text=False).engine
    sampling = SamplingParams(max_tokens=OUTPUT_TOKENS, temperature=0.0, ignore_eos=True, logprobs=2)
    for index, prompt in enumerate(prompts):
        engine.add(Request(str(index), tuple(prompt), sampling))
    outputs: list[list[tuple[int, float]]] = [[] for _ in prompts]
    while engine.busy:
        for event in engine.step():
            if isinstance(event, TokenEvent):
                for token, logprobs in zip(event.token_ids, event.logprobs, strict=True):
                    outputs[int(event.request_id)].append((token, logprobs.top[0][1] - logprobs.top[1][1]))
    engine.close()
    return outputs


def text_prompts(model: str) -> list[list[int]]:
    """Pieces of this repository's licence, as the model's own tokens."""
    from twostroke.models.loading import load_checkpoint
    from twostroke.models.resolve import resolve
    from twostroke.text.loading import load_tokenizer

    checkpoint = load_checkpoint(resolve(model))
    text = (Path(__file__).parents[2] / "LICENSE").read_text(encoding="utf-8")
    ids = load_tokenizer(checkpoint.path, checkpoint.gguf_metadata).encode(text)
    stride = (len(ids) - PROMPT_TOKENS) // PROMPTS
    return [ids[start : start + PROMPT_TOKENS] for start in range(0, stride * PROMPTS, stride)]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model")
    parser.add_argument("--write", type=Path)
    parser.add_argument("--against", type=Path)
    parser.add_argument("--backend", default="cuda")
    options = parser.parse_args()
    if options.write is not None:
        prompts = text_prompts(options.model)
        expected = generate(options.model, "reference", prompts)
        options.write.write_text(json.dumps({"prompts": prompts, "expected": expected}), encoding="utf-8")
        return 0
    stored = json.loads(options.against.read_text(encoding="utf-8"))
    found = generate(options.model, options.backend, stored["prompts"])
    same = faults = 0
    for index, (ours, theirs) in enumerate(zip(found, stored["expected"], strict=True)):
        parting = next((at for at, (a, b) in enumerate(zip(ours, theirs, strict=True)) if a[0] != b[0]), None)
        if parting is None:
            same += 1
            continue
        gaps = ours[parting][1], theirs[parting][1]
        faults += max(gaps) > NEAR_TIE
        print(f"prompt {index} parts at token {parting}: gaps {gaps[0]:.4f} here, {gaps[1]:.4f} in float32")
    print(
        f"{same} of {len(found)} prompts give the same {OUTPUT_TOKENS} tokens; {faults} part where it was no near-tie"
    )
    return 1 if faults else 0


if __name__ == "__main__":
    sys.exit(main())
