"""The command as a user types it: output, files, exit codes."""

import io
import json
import signal
import subprocess
import sys

import numpy as np
import pandas as pd
import pytest

import fald
import stopping
from command import FALD, STUDY, run, two_clinics
from fald.study.schema import load_study
from fald.study.template import TEMPLATE


def test_run_diagnose_predict(folder):
    out = run("run", "study.toml", cwd=folder)
    assert "Two clinics" in out
    assert "95% interval" in out
    assert "drug=verum" in out
    assert "not bias" in out
    document = json.loads(run("diagnose", "runs/study", "--json", cwd=folder))
    tree = fald.load(folder / "runs/study/posterior.nc")
    row = next(r for r in document["summary"] if r["parameter"] == "age")
    draws = tree["posterior"]["coefficient"].sel(feature="age").values
    assert row["mean"] == pytest.approx(float(draws.astype(float).mean()), rel=1e-6)
    assert row["odds ratio 97.5%"] == pytest.approx(float(np.exp(np.quantile(draws, 0.975))), rel=1e-5)
    predicted = run("predict", "runs/study", "south.csv", cwd=folder)
    table = pd.read_csv(io.StringIO(predicted), index_col="row")
    assert len(table) == 25
    assert ((table["mean"] > table["2.5%"]) & (table["mean"] < table["97.5%"])).all()


def test_json_is_one_document_and_quiet_is_quiet(folder):
    command = [*FALD, "run", "study.toml", "--json", "--quiet", "--out", "o"]
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr
    assert done.stderr == ""
    assert json.loads(done.stdout)["settings"]["local_steps"] == 2


def test_same_seed_same_summary_and_set_changes_it(folder):
    first = json.loads(run("run", "study.toml", "--json", "-q", "--out", "a", cwd=folder))
    again = json.loads(run("run", "study.toml", "--json", "-q", "--out", "b", cwd=folder))
    other = json.loads(run("run", "study.toml", "--json", "-q", "--out", "c", "--set", "seed=7", cwd=folder))
    assert first["summary"] == again["summary"]
    assert first["summary"] != other["summary"]
    assert other["settings"]["seed"] == 7


def test_an_existing_run_is_not_overwritten(folder):
    run("run", "study.toml", "-q", cwd=folder)
    before = (folder / "runs/study/posterior.nc").read_bytes()
    error = run("run", "study.toml", cwd=folder, code=2)
    assert "already holds a run" in error
    assert "--resume" in error
    assert (folder / "runs/study/posterior.nc").read_bytes() == before


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """A run that nobody stopped."""
    folder = two_clinics(tmp_path_factory.mktemp("whole"))
    run("run", "study.toml", "-q", "--out", "whole", cwd=folder)
    return fald.load(folder / "whole" / "posterior.nc")


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGKILL])
def test_a_stopped_run_resumes_to_the_same_draws(folder, whole, number):
    # where draws have been written, and the state that belongs to them has not
    process = stopping.start("draws-00001.npz", "run", "study.toml", "-q", "--out", "cut", cwd=folder)
    process.send_signal(number)
    _, error = process.communicate(timeout=600)
    expected = -9 if number == signal.SIGKILL else 130
    assert process.returncode == expected, error
    if expected == 130:
        assert "interrupted after round" in error
    run("run", "study.toml", "-q", "--out", "cut", "--resume", cwd=folder)
    cut = fald.load(folder / "cut" / "posterior.nc")
    np.testing.assert_array_equal(whole["posterior"]["coefficient"], cut["posterior"]["coefficient"])
    np.testing.assert_array_equal(whole["sample_stats"]["energy"], cut["sample_stats"]["energy"])


def test_divergence_keeps_draws_and_names_the_cause(folder):
    error = run("run", "study.toml", "--set", "step-size=50", cwd=folder, code=4)
    assert "non-finite" in error
    assert "step-size" in error
    assert "client" in error


