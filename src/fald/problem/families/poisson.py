"""Poisson regression of counts."""

from __future__ import annotations

import math

import jax
import jax.numpy as jnp
import numpy as np
from scipy.special import gammaln

from fald.problem.families.base import Features, linear_predictor, regression
from fald.problem.model import Model, bounded, predicted


def _values(eta, y, _, totals):
    chosen = totals.linear(y, eta) - totals(gammaln(y + 1.0))
    return chosen - totals(np.exp(eta, out=eta))


def _slopes(eta, y, _):
    return [y - np.exp(eta)]


def _bends(eta, y, _):
    return [[-np.exp(eta)]]


def poisson_regression(features: Features, *, prior_scale: float = 2.5) -> Model:
    """Counts y ∈ {0, 1, 2, …} with rate exp(a + xᵀb), a, b_j ~ N(0, prior_scale²).

    Examples
    --------
    >>> poisson_regression(2).dim
    3
    """

    @bounded(curvature=math.inf, rows=math.inf)
    @predicted(_values, _slopes, _bends)
    def loglikelihood_fn(position, example):
        x, y = example
        log_rate = linear_predictor(position, x)
        return y * log_rate - jnp.exp(log_rate) - jax.scipy.special.gammaln(y + 1.0)

    def check_outcome(y, whole):
        bad = y[(y < 0) | (y != np.floor(y))]
        return f"outcomes must be counts 0, 1, 2, …; got {bad[0]}" if len(bad) else ""

    return regression(
        features,
        prior_scale,
        name="poisson",
        loglikelihood_fn=loglikelihood_fn,
        mean_fn=jnp.exp,
        check_outcome=check_outcome,
        simulate_fn=lambda key, p, x: jax.random.poisson(key, jnp.exp(linear_predictor(p, x))),
        ratios={"coefficient": "rate ratio"},
    )
