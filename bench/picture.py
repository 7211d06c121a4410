"""The README's picture: the phase table of a recorded answer, and where the time of five kinds of requests went, from a
record of the lab. `python -m bench.picture` draws it anew, as `make readme` does. Equal records give equal bytes."""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from pathlib import Path
from xml.sax.saxutils import escape

from bench.readme import RESULTS, ROOT, TRANSCRIPTS, recorded_output

PICTURE = ROOT / "docs" / "plots" / "two-phases.svg"
LAB_RECORD = RESULTS / "lab-smollm2.json"
PREFILL, DECODE, INK, FAINT, PAPER, CARD = "#c2500a", "#0b6fb3", "#2b2b2b", "#6b6b6b", "#ffffff", "#f6f6f4"
WIDTH, MARGIN, LINE, BAR_LEFT, BAR_WIDTH, BAR_HEIGHT = 860, 20, 21, 170, 420, 17
"""In pixels."""
COLUMNS = ((40, "start"), (220, "end"), (320, "end"), (430, "end"), (470, "start"), (690, "end"), (810, "end"))
"""Where the table's cells stand, and which side of them stands there."""


@dataclass(frozen=True, slots=True)
class Split:
    """One kind of request: seconds until its first token, and after it."""

    label: str
    prefill_s: float
    decode_s: float
    note: str


def phase_table(record: str) -> list[list[str]]:
    """The cells of a recorded answer's table: its heads and a row for each phase."""
    lines = recorded_output(record).splitlines()
    first = next(i for i, line in enumerate(lines) if line.startswith("phase  "))
    return [re.split(r"\s{2,}", line.strip()) for line in (lines[first], *lines[first + 2 : first + 4])]


def splits(record: str) -> list[Split]:
    findings = {finding["name"]: finding for finding in json.loads(record)["findings"]}
    rows = findings["phase-split"]["chart"]["shares"]["rows"]
    return [Split(row["label"], row["prefill"], row["decode"], row["note"]) for row in rows]


def _text(x: float, y: float, text: str, colour: str = INK, style: str = "") -> str:
    return f'<text x="{x:g}" y="{y:g}" fill="{colour}"{style}>{escape(text)}</text>'


def _table(rows: list[list[str]], top: float) -> list[str]:
    drawn = []
    for i, (cells, colour) in enumerate(zip(rows, (FAINT, PREFILL, DECODE), strict=True)):
        for cell, (x, anchor) in zip(cells, COLUMNS, strict=True):
            drawn.append(_text(x, top + i * LINE, cell, colour, f' text-anchor="{anchor}"'))
    return drawn


def _bars(rows: list[Split], top: float) -> list[str]:
    drawn = []
    for i, row in enumerate(rows):
        y, share = top + i * (BAR_HEIGHT + 9), row.prefill_s / (row.prefill_s + row.decode_s)
        read = BAR_WIDTH * share
        drawn += [
            _text(BAR_LEFT - 10, y + 13, row.label, INK, ' text-anchor="end"'),
            f'<rect x="{BAR_LEFT}" y="{y}" width="{read:.1f}" height="{BAR_HEIGHT}" fill="{PREFILL}"/>',
            f'<rect x="{BAR_LEFT + read:.1f}" y="{y}" width="{BAR_WIDTH - read:.1f}" height="{BAR_HEIGHT}" '
            f'fill="{DECODE}"/>',
            _text(BAR_LEFT + BAR_WIDTH + 12, y + 13, row.note, FAINT),
        ]
        if share >= 0.08:
            drawn.append(_text(BAR_LEFT + 6, y + 13, f"{share:.0%}", PAPER))
        if share <= 0.92:
            drawn.append(_text(BAR_LEFT + BAR_WIDTH - 6, y + 13, f"{1 - share:.0%}", PAPER, ' text-anchor="end"'))
    return drawn


def picture(run_record: str, lab_record: str) -> str:
    table, rows = phase_table(run_record), splits(lab_record)
    bars_top = 164
    foot = bars_top + len(rows) * (BAR_HEIGHT + 9) + 14
    machine = re.search(r"^machine +(.*?),", run_record, re.MULTILINE)
    assert machine is not None
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{WIDTH}" height="{foot + 12}" '
        f'viewBox="0 0 {WIDTH} {foot + 12}" font-family="Helvetica, Arial, sans-serif" font-size="13" role="img">',
        "<title>Both phases of an answer, and where the time of five requests went</title>",
        f'<rect width="{WIDTH}" height="{foot + 12}" fill="{PAPER}"/>',
        f'<rect x="{MARGIN}" y="36" width="{WIDTH - 2 * MARGIN}" height="{3 * LINE + 14}" rx="6" fill="{CARD}"/>',
        _text(MARGIN, 24, "What one answer cost, phase by phase, beside the least this machine allows"),
        *_table(table, 60),
        _text(MARGIN, 146, "Where the time of five requests went: the same model, other lengths"),
        _text(WIDTH - MARGIN - 60, 146, "prefill", PREFILL, ' font-weight="bold" text-anchor="end"'),
        _text(WIDTH - MARGIN, 146, "decode", DECODE, ' font-weight="bold" text-anchor="end"'),
        *_bars(rows, bars_top),
        _text(MARGIN, foot, f"SmolLM2-135M in Q4_1 on {machine[1]}", FAINT, ' font-size="11"'),
        "</svg>",
    ]
    return "\n".join(parts) + "\n"


def draw(path: Path = PICTURE) -> None:
    run_record = TRANSCRIPTS[0].record.read_text(encoding="utf-8")
    path.write_text(picture(run_record, LAB_RECORD.read_text(encoding="utf-8")), encoding="utf-8")


if __name__ == "__main__":
    draw()
