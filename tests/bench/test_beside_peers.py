"""The bench beside other programs, as far as it goes without them: rates, turns and the table, over a fake engine."""

from __future__ import annotations

import sys
from contextlib import ExitStack
from pathlib import Path

import pytest

from bench import beside_peers
from bench.beside_peers import ADAPTERS, Engines, rates, show
from bench.peers.home import Home
from bench.peers.metrics import Output

FAKE = Path(__file__).parent / "fake_adapter.py"


def test_a_rate_of_decode_is_the_median_of_runs_of_eight_tokens() -> None:
    """One run of tokens that others held up changes nothing."""
    times_s = [2.0]
    for run in range(5):
        times_s += [times_s[-1] + (8.0 if run == 3 else 0.8)] * 7
        times_s.append(times_s[-1])
    found = rates(512, Output(tuple(range(len(times_s))), tuple(times_s)))
    assert found == {"prefill": pytest.approx(256.0), "decode": pytest.approx(10.0)}


def test_ratios_are_to_the_best_of_the_others(capsys: pytest.CaptureFixture[str]) -> None:
    show({"twostroke": {"tok/s": [30.0, 10.0, 20.0]}, "slow": {"tok/s": [5.0]}, "fast": {"tok/s": [16.0]}})
    heading, row = capsys.readouterr().out.splitlines()
    assert heading.split()[-3:] == ["ours", "/", "best"]
    assert "20.0 (10.0 to 30.0)" in row and row.endswith("1.25")


def test_engines_take_turns_and_who_is_first_rotates(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(beside_peers, "ADAPTERS", FAKE.parent)
    monkeypatch.setattr(Home, "find", lambda: Home(tmp_path))
    assert (ADAPTERS / "adapter_loop.py").is_file()
    said: list[str] = []
    with ExitStack() as stack:
        engines = Engines(stack, 2, said.append)
        for name in ("one", "two"):
            engines.start(name, sys.executable, FAKE.name, Path("model"), {})
        assert [engines.turns(number) for number in (0, 1, 2)] == [["one", "two"], ["two", "one"], ["one", "two"]]
        with engines.turn("two") as worker:
            assert worker.generate([[1]], 2)[0].token_ids == (1, 2)
    assert [line.split(":")[0] for line in said] == ["one", "two"]
