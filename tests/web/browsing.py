"""A real browser on the live page: what every test of it needs to start it, to wait, and to know that nothing went
wrong unseen."""

from __future__ import annotations

import os
import re
import shutil
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import urlsplit

from playwright.sync_api import Browser, ConsoleMessage, Page, Request, sync_playwright

CHROMIUM = os.environ.get("CHROMIUM") or shutil.which("chromium") or shutil.which("google-chrome")
OPTIONS = ("--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage")
"""As a container without a display needs them."""
LIMIT_S = 120.0
DESKTOP, PHONE = (1280, 900), (390, 844)
ROLES = re.compile(r"\W*(assistant|system|user)\b", re.IGNORECASE)
VIEWS = ("steps", "kv", "requests", "roofline", "playground", "planner", "replay")


@dataclass
class Tab:
    """A page that is watched: what it printed as an error, and whom it asked."""

    page: Page
    address: str
    errors: list[str] = field(default_factory=list)
    foreign: list[str] = field(default_factory=list)

    def open(self, view: str = "steps") -> None:
        self.page.goto(f"{self.address}/#{view}")
        self.page.wait_for_selector(".status.live", timeout=LIMIT_S * 1000)

    def turn_to(self, view: str) -> None:
        self.page.click(f'nav.tabs a[href="#{view}"]')
        self.page.wait_for_selector(f'section.view[aria-label="{view.title()}" i]:not([hidden])')

    def says(self, expression: str) -> Any:
        return self.page.evaluate(expression)

    def wait_until(self, expression: str, limit_s: float = LIMIT_S) -> Any:
        """Playwright's own waiting evaluates text inside the page, which the page's policy forbids."""
        end_s = time.monotonic() + limit_s
        while not (found := self.page.evaluate(expression)):
            assert time.monotonic() < end_s, f"not so after {limit_s} s: {expression}"
            time.sleep(0.05)
        return found

    def cause(self, situation: str, num_requests: int) -> None:
        """Presses a situation's button and waits until all of its requests are answered."""
        self.page.click(f"[data-situation={situation}]")
        self.wait_until(
            f"document.querySelectorAll('.runs tbody tr').length === {num_requests}"
            " && [...document.querySelectorAll('.runs tbody tr')].every((row) => row.dataset.done === 'true')"
        )
        answers = self.says("[...document.querySelectorAll('.runs td.answer')].map((cell) => cell.textContent)")
        assert all(answers), "each was answered"
        spilt = [text for text in answers if ROLES.match(text)]
        assert not spilt, f"an answer begins within its own turn, without the template's words: {spilt}"

    def check(self) -> None:
        assert not self.errors, f"the page's console: {self.errors}"
        assert not self.foreign, f"the page asked others: {self.foreign}"


@contextmanager
def browser() -> Iterator[Browser]:
    with sync_playwright() as playwright:
        running = playwright.chromium.launch(executable_path=CHROMIUM, args=list(OPTIONS))
        yield running
        running.close()


@contextmanager
def tab(running: Browser, address: str, size: tuple[int, int] = DESKTOP, scheme: str = "light") -> Iterator[Tab]:
    """In a profile of its own."""
    viewport = {"width": size[0], "height": size[1]}
    context = running.new_context(viewport=viewport, color_scheme=scheme, reduced_motion="reduce")  # type: ignore[arg-type]
    page = context.new_page()
    watched = Tab(page, address)
    origin = urlsplit(address)[:2]

    def on_request(request: Request) -> None:
        if not request.url.startswith(("data:", "blob:")) and urlsplit(request.url)[:2] != origin:
            watched.foreign.append(request.url)

    def on_console(message: ConsoleMessage) -> None:
        if message.type == "error":
            watched.errors.append(message.text)

    page.on("request", on_request)
    page.on("console", on_console)
    page.on("pageerror", lambda error: watched.errors.append(str(error)))
    page.on("dialog", lambda dialog: watched.errors.append(f"a dialog: {dialog.message}"))
    yield watched
    context.close()
