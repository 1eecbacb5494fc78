"""A real browser for tests of pages: what it complains about, what it shows, and how that reads.

``find_chromium`` looks for the browser, ``Visit`` is one page in it, and the functions below ask questions
about what the page shows. Most return the list of what is wrong, so that an empty list is the passing answer.
"""

from __future__ import annotations

import os
import re
import shutil
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

SCREENSHOTS = Path(__file__).parents[2] / "build" / "screenshots"
WIDE, NARROW = 1280, 390
NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable", "chrome")
FLAGS = (
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
)
NO_BROWSER = (
    f"no Chromium found (looked for {', '.join(NAMES)} on the path; FALD_CHROMIUM names another program): "
    "tests in a browser are skipped"
)


def find_chromium() -> str | None:
    """Path of the browser: FALD_CHROMIUM if set, else the first of the usual names on the path."""
    given = os.environ.get("FALD_CHROMIUM")
    if given:
        return shutil.which(given)
    return next((found for found in map(shutil.which, NAMES) if found), None)


class Visit:
    """A page that was opened, and everything it complained about.

    Attributes
    ----------
    page
        Playwright's page.
    complaints
        Errors and warnings of the console, exceptions, failed requests and requests that leave the page's
        own origin, in the order they came.
    """

    def __init__(self, page: Any, url: str):
        self.page, self.url = page, url
        self.complaints: list[str] = []
        self._home = urlsplit(url)
        page.on("console", self._console)
        page.on("pageerror", lambda error: self.complaints.append(f"exception: {error}"))
        page.on("request", self._request)
        page.on("requestfailed", self._failed)
        page.on("response", self._response)
        page.goto(url)

    def _console(self, message: Any) -> None:
        if message.type in ("error", "warning"):
            self.complaints.append(f"console {message.type}: {message.text}")

    def _request(self, request: Any) -> None:
        there = urlsplit(request.url)
        if there.scheme in ("data", "blob"):
            return
        if (there.scheme, there.netloc) != (self._home.scheme, self._home.netloc):
            self.complaints.append(f"request to elsewhere: {request.url[:200]}")
        elif there.scheme == "file" and there.path != self._home.path:
            self.complaints.append(f"request for another file: {request.url[:200]}")

    def _failed(self, request: Any) -> None:
        # a stream that the page itself closes is aborted, which is no failure
        if "ERR_ABORTED" not in (request.failure or ""):
            self.complaints.append(f"request failed: {request.url[:200]} {request.failure}")

    def _response(self, response: Any) -> None:
        if response.status >= 400:
            self.complaints.append(f"status {response.status}: {response.url[:200]}")

    def screenshot(self, name: str, *, whole: bool = True) -> Path:
        """Keep a picture of the page, whole or what fits the window, among the build products."""
        SCREENSHOTS.mkdir(parents=True, exist_ok=True)
        path = SCREENSHOTS / f"{name}.png"
        self.page.screenshot(path=path, full_page=whole, animations="disabled")
        return path

    def texts(self, selector: str) -> list[str]:
        """The visible text of every element that matches, in the order of the page."""
        return [_spaces(text) for text in self.page.locator(selector).all_inner_texts()]

    def text(self, selector: str) -> str:
        """The visible text of the one element that matches."""
        return _spaces(self.page.locator(selector).inner_text())


def _spaces(text: str) -> str:
    return re.sub(r"\s+", " ", text).strip()


_CONTRAST = """
() => {
  const parse = (text) => {
    const found = text.match(/rgba?\\(([^)]+)\\)/);
    if (!found) return null;
    const parts = found[1].split(/[ ,/]+/).filter(Boolean).map(Number);
    return [parts[0], parts[1], parts[2], parts.length > 3 ? parts[3] : 1];
  };
  const over = (top, under) => {
    const a = top[3];
    return [0, 1, 2].map((i) => a * top[i] + (1 - a) * under[i]).concat([1]);
  };
  const behind = (element) => {
    const layers = [];
    for (let node = element; node && node.nodeType === 1; node = node.parentElement) {
      const style = getComputedStyle(node);
      if (node.namespaceURI.endsWith("svg") && node.tagName !== "svg") continue;
      const colour = parse(style.backgroundColor);
      if (colour && colour[3] > 0) layers.push(colour);
      if (colour && colour[3] === 1) break;
    }
    return layers.reverse().reduce((under, top) => over(top, under), [255, 255, 255, 1]);
  };
  const luminance = (colour) => {
    const linear = colour.slice(0, 3).map((v) => {
      const s = v / 255;
      return s <= 0.04045 ? s / 12.92 : Math.pow((s + 0.055) / 1.055, 2.4);
    });
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2];
  };
  const wrong = [];
  const walker = document.createTreeWalker(document.body, NodeFilter.SHOW_TEXT);
  while (walker.nextNode()) {
    const text = walker.currentNode.textContent.trim();
    const element = walker.currentNode.parentElement;
    if (!text || ["SCRIPT", "STYLE", "NOSCRIPT", "TEMPLATE"].includes(element.tagName)) continue;
    const box = element.getBoundingClientRect();
    const style = getComputedStyle(element);
    if (box.width === 0 || box.height === 0 || style.visibility === "hidden") continue;
    if (!element.checkVisibility({ opacityProperty: true })) continue;
    if (element.closest("[disabled], [aria-disabled=true]")) continue;
    const svg = element.namespaceURI.endsWith("svg");
    const ink = parse(svg ? style.fill : style.color);
    if (!ink) continue;
    const paper = behind(element);
    const [dark, light] = [luminance(over(ink, paper)), luminance(paper)].sort((a, b) => a - b);
    const ratio = (light + 0.05) / (dark + 0.05);
    const size = parseFloat(style.fontSize);
    const large = size >= 24 || (size >= 18.66 && parseInt(style.fontWeight) >= 700);
    if (ratio < (large ? 3 : 4.5)) {
      wrong.push(`${ratio.toFixed(2)}: "${text.slice(0, 60)}" in <${element.tagName.toLowerCase()}>`);
    }
  }
  return wrong;
}
"""

