"""From a budget (ε, δ) to the largest setting that keeps it."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from typing import Any, Literal

import numpy as np

from fald.core.errors import ConfigError, PrivacyError
from fald.privacy.accountant import Ledger, PrivacyReport, account
from fald.privacy.settings import RunSettings

Vary = Literal["correlation", "step_size", "num_rounds", "num_participants"]

_MOST_ROUNDS = 10_000_000


@dataclass(frozen=True)
class Budget:
    """What a record may lose: ε at δ.

    Examples
    --------
    >>> Budget(1.0, 1e-5).epsilon
    1.0
    """

    epsilon: float
    delta: float

    def __post_init__(self) -> None:
        if not 0 < self.epsilon < math.inf:
            raise ConfigError(f"epsilon must be > 0 and finite; got {self.epsilon}")
        if not 0 < self.delta < 1:
            raise ConfigError(f"delta must be between 0 and 1, both excluded; got {self.delta}")


@dataclass(frozen=True, eq=False)
class Calibration:
    """The largest setting within a budget.

    Attributes
    ----------
    vary
        What was varied.
    value
        Its largest value found; the largest step where the step size is a schedule.
    settings
        The run with that value.
    report
        The accounting of that run: proof that it keeps the budget.
    budget
        The budget.
    at_limit
        True where the search ended at its own limit and more might be allowed.
    """

    vary: Vary
    value: float
    settings: RunSettings
    report: PrivacyReport
    budget: Budget
    at_limit: bool = False


def calibrate(
    budget: Budget,
    settings: RunSettings,
    *,
    vary: Vary,
    tolerance: float = 1e-3,
    most: float | None = None,
    **options: Any,
) -> Calibration:
    """Largest correlation, step size, number of rounds or of participants within a budget.

    ε grows with ρ, η, the number of rounds and, where the noise does not follow S, with S. All noise
    multipliers are proportional to √((1−ρ²)τ/η), so ρ and η come from one root in that factor; rounds
    are found by bisection; S by trying from the largest down, because with realised noise a larger S
    also means more noise, and ε need not grow with it.

    Parameters
    ----------
    budget
        ε and δ.
    settings
        The run; the value that is varied is ignored, except that a schedule of step sizes keeps its
        shape and a schedule's length limits the rounds.
    vary
        ``"correlation"``, ``"step_size"``, ``"num_rounds"`` or ``"num_participants"``.
    tolerance
        How far below the largest value a found ρ or η may be, relative to the noise multiplier.
    most
        Limit of the search: rounds (10 million), participants (number of clients), or step size.
    **options
        As for ``account``: ``method``, ``sampling``, ``view``, ``num_colluders``.

    Returns
    -------
    Calibration
        The value, the settings with it, and their accounting, which is within the budget.

    Raises
    ------
    PrivacyError
        If no value keeps the budget; the message says what the least ε is.

    Notes
    -----
    Not guaranteed: that the sampler works well at that value. A step size within the budget may be
    far too large for the target.

    Examples
    --------
    >>> run = RunSettings(sizes=[6000] * 10, local_steps=10, num_rounds=1000, step_size=1e-7,
    ...                   batch_size=200, sensitivity=2.0)
    >>> found = calibrate(Budget(1.0, 1e-5), run, vary="correlation")
    >>> round(found.value, 2), found.report.worst <= 1.0
    (0.84, True)
    """
    if not isinstance(budget, Budget):
        budget = Budget(*budget)
    if options.get("participation", "hidden") != "hidden":
        raise ConfigError("a run that is yet to be planned has no realised participation")
    if not 0 < tolerance < 1:
        raise ConfigError(f"tolerance must be between 0 and 1, both excluded; got {tolerance}")
    kind = vary.replace("-", "_")
    search: dict[str, Callable[..., Calibration]] = {
        "correlation": _correlation,
        "step_size": _step_size,
        "num_rounds": _num_rounds,
        "num_participants": _num_participants,
    }
    if kind not in search:
        raise ConfigError(f"vary must be one of {', '.join(search)}; got {vary!r}")
    return search[kind](budget, settings, options, tolerance, most)


def _account(settings: RunSettings, budget: Budget, options: dict[str, Any]) -> PrivacyReport:
    return account(settings, delta=budget.delta, **options)


def _infeasible(what: str, budget: Budget, least: float, hint: str) -> PrivacyError:
    return PrivacyError(
        f"no {what} keeps the budget ε = {budget.epsilon:g} at δ = {budget.delta:g}: "
        f"the least ε is {least:.4g}",
        hint=hint,
    )


def _largest(keeps: Callable[[float], bool], low: float, high: float, tolerance: float) -> float:
    """Largest value known to keep, with ``low`` keeping and ``high`` not, in relative terms."""
    while high - low > tolerance * low:
        middle = math.sqrt(low * high)
        low, high = (middle, high) if keeps(middle) else (low, middle)
    return low


def _correlation(
    budget: Budget, settings: RunSettings, options: dict[str, Any], tolerance: float, most: float | None
) -> Calibration:
    def at(rho: float) -> PrivacyReport:
        return _account(replace(settings, correlation=rho), budget, options)

    free = at(0.0)
    if free.worst > budget.epsilon:
        raise _infeasible(
            "correlation", budget, free.worst, "take fewer rounds, a smaller step size or a smaller clip-norm"
        )

    def rho_of(scale: float) -> float:
        return math.sqrt(max(0.0, 1.0 - 1.0 / scale**2))

    # in 1/√(1−ρ²), by which the multipliers shrink
    high = 2.0
    while at(rho_of(high)).worst <= budget.epsilon:
        high *= 4.0
        if high > 1e6:
            break
    scale = _largest(lambda x: at(rho_of(x)).worst <= budget.epsilon, 1.0, high, tolerance)
    rho = rho_of(scale)
    if most is not None:
        rho = min(rho, most)
    report = at(rho)
    return _checked("correlation", rho, report, budget, at_limit=rho == most)


def _step_size(
    budget: Budget, settings: RunSettings, options: dict[str, Any], tolerance: float, most: float | None
) -> Calibration:
    shape = np.asarray(settings.step_size, float)

    def at(scale: float) -> PrivacyReport:
        eta = shape * scale**2
        return _account(replace(settings, step_size=eta if eta.ndim else float(eta)), budget, options)

    low = high = 1.0
    if at(1.0).worst <= budget.epsilon:
        while at(high).worst <= budget.epsilon:
            low, high = high, high * 4.0
            if most is not None and np.max(shape) * low**2 >= most:
                break
    else:
        while at(low).worst > budget.epsilon:
            low, high = low / 4.0, low
            if low < 1e-12:
                raise _infeasible("step-size", budget, at(low).worst, "raise delta")
    scale = _largest(lambda x: at(x).worst <= budget.epsilon, low, high, tolerance)
    limited = most is not None and np.max(shape) * scale**2 > most
    if most is not None and limited:
        scale = math.sqrt(most / float(np.max(shape))) * (1.0 - 1e-12)
    report = at(scale)
    return _checked("step_size", float(np.max(report.settings.step_size)), report, budget, at_limit=limited)


def _num_rounds(
    budget: Budget, settings: RunSettings, options: dict[str, Any], tolerance: float, most: float | None
) -> Calibration:
    limit = int(most) if most is not None else _MOST_ROUNDS
    scheduled = not isinstance(settings.step_size, float)
    if scheduled:
        limit = min(limit, settings.num_rounds)

    run = settings.first_rounds
    first = _account(run(1), budget, options)
    if first.worst > budget.epsilon:
        raise _infeasible("number of rounds", budget, first.worst, "one round already spends more than that")
    rounds = horizon = limit if scheduled else min(limit, 1024)
    while True:
        rounds = Ledger(run(horizon), delta=budget.delta, **options).max_rounds(budget.epsilon)
        if rounds < horizon or horizon == limit:
            break
        horizon = min(limit, 8 * horizon)
    # a run of exactly that length has its own grid, so its ε may differ in the last digits
    rounds = max(1, rounds)
    report = _account(run(rounds), budget, options)
    while report.worst > budget.epsilon and rounds > 1:
        rounds -= max(1, rounds // 1000)
        report = _account(run(rounds), budget, options)
    while rounds < limit:
        longer = _account(run(rounds + 1), budget, options)
        if longer.worst > budget.epsilon:
            break
        rounds, report = rounds + 1, longer
    return _checked("num_rounds", rounds, report, budget, at_limit=rounds == limit)


def _with_participants(settings: RunSettings, number: int) -> RunSettings:
    if settings.scheme == "full":
        raise ConfigError(
            "the number of participants can only be varied where clients are drawn",
            hint="set a participation with or without replacement",
        )
    return replace(settings, participation=replace(settings.participation, num_participants=number))


def _num_participants(
    budget: Budget, settings: RunSettings, options: dict[str, Any], tolerance: float, most: float | None
) -> Calibration:
    limit = settings.num_clients if most is None else int(most)
    least = math.inf
    for number in range(limit, 0, -1):
        report = _account(_with_participants(settings, number), budget, options)
        if report.worst <= budget.epsilon:
            return _checked("num_participants", number, report, budget, at_limit=number == limit)
        least = min(least, report.worst)
    raise _infeasible(
        "number of participants",
        budget,
        least,
        "take fewer rounds, a smaller step size or a smaller correlation",
    )


def _checked(
    vary: Vary, value: float, report: PrivacyReport, budget: Budget, *, at_limit: bool = False
) -> Calibration:
    if not report.worst <= budget.epsilon:
        raise PrivacyError(
            f"calibration of {vary} ended at ε = {report.worst:.6g}, above the budget {budget.epsilon:g}",
            hint="give a larger tolerance",
        )
    return Calibration(vary, value, report.settings, report, budget, bool(at_limit))


@dataclass(frozen=True)
class FrontPoint:
    """One point of the front ρ_max(S): ``correlation`` is ``None`` where even ρ = 0 exceeds the budget."""

    num_participants: int
    correlation: float | None
    epsilon: float


def pareto_front(
    budget: Budget,
    settings: RunSettings,
    *,
    num_participants: Iterable[int] | None = None,
    tolerance: float = 1e-3,
    **options: Any,
) -> list[FrontPoint]:
    """Largest correlation for each number of participants: "largest ρ and S" is a front, not a point.

    Parameters
    ----------
    budget, settings, tolerance, **options
        As for ``calibrate``; the settings must draw clients.
    num_participants
        The S to try; all from 1 to N (without replacement) where not given.

    Returns
    -------
    list[FrontPoint]
        In the order of ``num_participants``, with ε at the point, or at ρ = 0 where infeasible.

    Notes
    -----
    With the paper's noise ρ_max falls as S grows. With realised noise the noise of a client grows
    with S, which outweighs its taking part more often, so ρ_max rises.

    Examples
    --------
    >>> from fald.settings.participation import without_replacement
    >>> run = RunSettings(sizes=[6000] * 10, local_steps=10, num_rounds=1000, step_size=1e-7, batch_size=200,
    ...                   sensitivity=2.0, noise="paper", participation=without_replacement(5))
    >>> front = pareto_front(Budget(0.4, 1e-5), run, num_participants=[2, 6, 10])
    >>> [p.correlation and round(p.correlation, 2) for p in front]
    [0.82, 0.27, None]
    """
    numbers = range(1, settings.num_clients + 1) if num_participants is None else num_participants
    front = []
    for number in numbers:
        run = _with_participants(settings, int(number))
        try:
            found = calibrate(budget, run, vary="correlation", tolerance=tolerance, **options)
            front.append(FrontPoint(int(number), found.value, found.report.worst))
        except PrivacyError:
            free = _account(replace(run, correlation=0.0), budget, options)
            front.append(FrontPoint(int(number), None, free.worst))
    return front
