"""Predicted errors against the exact law; searches for settings; the front."""

from __future__ import annotations

import json
import math
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import fald
import helpers
from fald import gaussian, planner
from fald.calculus import mode as prepare
from fald.core.errors import ConfigError
from fald.planner import Goal, Problem, Setting, scheduled
from fald.privacy import RunSettings
from fald.privacy.events import step_noise
from fald.report import plan as plan_report
from fald.results.predict import flat_positions
from fald.settings.participation import full, with_replacement, without_replacement
from helpers import gaussian_federation as federation
from helpers import in_parameters

SCHEMES = {
    "full": full(),
    "I": with_replacement(2),
    "II": without_replacement(2, allow_unequal=True),
}


@settings(max_examples=60, deadline=None)
@given(
    seed=st.integers(0, 10_000),
    scheme=st.sampled_from(sorted(SCHEMES)),
    noise=st.sampled_from(["realised", "paper"]),
    rho=st.sampled_from([0.0, 0.6, 1.0]),
    local_steps=st.sampled_from([1, 2, 7, 60, 300]),
    step=st.sampled_from([1e-4, 0.01, 0.1]),
)
def test_limits_are_those_of_the_exact_law(seed, scheme, noise, rho, local_steps, step):
    problem = federation(seed=seed)
    run = {"correlation": rho, "participation": SCHEMES[scheme], "noise": noise}
    expected = gaussian.stationary(*problem, step_size=step, local_steps=local_steps, temperature=0.7, **run)
    found = planner.chain(Problem.from_gaussian(*problem), Setting(local_steps, step, temperature=0.7, **run))
    mean, covariance = in_parameters(found, found.stationary)
    goal = gaussian.target(*problem, 0.7)
    np.testing.assert_allclose(mean + goal.mean, expected.mean, atol=1e-8)
    np.testing.assert_allclose(covariance, expected.covariance, rtol=1e-6, atol=1e-8)
    np.testing.assert_allclose(in_parameters(found, found.posterior)[1], goal.covariance, atol=1e-10)


@pytest.mark.parametrize("step", [0.01, 0.3, 0.6])
@pytest.mark.parametrize("rho", [0.0, 0.6])
def test_every_round_is_that_of_the_exact_law(rho, step):
    # the largest step has 1 − ηλ < 0, so the chain alternates
    problem, start = federation(), np.array([3.0, -2.0])
    path = gaussian.law(
        *problem, step_size=step, local_steps=1, num_rounds=40, correlation=rho, initial_position=start
    )
    goal = gaussian.target(*problem)
    local = Problem.from_gaussian(*problem, start=start)
    law = planner.chain(local, Setting(1, step, rho))
    for r in (0, 1, 2, 3, 10, 40):
        mean, covariance = in_parameters(law, law.at(r))
        np.testing.assert_allclose(mean + goal.mean, path.mean[r], atol=1e-9)
        np.testing.assert_allclose(covariance, path.covariance[r], atol=1e-9)
    found = planner.trajectory(local, Setting(1, step, rho), range(41))
    np.testing.assert_allclose(found.w2, gaussian.wasserstein2(*path, *goal), atol=1e-8)
    last = planner.predict(local, Setting(1, step, rho), 40)
    assert (last.w2, last.bias) == pytest.approx((found.w2[-1], found.bias[-1]))


@pytest.mark.parametrize("scheme", ["I", "II"])
def test_drawn_devices_approach_their_limit_nearly_like_the_average_round(scheme):
    problem, start = federation(), np.array([3.0, -2.0])
    run = {"participation": SCHEMES[scheme]}
    path = gaussian.law(
        *problem, step_size=0.01, local_steps=5, num_rounds=200, initial_position=start, **run
    )
    law = planner.chain(Problem.from_gaussian(*problem, start=start), Setting(5, 0.01, **run))
    goal = gaussian.target(*problem).mean
    for r in (5, 20, 100, 200):
        mean, covariance = in_parameters(law, law.at(r))
        np.testing.assert_allclose(mean + goal, path.mean[r], atol=1e-9)
        np.testing.assert_allclose(
            np.diag(covariance), np.diag(path.covariance[r]), rtol=0.35 if r < 20 else 0.1
        )


