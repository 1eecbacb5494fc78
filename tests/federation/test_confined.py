"""Models that fald did not write, at a site: what is never imported, and what ends in a refusal."""

from __future__ import annotations

import importlib
import json
import re
import shutil
import sys

import numpy as np
import pandas as pd
import pytest

from fald.core.errors import ConfigError, FederationError, PolicyError
from fald.core.version import __version__
from fald.federation import wire
from fald.federation.coordinator import sites
from fald.federation.coordinator.run import run_federated
from fald.federation.link import LocalLink
from fald.federation.site.worker import SiteSettings, SiteWorker
from fald.problem.families import FAMILIES, options_of, versions
from fald.study.schema import make_study

MODELS = """
import os, time
import jax, jax.numpy as jnp, numpy as np
import fald
from fald.core.errors import FederationError

def made(of_row=lambda p, x, y: -0.5 * (y - p["a"] - x @ p["b"]) ** 2, start=None, **others):
    start = {"a": jnp.array(0.0), "b": jnp.zeros(2)} if start is None else start
    return fald.Model(lambda p: -0.5 * (p["a"] ** 2 + jnp.sum(p["b"] ** 2)),
                      lambda p, row: of_row(p, *row), start, **others)

def fine(features): return made()
def quoting(features):
    def check(data): raise FederationError(f"the first outcome is {data.rows[1][0]}")
    return made(check_fn=check)
def raising(features):
    def of_row(p, x, y): raise FederationError("a secret of the rows")
    return made(of_row)
def importing(features): raise ImportError("no such thing")
def endless(a): return jax.lax.while_loop(lambda s: s < 3, lambda s: s * 0.5, jax.lax.stop_gradient(a))
def looping(features): return made(lambda p, x, y: endless(p["a"]) + p["a"])
def later(features): return made(lambda p, x, y: endless(4.0 - p["b"][0]) + p["a"])  # where b is 2
def spinning(features):
    while True: pass
def nan(features): return made(lambda p, x, y: jnp.nan * p["a"])
def huge(features): return made(lambda p, x, y: 1e20 * p["a"] + 1e20)
def shapes(features): return made(lambda p, x, y: x * p["a"])
def many(features): return made(lambda p, x, y: p["a"] * jnp.ones(10**12))
def greedy(features): return made(start={"a": jnp.array(0.0), "b": jnp.asarray(np.ones(10**12))})
def leaving(features): os._exit(3)
def exiting(features): raise SystemExit(0)
def printing(features):
    while True: print("x" * 10**5)
def forking(features):
    if not os.fork():
        time.sleep(600)
    return spinning(features)
def no_model(features): return "a string"
"""
POINTS = "[fald.models]\n" + "".join(
    f"{line.split('(')[0].removeprefix('def ')} = mischief:{line.split('(')[0].removeprefix('def ')}\n"
    for line in MODELS.splitlines()
    if line.startswith("def ") and "(features)" in line
)
ALLOWED = [f"mischief:{line.partition(' =')[0]}" for line in POINTS.splitlines()[1:]]
HOSTILE = [
    "os:system", "subprocess:run", "builtins:eval", "os.path:join", "mischief:os.system",
    "mischief:__import__", "mischief:made", "mischief:fine.__globals__", "__main__:fine", ":", "mischief:",
    ":fine", "a:b:c", "../mischief:fine", "mischief :fine", "mischief:fine\n",
    "fald.problem.families.mlp:mlp_classifier",
]  # fmt: skip


@pytest.fixture(scope="module")
def package(tmp_path_factory):
    """A package of models on the path, as if it were installed."""
    folder = tmp_path_factory.mktemp("installed")
    (folder / "mischief.py").write_text(MODELS)
    about = folder / "mischief-1.0.dist-info"
    about.mkdir()
    (about / "METADATA").write_text("Metadata-Version: 2.1\nName: mischief\nVersion: 1.0\n")
    (about / "entry_points.txt").write_text(POINTS)
    sys.path.insert(0, str(folder))
    importlib.invalidate_caches()
    FAMILIES.__dict__.pop("_found", None)
    yield folder
    sys.path.remove(str(folder))
    FAMILIES.__dict__.pop("_found", None)
    sys.modules.pop("mischief", None)


def study(family):
    return {"data": {"target": "y", "features": ["u", "v"]}, "model": {"family": family}}


@pytest.mark.parametrize("name", HOSTILE)
def test_what_is_no_registered_entry_point_is_never_imported(name, package, monkeypatch):
    before = set(sys.modules)
    monkeypatch.setattr(importlib.metadata.EntryPoint, "load", lambda self: pytest.fail(f"loads {self}"))
    with pytest.raises(ConfigError, match="no model family"):
        FAMILIES[name]
    with pytest.raises(ConfigError, match="no model family"):
        make_study(study(name), "a test")
    assert "without a model" in versions(name)
    assert set(sys.modules) == before


