"""What a run will do with rows that its user may not expect, in sentences."""

from __future__ import annotations

import functools
from typing import Any

import jax
import numpy as np
from jax.experimental import checkify

from fald.core.types import float_dtype
from fald.problem.data import FederatedData, evenly
from fald.problem.model import Model

_DIGITS = 1e5  # of about 1e7 that float32 has
_LOOKED_AT = 1000
_LARGE = 64 * 2**20  # bytes


def remarks(
    data: FederatedData, batch_size: int | None, *, model: Model | None = None, private: bool = False
) -> list[str]:
    """Sentences on what a run will do with the rows that its user may not expect; none on private values.

    Examples
    --------
    >>> remarks(FederatedData.from_arrays({"a": np.ones((5, 1)), "b": np.ones((9, 1))}), batch_size=8)[0][:54]
    "batch-size 8 is more than the 5 rows of client 'a': su"
    """
    found = []
    small = [name for name, size in zip(data.names, data.sizes) if batch_size and size < batch_size]
    if small:
        others = {1: "", 2: " and another"}.get(len(small), f" and {len(small) - 1} others")
        rows = int(data.sizes[data.names.index(small[0])])
        found.append(
            f"batch-size {batch_size} is more than the {rows} rows of client {small[0]!r}{others}: such a "
            "client takes all of its rows in every step"
        )
    if private or not data.readable:
        return found
    if model is not None and model.check_fn is None:
        found += _outside(model, data)
    if float_dtype() == np.float64:
        return found
    wide = [array for array in jax.tree.leaves(data.rows) if array.dtype == np.float64]
    if not wide:
        return found
    size = sum(array.size * array.dtype.itemsize for array in wide)
    if data.present and size >= _LARGE:
        found.append(
            f"rows of float64 are used as float32: of these {size / 1e6:,.0f} MB a copy of half the size is "
            "made; give float32, or bytes where they are such"
        )
    for array in jax.tree.leaves(data.take(evenly(data.num_rows, _LOOKED_AT))):
        if array.dtype == np.float64 and array.size:
            some = array.reshape(len(array), -1)
            size, spread = np.abs(some).max(axis=0), some.std(axis=0)
            lost = (spread > 0) & (size > _DIGITS * spread)
            if lost.any():
                column = int(np.argmax(lost))
                found.append(
                    f"rows of float64 are used as float32, which loses digits: a column has values up to "
                    f"{size[column]:.3g} that differ by {spread[column]:.3g} or so; subtract its mean, or "
                    "set jax.config.update('jax_enable_x64', True)"
                )
    return found


def _outside(model: Model, data: FederatedData) -> list[str]:
    """Whether a row with the largest or smallest label makes the log likelihood look outside an array.

    Looked at are rows in which a whole number that stands alone, as labels do, is largest or smallest.
    """
    labels = [a.ndim == 1 and a.dtype.kind in "iu" for a in jax.tree.leaves(data.rows)]
    if not any(labels):
        return []
    looked_at = None if data.present else evenly(data.num_rows, _LOOKED_AT)  # or all of them
    some = data.rows if looked_at is None else data.take(looked_at)
    alone = [np.asarray(a) for a, is_label in zip(jax.tree.leaves(some), labels) if is_label]
    for place in sorted({int(look(array)) for array in alone for look in (np.argmin, np.argmax)}):
        row = jax.tree.map(lambda a, place=place: np.asarray(a[place]), some)
        try:
            said = _index_error(model)(model.flat_initial_position, row).get()
        except Exception:  # JAX cannot look into every model (jax.checkpoint), and none has to be remarked on
            return []
        if said:
            number = place if looked_at is None else int(looked_at[place])
            client = int(np.searchsorted(data.offsets, number, "right")) - 1
            return [
                f"the log likelihood of row {number - data.offsets[client]} of client "
                f"{data.names[client]!r} looks outside an array ({said.splitlines()[0].rstrip('. ')}), "
                "which JAX answers with another entry, or nan; if that is a label, count from 0"
            ]
    return []


@functools.lru_cache(maxsize=16)
def _index_error(model: Model) -> Any:
    """A function of a position and a row: the error of an index that is out of bounds, if there is one."""
    checked = checkify.checkify(model.flat_loglikelihood, errors=checkify.index_checks)
    return jax.jit(lambda flat, row: checked(flat, row)[0])  # without the value, and so quick to compile
