"""The page needs nothing but itself, says what was measured on what, and trusts no text."""

from __future__ import annotations

import base64
from html.parser import HTMLParser
from typing import Any

import pytest

from twostroke.lab.chart import Axis, Chart, Mark, Panel, Series, Tone
from twostroke.lab.finding import Finding, to_record
from twostroke.lab.report import html_report
from twostroke.lab.run import SCHEMA, findings_of

HOSTILE = "<script>alert(1)</script>\"'&"
CHART = Chart((Panel(Axis("x (tokens)"), Axis("y (ms)"), (Series(Tone.PREFILL, Mark.MEASURED, (1.0,), (2.0,), "a"),)),))
FINDINGS = [
    Finding("one", "First", "Why?", CHART, f"It is {HOSTILE}.", "By hand.", "Do not.", {"prediction_error": 0.1}),
    Finding("two", "Second", "How?", skipped="there is no time"),
]


def record(**changes: Any) -> dict[str, Any]:
    return {
        "kind": SCHEMA,
        "date": "2026-01-01",
        "command": f"twostroke lab {HOSTILE}",
        "commit": None,
        "machine": {"processor": HOSTILE, "usable_threads": 2, "memory_bytes": 1 << 34, "system": "Linux"},
        "versions": {"twostroke": "0.1.0"},
        "model": {
            "name": HOSTILE, "family": "llama", "parameters": 135_000_000, "weight_bytes_per_step": 96_600_000,
            "kv_bytes_per_token": 23_040, "load": "random",
        },
        "engine": {"backend": "cpu", "threads": 2, "max_context": 8192, "kv_bytes": 10**9},
        "ceilings": {"multiply_adds_per_s": 4e11, "read_bytes_per_s": 3e10, "source": "measured here"},
        "prediction": "calibrated cost model",
        "effort": {"is_quick": True, "repetitions": 3, "point_s": 6.0},
        "others_share": 0.01,
        "findings": [to_record(finding) for finding in FINDINGS],
        **changes,
    }  # fmt: skip


class Page(HTMLParser):
    def __init__(self, text: str) -> None:
        super().__init__()
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.text = ""
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))

    def handle_data(self, data: str) -> None:
        self.text += data

    def named(self, tag: str) -> list[dict[str, str | None]]:
        return [attributes for name, attributes in self.tags if name == tag]


def test_the_page_needs_nothing_but_itself() -> None:
    page = Page(html_report(record(), FINDINGS))
    assert not {"script", "link", "iframe", "object"} & {tag for tag, _ in page.tags}
    sources = [value for _, attributes in page.tags for name, value in attributes.items() if name in ("src", "href")]
    assert sources and all(source and source.startswith(("data:image/svg+xml;base64,", "#")) for source in sources)
    [image] = page.named("img")
    assert b"<svg" in base64.b64decode(str(image["src"]).partition(",")[2])
    assert str(image["alt"]).startswith("Plot: First")


def test_the_page_says_what_was_measured_on_what_and_escapes_it() -> None:
    page = Page(html_report(record(), FINDINGS))
    for text in (HOSTILE, "cpu backend", "135M parameters", "800 GFLOP/s", "30 GB/s", "drawn at random", "quick sizes",
                 "calibrated cost model; mean error of the experiments below: 10%", "Not measured: there is no time",
                 "Do not.", "How it was measured.", "By hand."):  # fmt: skip
        assert text in page.text
    assert "busy" not in page.text


def test_a_busy_machine_is_called_out() -> None:
    assert (
        "This machine was busy: other processes took 31%" in Page(html_report(record(others_share=0.31), FINDINGS)).text
    )


def test_a_record_holds_its_findings() -> None:
    assert findings_of(record()) == FINDINGS


@pytest.mark.parametrize("wrong", [[], 3, None, {}, {"kind": SCHEMA}, {"kind": "other", "findings": []}])
def test_what_is_no_record_is_refused(wrong: object) -> None:
    with pytest.raises(ValueError, match="no record"):
        findings_of(wrong)
