"""Run ``fald.fit`` on a study and compare every round with the NUTS reference."""

from __future__ import annotations

import time
from typing import Any

import numpy as np

import fald
from benchmarks.rounds import references, studies
from benchmarks.rounds.errors import errors
from fald.core.errors import FaldError, Interrupted


def flat_draws(model: fald.Model, tree: Any) -> np.ndarray:
    """(draws, dim) draws of a result in the flat coordinates of the model."""
    if model.constrain_fn is not None:
        return tree["unconstrained_posterior"]["position"].values.reshape(-1, model.dim)
    columns = [v.values.reshape(v.shape[0] * v.shape[1], -1) for v in tree["posterior"].data_vars.values()]
    return np.concatenate(columns, axis=1)


def measure(name: str, method: str, seed: int, folder=references.CACHE) -> dict[str, Any]:
    """One run: verdict, rounds, bytes, and the worst errors of mean and sd, at the end and by round.

    An error of the method is a result like any other; a run that was stopped is none.
    """
    study = studies.load(name)
    row: dict[str, Any] = {
        "study": name, "method": method, "seed": seed, "dim": study.dim, "sites": study.sites,
        "rows": int(study.data.num_rows), "expects": study.expects, "holdout": study.holdout,
    }  # fmt: skip
    began = time.monotonic()
    try:
        tree = fald.fit(seed, study.model, study.data, method=method, progress=False)  # type: ignore[arg-type]
    except Interrupted:
        raise
    except FaldError as error:
        return {**row, "verdict": f"error: {error.message}", "seconds": time.monotonic() - began}
    rounds = tree["rounds"]
    row |= {
        "verdict": tree.attrs["verdict"],
        "reason": tree.attrs["reason"],
        "made_by": tree.attrs["method"],
        "rounds": int(tree.attrs["rounds_done"]),
        "khat": float(tree.attrs["khat"]),
        "megabytes_up": float(rounds["bytes_up"].values.sum() / 1e6),
        "seconds": time.monotonic() - began,
    }
    if study.expects == "reached":  # the others have no mean and sd to compare with
        known = references.reference(name, folder)
        row["mean_error"], row["sd_error"] = errors(flat_draws(study.model, tree), known)
        steps = [
            i for i, kinds in enumerate(rounds["uploads"].values) if "step" in kinds and "anchor" not in kinds
        ]
        row["newton_rounds"] = steps[0] if steps else None
        means, sds = rounds["mean"].values, rounds["sd"].values
        row["by_round"] = [
            [float(np.max(np.abs(m - known.mean) / known.sd)), float(np.max(np.abs(s / known.sd - 1)))]
            for m, s in zip(means, sds)
        ]
    return row
