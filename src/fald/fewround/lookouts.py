"""Lookouts: places with values alone, in and around a bulk and far beyond it, from which others may climb.

A hill that is narrower than the known one is met by few places, so that there must be many; values cost
least. Beside the bulk they are compared with the proposal. Far out they stand in lines: whatever the known
hill is like, it falls along a line as it fell before, and another hill is where it falls less.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

Array = NDArray[Any]

_PER_PARAMETER, _MOST = 1024, 16384  # places per parameter, and at most, of each kind
_MOST_NUMBERS = 2**19  # in all of these places, which travel
_MOST_DIM = 60  # of more parameters nobody sees narrow hills
_FEWEST_AROUND, _FEWEST_FAR = 5, 2  # of fewer climbers see every hill
_AROUND = 6.0  # sds beyond the bulk within which they lie
_ON_A_LINE = 16
_INNERMOST = 2.0  # sds from the centre
_FURTHEST = 20.0  # sds to which lines reach at least
_LESS = 0.1  # of what is to be expected, by which the fall to a place must be less
_CHOSEN = 32  # lines, those on which it is least


def around(dim: int, rng: np.random.Generator) -> Array:
    """(L, d) places in and around the bulk of a standard normal; none where they would be of no use."""
    count = _count(dim) if dim >= _FEWEST_AROUND else 0
    ways = rng.standard_normal((count, dim))
    far = np.sqrt(dim) + rng.uniform(-1, _AROUND, count)
    return (far / np.linalg.norm(ways, axis=1))[:, None] * ways


def outward(dim: int, reach: float, rng: np.random.Generator) -> Array:
    """(W, P, d) places on lines from the centre to ``reach``, the first of each at random within one step."""
    lines = _count(dim) // _ON_A_LINE if dim >= _FEWEST_FAR else 0
    ways = rng.standard_normal((lines, dim))
    ways /= np.linalg.norm(ways, axis=1)[:, None]
    steps = np.arange(_ON_A_LINE) + rng.uniform(0, 1, (lines, 1))
    radii = _INNERMOST * (max(reach, _FURTHEST) / _INNERMOST) ** (steps / _ON_A_LINE)
    return radii[:, :, None] * ways[:, None]


def _count(dim: int) -> int:
    return min(_PER_PARAMETER * dim, _MOST, _MOST_NUMBERS // dim) if dim <= _MOST_DIM else 0


def risen(lines: Array, levels: Array) -> Array:
    """(T, d) places at which lines fall least, compared with how they fell before, one of a line.

    A parabola through three places tells the fourth. It does so exactly for a normal, wherever its centre is,
    and for an exponential tail; heavier tails, and walls, lie below it.

    Parameters
    ----------
    lines, levels
        (W, P, d) places, and the log posterior (W, P) there.
    """
    if not len(lines):
        return lines[:, 0]
    radii = np.linalg.norm(lines, axis=2)
    a, b, c, x = (radii[:, i : len(radii[0]) - 3 + i] for i in range(4))
    before = [levels[:, i : levels.shape[1] - 3 + i] for i in range(4)]
    parts = [(x - b) * (x - c) / ((a - b) * (a - c)), (x - a) * (x - c) / ((b - a) * (b - c))]
    parts.append((x - a) * (x - b) / ((c - a) * (c - b)))
    with np.errstate(invalid="ignore", over="ignore", divide="ignore"):
        expected = sum(part * level for part, level in zip(parts, before))
        less = (before[3] - expected) / (before[2] - expected)
        usable = np.isfinite(less) & (expected < before[2] - 1)
    less = np.where(usable, less, 0.0)
    most = less.max(axis=1)
    # a place beyond another hill is compared with that hill, so that the first one of them counts
    first = np.argmax(less >= most[:, None] / 2, axis=1)
    chosen = np.argsort(-most, kind="stable")[:_CHOSEN]
    chosen = chosen[most[chosen] > _LESS]
    return lines[chosen, first[chosen] + 3]
