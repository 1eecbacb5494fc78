"""How uploads become the next state."""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp

from fald.core.keys import Stream, normals, stream_key
from fald.core.types import sum_last

_STREAMS = (Stream.SHARED_NOISE, Stream.SERVER_CHOICE)


class Server(NamedTuple):
    """What a method may use at the server in one round of one chain."""

    noise_key: jax.Array  # of noise that all clients share: added here, it equals noise of correlation 1
    choice_key: jax.Array  # of what else the server draws
    round: jax.Array
    weights: jax.Array  # (slots,) w_c of the uploads; zero: an empty slot

    @classmethod
    def at(cls, chain_key: jax.Array, round_index, weights: jax.Array) -> Server:
        """The view of one chain in one round."""
        noise, choice = (stream_key(chain_key, round_index, s) for s in _STREAMS)
        return cls(noise, choice, round_index, weights)


def diffusion(server: Server, dim: int, step_size, temperature) -> jax.Array:
    """√(2ητ) ξ, the noise of one Langevin step that the server adds."""
    return jnp.sqrt(2 * step_size * temperature) * normals(server.noise_key, 0, dim)


def total(extras: jax.Array, weights: jax.Array) -> jax.Array:
    """Sum over the slots that took part; ``extras`` (slots, …)."""
    active = (weights > 0).reshape(-1, *[1] * (extras.ndim - 1))
    return jnp.sum(jnp.where(active, extras, 0), axis=0)


def average(positions: jax.Array, weights: jax.Array) -> jax.Array:
    """Σ_s w_s β_s over the slots of one chain, β (slots, dim); empty slots may hold anything finite."""
    return weights @ positions


def drift(positions: jax.Array, weights: jax.Array, new_position: jax.Array) -> jax.Array:
    """‖β_s − θ‖ per slot: how far each client ended from the average; NaN for empty slots."""
    distance = jnp.sqrt(sum_last((positions - new_position) ** 2))
    return jnp.where(weights > 0, distance, jnp.nan)