def test_divergence_before_the_first_kept_draw_is_told_again(folder):
    wild = ["--set", "step-size=50", "--set", "num-warmup=400"]
    error = run("run", "study.toml", *wild, "--out", "wild", cwd=folder, code=4)
    assert "no draw was kept yet, so there is no report" in error
    again = run("report", "wild", cwd=folder, code=8)
    assert "diverged before its first kept draw: non-finite" in again
    assert "--resume" not in again
    assert "step-size 50" in again
    # a run that was killed there may go on
    journal = folder / "wild" / "rounds.jsonl"
    journal.write_text("".join(journal.read_text().splitlines(keepends=True)[:-1]))
    assert "--resume" in run("report", "wild", cwd=folder, code=8)


def test_strict_exits_with_5_when_diagnostics_object(folder):
    error = run(
        "run",
        "study.toml",
        "--strict",
        "--set",
        "num-rounds=120",
        "--set",
        "step-size=1e-6",
        cwd=folder,
        code=5,
    )
    assert "effective sample size" in error
    # the twin: a run that mixes passes the same gate
    fine = [
        "--set",
        "num-rounds=12000",
        "--set",
        "num-warmup=1000",
        "--set",
        "step-size=5e-3",
        "--out",
        "fine",
    ]
    run("run", "study.toml", "--strict", *fine, cwd=folder)


BAD_STUDIES = {
    "unknown key": ('step-size = 2e-3', 'stepsize = 2e-3', 2, ["unknown key", "sampler.stepsize", "step-size"]),
    "unknown section": ("[sampler]", "[sampling]", 2, ["unknown key", "sampling"]),
    "missing key": ('target = "ill"\n', "", 2, ["data.target", "missing"]),
    "negative step": ("step-size = 2e-3", "step-size = -0.1", 2, ["step-size must be a number > 0", "-0.1"]),
    "no local steps": ("local-steps = 2", "local-steps = 0", 2, ["local-steps", "0"]),
    "correlation": ("num-chains = 4", "num-chains = 4\ncorrelation = 1.5", 2, ["correlation", "1.5"]),
    "S = 0": ("num-chains = 4", 'participation = "with-replacement"\nnum-participants = 0', 2, ["num-participants", "0"]),
    "S > N": ("num-chains = 4", 'participation = "without-replacement"\nnum-participants = 3', 2, ["3", "2 clients"]),
    "scheme II": ("num-chains = 4", 'participation = "without-replacement"\nnum-participants = 1', 2, ["25 to 60 rows", "with-replacement"]),
    "no S": ("num-chains = 4", 'participation = "with-replacement"', 2, ["num-participants"]),
    "toml": ("[model]", "[model", 2, ["not valid TOML"]),
    "missing file": ("north.csv", "nroth.csv", 3, ["no such file", "did you mean", "north.csv"]),
    "wrong column": ('"age"]', '"agee"]', 3, ["agee", "did you mean 'age'"]),
    "undeclared level": ('"verum"]', '"drug"]', 3, ["verum", "drug", "not declared"]),
    "text in a number": ('[data.categories]\ndrug = ["placebo", "verum"]\n', "", 3, ["drug", "not a number", "categories"]),
    "nothing kept": ("num-warmup = 100", "num-warmup = 600", 2, ["no draw would be kept"]),
    "family": ('family = "logistic"', 'family = "probit"', 2, ["family", "probit"]),
    "both sources": ("[data]", '[data]\nfile = "north.csv"\nsite = "drug"', 2, ["either"]),
}  # fmt: skip


@pytest.mark.parametrize("case", BAD_STUDIES)
def test_bad_studies_are_answered(folder, case):
    old, new, code, words = BAD_STUDIES[case]
    assert old in STUDY
    (folder / "study.toml").write_text(STUDY.replace(old, new))
    error = run("run", "study.toml", cwd=folder, code=code)
    assert "Traceback" not in error
    for word in words:
        assert word in error, error
    assert not (folder / "runs/study/posterior.nc").exists()


