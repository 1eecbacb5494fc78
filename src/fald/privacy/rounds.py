"""The privacy loss of one client, composed over the rounds of a run."""

from __future__ import annotations

from typing import Literal

import numpy as np

from fald.privacy.accountants import ACCOUNTANTS, Releases, Steps
from fald.privacy.compose import Loss, mixed, nothing, repeated, together
from fald.privacy.events import Presence, StepNoise

Method = str  # of ``fald.privacy.accountants.ACCOUNTANTS``
Sampling = Literal["without-replacement", "poisson"]


class ClientLedger:
    """The loss of one client's records, round by round, from the events of the run.

    ``times`` is (chains, rounds) how often it was drawn, ``None`` where that is left to chance. Where "pld"
    has no grid, ``steps`` are those of "rdp".
    """

    def __init__(
        self,
        noise: StepNoise,
        client: int,
        times: np.ndarray | None,
        *,
        delta: float,
        method: Method,
        sampling: Sampling,
    ):
        self._noise, self._client, self._times = noise, client, times
        self._ways: dict[int, Presence] = {}
        self._constant: dict[int, Loss] = {}
        z, counts = self._multipliers()
        self.idle = z.size == 0
        if self.idle:
            return
        rows, size = int(noise.batch_rows[client]), int(noise.sizes[client])
        releases = Releases(z, counts, rows, size, sampling, delta)
        self.steps: Steps = ACCOUNTANTS[method].steps(releases, self._total)
        self._constant = {}

    @property
    def constant(self) -> bool:
        """Whether all rounds are alike, so that many are composed at the cost of one."""
        return self._noise.step.size == 1

    def _presence(self, times: int) -> Presence:
        if times not in self._ways:
            self._ways[times] = self._noise.presence(self._client, times)
        return self._ways[times]

    def _multipliers(self) -> tuple[np.ndarray, np.ndarray]:
        """Multipliers that occur in the run, with the number of times each is expected to."""
        n = self._noise
        factors = np.resize(n.step, n.local_steps if n.step.size == 1 else n.step.size)
        steps = factors.reshape(-1, n.local_steps)
        # (rounds or 1,) how often each round's pattern of steps happens, for each way of taking part
        if self._times is None:
            repeats = n.num_chains * (n.num_rounds if len(steps) == 1 else 1)
            ways = n.presences[self._client]
            usage = [(way, np.full(len(steps), repeats * way.probability)) for way in ways]
        else:
            usage = []
            for times in np.unique(self._times[self._times > 0]):
                count = np.sum(self._times == times, axis=0).astype(float)
                count = count.sum(keepdims=True) if len(steps) == 1 else count
                usage.append((self._presence(int(times)), count))
        values, counts = [np.zeros(0)], [np.zeros(0)]
        for way, count in usage:
            scale = np.append(np.full(n.local_steps - 1, way.own), way.last)
            values.append((steps * scale)[count > 0].ravel())
            counts.append(np.repeat(count[count > 0], n.local_steps))
        z, where = np.unique(np.concatenate(values), return_inverse=True)
        return z, np.bincount(where, np.concatenate(counts), z.size)

    def _taking_part(self, way: Presence, factors: np.ndarray) -> Loss:
        """Loss of the K local steps of a round in which the client takes part."""
        last = self.steps.step(float(way.last * factors[-1]))
        if factors.size == 1:
            return last
        inner, how_often = np.unique(way.own * factors[:-1], return_counts=True)
        losses = [repeated(self.steps.step(float(z)), int(k)) for z, k in zip(inner, how_often)]
        return together([*losses, last])

    def _round(self, factors: np.ndarray, times: int | None) -> Loss:
        if times is not None:
            return self._taking_part(self._presence(times), factors)
        ways = self._noise.presences[self._client]
        return mixed([self._taking_part(way, factors) for way in ways], [way.probability for way in ways])

    def _total(self, steps: Steps) -> Loss:
        self.steps, self._constant = steps, {}
        return self.advance(None, 0, self._noise.num_rounds)

    def advance(self, loss: Loss | None, start: int, stop: int) -> Loss:
        """Add rounds ``start`` to ``stop`` − 1 of all chains to a loss."""
        n = self._noise
        losses = [] if loss is None else [loss]
        drawn = None if self._times is None else self._times[:, start:stop]
        if self.constant:
            factors = np.repeat(n.step, n.local_steps)
            kinds = {0: n.num_chains * (stop - start)} if drawn is None else _counted(drawn)
            for times, count in kinds.items():
                if times not in self._constant:
                    self._constant[times] = self._round(factors, None if drawn is None else times)
                losses.append(repeated(self._constant[times], count))
        else:
            for r in range(start, stop):
                factors = n.step[r * n.local_steps : (r + 1) * n.local_steps]
                kinds = {0: n.num_chains} if drawn is None else _counted(drawn[:, r - start])
                for times, count in kinds.items():
                    losses.append(repeated(self._round(factors, None if drawn is None else times), count))
                if len(losses) >= 16:
                    losses = [together(losses)]
        if not losses:
            return nothing(self.steps.step(float(self._noise.step[0] * self._presence(1).own)))
        return together(losses)


def _counted(times: np.ndarray) -> dict[int, int]:
    values, counts = np.unique(times[times > 0], return_counts=True)
    return {int(v): int(k) for v, k in zip(values, counts)}
