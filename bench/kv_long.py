"""What each kind of KV keeps of a long context. `numbers`: attention of one query over many random keys, through the
kernels, beside float64. `facts`: a number planted in real text at several depths, which the model is then asked for.

    PYTHONPATH=src:. python -m bench.kv_long numbers [--keys 131072] [--kinds f16,bf16,int8]
    PYTHONPATH=src:. python -m bench.kv_long facts TEXT_FILE... [--contexts 2000,4000,8000] [--kinds f16,bf16,int8]
    `facts` on a card: --backend cuda --kinds bf16,fp8,int8; its `numbers` are those of bench/cuda/kv_long.py."""

from __future__ import annotations

import argparse
from pathlib import Path

import numpy as np

from bench.attention import HEAD_DIM, HEADS, KV_HEADS, Bench, Workload
from twostroke import LLM, SamplingParams
from twostroke.backends.cpu import isa as instruction_sets
from twostroke.config import EngineConfig, KVConfig

PIECE = 4096
DEPTHS = (0.1, 0.3, 0.5, 0.7, 0.9)
FACT = " The secret number of the old harbour is {}. Remember it. "
QUESTION = (
    "\n\nQuestion: What is the secret number of the old harbour?\nAnswer: The secret number of the old harbour is"
)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("check", choices=["numbers", "facts"])
    parser.add_argument("texts", type=Path, nargs="*")
    parser.add_argument("--kinds", default="f16,bf16,int8")
    parser.add_argument("--keys", type=int, default=1 << 17)
    parser.add_argument("--contexts", default="2000,4000,8000")
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--backend", default="cpu", help="that facts are asked of")
    options = parser.parse_args()
    for kind in options.kinds.split(","):
        if options.check == "numbers":
            check_numbers(kind, options.keys)
        else:
            check_facts(kind, options)


def check_numbers(kind: str, num_keys: int) -> None:
    """Errors are of the whole output, as a share of its size."""
    bench = Bench(kind, instruction_sets.choose(), 1, 1, Workload("", 1, num_keys - 1, 1))
    for start in range(0, num_keys - 1, PIECE):
        bench.run(start, min(PIECE, num_keys - 1 - start), ("rope_and_store",), 1)
    for sharpness in (1.0, 4.0, 8.0):
        bench.score_scale = sharpness * HEAD_DIM**-0.5
        bench.run(num_keys - 1, 1, ("rope_and_store", "attention"), 1)
        expected, largest = exact(bench, num_keys)
        error = bench.output.reshape(HEADS, HEAD_DIM) - expected
        print(
            f"{kind:5} {num_keys} keys, scores of deviation {sharpness:.0f}, the largest weight {largest:8.2%}: "
            f"error {np.sqrt((error**2).mean() / (expected**2).mean()):.3%}",
            flush=True,
        )
    bench.pool.close()


def exact(bench: Bench, num_keys: int) -> tuple[np.ndarray, float]:
    """[heads, head_dim] in float64, and the largest weight of any head."""
    starts = [*range(0, num_keys - 1, PIECE), num_keys - 1]
    stops = [min(start + PIECE, num_keys - 1) for start in starts[:-1]] + [num_keys]
    pieces = zip(starts, stops, strict=True)
    inputs = np.concatenate([np.float32(bench.random_inputs(start, stop - start)) for start, stop in pieces])
    heads = inputs.reshape(num_keys, -1, HEAD_DIM).astype(np.float64)
    cosines, sines = (np.float64(table[:num_keys, None]) for table in (bench.rotation.cosines, bench.rotation.sines))
    low, high = np.split(heads[:, : HEADS + KV_HEADS], 2, axis=2)
    turned = np.concatenate([low * cosines - high * sines, high * cosines + low * sines], axis=2)
    outputs, largest = [], 0.0
    for head in range(HEADS):
        kv_head = head // (HEADS // KV_HEADS)
        scores = turned[:, HEADS + kv_head] @ turned[-1, head] * bench.score_scale
        weights = np.exp(scores - scores.max())
        weights /= weights.sum()
        largest = max(largest, float(weights.max()))
        outputs.append(weights @ heads[:, HEADS + KV_HEADS + kv_head])
    return np.array(outputs), largest


def check_facts(kind: str, options: argparse.Namespace) -> None:
    contexts = [int(context) for context in options.contexts.split(",")]
    config = EngineConfig(
        backend=options.backend,
        max_context=max(contexts) + 16,
        speculate="off",
        kv=KVConfig(kind=kind, prefix_caching=False),
    )
    text = "\n\n".join(path.read_text(encoding="utf-8") for path in options.texts)
    with LLM(options.model, config) as llm:
        encode = llm.tokenizer.encode
        words, question = encode(text), encode(QUESTION)
        for context in contexts:
            found = 0
            for index, depth in enumerate(DEPTHS):
                number = str(1009 * (index + 3) + context)[:4]
                fact = encode(FACT.format(number))
                body = words[: context - len(fact) - len(question)]
                place = int(depth * len(body))
                prompt = [*body[:place], *fact, *body[place:], *question]
                answer = llm.generate(prompt, SamplingParams(temperature=0.0, max_tokens=8))[0].text
                found += answer.strip().startswith(number)
            print(f"{kind:5} {context} tokens: {found} of {len(DEPTHS)} planted numbers found", flush=True)


if __name__ == "__main__":
    main()
