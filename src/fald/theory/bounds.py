r"""Published convergence bounds of FA-LD in W2, with every term by its name.

Notation of the docstrings: L and m are smoothness and strong convexity of every client energy f^c,
κ = L/m, d the dimension, τ the temperature, ρ the correlation of injected noise, η the step size, K the
local steps per round, k = rounds·K the steps taken, N clients of weights p_c, S of them drawn per round,
D with ‖θ_0 − θ*‖² ≤ d D², γ = max_c ‖∇f^c(θ*)‖, σ with E‖∇f̃^c − ∇f^c‖² ≤ d σ², and

    H_ρ = D² + max_c T_cρ/m + γ²/(m² d) + σ²/m²,    T_cρ = τ(ρ² + (1−ρ²)/p_c).

All are upper bounds, for strongly convex and smooth energies and ``noise="paper"``. On random Gaussian
federations the exact distance is typically several hundred times smaller (four to ten at the start of a
chain of tiny steps): they guarantee convergence, they do not predict an error; ``fald.gaussian`` does.

"On Convergence of Federated Averaging Langevin Dynamics" (Deng, Zhang, Ma, Song, Lin).
"""

from __future__ import annotations

import math
from dataclasses import dataclass, fields
from typing import Any

import numpy as np
from numpy.typing import ArrayLike

from fald.errors import ConfigError
from fald.participation import Participation, full
from fald.schedules import paper_decay

_FULL = full()


@dataclass(frozen=True)
class Constants:
    """What the bounds need to know of a problem and of the start of the chain.

    Attributes
    ----------
    smoothness, strong_convexity
        L ≥ m > 0, the largest and smallest curvature of any client energy f^c.
    dim, num_clients, temperature
        d, N and τ.
    min_weight
        min_c p_c; 1/N unless given.
    heterogeneity
        γ, not its square.
    gradient_noise
        σ, the standard deviation per coordinate of a client's stochastic gradient; 0 for full batches.
    initial_distance
        D = ‖θ_0 − θ*‖/√d.

    Examples
    --------
    >>> Constants(smoothness=34.0, strong_convexity=1.0, dim=2, num_clients=50).condition_number
    34.0
    """

    smoothness: float
    strong_convexity: float
    dim: int
    num_clients: int = 1
    min_weight: float | None = None
    temperature: float = 1.0
    heterogeneity: float = 0.0
    gradient_noise: float = 0.0
    initial_distance: float = 0.0

    def __post_init__(self):
        for field in fields(Constants):
            value, name = getattr(self, field.name), field.name.replace("_", "-")
            if name == "min-weight" and value is None:
                continue
            if not (isinstance(value, int | float | np.number) and math.isfinite(value) and value >= 0):
                raise ConfigError(f"{name} must be a finite number ≥ 0; got {value!r}")
            if name in ("dim", "num-clients") and (value < 1 or value != int(value)):
                raise ConfigError(f"{name} must be a whole number ≥ 1; got {value!r}")
        L, m = self.smoothness, self.strong_convexity
        if not 0 < m <= L:
            raise ConfigError(
                f"strong-convexity must be > 0 and ≤ smoothness = {L:g}; got {m:g}",
                hint="the bounds do not cover flat or non-convex energies; a proper prior adds curvature",
            )
        if self.min_weight is not None and not 0 < self.min_weight <= (1 + 1e-9) / self.num_clients:
            raise ConfigError(
                f"min-weight must be > 0, ≤ 1/num-clients = {1 / self.num_clients:g}; got {self.min_weight:g}"
            )

    @property
    def condition_number(self) -> float:
        """κ = L/m."""
        return self.smoothness / self.strong_convexity

    def client_temperature(self, correlation: float = 0.0) -> float:
        """max_c T_cρ = τ(ρ² + (1−ρ²)/min_c p_c), the hottest local chain."""
        if not 0 <= correlation <= 1:
            raise ConfigError(f"correlation must be between 0 and 1; got {correlation!r}")
        least = 1 / self.num_clients if self.min_weight is None else self.min_weight
        return self.temperature * (correlation**2 + (1 - correlation**2) / least)

    def sources(self, correlation: float = 0.0) -> np.ndarray:
        """Return the four summands of H_ρ: D², max_c T_cρ/m, γ²/(m²d) and σ²/m²."""
        m = self.strong_convexity
        start, heat = self.initial_distance**2, self.client_temperature(correlation) / m
        apart, batch = (self.heterogeneity / m) ** 2 / self.dim, (self.gradient_noise / m) ** 2
        return np.array([start, heat, apart, batch])


