"""A process of its own for models that fald did not write: it has limits, and can be ended at any time.

What such a model does, from the import of its package on, happens there: it reads the messages that the
site's worker passes on, and answers them as a worker does. A model that loops for ever, takes all memory or
ends its process costs the site that process, and the coordinator gets a refusal.
"""

from __future__ import annotations

import contextlib
import json
import mmap
import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Mapping
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from pathlib import Path
from typing import IO, Any, NamedTuple

from fald.core.errors import FederationError, PolicyError
from fald.federation.wire import MOST_BYTES

_START = 300.0  # seconds for importing fald on a busy machine
_GRACE = 10.0  # seconds after which the kernel ends a process whose site could not
_MOST_PRINTED = 1_000_000  # bytes that the site's log takes of what one process prints


class Limits(NamedTuple):
    """What a model may take for one request: seconds, and megabytes beyond what fald itself has."""

    seconds: float
    megabytes: int


class Confined:
    """The process, started with the first message.

    Parameters
    ----------
    settings
        What its worker is made with, as JSON takes it: paths as text.
    limits
        What a request may take.
    log
        File for what the process prints, as far as it is not endless.
    """

    def __init__(self, settings: Mapping[str, Any], limits: Limits, log: Path):
        self._settings, self._limits, self._log = dict(settings), limits, log
        self._process: subprocess.Popen[bytes] | None = None
        self._pipe: Connection | None = None
        self._letters: mmap.mmap | None = None  # memory of both processes, for one message at a time
        self._listener: threading.Thread | None = None

    def handle(self, content: bytes, model: str) -> bytes:
        """Pass a message on and wait for its answer.

        Raises
        ------
        PolicyError
            If the limits are reached; the process has ended then, and the next message starts another.
        """
        pipe, letters = self._running()
        try:
            return self._answered(pipe, letters, content, model)
        except BaseException:
            self.stop()
            raise

    def _answered(self, pipe: Connection, letters: mmap.mmap, content: bytes, model: str) -> bytes:
        try:
            if pipe.poll():  # a copy of the process that answers as well
                raise OSError("an answer that nobody asked for")
            _put(pipe, letters, content)
            if pipe.poll(self._limits.seconds):
                return _take(pipe, letters)
        except (EOFError, OSError) as error:
            raise PolicyError(
                f"the process of the model {model!r} has ended: its code ended it, or it needs more than "
                f"{self._limits.megabytes} MB (max-megabytes)",
                hint="the site's own log may say more",
            ) from error
        raise PolicyError(
            f"the model {model!r} takes more than {self._limits.seconds:g} s for a request (max-seconds)",
            hint="a smaller study, or another limit in the site's policy",
        )

    def _running(self) -> tuple[Connection, mmap.mmap]:
        """The pipe to a process that waits for a message, and where that is put."""
        if self._process is not None and _has_ended(self._process):
            self.stop()
        if self._pipe is not None and self._letters is not None:
            return self._pipe, self._letters
        mine, theirs = Pipe()
        shared = _open_letters()
        command = [sys.executable, "-P", "-m", __name__, str(theirs.fileno()), str(shared)]
        self._process = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            bufsize=0,
            env={**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
            pass_fds=(theirs.fileno(), shared),
            start_new_session=True,
        )
        theirs.close()
        about = self._process.stdout, self._log
        self._listener = threading.Thread(target=_write_down, args=about, daemon=True)
        self._listener.start()
        self._pipe, self._letters = mine, mmap.mmap(shared, MOST_BYTES)
        os.close(shared)
        with contextlib.suppress(EOFError, OSError):
            mine.send_bytes(json.dumps({**self._settings, **self._limits._asdict()}).encode())
            if mine.poll(_START) and mine.recv_bytes() == b"ready":
                return mine, self._letters
        self.stop()
        raise FederationError("the process for its model does not start", hint="the site's own log says why")

    def stop(self) -> None:
        """End the process, and what it has started."""
        if self._pipe is not None:
            self._pipe.close()
            self._pipe = None
        if self._letters is not None:
            self._letters.close()
            self._letters = None
        if self._process is not None:
            # before anybody waits for it: until then its number, which is that of its group, is nobody else's
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(self._process.pid, signal.SIGKILL)
            self._process.wait()
            self._process = None
        if self._listener is not None:
            self._listener.join(1.0)  # longer only where somebody else holds its end open
            self._listener = None


