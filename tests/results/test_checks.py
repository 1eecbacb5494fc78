"""Every check at its border, from both sides and for both signs; and the checks of rows on rows."""

import math
from typing import Any

import numpy as np
import pandas as pd
import pytest
import xarray as xr

import fald
from fald.core.errors import DataError
from fald.results.columns import FAR, absurd_values, redundant_columns
from fald.results.examine import examine, made_checks
from fald.results.judgement import judgement
from fald.results.kinds import KINDS
from fald.results.prior import _log_densities, _sensitivity, prior_sensitivity

ROW = {"parameter": "x", "r_hat": 1.0, "ess_bulk": 1000.0}
SITE = {"client": "north", "took_part": 5, "seldom": False}
PREDICTED = {"bias": 0.01, "bias_parameter": "x", "sd_error": 0.01, "sd_parameter": "x"}
OUTCOME = {"client": "north", "seen": 0.2, "expected": 0.18, "low": 0.1, "high": 0.3, "distance": 0.5}
FITS = {"p_value": 0.5, "distance": 0.1}
FIT = {
    "site_means": FITS,
    "squared_error": FITS,
    "calibration_error": FITS,
    "sites": [OUTCOME],
    "outcome": "y",
}
SENSITIVE = {"parameter": "x", "prior": 0.01, "likelihood": 0.1}
COLUMNS = {"outcome": [], "constant": [], "copies": [], "dependent": [], "inflated": []}
REFERENCE = {
    "name": "nuts", "shift": 0.0, "shift_parameter": "x", "sd_error": 0.0, "sd_parameter": "x",
    "w2_relative": 0.01, "standard_error": 0.01, "sd_standard_error": 0.01,
}  # fmt: skip
CHAIN = {
    "run": {
        "kind": "chain", "summary": [ROW], "rounds_done": 10, "settings": {"num_rounds": 10},
        "foreseen": {"predicted": PREDICTED}, "step_times_curvature": 0.1, "pseudo_posterior": False,
    },
    "ended": "", "chains": 4, "modes": None, "sites": [SITE], "federation": None, "reference": REFERENCE,
    "doubling": {"shift": 0.0, "standard_error": 0.01, "shift_parameter": "x"},
    "predictive": FIT, "prior": [SENSITIVE], "columns": COLUMNS, "values": [], "no_rows": "",
}  # fmt: skip
FITTED = {
    **CHAIN,
    "run": {
        "kind": "few-round", "summary": [ROW], "rounds_done": 3, "settings": {}, "verdict": "reached",
        "reason": "", "advice": "", "accuracy": 0.05, "khat": 0.2,
    },
    "modes": 1, "doubling": None,
}  # fmt: skip
LEAST = 1e-9


def of_run(facts, **changes):
    return {**facts, "run": {**facts["run"], **changes}}


def colour(facts, name):
    (found,) = [check for check in made_checks(facts) if check.name == name]
    return found.colour


@pytest.mark.parametrize("facts", [CHAIN, FITTED])
def test_a_healthy_result_has_no_problem(facts):
    found = judgement(made_checks(facts))
    assert found["first"] == "No problem found."
    assert found["objections"] == []
    assert {c["colour"] for c in found["checks"]} == {"green"}
    assert not any(c["advice"] for c in found["checks"])


def doubled(shift):
    return {**CHAIN, "doubling": {**CHAIN["doubling"], "shift": math.copysign(abs(shift) + 0.02, shift)}}


def sensitive(value):
    return {**CHAIN, "prior": [SENSITIVE, {**SENSITIVE, "prior": value, "likelihood": 1.0}]}


LIMITS = {
    "Mixing (R-hat)": (lambda v: of_run(CHAIN, summary=[{**ROW, "r_hat": v}]), 1.01, 1.05),
    "Importance weights (k-hat)": (lambda v: of_run(FITTED, khat=v), 0.5, 0.7),
    "Predicted bias": (lambda v: of_run(CHAIN, foreseen={"predicted": {**PREDICTED, "bias": v}}), 0.05, 0.2),
    "Step size": (lambda v: of_run({**CHAIN, "reference": None}, step_times_curvature=v), 0.5, 1.0),
    "Twice the step size": (doubled, 0.05, 0.2),
    "Distance to a reference": (
        lambda v: {**CHAIN, "reference": {**REFERENCE, "shift": v + 0.03}}, 0.05, 0.2
    ),
    "Prior and rows": (sensitive, 0.05, 0.3),
}  # fmt: skip


