"""The next proposal, from all that the draws so far say."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from fald.fewround import certify, proposal, rays
from fald.fewround.mixture import fit_mixture
from fald.fewround.proposal import Proposal
from fald.fewround.search import FEWEST_DRAWS, USUAL_DRAWS, DrawBatch, Search, State
from fald.fewround.target import Derivatives
from fald.fewround.weights import Precision, moments, smooth

Array = NDArray[Any]

_SPARE = 1.3  # times the draws that this round's errors ask for, because errors are estimates too
_STEP = 512  # numbers of draws are multiples of it
_LOST = 1000.0  # nats below the highest point known, at which draws say nothing of where the posterior is
_AWAY = 1.0  # sds from a proposal to where Newton's method leads, beyond which it is followed on one hill
_WIDER = 10.0  # times a variance of a tempered concave posterior, which is itself wider than the posterior's
_NEAR = 10.0  # posterior sds from the mode at which the smoothed posterior takes over from Newton's method


def next_count(search: Search, state: State, count: int, following: Proposal) -> int:
    """How many draws of the next proposal there should be: what the tolerance asks for, by known weights.

    Where weights say little yet, the usual number, or many where the mode is near and yet draws miss. Where
    further modes may hide, draws look for them too, and their number does not follow a better proposal.
    """
    usual = max(count, USUAL_DRAWS)
    if state.pooled.ess < 10 * search.target.dim or state.pooled.khat > 0.9:
        if search.concave:
            return search.first_draws if search.climbing else usual
        close = search.best is not None and search.best.newton()[1] < 1
        return min(16 * usual, search.most_draws) if close and not search.many else usual
    if not state.newest.khat < certify.KHAT_LIMIT:
        return usual
    wanted = count * certify.needed_factor(state.precision, search.tolerance)
    if search.concave:
        last = search.batches[-1]
        current = _foreseen(state, last, last.density(last), search.tolerance)
        density = proposal.log_density(rays.widened(following, search.wide), USUAL_DRAWS, last.positions)
        # mirrored draws of several cores need not be apart, which is seen of the current ones
        wanted = max(wanted / current, 1.0) * _foreseen(state, last, density, search.tolerance)
        # a Gaussian fitted to few draws is off in as many numbers as it has
        wanted *= 1 + search.target.dim * (search.target.dim + 3) / (2 * state.pooled.ess)
    return int(np.clip(_STEP * np.ceil(_SPARE * wanted / _STEP), FEWEST_DRAWS, search.most_draws))


def _foreseen(state: State, last: DrawBatch, density: Array, tolerance: float) -> float:
    """How many draws a proposal needs, from its log density (C,) at the newest draws and their weights.

    A draw x of it has the weight r = posterior/proposal. E_π[r z²] is the variance that z has there, and a
    pair of mirrored draws, which are alike in z² − 1, makes one observation.
    """
    with np.errstate(over="ignore"):
        ratios = state.newest.weights * np.exp(last.values - density - state.log_mass)
    mean = state.newest.weights @ state.certified
    squares = (state.certified - mean) ** 2
    squares /= np.maximum(state.newest.weights @ squares, np.finfo(float).tiny)
    of_mean, of_sd = ratios @ squares, ratios @ (squares - 1) ** 2 / 2
    one = Precision(np.sqrt(of_mean), np.sqrt(of_sd), state.precision.khat)
    return certify.needed_factor(one, tolerance)


def adapt(search: Search, state: State, current: Proposal) -> Proposal:
    """The next proposal."""
    d = search.target.dim
    modes = search.modes.relevant()
    search.fitting = state.pooled.ess >= 10 * d and state.pooled.khat < 0.9
    if search.fitting:
        fitted = fit_mixture(state.all_positions, for_moments(state), search.seed + len(search.batches))
        if len(fitted.weights) > 1:
            search.modes.send_apart(fitted.means)
        return fitted
    best = search.best
    if best is None:
        widened = [2.0 * factor for factor in current.factors]
        return Proposal(current.weights, current.means, np.array(widened))
    if len(modes) > 1:
        logs = np.array([m.log_mass() for m in modes])
        weights = np.maximum(np.exp(logs - logs.max()), 0.05)
        factors = np.array([proposal.cholesky(m.covariance()) for m in modes])
        return Proposal(weights / weights.sum(), np.array([m.position for m in modes]), factors)
    if (best.newton()[1] > _NEAR or not best.concave()) and not search.stalled:
        step, decrement = best.newton()
        return proposal.gaussian(best.position + step / max(1.0, decrement), best.covariance())
    if search.concave and best.concave() and (certify.arrived(best) or not search.stalled):
        there = best.position + best.newton()[0]
        if np.linalg.norm(np.linalg.solve(current.factors[0], there - current.means[0])) > _AWAY:
            return proposal.gaussian(there, best.covariance())  # on the only hill Newton's method is surer
    return _tempered(search, state, current, best)


def for_moments(state: State) -> Array:
    """The draws' weights to fit a mixture to, larger in the tails of an sd that rests on few of them."""
    khats = state.precision.khat[: state.all_positions.shape[1]]
    heavy = int(np.argmax(khats))
    z = (state.all_positions[:, heavy] - state.all_moments.mean[heavy]) / state.all_moments.sd[heavy]
    weights = state.pooled.weights * (1 + (z**2 if khats[heavy] >= certify.KHAT_LIMIT else 0))
    return weights / weights.sum()


