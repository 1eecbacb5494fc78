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

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from fald.calculus.mode import descend_all, finite
from fald.calculus.sums import (
    Report,
    Site,
    hessians,
    hessians_each,
    log_likelihoods,
    many_gradients,
    many_hessians,
    many_log_likelihoods,
    many_mean_derivatives,
    prior_derivatives,
    prior_values,
)
from fald.core.errors import DataError, PolicyError
from fald.core.reveals import KINDS, check_kind
from fald.fewround.proposal import Proposal, draw
from fald.fewround.steps import leverage, local_steps

Array = NDArray[Any]
Request = Mapping[str, Array]
Answer = dict[str, Array]


class Answered(NamedTuple):
    """What a kind of request makes a site send.

    Attributes
    ----------
    asks
        Names of a request's arrays, or how they begin where they end in ``_``.
    says
        What the site reveals, in words.
    arrays
        Arrays of the answer by name: the kind of number, and how many axes stand in front of it.
    """

    asks: tuple[str, ...]
    says: str
    arrays: Mapping[str, tuple[str, int]]


ANSWERS: Mapping[str, Answered] = {
    "point": Answered(("points",), "its log likelihood at chosen parameters", {"point_values": ("value", 1)}),
    "draw": Answered(("proposal_",), "its log likelihood at drawn parameters", {"draw_values": ("value", 1)}),
    "state": Answered(
        ("states",),
        "its log likelihood and gradient at many parameters",
        {"state_values": ("value", 1), "state_gradients": ("gradient", 1)},
    ),
    "anchor": Answered(
        ("anchors",),
        "its log likelihood, gradient and curvature at chosen parameters",
        {
            "anchor_values": ("value", 1),
            "anchor_gradients": ("gradient", 1),
            "anchor_hessians": ("hessian", 1),
        },
    ),
    "smooth": Answered(
        ("smooth",),
        "its mean gradient and curvature over drawn parameters",
        {"smooth_gradient": ("gradient", 0), "smooth_hessian": ("hessian", 0)},
    ),
    "local": Answered(
        ("local_",),
        "its own best parameters and the curvature there",
        {
            "local_precision": ("precision", 0),
            "local_shift": ("shift", 0),
            "local_mode": ("mode", 0),
            "local_square": ("square", 0),
            "local_sites": ("count", 0),
        },
    ),
    "step": Answered(
        ("step_", "leverage_"),
        "where its local steps ended",
        {"step_leverage": ("leverage", 0), "step_positions": ("whitened", 2)},
    ),
}
ARRAYS = {name: each for answered in ANSWERS.values() for name, each in answered.arrays.items()}
REVEALS = {kind: answered.says for kind, answered in ANSWERS.items()}


def asked(request: Request) -> list[str]:
    """Kinds of requests in one; whatever no kind asks for is refused.

    Examples
    --------
    >>> asked({"points": np.zeros((1, 2)), "states": np.zeros((1, 2))})
    ['point', 'state']
    """
    kinds = set()
    for name in request:
        found = [
            k
            for k, a in ANSWERS.items()
            if any(name == p or (p[-1] == "_" and name.startswith(p)) for p in a.asks)
        ]
        if not found:
            raise PolicyError(f"no request has a part {name!r}")
        kinds.add(found[0])
    return [kind for kind in ANSWERS if kind in kinds]


# the shape of every part of a request, d the parameters, and the most that may stand for another letter
PARTS: Mapping[str, tuple[str, str]] = {
    "points": ("f", "Pd"),
    "states": ("f", "Md"),
    "anchors": ("f", "Ed"),
    "proposal_weights": ("f", "k"),
    "proposal_means": ("f", "kd"),
    "proposal_factors": ("f", "kdd"),
    "proposal_checksum": ("f", "D"),
    "proposal_count": ("i", ""),
    "proposal_seed": ("i", ""),
    "smooth": ("i", ""),
    "local_start": ("f", "d"),
    "leverage_anchor": ("f", "d"),
    "leverage_factor": ("f", "dd"),
    "step_states": ("f", "2Cd"),
    "step_mean": ("f", "d"),
    "step_factor": ("f", "dd"),
    "step_leverage": ("f", ""),
    "step_centre": ("f", "d"),
    "step_hessian": ("f", "dd"),
    "step_anchors": ("f", "Cd"),
    "step_gradient": ("f", "Cd"),
    "step_count": ("i", ""),
    "step_size": ("f", ""),
    "step_correlation": ("f", ""),
    "step_seed": ("i", ""),
}
MOST = {"P": 2**18, "M": 2**16, "E": 2**10, "C": 2**12, "k": 64}
MOST_COUNTS = {"proposal_count": 2**18, "smooth": 2**10, "step_count": 64}


