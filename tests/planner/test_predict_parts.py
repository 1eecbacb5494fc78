"""Predictions, guarantees and the front part by part: on laws made by hand, and on recursions written out."""

from __future__ import annotations

import importlib
import math
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest

from fald import gaussian, theory
from fald.core.errors import ConfigError, NonFiniteError
from fald.planner import Goal, Problem, Setting
from fald.planner.front import FrontPoint
from fald.settings.participation import full, with_replacement, without_replacement
from fald.settings.schedules import Phase, in_phases, piecewise, record
from fald.theory.gaussian import Law
from fald.theory.measured import Measured

checks, front, predict = (
    importlib.import_module(f"fald.planner.{n}") for n in ("checks", "front", "predict")
)

TWO = Problem.from_gaussian([[[1.0]], [[3.0]]], [[0.0], [1.0]], [0.5, 0.5])
NAMES = ("a", "b", "c")


def made_up(shifts, sd_errors, *, forgotten=5, posterior=(1.0, 4.0, 9.0), **more):
    """A law with such errors after any number of rounds, that remembers what it was asked."""
    law = SimpleNamespace(asked=[], posterior=Law(np.zeros(3), np.diag(posterior)), **more)
    sd = np.sqrt(np.array(posterior))
    law.stationary = Law(np.array(shifts) * sd, np.diag(((1 + np.array(sd_errors)) * sd) ** 2))

    def at(num_rounds):
        law.asked.append(num_rounds)
        return law.stationary

    def arrival(goal, towards=None):
        law.asked.append((goal.bias, goal.sd_error, towards))
        return forgotten

    law.at, law.arrival, law.errors = at, arrival, lambda place: (np.array(shifts), np.array(sd_errors))
    law.autocorrelation_time = lambda: np.array([3.0, 7.0, 2.0])
    return law


# -- predictions ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("forgotten", [5, None])
def test_a_prediction_names_the_worst_of_each(forgotten):
    law = made_up([0.1, -0.4, 0.2], [0.05, 0.1, -0.3], forgotten=forgotten)
    found = predict.errors_at(SimpleNamespace(parameters=NAMES), law, 12)
    assert (found.bias, found.bias_parameter) == (pytest.approx(0.4), "b")
    assert (found.sd_error, found.sd_parameter) == (pytest.approx(0.3), "c")
    assert (found.shifts.tolist(), found.sd_errors.tolist()) == ([0.1, -0.4, 0.2], [0.05, 0.1, -0.3])
    assert (found.autocorrelation_time, found.forgotten) == (7.0, forgotten or 0)
    # of independent coordinates W2² is the sum of squared distances of means and of sds
    means, sds = np.array([0.1, -0.8, 0.6]), np.array([0.05, 0.2, -0.9])
    w2 = math.sqrt(np.sum(means**2) + np.sum(sds**2))
    assert found.w2 == pytest.approx(w2)
    assert found.w2_relative == pytest.approx(w2 / math.sqrt(14))
    # the start is forgotten where mean and sd are within 1% of their limits, not of the posterior
    assert law.asked == [12, (0.01, 0.01, law.stationary)]


