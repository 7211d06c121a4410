"""Several ranks for one copy of a model, as an engine is built with them: what does not go with them, and what a user
is told of them. How they compute is the backend's (`backends/sharded`)."""

from __future__ import annotations

from twostroke.backends.interface import BackendFactory, SharingFactory
from twostroke.config import EngineConfig
from twostroke.core.errors import BadRequestError
from twostroke.models.checkpoint import Checkpoint
from twostroke.speculation.methods import computing_methods

OPTION = "--tensor-parallel"


def refuse_with_ranks(config: EngineConfig, in_fleet: bool = False) -> None:
    """Raise for what several ranks do not have, before anything is loaded. `in_fleet`: KV goes to other engines, and
    comes from there."""
    if config.tensor_parallel == 1:
        if config.rank_transport is not None:
            raise BadRequestError(f"--rank-transport is for several ranks: it goes with {OPTION}")
        return
    if in_fleet:
        raise BadRequestError(f"--role does not go with {OPTION}: ranks do not give their KV out yet")
    for method in computing_methods(config.speculate):
        raise BadRequestError(
            f"--speculate {method} does not go with {OPTION}: a model or a head that drafts is not shared by "
            "ranks yet; --speculate auto works"
        )
    for flag, asked in (("--kv-host-gb", config.kv.host_gb), ("--kv-disk", config.kv.disk)):
        if asked:
            raise BadRequestError(f"{flag} does not go with {OPTION}: ranks do not give their KV out yet")


def with_ranks(config: EngineConfig) -> str:
    """Of what computes: calibrations of other numbers of ranks are no measure of it."""
    if config.tensor_parallel == 1:
        return ""
    transport = "" if config.rank_transport is None else f" by {config.rank_transport}"
    return f", {config.tensor_parallel} ranks{transport}"


def ranks_reasons(config: EngineConfig, checkpoint: Checkpoint, factory: BackendFactory) -> tuple[str, ...]:
    if config.tensor_parallel == 1:
        return ()
    held = factory.described(checkpoint) if isinstance(factory, SharingFactory) else ""
    return (f"{config.tensor_parallel} ranks share the model, a process each: {held}",)
