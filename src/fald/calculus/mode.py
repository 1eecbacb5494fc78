r"""Federated mode and curvature: what clients report at a position, and Newton's method on the sums.

With ℓ^c the negative log likelihood of client c, the energy of the joint posterior is

    f(θ) = −log π0(θ) + Σ_c ℓ^c(θ),

so a value, a gradient and a Hessian per client, summed, are all that the server needs for a Newton step.
Clients compute in float64 whatever the precision of the run: a posterior of many rows has a mode that
float32 cannot resolve.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from numpy.typing import ArrayLike, NDArray

from fald.core.errors import DataError
from fald.core.types import PyTree
from fald.problem.data import FederatedData
from fald.problem.model import Model

Array = NDArray[Any]

MAX_DIM = 500
_BLOCK = 1024  # rows per compiled call
_LADDER = 2.0 ** -np.arange(1, 25)
_CLOSE = 1e-3  # posterior standard deviations from the mode, where rounding may end the search
_RUNNING = 5e-3  # a last step longer than this part of the way is one of a search that never ends


class Report(NamedTuple):
    """Value, gradient (d,) and Hessian (d, d) of an energy at one position."""

    value: float
    gradient: Array
    hessian: Array


class LocalModel(NamedTuple):
    """One client's energy f^c = ℓ^c/p_c − log π0 near a position, and how much its rows differ there.

    Attributes
    ----------
    gradient, hessian
        (d,) ∇f^c and (d, d) ∇²f^c.
    directions
        (d, d) eigenvectors q_k of the Hessian, in columns.
    skews
        (d, d) row k: ∇(q_kᵀ∇²f^c q_k), how the gradient bends along q_k.
    scatter
        (d, d) covariance of the gradients ∇l(θ; x_ci) over the client's rows; zero for a single row.
    """

    gradient: Array
    hessian: Array
    directions: Array
    skews: Array
    scatter: Array


@dataclass(frozen=True, eq=False)
class Preparation:
    """Mode of the joint posterior and the local model of every client there.

    Attributes
    ----------
    mode, start
        (d,) θ*, and where the search, like the chains, started.
    hessian
        (d, d) ∇²f(θ*), the precision of the Laplace approximation at temperature 1.
    local
        Every client's energy near θ*.
    sizes, clients
        (N,) rows n_c, and the clients' names.
    parameters
        A name for every entry of the flat position.
    num_exchanges
        Times that the server asked all clients and waited, the last one for ``local`` included.
    """

    mode: Array
    start: Array
    hessian: Array
    local: tuple[LocalModel, ...]
    sizes: Array
    clients: tuple[str, ...]
    parameters: tuple[str, ...]
    num_exchanges: int

    @property
    def weights(self) -> Array:
        """(N,) p_c = n_c/n."""
        return self.sizes / self.sizes.sum()


def blocks(rows: PyTree, size: int | None = None) -> Iterator[tuple[PyTree, jax.Array]]:
    """Cut rows into parts of one shape, so that each function compiles once; the last row fills up.

    Returns
    -------
    Iterator
        (rows, mask) of each part; ``mask`` marks the real rows.
    """
    count = len(jax.tree.leaves(rows)[0])
    size = block_size([count]) if size is None else size
    for first in range(0, count, size):
        index = np.arange(first, first + size)
        taken = np.minimum(index, count - 1)
        yield jax.tree.map(lambda a, i=taken: jnp.asarray(np.asarray(a)[i]), rows), jnp.asarray(index < count)


def block_size(sizes: ArrayLike) -> int:
    """Rows per part that suit clients of these sizes."""
    return min(_BLOCK, 1 << max(0, int(np.max(sizes)) - 1).bit_length())


def _masked(model: Model, theta: jax.Array, rows: PyTree, mask: jax.Array) -> jax.Array:
    terms = jax.vmap(model.flat_loglikelihood, (None, 0))(theta, rows)
    return -jnp.sum(jnp.where(mask, terms, 0))


@partial(jax.jit, static_argnums=0)
def _derivatives(model: Model, theta: jax.Array, rows: PyTree, mask: jax.Array):
    energy = partial(_masked, model, rows=rows, mask=mask)
    return *jax.value_and_grad(energy)(theta), jax.hessian(energy)(theta)


@partial(jax.jit, static_argnums=0)
def _values(model: Model, thetas: jax.Array, rows: PyTree, mask: jax.Array):
    return jax.lax.map(lambda theta: _masked(model, theta, rows, mask), thetas)


@partial(jax.jit, static_argnums=0)
def _prior_derivatives(model: Model, theta: jax.Array):
    def energy(t):
        return -model.flat_logprior(t)

    return *jax.value_and_grad(energy)(theta), jax.hessian(energy)(theta)


def _bends(energy: Callable, theta: jax.Array, directions: jax.Array) -> jax.Array:
    def second(t, q):
        return jax.jvp(lambda u: jax.jvp(energy, (u,), (q,))[1], (t,), (q,))[1]

    return jax.vmap(lambda q: jax.grad(second)(theta, q))(directions.T)


@partial(jax.jit, static_argnums=0)
def _shape(model: Model, theta: jax.Array, directions: jax.Array, rows: PyTree, mask: jax.Array):
    gradients = jax.vmap(jax.grad(model.flat_loglikelihood), (None, 0))(theta, rows)
    gradients = jnp.where(mask[:, None], gradients, 0)
    bends = _bends(partial(_masked, model, rows=rows, mask=mask), theta, directions)
    return bends, gradients.T @ gradients


@partial(jax.jit, static_argnums=0)
def _prior_bends(model: Model, theta: jax.Array, directions: jax.Array):
    return _bends(lambda t: -model.flat_logprior(t), theta, directions)


def _report(parts: Sequence[Any]) -> Report:
    value, gradient, hessian = (np.asarray(part, np.float64) for part in parts)
    return Report(float(value), gradient, (hessian + hessian.T) / 2)


def total(reports: Sequence[Report]) -> Report:
    """Sum reports, as the server does or a secure sum does for it."""
    values, gradients, hessians = zip(*reports)
    return Report(float(np.sum(values)), np.sum(gradients, axis=0), np.sum(hessians, axis=0))


def client_report(model: Model, rows: PyTree, position: ArrayLike, size: int | None = None) -> Report:
    """Report what one client is asked for: ℓ^c, ∇ℓ^c and ∇²ℓ^c at a flat position, over its rows.

    Parameters
    ----------
    model, rows
        The model and this client's rows.
    position
        (d,) flat position.
    size
        Rows per compiled call; clients that share it share the compiled program.

    Raises
    ------
    DataError
        If the model has more than 500 parameters: its Hessian is too large to send.

    Examples
    --------
    >>> import fald
    >>> model = fald.models.gaussian_location([[2.0]])
    >>> report = client_report(model, np.array([[1.0], [3.0]]), [0.0])
    >>> report.gradient, report.hessian
    (array([-2.]), array([[1.]]))
    """
    _check_dim(model)
    with jax.enable_x64(True):
        theta = jnp.asarray(np.asarray(position, np.float64))
        parts = [_report(_derivatives(model, theta, *block)) for block in blocks(rows, size)]
    return total(parts)


def client_values(model: Model, rows: PyTree, positions: ArrayLike, size: int | None = None) -> Array:
    """ℓ^c at several flat positions (M, d), for a line search in one exchange."""
    with jax.enable_x64(True):
        thetas = jnp.asarray(np.asarray(positions, np.float64))
        parts = [np.asarray(_values(model, thetas, *block), np.float64) for block in blocks(rows, size)]
    return np.sum(parts, axis=0)


def client_model(
    model: Model, rows: PyTree, position: ArrayLike, num_rows: int, size: int | None = None
) -> LocalModel:
    """Report one client's energy f^c near a position, as the planner needs it.

    Parameters
    ----------
    model, rows, position, size
        As in ``client_report``.
    num_rows
        n, the rows of all clients together; the client's weight is p_c = n_c/n.

    Examples
    --------
    >>> import fald
    >>> model = fald.models.gaussian_location([[2.0]])
    >>> own = client_model(model, np.array([[1.0], [3.0]]), [0.0], num_rows=4)
    >>> own.gradient, own.hessian, own.skews, own.scatter
    (array([-4.]), array([[2.]]), array([[0.]]), array([[0.5]]))
    """
    report, prior = client_report(model, rows, position, size), prior_report(model, position)
    count = len(jax.tree.leaves(rows)[0])
    hessian = report.hessian * (num_rows / count) + prior.hessian
    if not np.isfinite(hessian).all():
        raise DataError("the curvature of a client is not finite", hint="check the model at the mode")
    directions = np.linalg.eigh(hessian)[1]
    with jax.enable_x64(True):
        theta, basis = jnp.asarray(np.asarray(position, np.float64)), jnp.asarray(directions)
        parts = [_shape(model, theta, basis, *block) for block in blocks(rows, size)]
        bends, squares = (np.sum([np.asarray(p[i], np.float64) for p in parts], axis=0) for i in range(2))
        of_prior = np.asarray(_prior_bends(model, theta, basis), np.float64)
    spread = squares - np.outer(report.gradient, report.gradient) / count
    return LocalModel(
        gradient=report.gradient * (num_rows / count) + prior.gradient,
        hessian=hessian,
        directions=directions,
        skews=bends * (num_rows / count) + of_prior,
        scatter=spread / max(count - 1, 1),
    )


def prior_report(model: Model, position: ArrayLike) -> Report:
    """Report −log π0 and its derivatives at a flat position; the server knows the prior."""
    _check_dim(model)
    with jax.enable_x64(True):
        return _report(_prior_derivatives(model, jnp.asarray(np.asarray(position, np.float64))))


def _check_dim(model: Model) -> None:
    if model.dim > MAX_DIM:
        raise DataError(
            f"the model has {model.dim} parameters; Hessians are exchanged up to {MAX_DIM}",
            hint="choose settings by hand, or give the constants of the problem yourself",
        )


def find_mode(
    report_fn: Callable[[Array], Report],
    values_fn: Callable[[Array], Array],
    start: ArrayLike,
    *,
    parameters: Sequence[str] = (),
    tolerance: float = 1e-8,
    max_exchanges: int = 100,
) -> tuple[Array, Report, int]:
    r"""Minimise an energy that is known by its sums only, by damped Newton steps.

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
    parameters
        Names for messages.
    tolerance
        Stop when the Newton decrement (∇fᵀ∇²f⁻¹∇f)^½, the distance to the mode in posterior standard
        deviations, is below it.
    max_exchanges
        Give up after so many.

    Returns
    -------
    tuple
        The mode, the report there, and the number of exchanges.

    Raises
    ------
    DataError
        If the energy is not finite at the start, has no minimum or none that is found, or is flat there.

    Notes
    -----
    A minimum, not the lowest one: an energy with several has others. Rounding of a model that computes in
    float32 inside limits the decrement; up to 10⁻³ is then accepted.

    Examples
    --------
    >>> energy = lambda x: x - np.log(x)
    >>> report = lambda x: Report(energy(x[0]), 1 - 1 / x, np.diag(x**-2))
    >>> mode, _, exchanges = find_mode(report, lambda xs: energy(xs[:, 0]), [0.1])
    >>> mode.round(6), exchanges
    (array([1.]), 9)
    """
    position = np.asarray(start, np.float64)
    here = report_fn(position)
    exchanges = 1
    if not _finite(here):
        raise DataError(
            f"the energy or its derivatives are not finite at the start (energy {here.value})",
            hint="start where the model has a density, and check it for log(0) or overflow",
        )
    unit, first = 1 / unit_scaled(here.hessian)[0], position
    while True:
        step, decrement = newton_step(here)
        if decrement <= tolerance:
            break
        if exchanges >= max_exchanges:
            raise _no_mode(f"no mode found in {exchanges} exchanges", decrement, step, parameters)
        trial = report_fn(position + step)
        exchanges += 1
        if not _goes_down(here, trial, step, decrement):
            if decrement <= _CLOSE:
                break  # rounding: no shorter step would go down either
            values = values_fn(position + _LADDER[:, None] * step)
            values = np.where(np.isfinite(values), values, np.inf)
            best = int(np.argmin(values))
            exchanges += 1
            if not values[best] < here.value:
                raise _no_mode("no step goes down", decrement, step, parameters)
            step = _LADDER[best] * step
            trial = report_fn(position + step)
            exchanges += 1
            if not _finite(trial):
                raise _no_mode("the derivatives are not finite on the way", decrement, step, parameters)
        position, here = position + step, trial
    way = 1 + float(np.max(np.abs(position - first) / unit))
    if np.max(np.abs(step) / unit) > _RUNNING * way:
        raise _no_mode("the energy has no minimum: it falls on and on", decrement, step, parameters)
    _check_curved(here.hessian, unit, parameters)
    return position, here, exchanges


def _finite(report: Report) -> bool:
    return all(bool(np.all(np.isfinite(part))) for part in report)


def _sizes(values: Array) -> Array:
    return np.maximum(np.abs(values), 1e-10 * np.abs(values).max() or 1.0)


def unit_scaled(hessian: Array) -> tuple[Array, Array, Array]:
    """Scale of each parameter, and eigenvalues and vectors of the Hessian scaled to a unit diagonal."""
    scale = np.sqrt(np.abs(np.diag(hessian)))
    scale = np.where(scale > 0, scale, max(float(scale.max()), 1.0))
    values, vectors = np.linalg.eigh(hessian / np.outer(scale, scale))
    return scale, values, vectors


def newton_step(here: Report) -> tuple[Array, float]:
    """Newton step down an energy, eigenvalues taken by size, and its length in posterior sds."""
    scale, values, vectors = unit_scaled(here.hessian)
    along, sizes = vectors.T @ (here.gradient / scale), _sizes(values)
    return -(vectors @ (along / sizes)) / scale, float(np.sqrt(np.sum(along**2 / sizes)))


def _goes_down(here: Report, trial: Report, step: Array, decrement: float) -> bool:
    if not _finite(trial):
        return False
    # close to the mode the change of the energy drowns in its rounding; the gradient still tells
    closer = decrement <= _CLOSE and newton_step(trial)[1] < decrement / 2
    return closer or trial.value <= here.value + 1e-4 * float(here.gradient @ step)


def _check_curved(hessian: Array, unit: Array, parameters: Sequence[str]) -> None:
    scale, values, vectors = unit_scaled(hessian)
    direction = vectors[:, 0] / scale
    left = scale * unit  # roots of the curvatures, against those at the start
    if left.min() < 1e-6:
        direction = np.eye(len(left))[np.argmin(left)]
    elif values[0] > len(values) * 1e-13 * values[-1]:
        return
    raise DataError(
        f"the posterior is flat where the search ended{_along(direction, parameters)}",
        hint="a feature that repeats others or separates the outcomes does this; give every parameter a "
        "proper prior",
    )


def _along(direction: Array, parameters: Sequence[str]) -> str:
    size = np.abs(direction)
    most = [int(i) for i in np.argsort(-size)[:3] if size[i] > 0.1 * size.max()]
    return f" (along {', '.join(parameters[i] for i in most)})" if parameters else ""


def _no_mode(what: str, decrement: float, step: Array, parameters: Sequence[str]) -> DataError:
    return DataError(
        f"{what}; the last step was {decrement:.3g} posterior standard deviations{_along(step, parameters)}",
        hint="a feature that separates the outcomes does this under a flat prior; a proper prior, features "
        "on similar scales or another start help",
    )


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
        As in ``find_mode``, or if the model has too many parameters.

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
    _check_dim(model)
    rows, size = [data.client(name) for name in data.names], block_size(data.sizes)
    first = np.asarray(model.flat_initial_position if start is None else start, np.float64)
    if first.shape != (model.dim,):
        raise DataError(f"start must have shape ({model.dim},); got {first.shape}")

    def report_fn(position: Array) -> Report:
        reports = [client_report(model, own, position, size) for own in rows]
        return total([*reports, prior_report(model, position)])

    def values_fn(positions: Array) -> Array:
        with jax.enable_x64(True):
            prior = jax.lax.map(model.flat_logprior, jnp.asarray(positions))
        return sum((client_values(model, own, positions, size) for own in rows), start=-np.asarray(prior))

    parameters = tuple(model.parameter_names)
    mode, here, exchanges = find_mode(report_fn, values_fn, first, parameters=parameters)
    return Preparation(
        mode=mode,
        start=first,
        hessian=here.hessian,
        local=tuple(client_model(model, own, mode, data.num_rows, size) for own in rows),
        sizes=np.asarray(data.sizes, float),
        clients=data.names,
        parameters=parameters,
        num_exchanges=exchanges + 1,
    )
