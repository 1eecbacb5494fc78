"""The noise injected into a local step."""

from __future__ import annotations

from typing import Literal

import jax
import jax.numpy as jnp

from fald.keys import normals

NoiseScale = Literal["realised", "paper"]


def own_variance(noise: NoiseScale, share, weight):
    """v_c, the variance factor of a client's own noise.

    ``"realised"``: 1/w_c, the weight with which the update enters this round's average, so that the
    averaged noise has variance 2ητ in every round. ``"paper"``: 1/p_c whatever the participation;
    with S of N devices the average is then about N/S times too hot.
    """
    return 1.0 / share if noise == "paper" else 1.0 / jnp.where(weight > 0, weight, 1.0)


def langevin_step(
    position: jax.Array,
    drift: jax.Array,
    shared_key: jax.Array,
    own_key: jax.Array,
    step,
    *,
    step_size,
    temperature,
    correlation,
    variance,
    uses_shared: bool,
    uses_own: bool,
) -> jax.Array:
    """θ + drift + √(2ητ)·(ρ ξ̇ + √((1−ρ²) v_c) ξ^c): noise shared by all clients plus the client's own.

    ``uses_shared`` and ``uses_own`` are static: a part whose factor is zero is not drawn.
    """
    dim = position.shape[0]

    def move(number, position):
        # by the number of the loop, or the compiler would draw the noise before the loop, in one more pass
        address = step + number
        noise = jnp.zeros((), drift.dtype)
        if uses_shared:
            noise += correlation * normals(shared_key, address, dim)
        if uses_own:
            noise += jnp.sqrt((1 - correlation**2) * variance) * normals(own_key, address, dim)
        return (position + drift + jnp.sqrt(2 * step_size * temperature) * noise).astype(position.dtype)

    # A loop that runs once, which the compiler cannot know: it would otherwise merge the noise with the
    # gradient into one pass, in which neither uses the vector unit.
    once = jnp.where(temperature > 0, 1, 0)
    return jax.lax.fori_loop(0, once, move, position)
