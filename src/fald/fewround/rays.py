r"""Rays: a cheap look at everything far away from a proposal, where no draw may have been.

In coordinates in which the proposal has mean zero and unit covariance, values of the log posterior along
rays r·u tell how much of a second moment lies far out. A ray stands for a family of k dimensions of such
rays, in which the second moment is ∫ r^(k+1) π(ru) dr; beyond r = √(k+2) + 4 a Gaussian has none of it. What
lies there is of no consequence if it is little, or if draws have sampled it well: with w the posterior over
the density of the draws, C draws know the second moment of the family up to the relative variance

    (1/C) · ∫ r^(k−1) π dr · ∫ r^(k+3) w π dr / (∫ r^(k+1) π dr)²,

of which the part from far out is taken here. What is neither shows where the proposal lacks a wide core.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray
from scipy.special import logsumexp

from fald.fewround.proposal import Proposal, cholesky

Array = NDArray[Any]

RADII = np.geomspace(0.5, 1000.0, 32)
_RANDOM = 24  # random directions, both ways
_BEYOND = 4.0  # sds beyond the bulk at which far begins
_MOST_WIDE = 8  # wide cores at most, by direction
_MOST_KEPT = 12  # wide cores of all looks together
_WIDE_WEIGHT = 0.3  # of all wide cores together
_ALIKE = 0.9  # cosine of two directions that are one
_BESIDE = (0.0, 1e-6, -1.7e-6)  # a place and its twins, relative to the distance
_ROUNDING, _STEEPEST = 1.0, 0.01  # nats between twins that no density has, more of them far down


class Rays(NamedTuple):
    """A frame, centre (d,) and lower factor (d, d), and unit directions (K, d) in its coordinates.

    The first ``special`` directions are chosen, the others random. With ``twins`` every place has two more
    hard beside it: a density is nearly the same at all three, and what differs is rounding. ``radii`` are
    those of the places.
    """

    centre: Array
    factor: Array
    directions: Array
    special: int
    twins: bool = False
    radii: Array = RADII

    @property
    def positions(self) -> Array:
        """(K·R, d) parameters on the rays, and twice as many again where they have twins."""
        z = (self.directions[:, None] * self.radii[:, None]).reshape(-1, len(self.centre))
        z = np.concatenate([(1 + shift) * z for shift in _BESIDE]) if self.twins else z
        return self.centre + z @ self.factor.T

    def levels(self, values: Array) -> Array:
        """(K, R) values at the places, from those at all positions; −∞ from where they are but rounding.

        Far out a likelihood that subtracts large numbers from each other (gammaln(y + r) − gammaln(r) with
        r = 10^16) rises and falls by thousands of nats between neighbours, and the farther the more. That is
        no mass: there the posterior is not known, as where it is not a number.

        Examples
        --------
        >>> rays = Rays(np.zeros(1), np.eye(1), np.ones((1, 1)), 1, twins=True)
        >>> smooth, noise = -np.arange(32.0), np.r_[np.zeros(30), 900.0, 0.0]
        >>> rays.levels(np.concatenate([smooth, smooth + noise, smooth]))[0, -3:]
        array([-29., -inf, -inf])
        """
        here, *beside = values.reshape(-1, len(self.directions), len(self.radii))
        with np.errstate(invalid="ignore"):
            depth = np.maximum(here[:, :1] - here, 0.0)
            noisy = [np.abs(here - other) > _ROUNDING + _STEEPEST * depth for other in beside]
        if not noisy:
            return here
        return np.where(np.logical_or.accumulate(np.any(noisy, axis=0), axis=1), -np.inf, here)


class Far(NamedTuple):
    """What the rays found, by direction and family: arrays (K, F).

    ``share`` of the second moment that lies far out, ``error`` of the sd that draws leave there at 95%, and
    the ``width`` in sds of a Gaussian whose second moment peaks where that of the posterior does.
    """

    share: Array
    error: Array
    width: Array

    @property
    def missed(self) -> Array:
        """(K, F) how far off an sd may be: all that lies far out is missing, or badly sampled."""
        return np.minimum(self.share / 2, self.error)


def families(dim: int) -> list[int]:
    """Dimensions of the families a ray may stand for.

    Examples
    --------
    >>> families(1), families(10)
    ([1], [1, 2, 5, 10])
    """
    return sorted({1, min(2, dim), max(1, dim // 2), dim})


def cast(
    centre: Array, covariance: Array, thin: Array, rng: np.random.Generator, *, twins: bool = False
) -> Rays:
    """Rays along coordinates, principal axes, thin far mass and at random, both ways.

    Parameters
    ----------
    centre, covariance
        Of the proposal.
    thin
        (T, d) further directions, in parameters, along which mass far out was suspected.
    rng
        For the random ones.
    twins
        Whether every place is looked at twice, to tell mass from rounding.
    """
    d, factor = len(centre), cholesky(covariance)
    _, axes = np.linalg.eigh(covariance / np.sqrt(np.outer(np.diag(covariance), np.diag(covariance))))
    ways = np.concatenate([np.eye(d), covariance, (axes * np.sqrt(np.diag(covariance))[:, None]).T, thin])
    special = np.linalg.solve(factor, ways.T).T
    chosen = np.concatenate([special, rng.standard_normal((_RANDOM, d))])
    chosen = chosen / np.linalg.norm(chosen, axis=1, keepdims=True)
    kept = [0]
    for i in range(1, len(chosen)):  # with few parameters many of these are the same
        if np.max(np.abs(chosen[kept] @ chosen[i])) < 0.999:
            kept.append(i)
    chosen, count = chosen[kept], int(np.sum(np.array(kept) < len(special)))
    both = np.concatenate([chosen[:count], -chosen[:count], chosen[count:], -chosen[count:]])
    return Rays(centre, factor, both, 2 * count, twins)


def far(values: Array, log_weights: Array, dim: int, *, count: int, quantile: float) -> Far:
    """How much lies far out, and how well it is sampled.

    Parameters
    ----------
    values
        (K, R) log posterior along the rays.
    log_weights
        (K, R) logarithm of posterior over proposal there, both normalised; +∞ where no draws are known.
    dim, count, quantile
        Number of parameters, number of draws, and standard errors that stand for 95%.
    """
    kinds = families(dim)
    shape = (len(values), len(kinds))
    share, error, width = np.zeros(shape), np.zeros(shape), np.ones(shape)
    logs = np.log(RADII)  # the grid is geometric: dr = r·dlog r, up to a constant that cancels
    for j, k in enumerate(kinds):
        beyond = np.sqrt(k + 2) + _BEYOND < RADII
        with np.errstate(invalid="ignore", over="ignore"):
            second = values + (k + 2) * logs
            total, outside = _summed(second), _summed(second[:, beyond])
            mass = _summed(values + k * logs)
            weighed = np.where(np.isneginf(values), -np.inf, values + log_weights)
            noise = _summed((weighed + (k + 4) * logs)[:, beyond])
            log_variance = noise + mass - 2 * total
            share[:, j] = np.nan_to_num(np.exp(outside - total), nan=0.0)
            error[:, j] = np.nan_to_num(
                quantile / 2 * np.exp(np.minimum(log_variance / 2, 300.0)) / np.sqrt(count), nan=0.0
            )
        peak = RADII[beyond][np.argmax(second[:, beyond], axis=1)]
        width[:, j] = np.maximum(peak / np.sqrt(k + 1), 1.5)
    return Far(share, error, width)


def unknown(values: Array, undefined: Array, dim: int) -> Far:
    """How much may lie far out where the log posterior (K, R) is not a number, and so no draw is known."""
    kinds, logs, filled = families(dim), np.log(RADII), continued(values, undefined)
    lost, share = np.where(undefined, filled, -np.inf), np.zeros((len(values), len(kinds)))
    for j, k in enumerate(kinds):
        beyond = np.sqrt(k + 2) + _BEYOND < RADII
        with np.errstate(invalid="ignore", over="ignore"):
            parts = (lost + (k + 2) * logs)[:, beyond], filled + (k + 2) * logs
            share[:, j] = np.nan_to_num(np.exp(_summed(parts[0]) - _summed(parts[1])), nan=0.0)
    return Far(share, np.full_like(share, np.inf), np.ones_like(share))


def continued(values: Array, undefined: Array) -> Array:
    """(K, R) values along rays, those that are not numbers filled in as the three before them lead on.

    A parabola where these bend down, which is exact for a Gaussian, and a straight line elsewhere, which does
    not rise. Where there are no three numbers before, nothing is filled in: there are draws.

    Examples
    --------
    >>> level = -RADII[None] ** 2 / 2
    >>> bool(np.allclose(continued(level, RADII[None] > 6), level))
    True
    """
    filled, first = values.copy(), np.argmax(undefined, axis=1)
    for i in np.flatnonzero(undefined.any(axis=1) & (first >= 3)):
        at, (r, level) = undefined[i], (part[first[i] - 3 : first[i]] for part in (RADII, values[i]))
        if np.isfinite(level).all():
            slopes = np.diff(level) / np.diff(r)
            bend = min(float(slopes[1] - slopes[0]) / (r[2] - r[0]), 0.0)
            x = RADII[at]
            filled[i, at] = level[2] + min(slopes[1], 0.0) * (x - r[2]) + bend * (x - r[2]) * (x - r[1])
    return filled


def _summed(terms: Array) -> Array:
    """Logarithm of the sum of exp(terms) (K, R) along each ray, as if the last ones went on for ever.

    A tail that falls like a power leaves a part of its second moment beyond any distance. One that rises at
    its last place is taken to stay as high as it is there, nearly for ever: what has fallen by thousands of
    nats and rises a little is of no consequence.

    Examples
    --------
    >>> bool(np.isclose(_summed(np.log(0.5) * np.arange(5.0)[None])[0], np.log(2.0)))
    True
    >>> _summed(np.array([[0.0, -1e30, -1e29], [0.0, -9.0, -8.0]])).round(1)
    array([ 0. , 19.6])
    """
    last, rate = terms[:, -1], np.nan_to_num(terms[:, -1] - terms[:, -2], nan=-np.inf)
    rate = np.minimum(rate, -1e-12)
    after = rate - np.log(-np.expm1(rate))
    return np.logaddexp(np.asarray(logsumexp(terms, axis=1)), np.where(np.isinf(last), last, last + after))


def wide_cores(rays: Rays, found: Far, limit: float) -> Proposal | None:
    """Cores where far mass was missed by more than ``limit``; None where none was.

    One core along each chosen direction that showed it, one for all of these together, and one that is wide
    in every direction where random ones showed it too.
    """
    d = len(rays.centre)
    kinds = families(d)
    bad = found.missed > limit
    if not bad.any():
        return None
    spreads: list[Array] = []
    lines: list[tuple[Array, float]] = []
    order = np.argsort(-found.missed[: rays.special].max(axis=1), kind="stable") if rays.special else []
    for i in order:
        if not bad[i].any() or len(lines) == _MOST_WIDE:
            continue
        u = rays.directions[i]
        if all(abs(float(u @ other)) < _ALIKE for other, _ in lines):
            lines.append((u, float(found.width[i][bad[i]].max())))
    for u, width in lines:
        spreads.append(np.eye(d) + (width**2 - 1) * np.outer(u, u))
    if len(lines) > 1:
        spreads.append(np.eye(d) + sum((width**2 - 1) * np.outer(u, u) for u, width in lines))
    # a family of all dimensions is shown by most random directions, or by none
    everywhere = bad[rays.special :, -1] if len(bad) > rays.special else bad[:, -1]
    if d > 1 and kinds[-1] == d and np.mean(everywhere) > 0.2:
        widths = (found.width[rays.special :] if len(bad) > rays.special else found.width)[everywhere, -1]
        spreads.append(float(np.median(widths)) ** 2 * np.eye(d))
    if not spreads:  # a few random directions alone
        i = int(np.argmax(found.missed.max(axis=1)))
        width, u = float(found.width[i][bad[i]].max()), rays.directions[i]
        spreads.append(np.eye(d) + (width**2 - 1) * np.outer(u, u))
    factors = [rays.factor @ cholesky(spread) for spread in spreads]
    count = len(factors)
    return Proposal(np.full(count, 1 / count), np.repeat(rays.centre[None], count, axis=0), np.array(factors))


def joined(one: Proposal | None, other: Proposal | None) -> Proposal | None:
    """Wide cores of two looks, the newer first; the oldest are forgotten."""
    if one is None or other is None:
        return other or one
    parts = [np.concatenate([b, a])[:_MOST_KEPT] for a, b in zip(one, other)]
    return Proposal(np.full(len(parts[0]), 1 / len(parts[0])), *parts[1:])


def tops(values: Array, chosen: Array) -> Array:
    """Index, among all positions on the rays, of the highest place beyond the deepest valley of a ray.

    Examples
    --------
    >>> level = np.full((2, len(RADII)), -5.0)
    >>> level[1, 0], level[1, 9] = 0.0, -1.0
    >>> int(tops(level, np.array([1]))[0]) - len(RADII)
    9
    """
    found = []
    for i in chosen:
        level = np.maximum(values[i], -1e300)
        before, after = np.maximum.accumulate(level), np.maximum.accumulate(level[::-1])[::-1]
        low = int(np.argmax(np.minimum(before, after) - level))
        found.append(i * len(RADII) + low + int(np.argmax(level[low:])))
    return np.array(found, int)


def widened(base: Proposal, wide: Proposal | None) -> Proposal:
    """A proposal with wide cores behind its own."""
    if wide is None:
        return base
    return Proposal(
        np.concatenate([(1 - _WIDE_WEIGHT) * base.weights, _WIDE_WEIGHT * wide.weights]),
        np.concatenate([base.means, wide.means]),
        np.concatenate([base.factors, wide.factors]),
    )
