"""Importance weights: smoothing, how far to trust them, and the precision of what they estimate."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
import scipy  # whose parts load when they are first used
from numpy.typing import NDArray

Array = NDArray[Any]


_NOTHING = (
    1e-9  # of the largest value: where a tail holds so little, all rests on few draws, and none is fitted
)


class Smoothed(NamedTuple):
    """Normalised weights (C,), the shape k-hat of their tail, and the effective sample size 1/Σw²."""

    weights: Array
    khat: float
    ess: float


def fit_tail(excesses: Array) -> tuple[float, float]:
    """Shape and scale of a generalised Pareto law for sorted positive excesses.

    The estimator of Zhang and Stephens (2009), with a weak prior that pulls the shape of few excesses
    towards one half, as in Vehtari, Simpson, Gelman, Yao and Gabry (2024).
    """
    n = len(excesses)
    largest, quarter = excesses[-1], excesses[max(0, int(n / 4 + 0.5) - 1)]
    grid = 30 + int(np.sqrt(n))
    b = 1 / largest + (1 - np.sqrt(grid / (np.arange(1, grid + 1) - 0.5))) / (3 * quarter)
    shapes = np.mean(np.log1p(-b[:, None] * excesses), axis=1)
    profile = n * (np.log(-b / shapes) - shapes - 1)
    posterior = np.exp(profile - scipy.special.logsumexp(profile))
    centre = float(np.sum(b * posterior))
    shape = float(np.mean(np.log1p(-centre * excesses)))
    scale = -shape / centre
    return (n * shape + 5) / (n + 10), scale


def _tail_length(count: int) -> int:
    return min(count // 5, int(np.ceil(3 * np.sqrt(count))))


def tail_shape(values: Array) -> float:
    """k-hat of the largest of some non-negative values: moments of order up to 1/k-hat are finite.

    Examples
    --------
    >>> u = (np.arange(10_000) + 0.5) / 10_000
    >>> round(tail_shape(u ** -0.5), 2), tail_shape(np.ones(100))
    (0.5, 0.0)
    """
    length = _tail_length(len(values))
    top = np.sort(np.partition(values, len(values) - length - 1)[-length - 1 :])
    if length < 5:
        return np.inf
    excesses = top[1:] - top[0]
    if not np.isfinite(top).all():
        return np.inf
    if excesses[-1] <= 1e-9 * abs(top[-1]):
        return 0.0
    if top[0] <= _NOTHING * top[-1]:
        return np.inf
    return fit_tail(np.maximum(excesses, 1e-12 * excesses[-1]))[0]


def smooth(log_weights: Array) -> Smoothed:
    """Pareto-smoothed normalised weights.

    The largest weights are replaced by the expected order statistics of a generalised Pareto law fitted to
    them, and none may exceed the largest raw one.

    Examples
    --------
    >>> flat = smooth(np.zeros(1000))
    >>> flat.khat, round(flat.ess)
    (0.0, 1000)
    """
    logs = np.where(np.isnan(log_weights), -np.inf, log_weights)
    most = float(np.max(logs)) if len(logs) else -np.inf
    if not np.isfinite(most):
        return Smoothed(np.full(len(logs), 1 / max(len(logs), 1)), np.inf, 1.0)
    ratios = np.exp(logs - most)
    length, khat = _tail_length(len(ratios)), np.inf
    if length >= 5:
        # stable, because a site on another processor must break ties in the same way
        top = np.argsort(ratios, kind="stable")[-length - 1 :]
        tail, cutoff = top[1:], ratios[top[0]]
        excesses = ratios[tail] - cutoff
        khat = np.inf if cutoff <= _NOTHING else 0.0
        if khat == 0 and excesses[-1] > 1e-9:
            khat, scale = fit_tail(np.maximum(excesses, 1e-12 * excesses[-1]))
            p = (np.arange(length) + 0.5) / length
            lifted = scale * np.expm1(-khat * np.log1p(-p)) / khat if khat else -scale * np.log1p(-p)
            ratios[tail] = np.minimum(cutoff + lifted, 1.0)
    weights = ratios / ratios.sum()
    return Smoothed(weights, khat, float(1 / np.sum(weights**2)))


class Moments(NamedTuple):
    """Weighted mean (d,) and covariance (d, d)."""

    mean: Array
    covariance: Array

    @property
    def sd(self) -> Array:
        """Standard deviations."""
        return np.sqrt(np.diag(self.covariance))


def moments(positions: Array, weights: Array) -> Moments:
    """Weighted mean and covariance."""
    mean = weights @ positions
    centred = positions - mean
    return Moments(mean, (weights[:, None] * centred).T @ centred)


class Precision(NamedTuple):
    """Per coordinate: Monte-Carlo standard errors of mean and sd in units of the sd, and tail shapes."""

    mean: Array
    sd: Array
    khat: Array


def precision(positions: Array, weights: Array) -> Precision:
    """How precisely weighted draws in antithetic pairs give means and sds.

    A pair is one observation: mirrored draws cancel in the mean and double in the square. ``khat`` is the
    tail shape of weight times squared distance; above 0.7 the sd cannot be trusted.
    """
    mean = weights @ positions
    centred = positions - mean
    squares = centred**2
    variance = weights @ squares
    sd = np.sqrt(np.maximum(variance, np.finfo(float).tiny))
    first = (weights[:, None] * centred).reshape(-1, 2, positions.shape[1]).sum(axis=1)
    second = (weights[:, None] * (squares - variance)).reshape(-1, 2, positions.shape[1]).sum(axis=1)
    shapes = [tail_shape(weights * column) for column in squares.T]
    known = variance > 0  # not if a single draw has all the weight
    return Precision(
        np.where(known, np.sqrt(np.sum(first**2, axis=0)) / sd, np.inf),
        np.where(known, np.sqrt(np.sum(second**2, axis=0)) / (2 * sd**2), np.inf),
        np.array(shapes),
    )


def distinct(states: Array) -> tuple[Array, Array]:
    """Where each of the distinct rows comes first, and which share of all rows is like it.

    Chains that began as copies of one draw and have not parted are one observation, however many they are.
    The number is even, as ``precision`` wants it: where it is odd, a row is named again with share zero.

    Examples
    --------
    >>> distinct(np.array([[2.0], [1.0], [2.0], [0.0]]))
    (array([0, 1, 3, 0]), array([0.5 , 0.25, 0.25, 0.  ]))
    """
    _, first, counts = np.unique(states, axis=0, return_index=True, return_counts=True)
    order = np.argsort(first)  # as they came: neighbours must not be alike
    index, shares = first[order], counts[order] / len(states)
    return (index, shares) if len(index) % 2 == 0 else (np.append(index, index[0]), np.append(shares, 0.0))


def resample(weights: Array, count: int, offset: float) -> Array:
    """(count,) indices by systematic resampling; entry i is taken count·w_i times, up to rounding."""
    edges = np.cumsum(weights) / np.sum(weights)
    places = (np.arange(count) + offset) / count
    return np.minimum(np.searchsorted(edges, places), len(weights) - 1)


_POOL = 2  # other draws to choose from, for every one that is kept
_OFF = 2e-3  # by which kept draws may be off, in sds
_AT_ONCE = 32  # exchanges at a time, at most


def keep(values: Array, weights: Array, count: int, rng: np.random.Generator) -> Array:
    """(count,) indices of draws that, equally weighted, have nearly the means and sds of all weighted draws.

    By resampling alone the sd of a heavy-tailed quantity would rest on the few far draws that happened to be
    kept: with a kurtosis of 50, which 1% of the mass in a part ten times as wide has, 16,000 draws leave 3%.
    So some draws are exchanged for others of a larger resample, until means and sds agree.

    Parameters
    ----------
    values
        (C, k) quantities whose means and sds are to be kept.
    weights
        (C,) normalised weights.
    count, rng
        How many to keep; where chance comes from.

    Examples
    --------
    >>> rng = np.random.default_rng(1)
    >>> x, w = rng.standard_t(3, (5000, 1)), np.full(5000, 1 / 5000)
    >>> bool(abs(x[keep(x, w, 1000, rng)].std() / x.std() - 1) < 0.003)
    True
    """
    pool = np.concatenate([resample(weights, n * count, float(rng.random())) for n in (1, _POOL)])
    mean = weights @ values
    sd = np.sqrt(np.maximum(weights @ (values - mean) ** 2, np.finfo(float).tiny))
    z = (values[pool] - mean) / sd
    terms = np.concatenate([z, (z**2 - 1) / 2], axis=1)
    sizes = np.sum(terms**2, axis=1)
    off = terms[:count].sum(axis=0)
    most = min(_AT_ONCE, count // 2)
    while most and np.max(np.abs(off)) > _OFF * count:
        comes = count + np.argpartition(2 * terms[count:] @ off + sizes[count:], most)[:most]
        after = off + terms[comes].sum(axis=0)
        goes = np.argpartition(sizes[:count] - 2 * terms[:count] @ after, most)[:most]
        after -= terms[goes].sum(axis=0)
        if after @ after >= (1 - 1e-3) * (off @ off):
            most //= 2
            continue
        off, there, here = after, np.r_[comes, goes], np.r_[goes, comes]
        for part in (pool, terms, sizes):
            part[here] = part[there]
    return pool[:count]
