"""Measured constants against enumeration, against closed forms, and as bounds."""

from __future__ import annotations

import itertools
import json
import math
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import fald
import helpers
from fald import theory
from fald.calculus import mode as prepare
from fald.calculus.sums import client_report, make_site, prior_report
from fald.core.errors import ConfigError, DataError
from fald.theory import measured as measure


def classified(num_classes, sizes=(6, 20, 40), seed=0):
    rng = np.random.default_rng(seed)
    clients = {}
    for c, size in enumerate(sizes):
        X = rng.standard_normal((size, 2)) * [1.0, 2.0] + 0.5 * c
        y = np.clip(np.round(X[:, 0] + 1 + rng.standard_normal(size)), 0, num_classes - 1)
        clients[f"site-{c}"] = (X, y.astype(int))
    return fald.FederatedData.from_arrays(clients)


FAMILIES = {
    "logistic": (fald.models.logistic_regression(2, prior_scale=1.5), classified(2)),
    "softmax": (fald.models.softmax_regression(2, 3, prior_scale=1.5), classified(3)),
}


def client_hessian(model, data, name, theta):
    site = make_site(model, data.client(name))
    report, prior = client_report(site, theta), prior_report(model, theta)
    share = data.weights[data.names.index(name)]
    return report.hessian / share + prior.hessian


def test_the_gaussian_problem_of_the_paper():
    covariance = np.array([[5.0, -2.0], [-2.0, 1.0]])
    squared = {0: 1.1e8, 1: 4.1e11, 1000: 4.1e14}
    for alpha, expected in squared.items():
        rng = np.random.default_rng(0)
        means = np.sqrt(alpha) * rng.standard_normal((50, 2))
        rows = means[:, None] + rng.standard_normal((50, 1000, 2)) @ np.linalg.cholesky(covariance).T
        clients = {f"{c:02d}": (x.mean(0, keepdims=True), np.array([1000.0])) for c, x in enumerate(rows)}
        data = fald.FederatedData.from_arrays(clients)
        found = fald.theory.constants(fald.models.gaussian_location(covariance), data)
        assert round(found.strong_convexity) == 8579
        assert round(found.smoothness) == 291421
        assert round(found.condition_number) == 34
        assert set(found.provenance.values()) == {"exact"}
        np.testing.assert_allclose(found.heterogeneity**2, expected, rtol=0.15)
        np.testing.assert_allclose(found.initial_distance, np.linalg.norm(rows.mean((0, 1))) / math.sqrt(2))


def test_quadratic_energies_are_recognised_and_exact():
    problem = helpers.federation(prior_scale=2.0)
    found = measure.constants(helpers.linear_model(2.0), problem.data)
    values = np.linalg.eigvalsh(problem.hessians)
    np.testing.assert_allclose(found.smoothness, values.max(), rtol=1e-6)
    np.testing.assert_allclose(found.strong_convexity, values.min(), rtol=1e-6)
    assert found.provenance["smoothness"] == found.provenance["strong_convexity"] == "exact"
    assert found.smoothness_at_mode == pytest.approx(found.smoothness)
    mode = np.linalg.solve(
        np.tensordot(problem.weights, problem.hessians, 1),
        np.einsum("c,cpq,cq->p", problem.weights, problem.hessians, problem.centers),
    )
    pulls = np.einsum("cpq,cq->cp", problem.hessians, mode - problem.centers)
    np.testing.assert_allclose(found.heterogeneity, np.linalg.norm(pulls, axis=1).max(), rtol=1e-5)
    np.testing.assert_allclose(
        found.initial_distance, np.linalg.norm(helpers.START - mode) / math.sqrt(2), rtol=1e-5
    )


@pytest.fixture(scope="module", params=FAMILIES)
def bounded(request):
    model, data = FAMILIES[request.param]
    return model, data, measure.constants(model, data, batch_size=5)


@settings(max_examples=25, deadline=None)
@given(seed=st.integers(0, 10_000), scale=st.sampled_from([0.0, 0.1, 1.0, 10.0, 1000.0]))
def test_bounds_of_logistic_and_softmax_hold_at_every_position(bounded, seed, scale):
    model, data, found = bounded
    assert found.provenance["smoothness"] == found.provenance["strong_convexity"] == "bound"
    theta = scale * np.random.default_rng(seed).standard_normal(model.dim)
    for name in data.names:
        values = np.linalg.eigvalsh(client_hessian(model, data, name, theta))
        assert values[-1] <= found.smoothness * (1 + 1e-9)
        assert values[0] >= found.strong_convexity * (1 - 1e-9)
        assert gradient_variance(model, data, name, theta, 5) <= found.gradient_noise**2 * model.dim * (
            1 + 1e-9
        )


def test_bounds_are_tight():
    model, data = FAMILIES["logistic"]
    found = measure.constants(model, data)
    at_zero = max(np.linalg.eigvalsh(client_hessian(model, data, n, np.zeros(3)))[-1] for n in data.names)
    assert found.smoothness == pytest.approx(at_zero)
    # far out only the prior is left
    far = min(
        np.linalg.eigvalsh(client_hessian(model, data, n, [900.0, 700.0, 800.0]))[0] for n in data.names
    )
    assert found.strong_convexity == pytest.approx(1 / 1.5**2)
    assert far == pytest.approx(found.strong_convexity, rel=1e-6)


