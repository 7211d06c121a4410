"""How smooth the live page is while 16 streams run, by the browser's own tracing: first paint, frames a second, and
tasks that held the page up.

    python -m bench.page_frames
    python -m bench.page_frames --seconds 60 --streams 16 --view steps --view kv

Needs the extra [browser] and Chromium. Server and browser share this machine's cores, so a task has two lengths: by the
clock, with the time that it waited for a core, and by the processor, which is what the page itself did."""

from __future__ import annotations

import argparse
import json
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import pairwise
from pathlib import Path
from typing import Any

from playwright.sync_api import CDPSession
from tests.server.running import RunningServer, running_server
from tests.web.browsing import Tab, browser, tab

CATEGORIES = "toplevel,devtools.timeline,disabled-by-default-devtools.timeline"
TASK = "ThreadControllerImpl::RunTask"
"""One a task. `RunTask` lies around each of them: whoever counts both counts every task twice."""
LONG_S = 0.05
GOAL_S = 0.1
ANSWER_TOKENS = 400


@contextmanager
def streams(server: RunningServer, number: int, answer_tokens: int = ANSWER_TOKENS) -> Iterator[None]:
    """So many at once, asked again whenever they are answered."""
    ended = threading.Event()
    prompts = [f"Story {index}: once upon a time" for index in range(number)]
    body = {"prompt": prompts, "max_tokens": answer_tokens, "ignore_eos": True, "temperature": 1}

    def ask() -> None:
        while not ended.is_set():
            server.post("/v1/completions", body)

    asking = threading.Thread(target=ask)
    asking.start()
    try:
        yield
    finally:
        ended.set()
        asking.join()


def first_paint_s(watched: Tab) -> dict[str, float]:
    entries = watched.says("performance.getEntriesByType('paint').map((entry) => [entry.name, entry.startTime])")
    return {name: start_ms / 1000 for name, start_ms in entries}


def traced(watched: Tab, seconds: float) -> list[dict[str, Any]]:
    session: CDPSession = watched.page.context.new_cdp_session(watched.page)
    events: list[dict[str, Any]] = []
    complete: list[bool] = []
    session.on("Tracing.dataCollected", lambda data: events.extend(data["value"]))
    session.on("Tracing.tracingComplete", lambda _: complete.append(True))
    traced_parts = {"includedCategories": CATEGORIES.split(",")}
    session.send("Tracing.start", {"transferMode": "ReportEvents", "traceConfig": traced_parts})
    watched.page.wait_for_timeout(seconds * 1000)
    session.send("Tracing.end")
    end_s = time.monotonic() + 120
    while not complete and time.monotonic() < end_s:
        watched.page.wait_for_timeout(50)
    return events


def page_thread(events: list[dict[str, Any]]) -> tuple[int, int]:
    """Of the renderer that fired animation frames."""
    fired = [(event["pid"], event["tid"]) for event in events if event["name"] == "FireAnimationFrame"]
    return max(set(fired), key=fired.count)


def report(name: str, events: list[dict[str, Any]], seconds: float) -> dict[str, Any]:
    thread = page_thread(events)
    own = [event for event in events if (event["pid"], event["tid"]) == thread]
    frames = sorted(event["ts"] / 1e6 for event in own if event["name"] == "FireAnimationFrame")
    tasks = [event for event in own if event["name"] == TASK and "dur" in event]
    tasks_s = sorted(event["dur"] / 1e6 for event in tasks)
    work_s = sorted(event.get("tdur", event["dur"]) / 1e6 for event in tasks)  # some tell no processor time
    gaps_s = sorted(later - earlier for earlier, later in pairwise(frames))
    return {
        "view": name,
        "seconds": seconds,
        "frames_per_s": round(len(frames) / seconds, 1),
        "frame_gap_median_ms": round(gaps_s[len(gaps_s) // 2] * 1e3, 1),
        "frame_gap_p99_ms": round(gaps_s[int(len(gaps_s) * 0.99)] * 1e3, 1),
        "longest_task_ms": round(tasks_s[-1] * 1e3, 1),
        "tasks_over_50_ms": sum(task_s > LONG_S for task_s in tasks_s),
        "tasks_over_100_ms": sum(task_s > GOAL_S for task_s in tasks_s),
        "busy_share": round(sum(tasks_s) / seconds, 3),
        "longest_task_cpu_ms": round(work_s[-1] * 1e3, 1),
        "cpu_share": round(sum(work_s) / seconds, 3),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=60)
    parser.add_argument("--streams", type=int, default=16)
    parser.add_argument("--view", action="append", help="default: steps, kv and requests")
    asked = parser.parse_args()
    with (
        tempfile.TemporaryDirectory() as folder,
        running_server(Path(folder) / "log", "smollm2") as server,
        browser() as running,
    ):
        with tab(running, server.address) as watched:
            watched.open()
            print(json.dumps({"first_paint_s": first_paint_s(watched)}))
        with streams(server, asked.streams):
            for view in asked.view or ["steps", "kv", "requests"]:
                with tab(running, server.address) as watched:
                    watched.open(view)
                    watched.page.wait_for_timeout(2000)
                    print(json.dumps(report(view, traced(watched, asked.seconds), asked.seconds)), flush=True)
                    watched.check()


if __name__ == "__main__":
    main()
