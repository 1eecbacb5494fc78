"""Runs as jobs of NVIDIA FLARE: submit, look, abort, through the coordinator's kit."""

from __future__ import annotations

import base64
import contextlib
import io
import json
import logging
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fald.errors import FederationError
from fald.federation.folder import Federation, read_federation
from fald.federation.nvflare import require_nvflare
from fald.federation.nvflare.kits import CLASSES, COORDINATOR

JOB = "fald"
_WAIT = 15.0  # seconds to reach the server
_FINISHED = "FINISHED:"


@dataclass(frozen=True)
class Situation:
    """What the server knows: sites with the time they were last heard of, and the jobs that run."""

    sites: dict[str, float]
    jobs: tuple[str, ...]


@contextlib.contextmanager
def session(kit: Path, user: str = COORDINATOR) -> Iterator[Any]:
    """A logged-in session with the server of a federation.

    Raises
    ------
    FederationError
        If the server is not reached or refuses the user.
    """
    require_nvflare()
    from nvflare.fuel.flare_api import flare_api

    with _quiet():
        try:
            opened = flare_api.new_secure_session(
                user, str(kit.resolve()), timeout=_WAIT, auto_login_max_tries=1
            )
        except Exception as error:
            raise FederationError(
                f"the server of the federation is not reached, or refuses the user: {_said(error)}",
                hint="is 'fald federation serve' running, and do host and port of federation.toml lead to it?",
            ) from error
        try:
            yield opened
        finally:
            with contextlib.suppress(Exception):
                opened.close()


def submit(
    folder: Path, job: dict[str, Any], *, user_kit: Path | None = None, user: str = COORDINATOR
) -> str:
    """Submit a run to the server; returns the engine's job id.

    Parameters
    ----------
    folder
        Folder of the federation.
    job
        What ``fald.federation.run.serve_job`` takes.

    Raises
    ------
    FederationError
        If the server is not reached, refuses the user, or not all sites are there.
    """
    federation = read_federation(folder)
    with session(user_kit or folder / "coordinator", user) as opened:
        present = _situation(opened).sites
        missing = [site for site in federation.sites if site not in present]
        if missing:
            raise FederationError(
                f"not all sites have joined: {', '.join(missing)} missing",
                hint="fald federation join KIT --data FILE at each of them; fald federation status shows who is there",
            )
        with tempfile.TemporaryDirectory() as scratch:
            path = write_job(Path(scratch), federation, job)
            try:
                return opened.submit_job(str(path))
            except Exception as error:
                raise FederationError(f"the server refuses the run: {_said(error)}") from error


def write_job(folder: Path, federation: Federation, job: dict[str, Any]) -> Path:
    """The engine's description of a job: two class names, and no code."""
    packed = base64.b64encode(json.dumps(job).encode()).decode()
    root = folder / JOB
    server = {"id": "coordinator", "path": CLASSES["server"], "args": {"job": packed}}
    site = {"tasks": ["none"], "executor": {"path": CLASSES["site"], "args": {}}}
    common = {"format_version": 2, "components": [], "task_data_filters": [], "task_result_filters": []}
    files = {
        "meta.json": {
            "name": JOB,
            "resource_spec": {},
            "deploy_map": {"coordinator": ["server"], "site": list(federation.sites)},
            "min_clients": len(federation.sites),
            "mandatory_clients": list(federation.sites),
        },
        "coordinator/config/config_fed_server.json": {**common, "workflows": [server]},
        "site/config/config_fed_client.json": {**common, "executors": [site]},
    }
    for name, content in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(content, indent=1))
    return root


def job_state(folder: Path, job_id: str) -> str:
    """How a job stands: ``waiting``, ``running``, ``done``, ``aborted`` or ``failed``."""
    with session(folder / "coordinator") as opened:
        return _state(opened, job_id)


def abort(folder: Path, job_id: str, *, patience: float = 30.0) -> str:
    """Stop a job and wait until it has ended; returns its state."""
    with session(folder / "coordinator") as opened:
        with contextlib.suppress(Exception):  # it may have ended meanwhile
            opened.abort_job(job_id)
        end = time.monotonic() + patience
        while (state := _state(opened, job_id)) in ("waiting", "running") and time.monotonic() < end:
            time.sleep(0.5)
    return state


def situation(folder: Path) -> Situation:
    """Which sites the server has heard of, and which jobs run."""
    with session(folder / "coordinator") as opened:
        return _situation(opened)


def running_jobs(folder: Path) -> tuple[str, ...]:
    """Jobs that are submitted and have not ended; a killed server may leave one that never will."""
    with session(folder / "coordinator") as opened:
        listed = opened.list_jobs()
        return tuple(j["job_id"] for j in listed if not str(j["status"]).startswith(_FINISHED))


class Watchdog:
    """Notices that a run has stopped moving although its job still counts as running.

    After a kill -9 of the server the engine keeps such a job for ever.

    Parameters
    ----------
    path
        A file that grows with the run, ``rounds.jsonl`` in its output folder.
    seconds
        How long it may stay as it is.
    """

    def __init__(self, path: Path, seconds: float):
        self._path, self.seconds = path, seconds
        self._seen, self._moved = self._size(), time.monotonic()

    def _size(self) -> int:
        try:
            return self._path.stat().st_size
        except OSError:
            return -1

    def is_stuck(self) -> bool:
        """Whether nothing was written for too long."""
        size, now = self._size(), time.monotonic()
        if size != self._seen:
            self._seen, self._moved = size, now
        return now - self._moved > self.seconds


def _state(opened: Any, job_id: str) -> str:
    try:
        status = str(opened.get_job_status(job_id))
    except Exception as error:
        raise FederationError(f"the server does not say how the run stands: {_said(error)}") from error
    if status.startswith(_FINISHED):
        ending = status.removeprefix(_FINISHED)
        return {"COMPLETED": "done", "ABORTED": "aborted"}.get(ending, "failed")
    return "running" if status == "RUNNING" else "waiting"


def _situation(opened: Any) -> Situation:
    found = opened.get_system_info()
    sites = {c.name: float(c.last_connect_time or 0.0) for c in found.client_info}
    return Situation(dict(sorted(sites.items())), tuple(j.job_id for j in found.job_info))


def _said(error: Exception) -> str:
    return " ".join(str(error).split()) or type(error).__name__


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Keep what the engine's client library prints and logs off the terminal."""
    before = logging.root.manager.disable
    logging.disable(logging.CRITICAL)
    try:
        with contextlib.redirect_stdout(io.StringIO()):
            yield
    finally:
        logging.disable(before)
