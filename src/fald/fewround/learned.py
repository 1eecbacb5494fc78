"""Split-HMC along a learned gradient: one exchange per trajectory instead of one per step.

The first rounds ask for gradients at thousands of states and teach a surrogate what the posterior has beyond
its Gaussian; chains follow the surrogate, and the next gradients are taken where it led them. Once it
predicts fresh states well it is learned no further. From then on every round moves all chains along the
surrogate, asks for their log posterior alone, and accepts or rejects each move, which makes the posterior the
exact stationary law whatever the surrogate.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fald.fewround.certify import KHAT_LIMIT, Check, khat_limit, quantile
from fald.fewround.chains import Frame, chain_checks, chains_outcome, gradients, trace_row
from fald.fewround.exchange import Server
from fald.fewround.outcome import Outcome
from fald.fewround.proposal import cholesky
from fald.fewround.surrogate import Surrogate, blank, learn, moved, rest, wander
from fald.fewround.target import Target
from fald.fewround.weights import resample, smooth
from fald.models.base import Model

Array = NDArray[Any]

_STATES = 6400  # gradients of a round of learning
_MEMORY = 3  # rounds whose gradients are learned from
_GOOD = 0.4  # effective share of fresh states at which the surrogate is good enough
_SETTLED = 0.15  # sds by which means and sds may differ between rounds of learning
_LEARNING = 10  # rounds after which a surrogate that is not good enough is given up
_FEWEST = 6  # decisions before the end is looked at
_LEAST = 0.25  # acceptance


def learned_hmc(
    model: Model,
    mean: Array,
    factor: Array,
    *,
    seed: int,
    tolerance: float,
    max_rounds: int,
    report: Callable[[Array], Array] | None,
    trace: list[dict[str, Any]],
) -> Server[tuple[Outcome | None, int]]:
    """Server of HMC along a learned gradient; arguments as of ``split_hmc``.

    Returns
    -------
    Server
        Its outcome, or None if the posterior could not be learned, and the rounds it took.
    """
    target = Target(model)
    rng = np.random.Generator(np.random.Philox([seed & (2**64 - 1), 10]))
    most = max(0, min(_LEARNING, max_rounds - _FEWEST - 1))
    surrogate, frame, z, rounds = yield from _learning(target, Frame(mean, factor), rng, most, trace)
    if surrogate is None:
        return None, rounds

    def quantities(z: Array) -> Array:
        here = frame.positions(z)
        return here if report is None else np.concatenate([here, report(here)], axis=1)

    def ask(z: Array) -> Server[tuple[Array, Array]]:
        """Log posterior, and what the surrogate does not say of it."""
        here = frame.positions(z)
        sums = yield {"points": here}
        value = target.values(here, sums["point_values"])
        return value, value + np.sum(z**2, axis=1) / 2 - rest(surrogate, z)

    coordinates = target.dim if report is None else quantities(z[:1]).shape[1]
    # with a third of the tolerance for what the chains remember, two thirds are left for their number
    count = int(np.ceil((1.5 * quantile(coordinates) / tolerance) ** 2 / 256)) * 256
    z = _walk(surrogate, z[resample(np.full(len(z), 1.0), count, 0.5)], rng)
    value, off = yield from ask(z)
    rounds += 1
    fresh = smooth(off)
    trace.append(trace_row(frame.positions(z), fresh.khat, fresh.ess))
    limit = khat_limit(count)
    tail = Check(
        "k-hat", fresh.khat < limit, f"k-hat of the surrogate is {fresh.khat:.2f}, not below {limit:.2f}"
    )
    taken = resample(fresh.weights, count, float(rng.random()))
    z, value, off = z[taken], value[taken], off[taken]
    ensembles, energies = [z], [value]
    checks = [Check("rounds", False, "too few rounds were left for the chains"), tail]
    while rounds < max_rounds:
        there = _walk(surrogate, z, rng)
        level, after = yield from ask(there)
        rounds += 1
        with np.errstate(invalid="ignore"):
            moved = np.log(rng.random(count)) < np.where(np.isfinite(after), after - off, -np.inf)
        z = np.where(moved[:, None], there, z)
        value, off = np.where(moved, level, value), np.where(moved, after, off)
        ensembles.append(z)
        energies.append(value)
        accepted = float(moved.mean())
        trace.append(trace_row(frame.positions(z), accepted=accepted))
        if len(ensembles) <= _FEWEST:
            continue
        ends = [quantities(ensembles[i]) for i in (0, -2, -1)]
        names = list(model.parameter_names)
        checks = [*chain_checks(ends, energies, accepted, _LEAST, tolerance, names), tail]
        if not tail.holds or all(check.holds for check in checks):
            break  # of a surrogate with heavy weights, further decisions would not be believed either
    failed = [check for check in checks if not check.holds]
    return chains_outcome(frame.positions(z), failed, fresh.khat, trace), rounds


def _walk(surrogate: Surrogate, z: Array, rng: np.random.Generator, bound: float = np.inf) -> Array:
    return wander(surrogate, z, int(rng.integers(2**31)), trajectories=6, steps=10, bound=bound)


def _learning(
    target: Target, home: Frame, rng: np.random.Generator, most: int, trace: list[dict[str, Any]]
) -> Server[tuple[Surrogate | None, Frame, Array, int]]:
    """Rounds of gradients until the surrogate is good on states that it has not seen.

    Returns
    -------
    Server
        The surrogate, or None; the coordinates it is in, these states, and the rounds.
    """
    learned = surrogate = blank(target.dim, rng)
    frame = home
    z = rng.standard_normal((_STATES, target.dim))
    seen: list[tuple[Array, Array]] = []
    for number in range(1, most + 1):
        positions = frame.positions(z)
        value, slopes = yield from gradients(target, positions)
        fresh = smooth(value + np.sum(z**2, axis=1) / 2 - rest(surrogate, z))
        known = (fresh.khat, fresh.ess) if seen else (np.nan, np.nan)
        trace.append(trace_row(positions, *known))
        if seen and _settled(trace) and fresh.ess >= _GOOD * _STATES and fresh.khat < KHAT_LIMIT:
            return surrogate, frame, z, number
        kept = np.flatnonzero(_relevant(value, target.dim))
        if len(kept) < _STATES // 10:
            return None, frame, z, number
        if len(kept) < _STATES:  # states far out are of no use, and begin anew from others
            kept = np.concatenate([kept, rng.choice(kept, _STATES - len(kept))])
        newest = positions[kept], slopes[kept]
        # always as many states: the first round stands for those to come
        seen = [*seen, newest][-_MEMORY:] if seen else [newest] * _MEMORY
        states, wanted = map(np.concatenate, zip(*seen))
        states = home.inward(states)
        steps, rate = (4000, 0.02) if number == 1 else (3000, 0.01)
        learned = learn(learned, states, home.leftover(states, wanted), rng, steps=steps, rate=rate)
        surrogate, frame = _reframed(learned, home, positions[kept])
        start = frame.inward(positions[kept])
        z = _walk(surrogate, start, rng, 1.4 * float(np.max(np.sum(start**2, axis=1))))
    return None, frame, z, most


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


def _relevant(value: Array, dim: int) -> Array:
    """Whether a log posterior is one that states of the posterior have, whose sd is about √(d/2)."""
    finite = np.isfinite(value)
    middle = np.median(value[finite]) if finite.any() else np.inf
    return finite & (value > middle - 6 * np.sqrt(dim / 2))
