"""The live page in a browser: it follows a run as it goes, and its numbers are those of the files."""

import json
import threading

import pytest
from harness import NARROW, low_contrast, nameless, overflows, tab_stops

import fald
from fald.pages.server import Page, address, make_server
from fald.pages.watch import Follower
from fald.runtime.journal import Journal
from fald.study import run as commands

pytestmark = pytest.mark.slow


@pytest.fixture
def watch():
    """Serve the page of a folder, as ``fald watch`` does."""
    servers = []

    def serve(folder):
        server = make_server(Page("watch", {"state": Follower(folder).state}))
        threading.Thread(target=server.serve_forever, args=(0.05,), daemon=True).start()
        servers.append(server)
        return address(server)

    yield serve
    for server in servers:
        server.shutdown()
        server.server_close()


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    folder = tmp_path_factory.mktemp("run") / "trial"
    commands.run_study(fald.datasets.load_bundled_study("indo"), folder, resume=False, progress=False)
    return folder


def everything(found):
    return [*found.complaints, *low_contrast(found), *overflows(found), *nameless(found)]


@pytest.mark.parametrize(("width", "dark"), [(1280, False), (NARROW, True)])
def test_a_finished_run_shows_the_numbers_of_its_summary(visit, watch, finished, width, dark):
    found = visit(watch(finished), width=width, dark=dark)
    found.page.wait_for_selector("#intervals tbody tr")
    assert found.text("h1") == "INDO trial: pancreatitis after ERCP"
    assert found.text("#status") == "Finished"
    assert "Verdict: reached" in found.text("#says")
    rows = json.loads((finished / "summary.json").read_text())["summary"]
    assert found.texts("#intervals tbody th") == [row["parameter"] for row in rows]
    for column, key in (("mean", "mean"), ("low", "2.5%"), ("high", "97.5%")):
        shown = [float(text) for text in found.texts(f"#intervals td.{column}")]
        for value, row in zip(shown, rows, strict=True):
            assert value == pytest.approx(row[key], abs=0.006 * (row["97.5%"] - row["2.5%"]))
    assert found.texts("#sites tbody th") == ["Case", "Indiana", "Kentucky", "Michigan"]
    assert everything(found) == []
    found.screenshot(f"watch-finished-{width}")


def test_the_keyboard_reaches_and_reads_the_charts(visit, watch, finished):
    found = visit(watch(finished))
    found.page.wait_for_selector("#chart-ess svg")
    stops = tab_stops(found)
    assert all(stop["shown"] for stop in stops)
    assert "svg" in [stop["tag"] for stop in stops]
    found.page.focus("#chart-ess svg")
    found.page.keyboard.press("ArrowLeft")
    assert found.text("#chart-ess .readout").startswith("round ")


DRAW = """
values => lineChart(document.querySelector('#chart-ess > div'), {series: [{x: [4e6, 4e6 + 1], y: values}]})
"""


def test_no_two_ticks_of_an_axis_read_the_same(visit, watch, finished):
    found = visit(watch(finished))
    found.page.wait_for_selector("#chart-ess svg")
    # R-hats that nearly agree, one level, zero, and values that are written as powers of ten
    for values in (
        [1.01, 1.0103],
        [1.01, 1.01 + 1e-8],
        [1.01, 1.01 + 1e-14],
        [-0.01, 1],
        [4e7, 4e7 + 0.5],
        [2e-5, 2.0003e-5],
    ):
        found.page.evaluate(DRAW, values)
        shown = found.page.locator("#chart-ess text[text-anchor=end]").all_text_contents()
        assert len(shown) >= 2
        assert len(set(shown)) == len(shown), shown
        assert "-0" not in shown
        rounds = found.page.locator("#chart-ess text[text-anchor=middle]").all_text_contents()
        assert rounds[:-1] == ["4,000,000", "4,000,001"]


def test_a_run_is_followed_while_it_goes(visit, watch, tmp_path):
    notes = Journal(tmp_path)
    sites = {"north": 30, "south": 10}
    settings = {"privacy": {"delta": 1e-5, "max_epsilon": 2.0}}
    notes.write(event="start", round=0, rounds_total=100, sites=sites, title="Two sites", settings=settings)
    found = visit(watch(tmp_path))
    found.page.wait_for_selector("#status:text-is('Running')")
    assert found.text("h1") == "Two sites"
    for number in (10, 20, 30):
        answers = {
            "north": {"seconds": 0.5, "status": "answered"},
            "south": {"seconds": 4.0, "status": "answered" if number < 30 else "late"},
        }
        notes.write(
            round=number,
            rounds_total=100,
            energy=500.0 / number,
            r_hat=1 + 1 / number,
            epsilon=number / 50,
            draws=4 * number,
            bytes_up=1000 * number,
            bytes_down=1000 * number,
            intervals={"effect": [0.5, 0.5 - 3 / number, 0.5 + 3 / number]},
            sites=answers,
        )
    found.page.wait_for_selector("#progress-text:has-text('Round 30')")
    cards = dict(zip(found.texts("#cards dt"), found.texts("#cards dd:not(.note)")))
    assert cards == {
        "Draws": "120",
        "Energy": "16.67",
        "R-hat, largest": "1.033",
        "ε spent": "0.6",
        "Sent by sites": "30.0 kB",
    }
    assert "chains still differ" in found.text("#cards")
    assert "of 2" in found.text("#cards")
    assert found.texts("#intervals td.high") == ["0.6000"]
    assert found.text("#sites-note") == "No answer in the last round from: south."
    assert len(found.page.query_selector_all("#chart-energy polyline")) == 1
    found.screenshot("watch-running")
    notes.write(event="end", status="failed", message="non-finite value in round 31")
    notes.close()
    found.page.wait_for_selector("#banner.bad")
    assert found.text("#says") == "Non-finite value in round 31."
    assert everything(found) == []


def test_a_dead_run_and_a_dead_server_are_told(visit, watch, tmp_path):
    notes = Journal(tmp_path)
    notes.write(event="start", round=0, rounds_total=100, sites={"a": 1})
    notes.write(round=3, energy=1.0)
    notes.close()
    found = visit(watch(tmp_path))
    found.page.wait_for_selector("#banner.bad")
    assert found.text("#status") == "The run died"
    assert "--resume" in found.text("#says")
    assert everything(found) == []
    found.page.route("**/api/state*", lambda route: route.abort())
    found.page.wait_for_selector("#status:has-text('lost its server')")


def test_names_from_files_are_text_and_not_markup(visit, watch, tmp_path):
    evil = "<img src=x onerror=alert(1)>"
    notes = Journal(tmp_path)
    notes.write(event="start", round=0, rounds_total=9, sites={evil: 1}, title=evil, method=evil)
    notes.write(round=1, energy=1.0, intervals={evil: [1, 0, 2]})
    found = visit(watch(tmp_path))
    found.page.wait_for_selector("#intervals tbody tr")
    assert found.text("h1") == evil
    assert found.page.query_selector_all("img") == []
    assert found.complaints == []
    notes.close()
