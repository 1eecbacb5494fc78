r"""Federated mode and curvature: what clients report at a position, and Newton's method on the sums.

With ℓ^c the negative log likelihood of client c, the energy of the joint posterior is

    f(θ) = −log π0(θ) + Σ_c ℓ^c(θ),

so a value, a gradient and a Hessian per client, summed, are all that the server needs for a Newton step.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from numpy.typing import ArrayLike, NDArray

from fald.calculus.sums import (
    Part,
    Report,
    Site,
    check_dim,
    client_report,
    log_likelihoods,
    loglikelihood,
    make_site,
    prior_report,
    prior_values,
    total,
)
from fald.core.errors import DataError
from fald.problem.data import FederatedData
from fald.problem.model import Model

Array = NDArray[Any]

_LADDER = 2.0 ** -np.arange(1, 25)
_CLOSE = 1e-3  # posterior standard deviations from the mode, where rounding may end the search
_RUNNING = 5e-3  # a last step longer than this part of the way is one of a search that never ends


class LocalModel(NamedTuple):
    """One client's energy f^c = ℓ^c/p_c − log π0 near a position, and how much its rows differ there."""

    gradient: Array  # (d,) ∇f^c
    hessian: Array  # (d, d) ∇²f^c
    directions: Array  # (d, d) eigenvectors q_k of the Hessian, in columns
    skews: Array  # (d, d) row k: ∇(q_kᵀ∇²f^c q_k), how the gradient bends along q_k
    scatter: Array  # (d, d) covariance of ∇l(θ; x_ci) over the client's rows; zero for a single row


@dataclass(frozen=True, eq=False)
class Preparation:
    """Mode of the joint posterior and the local model of every client there."""

    mode: Array  # (d,) θ*
    start: Array  # (d,) where the search, like the chains, started
    hessian: Array  # (d, d) ∇²f(θ*), the precision of the Laplace approximation at temperature 1
    local: tuple[LocalModel, ...]  # every client's energy near θ*
    sizes: Array  # (N,) rows n_c
    clients: tuple[str, ...]
    parameters: tuple[str, ...]  # a name for every entry of the flat position
    num_exchanges: int  # times that the server asked all clients and waited, the last for ``local`` included

    @property
    def weights(self) -> Array:
        """(N,) p_c = n_c/n."""
        return self.sizes / self.sizes.sum()


@partial(jax.jit, static_argnums=0)
def _shape(model: Model, theta: jax.Array, directions: jax.Array, part: Part):
    """How the energy of a part of the rows bends along directions, and the sum of gradients squared."""
    rows, mask = part
    gradients = jax.vmap(jax.grad(model.flat_loglikelihood), (None, 0))(theta, rows)
    gradients = jnp.where(mask[:, None], gradients, 0)
    bends = _bends(lambda t: -loglikelihood(model, t, part), theta, directions)
    return bends, gradients.T @ gradients


def _bends(energy: Callable, theta: jax.Array, directions: jax.Array) -> jax.Array:
    def second(t, q):
        return jax.jvp(lambda u: jax.jvp(energy, (u,), (q,))[1], (t,), (q,))[1]

    return jax.vmap(lambda q: jax.grad(second)(theta, q))(directions.T)


@partial(jax.jit, static_argnums=0)
def _prior_bends(model: Model, theta: jax.Array, directions: jax.Array):
    return _bends(lambda t: -model.flat_logprior(t), theta, directions)


