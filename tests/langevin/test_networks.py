"""Networks with convolutions: chains that do not change each other, and a bounded look at the step size."""

from __future__ import annotations

import warnings

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import fald
from fald.calculus import gradients
from fald.lab import networks

PIXELS = 36


def small_network():
    """A convolution of 6 × 6 images, and two classes."""
    start = {
        "kernel": 0.3 * jax.random.normal(jax.random.key(0), (3, 3, 1, 2)),
        "out": 0.1 * jnp.ones((2, 2)),
    }

    def loglikelihood(p, row):
        x = jnp.asarray(row[0], jnp.float32).reshape(1, 6, 6, 1) / 255
        x = jax.lax.conv_general_dilated(
            x, p["kernel"], (1, 1), "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC")
        )
        return jax.nn.log_softmax(jnp.mean(jax.nn.relu(x), (0, 1, 2)) @ p["out"])[row[1]]

    return fald.Model(
        lambda p: -0.5 * sum(jnp.sum(a**2) for a in jax.tree.leaves(p)), loglikelihood, initial_position=start
    )


def small_data(sizes=(30, 30, 20)):
    rng = np.random.default_rng(0)
    return fald.FederatedData.from_arrays(
        {
            str(i): (rng.integers(0, 256, (n, PIXELS), dtype=np.uint8), rng.integers(0, 2, n, dtype=np.uint8))
            for i, n in enumerate(sizes)
        }
    )


def draws(**changes):
    settings = {"num_rounds": 4, "local_steps": 3, "step_size": 1e-4, "batch_size": 8, "num_chains": 1}
    model, data = changes.pop("model", None) or small_network(), changes.pop("data", None) or small_data()
    return fald.sample(3, model, data, progress=False, **{**settings, **changes})


@pytest.mark.slow
@pytest.mark.parametrize(
    "participation",
    [fald.full(), fald.with_replacement(2)],
    ids=["full", "drawn"],
)
def test_a_chain_is_the_same_alone_and_beside_others(participation):
    one, three = (draws(num_chains=n, participation=participation) for n in (1, 3))
    np.testing.assert_allclose(
        three["posterior"]["kernel"].values[:1], one["posterior"]["kernel"].values, rtol=1e-5, atol=1e-6
    )
    assert len(np.unique(three["posterior"]["out"].values[:, -1, 0, 0])) == 3
    assert "channels last" in one.attrs["layout"]


def test_a_step_that_is_too_large_is_said_before_the_first_round():
    with pytest.warns(UserWarning, match=r"step-size 0\.5 times the curvature .* try step-size"):
        found = draws(step_size=0.5, num_rounds=1)
    assert found.attrs["step_times_curvature"] > 1
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert draws().attrs["step_times_curvature"] < 1
        assert "step_times_curvature" not in draws(step_size=0.5, num_rounds=1, step_check=False).attrs


def test_a_look_at_curvatures_takes_bounded_work():
    rng = np.random.default_rng(0)
    rows = rng.integers(0, 256, (20_000, 784), dtype=np.uint8), rng.integers(0, 10, 20_000, dtype=np.uint8)
    data = fald.FederatedData(rows, np.arange(21) * 1000, tuple(f"{i:02d}" for i in range(20)))
    every = list(range(20))
    # a regression is cheap: all is looked at; a network is not
    assert gradients.affordable(fald.models.softmax_regression(PIXELS, 2), small_data((5, 5)), [0, 1], 12)[
        0
    ] == [
        0,
        1,
    ]
    clients, taken = gradients.affordable(networks.cnn(), data, every, 12)
    cost = 12 * len(clients) * taken * gradients._operations(networks.cnn(), data) * 2.5
    assert cost <= 1.5e10
    assert 16 <= taken < 1000
