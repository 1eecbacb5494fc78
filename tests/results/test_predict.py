"""Predictions against direct NumPy computations on the draws."""

from __future__ import annotations

import importlib
import sys
from dataclasses import replace
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pandas as pd
import pytest
import scipy.stats

import fald
from fald import models
from fald.core.errors import ConfigError, DataError
from fald.results.predict import flat_positions

RNG = np.random.default_rng(8)
NAMES = ["age", "dose"]
X = RNG.normal(size=(60, 2))
MEAN = 0.5 + X @ np.array([1.0, -0.7])
NEW = np.array([[0.0, 0.0], [1.0, -1.0], [-0.5, 2.0]])

MODELS = {
    "logistic": (models.logistic_regression(NAMES), (RNG.random(60) < 1 / (1 + np.exp(-MEAN))).astype(float)),
    "poisson": (models.poisson_regression(NAMES), RNG.poisson(np.exp(MEAN)).astype(float)),
    "linear": (models.linear_regression(NAMES), MEAN + 0.5 * RNG.normal(size=60)),
    "softmax": (models.softmax_regression(NAMES, 3), RNG.integers(0, 3, 60).astype(float)),
}
STEPS = {"logistic": 5e-3, "poisson": 5e-4, "linear": 5e-4, "softmax": 5e-3}


@pytest.fixture(scope="module")
def trees():
    return {
        name: fald.sample(
            1,
            model,
            fald.FederatedData.from_arrays({"a": (X[:40], y[:40]), "b": (X[40:], y[40:])}),
            num_rounds=700,
            num_warmup=200,
            local_steps=2,
            step_size=STEPS[name],
            num_chains=4,
            progress=False,
        )
        for name, (model, y) in MODELS.items()
    }


def linear_predictor(tree, x):
    p = tree["posterior"]
    intercept, coefficient = p["intercept"].values.reshape(-1), p["coefficient"].values.reshape(-1, 2)
    return intercept[:, None] + coefficient @ x.T


@pytest.mark.parametrize("name", ["logistic", "poisson", "linear"])
def test_mean_and_interval_equal_numpy(trees, name):
    inverse_link = {"logistic": lambda v: 1 / (1 + np.exp(-v)), "poisson": np.exp, "linear": lambda v: v}[
        name
    ]
    expected = inverse_link(linear_predictor(trees[name], NEW).astype(float))
    table = fald.predict(MODELS[name][0], trees[name], NEW, level=0.9, most_draws=2000)
    assert table.attrs["level"] == 0.9
    assert list(table.columns)[:3] == ["mean", "5%", "95%"]
    assert len(table) == 3
    np.testing.assert_allclose(table["mean"], expected.mean(0), rtol=1e-4, atol=1e-5)
    np.testing.assert_allclose(table["5%"], np.quantile(expected, 0.05, axis=0), rtol=1e-3, atol=1e-4)
    np.testing.assert_allclose(table["95%"], np.quantile(expected, 0.95, axis=0), rtol=1e-3, atol=1e-4)


def test_classes_get_a_block_of_columns_each(trees):
    table = fald.predict(MODELS["softmax"][0], trees["softmax"], NEW)
    assert list(table.columns) == [f"class {k} {c}" for k in range(3) for c in ("mean", "2.5%", "97.5%")]
    np.testing.assert_allclose(table[[f"class {k} mean" for k in range(3)]].sum(axis=1), 1, rtol=1e-5)
    p = trees["softmax"]["posterior"]
    logits = p["intercept"].values[..., None, :] + NEW @ np.swapaxes(p["coefficient"].values, -1, -2)
    shares = np.exp(logits) / np.exp(logits).sum(-1, keepdims=True)
    every_second = fald.predict(MODELS["softmax"][0], trees["softmax"], NEW, most_draws=2000)
    np.testing.assert_allclose(every_second["class 1 mean"], shares[..., 1].mean((0, 1)), rtol=1e-4)


def test_intervals_of_new_outcomes_are_those_of_the_law(trees):
    tree = trees["linear"]
    mean = linear_predictor(tree, NEW).astype(float)
    scale = tree["posterior"]["noise_scale"].values.reshape(-1, 1)
    table = fald.predict(MODELS["linear"][0], tree, NEW, most_draws=2000)

    def coverage(low, high):
        law = scipy.stats.norm(mean, scale)
        return (law.cdf(np.asarray(high)) - law.cdf(np.asarray(low))).mean(0)

    # the ends are quantiles of 2,000 simulated outcomes
    tolerance = 4 * np.sqrt(0.95 * 0.05 / 2000)
    covered = coverage(table["outcome 2.5%"], table["outcome 97.5%"])
    assert (np.abs(covered - 0.95) < tolerance).all()
    assert (np.abs(coverage(table["2.5%"], table["97.5%"]) - 0.95) > tolerance).all()
    narrow = 0.8 * (table["outcome 97.5%"] - table["outcome 2.5%"]) / 2
    middle = (table["outcome 97.5%"] + table["outcome 2.5%"]) / 2
    assert (coverage(middle - narrow, middle + narrow) < 0.95 - tolerance).all()