@pytest.mark.parametrize("name", LIMITS)
def test_colours_change_at_their_borders(name):
    make, amber, red = LIMITS[name]
    borders = [
        (amber - LEAST, "green"),
        (amber + LEAST, "amber"),
        (red - LEAST, "amber"),
        (red + LEAST, "red"),
    ]
    for value, expected in borders:
        assert colour(make(value), name) == expected
    if name in ("Predicted bias", "Twice the step size"):  # a shift downwards is as bad
        assert [colour(make(-value), name) for value, _ in borders] == [e for _, e in borders]


@pytest.mark.parametrize("sign", [1, -1])
def test_errors_of_sds_count_for_both_signs(sign):
    for value, expected in ((0.049, "green"), (0.051, "amber"), (0.201, "red")):
        facts = of_run(CHAIN, foreseen={"predicted": {**PREDICTED, "sd_error": sign * value}})
        assert colour(facts, "Predicted bias") == expected
    for value, expected in ((0.079, "green"), (0.081, "amber"), (0.231, "red")):
        facts = {**CHAIN, "reference": {**REFERENCE, "sd_error": value}}
        assert colour(facts, "Distance to a reference") == expected


def test_what_is_no_number_or_missing_is_red():
    for key in ("r_hat", "ess_bulk"):
        name = {"r_hat": "Mixing (R-hat)", "ess_bulk": "Effective draws (ESS)"}[key]
        assert colour(of_run(CHAIN, summary=[ROW, {**ROW, "parameter": "z", key: None}]), name) == "red"
    assert colour(of_run(FITTED, khat=math.nan), "Importance weights (k-hat)") == "red"
    wide = {**REFERENCE, "standard_error": 0.07}
    assert colour({**CHAIN, "reference": wide}, "Distance to a reference") == "amber"
    assert (
        colour({**CHAIN, "reference": {**wide, "standard_error": 0.066}}, "Distance to a reference")
        == "green"
    )


def test_few_draws_one_chain_and_an_early_end():
    for value, expected in ((400, "green"), (399, "amber"), (100, "amber"), (99, "red")):
        facts = of_run(CHAIN, summary=[{**ROW, "ess_bulk": value}, {**ROW, "parameter": "z"}])
        assert colour(facts, "Effective draws (ESS)") == expected
    assert colour({**CHAIN, "chains": 1}, "Mixing (R-hat)") == "amber"
    assert colour({**CHAIN, "chains": 2}, "Mixing (R-hat)") == "green"
    thinned = {"num_rounds": 10, "thinning": 3}
    for done, expected in ((8, "green"), (7, "red")):
        assert colour(of_run(CHAIN, settings=thinned, rounds_done=done), "Run complete") == expected
    assert colour({**FITTED, "ended": "stopped"}, "Run complete") == "red"


def test_verdict_modes_and_target():
    facts = of_run(FITTED, verdict="not reached", reason="uneven weights", advice="allow more rounds")
    found = judgement(made_checks(facts))
    assert found["first"] == "Do not use: The accuracy asked for was not reached: uneven weights."
    assert found["reasons"][0].endswith("What to do: allow more rounds.")
    for others, more in (("; few draws", "1 more condition"), ("; few draws; no mode", "2 more conditions")):
        several = of_run(FITTED, verdict="not reached", reason=f"uneven weights{others}", advice="")
        assert judgement(made_checks(several))["first"].endswith(f": uneven weights ({more} failed).")
    for other in ("", "stopped"):  # whatever is not reached
        assert colour(of_run(FITTED, verdict=other, reason="", advice=""), "Accuracy") == "red"
    assert colour({**FITTED, "modes": 2}, "Further solutions") == "amber"
    assert colour({**FITTED, "modes": 1}, "Further solutions") == "green"
    assert colour(of_run(CHAIN, pseudo_posterior=True), "Target") == "amber"


