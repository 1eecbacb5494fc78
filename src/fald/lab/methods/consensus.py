r"""Consensus Monte Carlo and its parametric form: subposteriors sampled locally, one communication.

Client c samples π0^{1/N}·(its likelihood), whose energy is U_c = ℓ^c − (1/N) log π0, by Langevin steps,

    θ_c ← θ_c − (η/p_c) ∇U_c(θ_c) + √(2ητ/p_c) ξ_c,

and estimates the covariance Σ̂_c and mean μ̂_c of its subposterior. With W_c = Σ̂_c⁻¹ the server makes draw g as

    consensus   (Σ_c W_c)⁻¹ Σ_c W_c θ_{c,g},       parametric   N((Σ_c W_c)⁻¹ Σ_c W_c μ̂_c, (Σ_c W_c)⁻¹).

Nothing ever travels back to the clients. The first round holds burn-in and fit; every further round adds a
draw, which would travel in the same one message.

References: Scott, Blocker, Bonassi, Chipman, George and McCulloch, "Bayes and big data", 2016; Neiswanger,
Wang and Xing, "Asymptotically exact, embarrassingly parallel MCMC", UAI 2014.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import NamedTuple, Self

import jax
import jax.numpy as jnp

from fald.core.checks import check_count
from fald.core.errors import ConfigError
from fald.core.keys import normals
from fald.core.reveals import Reveals
from fald.langevin.client import Local
from fald.langevin.method import Answers, Peer, Spent, Upload, check_dim, numbers_as_bytes, triangle
from fald.langevin.server import Server
from fald.problem.data import FederatedData
from fald.problem.model import Model


class _LocalChain(NamedTuple):
    position: jax.Array
    mean: jax.Array
    weight: jax.Array  # W_c


@dataclass(frozen=True, kw_only=True)
class Consensus(Peer):
    """Both forms; made by ``consensus`` and ``consensus_parametric``."""

    local_steps: int = 10
    num_burn: int = 2000
    num_fit: int = 10_000
    parametric: bool = False
    name: str = "consensus"

    reveals = Reveals(("position", "value", "precision", "shift"))
    client_steps = True

    def prepare(self, model: Model, data: FederatedData, answers: Answers) -> Self:
        """Check that the covariance can be sent and estimated."""
        check_dim(self.name, model.dim)
        if self.num_fit < 20 * model.dim:
            raise ConfigError(
                f"num-fit must be at least 20 per parameter to estimate a covariance; "
                f"got {self.num_fit} for {model.dim} parameters",
                hint=f"set num-fit to {20 * model.dim} or more",
            )
        return self

    def init(self, position: jax.Array) -> tuple[jax.Array, _LocalChain]:
        """The local chain starts where the server does, without a fit."""
        unit = jnp.eye(position.shape[0], dtype=position.dtype)
        return position, _LocalChain(position, position, unit)

    def _walk(self, hyper, local: Local, start, steps, *, visit=lambda carry, theta: carry, carry=()):
        """Local Langevin steps, numbered ``steps``, from ``start``; ``visit(carry, θ)`` sees every one."""

        def grad(theta, k):
            prior = local.prior_grad(theta)
            return local.grad(theta, k) - prior + prior / (local.num_clients * local.share)

        scale = jnp.sqrt(2 * hyper["step_size"] * hyper["temperature"] / local.share)

        def step(k, state):
            theta, carry = state
            theta = theta - hyper["step_size"] * grad(theta, k)
            theta = theta + scale * normals(local.own_key, k, theta.shape[0])
            return theta, visit(carry, theta)

        return jax.lax.fori_loop(steps[0], steps[1], step, (start, carry))

    def _fit(self, hyper, local: Local, start: jax.Array) -> _LocalChain:
        """Burn in, then estimate mean and covariance of the subposterior."""
        middle, _ = self._walk(hyper, local, start, (0, self.num_burn))
        # sums are taken around this point of the chain, so that float32 does not cancel

        def visit(sums, theta):
            first, second = sums
            apart = theta - middle
            return first + apart, second + jnp.outer(apart, apart)

        zeros = jnp.zeros_like(middle), jnp.zeros_like(middle, shape=2 * middle.shape)
        steps = self.num_burn, self.num_burn + self.num_fit
        theta, (first, second) = self._walk(hyper, local, middle, steps, visit=visit, carry=zeros)
        shift = first / self.num_fit
        covariance = (second - self.num_fit * jnp.outer(shift, shift)) / (self.num_fit - 1)
        # energies are divided by the temperature nowhere, so W_c is that of the tempered subposterior
        return _LocalChain(theta, middle + shift, jnp.linalg.inv(covariance))

    def client_update(self, hyper, local: Local, message: jax.Array, memory: _LocalChain):
        """Fit in the first round; then K steps to the next draw, which the parametric form does not need."""
        first = local.round == 0  # the same in all chains
        memory = jax.lax.cond(first, lambda: self._fit(hyper, local, message), lambda: memory)
        steps = 0 if self.parametric else hyper["local_steps"]
        begin = self.num_burn + self.num_fit
        theta, _ = self._walk(hyper, local, memory.position, (begin, begin + steps))
        dim, once = theta.shape[0], jnp.where(first, 1, 0)
        sent = once * (dim * self.parametric + triangle(dim)) + dim * (not self.parametric)
        spent = Spent(once, numbers_as_bytes(sent), 0, once * begin + steps)
        pull = memory.weight @ (memory.mean if self.parametric else theta)
        upload = Upload(theta, local.energy(theta, 0), (memory.weight, pull), spent)
        return upload, memory._replace(position=theta)

    def server_update(self, hyper, state: jax.Array, uploads: Upload, server: Server):
        """Combine; nothing is broadcast."""
        weight, pull = (part.sum(0) for part in uploads.extra)
        mean = jnp.linalg.solve(weight, pull)
        if not self.parametric:
            return mean
        root = jnp.linalg.cholesky(weight)
        noise = jax.scipy.linalg.solve_triangular(root.T, normals(server.noise_key, 0, mean.shape[0]))
        return mean + noise


def consensus(
    *,
    step_size: float,
    local_steps: int = 10,
    num_burn: int = 2000,
    num_fit: int = 10_000,
    temperature: float = 1.0,
    batch_size: int | None = None,
) -> Consensus:
    """Consensus Monte Carlo: weighted averages of draws from subposteriors.

    Parameters
    ----------
    step_size, temperature, batch_size
        η of the local chains, τ, and rows per stochastic gradient.
    local_steps
        Local steps between draws; they cost no communication, so take many.
    num_burn, num_fit
        Local steps before the fit, and in it. Local too.

    Notes
    -----
    Exact on Gaussian posteriors up to the local chains. Where subposteriors are not Gaussian, as with few
    rows or separated outcomes at a site, it is wrong and more draws do not help.

    Examples
    --------
    >>> consensus(step_size=1e-3).name
    'consensus'
    """
    return Consensus(
        step_size=step_size,
        temperature=temperature,
        batch_size=batch_size,
        local_steps=check_count("local-steps", local_steps, 1),
        num_burn=check_count("num-burn", num_burn, 0),
        num_fit=check_count("num-fit", num_fit, 2),
    )


def consensus_parametric(
    *,
    step_size: float,
    num_burn: int = 2000,
    num_fit: int = 10_000,
    temperature: float = 1.0,
    batch_size: int | None = None,
) -> Consensus:
    """Parametric consensus: the product of Gaussians fitted to the subposteriors.

    Parameters are those of ``consensus``; no draw travels, only means and covariances.

    Examples
    --------
    >>> consensus_parametric(step_size=1e-3).name
    'consensus-parametric'
    """
    given = {"num_burn": num_burn, "num_fit": num_fit, "temperature": temperature, "batch_size": batch_size}
    return replace(consensus(step_size=step_size, **given), parametric=True, name="consensus-parametric")
