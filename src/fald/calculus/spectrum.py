"""Mode and extreme curvatures of a posterior with too many parameters for a Hessian.

Only gradients and products of the Hessian with vectors are used, so memory grows with the number of
parameters and not with its square.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from numpy.typing import ArrayLike, NDArray

from fald.calculus.sums import Site, gradients, hessian_products, make_site, prior_gradients
from fald.core.errors import DataError
from fald.problem.data import FederatedData
from fald.problem.model import Model

Array = NDArray[Any]

_MOST_STEPS = 100  # of Lanczos' method; its extreme values are right long before
_MOST_EVALUATIONS = 2000


class Extremes(NamedTuple):
    """Where the mode is, how far the start is from it, and the curvatures of the posterior."""

    mode: Array  # (d,) θ*
    distance: float  # ‖start − θ*‖
    least: float  # eigenvalue of ∇²f(θ*)
    largest: float  # of the eigenvalues at the mode and at the start


def extremes(model: Model, data: FederatedData, start: ArrayLike | None = None) -> Extremes:
    """Find the mode by L-BFGS, from ``start`` (d,), and the extreme curvatures by Lanczos' method.

    Only sums over rows are used.

    Raises
    ------
    DataError
        If no mode is found, or the posterior is flat there.

    Notes
    -----
    The least curvature is found from above, the largest from below: both are a little too timid.

    Examples
    --------
    >>> import fald
    >>> data = fald.FederatedData.from_arrays({"a": np.array([[1.0, 0.0]]), "b": np.array([[3.0, 2.0]])})
    >>> found = extremes(fald.models.gaussian_location([[1.0, 0.0], [0.0, 4.0]]), data)
    >>> found.mode.round(4), round(found.least, 6), round(found.largest, 6)
    (array([2., 1.]), 0.5, 2.0)
    """
    from scipy.optimize import minimize

    site = make_site(model, data.rows, "all sites")
    first = np.asarray(model.flat_initial_position if start is None else start, np.float64)

    def energy(theta: Array) -> tuple[float, Array]:
        own, prior = gradients(site, theta[None]), prior_gradients(model, theta[None])
        return -float(own[0][0] + prior[0][0]), -(own[1][0] + prior[1][0])

    found = minimize(
        energy, first, jac=True, method="L-BFGS-B", options={"maxfun": _MOST_EVALUATIONS, "maxcor": 30}
    )
    mode = np.asarray(found.x)
    if not (np.isfinite(found.fun) and np.isfinite(mode).all()) or found.nfev >= _MOST_EVALUATIONS:
        raise DataError(
            f"no mode found in {found.nfev} gradients: {found.message}",
            hint="features on similar scales, a proper prior or another start help",
        )
    here, there = _curvatures(site, mode), _curvatures(site, first)
    if not here[0] > 1e-12 * here[1]:
        raise DataError(
            "the posterior is flat where the search ended",
            hint="a feature that repeats others does this; give every parameter a proper prior",
        )
    return Extremes(mode, float(np.linalg.norm(first - mode)), here[0], max(here[1], there[1]))


def _curvatures(site: Site, theta: Array) -> tuple[float, float]:
    """Least and largest eigenvalue of the Hessian of the energy, by Lanczos' method."""
    from scipy.linalg import eigvalsh_tridiagonal

    def product(vector: Array) -> Array:
        return -hessian_products(site, theta, vector) - _prior_product(site.model, theta, vector)

    first = np.random.default_rng(0).standard_normal(len(theta))
    basis = [first / np.linalg.norm(first)]
    diagonal, beside = [], []
    for _ in range(min(len(theta), _MOST_STEPS)):
        image = product(basis[-1])
        diagonal.append(float(basis[-1] @ image))
        known = np.array(basis)
        for _ in range(2):  # once is not enough against rounding
            image = image - known.T @ (known @ image)
        size = float(np.linalg.norm(image))
        if size <= 1e-10 * max(map(abs, diagonal)):
            break
        beside.append(size)
        basis.append(image / size)
    values = eigvalsh_tridiagonal(np.array(diagonal), np.array(beside[: len(diagonal) - 1]))
    return float(values[0]), float(values[-1])


def _prior_product(model: Model, theta: Array, vector: Array) -> Array:
    with jax.enable_x64(True):
        at, along = (jnp.asarray(np.asarray(a, np.float64)) for a in (theta, vector))
        return np.asarray(jax.jvp(jax.grad(model.flat_logprior), (at,), (along,))[1])
