"""What can be wrong with the columns of the rows: copies, constants, and values that cannot be meant."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fald.core.errors import DataError
from fald.problem.data import FederatedData

Array = NDArray[Any]

VIF_LIMIT = 100.0
"""Above this a column is, but for a hundredth of its variance, a sum of others."""

FAR = 10.0
"""Robust standard deviations from the median below which a value is never called absurd."""

_EXACT = 1e-8


def redundant_columns(data: FederatedData) -> dict[str, Any]:
    """Columns that carry nothing of their own.

    Each column is regressed on the others and an intercept. What is left of its variance is 1/VIF, the
    inverse of its variance inflation factor.

    Returns
    -------
    dict
        ``outcome``: that of all rows, if it is one value. ``constant``: columns with one value.
        ``copies``: pairs of columns of which one is the other, shifted and scaled. ``dependent``: columns
        that are exact sums of others, copies apart. ``inflated``: those whose factor is above 100, with it.

    Raises
    ------
    DataError
        If the rows are not features and an outcome.

    Examples
    --------
    >>> import fald
    >>> x = np.random.default_rng(0).normal(size=(50, 2))
    >>> rows = (np.column_stack([x, 2.2 * x[:, 0], np.ones(50)]), x[:, 1])
    >>> found = redundant_columns(fald.FederatedData.from_arrays({"a": rows}))
    >>> found["constant"], found["copies"], found["dependent"]
    (['3'], [('0', '2')], [])
    """
    x, y, names = _table(data)
    spread = x.std(axis=0)
    moving = [i for i in range(x.shape[1]) if spread[i] > _EXACT * np.abs(x[:, i]).max()]
    named = [names[i] for i in moving]
    z = (x[:, moving] - x[:, moving].mean(axis=0)) / spread[moving]
    related = z.T @ z / len(z)
    copies = [(i, j) for j in range(len(named)) for i in range(j) if abs(related[i, j]) > 1 - _EXACT]
    kept = [j for j in range(len(named)) if j not in {second for _, second in copies}]
    left = _left(related[np.ix_(kept, kept)])
    return {
        "outcome": [data.target or "the outcome"] if np.ptp(y) <= _EXACT * np.abs(y).max() else [],
        "constant": [names[i] for i in range(x.shape[1]) if i not in moving],
        "copies": [(named[i], named[j]) for i, j in copies],
        "dependent": [named[j] for j, share in zip(kept, left) if share <= _EXACT],
        "inflated": [(named[j], 1 / share) for j, share in zip(kept, left) if _EXACT < share < 1 / VIF_LIMIT],
    }


def _left(related: Array) -> list[float]:
    """The share of each column's variance that the others do not explain, from their correlations."""
    if not len(related):
        return []
    values, vectors = np.linalg.eigh(related)
    known = np.maximum(values, _EXACT**2)  # a direction that no row has leaves nothing to the columns in it
    return list(1 / np.sum(vectors**2 / known, axis=1))


def absurd_values(data: FederatedData) -> list[dict[str, Any]]:
    """Values that lie apart from all others of their column: by site and column with a count, never a value.

    A value is called absurd where it is more than ten robust standard deviations from the median, and a gap
    that is wider than the whole range of the ordinary values lies between these and it: an age of 999, or a
    −99 that stands for a missing value. Columns with two values are left alone.

    Examples
    --------
    >>> import fald
    >>> rng = np.random.default_rng(0)
    >>> age, y = rng.normal(50, 10, (60, 1)), rng.normal(size=60)
    >>> age[:2] = 999
    >>> absurd_values(fald.FederatedData.from_arrays({"a": (age, y), "b": (age[2:], y[2:])}))
    [{'client': 'a', 'column': '0', 'count': 2}]
    """
    x, y, names = _table(data)
    columns = [*zip(names, x.T), (data.target or "the outcome", y)]
    edges = np.cumsum([0, *data.sizes])
    found = []
    for name, values in columns:
        strange = _apart(values)
        for client, first, last in zip(data.names, edges, edges[1:]):
            count = int(strange[first:last].sum())
            if count:
                found.append({"client": client, "column": name, "count": count})
    return found


def _apart(values: Array) -> NDArray[np.bool_]:
    """Which values are far out and behind a gap."""
    none = np.zeros(len(values), bool)
    if len(np.unique(values)) <= 2:
        return none
    distance = np.abs(values - np.median(values))
    scale = 1.4826 * float(np.median(distance)) or 1.2533 * float(np.mean(distance))
    inside = values[distance <= FAR * scale]
    low, high = _reach(values, inside, -1), _reach(values, inside, 1)
    return (values < low) | (values > high)


def _reach(values: Array, inside: Array, sign: int) -> float:
    """The last value on one side before a gap that is wider than all ordinary values together."""
    ordinary, span = sign * inside, float(np.ptp(inside))
    end = float(ordinary.max())
    for value in np.sort((sign * values)[sign * values > end]):
        if value - end > span:
            break
        span, end = span + float(value) - end, float(value)
    return sign * end


def _table(data: FederatedData) -> tuple[Array, Array, Sequence[str]]:
    """Features (n, p), outcomes (n,) and the names of the features."""
    rows = data.rows
    if not (isinstance(rows, tuple) and len(rows) == 2 and np.ndim(rows[0]) == 2 and np.ndim(rows[1]) == 1):
        raise DataError("the rows are not features with an outcome")
    x, y = (np.asarray(part, float) for part in rows)
    return x, y, [str(n) for n in data.features] or [str(i) for i in range(x.shape[1])]
