"""What the documents say of prompts in float8 stands in the record, and so do the package's lines."""

from __future__ import annotations

import re
from collections import defaultdict

import pytest

from tests.bench.test_tables import numbers, table_with, text_of
from twostroke.backends.cuda.kernels.product import Product
from twostroke.backends.cuda.tuned_table import table_for

RECORD = text_of("bench/results/cuda-float8.txt")
PAGE = text_of("docs/performance-gpu.md")
PROSE = " ".join(PAGE.split())
ROWS = (512, 1024, 2048, 8192)
CODES = {"fp8 in blocks of 128": "fp8_128", "int4 (W4A8)": "int4_128"}
DENSE = (("join", 4096, 4096), ("plain", 6144, 4096), ("gated", 14336, 4096), ("join", 4096, 14336))
LINE = re.compile(r"^\| (\w+) (\d+) x (\d+) in (\w+) \| (\d+) \| (\w+)[^|]* \| ([\d.]+) \| (\d+) \|", re.MULTILINE)


def _measured() -> dict[tuple[str, int, int, str, int], dict[str, tuple[float, float]]]:
    """us and TFLOP/s of each kernel's fastest tile."""
    found = defaultdict[tuple[str, int, int, str, int], dict[str, tuple[float, float]]](dict)
    for role, outputs, width, code, rows, kernel, us, tflops in LINE.findall(RECORD):
        found[role, int(outputs), int(width), code, int(rows)][kernel] = (float(us), float(tflops))
    return found


MEASURED = _measured()


def gains(code: str, rows: int, kernel: str = "float8_library") -> list[float]:
    """Of the 8B's four matrices, beside bringing them to bf16."""
    each = (MEASURED[*product, code, rows] for product in DENSE)
    return sorted(one[f"{code}_unpacked"][0] / one[f"{code}_{kernel}"][0] for one in each)


def ends(values: list[float]) -> list[float]:
    return [round(values[0], 2), round(values[-1], 2)]


@pytest.mark.parametrize("rows", ROWS)
def test_the_table_of_ratios(rows: int) -> None:
    [own] = [table_with(PAGE, "8,192")[f"{rows:,}" if rows >= 1000 else str(rows)]]
    for head, code in CODES.items():
        assert numbers(own[head]) == ends(gains(code, rows))


def test_what_is_said_beside_it() -> None:
    ours = sorted(ratio for code in CODES.values() for rows in ROWS for ratio in gains(code, rows, "float8"))
    low, high = ends(ours)
    assert f"on an H200 it is at {low} to {high}." in PROSE
    rates = {
        code: [round(MEASURED[*product, code, 8192][kernel][1]) for product in DENSE]
        for code, kernel in (
            ("fp8_128", "fp8_128_float8_library"), ("int4_128", "int4_128_float8_library"), ("bf16", "cublas"),
        )
    }  # fmt: skip
    least, most = ({code: pick(found) for code, found in rates.items()} for pick in (min, max))
    assert f"blocks reaches {least['fp8_128']} to {most['fp8_128']} TFLOP/s" in PROSE
    assert f"int4 {least['int4_128']} to {most['int4_128']}, where bf16 weights reach" in PROSE
    assert f"bf16 weights reach {least['bf16']} to {most['bf16']}." in PROSE
    experts = [found for key, found in MEASURED.items() if key[3] == "fp8_units"]
    in_units = sorted(
        one["fp8_units_float8_experts"][0] / one["fp8_units_experts"][0]
        for one in experts
        if "fp8_units_experts" in one
    )
    assert f"is {in_units[0]:.1f} to {in_units[-1]:.1f} times as fast as float8" in PROSE
    assert all(one["fp8_units_float8_experts"][0] > min(us for us, _ in one.values()) for one in experts)


def test_lines_are_where_float8_was_faster() -> None:
    """And nowhere else; the backend's page says by how much."""
    table, taken = table_for("NVIDIA H200"), list[float]()
    for role, outputs, width in DENSE:
        for code in CODES.values():
            lines = table.products[Product(role, outputs, width)].get(f"{code}_in_float8", ())  # type: ignore[arg-type]
            for rows in ROWS:
                own = MEASURED[role, outputs, width, code, rows]
                gain = own[f"{code}_unpacked"][0] / own[f"{code}_float8_library"][0]
                assert any(one.first <= rows <= one.last for one in lines) == (gain > 1)
                taken += [gain] if gain > 1 else []
    low, high = ends(sorted(taken))
    for page in ("docs/backends.md", "docs/roadmap.md"):
        assert f"{low} to {high} times](" in text_of(page)
