"""`twostroke calibrate` and `twostroke simulate` as a user types them."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
from tests.cli.in_process import typed
from tests.cli.test_cli import twostroke
from tests.lab.conftest import SHAPE

from twostroke.cli.simulate import here
from twostroke.config import EngineConfig
from twostroke.cost.calibration import Calibration, write_calibration
from twostroke.cost.hardware import Ceilings
from twostroke.cost.step_cost import Coefficients
from twostroke.engine.build import prepare
from twostroke.models.loading import load_checkpoint


def test_calibrate_measures_shows_and_keeps(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(SHAPE))
    arguments = ("--load", "random", "--backend", "reference", "--threads", "1", "--max-tokens-per-step", "32")
    done = twostroke("calibrate", str(tmp_path), *arguments, "--seconds", "1", TWOSTROKE_CACHE=str(tmp_path / "cache"))
    assert done.returncode == 0, done.stderr
    for text in (
        "reading the weights",
        "x its floor",
        "the host, between steps",
        "a newcomer",
        "off by",
        "Kept for this model",
    ):
        assert text in done.stdout
    (kept,) = (tmp_path / "cache" / "calibrations").iterdir()
    assert json.loads(kept.read_text())["num_steps"] > 10
    assert str(kept) in done.stdout


def test_a_calibration_is_what_simulate_and_plan_start_from(
    smollm2_path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TWOSTROKE_CACHE", str(tmp_path))
    prepared = prepare(load_checkpoint(smollm2_path), EngineConfig(backend="cpu"))
    ceilings = Ceilings(50e9, 400e9, "a test")
    found = Calibration(ceilings, Coefficients(step_s=3.0), host_s=0.0, error=0.125, num_steps=9, taken="yesterday")
    found = replace(found, newcomer_s=40.0, newcomer_s_per_token=0.25)
    write_calibration(prepared.calibration_path, found)
    spec = here(str(smollm2_path), EngineConfig(backend="cpu")).spec
    assert (spec.host_s, spec.newcomer_s, spec.newcomer_s_per_token) == (0.0, 40.0, 0.25)
    simulated = typed(
        "simulate", str(smollm2_path), "--requests", "3", "--backend", "cpu", TWOSTROKE_CACHE=str(tmp_path)
    )
    assert simulated.returncode == 0, simulated.stderr
    assert "calibrated yesterday, steps off by 12.5%" in simulated.stdout
    planned = typed("plan", str(smollm2_path), "--on", "this", TWOSTROKE_CACHE=str(tmp_path))
    assert planned.returncode == 0, planned.stderr
    assert "twostroke calibrate on this machine, yesterday" in planned.stdout and "12.5%" in planned.stdout


@pytest.mark.parametrize("seconds", ["0", "-1", "nan", "inf", "1e9"])
def test_calibrate_refuses_senseless_times(seconds: str) -> None:
    done = typed("calibrate", "smollm2", "--seconds", seconds)
    assert done.returncode == 2 and "seconds must be" in done.stderr


def test_simulate_tells_what_users_would_feel(smollm2_path: Path) -> None:
    sizes = ("--rate", "5", "--requests", "200", "--input", "20-200", "--output", "10-40", "--replicas", "2")
    done = typed(
        "simulate", str(smollm2_path), *sizes, "--slo-ttft-ms", "500", "--slo-tpot-ms", "50", "--backend", "cpu"
    )
    assert done.returncode == 0, done.stderr
    for text in ("TTFT", "ITL", "TPOT", "p99", "Goodput", "200 requests", "2 x ", "on cpu", "Bound by", "So: "):
        assert text in done.stdout


def test_simulate_reads_a_trace_and_writes_json(smollm2_path: Path, tmp_path: Path) -> None:
    lines = [
        {"arrival_s": 0.1 * number, "prompt_tokens": 320, "output_tokens": 5, "prefix": "system", "prefix_tokens": 304}
        for number in range(20)
    ]
    trace = tmp_path / "trace.jsonl"
    trace.write_text("\n".join(json.dumps(line) for line in lines))
    done = typed("simulate", str(smollm2_path), "--trace", str(trace), "--json", "--backend", "cpu")
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert (found["requests"], found["refused"]) == (20, 0)
    assert 0 < found["prefix_hit_tokens"] <= 19 * 304
    assert 0.0 < found["ttft_s"]["p50"] <= found["ttft_s"]["p99"]
    assert found["goodput"]["share"] == 1.0


def test_simulate_needs_no_weights_for_another_device() -> None:
    sizes = ("--rate", "10", "--requests", "100", "--input", "200-2000", "--output", "20-100", "--json")
    done = typed("simulate", "Llama-3.1-70B", "--on", "h200", "--tensor-parallel", "2", *sizes)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert found["requests"] == 100 and "2 x H200" in found["deployment"] and "H200" in found["step_seconds"]
    # A prompt of 200 tokens at least, and 141 GB of weights at 9.6 TB/s at best.
    assert found["itl_s"]["p50"] > 141e9 / 9.6e12
    alone = typed("simulate", "Llama-3.1-70B", "--on", "l4")
    assert alone.returncode == 2 and "do not fit on L4" in alone.stderr
    assert "71B parameters are larger than any measured" in found["step_seconds"]
    assert found["note"] == "ranks on several devices are written and were not run: 2 are planned, not run"
    assert found["load"]["bound"] in ("prefill", "decode", "balanced") and found["load"]["advice"]
    here = typed("simulate", "llama-3.3-70b")
    assert here.returncode == 2 and "--on DEVICE (h200, ...) simulates it" in here.stderr
    decode = [
        json.loads(typed("simulate", "Llama-3.1-8B", "--on", "h200", "--decode-weights", form, *sizes).stdout)
        for form in ("packed", "plain")
    ]
    assert ["copies in 12 bits for decode" in one["deployment"] for one in decode] == [True, False]
    assert decode[0]["itl_s"]["p50"] < 0.95 * decode[1]["itl_s"]["p50"]
    assert [one["note"] for one in decode] == [None, "decode weights plain (asked for)"]
    wide = typed("simulate", "Llama-3.1-70B", "--on", "h200", "--tensor-parallel", "16", "--requests", "5")
    assert "; 16 devices share a copy over the link that joins devices within one machine" in wide.stdout


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (("--rate", "0"), "--rate must be a number above 0, not 0"),
        (("--requests", "0"), "--requests must be an integer of at least 1, not 0"),
        (("--input", "many"), "is not a length"),
        (("--replicas", "0"), "replicas must be"),
        (("--router", "dice"), "the router must be"),
        (("--on", "abacus"), "there is no device"),
        (("--tensor-parallel", "64"), "cannot be shared by"),
        (("--on", "h200", "--backend", "nonsense"), "--backend goes with --on this"),
        (("--on", "h200", "--threads", "2"), "--threads goes with --on this"),
        (("--on", "h200", "--dtype", "f16"), "--dtype goes with --on this"),
        (("--kv-host-gb", "1"), "--kv-host-gb is not simulated: what a device forgets is computed again"),
        (("--on", "h200", "--kv-disk", "kv"), "--kv-disk is not simulated"),
        (("--kv-disk-gb", "1"), "--kv-disk-gb is not simulated"),
        (("--on", "h200", "--decode-weights", "packed"), "cannot be packed here: the copies are of bf16 weights"),
        (("--slo-ttft-ms", "-1"), "slo-ttft-ms must be"),
        (("--trace", "/nowhere/trace.jsonl"), "could not be read"),
    ],
)
def test_simulate_refuses_what_makes_no_sense(smollm2_path: Path, arguments: tuple[str, ...], sentence: str) -> None:
    done = typed("simulate", str(smollm2_path), *arguments)
    assert done.returncode == 2, done.stdout
    assert sentence in done.stderr and "Traceback" not in done.stderr


def test_drafts_that_are_supposed_to_hold() -> None:
    """The same load with drafts: fewer milliseconds a token, and a note that says what was supposed."""
    asked = ("simulate", "Llama-3.1-8B", "--on", "h200", "--requests", "20", "--output", "50", "--json")
    plain, drafted, by_length = (
        json.loads(typed(*asked, *more).stdout)
        for more in ((), ("--accept", "0.7", "--drafts", "4"), ("--accepted-length", "2.7731"))
    )
    assert drafted["tpot_s"]["p50"] < 0.7 * plain["tpot_s"]["p50"]
    assert drafted["tpot_s"] == pytest.approx(by_length["tpot_s"], rel=0.02)
    assert "up to 4 drafts" in drafted["note"] and "2.77 tokens a step" in drafted["note"]
    for wrong in (("--drafts", "4"), ("--accept", "0.5", "--accepted-length", "2"), ("--accept", "1.5")):
        assert typed(*asked, *wrong).returncode == 2
