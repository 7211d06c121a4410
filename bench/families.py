"""Each family's worst difference from its oracle: a tiny random checkpoint, saved by transformers, run here in float32
and there in float64, as tests do. The largest difference of any logit over a prompt that is read whole, in chunks,
token by token, chunks and then tokens, and behind a prefix that another request had computed. Of models that give
vectors, the largest difference of any of a vector's numbers, both in float32, over texts of many lengths. Nothing is
timed.

    python -m bench.families > table.md
"""

from __future__ import annotations

import contextlib
import io
import tempfile
from pathlib import Path

import numpy as np
from tests.backends.reference.test_against_transformers import (
    BLOCK_SIZE,
    GGUF_CHANGES,
    GGUF_VARIANTS,
    HIT_BLOCKS,
    PIECES,
    hit_logits,
    reference_logits,
    tokens,
)
from tests.engine.test_embedding import KINDS, MORE, TEXTS, wanted
from tests.models.tiny_checkpoints import cpu_variants, cuda_variants, exact_logits, make_tiny, variants
from tests.models.tiny_embedders import make_embedder
from tests.models.tiny_gguf import write_gguf

from twostroke import LLM
from twostroke.config import EngineConfig
from twostroke.models.loading import load_checkpoint

VECTOR_BACKENDS = ("reference", "cpu")


def worst_difference(variant: str, folder: Path) -> tuple[float, float | None]:
    """Of the folder, and of the GGUF file."""
    path, model = make_tiny(variant, folder / "folder")
    expected, checkpoint = exact_logits(model, tokens()), load_checkpoint(path)
    found = [np.abs(reference_logits(checkpoint, tokens(), pieces) - expected).max() for pieces in PIECES.values()]
    found.append(np.abs(hit_logits(checkpoint, tokens()) - expected[HIT_BLOCKS * BLOCK_SIZE :]).max())
    if variant not in GGUF_VARIANTS:
        return float(max(found)), None
    _, model = make_tiny(variant, folder / "other", **GGUF_CHANGES.get(variant, {}))
    overrides = {"attention.sliding_window_pattern": 3} if variant == "gemma3" else {}
    file = load_checkpoint(write_gguf(model, folder / "tiny.gguf", **overrides))
    in_file = np.abs(reference_logits(file, tokens(), [30, 10]) - exact_logits(model, tokens())).max()
    return float(max(found)), float(in_file)


def worst_of_vectors(kind: str, folder: Path) -> tuple[str, list[float]]:
    """Of an embedder: its oracle, and by backend how far vectors are from those of that."""
    embedder, texts, worst = make_embedder(kind, folder / "m"), [*TEXTS, *MORE], []
    for backend in VECTOR_BACKENDS:
        with LLM(embedder.folder, EngineConfig(backend=backend, threads=2, quantise="none")) as llm:
            found = np.array(llm.embed(texts))
            worst.append(float(np.abs(found - wanted(llm, embedder, texts)).max()))
    return type(embedder.model).__name__, worst


def main() -> None:
    print_variants()
    print()
    print_embedders()


def print_embedders() -> None:
    print("| embedder | transformers' class | " + " | ".join(VECTOR_BACKENDS) + " |")
    print("|---|---|---|---|")
    for kind in KINDS:
        with tempfile.TemporaryDirectory() as folder, contextlib.redirect_stderr(io.StringIO()):
            oracle, worst = worst_of_vectors(kind, Path(folder))
        print(f"| `{kind}` | `{oracle}` | " + " | ".join(f"{one:.1e}" for one in worst) + " |", flush=True)


def print_variants() -> None:
    print("| variant | family | transformers' class | folder | GGUF | runs on |")
    print("|---|---|---|---|---|---|")
    for variant in variants():
        with tempfile.TemporaryDirectory() as folder, contextlib.redirect_stderr(io.StringIO()):
            path, model = make_tiny(variant, Path(folder))
            family, oracle = load_checkpoint(path).spec.family, type(model).__name__
        with tempfile.TemporaryDirectory() as folder, contextlib.redirect_stderr(io.StringIO()):
            own, in_file = worst_difference(variant, Path(folder))
        where = ["reference"] + ["cpu"] * (variant in cpu_variants()) + ["cuda"] * (variant in cuda_variants())
        stored = "" if in_file is None else f"{in_file:.1e}"
        print(f"| `{variant}` | {family} | `{oracle}` | {own:.1e} | {stored} | {', '.join(where)} |", flush=True)


if __name__ == "__main__":
    main()
