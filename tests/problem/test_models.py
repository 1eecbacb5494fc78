"""Built-in models against SciPy, the prior counted once, models of one's own, and bad input."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import scipy.special
import scipy.stats
from jax.flatten_util import ravel_pytree

import fald
from fald import models
from fald.calculus.gradients import client_rows, energy_fn
from fald.calculus.sums import prior_derivatives, prior_gradients, prior_values
from fald.core.errors import ConfigError, DataError
from fald.fewround.exchange import InProcessExchange

RNG = np.random.default_rng(5)
X = RNG.normal(size=(30, 3))
COVARIANCE = np.array([[2.0, 0.5, 0.0], [0.5, 1.0, -0.3], [0.0, -0.3, 0.7]])


def normal_logprior(position, scale):
    return sum(scipy.stats.norm.logpdf(v, 0, scale).sum() for v in jax.tree.leaves(position))


def linear(p, x):
    return p["intercept"] + x @ p["coefficient"]


def softmax_loglik(p, x, y):
    logits = p["intercept"] + x @ p["coefficient"].T
    return (logits - scipy.special.logsumexp(logits, axis=1, keepdims=True))[np.arange(len(y)), y.astype(int)]


def mlp_loglik(p, x, y):
    hidden = np.tanh(x @ p["weight_0"].T + p["bias_0"])
    logits = hidden @ p["weight_1"].T + p["bias_1"]
    return (logits - scipy.special.logsumexp(logits, axis=1, keepdims=True))[np.arange(len(y)), y.astype(int)]


def unknown_noise_logprior(p):
    s = np.exp(p["log_noise_scale"])
    rest = {k: v for k, v in p.items() if k != "log_noise_scale"}
    return normal_logprior(rest, 1.5) + scipy.stats.halfnorm.logpdf(s, scale=4.0) + np.log(s)


def mlp_logprior(p):
    weights = [normal_logprior(p[f"weight_{i}"], 2.0 / np.sqrt(n)) for i, n in enumerate((3, 5))]
    return sum(weights) + normal_logprior([p["bias_0"], p["bias_1"]], 2.0)


class Case(NamedTuple):
    model: fald.Model
    rows: object
    loglik: object  # (position, rows) -> a value per row
    logprior: object  # position -> a value, up to a constant


def _cases():
    binary, classes = RNG.integers(0, 2, 30).astype(float), RNG.integers(0, 4, 30).astype(float)
    counts, real = RNG.poisson(2.0, 30).astype(float), RNG.normal(size=30)
    return {
        "logistic": Case(
            models.logistic_regression(3, prior_scale=1.5),
            (X, binary),
            lambda p, r: scipy.stats.bernoulli.logpmf(r[1], scipy.special.expit(linear(p, r[0]))),
            lambda p: normal_logprior(p, 1.5),
        ),
        "poisson": Case(
            models.poisson_regression(3),
            (X, counts),
            lambda p, r: scipy.stats.poisson.logpmf(r[1], np.exp(linear(p, r[0]))),
            lambda p: normal_logprior(p, 2.5),
        ),
        "linear": Case(
            models.linear_regression(3, noise_scale=0.7),
            (X, real),
            lambda p, r: scipy.stats.norm.logpdf(r[1], linear(p, r[0]), 0.7),
            lambda p: normal_logprior(p, 2.5),
        ),
        "linear-unknown": Case(
            models.linear_regression(3, prior_scale=1.5, noise_prior_scale=4.0),
            (X, real),
            lambda p, r: scipy.stats.norm.logpdf(r[1], linear(p, r[0]), np.exp(p["log_noise_scale"])),
            unknown_noise_logprior,
        ),
        "softmax": Case(
            models.softmax_regression(3, 4),
            (X, classes),
            lambda p, r: softmax_loglik(p, *r),
            lambda p: normal_logprior(p, 2.5),
        ),
        "mlp": Case(
            models.mlp_classifier(3, 4, hidden=(5,), prior_scale=2.0),
            (X, classes),
            lambda p, r: mlp_loglik(p, *r),
            mlp_logprior,
        ),
        "gaussian": Case(
            models.gaussian_location(COVARIANCE, prior_scale=2.0),
            X,
            lambda p, r: scipy.stats.multivariate_normal.logpdf(r, p, COVARIANCE),
            lambda p: normal_logprior(p, 2.0),
        ),
        "gaussian-flat": Case(
            models.gaussian_location(COVARIANCE),
            X,
            lambda p, r: scipy.stats.multivariate_normal.logpdf(r, p, COVARIANCE),
            lambda p: 0.0,
        ),
    }


CASES = _cases()
ENERGIES = {name: jax.jit(jax.value_and_grad(energy_fn(case.model, 30))) for name, case in CASES.items()}


def random_position(model, seed):
    rng = np.random.default_rng(seed)
    return jax.tree.map(lambda leaf: 0.7 * rng.normal(size=np.shape(leaf)), model.initial_position)


def split(rows, num_clients):
    """Unequal clients, one of them with a single row."""
    cuts = {1: [0, 30], 5: [0, 1, 4, 10, 18, 30]}[num_clients]
    return fald.FederatedData.from_arrays(
        {f"c{i}": jax.tree.map(lambda a, i=i: a[cuts[i] : cuts[i + 1]], rows) for i in range(num_clients)}
    )


@pytest.mark.parametrize("name", CASES)
def test_log_densities_equal_scipy(name):
    model, rows, loglik, logprior = CASES[name]
    one, two = random_position(model, 1), random_position(model, 2)
    found = jax.vmap(model.loglikelihood_fn, (None, 0))(jax.tree.map(jnp.asarray, one), rows)
    np.testing.assert_allclose(found, loglik(one, rows), rtol=2e-4, atol=2e-5)
    at_once = model.loglikelihoods(jax.tree.map(jnp.asarray, one), rows)
    np.testing.assert_allclose(at_once, found, rtol=2e-4, atol=2e-5)
    difference = model.logprior_fn(one) - model.logprior_fn(two)
    np.testing.assert_allclose(difference, logprior(one) - logprior(two), rtol=2e-4, atol=1e-5)


@pytest.mark.parametrize("name", [*CASES, "linear-scaled"])
def test_priors_in_numpy_are_those_that_are_compiled(name):
    scales = {"outcome": (30.0, 4.0), "features": {"x0": (5.0, 2.0), "x1": (-1.0, 0.5), "x2": (0.0, 3.0)}}
    model = models.linear_regression(3, scales=scales) if name == "linear-scaled" else CASES[name].model
    own = replace(model, logprior_fn=lambda p: model.logprior_fn(p))
    assert not hasattr(own.logprior_fn, "derivatives_fn")
    positions = 3 * np.random.default_rng(2).normal(size=(5, model.dim))
    for look in (prior_derivatives, prior_gradients, lambda *given: [prior_values(*given)]):
        for found, wanted in zip(look(model, positions), look(own, positions), strict=True):
            np.testing.assert_allclose(found, wanted, rtol=1e-12, atol=1e-12)


def most_below_chords(model, rows):
    """How far log prior and log likelihoods of rows lie below their chords at most, at random places."""
    worst = -np.inf
    for seed in range(20):
        rng = np.random.default_rng(seed)
        a, b = (jnp.asarray(2 * rng.normal(size=model.dim)) for _ in range(2))
        part = rng.random()
        for function in (
            model.flat_logprior,
            lambda theta: jax.vmap(model.flat_loglikelihood, (None, 0))(theta, rows),
        ):
            chord = part * function(a) + (1 - part) * function(b)
            below = chord - function(part * a + (1 - part) * b)
            worst = max(worst, float(np.max(below / (1 + np.abs(chord)))))
    return worst


@pytest.mark.parametrize("name", CASES)
def test_models_that_are_declared_concave_are(name):
    model, rows, *_ = CASES[name]
    assert model.concave is (name not in {"linear-unknown", "mlp"})
    with jax.enable_x64(True):
        # the twin: of the others one is seen not to be
        assert (most_below_chords(model, rows) < 1e-9) is model.concave


def test_another_prior_or_likelihood_is_not_declared_concave():
    model = models.logistic_regression(2)
    assert not replace(model, logprior_fn=lambda p: -jnp.log1p(p["intercept"] ** 2)).concave
    assert not replace(model, loglikelihood_fn=lambda p, row: -(p["intercept"] ** 4)).concave
    assert replace(model, logprior_fn=models.concave(lambda p: -jnp.abs(p["intercept"]))).concave


def test_a_likelihood_put_in_place_of_one_that_takes_rows_gets_one_example():
    model = fald.models.softmax_regression(2, 3)

    def steeper(position, example):
        assert np.shape(example[0]) == (2,)
        return 2 * model.loglikelihood_fn(position, example)

    rows = (np.array([[1.0, 2.0], [0.5, -1.0], [0.0, 3.0]]), np.array([0, 2, 1]))
    position = jax.tree.map(jnp.asarray, random_position(model, 1))
    found = replace(model, loglikelihood_fn=steeper).loglikelihoods(position, rows)
    np.testing.assert_allclose(found, 2 * model.loglikelihoods(position, rows), rtol=1e-5)


@pytest.mark.parametrize("num_clients", [1, 5])
@pytest.mark.parametrize("name", CASES)
def test_client_energies_add_up_to_the_joint_posterior_with_the_prior_once(name, num_clients):
    model, rows, loglik, logprior = CASES[name]
    data = split(rows, num_clients)

    def total(position):
        flat = ravel_pytree(jax.tree.map(jnp.float32, position))[0]
        values = [ENERGIES[name](flat, client_rows(data, c, 30))[0] for c in range(num_clients)]
        return float(np.dot(data.weights, values))

    one, two = random_position(model, 1), random_position(model, 2)
    found = total(one) - total(two)
    prior = logprior(one) - logprior(two)
    expected = loglik(two, rows).sum() - loglik(one, rows).sum() - prior
    tolerance = 1e-5 * (abs(total(one)) + abs(total(two)))
    assert abs(found - expected) < tolerance
    if prior != 0:
        counted_per_client = expected - (num_clients - 1) * prior
        assert num_clients == 1 or abs(found - counted_per_client) > 5 * tolerance


@pytest.mark.parametrize("name", CASES)
def test_gradients_are_finite(name):
    model, rows, *_ = CASES[name]
    data = split(rows, 1)
    far = 5.0 * jnp.ones(model.dim)
    for theta in (model.flat_initial_position, far, -far):
        assert np.isfinite(ENERGIES[name](theta, client_rows(data, 0, 30))[1]).all()


def test_energy_of_a_run_is_that_of_its_start():
    model, rows, loglik, logprior = CASES["gaussian"]
    start = np.array([1.0, -2.0, 0.5])
    tree = fald.sample(
        0,
        model,
        split(rows, 5),
        num_rounds=1,
        local_steps=1,
        step_size=1e-3,
        num_chains=1,
        initial_position=start,
        progress=False,
    )
    constant = logprior(np.zeros(3))
    expected = -(logprior(start) - constant + loglik(start, rows).sum())
    assert tree["sample_stats"]["energy"].item() == pytest.approx(expected, rel=1e-5)


def test_a_mean_with_its_count_stands_for_the_rows():
    model = models.gaussian_location(COVARIANCE)
    whole = fald.FederatedData.from_arrays({"a": X[:20], "b": X[20:]})
    means = fald.FederatedData.from_arrays(
        {"a": (X[:20].mean(0)[None], np.array([20])), "b": (X[20:].mean(0)[None], np.array([10]))}
    )

    def loglik(data, theta):
        rows = jax.vmap(model.loglikelihood_fn, (None, 0))
        return sum(float(rows(theta, data.client(n)).sum()) for n in data.names)

    one, two = jnp.array([0.3, -1.0, 2.0]), jnp.zeros(3)
    found = loglik(means, one) - loglik(means, two)
    assert found == pytest.approx(loglik(whole, one) - loglik(whole, two), rel=1e-4)


def test_mlp_shapes_and_predictions():
    model = models.mlp_classifier(7, 3, hidden=(6, 4))
    shapes = {k: v.shape for k, v in model.initial_position.items()}
    assert shapes["weight_0"] == (6, 7)
    assert shapes["weight_2"] == (3, 4)
    assert shapes["bias_1"] == (4,)
    assert model.dim == 6 * 8 + 4 * 7 + 3 * 5
    probabilities = model.predict_fn(model.initial_position, jnp.ones(7))
    assert probabilities.shape == (3,)
    assert float(probabilities.sum()) == pytest.approx(1.0, rel=1e-6)


def test_integer_rows_are_used_as_they_are():
    model = models.softmax_regression(3, 2)
    pixels = RNG.integers(0, 255, (6, 3)).astype(np.uint8)
    labels = np.array([0, 1, 0, 1, 1, 0], np.uint8)
    position = jax.tree.map(jnp.asarray, random_position(model, 0))
    loglik = jax.vmap(model.loglikelihood_fn, (None, 0))
    np.testing.assert_allclose(
        loglik(position, (pixels, labels)),
        loglik(position, (pixels.astype(float), labels.astype(float))),
        rtol=1e-6,
    )


def sample(model, data, **changes):
    settings = {"num_rounds": 4, "local_steps": 2, "step_size": 1e-3, "num_chains": 2, "progress": False}
    return fald.sample(0, model, data, **{**settings, **changes})


@pytest.mark.parametrize(
    ("model", "y", "words"),
    [
        (models.logistic_regression(3), np.ones(30), "all outcomes are 1.0; with one class only"),
        (models.logistic_regression(3), np.arange(30) % 3, "must be 0 or 1; got [0, 1, 2]"),
        (models.logistic_regression(3), np.linspace(0, 1, 30), "must be 0 or 1"),
        (models.poisson_regression(3), np.arange(30) - 1.0, "counts 0, 1, 2, …; got -1.0"),
        (models.poisson_regression(3), np.full(30, 0.5), "counts 0, 1, 2, …; got 0.5"),
        (models.softmax_regression(3, 3), np.arange(30) % 4, "whole numbers 0 to 2; got 0 to 3"),
        (models.softmax_regression(3, 3), np.arange(30) % 3 - 1, "got -1 to 1"),
        (models.softmax_regression(3, 3), np.full(30, 2), "all labels are 2"),
        (models.mlp_classifier(3, 3), np.full(30, 0.5), "whole numbers 0 to 2"),
        (
            models.logistic_regression(2),
            np.arange(30) % 2,
            "has 2 features ['x0', 'x1']; the data's X has shape",
        ),
        (models.softmax_regression(4, 3), np.arange(30) % 3, "has 4 features"),
        (models.linear_regression(3), np.ones((30, 1)), "y has shape (30, 1)"),
    ],
)
def test_data_that_do_not_fit_the_model(model, y, words):
    data = fald.FederatedData.from_arrays({"a": (X[:20], y[:20]), "b": (X[20:], y[20:])})
    with pytest.raises(DataError) as caught:
        sample(model, data)
    assert words in caught.value.message
    assert caught.value.exit_code == 3


def test_one_class_at_one_site_is_normal():
    y = np.array([1.0] * 20 + [0.0] * 10)
    data = fald.FederatedData.from_arrays({"a": (X[:20], y[:20]), "b": (X[20:], y[20:])})
    sample(CASES["logistic"].model, data)


def test_rows_without_outcome():
    with pytest.raises(DataError, match="needs examples"):
        sample(models.logistic_regression(3), fald.FederatedData.from_arrays({"a": X}))


@pytest.mark.parametrize(
    ("build", "words"),
    [
        (lambda: models.logistic_regression(["a", "a"]), "distinct"),
        (lambda: models.logistic_regression(2, prior_scale=0.0), "prior-scale must be a number > 0"),
        (lambda: models.linear_regression(2, noise_scale=-1.0), "noise-scale"),
        (lambda: models.linear_regression(2, noise_prior_scale=np.inf), "noise-prior-scale"),
        (lambda: models.softmax_regression(2, 1), "num-classes must be a whole number ≥ 2"),
        (lambda: models.mlp_classifier(2, 2, hidden=(0,)), "at least one unit"),
        (lambda: models.gaussian_location([[1.0, 2.0], [2.0, 1.0]]), "positive definite"),
        (lambda: models.gaussian_location([[1.0, 0.0]]), "symmetric square"),
    ],
)
def test_bad_settings(build, words):
    with pytest.raises(ConfigError, match=words):
        build()


class Scales(NamedTuple):
    inner: jax.Array
    outer: tuple[jax.Array, ...]


@jax.tree_util.register_dataclass
@dataclass
class Ends:
    left: jax.Array
    right: jax.Array


def square_model(position, **changes):
    """Standard normal in every number of a position of any shape; rows are ignored."""
    return fald.Model(
        logprior_fn=lambda p: -0.5 * sum(jnp.sum(leaf**2) for leaf in jax.tree.leaves(p)),
        loglikelihood_fn=lambda p, x: 0.0 * jnp.sum(x),
        initial_position=position,
        **changes,
    )


NESTED = {
    "mean": (jnp.array(0.0), [jnp.zeros(2), jnp.zeros((2, 3))]),
    "scales": Scales(jnp.array(1.0), (jnp.array(2.0),)),
    "ends": Ends(jnp.array(0.0), jnp.zeros(4)),
}


NESTED_SHAPES = {
    "ends.left": (),
    "ends.right": (4,),
    "mean.0": (),
    "mean.1.0": (2,),
    "mean.1.1": (2, 3),
    "scales.inner": (),
    "scales.outer.0": (),
}


@pytest.mark.parametrize(
    ("position", "shapes"),
    [
        (NESTED, NESTED_SHAPES),
        (Scales(jnp.array(1.0), (jnp.array(2.0),)), {"inner": (), "outer.0": ()}),
        (jnp.zeros(3), {"position": (3,)}),
        ([jnp.zeros(3), jnp.array(1.0)], {"position.0": (3,), "position.1": ()}),
        ({"a/b": jnp.array(0.0)}, {"a.b": ()}),
    ],
    ids=["nested", "named tuple", "array", "list", "slash"],
)
def test_names_of_positions(position, shapes):
    model = square_model(position)
    assert {k: np.shape(v) for k, v in model.report(position).items()} == shapes
    assert {n.split("[")[0] for n in model.parameter_names} == set(shapes)
    assert len(model.parameter_names) == model.dim == sum(int(np.prod(s)) for s in shapes.values())


def test_any_pytree_runs():
    model = square_model(NESTED)
    tree = sample(model, fald.FederatedData.from_arrays({"a": np.ones(3), "b": np.ones(1)}))
    assert {str(k): v.shape[2:] for k, v in tree["posterior"].data_vars.items()} == NESTED_SHAPES
    assert len(fald.diagnostics.ess(tree)) == model.dim
    given = jax.tree.map(lambda leaf: leaf + 1.0, NESTED)
    moved = sample(
        model, fald.FederatedData.from_arrays({"a": np.ones(3), "b": np.ones(1)}), initial_position=given
    )
    assert moved["posterior"]["scales.outer.0"].values[0, 0] == pytest.approx(3.0, abs=0.5)


def test_labels_reach_results_and_names():
    model = square_model(
        {"effect": jnp.zeros(2)}, dims={"effect": ["drug"]}, coords={"drug": ["aspirin", "placebo"]}
    )
    assert model.parameter_names == ["effect[aspirin]", "effect[placebo]"]
    tree = sample(model, fald.FederatedData.from_arrays({"a": np.ones(3)}))
    assert tree["posterior"]["effect"].sel(drug="placebo").dims == ("chain", "draw")


@pytest.mark.parametrize(
    ("position", "changes", "words"),
    [
        ({}, {}, "no parameters"),
        ({"a": jnp.array(1)}, {}, "finite floating numbers"),
        ({"a": jnp.array(jnp.nan)}, {}, "finite floating numbers"),
        ({"draw": jnp.array(0.0)}, {}, "cannot be called 'draw'"),
        ({"a": jnp.zeros(2), "b": jnp.zeros(2)}, {"dims": {"a": ["b"]}}, "cannot be called 'b'"),
        ({"a": jnp.zeros(2)}, {"dims": {"a": ["x", "y"]}}, "'a' has shape"),
        (
            {"a": jnp.zeros(2)},
            {"dims": {"a": ["x"]}, "coords": {"x": [1]}},
            "has 2 entries, but coords gives it 1",
        ),
    ],
)
def test_models_that_cannot_work_are_refused_before_they_run(position, changes, words):
    with pytest.raises(DataError, match=words):
        square_model(position, **changes)


@pytest.mark.parametrize(
    ("loglikelihood_fn", "words"),
    [
        (lambda p, x: x * p["a"], "must return one number; it returns an array of shape \\(2,\\)"),
        (lambda p, x: x["height"] * p["a"], "cannot be evaluated on a row"),
        (lambda p, x: p["b"], "cannot be evaluated on a row"),
    ],
)
def test_likelihoods_that_do_not_fit_the_rows(loglikelihood_fn, words):
    model = fald.Model(lambda p: -(p["a"] ** 2), loglikelihood_fn, {"a": jnp.array(0.0)})
    with pytest.raises(DataError, match=words) as caught:
        sample(model, fald.FederatedData.from_arrays({"a": np.ones((3, 2))}))
    assert caught.value.hint


def test_scales_found_from_sums_are_those_of_the_columns():
    rng = np.random.default_rng(0)
    x, y = rng.normal([3.0, -40.0], [0.1, 7.0], (50, 2)), rng.normal(130, 15, 50)
    data = fald.FederatedData.from_arrays({"a": (x[:20], y[:20]), "b": (x[20:], y[20:])})
    for options in ({}, {"noise_scale": 4.0}, {"outcome_scaling": (100.0, 10.0)}):
        model = models.linear_regression(["u", "v"], **options)
        at = np.concatenate([np.zeros((1, model.dim)), np.eye(model.dim)])
        sums = InProcessExchange(model, data).ask({"states": at})
        found = model.scales_fn(sums["state_values"], sums["state_gradients"], 50)
        c, k = options.get("outcome_scaling", (0.0, 1.0))
        np.testing.assert_allclose(found["outcome"], ((y.mean() - c) / k, y.std() / k), rtol=1e-3)
        for name, column in zip("uv", x.T):
            np.testing.assert_allclose(found["features"][name], (column.mean(), column.std()), rtol=1e-3)


def test_priors_relative_to_scales_are_those_of_standardised_columns():
    scales = {"outcome": (130.0, 20.0), "features": {"u": (3.0, 0.5), "v": (-40.0, 7.0)}}
    model, plain = models.linear_regression(["u", "v"], scales=scales), models.linear_regression(["u", "v"])
    rng = np.random.default_rng(1)
    gaps = []
    for _ in range(5):
        a, b, s = rng.normal(), rng.normal(size=2), rng.normal()
        raw = {"coefficient": 20 * b / np.array([0.5, 7.0]), "log_noise_scale": s + np.log(20)}
        raw["intercept"] = 130 + 20 * a - raw["coefficient"] @ [3.0, -40.0]
        standard = {"intercept": a, "coefficient": b, "log_noise_scale": s}
        gaps.append(float(model.logprior_fn(raw)) - float(plain.logprior_fn(standard)))
    np.testing.assert_allclose(gaps, gaps[0], atol=1e-3)
    assert model.initial_position["intercept"] == 130
    for wrong in ({"u": (3.0, 0.5)}, {"u": (3.0, 0.0), "v": (0.0, 1.0)}, {**scales["features"], "w": (0, 1)}):
        with pytest.raises(ConfigError, match="scales"):
            models.linear_regression(["u", "v"], scales={**scales, "features": wrong})


def test_a_scaled_outcome_is_reported_and_predicted_in_its_own_units():
    plain, scaled = (models.linear_regression(1, outcome_scaling=pair) for pair in ((0, 1), (130.0, 20.0)))
    p = {"intercept": 0.5, "coefficient": np.array([-0.4]), "log_noise_scale": np.log(0.7)}
    raw = {k: float(np.ravel(v)[0]) for k, v in scaled.constrain_fn(p).items()}
    assert raw == pytest.approx({"intercept": 140.0, "coefficient": -8.0, "noise_scale": 14.0})
    x = np.array([2.0])
    assert float(scaled.predict_fn(p, x)) == pytest.approx(140.0 - 16.0)
    example, units = (x, 131.0), (x, (131.0 - 130) / 20)
    gap = float(scaled.loglikelihood_fn(p, example)) - float(plain.loglikelihood_fn(p, units))
    assert gap == pytest.approx(-np.log(20), rel=1e-5)


def test_a_position_with_something_else_in_it_is_refused_by_name():
    with pytest.raises(DataError, match=r"layer\.activation is a builtin_function") as refused:
        fald.Model(
            lambda p: 0.0, lambda p, x: 0.0, initial_position={"layer": {"w": jnp.ones(2), "activation": len}}
        )
    assert "eqx.partition" in refused.value.hint
