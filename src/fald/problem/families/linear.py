"""Linear regression with normal residuals."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from fald.core.checks import check_positive
from fald.core.types import float_dtype
from fald.problem.data import FederatedData
from fald.problem.families.base import Features, feature_names, linear_predictor, normal_logprior, outcomes
from fald.problem.model import Model


def linear_regression(
    features: Features,
    *,
    noise_scale: float | None = None,
    prior_scale: float = 2.5,
    noise_prior_scale: float = 5.0,
) -> Model:
    """y = a + xᵀb + s·ε with ε standard normal.

    Parameters
    ----------
    features
        Number of features, or their names.
    noise_scale
        s when it is known; ``None`` makes it a parameter with a half-normal prior of scale
        ``noise_prior_scale``, sampled as log s and reported as ``noise_scale``.
    prior_scale
        Scale of the normal priors of a and b_j.
    noise_prior_scale
        Scale of the half-normal prior of s.

    Examples
    --------
    >>> linear_regression(2, noise_scale=1.0).dim, linear_regression(2).dim
    (3, 4)
    """
    scale = check_positive("prior-scale", prior_scale)
    known = None if noise_scale is None else check_positive("noise-scale", noise_scale)
    half_scale = check_positive("noise-prior-scale", noise_prior_scale)
    names, prior = feature_names(features), normal_logprior(scale)
    position = {"intercept": jnp.array(0.0), "coefficient": jnp.zeros(len(names))}
    if known is None:
        position["log_noise_scale"] = jnp.array(0.0)

    def log_scale(p):
        return jnp.log(known) if known is not None else p["log_noise_scale"]

    def without_scale(p):
        return {k: v for k, v in p.items() if k != "log_noise_scale"}

    def logprior_fn(p):
        value = prior(without_scale(p))
        if known is None:
            s = p["log_noise_scale"]
            value = value - 0.5 * jnp.exp(2 * s) / half_scale**2 + s
        return value

    def loglikelihood_fn(p, example):
        x, y = example
        s = log_scale(p)
        return -0.5 * ((y - linear_predictor(p, x)) * jnp.exp(-s)) ** 2 - s - 0.5 * jnp.log(2 * jnp.pi)

    def constrain_fn(p):
        return without_scale(p) | ({} if known is not None else {"noise_scale": jnp.exp(log_scale(p))})

    def check_fn(data: FederatedData) -> None:
        outcomes(data, names)

    def simulate_fn(key, p, x):
        return linear_predictor(p, x) + jnp.exp(log_scale(p)) * jax.random.normal(key, dtype=float_dtype())

    return Model(
        logprior_fn=logprior_fn,
        loglikelihood_fn=loglikelihood_fn,
        initial_position=position,
        predict_fn=linear_predictor,
        simulate_fn=simulate_fn,
        constrain_fn=constrain_fn,
        dims={"coefficient": ["feature"]},
        coords={"feature": names},
        check_fn=check_fn,
        name="linear",
    )