def test_a_package_that_is_installed_anew_is_seen_by_processes_that_run(tmp_path, monkeypatch):
    """A SuperNode outlives many versions of a model."""
    monkeypatch.syspath_prepend(tmp_path)
    FAMILIES.refresh()
    assert versions("later:model").endswith("without a model later:model")
    for version in ("1.0", "2.0"):
        for old in tmp_path.glob("*.dist-info"):
            shutil.rmtree(old)
        about = tmp_path / f"later-{version}.dist-info"
        about.mkdir()
        (about / "METADATA").write_text(f"Metadata-Version: 2.1\nName: later\nVersion: {version}\n")
        (about / "entry_points.txt").write_text("[fald.models]\nmodel = later:model\n")
        importlib.invalidate_caches()
        assert versions("later:model").endswith(f"with later {version}")
    FAMILIES.refresh()


@pytest.mark.parametrize("mistake", ["raise SystemExit(0)", "1 / 0", "import no_such_package"])
def test_a_package_that_cannot_be_imported_is_named(mistake, tmp_path, monkeypatch):
    """One that ends Python with its own exit code would otherwise let a command end as if all were well."""
    monkeypatch.syspath_prepend(tmp_path)
    (tmp_path / "leaver.py").write_text(mistake)
    about = tmp_path / "leaver-1.0.dist-info"
    about.mkdir()
    (about / "METADATA").write_text("Metadata-Version: 2.1\nName: leaver\nVersion: 1.0\n")
    (about / "entry_points.txt").write_text("[fald.models]\nmodel = leaver:model\n")
    FAMILIES.refresh()
    with pytest.raises(ConfigError, match="the model family 'leaver:model' cannot be loaded"):
        FAMILIES["leaver:model"]
    FAMILIES.refresh()


def test_registered_models_are_named_by_their_package(package):
    assert "mischief:fine" in FAMILIES
    assert "fine" not in FAMILIES
    assert versions("mischief:fine").endswith("with mischief 1.0")
    assert options_of("mischief:fine") == {}
    assert make_study(study("mischief:fine"), "a test").build_model(["u", "v"]).origin == "mischief 1.0"
    for family, said in {"mischief:no_model": "makes no fald.Model"}.items():
        with pytest.raises(ConfigError, match=said):
            make_study(study(family), "a test").build_model(["u", "v"])


class Place:
    """A site, spoken to by hand."""

    def __init__(self, folder, policy, name="a"):
        rng = np.random.default_rng(0)
        folder.mkdir()
        rows = pd.DataFrame(rng.normal(size=(20, 2)), columns=["u", "v"])
        self.rows = rows.assign(y=rng.normal(size=20) + 77.125)
        self.rows.to_csv(folder / "rows.csv", index=False)
        path = None
        if policy:
            path = folder / "policy.toml"
            path.write_text(policy)
        self.state, self.session = folder / "state", 0
        self.settings = SiteSettings(name, self.state, folder / "rows.csv", path)
        self.worker = SiteWorker(self.settings)

    def limit(self, seconds):
        """Change the time that a request may take."""
        path = self.settings.policy
        path.write_text(re.sub("max-seconds = .*", f"max-seconds = {seconds}", path.read_text()))
        self.worker._confined.stop()
        self.worker = SiteWorker(self.settings)

    def open(self, family, version=None, run=0):
        self.session += 1
        self.ids = {"run": f"{run:016x}", "session": f"{self.session:016x}"}
        values = {"version": version or versions(family), "study": study(family), "secure": False}
        return self.say("open", {**values, "names": ["a", "b"]})

    def say(self, kind, values, arrays=None):
        return wire.unpack(self.worker.handle(wire.pack(kind, {**self.ids, **values}, arrays)))

    def begin(self):
        names = {"names": ["a", "b"], "sizes": [20, 5], "hellos": None}
        return self.say("begin", {**names, "identities": {"a": "", "b": ""}})

    def ask(self, attempt, b):
        """The log likelihood at a = 0 and both b the same."""
        return self.say("ask", {"round": 1, "attempt": attempt}, {"points": np.array([[0.0, b, b]])})

    @property
    def log(self):
        return (self.state / "site.log").read_text()


def refusal(reply):
    assert reply.kind == "refusal", reply.kind
    return reply.values["message"]


def test_a_site_names_what_it_refuses_and_imports_nothing(package, tmp_path, monkeypatch):
    def never(self):
        raise AssertionError(f"loads {self}")

    monkeypatch.setattr(importlib.metadata.EntryPoint, "load", never)
    silent = Place(tmp_path / "silent", None)
    for family in ("mischief:fine", "os:system"):
        assert f"the model '{family}' (allowed-models)" in refusal(silent.open(family))
        assert "allowed-models" in silent.log
    listed = Place(tmp_path / "listed", f"allowed-models = {json.dumps([*ALLOWED, 'gone:model'])}")
    said = refusal(listed.open("mischief:fine", "0.1.0 with mischief 1.1"))
    assert said == "it has fald 0.1.0 with mischief 1.0, the coordinator 0.1.0 with mischief 1.1"
    assert said in listed.log
    said = refusal(listed.open("gone:model", "0.1.0 with gone 2.0"))
    assert said == "it has fald 0.1.0 without a model gone:model, the coordinator 0.1.0 with gone 2.0"
    assert "the model 'logistic'" in refusal(listed.open("logistic"))
    assert listed.worker._confined._process is None


