"""What ``fald federation`` does, without a terminal: make a federation, serve it, join it, look at it."""

from __future__ import annotations

import contextlib
import json
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from fald.core.errors import ConfigError, FederationError, printable
from fald.core.files import sole_owner, write_atomically
from fald.core.version import differences, library_versions
from fald.federation.engines import ENGINES, Deployment, JoinedSite, deployment_of
from fald.federation.folder import (
    ENGINE,
    check_own,
    kit_engine,
    new_settings,
    note_own,
    parse_sites,
    read_settings,
    read_submitted,
)
from fald.federation.secure.identity import Identity, check_public, key_fingerprint
from fald.federation.secure.session import FEWEST_SITES
from fald.federation.site.record import as_rows, read_record
from fald.federation.site.settings import read_site
from fald.problem.encoding import TABLES, existing, read_table
from fald.results.text import align

Report = Callable[[str], None]
GONE = "gone"  # the fingerprint of a site that has left
_LATE = 30.0  # seconds of silence after which a site is called silent; it is heard of every ten


def init(folder: Path, sites: str, host: str, port: int, *, engine: str = ENGINE) -> str:
    """Make the folder of a federation and say what to do next."""
    federation = replace(new_settings(folder.name, parse_sites(sites), host, port), engine=engine)
    ENGINES[engine].init(folder, federation)
    count = len(federation.sites)
    kit = folder / "sites" / federation.sites[0]
    return "\n".join(
        [
            f"Made the federation {federation.name} in {folder}, server at {host}:{port}, "
            f"{count} sites: {', '.join(federation.sites)}.",
            f"Keep {folder / 'authority'} to yourself: it decides who belongs to the federation.",
            f"Give each site its folder of {folder / 'sites'}; it holds no secret and no program.",
            *ENGINES[engine].fingerprint(folder),
            "Next:",
            f"  fald federation serve {folder}          here; leave it running",
            f"  fald federation join {kit} --data FILE          at each site, with its own folder and table",
            f"  fald run study.toml --federation {folder}          here, when all sites have joined",
        ]
    )


def approve(folder: Path, request: Path, again: bool) -> str:
    """Approve a site's request and say what to send back."""
    site, digest, answer = deployment_of(folder).approve(folder, request, again)
    return "\n".join(
        [
            f"Approved site {site}; its request has the fingerprint {digest}.",
            f"If the site tells you another one, somebody has exchanged its keys: remove {answer}.",
            f"Send {answer} to the site, which puts it into the folder startup of its kit.",
        ]
    )


def serve(folder: Path, report: Report) -> None:
    """Run the server of a federation until Ctrl-C."""
    deployment_of(folder).serve(folder, report)


