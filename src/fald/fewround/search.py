"""What the server of importance sampling remembers between rounds, and what its draws say."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray
from scipy.special import logsumexp

from fald.fewround import explorers, proposal
from fald.fewround.climbers import Climbers
from fald.fewround.proposal import Proposal
from fald.fewround.target import Derivatives, Target
from fald.fewround.weights import Moments, Precision, Smoothed, moments, precision, smooth
from fald.problem.model import Model

Array = NDArray[Any]

FEWEST_DRAWS, USUAL_DRAWS, MOST_DRAWS = 4096, 8192, 262144
MOST_HESSIAN = 200  # parameters up to which curvatures are asked for
MANY = 60  # parameters beyond which only a very good Gaussian has usable weights
REGRESSED = 16  # gradients per parameter that a Hessian is regressed from
_NEWTON = 3  # rounds of draws that Newton's method may take where there is one hill
_CLOSE = 2.0  # sds of Newton's step from which on the next proposal should fit
_POOLED = 4  # rounds whose draws are pooled


class DrawBatch(NamedTuple):
    """The draws of one round: proposal, asked count, positions (C, d) and log posterior (C,).

    ``densities`` are the log densities (C,) of these draws under proposals of recent rounds, by round.
    """

    number: int
    proposal: Proposal
    count: int
    positions: Array
    values: Array
    densities: dict[int, Array]

    def density(self, other: DrawBatch) -> Array:
        """Log density (C,) of these draws under the proposal of another round, which is computed once."""
        if other.number not in self.densities:
            self.densities[other.number] = proposal.log_density(other.proposal, other.count, self.positions)
        return self.densities[other.number]


class State(NamedTuple):
    """What the draws so far say.

    ``certified`` (C, k) are the newest draws with what is reported of them, ``log_mass`` is the logarithm of
    the posterior's integral.
    """

    newest: Smoothed
    pooled: Smoothed
    precision: Precision
    moments: Moments
    all_moments: Moments
    all_positions: Array
    all_logs: Array
    certified: Array = np.zeros((0, 0))
    log_mass: float = 0.0


@dataclass
class Search:
    """Everything the server remembers between rounds."""

    target: Target
    seed: int
    tolerance: float
    names: list[str]
    modes: explorers.Modes
    report: Any = None
    curvature: bool = True
    climbers: Climbers | None = None
    batches: list[DrawBatch] = field(default_factory=list)
    best: Derivatives | None = None
    highest: float = -np.inf
    smoothed: Derivatives | None = None
    wide: Proposal | None = None
    suspicious: bool = False  # whether something was seen far out
    stalled: bool = False
    fitting: bool = False  # whether the proposal is fitted to draws, and needs no averaged derivatives
    heavy_rounds: int = 0
    trace: list[dict[str, Any]] = field(default_factory=list)

    @staticmethod
    def make(model: Model, *, seed: int, tolerance: float, **others: Any) -> Search:
        """A search that knows nothing yet."""
        target, names = Target(model), list(model.parameter_names)
        modes = explorers.Modes(target, single=model.concave)
        return Search(target, seed, tolerance, names, modes, **others)

    @property
    def concave(self) -> bool:
        """Whether the log posterior is declared concave, so that nobody need look for further modes."""
        return self.target.model.concave

    @property
    def climbing(self) -> bool:
        """Whether Newton's method is still on its way up the only hill, which many draws would not hasten."""
        near = self.fitting or (self.best is not None and self.best.newton()[1] < _CLOSE)
        return self.concave and not near and len(self.batches) <= _NEWTON

    @property
    def hessians(self) -> bool:
        """Whether sites are asked for Hessians; otherwise gradients at many draws stand for them."""
        return self.curvature and self.target.dim <= MOST_HESSIAN

    @property
    def many(self) -> bool:
        """Whether there are so many parameters that only a very good Gaussian has usable weights."""
        return self.target.dim > MANY

    @property
    def num_smoothed(self) -> int:
        """Draws over which derivatives are averaged; their noise must stay small against one sd in all d."""
        return int(np.clip(16 * self.target.dim, 128, 512 if self.target.dim <= MANY else 256))

    @property
    def most_draws(self) -> int:
        """Draws of a round at most; few parameters do not need many."""
        return MOST_DRAWS if self.target.dim > 15 else MOST_DRAWS // 4

    @property
    def first_draws(self) -> int:
        """Draws of the first round: many times the parameters, and what a regression of gradients needs."""
        if self.concave and self.hessians:  # they look for nothing, and few show its shape
            return int(2 ** np.ceil(np.log2(np.clip(128 * self.target.dim, 1024, USUAL_DRAWS))))
        least = FEWEST_DRAWS if self.hessians else USUAL_DRAWS
        enough = min(128 * self.target.dim, USUAL_DRAWS) if self.hessians else 24 * self.target.dim
        return int(2 ** np.ceil(np.log2(max(least, enough))))

    def generator(self, stream: int) -> np.random.Generator:
        """A random stream of the server."""
        return np.random.Generator(np.random.Philox([self.seed & (2**64 - 1), stream]))

    def improve(self, found: list[Derivatives]) -> None:
        """Keep the highest point with derivatives as the one that Newton's method goes on from.

        One where the posterior curves upwards does not take the place of one where it does not: the neck of a
        funnel rises for ever, and holds ever less.
        """
        for here in found:
            if not here.finite:
                continue
            self.highest = max(self.highest, here.value)
            if self.best is None or (
                here.value > self.best.value and (here.concave() or not self.best.concave())
            ):
                self.best = here
        self.modes.lead(self.best)

    def note(self, **values: Any) -> None:
        """Add a line to the trace of rounds."""
        empty = {"draws": 0, "khat": np.nan, "ess": np.nan}
        newton = self.best.newton()[1] if self.best else np.nan
        self.trace.append({**empty, "newton": newton, "explorers": len(self.modes.active), **values})


def weigh(search: Search) -> State:
    """Weights of the newest draws by their own proposal, and of recent ones by the mixture of theirs."""
    last, recent = search.batches[-1], search.batches[-_POOLED:]
    ratios = last.values - last.density(last)
    newest = smooth(ratios)
    positions = np.concatenate([b.positions for b in recent])
    values = np.concatenate([b.values for b in recent])
    sizes = np.array([len(b.positions) for b in recent])
    densities = [np.concatenate([b.density(other) for b in recent]) for other in recent]
    mixed = proposal.log_sum(np.array(densities) + np.log(sizes / sizes.sum())[:, None], 0)
    logs = values - mixed
    pooled = smooth(logs)
    certified = last.positions
    if search.report is not None:
        certified = np.concatenate([certified, search.report(last.positions)], axis=1)
    return State(
        newest,
        pooled,
        precision(certified, newest.weights),
        moments(last.positions, newest.weights),
        moments(positions, pooled.weights),
        positions,
        logs,
        certified,
        float(logsumexp(ratios) - np.log(len(ratios))),
    )
