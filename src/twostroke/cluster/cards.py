"""Which cards of this machine each of several workers has: a run of them for the ranks of each copy. Nothing here
imports torch, for a fleet's own process computes nothing."""

from __future__ import annotations

import re
from collections.abc import Sequence
from importlib.util import find_spec
from itertools import pairwise
from pathlib import Path

from twostroke.core.errors import BadRequestError

VISIBLE = "CUDA_VISIBLE_DEVICES"
DEVICES = Path("/dev")
_CARD = re.compile(r"nvidia\d+")


def option_of(options: Sequence[str], flag: str) -> str | None:
    """The value that the last of a command's options gives it; None: none does."""
    found = None
    for option, behind in pairwise((*options, "")):
        if option == flag or option.startswith(f"{flag}="):
            found = option.removeprefix(flag).removeprefix("=") or behind
    return found


def visible_cards(variable: str | None, devices: Path = DEVICES) -> list[str]:
    """As processes started from here name them. `variable`: the value of CUDA_VISIBLE_DEVICES; None: it is not set, and
    all cards that this machine or container has are seen."""
    if variable is None:
        num_cards = len([entry for entry in devices.glob("nvidia*") if _CARD.fullmatch(entry.name)])
        return [str(card) for card in range(num_cards)]
    names = [name.strip() for name in variable.split(",")]
    valid = next((place for place, name in enumerate(names) if not name or name.startswith("-")), len(names))
    return names[:valid]  # CUDA stops at the first that is none


def dealt(cards: Sequence[str], num_workers: int, options: Sequence[str]) -> tuple[str, ...]:
    """What CUDA_VISIBLE_DEVICES is for each worker; empty: what it is here. `options`: of `twostroke serve`, for all of
    them. Raises BadRequestError where ranks that need a card each would have to share one. Workers without ranks take
    turns where they are more than the cards."""
    if not cards or option_of(options, "--backend") not in (None, "auto", "cuda") or find_spec("torch") is None:
        return ()
    num_ranks = _ranks(options)
    num_wanted = num_workers * num_ranks
    if num_ranks > 1 and num_wanted > len(cards):
        if option_of(options, "--rank-transport") == "gloo":
            return ()
        who = f"{num_workers} workers of {num_ranks} ranks need" if num_workers > 1 else f"{num_ranks} ranks need"
        raise BadRequestError(
            f"{who} {num_wanted} cards, and there {'are' if len(cards) > 1 else 'is'} {len(cards)}: give fewer workers "
            "or ranks, --rank-transport gloo, by which ranks share a card, or --backend cpu"
        )
    if len(cards) == 1:
        return ()
    return tuple(
        ",".join(cards[(place * num_ranks + rank) % len(cards)] for rank in range(num_ranks))
        for place in range(num_workers)
    )


def _ranks(options: Sequence[str]) -> int:
    given = option_of(options, "--tensor-parallel") or ""
    return max(1, int(given)) if given.isdecimal() else 1  # what is no number is refused by the server
