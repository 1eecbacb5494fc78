"""Sums over rows where a log likelihood knows x through linear predictors alone.

Predictors of many rows at many positions are one matrix product; the family says what follows from them, its
derivatives too, so that gradients and Hessians are products Zᵀs and Zᵀdiag(w)Z with Z = (x, 1). Nothing is
compiled. Rows and positions are taken in tiles that stay in a core's cache, and positions are spread over
the cores; what is added up in which order depends on neither.

Values may be computed in float32 (a family says so). Predictors are then taken relative to those at the
middle of all positions, and features to their mean, so that rounding is relative to how far positions lie
apart; terms are added up in float64. Near the posterior of n rows this leaves errors of about 10⁻⁷ |η| √n
nats; by the same estimate 10⁻⁴ for a million rows, which was not measured.
"""

from __future__ import annotations

import functools
import os
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, NamedTuple

import jax
import numpy as np
from numpy.typing import NDArray

from fald.core.types import PyTree
from fald.problem.model import Model, Predictor

Array = NDArray[Any]

_ROWS, _POSITIONS = 256, 512  # of a tile
_FEW = 1 << 22  # pairs of rows and positions below which one core is as fast as two
_MANY_ROWS = 4096  # of a tile for a Hessian
_SINGLE = 4096  # rows from which on float32 is faster by enough
_FOR_MIDDLE = 64  # positions of which the middle is taken


class _Layout(NamedTuple):
    """Where predictors (q, k) and other entries are in a flat position; whether η has an axis of its own."""

    predictors: Array
    others: dict[str, Array]
    several: bool


@functools.lru_cache(maxsize=32)
def _layout(model: Model) -> _Layout:
    leaves, tree = jax.tree.flatten(model.initial_position)
    ends = np.cumsum([np.size(leaf) for leaf in leaves])
    places = [np.arange(end - np.size(leaf), end).reshape(np.shape(leaf)) for leaf, end in zip(leaves, ends)]
    index = dict(jax.tree.unflatten(tree, places))
    coefficient, intercept = index.pop("coefficient"), index.pop("intercept")
    predictors = np.concatenate([coefficient, intercept[..., None]], axis=-1)
    return _Layout(np.atleast_2d(predictors), index, predictors.ndim > 1)


def _split(layout: _Layout, positions: Array) -> tuple[Array, dict[str, Array]]:
    """Coefficients (q, k, M) and other entries (M,) of positions (M, d)."""
    coefficients = np.ascontiguousarray(np.moveaxis(positions[:, layout.predictors], 0, -1))
    return coefficients, {name: positions[:, place] for name, place in layout.others.items()}


def _tiles(rows: PyTree, size: int) -> Iterator[tuple[Array, Array]]:
    """Z = (x, 1) of some rows at a time, (T, k), and their outcomes (T, 1)."""
    x, y = rows
    for first in range(0, len(x), size):
        part = x[first : first + size]
        z = np.ones((len(part), x.shape[1] + 1))
        z[:, :-1] = part
        yield z, np.asarray(y[first : first + size], np.float64)[:, None]


def _spread(work: Callable[[slice], None], count: int, num_rows: int) -> None:
    """Do the work for all positions, some at a time and, where it pays, on all cores."""
    parts = [slice(first, first + _POSITIONS) for first in range(0, count, _POSITIONS)]
    if len(parts) == 1 or count * num_rows < _FEW:
        for part in parts:
            work(part)
        return
    with ThreadPoolExecutor(_cores()) as pool, np.errstate(all="ignore"):
        list(pool.map(work, parts))


def _cores() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def _quiet(function: Callable) -> Callable:
    """Without warnings of overflow: where there is no density, values are infinite."""

    @functools.wraps(function)
    def quiet(*args: Any) -> Any:
        with np.errstate(all="ignore"):
            return function(*args)

    return quiet


def values(model: Model, tables: Sequence[PyTree], positions: Array) -> Array:
    """(S, M) log likelihoods of the rows (x, y) of each table at positions (M, d)."""
    form, layout = _form(model), _layout(model)
    coefficients, others = _split(layout, positions)
    out = np.zeros((len(tables), len(positions)))
    # few rows are as precise as can be, whatever else is computed with them
    single = [form.single and len(x) >= _SINGLE for x, _ in tables]
    looks = [_Single if one else _Double for one in single]
    seen = [look(layout, coefficients, rows) for look, rows in zip(looks, tables)]

    @_quiet
    def work(part: slice) -> None:
        rest = {name: value[part] for name, value in others.items()}
        for i, (look, rows) in enumerate(zip(seen, tables)):
            kind = np.float32 if single[i] else np.float64
            given = {name: value.astype(kind) for name, value in rest.items()} if single[i] else rest
            here = np.ascontiguousarray(look.coefficients[..., part])
            for z, y in _tiles(rows, _ROWS):
                eta = look.design(z) @ here
                terms = form.value_fn(eta if layout.several else eta[0], y.astype(kind), given)
                out[i, part] += np.sum(terms, axis=0, dtype=np.float64)

    _spread(work, len(positions), sum(len(x) for x, _ in tables))
    return out


