"""A federation carried by Flower: its SuperLink and SuperNodes are run with Flower's own commands."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, NoReturn

from fald.core.errors import ConfigError
from fald.federation.engines import Finding, JoinedSite, Report, Situation
from fald.federation.engines.flower import submit
from fald.federation.folder import CLOCK, FederationSettings


def _by_hand(what: str) -> NoReturn:
    raise ConfigError(
        f"{what} of a Flower federation is Flower's own",
        hint="the how-to 'Run a study with Flower' has its commands and the folder to write",
    )


class Flower:
    """The engine; only runs go through it."""

    def init(self, folder: Path, federation: FederationSettings) -> None:
        """The folder is written by hand."""
        _by_hand("the folder")

    def fingerprint(self, folder: Path) -> list[str]:
        """Certificates are made by hand."""
        return []

    def approve(self, folder: Path, request: Path, again: bool) -> tuple[str, str, Path]:
        """Certificates are the SuperLink's."""
        _by_hand("the certificate of a site")

    def serve(self, folder: Path, report: Report) -> None:
        """The server is a SuperLink."""
        _by_hand("the server")

    def read_kit(self, kit: Path) -> Mapping[str, Any]:
        """There are no kits."""
        _by_hand("the kit of a site")

    def join(self, site: JoinedSite, report: Report, patience: float | None) -> None:
        """A site is a SuperNode."""
        _by_hand("the process of a site")

    def submit(self, folder: Path, job: dict[str, Any]) -> str:
        """Submit a run to the SuperLink."""
        return submit.submit(folder, job)

    def job_state(self, folder: Path, job_id: str) -> str:
        """How a run stands."""
        return submit.job_state(folder, job_id)

    def abort(self, folder: Path, job_id: str) -> str:
        """Stop a run."""
        return submit.abort(folder, job_id)

    def unfinished(self, folder: Path) -> list[str]:
        """Runs that have not ended."""
        return submit.unfinished(folder)

    def situation(self, folder: Path) -> Situation:
        """Runs; Flower's own commands know the sites."""
        return Situation({}, tuple(submit.unfinished(folder)))

    def examine(self, folder: Path) -> list[Finding]:
        """Whether the SuperLink answers, and its clock; those of sites are compared when a run begins."""
        runs, off = submit.unfinished(folder), submit.clock(folder)
        told = "clock", f"that of the SuperLink is {abs(off):.0f} s {'ahead' if off > 0 else 'behind'}"
        return [
            Finding("ok", "server", f"the SuperLink answers; runs going on: {len(runs)}"),
            Finding("ok", *told) if abs(off) <= CLOCK else Finding("bad", *told, "set it"),
        ]

    def examine_kit(self, kit: Path) -> list[Finding]:
        """There are no kits."""
        _by_hand("the kit of a site")


deployment = Flower()
