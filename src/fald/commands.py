"""What the commands do, without a terminal: run a study into a folder, look at it again, predict."""

from __future__ import annotations

import json
import platform
import re
import shutil
from collections.abc import Callable
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

import jax
import numpy as np

from fald import diagnostics, tables
from fald.checkpoint import Checkpoint, write_atomically
from fald.data import FederatedData
from fald.errors import ConfigError, DiagnosticsError, ExitCode, FaldError, NonFiniteError, StorageError
from fald.fit import fit
from fald.fit_report import fit_document, fit_lines, is_fit, verdict_lines
from fald.journal import NAME as JOURNAL
from fald.journal import Journal
from fald.journal import read as read_journal
from fald.models.base import Model
from fald.planner import checks, foresee
from fald.predict import predict
from fald.results import draws_by_row, load, save, settings_of
from fald.samplers.base import Method
from fald.sampling import sample
from fald.study import Study, make_study
from fald.summaries import summary

_MOST_CHECK_WORK = 1e11  # multiplications of the check with twice the step size: about a minute
POINT_NOTE = (
    "temperature 0: a point estimate, where the optimiser ended; there is no posterior and no interval"
)

if TYPE_CHECKING:
    import pandas as pd
    import xarray as xr


def set_precision(study: Study) -> None:
    """Choose float32 or float64 for the whole process, as the study says."""
    double = study.sampler is not None and study.sampler.precision == "float64"
    jax.config.update("jax_enable_x64", double)


class Remote(NamedTuple):
    """Where the rows of a study are, if not here.

    Attributes
    ----------
    data
        Names, sizes and columns of the sites.
    how
        Arguments for ``fald.fit`` or ``fald.sample`` that reach the sites.
    about
        Called at the end: what the result says of the federation.
    view
        What the coordinator sees of uploads, for privacy accounting.
    prepare
        The study's method with what the sites told of themselves.
    """

    data: FederatedData
    how: dict[str, Any]
    about: Callable[[], dict[str, Any]]
    view: Literal["server", "summed"]
    prepare: Callable[[Method], Method]


def run_study(
    study: Study, out: Path, *, resume: bool, progress: bool, command: str = "",
    remote: Callable[[], Remote] | None = None,
) -> xr.DataTree:  # fmt: skip
    """Run a study into a folder: ``study.json``, ``checkpoint/``, ``posterior.nc``, ``summary.json``.

    ``rounds.jsonl`` there tells how the run goes. ``remote`` reaches the sites of a federation;
    without it the study's files are read here. ``command`` is kept in the result, for those who want to run
    it again.

    Raises
    ------
    ConfigError
        If the folder already holds a run and ``resume`` is not set.
    """
    set_precision(study)
    check_folder(out, resume)
    result = out / "posterior.nc"
    place = None if remote is None else remote()
    data = study.read_data() if place is None else place.data
    model = study.build_model(data.features)
    try:
        out.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise StorageError(
            f"cannot make the folder {out}: {error.strerror}", hint="choose another with --out"
        ) from error
    about = json.dumps(study.as_settings(), indent=1).encode()
    if not resume:  # a resumed run is first recognised as the same
        write_atomically(out / "study.json", about)
    try:
        journal = Journal(out)
        journal.about["title"] = study.title
        how = {} if place is None else place.how
        how |= {"progress": progress, "checkpoint": Checkpoint(out / "checkpoint"), "journal": journal}
        tree = _draws(study, model, data, place, **how)
    except FaldError as error:
        partial = getattr(error, "tree", None)
        if partial is not None and not isinstance(error, StorageError):
            partial.attrs["ended"] = error.message
            save(_named(partial, study, command), out / "partial.nc")
            kept = partial.children["posterior"].sizes["draw"]
            error.hint += f"; {kept} draws per chain are kept in {out / 'partial.nc'}"
        elif isinstance(error, NonFiniteError):
            error.hint += "; no draw was kept yet, so there is no report"
        raise
    write_atomically(out / "study.json", about)
    if place is not None:
        tree.attrs["federation"] = json.dumps(place.about())
    planned = study.sampler is None or study.sampler.method == "fa-ld"
    if data.present and planned and not is_fit(tree):
        tree.attrs["foreseen"] = json.dumps(foresee(model, data, settings_of(tree)))
    save(_named(tree, study, command), result)
    (out / "partial.nc").unlink(missing_ok=True)
    write_atomically(out / "summary.json", json.dumps(document(tree), indent=1).encode())
    return tree


