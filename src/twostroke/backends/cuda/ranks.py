"""Where the ranks of one copy meet on their cards: sums behind a layer's two blocks, logits side by side, and rank 0's
tokens. By NCCL from card to card, inside of captured graphs too; or by gloo through the host, which any device can, and
which several ranks on one card need. Knows tensors, no model and no Step."""

from __future__ import annotations

import os
from collections.abc import Callable
from datetime import timedelta
from importlib import import_module
from itertools import pairwise
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np
import torch

from twostroke.backends.interface import RanksPartedError
from twostroke.core.errors import BackendError

if TYPE_CHECKING:
    from twostroke.backends.interface import CardPlace

WAIT_S = 600.0
"""For a rank that is there and does not come: kernels of a size that only it meets may have to be compiled."""
NCCL_ENVIRONMENT = {
    # Every way to meet is connected at once: not in the middle of a capture.
    "NCCL_RUNTIME_CONNECT": "0",
    # A rank that is gone is the engine's to tell of; torch would end this process.
    "TORCH_NCCL_ASYNC_ERROR_HANDLING": "0",
    "TORCH_NCCL_ENABLE_MONITORING": "0",
}


class Transport(Protocol):
    """All ranks make the same calls in the same order, with tensors of the same shapes. Each raises RanksPartedError
    where it finds that another is gone."""

    is_captured: bool
    """Whether its calls may be part of a captured graph."""

    def add_up(self, values: torch.Tensor) -> None:
        """Put the sum over all ranks in their place, the same to the bit on every rank."""

    def lay_out(self, part: torch.Tensor, parts: torch.Tensor) -> None:
        """part [rows, width] of each rank to parts [ranks * rows, width] of all."""

    def spread(self, values: torch.Tensor) -> None:
        """Rank 0's to all others."""

    def abandon(self) -> None:
        """Let nobody of this process wait any longer. From any thread."""