@pytest.mark.parametrize(
    ("alpha", "rounds"),
    [
        (0, [2692, 270, 90, 27, 9, 3, 1, 1]),
        (1000, [9119, 912, 304, 92, 31, 10, 4, 1]),
    ],
)
def test_rounds_to_one_thousandth_on_the_gaussian_problem_of_the_paper(alpha, rounds):
    covariance = np.array([[5.0, -2.0], [-2.0, 1.0]])
    rng = np.random.default_rng(0)
    means = np.sqrt(alpha) * rng.standard_normal((50, 2))
    rows = means[:, None] + rng.standard_normal((50, 1000, 2)) @ np.linalg.cholesky(covariance).T
    problem = Problem.from_gaussian(50_000 * np.linalg.inv(covariance), rows.mean(1), np.full(50, 0.02))
    goal = Goal(bias=math.inf, sd_error=math.inf, w2=1e-3, ess=0)
    local_steps = [1, 10, 30, 100, 300, 1000, 3000, 10000]
    assert [planner.rounds_to(problem, Setting(K, 1e-7), goal) for K in local_steps] == rounds
    assert planner.rounds_to(problem, Setting(10, 1e-7), replace(goal, w2=1e-9)) is None


def test_autocorrelation_time_of_an_autoregression_and_of_its_thinning():
    problem = Problem.from_gaussian([[[2.0]]], [[1.0]], [1.0])
    law = planner.chain(problem, Setting(3, 0.05))
    kept = 0.9**3
    assert law.autocorrelation_time()[0] == pytest.approx((1 + kept) / (1 - kept))
    assert law.autocorrelation_time(4)[0] == pytest.approx((1 + kept**4) / (1 - kept**4))


def test_autocorrelation_time_is_the_sum_over_lags_also_with_drawn_devices():
    hessians, centers, p = federation()
    run = {"participation": SCHEMES["I"]}
    law = planner.chain(Problem.from_gaussian(hessians, centers, p), Setting(4, 0.02, **run))
    _, C = in_parameters(law, law.stationary)
    average = sum(w * np.linalg.matrix_power(np.eye(2) - 0.02 * H, 4) for w, H in zip(p, hessians))
    lags = [np.diag(np.linalg.matrix_power(average, lag) @ C) / np.diag(C) for lag in range(1, 3000)]
    np.testing.assert_allclose(law.autocorrelation_time(), 1 + 2 * np.sum(lags, axis=0), rtol=1e-9)


def gaussian_rows(num_chains, batch_size, **run):
    rng = np.random.default_rng(4)
    sizes = {"a": 6, "b": 10, "c": 24}
    data = fald.FederatedData.from_arrays({n: rng.normal(0, 3, (s, 2)) for n, s in sizes.items()})
    model = fald.models.gaussian_location([[4.0, 1.0], [1.0, 2.0]], prior_scale=2.0)
    found = prepare.prepare(model, data)
    problem = Problem.from_preparation(found)
    setting = Setting(local_steps=3, step_size=0.02, batch_size=batch_size, **run)
    tree = fald.sample(
        5, model, data, num_rounds=25, num_warmup=24, num_chains=num_chains, local_steps=3, step_size=0.02,
        batch_size=batch_size, progress=False, **run,
    )  # fmt: skip
    law = planner.chain(problem, setting)
    mean, covariance = in_parameters(law, law.at(25))
    return flat_positions(model, tree), mean + found.mode, covariance, problem, setting


@pytest.mark.slow
@pytest.mark.parametrize("run", [{}, {"participation": with_replacement(2)}])
def test_batches_add_the_predicted_noise(run):
    draws, mean, covariance, problem, setting = gaussian_rows(3000, 3, **run)
    # with drawn devices the way to the limit is approximate, and 25 rounds are the limit
    assert np.abs(helpers.deviations(draws, mean, covariance)).max() < 4
    quiet = planner.chain(problem, replace(setting, batch_size=None))
    assert np.abs(helpers.deviations(draws, mean, in_parameters(quiet, quiet.at(25))[1])).max() > 6


