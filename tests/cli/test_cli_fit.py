"""Studies without sampler settings, as a user types them."""

import json
import re
import signal

import numpy as np
import pytest

import fald
import stopping
from command import FITTED, STUDY, run
from fald.study.schema import load_study


@pytest.fixture
def fitted(folder):
    (folder / "study.toml").write_text(FITTED)
    return folder


def test_a_study_without_settings_is_fitted_with_a_verdict(fitted):
    out = run("run", "study.toml", cwd=fitted)
    assert "rounds of adaptive importance sampling" in out
    assert "Reached: means within 0.05" in out
    assert "What no check sees" in out
    assert "R-hat" not in out
    document = json.loads(run("diagnose", "runs/study", "--json", "--strict", cwd=fitted))
    assert document["verdict"] == "reached"
    assert document["complaints"] == []
    assert len(document["rounds"]) == document["rounds_done"]
    assert document["uploads"] == "sums over sites"
    tree = fald.load(fitted / "runs/study/posterior.nc")
    row = next(r for r in document["summary"] if r["parameter"] == "age")
    draws = tree["posterior"]["coefficient"].sel(feature="age").values
    assert row["mean"] == pytest.approx(float(draws.mean()), rel=1e-6)
    text = run("diagnose", "runs/study", cwd=fitted)
    assert "Why this method" in text
    assert "What left a site" in text
    assert len(run("predict", "runs/study", "south.csv", cwd=fitted).splitlines()) == 26
    assert run("privacy", "--run", "runs/study", cwd=fitted).startswith("No privacy")


def test_fa_ld_by_name_is_planned_and_stands_beside_the_few_round_posterior(fitted):
    asked = ("run", "study.toml", "-q", "--set", "accuracy=0.3", "--method")
    out = run(*asked, "fa-ld", cwd=fitted)
    head, _, beside = out.partition(
        "\nFA-LD, planned for means within 0.3 posterior sd and sds within 30%, beside"
    )
    assert "local steps, 32 chains" in head
    assert re.search(r"the few-round posterior \(\d rounds, reached\)", beside)
    for row in ("largest shift of a mean", "ratio of sds", "rounds", "largest R-hat", "smallest ESS"):
        assert row in beside
    assert "--method corrected" in beside
    found = json.loads((fitted / "runs/study/summary.json").read_text())
    assert found["settings"]["method"] == "fa-ld"
    few = fald.fit(0, *model_and_data(fitted), accuracy=0.3, progress=False)
    table, exact = fald.summary(fald.load(fitted / "runs/study/posterior.nc")), fald.summary(few)
    assert found["beside"]["shift"] == pytest.approx(
        ((table["mean"] - exact["mean"]) / exact["sd"]).abs().max(), rel=1e-3
    )
    # what was found beside is still there for those who look later
    assert "few-round posterior" in run("diagnose", "runs/study", "--doubling", "0", cwd=fitted)
    # the twins: the few-round method has nothing beside it, and settings of one's own are not overruled
    assert "beside" not in run(*asked, "importance", "--out", "few", cwd=fitted)
    (fitted / "study.toml").write_text(STUDY)
    assert "(or --method)" in run(*asked, "fa-ld", "--out", "own", cwd=fitted, code=2)
    (fitted / "study.toml").write_text(FITTED)
    assert "'corrected' or 'fa-ld'; got 'langevin'" in run(*asked, "langevin", cwd=fitted, code=2)


def model_and_data(folder):
    study = load_study(folder / "study.toml")
    data = study.read_data()
    return study.build_model(data.features), data


TOO_LITTLE = ("--set", "max-rounds=3", "--set", "accuracy=0.005")


def test_a_verdict_that_says_no_is_loud(fitted):
    out = run("run", "study.toml", "-q", "--set", "method=importance", *TOO_LITTLE, cwd=fitted)
    assert "NOT REACHED" in out
    assert "What to do:" in out
    assert "not reached" in run("diagnose", "runs/study", "--strict", cwd=fitted, code=5)
    assert json.loads((fitted / "runs/study/summary.json").read_text())["complaints"]


def test_sections_that_exclude_each_other_are_named(fitted):
    (fitted / "study.toml").write_text(STUDY + '[fit]\naccuracy = "high"\n')
    assert "keep one" in run("run", "study.toml", cwd=fitted, code=2)
    (fitted / "study.toml").write_text(FITTED + "[privacy]\ndelta = 1e-5\n")
    assert "'privacy' needs a 'sampler' section" in run("run", "study.toml", cwd=fitted, code=2)
    (fitted / "study.toml").write_text(FITTED + "[fit]\nseed = 3\n")
    assert "has a [fit] section" in run("plan", "study.toml", "--write", cwd=fitted, code=2)
    assert "no [sampler] section" in run("privacy", "study.toml", "--delta", "1e-4", cwd=fitted, code=2)
    assert "accuracy" in run("run", "study.toml", "--set", "accuracy=perfect", cwd=fitted, code=2)


def test_settings_planned_for_a_study_without_any_run(fitted):
    run("plan", "study.toml", "--write", cwd=fitted)
    assert "[sampler]" in (fitted / "study.toml").read_text()
    settings = ("--set", "num-rounds=300", "--set", "num-warmup=10", "--set", "thinning=1")
    assert "local steps" in run("run", "study.toml", "-q", *settings, cwd=fitted)


@pytest.mark.slow
@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGINT])
def test_a_killed_run_resumes_to_the_same_draws(fitted, how):
    run("run", "study.toml", "-q", "--out", "whole", cwd=fitted)
    process = stopping.start("round-0001.npz", "run", "study.toml", "-q", "--out", "cut", cwd=fitted)
    process.send_signal(how)
    process.communicate(timeout=600)
    assert process.returncode == (-9 if how == signal.SIGKILL else 130)
    assert "already holds a run" in run("run", "study.toml", "--out", "cut", cwd=fitted, code=2)
    run("run", "study.toml", "-q", "--out", "cut", "--resume", cwd=fitted)
    whole, cut = (fald.load(fitted / name / "posterior.nc") for name in ("whole", "cut"))
    assert np.array_equal(whole["posterior"]["coefficient"].values, cut["posterior"]["coefficient"].values)