def check_request(request: Request, dim: int) -> None:
    """Refuse a request that is malformed, incomplete, or more work than any of ours.

    Raises
    ------
    PolicyError
        Before any row is looked at; it names the part.

    Examples
    --------
    >>> check_request({"points": np.zeros((4, 3))}, dim=3)
    >>> check_request({"points": np.zeros((4, 2))}, dim=3)
    Traceback (most recent call last):
    fald.core.errors.PolicyError: the part 'points' of a request does not have the shape of one
    """
    asked(request)
    for name, array in request.items():
        kind, shape = PARTS.get(name, ("", ""))
        sizes = {"d": (dim, dim), "D": (2 * dim, 2 * dim), "2": (2, 2)}
        bounds = [sizes.get(letter, (1, MOST.get(letter, 0))) for letter in shape]
        fits = len(array.shape) == len(bounds) and all(a <= n <= b for n, (a, b) in zip(array.shape, bounds))
        if not kind or array.dtype.kind != kind or not fits:
            raise PolicyError(f"the part {name!r} of a request does not have the shape of one")
        if name in MOST_COUNTS and not 0 <= int(array) <= MOST_COUNTS[name]:
            raise PolicyError(f"the part {name!r} of a request asks for more than {MOST_COUNTS[name]:,}")
    for start in ("proposal_", "step_", "leverage_"):
        whole = {name for name in PARTS if name.startswith(start)}
        if 0 < len(whole & set(request)) < len(whole):
            raise PolicyError(f"parts {start}* of a request are missing")
    if "smooth" in request and "proposal_seed" not in request:
        raise PolicyError("a request smooths draws that it does not make")


def answer_kinds(requests: Iterable[str]) -> list[str]:
    """Kinds of numbers, of ``fald.core.reveals.KINDS``, that some kinds of requests make a site send."""
    return sorted({kind for request in requests for kind, _ in ANSWERS[request].arrays.values()})


def check_answer(answer: Mapping[str, Array], dim: int) -> list[str]:
    """Kinds of numbers in an answer.

    Raises
    ------
    PolicyError
        If an array is not declared, or has not the shape of its kind.
    """
    for name, array in answer.items():
        if name not in ARRAYS:
            raise PolicyError(f"the array {name!r} of its answer is not declared")
        kind, front = ARRAYS[name]
        check_kind(kind, array, dim, front)
    return sorted({ARRAYS[name][0] for name in answer})


def answer_shapes(request: Request, dim: int) -> dict[str, tuple[int, ...]]:
    """Shapes of the answer to a request, by name; no answer has others.

    Examples
    --------
    >>> answer_shapes({"states": np.zeros((5, 3))}, dim=3)
    {'state_values': (5,), 'state_gradients': (5, 3)}
    """
    front: dict[str, tuple[int, ...]] = {
        "point": np.shape(request.get("points", ()))[:1],
        "state": np.shape(request.get("states", ()))[:1],
        "anchor": np.shape(request.get("anchors", ()))[:1],
        "draw": (int(request.get("proposal_count", 0)),),
        "step": np.shape(request.get("step_states", ()))[:2],
    }
    left_out = set() if "leverage_anchor" in request else {"step_leverage"}
    left_out |= set() if "step_states" in request else {"step_positions"}
    left_out |= set() if int(request.get("smooth", 0)) else set(ANSWERS["smooth"].arrays)
    return {
        name: front.get(kind, ())[:axes] + (dim,) * KINDS[number].axes
        for kind in asked(request)
        for name, (number, axes) in ANSWERS[kind].arrays.items()
        if name not in left_out
    }


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
    return {name: values[0] for name, values in answers([site], request).items()}