@settings(max_examples=12, deadline=None)
@given(seed=st.integers(0, 1000), wanted=st.sampled_from([0.02, 0.1]), rho=st.sampled_from([0.0, 1.0]))
def test_the_fewest_rounds_meet_the_goal_and_no_grid_beats_them(seed, wanted, rho):
    problem = Problem.from_gaussian(*federation(seed=seed), start=[2.0, 2.0])
    goal = Goal(wanted, wanted, ess=100, num_chains=4, ess_per_chain=0)
    tried = [1, 2, 4, 8]
    best = planner.fewest_rounds(problem, goal, local_steps=tried, correlation=rho).best
    assert best.predicted.bias <= wanted
    assert best.predicted.sd_error <= wanted
    assert best.ess >= 100
    for K in tried:
        for step in problem.largest_step / 1.3 ** np.arange(40):
            law = planner.chain(problem, Setting(K, float(step), rho))
            arrival = law.arrival(goal)
            if arrival is not None:
                assert arrival + 25 * law.autocorrelation_time().max() > 0.85 * best.num_rounds - 2


def test_more_rounds_or_less_accuracy_are_never_worse():
    problem = Problem.from_gaussian(*federation(), start=[2.0, 2.0])
    goal = Goal(ess=400, num_chains=4, ess_per_chain=0)
    errors = [
        max(p.bias, p.sd_error)
        for p in (planner.best_accuracy(problem, n, goal).best.predicted for n in (300, 1000, 3000, 10_000))
    ]
    assert errors == sorted(errors, reverse=True)
    assert errors[-1] < errors[0] / 5
    rounds = [planner.fewest_rounds(problem, replace(goal, bias=e, sd_error=e)).best.num_rounds
              for e in (0.3, 0.1, 0.03, 0.01)]  # fmt: skip
    assert rounds == sorted(rounds)
    # the two searches are inverse to each other
    back = planner.best_accuracy(problem, rounds[2], goal).best.predicted
    assert max(back.bias, back.sd_error) < 1.1 * 0.03


def test_a_goal_in_w2_alone_needs_no_draws():
    problem = Problem.from_gaussian(*federation(), start=[2.0, 2.0])
    goal = Goal(math.inf, math.inf, w2=0.05, ess=0)
    found = planner.fewest_rounds(problem, goal, local_steps=[1, 4])
    assert found.best.predicted.w2 <= 0.05
    assert found.best.num_rounds == planner.rounds_to(problem, found.best.setting, goal)
    json.dumps(plan_report.document(found), allow_nan=False)
    assert "guaranteed: none (no constants were given)" in plan_report.text(found)


def test_impossible_wishes_are_named():
    problem = Problem.from_gaussian(*federation())
    with pytest.raises(ConfigError, match=r"no step size gives bias ≤ 0.05, sd-error ≤ 0.05"):
        planner.fewest_rounds(problem, participation=with_replacement(1), noise="paper")
    with pytest.raises(ConfigError, match="num-rounds = 20 do not give 150 effective draws per chain"):
        planner.best_accuracy(problem, 20)
    with pytest.raises(ConfigError, match=r"correlation must be between 0 and 1; got 1.5"):
        planner.fewest_rounds(problem, correlation=1.5)
    with pytest.raises(ConfigError, match="another posterior"):
        planner.fewest_rounds(problem, participation=without_replacement(2))
    with pytest.raises(ConfigError, match="bias must be > 0; got 0"):
        Goal(bias=0.0)
    with pytest.raises(ConfigError, match="spectral radius"):
        planner.predict(problem, Setting(1, 100.0))


