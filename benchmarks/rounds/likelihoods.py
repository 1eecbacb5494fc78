"""Models that the package does not bring: each is a likelihood of one row, with proper priors.

Positions are unconstrained: positive parameters are kept as logarithms, whose priors are stated for them.
Coefficients and intercepts are a priori independent normals of scale ``prior_scale`` around zero.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.nn import log_sigmoid, softplus
from jax.scipy.special import gammaln

from fald import Model

FAR = 1e3  # a logit beyond which every probability is 0 or 1


def regression(
    features: Sequence[str],
    row_fn: Callable[[Any, Any, Any], Any],
    name: str,
    *,
    prior_scale: float = 2.5,
    further: Any = None,
    further_prior_fn: Callable[[Any], Any] = lambda position: 0.0,
) -> Model:
    """A regression with η = a + xᵀb and the likelihood ``row_fn(position, η, rest of the row)``.

    ``further`` names more parameters with their starting values; ``further_prior_fn`` is their log prior.
    """

    def logprior_fn(position):
        squares = position["intercept"] ** 2 + jnp.sum(position["coefficient"] ** 2)
        return -0.5 * squares / prior_scale**2 + further_prior_fn(position)

    def loglikelihood_fn(position, example):
        x, *rest = example
        return row_fn(position, position["intercept"] + x @ position["coefficient"], rest)

    start = {"intercept": np.zeros(()), "coefficient": np.zeros(len(features)), **(further or {})}
    return Model(
        logprior_fn,
        loglikelihood_fn,
        start,
        dims={"coefficient": ["feature"]},
        coords={"feature": list(features)},
        name=name,
    )


def normal(value: Any, scale: float, center: float = 0.0) -> Any:
    """Log density of independent normals, up to a constant."""
    return -0.5 * jnp.sum((value - center) ** 2) / scale**2


def binomial(features: Sequence[str], **options: Any) -> Model:
    """Rows (x, successes, trials) with log odds η."""

    def row_fn(position, eta, rest):
        successes, trials = rest
        return successes * eta - trials * softplus(eta)

    return regression(features, row_fn, "binomial", **options)


def poisson_offset(features: Sequence[str], **options: Any) -> Model:
    """Rows (x, count, log exposure) with rate exposure·exp(η)."""

    def row_fn(position, eta, rest):
        count, offset = rest
        return count * (eta + offset) - jnp.exp(eta + offset) - gammaln(count + 1.0)

    return regression(features, row_fn, "poisson-offset", **options)


def negative_binomial(features: Sequence[str], **options: Any) -> Model:
    """Rows (x, count) with mean exp(η) and variance m + m²/r; log r ~ N(0, 2²)."""

    def row_fn(position, eta, rest):
        (count,) = rest
        log_r = position["log_concentration"]
        r = jnp.exp(log_r)
        both = jnp.logaddexp(eta, log_r)
        binomial_part = gammaln(count + r) - gammaln(r) - gammaln(count + 1.0)
        return binomial_part + r * (log_r - both) + count * (eta - both)

    return regression(
        features,
        row_fn,
        "negative-binomial",
        further={"log_concentration": np.zeros(())},
        further_prior_fn=lambda p: normal(p["log_concentration"], 2.0),
        **options,
    )


def zero_inflated_poisson(features: Sequence[str], **options: Any) -> Model:
    """Rows (x, count): zero with probability 1/(1+exp(−w)), else Poisson of rate exp(η); w ~ N(0, 1.5²)."""

    def row_fn(position, eta, rest):
        (count,) = rest
        w = position["logit_zero"]
        counted = log_sigmoid(-w) + count * eta - jnp.exp(eta) - gammaln(count + 1.0)
        return jnp.where(count == 0, jnp.logaddexp(log_sigmoid(w), counted), counted)

    return regression(
        features,
        row_fn,
        "zero-inflated-poisson",
        further={"logit_zero": np.zeros(())},
        further_prior_fn=lambda p: normal(p["logit_zero"], 1.5),
        **options,
    )


def gamma_regression(features: Sequence[str], **options: Any) -> Model:
    """Rows (x, y > 0) with mean exp(η) and shape k; log k ~ N(0, 2²)."""

    def row_fn(position, eta, rest):
        (y,) = rest
        log_k = position["log_shape"]
        k = jnp.exp(log_k)
        return k * (log_k - eta) - gammaln(k) + (k - 1) * jnp.log(y) - k * y * jnp.exp(-eta)

    return regression(
        features,
        row_fn,
        "gamma",
        further={"log_shape": np.zeros(())},
        further_prior_fn=lambda p: normal(p["log_shape"], 2.0),
        **options,
    )


def weibull(features: Sequence[str], **options: Any) -> Model:
    """Rows (x, log time, event): log time = η + G/k with a Gumbel minimum G; log k ~ N(0, 1).

    An event of 0 means that the time is censored.
    """

    def row_fn(position, eta, rest):
        log_time, event = rest
        z = jnp.exp(position["log_shape"]) * (log_time - eta)
        return event * (position["log_shape"] + z - log_time) - jnp.exp(z)

    return regression(
        features,
        row_fn,
        "weibull",
        further={"log_shape": np.zeros(())},
        further_prior_fn=lambda p: normal(p["log_shape"], 1.0),
        **options,
    )


def student_t(features: Sequence[str], **options: Any) -> Model:
    """Rows (x, y): y = η + s·t_ν; s half-normal of scale 5, ν ~ Gamma(2, 0.1), both kept as logarithms."""

    def row_fn(position, eta, rest):
        (y,) = rest
        log_s, dof = position["log_noise_scale"], jnp.exp(position["log_dof"])
        z = (y - eta) * jnp.exp(-log_s)
        constant = gammaln((dof + 1) / 2) - gammaln(dof / 2) - 0.5 * jnp.log(dof * jnp.pi) - log_s
        return constant - (dof + 1) / 2 * jnp.log1p(z**2 / dof)

    def further_prior_fn(position):
        log_s, log_dof = position["log_noise_scale"], position["log_dof"]
        return log_s - 0.5 * jnp.exp(2 * log_s) / 25 + 2 * log_dof - 0.1 * jnp.exp(log_dof)

    return regression(
        features,
        row_fn,
        "student-t",
        further={"log_noise_scale": np.zeros(()), "log_dof": np.array(np.log(10.0))},
        further_prior_fn=further_prior_fn,
        **options,
    )


def ordinal(features: Sequence[str], num_levels: int, *, prior_scale: float = 2.5) -> Model:
    """Rows (x, level 0, 1, …): P(level ≤ j) = 1/(1+exp(xᵀb − c_j)).

    The lowest threshold and the coefficients have normal priors of scale ``prior_scale``; gaps between
    thresholds are kept as logarithms with N(0, 1) priors.
    """

    def thresholds(position):
        gaps = jnp.exp(position["log_gap"])
        inner = position["lowest"] + jnp.concatenate([jnp.zeros(1), jnp.cumsum(gaps)])
        return jnp.concatenate([jnp.array([-FAR]), inner, jnp.array([FAR])])

    def logprior_fn(position):
        regular = normal(position["coefficient"], prior_scale) + normal(position["lowest"], prior_scale)
        return regular + normal(position["log_gap"], 1.0)

    def loglikelihood_fn(position, example):
        x, level = example
        cuts = thresholds(position)
        chosen = (jnp.arange(num_levels) == level).astype(cuts.dtype)
        eta = x @ position["coefficient"]
        low, high = chosen @ cuts[:-1] - eta, chosen @ cuts[1:] - eta
        # σ(b) − σ(a) = σ(b)σ(−a)(1 − exp(a − b)), which keeps its digits far out
        return log_sigmoid(high) + log_sigmoid(-low) + jnp.log(-jnp.expm1(low - high))

    return Model(
        logprior_fn,
        loglikelihood_fn,
        {
            "coefficient": np.zeros(len(features)),
            "lowest": np.array(-1.0),
            "log_gap": np.zeros(num_levels - 2),
        },
        dims={"coefficient": ["feature"]},
        coords={"feature": list(features)},
        name="ordinal",
    )


def random_intercept_logistic(features: Sequence[str], *, prior_scale: float = 2.5, nodes: int = 16) -> Model:
    """One example is a whole group, (X, y, present): logit = a + xᵀb + s·u with u ~ N(0, 1) of the group.

    u is integrated out by Gauss–Hermite quadrature, so that nothing of the group is a parameter; s is
    log-normal and kept as a logarithm. Rows beyond the group's own have ``present`` 0.
    """
    points, weights = np.polynomial.hermite_e.hermegauss(nodes)
    log_weights = np.log(weights / weights.sum())

    def logprior_fn(position):
        log_s = position["log_group_sd"]
        regular = normal(position["coefficient"], prior_scale) + normal(position["intercept"], prior_scale)
        return regular + normal(log_s, 1.0)

    def loglikelihood_fn(position, example):
        x, y, present = example
        eta = position["intercept"] + x @ position["coefficient"]
        logits = eta[None, :] + jnp.exp(position["log_group_sd"]) * points[:, None]
        terms = jnp.sum(present * (y * logits - softplus(logits)), axis=1)
        return jax.nn.logsumexp(terms + log_weights)

    return Model(
        logprior_fn,
        loglikelihood_fn,
        {
            "intercept": np.zeros(()),
            "coefficient": np.zeros(len(features)),
            "log_group_sd": np.array(-1.0),
        },
        dims={"coefficient": ["feature"]},
        coords={"feature": list(features)},
        name="random-intercept-logistic",
    )
