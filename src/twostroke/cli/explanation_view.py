"""An explanation in the terminal: the verdict, a sentence for each phase, and the timeline as bars."""

from __future__ import annotations

from collections.abc import Sequence

from rich.console import Console
from rich.table import Table
from rich.text import Text

from twostroke.cli import units
from twostroke.explain.timeline import Span

NAMES = {
    "reception": "reception",
    "queue": "queue",
    "prefill": "prefill (read)",
    "others": "others' steps",
    "decode": "decode (write)",
    "preempted": "preempted",
    "queue there": "queue there",
    "prefill there": "prefill there",
    "way": "on the way",
    "handoff": "handoff (KV)",
    "delivery": "delivery",
}
COLOURS = {"prefill": "cyan", "decode": "green", "queue": "yellow", "others": "magenta", "preempted": "red"}
COLOURS |= {"prefill there": "cyan", "queue there": "yellow", "way": "blue", "handoff": "blue"}
BAR_CHARS = 30
MOST_ROWS = 16
FIRST_ROWS, LAST_ROWS = 9, 5


def print_explanation(
    console: Console,
    verdict: str,
    start: str | None,
    stream: str | None,
    spans: Sequence[Span],
    *,
    is_fitted: bool,
    doubt: str | None = None,
    promise: str | None = None,
    handoff: str | None = None,
) -> None:
    """`doubt`: why there are no fitted costs to go by, where that is known. `promise`: what its class promised and what
    was kept, where it promised anything. `handoff`: what another engine did of it, where one did."""
    console.print(Text(verdict[:1].upper() + verdict[1:] + ".", style="bold"))
    for name, sentence in (("Handoff", handoff), ("Start", start), ("Stream", stream), ("Promise", promise)):
        if sentence is not None and sentence not in verdict:
            console.print(Text(f"{name}: {sentence}."))
    if spans:
        console.print(_table(console, spans))
    doubt = doubt or "too few steps were measured to fit costs, or the fit was too far off"
    source = "costs fitted to this model's steps on this machine" if is_fitted else f"floors: {doubt}"
    console.print(Text(f"What might have been is predicted from {source}.", style="dim"))


def _table(console: Console, spans: Sequence[Span]) -> Table:
    begin_s = spans[0].start_s
    whole_s = max(1e-9, max(span.start_s + span.seconds for span in spans) - begin_s)
    bars = min(BAR_CHARS, max(0, console.width - 70))
    table = Table(box=None, pad_edge=False, show_header=False, padding=(0, 2, 0, 0))
    table.add_column(justify="right", no_wrap=True)
    table.add_column(justify="right", no_wrap=True)
    table.add_column(no_wrap=True)
    if bars:
        table.add_column(no_wrap=True)
    table.add_column(overflow="fold", style="dim")
    for span in _shortened(spans):
        row: list[Text | str] = [f"at {units.seconds(max(0.0, span.start_s - begin_s))}", units.seconds(span.seconds)]
        row.append(Text(NAMES.get(span.kind, span.kind), style=COLOURS.get(span.kind, "")))
        if bars:
            row.append(_bar(span, begin_s, whole_s, bars))
        table.add_row(*row, Text(span.note))
    return table


def _shortened(spans: Sequence[Span]) -> list[Span]:
    """Of many chunks, the first and the last few; what lies between is one row."""
    if len(spans) <= MOST_ROWS:
        return list(spans)
    middle = spans[FIRST_ROWS:-LAST_ROWS]
    seconds = sum(span.seconds for span in middle)
    between = Span(middle[0].kind, middle[0].start_s, seconds, f"and {len(middle) - 1} more spans like these")
    return [*spans[:FIRST_ROWS], between, *spans[-LAST_ROWS:]]


def _bar(span: Span, begin_s: float, whole_s: float, width: int) -> Text:
    first = min(width - 1, round((span.start_s - begin_s) / whole_s * width))
    length = max(1, min(width - first, round(span.seconds / whole_s * width)))
    return Text(" " * first + "█" * length + " " * (width - first - length), style=COLOURS.get(span.kind, ""))
