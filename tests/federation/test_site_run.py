"""A run at a site: whose noise it uses, whose keys it trusts, what it keeps and forgets."""

import json
from dataclasses import replace

import numpy as np
import pytest
from test_site_attacks import FEW_ROUND, IDS, NAMES, PRIVATE, START, STUDY, Coordinator, Steps

from fald.federation import wire
from fald.federation.site import run as site_run
from fald.federation.site import worker as site_worker
from fald.federation.site.langevin import LangevinSite, Task
from fald.federation.site.worker import SiteWorker
from fald.study.schema import make_study


@pytest.fixture
def prepared(monkeypatch):
    """What the local steps of site "a" would be made of."""
    made = []

    def record(*given):
        made.append(given)
        return Steps()

    monkeypatch.setattr(site_run, "LangevinSite", record)
    return made


@pytest.mark.parametrize(
    ("study", "secret"),
    [
        (STUDY, False),
        (PRIVATE, True),
        ({**PRIVATE, "privacy": {"delta": 1e-5, "client-noise": "entropy"}}, True),
    ],
    ids=["plain", "private", "entropy"],
)
def test_noise_of_a_private_run_is_a_secret_of_the_site(tmp_path, prepared, study, secret):
    coordinator = Coordinator(tmp_path, secure=False)
    coordinator.begin(coordinator.open(study))
    coordinator.round()
    roots = [given[6] for given in prepared]
    assert len(roots) == 3
    for public, own in roots:
        assert public.tolist() == [0, 0]  # as the coordinator said
        assert (own.tolist() != public.tolist()) == secret
    # no two sites, and no two sessions, share it
    assert len({tuple(own.tolist()) for _, own in roots}) == (3 if secret else 1)
    _, method, scheme, data, place, sizes, _, start, _ = prepared[1]
    assert method.shares_energy == (not secret)
    assert (scheme, data.num_rows, place, sizes) == ("full", 30, 1, [20, 30, 50])
    np.testing.assert_array_equal(start, START)
    about = json.loads((tmp_path / "a" / "state" / "runs" / IDS["run"] / "session.json").read_text())
    coordinator.open(study)
    later = json.loads((tmp_path / "a" / "state" / "runs" / IDS["run"] / "session.json").read_text())
    assert about["secret"] != later["secret"]


def test_keys_of_sites_are_those_of_the_file_or_those_seen_first(tmp_path):
    coordinator = Coordinator(tmp_path, secure=False)
    worker = coordinator.workers["a"]
    assert worker._pins({"a": "1", "b": "2"}) == {"a": "1", "b": "2"}
    assert worker._pins({"a": "1", "b": "another"}) == {"a": "1", "b": "2"}
    written = tmp_path / "pins.json"
    written.write_text('{"a": "7"}')
    own = SiteWorker(replace(worker.settings, pins=written))
    assert own._pins({"a": "1"}) == {"a": "7"}
    assert json.loads((tmp_path / "a" / "state" / "pins.json").read_text()) == {"a": "1", "b": "2"}


def test_with_a_secure_sum_only_masked_numbers_leave(tmp_path, monkeypatch):
    coordinator = Coordinator(tmp_path)
    monkeypatch.setattr(site_run.SiteRun, "_prepare", lambda self: Steps())
    coordinator.begin(coordinator.open())
    for reply in coordinator.round().values():
        assert set(reply.arrays) == {"masked"}
        assert reply.arrays["masked"].dtype == np.uint64
    (tmp_path / "few").mkdir()
    other = Coordinator(tmp_path / "few")
    other.begin(other.open(FEW_ROUND))
    monkeypatch.setattr(site_run, "answer", lambda rows, request: {"point_values": np.ones(2)})
    for name in NAMES:
        reply = other.say(name, "ask", {"round": 1, "attempt": 1}, {"points": np.zeros((2, 3))})
        assert set(reply.arrays) == {"masked", "shape_point_values"}
        assert reply.arrays["shape_point_values"].tolist() == [2]
    # the keys that were pinned in the first run are those of this one
    assert json.loads((tmp_path / "few" / "b" / "state" / "pins.json").read_text()) == {
        name: worker.identity.public for name, worker in other.workers.items()
    }


