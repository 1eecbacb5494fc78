"""Corrected federated Langevin dynamics, ending in a certified round of importance sampling.

Newton's method gives mode and curvature; in coordinates where the posterior is nearly standard normal one
step size fits all problems, and the correction of ``fald.fewround.steps`` removes the drift of local steps.
Chains that leave the bounds of a sound ensemble are rolled back: fewer local steps first, then one anchor per
chain.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from fald.calculus.sums import prior_derivatives
from fald.fewround import proposal
from fald.fewround.exchange import Server
from fald.fewround.importance import Search, certified_rounds, first_round, line
from fald.fewround.outcome import Outcome, no_draws
from fald.fewround.proposal import Proposal
from fald.fewround.target import Derivatives
from fald.fewround.weights import moments
from fald.problem.model import Model

Array = NDArray[Any]

NUM_CHAINS = 1024
_STEP_SIZE, _LOCAL_STEPS = 0.4, 4  # of the BAOAB integrator, in whitened coordinates; steps per round
_SOUND = (0.25, 4.0)  # bounds on the eigenvalues of the whitened covariance of the chains
_ROUNDS = 3  # of local steps; the last two make the proposal


class StepFrame(NamedTuple):
    """Coordinates z = L⁻¹(θ − m) of the chains, and the sites' leverages in them, summed."""

    mean: Array
    factor: Array
    leverage: float

    def positions(self, z: Array) -> Array:
        """θ of whitened coordinates (M, d)."""
        return self.mean + z @ self.factor.T


def corrected_langevin(
    model: Model,
    *,
    max_rounds: int,
    correlation: float = 1.0,
    **common: Any,
) -> Server[Outcome]:
    """Server of corrected federated Langevin dynamics.

    Parameters
    ----------
    model
        The model.
    max_rounds, common
        As in ``fald.fewround.importance.importance_sampling``.
    correlation
        ρ of the noise between sites; 1 is the most accurate and gives no privacy.
    """
    search = Search.make(model, **common)
    start = yield from first_round(search)
    frame = yield from _newton(search, start, max_rounds - _ROUNDS - 3)
    best = search.best
    if best is None or frame is None:
        return no_draws(
            "corrected-langevin",
            "no mode of the posterior was found: it rises on and on, or is flat",
            "a feature that separates the outcomes or repeats others does this; give every parameter a "
            "proper prior, or allow more rounds",
            search.trace,
        )
    chains = _Chains(search, frame, best, correlation)
    kept = yield from chains.run(max_rounds - len(search.trace) - 2)
    if kept is None:
        return no_draws(
            "corrected-langevin",
            "local steps left the bounds of a sound ensemble, even one at a time with an anchor per chain",
            "use method='importance', or fald.sample with a smaller step",
            search.trace,
        )
    fitted = moments(kept, np.full(len(kept), 1 / len(kept)))
    current = proposal.gaussian(fitted.mean, fitted.covariance)
    outcome, _ = yield from certified_rounds(search, current, len(search.trace) + 1, max_rounds)
    return replace(outcome, method="corrected-langevin")


def _newton(search: Search, start: Proposal, most: int) -> Server[StepFrame | None]:
    """Newton's method to the mode, and the sites' leverages in the coordinates of the step before."""
    target, current = search.target, start
    for _ in range(max(most, 1)):
        anchors, tried = line(search, current)
        mean, factor = current.means[0], current.factors[0]
        sums = yield {
            "anchors": anchors, "points": tried, "leverage_anchor": mean, "leverage_factor": factor,
        }  # fmt: skip
        search.improve(target.derivatives(anchors, sums))
        best = search.best
        known = {} if best is None else {"mean": best.position, "sd": np.sqrt(np.diag(best.covariance()))}
        search.note(**known)
        if best is None:
            continue
        step, decrement = best.newton()
        if decrement < 0.05 and best.concave():
            return StepFrame(mean, factor, float(sums["step_leverage"]))
        current = proposal.gaussian(best.position + step / max(1.0, decrement / 5), best.covariance())
    return None


class _Chains:
    """Chains under way: their states in whitened coordinates, and how carefully they step."""

    def __init__(self, search: Search, frame: StepFrame, best: Derivatives, correlation: float):
        self.search, self.frame, self.best, self.correlation = search, frame, best, correlation
        self.count = _LOCAL_STEPS
        self.each = False  # one anchor per chain
        rng = search.generator(6)
        first = rng.standard_normal((NUM_CHAINS, search.target.dim)) @ proposal.cholesky(best.covariance()).T
        z = np.linalg.solve(frame.factor, (best.position + first - frame.mean).T).T
        self.states = np.stack([z, rng.standard_normal(z.shape)])

    def run(self, most: int) -> Server[Array | None]:
        """Take rounds; (C, d) positions of the last ones, or None when no care is enough."""
        kept: list[Array] = []
        used = 0
        while len(kept) < _ROUNDS and used < most:
            states, spent = yield from self._round(len(self.search.trace))
            used += spent
            if self._sound(states):
                self.states = states
                kept.append(self.frame.positions(states[0]))
            elif self.count > 1:
                self.count //= 2
            elif not self.each:
                self.each, kept = True, []
            else:
                return None
            here = self.frame.positions(self.states[0])
            for _ in range(spent):
                self.search.note(local_steps=self.count, mean=here.mean(axis=0), sd=here.std(axis=0))
        return np.concatenate(kept[-2:]) if kept else None

    def _sound(self, states: Array) -> bool:
        if not np.isfinite(states).all():
            return False
        laplace = np.linalg.solve(self.frame.factor, proposal.cholesky(self.best.covariance()))
        z = np.linalg.solve(laplace, states[0].T - states[0].mean(axis=0)[:, None])
        values = np.linalg.eigvalsh(np.cov(z).reshape(len(z), len(z)))
        return bool(values[0] > _SOUND[0] and values[-1] < _SOUND[1])

    def _round(self, number: int) -> Server[tuple[Array, int]]:
        """One round of local steps; two exchanges when every chain has its own anchor."""
        prior = prior_derivatives(self.search.target.model, self.best.position[None])
        hessian = self.best.hessian - prior[2][0]
        anchors, gradient, spent = self.best.position[None], (self.best.gradient - prior[1][0])[None], 1
        if self.each:
            anchors, spent = self.frame.positions(self.states[0]), 2
            sums = yield {"states": anchors}
            gradient = sums["state_gradients"]
        sums = yield {
            "step_states": self.states,
            "step_mean": self.frame.mean,
            "step_factor": self.frame.factor,
            "step_leverage": np.asarray(self.frame.leverage),
            "step_centre": self.best.position,
            "step_hessian": hessian,
            "step_anchors": anchors,
            "step_gradient": gradient,
            "step_count": np.asarray(self.count),
            "step_size": np.asarray(_STEP_SIZE),
            "step_correlation": np.asarray(self.correlation),
            "step_seed": np.asarray((self.search.seed * 1_000_003 + 500_000 + number) & (2**63 - 1)),
        }
        return sums["step_positions"], spent
