"""Memory that the process has and nobody uses."""

from __future__ import annotations

import ctypes
import functools
from typing import Any


@functools.cache
def _trim() -> Any:
    try:
        return ctypes.CDLL(None).malloc_trim
    except (AttributeError, OSError, TypeError):  # the C library is not glibc
        return None


def give_back() -> None:
    """Return free memory to the system, where the C library is glibc, which keeps it otherwise.

    Threads that take large rooms and free them leave holes, by which a long run would grow.
    """
    trim = _trim()
    if trim is not None:
        trim(0)
