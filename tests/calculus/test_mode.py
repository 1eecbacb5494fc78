"""Federated mode and curvature against pooled ones, and problems without a mode."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import scipy.optimize
from hypothesis import given, settings
from hypothesis import strategies as st

import fald
import helpers
from fald.calculus import mode as prepare
from fald.calculus.sums import client_report, log_likelihoods, make_site, total
from fald.core.errors import DataError


def regression(link, sizes=(5, 30, 80), d=3, seed=0, offset=0.0, scale=1.0, spread=0.3):
    """Clients (X, y) whose coefficients differ a little."""
    rng = np.random.default_rng(seed)
    common = scale * rng.standard_normal(d)
    clients = {}
    for c, size in enumerate(sizes):
        X = rng.standard_normal((size, d)) + 0.3 * rng.standard_normal(d)
        clients[f"site-{c}"] = (X, link(rng, X @ (common + spread * rng.standard_normal(d)) + offset))
    return fald.FederatedData.from_arrays(clients)


def bernoulli(rng, z):
    return (rng.random(len(z)) < 1 / (1 + np.exp(-z))).astype(float)


def poisson(rng, z):
    return rng.poisson(np.exp(z)).astype(float)


def normal(rng, z):
    return z + 0.5 * rng.standard_normal(len(z))


def classes(rng, z):
    return np.clip(np.round(z + 1 + rng.standard_normal(len(z))), 0, 2).astype(int)


FAMILIES = {
    "logistic": (fald.models.logistic_regression(3), regression(bernoulli)),
    "poisson": (fald.models.poisson_regression(3), regression(poisson, offset=2.0)),
    "linear": (fald.models.linear_regression(3, noise_scale=0.5), regression(normal)),
    "linear with unknown scale": (fald.models.linear_regression(3), regression(normal, offset=20.0)),
    "softmax": (fald.models.softmax_regression(3, 3), regression(classes)),
}


def pooled_energy(model, data):
    with jax.enable_x64(True):
        rows = jax.tree.map(jnp.asarray, data.rows)

        @jax.jit
        def energy(theta):
            terms = jax.vmap(model.flat_loglikelihood, (None, 0))(theta, rows)
            return -model.flat_logprior(theta) - jnp.sum(terms)

    return energy


@pytest.mark.parametrize("family", FAMILIES)
def test_mode_and_curvature_are_those_of_the_pooled_rows(family):
    model, data = FAMILIES[family]
    found = prepare.prepare(model, data)
    energy = pooled_energy(model, data)
    with jax.enable_x64(True):
        down = jax.jit(jax.value_and_grad(energy))
        best = scipy.optimize.minimize(
            lambda t: tuple(np.asarray(v, float) for v in down(jnp.asarray(t))),
            np.zeros(model.dim),
            jac=True,
            method="BFGS",
            options={"gtol": 1e-7},
        )
        hessian = np.asarray(jax.hessian(energy)(jnp.asarray(found.mode)))
    np.testing.assert_allclose(found.mode, best.x, atol=1e-4)
    np.testing.assert_allclose(found.hessian, hessian, rtol=1e-9, atol=1e-9)
    local, p = found.local, found.weights
    np.testing.assert_allclose(
        sum(w * own.hessian for w, own in zip(p, local)), hessian, rtol=1e-9, atol=1e-9
    )
    scale = max(np.abs(own.gradient).max() for own in local)
    assert np.abs(sum(w * own.gradient for w, own in zip(p, local))).max() < 1e-8 * scale
    assert found.num_exchanges <= 20


@pytest.mark.parametrize("forget", ["the weight", "the prior"])
def test_twin_gradients_do_not_cancel_without_the_weight_or_the_prior(forget):
    model, data = FAMILIES["logistic"]
    found = prepare.prepare(model, data)
    gradients = np.array([own.gradient for own in found.local])
    reports = [client_report(make_site(model, data.client(name)), found.mode) for name in data.names]
    without_prior = np.array([r.gradient / p for r, p in zip(reports, found.weights)])
    wrong = gradients.mean(0) if forget == "the weight" else found.weights @ without_prior
    assert np.abs(wrong).max() > 1e-3


def test_quadratic_clients_are_reported_exactly():
    problem = helpers.federation(prior_scale=2.0)
    found = prepare.prepare(helpers.linear_model(2.0), problem.data)
    np.testing.assert_allclose([own.hessian for own in found.local], problem.hessians, rtol=1e-6)
    centers = [found.mode - np.linalg.solve(own.hessian, own.gradient) for own in found.local]
    np.testing.assert_allclose(centers, problem.centers, rtol=1e-5, atol=1e-5)
    assert all(np.abs(own.skews).max() < 1e-10 for own in found.local)
    assert found.num_exchanges == 3


@settings(max_examples=15, deadline=None)
@given(seed=st.integers(0, 1000), size=st.sampled_from([1, 4, 32, 128]))
def test_reports_add_up_over_clients_and_blocks_of_any_size(seed, size):
    model, data = FAMILIES["poisson"]
    position = 0.3 * np.random.default_rng(seed).standard_normal(model.dim)
    whole = client_report(make_site(model, data.rows), position)
    sites = [make_site(model, data.client(name))._replace(size=size) for name in reversed(data.names)]
    for pair in zip(whole, total([client_report(site, position) for site in sites])):
        np.testing.assert_allclose(*pair, rtol=1e-10, atol=1e-10)
    values = sum(log_likelihoods(site, np.stack([position, 2 * position])) for site in sites)
    np.testing.assert_allclose(-values[0], whole.value, rtol=1e-10)


def test_a_site_split_in_two_changes_no_mode():
    model, data = FAMILIES["logistic"]
    X, y = data.client("site-2")
    clients = {name: data.client(name) for name in ("site-0", "site-1")}
    split = fald.FederatedData.from_arrays({**clients, "a": (X[:7], y[:7]), "b": (X[7:], y[7:])})
    one, two = prepare.prepare(model, data), prepare.prepare(model, split)
    np.testing.assert_allclose(one.mode, two.mode, atol=1e-9)
    np.testing.assert_allclose(one.hessian, two.hessian, rtol=1e-8, atol=1e-8)


def test_third_derivatives_and_scatter_of_a_client():
    model, data = FAMILIES["poisson"]
    rows, theta, h = data.client("site-1"), np.array([0.1, -0.2, 0.3, 0.4]), 1e-5
    site = make_site(model, rows)
    own = prepare.client_model(site, theta, data.num_rows)
    np.testing.assert_allclose(own.directions.T @ own.directions, np.eye(4), atol=1e-12)
    for q, skew in zip(own.directions.T, own.skews):
        bent = []
        for e in np.eye(4):
            up, down = (prepare.client_model(site, theta + s * h * e, data.num_rows).hessian for s in (1, -1))
            bent.append(q @ (up - down) @ q / (2 * h))
        np.testing.assert_allclose(skew, bent, rtol=1e-6, atol=1e-5 * np.abs(own.hessian).max())
    with jax.enable_x64(True):
        each = jax.vmap(jax.grad(model.flat_loglikelihood), (None, 0))(
            jnp.asarray(theta), jax.tree.map(jnp.asarray, rows)
        )
    np.testing.assert_allclose(own.scatter, np.cov(np.asarray(each), rowvar=False), rtol=1e-9)


def test_float64_inside_and_the_run_untouched():
    model, data = FAMILIES["logistic"]
    found = prepare.prepare(model, data)
    assert found.mode.dtype == np.float64
    assert jnp.zeros(()).dtype == jnp.float32
    total = sum(w * own.gradient for w, own in zip(found.weights, found.local))
    assert np.abs(total).max() < 1e-7  # float32 could not tell this from 1e-5


def test_a_model_in_float32_is_solved_to_its_precision():
    def loglikelihood_fn(theta, example):
        x, y = (jnp.asarray(part, jnp.float32) for part in example)
        logit = x @ theta.astype(jnp.float32)
        return y * logit - jnp.logaddexp(jnp.float32(0), logit)

    single = fald.Model(lambda t: -0.5 * jnp.sum(t**2), loglikelihood_fn, jnp.zeros(3))
    _, data = FAMILIES["logistic"]
    found = prepare.prepare(single, data)
    gradient = sum(w * own.gradient for w, own in zip(found.weights, found.local))
    assert np.sqrt(gradient @ np.linalg.solve(found.hessian, gradient)) < 1e-3


def test_far_starts_and_energies_that_are_not_convex():
    model, data = FAMILIES["poisson"]
    near = prepare.prepare(model, data)
    far = prepare.prepare(model, data, start=[3.0, -4.0, 5.0, 2.0])
    np.testing.assert_allclose(near.mode, far.mode, atol=1e-6)
    student = fald.Model(
        lambda t: -0.5 * jnp.sum(t**2) / 100,
        lambda t, e: -2.5 * jnp.log1p((e[1] - e[0] @ t) ** 2 / 4),
        jnp.zeros(3),
    )
    found = prepare.prepare(student, regression(normal, scale=10.0))
    assert np.linalg.eigvalsh(found.hessian)[0] > 0


def flat_logistic(d):
    return fald.Model(
        lambda t: 0.0 * jnp.sum(t),
        lambda t, e: e[1] * (e[0] @ t) - jnp.logaddexp(0.0, e[0] @ t),
        jnp.zeros(d),
    )


def separable(rng, z):
    return (z > 0).astype(float)


def flat(t):
    return 0.0 * jnp.sum(t)


NO_MODE = {
    "separable, flat prior": (flat_logistic(3), regression(separable, spread=0.0), "flat|no minimum"),
    "separable, one feature": (flat_logistic(1), regression(separable, d=1, spread=0.0), "flat|no minimum"),
    "repeated feature": (
        fald.Model(flat, lambda t, e: -0.5 * (e[1] - e[0][0] * (t[0] + t[1])) ** 2, jnp.zeros(2)),
        regression(normal),
        "flat",
    ),
    "no minimum": (
        fald.Model(flat, lambda t, e: e[0] @ t, jnp.zeros(3)),
        regression(normal),
        "no mode found in 100 exchanges",
    ),
    "not finite": (
        fald.Model(lambda t: jnp.log(t[0]), lambda t, e: -0.5 * (e[1] - e[0] @ t) ** 2, -jnp.ones(3)),
        regression(normal),
        "not finite at the start",
    ),
    "too many parameters": (
        fald.models.mlp_classifier(3, 2, hidden=(200,)),
        regression(separable),
        "1202 parameters; Hessians are exchanged up to 500",
    ),
}


@pytest.mark.parametrize("case", NO_MODE)
def test_problems_without_a_mode_are_named(case):
    model, data, message = NO_MODE[case]
    with pytest.raises(DataError, match=message) as caught:
        prepare.prepare(model, data)
    assert caught.value.hint


def test_a_vague_prior_on_separable_rows_has_a_mode():
    model = fald.models.logistic_regression(3, prior_scale=100.0)
    found = prepare.prepare(model, regression(separable, spread=0.0))
    gradient = sum(w * own.gradient for w, own in zip(found.weights, found.local))
    assert np.abs(gradient).max() < 1e-6


def test_a_start_of_the_wrong_shape_is_named():
    model, data = FAMILIES["logistic"]
    with pytest.raises(DataError, match=r"start must have shape \(4,\); got \(2,\)"):
        prepare.prepare(model, data, start=[0.0, 0.0])


def test_every_step_goes_down_and_counts():
    asked = []

    def report_fn(x):
        asked.append(x)
        return prepare.Report(float(np.sum(np.cosh(x))), np.sinh(x), np.diag(np.cosh(x)))

    def values_fn(xs):
        asked.append(xs)
        return np.sum(np.cosh(xs), -1)

    found = prepare.descend(report_fn, values_fn, [20.0, -3.0])
    prepare.check_mode(found)
    np.testing.assert_allclose(found.position, 0, atol=1e-8)
    assert found.exchanges == len(asked)
