"""Charts as SVG, by matplotlib: measured values are points, predictions lines, floors dashed; each phase has a colour
of its own that also people who tell colours apart poorly can tell. Knows no experiment."""

from __future__ import annotations

import io
import math
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any, cast

from twostroke.core.errors import BadRequestError, install_hint
from twostroke.lab.chart import Axis, Chart, Mark, Panel, Series, ShareChart, Tone

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

COLOURS = {Tone.PREFILL: "#c2500a", Tone.DECODE: "#0b6fb3", Tone.MEMORY: "#1b7f5c", Tone.PLAIN: "#6b6b6b"}
"""Vermilion, blue and green as Okabe and Ito chose them, a little darker for print."""
INK, FAINT, GRID = "#2b2b2b", "#6b6b6b", "#e4e4e4"
WIDTH_IN, PANEL_IN, LONE_PANEL_IN = 6.4, 2.2, 2.7
KEY_IN, FOOT_IN, GAP_IN = 0.36, 0.52, 0.66
LEFT_IN, RIGHT_IN = 0.85, 1.2
ROW_IN = 0.46
LINES: dict[Mark, dict[str, Any]] = {
    Mark.PREDICTED: {"linewidth": 1.6, "alpha": 0.85, "zorder": 2},
    Mark.FLOOR: {"linewidth": 1.1, "linestyle": (0, (4, 2.5)), "alpha": 0.7, "zorder": 1},
    Mark.LIMIT: {"linewidth": 1.0, "color": "#9a9a9a", "zorder": 1},
}
STYLE: dict[str, Any] = {
    "font.family": "sans-serif",
    "font.sans-serif": ["DejaVu Sans"],  # comes with matplotlib: the same picture on every machine
    "font.size": 9,
    "axes.edgecolor": "#9a9a9a",
    "axes.labelcolor": INK,
    "axes.linewidth": 0.8,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.axisbelow": True,
    "axes.grid": True,
    "grid.color": GRID,
    "grid.linewidth": 0.7,
    "text.color": INK,
    "xtick.color": FAINT,
    "ytick.color": FAINT,
    "svg.fonttype": "path",
    "svg.hashsalt": "twostroke",
}


def check_available() -> None:
    """Before minutes are spent on what could not be drawn."""
    try:
        import matplotlib  # noqa: F401
    except ImportError:
        raise BadRequestError(f"the lab draws with matplotlib, which is missing; {install_hint('lab')}") from None


def svg(chart: Chart) -> str:
    check_available()
    import matplotlib

    with matplotlib.rc_context(cast(Any, STYLE)):
        out = io.StringIO()
        draw(chart).savefig(out, format="svg", metadata={"Date": None, "Creator": None})
    text = out.getvalue()
    return text[text.index("<svg") :]  # without the XML prologue: a page has one of its own


def draw(chart: Chart) -> Figure:
    from matplotlib.figure import Figure

    figure = Figure()
    if chart.shares is not None:
        _draw_shares(figure, chart.shares, chart)
    else:
        _draw_panels(figure, chart)
    return figure


def _draw_panels(figure: Figure, chart: Chart) -> None:
    count = len(chart.panels)
    each = PANEL_IN if count > 1 else LONE_PANEL_IN
    height = KEY_IN + count * each + (count - 1) * GAP_IN + FOOT_IN
    figure.set_size_inches(WIDTH_IN, height)
    for number, panel in enumerate(chart.panels):
        bottom = FOOT_IN + (count - 1 - number) * (each + GAP_IN)
        width = WIDTH_IN - LEFT_IN - RIGHT_IN
        axes = figure.add_axes((LEFT_IN / WIDTH_IN, bottom / height, width / WIDTH_IN, each / height))
        _draw_panel(axes, panel)
    marks = {series.mark for panel in chart.panels for series in panel.series}
    whiskers = any(series.low is not None for panel in chart.panels for series in panel.series)
    _draw_key(figure, _key(marks, chart.prediction, whiskers), height)


def _draw_panel(axes: Axes, panel: Panel) -> None:
    for series in sorted(panel.series, key=lambda series: list(Mark)[::-1].index(series.mark)):
        _draw_series(axes, series)
    _scale(axes.xaxis, panel.x)
    _scale(axes.yaxis, panel.y)
    if not panel.x.log and panel.x.from_zero:
        axes.set_xlim(left=0)
    if not panel.y.log and panel.y.from_zero:
        axes.set_ylim(bottom=0)
        axes.margins(y=0.08)
    if panel.y.log and any(series.names for series in panel.series):
        axes.set_ylim(bottom=axes.get_ylim()[0] / 1.5)  # room for the lowest point's name
    axes.set_xlabel(panel.x.label)
    axes.set_ylabel(panel.y.label)
    if panel.title is not None:
        axes.set_title(panel.title, loc="left", fontsize=9, color=INK)
    _label_ends(axes, panel.series)


