"""Every check by itself, on facts made up for it: whom it names, and where its borders are."""

import math

import pytest
from test_checks import (
    CHAIN,
    COLUMNS,
    FIT,
    FITTED,
    OUTCOME,
    PREDICTED,
    REFERENCE,
    ROW,
    SENSITIVE,
    SITE,
    colour,
    of_run,
)

from fald.results.checks_of_model import DISTANCE_RED, P_AMBER
from fald.results.examine import made_checks
from fald.results.judgement import Check, by_limits, judgement, listed


def found(facts, name):
    (check,) = [check for check in made_checks(facts) if check.name == name]
    return check


def test_the_worst_parameter_is_named():
    """The largest R-hat, the fewest draws, the largest bias and the strongest pull, wherever they stand."""
    rows = [
        {**ROW, "parameter": name, "r_hat": r, "ess_bulk": e}
        for name, r, e in (("a", 1.02, 350.0), ("b", 1.07, 90.0), ("c", 1.0, 900.0))
    ]
    for order in (rows, rows[::-1], rows[1:] + rows[:1]):
        facts = of_run(CHAIN, summary=order)
        assert "R-hat of b is 1.070" in found(facts, "Mixing (R-hat)").sentence
        assert found(facts, "Mixing (R-hat)").shown == "1.070"
        assert "For b the draws are worth only 90" in found(facts, "Effective draws (ESS)").sentence
        assert found(facts, "Effective draws (ESS)").shown == "90"
        missing = [*order, {**ROW, "parameter": "z", "r_hat": None}]
        assert (
            "R-hat of z cannot be computed"
            in found(of_run(CHAIN, summary=missing), "Mixing (R-hat)").sentence
        )
    pulls = [
        {"parameter": p, "prior": v, "likelihood": 1.0} for p, v in (("a", 0.06), ("b", 0.2), ("c", 0.01))
    ]
    for order in (pulls, pulls[::-1]):
        check = found({**CHAIN, "prior": order}, "Prior and rows")
        assert "about b (2 of 3 parameters)" in check.sentence
    # a pull against rows that do not resist is the prior alone
    alone = [{"parameter": p, "prior": v, "likelihood": 0.0} for p, v in (("a", 0.06), ("b", 0.9))]
    check = found({**CHAIN, "prior": alone}, "Prior and rows")
    assert (check.colour, check.shown) == ("amber", "0.900")
    assert "say little about b, a: what is known" in check.sentence
    many = [{"parameter": p, "prior": 0.2, "likelihood": 0.0} for p in "abcd"]
    assert "about a, b, c and 1 more" in found({**CHAIN, "prior": many}, "Prior and rows").sentence
    # what the prior alone tells is said beside a disagreement, and the disagreement is not repeated there
    check = found({**CHAIN, "prior": [*pulls, alone[1] | {"parameter": "z"}]}, "Prior and rows")
    assert "about b (2 of 4 parameters)" in check.sentence
    assert "say little about z: what is known" in check.sentence
    one = [SENSITIVE, {"parameter": "b", "prior": 0.06, "likelihood": 1.0}]
    assert "about b: the prior" in found({**CHAIN, "prior": one}, "Prior and rows").sentence
    for value, expected in ((0.05, "green"), (0.0501, "amber"), (0.3, "amber"), (0.301, "red")):
        both = [{"parameter": "a", "prior": value, "likelihood": value}]
        assert colour({**CHAIN, "prior": both}, "Prior and rows") == expected


@pytest.mark.parametrize("name", ["Mixing (R-hat)", "Effective draws (ESS)"])
def test_strict_minds_the_sampling_and_only_where_it_needs_care(name):
    key = {"Mixing (R-hat)": "r_hat", "Effective draws (ESS)": "ess_bulk"}[name]
    good, poor = {"r_hat": (1.0, 1.02), "ess_bulk": (1000.0, 300.0)}[key]
    check = found(of_run(CHAIN, summary=[{**ROW, key: good}]), name)
    assert (check.strict, check.advice) == (False, "")
    check = found(of_run(CHAIN, summary=[{**ROW, key: poor}]), name)
    assert check.strict
    assert "run longer" in check.advice
    assert found({**CHAIN, "chains": 1}, "Mixing (R-hat)").strict