BAD_TABLES = {
    "nan": (lambda t: t.assign(age=t["age"].where(t.index != 3)), ["north", "age", "missing value", "row 4"]),
    "no rows": (lambda t: t.iloc[:0], ["north", "no rows"]),
    "other columns": (lambda t: t.drop(columns="age"), ["north", "age"]),
    "one class": (lambda t: t.assign(ill=0), ["one class only"]),
    "labels": (lambda t: t.assign(ill=t["ill"] + 1), ["0 or 1"]),
}


@pytest.mark.parametrize("case", BAD_TABLES)
def test_bad_tables_are_answered(folder, case):
    change, words = BAD_TABLES[case]
    for name in ("north", "south") if case in ("one class", "labels") else ("north",):
        change(pd.read_csv(folder / f"{name}.csv")).to_csv(folder / f"{name}.csv", index=False)
    error = run("run", "study.toml", cwd=folder, code=3)
    assert "Traceback" not in error
    for word in words:
        assert word in error, error


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["run"], ["Missing argument"]),
        (["run", "nothing.toml"], ["no such study file"]),
        (["run", "study.toml", "--set", "step-size"], ["key=value"]),
        (["run", "study.toml", "--set", "stepsize=1"], ["unknown key", "step-size"]),
        (["run", "study.toml", "--resume"], ["nothing to resume"]),
        (["run", "study.toml", "--level", "2"], ["level"]),
        (["diagnose", "nowhere"], ["no such folder"]),
        (["diagnose", "."], ["not the folder of a run"]),
        (["predict", "nowhere", "north.csv"], ["no such folder"]),
        (["explode"], ["No such command"]),
    ],
)
def test_bad_commands_are_answered(folder, arguments, words):
    error = run(*arguments, cwd=folder, code=2)
    assert "Traceback" not in error
    for word in words:
        assert word in error, error


def test_new_writes_a_study_that_loads_and_never_overwrites(tmp_path):
    run("new", "mine.toml", cwd=tmp_path)
    assert (tmp_path / "mine.toml").read_text() == TEMPLATE
    assert load_study(tmp_path / "mine.toml").sampler is None
    assert "already exists" in run("new", "mine.toml", cwd=tmp_path, code=2)


def test_damaged_results_are_answered(folder):
    run("run", "study.toml", "-q", cwd=folder)
    result = folder / "runs/study/posterior.nc"
    result.write_bytes(result.read_bytes()[:1000])
    assert "not a readable result" in run("diagnose", "runs/study", cwd=folder, code=8)


def test_a_full_disk_is_reported_and_what_was_saved_stays(folder):
    limited = (
        "import resource; resource.setrlimit(resource.RLIMIT_FSIZE, (40_000, 40_000)); "
        "from fald.cli.main import main; main()"
    )
    command = [sys.executable, "-c", limited, "run", "study.toml", "-q", "--set", "num-rounds=8000"]
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=600)
    assert done.returncode == 8, (done.returncode, done.stderr)
    assert "disk is full" in done.stderr
    assert not list(folder.rglob("*.tmp"))
    run("run", "study.toml", "-q", "--resume", "--set", "num-rounds=8000", cwd=folder)


def test_float64_is_one_switch(folder):
    run("run", "study.toml", "-q", "--set", "precision=float64", cwd=folder)
    assert fald.load(folder / "runs/study/posterior.nc")["posterior"]["coefficient"].dtype == np.float64


def test_help_fits_a_screen_and_shows_an_example(tmp_path):
    assert "fald demo" in run("--help", cwd=tmp_path)
    for command in ("demo", "run", "diagnose", "predict", "plan", "privacy", "new"):
        text = run(command, "--help", cwd=tmp_path)
        assert "Example: fald " + command in text
        assert len(text.splitlines()) <= 30
        assert max(map(len, text.splitlines())) <= 100


