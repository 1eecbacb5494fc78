"""Small matrices on one core."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import ParamSpec, TypeVar

P = ParamSpec("P")
R = TypeVar("R")


def one_thread(function: Callable[P, R]) -> Callable[P, R]:
    """Let a function's linear algebra run on one thread.

    OpenBLAS splits even a 50 × 50 eigenproblem over all cores, which on a busy machine makes it tens
    of times slower than one core alone.
    """

    @functools.wraps(function)
    def limited(*args: P.args, **kwargs: P.kwargs) -> R:
        from threadpoolctl import threadpool_limits

        with threadpool_limits(1, "blas"):
            return function(*args, **kwargs)

    return limited
