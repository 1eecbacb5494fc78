"""The comparison of methods: its rule, its error, its command."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path

import jax.numpy as jnp
import numpy as np
import pytest
from typer.testing import CliRunner

from fald import compare, gaussian, samplers
from fald.cli.main import app
from fald.core.errors import ConfigError, FaldError, Interrupted, StorageError
from fald.lab.reference import Reference, longest_run, pooled_nuts
from helpers import federation, linear_model

MODEL = linear_model(1.5)
PROBLEM = federation((6, 8, 12, 10), spread=1.0, prior_scale=1.5)
TARGET = gaussian.target(*PROBLEM.energies)
SD = np.sqrt(np.diag(TARGET.covariance))
EXACT = Reference("exact", TARGET.mean, SD, 10**6)
PLAN = compare.ComparePlan(
    methods=("sgld", "laplace", "fedavg", "few-round"), budget_rounds=64, local_steps=2, num_chains=4
)


def draws_of(law, count=4000, seed=0):
    sample = np.random.default_rng(seed).multivariate_normal(law.mean, law.covariance, count)
    return sample.reshape(4, -1, 2)


class TestRule:
    def test_score_prefers_draws_of_the_posterior(self):
        problem = compare._Problem(MODEL, PROBLEM.data)
        sampler = samplers.sgld(step_size=0.1)
        right = problem.score(sampler, draws_of(TARGET))
        # two discrepancies of standard error about √2/√100 each
        assert right < 4 * np.sqrt(2 / compare._SCORED_DRAWS)
        wide = TARGET._replace(covariance=2 * TARGET.covariance)
        shifted = TARGET._replace(mean=TARGET.mean + 2 * SD)
        for wrong in (wide, shifted):
            assert problem.score(sampler, draws_of(wrong)) > 2 * right

    def test_point_estimates_are_scored_by_their_energy(self):
        problem = compare._Problem(MODEL, PROBLEM.data)
        method = samplers.fedavg(local_steps=1, step_size=0.1)
        at, off = (np.tile(TARGET.mean + shift, (2, 3, 1)) for shift in (0.0, 1.0))
        assert problem.score(method, at) < problem.score(method, off)

    def test_curvatures_are_those_of_the_energies(self):
        found = compare._Problem(MODEL, PROBLEM.data).curvatures
        H, _, p = PROBLEM.energies
        client = np.linalg.eigvalsh(H)[:, -1]
        joint = np.linalg.eigvalsh(np.linalg.inv(TARGET.covariance))[-1]
        np.testing.assert_allclose(found["client"], client.max(), rtol=0.02)
        np.testing.assert_allclose(found["node"], (len(p) * p * client).max(), rtol=0.02)
        np.testing.assert_allclose(found["joint"], joint, rtol=0.02)

    @pytest.mark.parametrize(
        ("settings", "match"),
        [
            ({"methods": ("sgdl",)}, "sgdl"),
            ({"methods": ()}, "no methods"),
            ({"methods": ("sgld", "sgld")}, "twice"),
            ({"budget_rounds": 3}, "budget-rounds"),
            ({"target_error": 0.0}, "target-error"),
            ({"num_chains": 1}, "num-chains"),
        ],
    )
    def test_nonsense_is_refused(self, settings, match):
        with pytest.raises(ConfigError, match=match):
            compare.ComparePlan(**settings)


@pytest.mark.slow
def test_a_comparison_finds_what_is_known(tmp_path):
    lines = []
    settings = {"folder": tmp_path, "plan": PLAN, "reference": EXACT}
    found = compare.compare(MODEL, PROBLEM.data, report=lines.append, **settings)
    exact, point = found["methods"]["laplace"], found["methods"]["fedavg"]
    # 44 rounds of 4 chains, the second half: 88 independent draws of the exact posterior
    assert exact["curve"][-1]["error"] < 4 * np.sqrt(1.5 / 88)
    assert exact["curve"][-1]["rounds"] == 20
    assert point["point_estimate"]
    assert point["curve"][-1]["sd_error"] is None
    curve = found["methods"]["sgld"]["curve"]
    assert [p["engine_rounds"] for p in curve] == compare.grid(PLAN)[1:]  # one round makes one draw
    assert np.all(np.diff([p["bytes_up"] for p in curve]) > 0)
    assert lines[-1].startswith("4 of 4")
    quick = found["methods"]["few-round"]["curve"]
    # two means to .05 sd and two sds to 5%, all at once, is what the default promises
    assert [p["rounds"] < 10 and p["error"] < 0.1 for p in quick] == [True]
    with pytest.raises(ConfigError, match="already holds"):
        compare.compare(MODEL, PROBLEM.data, **settings)
    again = compare.compare(MODEL, PROBLEM.data, resume=True, **settings)
    assert again == found  # seconds too: nothing was run again
    other = compare.ComparePlan(methods=("sgld",), budget_rounds=64)
    with pytest.raises(ConfigError, match="different: plan"):
        compare.compare(MODEL, PROBLEM.data, resume=True, **{**settings, "plan": other})
    (tmp_path / "curve-sgld.json").write_text("{")
    with pytest.raises(StorageError, match="curve-sgld"):
        compare.compare(MODEL, PROBLEM.data, resume=True, **settings)


@pytest.mark.slow
def test_an_interrupted_comparison_goes_on(tmp_path):
    def stop(line):
        if "step 0.1/L" in line:
            raise KeyboardInterrupt

    plan = compare.ComparePlan(methods=("sgld",), budget_rounds=64, num_chains=4)
    settings = {"plan": plan, "reference": EXACT}
    with pytest.raises(Interrupted):
        compare.compare(MODEL, PROBLEM.data, folder=tmp_path / "a", report=stop, **settings)
    kept = sorted(p.name for p in (tmp_path / "a").glob("pilot-*"))
    assert kept == ["pilot-sgld-0.1.json", "pilot-sgld-0.2.json", "pilot-sgld-0.5.json"]
    resumed = compare.compare(MODEL, PROBLEM.data, folder=tmp_path / "a", resume=True, **settings)
    whole = compare.compare(MODEL, PROBLEM.data, folder=tmp_path / "b", **settings)
    errors = [[p["error"] for p in found["methods"]["sgld"]["curve"]] for found in (resumed, whole)]
    assert errors[0] == errors[1]


@pytest.mark.slow
def test_a_search_for_a_target_stops_there(tmp_path):
    plan = compare.ComparePlan(methods=("laplace", "dsgld"), target_error=0.3, budget_rounds=64, num_chains=8)
    found = compare.compare(MODEL, PROBLEM.data, folder=tmp_path, plan=plan, reference=EXACT)["methods"]
    curve = found["laplace"]["curve"]
    assert found["laplace"]["reached"]
    assert curve[-1]["error"] <= 0.3 < min([1.0, *[p["error"] for p in curve[:-1]]])


@pytest.mark.slow
def test_references_agree_with_the_exact_posterior():
    few = {"num_warmup": 200, "num_draws": 500}
    nuts = pooled_nuts(MODEL, PROBLEM.data, jnp.asarray(TARGET.mean, jnp.float32), **few)
    assert nuts is not None
    run = longest_run(MODEL, PROBLEM.data, 0.05, 8000)
    for made, effective in ((nuts, 500), (run, 4 * 4000 * 0.05 / 2 * 0.5)):
        error = 4.5 / np.sqrt(effective)
        assert np.abs((made.mean - TARGET.mean) / SD).max() < error
        assert np.abs(made.sd / SD - 1).max() < error + 0.05
    # NUTS of another posterior is told from it
    other = pooled_nuts(linear_model(0.3), PROBLEM.data, jnp.zeros(2), **few)
    assert np.abs((other.mean - TARGET.mean) / SD).max() > 4.5 / np.sqrt(500)


STUDY = """
title = "Small"
[data]
files = { a = "a.csv", b = "b.csv" }
target = "y"
features = ["x"]
[model]
family = "logistic"
[sampler]
num-rounds = 10
local-steps = 2
step-size = 0.01
"""


@pytest.fixture
def study(tmp_path, monkeypatch):
    rng = np.random.default_rng(0)
    for name, count in (("a", 30), ("b", 20)):
        x = rng.normal(size=count)
        y = (rng.random(count) < 1 / (1 + np.exp(-x))).astype(int)
        lines = "\n".join(f"{a:.3f},{b}" for a, b in zip(x, y))
        (tmp_path / f"{name}.csv").write_text(f"x,y\n{lines}\n")
    (tmp_path / "study.toml").write_text(STUDY)
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.mark.slow
def test_the_command_prints_writes_and_draws(study):
    words = ["compare", "study.toml", "--methods", "fa-ld,laplace", "--budget-rounds", "64", "--chains", "4"]
    words += ["--reference", "longest"]
    done = CliRunner().invoke(app, [*words, "--json"], catch_exceptions=False)
    document = json.loads(done.stdout)
    assert set(document["methods"]) == {"fa-ld", "laplace"}
    folder = study / "comparisons" / "study"
    assert json.loads((folder / "comparison.json").read_text()) == document
    assert len(list(folder.glob("error-*.html"))) == 3
    shown = CliRunner().invoke(app, [*words, "--resume", "--quiet"], catch_exceptions=False).stdout
    assert "laplace" in shown
    assert "longest run" in shown
    for more, match in (
        (["--target-error", "0.1", "--resume"], "not both"),
        ([], "already holds"),
        (["--set", "temperature=0.5", "--resume"], "temperature"),
        (["--set", "privacy.delta=1e-5", "--resume"], "not private"),
    ):
        with pytest.raises(FaldError, match=match):
            CliRunner().invoke(app, [*words, *more], catch_exceptions=False)


def test_the_page_shows_the_stored_numbers():
    path = Path(__file__).parents[2] / "docs" / "make_comparison.py"
    spec = importlib.util.spec_from_file_location("make_comparison", path)
    assert spec is not None
    assert spec.loader is not None
    made = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(made)
    page = made.PAGE.read_text(encoding="utf-8")
    for name in made.PROBLEMS:
        document = json.loads((made.STORED / f"{name}.json").read_text())
        assert made.table(document) in page
        drawn = (made.HERE / "images" / f"comparison-{name}.svg").read_text(encoding="utf-8")
        assert drawn == made.picture(name, document)
        document["methods"]["sgld"]["curve"][-1]["mean_error"] *= 2
        assert made.table(document) not in page
    for name in samplers.METHODS:
        assert f"| `{name}` |" in page
