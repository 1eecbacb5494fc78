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
from fald.core.version import differences, library_versions
from fald.federation.engines import Finding, JoinedSite, Report, Situation
from fald.federation.engines.nvflare import certificates, jobs, kits, require_nvflare
from fald.federation.engines.nvflare.door import contended, read_joined
from fald.federation.engines.nvflare.jobs import AdminSession
from fald.federation.engines.nvflare.probe import probe
from fald.federation.engines.nvflare.process import Supervisor, keep_running
from fald.federation.folder import CLOCK, FederationSettings, check_own, note_own, read_settings

_ASK = 5.0  # seconds between questions to the server
_SOON = 60.0  # days before its end at which a certificate is spoken of
_DOUBT = 10.0  # seconds without a connection after which a site looks for the reason


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
        supervisor = Supervisor("server", kit, name=federation.host, organisation=federation.name)

        def look() -> str:
            for site in kits.approve_waiting(folder, federation):
                report(f"approved site {site}, whose kit is in {folder}")
            return observer.line() if supervisor.pid is not None else ""

        keep_running(supervisor, report, look, observer.close)

    def read_kit(self, kit: Path) -> Mapping[str, Any]:
        """Federation, site, host and port."""
        require_nvflare()
        return kits.read_kit(kit)

    def join(self, site: JoinedSite, report: Report, patience: float | None) -> None:
        """Write what the engine runs by, get a certificate, then keep the site's process running."""
        kits.settle(site.kit, site.about)
        _await_certificate(site, report=report, patience=patience)
        certificates.check_certificate(site.kit / "startup", site.about["site"])
        names = {"name": site.about["site"], "organisation": site.about["federation"]}
        supervisor = Supervisor("site", site.kit, **names, environment={"FALD_SITE": str(site.home)})
        line = _SiteLine(supervisor, site)
        keep_running(supervisor, report, line.look)

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
        with AdminSession(folder / "coordinator") as session:
            return session.unfinished()

    def situation(self, folder: Path) -> Situation:
        """Sites and running jobs, as the server knows them."""
        with AdminSession(folder / "coordinator") as session:
            return session.situation()

    def examine(self, folder: Path) -> list[Finding]:
        """Certificates, and what sites said when they joined."""
        require_nvflare()
        places = {
            "the authority": folder / "authority" / "authority.crt",
            "the server": folder / "server" / "startup" / "server.crt",
            "the coordinator": folder / "coordinator" / "startup" / "client.crt",
        }
        sites = read_settings(folder).sites
        places |= {site: folder / "sites" / site / "startup" / "client.crt" for site in sites}
        mend = "'fald federation init' makes a new federation; a site: remove client.crt, join, approve"
        found = [_days(whose, path, mend) for whose, path in places.items()]
        key = folder / "authority" / "authority.key"
        if not key.exists():
            found.append(Finding("warn", "keys", f"{key} is not here", "bring it for 'approve'"))
        odd, joined = odd_sites(folder), read_joined(folder / "server")
        never = [site for site in sites if site not in joined]
        if never:
            found.append(
                Finding("warn", "sites", f"never joined: {', '.join(never)}", "fald federation join")
            )
        found += [Finding("bad", "sites", *line.rsplit(": ", 1)) for line in odd]
        if not odd and joined:
            found.append(Finding("ok", "sites", f"versions and clocks agree: {', '.join(sorted(joined))}"))
        return found

    def examine_kit(self, kit: Path) -> list[Finding]:
        """Certificates, and the way to the server."""
        about, startup = self.read_kit(kit), kit / "startup"
        found = [_days("the authority", startup / "rootCA.pem", "the coordinator makes the federation anew")]
        if not (startup / "client.crt").exists():
            return [
                *found,
                Finding("warn", "certificate", "none yet", "join, and let the coordinator approve"),
            ]
        certificates.check_certificate(startup, about["site"])
        found.append(_days(about["site"], startup / "client.crt", "remove it, join again, approve"))
        differ = differences(about["versions"] or library_versions(), library_versions())
        if differ:
            said = f"the federation was made with {' and '.join(differ)}"
            found.append(Finding("warn", "versions", said, "the coordinator and all sites need the same"))
        why = probe(about["host"], about["port"], startup)
        reached = f"{about['host']}:{about['port']} is reached, and takes this site's certificate"
        found.append(Finding("bad", "port", *why.split(": ", 1)) if why else Finding("ok", "port", reached))
        return found


