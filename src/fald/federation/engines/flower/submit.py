"""Runs that ``fald run --federation`` hands to a SuperLink, through the ``flwr`` command.

The folder of such a federation is written by hand::

    NAME/
      federation.toml     name, engine = "flower", sites, and host and port of the SuperLink
      ca.crt              certificate of the authority that signed the SuperLink's; a SuperLink on this
                          machine may do without

What is made below ``coordinator/`` can be thrown away between runs.
"""

from __future__ import annotations

import email.utils
import ipaddress
import json
import os
import ssl
import subprocess
import sys
import time
import urllib.request
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from fald.core.errors import ConfigError, FederationError
from fald.core.files import write_atomically
from fald.federation.engines.flower import require_flower
from fald.federation.folder import FederationSettings, read_settings, read_submitted, remember_submitted

CERTIFICATE = "ca.crt"
_CONNECTION = "federation"
_PATIENCE, _QUICK = 120.0, 10.0  # seconds for one flwr command, and for a single question
_FRESH = 20.0  # seconds for which the answer to one is believed
_told: dict[tuple[Path, str], tuple[float, str]] = {}
_ENDS = {"finished:completed": "done", "finished:stopped": "aborted", "finished:failed": "failed"}
_APP = """\
[project]
name = "fald-study"
version = "1.0.0"
description = "Runs a study of fald on a Flower federation"
license = "Apache-2.0"

[tool.flwr.app]
publisher = "fald"

[tool.flwr.app.components]
serverapp = "fald.federation.engines.flower.app:server_app"
clientapp = "fald.federation.engines.flower.app:client_app"

[tool.flwr.app.config]
job = ""
sites = ""
"""


def submit(folder: Path, job: Mapping[str, Any]) -> str:
    """Submit a run to the SuperLink of a federation; returns Flower's number of it.

    The loop runs where the SuperLink is, so its host must have the output folder. A run that is still going
    on for the same output folder is stopped first; the new one continues it from its checkpoint.

    Parameters
    ----------
    folder
        Folder of the federation.
    job
        What ``fald.federation.coordinator.run.serve_job`` takes.

    Raises
    ------
    FederationError
        If the SuperLink is not reached or does not take the run.
    """
    settings = _prepare(folder)
    out = str(job["out"])
    earlier = [line["job"] for line in read_submitted(folder) if line["out"] == out]
    if earlier and (number := earlier[-1]) in _numbers(folder):
        abort(folder, number)
    home = folder.absolute() / "coordinator"
    path = home / "jobs" / f"{time.strftime('%Y%m%d-%H%M%S')}-{os.getpid()}.json"
    path.parent.mkdir(exist_ok=True)
    write_atomically(path, json.dumps(dict(job), indent=1).encode())
    config = f"job={json.dumps(str(path))} sites={json.dumps(','.join(settings.sites))}"
    found = _flwr(folder, "run", str(home / "app"), _CONNECTION, "--run-config", config)
    if not found.get("run-id"):
        raise FederationError("the SuperLink did not take the run", hint="its log says why")
    remember_submitted(folder, str(found["run-id"]), out)
    _told[folder, str(found["run-id"])] = time.monotonic(), "waiting"
    return str(found["run-id"])


def _numbers(folder: Path) -> list[str]:
    """Runs that the SuperLink knows; one that lost its database knows no earlier ones."""
    return [str(run.get("run-id")) for run in _flwr(folder, "list", _CONNECTION).get("runs", ())]


def unfinished(folder: Path) -> list[str]:
    """Runs that the SuperLink has not ended."""
    _prepare(folder)
    found = _flwr(folder, "list", _CONNECTION).get("runs", ())
    return [str(run.get("run-id")) for run in found if str(run.get("status")) not in _ENDS]


def clock(folder: Path) -> float:
    """Seconds by which the SuperLink's clock differs from this one, by what it says with an answer."""
    settings, certificate = read_settings(folder), folder / CERTIFICATE
    trusted = ssl.create_default_context(cafile=certificate) if certificate.exists() else None
    place = f"{'http' if trusted is None else 'https'}://{settings.host}:{settings.port}/health"
    began = time.time()
    try:
        with urllib.request.urlopen(place, timeout=_QUICK, context=trusted) as answer:
            moment = email.utils.parsedate_to_datetime(answer.headers["Date"]).timestamp()
    except (OSError, TypeError, ValueError) as error:
        raise FederationError(f"the SuperLink does not tell the time ({error})") from error
    return moment - min(max(moment, began - 1), time.time())  # it tells whole seconds


