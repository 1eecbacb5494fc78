"""The folder of a run: what may begin there, what lies there, and what to do with it next."""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path
from typing import TYPE_CHECKING

from fald.core.errors import ConfigError, ExitCode, StorageError
from fald.results.tree import load
from fald.runtime.journal import NAME as JOURNAL
from fald.runtime.journal import read as read_journal
from fald.study.schema import Study, make_study

if TYPE_CHECKING:
    import xarray as xr


def check_folder(out: Path, resume: bool) -> None:
    """Refuse to begin a run where one is, or to resume where none is."""
    if not resume and ((out / "posterior.nc").exists() or (out / "checkpoint").exists()):
        raise ConfigError(
            f"{out} already holds a run", hint="go on with --resume, or choose another folder with --out"
        )
    if resume and not (out / "checkpoint").exists():
        raise ConfigError(f"nothing to resume in {out}", hint="run without --resume, or check --out")


def forget_run(out: Path) -> None:
    """Remove the files of an earlier run from a folder, and nothing else."""
    files = ("posterior.nc", "partial.nc", "summary.json", "study.json", "report.html", "report.md", JOURNAL)
    for name in files:
        (out / name).unlink(missing_ok=True)
    if (out / "checkpoint").exists():
        shutil.rmtree(out / "checkpoint")


def read_study(folder: Path) -> Study:
    """The study of a run folder."""
    if not folder.is_dir():
        raise ConfigError(
            f"no such folder: {folder}", hint="give the folder of a run, the --out of 'fald run'"
        )
    about = folder / "study.json"
    if not about.is_file():
        raise ConfigError(f"{folder} is not the folder of a run: it has no study.json")
    try:
        settings = json.loads(about.read_text())
    except ValueError as error:
        raise StorageError(f"{about} is damaged ({error})", hint="restore it, or run again") from error
    return make_study(settings, str(about))


def open_run(folder: Path) -> tuple[Study, xr.DataTree]:
    """The study and the draws of a run folder; unfinished runs give what they have kept."""
    study = read_study(folder)
    for name in ("posterior.nc", "partial.nc"):
        if (folder / name).exists():
            return study, load(folder / name)
    diverged = _divergence(folder)
    if diverged:
        raise StorageError(
            f"the run in {folder} diverged before its first kept draw: {diverged}",
            hint="change what made it diverge and run the study again into another folder, with --out",
        )
    raise StorageError(
        f"the run in {folder} was stopped before it could write a result",
        hint=f"what it saved is in its checkpoint; go on with: fald run STUDY --out {folder} --resume",
    )


def _divergence(folder: Path) -> str:
    """Why a run left the finite numbers, by its journal; empty if it did not."""
    last = (read_journal(folder) if (folder / JOURNAL).exists() else [])[-1:]
    return next((str(line["message"]) for line in last if line.get("exit_code") == ExitCode.NON_FINITE), "")


def next_steps(folder: Path) -> str:
    """What to do next in a folder, by what lies there: reports to open, runs to finish, studies to run."""
    steps: dict[str, str] = {}
    runs = [p for p in (*folder.glob("runs/*/"), *folder.glob("fald-demo/")) if (p / "study.json").is_file()]
    for run in sorted(runs, key=lambda p: p.stat().st_mtime, reverse=True)[:2]:
        if (run / "posterior.nc").exists():
            steps[f"fald report {run}"] = f"write its report again, or open {run / 'report.html'}"
        elif (run / "checkpoint").exists() and not _divergence(run):
            steps[f"fald run STUDY.toml --out {run} --resume"] = "finish a run that was stopped"
    for path in sorted(folder.glob("*.toml"))[:3]:
        if re.search(r"^\s*\[data\]", path.read_text(encoding="utf-8", errors="replace"), re.MULTILINE):
            steps[f"fald run {path}"] = "run this study"
    steps.setdefault("fald demo", "analyse a bundled four-hospital trial and write its report (seconds)")
    steps.setdefault("fald new study.toml", "write a study file for tables of your own")
    steps["fald --help"] = "all commands"
    width = max(map(len, steps))
    lines = [f"  {command.ljust(width)}  {what}" for command, what in steps.items()]
    return "\n".join(["fald: a Bayesian posterior over data that cannot be pooled. Next:", "", *lines])
