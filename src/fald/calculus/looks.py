"""How predictors of rows at many positions are computed: in float64, or in float32 where that is enough.

In float32 predictors are taken relative to those at the middle of all positions, and features to their mean,
so that rounding is relative to how far positions lie apart.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

Array = NDArray[Any]

_FOR_MIDDLE = 64  # positions of which the middle is taken


class Look:
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


class Single(Look):
    """The same in float32 for one table, relative to the middle of positions and the mean of its features."""

    kind = np.float32

    def __init__(self, coefficients: Array, x: Array):
        self._centre = np.append(_means(x), 0.0)
        step = coefficients.shape[-1] // _FOR_MIDDLE + 1
        self._middle = np.nan_to_num(np.median(coefficients[..., ::step], axis=-1))
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
