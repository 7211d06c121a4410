"""Twostroke: an LLM inference engine that names its two phases. Importing it costs nothing: each name below loads its
room when it is first used."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from twostroke.config import EngineConfig as EngineConfig
    from twostroke.config import KVConfig as KVConfig
    from twostroke.core.errors import PromiseError as PromiseError
    from twostroke.core.errors import TwostrokeError as TwostrokeError
    from twostroke.core.events import PrefillProgress as PrefillProgress
    from twostroke.core.events import TokenEvent as TokenEvent
    from twostroke.core.grammar import GrammarSpec as GrammarSpec
    from twostroke.core.request import Request as Request
    from twostroke.core.sampling_params import SamplingParams as SamplingParams
    from twostroke.engine.engine import Engine as Engine
    from twostroke.engine.offline import LLM as LLM
    from twostroke.engine.results import GenerationResult as GenerationResult

__version__ = "0.3.0"

_HOMES = {
    "LLM": "twostroke.engine.offline",
    "Engine": "twostroke.engine.engine",
    "EngineConfig": "twostroke.config",
    "GenerationResult": "twostroke.engine.results",
    "GrammarSpec": "twostroke.core.grammar",
    "KVConfig": "twostroke.config",
    "PrefillProgress": "twostroke.core.events",
    "PromiseError": "twostroke.core.errors",
    "Request": "twostroke.core.request",
    "SamplingParams": "twostroke.core.sampling_params",
    "TokenEvent": "twostroke.core.events",
    "TwostrokeError": "twostroke.core.errors",
}

__all__ = ["__version__", *_HOMES]


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'twostroke' has no attribute {name!r}")
    return getattr(import_module(_HOMES[name]), name)


def __dir__() -> list[str]:
    """For completion: what is loaded when it is first used is there all the same."""
    modules = (name for name in globals() if name.startswith("__"))
    return sorted({*modules, *_HOMES})
