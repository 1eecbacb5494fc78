"""Ensembles of chains: the gradient they follow, and when they have forgotten where they began."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray
from scipy.linalg import solve_triangular

from fald.fewround import certify
from fald.fewround.certify import Condition, quantile
from fald.fewround.exchange import Server
from fald.fewround.outcome import Outcome
from fald.fewround.target import Target

Array = NDArray[Any]

_STILL = 0.5  # largest correlation of where chains are with where they began


class Frame(NamedTuple):
    """Coordinates z in which N(mean, factor·factorᵀ) is standard; the factor is lower triangular."""

    mean: Array
    factor: Array

    def positions(self, z: Array) -> Array:
        """Parameters (M, d) at z."""
        return self.mean + z @ self.factor.T

    def inward(self, positions: Array) -> Array:
        """z at parameters (M, d)."""
        return solve_triangular(self.factor, (positions - self.mean).T, lower=True).T

    def leftover(self, z: Array, gradients: Array) -> Array:
        """Gradients with respect to z, without the Gaussian part."""
        return gradients @ self.factor + z


def gradients(target: Target, positions: Array) -> Server[tuple[Array, Array]]:
    """Log posterior (M,) and its gradient (M, d); −∞ and zero where either is not finite."""
    sums = yield {"states": positions}
    value, gradient = target.gradients(positions, sums)
    wrong = ~(np.isfinite(gradient).all(axis=1) & np.isfinite(value))
    gradient[wrong], value[wrong] = 0.0, -np.inf
    return value, gradient


def trace_row(positions: Array, khat: float = np.nan, ess: float = np.nan, **others: Any) -> dict[str, Any]:
    """What a round of chains gives to the trace."""
    row = {"draws": len(positions), "khat": khat, "ess": ess, "newton": np.nan, "explorers": 0}
    return {**row, "mean": positions.mean(axis=0), "sd": positions.std(axis=0), **others}


def chains_outcome(
    positions: Array, failed: list[Condition], khat: float, trace: list[dict[str, Any]]
) -> Outcome:
    """The outcome of equally weighted chains."""
    count, d = positions.shape
    return Outcome(
        method="split-hmc",
        reached=not failed,
        reason="; ".join(check.sentence for check in failed),
        advice="allow more rounds, or ask for less accuracy" if failed else "",
        positions=positions,
        weights=np.full(count, 1 / count),
        khat=khat,
        ess=float(count),
        mean=positions.mean(axis=0),
        covariance=np.cov(positions.T).reshape(d, d),
        modes=np.zeros((0, d)),
        failed=tuple(check.name for check in failed),
        trace=trace,
    )


def chain_checks(
    ends: list[Array],
    energies: list[Array],
    *,
    accepted: float,
    least: float,
    tolerance: float,
    names: list[str],
) -> list[Condition]:
    """Conditions on the chains at first, before the last trajectory and after it.

    Parameters
    ----------
    ends
        Certified quantities (M, k) of the three ensembles.
    energies
        Log posterior of the first ensemble, …, the last.
    accepted, least
        Share of the last trajectories that was accepted, and the least that will do.
    tolerance, names
        Wanted precision in posterior sds; names of the parameters.
    """
    old, previous, new = ends
    labels = certify.labels(names, new.shape[1])
    sd = new.std(axis=0)
    still = np.array([_correlation(a, b) for a, b in zip(old.T, new.T)])
    square = np.array([_correlation((a - a.mean()) ** 2, (b - b.mean()) ** 2) for a, b in zip(old.T, new.T)])
    stuck, energy = np.maximum(still, square), _correlation(energies[0], energies[-1])
    moved = np.maximum(np.abs(new.mean(0) - previous.mean(0)) / sd, np.abs(previous.std(0) / sd - 1))
    # what is forgotten at a steady rate has so far to go: the way so far times r/(1 − r)
    shift = np.abs(new.mean(0) - old.mean(0)) / sd * _remaining(still)
    stretch = np.abs(old.std(0) / sd - 1) * _remaining(square)
    left = np.maximum(shift, stretch)
    slow, worst, far = int(np.argmax(stuck)), int(np.argmax(moved)), int(np.argmax(left))
    # two ensembles of chains at rest differ by this much, and no more, at 95% over all quantities
    noise = quantile(new.shape[1]) * np.sqrt(2 / len(new))
    return [
        Condition(
            "movement",
            bool(stuck[slow] < _STILL and energy < _STILL),
            f"chains still remember where they began (correlation {max(stuck[slow], energy):.2f}, in "
            f"{labels[slow] if stuck[slow] >= energy else 'their energy'})",
        ),
        Condition(
            "bias",
            bool(left[far] <= certify.ON_ITS_WAY * tolerance),
            f"{labels[far]} is still on its way from the start: about {left[far]:.3f} sd to go",
        ),
        Condition(
            "settled",
            bool(moved[worst] <= max(tolerance, noise)),
            f"{labels[worst]} still moved by {moved[worst]:.3f} sd in the last trajectory",
        ),
        Condition("acceptance", accepted >= least, f"only {accepted:.0%} of the trajectories were accepted"),
    ]


def _remaining(correlation: Array) -> Array:
    kept = np.clip(correlation, 0.0, 0.99)
    return kept / (1 - kept)


def _correlation(a: Array, b: Array) -> float:
    usable = np.isfinite(a) & np.isfinite(b)
    if usable.sum() < 10 or np.ptp(a[usable]) == 0 or np.ptp(b[usable]) == 0:
        return 1.0
    return float(np.corrcoef(a[usable], b[usable])[0, 1])
