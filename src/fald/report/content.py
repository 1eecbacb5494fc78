"""All that a report says, as one plain document, before anything is drawn."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from fald import diagnostics
from fald.commands import check_run, document, set_precision
from fald.data import FederatedData
from fald.errors import DataError, FaldError
from fald.fit_report import is_fit
from fald.models.base import Model
from fald.report.lights import lights, overall
from fald.report.predictive import predictive_checks
from fald.results import draws_by_row, load, settings_of
from fald.study import Study
from fald.tables import BIAS_NOTE, labelled

if TYPE_CHECKING:
    import xarray as xr

UNSEEN = "What no check sees: a further mode that no explorer met, and what the model leaves out."
_MOST_PAIRED = 1000
_PRIVATE = "a private run: sums over its rows would leave the sites without noise"


def run_document(
    study: Study,
    tree: xr.DataTree,
    *,
    level: float = 0.95,
    doubling: int = 0,
    reference: Path | None = None,
) -> dict[str, Any]:
    """The document of a run.

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
    set_precision(study)
    data, model, why = None, None, _PRIVATE
    if "federation" in tree.attrs:
        why = "the rows are at the sites"
    elif study.privacy is None:
        data, model, why = _rows(study, tree)
    found = None
    if doubling and data is not None and not is_fit(tree) and not tree.attrs["point_estimate"]:
        found = check_run(study, tree, doubling)["doubling"]["measured"]
    other = None if reference is None else (str(reference.name), load(reference))
    made = result_document(tree, model=model, data=data, level=level, reference=other, why=why)
    made |= {"doubling": found, **_about(study)}
    return made | _judged(made)


def _rows(study: Study, tree: xr.DataTree) -> tuple[FederatedData | None, Model | None, str]:
    """The rows of a study and its model, or why they are not there any more."""
    try:
        data = study.read_data()
        model = study.build_model(data.features)
    except FaldError as error:
        return None, None, f"the tables cannot be read ({error.message})"
    if tree.attrs.get("data", "") != data.fingerprint():
        return None, None, "the tables have changed since the run"
    return data, model, ""