def test_a_schedule_is_followed_step_by_step():
    """One client and one parameter: the recursion of mean and variance, and when the start is forgotten."""
    h, tau, start, K = 2.0, 0.5, 5.0, 3
    problem = replace(Problem.from_gaussian([[[h]]], [[1.0]], [1.0]), start=np.array([start]))
    steps = piecewise([(0, 0.1), (7, 0.02)])
    setting = Setting(K, steps, temperature=tau)
    mean, variance, path = start, 0.0, [(start, 0.0)]
    for k in range(60):
        eta = 0.1 if k < 7 else 0.02
        mean, variance = (1 - eta * h) * mean, (1 - eta * h) ** 2 * variance + 2 * eta * tau
        path += [(mean, variance)] * (k % K == K - 1)
    sd = math.sqrt(tau / h)
    ahead = [abs(m) / sd > 0.01 for m, _ in path]
    for rounds in (2, 3, 20):
        found = predict.predict(problem, setting, rounds)
        mean, variance = path[rounds]
        assert found.bias == found.shifts[0] == pytest.approx(mean / sd, rel=1e-5)
        assert found.sd_errors[0] == pytest.approx(math.sqrt(variance) / sd - 1, rel=1e-5)
        kept = (1 - (0.1 if rounds * K - 1 < 7 else 0.02) * h) ** K
        assert found.autocorrelation_time == pytest.approx((1 + kept) / (1 - kept), rel=1e-5)
        assert found.forgotten == (rounds + 1 if all(ahead[: rounds + 1]) else ahead.index(False))
    assert predict.predict(problem, setting, 0).sd_error == 1.0
    along = predict.trajectory(problem, setting, [20, 3])
    for i, rounds in enumerate((20, 3)):
        at = predict.predict(problem, setting, rounds)
        assert (along.bias[i], along.sd_error[i], along.w2[i]) == pytest.approx(
            (at.bias, at.sd_error, at.w2), rel=1e-6
        )
    near = replace(problem, start=np.zeros(1))
    assert predict.predict(near, setting, 5).forgotten == 0
    for wrong in ({"batch_size": 2}, {"preconditioner": "rms"}):
        for look in (predict.predict, lambda *given: predict.trajectory(*given[:2], [3])):
            with pytest.raises(ConfigError, match=next(iter(wrong)).replace("_", "-")):
                look(problem, replace(setting, **wrong), 3)


def test_along_a_schedule_the_worst_parameter_counts():
    curved = np.array([2.0, 5.0])
    both = replace(Problem.from_gaussian([np.diag(curved)], [[0.0, 0.0]], [1.0]), start=np.array([0.5, -3.0]))
    setting = Setting(2, piecewise([(0, 0.1), (5, 0.02)]))
    found = predict.trajectory(both, setting, [0, 3, 30])
    alone = [
        predict.trajectory(
            replace(Problem.from_gaussian([[[h]]], [[0.0]], [1.0]), start=np.array([start])),
            setting,
            [0, 3, 30],
        )
        for h, start in zip(curved, both.start)
    ]
    for name in ("bias", "sd_error"):
        parts = np.array([getattr(one, name) for one in alone])
        np.testing.assert_allclose(getattr(found, name), parts.max(axis=0), rtol=1e-6, atol=1e-9)
        assert np.abs(parts[0] / parts[1] - 1)[1] > 0.1  # the twin: they differ
    at = predict.predict(both, setting, 3)
    assert (at.bias, at.sd_error) == pytest.approx((found.bias[1], found.sd_error[1]), rel=1e-6)


@pytest.mark.parametrize(
    "changes",
    [
        {"momentum": 0.7}, {"correlation": 0.6}, {"temperature": 0.3},
        {"participation": with_replacement(1)}, {"participation": with_replacement(1), "noise": "paper"},
    ],
)  # fmt: skip
def test_a_schedule_has_the_law_of_the_whole_setting(changes):
    start, schedule = np.array([2.0]), piecewise([(0, 0.1), (5, 0.05)])
    problem = Problem.from_gaussian([[[1.0]], [[3.0]]], [[0.0], [1.0]], [0.5, 0.5], start=start)
    run = {"step_size": schedule, "local_steps": 2, **changes}
    path = gaussian.law([[[1.0]], [[3.0]]], [[0.0], [1.0]], [0.5, 0.5], num_rounds=9, initial_position=start,
                        **run)  # fmt: skip
    goal = gaussian.target([[[1.0]], [[3.0]]], [[0.0], [1.0]], [0.5, 0.5], changes.get("temperature", 1.0))
    found = predict.trajectory(problem, Setting(**run), [4, 9])
    for i, r in enumerate((4, 9)):
        sd = math.sqrt(goal.covariance[0, 0])
        assert found.bias[i] == pytest.approx(abs(path.mean[r, 0] - goal.mean[0]) / sd, rel=1e-6)
        assert found.sd_error[i] == pytest.approx(abs(math.sqrt(path.covariance[r, 0, 0]) / sd - 1), rel=1e-6)
    plain = predict.trajectory(problem, Setting(2, schedule), [4, 9])  # the twin: another setting
    assert (
        max(np.abs(found.sd_error / plain.sd_error - 1).max(), np.abs(found.bias / plain.bias - 1).max())
        > 0.02
    )


