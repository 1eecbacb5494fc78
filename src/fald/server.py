"""How uploads become the next state."""

from __future__ import annotations

import jax
import jax.numpy as jnp


def average(positions: jax.Array, weights: jax.Array) -> jax.Array:
    """Σ_s w_s β_s over the slots of one chain.

    Parameters
    ----------
    positions
        (slots, dim) uploads; those of empty slots may hold anything finite.
    weights
        (slots,) with zeros for empty slots.
    """
    return jnp.sum(weights[:, None] * positions, axis=0)


def drift(positions: jax.Array, weights: jax.Array, new_position: jax.Array) -> jax.Array:
    """‖β_s − θ‖ per slot: how far each client ended from the average; NaN for empty slots."""
    distance = jnp.sqrt(jnp.sum((positions - new_position) ** 2, axis=-1))
    return jnp.where(weights > 0, distance, jnp.nan)
