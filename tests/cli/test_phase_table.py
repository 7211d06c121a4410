"""The phase table is whole at any width."""

from __future__ import annotations

import io

import pytest
from rich.console import Console

from twostroke.cli.phase_table import COLUMNS, print_phases, turn_line
from twostroke.core.timing import SequenceTiming
from twostroke.cost.hardware import Ceilings
from twostroke.engine.floors import PhaseFloors

LONG = SequenceTiming(
    arrival_s=0.0,
    scheduled_s=0.1,
    token_times_s=[1234.5678 + index * 0.0999 for index in range(8000)],
    prompt_tokens=131_000,
    cached_tokens=1024,
    prefill_chunks=254,
)


def printed(timing: SequenceTiming, width: int) -> str:
    file = io.StringIO()
    floors, ceilings = PhaseFloors(987.654, 123.456), Ceilings(230e9, 22.1e9, "measured")
    print_phases(Console(file=file, width=width), timing, floors, ceilings)
    return file.getvalue()


@pytest.mark.parametrize("width", [80, 100, 200])
def test_nothing_is_cut_from_80_columns_on(width: int) -> None:
    text = printed(LONG, width)
    assert "…" not in text
    header, _, prefill, decode = text.splitlines()[:4]
    assert all(name in header for name in COLUMNS)
    for part in ("prefill (read)", "129976", "1234.47 s", "105 tok/s", "TTFT 1234.57 s", "987.65 s", "80%"):
        assert part in prefill
    for part in ("decode (write)", "8000", "799.10 s", "10 tok/s", "TPOT 99.9 ms", "123.46 s", "15%"):
        assert part in decode
    assert "1024 more tokens cached" in text


@pytest.mark.parametrize("width", [20, 40, 60])
def test_a_narrow_terminal_gets_sentences(width: int) -> None:
    text = " ".join(printed(LONG, width).split())
    assert "…" not in text
    assert (
        "prefill (read): 129976 tokens in 1234.47 s (105 tok/s), TTFT 1234.57 s, floor 987.65 s, 80% of floor" in text
    )
    assert "decode (write): 8000 tokens in 799.10 s (10 tok/s), TPOT 99.9 ms, floor 123.46 s, 15% of floor" in text


def test_drafts_have_their_words_and_only_where_there_were_some() -> None:
    times_s = [1.0, 1.1, 1.1, 1.1, 1.2, 1.3, 1.3]
    drafted = SequenceTiming(0.0, 0.5, times_s, 1.3, 10, draft_steps=2, drafts_computed=8, drafts_held=3)
    drafted.speculation_gain_s = 0.25
    said = "2.0 tokens a step (3 of 8 drafts held), 250 ms gained"
    assert said in printed(drafted, 200) and said in turn_line(drafted)
    drafted.speculation_gain_s = -0.05
    assert "50.0 ms lost" in printed(drafted, 200)
    assert "drafts" not in printed(LONG, 200) and "drafts" not in turn_line(LONG)
