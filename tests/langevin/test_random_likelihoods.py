"""Log likelihoods that draw at random, or look at a declared batch: what they sample, and twins."""

from __future__ import annotations

import dataclasses
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import fald
from fald.core.errors import ConfigError, DataError
from helpers import draws

RNG = np.random.default_rng(2)
SIZES = (6, 6, 6, 6)
ROWS = {str(i): RNG.normal(0.3 * i, 1, n).astype(np.float32) for i, n in enumerate(SIZES)}
DATA = fald.FederatedData.from_arrays(ROWS)
N, SPREAD, ETA, CHAINS = sum(SIZES), 1.5, 0.01, 20_000


def noisy(spread=SPREAD):
    """Rows of N(θ, 1) that are seen through fresh noise: E log p is that of the rows, up to a constant."""

    @fald.models.takes_key
    def loglikelihood(theta, x, rng_key):
        return -0.5 * (x + spread * jax.random.normal(rng_key) - theta) ** 2

    return fald.Model(lambda theta: -0.5 * theta**2, loglikelihood, jnp.array(0.0))


def last_draws(model, **others):
    settings = {"num_rounds": 60, "num_warmup": 59, "local_steps": 1, "step_size": ETA, "num_chains": CHAINS}
    settings |= {"progress": False, "step_check": False, **others}
    return draws(fald.sample(4, model, DATA, **settings))[:, -1].ravel().astype(float)


def law(spread, batch=None):
    """Mean and variance in the limit, by hand: a step of −η(1+n)θ, noise 2η, and that of keys and batches.

    The average of four equal clients moves by (n/b) Σ_c ¼ Σ_i (x_i + s ε_i) η; of b rows in each, the noise
    has the variance η² (n/b)² b/4 s².
    """
    rows = N // len(SIZES) if batch is None else batch
    pooled = np.concatenate(list(ROWS.values()))
    kept = 1 - ETA * (1 + N)
    added = 2 * ETA + ETA**2 * (N / rows) ** 2 * rows / len(SIZES) * spread**2
    if batch is not None:  # rows drawn without replacement
        of_rows = np.mean([x.var(ddof=1) for x in ROWS.values()]) * (1 - batch / 6) / batch
        added += ETA**2 * N**2 * of_rows / len(SIZES)
    return pooled.sum() / (1 + N), added / (1 - kept**2)


def off(sample, mean, variance):
    """The larger deviation of mean and variance, in standard errors."""
    of_variance = (sample.var() / variance - 1) * np.sqrt(len(sample) / 2)
    return max(abs(sample.mean() - mean) / np.sqrt(variance / len(sample)), abs(of_variance))


@pytest.mark.parametrize("batch", [pytest.param(None, marks=pytest.mark.slow), 2])
def test_every_row_of_every_step_has_its_own_key(batch):
    sample = last_draws(noisy(), batch_size=batch)
    assert off(sample, *law(SPREAD, batch)) < 4
    assert off(sample, *law(0.0, batch)) > 8  # the twin: as if nothing were drawn


def test_one_key_for_all_steps_is_told_apart(monkeypatch):
    monkeypatch.setattr(sys.modules["fald.langevin.client"], "fold", lambda key, step, _: jnp.zeros_like(key))
    assert off(last_draws(noisy(), num_chains=2000), *law(SPREAD)) > 8


@pytest.mark.slow
def test_clipped_gradients_have_keys_too():
    assert off(last_draws(noisy(), clip_norm=1e6), *law(SPREAD)) < 4


def test_chains_and_seeds_differ_and_a_run_repeats():
    one, other = (last_draws(noisy(), num_chains=3, num_rounds=2, num_warmup=1) for _ in range(2))
    np.testing.assert_array_equal(one, other)
    assert len(np.unique(one)) == 3


def test_few_rounds_refuse_what_draws_at_random():
    with pytest.raises(ConfigError, match="draws at random"):
        fald.fit(0, noisy(), DATA, method="importance", progress=False)


def test_a_likelihood_that_takes_a_key_must_say_so():
    plain = dataclasses.replace(noisy(), loglikelihood_fn=lambda theta, x, rng_key: -((x - theta) ** 2))
    with pytest.raises(DataError, match=r"fald\.models\.takes_key") as caught:
        last_draws(plain)
    assert "takes_key" in str(caught.value) + str(caught.value.hint)


def normalised(of_row=False):
    """A layer that is normalised by a declared batch; the twin looks at it anew for every row."""
    declared = jnp.asarray(RNG.normal(size=(50, 3)), jnp.float32)

    def loglikelihood(p, row):
        x, y = row
        units = jnp.tanh((declared + (0 * x if of_row else 0)) @ p["w"])
        here = (jnp.tanh(x @ p["w"]) - units.mean(0)) / jnp.sqrt(units.var(0) + 1e-3)
        return -0.5 * (y - here @ p["out"]) ** 2

    start = {"w": 0.3 * jnp.ones((3, 4)) * jnp.arange(1.0, 5), "out": jnp.ones(4) / 4}
    return fald.Model(lambda p: -0.5 * sum(jnp.sum(a**2) for a in jax.tree.leaves(p)), loglikelihood, start)


def test_a_declared_batch_is_looked_at_once_for_all_rows():
    """``vmap`` leaves alone what does not depend on the row: no array has rows × declared rows."""
    rows = jnp.zeros((7, 3)), jnp.zeros(7)

    def largest(model):
        program = jax.make_jaxpr(model.loglikelihoods)(model.initial_position, rows)
        return max(v.aval.size for one in program.jaxpr.eqns for v in one.outvars)

    assert largest(normalised()) == 50 * 4
    assert largest(normalised(of_row=True)) == 7 * 50 * 4
    # its statistics are part of the density: they move with the parameters, and so does the gradient
    model, example = normalised(), (jnp.ones(3), jnp.ones(()))
    gradient = jax.grad(model.flat_loglikelihood)(model.flat_initial_position, example)
    step = 1e-2 * jax.random.normal(jax.random.key(0), gradient.shape)
    values = [model.flat_loglikelihood(model.flat_initial_position + s * step, example) for s in (1, -1)]
    assert float(values[0] - values[1]) / 2 == pytest.approx(float(gradient @ step), rel=2e-2)
