"""All that a report says, as one plain document, before anything is drawn."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

from fald.results.examine import Examined
from fald.results.text import labelled
from fald.results.tree import draws_by_row
from fald.study.schema import Study

if TYPE_CHECKING:
    import xarray as xr

_NO_STUDY: dict[str, Any] = {"target": "", "family": "", "features": [], "study": None}


def report_document(found: Examined, study: Study | None = None) -> dict[str, Any]:
    """The document of a result that has been examined."""
    tree, run = found.tree, found.document
    return {
        **found.facts,
        "unseen": run["note"] if found.kind.unseen else "",
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
