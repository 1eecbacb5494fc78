"""The noise injected into a local step."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from fald.core.keys import normals
from fald.langevin.client import Local
from fald.settings.fald import NoiseScale


def own_variance(noise: NoiseScale, share, weight):
    """v_c, the variance factor of a client's own noise.

    ``"realised"``: 1/w_c, the weight with which the update enters this round's average, so that the
    averaged noise has variance 2ητ in every round. ``"paper"``: 1/p_c whatever the participation;
    with S draws from N equal devices the average is then too hot by (N+S−1)/S with replacement and by N/S
    without.
    """
    return 1.0 / share if noise == "paper" else 1.0 / jnp.where(weight > 0, weight, 1.0)


def injected(
    local: Local,
    step,
    dim: int,
    *,
    scale,
    correlation,
    variance,
    uses_shared: bool = True,
    uses_own: bool = True,
) -> jax.Array:
    """√(2ητ)·(ρ ξ̇ + √((1−ρ²) v_c) ξ^c): noise shared by all clients plus the client's own.

    ``scale`` is √(2ητ). ``uses_shared``, ``uses_own`` are static: a part whose factor is zero is not drawn.
    """
    total = jnp.zeros((dim,), jnp.zeros(()).dtype)
    # scales are multiplied first: often they are the same in all steps, and then computed once
    if uses_shared:
        total += (scale * correlation) * normals(local.shared_key, step, dim)
    if uses_own:
        # as a product, because 1 − ρ² would lose its digits near ρ = 1
        own = jnp.sqrt((1 - correlation) * (1 + correlation) * variance)
        total += (scale * own) * normals(local.own_key, step, dim)
    return total


def langevin_steps(
    count, drift_fn: Callable[[jax.Array, Any], jax.Array], noise_fn: Callable[[Any], Any], start: jax.Array
) -> jax.Array:
    """Where ``count`` steps θ ← θ + drift_fn(θ, k) + noise_fn(k) from ``start`` end.

    A turn of the loop begins with the drift of the last one and ends with the next. Noise is then added to
    numbers that are there, in a pass of its own and in place: the compiler would merge it with a gradient
    computed just before, and in such a pass neither uses the vector unit.
    """

    def move(k, theta, drift):
        return (theta + drift + noise_fn(k)).astype(start.dtype)

    def turn(k, carry):
        theta = move(k, *carry)
        return theta, drift_fn(theta, k + 1).astype(start.dtype)

    # under a condition, because a compiler that sees the last move would make it again for every use of it
    before_last = jax.lax.fori_loop(0, count - 1, turn, (start, drift_fn(start, 0).astype(start.dtype)))
    return jax.lax.cond(count > 0, lambda: move(count - 1, *before_last), lambda: start)


def underdamped_steps(
    count, momentum, moves: tuple[Callable, Callable, Callable], start: jax.Array
) -> jax.Array:
    """Where ``count`` steps with momentum from ``start`` end, the first of them with a velocity drawn anew.

    ``moves`` are the gradient of (θ, k), the noise of (k, variance) and the step size η of k. Velocities have
    the noise's variance per temperature, 1, in every step: one that is drawn anew and then moves by √(2η) is
    the noise of a Langevin step. Turns of the loop are as in ``langevin_steps``.
    """
    gradient_fn, noise_fn, step_size_fn = moves

    def move(k, theta, velocity, gradient):
        kept = jnp.where(k == 0, 0.0, momentum).astype(start.dtype)
        eta = step_size_fn(k)
        kick = (1 + kept) * jnp.sqrt(eta / 2) * gradient
        velocity = kept * velocity - kick + noise_fn(k, (1 - kept) * (1 + kept))
        # both uses of the velocity would draw its noise
        velocity = jax.lax.optimization_barrier(velocity.astype(start.dtype))
        return (theta + jnp.sqrt(2 * eta) * velocity).astype(start.dtype), velocity

    def turn(k, carry):
        theta, velocity = move(k, *carry)
        return theta, velocity, gradient_fn(theta, k + 1).astype(start.dtype)

    first = (start, jnp.zeros_like(start), gradient_fn(start, 0).astype(start.dtype))
    before_last = jax.lax.fori_loop(0, count - 1, turn, first)
    return jax.lax.cond(count > 0, lambda: move(count - 1, *before_last)[0], lambda: start)
