"""`twostroke bench` as a user types it, over a tiny model of random weights."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from tests.cli.in_process import typed
from tests.cli.test_cli import twostroke

from twostroke.lab.company import BUSY
from twostroke.lab.sizes import FULL

SIZES = "single:prompt_len=20:out_len=4:reps=1,nano:n=3:least=5:most=20,prefill"


def test_bench_shows_figures_beside_floors_and_writes_a_record(shape_folder: Path, tmp_path: Path) -> None:
    path = tmp_path / "record.json"
    arguments = ("--load", "random", "--workloads", SIZES, "--repetitions", "2", "--json", str(path), "-v")
    done = twostroke("bench", str(shape_folder), *arguments)
    assert done.returncode == 0, done.stderr
    for text in (
        "TTFT",
        "TPOT",
        "tok/s",
        "of floor",
        "%",
        "ready",
        "SMALL sizes",
        "random weights",
        "nano: many",
        "n=3",
    ):
        assert text in done.stdout
    assert "prefill: skipped; its longest request has 4,104 tokens, and here 512 fit" in done.stdout
    assert "measuring 2 of 2" in done.stderr and str(path) in done.stderr and "threads: " in done.stderr
    record = json.loads(path.read_text())
    assert [workload["name"] for workload in record["workloads"]] == ["single", "nano", "prefill"]
    single = record["workloads"][0]
    assert len(single["figures"]["ttft_ms"]["values"]) == 2
    assert record["start"]["ready_s"] > 0 and record["start"]["first_token_s"] > 0
    busy = record["others_share"]
    assert busy is None or ("This machine was busy" in done.stderr) == (busy >= BUSY)
    assert "--load random" in record["command"]
    assert record["machine"]["usable_threads"] >= 1 and record["versions"]["numpy"]


def test_bench_limits_prints_what_the_machine_allows(tmp_path: Path) -> None:
    path = tmp_path / "limits.json"
    done = twostroke("bench", "limits", "--backend", "reference", "--json", str(path))
    assert done.returncode == 0, done.stderr
    assert "GB/s" in done.stdout and "reference" in done.stdout and "multiply-adds" in done.stdout
    limits = json.loads(path.read_text())["limits"]
    assert limits["backend"] == "reference" and limits["ceilings"][0]["read_bytes_per_s"] > 0


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (("smollm2", "--speculate", "ngram"), "lab MODEL --only speculation"),
        (
            ("smollm2", "--workloads", "singel"),
            "the workloads are: single, prefill, batch, prefix, noisy, online, nano",
        ),
        (("smollm2", "--scale", "huge"), "scale must be one of full, small, not 'huge'"),
        (("smollm2", "--repetitions", "0"), "repetitions must be from 1 to 1000, not 0"),
        (("smollm2", "--json", "/no/such/folder/x.json"), "cannot be written: give a file in a folder that exists"),
        (("smollm2", "--max-running", "0"), "--max-running must be an integer from 1 to 65536"),
        (("no-such-model",), "no-such-model"),
        (("limits", "--backend", "quantum"), "there is no backend 'quantum'"),
        (("smollm2", "--load", "random"), "config.json"),
    ],
)
def test_what_is_wrong_is_said_before_anything_is_measured(arguments: tuple[str, ...], expected: str) -> None:
    done = typed("bench", *arguments)
    assert done.returncode == 2
    assert expected in done.stderr and "Traceback" not in done.stderr


def test_help_teaches_every_workload() -> None:
    done = twostroke("bench", "--help")
    assert done.returncode == 0
    for name in FULL:
        assert f"\n  {name} " in done.stdout
