import dataclasses

import pytest
import torch

from twostroke.backends.cuda.kernels.target import Target, launch_options, target_of


def test_a_host_device_has_the_interpreter_and_nothing_else(device):
    if device == "cuda":
        pytest.skip("there is a card")
    target = target_of("cpu")
    assert target.interpreted and not target.has_pdl and not target.is_hopper


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no card")
def test_the_card_says_what_it_is(device):
    target = target_of(device)
    assert target.capability == torch.cuda.get_device_capability()
    assert target.num_sms > 1 and target_of("cuda:0") is target_of("cuda:0")


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
    target = Target(interpreted=interpreted, capability=capability, num_sms=132)
    assert (target.has_pdl, target.is_hopper, target.has_bulk_copies) == (has_pdl, is_hopper, has_bulk_copies)
    with pytest.raises(dataclasses.FrozenInstanceError):
        target.num_sms = 1


def test_a_plain_launch_has_no_options_that_the_interpreter_would_not_know():
    assert launch_options(False) == {} and launch_options(True) == {"launch_pdl": True}
