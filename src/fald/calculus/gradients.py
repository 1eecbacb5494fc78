"""Energies of a client and their gradients, on all of its rows or on a fresh batch."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.flatten_util import ravel_pytree

from fald.calculus.convolutions import channels_last, convolves
from fald.core.keys import integers
from fald.core.types import PyTree
from fald.problem.data import FederatedData
from fald.problem.model import Model

_POWERS = 12  # of the Hessian, by which its largest eigenvalue is found
_DESCENTS = 200  # steps down to a rough mode
_MOST_ROWS = 1000  # of a client, by which its curvature is judged
_FEW_ROWS = 64
_SQUARED_ROWS = 256  # of a client, by which steps are preconditioned
_OPERATIONS = 1.5e10  # that a look at curvatures may take: half a second or so
_HESSIAN = 2.5  # operations of a Hessian times a vector, in those of a gradient


class Batch(NamedTuple):
    """Rows to evaluate: ``mask`` marks the real ones (None: all are), ``count`` is how many those are.

    ``key`` is for a log likelihood that draws at random.
    """

    rows: PyTree
    mask: jax.Array | None
    count: jax.Array
    key: jax.Array | None = None


def choose_without_replacement(
    rng_key: jax.Array, population, count: int, step=0, *, most: int = 2**31
) -> jax.Array:
    """Draw ``count`` distinct indices from ``range(population)``, every subset equally likely.

    A partial Fisher–Yates shuffle in O(count log count), without the array that it would shuffle: step i
    swaps position i with position j_i ≥ i, and where a position's value came from is found by following the
    swaps back. ``population`` may be traced. Where the static ``count`` exceeds it, entry i ≥ population is i
    itself and the entries before it are a permutation of the whole population. ``most``, which no population
    exceeds, changes the speed alone. Indices are int32 in random order, each off the uniform law by less
    than population / 2³².

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


class Fetched(NamedTuple):
    """Some of the rows, and their numbers among all in ascending order; what is drawn must be among them."""

    number: jax.Array | np.ndarray
    rows: PyTree


class Rows(NamedTuple):
    """Where one client's rows are in the flat storage of all."""

    flat: PyTree
    offset: Any  # the client's first row
    size: Any  # its rows
    total: Any  # the rows of all clients
    capacity: int = 0  # length that clients of a size class share; a smaller one repeats its last row masked
    exact: bool = False  # whether all clients of the class have exactly so many rows
    held: Batch | None = None  # all rows of the client, if they were taken out of the storage already

    def hold(self) -> Rows:
        """The same, with the rows taken out once for all that looks at them."""
        return self._replace(held=self.all())

    def all(self) -> Batch:
        """Every row of the client."""
        if self.held is not None:
            return self.held
        if self.exact:
            return Batch(_each(lambda a: _slice(a, self.offset, self.capacity), self.flat), None, self.size)
        index = jnp.arange(self.capacity, dtype=jnp.int32)
        return Batch(self._taken(jnp.minimum(index, self.size - 1)), index < self.size, self.size)

    def some(self, rng_key: jax.Array, step, batch_size: int, *, always_full: bool = False) -> Batch:
        """A fresh uniform batch without replacement; the whole client if it has fewer rows.

        ``always_full`` says that no client has fewer rows, so that nothing needs a mask.
        """
        index = self.chosen(rng_key, step, batch_size)
        if always_full:
            return Batch(self._taken(index), None, jnp.asarray(batch_size))
        mask = jnp.arange(batch_size) < self.size
        count = jnp.minimum(self.size, batch_size)
        return Batch(self._taken(jnp.minimum(index, self.size - 1)), mask, count)

    def chosen(self, rng_key: jax.Array, step, batch_size: int) -> jax.Array:
        """Numbers within the client of the rows of a batch; where these are too few, others follow."""
        most = 2**31 if isinstance(self.flat, Fetched) else _num_rows(self.flat)
        return choose_without_replacement(rng_key, self.size, batch_size, step, most=most)

    def _taken(self, index: jax.Array) -> PyTree:
        index, flat = self.offset + index, self.flat
        if isinstance(flat, Fetched):
            index, flat = jnp.searchsorted(jnp.asarray(flat.number), index, method="scan_unrolled"), flat.rows
        return _each(lambda a: _take(a, index), flat)


