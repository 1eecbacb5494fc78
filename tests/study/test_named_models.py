"""Models that a study names: networks of fald, files that a model reads itself, the package to start from."""

from __future__ import annotations

import json
import subprocess
import sys
import tomllib

import jax.numpy as jnp
import numpy as np
import pandas as pd
import pytest

import fald
from fald.core.errors import ConfigError, DataError
from fald.core.registry import Registry
from fald.problem.families import FAMILIES
from fald.report.page import question
from fald.study.new_model import SITES, write_model
from fald.study.review import predict_table
from fald.study.run import run_study
from fald.study.schema import make_study


def read(path, features, target):
    with np.load(path) as arrays:
        return arrays[features[0]] if target is None else (arrays[features[0]], arrays[target])


@fald.models.reads(read)
def pictures(features, *, scale=1.0):
    return fald.Model(
        lambda p: -0.5 * p["level"] ** 2,
        lambda p, row: -0.5 * ((row[1] - p["level"] * row[0].mean()) / scale) ** 2,
        {"level": jnp.array(0.0)},
    )


@pytest.fixture
def named(monkeypatch):
    """The model above as if a package had it."""
    monkeypatch.setitem(FAMILIES._own, "test:pictures", f"{__name__}:pictures")


@pytest.fixture
def tree(tmp_path, named):
    rng, files = np.random.default_rng(0), {}
    for site in ("a", "b"):
        picture = rng.normal(1, 1, (30, 3, 3))
        files[site] = str(tmp_path / f"{site}.npz")
        np.savez(files[site], picture=picture, y=2 * picture.mean((1, 2)) + 0.1 * rng.normal(size=30))
    data = {"files": files, "target": "y", "features": ["picture"]}
    return {"data": data, "model": {"family": "test:pictures", "options": {"scale": 0.1}}}


def test_a_model_reads_files_itself(tree):
    study = make_study(tree, "a test")
    data = study.read_data()
    assert data.rows[0].shape == (60, 3, 3)
    assert not study.encodes
    found = fald.fit(0, study.build_model(data.features), data, progress=False)
    assert abs(float(found["posterior"]["level"].mean()) - 2) < 0.1
    assert study.read_features(tree["data"]["files"]["a"]).shape == (30, 3, 3)
    for change, said in (
        ({"scaling": {"picture": {"scale": 2}}}, "reads files by itself"),
        ({"files": {}, "file": "all.npz", "site": "where"}, "one for every site"),
    ):
        with pytest.raises(ConfigError, match=said):
            make_study({**tree, "data": {**tree["data"], **change}}, "a test").read_data()
    with pytest.raises(DataError, match="no such file"):
        make_study({**tree, "data": {**tree["data"], "files": {"a": "gone.npz"}}}, "a test").read_data()


def test_reports_name_what_a_model_does_not_declare(tree):
    model = make_study(tree, "a test").build_model(["picture"])
    document = {
        "sites": [{"rows": 60}], "target": "y", "features": ["picture"], "family": "test:pictures",
        "effects": [], "prior": "", "undeclared": model.undeclared, "origin": "test 1.0",
    }  # fmt: skip
    said = question(document)
    assert "The model test:pictures of test 1.0, no part of fald" in said
    assert "The model does not declare its prior in words; what outcome it expects" in said
    assert fald.models.logistic_regression(2).undeclared == []
    assert fald.models.mlp_classifier(2, 2).undeclared == []


@pytest.mark.slow
def test_a_network_of_fald_in_a_study(tmp_path):
    rng = np.random.default_rng(0)
    files = {}
    for site in ("a", "b"):
        x = rng.normal(size=(30, 2))
        files[site] = str(tmp_path / f"{site}.csv")
        pd.DataFrame({"u": x[:, 0], "v": x[:, 1], "kind": (x[:, 0] > 0).astype(int)}).to_csv(files[site])
    study = make_study(
        {
            "data": {"files": files, "target": "kind", "features": ["u", "v"]},
            "model": {"family": "mlp", "num-classes": 2, "options": {"hidden": [3]}},
            "sampler": {"num-rounds": 200, "num-warmup": 150, "local-steps": 2, "step-size": 2e-3,
                        "batch-size": 10, "num-chains": 2},
        },
        "a test",
    )  # fmt: skip
    run_study(study, tmp_path / "out", resume=False, progress=False)
    found = predict_table(tmp_path / "out", tmp_path / "a.csv", 0.9)
    kinds = pd.read_csv(files["a"])["kind"]
    assert np.mean((found["class 1 mean"] > 0.5) == kinds) > 0.8


def test_names_of_packages_are_not_those_of_fald():
    registry = Registry("thing", "fald.methods", {}, qualified=True)
    assert "fald:fsgld" in registry
    assert "fsgld" not in registry
    with pytest.raises(ConfigError, match="not installed here"):
        registry["other:thing"]


def test_new_model_writes_a_whole_package(tmp_path):
    folder = tmp_path / "my-model"
    files = write_model(folder)
    assert all(path.exists() for path in files)
    project = tomllib.loads((folder / "pyproject.toml").read_text())["project"]
    assert project["entry-points"]["fald.models"] == {"survival": "my_model:survival"}
    study = tomllib.loads((folder / "study.toml").read_text())
    assert study["model"]["family"] == "my-model:survival"
    assert set(study["data"]["files"]) == set(SITES)
    assert "my-model:survival" in tomllib.loads((folder / "policy.toml").read_text())["allowed-models"]
    for name in ("My_Model", "a b", "-a", "os.path", "x" * 3 + "/../y"):
        with pytest.raises(ConfigError):
            write_model(tmp_path / name if "/" not in name else folder)
    with pytest.raises(ConfigError, match="already exists"):
        write_model(folder)


@pytest.mark.slow
def test_the_new_package_installs_and_passes_its_own_test(tmp_path):
    pytest.importorskip("numpyro")
    folder = tmp_path / "my-model"
    write_model(folder)
    pip = [
        sys.executable,
        "-m",
        "pip",
        "install",
        "--quiet",
        "--no-deps",
        "--no-build-isolation",
        "--no-index",
    ]
    subprocess.run([*pip, "--target", tmp_path / "installed", folder], check=True, timeout=600)
    path = json.dumps([str(tmp_path / "installed"), *sys.path])
    code = f"import sys; sys.path[:] = {path}; import pytest; sys.exit(pytest.main(['-q', {str(folder)!r}]))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=900)
    assert done.returncode == 0, done.stdout + done.stderr