# -- guarantees -----------------------------------------------------------------------------------------


def test_a_guarantee_is_the_bound_of_the_run_and_of_the_rounds_to_what_is_wanted():
    known = theory.Constants(3.0, 1.0, 1, 2, 0.5, heterogeneity=0.7, initial_distance=0.8)
    setting = Setting(2, 1e-3, 0.4, with_replacement(1), "paper", temperature=0.5)
    found = predict.guarantee(replace(TWO, constants=known), setting, 40.9, epsilon=60.0)
    cooler = replace(known, temperature=0.5)
    run = {"local_steps": 2, "correlation": 0.4, "participation": with_replacement(1)}
    bound = theory.fixed_step_bound(cooler, step_size=1e-3, num_rounds=40, **run)
    assert (found.w2, found.reason) == (pytest.approx(float(bound.total)), "")
    assert sum(found.terms.values()) == pytest.approx(found.w2)
    assert set(found.terms) == set(bound.__dataclass_fields__) - {"drift_share"}
    sure = theory.complexity(60.0, cooler, **run)
    assert (found.num_rounds, found.step_size) == (float(sure.num_rounds), float(sure.step_size))
    hotter = theory.fixed_step_bound(known, step_size=1e-3, num_rounds=40, **run)  # the twin
    assert float(hotter.total) > 1.1 * found.w2


def test_what_is_not_guaranteed_says_every_reason():
    known = theory.Constants(3.0, 1.0, 1, 2, 0.5)
    sure = replace(TWO, constants=known)
    drawn = Setting(2, 1e-3, 0.0, with_replacement(1), "paper")
    assert predict.guarantee(sure, drawn, 10, 100.0).reason == ""
    assert "paper" in predict.guarantee(sure, replace(drawn, noise="realised"), 10, 100.0).reason
    assert predict.guarantee(sure, replace(drawn, participation=full(), noise="realised"), 10, 9.0).w2 > 0
    estimated = Measured(3.0, 1.0, 1, 2, 0.5, provenance={"smoothness": "bound"})
    assert predict.guarantee(replace(TWO, constants=estimated), drawn, 10, 100.0).w2 > 0
    two = {"smoothness": "estimated", "gradient_noise": "estimated", "heterogeneity": "exact"}
    found = predict.guarantee(replace(TWO, constants=replace(estimated, provenance=two)), drawn, 10, 100.0)
    assert (found.w2, found.reason) == (
        None, "only estimated, not bounded: smoothness, gradient-noise",
    )  # fmt: skip
    nothing = predict.guarantee(sure, replace(drawn, step_size=1.0), 10, 1e-3)
    assert (nothing.w2, nothing.num_rounds) == (None, None)
    assert nothing.reason.index("step-size must be") < nothing.reason.index("; epsilon must be")
    few = predict.guarantee(sure, drawn, 10, 1e-3)  # drawing devices leaves more than that
    assert (few.w2 is None, few.num_rounds, few.reason[:14]) == (False, None, "epsilon must b")


