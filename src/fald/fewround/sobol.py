"""Scrambled Sobol points, the same to the last bit as those of ``scipy.stats.qmc.Sobol``.

SciPy's own class comes with all of ``scipy.stats``, whose import takes as long as that of JAX, in every
process of a federation. Its table of direction numbers (S. Joe and F. Y. Kuo, 2008) is used here.
"""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any

import numpy as np
import scipy
from numpy.typing import NDArray

Array = NDArray[Any]

_BITS = 30
_TABLE = Path(scipy.__file__).parent / "stats" / "_sobol_direction_numbers.npz"
_PLACES = np.arange(_BITS - 1, -1, -1)  # bits of a number, the highest first


@functools.lru_cache(maxsize=8)
def _directions(dim: int) -> Array:
    """(dim, bits) direction numbers before scrambling."""
    with np.load(_TABLE) as table:
        polynomials, first = table["poly"][:dim].tolist(), table["vinit"][:dim]
    found = np.ones((dim, _BITS), np.int64)
    for d, polynomial in enumerate(polynomials[1:], 1):
        degree = polynomial.bit_length() - 1
        found[d, :degree] = first[d, :degree]
        for j in range(degree, _BITS):
            number = found[d, j - degree]
            for k in range(degree):
                if polynomial >> (degree - 1 - k) & 1:
                    number ^= found[d, j - k - 1] << (k + 1)
            found[d, j] = number
    return found << _PLACES


def scrambled(count: int, dim: int, generator: np.random.Generator) -> Array:
    """(count, dim) points of the unit cube: a linear matrix scramble and a digital shift, at random.

    Examples
    --------
    >>> scrambled(4, 1, np.random.default_rng(0)).ravel().round(3).tolist()
    [0.41, 0.754, 0.56, 0.153]
    """
    kind, generator = np.uint32, generator.spawn(1)[0]
    shift = generator.integers(2, size=(dim, _BITS), dtype=kind) @ (1 << np.arange(_BITS, dtype=kind))
    lower = np.tril(generator.integers(2, size=(dim, _BITS, _BITS), dtype=kind))
    lower[:, np.arange(_BITS), np.arange(_BITS)] = 1
    digits = _directions(dim)[:, :, None] >> _PLACES & 1
    mixed = np.matmul(digits.astype(float), lower.swapaxes(1, 2).astype(float)).astype(np.int64) & 1
    directions = (mixed << _PLACES).sum(axis=2).astype(kind)
    length = max(count - 1, 1).bit_length()
    points = np.empty((1 << length, dim), kind)
    points[0] = shift
    for bit in range(length):  # in the order of binary numbers
        np.bitwise_xor(points[: 1 << bit], directions[:, bit], out=points[1 << bit : 2 << bit])
    index = np.arange(count)
    return points[index ^ index >> 1] * 2.0**-_BITS  # in the order of Gray's
