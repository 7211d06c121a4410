"""Does a model fit a smaller card? An engine is given a part of this card's memory, chooses its formats itself, says
how it got there, and reads a prompt that fills its KV. What torch and the driver say was taken is printed beside.

    PYTHONPATH=src:. python -m bench.cuda.memory_budget FOLDER [--gb 24] [--tokens 60000] [--kv-kind auto]"""

from __future__ import annotations

import argparse
import time
from collections.abc import Sequence

from bench.cuda.clock import say

GB = 1e9
ANSWER_TOKENS = 64


def options_of(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", help="with a model's config.json; weights are drawn at random")
    parser.add_argument("--gb", type=float, default=24.0, help="default: %(default)s")
    parser.add_argument("--tokens", type=int, default=60000, help="of one prompt and its answer (default: %(default)s)")
    parser.add_argument("--kv-kind", default="auto", help="default: %(default)s")
    return parser.parse_args(arguments)


def main() -> None:
    options = options_of()
    import torch

    from twostroke.config import EngineConfig
    from twostroke.core.kv_config import KVConfig
    from twostroke.engine.build import build
    from twostroke.lab.adapter import EngineAdapter

    free_before = torch.cuda.mem_get_info()[0]
    config = EngineConfig(
        backend="cuda",
        load="random",
        memory_gb=options.gb,
        max_context=options.tokens,
        kv=KVConfig(kind=options.kv_kind),
    )
    assembly = build(options.folder, config, text=False)
    try:
        print(*assembly.notes, sep="\n", flush=True)
        engine, vocab_size = EngineAdapter(assembly.engine, temperature=0.6), assembly.checkpoint.spec.vocab_size
        num_prompt_tokens = options.tokens - ANSWER_TOKENS
        prompt = [1 + (index * 7919) % (vocab_size - 1) for index in range(num_prompt_tokens)]
        began_s = time.perf_counter()
        engine.add(prompt, ANSWER_TOKENS)
        told = 0
        while engine.busy():
            told += sum(count for _, count, _ in engine.step())
        assert told == ANSWER_TOKENS, told
        say(f"{num_prompt_tokens} tokens read and {told} written in {time.perf_counter() - began_s:.1f} s")
        taken = (free_before - torch.cuda.mem_get_info()[0]) / GB
        peak = torch.cuda.max_memory_reserved() / GB
        say(f"of {options.gb:g} GB: {taken:.1f} GB taken on the device, torch's peak {peak:.1f} GB")
    finally:
        assembly.engine.close()


if __name__ == "__main__":
    main()