@settings(max_examples=25, deadline=None)
@given(
    seed=st.integers(0, 1000),
    scheme=st.sampled_from(["full", "I"]),
    local_steps=st.sampled_from([1, 5]),
    rounds=st.sampled_from([0, 10, 1000]),
)
def test_predicted_distances_stay_below_guaranteed_ones(seed, scheme, local_steps, rounds):
    hessians, centers, p = federation(seed=seed)
    values = np.linalg.eigvalsh(hessians)
    mode = gaussian.target(hessians, centers, p).mean
    pulls = np.einsum("cpq,cq->cp", hessians, mode - centers)
    known = fald.theory.Constants(
        float(values.max()), float(values.min()), 2, 4, float(p.min()),
        heterogeneity=float(np.linalg.norm(pulls, axis=1).max()),
        initial_distance=float(np.linalg.norm(mode)) / math.sqrt(2),
    )  # fmt: skip
    problem = Problem.from_gaussian(hessians, centers, p, constants=known)
    setting = Setting(local_steps, 0.4 / values.max(), 0.0, SCHEMES[scheme], "paper")
    predicted = planner.predict(problem, setting, rounds)
    sure = planner.guarantee(problem, setting, rounds, epsilon=50.0)
    assert sure.reason == ""
    assert predicted.w2 < sure.w2
    assert sure.w2 == pytest.approx(sum(sure.terms.values()))
    certain = planner.predict(problem, replace(setting, step_size=sure.step_size), sure.num_rounds)
    assert certain.w2 < 50.0


def test_without_a_precondition_nothing_is_guaranteed():
    problem = Problem.from_gaussian(*federation())
    setting = Setting(2, 0.01)
    assert planner.guarantee(problem, setting, 10, 0.1).reason == "no constants were given"
    known = fald.theory.Constants(20.0, 0.1, 2, 4, 0.1)
    sure = replace(problem, constants=known)
    assert planner.guarantee(sure, setting, 10, 0.1).w2 > 0
    drawn = planner.guarantee(sure, replace(setting, participation=with_replacement(2)), 10, 100.0)
    assert drawn.w2 is None
    assert 'noise = "paper" only' in drawn.reason
    large = planner.guarantee(sure, replace(setting, step_size=0.05), 10, 0.1)
    assert large.w2 is None
    assert large.num_rounds > 0
    assert "step-size must be ≤ 1/(2L)" in large.reason
    rng = np.random.default_rng(0)
    X = rng.standard_normal((30, 1))
    clients = {"a": (X[:10], rng.poisson(2, 10) * 1.0), "b": (X[10:], rng.poisson(2, 20) * 1.0)}
    data = fald.FederatedData.from_arrays(clients)
    found, _ = planner.local_models(fald.models.poisson_regression(1), data, setting)
    assert planner.guarantee(found, setting, 10, 0.1).reason == "only estimated, not bounded: smoothness"


def test_the_front_has_no_point_that_another_beats():
    problem = Problem.from_gaussian(*federation(), start=[2.0, 2.0])
    front = planner.pareto(problem, Goal(num_chains=4), local_steps=[1, 4, 16])
    values = np.array([(p.num_rounds, p.error, p.privacy) for p in front])
    for i, value in enumerate(values):
        others = np.delete(values, i, 0)
        assert not ((others <= value).all(1) & (others < value).any(1)).any()
    assert list(values[:, 0]) == sorted(values[:, 0])
    assert {p.setting.correlation for p in front} >= {0.0, 1.0}
    assert all(math.isinf(p.privacy) == (p.setting.correlation == 1) for p in front)
    with pytest.raises(ConfigError, match="no run on the grid"):
        planner.pareto(problem, errors=[1e-9], num_steps=2)


def test_the_front_asks_an_accountant_if_there_is_one():
    problem = Problem.from_gaussian(*federation(), start=[2.0, 2.0])
    asked = []

    def privacy_fn(run):
        asked.append(run)
        names = (
            "local_steps",
            "num_rounds",
            "step_size",
            "temperature",
            "correlation",
            "participation",
            "noise",
        )
        RunSettings(sizes=[10, 20, 30, 40], sensitivity=1.0, num_chains=run["num_chains"],
                    **{name: run[name] for name in names})  # fmt: skip
        return run["num_rounds"] * (1 + run["correlation"])

    front = planner.pareto(problem, local_steps=[2], correlations=[0.0, 0.5], privacy_fn=privacy_fn)
    assert {p.privacy for p in front} <= {privacy_fn(run) for run in list(asked)}


