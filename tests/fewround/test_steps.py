"""Local steps of the corrected sampler at one site, beside the same steps written out."""

from __future__ import annotations

import numpy as np
import pytest

import fald
from fald.calculus.sums import gradients, hessians, make_site, prior_gradients
from fald.fewround.steps import leverage, local_steps, normals

RNG = np.random.default_rng(0)
MODEL = fald.models.poisson_regression(["x"])
ROWS = (RNG.normal(size=(30, 1)), RNG.poisson(2.0, 30).astype(float))
SITE = make_site(MODEL, ROWS, "north")
DIM, CHAINS = MODEL.dim, 3
STATES = RNG.normal(size=(2, CHAINS, DIM))


def asked(correlation, share):
    """A request at a place where the quadratics of this site are not those of its rows."""
    factor = np.array([[0.2, 0.0], [0.05, 0.1]])
    mean = np.array([0.1, 0.6])
    own = leverage(hessians(SITE, mean[None])[2][0], factor)
    return {
        "step_states": STATES, "step_mean": mean, "step_factor": factor,
        "step_leverage": np.asarray(own / share), "step_centre": mean + 0.3,
        "step_hessian": -np.array([[90.0, 10.0], [10.0, 60.0]]), "step_anchors": mean[None] - 0.2,
        "step_gradient": np.array([[1.0, -2.0]]), "step_count": np.asarray(3),
        "step_size": np.asarray(0.4), "step_correlation": np.asarray(correlation),
        "step_seed": np.asarray(7),
    }  # fmt: skip


def by_hand(request, share):
    """BAOAB in z = L⁻¹(θ − m), driven by all sites' quadratic and what it lacks of this site's gradient."""
    mean, factor = request["step_mean"], request["step_factor"]
    anchor, rho, size = request["step_anchors"][0], float(request["step_correlation"]), 0.4
    at_anchor = gradients(SITE, anchor[None])[1][0]
    at_centre = hessians(SITE, request["step_centre"][None])[2][0]

    def force(z):
        theta = mean + z @ factor.T
        apart = theta - anchor
        lacking = gradients(SITE, theta)[1] - at_anchor - apart @ at_centre
        quadratic = request["step_gradient"] + apart @ request["step_hessian"]
        return (prior_gradients(MODEL, theta)[1] + quadratic + lacking / share) @ factor

    z, v = request["step_states"]
    keep = np.exp(-2.0 * size)
    shared, own = (normals(7, name, (3, *z.shape)) for name in (None, "north"))
    for k in range(3):
        v = v + size / 2 * force(z)
        z = z + size / 2 * v
        v = keep * v + np.sqrt(1 - keep**2) * (rho * shared[k] + np.sqrt((1 - rho**2) / share) * own[k])
        z = z + size / 2 * v
        v = v + size / 2 * force(z)
    return share * np.stack([z, v])


@pytest.mark.parametrize("correlation", [0.0, 0.6, 1.0])
@pytest.mark.parametrize("share", [0.25, 1.0])
def test_steps_of_a_site_are_those_written_out(correlation, share):
    request = asked(correlation, share)
    np.testing.assert_allclose(local_steps(SITE, request), by_hand(request, share), rtol=1e-6, atol=1e-8)


def test_twin_steps_without_what_the_quadratic_lacks_are_others():
    request = asked(0.6, 0.25)
    wrong = by_hand(request, 0.275)
    assert np.abs(wrong / 0.275 * 0.25 - local_steps(SITE, request)).max() > 1e-3


def test_every_site_has_noise_of_its_own_and_all_share_one():
    drawn = {name: normals(7, name, (1000,)) for name in (None, "north", "south")}
    assert np.array_equal(drawn["north"], normals(7, "north", (1000,)))
    assert not np.array_equal(drawn["north"], normals(8, "north", (1000,)))
    together = np.corrcoef(list(drawn.values()))
    assert np.abs(together - np.eye(3)).max() < 4.5 / np.sqrt(1000)
