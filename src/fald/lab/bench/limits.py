"""What this machine can do at best: matrix products, normals, copies."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np

from fald.core.keys import normals
from fald.lab.bench.timing import Contender, interleave
from fald.runtime.compiler import options

_SIZE = 1024
_NORMALS = (15_000, 2)
_STEPS = 200
_COPY_BYTES = 256 * 2**20


def limits(repeats: int = 5) -> dict[str, float]:
    """Best of several: ``sgemm`` in GFLOP/s, ``normals`` per second in millions, ``copy`` in GB/s.

    ``sgemm`` is the faster of NumPy's and JAX's product of two matrices of 1024 × 1024; ``normals`` those
    of 15,000 streams side by side, two each step, made as the sampler makes them; ``copy`` counts bytes
    read and written.
    """
    a = np.random.default_rng(0).standard_normal((_SIZE, _SIZE), np.float32)
    product, on_device = jax.jit(lambda x: x @ x), jnp.asarray(a)
    source, target = np.zeros(_COPY_BYTES, np.uint8), np.ones(_COPY_BYTES, np.uint8)
    works = {
        "numpy": lambda: a @ a,
        "jax": lambda: jax.block_until_ready(product(on_device)),
        "normals": normals_alone(*_NORMALS, _STEPS),
        "copy": lambda: np.copyto(target, source),
    }
    seconds = {
        name: interleave({name: Contender(work, 1)}, repeats)[name].best for name, work in works.items()
    }
    return {
        "sgemm": 2 * _SIZE**3 / 1e9 / min(seconds["numpy"], seconds["jax"]),
        "normals": _STEPS * math.prod(_NORMALS) / seconds["normals"] / 1e6,
        "copy": 2 * _COPY_BYTES / seconds["copy"] / 1e9,
    }


def normals_alone(streams: int, count: int, steps: int) -> Callable[[], object]:
    """A function that makes ``count`` normals of each stream in each step, and does nothing else."""
    words = np.random.default_rng(0).integers(0, 2**32, (streams, 2), dtype=np.uint32)

    @functools.partial(jax.jit, compiler_options=options())
    def make(keys):
        def step(k, total):
            return total + jax.vmap(lambda key: normals(key, k, count))(keys)

        return jax.lax.fori_loop(0, steps, step, jnp.zeros((streams, count), jnp.float32))

    return lambda: jax.block_until_ready(make(jnp.asarray(words)))
