"""The round before the first of a few-round method: scales of outcome and features, for priors left open.

Coordinator and sites follow the same steps, so that a site knows what will be asked.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

import numpy as np

from fald.fewround.site import Answer, Request
from fald.problem.model import Model
from fald.study.schema import Study

if TYPE_CHECKING:
    import xarray as xr


def scales_request(study: Study, model: Model) -> Request | None:
    """What the round asks: values and gradients at zero and one along each parameter; None: no such round."""
    if model.scales_fn is None or not study.open_scales:
        return None
    return {"states": np.concatenate([np.zeros((1, model.dim)), np.eye(model.dim)])}


def scaled(study: Study, model: Model, sums: Mapping[str, np.ndarray] | Answer, rows: int) -> Study:
    """The study with priors relative to the scales that the sums of the round show."""
    assert model.scales_fn is not None
    return study.with_scales(model.scales_fn(sums["state_values"], sums["state_gradients"], rows))


def counted(tree: xr.DataTree, request: Request) -> xr.DataTree:
    """A few-round result with the round that asked for scales as its first."""
    import xarray as xr

    method = tree["rounds"].to_dataset()
    count, dim = request["states"].shape
    first = xr.full_like(method.isel(round=[0]).drop_vars("uploads"), np.nan)
    first["draws"] = first["draws"].fillna(0.0)
    first["bytes_down"].values[:] = request["states"].nbytes
    first["bytes_up"].values[:] = 8 * count * (1 + dim)
    first["uploads"] = ("round", ["state"])
    joined = xr.concat([first, method], "round")
    tree["rounds"].dataset = joined.assign_coords(round=np.arange(1, joined.sizes["round"] + 1))
    tree.attrs["rounds_done"] += 1
    return tree
