"""`twostroke replay`: a record of a server's steps, as a page that plays it or in a few lines."""

from __future__ import annotations

from pathlib import Path
from statistics import median
from typing import Annotated, Any

import typer
from rich.console import Console

from twostroke.cli import units
from twostroke.core.errors import BadRequestError

Record = Annotated[Path, typer.Argument(metavar="FILE", help="What `twostroke serve --record FILE` wrote.")]
Html = Annotated[
    Path | None,
    typer.Option(metavar="OUT", help="Write the live page with this record in it: one file that needs no server."),
]


def replay(file: Record, html: Html = None) -> None:
    """Play a recorded run: where each step's time went, request by request.

    A record holds ids, lengths and times, and no text. With --html it becomes one HTML file that plays in any browser,
    without a server and without a network: for a bug report, or a lesson. Without it, a summary is printed.

    \b
    twostroke serve smollm2 --record run.jsonl
    twostroke replay run.jsonl --html run.html
    """
    from twostroke.web.recording import read_recording

    recording = read_recording(file)
    console = Console(highlight=False, markup=False)
    if html is None:
        for line in _summary(recording.events, recording.seconds):
            console.print("".join(one if one.isprintable() else ascii(one)[1:-1] for one in line))  # a file's texts
    else:
        from twostroke.web.bundle import bundle
        from twostroke.web.files import page_files

        text = bundle(recording, page_files())
        try:
            html.write_text(text, encoding="utf-8")
        except OSError as error:
            raise BadRequestError(f"cannot write {html}: {error.strerror or error}") from None
        console.print(f"{html}: {units.size(len(text.encode()))}, plays in any browser, without a server")
    if recording.num_torn:
        noun = "line was" if recording.num_torn == 1 else "lines were"
        console.print(f"{recording.num_torn} {noun} not whole, and left out")


def _summary(events: list[dict[str, Any]], seconds: float) -> list[str]:
    hello = events[0]
    steps = [event for event in events if event["t"] == "step"]
    ended = [event for event in events if event["t"] == "ended"]
    recorded = hello.get("recorded") or {}
    lines = [
        f"{hello.get('model')} on {recorded.get('machine') or hello.get('backend')}, {recorded.get('date', 'no date')}",
        f"  {seconds:.1f} s, {len(steps)} steps, {len(ended)} requests that ended",
    ]
    for name, field in (("TTFT", "ttft_s"), ("TPOT", "tpot_s")):
        values = [event[field] for event in ended if isinstance(event.get(field), float)]
        if values:
            lines.append(f"  {name}: median {median(values) * 1e3:.1f} ms, longest {max(values) * 1e3:.1f} ms")
    chunks = sum(chunk[2] for step in steps for chunk in step.get("chunks", ()))
    slots = [slot for step in steps for slot in step.get("slots", ())]
    lines.append(
        f"  prefill: {chunks:,} tokens read; decode: {sum(1 + slot[3] for slot in slots):,} tokens in "
        f"{len(slots):,} slots, {sum(slot[2] for slot in slots):,} drafts"
    )
    return lines
