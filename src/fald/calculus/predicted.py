"""Sums over rows where a log likelihood knows x through linear predictors alone.

Predictors of many rows at many positions are one matrix product; the family says what follows from them, its
derivatives too, so that gradients and Hessians are products Zᵀs and Zᵀdiag(w)Z with Z = (x, 1). Nothing is
compiled. Rows and positions are taken in tiles that stay in a core's cache, small sites side by side in one;
positions are spread over the cores. What is added up in which order does not depend on the cores.

Values and gradients may be computed in float32 (a family says so, ``looks.py`` how); a few terms at a time
are then added up in float32, and all else in float64.
"""

from __future__ import annotations

import functools
import itertools
import os
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, NamedTuple

import jax
import numpy as np
from numpy.typing import NDArray

from fald.calculus.looks import Look, Room, Single
from fald.calculus.tiles import Tile, Totals, tiles
from fald.core.types import PyTree
from fald.problem.model import Model, Predictor

Array = NDArray[Any]

_BYTES = 1 << 20  # of the predictors of a tile
_POSITIONS = 512  # of a tile
_MANY_ROWS = 4096  # of a tile at most
_FEW = 1 << 22  # pairs of rows and positions below which one core is as fast as two
_SINGLE = 1024  # rows from which on float32 is faster by enough
_SHORTENED = 1 << 14  # rows that are shortened at once
_SMALL = 256  # rows of a table, on average, below which tables are looked at together
_PAIRS = 32  # predictors' coefficients up to which all products of two are made first


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


def shortened(model: Model, rows: PyTree) -> PyTree:
    """Rows (x, y), or a few (z, y, weights) that stand for them where residuals count by their squares alone.

    With QR = (Z, y − c), Σ(y − c − Zβ)² over all rows is that over the rows of R, for every β. An empty row
    stands for all others, of which only the number matters.
    """
    form = model.predictor
    if form is None or form.squares is None:
        return rows
    (x, y), centre = rows, form.squares
    short = np.zeros((0, x.shape[1] + 2))
    for first in range(0, len(x), _SHORTENED):
        part = x[first : first + _SHORTENED], y[first : first + _SHORTENED] - centre
        joined = np.column_stack([part[0], np.ones(len(part[0])), part[1]])
        short = np.asarray(np.linalg.qr(np.concatenate([short, joined]), mode="r"))
    if len(x) <= len(short):
        return rows
    short = np.concatenate([short, np.zeros((1, short.shape[1]))])
    return short[:, :-1], short[:, -1] + centre, np.append(np.ones(len(short) - 1), len(x) - len(short) + 1.0)


