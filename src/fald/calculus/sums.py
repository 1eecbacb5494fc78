"""Sums over rows: log likelihoods and their derivatives, in float64 whatever the precision of a run.

A posterior of many rows has a mode that float32 cannot resolve. Rows are taken part by part and added up as
they come, so that memory does not grow with their number. Models that know a row through linear predictors
alone say so (``fald.models.predicted``), and are summed up by ``fald.calculus.predicted``; all others
are compiled.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from numpy.typing import ArrayLike, NDArray

from fald.calculus import predicted
from fald.core.errors import DataError
from fald.core.types import PyTree
from fald.problem.model import Model

Array = NDArray[Any]
Part = tuple[PyTree, Any]

MAX_DIM = 500
_MATRICES = 1 << 25  # numbers in the Hessians of the rows of one part
# positions looked at together, by order of derivatives: of few numbers, so that few programs are compiled
_TOGETHER = ((64, 1024), (16, 256), (4, 32))
_WORK = 1 << 20  # row-parameter pairs evaluated at once


class Report(NamedTuple):
    """Value, gradient (d,) and Hessian (d, d) of an energy at one position, or of several, stacked."""

    value: Any
    gradient: Array
    hessian: Array

    @property
    def finite(self) -> bool:
        """Whether all of it is finite."""
        return all(bool(np.all(np.isfinite(part))) for part in self)


class Site(NamedTuple):
    """A model and the rows of one site, which are looked at ``size`` at a time.

    ``table`` is what stands for them where a family knows rows through linear predictors.
    """

    model: Model
    rows: PyTree
    size: int
    name: str = ""
    table: PyTree = None

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
    size = next((s for s in (8, 64) if count <= s or most < 8 * s), 512)
    return Site(model, rows, size, name, predicted.shortened(model, rows))


def loglikelihood(model: Model, theta: jax.Array, part: Part) -> jax.Array:
    """Log likelihood of a part of the rows, inside compiled code; without a mask all rows count."""
    rows, mask = part
    terms = jax.vmap(model.flat_loglikelihood, (None, 0))(theta, rows)
    # a choice inside the sum keeps the compiler from using vectors: five times slower
    return jnp.sum(terms if mask is None else jnp.where(mask, terms, 0))


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
    return jax.lax.map(_with_derivatives(model.flat_logprior, order), thetas, batch_size=len(thetas))


def _in_groups(positions: ArrayLike, order: int, look: Callable[[jax.Array], PyTree]) -> list[Array]:
    """Look at positions (M, d), some at a time, the last ones filled up; values and derivatives (M, …)."""
    positions = np.asarray(positions, np.float64)
    few, many = _TOGETHER[order]
    size = few if len(positions) <= few else many
    missing = -len(positions) % size if len(positions) else size
    filler = positions[-1:] if len(positions) else np.zeros((1, positions.shape[1]))
    filled = np.concatenate([positions, np.repeat(filler, missing, axis=0)])
    with jax.enable_x64(True):
        found = [
            list(map(np.asarray, jax.tree.leaves(look(jnp.asarray(filled[first : first + size])))))
            for first in range(0, len(filled), size)
        ]
    return [np.concatenate(parts)[: len(positions)] for parts in zip(*found)]


def _symmetric(matrices: Array) -> Array:
    with np.errstate(invalid="ignore"):  # infinite where there is no density
        return (matrices + np.swapaxes(matrices, -1, -2)) / 2


def _over_parts(site: Site, positions: ArrayLike, order: int) -> list[Array]:
    """Sum log likelihoods and derivatives up to an order over the parts of a site's rows."""
    weight = (1, 2, site.model.dim)[order]
    batch = max(1, _WORK // (site.size * weight))
    sums: list[Array] = []
    for rows, mask in site.parts:
        part = rows, None if mask.all() else mask
        new = _in_groups(
            positions,
            order,
            lambda thetas, part=part: _of_part(
                site.model, thetas, part, order=order, batch=min(batch, len(thetas))
            ),
        )
        sums = [a + b for a, b in zip(sums, new)] if sums else new
    return [*sums[:2], *map(_symmetric, sums[2:])]


def log_likelihoods(site: Site, positions: Array) -> Array:
    """(M,) log likelihood of the site's rows at positions (M, d)."""
    return many_log_likelihoods([site], positions)[0]


def many_log_likelihoods(sites: Sequence[Site], positions: Array) -> Array:
    """(S, M) log likelihoods of each site's rows, for one model, at positions (M, d)."""
    return _many(sites, positions, 0, predicted.values)


def gradients(site: Site, positions: Array) -> tuple[Array, Array]:
    """Log likelihoods (M,) and their gradients (M, d)."""
    values, grads = many_gradients([site], positions)
    return values[0], grads[0]


def many_gradients(sites: Sequence[Site], positions: Array) -> tuple[Array, Array]:
    """Log likelihoods (S, M) of each site's rows, and their gradients (S, M, d)."""
    return _many(sites, positions, 1, predicted.gradients)


def hessians(site: Site, positions: Array) -> tuple[Array, Array, Array]:
    """Log likelihoods (M,), gradients (M, d) and Hessians (M, d, d)."""
    values, grads, second = many_hessians([site], positions)
    return values[0], grads[0], second[0]


def many_hessians(sites: Sequence[Site], positions: Array) -> tuple[Array, Array, Array]:
    """Log likelihoods (S, M) of each site's rows, gradients (S, M, d) and Hessians (S, M, d, d)."""
    return _many(sites, positions, 2, predicted.hessians)


def hessians_each(sites: Sequence[Site], positions: Array) -> tuple[Array, Array, Array]:
    """Log likelihoods (S,), gradients (S, d) and Hessians (S, d, d), each site at a position of its own."""
    model = sites[0].model
    if model.predictor is not None and predicted.small(model, [site.table for site in sites]):
        return predicted.hessians_each(model, [site.table for site in sites], positions)
    value, grad, second = zip(*[hessians(site, place[None]) for site, place in zip(sites, positions)])
    return np.concatenate(value), np.concatenate(grad), np.concatenate(second)


def many_mean_derivatives(sites: Sequence[Site], positions: Array) -> tuple[Array, Array]:
    """Gradients (S, d) and Hessians (S, d, d) of each site's log likelihood, averaged over positions."""
    if sites[0].model.predictor is not None:
        return predicted.mean_derivatives(sites[0].model, [site.table for site in sites], positions)
    # one site at a time, because the Hessians at all positions take memory
    means = [[part.mean(axis=0) for part in _over_parts(site, positions, 2)[1:]] for site in sites]
    return np.array([grad for grad, _ in means]), np.array([second for _, second in means])


def _many(sites: Sequence[Site], positions: Array, order: int, declared: Callable[..., Any]) -> Any:
    """Sums of each site, by what its family declares or compiled."""
    model = sites[0].model
    if model.predictor is not None:
        return declared(model, [site.table for site in sites], positions)
    found = [np.array(part) for part in zip(*[_over_parts(site, positions, order) for site in sites])]
    return found if order else found[0]


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
    value, grad, second = _prior(model, positions, 2)
    return value, grad, _symmetric(second)


def prior_gradients(model: Model, positions: Array) -> tuple[Array, Array]:
    """Log prior (M,) and its gradient (M, d)."""
    value, grad = _prior(model, positions, 1)
    return value, grad


def prior_values(model: Model, positions: Array) -> Array:
    """Log prior (M,)."""
    return _prior(model, positions, 0)[0]


def _prior(model: Model, positions: ArrayLike, order: int) -> list[Array]:
    """Log prior and its derivatives, by what its family says or compiled."""
    derivatives_fn = getattr(model.logprior_fn, "derivatives_fn", None)
    if derivatives_fn is not None:
        return derivatives_fn(np.asarray(positions, np.float64), order)
    return _in_groups(positions, order, lambda thetas: _of_prior(model, thetas, order=order))


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
    value, gradient, hessian = hessians(site, np.asarray(position, np.float64)[None])
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
