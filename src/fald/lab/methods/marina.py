r"""Langevin-MARINA: Langevin steps from compressed differences of gradients.

    x⁺ = x − η g + √(2ητ) ξ;   with probability p:  g⁺ = Σ_c ∇U_c(x⁺),
                               otherwise            g⁺ = g + Σ_c Q(∇U_c(x⁺) − ∇U_c(x)).

Reference: Sun, Salim and Richtárik, "Federated learning with a sampling algorithm under isoperimetry", 2022.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import jax
import jax.numpy as jnp

from fald.core.checks import check_probability
from fald.core.keys import uniforms
from fald.core.reveals import Reveals
from fald.langevin.client import Local
from fald.langevin.compressors import Compressor, qsgd, send
from fald.langevin.method import Peer, Spent, Upload, numbers_as_bytes
from fald.langevin.server import Server, average, diffusion


class _MarinaState(NamedTuple):
    position: jax.Array
    gradient: jax.Array
    whole: jax.Array  # whether whole gradients are asked for


@dataclass(frozen=True, kw_only=True)
class Marina(Peer):
    """The method; made by ``marina``."""

    compressor: Compressor
    probability: float = 0.2
    name: str = "marina"

    reveals = Reveals(("position", "value", "gradient"))
    _numbers = ("step_size", "temperature", "probability")

    def init(self, position: jax.Array) -> tuple[_MarinaState, jax.Array]:
        """Ask for whole gradients first; a client keeps its last gradient."""
        zero = jnp.zeros_like(position)
        return _MarinaState(position, zero, jnp.ones((), bool)), zero

    def client_update(self, hyper, local: Local, message: _MarinaState, memory: jax.Array):
        """The gradient, whole or as a compressed difference to the last one."""
        theta, before, whole = message
        gradient = local.grad(theta, 0)
        difference, sent = send(self.compressor, local.choice_key, gradient - memory)
        news = jnp.where(whole, gradient, difference)
        plain = numbers_as_bytes(theta.shape[0])
        spent = Spent(1, jnp.where(whole, plain, sent), plain, 1)
        where = theta - hyper["step_size"] * (news + jnp.where(whole, 0, before))
        return Upload(where, local.energy(theta, 0), news, spent), gradient

    def server_update(self, hyper, state: _MarinaState, uploads: Upload, server: Server):
        """A step, and the coin for the next round."""
        news = average(uploads.extra, server.weights)
        gradient = jnp.where(state.whole, news, state.gradient + news)
        noise = diffusion(server, gradient.shape[0], hyper["step_size"], hyper["temperature"])
        position = state.position - hyper["step_size"] * gradient + noise
        return _MarinaState(position, gradient, uniforms(server.choice_key, 0, 1)[0] < hyper["probability"])


def marina(
    *,
    step_size: float,
    levels: float = 16,
    probability: float = 0.2,
    temperature: float = 1.0,
    compressor: Compressor | None = None,
) -> Marina:
    """Langevin-MARINA: compressed differences of exact gradients, one step per round.

    Parameters
    ----------
    step_size, levels, temperature, compressor
        As for ``qlsd``.
    probability
        p ∈ (0, 1], chance of a round with whole gradients; 1 is SGLD with exact gradients.

    Examples
    --------
    >>> marina(step_size=1e-3, probability=0.1).probability
    0.1
    """
    return Marina(
        step_size=step_size,
        temperature=temperature,
        probability=check_probability("probability", probability),
        compressor=qsgd(levels) if compressor is None else compressor,
    )
