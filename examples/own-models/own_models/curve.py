"""An Equinox network: a smooth curve through numbers, with normal residuals."""

import equinox as eqx
import jax
import jax.numpy as jnp

import fald


def curve(features, *, width=4):
    """Make the model of a study with a number as its target."""
    network = eqx.nn.MLP(len(features), "scalar", width, depth=1, activation=jnp.tanh, key=jax.random.key(0))
    weights, rest = eqx.partition(network, eqx.is_inexact_array)

    def expected(position, x):
        return eqx.combine(position["network"], rest)(jnp.asarray(x, float))

    def loglikelihood(position, example):
        x, y = example
        off = (y - expected(position, x)) * jnp.exp(-position["log_noise"])
        return -0.5 * off**2 - position["log_noise"]

    return fald.Model(
        logprior_fn=lambda position: -0.5 * sum(jnp.sum(leaf**2) for leaf in jax.tree.leaves(position)),
        loglikelihood_fn=loglikelihood,
        initial_position={"network": weights, "log_noise": jnp.array(0.0)},
        predict_fn=expected,
        prior="weights, biases and the log residual sd Normal(0, 1)",
        name="curve",
    )
