"""Answers on a grid: unbiased, exact in sums, the same for the same request, and no finer than said."""

import jax.numpy as jnp
import numpy as np
import pytest

import fald
from fald.core.reveals import KINDS
from fald.fewround import proposal
from fald.fewround.rounding import Grid, _units, rounded
from fald.fewround.site import ARRAYS

MODEL = fald.models.logistic_regression(2)


def request(sd=1.0, seed=0):
    current = proposal.gaussian(np.zeros(3), np.diag([1.0, sd**2, 1.0]))
    parts = dict(zip(("weights", "means", "factors"), current))
    return {f"proposal_{k}": v for k, v in parts.items()} | {"proposal_seed": np.asarray(seed)}


def test_values_lie_on_the_grid_and_lose_nothing_on_average():
    values = np.full(40_000, 0.3 * 2**-12)
    found = rounded(MODEL, "a", request(), {"draw_values": values})["draw_values"]
    assert set(np.unique(found * 2**12)) == {0.0, 1.0}
    error = np.sqrt(0.3 * 0.7 / values.size)
    assert abs(found.mean() * 2**12 - 0.3) < 4 * error
    # the twin: without the dither all would be rounded down
    assert abs(np.floor(values * 2**12).mean() - 0.3) > 4 * error


def test_the_same_request_gets_the_same_answer_and_another_site_another():
    answer = {"draw_values": np.random.default_rng(0).normal(size=200)}
    first, again = (rounded(MODEL, "a", request(), answer)["draw_values"] for _ in range(2))
    np.testing.assert_array_equal(first, again)
    assert not np.array_equal(first, rounded(MODEL, "b", request(), answer)["draw_values"])
    assert not np.array_equal(first, rounded(MODEL, "a", request(seed=1), answer)["draw_values"])


def test_derivatives_are_rounded_relative_to_the_scale_of_their_parameter():
    rng = np.random.default_rng(1)
    answer = {"state_gradients": rng.normal(size=(500, 3)), "anchor_hessians": rng.normal(size=(50, 3, 3))}
    found = rounded(MODEL, "a", request(sd=2.0**-8), answer)
    apart = np.abs(found["state_gradients"] - answer["state_gradients"]).max(axis=0)
    np.testing.assert_allclose(np.log2(apart), [-12, -4, -12], atol=0.2)
    curved = np.abs(found["anchor_hessians"] - answer["anchor_hessians"]).max(axis=0)
    np.testing.assert_allclose(np.log2(curved[0]), [-12, -4, -12], atol=0.5)


def test_the_curvature_of_an_effect_in_millions_is_not_lost():
    model = fald.models.linear_regression(1, noise_scale=1e7, prior_scale=4e7)
    asked = {"local_start": np.zeros(2)}
    answer = {"local_precision": np.full((2, 2), 1e-13)}
    found = rounded(model, "a", asked, answer)["local_precision"]
    np.testing.assert_allclose(found, 1e-13, rtol=1e-3)
    # the twin: without a prior that says so, it is
    narrow = fald.models.linear_regression(1, noise_scale=1e7)
    assert not rounded(narrow, "a", asked, answer)["local_precision"].any()


def test_sums_of_rounded_answers_do_not_depend_on_their_order():
    rng = np.random.default_rng(2)
    answers = [
        rounded(MODEL, f"site {i}", request(), {"state_gradients": 1e5 * rng.normal(size=(20, 3))})[
            "state_gradients"
        ]
        for i in range(20)
    ]
    np.testing.assert_array_equal(sum(answers), sum(answers[::-1]))


def test_what_is_no_number_stays_none():
    values = np.array([np.nan, np.inf, -np.inf, 1.0])
    found = rounded(MODEL, "a", request(), {"draw_values": values})["draw_values"]
    np.testing.assert_array_equal(np.isfinite(found), np.isfinite(values))


@pytest.mark.parametrize("name", sorted(ARRAYS))
def test_every_array_of_an_answer_has_a_grid_but_counts(name):
    kind = ARRAYS[name][0]
    assert (KINDS[kind].grid is None) == (kind == "count")


def test_without_a_proposal_sds_are_allowed_for_as_far_as_the_prior_and_the_usual_go():
    sds = 2.0 ** np.array([20.5, -15.5, 0.5])
    model = fald.Model(lambda theta: -0.5 * jnp.sum((theta / sds) ** 2), lambda theta, row: 0.0, jnp.zeros(3))
    assert _units(model, {}, -1).tolist() == [-21, -10, -10]
    assert _units(model, {}, 0).tolist() == [0, 0, 0]
    assert _units(model, {}, 1).tolist() == [-10, -16, -10]


def test_the_dither_follows_from_the_names_of_what_is_asked_and_has_128_bits(recwarn):
    model = fald.models.logistic_regression(2)
    places = np.ones((4, model.dim))
    asked = [Grid(model, {name: places}) for name in ("points", "states")]
    numbers = [grid._number(site) for grid in asked for site in ("north", "south")]
    assert len(set(numbers)) == 4
    assert 2**100 < max(numbers) < 2**128
    odd = np.array([np.inf, -np.inf, np.nan, 1.0])
    found = asked[0].rounded("north", {"point_values": odd})["point_values"]
    np.testing.assert_array_equal(found[:3], odd[:3])
    assert not [w for w in recwarn if issubclass(w.category, RuntimeWarning)]
