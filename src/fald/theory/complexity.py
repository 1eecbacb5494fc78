r"""What the bounds certify: steps and rounds for an accuracy, the best local steps, the best step size.

Notation, parameters and errors as in ``fald.theory``. The published text has orders of magnitude, Ω(·); the
functions here have every constant, so that what they return satisfies the bound itself.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
from numpy.typing import ArrayLike

from fald.core.errors import ConfigError
from fald.settings.participation import Participation, full, with_replacement, without_replacement
from fald.settings.schedules import paper_decay
from fald.theory import bounds
from fald.theory.bounds import BoundSettings, Constants, assemble, checked, whole

_FULL = full()


@dataclass(frozen=True)
class Complexity:
    """Step size and length of a run that a bound certifies; whole numbers are kept as floats.

    ``num_participants`` is the number of devices to draw, where it was asked for.
    """

    step_size: Any
    num_steps: Any
    num_rounds: Any
    num_participants: Any = None


def complexity(
    epsilon: ArrayLike,
    constants: Constants,
    *,
    local_steps: ArrayLike,
    correlation: float = 0.0,
    participation: Participation = _FULL,
) -> Complexity:
    r"""Largest step size and fewest rounds for which the fixed-step bound certifies W2 ≤ ε.

    η is the largest step ≤ 1/(2L) for which the terms that do not decay use at most half of ε (with drawn
    devices: of what ε leaves above 2√(2dτ/(Sm)·(ρ²+N(1−ρ²))·C_S), which no step size removes). The
    number of steps is the smallest T that brings the total to ε; rounds are T/K, rounded up. An ε that is not
    above what drawn devices leave is refused. Section 5.3.1 and the discussion after Theorem B.6.

    Notes
    -----
    Sufficient, far from necessary: the exact law usually needs orders of magnitude fewer rounds.

    Examples
    --------
    >>> problem = Constants(smoothness=2.0, strong_convexity=1.0, dim=2, num_clients=4, initial_distance=1.0)
    >>> plan = complexity(0.5, problem, local_steps=2)
    >>> f"{plan.step_size:.3g} {plan.num_steps:.4g} {plan.num_rounds:.4g}"
    '5.79e-07 1.916e+07 9.582e+06'
    """
    K = whole("local-steps", local_steps, 1)
    eta, T = _certified(epsilon, constants, K, correlation, participation=participation)
    return _found(eta, np.ceil(T), np.ceil(np.ceil(T) / K))


def best_local_steps(
    constants: Constants,
    epsilon: float | None = None,
    *,
    correlation: float = 0.0,
    participation: Participation = _FULL,
) -> int:
    r"""Local steps K for which the bound certifies an accuracy in the fewest rounds.

    As long as η ≤ 1/(2L) does not bind, the certified rounds are proportional to ((K−1)² + κ)/K, least at K
    = √(1+κ), also with drawn devices. Integers on both sides are compared. With ``epsilon`` the rounds of
    ``complexity`` are minimised instead, caps and all; only then the correlation matters. Section 5.3.1 and
    the discussion after Theorem B.6.

    Notes
    -----
    Best for the bound, not for the chain: clients of equal curvature lose nothing by larger K. That this is
    of the order √T, as published, says little: at fixed ε, d and H the certified T grows like κ³, so that K
    grows like T^(1/6).

    Examples
    --------
    >>> best_local_steps(Constants(smoothness=34.0, strong_convexity=1.0, dim=2, num_clients=50))
    6
    """
    kappa = constants.condition_number
    ideal = math.sqrt(1 + kappa)
    if epsilon is None:
        around = np.array([max(1, math.floor(ideal)), math.ceil(ideal)])
        return int(around[np.argmin(((around - 1) ** 2 + kappa) / around)])
    # The cap on η binds up to about K = ε / (2·unit); beyond it and beyond the ideal, rounds only grow.
    unit = 30 * kappa * math.sqrt(constants.dim * constants.sources(correlation).sum() / (2 * kappa))
    low, high = 1, 2 * math.ceil(max(ideal, epsilon / unit if unit > 0 else 0)) + 2
    while True:
        grid = np.unique(np.round(np.geomspace(low, high, 400)))
        _, steps = _certified(epsilon, constants, grid, correlation, participation=participation)
        best = int(np.argmin(steps / grid))
        if len(grid) == high - low + 1:
            return int(grid[best])
        low, high = grid[max(best - 1, 0)], grid[min(best + 1, len(grid) - 1)]


def decaying_step_complexity(
    epsilon: ArrayLike, constants: Constants, *, local_steps: ArrayLike, correlation: float = 0.0
) -> Complexity:
    r"""Fewest rounds for which the bound for the decaying step size certifies W2 ≤ ε.

    The bound is 45κ √(((K−1)² + κ) H_ρ) √(η_k m d) with η_k = 1/(2L + mk/12), so the steps needed are

        k ≥ (12/m) (2025 κ² ((K−1)² + κ) H_ρ m d/ε² − 2L),

    of the order d/ε², without the logarithm of a fixed step. The ``step_size`` returned is the last one, η at
    the end of the run. After Theorems 5.8 and B.7.

    Examples
    --------
    >>> problem = Constants(smoothness=2.0, strong_convexity=1.0, dim=2, num_clients=4, initial_distance=1.0)
    >>> plan = decaying_step_complexity(0.5, problem, local_steps=2)
    >>> f"{plan.step_size:.3g} {plan.num_steps:.4g} {plan.num_rounds:.4g}"
    '1.03e-06 1.166e+07 5.832e+06'
    """
    c, epsilon = constants, checked("epsilon", epsilon, above=True)
    K = whole("local-steps", local_steps, 1)
    start = bounds.decaying_step_bound(c, local_steps=K, num_rounds=0, correlation=correlation).total
    # the square of the bound is proportional to η_k, and η_0 = 1/(2L)
    steps = np.ceil(np.maximum(0.0, 24 * c.condition_number * ((start / epsilon) ** 2 - 1)))
    rounds = np.ceil(steps / K)
    return _found(paper_decay(c.smoothness, c.strong_convexity)(K * rounds), steps, rounds)


def drawn_complexity(
    epsilon: ArrayLike,
    constants: Constants,
    *,
    local_steps: ArrayLike,
    correlation: float = 0.0,
    scheme: Literal["with-replacement", "without-replacement"] = "without-replacement",
) -> Complexity:
    r"""Devices, step size and rounds for which each of the three terms of the bound is at most ε/3.

        30κ √(ηmd ((K−1)² + κ) H_ρ) ≤ ε/3   gives η,
        (1−ηm/4)^T √(2d)(D + √(τ/m)) ≤ ε/3   gives T,
        2 √(C_K dτ/(Sm) (ρ² + N(1−ρ²)) C_S) ≤ ε/3   gives S.

    With a = 36 C_K dτ(ρ² + N(1−ρ²))/(mε²), S is a with replacement, of the order d/ε², and N/(1 + (N−1)/a) ≤
    N without, which needs equal weights; both rounded up. Draws with replacement may have to be more than
    there are devices. After Theorem 5.10.

    Notes
    -----
    Equal thirds are the published choice, not the best one: ``complexity`` takes S and shares out the rest.

    Examples
    --------
    >>> problem = Constants(smoothness=2.0, strong_convexity=1.0, dim=2, num_clients=40, initial_distance=1.0)
    >>> plan = drawn_complexity([1.0, 4.0], problem, local_steps=2, correlation=0.9)
    >>> plan.num_participants
    array([39., 27.])
    """
    c, third = constants, checked("epsilon", epsilon, above=True) / 3
    K = whole("local-steps", local_steps, 1)
    drawn = {"with-replacement": with_replacement, "without-replacement": without_replacement}
    if scheme not in drawn:
        raise ConfigError(f"scheme must be one of {', '.join(drawn)}; got {scheme!r}")
    bounds.thinning(c, drawn[scheme](1))  # refuses unequal weights
    eta = _largest_step(c, third, BoundSettings(1.0, K, correlation))
    wanted = 4 * bounds.drawing_heat(c, BoundSettings(eta, K, correlation)) / third**2
    if scheme == "without-replacement":
        wanted = c.num_clients * wanted / (wanted + (c.num_clients - 1)) if c.num_clients > 1 else 1.0
    T = np.ceil(_steps_to(c, third, eta))
    # a hair less before rounding up, so that a whole number stays itself
    devices = np.maximum(np.ceil(wanted * (1 - 1e-12)), 1.0)
    return _found(eta, T, np.ceil(T / K), devices)


def best_step_size(
    constants: Constants,
    *,
    local_steps: int,
    num_rounds: int,
    correlation: float = 0.0,
    participation: Participation = _FULL,
) -> float:
    r"""Step size η ≤ 1/(2L) for which the fixed-step bound is least after a given number of rounds.

    A larger η forgets the start sooner and leaves a larger error, so the best one falls as the run grows,
    like log(T)/T. It is found to one part in a million. A run so short that every step size leaves the bound
    above that of the start is refused. After Theorem 6.1: for a fixed number of steps there is a best step
    size.

    Examples
    --------
    >>> problem = Constants(smoothness=2.0, strong_convexity=1.0, dim=2, num_clients=4, initial_distance=1e3)
    >>> f"{best_step_size(problem, local_steps=2, num_rounds=10**7):.3g}"
    '9.81e-07'
    """
    run = {"local_steps": local_steps, "correlation": correlation, "participation": participation}
    low, high = 1e-18 / (2 * constants.smoothness), 1 / (2 * constants.smoothness)
    start = bounds.fixed_step_bound(constants, step_size=low, num_rounds=0, **run)
    while high > low * (1 + 1e-6):
        tried = np.minimum(np.geomspace(low, high, 400), 1 / (2 * constants.smoothness))
        totals = bounds.fixed_step_bound(constants, step_size=tried, num_rounds=num_rounds, **run).total
        best = int(np.argmin(totals))
        low, high = tried[max(best - 1, 0)], tried[min(best + 1, len(tried) - 1)]
    if totals[best] >= start.initialisation + start.partial_participation:
        raise ConfigError(
            f"num-rounds = {num_rounds} is too few: any step size leaves the bound above that of the start",
            hint="ask for more rounds; complexity says how many an accuracy takes",
        )
    return float(tried[best])


def _found(*values: Any) -> Complexity:
    return Complexity(*(value[()] for value in np.broadcast_arrays(*values)))


def _largest_step(c: Constants, error: Any, run: BoundSettings) -> np.ndarray:
    """Largest η ≤ 1/(2L) whose local error, which grows like √η, is at most ``error``; ``run`` has η = 1."""
    with np.errstate(divide="ignore"):
        return np.minimum(1 / (2 * c.smoothness), (error / assemble(c, run).local_error) ** 2)


def _steps_to(c: Constants, left: Any, eta: Any) -> np.ndarray:
    """Steps, before rounding, after which at most ``left`` remains of the distance at the start."""
    share = np.minimum(left / max(bounds.initial_distance_bound(c), 1e-300), 1.0)
    return np.log(share) / np.log1p(-eta * c.strong_convexity / 4) + 0.0


def _certified(epsilon, c: Constants, K: np.ndarray, correlation: float, *, participation: Participation):
    """Largest step size, and steps before rounding, that the fixed-step bound certifies for ε."""
    epsilon = checked("epsilon", epsilon, above=True)

    def lasting(eta):
        return assemble(c, BoundSettings(eta, K, correlation, participation)).total

    floor = lasting(0.0)
    if (epsilon <= floor).any():
        raise ConfigError(
            f"epsilon must be > {np.max(floor):.4g}, which drawing {participation.num_participants} of "
            f"{c.num_clients} devices leaves at any step size; got {epsilon.min():.4g}",
            hint="draw more devices or raise the correlation; noise='realised' removes the cause",
        )
    allowed = floor + (epsilon - floor) / 2
    eta = _largest_step(c, allowed - floor, BoundSettings(1.0, K, correlation, participation))
    if participation.scheme != "full":
        low, high = np.zeros_like(eta), eta
        for _ in range(200):
            middle = (low + high) / 2
            fits = lasting(middle) <= allowed
            low, high = np.where(fits, middle, low), np.where(fits, high, middle)
        eta = np.where(lasting(eta) <= allowed, eta, low)
    return eta, _steps_to(c, epsilon - lasting(eta), eta)
