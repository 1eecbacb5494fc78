"""Sums of families that know a row through linear predictors, beside the same sums compiled."""

from __future__ import annotations

import itertools

import numpy as np
import pytest

import fald
from fald.calculus import predicted, sums
from fald.calculus.sums import make_site
from fald.problem.model import Model

FAMILIES = {
    "logistic": lambda d: fald.models.logistic_regression(d),
    "poisson": lambda d: fald.models.poisson_regression(d),
    "linear": lambda d: fald.models.linear_regression(d, outcome_scaling=(0.5, 2.0)),
    "linear with a known scale": lambda d: fald.models.linear_regression(d, noise_scale=0.7),
    "softmax": lambda d: fald.models.softmax_regression(d, 3),
}


def outcomes(name: str, rng: np.random.Generator, count: int) -> np.ndarray:
    """Outcomes that a family accepts."""
    return {"logistic": 2, "softmax": 3}.get(name, 5) * rng.random(count) // 1.0


def case(name: str, count: int = 300, features: int = 4) -> tuple[Model, tuple, np.ndarray]:
    """A model, rows, and positions."""
    rng = np.random.default_rng(3)
    model = FAMILIES[name](features)
    rows = rng.normal(size=(count, features)), outcomes(name, rng, count)
    return model, rows, 0.4 * rng.normal(size=(7, model.dim))


@pytest.mark.parametrize("name", FAMILIES)
def test_the_declared_sums_are_those_of_the_compiled_likelihood(name: str) -> None:
    model, rows, positions = case(name)
    site = make_site(model, rows)
    value, grad, second = sums._over_parts(site, positions, 2)
    found = predicted.hessians(model, [rows], positions)
    for own, compiled in zip(found, (value, grad, second)):
        np.testing.assert_allclose(own[0], compiled, rtol=1e-9, atol=1e-9)
    for own, compiled in zip(predicted.gradients(model, [rows], positions), (value, grad)):
        np.testing.assert_allclose(own[0], compiled, rtol=1e-9, atol=1e-9)
    for own, compiled in zip(predicted.mean_derivatives(model, [rows], positions), (grad, second)):
        np.testing.assert_allclose(own[0], compiled.mean(axis=0), rtol=1e-9, atol=1e-9)
    np.testing.assert_allclose(predicted.values(model, [rows], positions)[0], value, rtol=1e-9)


@pytest.mark.parametrize("name", ["linear", "linear with a known scale"])
def test_few_rows_stand_for_many_where_squares_count(name: str) -> None:
    model, (x, y), positions = case(name, 40_000)
    rows = x + 50.0, y
    site = make_site(model, rows)
    assert len(site.table[0]) == 4 + 1 + 1 + 1  # features, intercept, outcome, and what stands for the rest
    assert site.table[2].sum() == 40_000
    for look in (predicted.gradients, predicted.hessians, predicted.mean_derivatives):
        for short, whole in zip(look(model, [site.table], positions), look(model, [rows], positions)):
            np.testing.assert_allclose(short, whole, rtol=1e-9, atol=1e-7 * np.abs(whole).max())
    twin = *site.table[:2], np.ones(7)  # rows that are not counted are missed
    assert not np.allclose(*(predicted.values(model, [t], positions) for t in (twin, rows)), rtol=1e-9)


