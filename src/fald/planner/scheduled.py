"""Runs whose steps follow a schedule: errors of every round by the exact law with η_j, and effective draws.

Between rounds r and s the positions have the covariance A_s … A_{r+1} C_r with A_r = I − Ḡ_r, whoever takes
part, so that the variance of a sum of draws, and with it their effective number, follows from that law.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from fald.planner.law import Goal, Problem, Setting
from fald.planner.predict import followed
from fald.settings.schedules import step_sizes_at
from fald.theory import gaussian

Array = NDArray[Any]

_FIRST, MOST = 256, 4096  # rounds that are followed
_TOO_SLOW = 1e9


class Course(NamedTuple):
    """Every round of a run: its largest error in what is allowed, and C_r, from the start on; and the A_r."""

    excess: Array
    covariance: Array
    maps: Array

    def arrival(self) -> int:
        """First round from which on the goal is met; one after the last where it is not met then."""
        beyond = np.flatnonzero(self.excess > 1)
        return int(beyond[-1]) + 1 if len(beyond) else 0

    def effective(self, warmup: int) -> Array:
        """Effective draws of the slowest parameter in the rounds after ``warmup``, up to each of them."""
        before = np.zeros_like(self.covariance[0])
        total, alone, found = np.zeros(len(before)), np.zeros(len(before)), []
        for step, now in zip(self.maps[warmup:], self.covariance[warmup + 1 :]):
            before = step @ before + now
            total = total + 2 * np.diagonal(before) - np.diagonal(now)
            alone = alone + np.diagonal(now)
            found.append((len(found) + 1) * np.min(alone / total))
        return np.array(found)


class Timetable(NamedTuple):
    """A run: its rounds, effective draws of a chain, the kept round of largest error, and what it costs."""

    num_rounds: int
    num_warmup: int
    ess: float
    worst: int
    cost: float


def course(problem: Problem, setting: Setting, goal: Goal, num_rounds: int) -> Course:
    """The rounds of a run with a schedule, from a single point."""
    path, posterior = followed(problem, setting, num_rounds)
    sd = np.sqrt(np.diagonal(posterior.covariance))
    spreads = np.sqrt(np.maximum(np.diagonal(path.covariance, axis1=1, axis2=2), 0))
    shift, widened = np.abs(path.mean / sd).max(axis=1), np.abs(spreads / sd - 1).max(axis=1)
    excess = np.maximum(shift / goal.bias, widened / goal.sd_error)
    if math.isfinite(goal.w2):
        apart = [float(gaussian.wasserstein2(*place, *posterior)) for place in zip(*path)]
        excess = np.maximum(excess, np.array(apart) / goal.w2)
    values, basis, _ = problem.spectrum
    chance = gaussian.drawn(problem.weights, setting)[0]
    steps = step_sizes_at(setting.step_size, np.arange(num_rounds * setting.local_steps))
    left = np.ones((num_rounds, *values.shape))
    for own in steps.reshape(num_rounds, setting.local_steps).T:
        left *= 1 - own[:, None, None] * values
    maps = np.einsum("c,cpk,rck,cqk->rpq", chance, basis, left, basis, optimize=True)
    return Course(excess, path.covariance, maps)


def peak(schedule: Any) -> float:
    """The largest step of a schedule, as far as a look at some thousand steps tells."""
    looks = np.unique([*range(2000), *np.geomspace(2000, 2e6, 2000).astype(int)])
    return float(step_sizes_at(schedule, looks).max())


def smallest(problem: Problem, setting: Setting, schedule: Any, goal: Goal) -> float:
    """What a schedule must be multiplied by at least for the flattest direction to fill its sd.

    Of a quadratic energy, by a factor of four or so: variances are 1 − exp(−2λ Σ η_j) of their limit.
    """
    flattest = float(np.linalg.eigvalsh(problem.precision)[0])
    whole = float(step_sizes_at(schedule, np.arange(MOST * setting.local_steps)).sum())
    missing = 1 - (1 - min(goal.sd_error, 0.9)) ** 2
    return -math.log(missing) / (8 * flattest * whole)


def fewest(problem: Problem, setting: Setting, goal: Goal) -> Timetable | None:
    """The run that meets a goal first, dear where it has too few draws; none where errors stay too large."""
    rounds = _FIRST
    while True:
        found = course(problem, setting, goal, rounds)
        warmup = found.arrival()
        if warmup < rounds:
            worth = found.effective(warmup)
            enough = np.flatnonzero(worth >= goal.draws) + 1
            if not goal.draws or len(enough):
                return _run(found, warmup, warmup + (int(enough[0]) if goal.draws else 0))
            if rounds >= MOST:
                return _run(found, warmup, rounds)._replace(cost=_TOO_SLOW * goal.draws / float(worth[-1]))
        if rounds >= MOST:
            return None
        rounds *= 4


def best_of(problem: Problem, setting: Setting, goal: Goal, num_rounds: int) -> Timetable:
    """The run of a given length that keeps as many rounds as its draws need, and no others."""
    found = course(problem, setting, goal, num_rounds)

    def worth(warmup: int) -> float:
        return float(found.effective(warmup)[-1])

    low, high = 0, num_rounds - 1  # enough, and perhaps not
    if worth(low) < goal.draws:
        run = _run(found, 0, num_rounds)
        return run._replace(cost=_TOO_SLOW * goal.draws / run.ess)
    while low < high:
        middle = (low + high + 1) // 2
        low, high = (middle, high) if worth(middle) >= goal.draws else (low, middle - 1)
    run = _run(found, low, num_rounds)
    return run._replace(cost=float(found.excess[run.worst]))


def _run(found: Course, warmup: int, rounds: int) -> Timetable:
    """A run whose draws are all rounds after the warm-up; its last position where it needs no more."""
    rounds = max(rounds, 1)
    warmup = min(warmup, rounds - 1)
    worst = warmup + int(np.argmax(found.excess[warmup : rounds + 1]))
    return Timetable(
        rounds, warmup, float(found.effective(warmup)[rounds - warmup - 1]), worst, float(rounds)
    )
