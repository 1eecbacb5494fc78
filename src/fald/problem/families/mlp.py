"""A small neural classifier."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

import jax
import jax.numpy as jnp
import numpy as np

from fald.core.checks import check_count, check_positive
from fald.core.errors import ConfigError
from fald.core.types import float_dtype
from fald.problem.families.base import Features, categorical_loglikelihood, check_classes, feature_names
from fald.problem.model import Model


def mlp_classifier(
    features: Features, num_classes: int, *, hidden: Sequence[int] = (100,), prior_scale: float = 1.0
) -> Model:
    """A multilayer perceptron with tanh units.

    Weights ~ N(0, prior_scale²/fan-in), biases ~ N(0, prior_scale²).
    The posterior of a neural network has many modes; a chain explores the ones near its start, and
    R-hat of the weights means little. Judge it by its predictions.

    Examples
    --------
    >>> mlp_classifier(784, 10, hidden=(100,)).dim
    79510
    """
    names, classes = feature_names(features), check_count("num-classes", num_classes, 2)
    scale = check_positive("prior-scale", prior_scale)
    widths = [len(names), *[int(h) for h in hidden], classes]
    if min(widths) < 1:
        raise ConfigError(f"hidden layers must have at least one unit; got {list(hidden)}")
    keys = jax.random.split(jax.random.key(0), len(widths) - 1)
    position = {}
    for layer, (fan_in, fan_out) in enumerate(pairwise(widths)):
        position[f"weight_{layer}"] = jax.random.normal(keys[layer], (fan_out, fan_in)) / np.sqrt(fan_in)
        position[f"bias_{layer}"] = jnp.zeros(fan_out)

    def logprior_fn(p):
        value = jnp.array(0.0, float_dtype())
        for layer, fan_in in enumerate(widths[:-1]):
            value = value - 0.5 * fan_in * jnp.sum(p[f"weight_{layer}"] ** 2) / scale**2
            value = value - 0.5 * jnp.sum(p[f"bias_{layer}"] ** 2) / scale**2
        return value

    def logits_fn(p, x):
        for layer in range(len(widths) - 1):
            x = p[f"weight_{layer}"] @ x + p[f"bias_{layer}"]
            if layer < len(widths) - 2:
                x = jnp.tanh(x)
        return x

    return Model(
        logprior_fn=logprior_fn,
        loglikelihood_fn=categorical_loglikelihood(logits_fn),
        initial_position=position,
        predict_fn=lambda p, x: jax.nn.softmax(logits_fn(p, jnp.asarray(x, float_dtype()))),
        check_fn=check_classes(classes, names),
        prior=f"weights Normal(0, {scale:g}/√inputs of the layer), biases Normal(0, {scale:g})",
        name="mlp",
    )
