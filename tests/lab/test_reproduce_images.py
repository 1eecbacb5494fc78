"""Figures 3 and 4 and the calibration panel, on small made-up sets and, where present, on the real ones."""

import json
import os

import numpy as np
import pandas as pd
import pytest

from fald import datasets
from fald.core.errors import DataError
from fald.lab.reproduce import figure3, images
from fald.lab.reproduce.base import PanelRun, read_settings
from fald.lab.reproduce.panels import PANELS
from fald.lab.reproduce.runner import redraw
from fald.results.probabilities import auroc, entropy, scores
from images import write_set

TINY = {
    "num-rows": 300, "validation-rows": 100, "batch-size": 20, "num-clients": 3, "local-steps": [1, 10],
    "num-rounds": 40, "num-warmup": 20, "num-seeds": 2, "step-sizes": [2e-4, 1e-3], "tuning-steps": 100,
    "tuning-rounds": 20, "compared-local-steps": 10,
}  # fmt: skip
NEEDS_DATA = pytest.mark.skipif(
    "FALD_DATA" not in os.environ, reason="FALD_DATA names no folder with the image sets"
)


@pytest.fixture
def sets(tmp_path, monkeypatch):
    folder = tmp_path / "sets"
    hashes = {name: write_set(folder / name, seed) for seed, name in enumerate(datasets.IMAGE_SETS)}
    monkeypatch.setattr(datasets, "_HASHES", hashes)
    monkeypatch.setenv("FALD_DATA", str(folder))
    images._split.cache_clear()
    yield folder
    images._split.cache_clear()


def run_of(name, cache, **changes):
    return PanelRun(name, {**read_settings(name, "quick"), **TINY, **changes}, 0, cache, progress=False)


def test_scores_of_known_probabilities():
    p = np.array([[0.7, 0.2, 0.1], [0.1, 0.6, 0.3], [0.3, 0.3, 0.4]])
    y = np.array([0, 2, 2])
    found = scores(p, y)
    assert found.accuracy == pytest.approx(2 / 3)
    assert found.brier == pytest.approx(np.mean(((p - np.eye(3)[y]) ** 2).sum(1)))
    assert found.ece == pytest.approx((0.3 + 0.6 + 0.6) / 3)
    assert scores(np.eye(3), np.arange(3)) == (1.0, 0.0, 0.0)


def test_calibration_error_sees_overconfidence():
    rng = np.random.default_rng(0)
    p = rng.dirichlet(np.ones(3), 20_000)
    y = (rng.random((20_000, 1)) > p.cumsum(1)).sum(1)
    assert scores(p, y).ece < 0.015
    sharper = p**2 / (p**2).sum(1, keepdims=True)
    assert scores(sharper, y).ece > 0.1


def test_entropy_and_ranks():
    assert entropy(np.full((1, 10), 0.1))[0] == pytest.approx(np.log(10))
    rng = np.random.default_rng(0)
    a, b = rng.normal(0, 1, 4000), rng.normal(1, 1, 4000)
    assert auroc(a, b) == pytest.approx(0.7602, abs=0.02)  # Φ(1/√2), standard error 0.005
    assert auroc(b, a) == pytest.approx(1 - auroc(a, b))


def table_of(values, measure="accuracy"):
    """A table of last-round values: K -> one value per seed."""
    rows = [
        {"set": "mnist", "local_steps": K, "seed": seed, "round": 10, measure: value}
        for K, per_seed in values.items()
        for seed, value in enumerate(per_seed)
    ]
    return pd.DataFrame(rows)


