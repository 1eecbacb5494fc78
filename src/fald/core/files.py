"""Files: written whole or not at all, and read back with suspicion."""

from __future__ import annotations

import contextlib
import errno
import io
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from fald.core.errors import StorageError


def write_atomically(path: Path, content: bytes | memoryview) -> None:
    """Replace a file by new content so that a reader sees the old or the new one, never a part.

    Raises
    ------
    StorageError
        If the disk is full or the folder cannot be written; the old file is then untouched.
    """
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        with open(temporary, "wb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    except OSError as error:
        raise storage_error(path, error) from error
    finally:
        with contextlib.suppress(OSError):
            temporary.unlink()


def append_line(path: Path, line: bytes) -> None:
    """Add a whole line to a file and see it on the disk; what a crash left of a line is cut off.

    Raises
    ------
    StorageError
        If it cannot be written.
    """
    try:
        file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND, 0o600)
        try:
            size = os.fstat(file).st_size
            if size and os.pread(file, 1, size - 1) != b"\n":
                whole = path.read_bytes()
                os.ftruncate(file, whole.rfind(b"\n") + 1)
            if os.write(file, line) != len(line):
                raise StorageError(f"cannot write {path}: the disk is full", hint="free space")
            os.fsync(file)
        finally:
            os.close(file)
    except OSError as error:
        raise storage_error(path, error) from error


@contextlib.contextmanager
def locked(path: Path) -> Iterator[None]:
    """No other process between here and the end, which another may have to wait for.

    Raises
    ------
    StorageError
        On systems that cannot lock files: a site answers nothing there.
    """
    try:
        import fcntl
    except ImportError as error:
        raise StorageError("this system cannot lock files", hint="run sites on Linux or macOS") from error
    try:
        file = os.open(path, os.O_RDWR | os.O_CREAT, 0o600)
    except OSError as error:
        raise storage_error(path, error) from error
    try:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield
    finally:
        os.close(file)


def storage_error(path: Path, error: OSError) -> StorageError:
    """Describe a failed write."""
    if error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
        return StorageError(
            f"cannot write {path}: the disk is full",
            hint="what was saved before is intact; free space or choose another folder, then resume",
        )
    missing = error.errno == errno.ENOENT
    return StorageError(
        f"cannot write {path}: {error.strerror or error}",
        hint=f"make the folder {path.parent} first" if missing else "choose another place",
    )


def pack(arrays: dict[str, np.ndarray]) -> bytes:
    """Arrays by name as the bytes of an ``.npz`` file."""
    buffer = io.BytesIO()
    np.savez(buffer, **arrays)  # type: ignore[arg-type]
    return buffer.getvalue()


def unpack(path: Path) -> dict[str, np.ndarray]:
    """Read arrays by name from an ``.npz`` file of a checkpoint."""
    try:
        with np.load(path, allow_pickle=False) as archive:
            return {name: archive[name] for name in archive.files}
    except Exception as error:  # a damaged archive fails in many ways, all of them the same to the user
        raise damaged(path, error) from error


def damaged(path: Path, why: Any) -> StorageError:
    """Describe a checkpoint file that cannot be used."""
    return StorageError(
        f"checkpoint file {path} is damaged or missing ({why})",
        hint="restore it from a copy, or delete the checkpoint folder to start anew",
    )
