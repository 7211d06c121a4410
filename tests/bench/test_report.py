"""The table, and the two files of a run."""

import json
from datetime import datetime

import pytest

from bench.peers.engines import ALL_ENGINES, DEFAULT_ENGINES, ENGINES, ORACLE, OURS, choose_engines
from bench.peers.guard import Disturbance
from bench.peers.install import RECIPES
from bench.peers.quality import Departure, Quality
from bench.peers.report import Report
from bench.peers.run import parse
from bench.peers.summary import Sample
from bench.peers.tables import markdown_table
from bench.peers.workloads import FULL

QUIET, NOISY = Disturbance(0.0, 0.0, 1.0), Disturbance(0.5, 0.0, 1.0)


def sample(engine, prefill, decode, disturbance=QUIET):
    values = {"prefill_tokens_per_s": prefill, "decode_tokens_per_s": decode}
    return Sample(engine, "w1", 0, 0, values, disturbance)


@pytest.fixture
def report():
    return Report(
        started_at=datetime(2026, 1, 2, 3, 4),
        command="make bench-cpu",
        revision="abc",
        model="some.gguf",
        threads=2,
        quick=False,
        machine={"processor": "some processor", "cores": 2, "memory_gb": 24.0, "system": "Linux"},
        workloads=[FULL[0]],
        engines=[OURS, "llama-cpp-q4_0", "llama-cpp-q8_0"],
        samples=[
            sample(OURS, 2000.0, 200.0),
            sample(OURS, 2200.0, 210.0),
            sample("llama-cpp-q4_0", 1000.0, 100.0),
            sample("llama-cpp-q8_0", 800.0, 70.0, NOISY),
        ],
        quality={OURS: Quality([Departure(None), Departure(7, 0.02)], 12.0, 1.001)},
        best={"w1.prefill_tokens_per_s": 4200.0, "w1.decode_tokens_per_s": 410.0},
        installs={OURS: {"install_s": 20.0, "venv_mb": 300.0}},
    )


def cells(table, name):
    (row,) = [line for line in table.splitlines() if line.startswith(f"| {name}")]
    return [cell.strip() for cell in row.strip("|").split("|")][1:]


def test_the_speed_table_shows_spread_leads_and_the_machine(report):
    table = report.tables()["Speed"]
    assert cells(table, OURS + "  ") == ["2100 (2000..2200)", "205.0 (200.0..210.0)"]
    assert cells(table, "llama-cpp-q4_0 (a coarser model)") == ["1000", "100.0"]
    assert cells(table, "llama-cpp-q8_0") == ["~800", "~70.0"]
    assert cells(table, "**lead over the best peer**") == ["2.10 x (llama-cpp-q4_0)", "2.05 x (llama-cpp-q4_0)"]
    fair = cells(table, "**lead over the best like-for-like")
    assert fair == ["~2.62 x (llama-cpp-q8_0)", "~2.93 x (llama-cpp-q8_0)"]
    assert cells(table, "twostroke, fraction") == ["50%", "50%"]


def test_the_files_hold_the_run(report, tmp_path):
    json_path, markdown_path = report.write(tmp_path)
    data = json.loads(json_path.read_text())
    assert data["summary"]["w1.decode_tokens_per_s"][OURS]["median"] == 205.0
    assert data["command"] == "make bench-cpu"
    assert [found["noisy"] for found in data["samples"]] == [False, False, False, True]
    assert data["quality"][OURS]["worst_gap_nats"] == 0.02
    page = markdown_path.read_text()
    for text in ("some processor", "`make bench-cpu` at abc", "-, 7", "+0.10%", "2.10 x", "20.0"):
        assert text in page
    assert "quick" not in page


def test_a_quick_run_says_that_it_proves_nothing(report):
    report.quick = True
    assert "no figure of it is a claim" in report.as_markdown()
    assert "quick" in report.name


def test_columns_are_aligned():
    lines = markdown_table(["a", "long header"], [["longer cell", "b"]]).splitlines()
    assert len({len(line) for line in lines}) == 1
    assert lines[1].replace("-", "").replace("|", "").strip() == ""


def test_ours_always_takes_part_and_all_means_all():
    assert [engine.name for engine in choose_engines(["llama-cpp-q8_0"])] == [OURS, "llama-cpp-q8_0"]
    assert [engine.name for engine in choose_engines(["all"])] == list(ALL_ENGINES)
    assert ORACLE not in ALL_ENGINES
    assert set(DEFAULT_ENGINES) < set(ALL_ENGINES)
    with pytest.raises(ValueError, match="no engine nonsense"):
        choose_engines(["nonsense"])


def test_every_engine_can_be_installed():
    assert {engine.peer for engine in ENGINES.values()} <= set(RECIPES)


def test_a_wrong_option_is_one_line(capsys):
    for arguments in (["--parts", "speed,nonsense"], ["--repetitions", "0"]):
        with pytest.raises(SystemExit) as ended:
            parse(arguments)
        assert ended.value.code == 2
        assert "Traceback" not in capsys.readouterr().err
