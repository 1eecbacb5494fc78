"""The folder of a federation: who belongs to it, where its coordinator listens, and what each party gets.

NAME/
  federation.toml     engine, host, port, sites
  authority/          certificate authority: whoever has its key decides who belongs to the federation
  server/             what the coordinator's server runs from
  coordinator/        with which the coordinator submits runs
  sites/SITE/         the kit that a site is given; it holds no secret until the site joins
  roster.json         public identity keys of the sites that were approved
"""

from __future__ import annotations

import datetime
import ipaddress
import json
import re
import time
import tomllib
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fald.core.errors import ConfigError, FederationError, StorageError
from fald.core.files import write_atomically

SETTINGS = "federation.toml"
KIT = "kit.json"  # in the folder that a site is given
ENGINE = "nvflare"  # unless another is named
PORT = 8102
CLOCK = 120.0  # seconds that clocks may differ
OUTCOME = "outcome.json"  # in the folder of a run: how it ended
OWN = "own.json"  # in a site's folder: which of its secrets were made there
ROSTER, SUBMITTED = "roster.json", "submitted.jsonl"
_NAME = re.compile(r"[A-Za-z][A-Za-z0-9_-]{0,39}")
_HOST = re.compile(
    r"(?=.{1,64}$)[A-Za-z0-9]([A-Za-z0-9-]*[A-Za-z0-9])?(\.[A-Za-z0-9]([A-Za-z0-9-]*[A-Za-z0-9])?)*"
)
_RESERVED = {"server", "coordinator", "authority", "all"}  # words of the engine and of this folder


@dataclass(frozen=True)
class FederationSettings:
    """What ``federation.toml`` says.

    Examples
    --------
    >>> trial = FederationSettings("trial", ("north", "south"), "127.0.0.1", 8002)
    >>> trial.engine, trial.sites
    ('nvflare', ('north', 'south'))
    """

    name: str
    sites: tuple[str, ...]
    host: str
    port: int
    engine: str = ENGINE
    created: str = ""

    def text(self) -> str:
        """The file's content."""
        values = [(k, json.dumps(getattr(self, k), ensure_ascii=False)) for k in self.__dataclass_fields__]
        return "".join(f"{key} = {value}\n" for key, value in values)


def check_name(name: str, what: str) -> str:
    """Refuse names that cannot be part of a file name, a certificate and an address alike.

    Examples
    --------
    >>> check_name("north", "site")
    'north'
    """
    if not _NAME.fullmatch(name) or name.lower() in _RESERVED:
        rule = "a letter, then letters, digits, - or _, at most 40"
        taken = f"; {', '.join(sorted(_RESERVED))} are taken" if name.lower() in _RESERVED else ""
        raise ConfigError(f"{what} {name!r} cannot be used", hint=f"a name is {rule}{taken}")
    return name


def parse_sites(text: str) -> tuple[str, ...]:
    """Site names from ``a,b,c``, sorted.

    Examples
    --------
    >>> parse_sites("south, north")
    ('north', 'south')
    """
    names = [check_name(part.strip(), "site") for part in text.split(",") if part.strip()]
    if not names:
        raise ConfigError("no site is named", hint="--sites north,south")
    lowered = [name.lower() for name in names]  # some file systems do not tell A from a
    twice = sorted({name for name in names if lowered.count(name.lower()) > 1})
    if twice:
        raise ConfigError(f"sites named twice: {', '.join(twice)}")
    if len(names) < 2:
        raise ConfigError("a federation has at least two sites; got one", hint="--sites north,south")
    return tuple(sorted(names))