def client_model(site: Site, position: ArrayLike, num_rows: int) -> LocalModel:
    """Report one client's energy f^c near a position, as the planner needs it; p_c = n_c/``num_rows``.

    Examples
    --------
    >>> import fald
    >>> site = make_site(fald.models.gaussian_location([[2.0]]), np.array([[1.0], [3.0]]))
    >>> own = client_model(site, [0.0], num_rows=4)
    >>> own.gradient, own.hessian, own.skews, own.scatter
    (array([-4.]), array([[2.]]), array([[0.]]), array([[0.5]]))
    """
    report, prior = client_report(site, position), prior_report(site.model, position)
    count, scale = site.num_rows, num_rows / site.num_rows
    hessian = report.hessian * scale + prior.hessian
    if not np.isfinite(hessian).all():
        raise DataError("the curvature of a client is not finite", hint="check the model at the mode")
    directions = np.linalg.eigh(hessian)[1]
    with jax.enable_x64(True):
        theta, basis = jnp.asarray(np.asarray(position, np.float64)), jnp.asarray(directions)
        parts = [_shape(site.model, theta, basis, part) for part in site.parts]
        bends, squares = (np.sum([np.asarray(p[i]) for p in parts], axis=0) for i in range(2))
        of_prior = np.asarray(_prior_bends(site.model, theta, basis))
    return LocalModel(
        gradient=report.gradient * scale + prior.gradient,
        hessian=hessian,
        directions=directions,
        skews=bends * scale + of_prior,
        scatter=(squares - np.outer(report.gradient, report.gradient) / count) / max(count - 1, 1),
    )


class Descent(NamedTuple):
    """Where damped Newton steps ended."""

    start: Array
    position: Array  # the last one
    report: Report  # the energy with its derivatives there
    first: Report  # the same at the start
    step: Array  # the last one
    decrement: Any  # its length in posterior standard deviations
    exchanges: Any  # times that the energy was asked for
    failed: Any  # why they ended before a mode was reached; empty if it was


def descend(
    report_fn: Callable[[Array], Report],
    values_fn: Callable[[Array], Array],
    start: ArrayLike,
    *,
    tolerance: float = 1e-8,
    max_exchanges: int = 100,
) -> Descent:
    r"""Go down an energy that is known by its sums only, by damped Newton steps.

    The step is −|∇²f|⁻¹∇f, with the eigenvalues of the Hessian (after scaling it to a unit diagonal) taken
    by their size, so that it goes down also where the energy is not convex. When the full step does not
    go down far enough, the energy is asked for at 24 shorter ones at once.

    Parameters
    ----------
    report_fn, values_fn
        The energy with its derivatives at a position (d,), and its values at positions (M, d). One call
        is one exchange with all clients.
    start
        (d,) where to begin.
    tolerance
        Stop when the Newton decrement (∇fᵀ∇²f⁻¹∇f)^½, the distance to the mode in posterior standard
        deviations, is below it. Rounding of a model that computes in float32 inside limits it; up to 10⁻³ is
        then accepted.
    max_exchanges
        Give up after so many.

    Notes
    -----
    A minimum, not the lowest one, and only where ``check_mode`` finds nothing wrong.

    Examples
    --------
    >>> energy = lambda x: x - np.log(x)
    >>> report = lambda x: Report(energy(x[0]), 1 - 1 / x, np.diag(x**-2))
    >>> found = descend(report, lambda xs: energy(xs[:, 0]), [0.1])
    >>> found.position.round(6), found.exchanges
    (array([1.]), 9)
    """

    def reports(_: Array, places: Array) -> Report:
        here = report_fn(places[0])
        return Report(np.array([here.value]), here.gradient[None], here.hessian[None])

    found = descend_all(
        reports,
        lambda _, places: values_fn(places[0])[None],
        np.asarray(start, np.float64)[None],
        tolerance=tolerance,
        max_exchanges=max_exchanges,
    )
    return Descent(
        found.start[0],
        found.position[0],
        _of(found.report, 0),
        _of(found.first, 0),
        found.step[0],
        float(found.decrement[0]),
        int(found.exchanges[0]),
        found.failed[0],
    )


def _of(reports: Report, i: int) -> Report:
    return Report(float(reports.value[i]), reports.gradient[i], reports.hessian[i])


