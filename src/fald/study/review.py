"""Look at a finished run again: its checks, its bias, its predictions."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from fald.core.errors import FaldError
from fald.planner import checks
from fald.problem.data import FederatedData
from fald.problem.model import Model
from fald.results.examine import Examined, examine
from fald.results.kinds import kind_of
from fald.results.predict import predict
from fald.results.tree import load, settings_of
from fald.study.folder import open_run
from fald.study.precision import set_precision
from fald.study.schema import Study

if TYPE_CHECKING:
    import pandas as pd
    import xarray as xr

_MOST_CHECK_WORK = 1e11  # multiplications of the check with twice the step size: about a minute


def examine_run(
    study: Study,
    tree: xr.DataTree,
    *,
    level: float = 0.95,
    doubling: int | None = None,
    reference: Path | None = None,
) -> tuple[Examined, dict[str, Any] | None]:
    """Examine a run of which the folder is left; its tables are read once, if they are still the same.

    Parameters
    ----------
    study, tree
        The study and its result, of a run that is finished or ended early.
    level
        Probability of the intervals.
    doubling
        Rounds of a check with twice the step size, 0 for what needs none of them; None: nothing is measured.
    reference
        A result to compare with, such as NUTS on pooled rows: a NetCDF file.

    Returns
    -------
    tuple
        The result with its judgement; and what was predicted, guaranteed and measured of a chain, where
        ``doubling`` asks for it and the tables are there.
    """
    set_precision(study)
    data, model, why = _rows(study, tree)
    measured = None
    if doubling is not None and data is not None and model is not None and kind_of(tree).chains:
        measured = _measured(tree, model, data, doubling)
    twice = None if measured is None else measured["doubling"]["measured"]
    other = None if reference is None else (str(reference.name), load(reference))
    found = examine(tree, model=model, data=data, level=level, why=why, reference=other, doubling=twice)
    return found, measured


def _rows(study: Study, tree: xr.DataTree) -> tuple[FederatedData | None, Model | None, str]:
    """The rows of a study and its model, or why they are not there any more."""
    if "federation" in tree.attrs:
        return None, None, "the rows are at the sites"
    try:
        data = study.read_data()
        model = study.build_model(data.features)
    except FaldError as error:
        return None, None, f"the tables cannot be read ({error.message})"
    # the result of a private run has no hash of its rows
    if not kind_of(tree).private and tree.attrs.get("data", "") != data.fingerprint():
        return None, None, "the tables have changed since the run"
    return data, model, ""


def _measured(tree: xr.DataTree, model: Model, data: FederatedData, rounds: int) -> dict[str, Any]:
    """Prediction, guarantee and measurements of a chain."""
    s = settings_of(tree)
    if data.num_rows * model.dim * s["local_steps"] * s["num_chains"] * rounds > _MOST_CHECK_WORK:
        rounds = 0
    return checks(tree, model, data, doubling_rounds=rounds)


def predict_table(folder: Path, table: Path, level: float) -> pd.DataFrame:
    """Predictions of a run for the rows of a table."""
    study, tree = open_run(folder)
    set_precision(study)
    features = study.read_features(table)
    return predict(study.build_model(study.encoded_features), tree, features, level=level)
