"""The tiers that KV blocks lie in, as the page shows them. In a real browser, before a server that spills."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.server.running import running_server

pytestmark = [pytest.mark.browser, pytest.mark.timeout(600)]


def test_the_block_map_has_a_band_for_each_tier(
    running_browser: Any, tiny_options: tuple[str, ...], tmp_path: Path
) -> None:
    from axe_playwright_python.sync_playwright import Axe

    from tests.web.browsing import PHONE, tab

    tiers = ("--kv-host-gb", "0.01", "--kv-disk", str(tmp_path / "kv"), "--kv-disk-gb", "0.1")
    options = (*tiny_options, "--max-context", "256", "--kv-memory", "300kB", *tiers)
    with (
        running_server(tmp_path / "log", *options) as server,
        tab(running_browser, server.address) as watched,
    ):
        watched.open("kv")
        for number in range(12):
            prompt = f"{number}, said the {number}th of them, and counted to {number} again. " * 3
            server.post("/v1/completions", {"prompt": prompt, "max_tokens": 4, "ignore_eos": True})
        watched.wait_until("document.querySelectorAll('.map').length === 3")
        watched.wait_until("/[1-9]\\d* kept and on disk too/.test(document.querySelectorAll('.band')[1]?.textContent)")
        assert watched.page.locator("h3.band").all_inner_texts()[2].startswith("On disk")
        host = watched.page.locator(".map .plot >> nth=1")
        host.focus()
        watched.page.keyboard.press("Home")
        watched.wait_until(
            "document.querySelectorAll('.map .plot')[1].getAttribute('aria-valuetext')"
            " === 'Slot 0: kept in host memory, and on disk too'"
        )
        told = watched.page.inner_text("ul.tiers")
        assert "host" in told and "disk" in told and "blocks" in told
        found = Axe().run(watched.page).response["violations"]
        assert not [fault["id"] for fault in found if fault["impact"] in ("serious", "critical")]
        watched.page.set_viewport_size({"width": PHONE[0], "height": PHONE[1]})
        watched.wait_until(f"document.documentElement.scrollWidth <= {PHONE[0]}", limit_s=20)  # the chart follows
        watched.check()
