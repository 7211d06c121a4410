"""A model that counts: behind token t it says t + STEP, whatever stands before. And an EAGLE-3 head that knows the next
token from the hidden state before it: its first draft holds, if its vocabulary has the token, and the others do not."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import numpy as np
import numpy.typing as npt

from twostroke.backends.interface import Companion
from twostroke.backends.reference import FACTORY as REFERENCE
from twostroke.engine.companions import plan_head
from twostroke.models.checkpoint import Checkpoint
from twostroke.models.heads.eagle3 import Eagle3Head, Eagle3Spec
from twostroke.models.rope_spec import RopeSpec
from twostroke.models.spec import DenseMlp, GroupedAttention, LayerSpec, ModelSpec, Shapes
from twostroke.models.weights.tensor import WeightTensor, from_float32

Array = npt.NDArray[np.float32]

VOCAB_SIZE, HIDDEN_SIZE, NUM_LAYERS, STEP = 256, 64, 2, 7
TAPS = (0, 1, 2)
"""What is embedded, what enters the second layer, and what leaves it."""
TARGET_IDS = np.array([token for token in range(VOCAB_SIZE) if token % 5])
"""Of the head's vocabulary."""
LAYER = LayerSpec(GroupedAttention(4, 2, 16, RopeSpec(1e4, 16)), DenseMlp(96))


def on_a_circle(tokens: npt.NDArray[np.int64]) -> Array:
    """Of each token a vector that is most like itself, and whose likeness depends on distances alone."""
    angles = 2 * np.pi / VOCAB_SIZE * tokens[:, None] * np.arange(1, HIDDEN_SIZE // 2 + 1)
    return np.concatenate([np.cos(angles), np.sin(angles)], axis=1).astype(np.float32)


def tensors(shapes: Shapes, own: Mapping[str, Array]) -> dict[str, WeightTensor]:
    """At random, but that layers add nothing to what was embedded, and norms leave it alone."""
    rng = np.random.default_rng(8)
    found = {}
    for name, shape in shapes.items():
        values = rng.standard_normal(shape).astype(np.float32) / np.float32(shape[-1] ** 0.5)
        if name.endswith("norm"):
            values = np.ones(shape, np.float32)
        if name.split(".")[-1] in ("o", "down"):
            values = np.zeros(shape, np.float32)
        found[name] = from_float32(name, np.ascontiguousarray(own.get(name, values)))
    return found


def counting_model() -> Checkpoint:
    spec = ModelSpec("llama", VOCAB_SIZE, HIDDEN_SIZE, 4096, (LAYER,) * NUM_LAYERS, 1e-5)
    ids = np.arange(VOCAB_SIZE)
    own = {"embedding": on_a_circle(ids), "output": on_a_circle(ids - STEP)}
    return Checkpoint("counting", Path("counting"), spec, tensors(spec.tensor_shapes(), own))


def counting_head() -> Companion:
    spec = Eagle3Spec(LAYER, HIDDEN_SIZE, HIDDEN_SIZE, VOCAB_SIZE, len(TARGET_IDS), TAPS, 1e-5, 4096)
    own = {
        "fc": np.tile(np.eye(HIDDEN_SIZE, dtype=np.float32) / np.float32(len(TAPS)), (1, len(TAPS))),
        "output": on_a_circle(TARGET_IDS - 2 * STEP),
    }
    shapes = spec.tensor_shapes() | {"output": spec.shared_shapes()["output"]}
    head = Eagle3Head("counting head", spec, tensors(shapes, own), TARGET_IDS)
    return plan_head(head, 1, REFERENCE).companion


def counted(prompt: list[int], count: int) -> list[int]:
    return [(prompt[-1] + STEP * place) % VOCAB_SIZE for place in range(1, count + 1)]
