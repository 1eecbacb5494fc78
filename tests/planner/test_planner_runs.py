"""Predictions held against simulated runs: the bundled trial, heterogeneous sites, NUTS, finished runs."""

from __future__ import annotations

import json
import math
from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from scipy.stats import norm, qmc

import fald
from fald import planner
from fald.calculus import mode as prepare
from fald.calculus.sums import log_likelihoods, make_site
from fald.planner import Goal, Setting
from fald.report import plan as plan_report
from fald.results.predict import flat_positions
from fald.results.tree import settings_of
from fald.study.datasets import load_bundled_study
from helpers import in_parameters, mostly_slow, pooled_nuts


def heterogeneous():
    """Logistic regression at five sites that disagree about coefficients, features and outcomes."""
    rng = np.random.default_rng(5)
    clients = {}
    for c, (n, shift) in enumerate(zip([40, 40, 80, 120, 120], [-1.5, 1.5, 0.5, -0.5, 0.0])):
        X = rng.normal(size=(n, 2)) * [1.0, 0.6] + [shift, -shift / 2]
        b = np.array([1.0, -0.5]) + 1.2 * rng.normal(size=2)
        chance = 1 / (1 + np.exp(-(X @ b - 0.3 + 0.8 * shift)))
        clients[f"site-{c}"] = (X, (rng.random(n) < chance).astype(float))
    return fald.models.logistic_regression(2), fald.FederatedData.from_arrays(clients)


class Case:
    """A model with its local models and the exact posterior mean and sd, by importance sampling."""

    def __init__(self, model, data, num_draws):
        self.model, self.data = model, data
        self.problem, _ = planner.local_models(model, data, Setting(1, 1.0))
        found = prepare.prepare(model, data)
        z = norm.ppf(qmc.Sobol(model.dim, seed=0).random(num_draws))
        z = np.concatenate([z, -z])
        thetas = found.mode + 1.15 * z @ np.linalg.inv(np.linalg.cholesky(found.hessian))
        energy = -log_likelihoods(make_site(model, data.rows), thetas)
        with jax.enable_x64(True):
            energy = energy - np.asarray(jax.vmap(model.flat_logprior)(jnp.asarray(thetas)))
        weights = np.exp(-(energy - energy.min()) + 0.5 * np.sum(z**2, 1) - 0.5 * np.sum(z**2, 1).min())
        weights /= weights.sum()
        assert 1 / np.sum(weights**2) > num_draws
        self.mean = weights @ thetas
        self.sd = np.sqrt(weights @ (thetas - self.mean) ** 2)

    def simulate(self, setting, num_rounds, seed=3, num_chains=1024):
        """Shifts of means and errors of sds of a long run, with the standard errors of both."""
        law = planner.chain(self.problem, setting)
        rng = np.random.default_rng(seed)
        mean, covariance = in_parameters(law, law.stationary)
        start = self.mean + rng.multivariate_normal(mean, covariance, num_chains)
        tree = fald.sample(
            seed,
            self.model,
            self.data,
            num_rounds=num_rounds,
            num_warmup=num_rounds // 4,
            thinning=max(1, int(law.autocorrelation_time().max() / 4)),
            local_steps=setting.local_steps,
            step_size=setting.step_size,
            correlation=setting.correlation,
            num_chains=num_chains,
            initial_position=jax.vmap(self.model.unravel)(jnp.asarray(start)),
            progress=False,
        )
        draws = flat_positions(self.model, tree).astype(float).reshape(num_chains, -1, self.model.dim)
        of_chain = draws.mean(1)
        squares = np.mean((draws - of_chain.mean(0)) ** 2, axis=1)
        variance = squares.mean(0)
        root = math.sqrt(num_chains)
        return (
            (of_chain.mean(0) - self.mean) / self.sd,
            np.sqrt(variance) / self.sd - 1,
            float(np.max(of_chain.std(0) / self.sd) / root),
            float(np.max(squares.std(0) / variance) / (2 * root)),
        )


@pytest.fixture(scope="module")
def trial():
    study = load_bundled_study("indo")
    data = study.read_data()
    return Case(study.build_model(data.features), data, 2**14)


