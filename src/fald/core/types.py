"""Shared vocabulary."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np

PyTree: TypeAlias = Any
Position: TypeAlias = PyTree
Example: TypeAlias = PyTree
StepSize: TypeAlias = float | Callable[[Any], Any]


def float_dtype() -> jnp.dtype:
    """The floating type of the run: float32, or float64 once ``jax_enable_x64`` is set."""
    return jax.dtypes.canonicalize_dtype(float)


def as_floats(tree: PyTree) -> PyTree:
    """Convert every leaf to an array of the run's floating type."""
    dtype = float_dtype()
    return jax.tree.map(lambda leaf: jnp.asarray(leaf, dtype), tree)


def sum_last(array: jax.Array) -> jax.Array:
    """Sum over the last axis; written out where it is short, because a reduction of a few numbers is slow."""
    if not 0 < array.shape[-1] <= 4:
        return jnp.sum(array, axis=-1)
    return sum((array[..., i] for i in range(1, array.shape[-1])), start=array[..., 0])


def incomplete(rows: PyTree) -> int | None:
    """The first of some rows with a missing or infinite value, if there is one.

    Examples
    --------
    >>> incomplete((np.ones((3, 2)), np.array([1.0, np.nan, np.inf])))
    1
    """
    found = [np.isfinite(a.reshape(len(a), -1)).all(1) for a in jax.tree.leaves(rows) if a.dtype.kind == "f"]
    return min((int(np.argmin(whole)) for whole in found if not whole.all()), default=None)
