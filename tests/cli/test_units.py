"""Numbers as people read them, and sizes as people write them."""

from __future__ import annotations

import pytest

from twostroke.cli import units
from twostroke.cli.options import parse_size
from twostroke.core.errors import BadRequestError


@pytest.mark.parametrize(
    ("value", "expected"),
    [(None, "-"), (0.0, "0 µs"), (1.5e-4, "150 µs"), (0.0123, "12.3 ms"), (0.25, "250 ms"), (1.0, "1.00 s")],
)
def test_seconds(value: float | None, expected: str) -> None:
    assert units.seconds(value) == expected


def test_rate() -> None:
    assert units.rate(3000, 2.0) == "1,500 tok/s"
    assert units.rate(0, 2.0) == "0 tok/s"
    assert units.rate(5, None) == units.rate(5, 0.0) == "-"


@pytest.mark.parametrize(
    ("value", "expected"),
    [(0, "0 B"), (999, "999 B"), (1000, "1.0 kB"), (96_576_768, "96.6 MB"), (5e15, "5000.0 TB")],
)
def test_size(value: float, expected: str) -> None:
    assert units.size(value) == expected


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("1000", 1000),
        ("512MB", 512 * 10**6),
        ("2 GiB", 2 << 30),
        (" 1.5kb ", 1500),
        ("3b", 3),
        ("0", 0),
        ("1TiB", 2**40),
    ],
)
def test_sizes_as_written(text: str, expected: int) -> None:
    assert parse_size(text) == expected


@pytest.mark.parametrize("text", ["", "lots", "-1", "1e9", "5 XB", "1.2.3MB", "nan", "inf", "9" * 400 + "TB", "٣MB x"])
def test_what_is_no_size_is_refused(text: str) -> None:
    with pytest.raises(BadRequestError, match="not a size"):
        parse_size(text)