@pytest.mark.parametrize(
    ("changes", "added"),
    [
        ({"local_steps": 1}, []),
        ({}, ["local-steps = 1", "correlation = 1"]),
        ({"local_steps": 2}, ["local-steps = 1", "correlation = 1"]),
        ({"correlation": 1.0}, ["local-steps = 1"]),
        ({"batch_size": 2, "local_steps": 1}, ["all rows in every step"]),
        (
            {"participation": with_replacement(2), "noise": "paper", "local_steps": 1},
            ["full participation", 'noise = "realised"'],
        ),
        ({"participation": with_replacement(2), "local_steps": 1}, ["full participation"]),
        ({"noise": "paper", "local_steps": 1}, []),
    ],
)
def test_changes_that_would_help_are_those_that_change_something(changes, added):
    problem = replace(TWO, scatters=np.ones((2, 1, 1)), sizes=np.array([10, 10]))
    setting = Setting(**{"local_steps": 4, "step_size": 0.1, **changes})
    found = predict.what_if(problem, setting)
    assert list(found) == ["as it is", *added, "half the step-size"]
    others = {
        "as it is": {}, "half the step-size": {"step_size": 0.05}, "local-steps = 1": {"local_steps": 1},
        "correlation = 1": {"correlation": 1.0}, "all rows in every step": {"batch_size": None},
        "full participation": {"participation": full()}, 'noise = "realised"': {"noise": "realised"},
    }  # fmt: skip
    for name, error in found.items():
        limit = predict.predict(problem, replace(setting, **others[name]))
        assert error == pytest.approx(max(limit.bias, limit.sd_error))
    assert len(set(found.values())) == len(found)


def test_the_error_of_a_change_is_that_of_the_worst_parameter():
    curved = [np.diag([1.0, 30.0]), np.diag([3.0, 2.0])]
    problem = Problem.from_gaussian(curved, [[0.0, 1.0], [1.0, -1.0]], [0.5, 0.5])
    setting = Setting(5, 0.01)
    limit = predict.predict(problem, setting)
    assert predict.what_if(problem, setting)["as it is"] == pytest.approx(max(limit.bias, limit.sd_error))
    parts = np.abs([*limit.shifts, *limit.sd_errors])
    assert len(set(np.round(parts, 6))) == 4  # the twin: any other would not do


# -- the front ------------------------------------------------------------------------------------------


def point(rounds, error, privacy):
    return FrontPoint(Setting(1, 0.1), rounds, 0, error, privacy)


def kept(*points):
    found = front._undominated([point(*p) for p in points])
    return [(p.num_rounds, p.error, p.privacy) for p in found]


def test_a_point_stays_unless_another_is_as_good_in_all_and_better_in_one():
    assert kept() == []
    assert kept((20, 0.1, 1.0), (10, 0.2, 1.0)) == [(10, 0.2, 1.0), (20, 0.1, 1.0)]
    for worse in ((11, 0.1, 1.0), (10, 0.11, 1.0), (10, 0.1, 1.1), (11, 0.2, math.inf)):
        assert kept(worse, (10, 0.1, 1.0)) == kept((10, 0.1, 1.0), worse) == [(10, 0.1, 1.0)]
    # what differs in the fourth digit is the same, and the first of the same stays
    assert kept((10, 0.10004, 1.0), (10, 0.1, 1.0)) == [(10, 0.10004, 1.0)]
    assert kept((10, 0.1, math.inf), (10, 0.1, math.inf)) == [(10, 0.1, math.inf)]
    assert kept((10, 0.1, 2.0), (10, 0.2, 1.0)) == [(10, 0.1, 2.0), (10, 0.2, 1.0)]


def test_points_of_a_setting_have_the_rounds_and_errors_of_its_law(monkeypatch):
    law = SimpleNamespace(
        autocorrelation_time=lambda: np.array([2.0, 3.46]),
        arrival=lambda goal: {0.1: 40, 0.2: 0}.get(goal.bias) if goal.bias == goal.sd_error else -1,
        excess=lambda rounds, goal: {(40, 0.1): 0.5, (0, 0.2): 0.9}.get((rounds, goal.bias), 0.7),
    )
    monkeypatch.setattr(front, "chain", lambda problem, setting: law)
    setting, goal, asked = Setting(2, 0.01, 0.5), Goal(ess=80, num_chains=8, ess_per_chain=0), []

    def privacy_fn(run):
        asked.append(run)
        return run["num_rounds"] / 10

    found = front._points(TWO, goal, setting, errors=(0.05, 0.1, 0.2), privacy_fn=privacy_fn)
    # ten draws per chain at 3.46 rounds each, rounded up, after the warm-up
    assert [(p.num_rounds, p.num_warmup, p.privacy) for p in found] == [(75, 40, 7.5), (35, 0, 3.5)]
    assert [p.error for p in found] == pytest.approx([0.1 * 0.7, 0.2 * 0.9])
    assert asked[0] == {**setting.arguments(), "num_rounds": 75, "num_chains": 8}
    plain = front._points(TWO, goal, setting, errors=(0.2,), privacy_fn=None)
    assert plain[0].privacy == front.privacy_loss(TWO, setting, 35, 8)
    none = front._points(TWO, Goal(ess=0), setting, errors=(0.2,), privacy_fn=lambda run: 0.0)
    assert (none[0].num_rounds, none[0].num_warmup) == (1, 0)

    def refused(problem, setting):
        raise ConfigError("no law")

    monkeypatch.setattr(front, "chain", refused)
    assert front._points(TWO, goal, setting, errors=(0.2,), privacy_fn=None) == []