_OVERFLOW = """
() => {
  const width = document.documentElement.clientWidth;
  if (document.documentElement.scrollWidth <= width) return [];
  const wrong = [];
  for (const element of document.body.querySelectorAll("*")) {
    const box = element.getBoundingClientRect();
    let scrolls = false;
    for (let node = element; node && node !== document.body; node = node.parentElement) {
      if (["auto", "scroll", "hidden", "clip"].includes(getComputedStyle(node).overflowX)) scrolls = true;
    }
    if (!scrolls && box.right > width + 1) {
      wrong.push(`<${element.tagName.toLowerCase()} class="${element.getAttribute("class") || ""}"> ` +
        `ends at ${Math.round(box.right)} of ${width} px`);
    }
  }
  return wrong.length ? wrong.slice(0, 10) : [`the page is ${document.documentElement.scrollWidth} px wide`];
}
"""

_NAMELESS = """
() => {
  const wrong = [];
  const named = (e) => {
    const by = (e.getAttribute("aria-labelledby") || "").split(/ +/).filter(Boolean)
      .map((id) => document.getElementById(id)?.textContent || "").join("");
    const label = e.labels ? [...e.labels].map((l) => l.textContent).join("") : "";
    const inside = ["INPUT", "SELECT", "TEXTAREA"].includes(e.tagName) ? "" : e.textContent;
    const alt = e.getAttribute("alt") || "";
    return (by + label + inside + alt + (e.getAttribute("aria-label") || "") + (e.title || "")).trim();
  };
  const wanted = "a[href], button, input:not([type=hidden]), select, textarea, summary, img, [role=img]";
  for (const element of document.querySelectorAll(wanted)) {
    if (element.checkVisibility() && !named(element)) wrong.push(element.outerHTML.slice(0, 120));
  }
  if (!document.title.trim()) wrong.push("the page has no title");
  if (!document.documentElement.lang) wrong.push("the page names no language");
  if (document.querySelectorAll("h1").length !== 1) wrong.push("the page needs one h1");
  return wrong;
}
"""

_FOCUS = """
() => {
  const e = document.activeElement;
  if (!e || e === document.body) return null;
  const style = getComputedStyle(e);
  const shown = (style.outlineStyle !== "none" && parseFloat(style.outlineWidth) > 0) ||
    style.boxShadow !== "none";
  const name = (e.getAttribute("aria-label") || e.labels?.[0]?.textContent || e.textContent || e.id).trim();
  return { tag: e.tagName.toLowerCase(), name: name.replace(/\\s+/g, " ").slice(0, 60), shown };
}
"""


def low_contrast(visit: Visit) -> list[str]:
    """Texts with less contrast than WCAG 2 AA asks for: 4.5 to 1, large text 3 to 1."""
    return visit.page.evaluate(_CONTRAST)


def overflows(visit: Visit) -> list[str]:
    """What makes the page wider than its window; parts that scroll by themselves may be wider."""
    return visit.page.evaluate(_OVERFLOW)


def nameless(visit: Visit) -> list[str]:
    """Controls and pictures that a screen reader could not name, and a page without title or language."""
    return visit.page.evaluate(_NAMELESS)


def tab_stops(visit: Visit, most: int = 40) -> list[dict[str, Any]]:
    """Where the tab key leads, from the top: tag and name of each stop, and whether its focus shows."""
    visit.page.evaluate("() => { document.activeElement?.blur(); window.scrollTo(0, 0); }")
    stops: list[dict[str, Any]] = []
    for _ in range(most):
        visit.page.keyboard.press("Tab")
        stop = visit.page.evaluate(_FOCUS)
        if stop is None:
            break
        stops.append(stop)
    return stops
