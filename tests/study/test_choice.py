"""Which method a study gets, what it says of the choice, and that every choice runs."""

import json

import numpy as np
import pytest

import fald
from fald.calculus.spectrum import extremes
from fald.core.errors import ConfigError
from fald.fewround import fit as choice
from fald.study.fit import choose
from fald.study.run import run_study
from fald.study.schema import load_study


def test_the_choice_follows_from_what_is_asked_and_from_the_model():
    small, large = fald.models.logistic_regression(3), fald.models.logistic_regression(2000)
    assert choose(small)[0] == "importance"
    assert "gradients" in choose(small, curvature=False)[1]
    assert choose(small, "corrected")[0] == "corrected"
    assert choose(small, "fa-ld") == ("fa-ld", "plain FA-LD, as asked for")
    assert choose(large) == ("fa-ld", "plain FA-LD, because the model has 2001 parameters, more than 1000")
    with pytest.raises(ConfigError, match="cannot be used: the model has 2001 parameters"):
        choose(large, "importance")
    with pytest.raises(ConfigError, match="needs Hessians"):
        choose(small, "corrected", curvature=False)
    with pytest.raises(ConfigError, match="method must be"):
        choose(small, "magic")  # type: ignore[arg-type]


def study(tmp_path, method):
    rng = np.random.default_rng(0)
    for name in ("a", "b"):
        x = rng.normal(size=40)
        y = 1 + x + rng.normal(size=40)
        lines = ["y,x", *[f"{float(v)!r},{float(u)!r}" for u, v in zip(x, y)]]
        (tmp_path / f"{name}.csv").write_text("\n".join(lines))
    (tmp_path / "study.toml").write_text(
        '[data]\nfiles = { a = "a.csv", b = "b.csv" }\ntarget = "y"\nfeatures = ["x"]\n'
        '[model]\nfamily = "linear"\nnoise-scale = 1.0\n'
        f'[fit]\nmethod = "{method}"\naccuracy = 0.2\n'
    )
    return load_study(tmp_path / "study.toml")


@pytest.mark.slow
def test_a_study_that_asks_for_langevin_is_planned_and_sampled(tmp_path):
    tree = run_study(study(tmp_path, "fa-ld"), tmp_path / "out", resume=False, progress=False).tree
    assert tree.attrs["verdict"] == "not certified"
    assert tree.attrs["chosen"] == "plain FA-LD, as asked for"
    settings = json.loads(tree.attrs["settings"])
    assert settings["method"] == "fa-ld"
    assert settings["num_rounds"] > settings["num_warmup"] > 0
    assert (tmp_path / "out" / "checkpoint" / "state.npz").exists()
    # the twin: left to itself, the study gets few rounds
    (tmp_path / "again").mkdir()
    few = run_study(study(tmp_path / "again", "auto"), tmp_path / "few", resume=False, progress=False).tree
    assert "importance sampling" in few.attrs["chosen"]
    assert few.attrs["rounds_done"] < 40


def wide(dim, rows=60, seed=0):
    """A Gaussian location model of many parameters with curvatures from 1 to 4 times the rows."""
    rng = np.random.default_rng(seed)
    variances = 1 / np.linspace(1, 4, dim)
    x = (rng.normal(size=(rows, dim)) * np.sqrt(variances)).astype(np.float32)
    model = fald.models.gaussian_location(np.diag(variances))
    return model, fald.FederatedData.from_arrays({"a": x[::2], "b": x[1::2]}), x, variances


def test_extreme_curvatures_are_found_without_a_hessian():
    model, data, x, _ = wide(30)
    found = extremes(model, data)
    assert np.allclose(found.mode, x.mean(0), atol=1e-4)
    assert found.least == pytest.approx(60, rel=1e-3)
    assert found.largest == pytest.approx(240, rel=1e-3)


@pytest.mark.slow
def test_too_many_parameters_for_matrices_are_planned_and_sampled(monkeypatch):
    monkeypatch.setattr(choice, "MAX_DIM", 500)
    model, data, x, variances = wide(501)
    tree = fald.fit(0, model, data, accuracy=0.2, progress=False)
    assert tree.attrs["chosen"] == "plain FA-LD, because the model has 501 parameters, more than 500"
    assert json.loads(tree.attrs["settings"])["local_steps"] == 1
    draws = tree["posterior"]["location"].values.reshape(-1, 501)
    sd = np.sqrt(variances / 60)
    shifts, spread = (draws.mean(0) - x.mean(0)) / sd, draws.std(0) / sd - 1
    effective = 400  # of 16 chains with 25 effective draws each
    # the largest of 501 normal errors, beside the error that was allowed
    assert np.abs(shifts).max() < 0.2 + 4 / np.sqrt(effective)
    assert np.abs(np.median(spread)) < 0.2
    # the twin: the prior scale of the errors tells a posterior of other rows apart
    assert np.abs((draws.mean(0) - x[:30].mean(0)) / sd).max() > 0.2 + 4 / np.sqrt(effective)
