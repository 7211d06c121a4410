"""What 8-bit activations cost in quality: perplexity of a text on the CPU backend against the reference in float32,
over the same weights, for several values of PEAK_RATIO (when a value that stands out gets a second digit).

    PYTHONPATH=src:. python -m bench.quality TEXT_FILE [--model smollm2] [--tokens 1200] [--peak-ratios 3,4,5,8,1e9]"""

from __future__ import annotations

import argparse
import os
import tempfile
from pathlib import Path

from bench.kv_quality import report, score
from twostroke import LLM
from twostroke.models.resolve import resolve


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("text", type=Path)
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--tokens", type=int, default=1200)
    parser.add_argument("--peak-ratios", default="3,4,5,8,1e9")
    options = parser.parse_args()
    text, path = options.text.read_text(encoding="utf-8"), str(resolve(options.model))
    with LLM(path, backend="reference", max_context=options.tokens + 16) as llm:
        first = score(llm, text, options.tokens)
    report("float", "reference", first, first)
    for ratio in options.peak_ratios.split(","):
        with tempfile.TemporaryDirectory() as folder:
            set_peak_ratio(float(ratio), folder)
            with LLM(path, backend="cpu", max_context=options.tokens + 16) as llm:
                report("cpu", f"ratio {ratio}", score(llm, text, options.tokens), first)


def set_peak_ratio(ratio: float, cache: str) -> None:
    """Kernels made from here on have this ratio; they are kept apart from those of the source as it is."""
    from twostroke.backends.cpu.kernels import operation

    os.environ["TWOSTROKE_CACHE"] = cache
    operation.PEAK_RATIO = ratio


if __name__ == "__main__":
    main()
