r"""Rényi differential privacy: the looser accountant, by other means than the tight one.

Each step is charged by ``dp_accounting``: a Gaussian mechanism on a batch without replacement under
replacement of one row (theorem 27 of Wang, Balle and Kasiviswanathan), and a plain Gaussian mechanism
on all rows. The noise multiplier is passed as it is; unlike the library's loss distributions, its
Rényi accountant does not double the sensitivity.

The library's formula costs the square of the order, and small ε are decided at orders of thousands.
Above order 256 the divergence is therefore integrated from the step's hockey-stick profile R,

    e^{(α−1)D_α} = 1 + α(α−1) ∫_0^∞ (e^{(α−1)x} + e^{−αx}) R(x) dx.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np

from fald.privacy.accountants import Accountant, Releases
from fald.privacy.compose import Loss
from fald.privacy.pld import step_profile

_LARGEST_BY_THEOREM = 256
_LARGE_ORDERS = np.round(_LARGEST_BY_THEOREM * 1.3 ** np.arange(1, 41))


def _integrated_log_moment(orders: np.ndarray, multiplier: float, fraction: float) -> np.ndarray:
    """(α−1)·D_α of one step from its profile; infinite where the integral leaves the grid."""
    mu = 1.0 / multiplier
    reach = 0.5 * mu**2 + 30.0 * mu  # the profile underflows not far beyond
    top = math.log1p(fraction * math.expm1(min(reach, 700.0)))
    x = np.linspace(0.0, top, 8001)
    with np.errstate(divide="ignore"):
        log_profile = np.log(step_profile(x, multiplier, fraction))
    out = np.full(orders.shape, math.inf)
    for i, order in enumerate(orders):
        exponent = np.logaddexp((order - 1.0) * x, -order * x) + log_profile
        peak = float(np.max(exponent))
        if exponent[-1] > peak - 40.0:
            continue  # an order this large is never the best one
        integral = float(np.trapezoid(np.exp(exponent - peak), x))
        log_excess = math.log(order) + math.log(order - 1.0) + peak + math.log(integral * (1.0 + 1e-6))
        out[i] = np.logaddexp(0.0, log_excess)
    return out


class RdpSteps:
    """Rényi divergences of the local steps of one client.

    Where there are many multipliers, the orders are narrowed to those near the best one, which ``total``,
    the loss of the whole run from this object, helps to find, and the multipliers are rounded down onto a
    grid; both keep the bound. Poisson sampling is charged like sampling without replacement: its two
    outcomes, with and without the row, are closer to each other than the theorem assumes.
    """

    def __init__(self, releases: Releases, total: Callable[[RdpSteps], Loss]):
        from dp_accounting.rdp import rdp_privacy_accountant as library

        multipliers, counts, self._rows, self._size, _, delta = releases
        self._cache: dict[float, Loss] = {}
        small = [order for order in library.DEFAULT_RDP_ORDERS if order <= _LARGEST_BY_THEOREM]
        self.orders = np.concatenate([small, _LARGE_ORDERS])
        every = self.orders
        distinct = np.unique(multipliers)
        self._anchors = distinct
        if distinct.size <= 2 or self._rows == self._size:
            return
        # the best order is found on a coarse grid of multipliers, then used on a fine one
        self._anchors = _rounding_grid(distinct, 6)
        runs = float(np.sum(counts))
        typical = float(np.sqrt(runs / np.sum(counts / multipliers**2)))
        best, seen = self._best(self.step_at(typical).log_moment * runs, delta)[1], set()
        while best not in seen:
            seen.add(best)
            near = int(np.argmin(np.abs(every - best)))
            self.orders, self._cache = every[max(0, near - 2) : near + 3], {}
            best = self._best(total(self).log_moment, delta)[1]
        self._anchors, self._cache = _rounding_grid(distinct, 100), {}

    def step(self, multiplier: float) -> Loss:
        """Loss of one local step, at the next lower multiplier of the grid."""
        below = int(np.searchsorted(self._anchors, multiplier, side="right")) - 1
        return self.step_at(multiplier if below < 0 else float(self._anchors[below]))

    def step_at(self, multiplier: float) -> Loss:
        """Loss of one local step with exactly this multiplier."""
        if multiplier not in self._cache:
            orders = self.orders
            if self._rows == self._size:
                moments = 0.5 * orders * (orders - 1.0) / multiplier**2
            else:
                few, many = orders[orders <= _LARGEST_BY_THEOREM], orders[orders > _LARGEST_BY_THEOREM]
                large = _integrated_log_moment(many, multiplier, self._rows / self._size)
                moments = np.concatenate([self._theorem(multiplier, few), large])
            self._cache[multiplier] = Loss(np.zeros(0, complex), moments, 0.0, 1.0)
        return self._cache[multiplier]

    def _theorem(self, multiplier: float, orders: np.ndarray) -> np.ndarray:
        import dp_accounting
        from dp_accounting.rdp import RdpAccountant

        event = dp_accounting.SampledWithoutReplacementDpEvent(
            self._size, self._rows, dp_accounting.GaussianDpEvent(multiplier)
        )
        accountant = RdpAccountant(orders.tolist(), dp_accounting.NeighboringRelation.REPLACE_ONE)
        accountant.compose(event)
        return np.maximum(accountant.rdp, 0.0) * (orders - 1.0)

    def _usable(self, log_moment: np.ndarray) -> tuple[list[float], list[float]]:
        """The orders with a finite divergence, and the divergences."""
        divergence = log_moment / (self.orders - 1.0)
        usable = np.isfinite(divergence)
        return self.orders[usable].tolist(), divergence[usable].tolist()

    def _best(self, log_moment: np.ndarray, delta: float) -> tuple[float, float]:
        """Least ε over the orders, and the order at which it is attained."""
        from dp_accounting.rdp import compute_epsilon

        orders, divergence = self._usable(log_moment)
        epsilon, order = compute_epsilon(orders, divergence, delta) if orders else (math.inf, math.nan)
        return float(epsilon), float(order)

    def precision(self, loss: Loss, delta: float) -> tuple[float, float]:
        """No grid; the order that gives ε."""
        return math.nan, self._best(loss.log_moment, delta)[1]

    def epsilon(self, loss: Loss, delta: float) -> float:
        """Least ε over the orders."""
        return self._best(loss.log_moment, delta)[0]

    def delta(self, loss: Loss, epsilon: float) -> float:
        """Least δ over the orders."""
        from dp_accounting.rdp.rdp_privacy_accountant import compute_delta

        orders, divergence = self._usable(loss.log_moment)
        return float(compute_delta(orders, divergence, epsilon)[0]) if orders else 1.0


def _rounding_grid(distinct: np.ndarray, most: int) -> np.ndarray:
    if distinct.size <= most:
        return distinct
    grid = np.geomspace(distinct[0], distinct[-1], most)
    grid[0] = distinct[0]
    return grid


accountant = Accountant(RdpSteps, "Rényi differential privacy.")
