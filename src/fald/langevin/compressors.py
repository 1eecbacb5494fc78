r"""Compressors of vectors, and the bytes they make.

A compressor turns a vector into a few integers and floats (``compress``), those into bytes (``encode``) and
back (``decode``, ``restore``). ``num_bytes`` says inside compiled code how long ``encode`` will be, exactly.

QSGD rounds stochastically to s levels of the vector's norm: with l_j = ⌊s|v_j|/‖v‖⌋,

    Q(v)_j = ‖v‖ sign(v_j) (l_j + Bernoulli(s|v_j|/‖v‖ − l_j)) / s.

It is unbiased, with E‖Q(v) − v‖² ≤ ω‖v‖², ω = min(d/s², √d/s). Top-k keeps the k largest entries: biased,
but contractive, ‖C(v) − v‖² ≤ (1 − k/d)‖v‖². Both commute with a positive factor, Q(av) = aQ(v).

References: Alistarh, Grubic, Li, Tomioka and Vojnovic, "QSGD", NeurIPS 2017; Elias, "Universal codeword sets
and representations of the integers", 1975.
"""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass, fields
from typing import Any, ClassVar, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from fald.core.checks import check_probability
from fald.core.errors import ConfigError
from fald.core.keys import uniforms
from fald.core.types import float_dtype


class Quantised(NamedTuple):
    """A vector as its norm and signed levels (d,)."""

    norm: Any
    levels: Any


class Sparse(NamedTuple):
    """A vector as the places (k,), ascending, and values (k,) of its largest entries."""

    places: Any
    values: Any


@dataclass(frozen=True)
class Compressor:
    """No compression: the vector travels as it is."""

    name: ClassVar[str] = "none"

    def settings(self) -> dict[str, Any] | str:
        """Plain values for the record."""
        return {"compressor": self.name, **asdict(self)} if fields(self) else self.name

    def variance(self, dim: int) -> float:
        """ω in E‖Q(v) − v‖² ≤ ω‖v‖²."""
        return 0.0

    def compress(self, rng_key: jax.Array, vector: jax.Array, step=0) -> Any:
        """What travels, as arrays."""
        return vector

    def restore(self, message: Any, dim: int) -> jax.Array:
        """The vector that the receiver sees."""
        return message

    def num_bytes(self, message: Any, dim: int) -> jax.Array:
        """Length of ``encode``, inside compiled code."""
        return jnp.asarray(dim * float_dtype().itemsize, jnp.int32)

    def encode(self, message: Any, dim: int) -> bytes:
        """Turn the message into bytes."""
        return np.asarray(message, float_dtype()).tobytes()

    def decode(self, content: bytes, dim: int) -> Any:
        """Read the message back."""
        return np.frombuffer(content, float_dtype(), dim)


@dataclass(frozen=True)
class QSGD(Compressor):
    """Stochastic rounding to ``levels`` levels, coded by Elias gamma; made by ``qsgd``."""

    levels: int = 16

    name = "qsgd"

    def variance(self, dim: int) -> float:
        """ω = min(d/s², √d/s)."""
        return min(dim / self.levels**2, math.sqrt(dim) / self.levels)

    def compress(self, rng_key: jax.Array, vector: jax.Array, step=0) -> Quantised:
        """The norm and the rounded levels with their signs."""
        norm = jnp.sqrt(jnp.sum(vector**2))
        scaled = self.levels * jnp.abs(vector) / jnp.where(norm > 0, norm, 1.0)
        below = jnp.floor(scaled)
        level = below + (uniforms(rng_key, step, vector.shape[0]) < scaled - below)
        return Quantised(norm, jnp.where(vector < 0, -level, level).astype(jnp.int32))

    def restore(self, message: Quantised, dim: int) -> jax.Array:
        """norm · level / s."""
        return message.norm * message.levels.astype(message.norm.dtype) / self.levels

    def num_bytes(self, message: Quantised, dim: int) -> jax.Array:
        """Bytes of the norm, then per level an Elias gamma code of its size + 1, and a sign unless zero."""
        number = (jnp.abs(message.levels) + 1).astype(jnp.uint32)
        length = 32 - jax.lax.clz(number).astype(jnp.int32)  # binary digits
        bits = jnp.sum(2 * length - 1 + (message.levels != 0))
        return message.norm.dtype.itemsize + (bits + 7) // 8

    def encode(self, message: Quantised, dim: int) -> bytes:
        """Pack norm and codes."""
        parts = []
        for level in np.asarray(message.levels).tolist():
            digits = f"{abs(level) + 1:b}"
            parts.append("0" * (len(digits) - 1) + digits + ("" if level == 0 else "01"[level < 0]))
        bits = np.frombuffer("".join(parts).encode(), np.uint8) - ord("0")
        return np.asarray(message.norm).tobytes() + np.packbits(bits).tobytes()

    def decode(self, content: bytes, dim: int) -> Quantised:
        """Read norm and codes back."""
        dtype = float_dtype()
        norm = np.frombuffer(content, dtype, 1)[0]
        bits = np.unpackbits(np.frombuffer(content, np.uint8, offset=dtype.itemsize))
        levels, at = np.zeros(dim, np.int32), 0
        for j in range(dim):
            first = at + int(np.argmax(bits[at:]))  # the first one ends the zeros that count digits
            end = 2 * first - at + 1
            level = int("".join(map(str, bits[first:end])), 2) - 1
            at = end + (level != 0)
            levels[j] = -level if level and bits[end] else level
        return Quantised(norm, levels)