def test_what_a_site_keeps_is_for_its_owner_and_goes_with_the_end(tmp_path, monkeypatch):
    coordinator = Coordinator(tmp_path)
    monkeypatch.setattr(site_run.SiteRun, "_prepare", lambda self: Steps())
    coordinator.begin(coordinator.open())
    first = coordinator.round()
    state = tmp_path / "a" / "state"
    folder = state / "runs" / IDS["run"]
    for kept in (folder / "session.json", state / "identity.pem"):
        assert kept.stat().st_mode & 0o777 == 0o600
    assert folder.stat().st_mode & 0o777 == 0o700
    # another process goes on with the same masks
    coordinator.workers["a"] = SiteWorker(coordinator.workers["a"].settings)
    again = coordinator.round()
    assert again["a"].arrays["masked"].tolist() == first["a"].arrays["masked"].tolist()
    second = coordinator.round(number=2)
    assert np.any(second["a"].arrays["masked"] != first["a"].arrays["masked"])
    assert coordinator.say("a", "end").kind == "reply"
    assert sorted(path.name for path in folder.iterdir()) == ["run.json"]
    refused = coordinator.round(number=3)["a"]
    assert "knows no such run" in refused.values["message"]


def memory_of(folder, start=0.0):
    """A site whose method keeps two arrays between rounds."""
    site = object.__new__(LangevinSite)
    site._folder, site._memory = folder, None
    site._start = {"h": np.full((2, 3), start), "n": np.zeros(2, np.int32)}
    return site


def test_memory_is_that_before_the_round_whoever_asks_again(tmp_path):
    site = memory_of(tmp_path)

    def task(number, saved=0):
        return Task(number, np.ones(2), [], saved)

    def kept(value):
        return {"h": np.full((2, 3), float(value)), "n": np.full(2, value, np.int32)}

    assert float(site._recall(task(0))["h"][0, 0]) == 0.0
    for number in range(4):
        site._keep(task(number), kept(number + 1))
        assert int(site._recall(task(number + 1))["n"][0]) == number + 1
    assert site._saved() == [1, 2, 3, 4]
    # a round that is asked again, here and in another process, begins with what was known before it
    for asked in (site, memory_of(tmp_path)):
        for number, value in ((4, 4), (3, 3), (1, 1), (0, 0), (9, 4)):
            found = asked._recall(task(number))
            assert (float(found["h"][1, 2]), int(found["n"][1])) == (value, value), number
    # what the coordinator has saved makes earlier memory needless, and what came after void
    again = memory_of(tmp_path)
    again._keep(task(2, saved=2), kept(30))
    assert again._saved() == [2, 3]
    assert int(again._recall(task(3))["n"][0]) == 30
    again._keep(task(3, saved=0), kept(40))
    assert again._saved() == [2, 3, 4]
    empty = memory_of(tmp_path / "none")
    empty._start = ()
    (tmp_path / "none").mkdir()
    empty._keep(task(0), ())
    assert empty._saved() == []
    assert empty._recall(task(1)) == ()


def test_what_a_study_asks_of_a_site():
    study = make_study({**PRIVATE, "privacy": {"delta": 1e-6, "max-epsilon": 0.7}}, "study.toml")
    found = site_worker._proposal(study, True, 17, 3)
    assert (found.epsilon, found.delta, found.private) == (0.7, 1e-6, True)
    assert (found.rows, found.dim, found.chains, found.rounds) == (17, 3, 2, 10)
    assert (found.columns, found.family, found.method) == (("y", "u", "v"), "logistic", "fa-ld")
    assert (found.few_round, found.secure_sum, found.sums, found.declared) == (False, True, True, True)
    plain = site_worker._proposal(make_study(STUDY, "study.toml"), False, 17, 3)
    assert (plain.epsilon, plain.delta, plain.private, plain.secure_sum) == (None, None, False, False)


def test_refusals_name_no_value_of_the_rows(tmp_path, monkeypatch):
    coordinator = Coordinator(tmp_path, secure=False)
    for error, told in ((ValueError("row 17 is 3.25"), "an internal error (ValueError)"),
                        (site_worker.FaldError("row 17 is 3.25"), "do not fit (FaldError)"),
                        (site_worker.PolicyError("curvature"), "curvature")):  # fmt: skip

        def fails(message, error=error):
            raise error

        monkeypatch.setattr(coordinator.workers["a"], "_hello", fails)
        reply = coordinator.say("a", "hello")
        assert reply.kind == "refusal"
        assert told in reply.values["message"]
        assert "3.25" not in json.dumps(reply.values)
        assert not reply.arrays
    log = (tmp_path / "a" / "state" / "site.log").read_text()
    assert "row 17 is 3.25" in log  # which stays at the site
    assert wire.unpack(coordinator.workers["a"].handle(b"nonsense")).kind == "refusal"