@pytest.mark.parametrize("features", [4, 40])
@pytest.mark.parametrize("name", FAMILIES)
def test_sites_that_share_a_tile_answer_as_they_would_alone(name: str, features: int) -> None:
    model, (x, y), positions = case(name, features=features)
    edges = [0, 1, 3, 90, 91, 299, 300]
    tables = [(x[a:b], y[a:b]) for a, b in itertools.pairwise(edges)]
    for look in (predicted.values, predicted.gradients, predicted.hessians, predicted.mean_derivatives):
        together, alone = look(model, tables, positions), [look(model, [one], positions) for one in tables]
        if look is predicted.values:
            together, alone = (together,), [(one,) for one in alone]
        for whole, *parts in zip(together, *alone):
            np.testing.assert_allclose(whole, np.concatenate(parts), rtol=1e-10, atol=1e-10)
    own = np.resize(positions, (len(tables), model.dim))
    sites = [make_site(model, one) for one in tables]
    for i, place in enumerate(own):  # each at a position of its own
        for each, alone in zip(sums.hessians_each(sites, own), sums.hessians(sites[i], place[None])):
            np.testing.assert_allclose(each[i], alone[0], rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("offset", [0.0, 2000.0])
@pytest.mark.parametrize("name", ["logistic", "softmax"])
def test_values_in_float32_are_far_more_precise_than_weights_need(name: str, offset: float) -> None:
    """A uniform error cancels in the weights; what is left must be below the grid of 2⁻¹² nats."""
    rng = np.random.default_rng(5)
    count, features = 100_000, 3
    model = FAMILIES[name](features)
    x = rng.normal(size=(count, features)) + offset
    places = predicted._layout(model).predictors
    centre = 0.5 * rng.normal(size=model.dim)
    positions = np.concatenate([centre[None], centre + rng.normal(size=(24, model.dim)) / np.sqrt(count)])
    for place in places:  # moderate predictors, wherever x is, as rows and their posterior have
        positions[:, place[-1]] -= offset * positions[:, place[:-1]].sum(axis=1)
    chances = [x @ positions[0, place[:-1]] + positions[0, place[-1]] for place in places]
    chances = np.stack(chances if len(places) > 1 else [0 * chances[0], *chances])
    rows = x, np.argmax(chances + rng.gumbel(size=chances.shape), axis=0).astype(float)
    exact, slopes, _ = (part[0] for part in predicted.hessians(model, [rows], positions))
    assert np.std(predicted.values(model, [rows], positions)[0] - exact) < 2.0**-13
    # gradients in nats per sd: those of an intercept at average features are up to √n
    spread = np.sqrt(-1 / np.linalg.eigvalsh(predicted.hessians(model, [rows], positions[:1])[2][0, 0])[0])
    off = predicted.gradients(model, [rows], positions)[1][0] - slopes
    assert np.max(np.abs(off)) * spread < 2.0**-12
    if name == "logistic" and offset:  # the twin: parameters themselves in float32 are not good enough
        rounded = positions.astype(np.float32).astype(float)
        assert np.std(predicted.hessians(model, [rows], rounded)[0][0] - exact) > 2.0**-12


def test_what_is_added_up_depends_neither_on_cores_nor_on_tiles(monkeypatch: pytest.MonkeyPatch) -> None:
    model, rows, _ = case("logistic", 5000)
    positions = 0.4 * np.random.default_rng(1).normal(size=(1500, model.dim))
    alone = predicted.values(model, [rows], positions), predicted.gradients(model, [rows], positions)[1]
    monkeypatch.setattr(predicted, "_cores", lambda: 1)
    again = predicted.values(model, [rows], positions), predicted.gradients(model, [rows], positions)[1]
    for one, other in zip(alone, again):
        np.testing.assert_array_equal(one, other)
    monkeypatch.setattr(predicted, "_BYTES", 1 << 15)
    np.testing.assert_allclose(predicted.values(model, [rows], positions), alone[0], atol=1e-8)


def test_a_function_in_the_place_of_a_declared_one_is_compiled() -> None:
    model, rows, positions = case("logistic")
    other = Model(
        model.logprior_fn, lambda p, row: 2 * model.loglikelihood_fn(p, row), model.initial_position
    )
    assert other.predictor is None
    twice = sums.log_likelihoods(make_site(other, rows), positions)
    np.testing.assert_allclose(twice, 2 * sums.log_likelihoods(make_site(model, rows), positions), rtol=1e-6)


def test_no_density_is_minus_infinity_and_says_nothing() -> None:
    model, rows, _ = case("poisson")
    far = np.full((2, model.dim), 1e4)
    assert np.all(np.isneginf(predicted.values(model, [rows], far)))