def test_chains_and_draws_at_their_borders():
    def check(key, value, **run):
        name = {"r_hat": "Mixing (R-hat)", "ess_bulk": "Effective draws (ESS)"}[key]
        return found({**of_run(CHAIN, summary=[{**ROW, key: value}]), **run}, name)

    for value, expected in ((1.01, "green"), (1.0101, "amber"), (1.05, "amber"), (1.0501, "red")):
        assert check("r_hat", value, chains=2).colour == expected
    assert check("r_hat", 1.0, chains=1).shown == "one chain"
    for value, expected in ((400, "green"), (399.9, "amber"), (100, "amber"), (99.9, "red")):
        assert check("ess_bulk", value).colour == expected
    assert "enough for intervals" in check("ess_bulk", 400).sentence
    assert "ends of its interval" in check("ess_bulk", 399.9).sentence
    assert "too few for an interval" in check("ess_bulk", 99.9).sentence
    for key in ("r_hat", "ess_bulk"):
        missing = check(key, None)
        assert (missing.colour, missing.shown) == ("red", "")
        assert "cannot be c" in missing.sentence


def test_distances_are_told_where_they_are_known():
    for value, told in ((0.031, True), (None, False)):
        said = found({**CHAIN, "reference": {**REFERENCE, "w2_relative": value}}, "Distance to a reference")
        assert ("W2 of Gaussians" in said.sentence) is told
    one, two = (found({**FITTED, "modes": n}, "Further solutions").sentence for n in (1, 2))
    assert "No further solution was found" in one
    proved = found({**FITTED, "modes": 1, "proved": "because it is so"}, "Further solutions")
    assert (proved.colour, proved.sentence) == ("green", "No further solution exists: because it is so.")
    assert (
        "2 modes" in found({**FITTED, "modes": 2, "proved": "because it is so"}, "Further solutions").sentence
    )
    assert "There are 1 further solutions: the posterior has 2 modes" in two


def test_sites_that_are_too_small_to_be_compared_are_not_said_to_be_as_expected():
    whole = found(FITTED, "Outcomes of the sites").sentence
    assert whole.startswith("Every site has the outcomes")
    small = {**FIT["sites"][0], "client": "s", "rows": 3, "seen": None, "distance": None}
    beside = {**FITTED, "predictive": {**FIT, "sites": [*FIT["sites"], small]}}
    said = found(beside, "Outcomes of the sites").sentence
    assert said.startswith("Every site with ten rows or more has the outcomes")


def test_more_chains_are_not_advised_where_there_are_none():
    few = {"summary": [{**ROW, "ess_bulk": 90.0}]}
    advice = [found(of_run(facts, **few), "Effective draws (ESS)").advice for facts in (CHAIN, FITTED)]
    assert "more chains" in advice[0]
    assert advice[1] == "allow more rounds"


def test_values_far_apart_are_listed_up_to_five():
    for count, more in ((5, False), (6, True)):
        far = [{"column": f"c{i}", "client": "a", "count": 1} for i in range(count)]
        check = found({**CHAIN, "values": far}, "Values")
        assert check.colour == "amber"
        assert ("and 1 more" in check.sentence) is more
        assert "c4 at a (1)" in check.sentence
        assert check.shown == f"{count} values"


def test_of_failed_comparisons_the_farthest_is_named():
    """Three comparisons are made, so each p-value counts three times."""

    def fit(site, scatter, rows):
        def one(p, far):
            return {**FIT["squared_error"], "p_value": p, "distance": far}

        given = {"site_means": one(*site), "squared_error": one(*scatter), "calibration_error": one(*rows)}
        return found({**CHAIN, "predictive": {**FIT, **given}}, "Fit of the model")

    border = P_AMBER / 3
    fine = (0.9, 0.1)
    for p, expected in ((1.001 * border, "green"), (0.999 * border, "amber")):
        for failing in range(3):
            parts = [fine] * 3
            parts[failing] = (p, 3.0)
            assert fit(*parts).colour == expected
    # a p-value that is not low enough does not name a comparison, however far it is
    said = fit((0.9 * border, 3.0), (1.2 * border, 3.5), fine).sentence
    assert "mean outcomes" in said
    assert "scatter" in fit((0.9 * border, 3.0), (0.9 * border, 3.5), fine).sentence
    assert "rows of similar prediction" in fit((0.9 * border, 3.0), fine, (0.9 * border, -3.5)).sentence
    for far, expected in ((DISTANCE_RED - 1e-9, "amber"), (DISTANCE_RED, "red"), (-DISTANCE_RED, "red")):
        assert fit(fine, (0.5 * border, far), fine).colour == expected


