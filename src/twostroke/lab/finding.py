"""What an experiment hands back: a plot, one sentence made of the numbers found, and the numbers. Plain data."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from twostroke.lab.chart import Chart, from_json, to_json


@dataclass(frozen=True, slots=True)
class Finding:
    name: str = ""
    title: str = ""
    question: str = ""
    chart: Chart | None = None
    """None: nothing was measured, and `skipped` says why."""
    sentence: str = ""
    method: str = ""
    warning: str | None = None
    """What a reader must not overlook."""
    numbers: Mapping[str, Any] = field(default_factory=dict)
    skipped: str | None = None
    duration_s: float = 0.0


def to_record(finding: Finding) -> dict[str, Any]:
    names = ("name", "title", "question", "sentence", "method", "warning", "skipped", "duration_s")
    plain = {name: getattr(finding, name) for name in names}
    return {**plain, "numbers": dict(finding.numbers), "chart": finding.chart and to_json(finding.chart)}


def from_record(data: Mapping[str, Any]) -> Finding:
    """Raises KeyError, TypeError or ValueError for what is no such record."""
    chart = data["chart"]
    return Finding(**{**data, "chart": None if chart is None else from_json(chart)})
