"""One judgement: what the report of a bad run says, the terminal says first, and --strict exits 5."""

import json
import shutil

import numpy as np
import pandas as pd
import pytest

import fald
from command import run
from reports import diverged_tree, make_runs


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    """A fitted and a sampled run of the same tables."""
    return make_runs(tmp_path_factory.mktemp("strict"))


def not_reached(tree):
    tree.attrs |= {
        "verdict": "not reached",
        "reason": "the weights are uneven",
        "advice": "allow more rounds",
    }


def uneven(tree):
    tree.attrs["khat"] = 0.9


def disagreeing(tree):
    posterior = tree["posterior"].to_dataset()
    posterior["intercept"] = posterior["intercept"] + 0.5 * posterior["intercept"].std() * posterior["chain"]
    tree["posterior"].dataset = posterior


def few(tree):
    for name in ("posterior", "sample_stats"):
        tree[name].dataset = tree[name].to_dataset().isel(draw=slice(0, 6))


def silent(tree):
    stats = tree["sample_stats"].to_dataset()
    stats["weight"] = stats["weight"].where(stats["participant"] != 2, 0.0)
    tree["sample_stats"].dataset = stats


def biased(tree):
    foreseen = json.loads(tree.attrs["foreseen"])
    foreseen["predicted"]["bias"] = 0.7
    tree.attrs["foreseen"] = json.dumps(foreseen)


def unstable(tree):
    tree.attrs["step_times_curvature"] = 1.5


def pointed(tree):
    tree.attrs["kind"] = "point estimate"


def shifted(tree):
    """Draws of another posterior: the model then does not reproduce the rows."""
    posterior = tree["posterior"].to_dataset()
    posterior["intercept"] = posterior["intercept"] + 8 * posterior["intercept"].std()
    tree["posterior"].dataset = posterior


BAD = {
    "fitted": (not_reached, uneven, shifted),
    "sampled": (diverged_tree, disagreeing, few, silent, biased, unstable, pointed, shifted),
}


@pytest.mark.parametrize(("name", "spoil"), [(n, spoil) for n, ways in BAD.items() for spoil in ways])
def test_what_the_report_stops_the_terminal_and_strict_stop(place, tmp_path, name, spoil):
    folder = tmp_path / "run"
    shutil.copytree(place / name, folder)
    tree = fald.load(folder / "posterior.nc")
    fald.save(spoil(tree) or tree, folder / "posterior.nc")
    document = json.loads(run("report", folder, "--json", cwd=place))
    judged = document["run"]["judgement"]
    assert judged["colour"] == "red"
    assert judged["headline"] in (folder / "report.html").read_text(encoding="utf-8")
    said = run("diagnose", folder, "--doubling", "0", cwd=place)
    assert said.splitlines()[0] == judged["first"]
    assert said.startswith("Do not use: ")
    found = json.loads(run("diagnose", folder, "--doubling", "0", "--json", cwd=place))["judgement"]
    assert found == judged
    run("diagnose", folder, "--doubling", "0", "--strict", cwd=place, code=5)


@pytest.mark.parametrize("name", BAD)
def test_the_twin_is_not_stopped(place, name):
    assert not run("diagnose", name, "--doubling", "0", "--strict", cwd=place).startswith("Do not use")


@pytest.mark.slow
def test_a_prior_that_fights_the_rows_is_stopped_at_the_run(tmp_path):
    rng, by_site = np.random.default_rng(0), []
    for name in "abcd":
        drug, age = rng.integers(0, 2, 100), rng.normal(50, 10, 100)
        sbp = 130 - 8.5 * drug + 0.4 * (age - 50) + rng.normal(0, 15, 100)
        columns = np.stack([np.ones(100), drug, age], axis=1)
        found = np.linalg.lstsq(columns, sbp, rcond=None)
        error = np.sqrt(found[1][0] / 97 * np.linalg.inv(columns.T @ columns)[1, 1])
        by_site.append((found[0][1], error))
        frame = pd.DataFrame({"drug": drug, "age": age, "sbp": sbp, "copy": 2 * age + 1})
        frame.to_csv(tmp_path / f"{name}.csv", index=False)
    study = """
        [data]
        files = {{ a = "a.csv", b = "b.csv", c = "c.csv", d = "d.csv" }}
        target = "sbp"
        features = {features}
        [model]
        family = "linear"
        {prior}
    """
    wide = "prior-scale = 200\n noise-prior-scale = 50"
    for name, features, prior, code in (
        ("default", ["drug", "age"], "", 0),
        ("narrow", ["drug", "age"], "prior-scale = 2.5\n noise-prior-scale = 5", 5),
        ("wide", ["drug", "age"], wide, 0),
        ("copied", ["drug", "age", "copy"], wide, 5),
    ):
        path = tmp_path / f"{name}.toml"
        path.write_text(study.format(features=json.dumps(features), prior=prior))
        run("run", path, "-q", "--strict", "--out", name, cwd=tmp_path, code=code)
        document = json.loads((tmp_path / name / "summary.json").read_text())
        judged = document["judgement"]
        assert (judged["colour"] == "red") == (code == 5)
        said = {check["name"] for check in judged["checks"] if check["colour"] == "red"}
        if name == "default":  # in mmHg, as at the sites, after a round that asked for scales
            mean, rounds = document["summary"][0]["mean"], document["rounds"]
            assert all(abs(mean - effect) < 2 * error for effect, error in by_site)
            assert len(rounds) == document["rounds_done"]
            assert rounds[0]["uploads"] == ["state"]
            assert rounds[0]["bytes_up"] == 8 * 5 * 5
        if name == "narrow":
            assert {"Fit of the model", "Prior and rows"} <= said
        if name == "copied":
            assert "Columns" in said
