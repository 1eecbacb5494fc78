r"""QLSD++: quantised Langevin steps with variance-reduced gradients and a memory at every client.

    θ ← θ − η [Σ_c m_c + (N/|A|) Σ_{c∈A} Q(H_c − m_c)] + √(2ητ) ξ,      m_c ← m_c + a Q(H_c − m_c), c ∈ A,

a = 1/(1+ω). H_c is the SVRG gradient ∇Ũ_c(θ) − ∇Ũ_c(w) + ∇U_c(w), the same batch in both stochastic terms,
with a reference w that a client renews at its first visit in every period of ``refresh`` rounds.

Reference: Vono, Plassier, Durmus, Dieuleveut and Moulines, "QLSD", AISTATS 2022.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import jax
import jax.numpy as jnp

from fald.core.checks import check_count
from fald.core.reveals import Reveals
from fald.langevin.client import Local
from fald.langevin.compressors import Compressor, qsgd, send
from fald.langevin.method import Peer, Spent, Upload, numbers_as_bytes
from fald.langevin.server import Server, diffusion, total


class _QLSDState(NamedTuple):
    position: jax.Array
    memory: jax.Array  # Σ_c E[w_c] m_c, over all clients


class _QLSDMemory(NamedTuple):
    memory: jax.Array  # m_c, in the scale of H_c
    reference: jax.Array  # w
    gradient: jax.Array  # ∇f^c(w)
    period: jax.Array  # in which w was taken


@dataclass(frozen=True, kw_only=True)
class QLSDPlus(Peer):
    """The method; made by ``qlsd_plus``."""

    compressor: Compressor
    refresh: int = 100
    name: str = "qlsd++"

    reveals = Reveals(("quantised", "value", "quantised", "quantised"))
    participation = "any"
    all_rows = True  # for exact gradients between the stochastic ones

    def init(self, position: jax.Array) -> tuple[_QLSDState, _QLSDMemory]:
        """No memory yet, and no reference."""
        zero = jnp.zeros_like(position)
        return _QLSDState(position, zero), _QLSDMemory(zero, zero, zero, jnp.full((), -1, jnp.int32))

    def broadcast(self, state: _QLSDState) -> jax.Array:
        """The position travels."""
        return state.position

    def _gradient(self, local: Local, theta: jax.Array, kept: _QLSDMemory):
        """∇f^c or its SVRG estimate, the new reference, and the gradients that it took."""
        if self.batch_size is None:
            return local.grad(theta, 0), kept, Spent(batch_gradients=1)
        period = (local.round // self.refresh).astype(jnp.int32)
        # with all clients present the answer is the same in all chains, so that nothing is computed in vain
        stale = local.round % self.refresh == 0 if local.always else kept.period != period
        reference, gradient = jax.lax.cond(
            stale, lambda: (theta, local.full_grad(theta)), lambda: (kept.reference, kept.gradient)
        )
        estimate = local.grad(theta, 0) - local.grad(reference, 0) + gradient
        kept = _QLSDMemory(kept.memory, reference, gradient, period)
        return estimate, kept, Spent(batch_gradients=2, full_gradients=jnp.where(stale, 1, 0))

    def client_update(self, hyper, local: Local, message: jax.Array, memory: _QLSDMemory):
        """What the memory does not know of the gradient, compressed."""
        estimate, memory, worked = self._gradient(local, message, memory)
        news, sent = send(
            self.compressor, local.choice_key, local.share / local.chance * estimate - memory.memory
        )
        rate = 1 / (1 + self.compressor.variance(message.shape[0]))
        learned = rate * news
        where = message - hyper["step_size"] * (memory.memory + news)
        spent = worked._replace(exchanges=1, bytes_up=sent, bytes_down=numbers_as_bytes(message.shape[0]))
        upload = Upload(where, local.energy(message, 0), (news, local.chance * learned), spent)
        return upload, memory._replace(memory=memory.memory + learned)

    def server_update(self, hyper, state: _QLSDState, uploads: Upload, server: Server):
        """A step along the memories of all and the news of the participants."""
        news, learned = uploads.extra
        gradient = state.memory + jnp.sum(server.weights[:, None] * news, axis=0)
        noise = diffusion(server, gradient.shape[0], hyper["step_size"], hyper["temperature"])
        position = state.position - hyper["step_size"] * gradient + noise
        return _QLSDState(position, state.memory + total(learned, server.weights))


def qlsd_plus(
    *,
    step_size: float,
    levels: float = 16,
    refresh: int = 100,
    temperature: float = 1.0,
    batch_size: int | None = None,
    compressor: Compressor | None = None,
) -> QLSDPlus:
    """QLSD++: compressed, variance-reduced, with memory.

    Parameters
    ----------
    step_size, levels, temperature, compressor
        As for ``qlsd``.
    refresh
        Rounds between renewals of the SVRG reference.
    batch_size
        Rows per stochastic gradient. None: exact gradients, which need no reference.

    Examples
    --------
    >>> qlsd_plus(step_size=1e-3).name
    'qlsd++'
    """
    return QLSDPlus(
        step_size=step_size,
        temperature=temperature,
        batch_size=batch_size,
        refresh=check_count("refresh", refresh, 1),
        compressor=qsgd(levels) if compressor is None else compressor,
    )