@dataclass(frozen=True)
class Bound:
    """A bound on W2 as a sum of named terms; each is a float or an array of one common shape.

    The published bound has one square root of H_ρ (drift + κ), drift being (K−1)² or K². It is divided here
    in proportion to the four summands of H_ρ, so that the terms add up to ``total``. A share therefore
    shrinks when another source grows; ``total`` never does.

    Attributes
    ----------
    initialisation
        What is left of the distance at the start; the only term that further rounds reduce.
    discretisation_and_drift
        Discretisation and local drift fed by the distance of the start, D².
    injected_noise, heterogeneity, stochastic_gradient
        The same, fed by the injected noise of the hottest client, by γ² and by σ².
    partial_participation
        Added by drawing S of N devices; does not vanish with the step size.
    drift_share
        Fraction drift/(drift + κ) of ``local_error`` that is due to local steps; the rest is
        discretisation, which K = 1 has too. Not a summand.
    """

    initialisation: Any
    discretisation_and_drift: Any
    injected_noise: Any
    heterogeneity: Any
    stochastic_gradient: Any
    partial_participation: Any
    drift_share: Any

    @property
    def local_error(self) -> Any:
        """The whole square-root term: four of the summands."""
        fed = self.injected_noise + self.heterogeneity + self.stochastic_gradient
        return self.discretisation_and_drift + fed

    @property
    def total(self) -> Any:
        """The bound."""
        return self.initialisation + self.local_error + self.partial_participation


@dataclass(frozen=True)
class Complexity:
    """Step size and length of a run that a bound certifies; whole numbers are kept as floats."""

    step_size: Any
    num_steps: Any
    num_rounds: Any


def constants(model: Any, data: Any, **settings: Any) -> Constants:
    """Measure the constants of a model and its clients: see ``fald.constants.constants``."""
    from fald.constants import constants as measure  # needs JAX, which the bounds do not

    return measure(model, data, **settings)


def fixed_step_bound(
    constants: Constants,
    *,
    step_size: ArrayLike,
    local_steps: ArrayLike,
    num_rounds: ArrayLike,
    correlation: float = 0.0,
    participation: Participation = _FULL,
) -> Bound:
    r"""Bound on W2 for a constant step size, with all devices or with S of N drawn per round.

    All devices:

        W2(μ_k, π) ≤ (1−ηm/4)^k √(2d)(D + √(τ/m)) + 30κ √(ηmd) √(((K−1)² + κ) H_ρ).

    Drawn devices: K² in place of (K−1)², and one more term

        2 √(C_K dτ/(Sm) · (ρ² + N(1−ρ²)) · C_S),    C_K = ηmK/(1 − e^{−ηmK/2}),

    C_S = 1 with replacement (Scheme I) and (N−S)/(N−1) without (Scheme II).

    Parameters
    ----------
    constants
        The problem.
    step_size, local_steps, num_rounds
        η ≤ 1/(2L), K ≥ 1 and the number of rounds; arrays broadcast.
    correlation
        ρ ∈ [0, 1].
    participation
        ``full()``, ``with_replacement(S)``, or ``without_replacement(S)``, which needs equal weights.

    Returns
    -------
    Bound
        The terms and their total.

    Raises
    ------
    ConfigError
        If a precondition fails; the message says which one and by how much.

    Notes
    -----
    Not a prediction: see the module. For drawn devices the appendix of the reference prints (K−1)²;
    K² is what its proof gives. ``noise="realised"`` with drawn devices is not covered.

    Examples
    --------
    >>> from fald.participation import with_replacement
    >>> problem = Constants(smoothness=2.0, strong_convexity=1.0, dim=2, num_clients=4, initial_distance=1.0)
    >>> settings = {"step_size": 1e-4, "num_rounds": 10**5}
    >>> fixed_step_bound(problem, local_steps=[1, 5], **settings).total.round(2)
    array([3.01, 8.05])
    >>> bound = fixed_step_bound(problem, local_steps=1, participation=with_replacement(2), **settings)
    >>> round(float(bound.partial_participation), 2), round(float(bound.total), 2)
    (5.66, 9.27)
    """
    c = constants
    eta = _step("1/(2L)", 1 / (2 * c.smoothness), step_size)
    K, rounds = _whole("local-steps", local_steps, 1), _whole("num-rounds", num_rounds, 0)
    start = initial_distance_bound(c) * np.exp(K * rounds * np.log1p(-eta * c.strong_convexity / 4))
    return _bound(c, 30.0, eta, K, correlation, participation, start)


