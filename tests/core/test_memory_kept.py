"""Memory that is free goes back to the system."""

from __future__ import annotations

import ctypes

import pytest

from fald.core import memory

_SIZE, _COUNT = 100_000, 1000


def in_use() -> int:
    """Bytes of memory in use, without pages of files."""
    with open("/proc/self/status") as lines:
        return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("RssAnon:"))


@pytest.mark.skipif(memory._trim() is None, reason="the C library is not glibc")
def test_holes_between_blocks_that_are_held_are_given_back():
    libc = ctypes.CDLL(None)
    libc.malloc.restype, libc.malloc.argtypes, libc.free.argtypes = (
        ctypes.c_void_p,
        [ctypes.c_size_t],
        [ctypes.c_void_p],
    )
    blocks = [libc.malloc(_SIZE) for _ in range(_COUNT)]
    for block in blocks:
        ctypes.memset(block, 1, _SIZE)
    for block in blocks[::2]:
        libc.free(block)
    free = _SIZE * _COUNT // 2
    before = in_use()
    memory.give_back()
    after = in_use()
    for block in blocks[1::2]:
        libc.free(block)
    assert before - after > 0.8 * free  # which the C library had kept: the twin is the line before
