"""Sums over rows where a log likelihood knows x through linear predictors alone.

Predictors of many rows at many positions are one matrix product; the family says what follows from them, its
derivatives too, so that gradients and Hessians are products Zᵀs and Zᵀdiag(w)Z with Z = (x, 1). Nothing is
compiled. Rows and positions are taken in tiles that stay in a core's cache, small sites side by side in one;
positions are spread over the cores. What is added up in which order does not depend on the cores.

Values and gradients may be computed in float32 (a family says so). Predictors are then taken relative to
those at the middle of all positions, and features to their mean, so that rounding is relative to how far
positions lie apart; a few terms at a time are added up in float32, and all else in float64.
"""

from __future__ import annotations

import copy
import functools
import itertools
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

_BYTES = 1 << 19  # of the predictors of a tile
_POSITIONS = 512  # of a tile
_MANY_ROWS = 4096  # of a tile at most
_FEW = 1 << 22  # pairs of rows and positions below which one core is as fast as two
_SINGLE = 1024  # rows from which on float32 is faster by enough
_FOR_MIDDLE = 64  # positions of which the middle is taken
_AT_ONCE = 8  # terms that are added up in float32
_FACTORS = 64.0  # binary digits that a product of factors may grow to
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


class Totals:
    """Sums over the rows of each of the groups that a tile consists of, (groups, positions) in float64.

    Parameters
    ----------
    sizes
        Rows of each group.
    weights
        (rows, 1) how many rows each row stands for.

    Attributes
    ----------
    sizes, slices, counts
        Rows of each group, where they are, and (groups, 1) rows that they stand for.
    """

    def __init__(self, sizes: Sequence[int], weights: Array | None = None):
        ends = np.cumsum(sizes).tolist()
        self.sizes, self._weights = sizes, weights
        self.slices = [slice(end - size, end) for end, size in zip(ends, sizes)]
        each = np.ones((ends[-1], 1)) if weights is None else weights
        changes = np.flatnonzero(np.diff(sizes, prepend=-1)).tolist()
        self._alike = list(zip(changes, [*changes[1:], len(sizes)]))
        self.counts = np.concatenate([np.sum(own, axis=1) for own in self.split(each)])
        self._known: tuple[Array, Array] | None = None

    def at(self, design: Array, coefficients: Array) -> Totals:
        """The same for predictors that are the product of rows (T, k) and coefficients (k, positions)."""
        other = copy.copy(self)
        other._known = design, coefficients
        return other

    def split(self, terms: Array) -> list[Array]:
        """Terms (rows, k) of neighbouring groups with as many rows: a few (groups, rows of each, k)."""
        return [
            terms[self.slices[first].start : self.slices[last - 1].stop].reshape(
                last - first, -1, terms.shape[-1]
            )
            for first, last in self._alike
        ]

    def weighed(self, terms: Array) -> Array:
        """Terms (rows, positions), times how many rows each stands for."""
        return terms if self._weights is None else self._weights * terms

    def __call__(self, terms: Array) -> Array:
        """Sums of terms (rows, positions)."""
        parts = self.split(self.weighed(terms))
        if terms.dtype == np.float32 and len(self.slices) == 1:
            parts = [_in_steps(np.add, parts[0], _AT_ONCE)]
        return _joined([np.sum(own, axis=1, dtype=np.float64) for own in parts])

    def linear(self, weights: Array, eta: Array) -> Array:
        """Sums of weights (rows, 1) times η (rows, positions); of all rows at once where rows make up η."""
        if self._known is None:
            return self(weights * eta)
        design, coefficients = self._known
        rows = self.split(self.weighed(weights) * design.astype(np.float64, copy=False))
        # one product for each group, with the rounding that it would have alone
        return _joined([(np.sum(own, axis=1, keepdims=True) @ coefficients)[:, 0] for own in rows])

    def of_logs(self, factors: Array, most: float = 2.0) -> Array:
        """Sums of the logarithms of factors (rows, positions) between 1 and ``most``, by their products."""
        step = max(1, int(_FACTORS / np.log2(most)))
        parts = [_in_steps(np.multiply, own, step) for own in self.split(factors)]
        return _joined([np.sum(np.log(own, dtype=np.float64), axis=1) for own in parts])


def _joined(parts: Sequence[Any]) -> Array:
    return parts[0] if len(parts) == 1 else np.concatenate(parts)