def test_shared_noise_alone_protects_nobody():
    assert math.isinf(front.privacy_loss(TWO, Setting(1, 0.1, 1.0), 10, 1))
    assert front.privacy_loss(TWO, Setting(1, 0.1, 0.999999), 10, 1) > 500


def test_the_grid_of_the_front_halves_steps_until_all_is_reached(monkeypatch):
    tried, goals = [], set()

    def points(problem, goal, setting, *, errors, privacy_fn):
        goals.add(goal)
        tried.append(
            (setting.participation.scheme, setting.correlation, setting.local_steps, setting.step_size)
        )
        reached = [e for e in errors if setting.step_size <= e]
        return [FrontPoint(setting, 10, 0, e, 1.0) for e in reached]

    monkeypatch.setattr(front, "_points", points)
    grid = {
        "local_steps": (1, 3),
        "correlations": (0.0, 0.5),
        "participations": (full(), with_replacement(2)),
    }
    front.pareto(TWO, errors=(0.1, 0.2), num_steps=9, **grid)
    largest = TWO.largest_step
    assert largest == pytest.approx(1 / 3)
    steps = [largest, largest / 2, largest / 4]
    assert tried == [
        (scheme, rho, K, s) for scheme in ("full", "with-replacement") for rho in (0.0, 0.5) for K in (1, 3)
        for s in steps
    ]  # fmt: skip
    assert goals == {Goal()}
    goals.clear()
    tried.clear()
    aim = Goal(ess=7.0)
    front.pareto(TWO, aim, errors=(0.1, 0.2), num_steps=2, local_steps=(1,), correlations=(0.0,))
    assert goals == {aim}
    assert [s for *_, s in tried] == steps[:2]
    with pytest.raises(ConfigError, match=r"error of at most 0\.01"):
        front.pareto(TWO, errors=(0.001, 0.01), num_steps=2, **grid)
    with pytest.raises(ConfigError, match="another posterior"):  # what no step size makes valid
        front.pareto(replace(TWO, weights=np.array([0.3, 0.7])), participations=[without_replacement(1)])


# -- a run beside its prediction ------------------------------------------------------------------------

USUAL = {
    "method": "fa-ld", "local_steps": 3, "step_size": 0.1, "temperature": 2.0, "correlation": 0.5,
    "noise": "paper", "batch_size": None, "clip_norm": None, "participation": "full",
    "num_participants": None, "num_rounds": 10,
}  # fmt: skip


def test_the_law_of_a_run_has_its_settings_or_a_reason():
    made, remark = checks.setting_of(USUAL)
    assert remark == ""
    assert (made.local_steps, made.step_size, made.temperature, made.correlation) == (3, 0.1, 2.0, 0.5)
    assert checks.setting_of({**USUAL, "method": "sgld", "momentum": 0.0, "preconditioner": None})[1] == ""
    for change, words in (
        ({"method": "fedavg"}, "the method is 'fedavg'"), ({"temperature": 0}, "point estimate"),
        ({"clip_norm": 1.0}, "clipped"), ({"momentum": 0.5}, "momentum or a preconditioner"),
        ({"preconditioner": "rms"}, "momentum or a preconditioner"),
    ):  # fmt: skip
        with pytest.raises(ConfigError, match=words):
            checks.setting_of({**USUAL, **change})