def _tile_rows(count: int, predictors: int, itemsize: int = 8) -> int:
    """Rows of a tile for so many positions."""
    rows = _BYTES // (itemsize * predictors * min(max(count, 1), _POSITIONS))
    return int(np.clip(rows // 64 * 64, 64, _MANY_ROWS))


def _spread(work: Callable[[list[slice]], None], count: int, num_rows: int) -> None:
    """Do the work for all positions, in parts and, where it pays, on all cores."""
    parts = [slice(first, first + _POSITIONS) for first in range(0, count, _POSITIONS)]
    cores = min(_cores(), len(parts)) if count * num_rows >= _FEW else 1
    if cores == 1:
        work(parts)
        return
    with ThreadPoolExecutor(cores) as pool:
        list(pool.map(work, [list(own) for own in np.array_split(np.array(parts, object), cores)]))


def _cores() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def _quiet(function: Callable) -> Callable:
    """Without warnings of overflow: where there is no density, values are infinite."""

    @functools.wraps(function)
    def quiet(*args: Any) -> Any:
        with np.errstate(all="ignore"):
            return function(*args)

    return quiet


def _looks(model: Model, tables: Sequence[PyTree], coefficients: Array) -> list[tuple[list[int], Look]]:
    """How to look at which tables: those with few rows together, and as precisely as can be."""
    single, every = _form(model).single, range(len(tables))
    many = [i for i in every if single and len(tables[i][0]) >= _SINGLE]
    few = sorted(set(every) - set(many))
    looks: list[tuple[list[int], Look]] = [([i], Single(coefficients, tables[i][0])) for i in many]
    return [*looks, *([(few, Look(coefficients))] if few else [])]


def values(model: Model, tables: Sequence[PyTree], positions: Array) -> Array:
    """(S, M) log likelihoods of the rows (x, y) of each table at positions (M, d)."""
    return _first_order(model, tables, positions, slopes=False)[0]


def gradients(model: Model, tables: Sequence[PyTree], positions: Array) -> tuple[Array, Array]:
    """Log likelihoods (S, M) of the rows of each table and their gradients (S, M, d)."""
    return _first_order(model, tables, positions, slopes=True)


def _first_order(
    model: Model, tables: Sequence[PyTree], positions: Array, slopes: bool
) -> tuple[Array, Array]:
    form, layout = _form(model), _layout(model)
    coefficients, others = _split(layout, positions)
    out = np.zeros((len(tables), len(positions)))
    grads = np.zeros((len(tables), *positions.shape)) if slopes else out
    looks = _looks(model, tables, coefficients)

    @_quiet
    def work(parts: list[slice]) -> None:
        for which, look in looks:
            given = {name: value.astype(look.kind) for name, value in others.items()}
            here = [look.part(part) for part in parts]
            rest = [{name: value[part] for name, value in given.items()} for part in parts]
            size = _tile_rows(len(positions), len(layout.predictors), np.dtype(look.kind).itemsize)
            room = Room(look.kind)
            for tile in tiles([tables[i] for i in which], size):
                design, y = look.design(tile.z), tile.y.astype(look.kind)
                groups = [which[i] for i in tile.tables]
                for part, own, entries in zip(parts, here, rest):
                    eta = np.matmul(design, own, out=room.of(len(own), len(tile.z), own.shape[-1]))
                    eta = eta if layout.several else eta[0]
                    if slopes:
                        bent = form.slopes_fn(eta, y, entries)
                        _add_slopes(layout, look, (bent, design, tile.totals), (grads, groups, part))
                    known = tile.totals if layout.several else tile.totals.at(look.rows(design), own[0])
                    out[groups, part] += form.value_fn(eta, y, entries, known)

    _spread(work, len(positions), sum(len(table[0]) for table in tables))
    return out, grads


def _add_slopes(
    layout: _Layout, look: Look, seen: tuple[Any, Array, Totals], to: tuple[Array, list[int], slice]
) -> None:
    """Add what the rows of a tile add to gradients (S, M, d) of the tables of its groups."""
    (slopes, design, totals), (grads, groups, part) = seen, to
    for place, slope in zip(layout.predictors, slopes):
        # neighbours are added in place, which takes a fraction of the time
        where = slice(place[0], place[-1] + 1) if place[-1] - place[0] + 1 == len(place) else place
        each = zip(totals.split(totals.weighed(slope)), totals.split(look.rows(design)))
        for i, own in zip(groups, itertools.chain.from_iterable(look.products(*both) for both in each)):
            grads[i, part][:, where] += own
    for place, slope in zip(layout.others.values(), slopes[len(layout.predictors) :]):
        grads[groups, part, place] += totals(slope)


@_quiet
def hessians(model: Model, tables: Sequence[PyTree], positions: Array) -> tuple[Array, Array, Array]:
    """Log likelihoods (S, M), gradients (S, M, d) and Hessians (S, M, d, d) of the rows of each table."""
    form, layout = _form(model), _layout(model)
    coefficients, others = _split(layout, positions)
    look, all_of_them = Look(coefficients), slice(None)
    shape = (len(tables), *positions.shape)
    out, grads, second = np.zeros(shape[:2]), np.zeros(shape), np.zeros((*shape, shape[-1]))
    for tile in tiles(tables, _tile_rows(len(positions), len(layout.predictors))):
        eta = tile.z @ coefficients
        eta = eta if layout.several else eta[0]
        slopes, bends = form.slopes_fn(eta, tile.y, others), form.bends_fn(eta, tile.y, others)
        _add_slopes(layout, look, (slopes, tile.z, tile.totals), (grads, tile.tables, all_of_them))
        _add_bends(layout, bends, tile, second)
        out[tile.tables] += form.value_fn(eta, tile.y, others, tile.totals)
    return out, grads, second


def small(model: Model, tables: Sequence[PyTree]) -> bool:
    """Whether ``hessians_each`` is for these tables: many small ones, of few predictors alone."""
    layout = _layout(model)
    rows = sum(len(table[0]) for table in tables)
    return not layout.others and layout.predictors.shape[1] <= _PAIRS and rows < _SMALL * len(tables)


@_quiet
def hessians_each(model: Model, tables: Sequence[PyTree], positions: Array) -> tuple[Array, Array, Array]:
    """Log likelihoods (S,), gradients (S, d) and Hessians (S, d, d), each table at its position (S, d)."""
    form, layout = _form(model), _layout(model)
    coefficients = positions[:, layout.predictors]
    left, right = np.triu_indices(layout.predictors.shape[1])
    out, grads = np.zeros(len(tables)), np.zeros(positions.shape)
    second = np.zeros((*positions.shape, positions.shape[1]))
    for tile in tiles(tables, _MANY_ROWS):
        own, totals, z = np.array(tile.tables), tile.totals, tile.z
        pairs = z[:, left] * z[:, right]
        eta = np.einsum("tk,tqk->qt", z, np.repeat(coefficients[own], totals.sizes, axis=0))[..., None]
        eta = eta if layout.several else eta[0]
        bends = form.bends_fn(eta, tile.y, {})
        for i, (place, slope) in enumerate(zip(layout.predictors, form.slopes_fn(eta, tile.y, {}))):
            grads[own[:, None], place] += totals(slope * z)
            for j, other in enumerate(layout.predictors[i:], i):
                block = np.empty((len(own), len(place), len(other)))
                block[:, left, right] = block[:, right, left] = totals(bends[i][j] * pairs)
                second[own[:, None, None], place[:, None], other] += block
                if j > i:
                    second[own[:, None, None], other[:, None], place] += block
        out[own] += form.value_fn(eta, tile.y, {}, totals)[:, 0]
    return out, grads, second


@_quiet
def mean_derivatives(model: Model, tables: Sequence[PyTree], positions: Array) -> tuple[Array, Array]:
    """Gradients (S, d) and Hessians (S, d, d) of each table's log likelihood, averaged over positions (M, d).

    Slopes and bends of a row are averaged first, so that there is one product over rows.
    """
    form, layout = _form(model), _layout(model)
    coefficients, others = _split(layout, positions)
    look, dim = Look(coefficients), positions.shape[1]
    grads, second = np.zeros((len(tables), 1, dim)), np.zeros((len(tables), 1, dim, dim))
    for tile in tiles(tables, _tile_rows(len(positions), len(layout.predictors))):
        eta = tile.z @ coefficients
        eta = eta if layout.several else eta[0]
        slopes = [np.mean(one, axis=1, keepdims=True) for one in form.slopes_fn(eta, tile.y, others)]
        _add_slopes(layout, look, (slopes, tile.z, tile.totals), (grads, tile.tables, slice(None)))
        bends = form.bends_fn(eta, tile.y, others)
        means = [[np.mean(bend, axis=1, keepdims=True) for bend in line] for line in bends]
        _add_bends(layout, means, tile, second)
    return grads[:, 0], second[:, 0]


def _add_bends(layout: _Layout, bends: Any, tile: Tile, second: Array) -> None:
    """Add what the rows of a tile add to Hessians (S, M, d, d), from their bends (T, M)."""
    places = [*layout.predictors, *map(np.atleast_1d, layout.others.values())]
    count, k, totals = len(layout.predictors), tile.z.shape[1], tile.totals
    left, right = np.triu_indices(k)
    pairs = tile.z[:, left] * tile.z[:, right] if k <= _PAIRS else None
    tables, every = np.array(tile.tables)[:, None, None, None], np.arange(second.shape[1])[:, None, None]

    def products(bend: Array, columns: Array) -> Array:
        """(groups, M, columns) sums over the rows of each group."""
        each = zip(totals.split(bend), totals.split(columns))
        return np.concatenate([np.swapaxes(own, 1, 2) @ z for own, z in each])

    for i, place in enumerate(places):
        for j, other in enumerate(places[i:], i):
            bend = totals.weighed(np.broadcast_to(bends[i][j], (len(tile.z), second.shape[1])))
            if i >= count:
                block = products(bend, np.ones((len(bend), 1)))[..., None]
            elif j >= count:
                block = products(bend, tile.z)[..., None]
            elif pairs is None:
                block = np.array(
                    [
                        [tile.z[rows].T @ (one[:, None] * tile.z[rows]) for one in bend[rows].T]
                        for rows in totals.slices
                    ]
                )
            else:
                block = np.empty((len(tables), second.shape[1], k, k))
                block[..., left, right] = block[..., right, left] = products(bend, pairs)
            second[tables, every, place[:, None], other] += block
            if j > i:
                second[tables, every, other[:, None], place] += np.swapaxes(block, 2, 3)


def _form(model: Model) -> Predictor:
    assert model.predictor is not None
    return model.predictor
