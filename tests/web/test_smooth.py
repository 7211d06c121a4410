"""What the page itself does while sixteen streams run, by the browser's own tracing. Processor time is told, which
a busy machine does not stretch: `bench.page_frames` has frames a second, and tasks by the clock."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.server.running import RunningServer

pytestmark = [pytest.mark.browser, pytest.mark.timeout(600)]

SECONDS = 4.0
LONGEST_CPU_MS = 50.0
"""Half of what holds a page up; the longest are near 10 on two cores."""
MOST_SHARE = 0.4


def test_no_task_of_the_page_is_long_while_sixteen_streams_run(
    running_browser: Any, page_server: tuple[RunningServer, Path]
) -> None:
    from bench.page_frames import report, streams, traced
    from tests.web.browsing import tab

    with streams(page_server[0], 16, answer_tokens=120):
        for view in ("steps", "kv", "requests", "roofline", "playground"):
            with tab(running_browser, page_server[0].address) as watched:
                watched.open(view)
                watched.page.wait_for_timeout(500)
                found = report(view, traced(watched, SECONDS), SECONDS)
                assert found["longest_task_cpu_ms"] < LONGEST_CPU_MS, found
                assert 0 < found["cpu_share"] < MOST_SHARE, found
                watched.check()