@pytest.mark.parametrize(
    ("claim", "values", "verdict"),
    [
        ({"worst": 1}, {1: [0.80, 0.81], 10: [0.90, 0.911], 20: [0.92, 0.931]}, "holds"),
        ({"worst": 1}, {1: [0.95, 0.96], 10: [0.90, 0.911], 20: [0.92, 0.931]}, "does not hold"),
        ({"worst": 1}, {1: [0.89, 0.93], 10: [0.93, 0.90], 20: [0.95, 0.95]}, "cannot be told"),
        ({"worst": 1}, {1: [0.80], 10: [0.90]}, "cannot be told"),
        ({"best": [20]}, {1: [0.80, 0.81], 10: [0.90, 0.911], 20: [0.92, 0.931]}, "holds"),
        ({"best": [10]}, {1: [0.80, 0.81], 10: [0.90, 0.911], 20: [0.92, 0.931]}, "does not hold"),
        ({"best": [50]}, {1: [0.80, 0.81], 10: [0.90, 0.911]}, "cannot be told"),
        ({"not-best": 1}, {1: [0.80, 0.81], 10: [0.90, 0.911]}, "holds"),
        ({"not-best": 10}, {1: [0.80, 0.81], 10: [0.90, 0.911]}, "does not hold"),
        ({"at-least": 0.91}, {1: [0.80, 0.81], 10: [0.91, 0.92]}, "holds"),
        ({"at-least": 0.93}, {1: [0.80, 0.81], 10: [0.91, 0.92]}, "does not hold"),
    ],
)
def test_verdicts_on_claims(claim, values, verdict):
    found = figure3.judge(table_of(values), {"set": "mnist", "measure": "accuracy", **claim})
    assert found.verdict == verdict, found


def test_smaller_is_better_for_errors():
    values = {1: [0.80, 0.81], 10: [0.90, 0.911], 20: [0.92, 0.931]}
    claim = {"set": "mnist", "measure": "brier", "worst": 20}
    assert figure3.judge(table_of(values, "brier"), claim).verdict == "holds"


@pytest.mark.slow
def test_figures_3_and_4_share_their_chains(sets, tmp_path):
    first = PANELS["fig3"].measure(run_of("fig3", tmp_path / "cache"))
    assert set(first.table["set"]) == {"mnist", "fashion-mnist"}
    assert first.table.groupby(["set", "local_steps", "seed"]).size().unique().tolist() == [4]
    last = first.table[(first.table["round"] == 40) & (first.table["local_steps"] == 10)]
    assert last["accuracy"].min() > 0.8  # chance is 0.1
    assert last["brier"].max() < 0.5  # ten equal probabilities have 0.9
    files = {p: p.stat().st_mtime_ns for p in (tmp_path / "cache").iterdir()}
    second = PANELS["fig4"].measure(run_of("fig4", tmp_path / "cache"))
    assert {p: p.stat().st_mtime_ns for p in (tmp_path / "cache").iterdir()} == files
    assert second.table["round"].min() == 30  # the first sample after 20 rounds of warm-up
    settings = read_settings("fig3", "quick")
    for name, outcome in (("fig3", first), ("fig4", second)):
        outcome.table.to_csv(tmp_path / f"{name}.csv", index=False)
        redraw(PANELS[name], tmp_path, {"settings": settings, "facts": {}}, ["png"])


@pytest.mark.slow
def test_chains_do_not_depend_on_what_runs_beside_them(sets, tmp_path):
    """The same seed gives the same scores, alone or two at a time, and the test rows do not choose η."""
    K = TINY["local-steps"]
    together = PANELS["fig3"].measure(run_of("fig3", tmp_path / "a", sets=["mnist"]))
    alone = run_of("fig3", tmp_path / "b", sets=["mnist"])
    chain = images.ImageChain(
        "mnist", K[1], together.facts["tuned"]["mnist"][K[1]]["step-size"], 40, 20, 1, "test",
        **images.chain_settings(alone.settings),
    )  # fmt: skip
    (found,) = images.run_chains(alone, [chain], "energy")
    part = together.table[(together.table["local_steps"] == K[1]) & (together.table["seed"] == 1)]
    expected = [f for f in found if f["warmup"] == 0]
    assert part["brier"].tolist() == [f["brier"] for f in expected]
    tuning = [json.loads(p.read_text())["chain"] for p in (tmp_path / "a").iterdir()]
    used = {c["scored_on"] for c in tuning if c["num_rounds"] < 40}
    assert used == {"validation"}


def test_validation_rows_are_not_trained_on(sets):
    settings = {**read_settings("fig3", "quick"), **TINY}
    chain = images.ImageChain("mnist", 1, 1e-6, 10, 0, 0, "test", **images.chain_settings(settings))
    train, held = (images.rows(chain, part)[0] for part in ("train", "validation"))
    assert len(train) == 300
    assert len(held) == 100
    assert not {row.tobytes() for row in train} & {row.tobytes() for row in held}


