r"""Privacy loss distributions: the tight accountant.

One step on a batch of fixed size, drawn without replacement, with one row replaced. By advanced joint
convexity its hockey-stick divergence at e^ε ≥ 1 is at most that of the pair "remove",

    H_{e^ε}((1−q)N(0,z²) + qN(1,z²) ‖ N(0,z²)) = q·G(log(1 + (e^ε−1)/q)),   q = batch fraction,
    G(x) = Φ(1/(2z) − xz) − e^x Φ(−1/(2z) − xz),

and because replacement is symmetric the same holds with the two data sets exchanged, which fixes the
divergence at e^ε < 1: there it is that of the pair "add". The pointwise maximum of the two is itself
the profile of some pair of distributions, so it composes. Each profile is put on a grid of losses by
the pessimistic connect-the-dots rule of ``dp_accounting``, and the grids are convolved by Fourier
transform with a window that a Chernoff bound justifies; the mass outside counts as infinite loss.

References
----------
Balle, Barthe, Gaboardi, "Privacy amplification by subsampling" (2018); Zhu, Dong, Wang, "Optimal
accounting of differential privacy via characteristic function" (2022); Doroshenko et al., "Connect
the dots" (2022); Lebeda et al., "Avoiding pitfalls for privacy accounting of subsampled mechanisms
under composition" (2024).
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np

from fald.privacy.accountants import ACCOUNTANTS, Accountant, Releases, Steps
from fald.privacy.compose import Loss, chord

# grid points per standard deviation of a step's loss; ε is then too large by about 1 / (10 points²)
_POINTS, _POINTS_OF_SCHEDULES = 32.0, 20.0
_LEAST_SIZE, _MOST_SIZE = 2**14, 2**19
_REACH = 10.0  # standard deviations of noise that a step's grid covers
_WIDEST_INTERVAL = 30.0  # beyond this the losses are so large that a grid is pointless


class NoGridError(Exception):
    """Losses that are too large for a grid, or a δ below what round-off allows."""


def step_profile(epsilon, multiplier: float, fraction: float, sampling: str = "without-replacement"):
    """Hockey-stick divergence of one local step, at any real ε.

    Parameters
    ----------
    epsilon
        Where to evaluate it.
    multiplier, fraction
        z, standard deviation of the noise over the effect of one replaced row; share of the client's rows in
        the batch.
    sampling
        ``"without-replacement"`` or ``"poisson"``. The second assumes that a row's gradient has norm
        at most Δ/2, as clipping ensures.

    Returns
    -------
    numpy.ndarray
        δ(ε), an upper bound over all pairs of neighbouring data sets; not always attained.

    Examples
    --------
    >>> round(float(step_profile(0.0, 1.0, 1.0)), 6)
    0.382925
    """
    from scipy.special import log_ndtr, ndtr

    eps = np.asarray(epsilon, dtype=float)
    if sampling == "poisson":
        from dp_accounting.pld import privacy_loss_mechanism as mechanism

        # the library's sensitivity is that of adding a row, half of Δ: hence 2z
        pair = mechanism.GaussianPrivacyLoss(
            2.0 * multiplier, sampling_prob=fraction, adjacency_type=mechanism.AdjacencyType.REPLACE
        )
        return np.clip(pair.get_delta_for_epsilon(eps), 0.0, 1.0)  # type: ignore[arg-type]
    size = np.abs(eps)
    small = np.minimum(size, 30.0)
    x = np.where(
        size < 30.0,
        np.log1p(np.expm1(small) / fraction),
        size + np.log1p(-(1.0 - fraction) * np.exp(-size)) - math.log(fraction),
    )
    mu = 1.0 / multiplier
    gap = ndtr(mu / 2 - x / mu) - np.exp(x + log_ndtr(-mu / 2 - x / mu))
    remove = fraction * np.maximum(gap, 0.0)
    below = np.minimum(eps, 0.0)
    return np.clip(np.where(eps >= 0, remove, -np.expm1(below) + np.exp(below) * remove), 0.0, 1.0)


def _discretised(multiplier: float, fraction: float, sampling: str, interval: float):
    """Probabilities of the losses k·interval, the least k, and the probability of an infinite loss."""
    from dp_accounting.pld import pld_pmf

    gauss = 0.5 / multiplier**2 + _REACH / multiplier
    reach = math.log1p(fraction * math.expm1(gauss)) if gauss < 700 else gauss
    if sampling == "poisson" and fraction < 1:
        reach = min(gauss, reach - math.log1p(-fraction))
    k = max(1, math.ceil(reach / interval))
    profile = step_profile(np.arange(-k, k + 1) * interval, multiplier, fraction, sampling)
    pmf = pld_pmf.create_pmf_pessimistic_connect_dots_fixed_gap(
        interval, -k, k, np.minimum.accumulate(profile)
    ).to_dense_pmf()
    return pmf._probs, pmf._lower_loss, pmf._infinity_mass


def _spread(multiplier: np.ndarray, fraction: float) -> np.ndarray:
    """Standard deviation of a step's loss, roughly: it only sets the grid."""
    square = np.minimum(1.0 / multiplier**2, 500.0)
    return np.minimum(
        fraction * np.sqrt(np.expm1(square)), math.sqrt(fraction) * (1 / multiplier + 0.5 / multiplier**2)
    )


