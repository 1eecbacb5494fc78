r"""Quantised Langevin stochastic dynamics (QLSD): one step per round from compressed gradients.

    θ ← θ − η (N/|A|) Σ_{c∈A} Q(H_c) + √(2ητ) ξ,

A the participants, H_c unbiased for ∇U_c = p_c ∇f^c, Q an unbiased compressor.

Reference: Vono, Plassier, Durmus, Dieuleveut and Moulines, "QLSD: Quantised Langevin stochastic dynamics for
Bayesian federated learning", AISTATS 2022.
"""

from __future__ import annotations

from dataclasses import dataclass

import jax

from fald.core.reveals import Reveals
from fald.langevin.client import Local
from fald.langevin.compressors import Compressor, qsgd, send
from fald.langevin.method import Peer, Spent, Upload, numbers_as_bytes
from fald.langevin.server import Server, average, diffusion


@dataclass(frozen=True, kw_only=True)
class QLSD(Peer):
    """The method; made by ``qlsd``."""

    compressor: Compressor
    name: str = "qlsd"

    reveals = Reveals(("quantised", "value"), sums=True)
    participation = "any"

    def client_update(self, hyper, local: Local, message: jax.Array, memory: tuple[()]):
        """The compressed gradient, weighed so that participants stand for all clients."""
        gradient = local.share / local.chance * local.grad(message, 0)
        moved, sent = send(self.compressor, local.choice_key, gradient)
        spent = Spent(1, sent, numbers_as_bytes(message.shape[0]), 1)
        where = message - hyper["step_size"] * moved
        return Upload(where, local.energy(message, 0), spent=spent), memory

    def server_update(self, hyper, state: jax.Array, uploads: Upload, server: Server):
        """The average of the clients' moves, and the noise."""
        noise = diffusion(server, state.shape[0], hyper["step_size"], hyper["temperature"])
        return average(uploads.position, server.weights) + noise


def qlsd(
    *,
    step_size: float,
    levels: float = 16,
    temperature: float = 1.0,
    batch_size: int | None = None,
    compressor: Compressor | None = None,
) -> QLSD:
    """QLSD: Langevin steps from quantised gradients.

    Parameters
    ----------
    step_size, temperature
        η and τ.
    levels
        s of the QSGD quantiser; ``math.inf`` sends gradients as they are, which is SGLD.
    batch_size
        Rows per stochastic gradient; None for exact gradients.
    compressor
        Another compressor instead; a biased one such as ``top_k`` biases the chain.

    Notes
    -----
    Quantisation adds noise that does not vanish at the mode where clients differ: the chain is too hot
    by an amount that grows with the step size. Partial participation adds more.

    Examples
    --------
    >>> qlsd(step_size=1e-3, levels=8).compressor
    QSGD(levels=8)
    """
    return QLSD(
        step_size=step_size,
        temperature=temperature,
        batch_size=batch_size,
        compressor=qsgd(levels) if compressor is None else compressor,
    )
