"""What device is here, as far as a choice of formats asks: of none nothing is known. Knows no model, and imports torch
only where a device was found."""

from __future__ import annotations

import ctypes
from functools import cache
from importlib.util import find_spec

from twostroke.backends.cuda.kernels.product import Card
from twostroke.core.errors import install_hint


@cache
def none_found() -> str | None:
    """Asked of the driver's library, which takes a millisecond; importing torch to ask takes seconds."""
    if find_spec("torch") is None or find_spec("triton") is None:
        return f"torch and triton are not installed; {install_hint('cuda')}"
    try:
        driver = ctypes.CDLL("libcuda.so.1")
    except OSError:
        return "there is no NVIDIA driver on this machine"
    count = ctypes.c_int(0)
    if driver.cuInit(0) != 0 or driver.cuDeviceGetCount(ctypes.byref(count)) != 0 or count.value == 0:
        return "the NVIDIA driver finds no device"
    return None


def lacks_float8() -> bool:
    """Of a device that is here; of none nothing is known."""
    if none_found() is not None:
        return False
    import torch

    return torch.cuda.is_available() and torch.cuda.get_device_capability() < (8, 9)


def card_here() -> Card | None:
    """As kernels decline it; None: no device is here."""
    if none_found() is not None:
        return None
    import torch

    from twostroke.backends.cuda.products import card_of

    return card_of(torch.device("cuda"), torch.bfloat16) if torch.cuda.is_available() else None


def reads_few_bits() -> bool:
    """Whether a device that is here has the kernels that make 16 bits of few in registers; of none nothing is known."""
    card = card_here()
    return card is None or card.has_hopper_kernels
