"""What the device at hand can do, asked once: the kernels' wrappers and the model choose by it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache, partial
from typing import Any

import torch
import triton

from twostroke.backends.cuda.compile_ahead import launcher

GROUP_SCALES_SINCE = (12, 9)


@dataclass(frozen=True)
class Target:
    """A device as kernels see it."""

    interpreted: bool
    """Kernels run in Triton's interpreter, on the host: slow, and blind to what only hardware has."""
    capability: tuple[int, int]  # CUDA's compute capability; (0, 0) on the host
    num_sms: int  # streaming multiprocessors: how many programs run at once, at least
    shared_bytes: int | None = None
    """Shared memory that one program may take; None on the host, which has no such limit."""
    name: str = ""
    """A card's, by which what was measured on it is found; the host has none."""

    @property
    def room(self) -> dict[str, int]:
        """As a fact that tables of settings go by; on the host there is none."""
        return {} if self.shared_bytes is None else {"shared_bytes": self.shared_bytes}

    def stages(self, wanted: int, stage_bytes: int) -> int:
        """As many of a ring's stages as shared memory holds, beside a little for sums over warps and barriers."""
        if self.shared_bytes is None:
            return wanted
        return max(1, min(wanted, (self.shared_bytes - 1024) // stage_bytes))

    @property
    def has_pdl(self) -> bool:
        """Whether a kernel may be launched before the one ahead of it has ended (programmatic dependent launch)."""
        return not self.interpreted and self.capability >= (9, 0)

    @property
    def has_bulk_copies(self) -> bool:
        """Whether an engine of its own copies blocks that a tensor descriptor tells of; the interpreter copies too."""
        return self.interpreted or self.capability >= (9, 0)

    @property
    def is_hopper(self) -> bool:
        """Whether the warp-group matrix instructions of sm_90 are there; later chips have others instead."""
        return not self.interpreted and self.capability[0] == 9

    @property
    def has_float8(self) -> bool:
        """Whether tensor cores multiply float8."""
        return not self.interpreted and self.capability >= (8, 9)

    @property
    def lacks_group_scales(self) -> bool:
        """Whether torch was built for a CUDA whose library has no scale for 128 inputs of a row."""
        built_for = (torch.version.cuda or "").split(".")
        return len(built_for) > 1 and tuple(map(int, built_for[:2])) < GROUP_SCALES_SINCE


def target_of(device: torch.device | str) -> Target:
    """The target behind a torch device, the current one where it names none; the host has the interpreter only."""
    return _target(torch.device(device))


@cache
def _target(device: torch.device) -> Target:
    interpreted = bool(triton.knobs.runtime.interpret)
    if device.type != "cuda":
        return Target(interpreted=interpreted, capability=(0, 0), num_sms=1)
    properties = torch.cuda.get_device_properties(device)
    index = torch.cuda.current_device() if device.index is None else device.index
    # Triton's word rather than torch's: its launches are held against this number.
    shared_bytes = triton.runtime.driver.active.utils.get_device_properties(index)["max_shared_mem"]
    capability = (properties.major, properties.minor)
    return Target(interpreted, capability, properties.multi_processor_count, shared_bytes, properties.name)


def dependent(kernel: Any, grid: tuple[int, ...], device: torch.device, *, ahead: bool = True) -> Callable[..., Any]:
    """What launches a kernel that waits for the one ahead of it by itself: before that has ended, where the device has
    such launches. The kernel is told by its constant `PDL`. Without `ahead` it starts behind the end, as any other."""
    if ahead and target_of(device).has_pdl:
        return partial(launcher(kernel, grid), PDL=True, launch_pdl=True)
    return partial(launcher(kernel, grid), PDL=False)
