"""What a few-round server returns."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

Array = NDArray[Any]


@dataclass(frozen=True, eq=False)
class Outcome:
    """Draws, and whether they may be trusted.

    Attributes
    ----------
    method
        The method that made the draws.
    reached
        Whether every condition held.
    reason, advice
        Why not, and what to do about it; empty when reached.
    positions, weights
        (C, d) draws and their normalised weights; equal weights for chains.
    khat, ess
        Tail shape of the weights, and the effective sample size; NaN where there are no weights.
    mean, covariance
        Moments of the draws.
    modes
        (n, d) modes found.
    failed
        Names of the conditions that did not hold.
    proved
        Which of them hold by proof, and why, in words; empty where all were looked at.
    trace
        What every round gave, by name.
    values
        (C,) log posterior of the draws, up to a constant; empty where the method does not know it.
    """

    method: str
    reached: bool
    reason: str
    advice: str
    positions: Array
    weights: Array
    khat: float
    ess: float
    mean: Array
    covariance: Array
    modes: Array
    failed: tuple[str, ...] = ()
    proved: str = ""
    trace: list[dict[str, Any]] = field(default_factory=list)
    values: Array = field(default_factory=lambda: np.zeros(0))

    @property
    def verdict(self) -> str:
        """``"reached"`` or ``"not reached"``."""
        return "reached" if self.reached else "not reached"

    @property
    def weighted(self) -> bool:
        """Whether the draws have weights."""
        return bool(np.ptp(self.weights) > 0)


def no_draws(method: str, reason: str, advice: str, trace: list[dict[str, Any]]) -> Outcome:
    """The outcome of a method that ended before it had draws."""
    empty = np.zeros((0, 0))
    return Outcome(
        method,
        False,
        reason,
        advice,
        empty,
        np.zeros(0),
        np.nan,
        np.nan,
        np.zeros(0),
        empty,
        empty,
        ("draws",),
        trace=trace,
    )
