"""Sums over rows: log likelihoods and their derivatives, in float64 whatever the precision of a run.

A posterior of many rows has a mode that float32 cannot resolve. Rows are taken part by part and added up as
they come, so that memory does not grow with their number.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from numpy.typing import ArrayLike, NDArray

from fald.core.errors import DataError
from fald.core.types import PyTree
from fald.problem.model import Model

Array = NDArray[Any]
Part = tuple[PyTree, Any]

MAX_DIM = 500
_WORK = 1 << 22  # row-parameter pairs evaluated at once
_MATRICES = 1 << 25  # numbers in the Hessians of the rows of one part


class Report(NamedTuple):
    """Value, gradient (d,) and Hessian (d, d) of an energy at one position."""

    value: float
    gradient: Array
    hessian: Array

    @property
    def finite(self) -> bool:
        """Whether all of it is finite."""
        return all(bool(np.all(np.isfinite(part))) for part in self)


class Site(NamedTuple):
    """A model and the rows of one site, which are looked at ``size`` at a time."""

    model: Model
    rows: PyTree
    size: int
    name: str = ""

    @property
    def num_rows(self) -> int:
        """Rows of the site."""
        return len(jax.tree.leaves(self.rows)[0])

    @property
    def parts(self) -> Iterator[Part]:
        """Rows and a mask of the real ones; the last row fills up, so that functions compile once."""
        count, place = self.num_rows, np.arange(self.size)
        for first in range(0, count, self.size):
            whole = first + self.size <= count
            taken = slice(first, first + self.size) if whole else np.minimum(first + place, count - 1)
            yield jax.tree.map(lambda a, i=taken: a[i], self.rows), place < count - first


def make_site(model: Model, rows: PyTree, name: str = "") -> Site:
    """Prepare the rows of a site: parts of 8, 64 or 512 rows, so that sites share compiled programs.

    Parts are small enough for the Hessian of one, which takes memory for each of its rows.
    """
    rows = jax.tree.map(np.asarray, rows)
    count, most = len(jax.tree.leaves(rows)[0]), _MATRICES // model.dim**2
    return Site(model, rows, next((s for s in (8, 64) if count <= s or most < 8 * s), 512), name)


def loglikelihood(model: Model, theta: jax.Array, part: Part) -> jax.Array:
    """Log likelihood of a part of the rows, inside compiled code."""
    rows, mask = part
    terms = jax.vmap(model.flat_loglikelihood, (None, 0))(theta, rows)
    return jnp.sum(jnp.where(mask, terms, 0))


def _with_derivatives(function: Callable, order: int) -> Callable:
    """A function with its first derivatives up to an order."""
    if order == 0:
        return function
    first = jax.value_and_grad(function)
    return first if order == 1 else lambda theta: (*first(theta), jax.hessian(function)(theta))


@partial(jax.jit, static_argnames=("model", "order", "batch"))
def _of_part(model: Model, thetas: jax.Array, part: Part, *, order: int, batch: int):
    look = _with_derivatives(lambda theta: loglikelihood(model, theta, part), order)
    return jax.lax.map(look, thetas, batch_size=batch)


@partial(jax.jit, static_argnames=("model", "order"))
def _of_prior(model: Model, thetas: jax.Array, *, order: int):
    look = _with_derivatives(model.flat_logprior, order)
    return jax.lax.map(look, thetas, batch_size=1024 if order == 1 else None)


def _padded(positions: ArrayLike) -> Array:
    """Positions, filled up to a number from a short list, so that few programs are compiled."""
    positions = np.asarray(positions, np.float64)
    missing = (1 << max(2, (len(positions) - 1).bit_length())) - len(positions)
    return np.concatenate([positions, np.repeat(positions[-1:], missing, axis=0)])


def _symmetric(matrices: Array) -> Array:
    with np.errstate(invalid="ignore"):  # infinite where there is no density
        return (matrices + np.swapaxes(matrices, -1, -2)) / 2


def _over_parts(site: Site, thetas: Array, order: int) -> list[Array]:
    """Sum log likelihoods and derivatives up to an order over the parts of a site's rows."""
    weight = (1, 2, site.model.dim)[order]
    batch = max(1, min(len(thetas), _WORK // (site.size * weight)))
    with jax.enable_x64(True):
        given = jnp.asarray(thetas)
        sums: list[Array] = []
        for part in site.parts:
            new = jax.tree.leaves(_of_part(site.model, given, part, order=order, batch=batch))
            sums = [a + np.asarray(b) for a, b in zip(sums, new)] if sums else [np.asarray(a) for a in new]
    return [*sums[:2], *map(_symmetric, sums[2:])]


def log_likelihoods(site: Site, positions: Array) -> Array:
    """(M,) log likelihood of the site's rows at positions (M, d)."""
    return _over_parts(site, _padded(positions), 0)[0][: len(positions)]


def gradients(site: Site, positions: Array) -> tuple[Array, Array]:
    """Log likelihoods (M,) and their gradients (M, d)."""
    values, grads = _over_parts(site, _padded(positions), 1)
    return values[: len(positions)], grads[: len(positions)]


def hessians(site: Site, positions: Array) -> tuple[Array, Array, Array]:
    """Log likelihoods (M,), gradients (M, d) and Hessians (M, d, d)."""
    values, grads, second = (a[: len(positions)] for a in _over_parts(site, _padded(positions), 2))
    return values, grads, second


def hessian_products(site: Site, position: Array, vector: Array) -> Array:
    """(d,) Hessian of the site's log likelihood at a position (d,), times a vector (d,)."""
    with jax.enable_x64(True):
        theta, along = (jnp.asarray(np.asarray(a, np.float64)) for a in (position, vector))
        return sum((np.asarray(_product(site.model, theta, along, p)) for p in site.parts), np.zeros(()))


@partial(jax.jit, static_argnums=0)
def _product(model: Model, theta: jax.Array, along: jax.Array, part: Part) -> jax.Array:
    slope = jax.grad(lambda t: loglikelihood(model, t, part))
    return jax.jvp(slope, (theta,), (along,))[1]


def prior_derivatives(model: Model, positions: ArrayLike) -> tuple[Array, Array, Array]:
    """Log prior (M,), gradient (M, d) and Hessian (M, d, d); the server knows the prior."""
    with jax.enable_x64(True):
        found = _of_prior(model, jnp.asarray(np.asarray(positions, np.float64)), order=2)
        value, grad, second = map(np.asarray, found)
    return value, grad, _symmetric(second)


def prior_gradients(model: Model, positions: Array) -> tuple[Array, Array]:
    """Log prior (M,) and its gradient (M, d)."""
    with jax.enable_x64(True):
        value, grad = _of_prior(model, jnp.asarray(_padded(positions)), order=1)
        return np.asarray(value)[: len(positions)], np.asarray(grad)[: len(positions)]


def total(reports: Sequence[Report]) -> Report:
    """Sum reports, as the server does or a secure sum does for it."""
    values, gradients, hessians = zip(*reports)
    return Report(float(np.sum(values)), np.sum(gradients, axis=0), np.sum(hessians, axis=0))


def client_report(site: Site, position: ArrayLike) -> Report:
    """Report what one client is asked for: ℓ^c, ∇ℓ^c and ∇²ℓ^c at a flat position, over its rows.

    ℓ^c is the negative log likelihood.

    Raises
    ------
    DataError
        If the model has more than 500 parameters: its Hessian is too large to send.

    Examples
    --------
    >>> import fald
    >>> site = make_site(fald.models.gaussian_location([[2.0]]), np.array([[1.0], [3.0]]))
    >>> report = client_report(site, [0.0])
    >>> report.gradient, report.hessian
    (array([-2.]), array([[1.]]))
    """
    check_dim(site.model)
    value, gradient, hessian = _over_parts(site, np.asarray(position, np.float64)[None], 2)
    return Report(-float(value[0]), -gradient[0], -hessian[0])


def prior_report(model: Model, position: ArrayLike) -> Report:
    """Report −log π0 and its derivatives at a flat position; the server knows the prior."""
    check_dim(model)
    value, gradient, hessian = prior_derivatives(model, np.asarray(position, np.float64)[None])
    return Report(-float(value[0]), -gradient[0], -hessian[0])


def check_dim(model: Model) -> None:
    """Raise ``DataError`` if Hessians of this model are too large to send."""
    if model.dim > MAX_DIM:
        raise DataError(
            f"the model has {model.dim} parameters; Hessians are exchanged up to {MAX_DIM}",
            hint="choose settings by hand, or give the constants of the problem yourself",
        )
