"""The location of a Gaussian with known covariance."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from fald.core.checks import check_positive
from fald.core.errors import ConfigError
from fald.core.types import float_dtype
from fald.problem.families.base import normal_logprior
from fald.problem.model import Model, concave


def _quadratic(matrix: np.ndarray, x: jax.Array) -> jax.Array:
    """xᵀMx of a positive definite M; written out for few dimensions, where calling a product costs more.

    As a sum of squares, whose gradient takes the fewest operations.
    """
    if len(matrix) > 4:
        return x @ jnp.asarray(matrix, float_dtype()) @ x
    part = [x[i] for i in range(len(matrix))]
    total, rest = jnp.zeros((), x.dtype), np.array(matrix, float)
    for j in range(len(part)):
        scale = rest[j, j]
        column = rest[:, j] / scale
        turned = sum((float(column[i]) * part[i] for i in range(j + 1, len(part))), part[j])
        total += float(scale) * turned * turned
        rest -= scale * np.outer(column, column)
    return total


def gaussian_location(covariance: Any, *, prior_scale: float | None = None) -> Model:
    """Rows x ~ N(θ, Σ) with Σ known; flat prior, or θ_j ~ N(0, prior_scale²).

    An example is a vector, or a pair ``(mean, count)`` that stands for ``count`` rows with that
    mean: the posterior of θ depends on nothing else.

    Examples
    --------
    >>> gaussian_location([[2.0, 0.0], [0.0, 1.0]]).dim
    2
    """
    cov = np.asarray(covariance, float)
    if cov.ndim != 2 or cov.shape[0] != cov.shape[1] or not np.allclose(cov, cov.T):
        raise ConfigError(f"covariance must be a symmetric square matrix; got shape {cov.shape}")
    eigenvalues = np.linalg.eigvalsh(cov)
    if eigenvalues[0] <= 0:
        raise ConfigError(
            f"covariance must be positive definite; its smallest eigenvalue is {eigenvalues[0]:g}"
        )
    precision = np.linalg.inv(cov)
    constant = -0.5 * (len(cov) * np.log(2 * np.pi) + float(np.sum(np.log(eigenvalues))))
    scale = None if prior_scale is None else check_positive("prior-scale", prior_scale)

    @concave
    def loglikelihood_fn(theta, example):
        x, count = example if isinstance(example, tuple) else (example, 1.0)
        gap = jnp.asarray(x, float_dtype()) - theta
        return count * (constant - 0.5 * _quadratic(precision, gap))

    prior = normal_logprior(scale) if scale is not None else concave(lambda theta: 0.0 * jnp.sum(theta))
    return Model(
        logprior_fn=prior,
        loglikelihood_fn=loglikelihood_fn,
        initial_position=jnp.zeros(len(cov)),
        constrain_fn=lambda theta: {"location": theta},
        name="gaussian-location",
    )