def test_sites_that_are_silent_seldom_or_late():
    other = {**SITE, "client": "south"}
    for change, expected in (({"took_part": 0}, "red"), ({"seldom": True}, "amber"), ({}, "green")):
        assert colour({**CHAIN, "sites": [SITE, {**other, **change}]}, "Sites") == expected
    late = {"dropouts": [{"round": 3, "silent": ["south"]}]}
    assert colour({**CHAIN, "federation": late}, "Sites") == "amber"


@pytest.mark.parametrize("key", ["site_means", "squared_error", "calibration_error"])
@pytest.mark.parametrize("sign", [1, -1])
def test_fit_of_the_model(key, sign):
    for p, distance, expected in ((0.0167, 9, "green"), (0.0166, 4.99, "amber"), (0.0166, 5.0, "red")):
        facts = {**CHAIN, "predictive": {**FIT, key: {"p_value": p, "distance": sign * distance}}}
        assert colour(facts, "Fit of the model") == expected


@pytest.mark.parametrize("sign", [1, -1])
def test_outcomes_of_a_site(sign):
    def outcomes(distance, others=2):
        shown = [{**OUTCOME, "client": f"s{i}", "distance": 0.1} for i in range(others)]
        facts = {**CHAIN, "predictive": {**FIT, "sites": [*shown, {**OUTCOME, "distance": sign * distance}]}}
        return next(c for c in made_checks(facts) if c.name == "Outcomes of the sites")

    assert [outcomes(d).colour for d in (1.95, 1.97, 4.99, 5.0)] == ["green", "amber", "amber", "red"]
    assert "north lie " + ("above" if sign > 0 else "below") in outcomes(3).sentence
    # among twenty sites one is so far by chance: 1 - (1 - p)^20 = 0.2 at p = 0.0111, 2.54 sds
    assert [outcomes(d, 19).colour for d in (2.5, 2.58)] == ["green", "amber"]
    small = {**CHAIN, "predictive": {**FIT, "sites": [{**OUTCOME, "seen": None, "distance": None}]}}
    assert colour(small, "Outcomes of the sites") == "none"


def test_a_prior_that_decides_alone_needs_care():
    for value, expected in ((0.051, "amber"), (0.049, "green")):
        facts = {**CHAIN, "prior": [{**SENSITIVE, "prior": value, "likelihood": 0.01}]}
        assert colour(facts, "Prior and rows") == expected


def test_columns_and_values_are_named_with_counts():
    changes = {
        "red": ({"outcome": ["sbp"]}, {"copies": [("kg", "lb")]}, {"dependent": ["a", "b", "c"]}),
        "amber": ({"constant": ["kg"]}, {"inflated": [("kg", 150.0)]}),
    }
    for expected, cases in changes.items():
        for change in cases:
            assert colour({**CHAIN, "columns": {**COLUMNS, **change}}, "Columns") == expected
    facts = {**CHAIN, "values": [{"client": "north", "column": "age", "count": 2}]}
    found = next(c for c in made_checks(facts) if c.name == "Values")
    assert found.colour == "amber"
    assert "age at north (2)" in found.sentence


def test_strict_objects_to_all_that_is_red_and_to_chains_that_need_care():
    red = {**CHAIN, "ended": "stopped"}
    assert judgement(made_checks(red))["objections"][0].startswith("Run complete: ")
    assert judgement(made_checks({**CHAIN, "chains": 1}))["objections"]
    assert judgement(made_checks(of_run(CHAIN, pseudo_posterior=True)))["objections"] == []


def test_without_rows_the_checks_of_rows_say_that_they_were_not_made():
    reasons = {"no_predictive": "away", "no_prior": "away", "no_rows": "away"}
    facts = {**CHAIN, **dict.fromkeys(("predictive", "prior", "columns", "values")), **reasons}
    missing = [c for c in made_checks(facts) if c.colour == "none"]
    assert len(missing) == 5
    assert all("away" in c.sentence for c in missing)
    assert judgement(made_checks(facts))["colour"] == "green"