@pytest.mark.parametrize("which", ["bias", "sd_error"])
def test_the_larger_of_two_predicted_errors_decides(which):
    for value, expected in (
        (0.05, "green"), (0.0501, "amber"), (-0.2, "amber"), (-0.2001, "red"), (math.nan, "red"),
    ):  # fmt: skip
        check = found(of_run(CHAIN, foreseen={"predicted": {**PREDICTED, which: value}}), "Predicted bias")
        assert check.colour == expected
        assert bool(check.advice) == (expected != "green")
    for foreseen, words in (
        (None, "needs a finished run"),
        ({"predicted": None, "no_prediction": "too many parameters"}, "too many parameters"),
    ):
        check = found(of_run(CHAIN, foreseen=foreseen), "Predicted bias")
        assert check.colour == "none"
        assert words in check.sentence
    # a reference shows what a coarse step shifts: only one that is unstable is bad beside it
    for value, expected in ((0.51, "green"), (1 - 1e-9, "green"), (1 + 1e-9, "red")):
        assert found(of_run(CHAIN, step_times_curvature=value), "Step size").colour == expected
    check = found(of_run(CHAIN, step_times_curvature=None), "Step size")
    assert check.colour == "none"


def test_doubling_and_reference_leave_room_for_their_own_errors():
    def doubling(shift, error):
        return {**CHAIN, "doubling": {"shift": shift, "standard_error": error, "shift_parameter": "x"}}

    for shift, error, expected in (
        (0.11, 0.03, "green"), (0.1101, 0.03, "amber"), (-0.1101, 0.03, "amber"), (0.051, None, "amber"),
        (0.049, None, "green"), (-0.31, 0.05, "red"), (0.01, 0.4, "green"),
        (math.nan, 0.1, "red"), (0.01, math.nan, "red"),
    ):  # fmt: skip
        assert colour(doubling(shift, error), "Twice the step size") == expected, (shift, error)
    for changes, expected in (
        ({"shift": 0.11, "standard_error": 0.02, "sd_error": 0.0}, "green"),
        ({"shift": 0.1101, "standard_error": 0.02}, "amber"),
        ({"sd_error": 0.11, "sd_standard_error": 0.02}, "green"),
        ({"sd_error": 0.1101, "sd_standard_error": 0.02}, "amber"),
        ({"sd_error": 0.2301, "sd_standard_error": 0.01}, "red"),
        ({"standard_error": 0.2 / 3 - 1e-9}, "green"),
        ({"standard_error": 0.2 / 3 + 1e-9}, "amber"),
        ({"shift": 1.0, "standard_error": 0.1}, "red"),
        *[({name: math.nan}, "red") for name in ("shift", "standard_error", "sd_error", "sd_standard_error")],
    ):  # fmt: skip
        assert colour({**CHAIN, "reference": {**REFERENCE, **changes}}, "Distance to a reference") == expected
    assert not [c for c in made_checks({**CHAIN, "reference": None}) if c.name == "Distance to a reference"]


def test_rounds_done_and_the_end_of_a_run():
    for done, thinning, expected in ((10, 1, "green"), (9, 1, "red"), (9, 2, "green"), (8, 2, "red")):
        facts = of_run(CHAIN, settings={"num_rounds": 10, "thinning": thinning}, rounds_done=done)
        check = found(facts, "Run complete")
        assert check.colour == expected
        assert check.shown == f"{done} of 10 rounds"
    assert found({**CHAIN, "ended": "the disk is full."}, "Run complete").sentence.endswith("full.")
    assert not [c for c in made_checks(FITTED) if c.name == "Run complete"]
    assert colour(of_run(CHAIN, settings={}, rounds_done=3), "Run complete") == "green"


