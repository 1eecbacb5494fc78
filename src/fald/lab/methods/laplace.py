r"""Federated Laplace approximation: Newton's method over rounds, then draws from N(θ*, τ(∇²f(θ*))⁻¹).

In each of the first rounds clients report energy, gradient and Hessian at the broadcast point, and the
server takes a damped Newton step on their sums. After that nothing travels, and every round is a draw at the
server.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, NamedTuple, Self

import jax
import jax.numpy as jnp

from fald.core.checks import check_count
from fald.core.keys import normals
from fald.core.reveals import Reveals
from fald.langevin.client import Local
from fald.langevin.method import Answers, Peer, Spent, Upload, check_dim, numbers_as_bytes, triangle
from fald.langevin.server import Server, average
from fald.problem.data import FederatedData
from fald.problem.model import Model


class _LaplaceState(NamedTuple):
    position: jax.Array  # the draw
    point: jax.Array  # where clients are asked next
    best: jax.Array
    energy: jax.Array  # at best
    move: jax.Array  # full Newton step from best
    length: jax.Array
    root: jax.Array  # R with R Rᵀ = (∇²f)⁻¹ at best


@dataclass(frozen=True, kw_only=True)
class Laplace(Peer):
    """The method; made by ``laplace``."""

    step_size: float | None = None
    newton_rounds: int = 20
    name: str = "laplace"

    reveals = Reveals(("point", "value", "gradient", "hessian"))
    _numbers: ClassVar[tuple[str, ...]] = ("temperature",)

    @property
    def preparation_rounds(self) -> int:
        """Newton's method comes first."""
        return self.newton_rounds

    def prepare(self, model: Model, data: FederatedData, answers: Answers) -> Self:
        """Check that Hessians can be sent."""
        check_dim(self.name, model.dim)
        return self

    def settings(self):
        """There is no step size."""
        return {k: v for k, v in super().settings().items() if k not in ("step_size", "batch_size")}

    def init(self, position: jax.Array) -> tuple[_LaplaceState, tuple[()]]:
        """Ask at the start."""
        zero = jnp.zeros_like(position)
        root = jnp.zeros((*position.shape, *position.shape), position.dtype)
        most = jnp.asarray(jnp.finfo(position.dtype).max, position.dtype)
        return _LaplaceState(position, position, position, most, zero, jnp.ones((), position.dtype), root), ()

    def broadcast(self, state: _LaplaceState) -> jax.Array:
        """The point to look at."""
        return state.point

    def client_update(self, hyper, local: Local, message: jax.Array, memory: tuple[()]):
        """Energy, gradient and Hessian, as long as Newton's method runs."""
        dim = message.shape[0]

        def report():
            return local.energy(message, 0), local.full_grad(message), local.hessian(message)

        shapes = jax.eval_shape(report)
        asked = local.round < self.newton_rounds  # the same in all chains
        energy, gradient, hessian = jax.lax.cond(
            asked, report, lambda: jax.tree.map(lambda s: jnp.zeros(s.shape, s.dtype), shapes)
        )
        once = jnp.where(asked, 1, 0)
        sent = numbers_as_bytes(once * (1 + dim + triangle(dim)))
        spent = Spent(once, sent, numbers_as_bytes(once * dim), 0, once * (1 + dim))
        return Upload(message, energy, (gradient, hessian), spent), memory

    def server_update(self, hyper, state: _LaplaceState, uploads: Upload, server: Server):
        """A damped Newton step while it runs; then only the draw changes."""
        energy = jnp.sum(server.weights * uploads.energy)
        gradient, hessian = (
            average(uploads.extra[0], server.weights),
            jnp.einsum("c,cij->ij", server.weights, uploads.extra[1]),
        )

        def newton():
            size = jnp.sqrt(jnp.maximum(jnp.abs(jnp.diagonal(hessian)), jnp.finfo(energy.dtype).tiny))
            values, vectors = jnp.linalg.eigh(hessian / jnp.outer(size, size))
            values = jnp.maximum(jnp.abs(values), 1e-7 * jnp.abs(values).max())
            # turned back by the vectors: their signs follow from rounding, which the draws must not do
            root = (vectors / size[:, None] / jnp.sqrt(values)) @ vectors.T
            better = (energy < state.energy) & jnp.all(jnp.isfinite(root)) & jnp.isfinite(energy)
            move, length = -root @ (root.T @ gradient), jnp.ones_like(energy)
            there = _LaplaceState(state.point, state.point, state.point, energy, move, length, root)
            back = state._replace(length=state.length / 4)
            chosen = jax.tree.map(lambda a, b: jnp.where(better, a, b), there, back)
            return chosen._replace(point=chosen.best + chosen.length * chosen.move)

        state = jax.lax.cond(server.round < self.newton_rounds, newton, lambda: state)
        noise = state.root @ normals(server.noise_key, 0, state.best.shape[0])
        return state._replace(position=state.best + jnp.sqrt(hyper["temperature"]) * noise)


def laplace(*, newton_rounds: int = 20, temperature: float = 1.0) -> Laplace:
    """Laplace approximation at the mode that federated Newton steps find.

    Parameters
    ----------
    newton_rounds
        Rounds of Newton's method; the warm-up of a run must cover them.
    temperature
        τ.

    Notes
    -----
    Exact on Gaussian posteriors; elsewhere skewness and heavy tails are lost, and no number of draws shows
    it. Gradients and Hessians are sums over rows, without any privacy.

    Examples
    --------
    >>> laplace(newton_rounds=8).preparation_rounds
    8
    """
    return Laplace(newton_rounds=check_count("newton-rounds", newton_rounds, 1), temperature=temperature)
