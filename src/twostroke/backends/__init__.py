"""Backends by name. A backend's module is imported only when it is asked about: `cuda` must not cost a CPU user torch.
A new backend adds one line here and one folder."""

from __future__ import annotations

from importlib import import_module

from twostroke.backends.interface import BackendFactory
from twostroke.core.errors import BackendError
from twostroke.core.formats import FormatWish
from twostroke.models.checkpoint import Checkpoint

BACKENDS: dict[str, str] = {
    "cuda": "twostroke.backends.cuda",
    "cpu": "twostroke.backends.cpu",
    "reference": "twostroke.backends.reference",
}
"""Name to the module whose `FACTORY` is its BackendFactory, the fastest first: `auto` takes the first that supports."""


def load_factory(name: str) -> BackendFactory:
    if name not in BACKENDS:
        raise BackendError(f"there is no backend {name!r}; the backends are: {', '.join(BACKENDS)}")
    factory: BackendFactory = import_module(BACKENDS[name]).FACTORY
    return factory


def choose(name: str, checkpoint: Checkpoint, weights: str | None = None) -> tuple[BackendFactory, str]:
    """The factory for `name` ("auto": the first that supports the model) and the reason for the choice. `weights`: what
    float matrices are to be brought to, if that was asked for; a backend that cannot is passed over."""
    declined: list[str] = []
    for candidate in BACKENDS if name == "auto" else (name,):
        factory = load_factory(candidate)
        reason = factory.supports(checkpoint)
        if reason is None and weights is not None:
            found = factory.formats(checkpoint, FormatWish(weights))
            reason = found if isinstance(found, str) else None
        if reason is None:
            if name != "auto":
                return factory, "asked for"
            without = "".join(f" ({sentence})" for sentence in declined)
            return factory, f"the fastest that supports this model{without}"
        declined.append(f"not {candidate}: {reason}")
    raise BackendError("no backend can run this model here; " + "; ".join(declined))
