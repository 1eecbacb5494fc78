"""All that a report says, as one plain document, before anything is drawn."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fald.problem.data import FederatedData
from fald.problem.model import Model
from fald.results.examine import Examined, examine
from fald.results.text import labelled
from fald.results.tree import draws_by_row
from fald.study.review import examine_run
from fald.study.schema import Study

if TYPE_CHECKING:
    import xarray as xr

_NO_STUDY: dict[str, Any] = {"target": "", "family": "", "features": [], "study": None}


def run_document(
    study: Study,
    tree: xr.DataTree,
    *,
    level: float = 0.95,
    doubling: int = 0,
    reference: Path | None = None,
) -> dict[str, Any]:
    """The document of a run whose folder is left.

    Parameters
    ----------
    study, tree
        The study and its result, of a run that is finished or ended early.
    level
        Probability of the intervals.
    doubling
        Rounds of a check with twice the step size; 0: none.
    reference
        A result to compare with, such as NUTS on pooled rows: a NetCDF file.
    """
    found, _ = examine_run(study, tree, level=level, doubling=doubling or None, reference=reference)
    return report_document(found, study)


def result_document(
    tree: xr.DataTree,
    *,
    model: Model | None = None,
    data: FederatedData | None = None,
    level: float = 0.95,
    reference: tuple[str, xr.DataTree] | None = None,
    why: str = "the rows were not given",
) -> dict[str, Any]:
    """The document of a result: what ``fald diagnose --json`` gives under ``run``, and what a report adds.

    Parameters
    ----------
    tree
        A result of ``fald.fit`` or ``fald.sample``.
    model, data
        What it was made from; without them the model is not checked against the rows, for the reason ``why``.
    level
        Probability of the intervals.
    reference
        Name and result of a reference to compare with.

    Examples
    --------
    >>> import numpy as np, fald
    >>> rng = np.random.default_rng(0)
    >>> data = fald.FederatedData.from_arrays({name: rng.normal(size=(40, 1)) for name in "ab"})
    >>> model = fald.models.gaussian_location([[1.0]])
    >>> result_document(fald.fit(0, model, data, progress=False))["run"]["judgement"]["headline"]
    'No problem found.'
    """
    return report_document(examine(tree, model=model, data=data, level=level, reference=reference, why=why))


def report_document(found: Examined, study: Study | None = None) -> dict[str, Any]:
    """The document of a result that has been examined."""
    tree, run = found.tree, found.document
    return {
        **found.facts,
        "unseen": found.kind.unseen,
        "effects": _effects(tree, run) if found.kind.draws else [],
        "privacy_statement": tree.attrs["privacy_statement"] if found.kind.private else "",
        **(_NO_STUDY if study is None else _about(study)),
        "prior": tree.attrs.get("prior", ""),
        "undeclared": json.loads(tree.attrs.get("undeclared", "[]")),
        "origin": tree.attrs.get("origin", ""),
        "command": tree.attrs.get("command", ""),
        "created_at": tree.attrs.get("created_at", ""),
        "versions": json.loads(tree.attrs.get("versions", "{}")),
        "data": tree.attrs.get("data", ""),
    }


def _about(study: Study) -> dict[str, Any]:
    return {
        "target": study.data.target,
        "family": study.model.family,
        "features": study.data.features,
        "study": study.as_settings(),
    }


def _effects(tree: xr.DataTree, run: dict[str, Any]) -> list[dict[str, Any]]:
    """What answers the question: coefficients where there are any, as ratios where they are ones.

    ``above`` is the posterior probability that the parameter is above 0, its ratio above 1.
    """
    low, high = (f"{100 * t:g}%" for t in ((1 - run["level"]) / 2, (1 + run["level"]) / 2))
    posterior = tree.children["posterior"]
    draws = draws_by_row(tree)
    effect = {name for name, array in posterior.data_vars.items() if "feature" in array.dims}
    effects = []
    for i, row in enumerate(run["summary"]):
        variable, values = draws[row["parameter"]]
        if effect and variable not in effect:
            continue
        ratio = posterior[variable].attrs.get("ratio")
        keys = (ratio, f"{ratio} {low}", f"{ratio} {high}") if ratio else ("mean", low, high)
        neutral = 1.0 if ratio else 0.0
        estimate, start, end = (row[key] for key in keys)
        effects.append(
            {
                "row": i,
                "label": labelled(row["parameter"], run["units"]),
                "scale": ratio or "",
                "keys": keys,
                "estimate": estimate,
                "low": start,
                "high": end,
                "neutral": neutral if effect else None,
                "excluded": bool(effect) and not start <= neutral <= end,
                "above": float((values > 0).mean()),
            }
        )
    return effects