def descend_all(
    reports_fn: Callable[[Array, Array], Report],
    values_fn: Callable[[Array, Array], Array],
    starts: Array,
    *,
    tolerance: float,
    max_exchanges: int,
) -> Descent:
    """``descend`` from several starts at once, each down its own energy; all that it returns is stacked.

    Parameters
    ----------
    reports_fn
        ``(which, positions (A, d)) -> Report``, stacked: of the energies ``which`` (A,), one position each.
    values_fn
        ``(which, positions (A, M, d)) -> (A, M)`` values.
    starts, tolerance, max_exchanges
        (S, d) where to begin; the others as in ``descend``.
    """
    position = np.array(starts, np.float64)
    everyone = np.arange(len(position))
    first = reports_fn(everyone, position.copy())  # who asks may keep it, and positions move on
    here = Report(*(np.array(part, np.float64) for part in first))
    step, decrement = np.zeros_like(position), np.full(len(position), np.inf)
    exchanges, failed = np.ones(len(position), int), [""] * len(position)
    on = everyone[finite(here)]
    while len(on):
        step[on], decrement[on] = newton_step(Report(*(part[on] for part in here)))
        on = on[decrement[on] > tolerance]
        for i in on[exchanges[on] >= max_exchanges]:
            failed[i] = f"no mode found in {exchanges[i]} exchanges"
        on = on[exchanges[on] < max_exchanges]
        if not len(on):
            break
        now = Report(*(part[on] for part in here))
        trial = Report(*(np.array(part) for part in reports_fn(on, position[on] + step[on])))
        exchanges[on] += 1
        down = _goes_down(now, trial, step[on], decrement[on])
        # close to the mode rounding ends it: no shorter step would go down either
        short = np.flatnonzero(~down & (decrement[on] > _CLOSE))
        if len(short):
            which = on[short]
            places = position[which][:, None] + _LADDER[:, None] * step[which][:, None]
            values = values_fn(which, places)
            values = np.where(np.isfinite(values), values, np.inf)
            best = np.argmin(values, axis=1)
            exchanges[which] += 1
            lower = values[np.arange(len(which)), best] < here.value[which]
            for i in which[~lower]:
                failed[i] = "no step goes down"
            short, which = short[lower], which[lower]
            step[which] *= _LADDER[best[lower]][:, None]
            if len(which):
                for part, new in zip(trial, reports_fn(which, position[which] + step[which])):
                    part[short] = new
                exchanges[which] += 1
                down[short] = True
        on, trial = on[down], Report(*(part[down] for part in trial))
        position[on] += step[on]
        for part, new in zip(here, trial):
            part[on] = new
        ends = ~finite(trial)
        for i in on[ends]:
            failed[i] = _NOT_FINITE
        on = on[~ends]
    for i in everyone[~finite(here)]:
        failed[i] = _NOT_FINITE
    return Descent(np.asarray(starts), position, here, first, step, decrement, exchanges, failed)


_NOT_FINITE = "the derivatives are not finite on the way"


def finite(reports: Report) -> Array:
    """(S,) whether all of each report is finite."""
    each = [np.isfinite(part).all(axis=tuple(range(1, part.ndim))) for part in reports]
    return np.logical_and.reduce(each)


def check_mode(found: Descent, parameters: Sequence[str] = ()) -> None:
    """Raise ``DataError`` if steps did not reach a mode, or the energy is flat there."""
    if not found.first.finite:
        raise DataError(
            f"the energy or its derivatives are not finite at the start (energy {found.first.value})",
            hint="start where the model has a density, and check it for log(0) or overflow",
        )
    unit = 1 / unit_scaled(found.first.hessian)[0]
    way = 1 + float(np.max(np.abs(found.position - found.start) / unit))
    failed = found.failed
    if not failed and np.max(np.abs(found.step) / unit) > _RUNNING * way:
        failed = "the energy has no minimum: it falls on and on"
    if failed:
        raise DataError(
            f"{failed}; the last step was {found.decrement:.3g} posterior standard deviations"
            f"{_along(found.step, parameters)}",
            hint="a feature that separates the outcomes does this under a flat prior; a proper prior, "
            "features on similar scales or another start help",
        )
    scale, values, vectors = unit_scaled(found.report.hessian)
    left = scale * unit  # roots of the curvatures, against those at the start
    if left.min() < 1e-6 or not values[0] > len(values) * 1e-13 * values[-1]:
        direction = np.eye(len(left))[np.argmin(left)] if left.min() < 1e-6 else vectors[:, 0] / scale
        raise DataError(
            f"the posterior is flat where the search ended{_along(direction, parameters)}",
            hint="a feature that repeats others or separates the outcomes does this; give every parameter a "
            "proper prior",
        )


