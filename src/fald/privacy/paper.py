r"""The published bound, as printed and as it should read.

Per local step, with c the client of least p_c (or, for realised noise, of least p_c²·v_c),

    ε₁ = 2Δ√(η log(1.25/δ₀) / (τ(1−ρ²) min_c p_c)),   valid for
    η ≤ τ(1−ρ²)·batch_fraction²·min_c p_c / (Δ² log(1.25/δ₀)),

per round of K steps ε_K = ε₁·min{√(2K log(1/δ₁)) + K(e^{ε₁}−1), K}, and over E rounds
ε = ε̃·min{√(2E log(1/δ₂)) + E(e^{ε̃}−1), E} with δ = E·δ̃ + δ₂.

What is printed differs from what holds in the step from ε_K to ε̃ when not all clients take part:

- Printed: ε̃ = log(1 + q(e^{ε_K}−1)). That amplification needs the upload of one client to look like
  the upload of another; replacing one record promises nothing of the kind, and uploads of clients
  with different data can be told apart. What holds: ε̃ = ε_K, and only δ̃ = q(K·batch_fraction·δ₀ + δ₁)
  shrinks, since with probability 1 − q nothing is uploaded.
- Printed for Scheme I: q = 1−(1−1/N)^S. What holds: 1−(1−p_c)^S, a client being drawn with
  probability p_c.
- Printed for Scheme I: a sum over δ_{K,s} for a client drawn s times. Such a client still uploads
  once; the term is not needed, and it soon exceeds one.

It is the loss that has to be Lipschitz in θ; the noise shared by all never counts.

Closed forms of it, with T = KE steps and c = √(2 log(1.25/δ₀)). Without slack, δ₁ = δ₂ = 0, the bound is

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
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from fald.core.errors import ConfigError
from fald.privacy.events import step_noise
from fald.privacy.settings import RunSettings


@dataclass(frozen=True)
class PaperBound:
    """The bound, ``epsilon`` at ``delta``, with all that leads to it.

    In the letters of the module: ε₁, ε_K and ε̃ of a step, a round and participation; δ₀, δ₁, δ₂ and δ̃;
    ``epsilon_gauss`` ε₀ ≤ 1 of the Gaussian mechanism on a given batch; ``inclusion`` q; ``num_rounds`` E
    over all chains; the least p_c (p_c²·v_c) and the largest batch fraction; the largest η used and the
    largest for which the bound holds. ``sound`` says whether the claim is true, and ``label`` says so in a
    line: the printed formula, ``as_published``, is not when q < 1.
    """

    epsilon: float
    delta: float
    epsilon_step: float
    epsilon_round: float
    epsilon_participation: float
    delta_0: float
    delta_1: float
    delta_2: float
    delta_participation: float
    epsilon_gauss: float
    inclusion: float
    num_rounds: int
    least_weight: float
    batch_fraction: float
    step_size: float
    step_size_limit: float
    as_published: bool
    sound: bool
    label: str

    def to_dict(self) -> dict[str, Any]:
        """All fields by name."""
        return asdict(self)


def _composed(epsilon: float, count: int, delta: float) -> float:
    """Advanced composition of ``count`` mechanisms at slack ``delta``, or plain addition if less."""
    if delta == 0:
        return epsilon * count
    advanced = math.sqrt(2 * count * math.log(1 / delta)) + count * math.expm1(min(epsilon, 700.0))
    return epsilon * min(advanced, count)


def _amplified(epsilon: float, q: float) -> float:
    """log(1 + q(e^ε − 1)), without overflow."""
    return math.log1p(q * math.expm1(epsilon)) if epsilon < 700 else epsilon + math.log(q)


def paper_bound(
    settings: RunSettings,
    *,
    delta: float | None = None,
    delta_0: float | None = None,
    delta_1: float | None = None,
    delta_2: float | None = None,
    as_published: bool = False,
) -> PaperBound:
    """(ε, δ) by the paper's chain of inequalities, corrected unless asked otherwise: Theorems 6.1 and G.3.

    Parameters
    ----------
    settings
        The run.
    delta
        Total δ, split as δ₀ = δ/(3·batch_fraction·T·q), δ₁ = δK/(3Tq), δ₂ = δ/3.
    delta_0, delta_1, delta_2
        The parts themselves, instead of ``delta``; δ₁ and δ₂ may be zero.
    as_published
        The printed formula. It is unsound where clients are drawn at random, and labelled so.

    Raises
    ------
    ConfigError
        If the step size is outside the range in which the bound holds.
    PrivacyError
        If ρ = 1, τ = 0 or gradients are unbounded.

    Notes
    -----
    Sound where ``sound`` is true, and loose: ε from ``account`` is smaller, often by an order of
    magnitude. A changing step size is charged at its largest value; realised noise of Scheme I at
    the most often a client can be drawn.

    Examples
    --------
    >>> run = RunSettings(sizes=[6000] * 10, local_steps=1, num_rounds=10_000, step_size=1e-7,
    ...                   batch_size=200, sensitivity=2.0, noise="paper")
    >>> round(paper_bound(run, delta=1e-5).epsilon, 6)
    11.683063
    """
    s = settings
    noise = step_noise(s)
    if as_published and s.noise != "paper" and s.scheme != "full":
        raise ConfigError("the published bound is for noise 'paper'", hint="drop as-published or set noise")
    if as_published and noise.step.size > 1:
        raise ConfigError(
            "the published bound is for a constant step size",
            hint="drop as-published: the corrected bound charges the largest step",
        )
    fraction, n, k = float(np.max(noise.batch_fraction)), s.num_clients, s.local_steps
    rounds = s.num_rounds * s.num_chains
    if s.scheme == "with-replacement" and as_published:
        q = -math.expm1(s.num_participants * math.log1p(-1 / n)) if n > 1 else 1.0
    else:
        q = float(np.max(noise.inclusion))
    if delta is not None and delta_0 is delta_1 is delta_2 is None:
        if not 0 < delta < 1:
            raise ConfigError(f"delta must be between 0 and 1, both excluded; got {delta}")
        d0, d1, d2 = delta / (3 * fraction * rounds * k * q), delta / (3 * rounds * q), delta / 3
    elif delta is None and delta_0 is not None:
        d0, d1, d2 = delta_0, delta_1 or 0.0, delta_2 or 0.0
    else:
        raise ConfigError("give either delta, or delta-0 with delta-1 and delta-2")
    if not (0 < d0 < 1 and 0 <= d1 < 1 and 0 <= d2 < 1):
        raise ConfigError(f"the parts of delta must be below 1, and delta-0 above 0; got {d0}, {d1}, {d2}")

    # z = batch_fraction/Δ·√(2τ(1−ρ²)/η)·√(p²v): p²v is what the printed p_c stands for
    own = np.array([min(way.own for way in ways) for ways in noise.presences])
    weight = (own * s.delta_gradient / noise.batch_fraction) ** 2
    heat = s.temperature * (1.0 - s.correlation) * (1.0 + s.correlation)
    log_0, eta = math.log(1.25 / d0), float(np.max(s.step_size))
    limit = heat * float(np.min(noise.batch_fraction**2 * weight)) / (s.delta_gradient**2 * log_0)
    if eta > limit * (1 + 1e-12):
        raise ConfigError(
            f"step-size must be ≤ {limit:.6g} for the paper's bound to hold; got {eta:.6g}",
            hint="use account(...): it has no such limit, and is tighter",
        )
    least = float(np.min(weight))
    step = 2 * s.delta_gradient * math.sqrt(eta * log_0 / (heat * least))
    per_round = _composed(step, k, d1)
    participation, delta_part = per_round, q * (k * fraction * d0 + d1)
    if as_published and s.scheme != "full":
        participation = _amplified(per_round, q)
        if s.scheme == "with-replacement":
            # a binomial sum over the number of times a client is drawn
            delta_part = 0.0
            for times in range(1, s.num_participants + 1):
                chance = math.comb(s.num_participants, times) * (n - 1) ** (s.num_participants - times)
                inner = 1.25 * k * fraction * (d0 / 1.25) ** (1 / times**2) + d1
                # (e^ε − 1)/(e^{ε/s} − 1), without overflow
                growth = math.exp(per_round * (1 - 1 / times))
                growth *= math.expm1(-per_round) / math.expm1(-per_round / times)
                delta_part += chance / n**s.num_participants * growth * inner
    sound = not as_published or q == 1
    return PaperBound(
        epsilon=_composed(participation, rounds, d2),
        delta=rounds * delta_part + d2,
        epsilon_step=step,
        epsilon_round=per_round,
        epsilon_participation=participation,
        delta_0=d0,
        delta_1=d1,
        delta_2=d2,
        delta_participation=delta_part,
        epsilon_gauss=math.sqrt(eta / limit),
        inclusion=q,
        num_rounds=rounds,
        least_weight=least,
        batch_fraction=fraction,
        step_size=eta,
        step_size_limit=limit,
        as_published=as_published,
        sound=sound,
        label=(
            ("as published" if as_published else "corrected")
            + ("" if sound else ": UNSOUND where clients are drawn at random, not a guarantee")
        ),
    )


@dataclass(frozen=True)
class PaperForms:
    """The closed forms of one run: ``bound`` itself, and what is simpler and larger.

    ``simple_epsilon`` and ``simple_delta`` are the form without slack. ``step_size_limit`` is the largest η
    for which the form under the root holds, ``step_size_order`` the published order of it, which is larger.
    ``closed_epsilon`` is the form under the root, infinite beyond that limit; ``epsilon_order`` the
    published order of ε with the constant 16.
    """

    bound: PaperBound
    simple_epsilon: float
    simple_delta: float
    step_size_limit: float
    step_size_order: float
    closed_epsilon: float
    epsilon_order: float


def paper_forms(
    settings: RunSettings, *, delta_0: float, delta_1: float, delta_2: float, as_published: bool = False
) -> PaperForms:
    """Closed forms of the published privacy bound: after Theorems 6.1 and G.3.

    Parameters and errors are those of ``paper_bound``; besides, the step size must be constant, and δ₁ and δ₂
    above zero.

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
    closed = outer * _amplified(inner, q) if bound.step_size <= limit * (1 + 1e-12) else math.inf
    return PaperForms(
        bound=bound,
        simple_epsilon=E * _amplified(K * bound.epsilon_step, q),
        simple_delta=bound.inclusion * bound.batch_fraction * K * E * delta_0,
        step_size_limit=min(limit, bound.step_size_limit),
        step_size_order=unit * second / (4 * q**2 * K * E * first),
        closed_epsilon=closed,
        epsilon_order=order,
    )
