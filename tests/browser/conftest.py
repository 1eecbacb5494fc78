"""Fixtures for tests in a browser; they are skipped where there is none."""

from __future__ import annotations

from pathlib import Path

import pytest
from harness import FLAGS, NARROW, NO_BROWSER, WIDE, Visit, find_chromium


@pytest.fixture(scope="module")  # not longer: Playwright keeps an event loop running in its thread
def chromium():
    """The browser, without a window, with a profile of its own."""
    program = find_chromium()
    if program is None:
        pytest.skip(NO_BROWSER)
    from playwright.sync_api import sync_playwright

    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=program, args=list(FLAGS))
        yield browser
        browser.close()


@pytest.fixture
def visit(chromium):
    """Open a file or an address in a fresh profile: ``visit(place, width=390)``; see ``harness.Visit``."""
    contexts = []

    def open_page(place: str | Path, *, width: int = WIDE, dark: bool = False) -> Visit:
        url = place.resolve().as_uri() if isinstance(place, Path) else place
        context = chromium.new_context(
            viewport={"width": width, "height": 844 if width <= NARROW else 900},
            color_scheme="dark" if dark else "light",
            reduced_motion="reduce",
        )
        context.set_default_timeout(120_000)  # of a busy machine; nothing here waits for time to pass
        contexts.append(context)
        return Visit(context.new_page(), url)

    yield open_page
    for context in contexts:
        context.close()