def _in_steps(operation: np.ufunc, terms: Array, step: int) -> Array:
    """Sums or products of every ``step`` rows of terms (groups, rows, k); far faster than reduceat."""
    groups, rows, positions = terms.shape
    whole = rows // step * step
    if not whole:
        return operation.reduce(terms, axis=1, keepdims=True)
    out = operation.reduce(terms[:, :whole].reshape(groups, -1, step, positions), axis=2)
    if whole == rows:
        return out
    return np.concatenate([out, operation.reduce(terms[:, whole:], axis=1, keepdims=True)], axis=1)


class _Tile(NamedTuple):
    """Some rows: Z = (x, 1) (T, k), outcomes (T, 1), sums over groups, and which tables the groups are of."""

    z: Array
    y: Array
    totals: Totals
    tables: list[int]


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


def _tiles(tables: Sequence[PyTree], size: int) -> Iterator[_Tile]:
    """All rows of some tables (x, y) or (z, y, weights), at most ``size`` at a time.

    A table is cut as if it were alone, and those of one length stand side by side.
    """
    parts: list[tuple[int, int, int]] = []  # of the next tile: table, first row, last row
    room = size
    for i in sorted(range(len(tables)), key=lambda i: len(tables[i][0])):
        first, count = 0, len(tables[i][0])
        if room < min(count, size):
            yield _tile(tables, parts)
            parts, room = [], size
        while first < count:
            last = min(first + room, count)
            parts.append((i, first, last))
            room -= last - first
            first = last
            if not room:
                yield _tile(tables, parts)
                parts, room = [], size
    if parts:
        yield _tile(tables, parts)


def _tile(tables: Sequence[PyTree], parts: list[tuple[int, int, int]]) -> _Tile:
    sizes = [last - first for _, first, last in parts]
    short = any(len(tables[i]) == 3 for i, _, _ in parts)
    width = tables[0][0].shape[1] + (0 if len(tables[0]) == 3 else 1)
    z, y, weights = np.ones((sum(sizes), width)), np.empty((sum(sizes), 1)), np.ones((sum(sizes), 1))
    start = 0
    for (i, first, last), size in zip(parts, sizes):
        x, outcome, *given = tables[i]
        z[start : start + size, : x.shape[1]] = x[first:last]
        y[start : start + size, 0] = outcome[first:last]
        if given:
            weights[start : start + size, 0] = given[0][first:last]
        start += size
    return _Tile(z, y, Totals(sizes, weights if short else None), [i for i, _, _ in parts])


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


def _looks(model: Model, tables: Sequence[PyTree], coefficients: Array) -> list[tuple[list[int], _Look]]:
    """How to look at which tables: those with few rows together, and as precisely as can be."""
    form = _form(model)
    many = [i for i, table in enumerate(tables) if form.single and len(table[0]) >= _SINGLE]
    few = sorted(set(range(len(tables))) - set(many))
    looks: list[tuple[list[int], _Look]] = [([i], _Single(coefficients, tables[i])) for i in many]
    return [*looks, *([(few, _Look(coefficients))] if few else [])]


class _Look:
    """Predictors in float64: coefficients (q, k, M), what they multiply, and products with slopes."""

    kind: Any = np.float64

    def __init__(self, coefficients: Array):
        self.coefficients = coefficients

    def part(self, part: slice) -> Array:
        """Coefficients of some positions."""
        return np.ascontiguousarray(self.coefficients[..., part])

    def design(self, z: Array) -> Array:
        """(T, k) or (q, T, k)."""
        return z

    def rows(self, design: Array) -> Array:
        """(T, …) what slopes are multiplied with, of what ``design`` gave."""
        return design

    def products(self, slopes: Array, designs: Array) -> Array:
        """(groups, M, k) sums of slopes (groups, T, M) times z, in float64."""
        return np.swapaxes(slopes, 1, 2) @ designs