def test_privacy_loss_grows_with_what_reveals_more():
    problem = Problem.from_gaussian(*federation())
    setting = Setting(2, 0.01)
    loss = planner.privacy_loss(problem, setting, 100, 4)
    assert planner.privacy_loss(problem, setting, 400, 4) == pytest.approx(2 * loss)
    assert planner.privacy_loss(problem, replace(setting, step_size=0.04), 100, 4) == pytest.approx(2 * loss)
    assert planner.privacy_loss(problem, replace(setting, correlation=0.5), 100, 4) > loss
    assert planner.privacy_loss(problem, replace(setting, temperature=2.0), 100, 4) < loss


def _drawn_in_every_round(problem, setting, num_rounds, num_chains, times):
    """μ of the worst client by the accountants' own multipliers, if it is drawn ``times`` times a round."""
    known = ("local_steps", "step_size", "temperature", "correlation", "participation", "noise", "batch_size")
    run = RunSettings(sizes=problem.sizes, num_rounds=num_rounds, num_chains=num_chains, sensitivity=1.0,
                      **{name: getattr(setting, name) for name in known})  # fmt: skip
    noise = step_noise(run)
    least = min(noise.presence(c, times).own for c in range(run.num_clients)) * noise.step[0]
    return math.sqrt(run.num_steps * num_chains) / least


@pytest.mark.parametrize("seed", range(40))
def test_privacy_loss_is_that_of_the_accountants_multipliers(seed):
    rng = np.random.default_rng(seed)
    n = int(rng.integers(2, 9))
    sizes = np.full(n, 12) if seed % 3 == 2 else rng.integers(5, 200, n)
    drawn = int(rng.integers(2, 12))
    scheme = [with_replacement(drawn), full(), without_replacement(int(rng.integers(1, n + 1)))][seed % 3]
    known = Problem.from_gaussian(np.ones((n, 1, 1)), rng.standard_normal((n, 1)), sizes / sizes.sum())
    problem = replace(known, sizes=sizes)
    setting = Setting(
        int(rng.integers(1, 20)), 10.0 ** rng.uniform(-6, -2), rng.uniform(0, 0.99), scheme,
        str(rng.choice(["realised", "paper"])), rng.uniform(0.1, 2), rng.choice([None, 3, 50]),
    )  # fmt: skip
    run = (problem, setting, int(rng.integers(1, 500)), int(rng.integers(1, 5)))
    most = drawn if scheme.scheme == "with-replacement" else 1
    loss = planner.privacy_loss(*run)
    assert loss == pytest.approx(_drawn_in_every_round(*run, times=most), rel=1e-12)
    # the twin: as if a client were drawn once; less is revealed exactly where drawing twice shows more
    once = _drawn_in_every_round(*run, times=1)
    assert (once < 0.9 * loss) == (most > 1 and setting.noise == "realised")


def test_privacy_loss_of_a_client_that_is_drawn_every_time():
    problem = Problem.from_gaussian(np.ones((4, 1, 1)), np.zeros((4, 1)), np.full(4, 0.25))
    losses = {
        noise: planner.privacy_loss(problem, Setting(1, 0.02 * 0.25, 0, with_replacement(8), noise), 1, 1)
        for noise in ("realised", "paper")
    }
    # z = p√(2v/η) = 0.25·20·√v, with v = 8/8 for eight draws out of eight, and 4 as published
    assert losses["realised"] == pytest.approx(1 / 5)
    assert losses["paper"] == pytest.approx(1 / 10)


def test_the_start_is_known_where_one_step_forgets_it():
    # K = 1 and η = 1/λ: the rate of a round is exactly one
    problem = Problem.from_gaussian(np.full((2, 1, 1), 4.0), [[1.0], [3.0]], [0.5, 0.5], start=[5.0])
    law = planner.chain(problem, Setting(1, 0.25))
    assert law.rates[0] == 1
    (mean, covariance), after = in_parameters(law, law.at(0)), in_parameters(law, law.at(1))
    np.testing.assert_allclose([mean[0], covariance[0, 0]], [3.0, 0.0], atol=1e-12)  # from the mode at 2
    np.testing.assert_allclose(after[1], in_parameters(law, law.stationary)[1])
    np.testing.assert_allclose(after[0], 0, atol=1e-12)
    assert law.excess(0, Goal()) > 1
    assert law.arrival(Goal(sd_error=0.5)) == 1


