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
from fald.fewround.evaluate import prior_gradients
from fald.fewround.exchange import Server
from fald.fewround.outcome import Outcome
from fald.fewround.target import Target, tidy
from fald.models.base import Model

Array = NDArray[Any]

_STEPS = (3, 5)  # of a trajectory, about a quarter turn, for few and for many parameters
_ANGLE, _MANY = (0.45, 0.3), 60  # of a step, for few and for many parameters
_FEWEST = 2  # trajectories before the end is looked at
_STILL = 0.5  # largest correlation of where chains are with where they began


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
    rng = np.random.Generator(np.random.Philox([seed & (2**64 - 1), 9]))
    coordinates = d if report is None else d + report(mean[None]).shape[1]
    chains = int(np.ceil(1.15 * (quantile(coordinates) / tolerance) ** 2 / 256)) * 256
    z = rng.standard_normal((chains, d))
    angle, steps, trace = _ANGLE[d > _MANY], _STEPS[d > _MANY], [] if trace is None else trace
    earlier = len(trace)
    value, push = yield from _residual(target, mean, factor, z)
    rounds, ensembles, energies, accepted = 1, [z], [value], 0.0

    def quantities(z: Array) -> Array:
        positions = mean + z @ factor.T
        return positions if report is None else np.concatenate([positions, report(positions)], axis=1)

    def judge() -> list[Check]:
        ends = [quantities(ensembles[i]) for i in (0, max(len(ensembles) - 2, 0), -1)]
        return _checks(ends, energies, accepted, tolerance, list(model.parameter_names))

    while rounds + steps <= max_rounds:
        v = rng.standard_normal(z.shape)
        turn = angle * rng.uniform(0.8, 1.2, (chains, 1))
        at, going, kick, level = z, v, push, value
        for _ in range(steps):
            going = going + turn / 2 * kick
            at, going = at * np.cos(turn) + going * np.sin(turn), going * np.cos(turn) - at * np.sin(turn)
            level, kick = yield from _residual(target, mean, factor, at)
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
        row = {"draws": chains, "khat": np.nan, "ess": np.nan, "newton": np.nan, "explorers": 0}
        here = mean + z @ factor.T
        row |= {"mean": here.mean(axis=0), "sd": here.std(axis=0)}
        trace += [{**row, "accepted": accepted}] * (rounds - len(trace) + earlier)
        if accepted < 0.5:
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
    positions = mean + z @ factor.T
    weights = np.full(chains, 1 / chains)
    centre = positions.mean(axis=0)
    return Outcome(
        method="split-hmc",
        reached=not failed,
        reason="; ".join(check.sentence for check in failed),
        advice="allow more rounds, or ask for less accuracy" if failed else "",
        positions=positions,
        weights=weights,
        khat=np.nan,
        ess=float(chains),
        mean=centre,
        covariance=np.cov(positions.T).reshape(d, d),
        modes=np.zeros((0, d)),
        failed=tuple(check.name for check in failed),
        trace=trace,
    )


def _residual(target: Target, mean: Array, factor: Array, z: Array) -> Server[tuple[Array, Array]]:
    """Log posterior at z, and the gradient that is left without its Gaussian part."""
    positions = mean + z @ factor.T
    sums = yield {"states": positions}
    prior, prior_gradient = prior_gradients(target.model, positions)
    value = tidy(sums["state_values"] + prior)
    gradient = (sums["state_gradients"] + prior_gradient) @ factor
    wrong = ~(np.isfinite(gradient).all(axis=1) & np.isfinite(value))
    gradient[wrong], value[wrong] = 0.0, -np.inf
    return value, gradient + np.where(wrong[:, None], 0.0, z)


def _checks(
    ends: list[Array], energies: list[Array], accepted: float, tolerance: float, names: list[str]
) -> list[Check]:
    """Conditions on the chains at first, before the last trajectory and after it."""
    old, previous, new = ends
    labels = [*names, *[f"reported quantity {i + 1}" for i in range(new.shape[1] - len(names))]]
    sd = new.std(axis=0)
    still = np.array([_correlation(a, b) for a, b in zip(old.T, new.T)])
    square = np.array([_correlation((a - a.mean()) ** 2, (b - b.mean()) ** 2) for a, b in zip(old.T, new.T)])
    stuck, energy = np.maximum(still, square), _correlation(energies[0], energies[-1])
    moved = np.maximum(np.abs(new.mean(0) - previous.mean(0)) / sd, np.abs(previous.std(0) / sd - 1))
    # what is forgotten at a steady rate has so far to go: the way so far times r/(1 − r)
    shift = np.abs(new.mean(0) - old.mean(0)) / sd * _rest(still)
    stretch = np.abs(old.std(0) / sd - 1) * _rest(square)
    left = np.maximum(shift, stretch)
    slow, worst, far = int(np.argmax(stuck)), int(np.argmax(moved)), int(np.argmax(left))
    return [
        Check(
            "movement",
            bool(stuck[slow] < _STILL and energy < _STILL),
            f"chains still remember where they began (correlation {max(stuck[slow], energy):.2f}, in "
            f"{labels[slow] if stuck[slow] >= energy else 'their energy'})",
        ),
        Check(
            "bias",
            bool(left[far] <= tolerance / 3),
            f"{labels[far]} is still on its way from the start: about {left[far]:.3f} sd to go",
        ),
        Check(
            "settled",
            bool(moved[worst] <= tolerance),
            f"{labels[worst]} still moved by {moved[worst]:.3f} sd in the last trajectory",
        ),
        Check("acceptance", accepted >= 0.5, f"only {accepted:.0%} of the trajectories were accepted"),
    ]


def _rest(correlation: Array) -> Array:
    kept = np.clip(correlation, 0.0, 0.99)
    return kept / (1 - kept)


def _correlation(a: Array, b: Array) -> float:
    usable = np.isfinite(a) & np.isfinite(b)
    if usable.sum() < 10 or np.ptp(a[usable]) == 0 or np.ptp(b[usable]) == 0:
        return 1.0
    return float(np.corrcoef(a[usable], b[usable])[0, 1])
