"""Processes that have loaded what a run needs before a run comes.

Most of what a new process does before the first round is importing. So the long-lived process of every party
keeps one process that has done that, and waits on its standard input for the command of a job. The next one
is started when the job has ended.
"""

from __future__ import annotations

import importlib
import json
import os
import runpy
import shlex
import subprocess
import sys
import threading
import warnings
from typing import Any

from nvflare.apis.event_type import EventType
from nvflare.apis.fl_constant import FLContextKey
from nvflare.apis.fl_context import FLContext
from nvflare.app_common.job_launcher.process_launcher import ProcessHandle, ProcessJobLauncher
from nvflare.utils.job_launcher_utils import (
    generate_client_command,
    generate_server_command,
    get_credential_env,
)

_SITE = "nvflare.private.fed.app.client.worker_process"
_SERVER = "nvflare.private.fed.app.server.runner_process"
_OURS = ("fald.federation.engines.nvflare.adapter", "fald.fewround.importance")
# what runs a job, and what it will need
_PROGRAMS = {
    _SITE: (*_OURS, "fald.federation.site.worker", "pandas"),
    _SERVER: (*_OURS, "fald.federation.coordinator.run", "xarray"),
}


class _Handle(ProcessHandle):
    """A job's process; the engine waits for its end in a thread of its own."""

    def __init__(self, process: subprocess.Popen[bytes], launcher: _Launcher):
        super().__init__(process)
        self._launcher = launcher

    def wait(self) -> None:
        """Wait for the end of the job, and make ready for the next."""
        super().wait()
        self._launcher.prepare()


class _Launcher(ProcessJobLauncher):
    """Hands jobs to a process that waits for them. Code is never shipped, so no job has a path of its own."""

    program = ""

    def __init__(self) -> None:
        super().__init__()
        self._waiting: subprocess.Popen[bytes] | None = None
        self._lock = threading.Lock()

    def handle_event(self, event_type: str, fl_ctx: FLContext) -> None:
        """Begin when the party is up: a site has joined by then."""
        super().handle_event(event_type, fl_ctx)
        if event_type == EventType.SYSTEM_START:
            self.prepare()

    def prepare(self) -> None:
        """Start a process that waits for a job, unless there is one."""
        with self._lock:
            self._started()

    def launch_job(self, job_meta: dict[str, Any], fl_ctx: FLContext) -> ProcessHandle:
        """Give a job to the process that waits, whether it has loaded everything or not."""
        command = shlex.split(self.get_command(job_meta, fl_ctx), posix=True)
        credentials = get_credential_env(fl_ctx.get_prop(FLContextKey.JOB_PROCESS_ARGS) or {})
        with self._lock:
            process, self._waiting = self._started(), None
        assert process.stdin is not None
        process.stdin.write(json.dumps({"command": command, "environment": credentials}).encode() + b"\n")
        process.stdin.close()
        return _Handle(process, self)

    def _started(self) -> subprocess.Popen[bytes]:
        if self._waiting is None or self._waiting.poll() is not None:
            self._waiting = subprocess.Popen(
                [sys.executable, "-u", "-m", __name__, self.program],
                stdin=subprocess.PIPE,
                start_new_session=True,  # the engine ends jobs by their group of processes
            )
        return self._waiting


class SiteLauncher(_Launcher):
    """For the jobs of a site."""

    program = _SITE

    def get_command(self, job_meta: dict[str, Any], fl_ctx: FLContext) -> str:
        """The engine's own command."""
        return generate_client_command(fl_ctx)


class ServerLauncher(_Launcher):
    """For the jobs of the server."""

    program = _SERVER

    def get_command(self, job_meta: dict[str, Any], fl_ctx: FLContext) -> str:
        """The engine's own command."""
        return generate_server_command(fl_ctx)


def main(program: str) -> None:
    """Load what a job needs, wait for one, and become its process; end where none comes any more."""
    for module in (program, *_PROGRAMS[program]):
        importlib.import_module(module)
    line = sys.stdin.readline()
    if not line:
        return
    job = json.loads(line)
    os.environ.update(job["environment"])
    sys.argv = job["command"][job["command"].index(program) :]
    warnings.filterwarnings("ignore", category=RuntimeWarning, module="runpy")  # that it is loaded already
    runpy.run_module(program, run_name="__main__", alter_sys=True)


if __name__ == "__main__":
    main(sys.argv[1])
