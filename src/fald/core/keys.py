"""Named random streams.

Every random number of a run is addressed by (chain, round, stream, client, step, place) and computed
from the run's key and that address alone, by the counter-based generator Threefry-2x32. Nothing is
split by the number of clients or chains, so a chain does not change when others are added, and any
engine that knows the address draws the same number.

The generator is written out here because JAX's own is a loop of small kernels on CPU; unrolled, it
fuses with whatever uses its words and is several times faster for the short vectors of this package.
It is traced once for each shape, because a program draws in many places; what was traced is called
there, and the compiler puts it in place.
Reference: Salmon, Moraes, Dror and Shaw, "Parallel random numbers: as easy as 1, 2, 3", SC 2011.
"""

from __future__ import annotations

import enum
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from fald.core.errors import ConfigError

_ROTATIONS = ((13, 15, 26, 6), (17, 29, 16, 24))


class Stream(enum.IntEnum):
    """What a key is used for; the numbers are part of the reproducibility contract."""

    PARTICIPATION = 0
    SHARED_NOISE = 1
    CLIENT_NOISE = 2
    BATCH = 3
    CHAIN = 4
    CLIENT_CHOICE = 5
    SERVER_CHOICE = 6
    MODEL = 7


def as_key(rng_key: jax.Array | int) -> tuple[jax.Array, Any]:
    """A JAX key from a key or a seed, and what to write down of it."""
    if isinstance(rng_key, int | np.integer) and not isinstance(rng_key, bool):
        seed = int(rng_key)
        if not 0 <= seed < 2**63:
            raise ConfigError(f"a seed must be between 0 and 2^63 − 1; got {seed}")
        # both halves: JAX's own key drops the upper one in float32
        return jax.random.wrap_key_data(jnp.array([seed >> 32, seed & 0xFFFFFFFF], jnp.uint32)), seed
    if not isinstance(rng_key, jax.Array):
        raise ConfigError(f"rng_key must be a JAX key or an integer seed; got {rng_key!r}")
    key = rng_key if jnp.issubdtype(rng_key.dtype, jax.dtypes.prng_key) else jax.random.wrap_key_data(rng_key)
    return key, np.asarray(jax.random.key_data(key)).tolist()


def key_words(key: jax.Array) -> jax.Array:
    """The (2,) uint32 words of a JAX key, or of words that are already plain."""
    if jnp.issubdtype(key.dtype, jax.dtypes.prng_key):
        key = jax.random.key_data(key)
    words = key.reshape(-1)
    start = words[:2]
    for i in range(2, words.shape[0], 2):
        start = fold(start, words[i], words[i + 1])
    return start


def threefry(key: jax.Array, first, second) -> tuple[jax.Array, jax.Array]:
    """Two random words from a (2,) key and a counter of two words, 20 rounds."""
    first, second = (jnp.asarray(word).astype(jnp.uint32) for word in (first, second))
    return _mixed(key, *jnp.broadcast_arrays(first, second))


@jax.jit
def _mixed(key: jax.Array, x0: jax.Array, x1: jax.Array) -> tuple[jax.Array, jax.Array]:
    k0, k1 = key[0], key[1]
    schedule = (k0, k1, k0 ^ k1 ^ jnp.uint32(0x1BD11BDA))
    x0, x1 = x0 + k0, x1 + k1
    for group in range(5):
        for rotation in _ROTATIONS[group % 2]:
            x0 = x0 + x1
            x1 = (x1 << jnp.uint32(rotation)) | (x1 >> jnp.uint32(32 - rotation))
            x1 = x0 ^ x1
        x0 = x0 + schedule[(group + 1) % 3]
        x1 = x1 + schedule[(group + 2) % 3] + jnp.uint32(group + 1)
    return x0, x1


def fold(key: jax.Array, first, second) -> jax.Array:
    """The key at an address below ``key``."""
    return jnp.stack(threefry(key, first, second))


def chain_key(rng_key: jax.Array, chain) -> jax.Array:
    """Key of one chain."""
    return fold(key_words(rng_key), chain, Stream.CHAIN)


def stream_key(chain_key: jax.Array, round_index, stream: Stream) -> jax.Array:
    """Key of one stream in one round of one chain."""
    return fold(key_words(chain_key), round_index, stream)


