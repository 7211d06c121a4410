"""The table, by the arithmetic that is done with it."""

import pytest

from twostroke.core.errors import BadRequestError
from twostroke.cost.devices import DEVICES, find_device


def test_an_h200s_ridge_is_206_flops_a_byte():
    # 989.5 TFLOP/s over 4.8 TB/s.
    assert find_device("h200").ridge_flops_per_byte("bf16") == pytest.approx(206.1, abs=0.1)


def test_ceilings_are_multiply_adds_and_grow_with_the_count():
    ceilings = find_device("h200").ceilings("bf16", count=8)
    assert ceilings.multiply_adds_per_s == pytest.approx(8 * 989.5e12 / 2)
    assert ceilings.read_bytes_per_s == 8 * 4.8e12
    assert ceilings.source == "8 x H200 by data sheet: bf16"


@pytest.mark.parametrize(
    ("name", "found"),
    [
        ("H200", "H200"),
        ("h100", "H100 SXM"),
        ("nvidia h100 sxm", "H100 SXM"),
        ("rtx4090", "RTX 4090"),
        ("GeForce RTX-4090", "RTX 4090"),
        ("a100", "A100 80GB"),
        ("mi300x", "MI300X"),
        ("AMD Instinct MI300X", "MI300X"),
        ("m4 max", "Apple M4 Max"),
        ("Apple M4 Max", "Apple M4 Max"),
    ],
)
def test_names_as_people_write_them(name, found):
    assert find_device(name).name == found


def test_an_unknown_name_lists_near_ones():
    with pytest.raises(BadRequestError, match=r"no device 'h201'; did you mean H200"):
        find_device("h201")
    with pytest.raises(BadRequestError, match="known are: RTX 3090"):
        find_device("x" * 10_000)


def test_arithmetic_a_device_does_not_have():
    with pytest.raises(BadRequestError, match="A100 80GB has no fp8 arithmetic in the table: it has bf16, int8"):
        find_device("a100").ceilings("fp8")
    with pytest.raises(BadRequestError, match="from 1 to 1024"):
        find_device("a100").ceilings("bf16", count=0)


def test_every_number_has_a_source_and_every_price_a_date():
    import re

    assert len({device.name for device in DEVICES}) == len(DEVICES)
    for device in DEVICES:
        assert device.sources, device.name
        prices = [source for source in device.sources if source.startswith("price:")]
        assert (device.price_per_hour_usd is not None) == bool(prices), device.name
        assert all(re.search(r"20\d\d-\d\d-\d\d", source) for source in prices), device.name


def test_numbers_are_plausible():
    """Against slips of the keyboard: a factor of two in sparsity, a thousand in units."""
    for device in DEVICES:
        assert 2 < device.peak_flops["bf16"] / 1e12 < 3000, device.name
        assert 5e10 < device.read_bytes_per_s < 1e13, device.name
        assert 8e9 < device.memory_bytes < 1e12, device.name
        assert 20 < device.ridge_flops_per_byte("bf16") < 450, device.name
        if "fp8" in device.peak_flops:
            assert 1.9 < device.peak_flops["fp8"] / device.peak_flops["bf16"] < 2.1, device.name
