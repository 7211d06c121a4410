from __future__ import annotations

import json

import pytest

from twostroke.lab.chart import Axis, Chart, Mark, Panel, Series, Share, ShareChart, Tone, from_json, to_json


def test_a_chart_comes_back_from_a_file() -> None:
    points = Series(Tone.PREFILL, Mark.MEASURED, (1.0, 2.0), (3.0, 4.0), "a", low=(2.0, 3.0), high=(4.0, 5.0))
    named = Series(Tone.DECODE, Mark.PREDICTED, (1.0,), (2.0,), hollow=True, names=("one",))
    panel = Panel(Axis("x (tokens)", log=True, ticks=(1.0, 2.0)), Axis("y (ms)"), (points, named), "title")
    shares = ShareChart("share (%)", (Share("row", 1.0, 2.0, "note", (3.0, 4.0)), Share("bare", 1.0, 2.0, "")))
    for chart in (Chart((panel,)), Chart(shares=shares, prediction="guess")):
        assert from_json(json.loads(json.dumps(to_json(chart)))) == chart


def test_a_series_with_a_value_missing_is_refused() -> None:
    with pytest.raises(ValueError, match="as many"):
        Series(Tone.PLAIN, Mark.LIMIT, (1.0, 2.0), (1.0,))


@pytest.mark.parametrize("broken", [{}, {"panels": [{}], "shares": None, "prediction": ""}, {"panels": 3}])
def test_what_is_no_chart_is_refused(broken: dict[str, object]) -> None:
    with pytest.raises((KeyError, TypeError, ValueError)):
        from_json(broken)
