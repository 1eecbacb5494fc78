"""A federation carried by NVIDIA FLARE: long-lived processes, kits with certificates, runs as jobs."""

from __future__ import annotations

import contextlib
import json
import socket
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from fald.core.errors import FederationError
from fald.federation.engines import Report, Site, Situation
from fald.federation.engines.nvflare import certificates, jobs, kits, require_nvflare
from fald.federation.engines.nvflare.jobs import Session
from fald.federation.engines.nvflare.process import Supervisor, keep_running
from fald.federation.folder import FederationSettings, read_settings

_ASK = 5.0  # seconds between questions to the server


class Nvflare:
    """The engine."""

    def init(self, folder: Path, federation: FederationSettings) -> None:
        """A certificate authority, the server, the coordinator's kit and a kit for every site."""
        require_nvflare()
        kits.make_kits(folder, federation)

    def fingerprint(self, folder: Path) -> list[str]:
        """That of the authority."""
        found = kits.authority_fingerprint(folder / "server")
        return [f"Tell them its fingerprint by another way, such as the telephone: {found}."]

    def approve(self, folder: Path, request: Path, again: bool) -> tuple[str, str, Path]:
        """Sign a site's request."""
        require_nvflare()
        return kits.approve(folder, read_settings(folder), request, again=again)

    def serve(self, folder: Path, report: Report) -> None:
        """Keep the server running."""
        require_nvflare()
        federation = read_settings(folder)
        kit = folder / "server"
        _check_port(federation.host, federation.port)
        kits.place_stores(kit, federation)
        report(f"Serving {federation.name} at {federation.host}:{federation.port}; Ctrl-C stops it.")
        observer = _Observer(folder)
        supervisor = Supervisor("server", kit, federation.host, federation.name)

        def look() -> str:
            for site in kits.approve_waiting(folder, federation):
                report(f"approved site {site}, whose kit is in {folder}")
            return observer.line() if supervisor.pid is not None else ""

        keep_running(supervisor, report, look, observer.close)

    def read_kit(self, kit: Path) -> Mapping[str, Any]:
        """Federation, site, host and port."""
        require_nvflare()
        return kits.read_kit(kit)

    def join(self, site: Site, report: Report, patience: float | None) -> None:
        """Write what the engine runs by, get a certificate, then keep the site's process running."""
        kits.settle(site.kit, site.about)
        _await_certificate(site.kit, site.about, site.public, report, patience)
        names = site.about["site"], site.about["federation"]
        supervisor = Supervisor("site", site.kit, *names, {"FALD_SITE": str(site.home)})
        keep_running(supervisor, report, lambda: _site_line(supervisor, site.about, site.status))

    def submit(self, folder: Path, job: dict[str, Any]) -> str:
        """Submit a job that names two classes and ships no code."""
        return jobs.submit(folder, job)

    def job_state(self, folder: Path, job_id: str) -> str:
        """How a job stands."""
        return jobs.job_state(folder, job_id)

    def abort(self, folder: Path, job_id: str) -> str:
        """Stop a job."""
        return jobs.abort(folder, job_id)

    def unfinished(self, folder: Path) -> list[str]:
        """Jobs that have not ended; after a kill -9 of the server some never will."""
        with Session(folder / "coordinator") as session:
            return session.unfinished()

    def situation(self, folder: Path) -> Situation:
        """Sites and running jobs, as the server knows them."""
        with Session(folder / "coordinator") as session:
            return session.situation()


deployment = Nvflare()


def _check_port(host: str, port: int) -> None:
    local = "127.0.0.1" if host in ("localhost", "127.0.0.1") else ""
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((local, port))
        except OSError as error:
            raise FederationError(
                f"port {port} cannot be used: {error.strerror}",
                hint="another server may be running, or the system keeps ports below 1024 for its "
                "administrator; the port is in federation.toml and in every kit",
            ) from error


class _Observer:
    """Asks the server now and then who is there, over one login."""

    def __init__(self, folder: Path):
        self._folder, self._federation = folder, read_settings(folder)
        self._session: Session | None = None
        self._next, self._line = time.monotonic() + _ASK, ""

    def line(self) -> str:
        if time.monotonic() < self._next:
            return self._line
        try:
            if self._session is None:
                self._session = Session(self._folder / "coordinator")
            found = self._session.situation()
        except FederationError:  # it is starting, or restarting
            self.close()
        else:
            here = [site for site in self._federation.sites if site in found.sites]
            gone = [site for site in self._federation.sites if site not in found.sites]
            missing = f"; missing: {', '.join(gone)}" if gone else ""
            work = "; a run is going on" if found.jobs else ""
            self._line = f"{len(here)} of {len(self._federation.sites)} sites joined{missing}{work}"
        self._next = time.monotonic() + _ASK
        return self._line

    def close(self) -> None:
        if self._session is not None:
            self._session.__exit__()
            self._session = None


def _await_certificate(
    kit: Path, about: Mapping[str, Any], public: str, report: Report, patience: float | None
) -> None:
    """Ask for a certificate if there is none, and wait for it."""
    key, certificate = kit / "startup" / "client.key", kit / "startup" / "client.crt"
    if not certificate.exists():
        request = certificates.make_request(kit, about["federation"], about["site"], public)
        report(
            f"Asking for a certificate: send {kit / certificates.REQUEST} to the coordinator, "
            f"and tell them its fingerprint, {certificates.fingerprint(request)}.\n"
            f"Put the client.crt that comes back into {kit / 'startup'}; waiting for it."
        )
        end = None if patience is None else time.monotonic() + patience
        while not certificate.exists():
            if end is not None and time.monotonic() > end:
                raise FederationError("no certificate came", hint="fald federation approve NAME REQUEST")
            time.sleep(0.5)
    if not key.exists() or not certificates.key_matches(certificate, key):
        raise FederationError(
            f"{certificate} does not belong to this site's key",
            hint="send the request of this kit to the coordinator, and use the certificate that comes back",
        )


def _site_line(supervisor: Supervisor, about: Mapping[str, Any], path: Path) -> str:
    """Connection and work of a site in a few words."""
    if not _is_connected(supervisor.pid, about["port"]):
        return f"trying to reach {about['host']}:{about['port']}"
    line = f"connected to {about['host']}:{about['port']}"
    note: dict[str, Any] = {}
    with contextlib.suppress(OSError, ValueError):
        note = json.loads(path.read_text())
    if "refused" in note:
        return f"{line}; refused: {note['refused']}"
    if "finished" in note:
        return f"{line}; run {note['finished']} is finished"
    if "round" in note:
        return f"{line}; run {note.get('run')}: answering rounds"
    return line


def _is_connected(pid: int | None, port: int) -> bool:
    import psutil

    if pid is None:
        return False
    try:
        found = psutil.Process(pid).net_connections(kind="tcp")
    except (psutil.Error, AttributeError):
        return False
    return any(c.raddr and c.raddr.port == port and c.status == psutil.CONN_ESTABLISHED for c in found)
