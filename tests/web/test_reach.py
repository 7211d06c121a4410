"""What is chosen without a mouse, at phone width: a step and a request by keyboard, a block by touch."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.server.running import RunningServer

pytestmark = [pytest.mark.browser, pytest.mark.timeout(600)]

MOMENT = "Number(document.querySelector('.scrub input').value)"


def test_a_step_chosen_by_keyboard_stays_in_sight(
    running_browser: Any, page_server: tuple[RunningServer, Path]
) -> None:
    from tests.web.browsing import PHONE, tab

    with tab(running_browser, page_server[0].address, size=PHONE) as watched:
        watched.open("playground")
        watched.cause("burst", 10)
        watched.turn_to("steps")
        watched.page.click("button:text-is('Pause the view')")
        timeline = watched.page.locator("section.view:not([hidden]) .timeline .plot")
        timeline.focus()
        watched.page.keyboard.press("End")
        end, latest = watched.says(MOMENT), timeline.get_attribute("aria-valuetext")
        for _ in range(7):
            watched.page.keyboard.press("PageUp")
        watched.wait_until(f"{MOMENT} < {end}", limit_s=20)
        assert timeline.get_attribute("aria-valuetext") != latest
        before = watched.says(MOMENT)
        for _ in range(7):
            watched.page.keyboard.press("PageDown")
        watched.wait_until(f"{MOMENT} > {before}", limit_s=20)
        assert timeline.get_attribute("aria-valuetext") == latest
        watched.check()


def test_a_request_that_is_chosen_comes_into_sight_and_its_row_is_found_again(
    running_browser: Any, page_server: tuple[RunningServer, Path]
) -> None:
    from tests.web.browsing import PHONE, tab

    with tab(running_browser, page_server[0].address, size=PHONE) as watched:
        watched.open("playground")
        watched.cause("burst", 10)
        watched.turn_to("requests")
        row = watched.page.locator("table.requests a.chip >> nth=9")
        number = row.inner_text()
        row.focus()
        watched.page.keyboard.press("Enter")
        top = "document.querySelector('.request-details')?.getBoundingClientRect().top ?? 1e9"
        watched.wait_until(f"0 <= ({top}) && ({top}) < {PHONE[1]}", limit_s=20)
        watched.page.keyboard.press("Tab")
        assert watched.says("document.activeElement.textContent") == "Close"
        watched.page.keyboard.press("Enter")
        watched.wait_until(f"document.activeElement.textContent === '{number}'", limit_s=20)
        watched.check()


def test_a_block_that_is_tapped_is_named_and_stays_so(
    running_browser: Any, page_server: tuple[RunningServer, Path]
) -> None:
    body = {"messages": [{"role": "user", "content": "Hello."}], "max_tokens": 4}
    page_server[0].post("/v1/chat/completions", body)
    context = running_browser.new_context(viewport={"width": 390, "height": 844}, has_touch=True)
    page = context.new_page()
    page.goto(f"{page_server[0].address}/#kv")
    page.wait_for_selector(".map .plot")
    page.tap(".map .plot", position={"x": 5, "y": 5})
    page.wait_for_selector(".map-words:has-text('Block 0:')")
    page.wait_for_timeout(500)
    assert page.inner_text(".map-words").startswith("Block 0:")
    context.close()
