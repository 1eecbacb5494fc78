"""Runs for the tests of reports: three small sites, fitted and sampled, as a user would run them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from fald.report import report_document, report_run
from fald.study.folder import open_run
from fald.study.review import examine_run
from fald.study.run import run_study
from fald.study.schema import load_study

FITTED = """
title = "Three clinics"
[data]
files = { north = "north.csv", south = "south.csv", tiny = "tiny.csv" }
target = "ill"
features = ["drug", "age"]
[data.categories]
drug = ["placebo", "verum"]
[data.scaling]
age = { center = 50, scale = 10 }
[model]
family = "logistic"
"""
SAMPLED = f"""{FITTED}
[sampler]
num-rounds = 4000
num-warmup = 100
local-steps = 2
step-size = 1e-2
num-chains = 8
thinning = 2
"""


def write_tables(place: Path) -> None:
    """Write the tables of three small sites into a folder."""
    rng = np.random.default_rng(1)
    for name, n in (("north", 60), ("south", 25), ("tiny", 4)):
        age, drug = rng.normal(50, 10, n), rng.integers(0, 2, n)
        ill = rng.random(n) < 1 / (1 + np.exp(0.5 + drug - 0.05 * (age - 50)))
        frame = pd.DataFrame({"drug": np.where(drug, "verum", "placebo"), "age": age, "ill": ill.astype(int)})
        frame.to_csv(place / f"{name}.csv", index=False)


def make_runs(place: Path) -> Path:
    """Write tables and studies into a folder, run them there, and write their reports."""
    write_tables(place)
    for name, text in (("fitted", FITTED), ("sampled", SAMPLED)):
        (place / f"{name}.toml").write_text(text)
        study = load_study(place / f"{name}.toml")
        command = f"fald run {name}.toml -q --out {name}"
        run_study(study, place / name, resume=False, progress=False, command=command)
        report_run(place / name)
    return place


def diverged_tree(tree):
    """The result of a run that left the finite numbers after a few rounds."""
    kept = tree["posterior"].sizes["draw"] // 100
    for name in ("posterior", "sample_stats"):
        tree[name].dataset = tree[name].to_dataset().isel(draw=slice(0, kept))
    done = int(tree["sample_stats"]["round"].values[-1])
    message = f"non-finite value in round {done + 1}, client 'south', parameter 'intercept', chain 0"
    tree.attrs |= {"ended": message, "rounds_done": done}
    del tree.attrs["foreseen"]
    return tree


def document_of(folder: Path, reference: Path | None = None) -> dict[str, Any]:
    """The document of a run's report, without its pages."""
    study, tree = open_run(folder)
    return report_document(examine_run(study, tree, reference=reference)[0], study)