def _about(study: Study) -> dict[str, Any]:
    return {
        "target": study.data.target,
        "family": study.model.family,
        "features": study.data.features,
        "study": study.as_settings(),
    }


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
    >>> result_document(fald.fit(0, model, data, progress=False))["status"]["headline"]
    'No check objects.'
    """
    run, private = document(tree, level), "privacy" in tree.attrs
    point = bool(tree.attrs["point_estimate"])
    checked, reason = None, _PRIVATE if private else why
    if model is not None and data is not None and not private and not point:
        try:
            checked, reason = predictive_checks(model, tree, data, level=level), ""
        except DataError as error:
            reason = error.message
    posterior = tree.children["posterior"]
    made = {
        "run": run,
        "ended": tree.attrs.get("ended", ""),
        "chains": int(posterior.sizes["chain"]),
        "draws": int(posterior.sizes["draw"]),
        "unseen": "" if point else UNSEEN if is_fit(tree) else BIAS_NOTE,
        "effects": [] if point else _effects(tree, run),
        "modes": _num_modes(tree),
        "sites": _sites(tree, run),
        "predictive": checked,
        "no_predictive": reason,
        "reference": None if reference is None or point else _distance(tree, *reference),
        "doubling": None,
        "federation": json.loads(tree.attrs.get("federation", "null")),
        "privacy_statement": tree.attrs.get("privacy_statement", ""),
        "target": "",
        "family": "",
        "features": [],
        "study": None,
        "command": tree.attrs.get("command", ""),
        "created_at": tree.attrs.get("created_at", ""),
        "versions": json.loads(tree.attrs.get("versions", "{}")),
        "data": tree.attrs.get("data", ""),
    }
    return made | _judged(made)


def _judged(made: dict[str, Any]) -> dict[str, Any]:
    found = lights(made)
    return {"lights": found, "status": overall(found)}


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


def _num_modes(tree: xr.DataTree) -> int | None:
    found = json.loads(tree.attrs.get("modes", "null"))
    return None if found is None else len(found)


def _sites(tree: xr.DataTree, run: dict[str, Any]) -> list[dict[str, Any]]:
    """Sites with what they did and sent; ``seldom``: they took part far less often than planned."""
    posterior = tree.children["posterior"]
    kept = posterior.sizes["chain"] * posterior.sizes["draw"]
    planned = int(tree.attrs["rounds_done"]) if is_fit(tree) else kept
    sites = []
    for site, spent in zip(run["sites"], _spent(tree, len(run["sites"]))):
        chance = 1.0 if is_fit(tree) else _inclusion(settings_of(tree), site["share"], len(run["sites"]))
        expected = planned * chance
        # rounds of a chain are drawn independently: five standard deviations below the plan is no accident
        floor = expected - 5 * math.sqrt(expected * (1 - chance))
        took_part = int(site["took_part"])
        sites.append(
            {
                **site,
                "rows": int(site["rows"]),
                "took_part": took_part,
                "planned": expected,
                "seldom": bool(took_part < floor),
                **spent,
            }
        )
    return sites


def _inclusion(settings: dict[str, Any], share: float, count: int) -> float:
    """Probability that a site takes part in a round, by the scheme of participation."""
    drawn = settings.get("num_participants")
    if settings.get("participation", "full") == "full" or drawn is None:
        return 1.0
    if settings["participation"] == "with-replacement":
        return 1 - (1 - share) ** drawn
    return drawn / count


def _spent(tree: xr.DataTree, count: int) -> list[dict[str, Any]]:
    """Bytes that each site received and sent, all chains together; None where they were not counted."""
    if is_fit(tree):
        rounds = tree.children["rounds"].to_dataset()
        spent = {k: int(rounds[k].values.sum()) for k in ("bytes_down", "bytes_up")}
        return [spent] * count
    if "cost" not in tree.children:
        return [{"bytes_down": None, "bytes_up": None}] * count
    cost = tree.children["cost"].to_dataset()
    down, up = (cost[k].values.sum(axis=0) for k in ("bytes_down", "bytes_up"))
    return [{"bytes_down": int(d), "bytes_up": int(u)} for d, u in zip(down, up)]


def _distance(tree: xr.DataTree, name: str, reference: xr.DataTree) -> dict[str, Any]:
    """How far the draws are from those of a reference, in the reference's standard deviations."""
    ours, theirs = (
        {label: d.ravel().astype(float) for label, (_, d) in draws_by_row(t).items()}
        for t in (tree, reference)
    )
    w2 = diagnostics.wasserstein2(tree, reference, most=_MOST_PAIRED)  # refuses other parameters
    shift = {k: float(abs(ours[k].mean() - theirs[k].mean()) / theirs[k].std()) for k in ours}
    spread = {k: float(abs(ours[k].std() / theirs[k].std() - 1)) for k in ours}
    size = math.sqrt(sum(v.var() for v in theirs.values()))
    matrix = np.stack([theirs[k] for k in ours], axis=1)
    halves = diagnostics.wasserstein2(matrix[::2], matrix[1::2], most=_MOST_PAIRED)
    error = math.sqrt(sum(1 / min(diagnostics.ess(t).values()) for t in (tree, reference)))
    worst, wide = max(shift, key=shift.__getitem__), max(spread, key=spread.__getitem__)
    return {
        "name": name,
        "w2": w2,
        "w2_relative": w2 / size,
        "w2_noise_relative": halves / size,
        "shift": shift[worst],
        "shift_parameter": worst,
        "standard_error": error,
        "sd_error": spread[wide],
        "sd_parameter": wide,
        "sd_standard_error": error / math.sqrt(2),
    }