def new_settings(name: str, sites: tuple[str, ...], host: str, port: int) -> FederationSettings:
    """A checked description of a new federation."""
    check_name(name, "federation")
    if not _HOST.fullmatch(host) or _is_bad_address(host):
        raise ConfigError(
            f"--host {host!r} is no host name or IPv4 address",
            hint="at which the sites reach the coordinator; 127.0.0.1 if all are on one machine",
        )
    if not 1 <= port <= 65535:
        raise ConfigError(f"--port must be from 1 to 65535; got {port}")
    if host in sites:
        raise ConfigError(
            f"the host {host!r} has the name of a site", hint="choose another name for the site"
        )
    created = datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")
    return FederationSettings(name, sites, host, port, created=created)


def _is_bad_address(host: str) -> bool:
    """Whether a host of digits and dots is no address that others can reach."""
    if not re.fullmatch(r"[0-9.]+", host):
        return False
    try:
        return ipaddress.IPv4Address(host).is_unspecified
    except ValueError:
        return True


def read_settings(folder: Path) -> FederationSettings:
    """The description in a federation's folder.

    Raises
    ------
    ConfigError
        If the folder is none that ``fald federation init`` made.
    """
    path = folder / SETTINGS
    if not path.is_file():
        raise ConfigError(
            f"{folder} is not the folder of a federation: it has no {SETTINGS}",
            hint="make one with: fald federation init NAME --sites a,b,c --host HOST",
        )
    try:
        values: dict[str, Any] = tomllib.loads(path.read_text(encoding="utf-8"))
        return FederationSettings(**{**values, "sites": tuple(values["sites"])})
    except (tomllib.TOMLDecodeError, TypeError, KeyError, UnicodeDecodeError) as error:
        raise StorageError(f"{path} is damaged ({error})", hint="restore it from a copy") from error


def read_roster(folder: Path) -> dict[str, str]:
    """Public identity keys (hex) by site, of the sites approved so far."""
    path = folder / ROSTER
    return json.loads(path.read_text()) if path.exists() else {}


def enter_roster(folder: Path, site: str, public_key: str) -> None:
    """Remember a site's public identity key; another key for the same site replaces it."""
    roster = {**read_roster(folder), site: public_key}
    write_atomically(folder / ROSTER, json.dumps(dict(sorted(roster.items())), indent=1).encode())


def remember_submitted(folder: Path, job_id: str, out: str) -> None:
    """Note a submitted run and where its results go."""
    line = {"time": time.time(), "job": job_id, "out": out}
    with open(folder / SUBMITTED, "a", encoding="utf-8") as file:
        file.write(json.dumps(line) + "\n")


def read_submitted(folder: Path) -> list[dict[str, Any]]:
    """Submitted runs, oldest first."""
    path = folder / SUBMITTED
    lines = path.read_text(encoding="utf-8").splitlines() if path.exists() else []
    return [json.loads(line) for line in lines if line.strip()]


def note_own(home: Path, secret: Path) -> None:
    """Remember that a secret of a site was made here: by when its file was, which no archive brings along."""
    noted = {**_own(home), secret.name: secret.stat().st_ctime_ns}
    write_atomically(home / OWN, json.dumps(noted).encode())


def check_own(home: Path, secret: Path) -> None:
    """Refuse a secret that was not made here: whoever sent it along with a kit knows it.

    Raises
    ------
    FederationError
        Also where there is none beside what else a site keeps.
    """
    if not secret.exists() or _own(home).get(secret.name) != secret.stat().st_ctime_ns:
        raise FederationError(
            f"{secret} was not made by 'fald federation join' on this machine: it came with the kit, or was "
            "moved or restored",
            hint=f"if you moved or restored it yourself: --state {home}; otherwise take a new kit, and tell "
            "the coordinator",
        )


def _own(home: Path) -> dict[str, int]:
    try:
        return dict(json.loads((home / OWN).read_text()))
    except (OSError, ValueError, TypeError):
        return {}


def kit_engine(kit: Path) -> str:
    """Engine that a site's folder is for, as its ``kit.json`` says."""
    try:
        return str(json.loads((kit / KIT).read_text()).get("engine", ENGINE))
    except (OSError, ValueError, AttributeError):
        return ENGINE  # which then says what is wrong with the folder
