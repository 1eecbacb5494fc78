"""Runs as jobs of NVIDIA FLARE: submit, look, abort, through the coordinator's kit."""

from __future__ import annotations

import base64
import contextlib
import io
import json
import logging
import os
import socket
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from fald.core.errors import FederationError
from fald.federation.engines import Situation
from fald.federation.engines.nvflare import require_nvflare
from fald.federation.engines.nvflare.kits import CLASSES, COORDINATOR
from fald.federation.folder import (
    OUTCOME,
    FederationSettings,
    read_settings,
    read_submitted,
    remember_submitted,
)

JOB = "fald"
_WAIT = 15.0  # seconds to reach the server
_SILENT = 25.0  # seconds after which a site counts as gone; it is heard of every ten
_FINISHED = "FINISHED:"
_UNFINISHED = ("waiting", "running")
_ENDING = 60.0  # seconds for the processes of a run that has its outcome to end
_RESTART = 60.0  # seconds in which a server that was killed is up again


class AdminSession:
    """A login at the server of a federation.

    Parameters
    ----------
    kit
        Folder of a user's kit.
    user
        Its user.

    Raises
    ------
    FederationError
        If the server is not reached or refuses the user.
    """

    def __init__(self, kit: Path, user: str = COORDINATOR):
        require_nvflare()
        os.environ.setdefault("GRPC_VERBOSITY", "NONE")  # it would report a refused connection by itself
        from nvflare.fuel.flare_api import flare_api

        _check_listening(kit)
        with _quiet():
            self._api = flare_api.Session(user, str(kit.resolve()))
            self._api.api.auto_login_max_tries = 1
        try:
            with _quiet():
                self._api.try_connect(_WAIT)
        except KeyboardInterrupt:
            self._hang_up()
            raise
        except Exception as error:
            self._hang_up()
            raise FederationError(
                f"the federation's server is not reached, or refuses the user: {_said(error)}",
                hint="is 'fald federation serve' running, and is it at the host and port of federation.toml?",
            ) from error

    def __enter__(self) -> AdminSession:
        return self

    def __exit__(self, *exception: object) -> None:
        with contextlib.suppress(Exception), _quiet():
            self._api.close()
        self._hang_up()

    def _hang_up(self) -> None:
        """End the connection's threads, which would keep the program from ending."""
        with contextlib.suppress(Exception), _quiet():
            self._api.api.close()

    def _do(self, name: str, *arguments: Any) -> Any:
        try:
            with _quiet():
                return getattr(self._api, name)(*arguments)
        except Exception as error:
            raise FederationError(f"the federation's server refuses: {_said(error)}") from error

    def situation(self) -> Situation:
        """Sites and running jobs."""
        found = self._do("get_system_info")
        sites = {c.name: float(c.last_connect_time or 0.0) for c in found.client_info}
        return Situation(dict(sorted(sites.items())), tuple(j.job_id for j in found.job_info))

    def submit(self, path: Path) -> str:
        """Submit a job's folder; returns its id."""
        return self._do("submit_job", str(path))

    def state(self, job_id: str) -> str:
        """How a job stands: ``waiting``, ``running``, ``done``, ``aborted`` or ``failed``."""
        return _state(str(self._do("get_job_status", job_id)))

    def unfinished(self) -> list[str]:
        """Jobs that have not ended; after a kill -9 of the server some never will."""
        return [j["job_id"] for j in self._do("list_jobs") if _state(str(j["status"])) in _UNFINISHED]

    def abort(self, job_id: str, patience: float) -> str:
        """Stop a job and wait until it has ended; returns its state."""
        with contextlib.suppress(FederationError):  # it may have ended meanwhile
            self._do("abort_job", job_id)
        end = time.monotonic() + patience
        while (state := self.state(job_id)) in _UNFINISHED and time.monotonic() < end:
            time.sleep(0.5)
        return state


def _check_listening(kit: Path) -> None:
    """Say at once when nothing listens; the engine's library would try for long."""
    admin = json.loads((kit / "startup" / "fed_admin.json").read_text())["admin"]
    try:
        socket.create_connection((admin["host"], admin["port"]), timeout=5.0).close()
    except OSError as error:
        raise FederationError(
            f"no server answers at {admin['host']}:{admin['port']} ({error.strerror or error})",
            hint="start it with: fald federation serve NAME",
        ) from error