def test_a_linear_energy_and_flat_directions_have_a_law():
    # one client knows nothing of the second parameter but pulls it; the other does the rest
    hessians = np.array([np.diag([2.0, 0.0]), np.diag([1.0, 3.0])])
    gradients = np.array([[0.4, 0.6], [-0.4, -0.6]])
    problem = Problem(hessians, gradients, np.array([0.5, 0.5]), np.zeros(2), ("a", "b"))
    law = planner.chain(problem, Setting(5, 0.01))
    theta, (mean, _) = np.zeros(2), in_parameters(law, law.stationary)
    for _ in range(3000):
        local = np.tile(theta, (2, 1))
        for _ in range(5):
            local = local - 0.01 * (np.einsum("cpq,cq->cp", hessians, local) + gradients)
        theta = local.mean(0)
    np.testing.assert_allclose(mean, theta, atol=1e-6)


@pytest.mark.slow
def test_fifty_parameters_and_a_hundred_sites_are_planned():
    rng = np.random.default_rng(0)
    d, clients = 49, {}
    common = 0.3 * rng.standard_normal(d)
    for c in range(100):
        X = rng.standard_normal((200, d)) * np.exp(0.3 * rng.standard_normal(d)) + 0.3 * rng.standard_normal(
            d
        )
        chance = 1 / (1 + np.exp(-X @ (common + 0.5 * rng.standard_normal(d))))
        clients[f"{c:03d}"] = (X, (rng.random(200) < chance).astype(float))
    data = fald.FederatedData.from_arrays(clients)
    found = planner.plan(fald.models.logistic_regression(d), data)
    assert found.best.predicted.bias <= 0.05


def test_a_schedule_that_is_constant_has_the_law_of_the_constant_step():
    schedules = fald.schedules
    problem = planner.Problem.from_gaussian([[[1.0]], [[3.0]]], [[0.0], [1.0]], [0.5, 0.5])
    rounds = [0, 1, 7, 40]
    constant = planner.Setting(local_steps=3, step_size=0.05, correlation=0.3)
    same = schedules.piecewise([(0, 0.05), (30, 0.05)])
    expected = planner.trajectory(problem, constant, rounds)
    found = planner.trajectory(problem, replace(constant, step_size=same), rounds)
    for name in ("w2", "bias", "sd_error"):
        np.testing.assert_allclose(getattr(found, name), getattr(expected, name), rtol=1e-5, atol=1e-7)
    other = schedules.piecewise([(0, 0.05), (30, 0.01)])  # the twin
    found = planner.trajectory(problem, replace(constant, step_size=other), rounds)
    assert abs(found.w2[-1] / expected.w2[-1] - 1) > 0.3
    at, of = (planner.predict(problem, replace(constant, step_size=s), 40) for s in (same, 0.05))
    for name in ("w2", "w2_relative", "bias", "sd_error", "shifts", "sd_errors", "autocorrelation_time"):
        np.testing.assert_allclose(getattr(at, name), getattr(of, name), rtol=1e-5, atol=1e-7, err_msg=name)
    twin = planner.predict(problem, replace(constant, step_size=other), 40)
    assert abs(twin.w2 / of.w2 - 1) > 0.3
    near = planner.predict(problem, replace(constant, step_size=same), 3)
    assert 3 < at.forgotten <= 40
    assert near.forgotten == 4  # not by then
    with pytest.raises(ConfigError, match="has no limit"):
        planner.predict(problem, replace(constant, step_size=same))
    with pytest.raises(ConfigError, match="chooses the step size"):
        planner.fewest_rounds(problem, step_size=0.05)


def held_for_ever(step=1.0):
    """A schedule that never changes."""
    return fald.schedules.piecewise([(0, step), (50, step)])


