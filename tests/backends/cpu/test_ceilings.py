"""The machine's measured rates: plausible, remembered, and measured again when what is remembered is damaged."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from twostroke.backends.cpu import ceilings
from twostroke.backends.cpu.ceilings import MachineRates, machine_rates, measure
from twostroke.backends.cpu.isa import choose

SMALL_BYTES = 8 << 20


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("TWOSTROKE_CACHE", str(tmp_path))
    return tmp_path / "ceilings"


@pytest.mark.parametrize("isa_name", ["generic", None])
def test_rates_are_plausible(isa_name: str | None) -> None:
    isa = choose(isa_name)
    rates = measure(isa, 2, SMALL_BYTES)
    assert 1e8 < rates.read_bytes_per_s < 1e13  # little is read, perhaps by two threads on one busy core
    assert 1e9 < rates.dot_multiply_adds_per_s < 1e13
    assert 1e8 < rates.float_multiply_adds_per_s < 1e13
    assert (rates.isa, rates.threads) == (isa.name, 2)


def test_an_instruction_set_made_for_it_is_faster_at_dot_products() -> None:
    if choose().name == "generic":
        pytest.skip("this machine has the generic set alone")
    for _ in range(5):  # others use this machine too
        fast, slow = (measure(choose(name), 1, SMALL_BYTES) for name in (None, "generic"))
        if fast.dot_multiply_adds_per_s > slow.dot_multiply_adds_per_s:
            return
    raise AssertionError((fast, slow))


def test_rates_are_remembered(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[int] = []

    def counted(isa: object, threads: int) -> MachineRates:
        calls.append(threads)
        return MachineRates(1e10, 2e10, 3e10, choose().name, threads)

    monkeypatch.setattr(ceilings, "measure", counted)
    assert machine_rates(choose(), 1) == machine_rates(choose(), 1)
    assert calls == [1]
    machine_rates(choose(), 2)
    assert calls == [1, 2]
    for path in cache.iterdir():
        path.write_text('{"read_bytes_per_s": NaN}')
    assert machine_rates(choose(), 1).read_bytes_per_s == 1e10
    assert calls == [1, 2, 1]


def test_what_has_aged_is_measured_again_and_only_raised(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    measured = iter(
        [MachineRates(1e10, 2e10, 3e10, choose().name, 1), MachineRates(2e10, 1e10, 3e10, choose().name, 1)]
    )
    monkeypatch.setattr(ceilings, "measure", lambda isa, threads: next(measured))
    machine_rates(choose(), 1)
    for path in cache.iterdir():
        os.utime(path, (0, 0))
    assert machine_rates(choose(), 1) == MachineRates(2e10, 2e10, 3e10, choose().name, 1)
