"""The explorer in a browser: sliders by keyboard, the server's numbers, and messages for nonsense."""

import json
import threading
import urllib.request

import pytest
from harness import NARROW, low_contrast, nameless, overflows, tab_stops

import fald
from fald.pages.explorer import SettingsExplorer
from fald.pages.server import Page, address, make_server

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def place():
    found = SettingsExplorer(fald.datasets.load_bundled_study("indo"))
    answers = {"about": found.about, "point": found.point, "privacy": found.privacy, "sweep": found.sweep}
    server = make_server(Page("explore", answers))
    threading.Thread(target=server.serve_forever, args=(0.05,), daemon=True).start()
    yield address(server)
    server.shutdown()
    server.server_close()


def ready(found):
    found.page.wait_for_selector("#sweep svg")
    found.page.wait_for_selector("#epsilon:not(.busy)")
    return found


def answer(place, name, **changes):
    with urllib.request.urlopen(f"{place}api/about") as response:
        values = {**json.load(response)["start"], **changes}
    query = "&".join(f"{key}={value}" for key, value in values.items())
    with urllib.request.urlopen(f"{place}api/{name}?{query}") as response:
        return json.load(response)


@pytest.mark.parametrize(("width", "dark"), [(1280, False), (NARROW, True)])
def test_the_page_shows_the_servers_numbers(visit, place, width, dark):
    found = ready(visit(place, width=width, dark=dark))
    point = answer(place, "point")
    assert float(found.text("#error").split()[0]) == pytest.approx(point["predicted"]["bias"], rel=6e-3)
    assert found.text("#error-word") == "Good: within 0.05"
    assert found.text("#cost") == f"{point['communication']['rounds']:,} rounds"
    assert "1/(2L)" in found.text("#bound-note")  # planned steps are larger than the bounds allow
    assert found.text("#epsilon").startswith("ε = ")
    assert [*found.complaints, *low_contrast(found), *overflows(found), *nameless(found)] == []
    found.screenshot(f"explore-{width}")


def test_sliders_move_by_keyboard_and_all_answers_follow(visit, place):
    found = ready(visit(place))
    before = {name: found.text(f"#{name}") for name in ("error", "epsilon", "cost")}
    assert all(stop["shown"] for stop in tab_stops(found))
    found.page.focus("#local_steps")
    for _ in range(5):
        found.page.keyboard.press("ArrowRight")
    found.page.wait_for_selector("#error-word.word-bad")
    assert found.page.get_attribute("#local_steps", "aria-valuetext") == found.text("#local_steps-value")
    steps = int(found.text("#local_steps-value"))
    predicted = answer(place, "point", local_steps=steps)["predicted"]
    assert float(found.text("#error").split()[0]) == pytest.approx(predicted["bias"], rel=6e-3)
    assert f"local-steps = {steps}" in found.text("#keys")
    found.page.wait_for_selector(f"#epsilon:not(:text-is('{before['epsilon']}'))")
    found.page.click("#reset")
    found.page.wait_for_selector(f"#error:text-is('{before['error']}')")
    assert found.complaints == []


def test_what_is_outside_the_theory_shows(visit, place):
    found = ready(visit(place))
    found.page.focus("#step_size")
    found.page.keyboard.press("Home")
    found.page.wait_for_selector("#bound:has-text('W2')")
    assert "times smaller" in found.text("#bound-note")
    found.page.focus("#correlation")
    found.page.keyboard.press("End")
    found.page.wait_for_selector("#epsilon:text-is('ε = ∞')")
    assert found.text("#epsilon-word") == "No protection"


def test_nonsense_gets_a_message_and_the_page_lives_on(visit, place):
    found = ready(visit(place))
    found.page.fill("#delta", "7")
    found.page.press("#delta", "Tab")
    found.page.wait_for_selector("#banner:not([hidden])")
    assert found.text("#problem") == "δ must be above 0 and at most 0.5."
    found.page.fill("#delta", "0.00001")
    found.page.press("#delta", "Tab")
    found.page.wait_for_selector("#banner", state="hidden")
    assert found.complaints == []
    # unequal sites cannot be drawn without replacement: the server says so
    found.page.select_option("#scheme", "without-replacement")
    found.page.wait_for_selector("#banner:not([hidden])")
    assert "equal" in found.text("#banner")
    found.page.select_option("#scheme", "with-replacement")
    found.page.wait_for_selector("#banner", state="hidden")


def test_drawing_as_many_sites_as_there_are_is_not_full_participation(visit, place):
    found = ready(visit(place))
    whole = found.text("#error-note")
    assert found.page.is_disabled("#num_participants")
    assert found.text("#num_participants-value") == "all 4"
    assert "participation" not in found.text("#keys")
    found.page.select_option("#scheme", "with-replacement")
    found.page.wait_for_function(
        "before => document.getElementById('error-note').textContent !== before", arg=whole
    )
    drawn = answer(place, "point", scheme="with-replacement")["predicted"]
    assert drawn["sd_error"] != answer(place, "point")["predicted"]["sd_error"]
    assert f"{100 * drawn['sd_error']:.3g}%" in found.text("#error-note")
    assert found.text("#num_participants-value") == "4"
    assert 'participation = "with-replacement" num-participants = 4' in found.text("#keys")
    found.page.focus("#num_participants")
    found.page.keyboard.press("ArrowLeft")
    assert found.text("#num_participants-value") == "3"
    found.page.select_option("#scheme", "full")
    assert found.text("#num_participants-value") == "all 4"
    assert found.complaints == []
