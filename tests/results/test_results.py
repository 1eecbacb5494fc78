"""The result tree, its tables, its files, and an import that stays light."""

from __future__ import annotations

import csv
import io
import json
import os

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import xarray as xr

import fald
from fald.core.errors import ConfigError, DataError, StorageError
from fald.results.text import csv_text
from fald.results.tree import draws_by_row, settings_of
from helpers import run_python

RNG = np.random.default_rng(4)
X = RNG.normal(size=(40, 2))
BINARY = (RNG.random(40) < 0.4).astype(float)
LOGISTIC = fald.models.logistic_regression(["age", "dose"])
LINEAR = fald.models.linear_regression(["age", "dose"])


@pytest.mark.parametrize("start", ["=", "+", "-", "@", "\t=", "\r=", " @"])
def test_no_cell_of_a_table_is_a_formula(start):
    import pandas as pd

    word = f"{start}cmd|' /C calc'!A0"
    frame = pd.DataFrame({word: [word, f"plain\r{word}", -1.5]}, index=[word, "row", "other"])
    cells = list(csv.reader(io.StringIO(csv_text(frame), newline="")))
    said = word.replace("\r", " ")
    assert cells == [["", f"'{said}"], [f"'{said}", f"'{said}"], ["row", f"plain {said}"], ["other", "-1.5"]]


def sites(y, features=X):
    cuts = {"c": slice(0, 30), "a": slice(30, 39), "b": slice(39, 40)}
    return fald.FederatedData.from_arrays({n: (features[cut], y[cut]) for n, cut in cuts.items()})


def sample(model, data, **changes):
    settings = {"num_rounds": 150, "num_warmup": 50, "local_steps": 3, "step_size": 5e-3, "progress": False}
    if "method" not in changes:
        settings["correlation"] = 0.25
    return fald.sample(3, model, data, **{**settings, **changes})


@pytest.fixture(scope="module")
def tree():
    return sample(LOGISTIC, sites(BINARY), thinning=2)


def test_groups_dimensions_and_names(tree):
    assert set(tree.children) == {"posterior", "sample_stats", "constant_data", "cost"}
    posterior, stats, constant = (tree[g] for g in ("posterior", "sample_stats", "constant_data"))
    assert posterior["coefficient"].dims == ("chain", "draw", "feature")
    assert posterior["coefficient"].shape == (4, 50, 2)
    assert posterior["intercept"].shape == (4, 50)
    assert posterior["feature"].values.tolist() == ["age", "dose"]
    assert stats["round"].values.tolist() == list(range(52, 151, 2))
    assert stats["energy"].shape == (4, 50)
    for name in ("participant", "weight", "drift"):
        assert stats[name].dims == ("chain", "draw", "slot")
        assert stats[name].shape == (4, 50, 3)
    assert np.isfinite(stats["drift"].values).all()
    np.testing.assert_allclose(stats["weight"].values.sum(-1), 1, rtol=1e-6)
    assert constant["client"].values.tolist() == ["a", "b", "c"]
    assert constant["size"].values.tolist() == [9, 1, 30]
    np.testing.assert_allclose(constant["share"], [9 / 40, 1 / 40, 30 / 40])
    np.testing.assert_allclose(stats["weight"].values[0, 0], constant["share"], rtol=1e-6)


def test_attributes_hold_version_method_and_all_settings(tree):
    assert tree.attrs["inference_library"] == "fald"
    assert tree.attrs["inference_library_version"] == fald.__version__
    assert tree.attrs["method"] == "fa-ld"
    assert tree.attrs["model"] == "logistic"
    assert (
        settings_of(tree).items()
        >= {
            "method": "fa-ld",
            "local_steps": 3,
            "step_size": 5e-3,
            "temperature": 1.0,
            "correlation": 0.25,
            "noise": "realised",
            "batch_size": None,
            "participation": "full",
            "num_participants": None,
            "num_chains": 4,
            "num_warmup": 50,
            "thinning": 2,
            "num_rounds": 150,
            "precision": "float32",
            "seed": 3,
        }.items()
    )


@pytest.fixture(scope="module")
def partial_tree():
    schedule = fald.paper_decay(100.0, 1.0)
    return sample(LOGISTIC, sites(BINARY), step_size=schedule, participation=fald.with_replacement(2))


def test_settings_of_schedules_participation_and_keys(partial_tree):
    settings = settings_of(partial_tree)
    assert settings["step_size"] == {"schedule": "PaperDecay", "smoothness": 100.0, "strong_convexity": 1.0}
    assert (settings["participation"], settings["num_participants"]) == ("with-replacement", 2)
    by_key = fald.sample(
        jax.random.key(3),
        LOGISTIC,
        sites(BINARY),
        num_rounds=2,
        local_steps=1,
        step_size=1e-3,
        correlation=0.5,
        progress=False,
    )
    assert settings_of(by_key)["seed"] == [0, 3]


