r"""The lemmas behind the published bounds, each as the bound that it states.

Notation, parameters and errors as in ``fald.theory``; θ = Σ_c p_c θ^c is the average of the clients'
positions, θ̄ the Langevin diffusion of f in its stationary law, Z = Σ_c p_c ∇f^c(θ^c), and β the average of
all clients before devices are drawn. Except for ``one_step_bound``, what is bounded is the expectation of a
squared norm.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
from numpy.typing import ArrayLike

from fald.core.errors import ConfigError
from fald.settings.participation import Participation
from fald.theory.bounds import Constants, checked, checked_step, shared_and_own, thinning, whole


def contraction_bound(
    constants: Constants, *, step_size: ArrayLike, squared_distance: ArrayLike, squared_divergence: ArrayLike
) -> Any:
    r"""Bound on how far the drift of one step leaves two points apart.

        ‖θ̄ − θ − η(∇f(θ̄) − Z)‖² ≤ (1−ηm) ‖θ̄−θ‖² + 4ηL Σ_c p_c ‖θ^c−θ‖²

    for η ≤ 1/(L+m) and any points θ̄ and θ^c: ``squared_distance`` is ‖θ̄−θ‖² and ``squared_divergence``
    Σ_c p_c ‖θ^c−θ‖². Lemmas 5.4 and B.1.

    Examples
    --------
    >>> problem = Constants(smoothness=2.0, strong_convexity=1.0, dim=2)
    >>> contraction_bound(problem, step_size=0.125, squared_distance=[4.0, 1.0], squared_divergence=0.5)
    array([4.   , 1.375])
    """
    c = constants
    eta = checked_step("1/(L+m)", 1 / (c.smoothness + c.strong_convexity), step_size)
    apart = checked("squared-distance", squared_distance)
    spread = checked("squared-divergence", squared_divergence)
    return ((1 - eta * c.strong_convexity) * apart + 4 * eta * c.smoothness * spread)[()]


def discretisation_bound(constants: Constants, *, step_size: ArrayLike) -> Any:
    r"""Bound on how far the stationary diffusion moves within one step.

        E‖θ̄_s − θ̄_{η⌊s/η⌋}‖² ≤ 2η² d κ L τ + 16 η d τ

    for any η > 0: the reference asks for η < 2/m, which its proof does not use. Lemma B.2.

    Examples
    --------
    >>> problem = Constants(smoothness=2.0, strong_convexity=1.0, dim=2)
    >>> discretisation_bound(problem, step_size=[0.01, 0.1]).round(3)
    array([0.322, 3.36 ])
    """
    c = constants
    eta = checked_step("infinity", np.inf, step_size)
    return (c.dim * c.temperature * eta * (2 * eta * c.condition_number * c.smoothness + 16))[()]


def one_step_bound(
    constants: Constants,
    *,
    step_size: ArrayLike,
    local_steps: ArrayLike,
    distance: ArrayLike,
    correlation: float = 0.0,
) -> Any:
    r"""Bound on W2 after one more local step of every client, from W2 before it; neither is squared.

        W2²(μ_{k+1}, π) ≤ (1−ηm/2) W2²(μ_k, π) + 400 η² d L² H_ρ ((K−1)² + κ)

    for η ≤ 1/(2L); ``distance`` is W2(μ_k, π). Published for ρ = 0; correlated noise changes H_0 into H_ρ,
    as in the theorem for it. Lemmas 5.6 and B.5.

    Examples
    --------
    >>> problem = Constants(smoothness=2.0, strong_convexity=1.0, dim=2, num_clients=4)
    >>> one_step_bound(problem, step_size=1e-5, local_steps=[1, 9], distance=1.0).round(6)
    array([0.999999, 1.00004 ])
    """
    c = constants
    eta = checked_step("1/(2L)", 1 / (2 * c.smoothness), step_size)
    K, apart = whole("local-steps", local_steps, 1), checked("distance", distance)
    added = 400 * eta**2 * c.dim * c.smoothness**2 * c.sources(correlation).sum()
    left = (1 - eta * c.strong_convexity / 2) * apart**2
    return np.sqrt(left + added * ((K - 1) ** 2 + c.condition_number))[()]


def second_moment_bound(constants: Constants, *, step_size: ArrayLike, correlation: float = 0.0) -> float:
    r"""Bound on how far any client is from the mode, in any step.

        sup_k E‖θ_k^c − θ*‖² ≤ d D² + (6d/m) (max_c T_cρ + σ²/m + γ²/(md))

    for η ≤ 2/(L+m), on which the bound itself does not depend. The reference allows η < 2/m, where a client
    of curvature above m can diverge. Holds with drawn devices too: given the clients' positions, a drawn
    average is no farther from θ* than the drawn clients are on average. Lemma E.1.

    Examples
    --------
    >>> problem = Constants(smoothness=2.0, strong_convexity=1.0, dim=2, num_clients=4, initial_distance=1.0)
    >>> second_moment_bound(problem, step_size=0.1)
    50.0
    """
    _contracting(constants, step_size)
    start, *others = constants.sources(correlation)
    return float(constants.dim * (start + 6 * sum(others)))


def gradient_bound(constants: Constants, *, step_size: ArrayLike, correlation: float = 0.0) -> float:
    r"""Bound on the stochastic gradient of any client, in any step.

        E‖∇f̃^c(θ_k^c)‖² ≤ 14 d L² H_ρ

    as far as ``second_moment_bound`` holds, from which it follows. Lemma E.2.

    Examples
    --------
    >>> problem = Constants(smoothness=2.0, strong_convexity=1.0, dim=2, num_clients=4, initial_distance=1.0)
    >>> gradient_bound(problem, step_size=0.1)
    560.0
    """
    c = constants
    _contracting(c, step_size)
    return float(14 * c.dim * c.smoothness**2 * c.sources(correlation).sum())


def gradient_variance_bound(constants: Constants) -> float:
    r"""Bound on the variance of the averaged stochastic gradient.

        E‖Z − Z̃‖² ≤ d σ²,    Z̃ = Σ_c p_c ∇f̃^c(θ^c)

    With batches that clients draw independently it is smaller by Σ_c p_c². Lemma B.4.

    Examples
    --------
    >>> gradient_variance_bound(Constants(smoothness=2.0, strong_convexity=1.0, dim=2, gradient_noise=3.0))
    18.0
    """
    return float(constants.dim * constants.gradient_noise**2)


def divergence_bound(
    constants: Constants, *, step_size: ArrayLike, local_steps: ArrayLike, correlation: float = 0.0
) -> Any:
    r"""Bound on how far clients drift from their average between synchronisations.

        Σ_c p_c E‖θ_k^c − θ_k‖² ≤ 112 (K−1)² η² d L² H_ρ + 8 (K−1) η d τ (ρ² + N(1−ρ²))

    for η ≤ 2/(L+m). The reference allows η < 2/m, for which a local chain of curvature L > m can diverge;
    its contraction step needs the range enforced here. It covers step sizes that halve at most within a
    round; for a constant one its proof gives 28 and 4 in place of 112 and 8. Lemmas 5.5 and B.3.

    Examples
    --------
    >>> problem = Constants(smoothness=2.0, strong_convexity=1.0, dim=2, num_clients=4)
    >>> divergence_bound(problem, step_size=0.001, local_steps=[1, 5]).round(3)
    array([0.   , 0.313])
    """
    steps = whole("local-steps", local_steps, 1) - 1
    return _pulled_apart(constants, step_size, correlation, steps=steps, coefficients=(112, 8))


def drawing_divergence_bound(
    constants: Constants,
    *,
    step_size: ArrayLike,
    local_steps: ArrayLike,
    participation: Participation,
    correlation: float = 0.0,
) -> Any:
    r"""Bound on how far the average of drawn devices is from that of all, at a synchronisation.

        E‖β_k − θ_k‖² ≤ (C_S/S) (28 K² η² d L² H_ρ + 4 K η d τ (ρ² + N(1−ρ²)))

    for η ≤ 2/(L+m), constant over the round; C_S = 1 with replacement and (N−S)/(N−1) without, and ``full()``
    has 0. The reference states 112 and 8 and proves 28 and 4; it allows η < 2/m, which is too much, as in
    ``divergence_bound``. Lemma C.2.

    Examples
    --------
    >>> from fald.settings.participation import with_replacement, without_replacement
    >>> problem = Constants(smoothness=2.0, strong_convexity=1.0, dim=2, num_clients=4)
    >>> for scheme in (with_replacement(2), without_replacement(2), without_replacement(4)):
    ...     bound = drawing_divergence_bound(problem, step_size=0.001, local_steps=5, participation=scheme)
    ...     print(round(float(bound), 5))
    0.0912
    0.0608
    0.0
    """
    steps = whole("local-steps", local_steps, 1)
    apart = _pulled_apart(constants, step_size, correlation, steps=steps, coefficients=(28, 4))
    return thinning(constants, participation) * apart


def rescaled(constants: Constants, *, length: float = 1.0, energy: float = 1.0) -> Constants:
    r"""The constants of the same problem in other units: a·θ in place of θ, and b·f in place of f.

    With a = ``length`` > 0 and b = ``energy`` > 0, which is also the unit of temperature, the same chain has
    the step size a²η/b. Every bound on W2 then is a times as large, and every bound on a mean squared
    distance a² times: none depends on the units. Remark on scale invariance after Theorem B.6.

    Examples
    --------
    >>> from fald.theory import fixed_step_bound
    >>> problem = Constants(smoothness=2.0, strong_convexity=1.0, dim=2, num_clients=4, initial_distance=1.0)
    >>> run = {"local_steps": 5, "num_rounds": 100}
    >>> metres = fixed_step_bound(problem, step_size=1e-4, **run).total
    >>> millimetres = fixed_step_bound(rescaled(problem, length=1000), step_size=100.0, **run).total
    >>> round(float(millimetres / metres), 9)
    1000.0
    """
    a, b = float(length), float(energy)
    for name, value in (("length", a), ("energy", b)):
        if not 0 < value < np.inf:
            raise ConfigError(f"{name} must be a finite number > 0; got {value:g}")
    units = {
        "smoothness": b / a**2,
        "strong_convexity": b / a**2,
        "temperature": b,
        "heterogeneity": b / a,
        "gradient_noise": b / a,
        "initial_distance": a,
    }
    return replace(constants, **{name: getattr(constants, name) * unit for name, unit in units.items()})


def _contracting(c: Constants, step_size: ArrayLike) -> np.ndarray:
    return checked_step("2/(L+m)", 2 / (c.smoothness + c.strong_convexity), step_size)


def _pulled_apart(c: Constants, step_size: ArrayLike, correlation: float, *, steps, coefficients) -> Any:
    """What gradients and injected noise of several steps add to a mean squared distance."""
    eta = _contracting(c, step_size)
    pulled = coefficients[0] * steps**2 * eta**2 * c.smoothness**2 * c.sources(correlation).sum()
    noise = coefficients[1] * steps * eta * c.temperature * shared_and_own(c, correlation)
    return (c.dim * (pulled + noise))[()]
