r"""Federated posterior averaging (FedPA): a point estimate from local estimates of posterior covariances.

A client runs SGD from θ on its own f^c and takes l samples, each the average of K iterates. With their mean μ̂
and sample covariance S,

    Σ̂ = r I + (1−r) S,   r = 1/(1+(l−1)ϱ),   Δ_c = Σ̂⁻¹(θ − μ̂),      θ ← θ − η_s Σ_c w_c Δ_c.

This converges to a point. It is not a sampler: its iterates are not draws from a posterior.

Reference: Al-Shedivat, Gillenwater, Xing and Rostamizadeh, "Federated learning via posterior averaging",
ICLR 2021.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import jax
import jax.numpy as jnp

from fald.core.checks import check_count, check_positive
from fald.core.reveals import Reveals
from fald.langevin.client import Local
from fald.langevin.method import Cost, Peer, Spent, Upload, numbers_as_bytes
from fald.langevin.server import Server, average


@dataclass(frozen=True, kw_only=True)
class FedPA(Peer):
    """The method; made by ``fedpa``."""

    local_steps: int = 10
    num_burn: int = 10
    num_samples: int = 5
    shrinkage: float = 0.1
    server_step: float = 0.5
    name: str = "fedpa"

    reveals = Reveals(sums=True)
    participation = "any"
    client_steps = True  # local chains follow their client's energy
    _numbers: ClassVar[tuple[str, ...]] = ("step_size", "temperature", "shrinkage", "server_step")

    @property
    def point_estimate(self) -> bool:
        """Always."""
        return True

    def cost(self, dim: int) -> Cost:
        """A position down, Δ up, and the gradients of the local run."""
        gradients = self.num_burn + self.num_samples * self.local_steps
        return Cost(Spent(1, numbers_as_bytes(dim), numbers_as_bytes(dim), gradients))

    def client_update(self, hyper, local: Local, message: jax.Array, memory: tuple[()]):
        """Local SGD, its samples, and the move that they propose."""

        def step(k, theta):
            return theta - hyper["step_size"] * local.grad(theta, k)

        steps = hyper["local_steps"]

        def one_sample(theta, i):
            def walk(j, carry):
                theta, sums = carry
                theta = step(self.num_burn + i * steps + j, theta)
                return theta, sums + theta

            theta, sums = jax.lax.fori_loop(0, steps, walk, (theta, jnp.zeros_like(theta)))
            return theta, sums / steps

        burnt = jax.lax.fori_loop(0, self.num_burn, step, message)
        _, samples = jax.lax.scan(one_sample, burnt, jnp.arange(self.num_samples))
        move = _shrunk_solve(samples, message - samples.mean(0), hyper["shrinkage"])
        return Upload(message - hyper["server_step"] * move, local.energy(message, 0)), memory

    def server_update(self, hyper, state: jax.Array, uploads: Upload, server: Server):
        """The average of the proposed moves."""
        return average(uploads.position, server.weights)


def _shrunk_solve(samples: jax.Array, vector: jax.Array, shrinkage) -> jax.Array:
    """Σ̂⁻¹ v for samples (l, d), by the l × l system of Woodbury's identity."""
    count = samples.shape[0]
    if count == 1:
        return vector
    ratio = 1 / (1 + (count - 1) * shrinkage)
    apart = samples - samples.mean(0)
    inner = ratio * (count - 1) / (1 - ratio) * jnp.eye(count, dtype=samples.dtype) + apart @ apart.T
    return (vector - apart.T @ jnp.linalg.solve(inner, apart @ vector)) / ratio


def fedpa(
    *,
    local_steps: int = 10,
    step_size: float,
    num_burn: int = 10,
    num_samples: int = 5,
    shrinkage: float = 0.1,
    server_step: float = 0.5,
    batch_size: int | None = None,
) -> FedPA:
    """FedPA: a point estimate, labelled so.

    Parameters
    ----------
    local_steps
        K, iterates averaged into one sample.
    step_size
        Of the local SGD on f^c.
    num_burn, num_samples
        SGD steps before the first sample, and l.
    shrinkage
        ϱ > 0.
    server_step
        η_s.
    batch_size
        Rows per stochastic gradient. None: exact gradients, whose iterates hardly scatter; Σ̂ then shrinks
        to r I.

    Examples
    --------
    >>> fedpa(step_size=1e-3).point_estimate
    True
    """
    return FedPA(
        step_size=step_size,
        batch_size=batch_size,
        local_steps=check_count("local-steps", local_steps, 1),
        num_burn=check_count("num-burn", num_burn, 0),
        num_samples=check_count("num-samples", num_samples, 1),
        shrinkage=check_positive("shrinkage", shrinkage),
        server_step=check_positive("server-step", server_step),
    )
