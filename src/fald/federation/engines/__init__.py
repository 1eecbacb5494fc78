"""What carries a federation: the protocol that every engine implements, and the engines by name.

Commands and the coordinator know nothing but this protocol. Installed packages add engines of their own
through the entry-point group ``fald.engines``.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple, Protocol

from fald.core.registry import Registry
from fald.federation.folder import FederationSettings, read_settings

Report = Callable[[str], None]


class Situation(NamedTuple):
    """What an engine knows of its federation.

    Attributes
    ----------
    sites
        Sites that have joined, with the time (Unix seconds) they were last heard of.
    jobs
        Jobs that have a process.
    """

    sites: dict[str, float]
    jobs: tuple[str, ...]


class Finding(NamedTuple):
    """What ``fald federation doctor`` has found.

    Attributes
    ----------
    level
        ``ok``, ``warn`` or ``bad``: the last will fail.
    about, said
        What it is about, and what is so.
    mend
        What to do.
    """

    level: str
    about: str
    said: str
    mend: str = ""


class JoinedSite(NamedTuple):
    """A site that is about to join.

    Attributes
    ----------
    kit
        The folder that the coordinator gave it.
    about
        What ``read_kit`` said of it.
    home
        Folder with ``site.toml``, from which its workers find table, policy and keys.
    status
        File in which its workers say what they do.
    public
        Its public identity key.
    trusted
        Whether keys that are there may have been made elsewhere.
    """

    kit: Path
    about: Mapping[str, Any]
    home: Path
    status: Path
    public: str
    trusted: bool = False


class Deployment(Protocol):
    """One engine. ``folder`` is always that of the federation, at the coordinator.

    An engine raises ``ConfigError`` where something is missing or not its business, ``FederationError`` where
    its server or a site fails.
    """

    def init(self, folder: Path, federation: FederationSettings) -> None:
        """Make what the server, the coordinator and every site need, below ``folder``."""
        ...

    def fingerprint(self, folder: Path) -> list[str]:
        """What sites compare by another way when they join, in words; nothing where there is nothing."""
        ...

    def approve(self, folder: Path, request: Path, again: bool) -> tuple[str, str, Path]:
        """Let a site in: its name, the fingerprint of its request, and the file to send back."""
        ...

    def serve(self, folder: Path, report: Report) -> None:
        """Run the server until Ctrl-C."""
        ...

    def read_kit(self, kit: Path) -> Mapping[str, Any]:
        """A site's folder: federation, its sites, this site, host, port, fingerprint of the authority."""
        ...

    def join(self, site: JoinedSite, report: Report, patience: float | None) -> None:
        """Take part until Ctrl-C, each message handed to ``SiteWorker.handle``.

        ``patience`` are seconds to wait for the coordinator to let the site in; None: as long as it takes.
        """
        ...

    def submit(self, folder: Path, job: dict[str, Any]) -> str:
        """Hand over what ``serve_job`` takes; returns the engine's name of the job."""
        ...

    def job_state(self, folder: Path, job_id: str) -> str:
        """``waiting``, ``running``, ``lost``, ``done``, ``aborted`` or ``failed``."""
        ...

    def abort(self, folder: Path, job_id: str) -> str:
        """Stop a job and wait until it has ended; returns its state."""
        ...

    def unfinished(self, folder: Path) -> list[str]:
        """Jobs that have not ended."""
        ...

    def situation(self, folder: Path) -> Situation:
        """Who is there, and what runs."""
        ...

    def examine(self, folder: Path) -> list[Finding]:
        """What is right and wrong with the engine's part at the coordinator."""
        ...

    def examine_kit(self, kit: Path) -> list[Finding]:
        """What is right and wrong with the engine's part at a site."""
        ...


ENGINES = Registry(
    "engine",
    "fald.engines",
    {
        "nvflare": "fald.federation.engines.nvflare.deployment:deployment",
        "flower": "fald.federation.engines.flower.deployment:deployment",
    },
)


def deployment_of(folder: Path) -> Deployment:
    """The engine of a federation, as its ``federation.toml`` says.

    Raises
    ------
    ConfigError
        If the folder is that of no federation, or there is no such engine.
    """
    return ENGINES[read_settings(folder).engine]