def _has_ended(process: subprocess.Popen[bytes]) -> bool:
    """Whether a process has ended; it stays on the system's list, so that ``stop`` ends its group alone."""
    look = os.WEXITED | os.WNOHANG | os.WNOWAIT
    return process.returncode is not None or os.waitid(os.P_PID, process.pid, look) is not None


def _write_down(printed: IO[bytes], log: Path) -> None:
    """Add what a process prints to a log; beyond some of it, read on and keep nothing."""
    left = _MOST_PRINTED
    with printed:
        while content := printed.read(1 << 16):
            if not left:
                continue
            kept, left = content[:left], max(0, left - len(content))
            with contextlib.suppress(OSError), open(log, "ab") as file:  # a full disk is no reason to stop
                file.write(kept if left else kept + b"\nthe model prints more, which is not kept\n")


def _open_letters() -> int:
    """A file without a name, in memory where possible: megabytes through a pipe cost more than steps.

    It is as large as the largest message, and takes what the largest so far took. Nobody can make it smaller:
    the site would end with the process that did.
    """
    if sys.platform == "linux":
        import fcntl

        shared = os.memfd_create("fald", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        os.ftruncate(shared, MOST_BYTES)
        fcntl.fcntl(shared, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK)
        return shared
    with tempfile.TemporaryFile() as file:
        file.truncate(MOST_BYTES)
        return os.dup(file.fileno())


def _put(pipe: Connection, letters: mmap.mmap, content: bytes) -> None:
    """Hand a message to the other process."""
    if len(content) > MOST_BYTES:
        raise OSError("a message that is too long")
    letters[: len(content)] = content
    pipe.send_bytes(len(content).to_bytes(8, "little"))


def _take(pipe: Connection, letters: mmap.mmap) -> bytes:
    """The message that the other process has handed over, out of its reach."""
    length = int.from_bytes(pipe.recv_bytes(8), "little")
    if length > MOST_BYTES:
        raise OSError("a message that is too long")
    return letters[:length]


def main(number: str, shared: int) -> None:
    """Answer the messages that the pipe ``number`` announces until it is closed."""
    pipe, parent, letters = Connection(int(number)), os.getppid(), mmap.mmap(shared, MOST_BYTES)
    threading.Thread(target=_end_with, args=(parent,), daemon=True).start()
    about: dict[str, Any] = json.loads(pipe.recv_bytes())
    limits = Limits(about.pop("seconds"), about.pop("megabytes"))

    import jax

    from fald.federation.site.worker import SiteSettings, SiteWorker

    for key in ("state", "data", "policy", "pins"):
        about[key] = None if about[key] is None else Path(about[key])
    settings = SiteSettings(**{**about, "sites": tuple(about["sites"])})
    if not jax.config.jax_compilation_cache_dir:  # type: ignore[attr-defined]
        jax.config.update("jax_compilation_cache_dir", str(settings.state / "compiled"))
        jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)
    jax.devices()  # what JAX itself takes is not the model's
    worker = SiteWorker(settings, confined=True)
    _limit_memory(limits.megabytes)
    signal.signal(signal.SIGALRM, signal.SIG_DFL)  # the kernel's, which no code of the model holds up
    pipe.send_bytes(b"ready")
    with contextlib.suppress(EOFError):
        while True:
            content = _take(pipe, letters)
            signal.setitimer(signal.ITIMER_REAL, limits.seconds + _GRACE)
            reply = worker.handle(content)
            signal.setitimer(signal.ITIMER_REAL, 0.0)
            _put(pipe, letters, reply)


def _limit_memory(megabytes: int) -> None:
    """Let this process have so much address space more than it has now; on Linux, where that can be said."""
    import resource

    path = Path("/proc/self/statm")
    if path.exists():
        now = int(path.read_text().split()[0]) * resource.getpagesize()
        limit = now + megabytes * 2**20
        resource.setrlimit(resource.RLIMIT_AS, (limit, limit))


def _end_with(parent: int) -> None:
    """End this process, and what it has started, when its site is gone."""
    while os.getppid() == parent:
        time.sleep(1.0)
    os.killpg(0, signal.SIGKILL)


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]))