class _Double:
    """Predictors in float64: coefficients (q, k, M), and what they multiply."""

    def __init__(self, layout: _Layout, coefficients: Array, rows: PyTree):
        self.coefficients = coefficients

    def design(self, z: Array) -> Array:
        """(T, k)."""
        return z


class _Single:
    """The same in float32, relative to the middle of the positions and to the mean of the features."""

    def __init__(self, layout: _Layout, coefficients: Array, rows: PyTree):
        step = coefficients.shape[-1] // _FOR_MIDDLE + 1
        self._middle = np.nan_to_num(np.median(coefficients[..., ::step], axis=-1))
        self._centre = np.append(np.mean(rows[0], axis=0, dtype=np.float64), 0.0)
        relative = coefficients - self._middle[..., None]
        relative[:, -1] += self._centre @ relative
        last = np.ones_like(relative[:, :1])
        self.coefficients = np.concatenate([relative, last], axis=1).astype(np.float32)

    def design(self, z: Array) -> Array:
        """(q, T, k + 1): the last column is the predictor at the middle."""
        table = np.empty((len(self._middle), len(z), z.shape[1] + 1), np.float32)
        table[..., :-1] = z - self._centre
        table[..., -1] = (z @ self._middle.T).T
        return table


def gradients(model: Model, rows: PyTree, positions: Array) -> tuple[Array, Array]:
    """Log likelihoods (M,) and their gradients (M, d)."""
    form, layout = _form(model), _layout(model)
    coefficients, others = _split(layout, positions)
    out, grads = np.zeros(len(positions)), np.zeros(positions.shape)

    @_quiet
    def work(part: slice) -> None:
        here = np.ascontiguousarray(coefficients[..., part])
        rest = {name: value[part] for name, value in others.items()}
        for z, y in _tiles(rows, _ROWS):
            eta = z @ here
            eta = eta if layout.several else eta[0]
            out[part] += np.sum(form.value_fn(eta, y, rest), axis=0)
            _add_slopes(layout, form.slopes_fn(eta, y, rest), z, grads[part])

    _spread(work, len(positions), len(rows[0]))
    return out, grads


def _add_slopes(layout: _Layout, slopes: Any, z: Array, grads: Array) -> None:
    """Add what some rows add to gradients (M, d)."""
    count = len(layout.predictors)
    for place, slope in zip(layout.predictors, slopes):
        grads[:, place] += slope.T @ z
    for place, slope in zip(layout.others.values(), slopes[count:]):
        grads[:, place] += np.sum(slope, axis=0)


@_quiet
def hessians(model: Model, rows: PyTree, positions: Array) -> tuple[Array, Array, Array]:
    """Log likelihoods (M,), gradients (M, d) and Hessians (M, d, d)."""
    form, layout = _form(model), _layout(model)
    coefficients, others = _split(layout, positions)
    count, dim = positions.shape
    out, grads, second = np.zeros(count), np.zeros((count, dim)), np.zeros((count, dim, dim))
    size = max(64, min(_MANY_ROWS, _ROWS * _POSITIONS // count))
    for z, y in _tiles(rows, size):
        eta = z @ coefficients
        eta = eta if layout.several else eta[0]
        out += np.sum(form.value_fn(eta, y, others), axis=0)
        _add_slopes(layout, form.slopes_fn(eta, y, others), z, grads)
        bends = form.bends_fn(eta, y, others)
        for m in range(count):
            _add_bends(layout, [[bend[:, m] for bend in line] for line in bends], z, second[m])
    return out, grads, second


@_quiet
def mean_derivatives(model: Model, rows: PyTree, positions: Array) -> tuple[Array, Array]:
    """Gradient (d,) and Hessian (d, d) of the log likelihood, averaged over positions (M, d).

    Slopes and bends of a row are averaged first, so that there is one product over rows.
    """
    form, layout = _form(model), _layout(model)
    coefficients, others = _split(layout, positions)
    dim = positions.shape[1]
    grad, second = np.zeros((1, dim)), np.zeros((dim, dim))
    for z, y in _tiles(rows, max(64, _ROWS * _POSITIONS // len(positions))):
        eta = z @ coefficients
        eta = eta if layout.several else eta[0]
        slopes = form.slopes_fn(eta, y, others)
        _add_slopes(layout, [np.mean(slope, axis=1, keepdims=True) for slope in slopes], z, grad)
        bends = form.bends_fn(eta, y, others)
        _add_bends(layout, [[np.mean(bend, axis=1) for bend in line] for line in bends], z, second)
    return grad[0], second


def _add_bends(layout: _Layout, bends: Any, z: Array, second: Array) -> None:
    """Add what some rows add to a Hessian (d, d), from their bends (T,)."""
    ones = np.ones((len(z), 1))
    parts = [(place, z) for place in layout.predictors]
    parts += [(np.atleast_1d(place), ones) for place in layout.others.values()]
    for i, (place, design) in enumerate(parts):
        for j, (other, across) in enumerate(parts[i:], i):
            block = design.T @ (bends[i][j][:, None] * across)
            second[np.ix_(place, other)] += block
            if j > i:
                second[np.ix_(other, place)] += block.T


def _form(model: Model) -> Predictor:
    assert model.predictor is not None
    return model.predictor
