"""Backends by name. A backend's module is imported only when it is asked about: `cuda` must not cost a CPU user torch.
A new backend adds one line here, one folder, and what it computes to `models/features.py`."""

from __future__ import annotations

from importlib import import_module

from twostroke.backends.interface import NO_RANKS, BackendFactory, CardTransport, RankedFactory
from twostroke.core.errors import BackendError
from twostroke.core.formats import ANY_FORMATS, FormatWish
from twostroke.models.checkpoint import Checkpoint

BACKENDS: dict[str, str] = {
    "cuda": "twostroke.backends.cuda",
    "cpu": "twostroke.backends.cpu",
    "reference": "twostroke.backends.reference",
}
"""Name to the module whose `FACTORY` is its BackendFactory, the fastest first: `auto` takes the first that supports."""


SHARDED = "twostroke.backends.sharded"
"""The module whose `shared_by` makes one backend of several ranks of another."""


def load_factory(name: str) -> BackendFactory:
    if name not in BACKENDS:
        raise BackendError(f"there is no backend {name!r}; the backends are: {', '.join(BACKENDS)}")
    factory: BackendFactory = import_module(BACKENDS[name]).FACTORY
    return factory


def why_no_ranks(name: str) -> str | None:
    """Why this backend shares no model between several ranks, whatever the model; None: it does."""
    return None if isinstance(load_factory(name), RankedFactory) else NO_RANKS


def _shared(name: str, ranks: int, transport: CardTransport | None) -> BackendFactory:
    factory: BackendFactory = import_module(SHARDED).shared_by(load_factory(name), ranks, transport)
    return factory


def choose(
    name: str,
    checkpoint: Checkpoint,
    wish: FormatWish = ANY_FORMATS,
    ranks: int = 1,
    transport: CardTransport | None = None,
) -> tuple[BackendFactory, str]:
    """The factory for `name` and the reason for the choice. "auto": the first that supports the model and has the
    formats that were asked for. Whether a backend that was named has them, its own `formats` says. `ranks`: that share
    the model, each with a part of it; `transport`: by what those on cards meet."""
    declined: list[str] = []
    for candidate in BACKENDS if name == "auto" else (name,):
        factory = load_factory(candidate) if ranks == 1 else _shared(candidate, ranks, transport)
        reason = factory.supports(checkpoint)
        if reason is not None and ranks > 1 and load_factory(candidate).supports(checkpoint) is None:
            raise BackendError(  # whoever asks for ranks wants to be faster: no slower backend is taken for them
                f"the {candidate} backend runs this model, but not with --tensor-parallel {ranks}: {reason}"
                + ("; --backend names another" if name == "auto" else "")
            )
        if reason is None and name != "auto":
            return factory, "asked for"
        if reason is None and wish != ANY_FORMATS:
            found = factory.formats(checkpoint, wish)
            reason = found if isinstance(found, str) else None
        if reason is None:
            asked = "" if wish == ANY_FORMATS else " in the formats asked for"
            without = "".join(f" ({sentence})" for sentence in declined)
            return factory, f"the fastest that supports this model{asked}{without}"
        declined.append(f"not {candidate}: {reason}")
    raise BackendError("no backend can run this model here; " + "; ".join(declined))
