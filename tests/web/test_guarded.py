"""Who may see the page, and who may act in it: keys, and a page that is for looking alone. In a real browser."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.server.running import running_server

pytestmark = [pytest.mark.browser, pytest.mark.timeout(600)]


def test_the_key_is_asked_for_and_stays_out_of_addresses(
    running_browser: Any, tiny_options: tuple[str, ...], tmp_path: Path
) -> None:
    from tests.web.browsing import tab

    with (
        running_server(tmp_path / "log", *tiny_options, TWOSTROKE_API_KEYS="quite-secret") as server,
        tab(running_browser, server.address) as watched,
    ):
        addresses: list[str] = []
        watched.page.on("request", lambda request: addresses.append(request.url))
        watched.page.goto(server.address)
        watched.page.wait_for_selector("dialog[open]")
        watched.page.keyboard.press("Escape")
        watched.page.wait_for_selector("dialog:not([open])", state="attached")
        watched.page.click("button:text-is('Give a key')")
        assert "was not taken" not in watched.page.inner_text("dialog[open]"), "none was given yet"
        watched.page.fill("dialog input", "Schlüssel")
        watched.page.click("dialog button[type=submit]")
        watched.page.wait_for_selector("dialog[open] >> text=ASCII")
        watched.page.fill("dialog input", "wrong")
        watched.page.click("dialog button[type=submit]")
        watched.page.wait_for_selector("dialog[open] >> text=was not taken")
        watched.page.fill("dialog input", "quite-secret")
        watched.page.click("dialog button[type=submit]")
        watched.page.wait_for_selector(".status.live")
        assert "Bearer $API_KEY" in watched.page.inner_text(".empty pre"), "a line to try needs the key's place"
        watched.turn_to("planner")
        watched.page.wait_for_selector("[data-path]")
        assert addresses and not any("quite-secret" in address for address in addresses)
        assert "quite-secret" not in watched.says("JSON.stringify(localStorage) + document.cookie + location.href")
        assert not watched.foreign
        assert all("401" in error for error in watched.errors), "only refusals, which browsers print"
        assert "quite-secret" not in server.log()


def test_a_page_for_looking_has_nothing_that_acts(
    running_browser: Any, tiny_options: tuple[str, ...], tmp_path: Path
) -> None:
    from tests.web.browsing import VIEWS, tab

    levels = tmp_path / "levels.toml"
    levels.write_text("[levels.default]\nttft_ms = 60000\nitl_ms = 0.001\n")
    options = (*tiny_options, "--page", "view", "--service-levels", str(levels))
    with (
        running_server(tmp_path / "log", *options) as server,
        tab(running_browser, server.address) as watched,
    ):
        watched.page.route("**/watch", lambda route: route.abort())
        watched.page.goto(f"{server.address}/#playground")
        watched.page.wait_for_selector(".status.waiting")
        assert not watched.page.locator("text=Playground").count(), "nor before the stream has begun"
        watched.errors.clear()
        watched.page.unroute("**/watch")
        watched.open("playground")
        assert watched.page.inner_text(".empty h2") == "No step yet", "there is no such view"
        server.post("/v1/chat/completions", {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 4})
        watched.page.wait_for_selector(".timeline")
        tabs = watched.page.locator("nav.tabs a").all_inner_texts()
        assert [name.lower() for name in tabs] == [view for view in VIEWS if view != "playground"]
        assert not watched.page.locator("text=Hold the engine").count()
        watched.turn_to("requests")
        watched.wait_until("document.querySelector('.promise')?.textContent.includes('TTFT ✓ kept')")
        assert "ITL ✗ broken" in watched.page.inner_text(".promise"), "a microsecond cannot be kept"
        assert "default: TTFT up to 60 s, ITL up to 1 µs" in watched.page.inner_text("section.view:not([hidden])")
        watched.page.click("table.requests a.chip >> nth=0")
        details = watched.page.inner_text(".request-details")
        assert "TTFT up to 60 s was promised\nTTFT ✓ kept" in details
        assert "ITL up to 1 µs was promised\nITL ✗ broken" in details
        watched.check()
