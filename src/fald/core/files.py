"""Files: written whole or not at all, and read back with suspicion."""

from __future__ import annotations

import contextlib
import datetime
import errno
import io
import os
import socket
import time
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fald.core.errors import ConfigError, StorageError

if TYPE_CHECKING:  # a command that only helps does not wait for it
    import numpy as np

try:
    import fcntl
except ImportError:  # a system without file locks: nobody is kept out
    fcntl = None

_flush = getattr(os, "fdatasync", os.fsync)  # content and length; macOS has no such call


def write_atomically(path: Path, content: bytes | memoryview, mode: int = 0o666) -> None:
    """Replace a file by new content so that a reader sees the old or the new one, never a part.

    The file has ``mode`` from its first byte on, less what the process takes from all its files.

    Raises
    ------
    StorageError
        If the disk is full or the folder cannot be written; the old file is then untouched.
    """
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        with open(temporary, "wb", opener=lambda name, flags: os.open(name, flags, mode)) as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    except BaseException as error:
        with contextlib.suppress(OSError):
            temporary.unlink()
        if isinstance(error, OSError):
            raise storage_error(path, error) from error
        raise


def overwrite(path: Path, *parts: bytes) -> None:
    """Write a file over what it had, and see it on the disk; a crash may leave neither old nor new.

    Raises
    ------
    StorageError
        If it cannot be written; what is in it then is neither the old nor the new.
    """
    try:
        file = os.open(path, os.O_RDWR | os.O_CREAT, 0o600)
        try:
            size = sum(map(len, parts))
            if os.writev(file, parts) != size:
                raise StorageError(f"cannot write {path}: the disk is full", hint="free space")
            os.ftruncate(file, size)
            _flush(file)
        finally:
            os.close(file)
    except OSError as error:
        raise storage_error(path, error) from error


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
            _flush(file)
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
    if fcntl is None:
        raise StorageError("this system cannot lock files", hint="run sites on Linux or macOS")
    try:
        file = os.open(path, os.O_RDWR | os.O_CREAT, 0o600)
    except OSError as error:
        raise storage_error(path, error) from error
    try:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield
    finally:
        fcntl.flock(file, fcntl.LOCK_UN)  # closing would not do: a process that was forked has it open too
        os.close(file)


@contextlib.contextmanager
def sole_owner(folder: Path, name: str = "run.lock", patience: float = 0.0) -> Iterator[None]:
    """Keep every other process out of a folder while the block runs, by the lock of a file in it.

    The operating system frees the lock when the process ends, however it ends.

    Parameters
    ----------
    folder
        The folder; made with those above it if it does not exist; what was made and stays empty is removed.
    name
        The file.
    patience
        Seconds to wait for whoever is about to leave.

    Raises
    ------
    ConfigError
        If another process has the folder, with its number, machine and time.
    """
    path, end = folder / name, time.monotonic() + patience
    made = [place for place in (folder, *folder.parents) if not place.exists()]
    while not _taken(file := _opened(path), path):
        holder = os.pread(file, 200, 0).decode(errors="replace").strip() or "another process"
        os.close(file)
        if time.monotonic() >= end:
            raise ConfigError(
                f"{folder} is in use by {holder}",
                hint="wait for its end or stop it, or choose another folder with --out",
            )
        time.sleep(0.1)
    try:
        now = datetime.datetime.now().isoformat(sep=" ", timespec="seconds")
        os.ftruncate(file, 0)
        os.pwrite(file, f"process {os.getpid()} on {socket.gethostname()}, since {now}\n".encode(), 0)
        yield
    finally:
        with contextlib.suppress(OSError):
            path.unlink()
            for place in made:
                place.rmdir()
        os.close(file)


def _opened(path: Path) -> int:
    try:
        for _ in range(100):  # whoever leaves may remove the folder in between
            path.parent.mkdir(parents=True, exist_ok=True)
            with contextlib.suppress(FileNotFoundError):
                return os.open(path, os.O_RDWR | os.O_CREAT, 0o600)
        raise FileNotFoundError(errno.ENOENT, "it vanishes again and again", str(path))
    except OSError as error:
        raise StorageError(
            f"cannot write to the folder {path.parent}: {error.strerror}", hint="choose another with --out"
        ) from error


def lock(file: Any, *, shared: bool = False) -> bool | None:
    """Take the lock of an open file until it closes; False: another process has it, None: no locks here."""
    if fcntl is None:
        return None
    try:
        fcntl.flock(file, (fcntl.LOCK_SH if shared else fcntl.LOCK_EX) | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError:  # some network folders have none
        return None
    return True


def _taken(file: int, path: Path) -> bool:
    """Whether the lock of an open file is ours now, and the file still the one at its path."""
    ours = lock(file)
    if not ours:
        return ours is None
    return path.exists() and os.fstat(file).st_ino == path.stat().st_ino


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
    import numpy as np

    buffer = io.BytesIO()
    np.savez(buffer, **arrays)  # type: ignore[arg-type]
    return buffer.getvalue()


def unpack(path: Path) -> dict[str, np.ndarray]:
    """Read arrays by name from an ``.npz`` file of a checkpoint."""
    import numpy as np

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