def test_version(tmp_path):
    assert run("--version", cwd=tmp_path).strip() == f"fald {fald.__version__}"


PRIVATE = STUDY.replace("num-chains = 4", "num-chains = 1\nclip-norm = 1.0").replace("2e-3", "1e-5")
PRIVATE += "\n[privacy]\ndelta = 1e-4\nmax-epsilon = 0.8\n"


def test_privacy_of_a_study_before_it_runs(folder):
    (folder / "study.toml").write_text(PRIVATE)
    text = run("privacy", "study.toml", cwd=folder)
    assert "against replacement by another record" in text
    assert "rounds within ε = 0.8" in text
    document = json.loads(run("privacy", "study.toml", "--json", cwd=folder))
    assert document["epsilon"] <= document["epsilon_rdp"] <= document["epsilon_published_bound"]
    assert {c["name"] for c in document["clients"]} == {"north", "south"}
    run("privacy", "study.toml", "--plot", "eps.html", cwd=folder)
    assert "ρ = 0.5" in (folder / "eps.html").read_text()
    found = json.loads(run("privacy", "calibrate", "study.toml", "--epsilon", "1", "--json", cwd=folder))
    assert found["largest"]["num_rounds"]["epsilon"] <= 1
    assert found["largest"]["step_size"]["value"] > 1e-5
    assert "--epsilon" in run("privacy", "calibrate", "study.toml", cwd=folder, code=2)
    assert ".html" in run("privacy", "study.toml", "--plot", "eps.png", cwd=folder, code=2)


def test_a_budget_ends_a_run_with_6_and_keeps_the_draws(folder):
    (folder / "study.toml").write_text(PRIVATE)
    rounds = json.loads(run("privacy", "study.toml", "--json", cwd=folder))["rounds_within_budget"]
    assert 100 < rounds < 600
    error = run("run", "study.toml", "-q", cwd=folder, code=6)
    assert f"stopped after round {rounds} of 600" in error
    assert "partial.nc" in error
    tree = fald.load(folder / "runs/study/partial.nc")
    assert tree["sample_stats"]["round"].values[-1] == rounds
    assert "Every record is protected with ε" in run("privacy", "--run", "runs/study", cwd=folder)
    # a study without protection says so
    (folder / "study.toml").write_text(STUDY)
    run("run", "study.toml", "-q", "--out", "open", cwd=folder)
    assert run("privacy", "--run", "open", cwd=folder).startswith("No privacy")
    assert "no bound on a row's gradient" in run(
        "privacy", "study.toml", "--delta", "1e-4", cwd=folder, code=6
    )
    assert "delta is needed" in run("privacy", "study.toml", cwd=folder, code=2)


def test_plan_writes_settings_that_hold_what_it_promised(folder):
    text = run("plan", "study.toml", cwd=folder)
    assert "Recommended" in text
    assert "rounds predicted" in text
    assert "rounds guaranteed" in text
    document = json.loads(run("plan", "study.toml", "--json", "--write", "--plot", "p.html", cwd=folder))
    chosen = document["recommended"]["settings"]
    written = load_study(folder / "study.toml").sampler
    assert written.local_steps == chosen["local-steps"]
    assert written.step_size == chosen["step-size"]
    assert "drug" in (folder / "study.toml").read_text()
    assert (folder / "p.html").stat().st_size > 1000
    result = json.loads(run("run", "study.toml", "-q", "--json", cwd=folder))
    assert result["complaints"] == []
    assert result["foreseen"]["predicted"]["bias"] <= 0.05
    assert result["foreseen"]["predicted"]["sd_error"] <= 0.05
    shown = run("diagnose", "runs/study", "--doubling", "200", cwd=folder)
    for word in ("predicted:", "guaranteed:", "measured: W2 between halves", "twice the step size, measured"):
        assert word in shown


