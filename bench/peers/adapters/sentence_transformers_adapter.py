"""sentence-transformers: texts in, vectors out, as `SentenceTransformer.encode` has them."""

from __future__ import annotations

import sys
from typing import Any

import sentence_transformers
import torch
from adapter_loop import serve

BATCH_TEXTS = 32


class SentenceTransformersAdapter:
    def __init__(self, model: str, threads: int, dtype: str = "float32") -> None:
        torch.set_num_threads(threads)
        kind = {"torch_dtype": getattr(torch, dtype)}
        self._model = sentence_transformers.SentenceTransformer(model, device="cpu", model_kwargs=kind)

    def facts(self) -> dict[str, Any]:
        versions = {"sentence-transformers": sentence_transformers.__version__, "torch": torch.__version__}
        return {"versions": {**versions, "python": sys.version.split()[0]}}

    def embed(self, texts: list[str]) -> list[list[float]]:
        found = self._model.encode(texts, batch_size=BATCH_TEXTS, show_progress_bar=False, normalize_embeddings=True)
        return [[float(value) for value in vector] for vector in found]


if __name__ == "__main__":
    serve(SentenceTransformersAdapter)