class _Single(_Look):
    """The same in float32, relative to the middle of the positions and to the mean of the features."""

    kind = np.float32

    def __init__(self, coefficients: Array, rows: PyTree):
        step = coefficients.shape[-1] // _FOR_MIDDLE + 1
        self._middle = np.nan_to_num(np.median(coefficients[..., ::step], axis=-1))
        self._centre = np.append(_means(rows[0]), 0.0)
        relative = coefficients - self._middle[..., None]
        relative[:, -1] += self._centre @ relative
        last = np.ones_like(relative[:, :1])
        super().__init__(np.concatenate([relative, last], axis=1).astype(np.float32))

    def design(self, z: Array) -> Array:
        """(q, T, k + 1): the last column is the predictor at the middle."""
        table = np.empty((len(self._middle), len(z), z.shape[1] + 1), np.float32)
        table[..., :-1] = z - self._centre
        table[..., -1] = (z @ self._middle.T).T
        return table

    def rows(self, design: Array) -> Array:
        """Those of the first predictor, whose last column alone differs."""
        return design[0]

    def products(self, slopes: Array, designs: Array) -> Array:
        """As in float64; features come back from their mean."""
        out = super().products(slopes, designs[..., :-1]).astype(np.float64)
        return out + out[..., -1:] * self._centre


class _Room:
    """Memory that is used again and again: to get it from the system would take longer than to fill it."""

    def __init__(self, kind: Any):
        self._memory = np.empty(0, kind)

    def of(self, *shape: int) -> Array:
        """An array of this shape, which is that of the last call too."""
        size = int(np.prod(shape))
        if len(self._memory) < size:
            self._memory = np.empty(size, self._memory.dtype)
        return self._memory[:size].reshape(shape)


def _means(x: Array) -> Array:
    """(features,) means, without a copy of the rows."""
    size = 1 << 16
    parts = (np.sum(x[first : first + size], axis=0, dtype=np.float64) for first in range(0, len(x), size))
    return np.asarray(sum(parts, np.zeros(x.shape[1])) / len(x))


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
            room = _Room(look.kind)
            for tile in _tiles([tables[i] for i in which], size):
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
    layout: _Layout, look: _Look, seen: tuple[Any, Array, Totals], to: tuple[Array, list[int], slice]
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
    look, all_of_them = _Look(coefficients), slice(None)
    shape = (len(tables), *positions.shape)
    out, grads, second = np.zeros(shape[:2]), np.zeros(shape), np.zeros((*shape, shape[-1]))
    for tile in _tiles(tables, _tile_rows(len(positions), len(layout.predictors))):
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
    for tile in _tiles(tables, _MANY_ROWS):
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
    look, dim = _Look(coefficients), positions.shape[1]
    grads, second = np.zeros((len(tables), 1, dim)), np.zeros((len(tables), 1, dim, dim))
    for tile in _tiles(tables, _tile_rows(len(positions), len(layout.predictors))):
        eta = tile.z @ coefficients
        eta = eta if layout.several else eta[0]
        slopes = [np.mean(one, axis=1, keepdims=True) for one in form.slopes_fn(eta, tile.y, others)]
        _add_slopes(layout, look, (slopes, tile.z, tile.totals), (grads, tile.tables, slice(None)))
        bends = form.bends_fn(eta, tile.y, others)
        means = [[np.mean(bend, axis=1, keepdims=True) for bend in line] for line in bends]
        _add_bends(layout, means, tile, second)
    return grads[:, 0], second[:, 0]


def _add_bends(layout: _Layout, bends: Any, tile: _Tile, second: Array) -> None:
    """Add what the rows of a tile add to Hessians (S, M, d, d), from their bends (T, M)."""
    places = [*layout.predictors, *map(np.atleast_1d, layout.others.values())]
    count, k = len(layout.predictors), tile.z.shape[1]
    left, right = np.triu_indices(k)
    pairs = tile.z[:, left] * tile.z[:, right] if k <= _PAIRS else None
    for own, rows in zip(tile.tables, tile.totals.slices):
        z = tile.z[rows]
        for i, place in enumerate(places):
            for j, other in enumerate(places[i:], i):
                bend = np.broadcast_to(bends[i][j], (len(tile.z), second.shape[1]))
                bend = tile.totals.weighed(bend)[rows]
                if i >= count:
                    block = np.sum(bend, axis=0)[:, None, None]
                elif j >= count:
                    block = (bend.T @ z)[:, :, None]
                elif pairs is None:
                    block = np.stack([z.T @ (one[:, None] * z) for one in bend.T])
                else:
                    block = np.empty((second.shape[1], k, k))
                    block[:, left, right] = block[:, right, left] = bend.T @ pairs[rows]
                second[own][:, place[:, None], other] += block
                if j > i:
                    second[own][:, other[:, None], place] += np.swapaxes(block, 1, 2)


def _form(model: Model) -> Predictor:
    assert model.predictor is not None
    return model.predictor
