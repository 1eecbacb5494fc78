r"""Split Hamiltonian Monte Carlo over a federation: exact where importance weights give up.

Thousands of chains start at the proposal N(m, S) and move together, one exchange per step. In coordinates
z = L⁻¹(θ − m), S = LLᵀ, the Gaussian part is solved exactly, by a rotation of (z, v), and only the rest of
the gradient, ∇_z log π + z, kicks. A Metropolis decision at the end of every trajectory makes the posterior
the exact stationary law, whatever the proposal.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from fald.fewround.certify import Check, quantile
from fald.fewround.chains import Frame, chain_checks, chains_outcome, gradients, trace_row
from fald.fewround.exchange import Server
from fald.fewround.learned import learned_hmc
from fald.fewround.outcome import Outcome
from fald.fewround.target import Target
from fald.models.base import Model

Array = NDArray[Any]

_MANY = 60  # parameters above which chains follow a learned gradient first
_STEPS, _ANGLE = (3, 5), (0.45, 0.3)  # of a trajectory and of a step, for few and for many parameters
_FEWEST = 2  # trajectories before the end is looked at
_LEAST = 0.5  # acceptance


def split_hmc(
    model: Model,
    mean: Array,
    factor: Array,
    *,
    seed: int,
    tolerance: float,
    max_rounds: int,
    report=None,
    trace: list[dict[str, Any]] | None = None,
) -> Server[Outcome]:
    """Server of split-HMC from N(mean, factor·factorᵀ).

    Parameters
    ----------
    model
        The model.
    mean, factor
        (d,) and lower (d, d): the Gaussian that is solved exactly, and where the chains start.
    seed, tolerance
        Of all draws; wanted precision of means and sds, in posterior sds.
    max_rounds
        Exchanges at most.
    report
        Function from positions (C, d) to reported quantities that are certified as well, or None.
    trace
        A list that gets a line per round.
    """
    target = Target(model)
    d = target.dim
    trace = [] if trace is None else trace
    learner = None
    if d > _MANY:
        common: dict[str, Any] = {"seed": seed, "tolerance": tolerance, "report": report, "trace": trace}
        outcome, learner = yield from learned_hmc(model, mean, factor, max_rounds=max_rounds, **common)
        if outcome is not None:
            return outcome
        max_rounds -= learner.rounds
    rng = np.random.Generator(np.random.Philox([seed & (2**64 - 1), 9]))
    coordinates = d if report is None else d + report(mean[None]).shape[1]
    chains = int(np.ceil(1.15 * (quantile(coordinates) / tolerance) ** 2 / 256)) * 256
    frame, z = Frame(mean, factor), rng.standard_normal((chains, d))
    if learner is not None and learner.taught:  # not good enough to follow, but to start from
        frame, z = learner.frame, learner.z[rng.integers(0, len(learner.z), chains)]
    angle, steps = _ANGLE[d > _MANY], _STEPS[d > _MANY]
    earlier = len(trace)
    value, slope = yield from gradients(target, frame.positions(z))
    push = frame.leftover(z, slope)
    rounds, ensembles, energies, accepted = 1, [z], [value], 0.0

    def quantities(z: Array) -> Array:
        positions = frame.positions(z)
        return positions if report is None else np.concatenate([positions, report(positions)], axis=1)

    def judge() -> list[Check]:
        ends = [quantities(ensembles[i]) for i in (0, max(len(ensembles) - 2, 0), -1)]
        return chain_checks(ends, energies, accepted, _LEAST, tolerance, list(model.parameter_names))

    while rounds + steps <= max_rounds:
        v = rng.standard_normal(z.shape)
        turn = angle * rng.uniform(0.8, 1.2, (chains, 1))
        at, going, kick, level = z, v, push, value
        for _ in range(steps):
            going = going + turn / 2 * kick
            at, going = at * np.cos(turn) + going * np.sin(turn), going * np.cos(turn) - at * np.sin(turn)
            level, slope = yield from gradients(target, frame.positions(at))
            kick = frame.leftover(at, slope)
            going = going + turn / 2 * kick
            rounds += 1
        before = value - np.sum(v**2, axis=1) / 2
        after = level - np.sum(going**2, axis=1) / 2
        with np.errstate(invalid="ignore"):
            ratio = np.where(np.isfinite(after), after - before, -np.inf)
        taken = np.log(rng.random(chains)) < ratio
        accepted = float(taken.mean())
        z = np.where(taken[:, None], at, z)
        push, value = np.where(taken[:, None], kick, push), np.where(taken, level, value)
        ensembles.append(z)
        energies.append(value)
        row = trace_row(frame.positions(z), accepted=accepted)
        trace += [row] * (rounds - len(trace) + earlier)
        if accepted < _LEAST:
            angle *= 0.75 if accepted > 0.25 else 0.5
            ensembles, energies = [z], [value]  # what follows is judged by itself
            continue
        checks = judge()
        if len(ensembles) > _FEWEST and all(check.holds for check in checks):
            break
    else:
        checks = judge()
        checks.append(Check("rounds", len(ensembles) > _FEWEST, "too few rounds were left for the chains"))
    failed = [check for check in checks if not check.holds]
    return chains_outcome(frame.positions(z), failed, np.nan, trace)
