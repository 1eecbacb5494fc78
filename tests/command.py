"""The command as a user types it, and a small study to type it for."""

import contextlib
import io
import signal
import sys

import numpy as np
import pandas as pd
import pytest

from fald.cli.main import main

FALD = [sys.executable, "-m", "fald.cli"]


def run(*arguments, cwd, code=0):
    """Run the command in this process; return its standard output, or its error text when it must fail."""
    out, err = io.StringIO(), io.StringIO()
    with (
        pytest.MonkeyPatch.context() as patch,
        contextlib.redirect_stdout(out),
        contextlib.redirect_stderr(err),
        contextlib.chdir(cwd),
    ):
        patch.setattr(sys, "argv", ["fald", *map(str, arguments)])
        patch.setattr(signal, "signal", lambda *_: None)
        patch.setenv("COLUMNS", "100")
        try:
            main()
            found = 0
        except SystemExit as stop:
            found = stop.code or 0
    assert found == code, (found, out.getvalue(), err.getvalue())
    return out.getvalue() if code == 0 else err.getvalue()


FITTED = """
title = "Two clinics"
[data]
files = { "north" = "north.csv", "south" = "south.csv" }
target = "ill"
features = ["drug", "age"]
[data.categories]
drug = ["placebo", "verum"]
[data.scaling]
age = { center = 50, scale = 10 }
[model]
family = "logistic"
"""
STUDY = f"""{FITTED}
[sampler]
num-rounds = 600
num-warmup = 100
local-steps = 2
step-size = 2e-3
num-chains = 4
"""


def two_clinics(folder):
    rng = np.random.default_rng(1)
    for name, n in (("north", 60), ("south", 25)):
        age = rng.normal(50, 10, n)
        drug = rng.integers(0, 2, n)
        ill = rng.random(n) < 1 / (1 + np.exp(0.5 + drug - 0.05 * (age - 50)))
        table = pd.DataFrame({"drug": np.where(drug, "verum", "placebo"), "age": age, "ill": ill.astype(int)})
        table.to_csv(folder / f"{name}.csv", index=False)
    (folder / "study.toml").write_text(STUDY)
    return folder