def test_a_plan_with_a_schedule_that_is_constant_is_that_of_the_constant_step():
    problem = Problem.from_gaussian(*federation(), start=[2.0, 2.0])
    goal = Goal(0.2, 0.2, ess=200, num_chains=4, ess_per_chain=0)
    usual, found = (
        planner.fewest_rounds(problem, goal, local_steps=[3], step_size=s).best
        for s in (None, held_for_ever())
    )
    assert found.num_rounds == pytest.approx(usual.num_rounds, rel=0.08)
    assert float(found.setting.step_size(0)) == pytest.approx(usual.setting.step_size, rel=0.2)
    most = planner.best_accuracy(problem, 400, goal, local_steps=[2], step_size=held_for_ever()).best
    wanted = planner.best_accuracy(problem, 400, goal, local_steps=[2]).best
    assert most.predicted.sd_error == pytest.approx(wanted.predicted.sd_error, rel=0.15)
    assert most.ess >= 200
    # the twin: a schedule that falls is another run
    twin = planner.fewest_rounds(
        problem, goal, local_steps=[3], step_size=fald.schedules.polynomial(1.0, 300)
    ).best
    assert abs(twin.num_rounds / usual.num_rounds - 1) > 0.2


def test_effective_draws_are_those_of_all_covariances_between_rounds():
    problem, goal = Problem.from_gaussian(*federation(), start=[2.0, 2.0]), Goal()
    setting = Setting(3, fald.schedules.cosine(0.05, 60, last=0.005), participation=SCHEMES["I"])
    found = scheduled.course(problem, setting, goal, 30)
    joint = np.zeros((20, 20, 2, 2))
    for i in range(20):
        joint[i, i] = found.covariance[11 + i]
        for j in range(i + 1, 20):
            joint[i, j] = joint[i, j - 1] @ found.maps[10 + j].T
            joint[j, i] = joint[i, j].T
    summed, alone = np.diag(joint.sum((0, 1))), np.diag(np.einsum("iipq->pq", joint))
    assert found.effective(10)[-1] == pytest.approx(20 * (alone / summed).min())
    still = scheduled.course(problem, replace(setting, step_size=held_for_ever(0.05)), goal, 2000)
    time = planner.chain(problem, replace(setting, step_size=0.05)).autocorrelation_time().max()
    assert still.effective(500)[-1] == pytest.approx(1500 / time, rel=0.02)


@pytest.mark.parametrize(
    "schedule",
    [
        fald.schedules.paper_decay(40.0, 0.3),
        fald.schedules.polynomial(1.0, 100),
        pytest.param(fald.schedules.cosine(1.0, 600, last=0.2), marks=pytest.mark.slow),
        fald.schedules.warm_up(30, 1.0),
        pytest.param(
            fald.schedules.piecewise([(0, 1.0), (100, fald.schedules.cosine(0.5, 200, last=0.1))]),
            marks=pytest.mark.slow,
        ),
    ],
    ids=lambda schedule: type(schedule).__name__,
)
def test_a_planned_run_with_a_schedule_meets_the_goal_in_every_kept_round(schedule):
    problem = Problem.from_gaussian(*federation(), start=[2.0, 2.0])
    goal = Goal(0.2, 0.2, ess=100, num_chains=4, ess_per_chain=0)
    best = planner.fewest_rounds(problem, goal, local_steps=[2], step_size=schedule).best
    kept = planner.trajectory(problem, best.setting, range(best.num_warmup, best.num_rounds + 1))
    assert max(kept.bias.max(), kept.sd_error.max()) <= 0.2
    assert max(best.predicted.bias, best.predicted.sd_error) == pytest.approx(
        max(kept.bias.max(), kept.sd_error.max()), rel=1e-6
    )
    assert best.ess >= 100
    (early,) = zip(*planner.trajectory(problem, best.setting, [best.num_warmup - 1])[2:])
    assert max(early) > 0.2  # the twin: one round sooner it is not met
    factor = float(best.setting.step_size(7)) / float(schedule(7))
    for k in (0, 50, 250, 5000):
        assert float(best.setting.step_size(k)) == pytest.approx(factor * float(schedule(k)), rel=1e-5)