def _scale(total_rows, batch: Batch, dtype) -> jax.Array:
    """n/b, the rows of all clients for each of the batch."""
    return jnp.asarray(total_rows, dtype) / jnp.asarray(batch.count, dtype)


def _energy(model: Model, position: PyTree, batch: Batch, scale: jax.Array) -> jax.Array:
    terms = model.loglikelihoods(position, batch.rows, batch.key)
    if batch.mask is not None:
        terms = jnp.where(batch.mask, terms, 0)
    return -jnp.asarray(model.logprior_fn(position)) - scale * jnp.sum(terms)


def energy_fn(model: Model, total_rows) -> Callable[[jax.Array, Batch], jax.Array]:
    """Energy of a client, f̃^c(θ) = −log π0(θ) − (n/b) Σ_{i in batch} log p(x_i | θ).

    With p_c = n_c/n, the factor (n_c/b)·(1/p_c) of a batch of b rows is n/b: on all rows this is
    f^c = −log π0 + ℓ^c/p_c, and Σ_c p_c f^c is the global energy with its prior counted once.
    """
    return lambda theta, batch: _energy(
        model, model.unravel(theta), batch, _scale(total_rows, batch, theta.dtype)
    )


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
            return _energy(model, position, batch, _scale(total_rows, batch, theta.dtype))

        gradient = jax.grad(energy)
        if convolves(model, batch.rows):
            gradient = channels_last(gradient)
        return ravel_pytree(gradient(model.unravel(theta)))[0]

    def clipped(theta: jax.Array, batch: Batch) -> jax.Array:
        assert clip_norm is not None
        keys = model.row_keys(batch.rows, batch.key)
        of_row = jax.vmap(jax.grad(model.flat_loglikelihood), in_axes=(None, 0, 0))(theta, batch.rows, keys)
        of_row, factor = clip_rows(of_row, clip_norm)
        if batch.mask is not None:
            factor = jnp.where(batch.mask, factor, 0)
        scale = _scale(total_rows, batch, theta.dtype)
        return -jax.grad(model.flat_logprior)(theta) - scale * (factor @ of_row)

    return whole if clip_norm is None else clipped


def client_rows(data: FederatedData, client: int, capacity: int) -> Batch:
    """The first rows of one client, outside compiled code; padded to ``capacity`` under a mask."""
    size = min(int(data.sizes[client]), capacity)
    taken = data.offsets[client] + np.minimum(np.arange(capacity), size - 1)
    rows = jax.tree.map(jnp.asarray, data.take(taken))
    return Batch(rows, jnp.arange(capacity) < size, jnp.asarray(size))


def affordable(
    model: Model, data: FederatedData, clients: Sequence[int], looks: int
) -> tuple[list[int], int]:
    """Which clients, and how many rows of each, to look at so often by Hessians times vectors.

    At most 1,000 rows. Where that is too much work, by the compiler's count of operations, fewer rows, then
    fewer clients, evenly spaced: the answer does not depend on the machine.
    """
    rows = min(int(data.sizes[list(clients)].max()), _MOST_ROWS)
    most = _OPERATIONS / (looks * _HESSIAN * max(_operations(model, data), 1.0))  # rows of all clients
    rows = max(1, min(rows, max(int(most / len(clients)), min(_FEW_ROWS, int(most)))))
    count = max(1, min(len(clients), int(most / rows)))
    taken = np.linspace(0, len(clients) - 1, count).astype(int)
    return [clients[i] for i in taken], rows


def _operations(model: Model, data: FederatedData) -> float:
    """Floating operations in the gradient of one row's log likelihood."""
    row = jax.tree.map(
        lambda a: jax.ShapeDtypeStruct(a.shape[1:], jax.dtypes.canonicalize_dtype(a.dtype)), data.rows
    )
    theta = jax.eval_shape(lambda: model.flat_initial_position)
    found: Any = jax.jit(jax.grad(model.flat_loglikelihood)).lower(theta, row).cost_analysis()
    return float((found or {}).get("flops", 0.0))