def _draw_series(axes: Axes, series: Series) -> None:
    from matplotlib.patheffects import withStroke

    colour = COLOURS[series.tone]
    if series.mark is Mark.MEASURED:
        if series.low is not None and series.high is not None:
            axes.vlines(series.x, series.low, series.high, color=colour, linewidth=1.1, alpha=0.45, zorder=3)
        face = "white" if series.hollow else colour
        size = 5.5 if len(series.x) < 20 else 3.2
        look: dict[str, Any] = {
            "markersize": size,
            "markerfacecolor": face,
            "markeredgewidth": 1.2,
            "zorder": 4,
            "clip_on": False,
        }
        axes.plot(series.x, series.y, "o", color=colour, **look)
        for x, y, name in zip(series.x, series.y, series.names or (), strict=False):
            # Prefill's names above, the others' below: where the phases meet, both can be read.
            above = series.tone is Tone.PREFILL
            place, horizontal, vertical = ((-3, 5), "right", "bottom") if above else ((4, -4), "left", "top")
            text = axes.annotate(name, (x, y), place, textcoords="offset points", fontsize=7, color=colour, zorder=6)
            text.set(ha=horizontal, va=vertical, path_effects=[withStroke(linewidth=2, foreground="white")])
        return
    axes.plot(series.x, series.y, **{"color": colour, **LINES[series.mark]})


def _scale(axis: Any, wanted: Axis) -> None:
    from matplotlib.ticker import FixedLocator, FuncFormatter, LogLocator, MaxNLocator, NullFormatter, NullLocator

    if wanted.log:
        getattr(axis.axes, f"set_{axis.axis_name}scale")("log")
        least, most = axis.get_view_interval()
        axis.set_major_locator(LogLocator(10, subs=log_steps(least, most)))
        axis.set_minor_locator(NullLocator())
        axis.set_minor_formatter(NullFormatter())
    else:
        axis.set_major_locator(MaxNLocator(6, steps=[1, 2, 5, 10]))
    if wanted.ticks is not None:
        axis.set_major_locator(FixedLocator(wanted.ticks))
    axis.set_major_formatter(
        FuncFormatter(lambda value, _: f"{value:,.10g}" if value < 1e6 else f"{value / 1e6:,.10g} M")
    )
    axis.set_tick_params(length=3, width=0.8, labelsize=8)


LOG_STEPS = (
    (1.0,),
    (1.0, 3.0),
    (1.0, 2.0, 5.0),
    (1.0, 1.5, 2.0, 3.0, 5.0, 7.0),
    *(tuple(step / parts for step in range(parts, 10 * parts)) for parts in (1, 2, 5, 10)),
)
FEWEST_TICKS = 4


def log_steps(least: float, most: float) -> tuple[float, ...]:
    """Where ticks stand within each power of ten: as few as make the axis readable, whatever it spans."""
    decades = range(math.floor(math.log10(least)), math.ceil(math.log10(most)) + 1)
    for steps in LOG_STEPS:
        if sum(least <= step * 10.0**decade <= most for decade in decades for step in steps) >= FEWEST_TICKS:
            return steps
    return LOG_STEPS[-1]


def _label_ends(axes: Axes, series: Iterable[Series]) -> None:
    """Labels in the margin beside their last points, moved apart where they would meet."""
    figure = axes.figure
    wanted = []
    top = axes.bbox.height
    for one in series:
        if one.label is None:
            continue
        last = max(range(len(one.x)), key=lambda index: one.x[index])
        y = axes.transData.transform((one.x[last], one.y[last]))[1] - axes.bbox.y0
        wanted.append((min(max(y, 0.0), top), one))
    wanted.sort(key=lambda item: item[0])
    line = 9.0 * 1.25 * figure.dpi / 72  # of text, in pixels
    heights = [line * (1 + one.label.count("\n")) for _, one in wanted if one.label is not None]
    places = apart([y for y, _ in wanted], heights, top + line / 2)
    for place, (_, one) in zip(places, wanted, strict=True):
        colour = FAINT if one.mark is Mark.LIMIT else COLOURS[one.tone]
        weight = "normal" if one.mark is Mark.LIMIT else "bold"
        axes.text(
            1.025, place / top, str(one.label), transform=axes.transAxes, color=colour, weight=weight, va="center",
            fontsize=8.5, linespacing=1.15,
        )  # fmt: skip


