"""What an operator sees when something breaks: who is waited for, who is blamed, and with which exit code."""

import json
import os
import time
from types import SimpleNamespace

import numpy as np
import pytest
from test_run import SIZES, Place, difference

from fald.core.errors import ConfigError, ExitCode, FaldError, FederationError
from fald.core.files import sole_owner
from fald.federation import wire
from fald.federation.coordinator import follow
from fald.federation.coordinator import sites as coordinator_sites
from fald.federation.coordinator.run import run_federated, serve_job
from fald.federation.link import Arrival, LocalLink
from fald.federation.site import run as site_run
from fald.federation.site.ledger import SiteLedger
from fald.results.examine import examine
from fald.results.terminal import text
from fald.study import run as commands
from fald.study.schema import FederationSection


@pytest.fixture
def place(tmp_path, monkeypatch):
    monkeypatch.setattr(coordinator_sites, "_AGAIN", 0.01)
    return Place(tmp_path)


class Gone(LocalLink):
    """Site b cannot be reached so many times, and the engine says so at once."""

    def __init__(self, place, kind, times):
        super().__init__({name: place.worker(name).handle for name in SIZES})
        self.kind, self.left = kind, times

    def send(self, messages, **how):
        gone = wire.unpack(next(iter(messages.values()))).kind == self.kind and "b" in messages
        if not gone or self.left == 0:
            return super().send(messages, **how)
        self.left -= 1
        found = super().send({n: m for n, m in messages.items() if n != "b"}, **how)
        return {**found, "b": Arrival(None, 0.0, "absent")}


@pytest.mark.parametrize(("kind", "sampler"), [("ask", None), ("round", {}), ("hello", {}), ("begin", {})])
def test_a_site_that_restarts_is_waited_for(place, tmp_path, kind, sampler):
    """Its absence is known at once; that must not spend the retries in a moment."""
    study = place.study(sampler, federation={"timeout": 30.0, "retries": 0, "opening-timeout": 30.0})
    link = Gone(place, kind, 5)
    tree = run_federated(study, link, tmp_path / "out")
    assert link.left == 0
    assert difference(run_federated(study, place.link(), tmp_path / "whole"), tree) == 0


def test_a_site_that_stays_away_is_named_after_all_retries(place, tmp_path):
    study = place.study({}, federation={"timeout": 0.2, "retries": 2})
    began = time.monotonic()
    with pytest.raises(FederationError, match="no answer from 'b' in round 1"):
        run_federated(study, Gone(place, "round", 10**9), tmp_path / "out")
    assert time.monotonic() - began > 3 * 0.2
    # the defaults outlast a node that Flower turns away for a minute, and its start
    options = FederationSection()
    assert options.timeout * (1 + options.retries) >= 180


class Silent(LocalLink):
    """No site is ever reached at first; how long each question may take is kept."""

    def __init__(self, place):
        super().__init__({name: place.worker(name).handle for name in SIZES})
        self.asked = []

    def send(self, messages, **how):
        self.asked.append(how["timeout"])
        return {name: Arrival(None, 0.0, "absent") for name in messages}


def test_the_opening_takes_as_long_as_the_study_says(place, tmp_path):
    link = Silent(place)
    with pytest.raises(FederationError, match="'a'"):
        run_federated(place.study({}, federation={"opening-timeout": 0.3}), link, tmp_path / "out")
    assert link.asked
    assert 0 < max(link.asked) <= 0.3


def test_two_runs_into_one_folder_are_one(place, tmp_path, monkeypatch):
    """Also while the first begins, when there is nothing but the folder; the second is told who has it."""
    submitted = []
    engine = SimpleNamespace(submit=lambda folder, job: submitted.append(job) or "job")
    monkeypatch.setattr(follow, "deployment_of", lambda folder: engine)
    monkeypatch.setattr(follow, "_follow", lambda *a, **k: {"status": "failed", "message": "it failed"})
    study, out = place.study({}), tmp_path / "out"
    told = rf"in use by process {os.getpid()} on"
    with sole_owner(out, "follow.lock"), pytest.raises(ConfigError, match=told):
        follow.run_on(study, tmp_path, out, resume=False, progress=False)
    assert submitted == []
    with pytest.raises(FaldError, match="it failed"):  # the twin: the folder is free
        follow.run_on(study, tmp_path, out, resume=False, progress=False)
    assert len(submitted) == 1
    with sole_owner(out), pytest.raises(ConfigError, match=told):
        commands.run_study(study, out, resume=False, progress=False)


LIES = {
    "far too large": lambda a: a + 1e14,
    "no number": lambda a: a * np.nan,
    "infinite": lambda a: a + np.inf,
    "one entry less": lambda a: a[:-1] if a.ndim else a,
    "one infinity": lambda a: np.where(np.arange(a.size).reshape(a.shape) == 0, np.inf, a),
}


