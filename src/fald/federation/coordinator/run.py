"""A whole run at the coordinator, wherever an engine lets it run: from the first greeting to the files."""

from __future__ import annotations

import contextlib
import json
import secrets
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fald.core.errors import ExitCode, FaldError, Interrupted
from fald.core.files import write_atomically
from fald.federation.coordinator.engine import RemoteEngine, RemoteExchange
from fald.federation.coordinator.sites import Federation
from fald.federation.folder import OUTCOME
from fald.federation.link import Link
from fald.results.kinds import kind_of
from fald.study.run import Remote, run_study
from fald.study.schema import Study, make_study

if TYPE_CHECKING:
    import xarray as xr


def run_federated(
    study: Study, link: Link, out: Path, *, resume: bool = False, progress: bool = False, command: str = ""
) -> xr.DataTree:
    """Run a study over a link into a folder, as ``fald run`` does in one process.

    Parameters
    ----------
    study, link
        What to run, and what reaches the sites.
    out
        Folder for the files of the run, at the coordinator.
    resume
        Go on with the run in the folder.
    progress
        Report on standard error.
    command
        Kept in the result, for those who want to run it again.
    """
    opened: list[Federation] = []

    def remote() -> Remote:
        federation = Federation(link, study, _run_id(out, resume), kept=out / "passed.bin")
        opened.append(federation)
        how: dict[str, Any] = (
            {"exchange": RemoteExchange(federation)}
            if study.sampler is None
            else {"engine": RemoteEngine(federation)}
        )
        view = "summed" if federation.secure else "server"
        return Remote(federation.data, how, federation.about, view)

    try:
        run = run_study(study, out, resume=resume, progress=progress, command=command, remote=remote)
        return run.tree
    finally:
        for federation in opened:
            with contextlib.suppress(FaldError):
                federation.end()


def serve_job(link: Link, job: dict[str, Any]) -> int:
    """Carry out a submitted run and leave its outcome in ``outcome.json``; never raises a ``FaldError``.

    Parameters
    ----------
    link
        What reaches the sites.
    job
        ``study`` (plain values), ``out`` (folder at the coordinator) and ``resume``.

    Returns
    -------
    int
        The exit code that ``fald run`` ends with.
    """
    out = Path(job["out"])
    try:
        study = make_study(job["study"], "the submitted study")
        tree = run_federated(
            study, link, out, resume=bool(job.get("resume")), command=str(job.get("command", ""))
        )
        verdict = tree.attrs["verdict"] if kind_of(tree).certified else None
        outcome = {"status": "done", "exit_code": 0, "verdict": verdict}
    except FaldError as error:
        status = "interrupted" if isinstance(error, Interrupted) else "failed"
        outcome = {
            "status": status,
            "exit_code": int(error.exit_code),
            "message": error.message,
            "hint": error.hint,
        }
    except KeyboardInterrupt:
        outcome = {"status": "interrupted", "exit_code": int(ExitCode.INTERRUPTED), "message": "stopped"}
    write_outcome(out, outcome)
    return int(outcome["exit_code"])


def write_outcome(out: Path, outcome: dict[str, Any]) -> None:
    """Say how a submitted run ended."""
    out.mkdir(parents=True, exist_ok=True)
    write_atomically(out / OUTCOME, json.dumps(outcome, indent=1).encode())


def _run_id(out: Path, resume: bool) -> str:
    """The name of the run in a folder; a new one unless it is resumed."""
    path = out / "federation.json"
    if resume and path.exists():
        return str(json.loads(path.read_text())["run"])
    name = secrets.token_hex(8)
    (out / "passed.bin").unlink(missing_ok=True)
    out.mkdir(parents=True, exist_ok=True)
    write_atomically(path, json.dumps({"run": name}).encode())
    return name