def test_sites_are_counted_and_named():
    others = [{**SITE, "client": f"s{i}", "took_part": 0} for i in range(7)]
    check = found({**CHAIN, "sites": [SITE, *others]}, "Sites")
    assert check.shown == "1 of 8"
    assert "Sites s0, s1, s2, s3, s4 and 2 more never took part" in check.sentence
    assert "their rows" in check.sentence
    check = found({**CHAIN, "sites": [SITE, others[0]]}, "Sites")
    assert "Site s0 never took part in a kept round: the result does not contain its rows" in check.sentence
    # one that is silent all the time is not called seldom
    assert colour({**CHAIN, "sites": [SITE, {**others[0], "seldom": True}]}, "Sites") == "red"
    check = found({**CHAIN, "sites": [SITE, {**SITE, "client": "s", "seldom": True}]}, "Sites")
    assert "Site s took part far less often" in check.sentence
    once = {**SITE, "client": "s", "seldom": True, "took_part": 1}
    assert "Site s took part far less often" in found({**CHAIN, "sites": [SITE, once]}, "Sites").sentence
    late = {"dropouts": [{"round": 3, "silent": ["b", "a"]}, {"round": 4, "silent": ["a"]}]}
    assert "Sites a, b did not answer" in found({**CHAIN, "federation": late}, "Sites").sentence
    assert colour({**CHAIN, "federation": {"dropouts": []}}, "Sites") == "green"


def test_modes_weights_and_targets_that_do_not_apply():
    for count, expected, shown in (
        (0, "green", "0"),
        (1, "green", "0"),
        (2, "amber", "1"),
        (4, "amber", "3"),
    ):
        check = found({**FITTED, "modes": count}, "Further solutions")
        assert (check.colour, check.shown, bool(check.advice)) == (expected, shown, expected == "amber")
        # a search that was not brought to its end has not shown that there is one solution alone
        ended = found({**of_run(FITTED, verdict="not reached"), "modes": count}, "Further solutions")
        assert ended.colour == ("none" if count < 2 else "amber")
        assert ("not judged" in ended.sentence) is (count < 2)
    proved = {**of_run(FITTED, verdict="not reached"), "proved": "because it is so"}
    assert found(proved, "Further solutions").colour == "green"
    named = [c.name for c in made_checks({**FITTED, "modes": None})]
    assert "Further solutions" not in named
    assert "Importance weights (k-hat)" not in [c.name for c in made_checks(of_run(FITTED, khat=None))]
    assert "Target" not in [c.name for c in made_checks(CHAIN)]
    for value, advised in ((0.5, False), (0.51, True), (0.71, True)):
        assert bool(found(of_run(FITTED, khat=value), "Importance weights (k-hat)").advice) == advised


def test_of_three_checks_of_the_fit_the_farthest_that_fails_is_told():
    def fit(**changes):
        return found({**CHAIN, "predictive": {**FIT, **changes}}, "Fit of the model")

    near, far = {"p_value": 0.001, "distance": -2.0}, {"p_value": 0.01, "distance": 6.0}
    assert "the scatter of outcomes: 6 standard" in fit(site_means=near, squared_error=far).sentence
    assert (
        "sites' mean outcomes (worst at north): 6 standard"
        in fit(site_means=far, squared_error=near).sentence
    )
    # one that is far off but not improbable does not count
    wide = {"p_value": 0.5, "distance": 50.0}
    assert fit(calibration_error=wide).colour == "green"
    assert not fit(calibration_error=wide).advice
    assert "look at the figures" in fit(site_means=near).advice
    assert fit(site_means=near, calibration_error=wide).colour == "amber"
    assert fit(site_means={"p_value": 0.5, "distance": 0.0}).shown == "p 1"
    assert fit(site_means={"p_value": 0.02, "distance": 0.0}).shown == "p 0.06"
    pair = [{**OUTCOME, "distance": 0.5}, {**OUTCOME, "client": "south", "distance": -0.9}]
    assert "(worst at south)" in fit(site_means=far, sites=pair).sentence
    assert "(worst at north)" in fit(site_means=far, sites=[*pair[:1], {**pair[1], "seen": None}]).sentence


