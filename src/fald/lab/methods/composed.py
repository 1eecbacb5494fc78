r"""FA-LD on Gaussian energies with the K local steps of a round composed into one draw per client.

For f^c(θ) = f^c(x_c) + ½(θ−x_c)ᵀH_c(θ−x_c) and A_c = I − ηH_c, K local steps from θ end at

    β^c = A_c^K θ + (I − A_c^K) x_c + √v_c L_c ξ^c + B_c ξ̇,

    L_c L_cᵀ = 2ητ(1−ρ²) Σ_j A_c^j A_c^jᵀ,    B_a B_bᵀ = 2ητρ² Σ_j A_a^j A_b^jᵀ,    j = 0 … K−1.

The law of a round is that of FA-LD exactly; the draws are others, because one normal vector stands for K.
A round costs the same whatever K and however many rows there are.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple, Self

import jax
import jax.numpy as jnp
import numpy as np

from fald.calculus.sums import client_report, make_site, prior_report
from fald.core.errors import ConfigError, DataError
from fald.core.keys import normals
from fald.core.reveals import Reveals
from fald.core.types import PyTree, float_dtype, sum_last
from fald.langevin.client import Local
from fald.langevin.fald import FALD, fald, variant
from fald.langevin.method import Answers, Cost, Spent, Upload, check_dim, digest, numbers_as_bytes
from fald.langevin.noise import NoiseScale, own_variance
from fald.problem.data import FederatedData
from fald.problem.model import Model

_MOST_SHARED = 2000  # numbers of all clients together, where one noise moves all of them
_QUADRATIC = 1e-6
_WRITTEN_OUT = 4


class Quadratics(NamedTuple):
    """Clients' energies: H_c (N, d, d), x_c (N, d) and f^c(x_c) (N,)."""

    hessians: np.ndarray
    centers: np.ndarray
    least: np.ndarray


class _Moves(NamedTuple):
    """What a round does to each client, and its energy."""

    carry: Any  # (N, d, d) A^K
    pull: Any  # (N, d) (I − A^K) x
    own: Any  # (N, d, d) L
    shared: Any  # (N, d, r) B; r = 0 without correlation
    hessian: Any
    center: Any
    least: Any


@dataclass(frozen=True)
class Composed(FALD):
    """The method; made by ``composed``."""

    quadratics: Quadratics | None = field(default=None, compare=False)

    reveals = Reveals(preparation={"hessians": "hessian", "centers": "mode", "least": "value"})

    def split(self) -> tuple[Self, dict[str, Any]]:
        """As FA-LD, with what a round does to each client among the numbers."""
        if self.quadratics is None:
            raise ConfigError("composed has no energies yet", hint="clients offer them beforehand")
        skeleton, numbers = super().split()
        moves = _compose(self, self.quadratics)
        arrays = _Moves(*[jnp.asarray(part, float_dtype()) for part in moves])
        return replace(skeleton, quadratics=None), {**numbers, "moves": arrays}

    def settings(self) -> dict[str, Any]:
        """Settings as plain values; the energies by a short hash."""
        told = {} if self.quadratics is None else {"energies": digest(self.quadratics)}
        return {**super().settings(), **told}

    def offer(self, model: Model, data: FederatedData) -> dict[str, Any]:
        """The quadratic energies of clients; ``DataError`` if they are not quadratic."""
        check_dim(self.name, model.dim)
        if data.part:  # a client's energy depends on how many rows all clients have
            raise DataError("composed rounds need the rows of all clients in one process")
        return find_quadratics(model, data)._asdict()

    def prepare(self, model: Model, data: FederatedData, answers: Answers) -> Self:
        """Take the energies."""
        check_dim(self.name, model.dim)
        return replace(self, quadratics=Quadratics(**answers))

    def cost(self, dim: int) -> Cost:
        """A position each way and no gradient; before that a gradient and a Hessian on all rows."""
        each = Spent(1, numbers_as_bytes(dim), numbers_as_bytes(dim))
        return Cost(each, Spent(full_gradients=1 + dim))

    def client_update(self, hyper, local: Local, message: PyTree, memory: PyTree):
        """One draw of where K local steps end."""
        own = jax.tree.map(lambda part: part[local.client], hyper["moves"])
        end = _times(own.carry, message) + own.pull
        if self.temperature > 0 and self.correlation < 1:
            variance = own_variance(self.noise, local.share, local.weight)
            end += jnp.sqrt(variance) * _times(own.own, _drawn(local.own_key, message.shape[0]))
        if self.temperature > 0 and self.correlation > 0:
            end += _times(own.shared, _drawn(local.shared_key, own.shared.shape[1]))
        away = message - own.center
        energy = own.least + 0.5 * sum_last(away * _times(own.hessian, away))
        return Upload(end.astype(message.dtype), energy), memory


def _drawn(key: jax.Array, count: int) -> jax.Array:
    """Normals, made once: without the barrier each entry of a product would make all of them again."""
    return jax.lax.optimization_barrier(normals(key, 0, count))


def _times(matrix: jax.Array, vector: jax.Array) -> jax.Array:
    """A matrix times a vector, written out where it is small: a call would cost more than its work."""
    if max(matrix.shape) > _WRITTEN_OUT:
        return matrix @ vector
    rows = [sum(matrix[i, j] * vector[j] for j in range(matrix.shape[1])) for i in range(matrix.shape[0])]
    return jnp.stack(rows)