def join(
    kit: Path,
    data: Path,
    policy: Path | None,
    state: Path | None,
    *,
    report: Report,
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
        Folder for the site's keys, ledger and log; default: ``site`` in the kit, where keys must have been
        made on this machine.
    pins
        Public keys of all sites, as in the federation's ``roster.json``; None: those seen in the first run.
    patience
        Seconds to wait for the certificate; None: as long as it takes.
    """
    engine: Deployment = ENGINES[kit_engine(kit)]
    about = engine.read_kit(kit)
    # what is no table is read by the model of a study
    table = existing(data).suffix.lower() in TABLES
    rows = f"{len(read_table(data)):,} rows in {data}" if table else f"what a model reads in {data}"
    if policy is not None:
        from fald.federation.site.policy import read_policy  # it knows all methods, which takes its time

        read_policy(policy)
    if pins is not None:
        _check_pins(pins, about["site"])
    place = (state or kit / "site").resolve()
    asks = f"{about['host']}:{about['port']}, authority {about['authority']}"
    _same_coordinator(place, asks)
    identity = _identity(place, trusted=state is not None)
    files = {"data": data, "policy": policy, "pins": pins}
    site = write_site(place, about["site"], files, coordinator=asks, sites=about["sites"])
    rules = f"rules of {policy}" if policy else "default rules"
    report(f"Site {about['site']} of {about['federation']}: {rows}, {rules}")
    report(
        f"The federation's authority has the fingerprint {about['authority']}: compare it with what the "
        "coordinator tells you by another way, such as the telephone."
    )
    if len(about["sites"]) < FEWEST_SITES:
        other = ", ".join(name for name in about["sites"] if name != about["site"])
        report(
            "Only two sites: no secure sum can hide what this one sends. The coordinator sees each upload, "
            f"and {other} can work out much from the result; 'unsummed = false' in a policy refuses that."
        )
    for line in differences(about.get("versions") or library_versions(), library_versions()):
        report(f"The federation was made with {line}: the coordinator and all sites need the same.")
    report(f"This site's key has the fingerprint {key_fingerprint(identity.public)}.")
    status = read_site(site).state / "status.json"
    here = JoinedSite(kit, about, site, status, identity.public, trusted=state is not None)
    with _joined_once(place):
        engine.join(here, report, patience)


@contextlib.contextmanager
def _joined_once(place: Path) -> Iterator[None]:
    """Refuse to join from a folder from which another process has joined."""
    with contextlib.ExitStack() as stack:
        try:
            stack.enter_context(sole_owner(place, "join.lock"))
        except ConfigError as error:
            raise FederationError(
                f"this site has joined already: {error.message}", hint="one process is enough; stop the other"
            ) from error
        yield


def repin(kit: Path, site: str, roster: Path, fingerprint: str) -> str:
    """At a site: take another site's new key, or the absence of one, once its fingerprint was compared.

    Parameters
    ----------
    kit
        This site's kit, or the folder of its state.
    site
        Whose key has changed; a new site, or one that has left.
    roster
        The federation's ``roster.json``, from the coordinator.
    fingerprint
        What the other site told its operator by another way; nothing: only say what has changed.

    Raises
    ------
    ConfigError
        If there is nothing to change here, or the fingerprint is not that of the new key.
    """
    home = _home(kit)
    own = read_site(home)
    if own.pins is not None:
        raise ConfigError(
            f"the keys that {own.name} trusts are in {own.pins}", hint="change that file, and join again"
        )
    path = own.state / "pins.json"
    keys, known = _read_keys(roster), _read_keys(path) if path.exists() else {}
    before, after = (known.get(site), keys.get(site))
    if before == after:
        return (
            f"Nothing to do: the key of {site} is {key_fingerprint(after) if after else 'in neither file'}."
        )
    told = key_fingerprint(after) if after else GONE
    change = f"{site}: {key_fingerprint(before) if before else 'no key'} so far, in {roster} now {told}."
    if not fingerprint:
        return (
            f"{change}\nAsk {site} itself for its fingerprint ('join' and 'doctor' show it), by telephone. "
            f"If it is this one:\n  fald federation repin {kit} {site} {roster} --fingerprint {told}"
        )
    if fingerprint.strip().lower() != told:
        raise ConfigError(
            f"{fingerprint!r} is not the fingerprint of the key of {site} in {roster}, which is {told}",
            hint="somebody may have exchanged the key on its way; nothing was changed",
        )
    left = {name: key for name, key in {**known, site: after}.items() if key is not None}
    write_atomically(path, json.dumps(left, indent=1, sort_keys=True).encode())
    return f"{change} {own.name} goes by the new one from the next run on."


def _same_coordinator(place: Path, asks: str) -> None:
    """Refuse a kit that names another server or authority than the one this site has joined."""
    if not (place / "site.toml").exists():
        return
    before = read_site(place).coordinator
    if before not in ("", asks):
        raise FederationError(
            f"the kit is for {asks}, and this site has joined {before}",
            hint="if the federation was really made anew, join with another --state; otherwise the kit was "
            "exchanged",
        )


def write_site(
    folder: Path, name: str, files: Mapping[str, Path | None], *, coordinator: str, sites: Sequence[str]
) -> Path:
    """Write ``site.toml``, which tells the site's workers where things are, and who the others are."""
    folder.mkdir(parents=True, exist_ok=True, mode=0o700)
    values = {
        "name": name,
        "coordinator": coordinator,
        "sites": list(sites),
        **{key: str(path.resolve()) for key, path in files.items() if path is not None},
    }
    text = "".join(f"{key} = {json.dumps(value, ensure_ascii=False)}\n" for key, value in values.items())
    write_atomically(folder / "site.toml", text.encode())
    return folder


def _check_pins(path: Path, site: str) -> None:
    if site not in _read_keys(path):
        raise ConfigError(f"{path} has no key for {site}, this site")


def _read_keys(path: Path) -> dict[str, str]:
    try:
        known = json.loads(path.read_text())
        return {name: check_public(name, key) for name, key in known.items()}
    except (OSError, ValueError, AttributeError) as error:
        raise ConfigError(
            f"{path} holds no public keys of sites ({error})", hint="see roster.json"
        ) from error


def _identity(home: Path, *, trusted: bool) -> Identity:
    """The site's own key, made here; ``trusted`` says that the folder is no part of a kit."""
    path = home / "state" / "identity.pem"
    if not trusted and any((home / name).exists() for name in ("state", "site.toml")):
        check_own(home, path)
    path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
    identity = Identity.load(path) if path.exists() else Identity.create(path)
    note_own(home, path)
    return identity


def read_log(folder: Path) -> tuple[str, list[dict[str, Any]]]:
    """The name of a site and its record, checked; ``folder`` is its kit, or the folder of its state.

    Raises
    ------
    ConfigError
        If no site has joined from there.
    StorageError
        If a line of the record was changed or removed.
    """
    site = read_site(_home(folder))
    if not site.identity.exists():
        raise ConfigError(f"no site has answered from {folder} yet", hint="'fald federation join' starts one")
    return site.name, read_record(site.state)


def _home(folder: Path) -> Path:
    """Where the ``site.toml`` of a kit is, or of the folder itself."""
    return folder / "site" if (folder / "site" / "site.toml").exists() else folder


def log_text(name: str, entries: list[dict[str, Any]]) -> str:
    """The same for a terminal."""
    heads, rows = as_rows(entries)
    rows = [[printable(cell) for cell in row] for row in rows]
    by = sorted({row[heads.index("by")] for row in rows} - {""})
    # said once; digests are for programs
    shown = [i for i, head in enumerate(heads) if head not in ("by", "digest")]
    table = align([heads[i] for i in shown], [[row[i] for i in shown] for row in rows]) if rows else ""
    count = f"{len(rows)} request{'s' if len(rows) != 1 else ''}{' by ' if by else ''}{' and '.join(by)}"
    return f"{name}: {count}, the record is whole\n" + (f"\n{table}" if rows else "")


def stop(folder: Path) -> str:
    """Abort every run that is going on; returns what was done."""
    engine = deployment_of(folder)
    jobs = engine.unfinished(folder)
    for job in jobs:
        engine.abort(folder, job)
    return f"Stopped {len(jobs)} run{'s' if len(jobs) != 1 else ''}." if jobs else "No run is going on."


def status(folder: Path) -> dict[str, Any]:
    """Sites with the seconds since they were heard of, and the last run."""
    federation = read_settings(folder)
    roster, kits = _approved(folder, federation.sites), (folder / "sites").is_dir()
    try:
        found, problem, now = deployment_of(folder).situation(folder), "", time.time()
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
            {
                "site": s,
                "approved": s in roster if kits else None,  # without kits it is the engine that knows
                "joined": s in seen if kits else None,
                "seconds_since_heard": seen.get(s),
            }
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
    if site["approved"] is None:
        return "the engine's own commands tell"
    if not site["approved"]:
        return "not approved yet"
    if not reached:
        return "approved"
    if not site["joined"]:
        return "approved, not here"
    seconds = site["seconds_since_heard"]
    return f"here, heard of {seconds:.0f} s ago" if seconds <= _LATE else f"silent for {seconds:.0f} s"