def test_the_law_of_changing_steps_is_that_of_the_last_one():
    falling = record(piecewise([(0, 0.1), (29, 0.05), (30, 0.025)]))
    made, remark = checks.setting_of({**USUAL, "step_size": falling})
    assert (made.step_size, made.temperature) == (pytest.approx(0.025), 2.0)
    assert "predicted for its last value 0.025" in remark
    for last, temperature in ((0.5, 1.0), (0.0, None)):
        phases, hottest, _ = in_phases(
            [Phase(4, 0.1, temperature=2.0), Phase(6, 0.05, temperature=last, draws=1)], 3
        )
        run = {**USUAL, "step_size": record(phases), "temperature": hottest}
        if temperature is None:
            with pytest.raises(ConfigError, match="the last phase has temperature 0"):
                checks.setting_of(run)
        else:
            made, _ = checks.setting_of(run)
            assert (made.step_size, made.temperature) == (pytest.approx(0.05), pytest.approx(last))


def test_a_foresight_is_prediction_and_guarantee_or_the_reason_for_none(monkeypatch):
    model = SimpleNamespace(dim=10)
    data = SimpleNamespace(num_rows=2_000_000)
    asked = []
    monkeypatch.setattr(checks, "local_models", lambda *given: asked.append(given) or (TWO, 3))
    setting = checks.setting_of(USUAL)[0]
    found = checks.foresee(model, data, USUAL)
    assert asked == [(model, data, setting)]
    limit = predict.predict(TWO, setting)
    assert found["predicted"] == {
        name: getattr(limit, name) for name in (
            "w2", "w2_relative", "bias", "bias_parameter", "sd_error", "sd_parameter", "autocorrelation_time",
            "forgotten",
        )
    }  # fmt: skip
    assert (found["no_prediction"], found["remark"]) == ("", "")
    assert (found["guaranteed"], found["no_guarantee"]) == (None, "no constants were given")
    sure = replace(TWO, constants=theory.Constants(3.0, 1.0, 1, 2, 0.5))
    slow = {**USUAL, "step_size": 1e-3}
    found = checks.foresee(model, data, slow, sure)
    bound = predict.guarantee(sure, replace(setting, step_size=1e-3), 10, found["predicted"]["w2"])
    assert (found["guaranteed"], found["no_guarantee"]) == ({"w2": bound.w2, "terms": bound.terms}, "")
    assert len(asked) == 1
    # one row more is too much work, unless the local models are there already
    large = SimpleNamespace(num_rows=2_000_001)
    for given, words in (((model, large, USUAL), "too many rows and parameters"),
                         ((model, data, {**USUAL, "privacy": {}}, TWO), "a private run"),
                         ((model, data, {**USUAL, "step_size": 5.0}, TWO), "spectral radius")):  # fmt: skip
        found = checks.foresee(*given)
        assert (found["predicted"], found["guaranteed"], found["remark"]) == (None, None, "")
        assert words in found["no_prediction"]
        assert found["no_guarantee"] == found["no_prediction"]
    assert checks.foresee(model, large, USUAL, TWO)["predicted"] is not None


def test_halves_are_compared_with_what_chance_alone_gives(monkeypatch):
    rng = np.random.default_rng(0)
    draws = rng.normal(size=(3, 9, 2))
    monkeypatch.setattr(checks.diagnostics, "ess", lambda tree: {"a": 100.0, "b": 60.0, "c": math.nan})
    found = checks._halves(draws, None)
    first, second = draws[:, :4].reshape(-1, 2), draws[:, 5:].reshape(-1, 2)
    laws = [(half.mean(0), np.cov(half.T)) for half in (first, second)]
    distance = gaussian.wasserstein2(*laws[0], *laws[1])
    size = math.sqrt(np.trace(np.cov(draws.reshape(-1, 2).T)))
    assert found["w2_between_halves"] == pytest.approx(float(distance))
    assert found["w2_between_halves_relative"] == pytest.approx(float(distance) / size)
    # half of 80 effective draws each
    assert found["w2_from_noise_relative"] == pytest.approx(math.sqrt((2 + 3 / 2) / 40))
    monkeypatch.setattr(checks.diagnostics, "ess", lambda tree: {"a": math.nan})
    assert checks._halves(draws, None)["w2_from_noise_relative"] is None
    assert set(checks._halves(draws[:, :3], None).values()) == {None}
    assert checks._halves(draws[:, :4], None)["w2_between_halves"] > 0