def table(*columns, outcome=None):
    x = np.column_stack(columns)
    y = np.random.default_rng(9).normal(size=len(x)) if outcome is None else outcome
    half = len(x) // 2
    return fald.FederatedData.from_arrays({"a": (x[:half], y[:half]), "b": (x[half:], y[half:])})


def test_redundant_columns_are_found_and_others_are_not():
    rng = np.random.default_rng(0)
    u, v, w = rng.normal(size=(3, 200))
    assert not any(redundant_columns(table(u, v, w)).values())
    assert redundant_columns(table(u, v, -2 * u + 3))["copies"] == [("0", "2")]
    assert redundant_columns(table(u, v, u - v + 1))["dependent"] == ["0", "1", "2"]
    assert redundant_columns(table(u, np.full(200, 7.0)))["constant"] == ["1"]
    assert redundant_columns(table(u, v, outcome=np.full(200, 7.0)))["outcome"] == ["the outcome"]
    # a copy with noise of sd s has a variance inflation of 1 + 1/s²
    assert [n for n, _ in redundant_columns(table(u, v, u + 0.08 * w))["inflated"]] == ["0", "2"]
    assert redundant_columns(table(u, v, u + 0.12 * w))["inflated"] == []
    # a copy that was stored in float32 is one
    assert redundant_columns(table(u, v, np.float32(u).astype(float)))["copies"] == [("0", "2")]
    frame = pd.DataFrame({"s": ["a", "b"] * 100, "u": u, "y": 7.0})
    named = fald.FederatedData.from_frame(frame, site="s", target="y", features=["u"])
    assert redundant_columns(named)["outcome"] == ["y"]
    frame["y"] = np.r_[1e6, v[1:]]
    named = fald.FederatedData.from_frame(frame, site="s", target="y", features=["u"])
    assert absurd_values(named) == [{"client": "a", "column": "y", "count": 1}]
    x, y = np.column_stack([u, v]), w
    for rows in (u, {"x": x, "y": y}, [x, y], (x, y, y), (u, y), (x, x)):
        with pytest.raises(DataError, match="not features"):
            redundant_columns(fald.FederatedData.from_arrays({"a": rows}))


@pytest.mark.parametrize("sign", [1, -1])
def test_values_that_cannot_be_meant(sign):
    rng = np.random.default_rng(1)
    age = rng.normal(50, 10, 200)
    age[[3, 5, 150]] = 50 + sign * 949
    assert absurd_values(table(sign * age, age)) == [
        {"client": c, "column": name, "count": n} for name in "01" for c, n in (("a", 2), ("b", 1))
    ]
    assert FAR == 10
    # a border: within ten robust sds nothing is called absurd, however lonely
    few = np.tile([-1.0, -0.5, 0.0, 0.5, 1.0], 40)
    scale = 1.4826 * 0.5
    for far, count in ((FAR - 0.01, 0), (FAR + 0.01, 1)):
        few[7] = sign * far * scale
        assert len(absurd_values(table(few, rng.normal(size=200)))) == count


@pytest.mark.parametrize("sign", [1, -1])
def test_the_range_of_ordinary_values_grows_with_those_that_are_near(sign):
    few = np.tile([-1.0, -0.5, 0.0, 0.5, 1.0], 40)  # robust sds of 0.74
    rng = np.random.default_rng(3)
    few[3] = sign * 7.0  # within ten of them: the range is 8
    few[4] = sign * 12.0  # beyond, and nearer than that: the range is 13
    for far, count in ((24.9, 0), (25.1, 1)):
        few[5] = sign * far
        assert len(absurd_values(table(few, rng.normal(size=200)))) == count


def test_skewed_and_binary_columns_are_left_alone():
    rng = np.random.default_rng(2)
    rare = np.zeros(400)
    rare[:3] = 1
    skewed = [
        rng.lognormal(0, 1, 400),
        rng.exponential(1, 400),
        rng.poisson(0.1, 400),
        rng.standard_t(4, 400),
    ]
    assert absurd_values(table(rare, *skewed)) == []


def pressures(centre):
    """Blood pressures about a centre at two sites, under a drug that takes 8.5 from them."""
    rng = np.random.default_rng(0)
    drug, age = rng.integers(0, 2, 400), rng.normal(size=400)
    return table(drug, age, outcome=centre - 8.5 * drug + 4 * age + rng.normal(0, 15, 400))