def answers(sites: Sequence[Site], request: Request) -> Answer:
    """What each of some sites of one model answers, which is what it would answer alone; stacked (S, …)."""
    found: dict[str, Any] = {}
    if "points" in request:
        found["point_values"] = many_log_likelihoods(sites, request["points"])
    if "draws" in request:
        found["draw_values"] = many_log_likelihoods(sites, request["draws"])
    if "states" in request:
        names = ("state_values", "state_gradients")
        found |= dict(zip(names, many_gradients(sites, request["states"])))
    if "anchors" in request:
        names = ("anchor_values", "anchor_gradients", "anchor_hessians")
        found |= dict(zip(names, many_hessians(sites, request["anchors"])))
    if int(request.get("smooth", 0)):
        drawn = request["draws"][: int(request["smooth"])]
        names = ("smooth_gradient", "smooth_hessian")
        found |= dict(zip(names, many_mean_derivatives(sites, drawn)))
    if "local_start" in request:
        found |= _local_quadratics(sites, request["local_start"])
    if "leverage_anchor" in request:
        anchor, factor = request["leverage_anchor"][None], request["leverage_factor"]
        found["step_leverage"] = np.array([leverage(hessians(site, anchor)[2][0], factor) for site in sites])
    if "step_states" in request:
        found["step_positions"] = np.array([local_steps(site, request) for site in sites])
    return found


def _local_quadratics(sites: Sequence[Site], start: Array) -> dict[str, Array]:
    """Each site's log likelihood near the mode of (prior × its rows): −½θᵀAθ + bᵀθ, with A ≥ 0; stacked.

    A site where the search fails leaves zeros; ``local_sites`` counts the others.
    """
    mode = _own_modes(sites, start)
    _, grads, second = hessians_each(sites, mode)
    usable = np.asarray(np.isfinite(mode).all(axis=1) & np.isfinite(second).all(axis=(1, 2)))
    precision = _positive_part(-np.where(usable[:, None, None], second, 0.0))
    with np.errstate(invalid="ignore"):
        found = {
            "local_precision": precision,
            "local_shift": np.einsum("sij,sj->si", precision, mode) + grads,
            "local_mode": mode,
            "local_square": mode[:, :, None] * mode[:, None],
            "local_sites": np.ones(len(sites)),
        }
    for value in found.values():
        usable &= np.isfinite(value).reshape(len(sites), -1).all(axis=1)
    return {name: np.where(usable.reshape(-1, *[1] * (v.ndim - 1)), v, 0.0) for name, v in found.items()}


def _positive_part(matrices: Array) -> Array:
    """Matrices (…, d, d) without their negative eigenvalues, taken after scaling to a unit diagonal."""
    scale = np.sqrt(np.maximum(np.abs(np.diagonal(matrices, axis1=-2, axis2=-1)), 1e-300))
    outer = scale[..., :, None] * scale[..., None, :]
    values, vectors = np.linalg.eigh(matrices / outer)
    return (vectors * np.maximum(values, 0)[..., None, :]) @ np.swapaxes(vectors, -1, -2) * outer


def _own_modes(sites: Sequence[Site], start: Array) -> Array:
    """(S, d) mode of the prior times each site's likelihood, by damped Newton steps; NaN when not found."""
    model = sites[0].model
    # a little off the start, which may be a point of symmetry
    theta = np.asarray(start, float) + 1e-3 * np.cos(1.0 + np.arange(len(start)))

    def reports(which: Array, places: Array) -> Report:
        own = hessians_each([sites[i] for i in which], places)
        return Report(*(-(a + b) for a, b in zip(own, prior_derivatives(model, places))))

    def values(which: Array, places: Array) -> Array:
        prior = prior_values(model, places.reshape(-1, model.dim)).reshape(places.shape[:2])
        return -np.array([log_likelihoods(sites[i], own) for i, own in zip(which, places)]) - prior

    starts = np.repeat(theta[None], len(sites), axis=0)
    found = descend_all(reports, values, starts, tolerance=1e-4, max_exchanges=60)
    return np.where(finite(found.report)[:, None], found.position, np.nan)
