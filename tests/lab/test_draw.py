"""What is drawn can be read: nothing outside the picture, no label on another."""

from __future__ import annotations

import re
from xml.etree import ElementTree

import matplotlib
import pytest
from hypothesis import given
from hypothesis import strategies as st
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.text import Text
from matplotlib.transforms import Bbox

from twostroke.lab.chart import Axis, Chart, Mark, Panel, Series, Share, ShareChart, Tone
from twostroke.lab.draw import COLOURS, FEWEST_TICKS, STYLE, apart, draw, log_steps, svg

X = (10.0, 100.0, 1000.0, 10_000.0)


def panel(log: bool, scale: float) -> Panel:
    rising = tuple(x * scale for x in X)
    nearly = tuple(1.02 * y for y in rising)
    return Panel(
        Axis("prompt length (tokens)", log=log),
        Axis("time to first token (ms)", log=log),
        (
            Series(Tone.PREFILL, Mark.MEASURED, X, rising, "without cache:\na prefill each", low=rising, high=nearly),
            Series(Tone.DECODE, Mark.MEASURED, X, nearly, "with cache:\na decode each", names=("1", "2", "3", "4,000")),
            Series(Tone.MEMORY, Mark.MEASURED, X, rising, "KV of one\nstream", hollow=True),
            Series(Tone.PREFILL, Mark.PREDICTED, X, rising),
            Series(Tone.DECODE, Mark.FLOOR, X, rising),
            Series(Tone.PLAIN, Mark.LIMIT, (X[0], X[-1]), (rising[0], rising[0]), "ITL before\nit came"),
        ),
    )


SHARES = ShareChart(
    "share of the request's time (%)",
    tuple(
        Share(f"{length:,} in, 1,000 out", 1.0, decode, "TTFT 100.1 ms, TPOT 99.9 ms", (1.0, 1.0))
        for length, decode in ((10, 1e-6), (10_000, 1.0), (100, 1e6))
    ),
)
CHARTS = {
    "log": Chart((panel(True, 1e-3), panel(True, 1e3)), prediction="predicted (calibrated cost model)"),
    "linear": Chart((panel(False, 1e-4), panel(False, 20.0)), prediction="predicted (bytes a token × tokens)"),
    "lone": Chart((panel(True, 1.0),)),
    "shares": Chart(shares=SHARES, prediction="predicted (calibrated cost model)"),
}


def texts_of(chart: Chart) -> tuple[Bbox, list[tuple[str, Bbox]]]:
    with matplotlib.rc_context(STYLE):
        figure = draw(chart)
        canvas = FigureCanvasAgg(figure)
        canvas.draw()
        beyond = [
            tick.label1
            for axes in figure.axes
            for axis in (axes.xaxis, axes.yaxis)
            for tick in axis.get_major_ticks()
            if not min(axis.get_view_interval()) <= tick.get_loc() <= max(axis.get_view_interval())
        ]  # matplotlib keeps ticks that it does not draw
        texts = [text for text in figure.findobj(Text) if text not in beyond]
        shown = [text for text in texts if text.get_visible() and text.get_text().strip()]
        return figure.bbox, [(text.get_text(), text.get_window_extent(canvas.get_renderer())) for text in shown]


@pytest.mark.parametrize("name", CHARTS)
def test_no_text_leaves_the_picture(name: str) -> None:
    whole, texts = texts_of(CHARTS[name])
    outside = [text for text, box in texts if box.x0 < 0 or box.y0 < 0 or box.x1 > whole.x1 or box.y1 > whole.y1]
    assert outside == []


@pytest.mark.parametrize("name", CHARTS)
def test_no_label_lies_on_another(name: str) -> None:
    _, texts = texts_of(CHARTS[name])
    labels = [(text, box) for text, box in texts if not re.fullmatch(r"[\d,.]+", text)]
    overlaps = [
        (one, other)
        for index, (one, box) in enumerate(labels)
        for other, other_box in labels[index + 1 :]
        if box.x0 < other_box.x1 - 1 and other_box.x0 < box.x1 - 1
        if box.y0 < other_box.y1 - 1 and other_box.y0 < box.y1 - 1
    ]
    assert overlaps == []


@pytest.mark.parametrize("name", CHARTS)
def test_svg_is_well_formed_the_same_each_time_and_refers_to_nothing(name: str) -> None:
    text = svg(CHARTS[name])
    assert ElementTree.fromstring(text).tag == "{http://www.w3.org/2000/svg}svg"
    assert svg(CHARTS[name]) == text
    assert not re.search(r"(?:href|src)=\"(?!#)", text) and "<script" not in text
    assert COLOURS[Tone.PREFILL] in text and COLOURS[Tone.DECODE] in text


@given(
    st.lists(st.tuples(st.floats(0, 300), st.floats(1, 30)), min_size=1, max_size=6).map(
        lambda pairs: sorted(pairs, key=lambda pair: pair[0])
    )
)
def test_things_moved_apart_do_not_meet(pairs: list[tuple[float, float]]) -> None:
    middles, heights = [middle for middle, _ in pairs], [height for _, height in pairs]
    places = apart(middles, heights, 320.0)
    for index in range(1, len(places)):
        assert places[index] - places[index - 1] >= (heights[index] + heights[index - 1]) / 2 - 1e-6
    assert places[-1] + heights[-1] / 2 <= 320.0 + 1e-6


def test_what_has_room_stays_where_it_is() -> None:
    assert apart([10.0, 50.0, 90.0], [20.0, 20.0, 20.0], 120.0) == [10.0, 50.0, 90.0]


@given(st.floats(1e-3, 1e6), st.floats(1.5, 1e6))
def test_a_log_axis_has_ticks_enough_to_be_read(least: float, span: float) -> None:
    most = least * span
    steps = log_steps(least, most)
    ticks = [step * 10.0**decade for decade in range(-5, 15) for step in steps if least <= step * 10.0**decade <= most]
    assert FEWEST_TICKS <= len(ticks) <= 12


def test_ticks_are_drawn_where_they_were_counted() -> None:
    axis = Axis("time (ms)", log=True)
    lone = Panel(axis, axis, (Series(Tone.DECODE, Mark.MEASURED, (21.0, 58.0), (21.0, 58.0)),))
    (axes,) = draw(Chart((lone,))).axes
    low, high = axes.get_xlim()
    assert sum(low <= tick <= high for tick in axes.get_xticks()) >= FEWEST_TICKS