def largest_curvatures(
    model: Model, data: FederatedData, clients: Sequence[int], theta: jax.Array, *, root: Any = None
) -> tuple[list[int], np.ndarray]:
    """Largest eigenvalue, in size, of ∇²f^c at ``theta`` for some clients, and which these are.

    By a few powers of the Hessian on some rows of each client, so a little too small rather than too large.
    What it may take is bounded: of a large model fewer rows and clients are looked at. ``root``: √M of steps
    that are preconditioned by M, which meet √M ∇²f^c √M.
    """
    chosen, capacity = affordable(model, data, clients, _POWERS)
    found = []
    for client in chosen:
        batch, vector = client_rows(data, client, capacity), _direction(theta)
        for _ in range(_POWERS):  # not a compiled loop, which would take longer to compile
            vector, size = _times_hessian(model, theta, vector, (batch, data.num_rows, root))
        found.append(float(size))
    return chosen, np.array(found)


def squared_gradients(model: Model, data: FederatedData) -> np.ndarray:
    """Σ_i (∇ log p(x_i | θ))² over the rows of each client (clients, dim), at the model's start.

    Of a client with more than 256 rows by its first 256, times what these are of all.
    """
    theta = model.flat_initial_position

    @jax.jit
    def total(batch: Batch) -> jax.Array:
        def add(so_far, row):
            own, counts = row
            gradient = jax.grad(model.flat_loglikelihood)(theta, own)
            return so_far + jnp.where(counts, gradient, 0) ** 2, None

        return jax.lax.scan(add, jnp.zeros_like(theta), (batch.rows, batch.mask))[0]

    capacity = min(int(data.sizes.max()), _SQUARED_ROWS)
    shares = np.maximum(data.sizes / capacity, 1.0)
    sums = [np.asarray(total(client_rows(data, c, capacity))) for c in range(data.num_clients)]
    return np.stack(sums) * shares[:, None].astype(theta.dtype)


def _direction(theta: jax.Array) -> jax.Array:
    start = jax.random.normal(jax.random.key(0), theta.shape, theta.dtype)
    return start / jnp.linalg.norm(start)


@functools.partial(jax.jit, static_argnums=0)
def _times_hessian(model: Model, theta: jax.Array, vector: jax.Array, on: Any) -> tuple[jax.Array, jax.Array]:
    """The direction of ∇²f^c v, and its length."""
    batch, total_rows, root = on
    energy = energy_fn(model, total_rows)
    root = 1.0 if root is None else jnp.asarray(root, theta.dtype)
    product = root * jax.jvp(jax.grad(lambda t: energy(t, batch)), (theta,), (root * vector,))[1]
    size = jnp.linalg.norm(product)
    return product / jnp.maximum(size, jnp.finfo(theta.dtype).tiny), size


def pooled_mode(model: Model, data: FederatedData, theta: jax.Array) -> jax.Array:
    """A point near the mode of the joint posterior: gradient descent from ``theta`` that only goes down.

    On at most 2,000 rows, evenly spaced, of a large model fewer; for rough answers such as a stable step.
    """
    _, rows = affordable(model, data, [0], _DESCENTS)
    most = 2000 if rows == min(_MOST_ROWS, int(data.sizes[0])) else rows
    taken = np.unique(np.linspace(0, data.num_rows - 1, min(data.num_rows, most)).round().astype(int))
    rows = jax.tree.map(jnp.asarray, data.take(taken))
    energy = energy_fn(model, data.num_rows)
    batch = Batch(rows, None, jnp.asarray(len(taken)))
    down = jax.value_and_grad(lambda t: energy(t, batch))
    if convolves(model, rows):
        down = channels_last(down)

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
        return jax.lax.fori_loop(0, _DESCENTS, step, (theta, value, grad, jnp.ones((), theta.dtype)))[0]

    return descend(theta)