def test_a_prior_that_fights_the_rows_is_red_and_one_that_does_not_is_green():
    data = pressures(130.0)
    narrow, wide = (
        fald.models.linear_regression(["drug", "age"], prior_scale=s, noise_prior_scale=n)
        for s, n in ((2.5, 5.0), (200.0, 50.0))
    )
    trees = {model: fald.fit(0, model, data, progress=False) for model in (narrow, wide)}
    assert trees[narrow].attrs["verdict"] == "reached"
    found = examine(trees[narrow], why="they are elsewhere")
    assert found.judgement["first"].startswith("Do not use: Prior and rows disagree about ")
    assert examine(trees[wide], model=wide, data=data).judgement["colour"] == "green"


def test_stored_densities_are_those_of_the_rows():
    data, model = pressures(10.0), fald.models.linear_regression(["drug", "age"])
    tree = fald.fit(0, model, data, progress=False)
    stats = tree["sample_stats"].to_dataset()
    alike = tree.copy()
    alike["posterior"].dataset = tree["posterior"].to_dataset() * 0 + 1
    with pytest.raises(DataError, match="all alike"):
        prior_sensitivity(alike)
    tree["sample_stats"].dataset = stats.drop_vars(["log_prior", "log_likelihood"])
    taken, computed = _log_densities(tree, model, data)
    for name in ("prior", "likelihood"):
        stored = stats[f"log_{name}"].values.ravel()[taken]
        np.testing.assert_allclose(stored, computed[name], rtol=1e-6)
        assert np.std(stored) > 0.1  # the twin: a constant would be no test
    assert (len(taken), taken[0], taken[-1]) == (1000, 0, stats["log_prior"].size - 1)
    for about in ((), (model,), (None, data)):
        with pytest.raises(DataError, match="rows are not here"):
            prior_sensitivity(tree, *about)
    tree["posterior"].dataset = tree["posterior"].to_dataset().isel(chain=[0], draw=slice(0, 99))
    with pytest.raises(DataError, match="takes 100 draws, and there are 99"):
        prior_sensitivity(tree, model, data)


def test_all_kinds_have_a_first_line():
    assert {kind.checks[0] for kind in KINDS.values()} == {"complete"}


def test_sensitivities_know_no_constants():
    draws, found = np.random.default_rng(1).normal(size=(2, 100)), []
    for constant in (0.0, -1e6, 1e6):
        about = {"log_prior": -(draws**2), "log_likelihood": draws + constant}
        tree = xr.DataTree.from_dict({
            "posterior": xr.Dataset({"x": (("chain", "draw"), draws)}),
            "sample_stats": xr.Dataset({name: (("chain", "draw"), a) for name, a in about.items()}),
        })  # fmt: skip
        tree.attrs["kind"] = "chain"
        (moving,) = prior_sensitivity(tree)
        found.append((moving["prior"], moving["likelihood"]))
    np.testing.assert_allclose(found[1:], [found[0]] * 2, rtol=1e-6)
    assert min(found[0]) > 0.1


def test_the_sensitivity_of_weighted_draws_is_that_of_arviz():
    from arviz_stats import base

    stats: Any = base.array_stats  # pyright: ignore[reportPrivateImportUsage]
    draws = np.random.default_rng(1).normal(size=500)
    pair = [np.exp(s * draws) / np.sum(np.exp(s * draws)) for s in (-0.05, 0.08)]
    expected = stats.power_scale_sense(draws[None], *[w[None] for w in pair], 0.99, 1.01)
    np.testing.assert_allclose(_sensitivity(draws, pair), expected, rtol=1e-9)


@pytest.mark.parametrize("name", ["few-round", "chain", "private chain"])
def test_the_first_line_names_a_cause_before_what_follows_from_it(name):
    order = KINDS[name].checks
    made = "mixing" if "mixing" in order else "accuracy"
    wanted = ["columns", "values", made, "prior", "fit", "outcomes"]
    assert [key for key in order if key in wanted] == wanted
