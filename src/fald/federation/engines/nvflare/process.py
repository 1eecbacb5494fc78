"""NVIDIA FLARE's long-lived processes: one per party, started in the foreground and restarted when it dies.

Run as a program, ``python -m fald.federation.engines.nvflare.process server|site KIT NAME ORG``, it becomes
the engine's process, and ends with the process that started it, so that a kill -9 leaves nothing behind.
"""

from __future__ import annotations

import contextlib
import os
import re
import runpy
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping
from pathlib import Path

from fald.core.compiled import cache_folder
from fald.core.errors import FederationError

ENGINE_LOG = "engine.txt"  # what the process prints; the engine's own log is log.txt beside it
_MODULES = {
    "server": ("nvflare.private.fed.app.server.server_train", "fed_server.json"),
    "site": ("nvflare.private.fed.app.client.client_train", "fed_client.json"),
}
_FIRST_PAUSE, _LONGEST_PAUSE = 1.0, 30.0
_STEADY = 60.0  # seconds after which an earlier failure no longer counts
_TIDY, _LARGEST_LOG, _KEPT_JOBS = 60.0, 5_000_000, 5  # seconds between looks, bytes, and how many stay
_JOB = re.compile(r"[0-9a-f]{8}(-[0-9a-f]{4}){3}-[0-9a-f]{12}")  # the engine names folders of jobs so
_PATIENCE = 5.0  # seconds between asking a process to end and ending it


class Supervisor:
    """Keeps one engine process running.

    Parameters
    ----------
    kind
        ``server`` or ``site``.
    kit
        Its folder.
    name, organisation
        As in its certificate.
    environment
        Variables to add for the process and its workers.
    """

    def __init__(
        self,
        kind: str,
        kit: Path,
        *,
        name: str,
        organisation: str,
        environment: Mapping[str, str] | None = None,
    ):
        self.kit, self.restarts = kit, 0
        self._command = [sys.executable, "-m", __name__, kind, str(kit.resolve()), name, organisation]
        # modules come from where Python is installed, never from the folder that somebody stands in
        self._environment = {
            **_compiled_programs(),
            **os.environ,
            "PYTHONSAFEPATH": "1",
            **(environment or {}),
        }
        self._process: subprocess.Popen[bytes] | None = None
        self._pause, self._began, self._restart_at, self._tidy_at = _FIRST_PAUSE, 0.0, 0.0, 0.0

    @property
    def pid(self) -> int | None:
        """Process id of the engine's process; None while there is none."""
        return self._process.pid if self._process is not None and self._process.poll() is None else None

    def start(self) -> None:
        """Start the process."""
        with open(self.kit / ENGINE_LOG, "ab") as log:
            self._process = subprocess.Popen(
                self._command,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                env=self._environment,
                start_new_session=True,  # Ctrl-C reaches the supervisor, which ends the process in order
            )
        self._began = time.monotonic()

    def look(self) -> str:
        """Restart the process if it has died and its pause is over; say what was done."""
        now = time.monotonic()
        if now > self._tidy_at:
            self._tidy_at = now + _TIDY
            tidy(self.kit)
        if self.pid is not None:
            if now - self._began > _STEADY:
                self._pause = _FIRST_PAUSE
            return ""
        if self._process is not None:
            code, self._process = self._process.returncode, None
            self._restart_at = now + self._pause
            said = f"the engine's process ended ({_reason(code)}); starting it again in {self._pause:g} s"
            self._pause = min(2 * self._pause, _LONGEST_PAUSE)
            return said
        if now >= self._restart_at:
            self.restarts += 1
            self.start()
        return ""

    def stop(self) -> None:
        """End the process and its workers."""
        if self._process is not None:
            end_family(self._process.pid)
            self._process.wait()
            self._process = None


def tidy(kit: Path) -> None:
    """Keep what a long life of a party leaves in its folder within bounds: its log, the folders of its jobs.

    The newest folder may be that of a job that is going on.
    """
    log = kit / ENGINE_LOG
    with contextlib.suppress(OSError):
        if log.stat().st_size > _LARGEST_LOG:  # the process goes on writing to the same file
            shutil.copyfile(log, log.with_suffix(".1.txt"))
            os.truncate(log, 0)
    jobs = [path for path in kit.iterdir() if path.is_dir() and _JOB.fullmatch(path.name)]
    jobs.sort(key=lambda path: path.stat().st_mtime)
    for path in jobs[:-_KEPT_JOBS]:
        shutil.rmtree(path, ignore_errors=True)


def _compiled_programs() -> dict[str, str]:
    """Let workers keep compiled programs where the ``fald`` command does, so that resumed runs start fast."""
    folder = cache_folder()
    if folder is None:
        return {}
    return {
        "JAX_COMPILATION_CACHE_DIR": str(folder),
        "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
        "JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES": "-1",
    }


def _reason(code: int) -> str:
    return f"signal {signal.Signals(-code).name}" if code < 0 else f"exit code {code}"


def end_family(pid: int) -> None:
    """End a process and everything it has started: first asked, then forced."""
    import psutil

    try:
        parent = psutil.Process(pid)
        family = [*parent.children(recursive=True), parent]
    except psutil.NoSuchProcess:
        return
    for member in family:
        with contextlib.suppress(psutil.NoSuchProcess):
            member.terminate()
    _, alive = psutil.wait_procs(family, timeout=_PATIENCE)
    for member in alive:
        with contextlib.suppress(psutil.NoSuchProcess):
            member.kill()
    psutil.wait_procs(alive, timeout=_PATIENCE)


def keep_running(
    supervisor: Supervisor,
    report: Callable[[str], None],
    look: Callable[[], str],
    leave: Callable[[], None] = lambda: None,
) -> None:
    """Run until Ctrl-C or SIGTERM.

    Parameters
    ----------
    supervisor
        What is kept running.
    report
        Takes lines of news.
    look
        Gives a status line, which is reported when it changes.
    leave
        Called before the process is ended.

    Raises
    ------
    FederationError
        If the process dies again and again without ever having run for a minute.
    """
    last = ""
    supervisor.start()
    try:
        while True:
            said = supervisor.look()
            if said:
                report(said)
            if supervisor.restarts >= 8 and supervisor.pid is None:
                raise FederationError(
                    "the engine's process does not stay up",
                    hint=f"read the end of {supervisor.kit / ENGINE_LOG}",
                )
            line = look()
            if line and line != last:
                report(line)
                last = line
            time.sleep(0.5)
    except KeyboardInterrupt:
        report("stopping")
        leave()
    finally:
        supervisor.stop()


def _end_with_parent(parent: int) -> None:
    """End this process when the one that started it is gone."""

    def watch() -> None:
        while os.getppid() == parent:
            time.sleep(1.0)
        end_family(os.getpid())

    threading.Thread(target=watch, daemon=True, name="fald-parent").start()


def main(kind: str, kit: str, name: str, organisation: str) -> None:
    """Become the engine's process of a party."""
    _end_with_parent(os.getppid())
    if kind == "server":
        from fald.federation.engines.nvflare.door import keep_door

        keep_door(Path(kit))
    module, settings = _MODULES[kind]
    options = ["secure_train=true", f"org={organisation}", "config_folder=config"]
    if kind == "site":
        options.append(f"uid={name}")
    sys.argv = [module, "-m", kit, "-s", settings, "--set", *options]
    runpy.run_module(module, run_name="__main__", alter_sys=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