def test_partial_participation_marks_empty_slots(partial_tree):
    stats = partial_tree["sample_stats"]
    weight, drift = stats["weight"].values, stats["drift"].values
    assert weight.shape == (4, 100, 2)
    assert set(np.unique(weight)) == {0.0, 0.5, 1.0}
    assert np.array_equal(np.isnan(drift), weight == 0)
    assert set(np.unique(stats["participant"].values)) <= {0, 1, 2}


def test_summary_equals_numpy(tree):
    table = fald.summary(tree)
    assert table.attrs["level"] == 0.95
    assert list(table.index) == ["age", "dose", "intercept"]
    assert list(table.columns) == [
        "mean",
        "sd",
        "2.5%",
        "97.5%",
        "mcse",
        "ess_bulk",
        "ess_tail",
        "r_hat",
        "odds ratio",
        "odds ratio 2.5%",
        "odds ratio 97.5%",
    ]
    draws = tree["posterior"]["coefficient"].sel(feature="dose").values.astype(float)
    row = table.loc["dose"]
    low, middle, high = np.quantile(draws, [0.025, 0.5, 0.975])
    expected = [draws.mean(), draws.std(ddof=1), low, high]
    np.testing.assert_allclose(row[["mean", "sd", "2.5%", "97.5%"]].astype(float), expected, rtol=1e-12)
    ratios = row[["odds ratio", "odds ratio 2.5%", "odds ratio 97.5%"]].astype(float)
    np.testing.assert_allclose(ratios, np.exp([middle, low, high]), rtol=1e-12)
    assert np.isnan(table.loc["intercept", "odds ratio"])


def test_level_of_the_intervals(tree):
    table = fald.summary(tree, level=0.8)
    assert table.attrs["level"] == 0.8
    assert {"10%", "90%", "odds ratio 10%", "odds ratio 90%"} <= set(table.columns)
    draws = tree["posterior"]["intercept"].values
    assert table.loc["intercept", "90%"] == pytest.approx(np.quantile(draws, 0.9), rel=1e-6)
    assert "0.5%" in fald.summary(tree, level=0.99)


def test_arviz_accepts_the_tree_and_agrees(tree):
    pytest.importorskip("xarray_einstats")
    import arviz_stats

    table = fald.summary(tree)
    functions = {"ess_bulk": arviz_stats.ess, "r_hat": arviz_stats.rhat, "mcse": arviz_stats.mcse}
    for name, function in functions.items():
        reference = function(tree)
        assert table.loc["intercept", name] == pytest.approx(float(reference["intercept"]), rel=1e-4)
        expected = reference["coefficient"].sel(feature="age")
        assert table.loc["age", name] == pytest.approx(float(expected), rel=1e-4)
    assert len(arviz_stats.summary(tree)) == 3


def test_rate_ratios_for_counts_and_none_for_lines():
    counts = RNG.poisson(2.0, 40).astype(float)
    table = fald.summary(
        sample(fald.models.poisson_regression(["age", "dose"]), sites(counts), step_size=1e-3)
    )
    assert "rate ratio 97.5%" in table
    assert "odds ratio" not in table
    lines = sample(LINEAR, sites(X @ [1.0, 2.0]), step_size=1e-5)
    table = fald.summary(lines)
    assert not [c for c in table if "ratio" in c]
    assert list(table.index) == ["age", "dose", "intercept", "noise_scale"]
    assert (lines["posterior"]["noise_scale"].values > 0).all()


@pytest.mark.parametrize("level", [0.0, 1.0, -0.5, 95, np.nan])
def test_bad_levels(tree, level):
    with pytest.raises(ConfigError, match="level must be between 0 and 1"):
        fald.summary(tree, level=level)


def test_no_parameter_is_lost_when_names_collide():
    names = ["intercept", "dose"]
    model = fald.Model(
        logprior_fn=lambda p: (
            -jnp.sum(p["coefficient"] ** 2) - p["intercept"] ** 2 - jnp.sum(p["other"] ** 2)
        ),
        loglikelihood_fn=lambda p, row: 0.0 * jnp.sum(row[0]),
        initial_position={"intercept": jnp.array(0.0), "coefficient": jnp.zeros(2), "other": jnp.zeros(2)},
        dims={"coefficient": ["feature"], "other": ["feature"]},
        coords={"feature": names},
    )
    rows = draws_by_row(sample(model, sites(BINARY), num_rounds=60))
    assert len(rows) == model.dim == 5
    plain = sample(fald.models.logistic_regression(names), sites(BINARY), num_rounds=60)
    table = fald.summary(plain)
    assert len(table) == 3
    assert table.loc["intercept", "mean"] == pytest.approx(
        plain["posterior"]["intercept"].values.mean(), rel=1e-5
    )


