"""How predictors of rows at many positions are computed: in float64, or in float32 where that is enough.

In float32 predictors are taken relative to those at the middle of all positions, and features to a mean, so
that rounding is relative to how far positions lie apart.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from fald.calculus.tiles import Tile, Totals

Array = NDArray[Any]

_FOR_MIDDLE = 64  # positions of which the middle is taken


class Design(NamedTuple):
    """What coefficients are multiplied with: (T, k) or (q, T, k), less the means (groups, k) of tables."""

    table: Array
    means: Array = np.empty((0, 0))


class Look:
    """Predictors in float64: coefficients (q, k, M), what they multiply, and products with slopes."""

    kind: Any = np.float64

    def __init__(self, coefficients: Array):
        self.coefficients = coefficients

    def part(self, part: slice) -> Array:
        """Coefficients of some positions."""
        return np.ascontiguousarray(self.coefficients[..., part])

    def design(self, tile: Tile) -> Design:
        """The rows of a tile."""
        return Design(tile.z)

    def predictors(self, tile: Tile, design: Design, own: Array, out: Array) -> tuple[Array, Totals]:
        """Predictors (q, T, m) at positions with coefficients ``own``, and sums that know the first ones."""
        return np.matmul(design.table, own, out=out), tile.totals.at(self.rows(design), own[0])

    def rows(self, design: Design) -> Array:
        """(T, …) what slopes are multiplied with."""
        return design.table

    def products(self, slopes: Array, designs: Array) -> Array:
        """(groups, M, k) sums of slopes (groups, T, M) times z, in float64."""
        return np.swapaxes(slopes, 1, 2) @ designs


class Single(Look):
    """The same in float32 for one table, relative to the middle of positions and the mean of its features."""

    kind = np.float32

    def __init__(self, coefficients: Array, x: Array):
        self._centre = np.append(_means(x), 0.0)
        self._middle, relative = _from_middle(coefficients)
        relative[:, -1] += self._centre @ relative
        last = np.ones_like(relative[:, :1])
        super().__init__(np.concatenate([relative, last], axis=1).astype(np.float32))

    def design(self, tile: Tile) -> Design:
        """(q, T, k + 1): the last column is the predictor at the middle."""
        return Design(_with_middle(tile.z - self._centre, tile, self._middle))

    def rows(self, design: Design) -> Array:
        """Those of the first predictor, whose last column alone differs."""
        return design.table[0]

    def products(self, slopes: Array, designs: Array) -> Array:
        """As in float64; features come back from their mean."""
        out = super().products(slopes, designs[..., :-1]).astype(np.float64)
        return out + out[..., -1:] * self._centre


class Shared(Look):
    """Values in float32 for tables side by side, each relative to the mean of its own rows in a tile."""

    kind = np.float32

    def __init__(self, coefficients: Array):
        self._middle, relative = _from_middle(coefficients)
        super().__init__(relative)

    def design(self, tile: Tile) -> Design:
        """(q, T, k): the last column is the predictor at the middle, in the place of the intercept."""
        means = tile.totals(tile.z) / tile.totals.counts
        features = tile.z[:, :-1] - np.repeat(means[:, :-1], tile.totals.sizes, axis=0)
        return Design(_with_middle(features, tile, self._middle), means)

    def predictors(self, tile: Tile, design: Design, own: Array, out: Array) -> tuple[Array, Totals]:
        """As in float64; what means and intercept say is computed so, and added to all rows of a table."""
        coefficients, moved = own.astype(np.float32), (design.means[:, None] @ own[:, None])[:, :, 0]
        coefficients[:, -1] = 1.0
        for predictors, table, known, each in zip(out, design.table, coefficients, moved.astype(np.float32)):
            _each(tile.totals, table, known, predictors)
            tile.totals.add(predictors, each)
        return out, tile.totals.at(design.table[0], coefficients[0], moved[0])


def _from_middle(coefficients: Array) -> tuple[Array, Array]:
    """The middle (q, k) of coefficients (q, k, M), and all of them relative to it."""
    step = coefficients.shape[-1] // _FOR_MIDDLE + 1
    middle = np.nan_to_num(np.median(coefficients[..., ::step], axis=-1))
    return middle, coefficients - middle[..., None]


def _each(totals: Totals, rows: Array, columns: Array, out: Array) -> Array:
    """The product of rows (T, k) and columns, a product for each table, rounded as it would be alone."""
    for own, place in zip(totals.split(rows), totals.split(out)):
        np.matmul(own, columns, out=place)
    return out


def _with_middle(design: Array, tile: Tile, middle: Array) -> Array:
    """(q, T, columns + 1) the design (T, columns), and a last column that is the predictor at the middle."""
    table = np.empty((len(middle), len(tile.z), design.shape[1] + 1), np.float32)
    table[..., :-1] = design
    table[..., -1] = _each(tile.totals, tile.z, middle.T, np.empty((len(tile.z), len(middle)))).T
    return table


class Room:
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