def decaying_step_bound(
    constants: Constants, *, local_steps: ArrayLike, num_rounds: ArrayLike, correlation: float = 0.0
) -> Bound:
    r"""Bound on W2 for the step size η_k = 1/(2L + mk/12) when every client takes part.

        W2(μ_k, π) ≤ 45κ √(((K−1)² + κ) H_ρ) √(η_k m d)

    Parameters
    ----------
    constants, local_steps, num_rounds, correlation
        As in ``fixed_step_bound``, and refused as there.

    Returns
    -------
    Bound
        ``initialisation`` is 0: this bound has no separate term for the start.

    Notes
    -----
    Published for ρ = 0; its induction uses only the one-step recursion, which correlated noise changes
    through H_ρ alone. The proof assumes that η at most halves within a round; in rounds longer than
    that the bound exceeds √(6dH) + √(dτ/m), which holds for any decreasing step, so it needs no cap on K.

    Examples
    --------
    >>> problem = Constants(smoothness=2.0, strong_convexity=1.0, dim=2, num_clients=4, initial_distance=1.0)
    >>> decaying_step_bound(problem, local_steps=1, num_rounds=[0, 10**6]).total.round(2)
    array([201.25,   1.39])
    """
    c = constants
    K, rounds = _whole("local-steps", local_steps, 1), _whole("num-rounds", num_rounds, 0)
    eta = paper_decay(c.smoothness, c.strong_convexity)(K * rounds)
    return _bound(c, 45.0, eta, K, correlation, _FULL, 0.0)


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
    number of steps is the smallest T that brings the total to ε; rounds are T/K, rounded up.

    Parameters
    ----------
    epsilon
        ε > 0; broadcasts with ``local_steps``.
    constants, local_steps, correlation, participation
        As in ``fixed_step_bound``.

    Returns
    -------
    Complexity
        Step size, steps and rounds.

    Raises
    ------
    ConfigError
        If a precondition fails, or ε is not above what partial participation leaves.

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
    eta, T, K = _certified(epsilon, constants, local_steps, correlation, participation)
    found = np.broadcast_arrays(eta, np.ceil(T), np.ceil(np.ceil(T) / K))
    return Complexity(*(value[()] for value in found))


