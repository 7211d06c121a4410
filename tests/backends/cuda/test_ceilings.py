"""The rates that floors count with, and how they are shown. What they are measured with: `test_read_memory.py`; that
they are, on a card: `test_factory.py`."""

from __future__ import annotations

import io
from collections.abc import Callable

import pytest
import torch
from rich.console import Console

from twostroke.backends.cuda import FACTORY, ceilings
from twostroke.backends.cuda.ceilings import DeviceRates, read_rates
from twostroke.backends.cuda.kernels.read_memory import ROW_BYTES, WIDTH, ReadConfig
from twostroke.cli.bench_table import print_limits
from twostroke.core.formats import Formats
from twostroke.lab.limits import Limits

DEEP, EVEN = ReadConfig(16, 2, 7, bulk=True), ReadConfig(16, 3, 1, bulk=False)


def rates(copy: float, **reads: float) -> DeviceRates:
    return DeviceRates("H200", copy, reads, multiply_adds_per_s=4e14, launch_s=4e-6)


@pytest.mark.parametrize(
    ("found", "faster", "bytes_per_s"),
    [
        (rates(4.1e12, deep=4.5e12, even=4.4e12), "read", 4.5e12),
        (rates(4.6e12, deep=4.5e12, even=4.4e12), "copy", 4.6e12),
        (rates(4.1e12, even=4.1e12), "read", 4.1e12),
    ],
)
def test_floors_count_with_the_faster(
    found: DeviceRates, faster: str, bytes_per_s: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert (found.floors_count_with, found.memory_bytes_per_s) == (faster, bytes_per_s)
    assert found.read_bytes_per_s == max(found.reads.values())
    monkeypatch.setattr(ceilings, "machine_rates", lambda: found)
    assert FACTORY.ceilings(None, 1, Formats.of("bf16")).read_bytes_per_s == bytes_per_s  # type: ignore[arg-type]  # not looked at
    assert FACTORY.measured_limits()["floors count with"] == faster


def test_limits_show_every_rate_and_which_one_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ceilings, "machine_rates", lambda: rates(4.1e12, deep=4.5e12, even=4.4e12))
    shown = io.StringIO()
    own = FACTORY.ceilings(None, 1, Formats.of("bf16"))  # type: ignore[arg-type]  # not looked at
    print_limits(Console(file=shown, width=160), Limits("cuda", 1, (own,), FACTORY.measured_limits()))
    lines = shown.getvalue().splitlines()
    assert lines[-7:] == [
        "copy TB/s: 4.1",
        "read TB/s: 4.5",
        "read TB/s by deep: 4.5",
        "read TB/s by even: 4.4",
        "floors count with: read",
        "bf16 TFLOP/s: 800",
        "kernel launch us: 4",
    ]


def test_each_way_reads_everything_in_the_time_it_is_given(device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Compiled beside each other first where that can be; then each is timed alone."""
    memory = torch.arange(16 * 5 * WIDTH, dtype=torch.int32, device=device).view(-1, WIDTH)
    read_by: dict[ReadConfig, int] = {}
    own_read = ceilings.read

    def noting(memory: torch.Tensor, sums: torch.Tensor, config: ReadConfig) -> None:
        sums.zero_()
        own_read(memory, sums, config)
        read_by[config] = int(sums.sum())

    def timing(one_pass: Callable[[], None]) -> float:
        read_by.clear()
        one_pass()
        assert list(read_by.values()) == [int(memory.sum())]
        return 1e-3 * next(iter(read_by)).programs_per_sm

    monkeypatch.setattr(ceilings, "read", noting)
    monkeypatch.setattr(ceilings, "_median_s", timing)
    assert read_rates(memory, [DEEP, EVEN]) == {DEEP: memory.nbytes / 2e-3, EVEN: memory.nbytes / 3e-3}


@pytest.mark.parametrize("free, measured", [(100 << 30, 2 << 30), (3 << 30, 3 << 29), (64 << 20, 256 << 20)])
def test_what_is_measured_finds_room_beside_kv(free: int, measured: int) -> None:
    assert ceilings.bytes_to_measure(free) == measured
    for odd in (free + 1, free + 128, free + 3 * 128 + 7):
        assert ceilings.bytes_to_measure(odd) % (2 * ROW_BYTES) == 0, "a copy goes from one half to the other"