def test_the_client_that_drifts_most_is_named(monkeypatch):
    pd = pytest.importorskip("pandas")
    drifts = {"a": 0.5, "b": math.nan, "c": 2.0}
    table = pd.DataFrame({"mean_drift": drifts.values()}, index=list(drifts))
    monkeypatch.setattr(checks.diagnostics, "client_drift", lambda tree: table)
    assert checks._drift(None, 4.0) == {"drift_client": "c", "drift": 2.0, "drift_relative": 0.5}
    table["mean_drift"] = math.nan
    assert set(checks._drift(None, 4.0).values()) == {None}


def test_what_twice_the_step_would_change():
    setting = Setting(3, 0.05)
    one, two = (predict.predict(TWO, replace(setting, step_size=s)) for s in (0.05, 0.1))
    found = checks._predicted_change(TWO, setting)
    assert found["shift"] == pytest.approx(abs(two.shifts[0] - one.shifts[0]))
    assert found["sd_change"] == pytest.approx(abs(two.sd_errors[0] - one.sd_errors[0]))
    assert found["shift_parameter"] == TWO.parameters[0]
    assert found["shift"] > 0.01
    assert checks._predicted_change(TWO, replace(setting, step_size=0.4)) is None  # the chain diverges
    curved = [np.diag([1.0, 30.0]), np.diag([3.0, 2.0])]
    both = Problem.from_gaussian(curved, [[0.0, 1.0], [1.0, -1.0]], [0.5, 0.5])
    one, two = (predict.predict(both, replace(setting, step_size=s)) for s in (0.01, 0.02))
    found = checks._predicted_change(both, replace(setting, step_size=0.01))
    moved = np.abs(two.shifts - one.shifts)
    assert (found["shift"], found["shift_parameter"]) == (
        pytest.approx(moved.max()), both.parameters[moved.argmax()],
    )  # fmt: skip
    assert found["sd_change"] == pytest.approx(np.abs(two.sd_errors - one.sd_errors).max())


def test_a_run_with_twice_the_step_is_measured_beside_the_first(monkeypatch):
    rng = np.random.default_rng(1)
    base = rng.normal(size=(2, 500, 2))
    other = base * [1.0, 1.2] + [-0.5, 0.1]
    model = SimpleNamespace(dim=2, parameter_names=("a", "b"), unravel=lambda v: v)
    seen = {}
    monkeypatch.setattr(checks, "_by_chain", lambda tree, model: tree)
    monkeypatch.setattr(checks, "sample", lambda **given: seen.update(given) or other)
    monkeypatch.setattr(
        checks.diagnostics, "ess", lambda tree: {"a": 50.0, "b": 80.0} if tree is base else {"a": 200.0}
    )
    found = checks._measured_change(base, model, "data", {"num_rounds": 1000, "step_size": 0.2})
    assert (seen["num_warmup"], seen["thinning"], seen["num_chains"]) == (250, 2, 2)
    assert (seen["num_rounds"], seen["step_size"], seen["data"]) == (1000, 0.2, "data")
    assert (seen["model"], seen["progress"]) == (model, False)
    np.testing.assert_allclose(seen["initial_position"], base[:, -1], rtol=1e-6)
    flat, moved = base.reshape(-1, 2), other.reshape(-1, 2)
    shift = np.abs(moved.mean(0) - flat.mean(0)) / flat.std(0, ddof=1)
    assert (found["shift"], found["shift_parameter"]) == (pytest.approx(shift[0]), "a")
    assert found["sd_change"] == pytest.approx(0.2)
    assert found["standard_error"] == pytest.approx(math.sqrt(1 / 50 + 1 / 200))

    def stopped(**given):
        raise NonFiniteError("the chain left the numbers")

    monkeypatch.setattr(checks, "sample", stopped)
    assert checks._measured_change(base, model, "data", {"num_rounds": 100}) is None


