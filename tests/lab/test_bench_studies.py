"""The studies that methods are judged by, and references that refuse what is not known."""

import json
import sys
from dataclasses import replace

import jax
import numpy as np
import pytest
from benchmarks.rounds import __main__ as command
from benchmarks.rounds import measure, report, studies
from benchmarks.rounds.errors import errors
from benchmarks.rounds.references import (
    Settings,
    UntrustedReferenceError,
    fingerprint,
    log_density,
    mcse_of_sd,
    mode,
    reference,
    summarise,
)
from benchmarks.rounds.study import KINDS

from fald.core.errors import ConfigError, DiagnosticsError, ExitCode, Interrupted
from fald.problem.models import logistic_regression


@pytest.mark.parametrize(
    ("name", "dim", "sites", "rows"),
    [("medpar", 6, 54, 1495), ("granulomatous", 10, 13, 203), ("two-modes-far", 2, 4, 4)],
)
def test_a_study_has_the_stated_shape_and_a_finite_energy_at_its_start(name, dim, sites, rows):
    study = studies.load(name)
    assert (study.dim, study.sites, study.data.num_rows) == (dim, sites, rows)
    assert study.note
    assert study.expects == ("not-reached" if study.kind == "adversarial" else "reached")
    with jax.enable_x64(True):
        start = study.model.flat_initial_position
        value, gradient = jax.jit(jax.value_and_grad(log_density(study)))(start)
    assert gradient.shape == (dim,)
    assert np.isfinite(value)
    assert np.all(np.isfinite(gradient))


def test_names_by_kind_and_holdout():
    kinds = [set(studies.names(kind)) for kind in KINDS]
    assert set.union(*kinds) == set(studies.names())
    assert sum(map(len, kinds)) == len(studies.names())
    held_out = set(studies.names(holdout=True))
    assert held_out < kinds[0]
    assert held_out.isdisjoint(studies.names(holdout=False))


def test_an_unknown_study_is_refused_with_the_nearest_name():
    with pytest.raises(ConfigError) as caught:
        studies.load("medpra")
    assert "medpar" in caught.value.hint


def test_the_mode_of_a_gaussian_posterior_is_exact():
    study = studies.load("gaussian-exact")
    covariance = np.array([[2.0, 0.9, 0.0], [0.9, 1.0, -0.3], [0.0, -0.3, 0.5]])
    (rows,) = jax.tree.leaves(study.data.rows)
    exact = np.linalg.inv(len(rows) * np.linalg.inv(covariance) + np.eye(3) / 100)
    with jax.enable_x64(True):
        center, spread = mode(log_density(study), study.model.flat_initial_position)
    sd = np.sqrt(np.diag(exact))
    mean = exact @ np.linalg.inv(covariance) @ rows.sum(0)
    # steps stop when the next one would be shorter than √1e-9 posterior sd
    np.testing.assert_allclose((center - mean) / sd, 0, atol=4e-5)
    np.testing.assert_allclose((spread - exact) / np.outer(sd, sd), 0, atol=1e-10)


def test_an_improper_posterior_has_no_reference(tmp_path):
    with pytest.raises(UntrustedReferenceError, match="no posterior"):
        reference("improper-constant", tmp_path)
    assert not list(tmp_path.iterdir())


def test_the_fingerprint_follows_model_and_rows():
    study = studies.load("single-rows")
    marks = {
        fingerprint(study),
        fingerprint(replace(study, model=logistic_regression(2, prior_scale=2.6))),
        fingerprint(replace(study, data=studies.load("separable-wide").data)),
    }
    assert len(marks) == 3
    assert fingerprint(studies.load("single-rows")) == fingerprint(study)


def chains(shift: float = 0.0) -> np.ndarray:
    draws = np.random.default_rng(3).standard_normal((8, 3000, 2))
    draws[0] += shift
    return draws