deployment = Nvflare()


def _days(whose: str, path: Path, mend: str) -> Finding:
    """How long a certificate holds."""
    if not path.exists():
        return Finding("warn", "certificate", f"{whose}: none yet", "join, and approve")
    days = certificates.days_left(path)
    level = "bad" if days <= 0 else "warn" if days < _SOON else "ok"
    return Finding(level, "certificate", f"{whose}: {days:,.0f} days left", mend if level != "ok" else "")


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


def odd_sites(folder: Path) -> list[str]:
    """What is wrong with sites by what they said when they joined: versions, clocks, twins."""
    lines = []
    for site, about in sorted(read_joined(folder / "server").items()):
        differ = differences(about["versions"], library_versions())
        if differ:
            lines.append(f"{site} has {' and '.join(differ)}: install the same everywhere")
        if about["clock"] is not None and abs(about["clock"]) > CLOCK:
            lines.append(f"the clock of {site} is {about['clock']:+.0f} s off: set it")
    twins = contended(folder / "server")
    return lines + [f"two processes join as {site}: its kit is in use twice, stop one" for site in twins]


class _Observer:
    """Asks the server now and then who is there, over one login."""

    def __init__(self, folder: Path):
        self._folder, self._federation = folder, read_settings(folder)
        self._session: AdminSession | None = None
        self._next, self._line = time.monotonic() + _ASK, ""

    def line(self) -> str:
        if time.monotonic() < self._next:
            return self._line
        try:
            if self._session is None:
                self._session = AdminSession(self._folder / "coordinator")
            found = self._session.situation()
        except FederationError:  # it is starting, or restarting
            self.close()
        else:
            here = [site for site in self._federation.sites if site in found.sites]
            gone = [site for site in self._federation.sites if site not in found.sites]
            missing = f"; missing: {', '.join(gone)}" if gone else ""
            work = "; a run is going on" if found.jobs else ""
            odd = "".join(f"; {line}" for line in odd_sites(self._folder))
            self._line = f"{len(here)} of {len(self._federation.sites)} sites joined{missing}{work}{odd}"
        self._next = time.monotonic() + _ASK
        return self._line

    def close(self) -> None:
        if self._session is not None:
            self._session.__exit__()
            self._session = None


def _await_certificate(site: JoinedSite, *, report: Report, patience: float | None) -> None:
    """Ask for a certificate if there is none, and wait for it."""
    kit, about = site.kit, site.about
    key, certificate = kit / "startup" / "client.key", kit / "startup" / "client.crt"
    if key.exists() and not site.trusted:
        check_own(site.home, key)
    if not certificate.exists():
        request = certificates.make_request(kit, about["federation"], about["site"], site.public)
        note_own(site.home, key)
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
    elif key.exists():
        note_own(site.home, key)
    if not key.exists() or not certificates.key_matches(certificate, key):
        raise FederationError(
            f"{certificate} does not belong to this site's key",
            hint="send the request of this kit to the coordinator, and use the certificate that comes back",
        )


class _SiteLine:
    """Connection and work of a site in a few words; what is wrong, where it does not get through."""

    def __init__(self, supervisor: Supervisor, site: JoinedSite):
        self._supervisor, self._site = supervisor, site
        self._asked, self._why = time.monotonic(), ""
        self._connected = float("-inf")

    def look(self) -> str:
        about, now = self._site.about, time.monotonic()
        recent = now - self._connected < _ASK and self._supervisor.pid is not None
        if recent or _is_connected(self._supervisor.pid, about["port"]):
            self._asked, self._why, self._connected = now, "", self._connected if recent else now
            return _work_line(f"connected to {about['host']}:{about['port']}", self._site.status)
        if now - self._asked > _DOUBT:
            self._asked = now
            self._why = probe(about["host"], about["port"], self._site.kit / "startup")
        return f"trying to reach {about['host']}:{about['port']}" + (f": {self._why}" if self._why else "")


def _work_line(line: str, path: Path) -> str:
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
