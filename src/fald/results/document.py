"""A result as one JSON document: what ``summary.json`` holds, apart from the judgement."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import numpy as np

from fald.results.diagnostics import client_drift
from fald.results.kinds import kind_of
from fald.results.summary import summary
from fald.results.text import records
from fald.results.tree import draws_by_row, settings_of

if TYPE_CHECKING:
    import xarray as xr

UNSEEN_OF_ONE = "What no check sees: what the model leaves out."  # where there is one mode by proof
POINT_NOTE = (
    "temperature 0: a point estimate, where the optimiser ended; there is no posterior and no interval"
)


def document(tree: xr.DataTree, level: float = 0.95) -> dict[str, Any]:
    """A result as one JSON document."""
    kind = kind_of(tree)
    made: dict[str, Any] = {
        "kind": kind.name,
        "title": tree.attrs.get("title", ""),
        "model": tree.attrs["model"],
        "method": tree.attrs["method"],
        "version": tree.attrs["inference_library_version"],
        "rounds_done": int(tree.attrs["rounds_done"]),
        "units": json.loads(tree.attrs.get("units", "{}")),
        "point_estimate": not kind.draws,
        "settings": settings_of(tree),
        "sites": records(client_drift(tree)),
        "note": (UNSEEN_OF_ONE if tree.attrs.get("proved") else kind.unseen) or POINT_NOTE,
    }
    if kind.draws:
        made |= {"level": level, "summary": records(summary(tree, level=level))}
    else:
        made["estimate"] = last_iterate(tree)
    if kind.certified:
        made |= _certified(tree)
    if kind.chains:
        made |= {
            "foreseen": json.loads(tree.attrs.get("foreseen", "null")),
            "beside": json.loads(tree.attrs.get("beside", "null")),
            "step_times_curvature": tree.attrs.get("step_times_curvature"),
            "pseudo_posterior": bool(tree.attrs["pseudo_posterior"]),
            "privacy": json.loads(tree.attrs["privacy"]) if kind.private else None,
        }
    return made


def _certified(tree: xr.DataTree) -> dict[str, Any]:
    """The verdict, what it rests on, and what the sites gave away for it."""
    khat = float(tree.attrs["khat"])
    return {
        "verdict": tree.attrs["verdict"],
        "reason": tree.attrs["reason"],
        "advice": tree.attrs["advice"],
        "chosen": tree.attrs["chosen"],
        "proved": tree.attrs.get("proved", ""),
        "accuracy": settings_of(tree)["accuracy"],
        "khat": khat if np.isfinite(khat) else None,
        "effective_draws": float(tree.attrs["effective_draws"]),
        "num_proposed": int(tree.attrs["num_proposed"]),
        "rounds": _rounds(tree),
        "uploads": tree.attrs["uploads"],
        "reveals": json.loads(tree.attrs["reveals"]),
        "exposed": json.loads(tree.attrs["exposed"]),
        "hidden": bool((json.loads(tree.attrs.get("federation", "null")) or {}).get("secure_sum")),
    }


def _rounds(tree: xr.DataTree) -> list[dict[str, Any]]:
    """What every round did: draws, k-hat, ESS, searches for further solutions, bytes per site, uploads."""
    rounds = tree.children["rounds"].to_dataset()
    names = ("draws", "khat", "ess", "explorers", "bytes_down", "bytes_up")
    table = []
    for i, count in enumerate(rounds["round"].values):
        values = {name: float(rounds[name].values[i]) for name in names}
        row = {name: value if np.isfinite(value) else None for name, value in values.items()}
        table.append({"round": int(count), **row, "uploads": str(rounds["uploads"].values[i]).split()})
    return table


def last_iterate(tree: xr.DataTree) -> dict[str, float]:
    """Where an optimiser ended, by parameter, averaged over chains."""
    return {label: float(draws[:, -1].mean()) for label, (_, draws) in draws_by_row(tree).items()}
