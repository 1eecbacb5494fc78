r"""What follows from a log posterior that its model declares concave, and whether what is seen agrees.

On a line a concave function lies under every secant, beyond the secant's ends, and over it in between; and
everywhere under each of its tangent planes. So a few places along a ray bound all mass further out, one mode
is all there is, and every value that is seen anyhow tests the declaration. Where there is a strict top, a
concave log posterior falls at least linearly in every direction, so that all variances exist.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fald.fewround.rays import RADII
from fald.fewround.target import Derivatives

Array = NDArray[Any]

_INNER = (0, 4)  # places of RADII that are asked for within the bulk
_FROM, _FURTHER = 6, 3  # the first beyond them, and how many follow where far begins for all parameters
_ROUNDING, _STEEPEST = 0.1, 1e-3  # nats above a bound that are none, more of them far down
_BENT = 0.1  # curvature upwards, the proposal's own being −1, that is none


def near(dim: int) -> Array:
    """Places of ``RADII`` that are enough along the rays of a concave function.

    Examples
    --------
    >>> RADII[near(1)].round(1).tolist()
    [0.5, 1.3, 2.2, 2.8, 3.6, 4.5, 5.8, 7.4, 9.5, 12.1]
    """
    begins = int(np.searchsorted(RADII, np.sqrt(dim + 2) + 4))
    return np.array([*_INNER, *range(_FROM, min(begins + _FURTHER, len(RADII) - 1) + 1)])


def asked(dim: int) -> Array:
    """Those of ``near``, and every other one beyond, where a false declaration may show."""
    first = near(dim)
    return np.concatenate([first, np.arange(first[-1] + 2, len(RADII), 2)])


def extended(levels: Array, places: Array) -> Array:
    """(K, R) levels along rays, from those at some places of ``RADII``, the first among them.

    Beyond the last the secant through the last two is the most that a concave function can be; in between
    the chord is the least.

    Examples
    --------
    >>> found = extended(-RADII[None, near(1)] ** 2, near(1))[0]
    >>> bool(np.all(found[:13] <= -(RADII[:13] ** 2))), bool(np.all(found[13:] >= -(RADII[13:] ** 2)))
    (True, True)
    """
    radii, inner = RADII[places], RADII[: places[-1] + 1]
    known = np.maximum(levels, -1e300)  # chords to where there is no density
    out = np.array([np.interp(inner, radii, level) for level in known])
    out[:, places] = levels
    slope = (known[:, -1:] - known[:, -2:-1]) / (radii[-1] - radii[-2])
    with np.errstate(over="ignore"):
        beyond = known[:, -1:] + slope * (RADII[places[-1] + 1 :] - radii[-1])
    return np.concatenate([np.where(out <= -1e299, -np.inf, out), beyond], axis=1)


def beyond_numbers(undefined: Array, places: Array) -> Array:
    """(K, R) where along rays nothing is known, from where values at some places of ``RADII`` are no numbers.

    Examples
    --------
    >>> unknown = beyond_numbers(np.array([[False, False, True], [False] * 3]), np.array([0, 4, 6]))
    >>> int(np.argmax(unknown[0])), bool(unknown[1].any())
    (5, False)
    """
    first = np.where(undefined.any(axis=1), np.argmax(undefined, axis=1), len(places))
    last_known = np.concatenate([[-1], places[:-1], [len(RADII)]])[first]
    return np.arange(len(RADII)) > last_known[:, None]


def above_chords(levels: Array, radii: Array, top: float) -> float:
    """Most nats by which levels (K, R) along rays lie below the chord of their neighbours, less rounding.

    Examples
    --------
    >>> radii = np.array([1.0, 2.0, 3.0])
    >>> above_chords(np.array([[-1.0, -4.0, -9.0]]), radii, 0.0) <= 0
    True
    >>> round(above_chords(np.array([[-1.0, -8.0, -2.0]]), radii, 0.0), 2)
    6.39
    """
    part = (radii[1:-1] - radii[:-2]) / (radii[2:] - radii[:-2])
    chord = (1 - part) * np.maximum(levels[:, :-2], -1e300) + part * np.maximum(levels[:, 2:], -1e300)
    return _excess(chord, np.maximum(levels[:, 1:-1], -1e300), top)


def above_tangents(found: Sequence[Derivatives], positions: Array, values: Array, top: float) -> float:
    """Most nats by which values (M,) at positions (M, d) lie above tangent planes, less rounding.

    Examples
    --------
    >>> here = Derivatives(np.array([1.0]), -0.5, np.array([-1.0]), np.array([[-1.0]]))
    >>> above_tangents([here], np.array([[0.0], [3.0]]), np.array([0.0, -4.5]), 0.0) <= 0
    True
    >>> round(above_tangents([here], np.array([[3.0]]), np.array([0.0]), 0.0), 2)
    2.4
    """
    worst = -np.inf
    for here in found:
        if here.finite:
            bound = here.value + (positions - here.position) @ here.gradient
            worst = max(worst, _excess(values, bound, top))
    return worst


def bent_up(found: Sequence[Derivatives], factor: Array) -> float:
    """The largest curvature upwards at places with derivatives, in units of a lower factor (d, d), or 0."""
    curves = [np.linalg.eigvalsh(factor.T @ here.hessian @ factor) for here in found if here.finite]
    return max([float(c[-1]) for c in curves if c[-1] > _BENT - 1e-6 * c[0]], default=0.0)


def _excess(values: Array, bounds: Array, top: float) -> float:
    """Most nats of values over their bounds, less what rounding allows."""
    with np.errstate(invalid="ignore"):
        over = values - bounds - _ROUNDING - _STEEPEST * np.maximum(top - bounds, 0.0)
    return float(np.max(over[np.isfinite(values)], initial=-np.inf))