def check_folder(out: Path, resume: bool) -> None:
    """Refuse to begin a run where one is, or to resume where none is."""
    if not resume and ((out / "posterior.nc").exists() or (out / "checkpoint").exists()):
        raise ConfigError(
            f"{out} already holds a run", hint="go on with --resume, or choose another folder with --out"
        )
    if resume and not (out / "checkpoint").exists():
        raise ConfigError(f"nothing to resume in {out}", hint="run without --resume, or check --out")


def _draws(study: Study, model: Model, data: FederatedData, place: Remote | None, **how: Any) -> xr.DataTree:
    """FA-LD with the study's settings; without any, the few-round method that suits it."""
    if study.sampler is None:
        return fit(study.fit.seed, model, data, **study.fit.arguments(), **how)
    given = study.sampler.arguments()
    privacy = study.protection()
    if place is not None:
        privacy = None if privacy is None else replace(privacy, view=place.view)
        if "method" in given:
            given["method"] = place.prepare(given["method"])
    return sample(study.sampler.seed, model, data, **given, privacy=privacy, **how)


def _named(tree: xr.DataTree, study: Study, command: str) -> xr.DataTree:
    """The result with what it takes to read and repeat it: title, units of features, command, versions."""
    units = {column: s.scale for column, s in study.data.scaling.items() if s.scale != 1}
    versions = {"Python": platform.python_version(), "JAX": jax.__version__, "NumPy": np.__version__}
    tree.attrs |= {
        "title": study.title,
        "units": json.dumps(units),
        "command": command,
        "versions": json.dumps({**versions, "system": f"{platform.system()} {platform.machine()}"}),
        "created_at": datetime.now(UTC).isoformat(timespec="seconds"),
    }
    return tree


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


def document(tree: xr.DataTree, level: float = 0.95) -> dict[str, Any]:
    """A result as one JSON document."""
    common = {
        "title": tree.attrs.get("title", ""),
        "model": tree.attrs["model"],
        "method": tree.attrs["method"],
        "version": tree.attrs["inference_library_version"],
        "rounds_done": int(tree.attrs["rounds_done"]),
        "units": json.loads(tree.attrs.get("units", "{}")),
        "point_estimate": bool(tree.attrs["point_estimate"]),
        "settings": settings_of(tree),
        "sites": tables.records(diagnostics.client_drift(tree)),
    }
    if is_fit(tree):
        return {
            **common,
            "level": level,
            "summary": tables.records(summary(tree, level=level)),
            **fit_document(tree),
        }
    if tree.attrs["point_estimate"]:
        return {**common, "estimate": last_iterate(tree), "note": POINT_NOTE}
    return {
        **common,
        "level": level,
        "summary": tables.records(summary(tree, level=level)),
        "complaints": diagnostics.verdict(tree),
        "note": tables.BIAS_NOTE,
        "foreseen": json.loads(tree.attrs["foreseen"]) if "foreseen" in tree.attrs else None,
        "step_times_curvature": tree.attrs.get("step_times_curvature"),
        "pseudo_posterior": bool(tree.attrs["pseudo_posterior"]),
        "privacy": json.loads(tree.attrs["privacy"]) if "privacy" in tree.attrs else None,
    }


def last_iterate(tree: xr.DataTree) -> dict[str, float]:
    """Where an optimiser ended, by parameter, averaged over chains."""
    return {label: float(draws[:, -1].mean()) for label, (_, draws) in draws_by_row(tree).items()}