def best_local_steps(
    constants: Constants,
    epsilon: float | None = None,
    *,
    correlation: float = 0.0,
    participation: Participation = _FULL,
) -> int:
    r"""Local steps K for which the bound certifies an accuracy in the fewest rounds.

    As long as η ≤ 1/(2L) does not bind, the certified rounds are proportional to ((K−1)² + κ)/K, least at
    K = √(1+κ); with drawn devices to (K² + κ)/K, least at √κ. Integers on both sides are compared. With
    ``epsilon`` the rounds of ``complexity`` are minimised instead, caps and all.

    Parameters
    ----------
    constants, correlation, participation
        As in ``fixed_step_bound``; the correlation matters only with ``epsilon``.
    epsilon
        Accuracy in W2; without it, the limit of high accuracy.

    Returns
    -------
    int
        K.

    Notes
    -----
    Best for the bound, not for the chain: clients of equal curvature lose nothing by larger K.

    Examples
    --------
    >>> best_local_steps(Constants(smoothness=34.0, strong_convexity=1.0, dim=2, num_clients=50))
    6
    """
    kappa, drawn = constants.condition_number, participation.scheme != "full"
    ideal = math.sqrt(kappa if drawn else 1 + kappa)
    if epsilon is None:
        around = np.array([max(1, math.floor(ideal)), math.ceil(ideal)])
        return int(around[np.argmin(((around - (not drawn)) ** 2 + kappa) / around)])
    # The cap on η binds up to about K = ε / (2·unit); beyond it and beyond the ideal, rounds only grow.
    unit = 30 * kappa * math.sqrt(constants.dim * constants.sources(correlation).sum() / (2 * kappa))
    low, high = 1, 2 * math.ceil(max(ideal, epsilon / unit if unit > 0 else 0)) + 2
    while True:
        grid = np.unique(np.round(np.geomspace(low, high, 400)))
        _, steps, _ = _certified(epsilon, constants, grid, correlation, participation)
        best = int(np.argmin(steps / grid))
        if len(grid) == high - low + 1:
            return int(grid[best])
        low, high = grid[max(best - 1, 0)], grid[min(best + 1, len(grid) - 1)]


def divergence_bound(
    constants: Constants, *, step_size: ArrayLike, local_steps: ArrayLike, correlation: float = 0.0
) -> Any:
    r"""Bound on how far clients drift from their average between synchronisations.

        Σ_c p_c E‖θ_k^c − θ_k‖² ≤ 112 (K−1)² η² d L² H_ρ + 8 (K−1) η d τ (ρ² + N(1−ρ²))

    Parameters
    ----------
    constants, local_steps, correlation
        As in ``fixed_step_bound``, and refused as there.
    step_size
        η ≤ 2/(L+m); broadcasts with ``local_steps``.

    Returns
    -------
    float or numpy.ndarray
        The bound, on a mean squared distance.

    Notes
    -----
    The reference allows η < 2/m, for which a local chain of curvature L > m can diverge; its
    contraction step needs the range enforced here.

    Examples
    --------
    >>> problem = Constants(smoothness=2.0, strong_convexity=1.0, dim=2, num_clients=4)
    >>> divergence_bound(problem, step_size=0.001, local_steps=[1, 5]).round(3)
    array([0.   , 0.313])
    """
    c = constants
    limit = 2 / (c.smoothness + c.strong_convexity)
    eta, K = _step("2/(L+m)", limit, step_size), _whole("local-steps", local_steps, 1)
    pulled = 112 * (K - 1) ** 2 * eta**2 * c.smoothness**2 * c.sources(correlation).sum()
    return (c.dim * (pulled + 8 * (K - 1) * eta * c.temperature * _mixed(c, correlation)))[()]


def initial_distance_bound(constants: Constants) -> float:
    r"""Bound on the distance of the start from the posterior.

        W2(δ_θ0, π) ≤ √2 (‖θ_0 − θ*‖ + √(dτ/m)) = √(2d) (D + √(τ/m))

    The start is one point; of ``constants`` only m, d, τ and D matter.

    Examples
    --------
    >>> initial_distance_bound(Constants(smoothness=2.0, strong_convexity=1.0, dim=2, initial_distance=1.0))
    4.0
    """
    c = constants
    return math.sqrt(2 * c.dim) * (c.initial_distance + math.sqrt(c.temperature / c.strong_convexity))


def _bound(c: Constants, coefficient, eta, K, correlation, participation: Participation, start) -> Bound:
    sources, kappa = c.sources(correlation), c.condition_number
    drawn = participation.scheme != "full"
    drift = K**2 if drawn else (K - 1) ** 2
    drawing = _drawing(c, eta, K, correlation, participation) if drawn else 0.0
    scale = sources.sum()
    root = coefficient * kappa * np.sqrt(eta * c.strong_convexity * c.dim * (drift + kappa) * scale)
    shares = (root * (source / scale if scale > 0 else 0.0) for source in sources)
    terms = np.broadcast_arrays(start, *shares, drawing, drift / (drift + kappa))
    return Bound(*(np.array(term, float)[()] for term in terms))


