r"""The front of rounds against accuracy against privacy.

Without an accountant, privacy is measured by the composition of full-batch Gaussian mechanisms: K local
steps in each of R rounds of M chains, each with noise multiplier z_c for sensitivity Δ = 1, are μ-Gaussian
private with

    μ = √(K·R·M)/min_c z_c,    z_c = batch_fraction·p_c·√(2τ(1−ρ²)v_c/η),

for a client that takes part in every round as often as it can: with realised noise v_c = 1/w_c, so that a
client which Scheme I may draw S times in a round is charged v_c = 1. The factors are the accountants', from
``fald.privacy.events``. Less is more private; ρ = 1 protects nobody. ``privacy_fn`` replaces it by any other
figure, such as an accountant's ε.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import product
from typing import Any

import numpy as np

from fald.core.errors import ConfigError
from fald.core.threads import one_thread
from fald.planner.law import Goal, Problem, Setting, chain
from fald.planner.search import chain_possible
from fald.privacy.events import entering_weight, own_noise
from fald.settings.participation import Participation, full

_FULL = full()


@dataclass(frozen=True)
class FrontPoint:
    """One run that no other run beats in rounds, accuracy and privacy at once.

    ``error`` is predicted: the larger of bias and sd error, from the end of the warm-up on. ``privacy`` is
    the loss, less is better: ``privacy_fn`` of the run, or μ per unit of sensitivity.
    """

    setting: Setting
    num_rounds: int
    num_warmup: int
    error: float
    privacy: float


def privacy_loss(problem: Problem, setting: Setting, num_rounds: int, num_chains: int) -> float:
    """μ of the module's formula, for sensitivity 1; infinite at correlation 1.

    Batches need the clients' rows in ``problem.sizes``, and are refused without.

    Examples
    --------
    >>> problem = Problem.from_gaussian([[[1.0]], [[3.0]]], [[0.0], [1.0]], [0.5, 0.5])
    >>> round(privacy_loss(problem, Setting(local_steps=2, step_size=0.01), num_rounds=50, num_chains=1), 6)
    1.0
    """
    s, p = setting, problem.weights
    if s.correlation >= 1:
        return math.inf
    scheme, drawn = s.participation.scheme, s.participation.num_participants or len(p)
    own = np.array([own_noise(w, entering_weight(w, scheme, drawn, drawn), s.noise) for w in p])
    fraction = 1.0
    if s.batch_size is not None:
        if problem.sizes is None:
            raise ConfigError(
                "batch-size needs the numbers of the clients' rows here; the problem has no sizes",
                hint="give Problem.sizes, a privacy_fn of your own, or leave batch-size out",
            )
        fraction = np.minimum(1.0, s.batch_size / problem.sizes)
    z = fraction * own * math.sqrt(2 * s.temperature * (1 - s.correlation**2) / s.step_size)
    return math.sqrt(s.local_steps * num_rounds * num_chains) / float(z.min())


@one_thread
def pareto(
    problem: Problem,
    goal: Goal | None = None,
    *,
    errors: Sequence[float] = (0.02, 0.05, 0.1, 0.2),
    local_steps: Sequence[int] = (1, 3, 10, 30),
    correlations: Sequence[float] = (0.0, 0.7, 0.95, 1.0),
    participations: Sequence[Participation] = (_FULL,),
    num_steps: int = 16,
    privacy_fn: Callable[[Mapping[str, Any]], float] | None = None,
    **fixed: Any,
) -> list[FrontPoint]:
    """Runs that no other run on a grid beats in rounds, predicted error and privacy at once.

    Parameters
    ----------
    problem
        The local models.
    goal
        Wanted draws and chains; its errors are replaced by ``errors``, the accuracies aimed at.
    local_steps, correlations, participations
        Values to try; together with ``num_steps`` step sizes from 1/L downwards, each half the one before.
    privacy_fn
        Privacy loss of a run given its settings by the names of ``fald.sample`` (num_rounds and
        num_chains included); see the module for what is used without it.
    **fixed
        Other fields of ``Setting``: noise, temperature, batch_size.

    Returns
    -------
    list of FrontPoint
        In ascending order of rounds; refused if no run on the grid reaches any of the accuracies. Errors are
        predicted, not guaranteed, and the grid is coarse: ``fewest_rounds`` refines a point.

    Examples
    --------
    >>> problem = Problem.from_gaussian([[[1.0]], [[3.0]]], [[0.0], [1.0]], [0.5, 0.5])
    >>> front = pareto(problem, Goal(num_chains=4), correlations=[0.0, 1.0])
    >>> {p.setting.correlation for p in front} == {0.0, 1.0}
    True
    """
    goal = Goal() if goal is None else goal
    found = []
    for participation, rho, K in product(participations, correlations, local_steps):
        like = Setting(int(K), problem.largest_step, float(rho), participation, **fixed)
        chain_possible(problem, like)
        for halvings in range(num_steps):
            setting = replace(like, step_size=problem.largest_step / 2.0**halvings)
            points = _points(problem, goal, setting, errors=errors, privacy_fn=privacy_fn)
            found += points
            if len(points) == len(errors):
                break  # every accuracy is reached: smaller steps only take longer
    front = _undominated(found)
    if not front:
        raise ConfigError(
            f"no run on the grid has an error of at most {max(errors):g}",
            hint="aim at larger errors, or try more step sizes, local steps or correlations",
        )
    return front


def _points(problem: Problem, goal: Goal, setting: Setting, *, errors, privacy_fn) -> list[FrontPoint]:
    try:
        law = chain(problem, setting)
    except ConfigError:
        return []
    sampling = math.ceil(goal.draws * float(law.autocorrelation_time().max()))
    points = []
    for error in errors:
        aim = Goal(bias=error, sd_error=error)
        warmup = law.arrival(aim)
        if warmup is None:
            continue
        rounds = max(1, warmup + sampling)
        reached = error * max(law.excess(warmup, aim), law.excess(math.inf, aim))
        if privacy_fn is None:
            privacy = privacy_loss(problem, setting, rounds, goal.num_chains)
        else:
            counts = {"num_rounds": rounds, "num_chains": goal.num_chains}
            privacy = float(privacy_fn({**setting.arguments(), **counts}))
        points.append(FrontPoint(setting, rounds, warmup, reached, privacy))
    return points


def _undominated(points: list[FrontPoint]) -> list[FrontPoint]:
    # to three digits, so that rounding does not keep a run that gains nothing
    values = np.array([[float(f"{v:.3g}") for v in (p.num_rounds, p.error, p.privacy)] for p in points])
    keep = []
    for i, value in enumerate(values):
        as_good = (values <= value).all(1)
        better = as_good & (values < value).any(1)
        twin = as_good[:i] & ~better[:i]
        if not better.any() and not twin.any():
            keep.append(points[i])
    return sorted(keep, key=lambda p: (p.num_rounds, p.error, p.privacy))
