"""Convolutions with channels last: the same numbers, and none of another kind left, wherever they stand."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import fald
from fald.calculus.convolutions import channels_last, convolves
from fald.lab import networks

X = jax.random.normal(jax.random.key(0), (3, 8, 8, 2))
KERNEL = jax.random.normal(jax.random.key(1), (3, 3, 2, 4))


def convolved(x, kernel, **settings):
    settings = {"window_strides": (1, 1), "padding": "SAME", **settings}
    return jax.lax.conv_general_dilated(x, kernel, dimension_numbers=("NHWC", "HWIO", "NHWC"), **settings)


def labels(function, *args):
    """Dimension numbers of all convolutions in the lowered program."""
    text = jax.jit(function).lower(*args).as_text()
    return [line.split("dim_numbers = ")[1].split(",  ")[0].split(", window")[0]
            for line in text.splitlines() if "stablehlo.convolution" in line]  # fmt: skip


CASES = {
    "kernel": lambda x, k: jax.grad(lambda k: jnp.sum(convolved(x, k) ** 2))(k),
    "input": lambda x, k: jax.grad(lambda x: jnp.sum(convolved(x, k, window_strides=(2, 2)) ** 2))(x),
    "loop": lambda x, k: jax.lax.fori_loop(
        0, 3, lambda _, k: k - 0.01 * jax.grad(lambda k: jnp.sum(convolved(x, k) ** 2))(k), k
    ),
    "branches": lambda x, k: jax.lax.cond(
        x[0, 0, 0, 0] > 0,
        lambda: jax.grad(lambda k: jnp.sum(convolved(x, k)))(k),
        lambda: jax.grad(lambda k: jnp.sum(convolved(x, k) ** 2))(k),
    ),
    "checkpoint": lambda x, k: jax.grad(jax.checkpoint(lambda k: jnp.sum(jax.nn.relu(convolved(x, k)) ** 2)))(
        k
    ),
    "channels first": lambda x, k: jax.lax.conv(
        x.transpose(0, 3, 1, 2), k.transpose(3, 2, 0, 1), (1, 1), "SAME"
    ),
    "groups": lambda x, k: jax.vmap(lambda k: jax.grad(lambda k: jnp.sum(convolved(x, k) ** 2))(k))(
        jnp.stack([k, 2 * k])
    ),
}


@pytest.mark.parametrize("name", CASES)
def test_the_same_numbers_and_no_other_layout_left(name):
    function = CASES[name]
    expected, found = function(X, KERNEL), channels_last(function)(X, KERNEL)
    np.testing.assert_allclose(found, expected, rtol=2e-4, atol=2e-4 * float(jnp.abs(expected).max()))
    usual = "[b, 0, 1, f]x[0, 1, i, o]->[b, 0, 1, f]"
    assert set(labels(channels_last(function), X, KERNEL)) == {usual}
    assert name == "groups" or set(labels(function, X, KERNEL)) != {usual}  # there was something to rewrite


@pytest.mark.slow
def test_knows_which_models_convolve():
    images = np.zeros((4, 784), np.uint8), np.zeros(4, np.uint8)
    assert convolves(networks.cnn(), images)
    assert convolves(networks.resnet(width=2), images)
    assert not convolves(fald.models.mlp_classifier(784, 10), images)
