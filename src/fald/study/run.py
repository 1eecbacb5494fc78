"""Run a study into a folder, here or on a federation."""

from __future__ import annotations

import json
import platform
from collections.abc import Callable
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

import jax
import numpy as np

from fald.core.errors import DiagnosticsError, FaldError, NonFiniteError, StorageError
from fald.core.files import sole_owner, write_atomically
from fald.fewround.exchange import InProcessExchange
from fald.fewround.fit import MAX_DIM, tolerance_of
from fald.langevin.sampling import sample
from fald.planner import foresee
from fald.problem.data import FederatedData
from fald.problem.model import Model, check_model
from fald.results.examine import Examined, compared, examine
from fald.results.kinds import kind_of
from fald.results.tree import save, settings_of
from fald.runtime.checkpoint import Checkpoint
from fald.runtime.journal import Journal
from fald.study.fit import fit
from fald.study.folder import check_folder, read_study
from fald.study.precision import set_precision
from fald.study.scales import counted, scaled, scales_request
from fald.study.schema import Study

if TYPE_CHECKING:
    import xarray as xr


@dataclass(frozen=True, eq=False)
class Run:
    """A finished run: its study, its folder, and its result with all that was found out about it.

    What follows a run (the terminal, ``--strict``, the report) takes it from here, and neither reads the
    tables nor summarises again.
    """

    study: Study
    folder: Path
    examined: Examined

    @property
    def tree(self) -> xr.DataTree:
        """The result."""
        return self.examined.tree


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
    """

    data: FederatedData
    how: dict[str, Any]
    about: Callable[[], dict[str, Any]]
    view: Literal["server", "summed"]


def run_study(
    study: Study, out: Path, *, resume: bool, progress: bool, command: str = "",
    remote: Callable[[], Remote] | None = None, level: float = 0.95,
) -> Run:  # fmt: skip
    """Run a study into a folder: ``study.json``, ``checkpoint/``, ``posterior.nc``, ``summary.json``.

    ``rounds.jsonl`` there tells how the run goes. ``remote`` reaches the sites of a federation;
    without it the study's files are read here. ``command`` is kept in the result, for those who want to run
    it again. ``level`` is the probability of the intervals.

    Raises
    ------
    ConfigError
        If the folder already holds a run and ``resume`` is not set, or another process runs into it.
    """
    set_precision(study)
    # a job that was stopped to make way for this one may take a moment to end
    with sole_owner(out, patience=0.0 if remote is None else 30.0):
        check_folder(out, resume)
        return _run(study, out, resume, remote, level=level, progress=progress, command=command)


def _run(
    study: Study, out: Path, resume: bool, remote: Callable[[], Remote] | None, *, level: float,
    progress: bool, command: str,
) -> Run:  # fmt: skip
    result = out / "posterior.nc"
    place = None if remote is None else remote()
    data = study.read_data() if place is None else place.data
    asked = scales_request(study, study.build_model(data.features))
    study = _scaled(study, data, place, read_study(out) if resume else None)
    model = study.build_model(data.features)
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
            error.hint += f"; the draws so far, {kept} per chain, are in {out / 'partial.nc'}"
        elif isinstance(error, NonFiniteError):
            error.hint += "; no draw was kept yet, so there is no report"
        raise
    write_atomically(out / "study.json", about)
    if place is not None:
        tree.attrs["federation"] = json.dumps(place.about())
    planned = study.sampler is None or study.sampler.method == "fa-ld"
    if data.present and planned and kind_of(tree).chains:
        tree.attrs["foreseen"] = json.dumps(foresee(model, data, settings_of(tree)))
        if study.sampler is None and model.dim <= MAX_DIM:
            tree.attrs["beside"] = json.dumps(_few_rounds(tree, study, model, data, progress=progress))
    if asked is not None and kind_of(tree).certified:
        tree = counted(tree, asked)
    tree.attrs |= {"prior": model.prior, "undeclared": json.dumps(model.undeclared), "origin": model.origin}
    save(_named(tree, study, command), result)
    (out / "partial.nc").unlink(missing_ok=True)
    away = "the rows are at the sites"
    found = examine(tree, model=model, data=data, level=level, why=away)
    write_atomically(out / "summary.json", json.dumps(found.document, indent=1).encode())
    return Run(study, out, found)


def _scaled(study: Study, data: FederatedData, place: Remote | None, before: Study | None) -> Study:
    """The study with priors relative to scales that one round of sums finds, where it leaves them open.

    A run that is resumed has asked for them ``before``.
    """
    model = study.build_model(data.features)
    request = scales_request(study, model)
    if request is None:
        return study
    check_model(model, data)
    if before is not None and before.model.scales is not None:
        if place is not None:
            place.how["exchange"].resume(1)
        return study.with_scales(before.model.scales.model_dump())
    exchange = InProcessExchange(model, data) if place is None else place.how["exchange"]
    return scaled(study, model, exchange.ask(request), int(np.sum(data.sizes)))


def _draws(study: Study, model: Model, data: FederatedData, place: Remote | None, **how: Any) -> xr.DataTree:
    """FA-LD with the study's settings; without any, the few-round method that suits it."""
    if study.sampler is None:
        return fit(study.fit.seed, model, data, **study.fit.arguments(), **how)
    given = study.sampler.arguments()
    privacy = study.protection()
    if place is not None:
        privacy = None if privacy is None else replace(privacy, view=place.view)
    return sample(study.sampler.seed, model, data, **given, privacy=privacy, **how)


def _few_rounds(
    tree: xr.DataTree, study: Study, model: Model, data: FederatedData, *, progress: bool
) -> dict[str, Any]:
    """What the few-round posterior says beside planned FA-LD; or why there is none."""
    planned = {"planned": tolerance_of(study.fit.accuracy)}
    asked = {**study.fit.arguments(), "method": "auto"}
    try:
        reference = fit(study.fit.seed, model, data, **asked, progress=progress)
    except DiagnosticsError as error:  # it ended without a draw, and the chains are worth keeping
        return {**planned, "missing": error.message}
    found = compared(tree, "the few-round posterior", reference)
    return {**planned, **found, "verdict": reference.attrs["verdict"]}


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