def test_refusals_reach_the_coordinator_with_both_versions(package, tmp_path, monkeypatch):
    """What runs at a site is not looked at: both sites refuse before."""
    asked = make_study(study("mischief:fine"), "a test")
    silent = {name: Place(tmp_path / name, None, name).worker.handle for name in "ab"}
    with pytest.raises(PolicyError, match=r"site 'a' refuses: .*'mischief:fine' \(allowed-models\)"):
        run_federated(asked, LocalLink(silent), tmp_path / "out")
    policy = f"allowed-models = {json.dumps(ALLOWED)}"
    listed = {name: Place(tmp_path / f"listed {name}", policy, name).worker.handle for name in "ab"}
    monkeypatch.setattr(sites, "versions", lambda family: f"{__version__} with mischief 1.1")
    both = f"it has fald {__version__} with mischief 1.0, the coordinator {__version__} with mischief 1.1"
    with pytest.raises(FederationError, match=f"site 'a' refuses: {both}"):
        run_federated(asked, LocalLink(listed), tmp_path / "out2")


@pytest.mark.slow
def test_a_private_run_clips_rows_and_says_whose_model_it_is(package, tmp_path):
    tree = study("mischief:fine")
    tree["sampler"] = {
        "num-rounds": 4, "local-steps": 2, "step-size": 1e-6, "num-chains": 1, "batch-size": 5,
        "clip-norm": 1.0,
    }  # fmt: skip
    asked = make_study({**tree, "privacy": {"delta": 1e-5}}, "a test")
    policy = f"allowed-models = {json.dumps(ALLOWED)}\nmax-seconds = 600\nunsummed = true"
    places = {name: Place(tmp_path / name, policy, name) for name in "ab"}
    found = run_federated(asked, LocalLink({n: p.worker.handle for n, p in places.items()}), tmp_path / "out")
    said = found.attrs["privacy_statement"]
    assert "clipped to norm 1" in said
    assert "the model, which comes from mischief 1.0 and not from fald" in said
    moved = np.abs(found["posterior"]["b"].values).max()
    # 8 steps of 1e-6 with noise; unclipped, rows of gradient 77 would add 40·77·8e-6
    assert 0 < moved < 0.02


@pytest.mark.slow
def test_whatever_a_model_does_ends_in_a_refusal_and_the_site_stays_up(package, tmp_path):
    limits = (
        "max-seconds = 600\nmax-megabytes = 1500\nmax-failed-opens = 100\nunsummed = true\naudit = false\n"
    )
    site = Place(tmp_path / "site", f"allowed-models = {json.dumps(ALLOWED)}\n{limits}")
    unsaid = "its rows or settings do not fit the study, or cannot be evaluated"
    words = {
        "raising": "a secret of the rows", "quoting": "the first outcome is", "importing": "no such thing",
        "nan": "not finite, or beyond 1e12", "huge": "not finite, or beyond 1e12",
        "shapes": "must return one number", "many": "must return one number", "greedy": "",
        "no_model": "makes no fald.Model",
    }  # fmt: skip
    for name, logged in words.items():
        assert refusal(site.open(f"mischief:{name}")) == unsaid, name
        assert logged in site.log, name
    assert "77." not in refusal(site.open("mischief:quoting"))
    for name in ("leaving", "exiting"):
        assert "has ended: its code ended it" in refusal(site.open(f"mischief:{name}"))
    assert site.open("mischief:later", run=1).values["rows"] == 20
    assert site.begin().kind == "reply"
    site.limit(2)
    said = refusal(site.ask(1, 2.0))
    assert said == "the model 'mischief:later' takes more than 2 s for a request (max-seconds)"
    assert site.worker._confined._process is None
    assert refusal(site.ask(2, 2.0)) == said  # asked again in the same session it says so at once
    assert site.worker._confined._process is None
    for name in ("spinning", "looping", "printing", "forking"):  # the last has the site's locks twice
        said = refusal(site.open(f"mischief:{name}"))
        assert said == f"the model 'mischief:{name}' takes more than 2 s for a request (max-seconds)"
        assert said in site.log
    assert len(site.log) < 1_500_000

    site.limit(600)
    assert site.open("mischief:later", run=1).values["rows"] == 20
    assert site.begin().kind == "reply"
    assert site.ask(1, 0.0).kind == "reply"  # the twin

    assert site.open("mischief:fine", run=2).values["rows"] == 20
    assert site.begin().kind == "reply"
    found = site.ask(1, 0.5)
    x, y = site.rows[["u", "v"]].to_numpy(), site.rows["y"].to_numpy()
    expected = -0.5 * np.sum((y - 0.5 * x.sum(axis=1)) ** 2)
    np.testing.assert_allclose(found.arrays["point_values"], expected, rtol=0, atol=2**-12)
    process = site.worker._confined._process
    process.kill()  # the next message starts another, which reads on where this one was
    process.wait()
    assert site.ask(1, 0.5).arrays["point_values"] == found.arrays["point_values"]
    assert site.say("end", {}).kind == "reply"
    assert site.worker._confined._process is None