def _meeting_place(place: CardPlace) -> Any:
    """Returns torch's store of the ranks' addresses. When it is destroyed, it opens its path once more
    and writes to what it finds there. The path names a descriptor, which may be another file's by then. So the store
    gets a descriptor of its own, which stays open as long as this process lives."""
    own = os.open(place.store, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    return _torch_ranks().FileStore(f"/proc/self/fd/{own}", len(place.widths))


class GlooTransport:
    """Through the host's memory, and sums in float32 there: a device is waited for each time."""

    is_captured = False

    def __init__(self, place: CardPlace) -> None:
        torch_ranks, size = _torch_ranks(), len(place.widths)
        gloo = torch_ranks.ProcessGroupGloo
        options = gloo._Options()
        options._devices = [gloo.create_device(hostname="127.0.0.1")]
        options._timeout = timedelta(seconds=WAIT_S)
        try:
            self._group = gloo(_meeting_place(place), place.rank, size, options)
        except RuntimeError as error:
            raise RanksPartedError(str(error)) from error
        self._from_first = torch_ranks.BroadcastOptions()

    def add_up(self, values: torch.Tensor) -> None:
        host = values.to("cpu", torch.float32).contiguous()
        _wait_for(lambda: self._group.allreduce([host]))
        if host is not values:
            values.copy_(host)

    def lay_out(self, part: torch.Tensor, parts: torch.Tensor) -> None:
        host = parts if parts.device.type == "cpu" else torch.empty(parts.shape, dtype=parts.dtype)
        _wait_for(lambda: self._group._allgather_base(host, part.cpu()))
        if host is not parts:
            parts.copy_(host)

    def spread(self, values: torch.Tensor) -> None:
        host = values.cpu()
        _wait_for(lambda: self._group.broadcast([host], self._from_first))
        if host is not values:
            values.copy_(host)

    def abandon(self) -> None:
        """Nothing waits long: gloo sees a rank that is gone."""


class NcclTransport:
    """From card to card, in the order of this thread's stream: the host waits for nothing."""

    is_captured = True

    def __init__(self, place: CardPlace) -> None:
        torch_ranks, size = _torch_ranks(), len(place.widths)
        if not torch_ranks.is_nccl_available():
            raise BackendError("this torch has no NCCL")
        for name, value in NCCL_ENVIRONMENT.items():
            os.environ.setdefault(name, value)
        nccl = torch_ranks.ProcessGroupNCCL
        options = nccl.Options()
        options._timeout = timedelta(seconds=WAIT_S)
        self._is_abandoned = False
        self._group = nccl(_meeting_place(place), place.rank, size, options)
        self._from_first = torch_ranks.BroadcastOptions()

    def add_up(self, values: torch.Tensor) -> None:
        _wait_for(lambda: self._group.allreduce([values]))

    def lay_out(self, part: torch.Tensor, parts: torch.Tensor) -> None:
        _wait_for(lambda: self._group._allgather_base(parts, part))

    def spread(self, values: torch.Tensor) -> None:
        _wait_for(lambda: self._group.broadcast([values], self._from_first))

    def abandon(self) -> None:
        if not self._is_abandoned:
            self._is_abandoned = True
            self._group.abort()


def _torch_ranks() -> Any:
    """Groups of processes are made directly, not by `init_process_group`: two engines may live in one process."""
    return import_module("torch.distributed")


def _wait_for(begin: Callable[[], Any]) -> None:
    """gloo's host; of NCCL this thread's stream."""
    try:
        begin().wait()
    except RuntimeError as error:
        raise RanksPartedError(str(error)) from error


TRANSPORTS: dict[str, type[GlooTransport] | type[NcclTransport]] = {"gloo": GlooTransport, "nccl": NcclTransport}


class CardRanks:
    """All ranks, as one of them has them. Until all have begun, steps are launched that have kernels compiled and are
    not the same on every rank: in these nobody meets. What is captured meets when it is replayed."""

    def __init__(self, place: CardPlace, device: torch.device, transport: Transport | None = None) -> None:
        self.rank, self._device = place.rank, device
        self._bounds = list(pairwise(np.cumsum([0, *place.widths]).tolist()))
        self._widest = max(place.widths)
        self._transport = TRANSPORTS[place.transport](place) if transport is None else transport
        self._has_begun = False
        self._own = self._part = self._parts = torch.empty(0, device=device)
        self._meet_once()

    @property
    def is_captured(self) -> bool:
        return self._transport.is_captured

    def make_room(self, num_rows: int) -> None:
        """For the logits of this many rows, at most."""
        size, (first, last) = len(self._bounds), self._bounds[self.rank]
        self._own = torch.zeros(num_rows * (last - first), device=self._device)
        self._part = torch.zeros(num_rows, self._widest, device=self._device)
        self._parts = torch.zeros(size * num_rows, self._widest, device=self._device)

    def begin(self) -> None:
        """From now on all ranks launch the same steps."""
        self._has_begun = True

    def add_up(self, values: torch.Tensor) -> None:
        """Put the sum over all ranks in their place."""
        if self._meets:
            self._transport.add_up(values)

    def own_logits(self, num_rows: int) -> torch.Tensor:
        """Where this rank's part of them is put  # float32 [num_rows, own width]"""
        first, last = self._bounds[self.rank]
        return self._own[: num_rows * (last - first)].view(num_rows, last - first)

    def collect(self, logits: torch.Tensor) -> None:
        """All parts of these rows, side by side  # float32 [num_rows, vocab]"""
        if not self._meets:
            return
        num_rows = len(logits)
        own, parts = self.own_logits(num_rows), self._parts[: len(self._bounds) * num_rows]
        if own.shape[1] < self._widest:  # all ranks' are as wide as the widest on their way
            own = self._widened(own)
        self._transport.lay_out(own, parts)
        for part, (first, last) in zip(parts.split(num_rows), self._bounds, strict=True):
            logits[:, first:last].copy_(part[:, : last - first])

    def _widened(self, own: torch.Tensor) -> torch.Tensor:
        part = self._part[: len(own)]
        part[:, : own.shape[1]].copy_(own)
        return part

    def spread(self, tokens: torch.Tensor) -> None:
        """Rank 0's tokens become everybody's."""
        if self._meets:
            self._transport.spread(tokens)

    def largest(self, number: int) -> int:
        """Of the ranks' own numbers: what all launch alike is decided by the same one. Before steps."""
        found = torch.zeros(len(self._bounds), dtype=torch.float32, device=self._device)
        found[self.rank] = number
        self._transport.add_up(found)
        return int(found.max())

    def abandon(self) -> None:
        """Nobody of this process meets any longer. From any thread."""
        self._transport.abandon()

    @property
    def _meets(self) -> bool:
        return self._has_begun or (self._device.type == "cuda" and torch.cuda.is_current_stream_capturing())

    def _meet_once(self) -> None:
        """Each way: connections are made now."""
        size = len(self._bounds)
        self._transport.add_up(torch.zeros(1, device=self._device))
        self._transport.lay_out(torch.zeros(1, 1, device=self._device), torch.zeros(size, 1, device=self._device))
        self._transport.spread(torch.zeros(1, dtype=torch.int32, device=self._device))
