"""How alike the tokens of one prompt are with random weights, layer by layer, and how many experts they meet: drawn as
they are, and with every matrix's spread the same. MLPs are narrower here than the model's, to save memory: neither
depends on it much.

    PYTHONPATH=src:. python -m bench.tokens_alike bench/shapes/llama-3.1-8b [--tokens 512] [--layers 16] [--width 96]"""

from __future__ import annotations

import argparse
import json
import tempfile
from dataclasses import dataclass, field
from pathlib import Path
from unittest.mock import patch

import numpy as np
import numpy.typing as npt

from twostroke import LLM, SamplingParams
from twostroke.backends.host.arithmetic import Array
from twostroke.backends.interface import Join
from twostroke.backends.reference import mlp, model
from twostroke.backends.reference.weights import LayerWeights
from twostroke.models import random_weights
from twostroke.models.loading import read_folder_spec
from twostroke.models.spec import LayerSpec, ModelSpec, MoeSpec


@dataclass(frozen=True)
class Layers:
    """What was seen in each, in front of its MLP."""

    likeness: list[float] = field(default_factory=list)
    """The mean cosine between two tokens: 0 where they have nothing in common, 1 where they are the same."""
    experts_met: list[int] = field(default_factory=list)


def read_prompt(folder: Path, num_tokens: int) -> Layers:
    """One of random tokens, by the reference backend."""
    seen = Layers()
    block, route = model._mlp_block, mlp.route

    def watch(
        spec: ModelSpec, layer: LayerSpec, weights: LayerWeights, hidden: Array, join: Join | None = None
    ) -> Array:
        unit = hidden / np.linalg.norm(hidden, axis=-1, keepdims=True)
        pairs = num_tokens * (num_tokens - 1)
        seen.likeness.append(float((np.square(unit.sum(0)).sum() - num_tokens) / pairs))
        return block(spec, layer, weights, hidden, join)

    def count(moe: MoeSpec, logits: Array, correction: Array | None = None) -> tuple[npt.NDArray[np.intp], Array]:
        chosen, shares = route(moe, logits, correction)
        seen.experts_met.append(len(np.unique(chosen)))
        return chosen, shares

    _, spec = read_folder_spec(folder)
    prompt = np.random.default_rng(0).integers(0, spec.vocab_size, num_tokens).tolist()
    whole = {"max_tokens_per_step": num_tokens}  # in one step: tokens are compared with all others
    with (
        patch.object(model, "_mlp_block", watch),
        patch.object(mlp, "route", count),
        LLM(str(folder), load="random", backend="reference", max_context=num_tokens + 64, **whole) as llm,
    ):
        llm.generate(prompt, SamplingParams(max_tokens=1))
    return seen


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path, help="with a config.json")
    parser.add_argument("--tokens", type=int, default=512)
    parser.add_argument("--layers", type=int, default=16)
    parser.add_argument("--width", type=int, default=96, help="of an MLP, or of an expert")
    options = parser.parse_args()
    if options.tokens < 2:
        parser.error("one token is like no other: --tokens 2 or more")
    config = json.loads((options.folder / "config.json").read_text())
    width = "moe_intermediate_size" if "moe_intermediate_size" in config else "intermediate_size"
    config |= {"num_hidden_layers": options.layers, width: options.width}
    print(f"{options.folder}: {options.tokens} tokens")
    with tempfile.TemporaryDirectory() as narrow:
        (Path(narrow) / "config.json").write_text(json.dumps(config))
        for name, gain in (("as drawn", random_weights._gain), ("all of one spread", lambda *_: 1.0)):
            with patch.object(random_weights, "_gain", gain):
                seen = read_prompt(Path(narrow), options.tokens)
            print(f"{name}: likeness {' '.join(f'{likeness:.2f}' for likeness in seen.likeness)}")
            if seen.experts_met:
                met = " ".join(map(str, seen.experts_met))
                print(f"  experts met {met}: {np.mean(seen.experts_met):.1f} on average", flush=True)


if __name__ == "__main__":
    main()
