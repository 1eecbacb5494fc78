"""Published convergence bounds in W2, with every term by its name; notation as in ``fald.theory``."""

from __future__ import annotations

import math
from dataclasses import dataclass, fields
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import ArrayLike

from fald.core.errors import ConfigError
from fald.settings.participation import Participation, full
from fald.settings.schedules import paper_decay

_FULL = full()


@dataclass(frozen=True)
class Constants:
    """What the bounds need to know of a problem and of the start of the chain.

    ``smoothness`` L and ``strong_convexity`` m > 0 are the largest and smallest curvature of any client
    energy f^c; d, N and τ; ``min_weight`` is min_c p_c, 1/N unless given; ``heterogeneity`` γ, not its
    square; ``gradient_noise`` σ, the standard deviation per coordinate of a client's stochastic gradient, 0
    for full batches; ``initial_distance`` D = ‖θ_0 − θ*‖/√d.

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

    ``initialisation`` is what is left of the distance at the start, the only term that further rounds
    reduce; ``partial_participation`` is added by drawing S of N devices, and does not vanish with the step
    size. The square root of H_ρ ((K−1)² + κ), ``local_error``, is divided in proportion to the four summands
    of H_ρ: discretisation and local drift fed by D², by the injected noise of the hottest client, by γ² and
    by σ². A share therefore shrinks when another source grows; ``total`` never does. ``drift_share`` is no
    summand but the fraction (K−1)²/((K−1)² + κ) of ``local_error`` due to local steps; the rest is
    discretisation, which K = 1 has.
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


def constants(model: Any, data: Any, **settings: Any) -> Constants:
    """Measure the constants of a model and its clients: see ``fald.theory.measured.constants``."""
    from fald.theory.measured import constants as measure  # needs JAX, which the bounds do not

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

    All devices, for η ≤ 1/(2L):

        W2(μ_k, π) ≤ (1−ηm/4)^k √(2d)(D + √(τ/m)) + 30κ √(ηmd) √(((K−1)² + κ) H_ρ).

    Drawn devices add one more term,

        2 √(C_K dτ/(Sm) · (ρ² + N(1−ρ²)) · C_S),    C_K = ηmK/(1 − e^{−ηmK/2}),

    C_S = 1 with replacement (Scheme I) and (N−S)/(N−1) without (Scheme II), so that S = N without
    replacement has the bound of all devices. Theorems 5.7, 5.9 and 5.10; B.6, B.8 and C.3.

    Notes
    -----
    Not a prediction. For drawn devices the reference has K² in its main text and in the steps of its proof,
    and (K−1)² in its appendix. The latter holds: summed over rounds instead of steps, what a synchronisation
    adds is at most 28·K·C_K·κ²ηmdH_ρ, and 28·K·C_K ≤ 100((K−1)² + κ) for η ≤ 1/(2L). The page on theory
    bounds has the proof. ``noise="realised"`` with drawn devices is not covered.

    Examples
    --------
    >>> from fald.settings.participation import with_replacement
    >>> problem = Constants(smoothness=2.0, strong_convexity=1.0, dim=2, num_clients=4, initial_distance=1.0)
    >>> settings = {"step_size": 1e-4, "num_rounds": 10**5}
    >>> fixed_step_bound(problem, local_steps=[1, 5], **settings).total.round(2)
    array([3.01, 8.05])
    >>> bound = fixed_step_bound(problem, local_steps=1, participation=with_replacement(2), **settings)
    >>> round(float(bound.partial_participation), 2), round(float(bound.total), 2)
    (5.66, 8.67)
    """
    c = constants
    eta = checked_step("1/(2L)", 1 / (2 * c.smoothness), step_size)
    K, rounds = whole("local-steps", local_steps, 1), whole("num-rounds", num_rounds, 0)
    start = initial_distance_bound(c) * np.exp(K * rounds * np.log1p(-eta * c.strong_convexity / 4))
    return assemble(c, BoundSettings(eta, K, correlation, participation), start=start)