def apart(middles: Sequence[float], heights: Sequence[float], top: float) -> list[float]:
    """Middles of things of these heights, in ascending order, moved as little as is simple so that none overlap and
    the highest ends below `top`."""
    places: list[float] = []
    for number, (middle, height) in enumerate(zip(middles, heights, strict=True)):
        least = places[-1] + (heights[number - 1] + height) / 2 if places else middle
        places.append(max(middle, least))
    limit = top
    for number in range(len(places) - 1, -1, -1):
        places[number] = min(places[number], limit - heights[number] / 2)
        limit = places[number] - heights[number] / 2
    return places


def _key(marks: set[Mark], prediction: str, whiskers: bool) -> list[tuple[Mark, str]]:
    words = {
        Mark.MEASURED: "measured" + (" (median, middle 80%)" if whiskers else ""),
        Mark.PREDICTED: prediction,
        Mark.FLOOR: "floor (hardware limit)",
    }
    return [(mark, text) for mark, text in words.items() if mark in marks]


def _draw_key(figure: Figure, entries: list[tuple[Mark, str]], height: float) -> None:
    from matplotlib.lines import Line2D

    looks: dict[Mark, dict[str, Any]] = {
        Mark.MEASURED: {"marker": "o", "linestyle": "", "markersize": 5},
        Mark.PREDICTED: {"linewidth": 1.6},
        Mark.FLOOR: {"linewidth": 1.1, "linestyle": (0, (4, 2.5))},
    }
    handles = [Line2D([], [], color=FAINT, label=text, **looks[mark]) for mark, text in entries]
    figure.legend(
        handles=handles, loc="upper left", bbox_to_anchor=(0.08 / WIDTH_IN, 1 - 0.02 / height), ncols=len(handles),
        frameon=False, fontsize=7.6, labelcolor=FAINT, handlelength=1.7, columnspacing=1.3, handletextpad=0.5,
        borderpad=0, borderaxespad=0,
    )  # fmt: skip


def _draw_shares(figure: Figure, shares: ShareChart, chart: Chart) -> None:
    from matplotlib.lines import Line2D
    from matplotlib.patches import Patch

    height = KEY_IN + ROW_IN * len(shares.rows) + FOOT_IN
    figure.set_size_inches(WIDTH_IN, height)
    left, right = 1.25, 1.45
    axes = figure.add_axes(
        (left / WIDTH_IN, FOOT_IN / height, (WIDTH_IN - left - right) / WIDTH_IN, ROW_IN * len(shares.rows) / height)
    )
    for number, row in enumerate(shares.rows):
        part = 100 * row.prefill / (row.prefill + row.decode)
        axes.barh(number, part, height=0.5, color=COLOURS[Tone.PREFILL], zorder=2)
        axes.barh(number, 100 - part, left=part, height=0.5, color=COLOURS[Tone.DECODE], zorder=2)
        if row.predicted is not None:
            at = 100 * row.predicted[0] / sum(row.predicted)
            axes.plot([at, at], [number - 0.36, number + 0.36], color=INK, linewidth=1.6, zorder=3)
        for at, value in ((part / 2, part), (50 + part / 2, 100 - part)):
            if value >= 11:
                axes.text(at, number, f"{value:.0f}%", color="white", ha="center", va="center", fontsize=8, zorder=4)
        axes.text(102, number, row.note.replace(", ", "\n"), va="center", fontsize=7.6, color=FAINT, linespacing=1.15)
    axes.set_yticks(range(len(shares.rows)), [row.label for row in shares.rows])
    axes.set_ylim(len(shares.rows) - 0.5, -0.5)
    axes.set_xlim(0, 100)
    axes.grid(axis="y", visible=False)
    axes.set_xlabel(shares.axis)
    axes.tick_params(length=3, labelsize=8)
    axes.tick_params(axis="y", length=0, labelcolor=INK)
    handles: list[Any] = [
        Patch(color=COLOURS[Tone.PREFILL], label="prefill, measured"),
        Patch(color=COLOURS[Tone.DECODE], label="decode, measured"),
        Line2D(
            [],
            [],
            color=INK,
            linestyle="",
            marker="|",
            markersize=9,
            markeredgewidth=1.6,
            label=f"border, {chart.prediction}",
        ),
    ]
    figure.legend(
        handles=handles, loc="upper left", bbox_to_anchor=(0.08 / WIDTH_IN, 1 - 0.02 / height), ncols=3, frameon=False,
        fontsize=7.6, labelcolor=FAINT, handlelength=1.1, columnspacing=1.3, handletextpad=0.5, borderpad=0,
        borderaxespad=0,
    )  # fmt: skip