def test_a_reference_is_trusted_unless_chains_disagree_or_are_short():
    assert summarise(chains(), 0, Settings()).trusted("x").draws.shape == (4000, 2)
    with pytest.raises(UntrustedReferenceError, match="R-hat"):
        summarise(chains(shift=1.0), 0, Settings()).trusted("x")
    with pytest.raises(UntrustedReferenceError, match="Monte-Carlo"):
        summarise(chains()[:, :300], 0, Settings()).trusted("x")


def test_the_error_of_an_sd_counts_how_slowly_squares_mix():
    # x_t = −φ x_{t−1} + noise: draws alternate and means cancel, but squares are correlated by φ^{2t}
    phi, shape = 0.6, (32, 4000)
    noise = np.random.default_rng(4).standard_normal(shape)
    draws = np.empty(shape)
    draws[:, 0] = noise[:, 0]
    for t in range(1, shape[1]):
        draws[:, t] = -phi * draws[:, t - 1] + np.sqrt(1 - phi**2) * noise[:, t]
    exact = np.sqrt((1 + phi**2) / (1 - phi**2) / (2 * draws.size))
    axes = {"chain_axis": 0, "draw_axis": 1}
    assert mcse_of_sd(draws, **axes) == pytest.approx(exact, rel=0.1)
    ignoring_order = float(np.std((draws - draws.mean()) ** 2) / np.sqrt(draws.size) / 2)
    assert ignoring_order != pytest.approx(exact, rel=0.1)


def test_errors_are_in_units_of_the_posterior_sd():
    known = summarise(chains(), 0, Settings())
    sample = known.mean + known.sd * [1.0, 1.1] * np.array([[-1.0, -1.0], [1.0, 1.0]]) / np.sqrt(2)
    of_mean, of_sd = errors(sample + known.sd * [0.0, -0.3], known)
    assert of_mean == pytest.approx(0.3)
    assert of_sd == pytest.approx(0.1)


def test_the_table_counts_verdicts_and_false_ones_are_found():
    row = {
        "study": "a",
        "method": "auto",
        "dim": 2,
        "sites": 3,
        "rows": 10,
        "holdout": False,
        "expects": "reached",
    }
    good = {**row, "seed": 0, "verdict": "reached", "rounds": 3, "mean_error": 0.02, "sd_error": 0.03}
    good["by_round"] = [[0.5, 0.4], [0.1, 0.1], [0.02, 0.03]]
    worse = {**good, "seed": 1, "rounds": 5, "mean_error": 0.06}
    refused = {
        **row,
        "study": "b",
        "seed": 0,
        "verdict": "not reached",
        "rounds": 9,
        "expects": "not-reached",
    }
    text = report.table([good, worse, refused])
    assert "| a | 2 | 3 | 10 | 0.500 / 0.400 | – | – | reached, 3–5, 0.060 / 0.030 |" in text
    assert "not reached, 9" in text
    assert report.false_verdicts([good, worse, refused]) == [worse]
    assert report.false_verdicts([{**refused, "verdict": "reached"}])


@pytest.mark.parametrize(
    "error", [Interrupted("interrupted after round 2"), DiagnosticsError("no posterior")]
)
def test_a_run_that_was_stopped_is_measured_again(error, tmp_path, monkeypatch, capsys):
    def fit(*_, **__):
        raise error

    monkeypatch.setattr(measure.fald, "fit", fit)
    words = ["rounds", "two-modes-far", "--out", str(tmp_path), "--methods", "auto", "--seeds", "1"]
    monkeypatch.setattr(sys, "argv", words)
    code = command.main()
    stopped = isinstance(error, Interrupted)
    assert code == (ExitCode.INTERRUPTED if stopped else ExitCode.OK)
    assert ("stopped" in capsys.readouterr().err) == stopped
    # the twin: an error of the method is a result, and is not measured again
    stored = tmp_path / "runs.jsonl"
    rows = [json.loads(line) for line in stored.read_text().splitlines()] if stored.exists() else []
    assert [row["verdict"] for row in rows] == ([] if stopped else ["error: no posterior"])