def test_step_size_that_diverges_is_not_chosen(sets, tmp_path):
    run = run_of("fig3", tmp_path / "cache", **{"step-sizes": [2e-4, 1e30]})
    chosen = images.tune(run, "mnist", [10])
    assert chosen[10]["step-size"] == 2e-4


def test_the_step_size_is_chosen_by_the_mean_over_its_own_seeds(sets, tmp_path, monkeypatch):
    briers = {2e-4: [0.25, 0.5], 1e-3: [0.125, 0.75]}  # the first seed alone would choose the other

    def known(run, chains, label):
        return [[{"round": c.num_rounds, "brier": briers[c.step_size][c.seed]}] for c in chains]

    monkeypatch.setattr(images, "run_chains", known)
    run = run_of("fig3", tmp_path, **{"tuning-seeds": 2, "num-seeds": 5})
    scored = {"0.0002": 0.375, "0.001": 0.4375}
    assert images.tune(run, "mnist", [10])[10] == {"step-size": 2e-4, "brier": scored}
    run = run_of("fig3", tmp_path, **{"tuning-seeds": 1, "num-seeds": 5})
    assert images.tune(run, "mnist", [10])[10]["step-size"] == 1e-3


def test_chains_go_on_after_a_stop(sets, tmp_path):
    """A stop at any time loses the chains under way and no other."""
    settings = run_of("fig3", tmp_path).settings
    chains = [
        images.ImageChain("mnist", 1, 2e-4, 20, 0, seed, "test", **images.chain_settings(settings))
        for seed in range(4)
    ]
    begun = []

    def stops_at_the_third(chain, meter, stopped):
        begun.append(chain.seed)
        if len(begun) == 3:
            raise KeyboardInterrupt
        return images.score_chain(chain, meter)

    run = run_of("fig3", tmp_path / "cache")
    with pytest.raises(KeyboardInterrupt):
        images.each_chain(run, chains, "energy", work=stops_at_the_third, kind="scores")
    kept = {p: p.stat().st_mtime_ns for p in run.cache.iterdir()}
    assert 1 <= len(kept) <= 3
    resumed = images.run_chains(run, chains, "energy")
    assert {p: p.stat().st_mtime_ns for p in kept} == kept
    assert resumed == images.run_chains(run_of("fig3", tmp_path / "other"), chains, "energy")


def test_calibration_panel(sets, tmp_path):
    panel = PANELS["calibration"]
    outcome = panel.measure(run_of("calibration", tmp_path / "cache"))
    assert len(outcome.verdicts) == 4
    shares = outcome.table[outcome.table["quantity"].str.startswith("entropy bin")]
    np.testing.assert_allclose(shares.groupby(["method", "seed", "images"])["value"].sum(), 1)
    outcome.table.to_csv(tmp_path / "calibration.csv", index=False)
    redraw(panel, tmp_path, {"settings": {}, "facts": outcome.facts}, ["svg"])


def test_without_data_the_error_says_how_to_place_the_files(tmp_path, monkeypatch):
    monkeypatch.setenv("FALD_DATA", str(tmp_path))
    images._split.cache_clear()
    with pytest.raises(DataError, match="no file"):
        PANELS["fig3"].measure(run_of("fig3", tmp_path / "cache"))


@NEEDS_DATA
@pytest.mark.slow
@pytest.mark.parametrize(("name", "rounds", "least"), [("mnist", 20, 0.915), ("fashion-mnist", 40, 0.835)])
def test_softmax_regression_reaches_its_accuracy(name, rounds, least, tmp_path):
    settings = read_settings("fig3", "full")
    run = PanelRun("fig3", settings, 0, tmp_path, progress=False)
    eta = 1.6e-5 if name == "mnist" else 8e-6
    chain = images.ImageChain(name, 50, eta, rounds, 0, 0, "test", **images.chain_settings(settings))
    (found,) = images.run_chains(run, [chain], "energy")
    assert found[-1]["accuracy"] >= least
