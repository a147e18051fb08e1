"""Open a page of `entropykv serve` in Chromium, and record its errors and requests."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[2]
AXE = ROOT / "web" / "node_modules" / "axe-core" / "axe.min.js"
_CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser")
SECONDS = 60
ENDED = "/v1/kv/text"
"""The page may ask for the text of a conversation that has ended since its last picture."""


@contextmanager
def chromium() -> Iterator[Any]:
    """Yield a headless browser; skips the test if there is none."""
    api = pytest.importorskip("playwright.sync_api", reason="needs entropykv[browser]")
    if _CHROMIUM is None:
        pytest.skip("needs Chromium: install the package chromium of Debian")
    with api.sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=_CHROMIUM)
        yield browser
        browser.close()


class Watched:
    """Hold a page, the errors in it, and its requests to other machines."""

    def __init__(self, browser: Any, url: str, **context: Any) -> None:
        """Open the page; `context`: arguments of Playwright's new_context()."""
        self.url = url
        self.problems: list[str] = []
        self.foreign: list[str] = []
        self.context = browser.new_context(**context)
        self.page = self.context.new_page()
        self.page.set_default_timeout(1000 * SECONDS)
        self.page.on("console", self._note)
        self.page.on("pageerror", lambda error: self.problems.append(str(error)))
        self.page.on("request", self._note_request)
        self.page.goto(url)

    def _note(self, message: Any) -> None:
        if message.type in ("error", "warning"):
            # A browser does not name the file in its message.
            where = message.location.get("url", "")
            self.problems.append(f"{message.text} {where}".rstrip())

    def _note_request(self, request: Any) -> None:
        if not request.url.startswith((self.url, "data:", "blob:")):
            self.foreign.append(request.url)

    def check(self, *expected: str) -> None:
        """Assert that there were only `expected` errors and no foreign requests; close the page."""
        wrong = [
            text for text in self.problems if not any(each in text for each in (ENDED, *expected))
        ]
        self.context.close()
        assert not wrong, wrong
        assert not self.foreign, self.foreign

    def wait_for(self, locator: Any) -> None:
        """Wait until something is shown; the error shows what the page says instead."""
        try:
            locator.wait_for()
        except Exception as error:
            shown = self.page.locator("#app").inner_text()
            raise AssertionError(f"{error}\n{self.problems}\n{shown}") from error

    def shows_instead(self, model: Any, pictures: Iterable[Any]) -> list[str]:
        """Send these states of the cache to the page in place of the server's stream.

        Returns a list that grows by an address each time the page asks for the stream.
        """
        looks: list[str] = []
        sent = [("model", model), *(("kv", picture) for picture in pictures)]
        body = "".join(f"event: {name}\ndata: {json.dumps(data)}\n\n" for name, data in sent)

        def show(route: Any) -> None:
            looks.append(route.request.url)
            route.fulfill(body=body, content_type="text/event-stream")

        self.page.route("**/v1/kv/stream*", show)
        return looks

    def ask(self, text: str) -> None:
        self.page.get_by_label("Your message").fill(text)
        self.page.keyboard.press("Enter")

    def answers(self) -> list[str]:
        return [
            str(text) for text in self.page.locator("article.answer .markdown").all_inner_texts()
        ]

    def finished(self) -> None:
        """Wait until the answer is complete."""
        self.page.locator("article.answer .actions").last.wait_for()

    def settings(self, **fields: object) -> None:
        """Fill fields of the settings by their labels, with _ for a space, and save."""
        self.page.get_by_role("button", name="Settings").click()
        for label, value in fields.items():
            self.page.get_by_label(label.replace("_", " "), exact=True).fill(str(value))
        self.page.get_by_role("button", name="Save").click()

    def findings(self) -> list[str]:
        """Return the findings that axe rates as serious or critical; skips the test without axe."""
        if not AXE.is_file():
            pytest.skip("needs axe-core: run `make web`")
        # The test injects this script; a script tag would violate the page's content security
        # policy.
        self.page.evaluate(f"{AXE.read_text(encoding='utf-8')};0")
        result = self.page.evaluate("axe.run(document)")
        return [
            f"{each['id']}: {node['html'][:200]}"
            for each in result["violations"]
            if each["impact"] in ("serious", "critical")
            for node in each["nodes"]
        ]