@pytest.mark.parametrize(
    "fixed",
    [
        {"correlation": 0.6},
        pytest.param({"participation": fald.with_replacement(2)}, marks=pytest.mark.slow),
    ],
    ids=["noise that is shared", "drawn clients"],
)
def test_a_planned_run_with_a_schedule_has_the_errors_and_draws_that_were_planned(fixed):
    """The run itself, 8,000 times: what was predicted of its worst kept round, and its effective draws."""
    given = helpers.federation((2, 2, 8, 8))
    problem = Problem.from_gaussian(*given.energies, start=helpers.START)
    goal = Goal(0.3, 0.3, ess=20, num_chains=4, ess_per_chain=0)
    schedule = fald.schedules.polynomial(1.0, 40)
    best = planner.fewest_rounds(problem, goal, local_steps=[2], step_size=schedule, **fixed).best
    count, kept = 8000, best.num_rounds - best.num_warmup
    assert 5 < kept < 300

    def run(setting):
        tree = fald.sample(
            3, helpers.linear_model(), given.data, **setting.arguments(), num_rounds=best.num_rounds,
            num_warmup=best.num_warmup, num_chains=count, progress=False, step_check=False,
        )  # fmt: skip
        found = helpers.draws(tree).astype(float)
        shift = found.mean(0) / sd - goal_law.mean / sd
        return np.abs(shift).max(), np.abs(found.std(0) / sd - 1).max(), found

    goal_law = fald.gaussian.target(*given.energies)
    sd = np.sqrt(np.diagonal(goal_law.covariance))
    predicted = planner.trajectory(problem, best.setting, range(best.num_warmup + 1, best.num_rounds + 1))
    noise = 4 / np.sqrt(count)  # four standard errors of a mean in sds, and more than that of an sd
    bias, sd_error, found = run(best.setting)
    assert abs(bias - predicted.bias.max()) < noise
    assert abs(sd_error - predicted.sd_error.max()) < noise
    alone, together = found.var(0).mean(0), found.mean(1).var(0)
    effective = alone / together
    assert effective.min() == pytest.approx(best.ess / goal.num_chains, rel=4 * np.sqrt(2 / count))
    hotter = run(replace(best.setting, temperature=1.2**2))  # the twin
    assert abs(hotter[1] - predicted.sd_error.max()) > noise
    still = run(replace(best.setting, step_size=float(best.setting.step_size(0))))[2]
    assert abs((still.var(0).mean(0) / still.mean(1).var(0)).min() / effective.min() - 1) > 8 * np.sqrt(
        2 / count
    )


def test_a_plan_with_a_schedule_says_what_cannot_be_reached():
    problem = Problem.from_gaussian(*federation(), start=[2.0, 2.0])
    goal = Goal(1e-3, 1e-3)
    with pytest.raises(ConfigError, match=r"no multiple of the schedule gives .* in 4,096 rounds"):
        planner.fewest_rounds(problem, goal, local_steps=[2], step_size=fald.schedules.polynomial(1.0, 5))
    wide, longest, found = Goal(math.inf, 0.2), scheduled.MOST, []
    least = scheduled.smallest(problem, Setting(2, 1.0), held_for_ever(), wide)
    for factor in (least, 16 * least):
        setting = Setting(2, fald.schedules.scaled(held_for_ever(), factor))
        found.append(scheduled.course(problem, setting, wide, longest).arrival())
    assert found[0] > longest >= found[1]  # with smaller multiples no run arrives


def test_schedules_that_do_not_serve_are_named():
    problem = Problem.from_gaussian(*federation(), start=[2.0, 2.0])
    own, phases = (lambda k: 0.1), fald.schedules.in_phases([fald.schedules.Phase(4, 0.1, draws=1)], 2)[0]
    with pytest.raises(ConfigError, match="chooses the step size"):
        planner.fewest_rounds(problem, step_size=own)
    with pytest.raises(ConfigError, match="can be multiplied"):
        planner.fewest_rounds(problem, local_steps=[1], step_size=phases)
    with pytest.raises(ConfigError, match="num-rounds = 20 do not give 150 effective draws per chain"):
        planner.best_accuracy(problem, 20, local_steps=[1], step_size=held_for_ever())
    with pytest.raises(ConfigError, match="batch-size must be None"):
        planner.fewest_rounds(problem, local_steps=[1], step_size=held_for_ever(), batch_size=5)
