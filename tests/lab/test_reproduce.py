"""``fald reproduce``: files, resumption, errors, settings, the page."""

import contextlib
import io
import json
import runpy
import signal
import sys
import tomllib
from importlib import resources
from pathlib import Path

import numpy as np
import pandas as pd
import pytest

from fald.cli.main import main
from fald.core.errors import ConfigError, Interrupted, StorageError
from fald.lab.reproduce import communication, figure3, local_steps, runner
from fald.lab.reproduce.base import Panel, PanelRun, cuts, read_settings
from fald.lab.reproduce.panels import PANELS

STORED = Path(__file__).parents[2] / "docs" / "reproduction"
PAGE = Path(__file__).parents[2] / "docs" / "reproduction.md"
GENERATOR = PAGE.with_name("make_reproduction.py")


def command(*arguments, cwd, code=0):
    """Standard output of ``fald reproduce``, or the error text when it must fail."""
    out, err = io.StringIO(), io.StringIO()
    with (
        pytest.MonkeyPatch.context() as patch,
        contextlib.redirect_stdout(out),
        contextlib.redirect_stderr(err),
        contextlib.chdir(cwd),
    ):
        patch.setattr(sys, "argv", ["fald", "reproduce", *map(str, arguments)])
        patch.setattr(signal, "signal", lambda *_: None)
        try:
            main()
            found = 0
        except SystemExit as stop:
            found = stop.code or 0
    assert found == code, (found, out.getvalue(), err.getvalue())
    return out.getvalue() if code == 0 else err.getvalue()


@pytest.fixture
def counted(monkeypatch):
    """The panel fig1d, counting how often it is measured."""
    calls = []
    original = PANELS["fig1d"]

    def measure(run):
        calls.append(run.seed)
        return original.measure(run)

    monkeypatch.setitem(PANELS, "fig1d", Panel("fig1d", measure, original.draw))
    return calls


def test_every_output_is_written(tmp_path):
    said = command("fig1d", "--quick", cwd=tmp_path)
    folder = tmp_path / "fald-reproduce"
    assert {p.name for p in folder.iterdir()} == {f"fig1d.{k}" for k in ("csv", "json", "svg", "png")}
    record = json.loads((folder / "fig1d.json").read_text())
    assert record["seed"] == 0
    assert record["settings"]["num-clients"] == 50
    assert {"fald", "jax", "numpy", "python"} <= set(record["versions"])
    assert record["verdicts"][0]["verdict"] in ("holds", "does not hold", "cannot be told")
    assert "HOLDS" in said
    assert "1 claims: 1 holds" in said


def test_json_is_one_document(tmp_path):
    document = json.loads(command("fig1d", "--quick", "--json", "--out", "x", cwd=tmp_path))
    assert document["folder"] == "x"
    assert [p["panel"] for p in document["panels"]] == ["fig1d"]


def test_finished_panel_is_not_run_again(tmp_path, counted):
    first = command("fig1d", cwd=tmp_path)
    assert "not run again" not in first
    assert "not run again" in command("fig1d", cwd=tmp_path)
    assert counted == [0]


@pytest.mark.parametrize("what", ["seed", "settings", "version", "points", "record"])
def test_a_panel_is_run_again_when_anything_changed(tmp_path, counted, monkeypatch, what):
    runner.reproduce(["fig1d"], tmp_path, progress=False)
    if what == "settings":
        monkeypatch.setattr(runner, "read_settings", lambda *a: {**read_settings(*a), "num-points": 11})
    elif what == "version":
        monkeypatch.setattr(runner, "__version__", "9.9")
    elif what == "points":
        (tmp_path / "fig1d.csv").write_text("x,y,density\n0,0,0\n")
    elif what == "record":
        (tmp_path / "fig1d.json").write_text("{")
    (record,) = runner.reproduce(["fig1d"], tmp_path, seed=int(what == "seed"), progress=False)
    assert not record["reused"]
    assert len(counted) == 2


@pytest.mark.slow
def test_same_seed_gives_the_same_bytes(tmp_path, monkeypatch):
    small = {"num-runs": 20, "num-rounds": 4, "alphas": [0]}
    monkeypatch.setattr(runner, "read_settings", lambda *a: {**read_settings(*a), **small})
    for folder, seed in (("a", 0), ("b", 0), ("c", 1)):
        runner.reproduce(["fig1b"], tmp_path / folder, seed=seed, progress=False)
    a, b, c = ((tmp_path / f / "fig1b.csv").read_bytes() for f in "abc")
    assert a == b
    assert a != c
    assert (tmp_path / "a" / "fig1b.svg").read_bytes() == (tmp_path / "b" / "fig1b.svg").read_bytes()