def _await_server(kit: Path, seconds: float) -> None:
    """Wait until something listens; say after so long that nothing does."""
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        with contextlib.suppress(FederationError):
            return _check_listening(kit)
        time.sleep(0.5)
    _check_listening(kit)


def submit(folder: Path, job: dict[str, Any], *, wait: float = 60.0) -> str:
    """Submit a run to the server of a federation; returns the engine's job id.

    A job that the engine still counts as running for the same output folder, or that has lost its process, is
    aborted first: the run goes on from its checkpoint in a new job.

    Parameters
    ----------
    folder
        Folder of the federation.
    job
        What ``fald.federation.coordinator.run.serve_job`` takes.
    wait
        Seconds to wait for sites that are missing or silent: they may be about to come back.

    Raises
    ------
    FederationError
        If the server is not reached, refuses the user, sites stay away, or another run is going on.
    """
    federation = read_settings(folder)
    if job.get("resume"):  # whoever resumes may be quicker than the restart of what was killed
        _await_server(folder / "coordinator", _RESTART)
    with AdminSession(folder / "coordinator") as session:
        present = _await_sites(session, federation, wait)
        _make_way(folder, session, present, str(job["out"]))
        with tempfile.TemporaryDirectory() as scratch:
            job_id = session.submit(write_job(Path(scratch), federation, job))
    remember_submitted(folder, job_id, str(job["out"]))
    return job_id


def _await_sites(session: AdminSession, federation: FederationSettings, wait: float) -> Situation:
    end = time.monotonic() + wait
    while True:
        present = session.situation()
        heard = {site for site, moment in present.sites.items() if time.time() - moment < _SILENT}
        missing = [site for site in federation.sites if site not in heard]
        if not missing:
            return present
        if time.monotonic() > end:
            raise FederationError(
                f"not all sites are there: {', '.join(missing)} missing",
                hint="fald federation join KIT --data FILE at each; see fald federation status NAME",
            )
        time.sleep(1.0)


def _make_way(folder: Path, session: AdminSession, present: Situation, out: str) -> None:
    places = {line["job"]: line["out"] for line in read_submitted(folder)}
    for job_id in session.unfinished():
        place = places.get(job_id)
        if place is not None and (Path(place) / OUTCOME).exists() and _ends(session, job_id):
            continue  # whoever followed it knows its outcome, and may begin the next one at once
        alive = job_id in present.jobs or session.state(job_id) == "waiting"
        if alive and place != out:
            raise FederationError(
                f"another run is going on, into {place or 'an unknown folder'}",
                hint="wait for its end, or stop it with: fald federation stop NAME",
            )
        session.abort(job_id, patience=30.0)


def _ends(session: AdminSession, job_id: str) -> bool:
    end = time.monotonic() + _ENDING
    while session.state(job_id) in _UNFINISHED:
        if time.monotonic() > end:
            return False
        time.sleep(0.5)
    return True


def abort(folder: Path, job_id: str, *, patience: float = 30.0) -> str:
    """Stop a job and wait until it has ended; returns its state."""
    with AdminSession(folder / "coordinator") as session:
        return session.abort(job_id, patience)


def job_state(folder: Path, job_id: str) -> str:
    """How a job stands: ``waiting``, ``running``, ``lost``, ``done``, ``aborted`` or ``failed``.

    A lost job counts as running and has no process: it is just starting or ending, or its server was killed.
    """
    with AdminSession(folder / "coordinator") as session:
        state = session.state(job_id)
        return "lost" if state == "running" and job_id not in session.situation().jobs else state


def write_job(folder: Path, federation: FederationSettings, job: dict[str, Any]) -> Path:
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


def _state(status: str) -> str:
    if status.startswith(_FINISHED):
        ending = status.removeprefix(_FINISHED)
        return {"COMPLETED": "done", "ABORTED": "aborted"}.get(ending, "failed")
    return "running" if status == "RUNNING" else "waiting"


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