def _mixed(c: Constants, correlation: float) -> float:
    return correlation**2 + c.num_clients * (1 - correlation**2)


def _drawing(c: Constants, eta, K, correlation, participation: Participation):
    """Term of partial participation; at η = 0 its limit."""
    n, thinning = c.num_clients, 1.0
    participation.check(np.ones(n, int))
    s = participation.num_participants or n
    if participation.scheme == "without-replacement":
        if c.min_weight is not None and abs(c.min_weight * n - 1) > 1e-6:
            raise ConfigError(
                f"without replacement the bound needs min-weight = 1/num-clients = {1 / n:g}; "
                f"got {c.min_weight:g}"
            )
        thinning = (n - s) / max(n - 1, 1)
    x = np.asarray(eta * c.strong_convexity * K, float)
    c_k = np.where(x > 0, x / -np.expm1(-np.where(x > 0, x, 1.0) / 2), 2.0)
    noise = c.temperature / (s * c.strong_convexity) * _mixed(c, correlation)
    return 2 * np.sqrt(c_k * c.dim * noise * thinning)


def _certified(epsilon, c: Constants, local_steps, correlation, participation: Participation):
    """Largest step size, and steps before rounding, that the fixed-step bound certifies for ε."""
    K = _whole("local-steps", local_steps, 1)
    epsilon = np.asarray(epsilon, float)
    if not (np.isfinite(epsilon) & (epsilon > 0)).all():
        raise ConfigError(f"epsilon must be > 0; got {epsilon.min():g}")

    def lasting(eta):
        return _bound(c, 30.0, eta, K, correlation, participation, 0.0).total

    floor = lasting(0.0)
    if (epsilon <= floor).any():
        raise ConfigError(
            f"epsilon must be > {np.max(floor):.4g}, which drawing {participation.num_participants} of "
            f"{c.num_clients} devices leaves at any step size; got {epsilon.min():.4g}",
            hint="draw more devices or raise the correlation; noise='realised' removes the cause",
        )
    allowed = floor + (epsilon - floor) / 2
    with np.errstate(divide="ignore"):
        root = (allowed - floor) / _bound(c, 30.0, 1.0, K, correlation, participation, 0.0).local_error
    eta = np.minimum(1 / (2 * c.smoothness), root**2)
    if participation.scheme != "full":
        low, high = np.zeros_like(eta), eta
        for _ in range(200):
            middle = (low + high) / 2
            fits = lasting(middle) <= allowed
            low, high = np.where(fits, middle, low), np.where(fits, high, middle)
        eta = np.where(lasting(eta) <= allowed, eta, low)
    left = np.minimum((epsilon - lasting(eta)) / max(initial_distance_bound(c), 1e-300), 1.0)
    return eta, np.log(left) / np.log1p(-eta * c.strong_convexity / 4) + 0.0, K


def _step(rule: str, limit: float, step_size: ArrayLike) -> np.ndarray:
    eta = np.asarray(step_size, float)
    bad = eta[~(np.isfinite(eta) & (eta > 0))]
    if bad.size:
        raise ConfigError(f"step-size must be > 0; got {bad.flat[0]:g}", hint="choose a positive number")
    if eta.max() > limit * (1 + 1e-12):
        got = f"{eta.max():.6g}, {eta.max() / limit:.4g} times that"
        raise ConfigError(f"step-size must be ≤ {rule} = {limit:.6g}; got {got}")
    return eta


def _whole(name: str, value: ArrayLike, low: int) -> np.ndarray:
    number = np.asarray(value, float)
    good = np.isfinite(number) & (number >= low) & (number == np.floor(number))
    if not good.all():
        raise ConfigError(f"{name} must be a whole number ≥ {low}; got {number[~good].flat[0]:g}")
    return number