def test_plan_from_constants_and_its_errors(folder):
    found = json.loads(run("plan", "--constants", "L=34 m=1 d=2 N=50", "--json", cwd=folder))
    assert found["best_local_steps"] == 6  # √(1 + 34) to rounding
    assert found["predicted"] is None
    for arguments, word in (
        (["plan"], "--constants"),
        (["plan", "study.toml", "--constants", "L=1 m=1 d=1"], "--constants"),
        (["plan", "--constants", "L=1 m=2 d=1"], "strong-convexity"),
        (["plan", "--constants", "Q=1"], "unknown constant"),
        (["plan", "--constants", "L=1 m=1 d=1", "--write"], "--write"),
        (["plan", "study.toml", "--bias", "-1"], "bias"),
    ):
        assert word in run(*arguments, cwd=folder, code=2)


@pytest.mark.parametrize(
    ("arguments", "code", "words"),
    [
        (["demo", "--out", "north.csv"], 2, ["not an earlier demo"]),
        (["run", "study.toml", "--level", "1.5"], 2, ["level must be between"]),
        (["run", "study.toml", "--set", "num-rounds=1e20"], 2, ["num-rounds"]),
        (["run", "study.toml", "--set", "num-rounds=2000000000", "--set", "local-steps=9"], 2, ["2^31"]),
        (["run", "study.toml", "--set", "seed=-1"], 2, ["seed"]),
        (["run", "study.toml", "--set", 'target="drug"'], 2, ["columns named twice"]),
        (["new", "nowhere/study.toml"], 8, ["make the folder nowhere first"]),
        (["privacy", "--run", "x", "--set", "seed=1"], 2, ["as it was"]),
    ],
)
def test_more_nonsense_is_answered_before_any_work(folder, arguments, code, words):
    error = run(*arguments, cwd=folder, code=code)
    for word in words:
        assert word in error
    assert not (folder / "runs").exists()


def test_other_separators_and_numbers_too_large_are_named(folder):
    table = pd.read_csv(folder / "north.csv")
    table.to_csv(folder / "north.csv", index=False, sep=";")
    assert "separated by commas" in run("run", "study.toml", cwd=folder, code=3)
    table.assign(age=np.where(table.index == 2, 1e30, table["age"])).to_csv(folder / "north.csv", index=False)
    assert "feature 'age' has the value 1e+29" in run("run", "study.toml", cwd=folder, code=3)


def test_a_budget_that_ends_in_the_warm_up_spends_nothing(folder):
    (folder / "study.toml").write_text(PRIVATE)
    error = run("run", "study.toml", "-q", "--set", "num-warmup=590", cwd=folder, code=6)
    assert "before its first draw" in error
    assert not (folder / "runs/study/checkpoint/begun.json").exists()


def test_the_privacy_of_a_killed_run_can_be_stated(folder):
    (folder / "study.toml").write_text(PRIVATE)
    run("run", "study.toml", "-q", "--set", "privacy.max-epsilon=50", cwd=folder)
    stated = json.loads(run("privacy", "--run", "runs/study", "--json", cwd=folder))
    (folder / "runs/study/posterior.nc").unlink()
    killed = json.loads(run("privacy", "--run", "runs/study", "--json", cwd=folder))
    assert killed["epsilon"] == pytest.approx(stated["epsilon"], rel=1e-3)
    assert "was killed" in killed["text"]
    assert "--resume" in run("diagnose", "runs/study", cwd=folder, code=8)


def test_one_chain_is_told_that_mixing_was_not_compared(folder):
    out = run("run", "study.toml", "-q", "--set", "num-chains=1", cwd=folder)
    assert "R-hat needs two chains" in out
    assert "nan" not in out


def test_a_run_whose_tables_have_moved_is_still_diagnosed(folder):
    run("run", "study.toml", "-q", cwd=folder)
    (folder / "north.csv").rename(folder / "moved.csv")
    shown = run("diagnose", "runs/study", cwd=folder)
    assert "odds ratio" in shown
    assert "none: the tables cannot be read (no such file" in shown