def _tempered(search: Search, state: State, current: Proposal, best: Derivatives) -> Proposal:
    """A Newton step on the posterior smoothed by the proposal, mixed with tempered moments."""
    power, weights = 1.0, state.pooled
    while weights.ess < 5 * search.target.dim and power > 1e-6:
        power *= 0.8
        weights = smooth(power * state.all_logs)
    if weights.ess < 5 * search.target.dim:  # hardly a draw is near: go on from the highest
        if not np.max(search.batches[-1].values) > best.value - _LOST:
            return proposal.gaussian(best.position, best.covariance())
        chosen = np.argsort(-search.batches[-1].values, kind="stable")[: max(20 * search.target.dim, 64)]
        own = moments(search.batches[-1].positions[chosen], np.full(len(chosen), 1 / len(chosen)))
        return proposal.gaussian(own.mean, 2 * own.covariance)
    tempered = moments(state.all_positions, weights.weights)
    if len(current.weights) > 1 or search.smoothed is None:
        return proposal.gaussian(tempered.mean, tempered.covariance)
    here = search.smoothed
    if search.concave and _wider(here.covariance(), tempered.covariance):  # derivatives do not see a kink
        return proposal.gaussian(tempered.mean, tempered.covariance)
    if not here.finite or not here.concave():
        return proposal.gaussian(tempered.mean, (tempered.covariance + best.covariance()) / 2)
    if search.many:  # half of the old precision keeps the steps of many parameters from swinging
        old = np.linalg.inv(current.factors[0] @ current.factors[0].T)
        here = here._replace(hessian=(here.hessian - old) / 2)
    step, decrement = here.newton()
    climb, left = best.newton()
    away = np.linalg.norm(np.linalg.solve(current.factors[0], best.position - current.means[0]))
    if min(away, decrement) > 2.5 and 0.3 < left < 0.6 * decrement:
        # Newton's method is ahead: start anew from where it is
        return proposal.gaussian(best.position + climb / max(1.0, left), best.covariance())
    mean = here.position + step / max(1.0, decrement / 4)
    if search.many:  # tempered moments of few draws would spoil more directions than they mend
        return proposal.gaussian(mean, here.covariance())
    # the less the weights had to be tempered, the more their moments count
    mixed = power * tempered.mean + (1 - power) * mean
    return proposal.gaussian(mixed, power * tempered.covariance + (1 - power) * here.covariance())


def _wider(one: Array, other: Array) -> bool:
    """Whether a covariance is far wider than another in some direction."""
    inverse = np.linalg.inv(proposal.cholesky(other))
    return bool(np.linalg.eigvalsh(inverse @ one @ inverse.T)[-1] > _WIDER)