def tree_of(chains, draws, **changes):
    return SimpleNamespace(
        children={"posterior": SimpleNamespace(sizes={"chain": chains, "draw": draws})},
        settings={**USUAL, "step_size": 0.05, **changes},
    )


@pytest.fixture
def looked(monkeypatch):
    """Checks of a run that tell what they looked at."""
    looked = []

    def noted(name, value):
        return lambda *given, **named: looked.append((name, given, named)) or value

    monkeypatch.setattr(checks, "require_posterior", noted("posterior", None))
    monkeypatch.setattr(checks, "settings_of", lambda tree: tree.settings)
    monkeypatch.setattr(
        checks, "flat_positions", lambda model, tree: np.arange(24.0, dtype=np.float32).reshape(12, 2)
    )
    monkeypatch.setattr(checks, "_halves", lambda draws, tree: {"halves": draws.shape})
    monkeypatch.setattr(checks, "_drift", lambda tree, size: {"drift": size})
    monkeypatch.setattr(checks, "local_models", noted("models", (TWO, 3)))
    monkeypatch.setattr(checks, "_measured_change", noted("run again", {"shift": 0.1}))
    return looked


MODEL, DATA = SimpleNamespace(dim=2), SimpleNamespace(num_rows=10)


def test_a_finished_run_is_measured_predicted_and_run_again(looked):
    tree = tree_of(3, 4)
    found = checks.checks(tree, MODEL, DATA)
    draws = np.arange(24.0).reshape(3, 4, 2)
    np.testing.assert_array_equal(checks._by_chain(tree, MODEL), draws)
    assert found["measured"]["halves"] == (3, 4, 2)
    size = math.sqrt(np.trace(np.cov(draws.reshape(-1, 2).T)))
    assert found["measured"]["drift"] == pytest.approx(size)
    setting = checks.setting_of(tree.settings)[0]
    assert found["doubling"] == {"predicted": checks._predicted_change(TWO, setting), "measured": None}
    assert found["predicted"]["bias"] == predict.predict(TWO, setting).bias
    assert [name for name, *_ in looked] == ["posterior", "models"]
    again = checks.checks(tree, MODEL, DATA, doubling_rounds=80, seed=9)
    assert again["doubling"]["measured"] == {"shift": 0.1}
    twice = {**setting.arguments(), "step_size": 0.1, "num_rounds": 80, "rng_key": 9}
    assert looked[-1] == ("run again", (tree, MODEL, DATA, twice), {})


def test_of_a_private_run_nothing_is_made_from_rows(looked):
    found = checks.checks(tree_of(3, 4, privacy={"delta": 1e-6}), MODEL, DATA, doubling_rounds=80)
    assert [name for name, *_ in looked] == ["posterior"]
    assert found["doubling"] == {"predicted": None, "measured": None}
    assert (found["predicted"], found["measured"]["halves"]) == (None, (3, 4, 2))


def test_what_has_no_law_or_takes_too_long_is_measured_alone(looked):
    found = checks.checks(tree_of(3, 4, clip_norm=1.0), MODEL, DATA, doubling_rounds=80)
    assert [name for name, *_ in looked] == ["posterior"]
    assert found["doubling"] == {"predicted": None, "measured": None}
    looked.clear()
    large = SimpleNamespace(num_rows=50_000_001)  # times four: more than 2e8
    found = checks.checks(tree_of(3, 4), MODEL, large, doubling_rounds=80)
    assert [name for name, *_ in looked] == ["posterior", "run again"]
    assert found["doubling"] == {"predicted": None, "measured": {"shift": 0.1}}
    assert "too many rows" in found["no_prediction"]
    looked.clear()
    checks.checks(tree_of(3, 4), MODEL, SimpleNamespace(num_rows=50_000_000))
    assert [name for name, *_ in looked] == ["posterior", "models"]