def test_interruption_keeps_what_is_finished(tmp_path, counted, monkeypatch):
    def interrupted(run):
        raise KeyboardInterrupt

    monkeypatch.setitem(PANELS, "fig1e", Panel("fig1e", interrupted, PANELS["fig1e"].draw))
    with pytest.raises(Interrupted, match="during fig1e") as caught:
        runner.reproduce(["fig1d", "fig1e"], tmp_path, progress=False)
    assert "not run again" in caught.value.hint
    assert not (tmp_path / "fig1e.json").exists()
    (record,) = runner.reproduce(["fig1d"], tmp_path, progress=False)
    assert record["reused"]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["fig1z"], "no experiment 'fig1z'"),
        (["nonsense"], "there are: all, fig1a"),
        (["fig1d", "--seed", "-1"], "seed must be"),
        (["fig3", "--rounds", "3"], "rounds must be at least 40"),
        (["fig1d", "--rounds", "500"], "rounds are for image panels"),
    ],
)
def test_nonsense_is_refused_with_a_hint(tmp_path, arguments, message):
    assert message in command(*arguments, cwd=tmp_path, code=2)


def test_folder_that_cannot_be_made(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(StorageError, match="cannot make the folder"):
        runner.reproduce(["fig1d"], tmp_path / "file" / "x")


def test_unknown_size():
    with pytest.raises(ConfigError, match="size must be"):
        runner.reproduce(["fig1d"], "nowhere", size="huge")  # type: ignore[arg-type]


@pytest.mark.parametrize("name", PANELS)
def test_settings_say_what_a_reader_needs(name):
    text = (resources.files("fald.lab.reproduce") / "settings" / f"{name}.toml").read_text(encoding="utf-8")
    assert {"title", "paper", "shows"} <= set(tomllib.loads(text))
    full, quick = read_settings(name, "full"), read_settings(name, "quick")
    assert set(full) == set(quick)
    assert full["differs"]
    assert bool(cuts(name, quick)) == (full != quick)


def test_full_settings_are_those_of_the_paper():
    for name in ("fig1a", "fig1b", "fig1c", "fig1e", *(f"fig2{x}" for x in "abcde")):
        assert read_settings(name, "full")["num-runs"] == 300
    assert read_settings("fig1c", "full")["correlations"] == [0, 0.25, 0.5, 0.75, 1]
    images = read_settings("fig3", "full")
    assert images["local-steps"] == [1, 10, 20, 50, 100]
    assert read_settings("fig4", "full")["num-warmup"] == 500
    assert (images["num-clients"], images["batch-size"], images["temperature"]) == (10, 200, 0.05)


@pytest.mark.slow
def test_communication_panel(tmp_path):
    small = {"num-runs": 50, "num-rounds": 20, "reference-draws": 2000, "problems": ["trial"]}
    settings = {**read_settings("communication", "quick"), **small}
    settings["step-sizes"] = {p: {m: s[:1] for m, s in v.items()} for p, v in settings["step-sizes"].items()}
    outcome = communication.measure(PanelRun("communication", settings, 0, tmp_path, progress=False))
    assert len(outcome.verdicts) == 2
    table = outcome.table
    assert set(table["method"]) == {"sgld", "fa-ld", "laplace"}
    for _, curve in table.groupby(["problem", "method"]):
        assert curve["error"].iloc[-1] < curve["error"].iloc[0]
    record = {"settings": settings, "facts": outcome.facts}
    table.to_csv(tmp_path / "communication.csv", index=False)
    runner.redraw(PANELS["communication"], tmp_path, record, ["png"])


def test_reference_moments_are_those_of_a_long_integration():
    """On one feature and an intercept, importance sampling against a sum over a fine grid."""
    settings = {**read_settings("communication", "full"), "num-features": 1, "reference-draws": 10_000}
    problem = communication.regression("balanced", settings)
    at, width = problem.mean, 6 * problem.sd
    grids = [np.linspace(m - w, m + w, 61) for m, w in zip(at, width)]
    b, a = np.meshgrid(*grids)
    logits = b.ravel()[:, None] * problem.design[:, 0] + a.ravel()[:, None]
    density = (logits * problem.outcome - np.logaddexp(0, logits)).sum(1)
    density -= 0.5 * (b.ravel() ** 2 + a.ravel() ** 2) / 2.5**2
    weight = np.exp(density - density.max())
    exact = np.array([np.average(v.ravel(), weights=weight) for v in (b, a)])
    z = (problem.mean - exact) / (problem.sd / np.sqrt(problem.effective))
    assert np.abs(z).max() < 4
    assert problem.effective > 0.5 * 10_000
    shifted = (problem.mean + 0.1 * problem.sd - exact) / (problem.sd / np.sqrt(problem.effective))
    assert np.abs(shifted).max() > 4


def stored(name):
    """A stored record and its points."""
    points = pd.read_csv(STORED / f"{name}.csv")
    return json.loads((STORED / f"{name}.json").read_text(encoding="utf-8")), points


@pytest.mark.parametrize("name", PANELS)
def test_stored_records_have_the_words_of_the_settings(name):
    record, full = stored(name)[0], read_settings(name, "full")
    assert {key: record[key] for key in ("title", "paper", "shows", "differs")} == {
        key: full[key] for key in ("title", "paper", "shows", "differs")
    }
    section = PAGE.read_text(encoding="utf-8").split(f"\n## {name}\n")[1].split("\n## ")[0]
    assert ("Cut from the full experiment: " in section) == bool(record["cut"])
    assert all(cut in section for cut in record["cut"])


def test_stored_verdicts_follow_from_the_stored_points():
    record, points = stored("fig1a")
    points = points.astype({"rounds_law": "Int64", "rounds_runs": "Int64"})
    facts = record["facts"]
    known = (facts["squared heterogeneity"], facts["chance above epsilon"])
    verdicts = [vars(v) for v in local_steps._verdicts(points, record["settings"], *known)]
    assert verdicts == record["verdicts"][:-1]
    (saved,) = [v for v in verdicts if "as large as 30" in v["claim"]]
    assert saved["verdict"] == "holds"
    assert "2,280 from K = 1 (9119 rounds)" in saved["measured"]
    assert "23 from K = 100 (92 rounds)" in saved["measured"]
    record, points = stored("fig4")
    claims = [c for c in read_settings("fig4", "full")["claims"] if c["set"] in record["settings"]["sets"]]
    verdicts = [figure3.judge(points, c) for c in claims] + figure3.shifts(stored("fig3")[1], points)
    assert [vars(v) for v in verdicts] == record["verdicts"]


def test_no_saving_without_local_steps():
    table = pd.DataFrame({0: [90, 80]}, index=pd.Index([1, 10], name="local_steps"))
    assert local_steps._savings(table).verdict == "does not hold"


def test_a_best_k_that_moves_is_told_from_one_that_does_not():
    rng = np.random.default_rng(0)

    def scored(accuracy, brier, noise=1e-4):
        lines = [
            {"set": "mnist", "seed": s, "local_steps": K, "round": 10, "accuracy": a, "brier": b, "ece": 0.1}
            for s in range(3)
            for K, a, b in zip((1, 10), accuracy + noise * rng.standard_normal(2), brier)
        ]
        return pd.DataFrame(lines)

    same = scored([0.8, 0.9], [0.3, 0.2])
    by_measure, by_warmup = figure3.shifts(same, scored([0.8, 0.9], [0.2, 0.3]))
    assert by_measure.verdict == by_warmup.verdict == "holds"
    assert [v.verdict for v in figure3.shifts(same, same)] == ["cannot be told"] * 2
    noisy = scored([0.9, 0.8], [0.3, 0.2], noise=10.0)
    assert figure3.shifts(same, noisy)[1].verdict == "cannot be told"


@pytest.mark.skipif(not PAGE.exists(), reason="the page is not part of this copy")
def test_page_is_what_the_generator_makes_of_the_stored_outputs():
    assert PAGE.read_text(encoding="utf-8") == runpy.run_path(str(GENERATOR))["page"](STORED)


@pytest.mark.skipif(not PAGE.exists(), reason="the page is not part of this copy")
@pytest.mark.parametrize("name", PANELS)
def test_nothing_is_cut_from_a_stored_panel(name):
    record = json.loads((STORED / f"{name}.json").read_text(encoding="utf-8"))
    assert record["cut"] == cuts(name, read_settings(name, "full") | record["settings"]) == []


@pytest.mark.skipif(not PAGE.exists(), reason="the page is not part of this copy")
def test_page_shows_every_panel_and_every_verdict(tmp_path):
    (record,) = runner.reproduce(["fig1d"], tmp_path, progress=False)
    page = runpy.run_path(str(GENERATOR))["page"]
    text = page(tmp_path)
    assert record["verdicts"][0]["measured"].replace("|", "\\|") in text
    assert "reproduction/fig1d.svg" in text
    changed = {**record, "verdicts": [{**record["verdicts"][0], "verdict": "does not hold"}]}
    (tmp_path / "fig1d.json").write_text(json.dumps(changed))
    assert page(tmp_path) != text
