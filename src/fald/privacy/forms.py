r"""Closed forms of the published privacy bound: the simple one, the one under a root, and its order.

Notation as in ``fald.privacy.paper``, with E rounds, T = KE steps and c = √(2 log(1.25/δ₀)). Without slack,
δ₁ = δ₂ = 0, the bound is

    ε = E·log(1 + q(e^{Kε₁}−1)),    δ = q·batch_fraction·T·δ₀.

With slack, and for step sizes up to

    η ≤ τ(1−ρ²) min_c p_c/(2Δ²c²) · min{log²(1 + √(2 log(1/δ₁)/K)),
                                        log²(1 + √(2 log(1/δ₂)/E)/q)/(8K log(1/δ₁))},

which is at most τ(1−ρ²) min_c p_c log(1/δ₂)/(16q²Δ²T log(1.25/δ₀) log(1/δ₁)), it is bounded by

    ε ≤ 2√(2E log(1/δ₂)) · log(1 + q(e^{4cΔ√(ηK log(1/δ₁)/(τ(1−ρ²) min_c p_c))} − 1)).

Printed with q the chance to be drawn. Drawing clients does not amplify the privacy of records, so q = 1 is
what holds; then the last form is the published order with its constant,

    16Δ√(ηT log(1.25/δ₀) log(1/δ₁) log(1/δ₂)/(τ(1−ρ²) min_c p_c)).
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from fald.core.errors import ConfigError
from fald.privacy.paper import PaperBound, paper_bound
from fald.privacy.settings import RunSettings


@dataclass(frozen=True)
class PaperForms:
    """The closed forms of one run; see the module.

    Attributes
    ----------
    bound
        The bound itself, of which the others are simpler and larger forms.
    simple_epsilon, simple_delta
        The form without slack.
    step_size_limit, step_size_order
        Largest η for which the form under the root holds, and the published order of it, which is larger.
    closed_epsilon
        The form under the root; infinite beyond ``step_size_limit``.
    epsilon_order
        The published order of ε with the constant 16.
    """

    bound: PaperBound
    simple_epsilon: float
    simple_delta: float
    step_size_limit: float
    step_size_order: float
    closed_epsilon: float
    epsilon_order: float


def paper_forms(
    settings: RunSettings,
    *,
    delta_0: float,
    delta_1: float,
    delta_2: float,
    as_published: bool = False,
) -> PaperForms:
    """Closed forms of the published privacy bound, corrected unless asked otherwise.

    Parameters
    ----------
    settings
        The run, with a constant step size.
    delta_0, delta_1, delta_2
        The parts of δ; the last two above zero and below one.
    as_published
        With the printed amplification by client sampling, which is unsound where clients are drawn.

    Returns
    -------
    PaperForms
        The forms and the bound that they simplify.

    Raises
    ------
    ConfigError
        If the step size changes, is outside the range of the bound, or a part of δ is out of its range.
    PrivacyError
        If ρ = 1, τ = 0 or gradients are unbounded.

    References
    ----------
    After Theorems 6.1 and G.3.

    Examples
    --------
    >>> run = RunSettings(sizes=[6000] * 10, local_steps=10, num_rounds=1000, step_size=1e-12,
    ...                   batch_size=200, sensitivity=2.0, noise="paper")
    >>> forms = paper_forms(run, delta_0=1e-8, delta_1=1e-9, delta_2=1e-6)
    >>> round(forms.bound.epsilon, 3), round(forms.closed_epsilon, 3), round(forms.simple_epsilon, 3)
    (0.091, 0.739, 0.546)
    """
    s = settings
    if isinstance(s.step_size, tuple):
        raise ConfigError("the closed forms are for a constant step size", hint="use paper_bound")
    if not (0 < delta_1 < 1 and 0 < delta_2 < 1):
        raise ConfigError(f"delta-1 and delta-2 must be between 0 and 1; got {delta_1} and {delta_2}")
    parts = {"delta_0": delta_0, "delta_1": delta_1, "delta_2": delta_2}
    bound = paper_bound(s, **parts, as_published=as_published)
    K, E = s.local_steps, bound.num_rounds
    q = bound.inclusion if as_published and s.scheme != "full" else 1.0
    heat = s.temperature * (1 - s.correlation) * (1 + s.correlation) * bound.least_weight
    root, first, second = math.log(1.25 / delta_0), math.log(1 / delta_1), math.log(1 / delta_2)
    unit = heat / (4 * s.delta_gradient**2 * root)
    slack = math.log1p(math.sqrt(2 * first / K)), math.log1p(math.sqrt(2 * second / E) / q)
    limit = unit * min(slack[0] ** 2, slack[1] ** 2 / (8 * K * first))
    inner = 4 * s.delta_gradient * math.sqrt(2 * root * bound.step_size * K * first / heat)
    outer = 2 * math.sqrt(2 * E * second)
    order = 16 * q * s.delta_gradient * math.sqrt(bound.step_size * K * E * root * first * second / heat)
    closed = outer * _drawn(inner, q) if bound.step_size <= limit * (1 + 1e-12) else math.inf
    return PaperForms(
        bound=bound,
        simple_epsilon=E * _drawn(K * bound.epsilon_step, q),
        simple_delta=bound.inclusion * bound.batch_fraction * K * E * delta_0,
        step_size_limit=min(limit, bound.step_size_limit),
        step_size_order=unit * second / (4 * q**2 * K * E * first),
        closed_epsilon=closed,
        epsilon_order=order,
    )


def _drawn(epsilon: float, q: float) -> float:
    """log(1 + q(e^ε − 1)), without overflow."""
    return math.log1p(q * math.expm1(epsilon)) if epsilon < 700 else epsilon + math.log(q)