def test_outcomes_of_counts_are_counts(trees):
    model, tree = MODELS["poisson"][0], trees["poisson"]
    table = fald.predict(model, tree, NEW)
    ends = table[["outcome 2.5%", "outcome 97.5%"]].to_numpy()
    assert (ends[:, 0] <= table["mean"]).all()
    assert (ends[:, 1] >= table["mean"]).all()
    assert (ends >= 0).all()
    assert fald.predict(model, tree, NEW, seed=0).equals(table)
    # ends are whole numbers, so that a few seeds may agree
    assert not all(fald.predict(model, tree, NEW, seed=s).equals(table) for s in range(1, 12))


def test_kinds_of_features_that_mean_the_same(trees):
    model, tree = MODELS["logistic"][0], trees["logistic"]
    table = fald.predict(model, tree, NEW)
    for same in (NEW.astype(np.float32), jnp.asarray(NEW), NEW.tolist()):
        assert np.allclose(fald.predict(model, tree, same), table, rtol=1e-5)
    frame = pd.DataFrame({"dose": NEW[:, 1], "unused": "text", "age": NEW[:, 0]})
    assert fald.predict(model, tree, frame).equals(table)
    assert fald.predict(model, tree, NEW[:1]).equals(table[:1])
    whole = fald.predict(model, tree, np.array([[1, -1]]))
    assert np.allclose(whole, fald.predict(model, tree, NEW[1:2]))


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("wrong", [np.ones((3, 3)), np.ones((3, 1)), np.ones(2), np.ones((3, 0))])
def test_wrong_width(trees, name, wrong):
    with pytest.raises(DataError, match=r"must have 2 columns \(age, dose\)") as caught:
        fald.predict(MODELS[name][0], trees[name], wrong)
    assert "without the target" in caught.value.hint


@pytest.mark.parametrize(
    ("features", "words"),
    [
        (np.array([[1.0, np.nan]]), "missing or infinite value in row 1"),
        (np.array([["a", "b"]]), "array of numbers"),
        (pd.DataFrame({"age": [1.0], "doze": [1.0]}), "no column 'dose'"),
    ],
)
def test_features_that_cannot_be_used(trees, features, words):
    with pytest.raises(DataError, match=words):
        fald.predict(MODELS["logistic"][0], trees["logistic"], features)


@pytest.mark.parametrize("most", [0, -1, 2.5, None])
def test_some_draws_must_be_used(trees, most):
    with pytest.raises(ConfigError, match="most-draws must be a whole number ≥ 1"):
        fald.predict(MODELS["logistic"][0], trees["logistic"], NEW, most_draws=most)


def test_bad_level(trees):
    with pytest.raises(ConfigError, match="level"):
        fald.predict(MODELS["logistic"][0], trees["logistic"], NEW, level=95)


@pytest.mark.parametrize(
    ("model", "words"),
    [
        (models.linear_regression(NAMES), "no variable 'noise_scale'"),
        (models.logistic_regression(3), "'coefficient' has shape \\(2,\\) there and \\(3,\\) here"),
        (models.logistic_regression(["dose", "age"]), "other labels of 'feature', or in another order"),
        (models.mlp_classifier(2, 2), "no variable 'bias_0'"),
    ],
)
def test_results_of_another_model(trees, model, words):
    with pytest.raises(DataError, match=words) as caught:
        fald.predict(model, trees["logistic"], NEW)
    assert "made with model 'logistic'" in caught.value.message


def test_known_noise_is_another_model(trees):
    with pytest.raises(DataError, match="parameters"):
        fald.predict(models.linear_regression(NAMES, noise_scale=1.0), trees["linear"], NEW)


def test_a_model_without_predictions(trees):
    model = MODELS["logistic"][0]
    silent = fald.Model(model.logprior_fn, model.loglikelihood_fn, model.initial_position)
    with pytest.raises(DataError, match="has no predict_fn"):
        fald.predict(silent, trees["logistic"], NEW)


def test_flat_positions_are_the_sampler_s_own(trees):
    for name in ("softmax", "linear"):
        model, tree = MODELS[name][0], trees[name]
        flat = flat_positions(model, tree)
        assert flat.shape == (2000, model.dim)
        last = model.report(model.unravel(jnp.asarray(flat[-1])))
        for variable, value in last.items():
            np.testing.assert_allclose(value, tree["posterior"][variable].values[-1, -1], rtol=1e-6)


