"""Kernels launched one behind the other's end: what chains of dependent launches are held against."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import fields
from unittest.mock import patch

import torch

from twostroke.backends.cuda.kernels import target
from twostroke.backends.cuda.kernels.target import Target


class _Plain(Target):
    has_pdl = property(lambda self: False)  # type: ignore[assignment]


@contextmanager
def plain_launches(device: torch.device | str) -> Iterator[None]:
    """Within, the device is the same but that it has no dependent launches."""
    real = target.target_of(device)
    plain = _Plain(**{field.name: getattr(real, field.name) for field in fields(real)})
    with patch.object(target, "_target", lambda device: plain):
        yield
