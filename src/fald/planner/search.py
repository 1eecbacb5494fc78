"""Choice of settings: fewest rounds for an accuracy, or best accuracy for a number of rounds.

Every candidate (K, η, …) is judged by the law of its chain (``fald.planner.law``). A run of it costs

    rounds = arrival + (effective draws per chain) · (autocorrelation time),

the arrival being the first round from which on the law of the position meets the goal.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import ArrayLike

from fald.calculus.mode import prepare
from fald.calculus.spectrum import extremes
from fald.calculus.sums import MAX_DIM
from fald.core.errors import ConfigError, FaldError
from fald.core.threads import one_thread
from fald.planner.law import Chain, Goal, Problem, Setting, chain
from fald.planner.predict import Guarantee, Prediction, errors_at, followed, guarantee, predict, what_if
from fald.planner.scheduled import MOST, Timetable, best_of, fewest, peak, smallest
from fald.problem.data import FederatedData
from fald.problem.model import Model
from fald.settings.schedules import is_data, scaled
from fald.theory.measured import constants

LOCAL_STEPS = (1, 2, 3, 5, 8, 12, 20, 30, 50, 80)
_TOO_SLOW = 1e9
_SPAN = 20  # times a step size is made smaller


@dataclass(frozen=True, eq=False)
class Candidate:
    """The best run with one number of local steps; ``predicted`` is None when no step size will do."""

    setting: Setting
    num_rounds: int
    num_warmup: int
    thinning: int
    ess: float
    predicted: Prediction | None
    guaranteed: Guarantee


@dataclass(frozen=True, eq=False)
class Plan:
    """A recommended run, and the best run for every number of local steps that was tried.

    ``num_exchanges`` counts the exchanges with all clients that the plan took; ``what_if`` gives the error in
    the limit of the recommended setting and of changes to it.
    """

    best: Candidate
    candidates: tuple[Candidate, ...]
    goal: Goal
    problem: Problem
    what_if: dict[str, float]
    num_exchanges: int = 0

    def arguments(self) -> dict[str, Any]:
        """Keyword arguments for ``fald.sample``."""
        b, s = self.best, self.best.setting
        counts = {"num_rounds": b.num_rounds, "num_warmup": b.num_warmup, "thinning": b.thinning}
        return {**s.arguments(), **counts, "num_chains": self.goal.num_chains}


@one_thread
def fewest_rounds(
    problem: Problem,
    goal: Goal | None = None,
    *,
    local_steps: Sequence[int] = LOCAL_STEPS,
    step_size: Callable | None = None,
    **fixed: Any,
) -> Plan:
    """Run that meets a goal in the fewest rounds; refused where no step size up to 1/L meets it.

    Parameters
    ----------
    problem, goal
        The local models, and what to reach.
    local_steps
        Numbers of local steps to try; the step size is searched for each.
    step_size
        A schedule of ``fald.schedules`` instead of a constant step: what it is multiplied by is searched. Its
        errors are those of the exact law with η_j, without batches and terms of third order. All rounds after
        the warm-up are draws. Every round is followed, which takes time: a run may have 4,096 rounds at most,
        or as many as ``num_rounds`` of ``best_accuracy`` says.
    **fixed
        Other fields of ``Setting``: correlation, participation, noise, temperature, batch_size.

    Notes
    -----
    Predicted, not guaranteed: see ``Plan.best.guaranteed``.

    Examples
    --------
    >>> problem = Problem.from_gaussian([[[1.0]], [[3.0]]], [[0.0], [1.0]], [0.5, 0.5])
    >>> best = fewest_rounds(problem, Goal(num_chains=4), local_steps=[1, 2, 4]).best
    >>> best.setting.local_steps, best.predicted.bias <= 0.05, best.predicted.sd_error <= 0.05
    (4, True, True)
    >>> from fald.settings.schedules import polynomial
    >>> falling = fewest_rounds(problem, Goal(ess=600), local_steps=[4], step_size=polynomial(1.0, 400)).best
    >>> falling.num_rounds < 2000, falling.predicted.sd_error <= 0.05
    (True, True)
    """
    goal = Goal() if goal is None else goal
    if step_size is not None:
        return _scheduled(problem, goal, _likes(problem, local_steps, fixed), step_size)

    def cost(law: Chain) -> float:
        arrival = law.arrival(goal)
        return math.inf if arrival is None else arrival + goal.draws * float(law.autocorrelation_time().max())

    def shape(law: Chain) -> tuple[int, int, int]:
        arrival, (thinning, kept) = law.arrival(goal) or 0, _draws(law, goal)
        if kept == 0:
            return max(arrival, 1), max(arrival, 1) - 1, 1
        return _up(arrival) + thinning * _up(kept), _up(arrival), thinning

    likes = _likes(problem, local_steps, fixed)
    plan = _search(problem, goal, likes, cost=cost, shape=shape, merit=lambda c: c.num_rounds)
    return _found(plan, goal, likes)


@one_thread
def best_accuracy(
    problem: Problem,
    num_rounds: int,
    goal: Goal | None = None,
    *,
    local_steps: Sequence[int] = LOCAL_STEPS,
    step_size: Callable | None = None,
    **fixed: Any,
) -> Plan:
    """Most accurate run of a given length; refused where it does not suffice for the draws.

    Parameters
    ----------
    problem, local_steps, step_size, fixed
        As in ``fewest_rounds``.
    num_rounds
        Rounds in total, warm-up included.
    goal
        Wanted draws; of its errors only the ratios count: the largest multiple of them is minimised.

    Examples
    --------
    >>> problem = Problem.from_gaussian([[[1.0]], [[3.0]]], [[0.0], [1.0]], [0.5, 0.5])
    >>> few, many = (best_accuracy(problem, n, Goal(num_chains=40)).best.predicted for n in (500, 5000))
    >>> few.bias > many.bias
    True
    """
    goal = Goal() if goal is None else goal
    if step_size is not None:
        return _scheduled(
            problem, goal, _likes(problem, local_steps, fixed), step_size, num_rounds=num_rounds
        )

    def spare(law: Chain) -> tuple[int, int]:
        thinning, kept = _draws(law, goal)
        return num_rounds - thinning * kept, thinning

    def cost(law: Chain) -> float:
        warmup, _ = spare(law)
        if warmup < 0:
            return _TOO_SLOW * (1 - warmup / num_rounds)  # larger steps mix faster
        return max(law.excess(warmup, goal), law.excess(math.inf, goal))

    def shape(law: Chain) -> tuple[int, int, int] | None:
        warmup, thinning = spare(law)
        return None if warmup < 0 else (num_rounds, min(warmup, num_rounds - 1), thinning)

    def merit(c: Candidate) -> float:
        return cost(chain(problem, c.setting))

    likes = _likes(problem, local_steps, fixed)
    plan = _search(problem, goal, likes, cost=cost, shape=shape, merit=merit)
    return _found(plan, goal, likes, num_rounds)


@one_thread
def plan(
    model: Model,
    data: FederatedData,
    *,
    goal: Goal | None = None,
    num_rounds: int | None = None,
    local_steps: Sequence[int] = LOCAL_STEPS,
    start: ArrayLike | None = None,
    step_size: Callable | None = None,
    **fixed: Any,
) -> Plan:
    """Plan a run on a model and its clients: find the mode, measure the constants, search.

    Parameters
    ----------
    model, data, start
        The model, the rows of each client, and where chains start.
    goal, num_rounds
        What to reach; with ``num_rounds``, the best that so many rounds give.
    local_steps, step_size, fixed
        As in ``fewest_rounds``.

    Notes
    -----
    Above 500 parameters there are no local models: the plan then takes one local step per round, whose law
    on a Gaussian posterior follows from the extreme curvatures alone.

    Examples
    --------
    >>> import fald
    >>> study = fald.datasets.load_bundled_study("indo")
    >>> data = study.read_data()
    >>> found = plan(study.build_model(data.features), data, correlation=1.0, local_steps=[5])
    >>> found.best.predicted.bias <= 0.05, found.best.guaranteed.num_rounds > 1e6 * found.best.num_rounds
    (True, True)
    """
    if model.dim > MAX_DIM:
        problem, exchanges = _without_matrices(model, data, Setting(1, 1.0, **fixed), start), 0
        local_steps = (1,)
    else:
        problem, exchanges = local_models(model, data, Setting(1, 1.0, **fixed), start=start)
    if num_rounds is None:
        chosen = fewest_rounds(problem, goal, local_steps=local_steps, step_size=step_size, **fixed)
    else:
        searched = {"local_steps": local_steps, "step_size": step_size}
        chosen = best_accuracy(problem, num_rounds, goal, **searched, **fixed)
    return replace(chosen, num_exchanges=exchanges)


def _without_matrices(model: Model, data: FederatedData, setting: Setting, start) -> Problem:
    """A Gaussian posterior of two parameters, with the extreme curvatures of the real one.

    With one local step on all rows at all clients a round is a step along the joint energy, so that every
    direction has a law of its own; the flattest is the slowest, and the steepest has the largest error.
    """
    if setting.batch_size is not None or setting.participation.scheme != "full":
        raise ConfigError(
            f"above {MAX_DIM} parameters, plans are for all rows of all clients in every step; "
            f"the model has {model.dim}",
            hint="leave out batch-size and participation, or choose settings by hand",
        )
    found = extremes(model, data, start)
    one, away = ([np.diag([found.least, found.largest])], [np.zeros(2)], [1.0]), np.full(2, found.distance)
    problem = Problem.from_gaussian(*one, start=away)
    names = ("the flattest direction", "the steepest direction")
    return replace(problem, parameters=names, uncertified="no bounds above 500 parameters")


def local_models(
    model: Model, data: FederatedData, setting: Setting, *, start: ArrayLike | None = None
) -> tuple[Problem, int]:
    """Local models at the mode, with the constants of the bounds if there are any; exchanges it took."""
    found = prepare(model, data, start=start)
    known, uncertified = None, ""
    run = {"temperature": setting.temperature, "batch_size": setting.batch_size}
    try:
        known = constants(model, data, preparation=found, **run)
    except FaldError as error:
        uncertified = error.message
    return Problem.from_preparation(found, known, uncertified), found.num_exchanges + 1


def _draws(law: Chain, goal: Goal) -> tuple[int, int]:
    """Thinning that loses next to nothing, and draws to keep of each chain."""
    thinning = max(1, int(law.autocorrelation_time().max() / 10))
    return thinning, math.ceil(goal.draws * float(law.autocorrelation_time(thinning).max()))


def _likes(problem: Problem, local_steps: Sequence[int], fixed: dict[str, Any]) -> list[Setting]:
    """A setting for every number of local steps, valid apart from its step size."""
    likes = [Setting(int(K), problem.largest_step, **fixed) for K in local_steps]
    for like in likes:
        chain_possible(problem, like)
    return likes


def _search(problem: Problem, goal: Goal, likes: list[Setting], *, cost, shape, merit) -> Plan | None:
    candidates, guess = [], problem.largest_step / 4
    for like in likes:

        def judged(step: float, like: Setting = like) -> float:
            try:
                return cost(chain(problem, replace(like, step_size=step)))
            except ConfigError:
                return math.inf

        step = _down(_least(judged, guess / like.local_steps, problem.largest_step))
        setting = replace(like, step_size=step)
        law = chain(problem, setting) if math.isfinite(judged(step)) else None
        form = None if law is None else shape(law)
        if law is None or form is None:
            none = Guarantee(reason="no step size will do")
            candidates.append(Candidate(setting, 0, 0, 1, 0.0, None, none))
            continue
        guess = step * like.local_steps  # K·η changes little with K
        rounds, warmup, thinning = form
        kept = (rounds - warmup) // thinning
        ess = goal.num_chains * kept / float(law.autocorrelation_time(thinning).max())
        first = warmup if goal.draws else rounds
        worst = max(first, math.inf, key=lambda r, law=law: law.excess(r, goal))
        predicted = errors_at(problem, law, worst)
        guaranteed = guarantee(problem, setting, rounds, predicted.w2)
        candidates.append(Candidate(setting, rounds, warmup, thinning, ess, predicted, guaranteed))
    good = [c for c in candidates if c.predicted is not None]
    if not good:
        return None
    best = _cheapest(good, [merit(c) for c in good])
    return Plan(best, tuple(candidates), goal, problem, what_if(problem, best.setting))


def _cheapest(good: list[Candidate], merits: list[float]) -> Candidate:
    # fewer local steps where they cost next to nothing: less to compute, and less to go wrong
    return next(c for c, m in zip(good, merits) if m <= 1.02 * min(merits))


def _found(plan: Plan | None, goal: Goal, likes: list[Setting], num_rounds: int | None = None) -> Plan:
    """The plan, or an error that says what cannot be reached."""
    if plan is None and num_rounds is None:
        raise ConfigError(
            f"no step size gives bias ≤ {goal.bias:g}, sd-error ≤ {goal.sd_error:g} and W2 ≤ {goal.w2:g} "
            f"with local-steps in {[like.local_steps for like in likes]}",
            hint="allow more error, raise the correlation, or let more devices take part",
        )
    if plan is None:
        raise ConfigError(
            f"num-rounds = {num_rounds} do not give {goal.draws:.0f} effective draws per chain",
            hint="more rounds, more chains, more local steps, or fewer effective draws",
        )
    return plan


def _scheduled(
    problem: Problem, goal: Goal, likes: list[Setting], schedule: Any, *, num_rounds: int | None = None
) -> Plan:
    """The best multiple of a schedule."""
    if not is_data(schedule):
        raise ConfigError(
            "a plan chooses the step size", hint="give a schedule of fald.schedules, or leave step-size out"
        )
    high, found = problem.largest_step / peak(schedule), []
    for like in likes:
        followed(problem, replace(like, step_size=scaled(schedule, 1e-3 * high)), 1)  # what it has no law for

        def run(factor: float, like: Setting = like) -> Timetable | None:
            setting = replace(like, step_size=scaled(schedule, factor))
            try:
                if num_rounds is None:
                    return fewest(problem, setting, goal)
                return best_of(problem, setting, goal, num_rounds)
            except ConfigError:
                return None

        def judged(factor: float, run: Callable = run) -> float:
            found = run(factor)
            return math.inf if found is None else found.cost

        # steps that fall are to begin large
        factor = _down(_least(judged, high, high, down=2.0, low=smallest(problem, like, schedule, goal)))
        setting, best = replace(like, step_size=scaled(schedule, factor)), run(factor)
        guaranteed = Guarantee(reason="the bounds are for constant step sizes")
        if best is None or best.ess < goal.draws:
            none = replace(guaranteed, reason="no multiple of the schedule will do")
            found.append((Candidate(setting, 0, 0, 1, 0.0, None, none), math.inf))
            continue
        predicted = predict(problem, setting, best.worst)
        counts = best.num_rounds, best.num_warmup, 1, goal.num_chains * best.ess
        found.append((Candidate(setting, *counts, predicted, guaranteed), best.cost))
    good = [(c, cost) for c, cost in found if c.predicted is not None]
    if not good and num_rounds is None:
        raise ConfigError(
            f"no multiple of the schedule gives bias ≤ {goal.bias:g}, sd-error ≤ {goal.sd_error:g}, W2 ≤ "
            f"{goal.w2:g} and {goal.draws:.0f} effective draws per chain in {MOST:,} rounds with local-steps "
            f"in {[like.local_steps for like in likes]}",
            hint="allow more error or fewer draws, take more local steps, a schedule that falls more slowly, "
            "or a constant step size, which may take any number of rounds",
        )
    if not good:
        return _found(None, goal, likes, num_rounds)
    chosen = _cheapest(*map(list, zip(*good)))
    others = what_if(problem, chosen.setting, chosen.num_rounds)
    return Plan(chosen, tuple(c for c, _ in found), goal, problem, others)


def chain_possible(problem: Problem, like: Setting) -> None:
    """Raise the ``ConfigError`` of settings that no step size makes valid."""
    chain(problem, replace(like, local_steps=1, step_size=1e-3 * problem.largest_step))


def _least(
    cost: Callable[[float], float], guess: float, high: float, *, down: float = 4.0, low: float = 0.0
) -> float:
    """Argument ≤ ``high`` of least cost, for costs with one valley on the logarithmic scale.

    Above the valley a cost may be infinite: there the goal is out of reach, and the next that is looked at is
    ``down`` times smaller. Below ``low`` nothing is looked for.
    """
    seen: dict[float, float] = {}

    def look(x: float) -> float:
        if x not in seen:
            seen[x] = cost(math.exp(x))
        return seen[x]

    top, here, step = math.log(high), math.log(min(guess, high)), math.log(2)
    for _ in range(_SPAN):
        if math.isfinite(look(here)):
            break
        if here < (math.log(low) if low else -math.inf):
            return math.exp(here)
        here -= math.log(down)
    while here < top and look(min(here + step, top)) < look(here):
        here = min(here + step, top)
    while look(here - step) < look(here):
        here -= step
    low, top, ratio = here - step, min(here + step, top), (math.sqrt(5) - 1) / 2
    left, right = top - ratio * (top - low), low + ratio * (top - low)
    for _ in range(7):
        if look(left) <= look(right):
            top, left, right = right, right - ratio * (right - low), left
        else:
            low, left, right = left, right, left + ratio * (top - left)
    return math.exp(min(seen, key=lambda x: seen[x]))


def _down(value: float, digits: int = 3) -> float:
    """Round down to a few significant digits, so that the number can be typed."""
    unit = 10.0 ** (math.floor(math.log10(value)) - digits + 1)
    return float(f"{math.floor(value / unit * (1 + 1e-12)) * unit:.{digits - 1}e}")


def _up(value: int) -> int:
    """Round a count up to two significant digits."""
    unit = 10 ** max(0, len(str(value)) - 2)
    return -(-value // unit) * unit
