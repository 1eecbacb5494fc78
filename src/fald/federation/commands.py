"""What ``fald federation`` does, without a terminal: make a federation, serve it, join it, look at it."""

from __future__ import annotations

import contextlib
import json
import socket
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from fald.checkpoint import write_atomically
from fald.data import read_table
from fald.errors import ConfigError, FederationError
from fald.federation.folder import new_settings, parse_sites, read_settings, read_submitted
from fald.federation.identity import Identity, check_public
from fald.federation.nvflare import certificates, kits, require_nvflare
from fald.federation.nvflare.jobs import Session
from fald.federation.nvflare.process import Supervisor, keep_running
from fald.federation.policy import read_policy
from fald.federation.site import read_site
from fald.tables import align

Report = Callable[[str], None]
PORT = 8102
_ASK = 5.0  # seconds between questions to the server
_LATE = 30.0  # seconds of silence after which a site is called silent; it is heard of every ten


def init(folder: Path, sites: str, host: str, port: int) -> str:
    """Make the folder of a federation and say what to do next."""
    require_nvflare()
    federation = new_settings(folder.name, parse_sites(sites), host, port)
    kits.make_kits(folder, federation)
    count = len(federation.sites)
    kit = folder / "sites" / federation.sites[0]
    return "\n".join(
        [
            f"Made the federation {federation.name} in {folder}, server at {host}:{port}, "
            f"{count} sites: {', '.join(federation.sites)}.",
            f"Keep {folder / 'authority'} to yourself: it decides who belongs to the federation.",
            f"Give each site its folder of {folder / 'sites'}; it holds no secret.",
            "Next:",
            f"  fald federation serve {folder}          here; leave it running",
            f"  fald federation join {kit} --data FILE          at each site, with its own folder and table",
            f"  fald run study.toml --federation {folder}          here, when all sites have joined",
        ]
    )


def approve(folder: Path, request: Path, again: bool) -> str:
    """Approve a site's request and say what to send back."""
    require_nvflare()
    site, digest, answer = kits.approve(folder, read_settings(folder), request, again=again)
    return "\n".join(
        [
            f"Approved site {site}; its request has the fingerprint {digest}.",
            f"If the site tells you another one, somebody has exchanged its keys: remove {answer}.",
            f"Send {answer} to the site, which puts it into the folder startup of its kit.",
        ]
    )


def serve(folder: Path, report: Report) -> None:
    """Run the server of a federation until Ctrl-C."""
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


