r"""VR-FALD*: variance- and bias-reduced federated Langevin dynamics with random synchronisation.

Every client keeps its own X_c and moves it, the same batch in both stochastic terms,

    X_c ← X_c − Nη[∇Ũ_c(X_c) − ∇Ũ_c(Y) + (1/N) Σ_j ∇U_j(Y)] + √(2ητ)(ρ ξ̇ + √(N(1−ρ²)) ξ_c).

After each step, with probability ``sync`` all X_c ← X̄, and with probability ``refresh`` Y ← X̄, independently.
A round runs to the next such event, so its steps are geometric; a new Y needs a round of gradients. The
draw is X̄ = (1/N) Σ_c X_c.

Reference: Plassier, Durmus and Moulines, "Federated averaging Langevin dynamics: toward a unified theory and
new algorithms", AISTATS 2023, whose step is γ = Nη and correlation τ = ρ².
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import jax
import jax.numpy as jnp

from fald.core.checks import check_number, check_probability
from fald.core.keys import uniforms
from fald.core.reveals import Reveals
from fald.langevin.client import Local
from fald.langevin.method import Peer, Spent, Upload, numbers_as_bytes
from fald.langevin.noise import injected, langevin_steps
from fald.langevin.server import Server, average

_MOST_STEPS = 1_000_000


class _VRState(NamedTuple):
    position: jax.Array  # X̄
    anchor: jax.Array  # Y
    gradient: jax.Array  # Σ_j ∇U_j(Y)
    steps: jax.Array  # of the coming round
    sync: jax.Array  # whether clients take X̄ for their own
    renew: jax.Array  # whether the coming round is one of gradients at Y
    renewed: jax.Array  # whether the last round was


@dataclass(frozen=True, kw_only=True)
class VRFALD(Peer):
    """The method; made by ``vr_fald``."""

    sync: float = 0.1
    refresh: float = 0.02
    correlation: float = 0.0
    name: str = "vr-fald"

    _numbers = ("step_size", "temperature", "sync", "refresh", "correlation")

    reveals = Reveals(("position", "value", "gradient"))
    meets = "node"
    all_rows = True  # for exact gradients between the stochastic ones

    def init(self, position: jax.Array) -> tuple[_VRState, jax.Array]:
        """Ask for gradients at the start; a client keeps X_c."""
        yes, no = jnp.ones((), bool), jnp.zeros((), bool)
        zero, one = jnp.zeros_like(position), jnp.ones((), jnp.int32)
        return _VRState(position, position, zero, one, yes, yes, no), position

    def client_update(self, hyper, local: Local, message: _VRState, memory: jax.Array):
        """Steps up to the next event, or the gradient at the new Y."""
        start = jnp.where(message.sync, message.position, memory)
        own = local.num_clients * local.share  # N ∇U_c = own · ∇f^c
        dim = start.shape[0]

        def drift(x, k):
            reduced = own * (local.grad(x, k) - local.grad(message.anchor, k)) + message.gradient
            return -hyper["step_size"] * reduced

        def noise(k):
            scale = jnp.sqrt(2 * hyper["step_size"] * hyper["temperature"])
            correlation = hyper["correlation"]
            return injected(local, k, dim, scale=scale, correlation=correlation, variance=local.num_clients)

        steps = jnp.where(message.renew, 0, message.steps)
        x = langevin_steps(steps, drift, noise, start)
        gradient = local.full_grad(message.anchor)
        # the mean travels down when it is new to clients, the gradient in the round after it was summed
        down = message.renew | message.renewed | message.sync
        spent = Spent(
            1,
            numbers_as_bytes(dim),
            jnp.where(down, numbers_as_bytes(dim), 0),
            (1 if self.batch_size is None else 2) * steps,
            jnp.where(message.renew, 1, 0),
        )
        return Upload(x, local.energy(message.position, 0), gradient, spent), x

    def server_update(self, hyper, state: _VRState, uploads: Upload, server: Server):
        """The mean, which event ended the round, and how long the next one is."""
        no = jnp.zeros((), bool)
        first, second = uniforms(server.choice_key, 0, 2)
        sync, refresh = hyper["sync"], hyper["refresh"]
        either = sync + refresh - sync * refresh
        steps = 1 + jnp.floor(jnp.log1p(-first) / jnp.log1p(-jnp.minimum(either, 1 - 1e-7)))
        steps = jnp.clip(jnp.where(either >= 1, 1, steps), 1, _MOST_STEPS).astype(jnp.int32)
        after_gradients = state._replace(
            gradient=average(uploads.extra, server.weights), steps=steps, sync=no, renew=no, renewed=~no
        )
        mean = jnp.mean(uploads.position, axis=0)
        event = second * either  # uniform over: sync alone, both, refresh alone
        synced, renews = event < sync, event >= sync - sync * refresh
        after_steps = _VRState(
            mean, jnp.where(renews, mean, state.anchor), state.gradient, steps, synced, renews, no
        )
        return jax.tree.map(lambda a, b: jnp.where(state.renew, a, b), after_gradients, after_steps)


def vr_fald(
    *,
    step_size: float,
    sync: float = 0.1,
    refresh: float = 0.02,
    temperature: float = 1.0,
    correlation: float = 0.0,
    batch_size: int | None = None,
) -> VRFALD:
    """VR-FALD*: control variates against both client drift and minibatch noise.

    Parameters
    ----------
    step_size, temperature, batch_size
        η, τ and rows per stochastic gradient.
    sync
        Probability, after each step, that all clients take the mean: 1/sync steps between on average.
    refresh
        Probability, after each step, that the point of the control variates moves to the mean.
    correlation
        ρ; the reference writes τ = ρ².

    Notes
    -----
    Clients count equally in the mean whatever their rows, so a client that has most of the rows takes steps
    N p_c times as large as in FA-LD: choose a smaller step for unequal clients.

    Examples
    --------
    >>> vr_fald(step_size=1e-3, sync=0.05).sync
    0.05
    """
    return VRFALD(
        step_size=step_size,
        temperature=temperature,
        batch_size=batch_size,
        sync=check_probability("sync", sync),
        refresh=check_probability("refresh", refresh),
        correlation=check_number("correlation", correlation, 0, 1, rule="between 0 and 1"),
    )