def text(tree: xr.DataTree, level: float = 0.95) -> str:
    """A result as text for a terminal."""
    sites = tree.children["constant_data"].to_dataset()
    rows, count = int(sites["size"].sum()), len(sites["client"])
    pairs = zip(sites["client"].values, sites["size"].values)
    sizes = f" ({', '.join(f'{n} {s}' for n, s in pairs)})" if count <= 8 else ""
    title = tree.attrs.get("title") or f"{tree.attrs['model']} model"
    units = json.loads(tree.attrs.get("units", "{}"))
    if is_fit(tree):
        table = tables.summary_text(summary(tree, level=level), units)
        said = f"{count} sites, {rows:,} rows{sizes}; sites exchanged sums over rows, not rows"
        lines = [title, said, *fit_lines(tree), *federation_lines(tree)]
        return "\n".join([*lines, "", table, "", *verdict_lines(tree)])
    settings = settings_of(tree)
    chains, asked, done = settings["num_chains"], settings["num_rounds"], int(tree.attrs["rounds_done"])
    rounds = f"{asked:,} rounds" if done + settings["thinning"] > asked else f"{done:,} of {asked:,} rounds"
    lines = [
        title,
        f"{count} sites, {rows:,} rows{sizes}; sites exchanged parameters, not rows",
        f"{rounds} of {settings['local_steps']} local steps, {chains} chain{'s' if chains > 1 else ''}",
        *federation_lines(tree),
        "",
    ]
    if tree.attrs["point_estimate"]:
        cells = [[tables.labelled(k, units), tables.number(v)] for k, v in last_iterate(tree).items()]
        return "\n".join([*lines, tables.align(["parameter", "estimate"], cells), "", POINT_NOTE])
    lines += [tables.summary_text(summary(tree, level=level), units), ""]
    lines += [f"warning: {c}" for c in diagnostics.verdict(tree)]
    lines.append(tables.BIAS_NOTE)
    foreseen = json.loads(tree.attrs.get("foreseen", "{}")).get("predicted")
    if foreseen:
        lines.append(
            f"Predicted for these settings: means off by up to {foreseen['bias']:.2g} posterior sd, "
            f"sds by up to {tables.percent(foreseen['sd_error'])}."
        )
    if tree.attrs["pseudo_posterior"]:
        lines.append(
            "Gradients of rows were clipped: this is a pseudo-posterior, not that of the model as written."
        )
    if "privacy_statement" in tree.attrs:
        lines.append(tree.attrs["privacy_statement"].splitlines()[0])
    return "\n".join(lines)


def federation_lines(tree: xr.DataTree) -> list[str]:
    """What a result says of the federation it came from; nothing for a run in one process."""
    if "federation" not in tree.attrs:
        return []
    about = json.loads(tree.attrs["federation"])
    if about["secure_sum"]:
        lines = ["Secure sum: the coordinator saw sums over sites only."]
    else:
        lines = [f"No secure sum ({about['why_not']}): the coordinator saw the upload of every single site."]
    if about["arrival_based"]:
        lines.append(
            "Participants were those who answered in time: slow sites count for less than they should."
        )
    if about["dropouts"]:
        rounds = len(about["dropouts"])
        sites = sorted({site for d in about["dropouts"] for site in d["silent"]})
        lines.append(f"Sites that were silent in {rounds} rounds: {', '.join(sites)}.")
    return lines


def require_clean(tree: xr.DataTree) -> None:
    """Raise ``DiagnosticsError`` if the diagnostics object to the result."""
    complaints = [POINT_NOTE] if tree.attrs["point_estimate"] else diagnostics.verdict(tree)
    if complaints:
        advice = tree.attrs.get("advice") or "run longer: more rounds, more chains, or a larger step"
        raise DiagnosticsError("; ".join(complaints), hint=advice)


def check_run(study: Study, tree: xr.DataTree, doubling_rounds: int) -> dict[str, Any]:
    """Prediction, guarantee and measurements of a finished run; needs the study's files."""
    set_precision(study)
    data = study.read_data()
    model, s = study.build_model(data.features), settings_of(tree)
    if data.num_rows * model.dim * s["local_steps"] * s["num_chains"] * doubling_rounds > _MOST_CHECK_WORK:
        doubling_rounds = 0
    return checks(tree, model, data, doubling_rounds=doubling_rounds)


def predict_table(folder: Path, table: Path, level: float) -> pd.DataFrame:
    """Predictions of a run for the rows of a table."""
    study, tree = open_run(folder)
    set_precision(study)
    features = study.read_features(table)
    names = tree.children["posterior"].to_dataset()["feature"].values
    return predict(study.build_model([str(n) for n in names]), tree, features, level=level)
