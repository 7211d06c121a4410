"""The transcripts of docs/planning.md are what the commands print today, and so are the figures in its sentences."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import pytest

from tests.cli.in_process import typed

PAGE = (Path(__file__).parents[1] / "docs" / "planning.md").read_text(encoding="utf-8")
LEFT_OUT = {"...", ""}
WIDE = {"COLUMNS": "200"}


def transcripts() -> dict[str, list[str]]:
    """What was typed, and the lines that are shown of the answer."""
    found = {}
    for block in re.findall(r"^```\n\$ twostroke (.*?)^```$", PAGE, re.MULTILINE | re.DOTALL):
        typed_text, _, shown = re.sub(r" *\\\n *", " ", block).partition("\n")
        found[typed_text] = [line.rstrip() for line in shown.splitlines() if line.strip() not in LEFT_OUT]
    return found


TRANSCRIPTS = transcripts()


PLANS = [command for command in TRANSCRIPTS if command.startswith("plan ")]
SIMULATIONS = [command for command in TRANSCRIPTS if command.startswith("simulate ")]


def printed(command: str) -> list[str]:
    done = typed(*shlex.split(command), **WIDE)
    assert done.returncode == 0, done.stderr
    return [line.rstrip() for line in done.stdout.splitlines()]


@pytest.mark.parametrize("command", PLANS)
def test_a_plan_answers_as_the_page_shows(command: str) -> None:
    rest = iter(printed(command))
    for line in TRANSCRIPTS[command]:  # in this order; what a line leaves out ends in dots
        is_cut = line.endswith("...")
        assert any(found.startswith(line[:-3]) if is_cut else found == line for found in rest), line


@pytest.mark.slow
@pytest.mark.parametrize("command", SIMULATIONS)
def test_a_simulation_answers_nearly_as_the_page_shows(command: str) -> None:
    """It plays the scheduler, whose rules may be changed a little."""
    out = printed(command)
    for line in TRANSCRIPTS[command]:
        words, figures = _apart(line)
        alike = [_apart(found)[1] for found in out if _apart(found)[0] == words]
        assert alike and figures == pytest.approx(alike[0], rel=0.1), line


def _apart(line: str) -> tuple[str, list[float]]:
    figures = [float(found.replace(",", "")) for found in re.findall(r"\d[\d,.]*\d|\d", line)]
    return " ".join(re.sub(r"\d[\d,.]*\d|\d", "#", line).split()), figures


def test_the_page_shows_what_it_is_about() -> None:
    assert len(PLANS) >= 3 and len(SIMULATIONS) == 1
    assert all(len(shown) >= 4 for shown in TRANSCRIPTS.values())


def test_what_is_said_of_eight_devices_that_share_every_matrix() -> None:
    out = typed("plan", "DeepSeek-V3", "--on", "h200", "--tensor-parallel", "8", "--users", "256", **WIDE).stdout
    alone = re.search(r"^alone: TPOT +(\S+ ms) +(\S+ ms)", out, re.MULTILINE)
    users = re.search(r"([\d,]+) users a copy", out)
    rate = re.search(r"^throughput +([\d,]+) output", out, re.MULTILINE)
    assert alone is not None and users is not None and rate is not None
    prose = " ".join(PAGE.split())
    assert f"one stream is faster: {alone[1]} at the floor, {alone[2]} expected." in prose
    assert f"{users[1]} users fit, and 256 get {rate[1]} tokens a second." in prose