def job_state(folder: Path, job_id: str) -> str:
    """How a run stands: ``waiting``, ``running``, ``done``, ``aborted`` or ``failed``.

    Every question is a process of its own, so an answer is good for a while.
    """
    asked, state = _told.get((folder, job_id), (float("-inf"), ""))
    if time.monotonic() - asked > _FRESH:
        state = _ask_state(folder, job_id)
        _told[folder, job_id] = time.monotonic(), state
    return state


def _ask_state(folder: Path, job_id: str) -> str:
    _prepare(folder)
    found = _flwr(folder, "list", _CONNECTION, "--run-id", job_id)
    runs = [run for run in found.get("runs", ()) if str(run.get("run-id")) == job_id]
    if not runs:
        raise FederationError(f"the SuperLink knows no run {job_id}")
    status = str(runs[0].get("status"))
    return _ENDS.get(status, "running" if status == "running" else "waiting")


def abort(folder: Path, job_id: str, *, patience: float = 30.0) -> str:
    """Stop a run and wait until it has ended; returns its state."""
    state = _ask_state(folder, job_id)
    if state in ("waiting", "running"):
        _flwr(folder, "stop", job_id, _CONNECTION)
    end = time.monotonic() + patience
    while (state := _ask_state(folder, job_id)) in ("waiting", "running") and time.monotonic() < end:
        time.sleep(0.5)
    return state


def _prepare(folder: Path) -> FederationSettings:
    """Write what ``flwr`` needs: the app, and how to reach the SuperLink."""
    require_flower()
    settings = read_settings(folder)
    if settings.engine != "flower":
        raise ConfigError(f"the engine of {folder} is {settings.engine!r}, not 'flower'")
    home = folder.absolute() / "coordinator"
    (home / "app").mkdir(parents=True, exist_ok=True)
    write_atomically(home / "app" / "pyproject.toml", _APP.encode())
    write_atomically(home / "config.toml", _connection(folder, settings).encode())
    return settings


def _connection(folder: Path, settings: FederationSettings) -> str:
    certificate = folder.absolute() / CERTIFICATE
    if certificate.exists():
        secured = f"root-certificates = {json.dumps(str(certificate))}"
    elif _is_here(settings.host):
        secured = "insecure = true"
    else:
        raise ConfigError(
            f"{certificate} is missing, and the SuperLink is on another machine",
            hint="put the certificate of its authority there; nothing is sent in the clear",
        )
    return f'[superlink.{_CONNECTION}]\naddress = "{settings.host}:{settings.port}"\n{secured}\n'


def _is_here(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def _flwr(folder: Path, *arguments: str) -> dict[str, Any]:
    """Run a command of ``flwr`` and read the JSON it prints."""
    quiet = {"FLWR_TELEMETRY_ENABLED": "0", "FLWR_DISABLE_UPDATE_CHECK": "1"}
    home = {"FLWR_HOME": str(folder.absolute() / "coordinator")}
    command = [sys.executable, "-m", "flwr.cli.app", *arguments, "--format", "json"]
    try:
        done = subprocess.run(
            command,
            env={**os.environ, **quiet, **home},
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=_PATIENCE,
        )
    except subprocess.TimeoutExpired as error:
        raise FederationError(f"the SuperLink did not answer within {_PATIENCE:g} s") from error
    try:
        found = json.loads(done.stdout[done.stdout.index("{") :])
    except ValueError:
        found = {}
    if done.returncode or not found.get("success"):
        said = str(found.get("error-message") or done.stderr or done.stdout).splitlines()
        told = " ".join(
            line.strip() for line in said if not line.startswith("Using SuperLink") and line[-3:] != "..."
        )
        raise FederationError(
            f"flwr {arguments[0]} failed: {told[-300:].strip() or 'it said nothing'}",
            hint="is the SuperLink running at the host and port of federation.toml?",
        )
    return found
