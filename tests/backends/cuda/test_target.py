import dataclasses

import pytest
import torch

from twostroke.backends.cuda.kernels import target
from twostroke.backends.cuda.kernels.target import Target, dependent, target_of


def test_a_host_device_has_the_interpreter_and_nothing_else(device):
    if device == "cuda":
        pytest.skip("there is a card")
    found = target_of("cpu")
    assert found.interpreted and not found.has_pdl and not found.is_hopper


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no card")
def test_the_card_says_what_it_is(device):
    found = target_of(device)
    assert found.capability == torch.cuda.get_device_capability()
    assert found.num_sms > 1 and target_of("cuda:0") is target_of("cuda:0")


@pytest.mark.parametrize(
    ("capability", "interpreted", "has_pdl", "is_hopper", "has_bulk_copies"),
    [
        ((8, 0), False, False, False, False),
        ((9, 0), False, True, True, True),
        ((9, 0), True, False, False, True),
        ((10, 0), False, True, False, True),
    ],
)
def test_what_follows_from_the_capability(capability, interpreted, has_pdl, is_hopper, has_bulk_copies):
    found = Target(interpreted=interpreted, capability=capability, num_sms=132)
    assert (found.has_pdl, found.is_hopper, found.has_bulk_copies) == (has_pdl, is_hopper, has_bulk_copies)
    with pytest.raises(dataclasses.FrozenInstanceError):
        found.num_sms = 1


class Kernel:
    """Says what it was launched with."""

    def __getitem__(self, grid):
        return lambda *values, **options: (grid, values, options)


@pytest.mark.parametrize(
    ("capability", "ahead", "options"),
    [
        ((9, 0), True, {"PDL": True, "launch_pdl": True}),
        ((9, 0), False, {"PDL": False}),
        ((8, 0), True, {"PDL": False}),  # no option that the interpreter would not know
    ],
)
def test_kernels_start_ahead_where_the_device_can(monkeypatch, capability, ahead, options):
    found = Target(interpreted=False, capability=capability, num_sms=132)
    monkeypatch.setattr(target, "_target", lambda device: found)
    launched = dependent(Kernel(), (3,), torch.device("cpu"), ahead=ahead)(1, 2, BLOCK=4)
    assert launched == ((3,), (1, 2), {"BLOCK": 4} | options)
