"""How near a kernel's output must be to float32 mathematics, given the type it is rounded to."""

import torch

DTYPES = [torch.float32, torch.float16, torch.bfloat16]

TOLERANCE = {torch.float32: 2e-5, torch.float16: 4e-3, torch.bfloat16: 3e-2}
"""A few roundings of the type, relative to the largest value."""


def assert_close(actual, expected):
    """Equal shapes, and no element further off than the tolerance of its own type."""
    assert actual.shape == expected.shape
    assert torch.isfinite(actual.float()).all()
    largest = expected.abs().max().clamp(min=1.0)
    error = ((actual.float() - expected).abs().max() / largest).item()
    assert error < TOLERANCE[actual.dtype], f"error {error:.1e} of the largest value"


def random(*shape, dtype, device, seed=0):
    generator = torch.Generator().manual_seed(seed + sum(shape))
    return torch.randn(shape, generator=generator).to(dtype).to(device)


def poisoned(*shape, dtype, device):
    """An output that shows what was not written."""
    return torch.full(shape, float("nan"), dtype=dtype, device=device)