def test_twin_a_smaller_bound_is_broken():
    model, data = FAMILIES["logistic"]
    found = measure.constants(model, data)
    prior = 1 / 1.5**2
    four_fifths = prior + 0.8 * (found.smoothness - prior)
    at_zero = max(np.linalg.eigvalsh(client_hessian(model, data, n, np.zeros(3)))[-1] for n in data.names)
    assert at_zero > four_fifths
    # two classes of a softmax reach its bound, so ¼ in place of ½ is broken
    two = fald.models.softmax_regression(2, 2, prior_scale=1.5)
    binary = classified(2)
    bound = measure.constants(two, binary).smoothness
    reached = max(np.linalg.eigvalsh(client_hessian(two, binary, n, np.zeros(6)))[-1] for n in binary.names)
    assert reached == pytest.approx(bound)


@partial(jax.jit, static_argnums=0)
def row_gradients(model, theta, rows):
    return jax.vmap(jax.grad(model.flat_loglikelihood), (None, 0))(theta, rows)


def gradient_variance(model, data, name, theta, batch_size):
    """E‖∇f̃^c − ∇f^c‖² by the formula for means of samples without replacement."""
    rows = data.client(name)
    with jax.enable_x64(True):
        each = np.asarray(row_gradients(model, jnp.asarray(theta), jax.tree.map(jnp.asarray, rows)))
    n_c = len(each)
    if batch_size >= n_c:
        return 0.0
    spread = np.sum((each - each.mean(0)) ** 2) / (n_c - 1)
    return data.num_rows**2 / batch_size * (1 - batch_size / n_c) * spread


@pytest.mark.parametrize("batch_size", [1, 2, 4, 5])
def test_gradient_noise_equals_the_mean_over_all_batches(batch_size):
    rng = np.random.default_rng(1)
    sizes = {"a": 5, "b": 3, "c": 1}
    data = fald.FederatedData.from_arrays({n: rng.normal(0, 2, (s, 2)) for n, s in sizes.items()})
    covariance = np.array([[2.0, 0.3], [0.3, 1.0]])
    model = fald.models.gaussian_location(covariance, prior_scale=3.0)
    found = measure.constants(model, data, batch_size=batch_size)
    precision, theta = np.linalg.inv(covariance), np.array([0.4, -1.0])
    worst = 0.0
    for name in data.names:
        each = (theta - data.client(name)) @ precision
        full = data.num_rows * each.mean(0)
        batches = list(itertools.combinations(range(len(each)), min(batch_size, len(each))))
        errors = [np.sum((data.num_rows * each[list(b)].mean(0) - full) ** 2) for b in batches]
        worst = max(worst, float(np.mean(errors)))
    np.testing.assert_allclose(2 * found.gradient_noise**2, worst, rtol=1e-9, atol=1e-9)
    assert found.provenance["gradient_noise"] == "exact"
    if 1 < batch_size < 5:  # with replacement the factor 1 − b/n_c would be missing
        assert abs(2 * found.gradient_noise**2 / (1 - batch_size / 5) / worst - 1) > 0.1


def poisson_data():
    rng = np.random.default_rng(0)
    clients = {}
    for c, size in enumerate((10, 30)):
        X = rng.standard_normal((size, 2))
        clients[f"site-{c}"] = (X, rng.poisson(np.exp(0.5 * X[:, 0] + 1)).astype(float))
    return fald.FederatedData.from_arrays(clients)


def same_name(theta, example):
    x, y = example
    return y * (x @ theta) - jnp.logaddexp(0.0, x @ theta)


LABELS = {
    "poisson": (
        fald.models.poisson_regression(2),
        poisson_data(),
        {"smoothness": "estimated", "strong_convexity": "bound", "heterogeneity": "exact"},
    ),
    "linear": (
        fald.models.linear_regression(2, noise_scale=1.0),
        poisson_data(),
        {"smoothness": "exact", "strong_convexity": "exact", "gradient_noise": "estimated"},
    ),
    "own model of a known name": (
        fald.Model(lambda t: -0.5 * jnp.sum(t**2), same_name, jnp.zeros(2), name="logistic"),
        classified(2),
        {"smoothness": "estimated", "strong_convexity": "estimated"},
    ),
    "own prior": (
        fald.Model(
            lambda p: (
                -jnp.sum(jnp.log1p(p["coefficient"] ** 2) + p["coefficient"] ** 2) - p["intercept"] ** 2
            ),
            fald.models.logistic_regression(2).loglikelihood_fn,
            fald.models.logistic_regression(2).initial_position,
            name="logistic",
        ),
        classified(2),
        {"smoothness": "estimated", "strong_convexity": "estimated"},
    ),
}


