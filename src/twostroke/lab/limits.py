"""What a backend says this machine can do at most, without a model: asked through models too small to matter, one in
each arithmetic that a backend may use."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from twostroke import backends, machine
from twostroke.core.errors import BackendError
from twostroke.cost.hardware import Ceilings
from twostroke.models.random_weights import random_checkpoint
from twostroke.models.weights.tensor import WeightKind

KINDS = (WeightKind.BF16, WeightKind.Q8_0)
_CONFIG = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_act": "silu",
    "hidden_size": 128,
    "intermediate_size": 128,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "vocab_size": 256,
    "max_position_embeddings": 256,
    "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0,
    "tie_word_embeddings": False,
}


@dataclass(frozen=True, slots=True)
class Limits:
    backend: str
    threads: int
    ceilings: tuple[Ceilings, ...]
    """One an arithmetic."""
    more: Mapping[str, Any] = field(default_factory=dict)
    """Whatever else the backend measures, by name and unit: its factory's `measured_limits()`, where it has one."""


def measure_limits(backend: str, threads: int | None) -> Limits:
    threads = threads or machine.detect().threads
    found: dict[str, Ceilings] = {}
    declined: list[str] = []
    names = list(backends.BACKENDS) if backend == "auto" else [backend]
    with tempfile.TemporaryDirectory() as folder:
        Path(folder, "config.json").write_text(json.dumps(_CONFIG), encoding="utf-8")
        models = [random_checkpoint(Path(folder), kind, name="limits") for kind in KINDS]
    for name in names:
        factory = backends.load_factory(name)
        for model in models:
            formats = factory.supports(model) or factory.formats(model)
            if isinstance(formats, str):
                declined.append(f"{name}: {formats}")
                continue
            ceilings = factory.ceilings(model, threads, formats)
            found.setdefault(ceilings.source, ceilings)
        if found:
            more: Callable[[], Mapping[str, Any]] = getattr(factory, "measured_limits", dict)
            return Limits(name, threads, tuple(found.values()), dict(more()))
    raise BackendError("no backend can measure this machine. " + "; ".join(dict.fromkeys(declined)))
