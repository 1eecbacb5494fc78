"""Privacy of a run while it runs: what it has spent, and when it must stop."""

from __future__ import annotations

from typing import Any

import numpy as np

from fald.core.errors import PrivacyError
from fald.langevin.engine import Assignment
from fald.langevin.fald import private
from fald.langevin.safety import as_used
from fald.privacy.accountant import Ledger
from fald.privacy.protection import Protection, bounded_sensitivity
from fald.privacy.settings import RunSettings
from fald.privacy.statements import Statement, statement
from fald.settings.fald import Setting

_MOST_READINGS = 40


def settings_of_run(
    problem: Assignment, num_rounds: int, sensitivity: float | None, lost_rounds: int
) -> RunSettings:
    """The privacy-relevant settings of a sampling problem.

    A bound of the model's own replaces clipping only where nothing is clipped. Rounds lost in a crash
    are charged at the largest step of a schedule, which is at least what they used.
    """
    own = as_used(private(problem.method))
    step_size: Any = own.pop("step_size")
    schedule: Any = problem.method.step_size
    if callable(schedule):
        steps = np.array([schedule(k) for k in range(num_rounds * own["local_steps"])], float)
        # first, so that any number of rounds after the lost ones is charged with them
        step_size = np.append(np.full(lost_rounds * own["local_steps"], steps.max()), steps)
    return RunSettings.of(
        Setting(step_size=1.0, participation=problem.participation, **own),
        sensitivity=sensitivity,
        step_size=step_size,
        sizes=problem.data.sizes.tolist(),
        num_rounds=num_rounds + lost_rounds,
        num_chains=problem.num_chains,
    )


class Guard:
    """Accounts for a run as it goes.

    ``lost_rounds`` were begun by an earlier part of this run, and their results lost in a crash: they were
    seen, so they count.

    Raises
    ------
    PrivacyError
        If the run gives no privacy, or not even one round fits the budget.
    """

    def __init__(self, protection: Protection, problem: Assignment, num_rounds: int, lost_rounds: int = 0):
        self.protection, self.problem, self.lost_rounds = protection, problem, lost_rounds
        stated = protection.sensitivity
        own = bounded_sensitivity(problem.model, problem.data) if stated is None else stated
        settings = settings_of_run(problem, num_rounds, own, lost_rounds)
        self.ledger = Ledger(settings, delta=protection.delta, method=protection.method, view=protection.view)
        self.num_rounds = num_rounds
        self.rounds_begun = 0
        self._readings: dict[int, float] = {}
        if protection.max_epsilon is not None:
            within = self.ledger.max_rounds(protection.max_epsilon) - lost_rounds
            if within < 1:
                first = self.ledger.worst(min(1 + lost_rounds, settings.num_rounds))
                raise PrivacyError(
                    f"the budget of ε = {protection.max_epsilon:g} does not allow one more round, "
                    f"after which ε would be {first:.3g}",
                    hint="use fewer chains, a smaller step size, a lower correlation or a larger budget; "
                    "'fald privacy calibrate' searches",
                )
            self.num_rounds = min(num_rounds, within)
            if problem.num_kept(self.num_rounds) < 1:
                raise PrivacyError(
                    f"the budget of ε = {protection.max_epsilon:g} would end the run after round "
                    f"{self.num_rounds}, before its first draw is kept",
                    hint="use a shorter warm-up, fewer chains, a smaller step size or a larger budget; "
                    "nothing was spent",
                )

    def epsilon(self, round_number: int) -> float:
        """Worst ε after a round, read off a coarse grid from above, so never too small."""
        places = np.unique(np.linspace(1, self.num_rounds, _MOST_READINGS).astype(int))
        place = int(places[np.searchsorted(places, min(max(round_number, 1), self.num_rounds))])
        if place not in self._readings:
            self._readings[place] = self.ledger.worst(place + self.lost_rounds)
        return self._readings[place]

    def statement(self) -> Statement:
        """The statement of the run so far: every round begun counts."""
        return statement(
            self.ledger.report(max(1, self.rounds_begun + self.lost_rounds)),
            simulation=self.protection.client_noise == "seeded",
            preparation_rounds=min(self.rounds_begun, self.problem.num_warmup),
            clients=self.problem.data.names,
            origin=self.problem.model.origin,
        )

    def exceeded(self, asked: int) -> PrivacyError:
        """The error of a run that the budget ended before its last round."""
        budget = self.protection.max_epsilon
        return PrivacyError(
            f"stopped after round {self.num_rounds} of {asked}: the next round would exceed the budget of "
            f"ε = {budget:g} at δ = {self.protection.delta:g}",
            hint="a longer run needs a larger budget or more noise",
        )
