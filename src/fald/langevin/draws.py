"""Kept draws of a chain as a result."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import numpy as np

from fald.core.version import __version__
from fald.langevin.engine import Assignment
from fald.langevin.guard import Guard
from fald.results import kinds
from fald.results.tree import posterior_groups, site_sizes
from fald.runtime.records import Records

if TYPE_CHECKING:
    import xarray as xr


def build_tree(
    problem: Assignment,
    records: list[Records],
    settings: dict[str, Any],
    *,
    guard: Guard | None = None,
    costs: Mapping[str, np.ndarray] | None = None,
) -> xr.DataTree:
    """Collect kept draws into the result tree; ``guard`` adds the privacy of a private run."""
    import xarray as xr

    model, data = problem.model, problem.data
    small = [field for field in Records._fields if field != "position"]
    empty = np.zeros(0)
    joined = Records(position=empty, **{f: _joined([getattr(r, f) for r in records]) for f in small})
    groups = posterior_groups(model, _by_chain([r.position for r in records]))
    base = {k: groups["posterior"].coords[k].values for k in ("chain", "draw")}
    per_slot = ["chain", "draw", "slot"]
    stats = {
        "round": (["draw"], joined.round),
        "energy": (["chain", "draw"], joined.energy.T),
        "participant": (per_slot, np.swapaxes(joined.client, 0, 1)),
        "weight": (per_slot, np.swapaxes(joined.weight, 0, 1)),
        "drift": (per_slot, np.swapaxes(joined.drift, 0, 1)),
    }
    if guard is not None:
        del stats["energy"]  # clients of a private run keep it
        if guard.protection.view == "summed":  # ε is that of sums, which show nothing of a single client
            stats["drift"] = (per_slot, np.full_like(stats["drift"][1], np.nan))
        stats["epsilon"] = (["draw"], np.array([guard.epsilon(int(r)) for r in joined.round]))
    groups["sample_stats"] = xr.Dataset(stats, base)
    groups["constant_data"] = site_sizes(data.names, data.sizes)
    if costs is not None:
        dims = (["chain"], ["chain", "client"])
        spent = {name: (dims[np.ndim(value) - 1], value) for name, value in costs.items()}
        groups["cost"] = xr.Dataset(spent, {"chain": base["chain"], "client": list(data.names)})
    tree = xr.DataTree.from_dict(groups)
    sampled = kinds.CHAIN if guard is None else kinds.PRIVATE_CHAIN
    tree.attrs = {
        "kind": kinds.POINT_ESTIMATE.name if problem.method.about.point_estimate else sampled.name,
        "inference_library": "fald",
        "inference_library_version": __version__,
        "method": problem.method.about.name,
        "model": model.name,
        "point_estimate": int(problem.method.about.point_estimate),
        "settings": json.dumps(settings),
        "pseudo_posterior": int(settings.get("clip_norm") is not None),
        "rounds_done": int(joined.round[-1]),
    }
    if guard is None:
        tree.attrs["data"] = data.fingerprint()
    else:  # a hash of the rows has no noise on it: who knows all rows but one could find that one
        said = guard.statement()
        tree.attrs |= {"privacy_statement": said.text, "privacy": said.to_json()}
    return tree


def _by_chain(parts: list[np.ndarray]) -> np.ndarray:
    """Chunks of positions (draws, chains, dim) as one array (chains, draws, dim), copied once."""
    _, chains, dim = parts[0].shape
    whole = np.empty((chains, sum(map(len, parts)), dim), parts[0].dtype)
    start = 0
    for part in parts:
        whole[:, start : start + len(part)] = np.swapaxes(part, 0, 1)
        start += len(part)
    return whole


def _joined(parts: list[np.ndarray]) -> np.ndarray:
    """Chunks of draws in one array; what is the same in every draw is kept once."""
    filled = [part for part in parts if len(part)] or parts
    once = filled[0][:1]
    if once.ndim > 1 and all(part.strides[0] == 0 and np.array_equal(part[:1], once) for part in filled):
        return np.broadcast_to(once, (sum(len(part) for part in parts), *once.shape[1:]))
    return np.concatenate(parts)
