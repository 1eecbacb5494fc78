"""What a site answers when the server asks about its rows: sums, all of them.

A request is a flat mapping of arrays, and so is the answer. Each part of a request is independent of the
others, and every entry of an answer is a sum over the site's rows, so that the server needs only the sum over
sites: a secure sum can carry them. Sites compute in float64 whatever the precision of a run.

=====================  ==================================================================================
part of a request      answer, with ℓ the site's log likelihood
=====================  ==================================================================================
``points`` (P, d)      ``point_values`` (P,): ℓ
``states`` (M, d)      ``state_values``, ``state_gradients``: ℓ and ∇ℓ
``anchors`` (E, d)     ``anchor_values``, ``anchor_gradients``, ``anchor_hessians``: ℓ, ∇ℓ and ∇²ℓ
``proposal_*``         ``draw_values`` (C,): ℓ at draws that the site makes from the proposal and the seed;
                       with ``smooth`` of them: mean gradient and, if small enough, mean Hessian
``local_start`` (d,)   ``local_*``: the quadratic of ℓ at the site's own posterior mode
``leverage_*``         ``step_leverage``: the site's share of the posterior's curvature
``step_*``             ``step_positions``: the site's weighted part of local Langevin steps
=====================  ==================================================================================
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fald.errors import DataError
from fald.fewround.evaluate import (
    Site,
    gradients,
    hessians,
    log_likelihoods,
    prior_derivatives,
    prior_gradients,
)
from fald.fewround.proposal import Proposal, draw
from fald.fewround.steps import leverage, local_steps
from fald.prepare import Report, newton_step

Array = NDArray[Any]
Request = Mapping[str, Array]
Answer = dict[str, Array]

REVEALS = {
    "point": "its log likelihood at chosen parameters",
    "draw": "its log likelihood at drawn parameters",
    "state": "its log likelihood and gradient at many parameters",
    "anchor": "its log likelihood, gradient and curvature at chosen parameters",
    "smooth": "its mean gradient and curvature over drawn parameters",
    "local": "its own best parameters and the curvature there",
    "step": "where its local steps ended",
}
_LADDER = 2.0 ** -np.arange(1, 13)


def proposal_of(request: Request) -> tuple[Proposal, int, int]:
    """The proposal in a request, how many draws, and their seed."""
    parts = (request["proposal_weights"], request["proposal_means"], request["proposal_factors"])
    return Proposal(*map(np.asarray, parts)), int(request["proposal_count"]), int(request["proposal_seed"])


def expand(request: Request) -> dict[str, Array]:
    """Make the draws of a request; the server does the same, and both must agree.

    Raises
    ------
    DataError
        If they are not those of the server, as happens when libraries of different versions draw differently.
    """
    full = dict(request)
    if "proposal_seed" in request:
        full["draws"] = draws = draw(*proposal_of(request))
        if not np.allclose(checksum(draws), request["proposal_checksum"], rtol=1e-7, atol=1e-9):
            raise DataError(
                "this site draws other parameters from the proposal than the server",
                hint="install the same versions of fald, NumPy and SciPy at the server and at every site",
            )
    return full


def checksum(draws: Array) -> Array:
    """A few numbers by which two sides see that they made the same draws."""
    return np.concatenate([draws[len(draws) // 3], draws[-1]])


def answer(site: Site, request: Request) -> Answer:
    """Answer one request; every entry is a sum over the site's rows.

    Parameters
    ----------
    site
        The site.
    request
        A request that went through ``expand``.
    """
    out: Answer = {}
    if "points" in request:
        out["point_values"] = log_likelihoods(site, request["points"])
    if "states" in request:
        out["state_values"], out["state_gradients"] = gradients(site, request["states"])
    if "anchors" in request:
        names = ("anchor_values", "anchor_gradients", "anchor_hessians")
        out |= dict(zip(names, hessians(site, request["anchors"])))
    if "draws" in request:
        out["draw_values"] = log_likelihoods(site, request["draws"])
        if int(request.get("smooth", 0)):
            out |= _smoothed(site, request["draws"][: int(request["smooth"])])
    if "local_start" in request:
        out |= _local_quadratic(site, request["local_start"])
    if "leverage_anchor" in request:
        own = hessians(site, request["leverage_anchor"][None])[2][0]
        out["step_leverage"] = np.asarray(leverage(own, request["leverage_factor"]))
    if "step_states" in request:
        out["step_positions"] = local_steps(site, request)
    return out


def _smoothed(site: Site, positions: Array) -> Answer:
    _, grads, second = hessians(site, positions)
    return {"smooth_gradient": grads.mean(axis=0), "smooth_hessian": second.mean(axis=0)}


def _local_quadratic(site: Site, start: Array) -> Answer:
    """The site's log likelihood near the mode of (prior × its rows): −½θᵀAθ + bᵀθ, with A ≥ 0.

    A site where the search fails leaves zeros; ``local_sites`` counts the others.
    """
    d = site.model.dim
    mode = _own_mode(site, start)
    names = ("local_precision", "local_shift", "local_mode", "local_square", "local_sites")
    zeros = (np.zeros((d, d)), np.zeros(d), np.zeros(d), np.zeros((d, d)), np.zeros(()))
    if mode is None:
        return dict(zip(names, zeros))
    _, grads, second = hessians(site, mode[None])
    precision = _positive_part(-second[0])
    values = (precision, precision @ mode + grads[0], mode, np.outer(mode, mode), np.ones(()))
    return dict(zip(names, values)) if all(np.isfinite(v).all() for v in values) else dict(zip(names, zeros))


def _positive_part(matrix: Array) -> Array:
    """The matrix without its negative eigenvalues, taken after scaling to a unit diagonal."""
    scale = np.sqrt(np.maximum(np.abs(np.diag(matrix)), 1e-300))
    values, vectors = np.linalg.eigh(matrix / np.outer(scale, scale))
    return (vectors * np.maximum(values, 0)) @ vectors.T * np.outer(scale, scale)


def _own_mode(site: Site, start: Array, most: int = 30) -> Array | None:
    """Mode of the prior times this site's likelihood, by damped Newton steps; None when not found."""
    # a little off the start, which may be a point of symmetry
    theta = np.asarray(start, float) + 1e-3 * np.cos(1.0 + np.arange(len(start)))

    def report(theta: Array) -> Report:
        own, prior = hessians(site, theta[None]), prior_derivatives(site.model, theta[None])
        value, grad, second = (-(a[0] + b[0]) for a, b in zip(own, prior))
        return Report(float(value), grad, second)

    here = report(theta)
    for _ in range(most):
        if not (
            np.isfinite(here.value) and np.isfinite(here.gradient).all() and np.isfinite(here.hessian).all()
        ):
            return None
        step, decrement = newton_step(here)
        if decrement < 1e-4:
            break
        trial = report(theta + step)
        if not trial.value < here.value:
            places = theta + _LADDER[:, None] * step
            energies = -log_likelihoods(site, places) - prior_gradients(site.model, places)[0]
            best = int(np.argmin(np.where(np.isfinite(energies), energies, np.inf)))
            if not energies[best] < here.value:
                break
            step = _LADDER[best] * step
            trial = report(theta + step)
        theta, here = theta + step, trial
    return theta