@pytest.fixture(scope="module")
def skewed():
    return Case(*heterogeneous(), 2**14)


SIMULATED = [
    ("trial", 5, 1.5e-3, 150),
    ("trial", 20, 1e-3, 150),
    ("skewed", 5, 2.7e-4, 300),
    ("skewed", 20, 2.7e-4, 150),
]


@pytest.mark.parametrize(("name", "local_steps", "step", "num_rounds"), mostly_slow(SIMULATED, SIMULATED[3:]))
def test_predicted_errors_agree_with_simulations(name, local_steps, step, num_rounds, request):
    case = request.getfixturevalue(name)
    setting = Setting(local_steps, step)
    assert step * case.problem.spectrum[0].max() < 0.4
    predicted = planner.predict(case.problem, setting)
    shifts, sds, shift_error, sd_error = case.simulate(setting, num_rounds)
    bias, width = np.abs(shifts).max(), np.abs(sds).max()
    print(
        f"{name} K={local_steps} step={step:g}: bias predicted {predicted.bias:.3f} simulated {bias:.3f} "
        f"± {shift_error:.3f}; sd error predicted {predicted.sd_error:.3f} simulated {width:.3f} "
        f"± {sd_error:.3f}"
    )
    assert predicted.bias / 1.5 < bias < 1.5 * predicted.bias
    assert bias > 8 * shift_error
    if width > 8 * sd_error:
        assert predicted.sd_error / 1.5 < width < 1.5 * predicted.sd_error

    def apart(problem, setting):
        return np.linalg.norm(planner.predict(problem, setting).shifts - shifts) / np.linalg.norm(shifts)

    limit = 0.3
    assert apart(case.problem, setting) < limit
    # twins: gradients without 1/p_c, half the local steps, sds of chains with a tenth more noise
    scale = len(case.problem.weights) * case.problem.weights[:, None]
    unscaled = replace(case.problem, gradients=case.problem.gradients * scale)
    assert apart(unscaled, setting) > limit
    assert apart(case.problem, replace(setting, local_steps=max(1, local_steps // 2))) > limit
    assert np.abs(1.1 * (1 + predicted.sd_errors) - 1 - sds).max() > 8 * sd_error


def test_the_third_order_term_is_needed_where_clients_are_small(trial):
    # one site has 3 of 602 rows: its own noise has variance 200, and its gradient bends
    setting = Setting(3, 6e-4)
    bent = planner.predict(trial.problem, setting).bias
    straight = planner.predict(replace(trial.problem, skews=None), setting).bias
    assert bent > 1.5 * straight
    shared = [planner.predict(replace(trial.problem, skews=s), replace(setting, correlation=1.0)).bias
              for s in (trial.problem.skews, None)]  # fmt: skip
    assert shared[0] == pytest.approx(shared[1], rel=0.1)


@pytest.fixture(scope="module")
def nuts(trial):
    """Pooled draws by NUTS."""
    return pooled_nuts(trial.model, trial.data, 2500)


@pytest.mark.slow
def test_the_recommended_setting_reaches_what_it_promised_against_nuts(trial, nuts):
    goal = Goal(num_chains=64, ess=2500, ess_per_chain=0)
    found = planner.fewest_rounds(trial.problem, goal)
    promised = found.best.predicted
    assert promised.bias <= 0.05
    assert promised.sd_error <= 0.05
    tree = fald.sample(11, trial.model, trial.data, **found.arguments(), progress=False)
    draws = flat_positions(trial.model, tree).astype(float)
    mean, sd = nuts.mean(0), nuts.std(0)
    ess = min(fald.diagnostics.ess(tree).values())
    assert 0.7 < ess / found.best.ess < 1.6
    # what was promised, and three standard errors of both samples; NUTS has about 10,000 draws
    noise = math.sqrt(1 / ess + 1 / 8000)
    shifts = (draws.mean(0) - mean) / sd
    bias = np.abs(shifts).max()
    width = np.abs(draws.std(0) / sd - 1).max()
    print(
        f"promised {promised.bias:.3f} and {promised.sd_error:.3f}, found {bias:.3f} and {width:.3f}, "
        f"noise {noise:.3f}; effective draws {ess:.0f} of {found.best.ess:.0f}; "
        f"{found.best.num_rounds} rounds"
    )
    assert bias < promised.bias + 3 * noise
    assert math.sqrt(max(0.0, np.mean(shifts**2) - noise**2)) < promised.bias
    assert width < promised.sd_error + 3 * noise / math.sqrt(2)
    # the twin: ten times the local steps break the promise
    longer = {**found.arguments(), "local_steps": 10 * found.best.setting.local_steps, "num_rounds": 800}
    biased = fald.sample(12, trial.model, trial.data, **{**longer, "num_warmup": 200}, progress=False)
    shifted = np.abs((flat_positions(trial.model, biased).mean(0) - mean) / sd).max()
    assert shifted > promised.bias + 3 * noise


@pytest.fixture(scope="module")
def run(skewed):
    lengths = {"num_rounds": 2000, "num_warmup": 500, "thinning": 10, "num_chains": 16}
    return fald.sample(
        0, skewed.model, skewed.data, local_steps=10, step_size=2e-4, progress=False, **lengths
    )


def test_a_run_beside_its_prediction_and_its_guarantee(skewed, run):
    found = planner.checks(run, skewed.model, skewed.data, doubling_rounds=1000)
    json.dumps(found, allow_nan=False)
    predicted = planner.predict(skewed.problem, Setting(10, 2e-4))
    assert found["predicted"]["bias"] == pytest.approx(predicted.bias, rel=1e-6)
    assert found["guaranteed"]["w2"] > 100 * found["predicted"]["w2"]
    measured = found["measured"]
    assert measured["w2_between_halves_relative"] < 3 * measured["w2_from_noise_relative"]
    assert measured["drift_client"] in skewed.data.names
    doubling = found["doubling"]
    gap = abs(doubling["measured"]["shift"] - doubling["predicted"]["shift"])
    assert gap < 0.3 * doubling["predicted"]["shift"] + 3 * doubling["measured"]["standard_error"]
    shown = plan_report.checks_text(found)
    for word in (
        "predicted: bias",
        "guaranteed: W2 ≤",
        "W2 between halves",
        "drifts most",
        "twice the step size",
    ):
        assert word in shown


def test_runs_that_cannot_be_predicted_say_why(skewed, run):
    usual = settings_of(run)
    for change, message in (
        ({"privacy": {"delta": 1e-5}}, "a private run"),
        ({"clip_norm": 1.0}, "clipped"),
        ({"temperature": 0}, "point estimate"),
        ({"method": "other"}, "the method is 'other'"),
        ({"step_size": {"schedule": "Mine"}}, "constant step size"),
        ({"step_size": 1.0}, "spectral radius"),
    ):
        found = planner.foresee(skewed.model, skewed.data, {**usual, **change}, skewed.problem)
        assert found["predicted"] is None
        assert message in found["no_prediction"]
        assert message in found["no_guarantee"]
    decay = {"schedule": "PaperDecay", "smoothness": 400.0, "strong_convexity": 1.0}
    found = planner.foresee(skewed.model, skewed.data, {**usual, "step_size": decay}, skewed.problem)
    assert "the step size changes" in found["remark"]
    wide = fald.models.mlp_classifier(2, 2, hidden=(200,))
    assert "parameters" in planner.foresee(wide, skewed.data, usual)["no_prediction"]


def test_checks_of_runs_without_a_law_measure_and_run_nothing_again(skewed, run):
    for change in ({"privacy": {"delta": 1e-5}}, {"clip_norm": 1.0}):
        other = run.copy()
        other.attrs["settings"] = json.dumps({**settings_of(run), **change})
        found = planner.checks(other, skewed.model, skewed.data, doubling_rounds=10)
        assert found["predicted"] is None
        assert found["doubling"] == {"predicted": None, "measured": None}
        assert found["measured"]["w2_between_halves"] > 0
        assert "predicted: none" in plan_report.checks_text(found)