def test_custom_model_predicts_from_rows_of_any_shape():
    model = fald.Model(
        logprior_fn=lambda p: -0.5 * jnp.sum(p["w"] ** 2),
        loglikelihood_fn=lambda p, row: -0.5 * (row[1] - jnp.vdot(row[0], p["w"])) ** 2,
        initial_position={"w": jnp.zeros((2, 3))},
        predict_fn=lambda p, x: jnp.vdot(x, p["w"]),
    )
    images = RNG.normal(size=(20, 2, 3))
    data = fald.FederatedData.from_arrays({"a": (images, images.sum((1, 2)))})
    tree = fald.sample(0, model, data, num_rounds=50, local_steps=2, step_size=1e-3, progress=False)
    table = fald.predict(model, tree, images[:4])
    draws = tree["posterior"]["w"].values.reshape(-1, 6)
    np.testing.assert_allclose(table["mean"], (draws @ images[:4].reshape(4, 6).T).mean(0), rtol=1e-4)
    with pytest.raises(DataError, match=r"cannot predict from rows of shape \(5,\)"):
        fald.predict(model, tree, np.ones((4, 5)))


def test_float64_runs_predict_in_float64():
    model, y = MODELS["logistic"]
    with jax.enable_x64(True):
        data = fald.FederatedData.from_arrays({"a": (X, y)})
        tree = fald.sample(0, model, data, num_rounds=20, local_steps=1, step_size=1e-2, progress=False)
        assert tree["posterior"]["intercept"].dtype == np.float64
        table = fald.predict(model, tree, NEW)
    expected = 1 / (1 + np.exp(-linear_predictor(tree, NEW)))
    np.testing.assert_allclose(table["mean"], expected.mean(0), rtol=1e-12)


@pytest.mark.parametrize("most", [4, 8, 10, 399, 400, 5000])
def test_predictions_from_fewer_draws_come_from_all_chains(monkeypatch, most):
    """Chains that disagree, one after the other in memory: each gives its share."""
    model = MODELS["linear"][0]
    chains = np.repeat([0.0, 10.0, 20.0, 30.0], 100)
    flat = np.zeros((400, model.dim))
    flat[:] = chains[:, None]
    module = sys.modules["fald.results.predict"]
    monkeypatch.setattr(module, "require_posterior", lambda tree: None)
    monkeypatch.setattr(module, "flat_positions", lambda model, tree: flat)

    def predicted(position, row):
        return jax.tree.leaves(position)[0].ravel()[0]

    table = fald.predict(replace(model, predict_fn=predicted, simulate_fn=None), None, NEW, most_draws=most)
    # each chain gives a quarter, up to one draw
    assert abs(float(table["mean"].iloc[0]) - 15.0) <= 30.0 / min(most, 400) + 1e-3
    assert float(table["2.5%"].iloc[0]) < 3.0
    assert float(table["97.5%"].iloc[0]) > 27.0


@pytest.mark.parametrize("most", [4, 5, 10, 399, 400, 5000])
def test_probabilities_from_fewer_draws_come_from_all_chains(monkeypatch, most):
    module = importlib.import_module("fald.results.probabilities")
    chains = np.repeat(np.arange(4.0)[:, None], 100, axis=1)
    monkeypatch.setattr(module, "positions", lambda tree, model: chains)
    used = []

    def predicted(model, position, x, batch_size):
        used.append(int(position))
        return np.full((len(x), 2), 0.5)

    monkeypatch.setattr(module, "predicted", predicted)
    monkeypatch.setattr(module, "classes_of", lambda model, x, batch_size: 2)
    found = fald.predictive(SimpleNamespace(children={}), None, NEW, most_draws=most)
    counts = np.bincount(used, minlength=4)
    assert found.draws == len(used) == min(most, 400)
    assert counts.max() - counts.min() <= 1


def test_simulated_outcomes_come_from_all_chains(monkeypatch):
    """As many draws as are simulated, of chains that disagree."""
    module = importlib.import_module("fald.results.predictive")
    model = replace(
        MODELS["linear"][0], predict_fn=lambda position, row: jax.tree.leaves(position)[0].ravel()[0]
    )
    flat = np.repeat([0.0, 1.0, 2.0, 3.0], 2500)[:, None] * np.ones(model.dim)
    monkeypatch.setattr(module, "flat_positions", lambda model, tree: flat)
    _, chance, _, _ = module._outcomes(model, None, fald.FederatedData.from_arrays({"a": (X, MEAN)}), 0)
    np.testing.assert_allclose(chance.mean(axis=1), 1.5, atol=0.01)