def lying(worker, lie):
    """A site whose numbers are changed before they leave, under masks or not."""

    def handle(content):
        kept = site_run.SiteRun._masked
        site_run.SiteRun._masked = lambda self, message, flat, digest: kept(self, message, lie(flat), digest)
        try:
            reply = wire.unpack(worker.handle(content))
        finally:
            site_run.SiteRun._masked = kept
        if wire.unpack(content).kind in ("ask", "round") and reply.kind == "reply":
            arrays = {n: lie(a) if a.dtype == np.float64 else a for n, a in reply.arrays.items()}
            return wire.pack("reply", reply.values, arrays)
        return wire.pack(reply.kind, reply.values, reply.arrays)

    return handle


@pytest.mark.parametrize("lie", LIES)
@pytest.mark.parametrize(("sampler", "secure"), [(None, True), (None, False), ({}, True), ({}, False)])
def test_the_site_that_lies_is_named_or_nobody(place, tmp_path, sampler, secure, lie):
    """Never an honest one: with a secure sum the message says that it cannot know."""
    study, liar = place.study(sampler, federation={"secure-sum": secure}), "a"
    handlers = {name: place.worker(name).handle for name in SIZES}
    link = LocalLink({**handlers, liar: lying(place.worker(liar), LIES[lie])})
    if secure and lie == "one infinity" and sampler is None:
        # of thousands of draws one has no density then: it is left out, and nobody is blamed
        tree = run_federated(study, link, tmp_path / "out")
        assert all(np.isfinite(values).all() for values in tree["posterior"].data_vars.values())
        return
    with pytest.raises(FederationError) as caught:
        run_federated(study, link, tmp_path / "out")
    if secure and lie != "one entry less":
        assert "a secure sum cannot say" in caught.value.message
        assert "site '" not in caught.value.message
    else:
        assert caught.value.message.startswith(f"site '{liar}'")
        assert not any(f"'{name}'" in caught.value.message for name in SIZES if name != liar)


def test_a_spent_budget_has_its_own_exit_code_and_a_damaged_ledger_is_said(place, tmp_path):
    policy = tmp_path / "policy.toml"
    policy.write_text("[privacy]\nmax-epsilon = 1.5\ndelta = 1e-2\n")
    sampler = {"clip-norm": 0.05, "num-chains": 1, "step-size": 1e-4, "num-rounds": 6}
    study = place.study(sampler, privacy={"delta": 1e-3, "max-epsilon": 1.0})
    job = {"study": study.as_settings(), "resume": False}
    (tmp_path / "state" / "b").mkdir(parents=True)
    SiteLedger(tmp_path / "state" / "b" / "ledger.jsonl", 1.5, 1e-2).reserve("earlier", 1.499999, 1e-3)
    assert serve_job(place.link(policy=policy), {**job, "out": str(tmp_path / "spent")}) == ExitCode.PRIVACY
    (tmp_path / "state" / "b" / "ledger.jsonl").write_text("nonsense\n")
    assert (
        serve_job(place.link(policy=policy), {**job, "out": str(tmp_path / "damaged")}) == ExitCode.FEDERATION
    )
    outcome = json.loads((tmp_path / "damaged" / "outcome.json").read_text())
    assert outcome["message"].startswith("site 'b' refuses: a file of its own, such as its privacy ledger")
    assert "nonsense" not in json.dumps(outcome)
    assert "ledger.jsonl" in (tmp_path / "state" / "b" / "site.log").read_text()


class Counting(LocalLink):
    """Counts the bytes of rounds to one site and back."""

    down = up = 0

    def send(self, messages, **how):
        found = super().send(messages, **how)
        if wire.unpack(messages["a"]).kind in ("ask", "round"):
            self.down += len(messages["a"])
            self.up += len(found["a"].content)
        return found


@pytest.mark.parametrize(("sampler", "secure"), [(None, True), (None, False), ({"num-chains": 50}, True)])
def test_bytes_are_those_that_travel(place, tmp_path, sampler, secure):
    study = place.study(sampler, federation={"secure-sum": secure})
    link = Counting({name: place.worker(name).handle for name in SIZES})
    tree = run_federated(study, link, tmp_path / "out")
    if sampler is None:
        rounds = tree["rounds"].to_dataset()
        down, up = (float(rounds[name].sum()) for name in ("bytes_down", "bytes_up"))
    else:
        down, up = (float(tree["cost"][name].sel(client="a").sum()) for name in ("bytes_down", "bytes_up"))
    # headers, weights and the energy that monitors a run are left out
    assert 0.5 * link.up < up <= link.up
    assert 0.5 * link.down < down <= link.down


@pytest.mark.parametrize("secure", [True, False])
def test_few_rows_are_exposed_only_where_nothing_hides_them(tmp_path, secure):
    place = Place(tmp_path, {"a": 2, "b": 20, "c": 12})
    study = place.study(federation={"secure-sum": secure})
    said = text(examine(run_federated(study, place.link(), tmp_path / "out")))
    assert ("Exposed: a." in said) == (not secure)
    assert ("A secure sum has hidden them" in said) == secure
