"""From a budget (ε, δ) to the largest setting that keeps it."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from typing import Any, Literal, NamedTuple, get_args

import numpy as np

from fald.core.errors import ConfigError, PrivacyError
from fald.privacy.accountant import Ledger, PrivacyReport, account
from fald.privacy.settings import RunSettings

Vary = Literal["correlation", "step_size", "num_rounds", "num_participants"]

_MOST_ROUNDS = 10_000_000


@dataclass(frozen=True)
class Budget:
    """What a record may lose: ε at δ."""

    epsilon: float
    delta: float

    def __post_init__(self) -> None:
        if not 0 < self.epsilon < math.inf:
            raise ConfigError(f"epsilon must be > 0 and finite; got {self.epsilon}")
        if not 0 < self.delta < 1:
            raise ConfigError(f"delta must be between 0 and 1, both excluded; got {self.delta}")


@dataclass(frozen=True, eq=False)
class Calibration:
    """The largest ``value`` of what was varied within a budget: of a schedule, its largest step.

    ``report`` is the accounting of the run with that value: proof that it keeps the budget. ``at_limit`` is
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
        Within the budget. If no value is, ``PrivacyError`` says what the least ε is.

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
    kind: Any = vary.replace("-", "_")
    if kind not in get_args(Vary):
        raise ConfigError(f"vary must be one of {', '.join(get_args(Vary))}; got {vary!r}")
    search = _Search(budget, settings, options, tolerance, most)
    value, report, at_limit = getattr(search, kind)()
    if not report.worst <= budget.epsilon:
        raise PrivacyError(
            f"calibration of {kind} ended at ε = {report.worst:.6g}, above the budget {budget.epsilon:g}",
            hint="give a larger tolerance",
        )
    return Calibration(kind, value, report.settings, report, budget, bool(at_limit))


class _Search(NamedTuple):
    """One search for each ``Vary``: the value, its accounting, and whether the search ended at its limit."""

    budget: Budget
    settings: RunSettings
    options: dict[str, Any]
    tolerance: float
    most: float | None

    def account(self, settings: RunSettings) -> PrivacyReport:
        return account(settings, delta=self.budget.delta, **self.options)

    def infeasible(self, what: str, least: float, hint: str) -> PrivacyError:
        budget = f"ε = {self.budget.epsilon:g} at δ = {self.budget.delta:g}"
        return PrivacyError(f"no {what} keeps the budget {budget}: the least ε is {least:.4g}", hint=hint)

    def largest(self, keeps: Callable[[float], bool], low: float, high: float) -> float:
        """Largest value known to keep, with ``low`` keeping and ``high`` not, in relative terms."""
        while high - low > self.tolerance * low:
            middle = math.sqrt(low * high)
            low, high = (middle, high) if keeps(middle) else (low, middle)
        return low

    def correlation(self) -> tuple[float, PrivacyReport, bool]:
        def at(rho: float) -> PrivacyReport:
            return self.account(replace(self.settings, correlation=rho))

        free = at(0.0).worst
        if free > self.budget.epsilon:
            hint = "take fewer rounds, a smaller step size or a smaller clip-norm"
            raise self.infeasible("correlation", free, hint)

        def rho_of(scale: float) -> float:
            return math.sqrt(max(0.0, 1.0 - 1.0 / scale**2))

        def keeps(scale: float) -> bool:
            return at(rho_of(scale)).worst <= self.budget.epsilon

        # in 1/√(1−ρ²), by which the multipliers shrink
        high = 2.0
        while high <= 1e6 and keeps(high):
            high *= 4.0
        rho = rho_of(self.largest(keeps, 1.0, high))
        rho = rho if self.most is None else min(rho, self.most)
        return rho, at(rho), rho == self.most

    def step_size(self) -> tuple[float, PrivacyReport, bool]:
        shape = np.asarray(self.settings.step_size, float)
        first, most = float(np.max(shape)), math.inf if self.most is None else self.most

        def at(scale: float) -> PrivacyReport:
            eta = shape * scale**2
            return self.account(replace(self.settings, step_size=eta if eta.ndim else float(eta)))

        def keeps(scale: float) -> bool:
            return at(scale).worst <= self.budget.epsilon

        low = high = 1.0
        if keeps(1.0):
            while keeps(high):
                low, high = high, high * 4.0
                if first * low**2 >= most:
                    break
        else:
            while not keeps(low):
                low, high = low / 4.0, low
                if low < 1e-12:
                    raise self.infeasible("step-size", at(low).worst, "raise delta")
        scale = self.largest(keeps, low, high)
        limited = first * scale**2 > most
        report = at(math.sqrt(most / first) * (1.0 - 1e-12) if limited else scale)
        return float(np.max(report.settings.step_size)), report, limited

    def num_rounds(self) -> tuple[float, PrivacyReport, bool]:
        limit = int(self.most) if self.most is not None else _MOST_ROUNDS
        scheduled = not isinstance(self.settings.step_size, float)
        if scheduled:
            limit = min(limit, self.settings.num_rounds)

        def at(rounds: int) -> PrivacyReport:
            return self.account(self.settings.first_rounds(rounds))

        first, epsilon = at(1).worst, self.budget.epsilon
        if first > epsilon:
            raise self.infeasible("number of rounds", first, "one round already spends more than that")
        horizon = limit if scheduled else min(limit, 1024)
        while True:
            ledger = Ledger(self.settings.first_rounds(horizon), delta=self.budget.delta, **self.options)
            rounds = ledger.max_rounds(epsilon)
            if rounds < horizon or horizon == limit:
                break
            horizon = min(limit, 8 * horizon)
        # a run of exactly that length has its own grid, so its ε may differ in the last digits
        rounds = max(1, rounds)
        report = at(rounds)
        while report.worst > epsilon and rounds > 1:
            rounds -= max(1, rounds // 1000)
            report = at(rounds)
        while rounds < limit and (longer := at(rounds + 1)).worst <= epsilon:
            rounds, report = rounds + 1, longer
        return rounds, report, rounds == limit

    def num_participants(self) -> tuple[float, PrivacyReport, bool]:
        limit = self.settings.num_clients if self.most is None else int(self.most)
        least = math.inf
        for number in range(limit, 0, -1):
            report = self.account(_with_participants(self.settings, number))
            if report.worst <= self.budget.epsilon:
                return number, report, number == limit
            least = min(least, report.worst)
        hint = "take fewer rounds, a smaller step size or a smaller correlation"
        raise self.infeasible("number of participants", least, hint)


def _with_participants(settings: RunSettings, number: int) -> RunSettings:
    if settings.scheme == "full":
        raise ConfigError(
            "the number of participants can only be varied where clients are drawn",
            hint="set a participation with or without replacement",
        )
    return replace(settings, participation=replace(settings.participation, num_participants=number))


@dataclass(frozen=True)
class Affordable:
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
) -> list[Affordable]:
    """Largest correlation for each number of participants: "largest ρ and S" is a front, not a point.

    Parameters
    ----------
    budget, settings, tolerance, **options
        As for ``calibrate``; the settings must draw clients.
    num_participants
        The S to try, in this order; all from 1 to N where not given.

    Returns
    -------
    list[Affordable]
        With ε at the point, or at ρ = 0 where infeasible. With the paper's noise ρ_max falls as S grows. With
        realised noise the noise of a client grows with S, which outweighs its taking part more often, so
        ρ_max rises.

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
            front.append(Affordable(int(number), found.value, found.report.worst))
        except PrivacyError:
            free = account(replace(run, correlation=0.0), delta=budget.delta, **options)
            front.append(Affordable(int(number), None, free.worst))
    return front
