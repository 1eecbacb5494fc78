"""Sums that do not depend on the order of their terms: 128-bit fixed point.

A number x is held as the whole number x·2⁵⁶ modulo 2¹²⁸, in two rows of 64-bit words: low words, high words.
Addition of such numbers is exact, so a sum over sites is the same whichever way it is taken, and masks that
are added and subtracted leave no trace.

Numbers must stay below 2⁴⁷ ≈ 1.4e14 in magnitude; with at most 255 terms a sum then fills 112 bits. What lies
beyond can be refused, or *marked*: of the 16 bits above, eight count the terms that are −∞ or too far down,
and eight those that are not a number, +∞ or too large. A sum with such terms is read as −∞ or as no number.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from fald.core.errors import NonFiniteError

Words = NDArray[np.uint64]

FRACTION_BITS = 56
LIMIT = 2.0**47
MOST_TERMS = 255
MASKED_BYTES = 16  # of a number under masks
_TO_HIGH = 2.0 ** (FRACTION_BITS - 64)
_TO_LOW = 2.0**64
_LOST = np.uint64(48)  # bit of a high word from which terms that are −∞ are counted
_NONE = np.uint64(56)  # and from which those that are no number
_ONE = np.uint64(1)
_PART = 8192  # numbers at a time: what is needed on the way stays small, and in the cache
_ONE_WORD = 2.0**7  # what is smaller fits a low word; the high word repeats its sign


def encode(values: ArrayLike, *, saturate: bool = False, out: Words | None = None) -> Words:
    """Numbers as 128-bit fixed point, rounded to the nearest multiple of 2⁻⁵⁶ ≈ 1.4e-17.

    Parameters
    ----------
    values
        (n,) numbers.
    saturate
        What to do with NaN, infinities and numbers of 2⁴⁷ or more in magnitude: mark them, so that every sum
        with them is −∞ or no number, or refuse them.
    out
        (2, n) words to write to; None: new ones.

    Returns
    -------
    array
        (2, n) words: low, high.

    Raises
    ------
    NonFiniteError
        Where a number is refused. The message has its place, not its value.

    Examples
    --------
    >>> encode([1.0, -1.0]).tolist() == [[2**56, 2**64 - 2**56], [0, 2**64 - 1]]
    True
    """
    x = np.asarray(values, np.float64)
    if x.ndim != 1:
        raise ValueError(f"values must have one dimension; got shape {x.shape}")
    words = np.empty((2, len(x)), np.uint64) if out is None else out
    for part in _parts(len(x)):
        if np.abs(x[part]).max() < _ONE_WORD:  # False for NaN
            low, high = words[:, part].view(np.int64)
            scaled = x[part] * 2.0**FRACTION_BITS
            low[:] = np.rint(scaled, out=scaled)
            np.right_shift(low, 63, out=high)
        else:
            _encode(x, part, words[:, part], saturate)
    return words


def _encode(x: NDArray[np.float64], part: slice, words: Words, saturate: bool) -> None:
    size = np.abs(x[part])
    fits = size < LIMIT  # False for NaN
    if not fits.all():
        if not saturate:
            raise _refused(x)
        size[~fits] = 0.0
    size *= _TO_HIGH
    high = np.floor(size)
    words[0] = np.rint((size - high) * _TO_LOW)  # a float64 below one stays below one: no carry
    words[1] = high
    _negate(words, (x[part] < 0) & fits)
    words[1, ~fits] = np.where(x[part][~fits] <= -LIMIT, _ONE << _LOST, _ONE << _NONE)


def decode(words: Words, terms: int = MOST_TERMS) -> NDArray[np.float64]:
    """Sums in fixed point as numbers; NaN where a term was none, else −∞ where one was.

    Parameters
    ----------
    words
        (2, n) words: low, high.
    terms
        How many were summed.

    Raises
    ------
    NonFiniteError
        Where no terms within the limits have such a sum.

    Examples
    --------
    >>> decode(encode([0.1, -2.5])).tolist()
    [0.1, -2.5]
    """
    found = np.empty(words.shape[1])
    for part in _parts(len(found)):
        low, high = words[:, part].view(np.int64)
        small = np.array_equal(high, low >> 63)
        found[part] = low * 2.0**-FRACTION_BITS if small else _decoded(words[:, part], terms)
    return found


def _decoded(words: Words, terms: int) -> NDArray[np.float64]:
    marks = (words[1] + (_ONE << (_LOST - _ONE))) >> _LOST  # the sum may be negative
    words = np.stack([words[0], words[1] - (marks << _LOST)])
    negative = words[1] >> np.uint64(63) == 1
    _negate(words, negative)
    low, found = words.astype(np.float64)
    found *= 1 / _TO_HIGH
    found += low * (1 / (_TO_HIGH * _TO_LOW))
    if np.any(found >= LIMIT * terms):
        raise _outside()
    np.negative(found, out=found, where=negative)
    if marks.any():
        lost, none = marks & np.uint64(MOST_TERMS), marks >> (_NONE - _LOST)
        if np.any(lost + none > terms):
            raise _outside()
        found = np.where(none > 0, np.nan, np.where(lost > 0, -np.inf, found))
    return found


def _outside() -> NonFiniteError:
    return NonFiniteError("a sum lies outside the range of all its terms")


def _parts(count: int) -> list[slice]:
    return [slice(start, start + _PART) for start in range(0, count, _PART)]


def add(a: Words, b: Words, out: Words | None = None) -> Words:
    """a + b modulo 2¹²⁸, in a new array or in ``out``, which may be a.

    Examples
    --------
    >>> decode(add(encode([1.5]), encode([-4.0]))).tolist()
    [-2.5]
    """
    found = np.add(a, b, out=out)
    found[1] += found[0] < b[0]
    return found


def subtract(a: Words, b: Words, out: Words | None = None) -> Words:
    """a − b modulo 2¹²⁸, in a new array or in ``out``, which may be a."""
    borrowed = a[0] < b[0]
    found = np.subtract(a, b, out=out)
    found[1] -= borrowed
    return found


def _negate(a: Words, where: NDArray[np.bool_]) -> None:
    """−a modulo 2¹²⁸ in some places."""
    a ^= np.negative(where, dtype=np.uint64)  # all bits, or none
    a[0] += where
    a[1] += where & (a[0] == 0)


def total(terms: Iterable[Words]) -> Words:
    """Sum modulo 2¹²⁸ of at least one term."""
    first, *rest = terms
    found = first.copy()
    for term in rest:
        add(found, term, found)
    return found


def fixed_point_sum(values: Sequence[ArrayLike], *, saturate: bool = False) -> NDArray[np.float64]:
    """Sum arrays as ``unmask_sum`` does, without masks: equal to the last bit.

    Parameters
    ----------
    values
        Arrays of one length, at most 255 of them.
    saturate
        As in ``encode``.

    Examples
    --------
    >>> float(sum([0.1, 0.2, -0.3])), fixed_point_sum([[0.1], [0.2], [-0.3]]).tolist()
    (5.551115123125783e-17, [2.7755575615628914e-17])
    >>> fixed_point_sum([[1.0], [-np.inf]], saturate=True).tolist()
    [-inf]
    """
    if not 1 <= len(values) <= MOST_TERMS:
        raise ValueError(f"between 1 and {MOST_TERMS} arrays can be summed; got {len(values)}")
    return decode(total(encode(v, saturate=saturate) for v in values), len(values))


def _refused(x: NDArray[Any]) -> NonFiniteError:
    place = int(np.argmin(np.abs(x) < LIMIT))
    if not np.isfinite(x[place]):
        return NonFiniteError(
            f"entry {place} of {len(x)} to be summed is not finite",
            hint="the computation at this site diverged; a smaller step size often helps",
        )
    return NonFiniteError(
        f"entry {place} of {len(x)} to be summed is 2^47 (1.4e14) or more in magnitude",
        hint="declare a scaling for columns with large numbers, so that sums over rows stay moderate",
    )
