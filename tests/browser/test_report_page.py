"""Reports as a reader meets them: in a browser, on a phone, on paper, with the keyboard alone."""

import json
import re

import numpy as np
import pytest
from harness import NARROW, WIDE, low_contrast, nameless, overflows, tab_stops

import fald
from fald.report import write_report
from fald.report.page import FORMATS, look_up
from reports import diverged_tree, document_of, make_runs

pytestmark = pytest.mark.slow


IDS = "all => all.map((e) => e.id)"
MARKED = "all => all.map((e) => [e.dataset.key, e.dataset.how, e.value, e.textContent])"
# of every mark: the value it stands for, and the middle of where it is drawn
POINTS = """() => [...document.querySelectorAll('#forest .mark')].map((m) => {
  const box = m.firstElementChild.nextElementSibling.getBoundingClientRect();
  return [Number(m.dataset.x), box.x + box.width / 2];
})"""
SHOWN = "() => Number(document.querySelector('.plot:not([hidden]) .mark').dataset.x)"


@pytest.fixture(scope="module")
def runs(chromium, tmp_path_factory):
    """Folders of a fitted and a sampled run, with their reports."""
    return make_runs(tmp_path_factory.mktemp("pages"))


FIGURES = {
    "fitted": ["forest", "calibration", "site-means"],
    "sampled": ["forest", "trace", "calibration", "site-means", "drift"],
}


@pytest.mark.parametrize("name", FIGURES)
@pytest.mark.parametrize("width", [WIDE, NARROW])
def test_a_report_reads_well_and_shows_the_numbers_of_the_files(visit, runs, name, width):
    found = visit(runs / name / "report.html", width=width)
    found.screenshot(f"report-{name}-{width}")
    assert found.complaints == []
    assert low_contrast(found) == []
    assert overflows(found) == []
    assert nameless(found) == []
    assert sorted(found.page.eval_on_selector_all(".plot:not([hidden])", IDS)) == sorted(FIGURES[name])
    for place in FIGURES[name]:
        box = found.page.locator(f"#{place} .mark, #{place} polyline").first.bounding_box()
        assert min(box["width"], box["height"]) > 4, place
    document = document_of(runs / name)
    marked = found.page.eval_on_selector_all("data", MARKED)
    assert len(marked) > 60
    for key, how, value, text in marked:
        assert float(value) == look_up(document, key)
        assert text == FORMATS[how](look_up(document, key))
    summary = json.loads((runs / name / "summary.json").read_text())
    assert json.loads(found.page.text_content("#document"))["run"] == summary
    drawn, middles = np.array(found.page.evaluate(POINTS)).T
    assert drawn == pytest.approx([e["estimate"] for e in document["effects"]])
    straight = np.polyfit(np.log(drawn), middles, 1)  # ratios stand on a logarithmic axis
    assert np.abs(np.polyval(straight, np.log(drawn)) - middles).max() < 1


def test_the_keyboard_reaches_everything(visit, runs):
    found = visit(runs / "fitted" / "report.html")
    stops = tab_stops(found)
    assert all(stop["shown"] for stop in stops)
    names = [stop["name"] for stop in stops]
    assert names[:2] == ["Answer", "Trust"]
    assert {"odds ratios", "log scale", "The numbers behind the two figures"} <= set(names)
    page = found.page
    before = page.evaluate(SHOWN)
    page.locator("button", has_text="log scale").focus()
    page.keyboard.press("Enter")
    after = page.evaluate(SHOWN)
    row = document_of(runs / "fitted")["run"]["summary"][0]
    assert (before, after) == (pytest.approx(row["odds ratio"]), pytest.approx(row["mean"]))
    assert page.locator("button[aria-pressed=true]").all_inner_texts() == ["log scale"]
    page.locator("summary").first.focus()
    page.keyboard.press("Enter")
    assert page.locator("#bins").is_visible()


def test_a_report_prints_on_light_a4(visit, runs, tmp_path):
    found = visit(runs / "sampled" / "report.html", dark=True)
    assert (
        found.page.evaluate("() => getComputedStyle(document.body).backgroundColor") == "rgb(255, 255, 255)"
    )
    printed = found.page.pdf(path=tmp_path / "report.pdf", prefer_css_page_size=True)
    boxes = re.findall(rb"/MediaBox\s*\[\s*0 0 ([\d.]+) ([\d.]+)", printed)
    assert boxes
    for width, height in boxes:  # A4 in points
        assert (float(width), float(height)) == (pytest.approx(595, abs=2), pytest.approx(842, abs=2))
    found.page.emulate_media(media="print")
    found.page.set_viewport_size({"width": 680, "height": 960})  # the text of an A4 page
    assert overflows(found) == []
    assert low_contrast(found) == []


def test_a_bad_run_is_seen_without_scrolling(visit, runs, tmp_path):
    tree = diverged_tree(fald.load(runs / "sampled" / "posterior.nc"))
    for width in (WIDE, NARROW):
        found = visit(write_report(tree, tmp_path), width=width)
        found.screenshot(f"report-bad-{width}", whole=False)
        assert found.complaints == []
        box = found.page.locator("#status .headline").bounding_box()
        assert box["y"] + box["height"] < 600
        assert "Do not use this result." in found.text("#status")
        assert "The run ended early" in found.text("#status")
        colour = found.page.evaluate(
            "() => getComputedStyle(document.querySelector('#status .badge')).backgroundColor"
        )
        assert colour == "rgb(176, 0, 32)"
    # the twin: a good run has no red box
    found = visit(runs / "fitted" / "report.html")
    assert "Do not use" not in found.text("#status")