def unit_scaled(hessian: Array) -> tuple[Array, Array, Array]:
    """Scale of each parameter, and eigenvalues and vectors of Hessians scaled to a unit diagonal."""
    scale = np.sqrt(np.abs(np.diagonal(hessian, axis1=-2, axis2=-1)))
    scale = np.where(scale > 0, scale, np.maximum(scale.max(-1, keepdims=True), 1.0))
    values, vectors = np.linalg.eigh(hessian / (scale[..., :, None] * scale[..., None, :]))
    return scale, values, vectors


def newton_step(here: Report) -> tuple[Array, Any]:
    """Newton steps down energies, eigenvalues taken by size, and their lengths in posterior sds."""
    scale, values, vectors = unit_scaled(here.hessian)
    along = np.einsum("...ij,...i->...j", vectors, here.gradient / scale)
    most = np.abs(values).max(-1, keepdims=True)
    sizes = np.maximum(np.abs(values), np.where(most > 0, 1e-10 * most, 1.0))
    step = -np.einsum("...ij,...j->...i", vectors, along / sizes) / scale
    return step, np.sqrt(np.sum(along**2 / sizes, axis=-1))


def _goes_down(here: Report, trial: Report, step: Array, decrement: Array) -> Array:
    """(S,) whether steps led down."""
    usable = finite(trial)
    down = usable & (trial.value <= here.value + 1e-4 * np.sum(here.gradient * step, axis=1))
    # close to the mode the change of the energy drowns in its rounding; the gradient still tells
    unsure = np.flatnonzero(usable & ~down & (decrement <= _CLOSE))
    if len(unsure):
        down[unsure] = newton_step(Report(*(part[unsure] for part in trial)))[1] < decrement[unsure] / 2
    return down


def _along(direction: Array, parameters: Sequence[str]) -> str:
    size = np.abs(direction)
    most = [int(i) for i in np.argsort(-size)[:3] if size[i] > 0.1 * size.max()]
    return f" (along {', '.join(parameters[i] for i in most)})" if parameters else ""


def prepare(model: Model, data: FederatedData, *, start: ArrayLike | None = None) -> Preparation:
    """Mode of the joint posterior and every client's energy near it.

    Parameters
    ----------
    model, data
        The model, and the rows of each client. Only sums over a client's rows leave it.
    start
        (d,) flat position to start from; the model's own unless given.

    Returns
    -------
    Preparation
        At temperature 1; the mode is the same at every temperature.

    Raises
    ------
    DataError
        As in ``check_mode``, or if the model has too many parameters.

    Notes
    -----
    Sums over rows are not differentially private. Of several modes one is found.

    Examples
    --------
    >>> import fald
    >>> data = fald.FederatedData.from_arrays({"a": np.array([[1.0], [3.0]]), "b": np.array([[5.0]])})
    >>> found = prepare(fald.models.gaussian_location([[2.0]]), data)
    >>> found.mode, found.hessian, [round(own.gradient.item(), 6) for own in found.local], found.num_exchanges
    (array([3.]), array([[1.5]]), [1.5, -3.0], 3)
    """
    if model.check_fn is not None:
        model.check_fn(data)
    check_dim(model)
    sites = [make_site(model, data.client(name), name) for name in data.names]
    first = np.asarray(model.flat_initial_position if start is None else start, np.float64)
    if first.shape != (model.dim,):
        raise DataError(f"start must have shape ({model.dim},); got {first.shape}")

    def report_fn(position: Array) -> Report:
        return total([*(client_report(site, position) for site in sites), prior_report(model, position)])

    def values_fn(positions: Array) -> Array:
        prior = prior_values(model, positions)
        return -sum((log_likelihoods(site, positions) for site in sites), start=prior)

    parameters = tuple(model.parameter_names)
    found = descend(report_fn, values_fn, first)
    check_mode(found, parameters)
    return Preparation(
        mode=found.position,
        start=first,
        hessian=found.report.hessian,
        local=tuple(client_model(site, found.position, data.num_rows) for site in sites),
        sizes=np.asarray(data.sizes, float),
        clients=data.names,
        parameters=parameters,
        num_exchanges=found.exchanges + 1,
    )
