"""An EAGLE-3 head with random weights for any model, in the shape that `train-drafter` gives it: it costs what a
trained one costs, and is hardly ever right. It is sure of its guesses, so that it makes as many as it is asked for."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import torch

from twostroke.models.heads.eagle3 import default_taps
from twostroke.models.spec import ModelSpec
from twostroke.training.head import Head, head_spec
from twostroke.training.published import write_head

SPREAD, OUTPUT_SPREAD = 0.02, 1.0


def write_made_head(folder: Path, target: ModelSpec, target_ids: np.ndarray, seed: int = 1) -> Path:
    """As a folder that `--speculate eagle3:FOLDER` reads. `target_ids`: the tokens that it can draft, growing."""
    folder.mkdir(parents=True, exist_ok=True)
    made = torch.Generator().manual_seed(seed)
    spec = head_spec(target, default_taps(target.num_layers), len(target_ids))
    shapes = spec.tensor_shapes() | {"output": (spec.draft_vocab_size, spec.hidden_size)}
    weights = {
        name: torch.randn(shape, generator=made) * SPREAD if len(shape) > 1 else torch.ones(shape)
        for name, shape in shapes.items()
    }
    weights["output"] *= OUTPUT_SPREAD / SPREAD
    no_embedding = torch.empty(0)  # it is the target's, and stands in no file
    write_head(folder, Head(spec, weights, no_embedding, torch.from_numpy(target_ids.astype(np.int64))), "random")
    return folder
