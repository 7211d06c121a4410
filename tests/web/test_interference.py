"""What others' prompts take of a stream is seen while it still runs, and meets what the server tells at its end."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

from tests.server.running import RunningServer

pytestmark = [pytest.mark.browser, pytest.mark.timeout(600)]

UNITS = {"min": 60.0, "s": 1.0, "ms": 1e-3, "µs": 1e-6}
ROWS = """[...document.querySelectorAll('table.requests tbody tr')].map((row) => [
    row.querySelector('a.chip').textContent, row.querySelector('th .note').textContent,
    row.querySelector('.phase-bar').getAttribute('aria-label')])"""
AT_THE_END = """async (events) => {
    const { History } = await import('/page/history.js');
    const { requestAt } = await import('/page/request_state.js');
    const history = new History({ bounded: false });
    const found = [];
    for (const event of events) {
        if (event.t === 'ended') {
            const state = requestAt(history.request(event.r), event.at_s, history);
            found.push([event, state]);
        }
        history.apply(event);
    }
    return found;
}"""
"""Of each request of a record: its end, and what the page knew right before."""


def shown_s(label: str) -> float:
    """The bar's part, in seconds; 0 where it has none."""
    found = re.search(r"interference ([\d.,]+) (\S+?)(?:,|$)", label)
    return float(found[1].replace(",", "")) * UNITS[found[2]] if found else 0.0


def test_a_long_prompt_amid_streams_is_seen_in_their_rows_before_they_end(
    running_browser: Any, page_server: tuple[RunningServer, Path]
) -> None:
    from tests.web.browsing import tab

    with tab(running_browser, page_server[0].address) as watched:
        watched.open("playground")
        watched.page.click("[data-situation=long]")
        watched.turn_to("requests")
        live_s: dict[str, list[float]] = {}
        ended_s: dict[str, float] = {}
        details: set[str] = set()
        watched.wait_until(f"{ROWS}.filter((row) => row[1].includes('writing')).length >= 4")
        while not ended_s or len(ended_s) < len(live_s):
            for number, state, label in watched.says(ROWS):
                if "writing" in state:
                    live_s.setdefault(number, []).append(shown_s(label))
                elif number in live_s:
                    ended_s.setdefault(number, shown_s(label))
            if not details and any(values[-1] > 0 for values in live_s.values()):
                number = next(number for number, values in live_s.items() if values[-1] > 0)
                watched.page.click(f"table.requests a.chip:text-is('{number}')")
                details.add(watched.page.inner_text(".request-details .figures"))
        watched.check()
    streams = sorted(live_s, key=lambda number: len(live_s[number]))[-4:]
    for number in streams:
        assert ended_s[number] > 0.0
        assert live_s[number][-1] == pytest.approx(ended_s[number], rel=0.15), number
    [told] = details
    assert "so far" in told and "known at its end" not in told


def test_what_the_page_knows_right_before_an_end_is_what_the_end_tells(
    running_browser: Any, page_server: tuple[RunningServer, Path]
) -> None:
    from tests.web.browsing import tab

    server, record = page_server
    with tab(running_browser, server.address) as watched:
        watched.open("playground")
        watched.cause("long", 5)
        watched.cause("burst", 10)
        server.wait_until(lambda: record.read_text(encoding="utf-8").count('"t":"ended"') >= 15)
        lines = record.read_text(encoding="utf-8").splitlines()
        events = [json.loads(line) for line in lines[:-1]]
        found = [pair for pair in watched.page.evaluate(AT_THE_END, events) if pair[0]["output_tokens"] > 1]
        watched.check()
    assert len(found) >= 14
    in_decode = [end["interference_s"] - end["prefill_interference_s"] for end, _ in found]
    assert max(in_decode) > 0.1, "streams waited for chunks"
    for (end, live), decode_s in zip(found, in_decode, strict=True):
        live_prefill_s = live["prefillInterference_s"]
        assert live["interference_s"] - live_prefill_s == pytest.approx(decode_s, rel=0.05, abs=0.005), end["r"]
        assert live_prefill_s == pytest.approx(end["prefill_interference_s"], rel=0.1, abs=0.02), end["r"]
