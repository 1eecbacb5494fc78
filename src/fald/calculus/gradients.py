"""Energies of a client and their gradients, on all of its rows or on a fresh batch."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.flatten_util import ravel_pytree

from fald.core.keys import integers
from fald.core.types import PyTree
from fald.problem.data import FederatedData
from fald.problem.model import Model


class Batch(NamedTuple):
    """Rows to evaluate: ``mask`` marks the real ones (None: all are), ``count`` is how many those are."""

    rows: PyTree
    mask: jax.Array | None
    count: jax.Array


def choose_without_replacement(
    rng_key: jax.Array, population, count: int, step=0, *, most: int = 2**31
) -> jax.Array:
    """Draw ``count`` distinct indices from ``range(population)``, every subset equally likely.

    A partial Fisher–Yates shuffle in O(count log count), without the array that it would shuffle:
    step i swaps position i with position j_i ≥ i, and where a position's value came from is found
    by following the swaps back.

    Parameters
    ----------
    rng_key
        Key of this draw.
    population
        Number of things to choose from; may be traced.
    count
        How many; static. Where it exceeds ``population``, entry i ≥ population is i itself and the
        entries before it are a permutation of the whole population.
    step
        Which draw of this key.
    most
        No population is larger; static. It changes the speed alone.

    Returns
    -------
    jax.Array
        (count,) int32, in random order. A single index is off the uniform law by less than
        population / 2³².

    Examples
    --------
    >>> chosen = choose_without_replacement(jax.random.key(0), 10, 10)
    >>> sorted(chosen.tolist()) == list(range(10))
    True
    """
    i = jnp.arange(count, dtype=jnp.int32)
    span = jnp.maximum(jnp.asarray(population, jnp.int32) - i, 1)
    j = i + integers(rng_key, step, count, span)
    # origin[t]: what stands at position t just before step t, traced back through earlier swaps
    inside = jnp.where((j < count) & (j > i), j, count)
    parent = jnp.full((count,), -1, jnp.int32).at[inside].max(i, mode="drop")
    origin = jnp.where(parent < 0, i, parent)
    for _ in range(max(1, math.ceil(math.log2(max(count, 2))))):
        origin = origin[origin]
    previous = _last_equal(j, max(most, count))
    # taken from one table, because the compiler makes what is taken once and would make a choice again
    # for every number of a row that the index is used for
    return jnp.concatenate([origin, j])[jnp.where(previous >= 0, previous, count + i)]


def _last_equal(values: jax.Array, most: int) -> jax.Array:
    """For each of some numbers below ``most`` the index of the last earlier equal one, or −1."""
    count = values.shape[0]
    bits = (count - 1).bit_length()
    place = jnp.arange(count, dtype=jnp.int32)
    if most << bits <= 2**32:  # value and place in one word, which sort several times quicker than pairs
        words = jnp.sort((values.astype(jnp.uint32) << bits) | place.astype(jnp.uint32))
        ordered, order = words >> bits, (words & (2**bits - 1)).astype(jnp.int32)
    else:
        order = jnp.argsort(values, stable=True).astype(jnp.int32)
        ordered = values[order]
    repeated = jnp.concatenate([jnp.zeros((1,), bool), ordered[1:] == ordered[:-1]])
    before = jnp.concatenate([order[:1], order[:-1]])
    return jnp.zeros((count,), jnp.int32).at[order].set(jnp.where(repeated, before, -1))


class Split(NamedTuple):
    """Flat rows in two parts: a few copied rows, and the rest where the user's array has them.

    JAX reads a NumPy array in place only from a 64-byte boundary, which large arrays miss by a few
    rows. Wherever rows are taken, a split array stands for the whole one.
    """

    head: jax.Array
    rest: jax.Array


def _take(array: jax.Array | Split, index: jax.Array) -> jax.Array:
    if not isinstance(array, Split):
        # indices are in range by construction; looking again would cost a pass over the rows
        return array.at[index].get(mode="promise_in_bounds")
    head = len(array.head)
    first, later = array.head[jnp.minimum(index, head - 1)], array.rest[jnp.maximum(index - head, 0)]
    return jnp.where((index < head).reshape(-1, *[1] * (later.ndim - 1)), first, later)


def _slice(array: jax.Array | Split, start, length: int) -> jax.Array:
    if not isinstance(array, Split):
        return jax.lax.dynamic_slice_in_dim(array, start, length)
    head = len(array.head)
    most = min(length, len(array.rest))
    rest = jax.lax.dynamic_slice_in_dim(array.rest, jnp.maximum(start - head, 0), most)
    return jax.lax.dynamic_slice_in_dim(jnp.concatenate([array.head, rest]), jnp.minimum(start, head), length)


def _num_rows(rows: PyTree) -> int:
    first = jax.tree.leaves(rows, is_leaf=lambda leaf: isinstance(leaf, Split))[0]
    return sum(len(part) for part in first) if isinstance(first, Split) else len(first)


def _each(function: Callable, rows: PyTree) -> PyTree:
    return jax.tree.map(function, rows, is_leaf=lambda leaf: isinstance(leaf, Split))


def all_rows(rows: PyTree, offset, size, capacity: int, exact: bool) -> Batch:
    """Every row of one client out of the flat rows.

    Clients of one size class share the static ``capacity``; a smaller client repeats its last row
    under a mask. ``exact`` says that all clients of the class have exactly ``capacity`` rows.
    """
    if exact:
        return Batch(_each(lambda a: _slice(a, offset, capacity), rows), None, size)
    index = jnp.arange(capacity, dtype=jnp.int32)
    taken = offset + jnp.minimum(index, size - 1)
    return Batch(_each(lambda a: _take(a, taken), rows), index < size, size)


def random_rows(
    rng_key: jax.Array, step, rows: PyTree, offset, size, batch_size: int, *, always_full: bool = False
) -> Batch:
    """A fresh uniform batch without replacement; the whole client if it has fewer rows.

    ``always_full`` says that no client has fewer rows, so that nothing needs a mask.
    """
    index = choose_without_replacement(rng_key, size, batch_size, step, most=_num_rows(rows))
    if always_full:
        return Batch(_each(lambda a: _take(a, offset + index), rows), None, jnp.asarray(batch_size))
    taken = offset + jnp.minimum(index, size - 1)
    mask = jnp.arange(batch_size) < size
    return Batch(_each(lambda a: _take(a, taken), rows), mask, jnp.minimum(size, batch_size))


def _energy(model: Model, total_rows, position: PyTree, batch: Batch, dtype) -> jax.Array:
    terms = model.loglikelihoods(position, batch.rows)
    if batch.mask is not None:
        terms = jnp.where(batch.mask, terms, 0)
    scale = jnp.asarray(total_rows, dtype) / jnp.asarray(batch.count, dtype)
    return -jnp.asarray(model.logprior_fn(position)) - scale * jnp.sum(terms)


def energy_fn(model: Model, total_rows) -> Callable[[jax.Array, Batch], jax.Array]:
    """Energy of a client, f̃^c(θ) = −log π0(θ) − (n/b) Σ_{i in batch} log p(x_i | θ).

    With p_c = n_c/n, the factor (n_c/b)·(1/p_c) of a batch of b rows is n/b: on all rows this is
    f^c = −log π0 + ℓ^c/p_c, and Σ_c p_c f^c is the global energy with its prior counted once.
    """
    return lambda theta, batch: _energy(model, total_rows, model.unravel(theta), batch, theta.dtype)


def clip_rows(of_row: jax.Array, clip_norm) -> tuple[jax.Array, jax.Array]:
    """Gradients of rows (n, d), and the factor (n,) that cuts each to a norm.

    Very large and very small gradients are brought to a moderate size first, so that their squares neither
    over- nor underflow, and one that is no number counts as zero: none may take a row past its bound.
    """
    of_row = jnp.where(jnp.all(jnp.isfinite(of_row), axis=1, keepdims=True), of_row, 0)
    largest = jnp.max(jnp.abs(of_row), axis=1)
    unit = jnp.where(largest > 1e12, 2.0**-80, jnp.where(largest < 1e-12, 2.0**80, 1.0)).astype(of_row.dtype)
    norm = jnp.sqrt(jnp.sum((of_row * unit[:, None]) ** 2, axis=1))
    return of_row, jnp.where(norm <= clip_norm * unit, 1.0, clip_norm * unit / norm).astype(of_row.dtype)


def gradient_fn(model: Model, total_rows, clip_norm=None) -> Callable[[jax.Array, Batch], jax.Array]:
    """Gradient of a client's energy; with ``clip_norm`` each row's share is first cut to that norm.

    With g_i = ∇ log p(x_i | θ), the clipped gradient is −∇log π0 − (n/b) Σ_i g_i·min(1, C/‖g_i‖). The
    prior is not clipped: it holds no data. Clipping changes the target to a pseudo-posterior.
    """

    def whole(theta: jax.Array, batch: Batch) -> jax.Array:
        # by parameters, joined at the end: the gradient of taking them out of θ would add zeros around each
        def energy(position):
            return _energy(model, total_rows, position, batch, theta.dtype)

        return ravel_pytree(jax.grad(energy)(model.unravel(theta)))[0]

    def clipped(theta: jax.Array, batch: Batch) -> jax.Array:
        assert clip_norm is not None
        of_row = jax.vmap(jax.grad(model.flat_loglikelihood), in_axes=(None, 0))(theta, batch.rows)
        of_row, factor = clip_rows(of_row, clip_norm)
        if batch.mask is not None:
            factor = jnp.where(batch.mask, factor, 0)
        scale = jnp.asarray(total_rows, theta.dtype) / jnp.asarray(batch.count, theta.dtype)
        return -jax.grad(model.flat_logprior)(theta) - scale * (factor @ of_row)

    return whole if clip_norm is None else clipped


def client_rows(data: FederatedData, client: int, capacity: int) -> Batch:
    """The first rows of one client, outside compiled code; padded to ``capacity`` under a mask."""
    size = min(int(data.sizes[client]), capacity)
    taken = data.offsets[client] + np.minimum(np.arange(capacity), size - 1)
    rows = jax.tree.map(lambda a: jnp.asarray(np.asarray(a)[taken]), data.rows)
    return Batch(rows, jnp.arange(capacity) < size, jnp.asarray(size))


def largest_curvatures(
    model: Model, data: FederatedData, clients: Sequence[int], theta: jax.Array, iterations: int = 12
) -> np.ndarray:
    """Largest eigenvalue, in size, of ∇²f^c at ``theta`` for some clients.

    By power iteration on at most 1,000 rows of each client, so a little too small rather than too
    large.
    """
    capacity = min(int(data.sizes[list(clients)].max()), 1000)
    compiled = _compiled_curvature(model, iterations, str(theta.dtype))
    batches = (client_rows(data, c, capacity) for c in clients)
    return np.array([float(compiled(theta, batch, data.num_rows)) for batch in batches])


@functools.lru_cache(maxsize=32)
def _compiled_curvature(model: Model, iterations: int, dtype: str) -> Callable:
    """Compiled once per model, so that a look at the curvature costs milliseconds in a sweep."""

    @jax.jit
    def curvature(theta, batch, total_rows):
        energy = energy_fn(model, total_rows)

        def product(vector):
            return jax.jvp(jax.grad(lambda t: energy(t, batch)), (theta,), (vector,))[1]

        def step(_, vector):
            return product(vector / jnp.maximum(jnp.linalg.norm(vector), jnp.finfo(theta.dtype).tiny))

        start = jax.random.normal(jax.random.key(0), theta.shape, theta.dtype)
        return jnp.linalg.norm(jax.lax.fori_loop(0, iterations, step, start))

    return curvature


def pooled_mode(model: Model, data: FederatedData, theta: jax.Array, iterations: int = 200) -> jax.Array:
    """A point near the mode of the joint posterior: gradient descent from ``theta`` that only goes down.

    On at most 2,000 rows, evenly spaced; for rough answers such as a stable step size.
    """
    taken = np.unique(np.linspace(0, data.num_rows - 1, min(data.num_rows, 2000)).round().astype(int))
    rows = jax.tree.map(lambda a: jnp.asarray(np.asarray(a)[taken]), data.rows)
    energy = energy_fn(model, data.num_rows)
    batch = Batch(rows, None, jnp.asarray(len(taken)))
    down = jax.value_and_grad(lambda t: energy(t, batch))

    def step(_, carry):
        theta, value, grad, size = carry
        trial = theta - size * grad
        new_value, new_grad = down(trial)
        better = (new_value < value) & jnp.all(jnp.isfinite(new_grad))
        chosen = jax.tree.map(
            lambda new, old: jnp.where(better, new, old), (trial, new_value, new_grad), (theta, value, grad)
        )
        return *chosen, jnp.where(better, 2 * size, size / 4)

    @jax.jit
    def descend(theta):
        value, grad = down(theta)
        return jax.lax.fori_loop(0, iterations, step, (theta, value, grad, jnp.ones((), theta.dtype)))[0]

    return descend(theta)
