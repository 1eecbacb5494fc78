"""Rows that a function reads: those of the next round on a thread, while the clients work on this one's.

Which rows a round takes follows from keys, not from where the chains are, so it is known before the round.
"""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor, wait
from typing import Any

import jax
import numpy as np

from fald.calculus.gradients import Fetched
from fald.core.types import float_dtype
from fald.langevin.engine import Assignment


def row_dtype(dtype: np.dtype) -> Any:
    """The type of rows in a run: that of the run for floats, bytes for truth values."""
    if dtype.kind == "b":
        return np.uint8
    return float_dtype() if dtype.kind == "f" else jax.dtypes.canonicalize_dtype(dtype)


def _power(number: int) -> int:
    """The least power of two from a number on; shapes that are such seldom compile anew."""
    return 1 << (number - 1).bit_length()


class Reader:
    """Rows of rounds, read one round ahead of what is asked for.

    ``batches(round, steps)`` gives the numbers of the rows of a round (chains, slots, steps, batch).
    """

    def __init__(self, problem: Assignment, batches: Callable[[Any, int], jax.Array]):
        self.data, self._batches = problem.data, batches
        self._steps = problem.method.about.local_steps
        self._dtypes = jax.tree.map(lambda a: row_dtype(a.dtype), problem.data.rows)
        self._pool = ThreadPoolExecutor(1, thread_name_prefix="fald-read")
        self._ahead: tuple[int, Future[Fetched]] | None = None

    def rows(self, round_index: int) -> Fetched:
        """All rows that a round needs; begins to read those of the round after it."""
        if self._ahead is None or self._ahead[0] != round_index:
            self._begin(round_index)
        assert self._ahead is not None
        (_, found), self._ahead = self._ahead, None
        rows = jax.device_put(found.result())
        self._begin(round_index + 1)
        return rows

    def close(self) -> None:
        """Wait until nothing is read; what was read in vain is forgotten."""
        if self._ahead is not None:
            self._ahead[1].cancel()
            wait([self._ahead[1]])
            self._ahead = None

    def _begin(self, round_index: int) -> None:
        numbers = self._batches(np.int32(round_index), _power(self._steps))
        self._ahead = round_index, self._pool.submit(self._read, numbers)

    def _read(self, numbers: jax.Array) -> Fetched:
        asked = np.asarray(numbers)[:, :, : self._steps]
        wanted = np.unique(asked)
        length = _power(min(asked.size, self.data.num_rows))

        def padded(array: np.ndarray, dtype: Any, beyond: int = 0) -> np.ndarray:
            whole = np.full((length, *array.shape[1:]), beyond, dtype)
            whole[: len(array)] = array
            return whole

        rows = jax.tree.map(padded, self.data.take(wanted), self._dtypes)
        return Fetched(padded(wanted, np.int32, np.iinfo(np.int32).max), rows)