def client_key(stream_key: jax.Array, client) -> jax.Array:
    """Key of one client within a stream."""
    return fold(stream_key, client, 0)


def words(key: jax.Array, step, pairs: int) -> tuple[jax.Array, jax.Array]:
    """Two arrays of ``pairs`` random words for one step."""
    return threefry(key_words(key), step, jnp.arange(pairs, dtype=jnp.uint32))


@functools.partial(jax.jit, static_argnums=2)
def integers(key: jax.Array, step, count: int, span) -> jax.Array:
    """(count,) integers, entry i uniform on {0, …, span_i − 1}, as int32.

    The high word of a 32-bit random word times ``span``: off the uniform law by less than span/2³².
    """
    first, second = words(key, step, (count + 1) // 2)
    word = jnp.stack([first, second], axis=1).reshape(-1)[:count]
    span = jnp.broadcast_to(jnp.asarray(span), (count,)).astype(jnp.uint32)
    mask = jnp.uint32(0xFFFF)
    low = (word & mask) * (span & mask)
    cross_a = (word >> 16) * (span & mask) + (low >> 16)
    cross_b = (word & mask) * (span >> 16) + (cross_a & mask)
    return ((word >> 16) * (span >> 16) + (cross_a >> 16) + (cross_b >> 16)).astype(jnp.int32)


@functools.partial(jax.jit, static_argnums=2)
def uniforms(key: jax.Array, step, count: int) -> jax.Array:
    """(count,) numbers uniform on the multiples of 2⁻²⁴ in [0, 1), exact in float32."""
    first, second = words(key, step, (count + 1) // 2)
    word = jnp.concatenate([first, second])[:count]
    return (word >> 8).astype(jnp.zeros(()).dtype) * 2.0**-24


@functools.partial(jax.jit, static_argnums=2)
def normals(key: jax.Array, step, count: int) -> jax.Array:
    """(count,) standard normals in the run's floating type, by inversion.

    In float32 one word makes one number and |z| ends at 6.3, which cuts 3e-10 of the mass; in float64
    two words make one number. Number i needs no other number, so that all are computed in one pass
    together with what uses them: joining both words of a block into one array would cost more than
    the second word saves.
    """
    dtype = jnp.zeros(()).dtype
    if dtype == jnp.float64:
        high, low = words(key, step, count)
        uniform = (high.astype(dtype) * 2.0**32 + low.astype(dtype) + 0.5) * 2.0**-63 - 1.0
        limit = 1 - 2.0**-53
        return jnp.asarray(2.0**0.5, dtype) * jax.lax.erf_inv(jnp.clip(uniform, -limit, limit))
    return normal_of_word(words(key, step, count)[0])


# z ≈ P(t)/Q(t), within 4e-8 on the whole range of t below
_UPPER = (-3.201454715535368, -7.749722447535022, 3.3564567047530356, 4.116834057900629, 0.4960790613180107)
_LOWER = (1.0, 5.397613338741085, 4.138669841097837, 0.49577961135264675)


def normal_of_word(word: jax.Array) -> jax.Array:
    """A float32 standard normal from each 32-bit word.

    The lowest bit is the sign. The others are the chance q = (m + ½)·2⁻³² ∈ (0, ½) of a larger |z|, and
    z = Φ⁻¹(1 − q) is a smooth function of t = √(−2 log q), for which one ratio of polynomials serves on
    the whole range: no branches, so it runs on all lanes of a vector unit.
    """
    chance = ((word >> 1).astype(jnp.int32).astype(jnp.float32) + 0.5) * 2.0**-32
    t = jnp.sqrt(-2.0 * jnp.log(chance))
    size = _polynomial(_UPPER, t) / _polynomial(_LOWER, t)
    bits = jax.lax.bitcast_convert_type(size, jnp.uint32) ^ (word << 31)
    return jax.lax.bitcast_convert_type(bits, jnp.float32)


def _polynomial(coefficients: tuple[float, ...], t: jax.Array) -> jax.Array:
    value = jnp.full_like(t, coefficients[-1])
    for coefficient in coefficients[-2::-1]:
        value = value * t + coefficient
    return value