def _check_port(host: str, port: int) -> None:
    local = "127.0.0.1" if host in ("localhost", "127.0.0.1") else ""
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((local, port))
        except OSError as error:
            raise FederationError(
                f"port {port} cannot be used: {error.strerror}",
                hint="another server may be running; the port is in federation.toml and in every kit",
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


def join(
    kit: Path,
    data: Path,
    policy: Path | None,
    state: Path | None,
    report: Report,
    *,
    pins: Path | None = None,
    patience: float | None = None,
) -> None:
    """Take part in a federation with a table of rows, until Ctrl-C.

    Parameters
    ----------
    kit
        The site's folder, as the coordinator gave it.
    data, policy
        The site's rows and rules.
    state
        Folder for the site's keys, ledger and log; default: ``site`` in the kit.
    pins
        Public keys of all sites, as in the federation's ``roster.json``; None: those seen in the first run.
    patience
        Seconds to wait for the certificate; None: as long as it takes.
    """
    require_nvflare()
    about = kits.read_kit(kit)
    rows = len(read_table(data))
    read_policy(policy)
    if pins is not None:
        _check_pins(pins, about["site"])
    place = (state or kit / "site").resolve()
    site = write_site(place, about["site"], {"data": data, "policy": policy, "pins": pins})
    rules = f"rules of {policy}" if policy else "default rules"
    report(f"Site {about['site']} of {about['federation']}: {rows:,} rows in {data}, {rules}")
    identity = _identity(read_site(site).identity)
    _await_certificate(kit, about, identity, report, patience)
    supervisor = Supervisor("site", kit, about["site"], about["federation"], {"FALD_SITE": str(site)})
    status = read_site(site).state / "status.json"
    keep_running(supervisor, report, lambda: _site_line(supervisor, about, status))


def write_site(folder: Path, name: str, files: Mapping[str, Path | None]) -> Path:
    """Write ``site.toml``, which tells the site's workers where things are."""
    folder.mkdir(parents=True, exist_ok=True, mode=0o700)
    values = {"name": name, **{key: str(path.resolve()) for key, path in files.items() if path is not None}}
    text = "".join(f"{key} = {json.dumps(value, ensure_ascii=False)}\n" for key, value in values.items())
    write_atomically(folder / "site.toml", text.encode())
    return folder


def _check_pins(path: Path, site: str) -> None:
    try:
        known = json.loads(path.read_text())
        keys = {name: check_public(name, key) for name, key in known.items()}
    except (OSError, ValueError, AttributeError) as error:
        raise ConfigError(
            f"{path} holds no public keys of sites ({error})", hint="see roster.json"
        ) from error
    if site not in keys:
        raise ConfigError(f"{path} has no key for {site}, this site")


def _identity(path: Path) -> Identity:
    path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
    return Identity.load(path) if path.exists() else Identity.create(path)


def _await_certificate(
    kit: Path, about: dict[str, Any], identity: Identity, report: Report, patience: float | None
) -> None:
    """Ask for a certificate if there is none, and wait for it."""
    key, certificate = kit / "startup" / "client.key", kit / "startup" / "client.crt"
    if not certificate.exists():
        request = certificates.make_request(kit, about["federation"], about["site"], identity.public)
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


def _site_line(supervisor: Supervisor, about: dict[str, Any], path: Path) -> str:
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


def stop(folder: Path) -> str:
    """Abort every run that is going on; returns what was done."""
    read_settings(folder)
    with Session(folder / "coordinator") as session:
        jobs = session.unfinished()
        for job in jobs:
            session.abort(job, patience=30.0)
    return f"Stopped {len(jobs)} run{'s' if len(jobs) != 1 else ''}." if jobs else "No run is going on."


def status(folder: Path) -> dict[str, Any]:
    """Sites with the seconds since they were heard of, and the last run."""
    federation = read_settings(folder)
    roster = _approved(folder, federation.sites)
    try:
        with Session(folder / "coordinator") as session:
            found, problem, now = session.situation(), "", time.time()
            seen = {site: max(0.0, now - moment) for site, moment in found.sites.items()}
            jobs = list(found.jobs)
    except FederationError as error:
        seen, jobs, problem = {}, [], error.message
    return {
        "federation": federation.name,
        "server": f"{federation.host}:{federation.port}",
        "reached": not problem,
        "problem": problem,
        "sites": [
            {"site": s, "approved": s in roster, "joined": s in seen, "seconds_since_heard": seen.get(s)}
            for s in federation.sites
        ],
        "running": jobs,
        "last_run": _last_run(folder, jobs),
    }


def _approved(folder: Path, sites: tuple[str, ...]) -> set[str]:
    return {s for s in sites if (folder / "sites" / s / "startup" / "client.crt").exists()}


def _last_run(folder: Path, jobs: list[str]) -> dict[str, Any] | None:
    submitted = read_submitted(folder)
    if not submitted:
        return None
    last = submitted[-1]
    out = Path(last["out"])
    outcome: dict[str, Any] = {}
    with contextlib.suppress(OSError, ValueError):
        outcome = json.loads((out / "outcome.json").read_text())
    state = "running" if last["job"] in jobs else outcome.get("status", "stopped")
    rounds, total = _progress(out / "rounds.jsonl")
    said = outcome.get("message") if state == "failed" else None
    return {"out": str(out), "state": state, "round": rounds, "rounds_total": total, "message": said}


def _progress(path: Path) -> tuple[int | None, int | None]:
    """The last round of a journal, and how many there will be."""
    done = total = None
    with contextlib.suppress(OSError):
        for line in path.read_text(encoding="utf-8").splitlines():
            with contextlib.suppress(ValueError):
                entry = json.loads(line)
                done, total = entry.get("round", done), entry.get("rounds_total", total)
    return done, total


def status_text(document: dict[str, Any]) -> str:
    """The same for a terminal."""
    rows = [[s["site"], _standing(s, document["reached"])] for s in document["sites"]]
    reached = "" if document["reached"] else f": {document['problem']}"
    lines = [
        f"{document['federation']}, server at {document['server']}{reached}",
        "",
        align(["site", ""], rows),
    ]
    run = document["last_run"]
    if run is not None:
        of = f" of {run['rounds_total']}" if run["rounds_total"] else ""
        count = f", round {run['round']}{of}" if run["round"] is not None else ""
        said = f": {run['message']}" if run["message"] else ""
        lines += ["", f"Last run, {run['out']}: {run['state']}{count}{said}"]
    return "\n".join(lines)


def _standing(site: dict[str, Any], reached: bool) -> str:
    if not site["approved"]:
        return "not approved yet"
    if not reached:
        return "approved"
    if not site["joined"]:
        return "approved, not here"
    seconds = site["seconds_since_heard"]
    return f"here, heard of {seconds:.0f} s ago" if seconds <= _LATE else f"silent for {seconds:.0f} s"
