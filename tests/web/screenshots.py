"""Makes the pictures under docs/page and the recorded run beside them: one real session on SmolLM2.

    python -m tests.web.screenshots
    python -m tests.web.screenshots --view kv --to /tmp/pictures

Needs the extra [browser] and Chromium. Best on a quiet machine: what it shows is how long steps really took."""

from __future__ import annotations

import argparse
import io
import json
import subprocess
import tempfile
from pathlib import Path
from typing import Any

from PIL import Image

from tests.server.running import COMMAND, running_server
from tests.web.browsing import DESKTOP, PHONE, VIEWS, Tab, browser, tab

FOLDER = Path(__file__).resolve().parents[2] / "docs" / "page"
SERVER = ("smollm2", "--backend", "cpu", "--max-context", "4096", "--kv-memory", "100MB", "--speculate", "auto")
PACE = ("--itl-target-ms", "60")
HOST_GB = "0.05"
SIZES = (("desktop", DESKTOP), ("phone", PHONE))
LOOKS = [(scheme, name, size) for scheme in ("light", "dark") for name, size in SIZES]
TALLEST = 1000, 1400
"""A picture of a desktop, and of a phone."""
PHONE_COLUMN_PX, DESKTOP_COLUMN_PX = 6, 10
"""As a page that is loaded on each has them."""
AFTER_CHUNKS = 24
"""Steps after the long prompt's last chunk: there the picture is taken."""


def play(watched: Tab) -> None:
    """The situations, one after the other, and a chat in both panes."""
    watched.cause("prefix", 2)
    watched.cause("burst", 10)
    watched.cause("speculation", 2)
    watched.page.click("button:text-is('Feel TTFT against TPOT')")
    watched.wait_until(
        "[...document.querySelectorAll('.pane')]"
        ".every((pane) => pane.querySelector('.felt')?.textContent.includes(' out'))"
    )
    watched.cause("long", 5)


def moments(record: Path) -> tuple[float, float]:
    """Where the latest long prompt had just been read, and the time that the history begins at."""
    events = [json.loads(line) for line in record.read_text(encoding="utf-8").splitlines()]
    steps = [event for event in events if event["t"] == "step"]
    mixed = [index for index, step in enumerate(steps) if step["chunks"] and len(step["slots"]) >= 4]
    return steps[min(mixed[-1] + AFTER_CHUNKS, len(steps) - 1)]["done_s"], steps[0]["began_s"]


def seek(watched: Tab, at_s: float) -> None:
    """By the slider, as a hand would."""
    watched.says(
        "(() => { const field = document.querySelector('.scrub input');"
        f" field.value = {at_s}; field.dispatchEvent(new Event('input', {{ bubbles: true }})); }})()"
    )


def settle(watched: Tab, view: str, at_s: float) -> None:
    watched.turn_to(view)
    if view in ("steps", "kv", "requests", "roofline"):
        watched.page.wait_for_timeout(300)
        seek(watched, at_s)
    if view == "steps":
        columns = PHONE_COLUMN_PX if watched.says("innerWidth") == PHONE[0] else DESKTOP_COLUMN_PX
        watched.says(
            "(() => { const field = document.querySelector('.card-head input[type=range]');"
            f" field.value = {columns}; field.dispatchEvent(new Event('input', {{ bubbles: true }})); }})()"
        )
        watched.page.locator("section.view:not([hidden]) .timeline .plot").focus()
        watched.page.keyboard.press("End")
        for _ in range(AFTER_CHUNKS):
            watched.page.keyboard.press("ArrowLeft")
        watched.says("document.activeElement.blur()")
    if view == "planner":
        watched.page.wait_for_selector("[data-path]")
    watched.page.wait_for_timeout(1500)  # scales and bars come to rest
    watched.says("scrollTo(0, 0)")


def replay(watched: Tab, record: Path, at_s: float) -> None:
    watched.turn_to("replay")
    watched.page.set_input_files("input[type=file]", record)
    watched.page.wait_for_selector(".status.replay")
    watched.turn_to("replay")
    watched.page.click("button:text-is('Pause the view')")
    seek(watched, at_s)
    watched.page.wait_for_timeout(1500)
    watched.says("scrollTo(0, 0)")


def keep(picture: bytes, path: Path) -> None:
    """Not taller than is looked at, and packed as tightly as can be."""
    image = Image.open(io.BytesIO(picture)).convert("RGB")
    tallest = TALLEST[0] if image.width > PHONE[0] else TALLEST[1]
    image = image.crop((0, 0, image.width, min(image.height, tallest)))
    # The commonest colours: a page is made of few. A palette of averages would mix those of small marks. Of colours
    # that look alike only the commonest counts, or the shades at the edges of letters would drive out small marks.
    counted: list[Any] = sorted(image.getcolors(image.width * image.height) or [], reverse=True)
    chosen: dict[tuple[int, ...], tuple[int, ...]] = {}
    for _, colour in counted:
        chosen.setdefault(tuple(part >> 3 for part in colour), colour)
    palette = Image.new("P", (1, 1))
    palette.putpalette([part for colour in list(chosen.values())[:256] for part in colour])
    image.quantize(palette=palette, dither=Image.Dither.NONE).save(path, optimize=True)


def one_file(record: Path, to: Path) -> None:
    command = [*COMMAND[:-1], "replay", str(record), "--html", str(to / "smollm2.html")]
    subprocess.run(command, check=True)


def photograph(running: Any, address: str, record: Path, to: Path, views: list[str]) -> None:
    with tab(running, address) as first:
        first.open("playground")
        play(first)
        at_s, began_s = moments(record)
        for scheme, name, size in LOOKS:
            first.page.set_viewport_size({"width": size[0], "height": size[1]})
            first.page.emulate_media(color_scheme=scheme)  # type: ignore[arg-type]
            for view in views:
                if view == "replay":
                    replay(first, record, at_s - began_s)
                else:
                    settle(first, view, at_s - began_s)
                keep(first.page.screenshot(full_page=True), to / f"{view}-{scheme}-{name}.png")
            if "replay" in views:
                first.page.click("button:text-is('Back to live')")
        first.check()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--view", action="append", choices=VIEWS, help="default: all of them, and the recorded run")
    parser.add_argument("--to", type=Path, default=FOLDER)
    asked = parser.parse_args()
    asked.to.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as folder:
        record, tiers = Path(folder) / "run.jsonl", ("--kv-host-gb", HOST_GB)
        with (
            running_server(Path(folder) / "log", *SERVER, *PACE, *tiers, "--record", str(record)) as server,
            browser() as running,
        ):
            photograph(running, server.address, record, asked.to, asked.view or list(VIEWS))
        if asked.view is None:
            one_file(record, asked.to)
    total = sum(path.stat().st_size for path in asked.to.iterdir())
    print(f"{len(list(asked.to.iterdir()))} files in {asked.to}, {total / 1e6:.1f} MB")


if __name__ == "__main__":
    main()