def find_quadratics(model: Model, data: FederatedData) -> Quadratics:
    """H_c, x_c and f^c(x_c) of energies that are quadratic, in double precision.

    Raises
    ------
    DataError
        If an energy is not quadratic, or has no single lowest point.

    Examples
    --------
    >>> import fald
    >>> data = fald.FederatedData.from_arrays({"a": np.array([[1.0], [3.0]]), "b": np.array([[5.0]])})
    >>> found = find_quadratics(fald.models.gaussian_location([[2.0]]), data)
    >>> found.hessians.ravel().round(6).tolist(), found.centers.ravel().round(6).tolist()
    ([1.5, 1.5], [2.0, 5.0])
    """
    found = [_quadratic(model, data, name, share) for name, share in zip(data.names, data.weights)]
    return Quadratics(*[np.array(part) for part in zip(*found)])


def _quadratic(
    model: Model, data: FederatedData, name: str, share: float
) -> tuple[np.ndarray, np.ndarray, float]:
    site = make_site(model, data.client(name), name)

    def energy(theta: np.ndarray) -> list[Any]:
        reports = zip(client_report(site, theta), prior_report(model, theta))
        return [of_rows / share + of_prior for of_rows, of_prior in reports]

    start = np.asarray(model.flat_initial_position, np.float64)
    value, gradient, hessian = energy(start)
    eigenvalues = np.linalg.eigvalsh(hessian)
    if not np.all(np.isfinite(hessian)) or eigenvalues[0] <= 1e-12 * abs(eigenvalues[-1]):
        raise DataError(
            f"the energy of client {name!r} has no single lowest point: its Hessian is not positive definite",
            hint="use a proper prior, or fald.samplers.fald",
        )
    step = np.linalg.solve(hessian, gradient)
    # as far again on the other side: what is quadratic keeps its Hessian and its gradient vanishes
    width = np.sqrt(np.diag(np.linalg.inv(hessian)))
    _, at_center, _ = energy(start - step)
    _, _, elsewhere = energy(start - step + 10 * width)
    off = np.abs((elsewhere - hessian) / np.sqrt(np.outer(np.diag(hessian), np.diag(hessian)))).max()
    left = np.abs(at_center * width).max() / max(1.0, np.abs(gradient * width).max())
    if max(off, left) > _QUADRATIC:
        raise DataError(
            f"composed rounds need Gaussian energies; the energy of client {name!r} is not quadratic",
            hint="use fald.samplers.fald, which takes the K steps one after the other",
        )
    return hessian, start - step, float(value - 0.5 * gradient @ step)


def _compose(method: Composed, energies: Quadratics) -> _Moves:
    """The affine-Gaussian map of a round, in the eigenbasis of each Hessian."""
    eta, steps = float(method.step_size), method.local_steps  # type: ignore[arg-type]
    values, basis = np.linalg.eigh(energies.hessians)
    factor, scale = 1 - eta * values, 2 * eta * method.temperature

    def matrix(diagonal: np.ndarray) -> np.ndarray:
        return (basis * diagonal[:, None, :]) @ basis.transpose(0, 2, 1)

    carry = matrix(factor**steps)
    pull = energies.centers - np.einsum("cij,cj->ci", carry, energies.centers)
    own = matrix(np.sqrt((1 - method.correlation**2) * scale * _geometric(factor**2, steps)))
    shared = np.zeros((*energies.centers.shape, 0))
    if method.correlation > 0:
        shared = _shared(basis, factor, steps) * np.sqrt(scale) * method.correlation
    return _Moves(carry, pull, own, shared, *energies)


def _geometric(ratio: np.ndarray, count: int) -> np.ndarray:
    """Σ_{j<count} ratio^j, also where the ratio is near one."""
    near = np.abs(ratio - 1) < 1e-8
    return np.where(near, count, (1 - ratio**count) / np.where(near, 1, 1 - ratio))


def _shared(basis: np.ndarray, factor: np.ndarray, steps: int) -> np.ndarray:
    """(N, d, r) with B_a B_bᵀ = Σ_j A_a^j A_b^jᵀ: the shared noise of all clients, jointly."""
    num_clients, d = factor.shape
    if num_clients * d > _MOST_SHARED:
        raise ConfigError(
            f"composed rounds with correlated noise take at most {_MOST_SHARED} parameters of all clients "
            f"together; here are {num_clients * d}",
            hint="set correlation to 0, or use fald.samplers.fald",
        )
    flat = factor.ravel()
    sums = _geometric(np.outer(flat, flat), steps).reshape(num_clients, d, num_clients, d)
    overlap = np.einsum("aki,bkj->aibj", basis, basis)
    joint = np.einsum("api,aibj,bqj->apbq", basis, sums * overlap, basis)
    values, vectors = np.linalg.eigh(joint.reshape(num_clients * d, -1))
    kept = values > 1e-12 * values[-1]
    return (vectors[:, kept] * np.sqrt(values[kept])).reshape(num_clients, d, -1)


def composed(
    *,
    local_steps: int,
    step_size: float,
    temperature: float = 1.0,
    correlation: float = 0.0,
    noise: NoiseScale = "realised",
) -> Composed:
    """FA-LD on Gaussian energies, each round one exact draw per client instead of K steps.

    Parameters
    ----------
    local_steps, step_size, temperature, correlation, noise
        As for ``fald``; the step size is a constant.

    Raises
    ------
    ConfigError
        If settings cannot be used; ``sample`` raises ``DataError`` if an energy is not quadratic.

    Notes
    -----
    Gradients are exact, so there are no batches and no clipping. The energies are found once, before the
    first round, from all rows in this process.

    Examples
    --------
    >>> composed(local_steps=3000, step_size=1e-7).name
    'composed'
    """
    if callable(step_size):
        raise ConfigError("composed rounds need a constant step-size", hint="use fald.samplers.fald")
    given = {"temperature": temperature, "correlation": correlation, "noise": noise}
    return variant(Composed, fald(local_steps=local_steps, step_size=step_size, **given), name="composed")
