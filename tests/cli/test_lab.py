"""`twostroke lab` as a user types it, over a tiny model of random weights."""

from __future__ import annotations

import io
import json
from pathlib import Path

import pytest
from rich.console import Console
from tests.cli.in_process import typed
from tests.cli.test_cli import twostroke

from twostroke.cli import lab as lab_command
from twostroke.lab.experiments import EXPERIMENTS


def test_lab_writes_a_page_its_numbers_and_its_plots(shape_folder: Path, tmp_path: Path) -> None:
    page, plots = tmp_path / "page.html", tmp_path / "plots"
    plots.mkdir()
    options = (
        "--load",
        "random",
        "--backend",
        "cpu",
        "--threads",
        "1",
        "--max-tokens-per-step",
        "64",
        "--calibration-seconds",
        "0.5",
    )
    done = twostroke(
        "lab",
        str(shape_folder),
        *options,
        "--quick",
        "--only",
        "kv-memory,batch-size",
        "-o",
        str(page),
        "--plots",
        str(plots),
    )
    assert done.returncode == 0, done.stderr
    assert "Throughput and time per token" in done.stdout and "Each token of context takes" in done.stdout
    assert {path.name for path in plots.iterdir()} == {"batch-size.svg", "kv-memory.svg"}
    record = json.loads(page.with_suffix(".json").read_text())
    assert [finding["name"] for finding in record["findings"]] == ["batch-size", "kv-memory"]
    assert record["effort"]["is_quick"] and record["versions"]["matplotlib"]
    assert "<svg" not in page.read_text() and page.read_text().count("data:image/svg+xml") == 2

    again = tmp_path / "again.html"
    drawn = twostroke("lab", "--from", str(page.with_suffix(".json")), "--only", "kv-memory", "-o", str(again))
    assert drawn.returncode == 0, drawn.stderr
    assert again.read_text().count("data:image/svg+xml") == 1 and not again.with_suffix(".json").exists()

    other = tmp_path / "other.json"
    other.write_text(
        json.dumps({**record, "command": "another", "findings": record["findings"][1:], "others_share": 1.0})
    )
    sources = ("--from", str(other), "--from", str(page.with_suffix(".json")))
    joined = twostroke("lab", *sources, "-o", str(again))
    assert joined.returncode == 0, joined.stderr
    kept = json.loads(again.with_suffix(".json").read_text())
    assert [finding["name"] for finding in kept["findings"]] == ["batch-size", "kv-memory"]
    assert kept["command"] == f"another; {record['command']}" and kept["others_share"] == 1.0
    refused = twostroke("lab", *sources, "-o", str(page))
    assert refused.returncode == 2 and "one of the records to join" in refused.stderr


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        ((), "give a model to measure, or --from"),
        (("smollm2", "--from", "x.json"), "one of the two"),
        (("smollm2", "--only", "prefil"), "the experiments are: prefill-length"),
        (("smollm2", "-o", "/no/such/folder/x.html"), "give a file in a folder that exists"),
        (("smollm2", "--plots", "/no/such/folder"), "does not exist"),
        (("smollm2", "--calibration-seconds", "-1"), "calibration_seconds must be from 0"),
        (("--from", "/no/such/file.json"), "could not be read"),
        (("no-such-model", "-o", "/dev/null"), "no-such-model"),
    ],
)
def test_what_is_wrong_is_said_before_anything_is_measured(arguments: tuple[str, ...], expected: str) -> None:
    done = typed("lab", *arguments)
    assert done.returncode == 2
    assert expected in done.stderr and "Traceback" not in done.stderr


@pytest.mark.parametrize(
    "text",
    [
        "{}",
        "[",
        "[1]",
        '{"kind": "twostroke-lab-1", "findings": [{}]}',
        '{"kind": "twostroke-lab-1", "findings": []}',
        "\x00",
    ],
)
def test_what_is_no_record_is_refused(tmp_path: Path, text: str) -> None:
    path = tmp_path / "broken.json"
    path.write_text(text)
    done = typed("lab", "--from", str(path), "-o", str(tmp_path / "page.html"))
    assert done.returncode == 2 and "could not be drawn" in done.stderr


def test_help_names_every_experiment() -> None:
    done = twostroke("lab", "--help")
    assert done.returncode == 0
    for name in EXPERIMENTS:
        assert f"\n  {name} " in done.stdout


def test_a_benchmark_with_short_prompts_is_warned_of(shape_folder: Path, tmp_path: Path) -> None:
    options = ("--load", "random", "--json", str(tmp_path / "record.json"))
    done = twostroke("bench", str(shape_folder), "--workloads", "single:prompt_len=10:out_len=4:reps=1", *options)
    assert done.returncode == 0, done.stderr
    assert "WARNING: single has prompts of 10 tokens" in done.stderr


def test_the_clock_of_the_bar_is_never_cut() -> None:
    shown = io.StringIO()
    notes = Console(file=shown, width=80, force_terminal=True, color_system=None)
    with lab_command._bar(notes, 11) as told:
        told(3, "prefill-length: a description that is longer than what is left of eighty columns by far: 4,000 tokens")
    assert "3/11 0:00:00 " in shown.getvalue()