class PldSteps:
    """Losses of the local steps of one client, on a grid fit for a whole run; else ``NoGridError``.

    The multipliers that occur set the grid. Many different ones are interpolated: the profile is convex in
    the total variation erf(1/(z√8)), so the chord between two multipliers dominates all between them. Tails
    below 1e-7 of δ are cut, and counted. ``total`` gives the loss of the whole run from this object, to find
    the width of the window.
    """

    def __init__(self, releases: Releases, total: Callable[[PldSteps], Loss]):
        multipliers, counts, rows, size, sampling, delta = releases
        self.fraction, self.sampling, fraction = rows / size, sampling, rows / size
        self._tail = 1e-7 * delta
        self._anchors, self._interpolates = _anchors(multipliers, sampling, fraction)
        variance = float(np.sum(counts * _spread(multipliers, fraction) ** 2))
        deviation, step = math.sqrt(variance), math.sqrt(variance / float(np.sum(counts)))
        scheduled = self._anchors.size > 32 or multipliers.size > self._anchors.size
        points, least = (_POINTS_OF_SCHEDULES, _LEAST_SIZE / 4) if scheduled else (_POINTS, _LEAST_SIZE)
        self.interval = min(step / points, 16.0 * deviation / least)
        at = math.sqrt(2.0 * math.log(1.0 / self._tail)) / deviation
        self._orders = at * np.concatenate([-(2.0 ** np.arange(-4, 4)), 2.0 ** np.arange(-4, 4)])
        while True:
            if self.interval > _WIDEST_INTERVAL:
                raise NoGridError("privacy losses too large")
            self.size, self._cache, self._grids = 0, {}, {}
            whole = total(self)
            if whole.infinity + 4.0 * _roundoff(whole) > 0.1 * delta:
                raise NoGridError("delta is below round-off")
            low, high = self._window(whole)
            if high - low < _MOST_SIZE:
                break
            self.interval *= max(1.5, 1.1 * (high - low) / _MOST_SIZE)
        from scipy.fft import next_fast_len

        self._cache = {}
        self.size = int(next_fast_len(high - low + 2, real=True) or 0)

    def step(self, multiplier: float) -> Loss:
        """Loss of one local step, or an upper bound on it between two multipliers of the grid."""
        if multiplier in self._cache:
            return self._cache[multiplier]
        anchors = self._anchors
        if not anchors[0] <= multiplier <= anchors[-1]:
            return self._anchor(multiplier)
        below = int(np.searchsorted(anchors, multiplier, side="right")) - 1
        if anchors[below] == multiplier or not self._interpolates:
            return self._anchor(float(anchors[below]))
        low, high = float(anchors[below]), float(anchors[below + 1])
        variation = [math.erf(1.0 / (math.sqrt(8.0) * z)) for z in (multiplier, low, high)]
        share = (variation[0] - variation[2]) / (variation[1] - variation[2])
        return chord(self._anchor(low), self._anchor(high), min(1.0, max(0.0, share)))

    def _anchor(self, multiplier: float) -> Loss:
        if multiplier not in self._grids:
            probs, lower, infinity = _discretised(multiplier, self.fraction, self.sampling, self.interval)
            held = np.flatnonzero(probs)
            exponent = self._orders[:, None] * ((held + lower) * self.interval) + np.log(probs[held])
            top = exponent.max(axis=1)
            moments = top + np.log(np.sum(np.exp(exponent - top[:, None]), axis=1))
            self._grids[multiplier] = (probs, lower, moments, float(infinity))
        if multiplier not in self._cache:
            from scipy.fft import rfft

            probs, lower, moments, infinity = self._grids[multiplier]
            transform = np.zeros(0, complex)
            if self.size:
                folded = np.bincount((np.arange(probs.size) + lower) % self.size, probs, self.size)
                transform = np.asarray(rfft(folded))
            self._cache[multiplier] = Loss(transform, moments, infinity, 1.0)
        return self._cache[multiplier]

    def _window(self, loss: Loss) -> tuple[int, int]:
        """Grid points outside which the loss falls with probability at most the tail, on each side."""
        bound = (loss.log_moment + math.log(1.0 / self._tail)) / self._orders
        high = np.min(bound[self._orders > 0]) / self.interval
        low = np.max(bound[self._orders < 0]) / self.interval
        if not (math.isfinite(low) and math.isfinite(high)):
            raise NoGridError("privacy losses too large")
        return math.floor(min(low, 0.0)), math.ceil(max(high, 1.0))

    def _excess(self, loss: Loss) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Grid of ε ≥ 0, P[L > ε] and E[e^{ε−L}; L > ε] there, all slack included in the first."""
        from scipy.fft import irfft
        from scipy.signal import lfilter

        low, high = self._window(loss)
        high = min(high, low + self.size - 1)
        mass = np.asarray(irfft(loss.transform, self.size))
        probs = np.maximum(mass[np.arange(0, high + 1) % self.size], 0.0)
        chernoff = loss.log_moment - self._orders * (high + 0.5) * self.interval
        above = float(np.min(chernoff[self._orders > 0]))
        weights = np.full(loss.transform.size, 2.0)
        weights[0] = 1.0
        energy = float(np.sum(weights * np.abs(loss.transform) ** 2)) / self.size
        # errors of the transform grow with the number of factors; by Parseval their sum over any set
        # of grid points is below √size times their root mean square
        slack = loss.infinity + math.exp(min(0.0, above)) + _roundoff(loss) * math.sqrt(energy * self.size)
        backwards, decay = probs[:0:-1], math.exp(-self.interval)
        upper = np.concatenate([[0.0], np.cumsum(backwards)])[::-1] + slack
        discounted = np.asarray(lfilter([decay], [1.0, -decay], backwards))
        lower = np.concatenate([[0.0], discounted])[::-1]
        return np.arange(high + 1) * self.interval, upper, lower

    def precision(self, loss: Loss, delta: float) -> tuple[float, float]:
        """Width of the grid; no Rényi order."""
        return self.interval, math.nan

    def epsilon(self, loss: Loss, delta: float) -> float:
        """Least ε ≥ 0 that the grid shows to hold with this δ; infinite if there is none."""
        grid, upper, lower = self._excess(loss)
        if upper[-1] > delta:
            return math.inf
        over = np.flatnonzero(upper - lower > delta)
        if over.size == 0:
            return 0.0
        j = int(over[-1])
        return float(grid[j] + math.log((upper[j] - delta) / lower[j]) if lower[j] > 0 else grid[j + 1])

    def delta(self, loss: Loss, epsilon: float) -> float:
        """The δ that the grid shows to hold with this ε."""
        grid, upper, lower = self._excess(loss)
        j = int(min(epsilon / self.interval, grid.size - 1))  # beyond the grid nothing but slack is left
        excess = math.exp(min(epsilon - grid[j], self.interval)) * lower[j]
        return float(min(1.0, max(upper[-1], upper[j] - excess)))


def _roundoff(loss: Loss) -> float:
    """Relative error of a transform after so many multiplications."""
    return 2.0 * np.finfo(float).eps * (loss.factors + 32.0)


def _anchors(multipliers: np.ndarray, sampling: str, fraction: float) -> tuple[np.ndarray, bool]:
    """Multipliers to discretise, and whether those between them may be interpolated."""
    distinct = np.unique(multipliers)
    if distinct.size <= 32:
        return distinct, True
    interpolates = sampling == "without-replacement" or fraction == 1
    ratio = 1.02 if interpolates else 1.005
    number = math.ceil(math.log(distinct[-1] / distinct[0]) / math.log(ratio)) + 1
    anchors = np.geomspace(distinct[0], distinct[-1], max(2, number))
    anchors[0], anchors[-1] = distinct[0], distinct[-1]
    return (distinct, True) if anchors.size >= distinct.size else (anchors, interpolates)


def _steps(releases: Releases, total: Callable[[Any], Loss]) -> Steps:
    """On a grid; by Rényi divergences where the losses have none."""
    try:
        return PldSteps(releases, total)
    except NoGridError:
        return ACCOUNTANTS["rdp"].steps(releases, total)


accountant = Accountant(
    _steps,
    "composition of privacy loss distributions with pessimistic discretisation.",
    "Where their losses have no usable grid, Rényi divergences took their place.",
)
