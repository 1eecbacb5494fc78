"""What the run loop asks of an engine.

The loop owns rounds, checkpoints, progress and draws; an engine only moves the chains forward.
"""

from __future__ import annotations

from bisect import bisect_right
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

import jax
import numpy as np

from fald.langevin.method import Method
from fald.problem.data import FederatedData
from fald.problem.model import Model
from fald.runtime.records import Records, RunState
from fald.settings.participation import Participation


@dataclass(frozen=True)
class Assignment:
    """One sampling problem: who samples what, from which rows, with which key.

    ``secret_key`` is the root of participation, clients' own noise and batches in a private run; None:
    ``rng_key``. ``kept`` are the rounds whose draws are kept, instead of warm-up and thinning.
    """

    rng_key: jax.Array
    model: Model
    data: FederatedData
    method: Method
    participation: Participation
    num_chains: int
    num_warmup: int
    thinning: int
    secret_key: jax.Array | None = None
    kept: tuple[int, ...] | None = None

    @property
    def roots(self) -> tuple[jax.Array, jax.Array]:
        """Roots of the keys that anybody may know, and of those that nobody may predict in a private run."""
        return self.rng_key, self.rng_key if self.secret_key is None else self.secret_key

    def num_kept(self, num_rounds: int) -> int:
        """Draws kept by the end of round ``num_rounds``."""
        if self.kept is not None:
            return bisect_right(self.kept, num_rounds)
        return max(0, num_rounds - self.num_warmup) // self.thinning

    def kept_rounds(self, first: int, last: int) -> np.ndarray:
        """Rounds of the draws from number ``first``, counted from 0, up to and without ``last``."""
        if self.kept is not None:
            return np.array(self.kept[first:last], int)
        return self.num_warmup + self.thinning * np.arange(first + 1, last + 1)

    def round_of(self, draw: int) -> int:
        """The round of a draw; one that no run reaches where there are fewer."""
        return int(next(iter(self.kept_rounds(draw, draw + 1)), 2**31))


class Failure(NamedTuple):
    """Where a chain left the finite numbers."""

    round: int
    chain: int
    client: int | None
    parameter: int


class Engine(Protocol):
    """Moves chains forward."""

    def init(self, problem: Assignment, positions: jax.Array) -> RunState:
        """State of chains that start at ``positions`` (chains, dim)."""
        ...

    def gather(self, method: Method, model: Model, data: FederatedData) -> dict[str, Any]:
        """What the clients send before the first round: arrays by name, clients in front."""
        ...

    def most_rounds(self, problem: Assignment, state: RunState) -> int:
        """How many rounds one ``advance`` may cover, given the memory for draws."""
        ...

    def advance(
        self, problem: Assignment, state: RunState, num_rounds: int
    ) -> tuple[RunState, Records, float]:
        """Run rounds; return the new state, the kept draws and the latest mean energy."""
        ...

    def before_save(self, state: RunState) -> None:
        """Get ready to go on from a state that is about to be saved."""
        ...

    def costs(self, problem: Assignment, state: RunState) -> dict[str, np.ndarray]:
        """What the rounds so far have cost: ``rounds`` (chains,), and (chains, clients) for each client."""
        ...

    def locate(self, problem: Assignment, state: RunState, num_rounds: int) -> Failure:
        """Replay rounds that ended non-finite and find the first offender."""
        ...
