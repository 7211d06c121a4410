"""Run in llama.cpp's venv: `llama_logits.py MODEL.gguf TOKENS.json TARGET.npy` writes the logits behind every token of
each list of token ids, list after list, as llama.cpp computes them."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import llama_cpp
import numpy as np


def main(model: str, tokens: str, target: str) -> None:
    lists: list[list[int]] = json.loads(Path(tokens).read_text(encoding="utf-8"))
    longest = max(len(token_ids) for token_ids in lists)
    sizes = {"n_ctx": longest, "n_batch": longest, "n_threads": 1, "n_threads_batch": 1}
    llama = llama_cpp.Llama(model, logits_all=True, verbose=False, **sizes)
    found = []
    for token_ids in lists:
        llama.reset()
        llama.eval(token_ids)
        found.append(np.array(llama.scores[: len(token_ids)], dtype=np.float32))
    np.save(target, np.concatenate(found))


if __name__ == "__main__":
    main(*sys.argv[1:])
