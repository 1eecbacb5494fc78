r"""FA-LD with control variates (SCAFFOLD), which take away the drift of clients towards their own modes.

Local step, with h̄ = Σ_c p_c h_c:

    β^c ← β^c − η(∇f̃^c(β^c) − h_c + h̄) + the noise of FA-LD.

Option I takes h_c = ∇f^c(θ) anew at every synchronised θ, which needs an exchange of its own: rounds
alternate between gradients and local steps, and the chain moves in every second one. Option II takes

    h_c ← h_c − h̄ + (θ_before − β^c)/(Kη)

from the steps themselves, and needs no further exchange or gradient.

Reference: Karimireddy, Kale, Mohri, Reddi, Stich and Suresh, "SCAFFOLD", ICML 2020, for the optimiser.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import NamedTuple

import jax
import jax.numpy as jnp

from fald.core.errors import ConfigError
from fald.core.reveals import Reveals
from fald.langevin.client import Local
from fald.langevin.fald import FALD, fald, variant
from fald.langevin.method import Cost, Spent, Upload, numbers_as_bytes
from fald.langevin.noise import NoiseScale
from fald.langevin.server import Server, average, total


class _ScaffoldState(NamedTuple):
    position: jax.Array
    control: jax.Array  # h̄
    moving: jax.Array  # option I: whether this round takes local steps


@dataclass(frozen=True)
class ScaffoldI(FALD):
    """Option I; made by ``scaffold``."""

    reveals = Reveals(("position", "value", "gradient"))
    all_rows = True  # for exact gradients between the stochastic ones
    participation = "full"  # h̄ is a sum over all clients

    def cost(self, dim: int) -> Cost:
        """Uploads say it: rounds of gradients and rounds of steps differ."""
        return Cost()

    def init(self, position: jax.Array) -> tuple[_ScaffoldState, jax.Array]:
        """Ask for gradients first; a client keeps h_c."""
        zero = jnp.zeros_like(position)
        return _ScaffoldState(position, zero, jnp.zeros((), bool)), zero

    def client_update(self, hyper, local: Local, message: _ScaffoldState, memory: jax.Array):
        """The gradient at the broadcast position, or K corrected steps."""
        start, control, moving = message
        h = jnp.where(moving, memory, local.full_grad(start))
        corrected = local._replace(grad=lambda theta, k: local.grad(theta, k) - h + control)
        steps = jnp.where(moving, hyper["local_steps"], 0)
        theta = self.steps({**hyper, "local_steps": steps}, corrected, start)
        sent = numbers_as_bytes(start.shape[0])
        spent = Spent(1, sent, sent, steps, jnp.where(moving, 0, 1))
        return Upload(theta, local.energy(start, 0), h, spent), h

    def server_update(self, hyper, state: _ScaffoldState, uploads: Upload, server: Server):
        """Average what was asked for, and ask for the other."""
        control = jnp.where(state.moving, state.control, average(uploads.extra, server.weights))
        position = jnp.where(state.moving, average(uploads.position, server.weights), state.position)
        return _ScaffoldState(position, control, ~state.moving)


@dataclass(frozen=True)
class ScaffoldII(FALD):
    """Option II; made by ``scaffold``."""

    reveals = Reveals(("position", "value", "gradient"))

    def cost(self, dim: int) -> Cost:
        """θ and h̄ down, β^c up: the server can work out h_c from it."""
        return Cost(Spent(1, numbers_as_bytes(dim), numbers_as_bytes(2 * dim), self.local_steps))

    def init(self, position: jax.Array) -> tuple[_ScaffoldState, jax.Array]:
        """Controls start at zero; a client keeps h_c."""
        zero = jnp.zeros_like(position)
        return _ScaffoldState(position, zero, jnp.ones((), bool)), zero

    def client_update(self, hyper, local: Local, message: _ScaffoldState, memory: jax.Array):
        """K corrected steps; what they moved is the next control."""
        start, control, _ = message
        corrected = local._replace(grad=lambda theta, k: local.grad(theta, k) - memory + control)
        theta = self.steps(hyper, corrected, start)
        change = (start - theta) / (hyper["local_steps"] * hyper["step_size"]) - control
        return Upload(theta, local.energy(start, 0), local.share * change), memory + change

    def server_update(self, hyper, state: _ScaffoldState, uploads: Upload, server: Server):
        """Average the positions, and keep h̄ = Σ_c p_c h_c over all clients, present or not."""
        control = state.control + total(uploads.extra, server.weights)
        return _ScaffoldState(average(uploads.position, server.weights), control, state.moving)


def scaffold(
    *,
    local_steps: int,
    step_size: float,
    option: int = 2,
    temperature: float = 1.0,
    correlation: float = 0.0,
    noise: NoiseScale = "realised",
    batch_size: int | None = None,
) -> FALD:
    """FA-LD corrected for client drift by SCAFFOLD's control variates.

    Parameters
    ----------
    local_steps, step_size, temperature, correlation, noise, batch_size
        As for ``fald``; the step size is a constant.
    option
        1: gradients at every synchronised position, two exchanges per move, all clients. 2: from the
        steps themselves.

    Notes
    -----
    On Gaussian energies option I leaves no bias in the mean, whatever K; the variance keeps that of the
    step size. The controls of option II carry the injected noise of one round into the next.

    Examples
    --------
    >>> scaffold(local_steps=10, step_size=1e-3, option=1).name
    'scaffold-1'
    """
    if option not in (1, 2):
        raise ConfigError(f"option must be 1 or 2; got {option!r}")
    if callable(step_size):
        raise ConfigError("scaffold needs a constant step-size", hint="schedules work with fald and sgld")
    given = {"temperature": temperature, "correlation": correlation, "noise": noise, "batch_size": batch_size}
    made = fald(local_steps=local_steps, step_size=step_size, name=f"scaffold-{option}", **given)
    return variant(ScaffoldI if option == 1 else ScaffoldII, made)


scaffold_1 = functools.partial(scaffold, option=1)
scaffold_2 = functools.partial(scaffold, option=2)