@dataclass(frozen=True)
class TopK(Compressor):
    """The ``fraction`` of largest entries, as places and values; made by ``top_k``. Biased."""

    fraction: float = 0.1

    name = "top-k"

    def kept(self, dim: int) -> int:
        """k, at least one."""
        return max(1, math.ceil(self.fraction * dim - 1e-9))

    def compress(self, rng_key: jax.Array, vector: jax.Array, step=0) -> Sparse:
        """Places, ascending, and values."""
        _, places = jax.lax.top_k(jnp.abs(vector), self.kept(vector.shape[0]))
        places = jnp.sort(places).astype(jnp.int32)
        return Sparse(places, vector[places])

    def restore(self, message: Sparse, dim: int) -> jax.Array:
        """Zero wherever nothing was sent."""
        return jnp.zeros((dim,), message.values.dtype).at[message.places].set(message.values)

    def num_bytes(self, message: Sparse, dim: int) -> jax.Array:
        """k places of ⌈log₂ d⌉ bits, packed, and k numbers."""
        k = self.kept(dim)
        return jnp.asarray((k * _digits(dim) + 7) // 8 + k * message.values.dtype.itemsize, jnp.int32)

    def encode(self, message: Sparse, dim: int) -> bytes:
        """Pack places and values."""
        shifts = np.arange(_digits(dim))[::-1]
        bits = (np.asarray(message.places)[:, None] >> shifts) & 1
        return np.packbits(bits.astype(np.uint8).ravel()).tobytes() + np.asarray(message.values).tobytes()

    def decode(self, content: bytes, dim: int) -> Sparse:
        """Read places and values back."""
        k, digits = self.kept(dim), _digits(dim)
        packed = (k * digits + 7) // 8
        bits = np.unpackbits(np.frombuffer(content, np.uint8, packed))[: k * digits].reshape(k, digits)
        places = bits.astype(np.int64) @ (1 << np.arange(digits)[::-1])
        return Sparse(places.astype(np.int32), np.frombuffer(content, float_dtype(), offset=packed))


def _digits(dim: int) -> int:
    return max(0, dim - 1).bit_length()


def qsgd(levels: float = 16) -> Compressor:
    """Unbiased stochastic rounding to ``levels`` levels of the norm; ``math.inf`` does not compress.

    Examples
    --------
    >>> import jax
    >>> compressor = qsgd(16)
    >>> message = compressor.compress(jax.random.key(0), jnp.ones(1000))
    >>> len(compressor.encode(message, 1000)), int(compressor.num_bytes(message, 1000))
    (318, 318)
    """
    if levels == math.inf:
        return Compressor()
    if isinstance(levels, bool) or not isinstance(levels, int) or not 1 <= levels < 2**15:
        raise ConfigError(
            f"levels must be a whole number from 1 to 32767, or math.inf for no compression; got {levels!r}"
        )
    return QSGD(levels)


def top_k(fraction: float = 0.1) -> Compressor:
    """Keep the largest entries: ``fraction`` of them, at least one. Biased; meant for error feedback.

    Examples
    --------
    >>> import jax
    >>> message = top_k(0.5).compress(jax.random.key(0), jnp.array([1.0, -3.0, 0.5, 2.0]))
    >>> message.places.tolist(), message.values.tolist()
    ([1, 3], [-3.0, 2.0])
    """
    return TopK(check_probability("fraction", fraction))


def send(compressor: Compressor, rng_key: jax.Array, vector: jax.Array) -> tuple[jax.Array, jax.Array]:
    """The vector after compression and restoration, and the bytes that travelled."""
    message = compressor.compress(rng_key, vector)
    return compressor.restore(message, vector.shape[0]), compressor.num_bytes(message, vector.shape[0])
