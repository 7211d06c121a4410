"""The README's picture shows what the records say, and is what the script draws of them."""

from __future__ import annotations

import json
from xml.etree import ElementTree

import pytest

from bench.picture import BAR_WIDTH, DECODE, LAB_RECORD, PICTURE, PREFILL, phase_table, picture, splits
from bench.readme import README, TRANSCRIPTS, facts_of, readme_block

RUN_RECORD = TRANSCRIPTS[0].record.read_text(encoding="utf-8")
LAB_TEXT = LAB_RECORD.read_text(encoding="utf-8")


def test_the_picture_is_drawn_of_todays_records() -> None:
    assert PICTURE.read_text(encoding="utf-8") == picture(RUN_RECORD, LAB_TEXT)
    assert f"](docs/plots/{PICTURE.name})" in README.read_text(encoding="utf-8")


def test_its_table_is_the_recorded_one() -> None:
    heads, *rows = phase_table(RUN_RECORD)
    assert heads == ["phase", "tokens", "time", "rate", "felt as", "floor", "of floor"]
    counts = facts_of(readme_block(README.read_text(encoding="utf-8"), TRANSCRIPTS[0].name)).counts
    assert [(int(row[1]),) for row in rows] == list(counts)
    drawn = [element.text for element in ElementTree.fromstring(picture(RUN_RECORD, LAB_TEXT)).iter()]
    assert all(cell in drawn for row in (heads, *rows) for cell in row)


def test_its_bars_are_as_long_as_the_phases_took() -> None:
    drawn = ElementTree.fromstring(picture(RUN_RECORD, LAB_TEXT))
    bars = {
        colour: [float(one.get("width", 0)) for one in drawn.iter() if one.get("fill") == colour]
        for colour in (PREFILL, DECODE)
    }
    read, written = ([width for width in bars[colour] if width] for colour in (PREFILL, DECODE))
    assert len(read) == len(written) == len(splits(LAB_TEXT)) >= 5
    for row, first, second in zip(splits(LAB_TEXT), read, written, strict=True):
        assert first + second == pytest.approx(BAR_WIDTH, abs=0.2)
        assert first / BAR_WIDTH == pytest.approx(row.prefill_s / (row.prefill_s + row.decode_s), abs=1e-3)


def test_another_record_gives_another_picture() -> None:
    lab = json.loads(LAB_TEXT)
    finding = next(one for one in lab["findings"] if one["name"] == "phase-split")
    finding["chart"]["shares"]["rows"][0]["prefill"] *= 10
    assert picture(RUN_RECORD, json.dumps(lab)) != picture(RUN_RECORD, LAB_TEXT)
    prefill_time = phase_table(RUN_RECORD)[1][2]
    assert picture(RUN_RECORD.replace(prefill_time, "1.23 h"), LAB_TEXT) != picture(RUN_RECORD, LAB_TEXT)
