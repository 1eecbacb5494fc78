"""Explorers: they climb by Newton's method to modes that the proposal does not know."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fald.fewround.climbers import DIP, plain, valley
from fald.fewround.proposal import cholesky
from fald.fewround.target import Derivatives, Target
from fald.fewround.weights import smooth

Array = NDArray[Any]

NUM_SCOUTS = 1024
EACH = 4  # explorers around the sites' consensus, and from the prior
_MOST = 24  # explorers under way at once
_PATH = 24
_ARRIVED = 0.05  # Newton's step in sds, at which an explorer stands on a hilltop
_SAME = 0.5  # sds between two explorers that have met the same mode
_APART = 2.0  # sds from a mode at which another may stand
_BESIDE = 1.0  # sds of the main mode between two places apart from which explorers are sent
_NEGLIGIBLE = 1e-3  # mass times squared distance in sds that a mode must have to matter


def scouts(centre: Array, covariance: Array, rng: np.random.Generator) -> Array:
    """(M, d) wide draws around the prior; the log posterior there tells where to send explorers."""
    d = len(centre)
    root = np.linalg.cholesky(covariance + 1e-12 * np.diag(np.diag(covariance)))
    scale = np.sqrt(5 / rng.chisquare(5, NUM_SCOUTS))
    return centre + scale[:, None] * (rng.standard_normal((NUM_SCOUTS, d)) @ root.T)


def promising(positions: Array, values: Array, rng: np.random.Generator, count: int) -> Array:
    """A few scouts: the highest, and others by tempered weights that leave about 24 of them in play."""
    usable = np.isfinite(values)
    if not usable.any():
        return positions[:0]
    positions, values = positions[usable], values[usable]
    power = 1.0
    while smooth(power * values).ess < min(24, len(values) / 2) and power > 1e-9:
        power *= 0.7
    weights = np.exp(power * (values - values.max()))
    best = int(np.argmax(values))
    weights[best] = 0.0
    others = min(count - 1, int(np.sum(weights > 0)))
    if others < 1:
        return positions[best][None]
    chosen = rng.choice(len(values), others, replace=False, p=weights / weights.sum())
    return positions[[best, *chosen]]


@dataclass
class Explorer:
    """One explorer: where it is, the best it has seen, and how long its next step is."""

    position: Array
    best: Derivatives | None = None
    damping: float = 1.0

    def on_a_hill(self, here: Derivatives, top: float) -> bool:
        """Whether it has climbed, or began high enough; from the plain every hill can be seen."""
        if self.best is None:
            return here.value > top - plain(len(self.position))
        return here.value >= self.best.value  # a step that led down says nothing


@dataclass
class Modes:
    """All modes known so far, the first being that of the proposal, and the explorers still under way.

    Where it is known that there is a ``single`` one, nobody is sent.
    """

    target: Target
    single: bool = False
    main: Derivatives | None = None
    others: list[Derivatives] = field(default_factory=list)
    active: list[Explorer] = field(default_factory=list)
    apart: list[Array] = field(default_factory=list)
    dismissed: int = 0

    def send(self, positions: Array) -> None:
        """Start explorers, as many as there is room for."""
        free = 0 if self.single else max(0, _MOST - len(self.active))
        self.active += [Explorer(np.asarray(p, float)) for p in positions[:free]]

    def send_apart(self, positions: Array) -> None:
        """Start explorers from those places that stand apart from every known mode, and from one another."""
        for position in positions:
            if min((_apart(mode, position) for mode in self.known), default=0.0) > _APART:
                before = [self.known[0]._replace(position=place) for place in self.apart]
                if min((_apart(here, position) for here in before), default=np.inf) > _BESIDE:
                    self.apart.append(position)
                    self.send(position[None])

    def lead(self, best: Derivatives | None) -> None:
        """Make the highest point known the main one; the one before it may stand on another hill."""
        before, self.main = self.main, best
        if self.single or before is None or best is None or before is best:
            return
        if _apart(before, best.position) < _SAME:
            return
        if before.concave() and before.newton()[1] < _ARRIVED:
            self._arrived(before)
        elif _apart(before, best.position) > _APART:
            self.send(before.position[None])

    @property
    def known(self) -> list[Derivatives]:
        """Modes and the best point near the proposal."""
        return ([self.main] if self.main else []) + self.others

    def paths(self, known: list[Derivatives]) -> Array:
        """(P, d) points on the way from every explorer to every known mode, finer near the mode."""
        steps = 1 - (1 - np.arange(1, _PATH) / _PATH) ** 2
        lines = [
            e.position + steps[:, None] * (mode.position - e.position) for e in self.active for mode in known
        ]
        return np.concatenate(lines) if lines else np.zeros((0, self.target.dim))

    def receive(self, found: list[Derivatives], along: Array, modes: list[Derivatives]) -> list[Derivatives]:
        """Move the explorers on: ``found`` at their positions, ``along`` the paths to ``modes``.

        Returns
        -------
        list
            What explorers found on the hill of the main mode, which may be higher than what is known of it.
        """
        same: list[Derivatives] = []
        along = along.reshape(len(found), len(modes), _PATH - 1)
        still: list[Explorer] = []
        for explorer, here, ways in zip(self.active, found, along):
            hills = [
                here.finite
                and explorer.on_a_hill(here, mode.value)
                and valley(np.concatenate([[here.value], way, [mode.value]])) <= DIP
                for way, mode in zip(ways, modes)
            ]
            if any(hills):
                self.dismissed += 1
                same += [here] if hills[0] else []
                continue
            step = self._climb(explorer, here)
            if step is not None:
                still.append(step)
        self.active = still
        return same

    def _climb(self, explorer: Explorer, here: Derivatives) -> Explorer | None:
        best = explorer.best
        if not here.finite:
            if best is None:
                self.dismissed += 1  # it began where there is no density
                return None
            damping = explorer.damping / 16
        elif best is not None and here.value < best.value:
            damping = explorer.damping / 16
        else:
            best, damping = here, explorer.damping * (1 if best is None else 2)
        step, decrement = best.newton()
        if decrement < _ARRIVED and best.concave():
            self._arrived(best)
            return None
        if damping < 1e-9:
            self.dismissed += 1
            return None
        # up to five sds at first, twice as far after every step that led up
        part = min(1.0, 5 * damping / max(decrement, 1e-300))
        return Explorer(best.position + part * step, best, damping)

    def _arrived(self, here: Derivatives) -> None:
        """A mode, if it is none of the known ones and has mass that matters."""
        if any(_apart(mode, here.position) < _SAME for mode in self.known):
            self.dismissed += 1
            return
        self.others.append(here)

    def relevant(self) -> list[Derivatives]:
        """Modes with mass enough to shift a mean or an sd, the main one first."""
        if self.main is None or not self.others:
            return self.known[:1]
        kept = [self.main]
        for mode in self.others:
            away = _apart(self.main, mode.position)
            if away < _SAME:
                continue  # met before the main mode was known
            share = np.exp(min(mode.log_mass() - self.main.log_mass(), 50.0))
            if share * max(away**2, 1.0) > _NEGLIGIBLE:
                kept.append(mode)
        return kept


def _apart(mode: Derivatives, position: Array) -> float:
    """Distance of another place from a mode, in the mode's own sds."""
    factor = cholesky(mode.covariance())
    return float(np.linalg.norm(np.linalg.solve(factor, position - mode.position)))
