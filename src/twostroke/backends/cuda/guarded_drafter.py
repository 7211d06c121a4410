"""A drafter on a device as steps call it. One that raises while a step is launched is given up: the step goes on
without its drafts, and no later one has any of it. While the engine starts it may raise: whoever asked for it is told
then. What fails on the device itself is told of later, by whatever is launched next, and cannot be caught here."""

from __future__ import annotations

from collections.abc import Callable

import torch

from twostroke.backends.cuda.drafting import NO_DRAFT, DeviceDrafter
from twostroke.backends.cuda.passes import Pass


class GuardedDrafter:
    def __init__(self, drafter: DeviceDrafter) -> None:
        self._drafter = drafter
        self._give_up: Callable[[Exception], None] | None = None
        self._is_given_up = False

    def guard(self, give_up: Callable[[Exception], None]) -> None:
        """From now on it may raise; `give_up` is told, once."""
        self._give_up = give_up

    def follow(self, done: Pass, taps: torch.Tensor) -> None:
        self._calls(lambda: self._drafter.follow(done, taps))

    def draft(self, rows: torch.Tensor, width: int, drafts: torch.Tensor) -> None:
        """As `DeviceDrafter.draft`: where it cannot, nothing is drafted."""
        if not self._calls(lambda: self._drafter.draft(rows, width, drafts)):
            drafts.fill_(NO_DRAFT)

    def _calls(self, act: Callable[[], None]) -> bool:
        """Whether it was called, and did what it was to do."""
        if self._is_given_up:
            return False
        try:
            act()
        except Exception as error:
            if self._give_up is None:
                raise
            self._is_given_up = True
            self._give_up(error)
        return not self._is_given_up