def decaying_step_bound(
    constants: Constants, *, local_steps: ArrayLike, num_rounds: ArrayLike, correlation: float = 0.0
) -> Bound:
    r"""Bound on W2 for the step size η_k = 1/(2L + mk/12) when every client takes part.

        W2(μ_k, π) ≤ 45κ √(((K−1)² + κ) H_ρ) √(η_k m d)

    It has no separate term for the start: ``initialisation`` is 0. Theorems 5.8 and B.7.

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
    K, rounds = whole("local-steps", local_steps, 1), whole("num-rounds", num_rounds, 0)
    eta = paper_decay(c.smoothness, c.strong_convexity)(K * rounds)
    return assemble(c, BoundSettings(eta, K, correlation), coefficient=45.0)


def initial_distance_bound(constants: Constants) -> float:
    r"""Bound on the distance of the start from the posterior.

        W2(δ_θ0, π) ≤ √2 (‖θ_0 − θ*‖ + √(dτ/m)) = √(2d) (D + √(τ/m))

    The start is one point; of ``constants`` only m, d, τ and D matter. Lemma F.1.

    Examples
    --------
    >>> initial_distance_bound(Constants(smoothness=2.0, strong_convexity=1.0, dim=2, initial_distance=1.0))
    4.0
    """
    c = constants
    return math.sqrt(2 * c.dim) * (c.initial_distance + math.sqrt(c.temperature / c.strong_convexity))


class BoundSettings(NamedTuple):
    """The settings of a run that a bound reads, as arrays that broadcast."""

    step_size: Any
    local_steps: Any
    correlation: float = 0.0
    participation: Participation = _FULL


def assemble(c: Constants, run: BoundSettings, *, coefficient: float = 30.0, start: Any = 0.0) -> Bound:
    """The bound with a given coefficient of its square root and a given first term; settings unchecked."""
    eta, K = run.step_size, run.local_steps
    sources, kappa = c.sources(run.correlation), c.condition_number
    drift, scale = (K - 1) ** 2, sources.sum()
    root = coefficient * kappa * np.sqrt(eta * c.strong_convexity * c.dim * (drift + kappa) * scale)
    shares = (root * (source / scale if scale > 0 else 0.0) for source in sources)
    terms = np.broadcast_arrays(start, *shares, drawing_term(c, run), drift / (drift + kappa))
    return Bound(*(np.array(term, float)[()] for term in terms))


def shared_and_own(c: Constants, correlation: float) -> float:
    """ρ² + N(1−ρ²) = Σ_c p_c T_cρ/τ, the noise of an average client."""
    return correlation**2 + c.num_clients * (1 - correlation**2)


def thinning(c: Constants, participation: Participation) -> float:
    """C_S/S, by which drawing S of N devices thins the spread of clients: 1/S or (N−S)/(S(N−1))."""
    n = c.num_clients
    participation.check(np.ones(n, int))
    if participation.scheme == "full":
        return 0.0
    s = participation.num_participants or n
    if participation.scheme == "with-replacement":
        return 1 / s
    if c.min_weight is not None and abs(c.min_weight * n - 1) > 1e-6:
        rule = f"min-weight = 1/num-clients = {1 / n:g}"
        raise ConfigError(f"without replacement the bound needs {rule}; got {c.min_weight:g}")
    return (n - s) / (s * max(n - 1, 1))


def drawing_heat(c: Constants, run: BoundSettings) -> np.ndarray:
    """C_K dτ/m (ρ² + N(1−ρ²)), C_K = ηmK/(1 − e^{−ηmK/2}): drawing devices adds 4 C_S/S of it to W2²."""
    x = np.asarray(run.step_size * c.strong_convexity * run.local_steps, float)
    factor = np.where(x > 0, x / -np.expm1(-np.where(x > 0, x, 1.0) / 2), 2.0)  # 2 is its limit at η = 0
    return factor * (c.dim * c.temperature / c.strong_convexity * shared_and_own(c, run.correlation))


def drawing_term(c: Constants, run: BoundSettings) -> np.ndarray:
    """Term of partial participation; at η = 0 its limit."""
    return 2 * np.sqrt(drawing_heat(c, run) * thinning(c, run.participation))


def checked(name: str, value: ArrayLike, *, above: bool = False) -> np.ndarray:
    """Finite numbers ≥ 0, or > 0 where ``above`` is set."""
    found = np.asarray(value, float)
    bad = found[~(np.isfinite(found) & ((found > 0) if above else (found >= 0)))]
    if bad.size:
        raise ConfigError(f"{name} must be {'>' if above else '≥'} 0; got {bad.flat[0]:g}")
    return found


def checked_step(rule: str, limit: float, step_size: ArrayLike) -> np.ndarray:
    """η, refused unless 0 < η ≤ limit; ``rule`` names the limit."""
    eta = checked("step-size", step_size, above=True)
    if eta.max() > limit * (1 + 1e-12):
        got = f"{eta.max():.6g}, {eta.max() / limit:.4g} times that"
        raise ConfigError(f"step-size must be ≤ {rule} = {limit:.6g}; got {got}")
    return eta


def whole(name: str, value: ArrayLike, low: int) -> np.ndarray:
    """Whole numbers of at least ``low``, as floats."""
    number = np.asarray(value, float)
    good = np.isfinite(number) & (number >= low) & (number == np.floor(number))
    if not good.all():
        raise ConfigError(f"{name} must be a whole number ≥ {low}; got {number[~good].flat[0]:g}")
    return number
