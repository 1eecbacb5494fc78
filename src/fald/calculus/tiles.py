"""Rows in tiles that stay in a core's cache, those of small tables side by side, and sums over them."""

from __future__ import annotations

import copy
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from fald.core.types import PyTree

Array = NDArray[Any]

_AT_ONCE = 8  # terms that are added up in float32
_FACTORS = 64.0  # binary digits that a product of factors may grow to


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
        if terms.dtype == np.float32:
            parts = [_in_steps(np.add, own, _AT_ONCE) for own in parts]
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


class Tile(NamedTuple):
    """Some rows: Z = (x, 1) (T, k), outcomes (T, 1), sums over groups, and which tables the groups are of."""

    z: Array
    y: Array
    totals: Totals
    tables: list[int]


def tiles(tables: Sequence[PyTree], size: int) -> Iterator[Tile]:
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


def _tile(tables: Sequence[PyTree], parts: list[tuple[int, int, int]]) -> Tile:
    sizes = [last - first for _, first, last in parts]
    own = [tuple(part[first:last] for part in tables[i]) for i, first, last in parts]
    short = any(len(rows) == 3 for rows in own)
    weights = [rows[2] if len(rows) == 3 else np.ones(len(rows[0])) for rows in own] if short else None
    width = max(rows[0].shape[1] + (len(rows) == 2) for rows in own)
    z, y = np.ones((sum(sizes), width)), np.empty((sum(sizes), 1))
    np.concatenate([rows[1] for rows in own], out=y[:, 0])
    if short:  # with an intercept or without
        for rows, end in zip(own, np.cumsum(sizes)):
            z[end - len(rows[0]) : end, : rows[0].shape[1]] = rows[0]
    else:
        np.concatenate([rows[0] for rows in own], out=z[:, :-1])
    totals = Totals(sizes, None if weights is None else np.concatenate(weights)[:, None])
    return Tile(z, y, totals, [i for i, _, _ in parts])
