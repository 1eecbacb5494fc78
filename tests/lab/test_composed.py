"""Composed rounds: the law of FA-LD, its iterates without noise, and what they refuse."""

from __future__ import annotations

import jax.numpy as jnp
import numpy as np
import pytest

import fald
from fald import gaussian, samplers
from fald.core.errors import ConfigError, DataError
from helpers import START, deviations, draws, federation, linear_model

NUM_CHAINS = 20_000
LIMIT = 4.0
PRIOR = 3.0
MODEL = linear_model(PRIOR)
PROBLEM = federation(prior_scale=PRIOR)
SCHEMES = {
    "full": fald.full(),
    "I": fald.with_replacement(2),
    "II": fald.without_replacement(2, allow_unequal=True),
}
STEPS, STEP, ROUNDS = 20, 0.05, 3
GRID = [
    ("full", "realised", 0.0),
    ("full", "paper", 0.6),
    ("I", "realised", 0.6),
    ("II", "realised", 1.0),
    ("II", "paper", 0.0),
]


def sampled(method, scheme="full", num_chains=NUM_CHAINS, seed=3):
    """Draws of the last round (chains, dim)."""
    tree = fald.sample(
        seed,
        MODEL,
        PROBLEM.data,
        method=method,
        num_rounds=ROUNDS,
        num_warmup=ROUNDS - 1,
        num_chains=num_chains,
        participation=SCHEMES[scheme],
        progress=False,
    )
    return draws(tree)[:, -1]


def composed(**settings):
    return samplers.composed(**{"local_steps": STEPS, "step_size": STEP, **settings})


def off(sample, scheme="full", **settings):
    """The largest deviation from the exact law of FA-LD, in standard errors."""
    path = gaussian.law(
        *PROBLEM.energies,
        step_size=STEP,
        local_steps=STEPS,
        num_rounds=ROUNDS,
        initial_position=START,
        participation=SCHEMES[scheme],
        **settings,
    )
    return np.abs(deviations(sample, path.mean[-1], path.covariance[-1])).max()


@pytest.mark.parametrize(("scheme", "noise", "correlation"), GRID)
def test_draws_follow_the_exact_law_and_hotter_ones_do_not(scheme, noise, correlation):
    settings = {"noise": noise, "correlation": correlation}
    assert off(sampled(composed(**settings), scheme), scheme, **settings) < LIMIT
    assert off(sampled(composed(temperature=1.1**2, **settings), scheme), scheme, **settings) > 2 * LIMIT


def test_noise_shared_by_nobody_is_told_from_shared_noise():
    sample = sampled(composed(correlation=1.0))
    assert off(sample, correlation=1.0) < LIMIT
    assert off(sample, correlation=0.0) > 2 * LIMIT


@pytest.mark.slow
def test_steps_one_after_the_other_have_the_same_law():
    stepwise = samplers.fald(local_steps=STEPS, step_size=STEP, correlation=0.6)

    def apart(a, b):
        """Differences of means and second moments of two samples, in standard errors."""
        both = [np.stack([s[:, 0], s[:, 1], s[:, 0] ** 2, s[:, 0] * s[:, 1], s[:, 1] ** 2]) for s in (a, b)]
        variance = sum(m.var(axis=1) / m.shape[1] for m in both)
        return np.abs((both[0].mean(1) - both[1].mean(1)) / np.sqrt(variance)).max()

    one, other = sampled(composed(correlation=0.6)), sampled(stepwise, seed=4)
    assert apart(one, other) < LIMIT
    assert apart(sampled(composed(correlation=0.6, local_steps=STEPS // 2)), other) > 2 * LIMIT


def test_without_noise_it_is_federated_averaging():
    plain = sampled(samplers.fedavg(local_steps=STEPS, step_size=STEP), num_chains=1)
    np.testing.assert_allclose(sampled(composed(temperature=0.0), num_chains=1), plain, rtol=2e-5)
    other = sampled(composed(temperature=0.0, local_steps=STEPS - 1), num_chains=1)
    assert np.abs(other - plain).max() > 1e-2


def test_energies_are_those_of_the_clients():
    settings = {"num_rounds": 2, "num_chains": 2, "progress": False}
    stepwise = {"step_size": STEP, "local_steps": STEPS}
    ours = fald.sample(0, MODEL, PROBLEM.data, method=composed(), **settings)
    theirs = fald.sample(0, MODEL, PROBLEM.data, **stepwise, **settings)
    first = [tree["sample_stats"]["energy"].values[:, 0] for tree in (ours, theirs)]
    np.testing.assert_allclose(first[0], first[1], rtol=1e-5)
    assert ours["cost"]["gradients"].values[0].tolist() == [1 + 2] * 4


def test_what_is_not_gaussian_is_refused():
    data = fald.datasets.load("indo")
    model = fald.models.logistic_regression(list(data.features))
    with pytest.raises(DataError, match="not quadratic"):
        fald.sample(0, model, data, method=composed(), num_rounds=2, progress=False)
    flat = fald.Model(lambda t: 0.0 * t[0], lambda t, x: -0.5 * (x - t[0]) ** 2, jnp.zeros(2))
    rows = fald.FederatedData.from_arrays({"a": np.ones(3), "b": np.zeros(2)})
    with pytest.raises(DataError, match="no single lowest point"):
        fald.sample(0, flat, rows, method=composed(), num_rounds=2, progress=False)
    with pytest.raises(ConfigError, match="constant"):
        composed(step_size=lambda k: 0.1)
    with pytest.raises(ConfigError, match="no energies"):
        composed().split()
