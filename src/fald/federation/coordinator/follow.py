"""``fald run --federation``: submit a run to its federation, follow it, and bring back its end.

The run itself goes on at the coordinator's server, whoever watches. What it does is read from the files it
writes: ``rounds.jsonl`` as it goes, ``outcome.json`` at its end.
"""

from __future__ import annotations

import contextlib
import json
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fald.core.errors import ExitCode, FaldError, FederationError, Interrupted, StorageError
from fald.core.files import sole_owner
from fald.federation.engines import Deployment, deployment_of
from fald.federation.folder import OUTCOME
from fald.runtime import journal
from fald.runtime.progress import Progress
from fald.study.folder import check_folder, open_run
from fald.study.schema import Study

if TYPE_CHECKING:
    import xarray as xr

_LOOK = 0.2  # seconds between looks at the files
_ASK = 5.0  # seconds between questions to the engine
_SPARE = 60.0
_GONE = 180.0  # seconds for which a server may be out of reach


def run_on(
    study: Study, federation: Path, out: Path, *, resume: bool, progress: bool, command: str = ""
) -> xr.DataTree:
    """Run a study on a federation and return its result.

    Parameters
    ----------
    study
        The study; what it says of files is not used.
    federation
        Folder of the federation.
    out
        Folder for the files of the run.
    resume
        Go on with the run in that folder.
    progress
        Report on standard error.
    command
        Kept in the result, for those who want to run it again.

    Raises
    ------
    FaldError
        The error that ended the run, with its exit code.
    Interrupted
        On Ctrl-C; the job is stopped, and what it had saved is kept.
    """
    out = out.resolve()
    with sole_owner(out, "follow.lock"):  # the run itself, at the server, has the folder's other lock
        check_folder(out, resume)
        (out / OUTCOME).unlink(missing_ok=True)
        return _submit_and_follow(study, federation, out, resume, progress=progress, command=command)


def _submit_and_follow(
    study: Study, federation: Path, out: Path, resume: bool, *, progress: bool, command: str
) -> xr.DataTree:
    adapter = deployment_of(federation)
    job = {"study": study.as_settings(), "out": str(out), "resume": resume, "command": command}
    handle = adapter.submit(federation, job)
    try:
        outcome = _follow(adapter, federation, handle, study, out=out, progress=progress)
    except KeyboardInterrupt:
        adapter.abort(federation, handle)
        raise Interrupted(
            "interrupted; the job was stopped", hint="what it saved is kept: go on with --resume"
        ) from None
    if outcome["status"] != "done":
        raise _as_error(outcome)
    return open_run(out)[1]


def _follow(
    adapter: Deployment, federation: Path, handle: str, study: Study, *, out: Path, progress: bool
) -> dict[str, Any]:
    """Show how the run goes until it has ended, or stops moving."""
    options = study.federation
    patience = options.timeout * (1 + options.retries) + _SPARE
    total = None if study.sampler is None else study.sampler.num_rounds
    seen = time.time() - 1  # lines of an earlier part of a resumed run are no news
    began = moved = asked = heard = time.monotonic()
    state = ""
    with Progress(total or 1, 0, progress and total is not None) as display:
        while True:
            if (out / OUTCOME).exists():
                return json.loads((out / OUTCOME).read_text())
            news = _news(out, seen)
            now = time.monotonic()
            for line in news:
                seen, moved = line["time"], now
                if total is not None:
                    display.update(int(line["round"]), f"energy {line.get('energy') or float('nan'):,.4g}")
                elif progress:
                    print(_told(line), file=sys.stderr, flush=True)
            limit = patience if moved > began else 2 * options.opening_timeout + patience
            if now - asked > _ASK:
                asked, before = now, state
                try:
                    state, heard = adapter.job_state(federation, handle), now
                except FederationError as error:
                    # the run needs nobody who follows it: it may end well while its server does not answer
                    if progress and state != "unknown":
                        print(f"{error.message}; asking again for {_GONE:.0f} s", file=sys.stderr, flush=True)
                    state = "unknown"
                    if now - max(heard, moved) > _GONE:
                        error.hint = f"for {_GONE:.0f} s; when it is back, --resume takes over what it did"
                        raise
                # a run that has moved had a process; one that is missing twice will not come back
                lost = state == before == "lost" and moved > began
                if lost or state in ("done", "failed", "aborted"):
                    time.sleep(1.0)  # the outcome is written just before the job ends
                    if not (out / OUTCOME).exists():
                        raise FederationError(
                            f"the job ended as {state!r} without a result: "
                            "a site's worker, the loop or the server died",
                            hint="go on from what was saved with --resume, once all sites are back",
                        )
            if now - moved > limit:
                with contextlib.suppress(FederationError):
                    adapter.abort(federation, handle)
                raise FederationError(
                    f"the run has not moved for {limit:.0f} s; the job was stopped",
                    hint="when server and sites are up (fald federation status): go on with --resume",
                )
            time.sleep(_LOOK)


def _news(out: Path, since: float) -> list[dict[str, Any]]:
    try:
        lines = journal.read(out)
    except StorageError:
        return []
    return [
        line for line in lines if line.get("round") and line.get("time", 0) > since and "event" not in line
    ]


def _told(line: dict[str, Any]) -> str:
    sites = line.get("sites") or {}
    slowest = max(sites, key=lambda s: sites[s]["seconds"] or 0, default="")
    ending = f", slowest site {slowest} ({sites[slowest]['seconds']:.1f} s)" if slowest else ""
    draws = f", {line['draws']:,} draws" if line.get("draws") else ""
    return f"round {line['round']}{draws}{ending}"


def _as_error(outcome: dict[str, Any]) -> FaldError:
    """The error that ended the run elsewhere, with its exit code."""
    kind = Interrupted if outcome["status"] == "interrupted" else FaldError
    error = kind(str(outcome.get("message", "the run failed")), hint=str(outcome.get("hint", "")))
    error.exit_code = ExitCode(outcome.get("exit_code", ExitCode.FEDERATION))
    return error
