"""The page that teaches the subject quotes what was measured, word for word, and its arithmetic can be checked."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from twostroke.lab.experiments import EXPERIMENTS
from twostroke.lab.run import findings_of
from twostroke.lab.wording import share

ROOT = Path(__file__).resolve().parents[2]
PAGE = (ROOT / "docs" / "two-phases.md").read_text(encoding="utf-8")
RECORD = json.loads((ROOT / "bench" / "results" / "lab-smollm2.json").read_text(encoding="utf-8"))
TAUGHT = [name for name in EXPERIMENTS if name not in ("promise", "speculation")]
"""That one is of decode alone, and has a page of its own."""
FINDINGS = {finding.name: finding for finding in findings_of(RECORD)}


def test_every_experiment_was_measured_for_the_page() -> None:
    assert set(FINDINGS) == set(TAUGHT)
    assert all(finding.skipped is None for finding in FINDINGS.values())


@pytest.mark.parametrize("name", TAUGHT)
def test_the_page_quotes_the_record_and_shows_its_plot(name: str) -> None:
    assert f"\n> {FINDINGS[name].sentence}\n" in PAGE
    assert f"(plots/{name}.svg)" in PAGE
    assert (ROOT / "docs" / "plots" / f"{name}.svg").stat().st_size < 100_000


def test_the_ridges() -> None:
    assert round(989e12 / 4.8e12) == 206 and round(989e12 / 3.35e12) == 295
    measured = (ROOT / "bench" / "results" / "cuda-bench.txt").read_text(encoding="utf-8")
    multiply_adds, read = re.findall(r"allows: ([\d.]+) T multiply-adds/s, ([\d.]+) TB/s read", measured)[0]
    peak = 2 * float(multiply_adds)
    # The record's floors counted with what a copy reads and writes; the engine's own count with what is only read.
    assert f"| {peak:.0f} TFLOP/s | {read} TB/s (a copy) | {peak / float(read):.0f} FLOP/byte |" in PAGE
    ceilings = RECORD["ceilings"]
    ridge = 2 * ceilings["multiply_adds_per_s"] / ceilings["read_bytes_per_s"]
    assert f"| {ridge:.3g} FLOP/byte |" in PAGE


def test_a_token_of_a_70b_model() -> None:
    parameters = 70.6e9  # Llama 3.1 70B
    assert f"{2 * parameters / 1e9:.0f} GFLOPs a token" in PAGE
    assert f"{2 * parameters / 989e12 * 1e3:.2f} ms of arithmetic" in PAGE
    assert f"{2 * parameters / 4.8e12 * 1e3:.0f} ms of reading {2 * parameters / 1e9:.0f} GB" in PAGE


def test_the_errors_of_every_run_stand_on_the_page() -> None:
    """All complete runs, not the best of them."""
    names = ("lab-smollm2-run1", "lab-smollm2-run2", "lab-smollm2")
    texts = [(ROOT / "bench" / "results" / f"{name}.json").read_text(encoding="utf-8") for name in names]
    runs = [{finding.name: finding.numbers for finding in findings_of(json.loads(text))} for text in texts]
    for name in TAUGHT:
        errors = [run[name].get("prediction_error") for run in runs]
        if None not in errors:
            assert f"| {name} | {' | '.join(share(error) for error in errors)} |" in PAGE
