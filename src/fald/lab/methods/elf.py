r"""ELF: Langevin steps with error feedback, compressed in both directions by a contractive compressor.

    x ← x − η g + √(2ητ) ξ,   w ← w + C(x − w)  (down),   g_c ← g_c + C(∇U_c(w) − g_c)  (up),   g = Σ_c g_c.

Reference: Karagulyan and Richtárik, "ELF: Federated Langevin algorithms with primal, dual and bidirectional
compression", 2023.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import jax
import jax.numpy as jnp

from fald.core.reveals import Reveals
from fald.langevin.client import Local
from fald.langevin.compressors import Compressor, send, top_k
from fald.langevin.method import Peer, Spent, Upload
from fald.langevin.server import Server, average, diffusion


class _ElfState(NamedTuple):
    position: jax.Array
    seen: jax.Array  # w, what clients know of x
    gradient: jax.Array  # Σ_c p_c g_c
    down: jax.Array  # bytes of the last message down


@dataclass(frozen=True, kw_only=True)
class Elf(Peer):
    """The method; made by ``elf``."""

    compressor: Compressor
    name: str = "elf"

    reveals = Reveals(("quantised", "value", "quantised"))

    def init(self, position: jax.Array) -> tuple[_ElfState, jax.Array]:
        """Clients know the start; each keeps g_c."""
        zero = jnp.zeros_like(position)
        return _ElfState(position, position, zero, jnp.zeros((), jnp.int32)), zero

    def client_update(self, hyper, local: Local, message: _ElfState, memory: jax.Array):
        """What the server does not know of the gradient, compressed."""
        news, sent = send(self.compressor, local.choice_key, local.grad(message.seen, 0) - memory)
        known = memory + news
        where = message.position - hyper["step_size"] * known
        spent = Spent(1, sent, message.down, 1)
        return Upload(where, local.energy(message.seen, 0), news, spent), known

    def server_update(self, hyper, state: _ElfState, uploads: Upload, server: Server):
        """A step, and what clients get to know of it."""
        gradient = state.gradient + average(uploads.extra, server.weights)
        noise = diffusion(server, gradient.shape[0], hyper["step_size"], hyper["temperature"])
        position = state.position - hyper["step_size"] * gradient + noise
        news, sent = send(self.compressor, server.choice_key, position - state.seen)
        return _ElfState(position, state.seen + news, gradient, sent)


def elf(*, step_size: float, fraction: float = 0.25, temperature: float = 1.0) -> Elf:
    """ELF with top-k compression up and down.

    Parameters
    ----------
    step_size, temperature
        η and τ. Sparse messages need smaller steps than SGLD.
    fraction
        Share of the entries that travel; 1 is SGLD with exact gradients.

    Notes
    -----
    The first message down is not counted: all know where the chain starts.

    Examples
    --------
    >>> elf(step_size=1e-3, fraction=0.1).compressor
    TopK(fraction=0.1)
    """
    return Elf(step_size=step_size, temperature=temperature, compressor=top_k(fraction))
