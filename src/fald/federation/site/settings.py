"""What a site is and where its things are; commands read it, which need nothing that computes."""

from __future__ import annotations

import tomllib
from dataclasses import dataclass
from pathlib import Path

from fald.core.errors import ConfigError


@dataclass(frozen=True)
class SiteSettings:
    """What a site is and where its things are.

    Attributes
    ----------
    name
        The site's name in the federation.
    state
        Folder for what must outlive the process, readable by its owner only.
    data
        The site's table, CSV or Parquet; None where a program hands over the rows.
    policy
        What the site allows; None: the default policy.
    pins
        Public keys of all sites; None: those seen in the first run are kept, and later ones must match.
    coordinator
        Who can ask, as the record says it: the address of the server, and the fingerprint of its authority.
    sites
        Names of all sites of the federation, as the people here were told when they joined; empty: unknown.
    """

    name: str
    state: Path
    data: Path | None = None
    policy: Path | None = None
    pins: Path | None = None
    coordinator: str = ""
    sites: tuple[str, ...] = ()

    @property
    def identity(self) -> Path:
        """The file of the site's own key."""
        return self.state / "identity.pem"


def read_site(folder: str | Path) -> SiteSettings:
    """Read ``site.toml`` of a site's folder; relative paths start there.

    Raises
    ------
    ConfigError
        If it is missing or wrong.
    """
    path = Path(folder) / "site.toml"
    try:
        tree = tomllib.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ConfigError(f"cannot read {path}: {error}", hint="'fald federation join' writes it") from error
    unknown = sorted(set(tree) - {"name", "state", "data", "policy", "pins", "coordinator", "sites"})
    if unknown or not isinstance(tree.get("name"), str):
        raise ConfigError(f"{path}: {'unknown key ' + repr(unknown[0]) if unknown else 'name is missing'}")
    paths = {key: Path(folder) / tree[key] for key in ("data", "policy", "pins") if key in tree}
    asks, sites = str(tree.get("coordinator", "")), tree.get("sites", [])
    if not isinstance(sites, list) or (sites and tree["name"] not in sites):
        raise ConfigError(f"{path}: sites must be a list of names, this site's among them")
    state = Path(folder) / tree.get("state", "state")
    return SiteSettings(tree["name"], state, **paths, coordinator=asks, sites=tuple(map(str, sites)))
