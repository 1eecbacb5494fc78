"""``fald federation doctor``: what will fail, before it does, and what to do about it."""

from __future__ import annotations

import contextlib
import json
import shutil
import socket
import stat
from collections.abc import Callable, Iterator
from pathlib import Path

from fald.core.errors import ConfigError, FaldError
from fald.core.version import library_versions
from fald.federation.engines import ENGINES, Finding
from fald.federation.folder import KIT, SETTINGS, check_own, kit_engine, read_settings
from fald.federation.secure.identity import Identity, key_fingerprint
from fald.federation.site.settings import read_site

_SIGNS = {"ok": "ok", "warn": "look", "bad": "WRONG"}
_LITTLE, _TOO_LITTLE = 2e9, 1e8  # bytes of free disk


def examine(folder: Path) -> list[Finding]:
    """Findings on a federation's folder, a site's kit, or a site's own folder.

    Raises
    ------
    ConfigError
        If the folder is none of these.
    """
    if (folder / SETTINGS).exists():
        federation = read_settings(folder)
        own = [*_versions(), *_disk(folder), *_port(federation.host, federation.port)]
        return [*own, *_attempted("engine", lambda: ENGINES[federation.engine].examine(folder))]
    if (folder / KIT).exists():
        own = [*_versions(), *_disk(folder), *_site(folder / "site")]
        own += _attempted("keys", lambda: _made_here(folder / "site"))
        return [*own, *_attempted("engine", lambda: ENGINES[kit_engine(folder)].examine_kit(folder))]
    if (folder / "site.toml").exists():
        return [*_versions(), *_disk(folder), *_site(folder)]
    raise ConfigError(
        f"{folder} is neither the folder of a federation nor that of a site",
        hint=f"the first has {SETTINGS}, a kit {KIT}, the folder of a site site.toml",
    )


def text(found: list[Finding]) -> str:
    """The same for a terminal."""
    signs, subjects = max(map(len, _SIGNS.values())), max((len(f.about) for f in found), default=0)
    lines = []
    for f in found:
        lines.append(f"{_SIGNS[f.level]:{signs}}  {f.about:{subjects}}  {f.said}")
        if f.mend:
            lines.append(f"{'':{signs}}  {'':{subjects}}  -> {f.mend}")
    return "\n".join(lines)


def _attempted(about: str, look: Callable[[], list[Finding]]) -> list[Finding]:
    try:
        return look()
    except FaldError as error:
        return [Finding("bad", about, error.message, error.hint)]


def _versions() -> Iterator[Finding]:
    here = library_versions()
    yield Finding("ok", "versions", ", ".join(f"{name} {number}" for name, number in here.items()))


def _disk(folder: Path) -> Iterator[Finding]:
    free = shutil.disk_usage(folder).free
    level = "bad" if free < _TOO_LITTLE else "warn" if free < _LITTLE else "ok"
    yield Finding(
        level, "disk", f"{free / 1e9:,.1f} GB free at {folder}", "free space" if level != "ok" else ""
    )


def _port(host: str, port: int) -> Iterator[Finding]:
    try:
        socket.create_connection((host, port), timeout=5.0).close()
        yield Finding("ok", "port", f"something answers at {host}:{port}")
    except OSError as error:
        said = f"nothing answers at {host}:{port} ({error.strerror or error})"
        yield Finding("bad", "port", said, "start the server; look at the name and the firewall")


def _site(home: Path) -> Iterator[Finding]:
    """Keys, table and rules of a site."""
    if not (home / "site.toml").exists():
        yield Finding("warn", "site", "it has not joined yet", "fald federation join KIT --data FILE")
        return
    site = read_site(home)
    if site.state.exists() and site.state.stat().st_dev != home.stat().st_dev:
        yield from _disk(site.state)
    try:
        own = Identity.load(site.identity).public
        yield Finding("ok", "keys", f"this site's key has the fingerprint {key_fingerprint(own)}")
    except ConfigError as error:
        own = ""
        yield Finding(
            "bad", "keys", error.message, error.hint or "join makes one; restore it if others pinned it"
        )
    pins = site.pins or site.state / "pins.json"
    with contextlib.suppress(OSError, ValueError, AttributeError):
        known = json.loads(pins.read_text())
        shown = ", ".join(f"{name} {key_fingerprint(key)}" for name, key in known.items())
        yield Finding("ok", "keys", f"trusted: {shown}")
        if own and known.get(site.name) != own:
            mend = f"fald federation repin KIT {site.name} roster.json, here and at every site"
            yield Finding("bad", "keys", f"{pins} has another key for this site", mend)
    for key in (site.identity,):
        if key.exists() and stat.S_IMODE(key.stat().st_mode) & 0o077:
            yield Finding("bad", "keys", f"others may read {key}", f"chmod 600 {key}")
    if site.data is not None and not site.data.exists():
        yield Finding("bad", "table", f"{site.data} is gone", "join again with --data")
    yield from _attempted("policy", lambda: _rules(site.policy))


def _made_here(kit: Path) -> list[Finding]:
    """Whether 'join' would go on with the key of a kit."""
    if (kit / "site.toml").exists():
        check_own(kit, read_site(kit).identity)
    return []


def _rules(path: Path | None) -> list[Finding]:
    if path is not None:
        from fald.federation.site.policy import read_policy

        read_policy(path)
    return [Finding("ok", "policy", str(path) if path else "the default")]
