r"""What a run reveals, as data: the Gaussian mechanism behind every local step of every client.

A local step adds its own noise of standard deviation √(2ητ(1−ρ²)v_c) to a drift that one replaced row
moves by at most ηΔ/(batch_fraction·p_c), so its noise multiplier is

    z_c = (batch_fraction/Δ)·√(2ητ(1−ρ²)v_c)·p_c/η.

The noise that all clients share never counts: every participant, and so the server, can know it.
Nothing in this module says what ε follows; that is the accountants' part.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Literal, NamedTuple

import numpy as np

from fald.core.checks import check_count
from fald.core.errors import ConfigError, PrivacyError
from fald.privacy.settings import RunSettings

View = Literal["server", "summed"]


class Presence(NamedTuple):
    """One way a client can take part in a round; noise multipliers are to be multiplied by those of steps."""

    probability: float  # of it per round
    own: float  # noise multiplier of an inner local step
    last: float  # and of the last one


@dataclass(frozen=True, eq=False)
class StepNoise:
    """Noise multipliers of every client and step: all that an accountant needs to know.

    A multiplier is the product of ``client``, the factor of a client drawn once, and of ``step``,
    √(2τ(1−ρ²)/η_k), one for all steps where they are alike. ``inclusion`` is the probability that a client
    takes part in a round, the sum over the ways in ``presences``.
    """

    client: np.ndarray  # (N,)
    step: np.ndarray  # (1,) or (num_steps,)
    batch_fraction: np.ndarray  # (N,)
    batch_rows: np.ndarray  # (N,)
    sizes: np.ndarray  # (N,)
    inclusion: np.ndarray  # (N,)
    presences: tuple[tuple[Presence, ...], ...]  # of each client
    local_steps: int
    num_rounds: int
    num_chains: int
    settings: RunSettings = field(repr=False)
    view: View = "server"
    num_colluders: int = 0

    @property
    def multiplier(self) -> np.ndarray:
        """z of a client drawn once: (N,), or (N, num_steps) when the step size changes."""
        return self.client * self.step[0] if self.step.size == 1 else np.outer(self.client, self.step)

    def presence(self, client: int, times: int) -> Presence:
        """The factors of a client that was drawn ``times`` times, with probability one."""
        return _presence(self.settings, client, times, 1.0, view=self.view, colluders=self.num_colluders)

    @property
    def times_matter(self) -> bool:
        """Whether a client drawn twice in a round has another noise multiplier than one drawn once."""
        s = self.settings
        return s.scheme == "with-replacement" and (s.noise == "realised" or self.view == "summed")


def _honest_noise(s: RunSettings, c: int, times: int, colluders: int) -> float:
    """Least Σ w_a² v_a over honest participants other than c, given that c was drawn ``times`` times."""
    p, big = s.weights, s.num_participants
    others = np.delete(p, c)
    if s.scheme == "full":
        return float(np.sort(others)[: max(0, others.size - colluders)].sum())
    if s.scheme == "without-replacement":
        # the adversary's best case: all colluders drawn, and the honest ones are those with least noise
        left = max(0, big - 1 - colluders)
        v = np.full(others.size, float(big)) if s.noise == "realised" else 1.0 / others
        return float(np.sort(v)[:left].sum()) / big**2
    rest = big - times
    if colluders > 0 or others.size == 0:
        return 0.0  # all other draws may fall on colluders
    if s.noise == "realised":
        return rest / big
    # Σ m_a²/p_a over whole m_a with Σ m_a = rest: at least by Cauchy–Schwarz, and by m² ≥ m
    return max(rest**2 / others.sum(), rest / others.max()) / big**2


def entering_weight(weight: float, scheme: str, num_participants: int, times: int) -> float:
    """w_c, with which a client of weight p_c that was drawn ``times`` times enters the average of a round."""
    drawn = {"full": weight, "without-replacement": 1.0 / num_participants}
    return drawn.get(scheme, times / num_participants)


def own_noise(weight: float, entering: float, noise: str) -> float:
    """p_c √v_c of one client: its own noise, relative to how far one row of all its rows moves a step.

    v_c = 1/w_c for realised noise and 1/p_c for the paper's. The noise multiplier of a step is this, times
    batch_fraction·√(2τ(1−ρ²)/η)/Δ.
    """
    return weight * math.sqrt(1.0 / (entering if noise == "realised" else weight))


def _presence(
    s: RunSettings, c: int, times: int, probability: float, *, view: View = "server", colluders: int = 0
) -> Presence:
    p, fraction, delta = s.weights[c], s.batch_fraction[c], s.delta_gradient
    weight = entering_weight(p, s.scheme, s.num_participants, times)
    own = fraction * own_noise(p, weight, s.noise) / delta
    if view == "server":
        return Presence(probability, own, own)
    v = (own * delta / (fraction * p)) ** 2
    total = weight**2 * v + _honest_noise(s, c, times, colluders)
    return Presence(probability, own, fraction * p / weight * math.sqrt(total) / delta)


def _multiplicities(draws: int, p: float) -> list[tuple[int, float]]:
    """Times drawn and probability, for Binomial(draws, p) without zero, rounded up into few classes.

    More draws mean less noise, so a class is represented by its largest member. Small and likely
    numbers of draws are kept as they are.
    """
    from scipy.stats import binom

    if p >= 1:
        return [(draws, 1.0)]
    likely = int(binom.isf(1e-9, draws, p))
    unlikely = int(binom.ppf(1e-12, draws, p))
    classes, start = [], 1
    while start <= draws:
        stop = max(start, int(start * 1.02)) if start <= max(likely, 8) else 2 * start
        stop = min(unlikely if start < unlikely else stop, draws)
        mass = float(binom.sf(start - 1, draws, p) - binom.sf(stop, draws, p))
        if mass > 0:
            classes.append((stop, mass))
        start = stop + 1
    # what rounding of the differences above left over goes to the worst class
    missing = -math.expm1(draws * math.log1p(-p)) - sum(m for _, m in classes)
    worst, mass = classes[-1]
    classes[-1] = (worst, mass + max(0.0, missing))
    return classes


def step_noise(settings: RunSettings, *, view: View = "server", num_colluders: int = 0) -> StepNoise:
    """Noise multipliers of a run, and how likely a client is to take part.

    Inclusion per round is 1 for full participation, 1 − (1−p_c)^S in Scheme I and S/N in Scheme II.
    In Scheme I with realised noise a client drawn s times has v_c = S/s, hence less noise the more
    often it is drawn: each s is an outcome with its own multiplier.

    Parameters
    ----------
    settings
        The run.
    view
        ``"server"``: every upload is seen. ``"summed"``: only the weighted sum of uploads is, through
        a secure sum; then the last local step of a round is also covered by the honest clients' noise.
    num_colluders
        ``"summed"`` only: sites that hand their noise to the server. The worst set of that many is
        assumed; in Scheme I one colluder is taken to receive every other draw of the round.

    Raises
    ------
    PrivacyError
        If there is no noise (ρ = 1, τ = 0) or no bound on a row's gradient.

    Examples
    --------
    >>> run = RunSettings(sizes=[6000] * 10, local_steps=1, num_rounds=10_000, step_size=1e-6,
    ...                   batch_size=200, sensitivity=2.0)
    >>> round(float(step_noise(run).multiplier[0]), 5)
    7.45356
    """
    s = settings
    if view not in ("server", "summed"):
        raise ConfigError(f"view must be 'server' or 'summed'; got {view!r}")
    num_colluders = check_count("num-colluders", num_colluders, 0)
    if num_colluders >= s.num_clients:
        raise ConfigError(
            f"num-colluders must be less than the number of clients, {s.num_clients}; got {num_colluders}",
            hint="the client whose record is protected does not collude",
        )
    if s.correlation == 1:
        raise PrivacyError(
            "correlation 1 leaves a client no noise of its own: ε is infinite",
            hint="choose a correlation below 1; shared noise is known to every client and protects nobody",
        )
    if s.temperature == 0:
        raise PrivacyError(
            "temperature 0 injects no noise: ε is infinite", hint="choose a temperature above 0"
        )
    eta = np.atleast_1d(np.asarray(s.step_size, float))
    if np.all(eta == eta[0]):
        eta = eta[:1]
    p, big, n = s.weights, s.num_participants, s.num_clients
    kinds: dict[tuple[float, int], tuple[Presence, ...]] = {}
    presences = []
    for c in range(n):
        key = (float(p[c]), s.sizes[c])
        if key not in kinds:
            once = {"full": [(1, 1.0)], "without-replacement": [(1, big / n)]}
            chances = once.get(s.scheme) or _multiplicities(big, p[c])
            seen = {"view": view, "colluders": num_colluders}
            ways = [_presence(s, c, times, chance, **seen) for times, chance in chances]
            if s.scheme == "with-replacement" and s.noise == "paper" and view == "server":
                ways = [Presence(sum(w.probability for w in ways), ways[0].own, ways[0].last)]
            kinds[key] = tuple(ways)
        presences.append(kinds[key])
    return StepNoise(
        client=np.array([_presence(s, c, 1, 1.0).own for c in range(n)]),
        step=np.sqrt(2.0 * s.temperature * (1.0 - s.correlation) * (1.0 + s.correlation) / eta),
        batch_fraction=s.batch_fraction,
        batch_rows=s.batch_rows,
        sizes=np.asarray(s.sizes),
        inclusion=np.array([min(1.0, sum(w.probability for w in ways)) for ways in presences]),
        presences=tuple(presences),
        local_steps=s.local_steps,
        num_rounds=s.num_rounds,
        num_chains=s.num_chains,
        settings=s,
        view=view,
        num_colluders=num_colluders,
    )
