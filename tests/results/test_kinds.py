"""Kinds of results: declared where draws are made, kept in the file, and guessed nowhere."""

import json
import re
from pathlib import Path

import numpy as np
import pytest

import fald
from fald.core.errors import DataError, StorageError
from fald.report.privacy import run_document
from fald.results.examine import CHECKS, examine
from fald.results.kinds import KINDS, kind_of
from fald.study.run import run_study
from fald.study.schema import make_study

SOURCES = Path(fald.__file__).parent
SETTINGS = {"num_rounds": 40, "local_steps": 2, "step_size": 1e-3, "num_chains": 2, "progress": False}


def sites():
    rng = np.random.default_rng(0)
    return fald.FederatedData.from_arrays(
        {name: (rng.normal(size=(30, 1)), rng.integers(0, 2, 30)) for name in "ab"}
    )


def result(kind):
    model, data = fald.models.logistic_regression(["x"]), sites()
    if kind == "few-round":
        return fald.fit(0, model, data, progress=False)
    private = {"clip_norm": 1.0, "privacy": fald.privacy.Protection(delta=1e-3)}
    more = {"private chain": private, "point estimate": {"temperature": 0.0}, "chain": {}}[kind]
    return fald.sample(0, model, data, **{**SETTINGS, **more})


@pytest.fixture(scope="module")
def results():
    return {name: result(name) for name in KINDS}


@pytest.mark.parametrize("name", KINDS)
def test_a_result_says_what_it_is_and_offers_that(results, name, tmp_path):
    tree, kind = results[name], KINDS[name]
    assert tree.attrs["kind"] == name
    assert kind_of(fald.load(fald.save(tree, tmp_path / "a.nc"))) is kind
    found = examine(tree).document
    assert found["kind"] == name
    assert ("verdict" in found) == ("khat" in found) == ("rounds" in found) == kind.certified
    assert ("summary" in found) == kind.draws
    assert ("foreseen" in found) == kind.chains
    assert ("privacy_statement" in tree.attrs) == kind.private
    assert json.loads(json.dumps(found, allow_nan=False)) == found
    if kind.draws:
        assert (found["summary"][0]["r_hat"] is None) == kind.certified
        assert len(fald.predict(fald.models.logistic_regression(["x"]), tree, np.zeros((2, 1)))) == 2
    else:
        for ask in (fald.summary, fald.diagnostics.rhat):
            with pytest.raises(DataError, match="point estimate"):
                ask(tree)


@pytest.mark.parametrize("name", KINDS)
def test_a_file_of_an_earlier_version_is_recognised_when_it_is_loaded(results, name, tmp_path):
    tree = results[name].copy()
    del tree.attrs["kind"]
    assert fald.load(fald.save(tree, tmp_path / "old.nc")).attrs["kind"] == name


def test_a_kind_from_elsewhere_is_refused(results, tmp_path):
    tree = results["chain"].copy()
    tree.attrs["kind"] = "oracle"
    with pytest.raises(StorageError, match="'oracle'"):
        fald.load(fald.save(tree, tmp_path / "new.nc"))


def test_every_check_is_declared_by_a_kind_and_every_declared_check_exists():
    declared = {key for kind in KINDS.values() for key in kind.checks}
    assert declared == set(CHECKS)


GUESSES = (
    r'"rounds" (not )?in ', r'"precision" in (tree|result)', r'"verdict" (not )?in ', r"\bis_fit\b",
    r'attrs(\[|\.get\()"point_estimate"', r'"privacy(_statement)?" (not )?in ', r'run\["point_estimate"\]',
)  # fmt: skip


def test_nothing_guesses_what_a_result_is():
    found = {
        (path.name, line.strip())
        for path in [*SOURCES.rglob("*.py"), *SOURCES.rglob("templates/*")]
        for line in path.read_text(encoding="utf-8").splitlines()
        if any(re.search(guess, line) for guess in GUESSES)
    }
    # the one place, for files of earlier versions
    assert {name for name, _ in found} == {"kinds.py"}
    assert len(found) == 3


def test_the_privacy_of_a_chain_that_fit_has_chosen_is_that_of_a_chain(tmp_path):
    rng = np.random.default_rng(0)
    for name in "ab":
        rows = [f"{x},{int(rng.random() < 0.5)}" for x in rng.normal(size=40)]
        (tmp_path / f"{name}.csv").write_text("\n".join(["x,y", *rows]))
    about = {
        "data": {"files": {"a": "a.csv", "b": "b.csv"}, "target": "y", "features": ["x"]},
        "model": {"family": "logistic"},
        "folder": str(tmp_path),
    }
    said = {}
    for method in ("fa-ld", "importance"):
        fit = {"method": method, "accuracy": 0.5}
        study = make_study({**about, "fit": fit}, "a study")
        run_study(study, tmp_path / method, resume=False, progress=False)
        said[method] = run_document(tmp_path / method)["text"]
    assert "sums" not in said["fa-ld"]
    assert "client noise came from the run's seed" in said["fa-ld"]
    assert "sums over rows without noise" in said["importance"]
