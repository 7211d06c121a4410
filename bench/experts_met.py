"""How many experts the tokens of one prompt meet with random weights, layer by layer, beside what independent tokens
would: drawn as they are, and with every matrix's spread the same. Experts are narrower here than the model's, to save
memory: how they are chosen does not depend on it.

    PYTHONPATH=src:. python -m bench.experts_met bench/shapes/qwen3-30b-a3b [--tokens 512] [--layers 16] [--width 96]"""

from __future__ import annotations

import argparse
import json
import tempfile
from pathlib import Path
from unittest.mock import patch

import numpy as np
import numpy.typing as npt

from twostroke import LLM, SamplingParams
from twostroke.backends.reference import mlp
from twostroke.backends.reference.arithmetic import Array
from twostroke.models import random_weights
from twostroke.models.loading import read_folder_spec
from twostroke.models.spec import MoeSpec


def experts_met(folder: Path, num_tokens: int) -> list[int]:
    """By one prompt of random tokens, in each layer."""
    met: list[int] = []
    route = mlp.route

    def count(moe: MoeSpec, logits: Array) -> tuple[npt.NDArray[np.intp], Array]:
        chosen, shares = route(moe, logits)
        if len(logits) > 1:
            met.append(len(np.unique(chosen)))
        return chosen, shares

    _, spec = read_folder_spec(folder)
    prompt = np.random.default_rng(0).integers(0, spec.vocab_size, num_tokens).tolist()
    with (
        patch.object(mlp, "route", count),
        LLM(str(folder), load="random", backend="reference", max_context=num_tokens + 64) as llm,
    ):
        llm.generate(prompt, SamplingParams(max_tokens=1))
    return met


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path, help="with the config.json of a mixture of experts")
    parser.add_argument("--tokens", type=int, default=512)
    parser.add_argument("--layers", type=int, default=16)
    parser.add_argument("--width", type=int, default=96, help="of an expert")
    options = parser.parse_args()
    config = json.loads((options.folder / "config.json").read_text())
    config |= {"num_hidden_layers": options.layers, "moe_intermediate_size": options.width}
    with tempfile.TemporaryDirectory() as narrow:
        (Path(narrow) / "config.json").write_text(json.dumps(config))
        _, spec = read_folder_spec(Path(narrow))
        if spec.moe is None:
            parser.error(f"{options.folder} has no experts")
        share = spec.moe.experts_per_token / spec.moe.num_experts
        independent = spec.moe.num_experts * (1 - (1 - share) ** options.tokens)
        print(f"{options.tokens} tokens, {spec.moe.num_experts} experts; independent tokens meet {independent:.1f}")
        for name, gain in (("as drawn", random_weights._gain), ("all of one spread", lambda *_: 1.0)):
            with patch.object(random_weights, "_gain", gain):
                met = experts_met(Path(narrow), options.tokens)
            print(f"{name}: {np.mean(met):.1f} on average, layer by layer {' '.join(map(str, met))}", flush=True)


if __name__ == "__main__":
    main()