def test_sites_outside_are_counted_and_the_worst_told_first():
    def outcomes(*distances):
        sites = [{**OUTCOME, "client": f"s{i}", "distance": d} for i, d in enumerate(distances)]
        return found({**CHAIN, "predictive": {**FIT, "sites": sites}}, "Outcomes of the sites")

    check = outcomes(0.1, -3.5, 2.5)
    assert check.shown == "2 of 3 outside"
    assert check.sentence.startswith("Outcomes at s1 lie below")
    assert "So do those at s2" in check.sentence
    assert "So do those" not in outcomes(0.1, 3.5).sentence
    # 1.97 sds: p = 0.0488; among two 1 - (1-p)² = 0.095, among five 0.22
    assert [outcomes(*[0.1] * others, 1.97).colour for others in (0, 1, 4)] == ["amber", "amber", "green"]
    assert outcomes(*[0.1] * 4, 1.97).shown == "1 of 5 outside"


def test_columns_in_the_order_of_how_bad_they_are():
    both = {**COLUMNS, "copies": [("kg", "lb"), ("m", "cm")], "dependent": ["a"], "constant": ["z"]}
    check = found({**CHAIN, "columns": both}, "Columns")
    assert (check.colour, check.shown, check.advice) == ("red", "2 copied", "leave out lb")
    assert "There are 1 more such pairs" in check.sentence
    assert found({**CHAIN, "columns": {**both, "copies": []}}, "Columns").shown == "1 dependent"
    single = {**COLUMNS, "copies": [("kg", "lb")]}
    assert "more such pairs" not in found({**CHAIN, "columns": single}, "Columns").sentence
    assert (
        found(
            {**CHAIN, "columns": {**COLUMNS, "constant": ["z"], "inflated": [("b", 200.0)]}}, "Columns"
        ).shown
        == "1 constant"
    )
    check = found(
        {**CHAIN, "columns": {**COLUMNS, "inflated": [("b", 200.0), ("c", 900.0), ("d", 150.0)]}}, "Columns"
    )
    assert check.sentence.startswith("Column c")
    far = [{"client": f"s{i}", "column": "age", "count": 1} for i in range(7)]
    check = found({**CHAIN, "values": far}, "Values")
    assert check.shown == "7 values"
    assert "age at s4 (1) and 2 more" in check.sentence
    assert found({**CHAIN, "values": far[:1]}, "Values").shown == "1 value"
    assert "more" not in found({**CHAIN, "values": far[:5]}, "Values").sentence


def test_a_judgement_puts_the_worst_first():
    def check(name, colour, **more):
        return Check(name, colour, "", f"{name} speaks.", "", **more)

    green, amber, red = check("g", "green"), check("a", "amber", advice="care"), check("r", "red")
    told = judgement([green, amber, red, check("n", "none")])
    assert (told["colour"], told["word"], told["headline"]) == ("red", "stop", "Do not use this result.")
    assert told["first"] == "Do not use: r speaks."
    assert told["reasons"] == ["r speaks.", "a speaks. What to do: care."]
    assert told["objections"] == ["r: r speaks."]
    assert [c["word"] for c in told["checks"]] == ["fine", "care", "stop", "not known"]
    careful = judgement([green, amber])
    assert (careful["colour"], careful["first"]) == ("amber", "Use with care: a speaks.")
    assert careful["objections"] == []
    assert judgement([green, check("s", "amber", strict=True)])["objections"] == ["s: s speaks."]
    assert judgement([green, check("s", "green", strict=True)])["objections"] == []
    assert judgement([check("n", "none")])["first"] == "No problem found."
    assert [by_limits(v, 1.0, 2.0) for v in (None, math.nan, 2.0, 1.0, math.inf, -math.inf)] == [
        "red", "red", "amber", "green", "red", "green",
    ]  # fmt: skip
    assert listed([f"s{i}" for i in range(5)]) == "Sites s0, s1, s2, s3, s4"
    assert listed([f"s{i}" for i in range(6)]).endswith("s4 and 1 more")
