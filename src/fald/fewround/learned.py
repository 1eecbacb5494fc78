"""Split-HMC along a learned gradient: one exchange per trajectory instead of one per step.

The first rounds ask for gradients at thousands of states and teach a surrogate what the posterior has beyond
its Gaussian; chains follow the surrogate, and the next gradients are taken where it led them and further out.
Once it predicts fresh states well it is learned no further. From then on every round moves all chains along
the surrogate, asks for their log posterior alone, and accepts or rejects each move, which makes the posterior
the exact stationary law whatever the surrogate.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from fald.fewround import certify, rays
from fald.fewround.certify import KHAT_LIMIT, Condition, khat_limit, quantile
from fald.fewround.chains import Frame, chain_checks, chains_outcome, gradients, trace_row
from fald.fewround.exchange import Server
from fald.fewround.importance import certified_rounds
from fald.fewround.mixture import fit_mixture
from fald.fewround.outcome import Outcome
from fald.fewround.proposal import cholesky
from fald.fewround.search import MANY, Search
from fald.fewround.surrogate import Surrogate, blank, learn, moved, rest, wander
from fald.fewround.target import Target
from fald.fewround.weights import distinct, precision, resample, smooth
from fald.problem.model import Model

Array = NDArray[Any]

_STATES = 6400  # states of a round of learning to which the surrogate led; half as many are further out
_OUTER = 2.0  # how much further out, at most
_NEAR, _FAR = 6.0, 20.0  # sds of log posteriors below their middle at which states are given up, for good
_MEMORY = 3  # rounds whose gradients are learned from
_GOOD = 0.4  # effective share of fresh states at which the surrogate is good enough
_SETTLED = 0.15  # sds by which means and sds may differ between rounds of learning
_LEARNING = 10  # rounds after which a surrogate that is not good enough is given up
_FEWEST, _STRICT = 6, 8  # decisions before the end is looked at; more where chains have the last word
_LEAST = 0.25  # acceptance
_DISPERSED = 3.0  # sds by which chains are moved out along one coordinate before they begin, at most
_LAST = 5  # rounds of importance sampling that have the last word
_NUMBERED = 1000  # rounds of the last word are numbered from here, so that their draws are fresh
_CORES = 8  # of the mixture fitted to chains
_ADVICE = (
    "write effects in units of their scale, or integrate them out, so that the posterior has no narrow neck; "
    "or allow more rounds"
)


class Known(NamedTuple):
    """Positions and gradients of a round that can be learned from, and positions to go on from."""

    positions: Array
    slopes: Array
    followed: Array


class Learner:
    """A surrogate that is asked about, judged and taught, round after round.

    Attributes
    ----------
    surrogate, frame
        What was learned last, and the coordinates it is in.
    z
        (M, d) states in these coordinates to which it led.
    rounds, trace
        Rounds so far, and a list that gets a line for each.
    good, lost
        Whether it predicted the states of the last round well; whether it led to nowhere.
    """

    def __init__(self, target: Target, home: Frame, rng: np.random.Generator, trace: list[dict[str, Any]]):
        self.frame, self.rounds, self.good, self.lost = home, 0, False, False
        self.surrogate = self._learned = blank(target.dim, rng)
        # further out than the Gaussian, which tends to be too narrow
        self.z = _outward(rng.standard_normal((_STATES, target.dim)), rng)
        self._target, self._home, self._rng, self.trace = target, home, rng, trace
        self._seen: list[Known] = []

    def ask(self) -> Server[Known]:
        """Ask for gradients at the states and further out, and judge what was learned before."""
        z, first = self.z, not self._seen
        positions = self.frame.positions(np.concatenate([z, _outward(z[: _STATES // 2], self._rng)]))
        value, slopes = yield from gradients(self._target, positions)
        self.rounds += 1
        led, near = positions[:_STATES], value[:_STATES]
        fresh = smooth(near + np.sum(z**2, axis=1) / 2 - rest(self.surrogate, z))
        self.trace.append(trace_row(led, *((np.nan, np.nan) if first else (fresh.khat, fresh.ess))))
        fits = fresh.ess >= _GOOD * _STATES and fresh.khat < KHAT_LIMIT
        self.good = not first and fits and _settled(self.trace)
        followed = _relevant(near, near, self._target.dim, _NEAR)
        self.lost = int(followed.sum()) < _STATES // 10
        # always as many, so that programs are compiled once
        used = self._filled(_relevant(value, near, self._target.dim, _FAR), len(value))
        return Known(positions[used], slopes[used], led[self._filled(followed, _STATES)])

    def study(self, known: Known) -> None:
        """Learn from the newest gradients, and follow what was learned."""
        steps, rate = (3000, 0.01) if self._seen else (4000, 0.02)
        # the first round stands for those to come
        self._seen = [*self._seen, known][-_MEMORY:] if self._seen else [known] * _MEMORY
        states = self._home.inward(np.concatenate([one.positions for one in self._seen]))
        wanted = self._home.leftover(states, np.concatenate([one.slopes for one in self._seen]))
        self._learned = learn(self._learned, states, wanted, self._rng, steps=steps, rate=rate)
        self.surrogate, self.frame = _reframed(self._learned, self._home, known.followed)
        start = self.frame.inward(known.followed)
        self.z = self.walk(start, 1.4 * float(np.max(np.sum(start**2, axis=1))))

    def decide(self, z: Array) -> Server[tuple[Array, Array]]:
        """Ask for the log posterior at states: all of it, and what the surrogate does not say."""
        here = self.frame.positions(z)
        sums = yield {"points": here}
        self.rounds += 1
        value = self._target.values(here, sums["point_values"])
        return value, value + np.sum(z**2, axis=1) / 2 - rest(self.surrogate, z)

    def walk(self, z: Array, bound: float = np.inf) -> Array:
        """States (M, d) after some trajectories along the surrogate, with |z|² < bound."""
        seed = int(self._rng.integers(2**31))
        return wander(self.surrogate, z, seed, trajectories=6, steps=10, bound=bound)

    def _filled(self, chosen: Array, count: int) -> Array:
        """Indices of what was chosen, some of them again, up to a count."""
        index = np.flatnonzero(chosen)
        if not len(index):
            return np.arange(count)
        return np.concatenate([index, self._rng.choice(index, count - len(index))])


def split_hmc(
    model: Model, mean: Array, factor: Array, *, max_rounds: int, **common: Any
) -> Server[Outcome | None]:
    """Server of split-HMC along a learned gradient, with an end as strict as that of importance sampling.

    Up to 60 parameters the last word is importance sampling of fresh draws from a density fitted to the
    chains. With more no weights can work, and the chains must show more of themselves: that those which began
    apart are alike, that the gradient balances, and that rays find nothing far out.

    Parameters
    ----------
    model
        The model.
    mean, factor
        (d,) and lower (d, d): the Gaussian N(mean, factor·factorᵀ) that learning starts from.
    max_rounds
        Exchanges at most.
    common
        ``seed`` of all draws; ``tolerance``, wanted precision of means and sds in posterior sds; ``report``,
        a function from positions (C, d) to reported quantities that are certified as well, or None;
        ``trace``, a list that gets a line per round.

    Returns
    -------
    Server
        Its outcome, or None if the posterior could not be learned.
    """
    few, search = model.dim <= MANY, Search.make(model, **common)
    outcome = yield from run_chains(
        model, Frame(mean, factor), max_rounds=max_rounds - (_LAST if few else 0), strict=not few, **common
    )
    if outcome is None or not outcome.reached or not few:
        return outcome
    fitted = fit_mixture(outcome.positions, outcome.weights, search.seed, most=_CORES)
    last, _ = yield from certified_rounds(search, fitted, _NUMBERED, _NUMBERED + _LAST - 1)
    if last.reached:
        return replace(last, method="split-hmc")
    reason = f"importance sampling of fresh draws does not confirm the chains of split-HMC: {last.reason}"
    return replace(outcome, reached=False, reason=reason, advice=_ADVICE, failed=last.failed)


def run_chains(
    model: Model,
    frame: Frame,
    *,
    seed: int,
    tolerance: float,
    max_rounds: int,
    report: Callable[[Array], Array] | None = None,
    trace: list[dict[str, Any]] | None = None,
    strict: bool = False,
) -> Server[Outcome | None]:
    """Server of the chains of split-HMC, as ``split_hmc``; ``strict`` asks all of them that they can show."""
    target, trace = Target(model), [] if trace is None else trace
    rng = np.random.Generator(np.random.Philox([seed & (2**64 - 1), 10]))
    learner = Learner(target, frame, rng, trace)
    coordinates = target.dim if report is None else target.dim + report(frame.mean[None]).shape[1]
    # half of the tolerance is for the number of chains, the rest for what they remember
    count = int(np.ceil((2 * quantile(coordinates) / tolerance) ** 2 / 256)) * 256
    fewest = _STRICT if strict else _FEWEST
    drawn = yield from _drawn(learner, count, min(_LEARNING, max_rounds - fewest - 1))
    if drawn is None:
        return None
    taken = resample(drawn.weights, count, float(rng.random()))
    z, value, off = (part[taken] for part in (drawn.z, drawn.value, drawn.off))
    if strict:  # from further apart than the surrogate leads
        z, value, off = yield from _apart(learner, (z, value, off), rng)
        trace.append(trace_row(learner.frame.positions(z)))

    def quantities(z: Array) -> Array:
        here = learner.frame.positions(z)
        return here if report is None else np.concatenate([here, report(here)], axis=1)

    names = list(model.parameter_names)
    first, ensembles, energies = quantities(z), [z], [value]
    checks = [Condition("rounds", False, "too few rounds were left for the chains")]
    while learner.rounds < max_rounds - (1 if strict else 0):
        there = learner.walk(z)
        level, after = yield from learner.decide(there)
        with np.errstate(invalid="ignore"):
            moved = np.log(rng.random(count)) < np.where(np.isfinite(after), after - off, -np.inf)
        z = np.where(moved[:, None], there, z)
        value, off = np.where(moved, level, value), np.where(moved, after, off)
        ensembles, energies = [ensembles[-1], z], [*energies, value]
        accepted = float(moved.mean())
        trace.append(trace_row(learner.frame.positions(z), accepted=accepted))
        if len(energies) <= fewest:
            continue
        ends = [first, *map(quantities, ensembles)]
        checks = [
            *chain_checks(ends, energies, accepted=accepted, least=_LEAST, tolerance=tolerance, names=names),
            certify.forgotten(first[:, : target.dim], learner.frame.positions(z), names),
        ]
        if all(check.holds for check in checks):
            break
    if strict and all(check.holds for check in checks):
        last = [learner.frame.positions(each) for each in ensembles]
        checks += yield from _shown(target, last, quantities(z), rng, tolerance=tolerance)
        trace.append(trace_row(learner.frame.positions(z)))
    failed = [check for check in checks if not check.holds]
    return chains_outcome(learner.frame.positions(z), failed, drawn.khat, trace)


def _apart(
    learner: Learner, start: tuple[Array, Array, Array], rng: np.random.Generator
) -> Server[tuple[Array, Array, Array]]:
    """States, log posterior and what the surrogate does not say of it, of chains that begin further apart.

    Nobody begins on a wall, where the posterior is negligible: a surrogate that puts it lower still would
    hold a chain there for ever.
    """
    away = _dispersed(start[0], rng)
    value, off = yield from learner.decide(away)
    usable = _relevant(value, start[1], away.shape[1], _NEAR)
    there = np.where(usable[:, None], away, start[0])
    return there, np.where(usable, value, start[1]), np.where(usable, off, start[2])


def _dispersed(z: Array, rng: np.random.Generator) -> Array:
    """States of which every other one is moved out along one coordinate, each in its turn."""
    out = z.copy()
    rows = np.arange(0, len(z), 2)
    far = rng.choice([-1, 1], len(rows)) * rng.uniform(_DISPERSED / 2, _DISPERSED, len(rows))
    out[rows, rows // 2 % z.shape[1]] += far
    return out


def _shown(
    target: Target, last: list[Array], certified: Array, rng: np.random.Generator, *, tolerance: float
) -> Server[list[Condition]]:
    """Ask for gradients at some states of the last two trajectories' ends, and for values along rays.

    ``certified`` are the quantities (M, k) of the newest ends that must be known to the tolerance.
    """
    names = list(target.model.parameter_names)
    first, shares = distinct(certified)
    known = precision(certified[first], shares)
    labels = certify.labels(names, certified.shape[1])
    positions, both = last[-1], np.concatenate(last)
    chosen = both[rng.permutation(len(both))[: 2 * _STATES]]
    nothing = np.zeros((0, target.dim))
    cast = rays.cast(positions.mean(axis=0), np.cov(positions.T), nothing, rng, twins=True)
    sums = yield {"states": chosen, "points": cast.positions}
    slopes = target.gradients(chosen, sums)[1]
    seen, missing = target.posterior(cast.positions, sums["point_values"])
    out = cast.levels(seen)
    lost = rays.unknown(out, missing[: out.size].reshape(out.shape), target.dim)
    found = rays.far(out, np.zeros_like(out), target.dim, count=len(positions), quantile=1.0)
    # no density of the chains is known: what lies far out must be little. A chosen direction stands for the
    # few dimensions of a thin tail; for more only random ones do, as a skewed posterior is wide along some
    error = np.full_like(found.error, np.inf)
    error[: cast.special, np.array(rays.families(target.dim)) > 2] = 0.0
    found = found._replace(error=error)
    return [
        certify.means_precise(known, tolerance, labels),
        certify.sds_precise(known, tolerance, labels),
        certify.moments_exist(known, labels),
        certify.scores(chosen, slopes, tolerance, names),
        certify.far_mass(cast, found, tolerance, names),
        certify.defined_far_out(cast, lost, tolerance, names),
    ]


class LearnedDraws(NamedTuple):
    """Draws of a surrogate: states, log posterior, what the surrogate does not say of it, weights, k-hat."""

    z: Array
    value: Array
    off: Array
    weights: Array
    khat: float


def _drawn(learner: Learner, count: int, most: int) -> Server[LearnedDraws | None]:
    """Learn until as many draws as there will be chains have light weights; None after ``most`` rounds."""
    while learner.rounds < most:
        known = yield from learner.ask()
        if learner.lost:
            return None
        if learner.good:
            z = learner.walk(learner.z[resample(np.full(_STATES, 1.0), count, 0.5)])
            value, off = yield from learner.decide(z)
            fresh = smooth(off)
            learner.trace.append(trace_row(learner.frame.positions(z), fresh.khat, fresh.ess))
            if fresh.khat < khat_limit(count):
                return LearnedDraws(z, value, off, fresh.weights, fresh.khat)
        learner.study(known)
    return None


def _outward(z: Array, rng: np.random.Generator) -> Array:
    return z * rng.uniform(1.0, _OUTER, (len(z), 1))


def _reframed(surrogate: Surrogate, old: Frame, positions: Array) -> tuple[Surrogate, Frame]:
    """The same surrogate in coordinates in which the states have unit covariance, so that all mix alike."""
    new = Frame(positions.mean(axis=0), cholesky(np.cov(positions.T).reshape(2 * old.mean.shape)))
    stretch = old.inward(old.mean + new.factor.T).T
    return moved(surrogate, old.inward(new.mean[None])[0], stretch), new


def _settled(trace: list[dict[str, Any]]) -> bool:
    """Whether the states of the last two rounds have nearly the same means and sds."""
    before, now = trace[-2:]
    shift = np.abs(now["mean"] - before["mean"]) / now["sd"]
    return bool(np.max(np.maximum(shift, np.abs(before["sd"] / now["sd"] - 1))) < _SETTLED)


def _relevant(value: Array, near: Array, dim: int, sds: float) -> Array:
    """Whether log posteriors are so few sds, about √(d/2), below the middle of the near ones."""
    usable = near[np.isfinite(near)]
    middle = np.median(usable) if len(usable) else np.inf
    return np.isfinite(value) & (value > middle - sds * np.sqrt(dim / 2))
