r"""Constants of the convergence bounds, measured on a model and its clients.

L and m are the largest and smallest curvature of any client energy f^c = ℓ^c/p_c − log π0 at any position,
γ = max_c ‖∇f^c(θ*)‖, D = ‖θ_0 − θ*‖/√d, and σ the gradient noise of a batch of b rows without replacement,

    d σ² = max_c E‖∇f̃^c − ∇f^c‖² = max_c (n²/b)(1 − b/n_c) S_c,    S_c = Σ_i ‖∇l_ci − mean‖²/(n_c − 1).

Each client computes its own numbers from its own rows; the server takes the largest and the smallest.
Every number says where it comes from:

- ``"exact"``: the number itself, for every position;
- ``"bound"``: holds for every position by an inequality of the model family. With X the features and a
  column of ones, logistic: 0 ≼ ∇²ℓ^c ≼ ¼XᵀX, softmax: 0 ≼ ∇²ℓ^c ≼ ½(I − 11ᵀ/C)⊗XᵀX, Poisson: 0 ≼ ∇²ℓ^c;
- ``"estimated"``: the worst of the positions looked at, around the mode and on the way to it. What
  follows from it is not a guarantee.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np
from numpy.typing import ArrayLike

from fald.calculus.mode import Preparation, prepare
from fald.calculus.sums import Part, client_report, make_site, prior_report
from fald.core.errors import DataError
from fald.core.types import PyTree
from fald.problem.data import FederatedData
from fald.problem.model import Model
from fald.settings.fald import checked
from fald.theory.bounds import Constants

Provenance = Literal["exact", "bound", "estimated"]

_RANK = ("exact", "bound", "estimated")
_SAME = 1e-8  # relative change of a curvature that counts as rounding
_NUM_DRAWS = 8


@dataclass(frozen=True)
class Measured(Constants):
    """Constants with their origin; fit for every function of ``fald.theory``.

    ``provenance`` says of a constant by name whether it is ``"exact"``, ``"bound"`` or ``"estimated"``.
    Curvatures at the mode are exact, but of that one position. ``clients`` has what each client reported, by
    name.
    """

    provenance: Mapping[str, Provenance] = field(default_factory=dict)
    smoothness_at_mode: float = math.nan
    strong_convexity_at_mode: float = math.nan
    clients: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)

    @property
    def estimated(self) -> list[str]:
        """Names of the constants that were only estimated: with any, no bound is a guarantee."""
        return [name for name, origin in self.provenance.items() if origin == "estimated"]


@partial(jax.jit, static_argnums=0)
def _row_squares(model: Model, theta: jax.Array, part: Part):
    rows, mask = part
    gradients = jax.vmap(jax.grad(model.flat_loglikelihood), (None, 0))(theta, rows)
    return jnp.sum(jnp.where(mask[:, None], gradients, 0) ** 2)


def client_constants(
    model: Model,
    rows: PyTree,
    mode: ArrayLike,
    probes: ArrayLike,
    *,
    num_rows: int,
    batch_size: int | None = None,
) -> dict[str, Any]:
    """What one client reports: curvatures, gradient norm and gradient noise of its own energy.

    ``mode`` is (d,) θ*, ``probes`` are (M, d) other positions to look at, two or more; ``num_rows`` is n of
    all clients, ``batch_size`` rows per stochastic gradient, ``None`` for all. Plain numbers, and the
    provenance of each: eight numbers leave the client.
    """
    mode, probes = np.asarray(mode, float), np.asarray(probes, float)
    site = make_site(model, rows)
    count, scale, d = site.num_rows, num_rows / site.num_rows, len(mode)
    reports, priors = [], []

    def look(positions: Sequence[np.ndarray]) -> None:
        reports.extend(client_report(site, position) for position in positions)
        priors.extend(prior_report(model, position) for position in positions)

    def row_spread(position: np.ndarray, gradient: np.ndarray) -> float:
        """S_c at a position, given the summed gradient there."""
        with jax.enable_x64(True):
            place = jnp.asarray(position)
            squares = sum(float(_row_squares(model, place, part)) for part in site.parts)
        return max(0.0, squares - float(gradient @ gradient) / count) / max(count - 1, 1)

    look([mode, *probes[:2]])
    constant_prior = _same([p.hessian for p in priors])
    family = model.bounds if constant_prior else None
    # a likelihood without any curvature where one looks may still have some elsewhere
    curved = any(r.hessian.any() for r in reports)
    quadratic = family is None and constant_prior and curved and _same([r.hessian for r in reports])
    if not quadratic and (family is None or math.isinf(family.curvature)):
        look(list(probes[2:]))
    spectra = [np.linalg.eigvalsh(scale * r.hessian + p.hessian) for r, p in zip(reports, priors)]
    high, low = max(float(s[-1]) for s in spectra), min(float(s[0]) for s in spectra)
    origins: dict[str, Provenance] = dict.fromkeys(("smoothness", "strong_convexity"), "estimated")
    at_zero = None
    if quadratic:
        origins = dict.fromkeys(origins, "exact")
    elif family is not None:
        low, origins["strong_convexity"] = float(np.linalg.eigvalsh(priors[0].hessian)[0]), "bound"
        if math.isfinite(family.curvature):
            at_zero = client_report(site, np.zeros(d)).hessian
            largest = family.curvature * scale * at_zero + priors[0].hessian
            high, origins["smoothness"] = float(np.linalg.eigvalsh(largest)[-1]), "bound"
    noise, origins["gradient_noise"] = 0.0, "exact"
    if batch_size is not None and batch_size < count:
        spreads = [row_spread(position, r.gradient) for position, r in zip([mode, *probes], reports)]
        spread = max(spreads)
        if family is not None and at_zero is not None:
            spread, origins["gradient_noise"] = family.rows * float(np.trace(at_zero)) / (count - 1), "bound"
        elif not _same([np.array(s) for s in spreads]):
            origins["gradient_noise"] = "estimated"
        noise = num_rows * math.sqrt(spread * (1 - batch_size / count) / (batch_size * d))
    return {
        "rows": count,
        "smoothness": high,
        "strong_convexity": low,
        "smoothness_at_mode": float(spectra[0][-1]),
        "strong_convexity_at_mode": float(spectra[0][0]),
        "gradient_norm": float(np.linalg.norm(scale * reports[0].gradient + priors[0].gradient)),
        "gradient_noise": noise,
        "one_mode": family is not None or quadratic,
        "provenance": origins,
    }


def _same(values: Sequence[np.ndarray]) -> bool:
    largest = max(float(np.abs(v).max()) for v in values)
    return all(float(np.abs(v - values[0]).max()) <= _SAME * largest for v in values)


def combine(
    reports: Mapping[str, Mapping[str, Any]], *, dim: int, initial_distance: float, temperature: float = 1.0
) -> Measured:
    """Constants of the federation from what ``client_constants`` returned of each client, by name.

    A client whose energy is not strongly convex is refused: no bound covers it.
    """
    found = list(reports.values())

    def worst(name: str) -> float:
        return max(r[name] for r in found)

    weakest = min(reports, key=lambda name: reports[name]["strong_convexity"])
    m, L = reports[weakest]["strong_convexity"], worst("smoothness")
    if not m > 1e-12 * L:
        raise DataError(
            f"the bounds need every client's energy to be strongly convex; the smallest curvature of "
            f"client {weakest!r} ({reports[weakest]['rows']} rows) is {m:.3g}",
            hint="a proper prior adds curvature at every client",
        )
    names = ("smoothness", "strong_convexity", "gradient_noise")
    provenance = {name: max((r["provenance"][name] for r in found), key=_RANK.index) for name in names}
    one_mode = "exact" if all(r["one_mode"] for r in found) else "estimated"
    return Measured(
        smoothness=L,
        strong_convexity=m,
        dim=dim,
        num_clients=len(reports),
        min_weight=min(r["rows"] for r in found) / sum(r["rows"] for r in found),
        temperature=temperature,
        heterogeneity=worst("gradient_norm"),
        gradient_noise=worst("gradient_noise"),
        initial_distance=initial_distance,
        provenance={**provenance, "heterogeneity": one_mode, "initial_distance": one_mode},
        smoothness_at_mode=worst("smoothness_at_mode"),
        strong_convexity_at_mode=min(r["strong_convexity_at_mode"] for r in found),
        clients=dict(reports),
    )


def probes(preparation: Preparation, temperature: float = 1.0) -> np.ndarray:
    """Positions (10, d) at which estimates look: a far one, the start, and draws of the Laplace law."""
    mode, start = preparation.mode, preparation.start
    root = np.linalg.inv(np.linalg.cholesky(preparation.hessian)).T
    z = np.random.default_rng(0).standard_normal((_NUM_DRAWS + 1, len(mode)))
    away = math.sqrt(max(temperature, 1.0)) * z @ root.T
    return np.concatenate([[mode + 3 * away[0], start], mode + away[1:]])


def constants(
    model: Model,
    data: FederatedData,
    *,
    temperature: float = 1.0,
    batch_size: int | None = None,
    start: ArrayLike | None = None,
    preparation: Preparation | None = None,
) -> Measured:
    """Constants of the bounds for a model and its clients, each labelled with its origin.

    Parameters
    ----------
    model, data
        The model, and the rows of each client.
    temperature, batch_size
        τ, and rows per stochastic gradient (``None``: all), as in ``fald.sample``.
    start
        (d,) where the chains start; the model's own position unless given.
    preparation
        Result of ``fald.calculus.mode.prepare``, when it is there already.

    Returns
    -------
    Measured
        L, m, γ, σ and D with ``provenance``. ``DataError`` if there is no mode, or a client's energy is not
        strongly convex.

    Notes
    -----
    Exact for quadratic energies, which are recognised by a curvature that is the same at three positions.
    A model without an inequality is estimated: its L and m may be worse elsewhere.

    Examples
    --------
    >>> import fald
    >>> study = fald.datasets.load_bundled_study("indo")
    >>> data = study.read_data()
    >>> found = constants(study.build_model(data.features), data)
    >>> round(found.smoothness), found.provenance["smoothness"], round(found.strong_convexity, 2)
    (583, 'bound', 0.16)
    """
    batch_size = checked("batch_size", batch_size)
    found = prepare(model, data, start=start) if preparation is None else preparation
    places = probes(found, temperature)
    settings = {"num_rows": data.num_rows, "batch_size": batch_size}
    reports = {
        name: client_constants(model, data.client(name), found.mode, places, **settings)
        for name in data.names
    }
    distance = float(np.linalg.norm(found.start - found.mode)) / math.sqrt(model.dim)
    return combine(reports, dim=model.dim, initial_distance=distance, temperature=temperature)
