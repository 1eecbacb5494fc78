"""A family, a method, an accountant and an engine from a package outside fald, each one file."""

from __future__ import annotations

import importlib
import sys
from pathlib import Path

import numpy as np
import pandas as pd
import pytest

import fald
from fald.core.errors import ConfigError, PolicyError
from fald.core.registry import Registry
from fald.core.reveals import Reveals, check_upload
from fald.federation.coordinator.run import run_federated
from fald.federation.engines import ENGINES, deployment_of
from fald.federation.link import LocalLink
from fald.federation.site.policy import Enquiry, make_policy
from fald.federation.site.worker import SiteSettings, SiteWorker
from fald.langevin.registry import METHODS, reveals_of
from fald.privacy.accountants import ACCOUNTANTS
from fald.problem.families import FAMILIES
from fald.report import report_finished
from fald.study.run import run_study
from fald.study.schema import make_study

PAGE = Path(__file__).parents[2] / "docs" / "how-to" / "add-your-own.md"
REGISTRIES: tuple[Registry, ...] = (FAMILIES, METHODS, ACCOUNTANTS, ENGINES)


def blocks() -> dict[str, str]:
    """The files that the page shows, by name: each block begins with a comment that names it."""
    found = {}
    for part in PAGE.read_text().split("```")[1::2]:
        _, _, code = part.partition("\n")
        first, _, rest = code.partition("\n")
        if first.startswith("# file: "):
            found[first.removeprefix("# file: ").strip()] = rest
    return found


@pytest.fixture
def package(tmp_path, monkeypatch):
    """The package of the page on the path, as if it were installed."""
    for name, content in blocks().items():
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(content)
    monkeypatch.syspath_prepend(str(tmp_path))
    importlib.invalidate_caches()

    def forget() -> None:
        for registry in REGISTRIES:
            registry.__dict__.pop("_found", None)
        for module in [m for m in sys.modules if m.split(".")[0] == "outside"]:
            del sys.modules[module]

    forget()
    yield tmp_path
    forget()


def rows(seed: int = 0) -> fald.FederatedData:
    rng = np.random.default_rng(seed)
    clients = {}
    for name in ("a", "b", "c"):
        x = rng.normal(size=(40, 1))
        clients[name] = (x, rng.exponential(np.exp(0.3 + 0.5 * x[:, 0])))
    return fald.FederatedData.from_arrays(clients)


STUDY = {
    "data": {"target": "y", "features": ["x"]},
    "model": {"family": "outside:exponential", "options": {"shift": 0.0}},
}


def test_a_family_is_one_file(package):
    model = make_study(STUDY, "a test").build_model(["x"])
    tree = fald.fit(0, model, rows(), progress=False)
    assert tree.attrs["verdict"] == "reached"
    assert abs(float(tree["posterior"]["coefficient"].mean()) - 0.5) < 0.4
    assert "rate ratio" in str(fald.summary(tree)) or tree["posterior"]["coefficient"].attrs["ratio"]
    make_policy({"allowed-models": ["outside:exponential"]})
    with pytest.raises(ConfigError, match="no option"):
        make_study({**STUDY, "model": {"family": "outside:exponential", "options": {"shfit": 0.0}}}, "a test")


@pytest.fixture
def tables(tmp_path):
    """The rows of three sites as tables, with a study of the outside family."""
    data, files = rows(), {}
    for name, first, last in zip("abc", data.offsets[:-1], data.offsets[1:], strict=True):
        x, y = (part[first:last] for part in data.rows)
        files[name] = str(tmp_path / f"{name}.csv")
        pd.DataFrame({"x": x[:, 0], "y": y}).to_csv(files[name], index=False)
    return {**STUDY, "title": "Waiting times", "data": {**STUDY["data"], "files": files}}


