"""Log likelihoods of a site's rows and their derivatives, in float64 whatever the precision of a run."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from numpy.typing import NDArray

from fald.core.types import PyTree
from fald.problem.model import Model

Array = NDArray[Any]

_WORK = 1 << 22  # row-parameter pairs evaluated at once
_MATRICES = 1 << 25  # numbers in the Hessians of the rows of one part


class Site(NamedTuple):
    """A model and the rows of one site, cut into parts of one shape under masks."""

    model: Model
    parts: tuple[tuple[PyTree, jax.Array], ...]
    name: str


def make_site(model: Model, rows: PyTree, name: str) -> Site:
    """Prepare the rows of a site: parts of 8, 64 or 512 rows, so that sites share compiled programs.

    Parts are small enough for the Hessian of one, which takes memory for each of its rows.
    """
    count, most = len(jax.tree.leaves(rows)[0]), _MATRICES // model.dim**2
    size = next((s for s in (8, 64) if count <= s or most < 8 * s), 512)
    return Site(model, tuple(_parts(rows, count, size)), name)


def _parts(rows: PyTree, count: int, size: int) -> Iterator[tuple[PyTree, jax.Array]]:
    with jax.enable_x64(True):
        for first in range(0, count, size):
            index = np.arange(first, first + size)
            taken = np.minimum(index, count - 1)
            yield (
                jax.tree.map(lambda a, i=taken: jnp.asarray(np.asarray(a)[i]), rows),
                jnp.asarray(index < count),
            )


def _loglikelihood(model: Model, theta: jax.Array, rows: PyTree, mask: jax.Array) -> jax.Array:
    terms = jax.vmap(model.flat_loglikelihood, (None, 0))(theta, rows)
    return jnp.sum(jnp.where(mask, terms, 0))


@partial(jax.jit, static_argnums=(0, 4))
def _values(model: Model, thetas: jax.Array, rows: PyTree, mask: jax.Array, batch: int) -> jax.Array:
    return jax.lax.map(lambda t: _loglikelihood(model, t, rows, mask), thetas, batch_size=batch)


@partial(jax.jit, static_argnums=(0, 4))
def _gradients(model: Model, thetas: jax.Array, rows: PyTree, mask: jax.Array, batch: int):
    value_and_grad = jax.value_and_grad(lambda t: _loglikelihood(model, t, rows, mask))
    return jax.lax.map(value_and_grad, thetas, batch_size=batch)


@partial(jax.jit, static_argnums=(0, 4))
def _hessians(model: Model, thetas: jax.Array, rows: PyTree, mask: jax.Array, batch: int):
    def derivatives(theta):
        energy = partial(_loglikelihood, model, rows=rows, mask=mask)
        return *jax.value_and_grad(energy)(theta), jax.hessian(energy)(theta)

    return jax.lax.map(derivatives, thetas, batch_size=batch)


@partial(jax.jit, static_argnums=0)
def _prior(model: Model, thetas: jax.Array):
    def derivatives(theta):
        return *jax.value_and_grad(model.flat_logprior)(theta), jax.hessian(model.flat_logprior)(theta)

    return jax.lax.map(derivatives, thetas)


@partial(jax.jit, static_argnums=0)
def _prior_values(model: Model, thetas: jax.Array):
    return jax.lax.map(jax.value_and_grad(model.flat_logprior), thetas, batch_size=1024)


def _padded(count: int) -> int:
    """A length from a short list, so that few programs are compiled."""
    return 1 << max(2, (count - 1).bit_length())


def _over_parts(function, site: Site, thetas: Array, weight: int) -> list[Array]:
    """Sum a compiled function of positions (M, d) over the parts of a site's rows."""
    count = len(thetas)
    filled = np.concatenate([thetas, np.repeat(thetas[-1:], _padded(count) - count, axis=0)])
    size = len(site.parts[0][1])
    batch = max(1, min(len(filled), _WORK // (size * weight)))
    with jax.enable_x64(True):
        given = jnp.asarray(np.asarray(filled, np.float64))
        sums: list[Array] = []
        for part in site.parts:  # added as they come, so that memory does not grow with the rows
            new = [np.asarray(leaf) for leaf in jax.tree.leaves(function(site.model, given, *part, batch))]
            sums = [a + b for a, b in zip(sums, new)] if sums else new
    return [a[:count] for a in sums]


def log_likelihoods(site: Site, positions: Array) -> Array:
    """(M,) log likelihood of the site's rows at positions (M, d)."""
    return _over_parts(_values, site, positions, 1)[0]


def gradients(site: Site, positions: Array) -> tuple[Array, Array]:
    """Log likelihoods (M,) and their gradients (M, d)."""
    values, grads = _over_parts(_gradients, site, positions, 2)
    return values, grads


def hessians(site: Site, positions: Array) -> tuple[Array, Array, Array]:
    """Log likelihoods (M,), gradients (M, d) and Hessians (M, d, d)."""
    values, grads, second = _over_parts(_hessians, site, positions, site.model.dim)
    with np.errstate(invalid="ignore"):  # infinite where there is no density
        return values, grads, (second + np.swapaxes(second, 1, 2)) / 2


def hessian_products(site: Site, position: Array, vector: Array) -> Array:
    """(d,) Hessian of the site's log likelihood at a position (d,), times a vector (d,)."""
    with jax.enable_x64(True):
        theta, along = (jnp.asarray(np.asarray(a, np.float64)) for a in (position, vector))
        return sum(
            (np.asarray(_product(site.model, theta, along, part)) for part in site.parts), np.zeros(())
        )


@partial(jax.jit, static_argnums=0)
def _product(model: Model, theta: jax.Array, along: jax.Array, part: tuple[PyTree, jax.Array]) -> jax.Array:
    rows, mask = part
    slope = jax.grad(lambda t: _loglikelihood(model, t, rows, mask))
    return jax.jvp(slope, (theta,), (along,))[1]


def prior_derivatives(model: Model, positions: Array) -> tuple[Array, Array, Array]:
    """Log prior (M,), gradient (M, d) and Hessian (M, d, d); the server knows the prior."""
    with jax.enable_x64(True):
        value, grad, second = _prior(model, jnp.asarray(np.asarray(positions, np.float64)))
        second = np.asarray(second)
        return np.asarray(value), np.asarray(grad), (second + np.swapaxes(second, 1, 2)) / 2


def prior_gradients(model: Model, positions: Array) -> tuple[Array, Array]:
    """Log prior (M,) and its gradient (M, d)."""
    count = len(positions)
    filled = np.concatenate([positions, np.repeat(positions[-1:], _padded(count) - count, axis=0)])
    with jax.enable_x64(True):
        value, grad = _prior_values(model, jnp.asarray(np.asarray(filled, np.float64)))
        return np.asarray(value)[:count], np.asarray(grad)[:count]