@pytest.mark.parametrize("case", LABELS)
def test_labels(case):
    model, data, expected = LABELS[case]
    found = measure.constants(model, data, batch_size=4)
    assert {name: found.provenance[name] for name in expected} == expected
    assert found.estimated == [k for k, v in found.provenance.items() if v == "estimated"]
    assert found.smoothness >= found.smoothness_at_mode * (1 - 1e-12)
    assert found.strong_convexity <= found.strong_convexity_at_mode * (1 + 1e-12)


def test_clients_report_a_few_plain_numbers_and_the_server_combines_them():
    model, data = FAMILIES["logistic"]
    found = measure.constants(model, data, batch_size=5, temperature=0.5)
    prepared = prepare.prepare(model, data)
    places = measure.probes(prepared)
    reports = {}
    for name in data.names:  # each client on its own, its report as text
        own = measure.client_constants(
            model, data.client(name), prepared.mode, places, num_rows=data.num_rows, batch_size=5
        )
        reports[name] = json.loads(json.dumps(own))
    again = measure.combine(reports, dim=3, initial_distance=found.initial_distance, temperature=0.5)
    for field in ("smoothness", "strong_convexity", "heterogeneity", "gradient_noise", "min_weight"):
        assert getattr(again, field) == pytest.approx(getattr(found, field), rel=1e-9)
    assert again.provenance == found.provenance
    assert again.min_weight == pytest.approx(6 / 66)
    assert all(len(report) <= 9 for report in reports.values())


def test_of_clients_the_worst_counts():
    """Where two clients report other numbers, whichever of them is named first."""
    one = {
        "rows": 30, "smoothness": 9.0, "strong_convexity": 2.0, "smoothness_at_mode": 8.0,
        "strong_convexity_at_mode": 3.0, "gradient_norm": 1.0, "gradient_noise": 5.0, "one_mode": True,
        "provenance": {"smoothness": "exact", "strong_convexity": "bound", "gradient_noise": "estimated"},
    }  # fmt: skip
    other = {
        "rows": 10, "smoothness": 7.0, "strong_convexity": 1.0, "smoothness_at_mode": 6.0,
        "strong_convexity_at_mode": 2.0, "gradient_norm": 4.0, "gradient_noise": 0.5, "one_mode": False,
        "provenance": {"smoothness": "bound", "strong_convexity": "exact", "gradient_noise": "exact"},
    }  # fmt: skip
    for reports in ({"a": one, "b": other}, {"a": other, "b": one}):
        found = measure.combine(reports, dim=2, initial_distance=1.0)
        assert (found.smoothness, found.strong_convexity, found.min_weight) == (9.0, 1.0, 0.25)
        assert (found.smoothness_at_mode, found.strong_convexity_at_mode) == (8.0, 2.0)
        assert (found.heterogeneity, found.gradient_noise) == (4.0, 5.0)
        origins = ("bound", "bound", "estimated", "estimated", "estimated")
        assert tuple(found.provenance.values()) == origins
    surely = measure.combine({"a": one, "b": {**other, "one_mode": True}}, dim=2, initial_distance=1.0)
    assert surely.provenance["heterogeneity"] == surely.provenance["initial_distance"] == "exact"


def test_measured_constants_serve_the_bounds():
    model, data = FAMILIES["logistic"]
    found = measure.constants(model, data)
    bound = theory.fixed_step_bound(found, step_size=1e-4, local_steps=5, num_rounds=100)
    assert bound.heterogeneity > 0
    plain = theory.Constants(
        *(
            getattr(found, name)
            for name in ("smoothness", "strong_convexity", "dim", "num_clients", "min_weight")
        ),
        heterogeneity=found.heterogeneity,
        initial_distance=found.initial_distance,
    )
    assert bound.total == theory.fixed_step_bound(plain, step_size=1e-4, local_steps=5, num_rounds=100).total


def test_a_client_that_is_not_strongly_convex_is_named():
    problem = helpers.federation(sizes=(1, 3, 5, 10))
    with pytest.raises(DataError, match=r"client 'site-000' \(1 rows\)") as caught:
        measure.constants(helpers.linear_model(), problem.data)
    assert "prior" in caught.value.hint


def test_an_energy_that_is_not_convex_has_no_constants():
    with pytest.raises(DataError, match=r"strongly convex; the smallest curvature of client .* is -"):
        measure.constants(fald.models.linear_regression(2), poisson_data())


def test_bad_batch_sizes_are_named():
    model, data = FAMILIES["logistic"]
    with pytest.raises(ConfigError, match="batch-size must be a whole number ≥ 1; got 0"):
        measure.constants(model, data, batch_size=0)


def test_the_bounds_do_not_import_the_measurement():
    code = "import sys, fald.theory; print('fald.theory.measured' in sys.modules)"
    # the package itself imports everything; an empty one in its place imports only what is asked for
    empty = "import types, sys; m = types.ModuleType('fald'); m.__path__ = [sys.argv[1]]; "
    code = f"{empty}sys.modules['fald'] = m; {code}"
    assert helpers.run_python(code, str(fald.__path__[0])).strip() == "False"
