"""What a setting leads to: predicted errors, and what the published bounds guarantee.

``Prediction`` comes from the law of the local models and is usually right within a few percent of the
error or so; ``Guarantee`` comes from the bounds, never fails, and is usually orders of magnitude away. They
are never mixed.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from fald import theory
from fald.core.errors import ConfigError
from fald.planner.law import Chain, Goal, Problem, Setting, chain
from fald.settings.participation import full
from fald.settings.schedules import scaled, step_sizes_at
from fald.theory import gaussian
from fald.theory.gaussian import Law
from fald.theory.measured import Measured

Array = NDArray[Any]

_FORGOTTEN = Goal(bias=0.01, sd_error=0.01)


@dataclass(frozen=True, eq=False)
class Prediction:
    """Errors of a chain against the posterior, by the law of the local models. Not a guarantee.

    ``w2`` is in units of the parameters, ``w2_relative`` divided by √tr of the posterior covariance;
    ``bias`` is the shift of a mean in posterior sds and ``sd_error`` the relative error of an sd, each of
    the worst parameter, ``bias_parameter`` and ``sd_parameter``; ``shifts`` and ``sd_errors`` (d,) are those
    of all, signed. ``autocorrelation_time`` is rounds per effective draw of the slowest parameter,
    ``forgotten`` the rounds until mean and sd of every parameter are within 1% of a posterior sd of their
    limits.
    """

    w2: float
    w2_relative: float
    bias: float
    sd_error: float
    bias_parameter: str
    sd_parameter: str
    shifts: Array
    sd_errors: Array
    autocorrelation_time: float
    forgotten: int


@dataclass(frozen=True)
class Guarantee:
    """What the published bounds guarantee; ``None`` where they guarantee nothing, and ``reason`` says why.

    ``w2`` is the bound with the settings and rounds of the run, ``terms`` are its named terms;
    ``num_rounds`` is after how many rounds the bound certifies the W2 that is predicted, with the
    ``step_size`` it needs.
    """

    w2: float | None = None
    terms: dict[str, float] | None = None
    num_rounds: float | None = None
    step_size: float | None = None
    reason: str = ""


class Trajectory(NamedTuple):
    """Errors against rounds, as in ``Prediction``; each array has the length of ``num_rounds``."""

    num_rounds: Array
    w2: Array
    bias: Array
    sd_error: Array


def predict(problem: Problem, setting: Setting, num_rounds: float = math.inf) -> Prediction:
    """Errors of the position after some rounds from the start, a single point; in the limit unless given.

    Exact for Gaussian energies with full participation and full batches. With drawn devices W2 is that of
    Gaussians of the same moments, a lower bound. Settings with which the chain diverges are refused.

    Notes
    -----
    For other energies the errors are right to leading order in the step size: on logistic regressions within
    a third or so while K·η·L is below 1 or so. Models far from Gaussian can behave differently.

    Examples
    --------
    >>> problem = Problem.from_gaussian([[[1.0]], [[3.0]]], [[0.0], [1.0]], [0.5, 0.5])
    >>> limit = predict(problem, Setting(local_steps=2, step_size=0.1))
    >>> round(limit.bias, 4), round(limit.sd_error, 4), round(limit.autocorrelation_time, 2)
    (0.0303, 0.069, 4.71)

    A schedule of ``fald.schedules`` has no limit, so it needs ``num_rounds``. It is followed by the exact law
    with η_j, without batches and terms of third order; ``autocorrelation_time`` is that of its last step, and
    ``forgotten`` is ``num_rounds + 1`` where the start is not forgotten by then.

    >>> from fald.settings.schedules import cosine
    >>> falling = Setting(local_steps=2, step_size=cosine(0.1, 60, last=0.01))
    >>> round(predict(problem, falling, 100).sd_error, 4), predict(problem, falling, 100).forgotten
    (0.0063, 13)
    """
    if not callable(setting.step_size):
        return errors_at(problem, chain(problem, setting), num_rounds)
    if math.isinf(num_rounds):
        raise ConfigError("a schedule has no limit: give num-rounds")
    rounds = int(num_rounds)
    path, posterior = followed(problem, setting, rounds)
    sd = np.sqrt(np.diagonal(posterior.covariance))
    place = Law(path.mean[-1], path.covariance[-1])
    shifts = place.mean / sd
    sd_errors = np.sqrt(np.maximum(np.diagonal(place.covariance), 0)) / sd - 1
    # the law is affine in the start: what is left of it is the difference of two means
    left = np.abs(path.mean - followed(replace(problem, start=0 * problem.start), setting, rounds)[0].mean)
    behind = np.flatnonzero((left / sd).max(axis=1) > _FORGOTTEN.bias)
    end = float(step_sizes_at(setting.step_size, np.array([max(rounds * setting.local_steps - 1, 0)]))[0])
    last = chain(problem, replace(setting, step_size=end))
    return _prediction(
        problem,
        (place, posterior),
        (shifts, sd_errors),
        time=float(last.autocorrelation_time().max()),
        forgotten=int(behind[-1]) + 1 if len(behind) else 0,
    )


def trajectory(problem: Problem, setting: Setting, num_rounds: Iterable[int]) -> Trajectory:
    """Errors after each of several numbers of rounds; see ``predict``.

    Examples
    --------
    >>> problem = Problem.from_gaussian([[[1.0]], [[3.0]]], [[0.0], [1.0]], [0.5, 0.5])
    >>> trajectory(problem, Setting(local_steps=2, step_size=0.01), [0, 10, 1000]).w2.round(3)
    array([1.031, 0.532, 0.005])

    A schedule of ``fald.schedules`` is followed step by step, by the exact law with η_j; batches and the
    third-order term are not in it.

    >>> from fald.settings.schedules import cosine
    >>> falling = Setting(local_steps=2, step_size=cosine(0.1, 60, last=0.001))
    >>> bool(trajectory(problem, falling, [100]).w2 < trajectory(problem, falling, [10]).w2)
    True
    """
    rounds = np.array(list(num_rounds), int)
    if callable(setting.step_size):
        return _scheduled(problem, setting, rounds)
    law = chain(problem, setting)
    places = [law.at(int(r)) for r in rounds]
    errors = np.array([[np.abs(e).max() for e in law.errors(place)] for place in places]).reshape(-1, 2)
    w2 = np.array([float(gaussian.wasserstein2(*place, *law.posterior)) for place in places])
    return Trajectory(rounds, w2, *errors.T)


def followed(problem: Problem, setting: Setting, num_rounds: int) -> tuple[Law, Law]:
    """Law of every round of a run whose steps change, and the posterior, from local Gaussian models."""
    s = setting
    if s.batch_size is not None:
        raise ConfigError("batch-size must be None here: the law of a schedule has no noise of batches")
    if s.preconditioner is not None:
        raise ConfigError(
            "preconditioner must be left out here: its scale is known once clients have sent theirs"
        )
    centers = -np.einsum("cij,cj->ci", np.linalg.pinv(problem.hessians, hermitian=True), problem.gradients)
    found = gaussian.law(
        problem.hessians,
        centers,
        problem.weights,
        step_size=s.step_size,
        local_steps=s.local_steps,
        num_rounds=num_rounds,
        temperature=s.temperature,
        correlation=s.correlation,
        participation=s.participation,
        noise=s.noise,
        momentum=s.momentum,
        initial_position=problem.start,
    )
    return found, Law(np.zeros(len(problem.start)), s.temperature * np.linalg.inv(problem.precision))


def _scheduled(problem: Problem, setting: Setting, rounds: Array) -> Trajectory:
    """Errors along a run whose steps change."""
    found, (_, posterior) = followed(problem, setting, int(rounds.max(initial=0)))
    sd, means, joint = np.sqrt(np.diagonal(posterior)), found.mean[rounds], found.covariance[rounds]
    w2 = [float(gaussian.wasserstein2(m, c, np.zeros_like(m), posterior)) for m, c in zip(means, joint)]
    sds = np.sqrt(np.maximum(np.diagonal(joint, axis1=1, axis2=2), 0))
    return Trajectory(rounds, np.array(w2), np.abs(means / sd).max(axis=1), np.abs(sds / sd - 1).max(axis=1))


def rounds_to(problem: Problem, setting: Setting, goal: Goal) -> int | None:
    """First round from which on the law of the position meets the goal; ``None`` if it never does.

    Examples
    --------
    >>> problem = Problem.from_gaussian([[[1.0]], [[3.0]]], [[0.0], [1.0]], [0.5, 0.5])
    >>> rounds_to(problem, Setting(local_steps=2, step_size=0.01), Goal(math.inf, math.inf, w2=0.1))
    51
    """
    return chain(problem, setting).arrival(goal)


def guarantee(problem: Problem, setting: Setting, num_rounds: float, epsilon: float) -> Guarantee:
    """What the bounds say of a run, and of the rounds to W2 ≤ ``epsilon``; or why they say nothing."""
    known, s = problem.constants, setting
    if known is None:
        return Guarantee(reason=problem.uncertified)
    if isinstance(known, Measured) and known.estimated:
        names = ", ".join(name.replace("_", "-") for name in known.estimated)
        return Guarantee(reason=f"only estimated, not bounded: {names}")
    if s.participation.scheme != "full" and s.noise == "realised":
        return Guarantee(reason='drawn devices are covered with noise = "paper" only')
    known = replace(known, temperature=s.temperature)
    run = {"correlation": s.correlation, "participation": s.participation}
    found, reasons = {}, []
    try:
        bound = theory.fixed_step_bound(
            known, step_size=s.step_size, local_steps=s.local_steps, num_rounds=math.floor(num_rounds), **run
        )
        shown = [name for name in bound.__dataclass_fields__ if name != "drift_share"]
        found = {"w2": float(bound.total), "terms": {name: float(getattr(bound, name)) for name in shown}}
    except ConfigError as error:
        reasons.append(error.message)
    try:
        certified = theory.complexity(epsilon, known, local_steps=s.local_steps, **run)
        found |= {"num_rounds": float(certified.num_rounds), "step_size": float(certified.step_size)}
    except ConfigError as error:
        reasons.append(error.message)
    return Guarantee(**found, reason="; ".join(reasons))


def what_if(problem: Problem, setting: Setting, num_rounds: float = math.inf) -> dict[str, float]:
    """Error after some rounds, or in the limit: max of bias and sd error, of a setting and changes to it."""
    s, changes = setting, {"as it is": setting}
    if s.local_steps > 1:
        changes["local-steps = 1"] = replace(s, local_steps=1)
        if s.correlation < 1:
            changes["correlation = 1"] = replace(s, correlation=1.0)
    if s.batch_size is not None:
        changes["all rows in every step"] = replace(s, batch_size=None)
    if s.participation.scheme != "full":
        changes["full participation"] = replace(s, participation=full())
        if s.noise == "paper":
            changes['noise = "realised"'] = replace(s, noise="realised")
    changes["half the step-size"] = replace(s, step_size=scaled(s.step_size, 0.5))
    at = {name: predict(problem, changed, num_rounds) for name, changed in changes.items()}
    return {name: max(found.bias, found.sd_error) for name, found in at.items()}


def errors_at(problem: Problem, law: Chain, num_rounds: float) -> Prediction:
    """Errors after some rounds of a chain whose law is known."""
    place = law.at(num_rounds)
    time, forgotten = law.autocorrelation_time().max(), law.arrival(_FORGOTTEN, law.stationary) or 0
    return _prediction(
        problem, (place, law.posterior), law.errors(place), time=float(time), forgotten=forgotten
    )


def _prediction(
    problem: Problem, laws: tuple[Law, Law], errors: tuple[Array, Array], *, time: float, forgotten: int
) -> Prediction:
    (place, posterior), (shifts, sd_errors) = laws, errors
    w2 = float(gaussian.wasserstein2(*place, *posterior))
    worst, widest = int(np.argmax(np.abs(shifts))), int(np.argmax(np.abs(sd_errors)))
    return Prediction(
        w2=w2,
        w2_relative=w2 / math.sqrt(float(np.trace(posterior.covariance))),
        bias=float(abs(shifts[worst])),
        sd_error=float(abs(sd_errors[widest])),
        bias_parameter=problem.parameters[worst],
        sd_parameter=problem.parameters[widest],
        shifts=shifts,
        sd_errors=sd_errors,
        autocorrelation_time=time,
        forgotten=forgotten,
    )
