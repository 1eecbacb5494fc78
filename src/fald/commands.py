"""What the commands do, without a terminal: run a study into a folder, look at it again, predict."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import TYPE_CHECKING, Any

import jax

from fald import diagnostics, tables
from fald.checkpoint import Checkpoint, write_atomically
from fald.errors import ConfigError, DiagnosticsError, FaldError, StorageError
from fald.predict import predict
from fald.results import load, save, settings_of, summary
from fald.sampling import sample
from fald.study import Study, make_study

if TYPE_CHECKING:
    import pandas as pd
    import xarray as xr


def set_precision(study: Study) -> None:
    """Choose float32 or float64 for the whole process, as the study says."""
    jax.config.update("jax_enable_x64", study.sampler.precision == "float64")


def run_study(study: Study, out: Path, *, resume: bool, progress: bool) -> xr.DataTree:
    """Run a study into a folder: ``study.json``, ``checkpoint/``, ``posterior.nc``, ``summary.json``.

    Raises
    ------
    ConfigError
        If the folder already holds a run and ``resume`` is not set.
    """
    set_precision(study)
    result = out / "posterior.nc"
    if not resume and (result.exists() or (out / "checkpoint").exists()):
        raise ConfigError(
            f"{out} already holds a run", hint="go on with --resume, or choose another folder with --out"
        )
    if resume and not (out / "checkpoint").exists():
        raise ConfigError(f"nothing to resume in {out}", hint="run without --resume, or check --out")
    data = study.read_data()
    model = study.build_model(data.features)
    try:
        out.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise StorageError(
            f"cannot make the folder {out}: {error.strerror}", hint="choose another with --out"
        ) from error
    write_atomically(out / "study.json", json.dumps(study.as_settings(), indent=1).encode())
    try:
        tree = sample(
            study.sampler.seed,
            model,
            data,
            **study.sampler.arguments(),
            privacy=study.protection(),
            progress=progress,
            checkpoint=Checkpoint(out / "checkpoint"),
        )
    except FaldError as error:
        partial = getattr(error, "tree", None)
        if partial is not None and not isinstance(error, StorageError):
            save(partial, out / "partial.nc")
            kept = partial.children["posterior"].sizes["draw"]
            error.hint += f"; {kept} draws per chain are kept in {out / 'partial.nc'}"
        raise
    if study.title:
        tree.attrs["title"] = study.title
    save(tree, result)
    (out / "partial.nc").unlink(missing_ok=True)
    if not tree.attrs["point_estimate"]:
        write_atomically(out / "summary.json", json.dumps(document(tree), indent=1).encode())
    return tree


def forget_run(out: Path) -> None:
    """Remove the files of an earlier run from a folder, and nothing else."""
    for name in ("posterior.nc", "partial.nc", "summary.json", "study.json"):
        (out / name).unlink(missing_ok=True)
    if (out / "checkpoint").exists():
        shutil.rmtree(out / "checkpoint")


def open_run(folder: Path) -> tuple[Study, xr.DataTree]:
    """The study and the draws of a run folder; unfinished runs give what they have kept."""
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
    study = make_study(settings, str(about))
    name = "posterior.nc" if (folder / "posterior.nc").exists() else "partial.nc"
    return study, load(folder / name)


def document(tree: xr.DataTree, level: float = 0.95) -> dict[str, Any]:
    """A result as one JSON document."""
    frame = summary(tree, level=level)
    return {
        "title": tree.attrs.get("title", ""),
        "model": tree.attrs["model"],
        "method": tree.attrs["method"],
        "version": tree.attrs["inference_library_version"],
        "level": level,
        "summary": tables.records(frame),
        "sites": tables.records(diagnostics.client_drift(tree)),
        "complaints": diagnostics.verdict(tree),
        "note": tables.BIAS_NOTE,
        "pseudo_posterior": bool(tree.attrs["pseudo_posterior"]),
        "privacy": json.loads(tree.attrs["privacy"]) if "privacy" in tree.attrs else None,
        "settings": settings_of(tree),
    }


def text(tree: xr.DataTree, level: float = 0.95) -> str:
    """A result as text for a terminal."""
    sites = tree.children["constant_data"].to_dataset()
    rows = int(sites["size"].sum())
    sizes = ", ".join(
        f"{n} {s}" for n, s in zip(sites["client"].values, sites["size"].values) if len(sites["client"]) <= 8
    )
    settings = settings_of(tree)
    chains = settings["num_chains"]
    title = tree.attrs.get("title") or f"{tree.attrs['model']} model"
    many = f"{chains} chains" if chains > 1 else "1 chain"
    lines = [
        title,
        f"{len(sites['client'])} sites, {rows} rows{f' ({sizes})' if sizes else ''}; no rows were pooled",
        f"{settings['num_rounds']:,} rounds of {settings['local_steps']} local steps, {many}",
        "",
    ]
    if tree.attrs["point_estimate"]:
        lines.append("temperature 0: a point estimate, no posterior and no intervals")
        last = tree["posterior"].isel(draw=-1).mean("chain")
        lines += [f"  {name}: {values.values}" for name, values in last.data_vars.items()]
        return "\n".join(lines)
    lines += [tables.summary_text(summary(tree, level=level)), ""]
    lines += [f"warning: {c}" for c in diagnostics.verdict(tree)]
    lines.append(tables.BIAS_NOTE)
    if tree.attrs["pseudo_posterior"]:
        lines.append(
            "Gradients of rows were clipped: this is a pseudo-posterior, not that of the model as written."
        )
    if "privacy_statement" in tree.attrs:
        lines.append(tree.attrs["privacy_statement"].splitlines()[0])
    return "\n".join(lines)


def require_clean(tree: xr.DataTree) -> None:
    """Raise ``DiagnosticsError`` if the diagnostics object to the result."""
    complaints = diagnostics.verdict(tree)
    if complaints:
        raise DiagnosticsError(
            "; ".join(complaints), hint="run longer: more rounds, more chains, or a larger step"
        )


def predict_table(folder: Path, table: Path, level: float) -> pd.DataFrame:
    """Predictions of a run for the rows of a table."""
    study, tree = open_run(folder)
    set_precision(study)
    features = study.read_features(table)
    names = tree.children["posterior"].to_dataset()["feature"].values
    return predict(study.build_model([str(n) for n in names]), tree, features, level=level)