def test_a_point_estimate_has_no_intervals():
    for changes in (
        {"temperature": 0.0},
        {
            "method": fald.samplers.fedavg(local_steps=3, step_size=5e-3),
            "local_steps": None,
            "step_size": None,
        },
    ):
        tree = sample(LOGISTIC, sites(BINARY), num_rounds=60, **changes)
        assert tree.attrs["point_estimate"] == 1
        for use in (
            fald.summary,
            fald.diagnostics.ess,
            fald.diagnostics.rhat,
            fald.diagnostics.verdict,
            lambda t: fald.predict(LOGISTIC, t, X),
        ):
            with pytest.raises(DataError, match="point estimate"):
                use(tree)


def test_few_draws_give_a_table_without_diagnostics():
    table = fald.summary(sample(LOGISTIC, sites(BINARY), num_rounds=52))
    assert table["mean"].notna().all()
    assert table["r_hat"].isna().all()


@pytest.mark.parametrize("model", [LOGISTIC, LINEAR], ids=["plain", "constrained"])
def test_save_and_load_round_trip(tmp_path, model):
    tree = sample(model, sites(BINARY), num_rounds=60, step_size=1e-4)
    path = fald.save(tree, tmp_path / "posterior.nc")
    loaded = fald.load(path)
    xr.testing.assert_identical(loaded, tree)
    assert loaded.attrs == tree.attrs
    assert settings_of(loaded) == settings_of(tree)
    assert fald.summary(loaded).equals(fald.summary(tree))
    assert os.listdir(tmp_path) == ["posterior.nc"]
    path.unlink()
    assert float(loaded["posterior"]["intercept"].mean()) == float(tree["posterior"]["intercept"].mean())


def test_files_that_are_no_results(tree, tmp_path):
    path = fald.save(tree, tmp_path / "posterior.nc")
    content = path.read_bytes()
    for broken in (b"", content[:10], content[: len(content) // 2], content[:-1], os.urandom(5000)):
        path.write_bytes(broken)
        with pytest.raises(StorageError, match=r"posterior\.nc is not a readable result") as caught:
            fald.load(path)
        assert caught.value.exit_code == 8
    with pytest.raises(StorageError, match="no such file"):
        fald.load(tmp_path / "other.nc")
    xr.DataTree.from_dict({"other": xr.Dataset({"x": 1})}).to_netcdf(path, engine="h5netcdf")
    with pytest.raises(StorageError, match="no posterior in it"):
        fald.load(path)
    with pytest.raises(StorageError, match=r"folder .* does not exist"):
        fald.save(tree, tmp_path / "none" / "posterior.nc")


SAVE_ON_A_FULL_DISK = """
import json, resource, sys
import fald
tree = fald.load(sys.argv[1])
tree.attrs["title"] = "new"
answers = []
for limit in (64, 5000, int(sys.argv[2]) // 2):
    resource.setrlimit(resource.RLIMIT_FSIZE, (limit, resource.RLIM_INFINITY))
    try:
        fald.save(tree, sys.argv[1])
    except fald.errors.StorageError as error:
        answers.append(error.message)
print(json.dumps(answers))
"""


def test_saving_on_a_full_disk_keeps_the_old_file(tree, tmp_path):
    path = fald.save(tree, tmp_path / "posterior.nc")
    no_shared_cache = {"JAX_ENABLE_COMPILATION_CACHE": "false"}  # it would get half an entry
    out = run_python(SAVE_ON_A_FULL_DISK, str(path), str(path.stat().st_size), env=no_shared_cache)
    answers = json.loads(out)
    assert len(answers) == 3
    assert all("posterior.nc: the disk is full" in a for a in answers)
    assert os.listdir(tmp_path) == ["posterior.nc"]
    xr.testing.assert_identical(fald.load(path), tree)


HEAVY = ["nvflare", "flwr", "plotly", "matplotlib", "pandas", "xarray", "typer", "rich", "numpyro", "ot"]


def test_import_brings_in_nothing_heavy():
    found = run_python(f"import sys, fald; print([m for m in {HEAVY} if m in sys.modules])")
    assert found.strip() == "[]"
    control = run_python(f"import sys, fald, pandas; print([m for m in {HEAVY} if m in sys.modules])")
    assert "pandas" in control