@pytest.mark.slow
def test_the_family_is_planned_reported_predicted_and_run_on_a_federation(package, tables, tmp_path):
    study = make_study(tables, "a test")
    here = run_study(study, tmp_path / "here", resume=False, progress=False)
    report_finished(here)
    page = (tmp_path / "here" / "report.html").read_text()
    assert "ratio of means" in page
    assert "Waiting times" in page
    found = fald.predict(study.build_model(["x"]), here.tree, np.array([[0.0], [1.0]]))
    assert found["mean"][1] > found["mean"][0] > 0
    planned = fald.planner.plan(study.build_model(["x"]), study.read_data())
    assert planned.best.num_rounds > 1
    policy = tmp_path / "policy.toml"
    policy.write_text('allowed-models = ["outside:exponential"]')
    files = tables["data"]["files"]
    sites = {
        name: SiteWorker(
            SiteSettings(name, tmp_path / "state" / name, Path(file), policy, sites=tuple(files))
        ).handle
        for name, file in files.items()
    }
    there = run_federated(study, LocalLink(sites), tmp_path / "there")
    np.testing.assert_allclose(
        there["posterior"]["coefficient"], here.tree["posterior"]["coefficient"], atol=1e-6
    )


def test_without_the_package_there_is_no_such_family():
    with pytest.raises(ConfigError, match="no model family"):
        make_study(STUDY, "a test")


def test_a_method_is_one_file_and_says_what_leaves(package):
    settings = {"num_rounds": 30, "num_chains": 2, "progress": False}
    data = fald.FederatedData.from_arrays({n: np.ones((5, 1)) for n in "ab"})
    model = fald.models.gaussian_location([[1.0]])
    tree = fald.sample(0, model, data, method="preconditioned", step_size=0.05, **settings)
    assert np.isfinite(tree["posterior"]["location"].values).all()
    assert reveals_of("preconditioned").curvature
    asked = Enquiry(
        columns=("y",), family="linear", method="preconditioned", few_round=False, curvature=False,
        secure_sum=False, rounds=3, chains=1, rows=40, dim=2, sites=2,
    )  # fmt: skip
    make_policy({}).check(asked)
    with pytest.raises(PolicyError, match="second derivatives"):
        make_policy({"curvature": False}).check(asked)


def test_an_accountant_is_one_file(package):
    run = fald.privacy.RunSettings(
        sizes=[100] * 3, local_steps=1, num_rounds=5, step_size=1e-5, clip_norm=1.0
    )
    found = fald.privacy.account(run, delta=1e-5, method="doubled")
    tight = fald.privacy.account(run, delta=1e-5)
    assert found.worst == pytest.approx(2 * tight.worst)
    assert "twice" in fald.privacy.statement(found).text


def test_an_engine_is_one_folder(package, tmp_path):
    place = tmp_path / "trial"
    from fald.federation import commands

    commands.init(place, "north,south", "127.0.0.1", 8102, engine="folder")
    engine = deployment_of(place)
    assert engine.submit(place, {"out": "x"}) == "1"
    assert commands.status(place)["reached"]
    assert commands.stop(place) == "Stopped 1 run."
    assert engine.job_state(place, "1") == "aborted"


def test_uploads_that_were_not_declared_are_refused():
    plain, dim = Reveals(), 3
    check_upload(plain, [np.zeros((2, dim)), np.zeros(2)], [np.zeros(2)], dim)
    for arrays in (
        [np.zeros((2, dim)), np.zeros(2), np.zeros((2, dim, dim))],
        [np.zeros((2, dim, dim)), np.zeros(2)],
        [np.zeros((2, dim)), np.zeros((2, dim))],
    ):
        with pytest.raises(PolicyError):
            check_upload(plain, arrays, [], dim)
    kept = Reveals(("position", "nothing"))
    check_upload(kept, [np.ones((2, dim)), np.zeros(2)], [], dim)
    with pytest.raises(PolicyError, match="declares to keep"):
        check_upload(kept, [np.ones((2, dim)), np.ones(2)], [], dim)
    with pytest.raises(PolicyError, match="does not declare"):
        check_upload(Reveals(declared=False), [np.ones((2, dim)), np.ones(2)], [], dim)
