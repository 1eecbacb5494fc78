"""A run at a site part by part: the order of rounds, what is asked and passed on, and what leaves."""

import hmac
import json
import os
from types import SimpleNamespace

import numpy as np
import pytest

from fald.core.errors import FederationError, PolicyError, SecureSumError
from fald.core.reveals import Reveals
from fald.core.types import float_dtype
from fald.federation import wire
from fald.federation.secure import shares
from fald.federation.secure.fixed_point import decode, encode, total
from fald.federation.secure.session import Identity, Session
from fald.federation.site import run as site_run
from fald.federation.site.answers import Answers, Kept, Last
from fald.federation.site.audit import public_root
from fald.federation.site.policy import make_policy
from fald.federation.site.run import Frozen, Owner, RowsError, SiteRun, about_rows, study_digest
from fald.langevin.method import Upload
from fald.langevin.registry import reveals_of
from fald.study.schema import make_study

NAMES, SIZES = ["a", "b", "c"], [20, 30, 50]
IDS = {"run": "0" * 16, "session": "1" * 16}
CHAINS, DIM = 2, 3
SHARES = np.tile(np.array(SIZES) / 100, (CHAINS, 1))


class Masks:
    """In place of a session of the secure sum: it remembers what it was asked to mask."""

    def __init__(self):
        self.asked, self.exported = [], 0

    def mask(self, values, **given):
        self.asked.append((np.array(values), given))
        return np.zeros((2, len(values) + 1), np.uint64)

    def export(self):
        self.exported += 1
        return {"exported": self.exported}


def sampler(**changes):
    return SimpleNamespace(
        **{"num_chains": CHAINS, "num_rounds": 9, "seed": 3, "participation": "full", **changes}
    )


def run_of(folder, *, secure=False, policy=None, **changes):
    """Site "b" of three, without anything that a test does not give it."""
    run = object.__new__(SiteRun)
    run.site = Owner("b", folder, None, make_policy(policy or {}))
    run.folder, run.about, run.model = folder, dict(IDS), SimpleNamespace(dim=DIM)
    run.frozen = Frozen("study", NAMES, secure, SIZES, "rows", "07" * 32)
    drawn = sampler()
    run.study = SimpleNamespace(sampler=drawn, privacy=None, require_any_sampler=lambda: drawn)
    run.answers, run.left, run.epsilon, run.data, run.reveals = Answers(folder), {}, None, None, None
    run._session = Masks() if secure else None
    run._rows = run._langevin = run._account = run._audit = None
    run._broadcast = run._shown = run._masks = ""
    for name, value in changes.items():
        setattr(run, name, value)
    return run


def message(kind="round", arrays=None, **values):
    return wire.Message(kind, {**IDS, "round": 1, "attempt": 1, **values}, arrays or {})


# -- what a run is -------------------------------------------------------------------------------------------


def test_a_run_may_go_on_for_more_rounds_and_with_another_title_alone():
    tree = {"title": "t", "data": {"target": "y"}, "sampler": {"num-rounds": 5, "seed": 1}}
    digest = study_digest(tree)
    assert len(digest) == 64
    assert study_digest({**tree, "title": "other", "sampler": {"num-rounds": 7, "seed": 1}}) == digest
    names = {"b": 1, "a": {"d": 2, "c": 3}}
    backwards = {"a": {"c": 3, "d": 2}, "b": 1}
    assert study_digest({**names, "sampler": names}) == study_digest({"sampler": backwards, **backwards})
    untitled = {name: tree[name] for name in ("data", "sampler")}
    assert study_digest(untitled) == digest
    for other in (
        {**tree, "sampler": {"num-rounds": 5, "seed": 2}}, {**tree, "data": {"target": "z"}},
        {**tree, "model": 1}, {**tree, "sampler": None}, {"data": {"target": "y"}},
    ):  # fmt: skip
        assert study_digest(other) != digest
    assert study_digest({**tree, "sampler": None}) == study_digest({**tree, "sampler": {}})


def test_what_a_run_is_is_kept_where_only_its_owner_reads(tmp_path):
    assert Frozen.read(tmp_path) is None
    frozen = Frozen("study", NAMES, True, SIZES, "rows", "secret")
    frozen.save(tmp_path)
    frozen.save(tmp_path)
    assert Frozen.read(tmp_path) == frozen
    assert (tmp_path / "run.json").stat().st_mode & 0o777 == 0o600


@pytest.mark.parametrize("secure", [True, False])
def test_keys_of_a_session_are_kept_where_only_their_owner_reads(tmp_path, secure):
    run = run_of(tmp_path, secure=secure)
    run._save()
    path = tmp_path / "session.json"
    assert path.stat().st_mode & 0o777 == 0o600
    assert json.loads(path.read_text()) == {**IDS, "keys": {"exported": 1} if secure else None}
    path.chmod(0o644)
    run._save()
    assert path.stat().st_mode & 0o777 == 0o600


@pytest.mark.parametrize("what", ["run", "session"])
def test_secrets_are_at_no_time_readable_by_others(tmp_path, monkeypatch, what):
    """Also while they are written, under another name."""
    modes, replaced = [], os.replace

    def seen(source, target):
        modes.append(os.stat(source).st_mode & 0o777)
        replaced(source, target)

    monkeypatch.setattr(os, "replace", seen)
    before = os.umask(0)
    try:
        if what == "run":
            Frozen("study", NAMES, True, SIZES, "rows", "secret").save(tmp_path)
        else:
            run_of(tmp_path, secure=True)._save()
    finally:
        os.umask(before)
    assert modes == [0o600]


def test_another_process_goes_on_with_the_keys(tmp_path):
    identity = Identity.generate()
    session = Session(identity, "b", "run 1")
    owner = Owner("b", tmp_path, identity, make_policy({}))
    run = run_of(tmp_path, site=owner, about={**IDS, "keys": session.export()})
    run.restore()
    assert run._session.hello() == session.hello()
    assert run.about == IDS
    plain = run_of(tmp_path, about={**IDS, "keys": None})
    plain.restore()
    assert plain._session is None


@pytest.mark.parametrize("secure", [True, False])
def test_a_session_begins_with_keys_of_its_own(tmp_path, secure):
    identity = Identity.generate()
    run = run_of(tmp_path, site=Owner("b", tmp_path, identity, make_policy({})), hello={})
    run.frozen = run.frozen._replace(secure=secure)
    run.answers.add(Kept(1, 1, "t", "", {}), Last(1, 1, {}, b"d", b"r"))
    run.introduce()
    assert run.answers.last() is None
    assert json.loads((tmp_path / "session.json").read_text())["run"] == IDS["run"]
    assert (run._session is not None) == secure
    if secure:
        assert run._session.run == f"{IDS['run']} {IDS['session']}"  # keys of one session serve in no other
        assert run.hello == run._session.hello()


@pytest.mark.parametrize(
    ("audit", "scales", "wants"), [(True, None, True), (False, None, False), (False, 1, True)]
)
def test_a_site_wants_sums_to_audit_or_for_its_prior(tmp_path, audit, scales, wants):
    run = run_of(tmp_path, policy={"audit": audit}, _audit=SimpleNamespace(scales=scales))
    assert run.wants_sums is wants
    assert run_of(tmp_path, policy={"audit": audit}).wants_sums is audit  # chains have no such prior


def test_the_sites_are_told_of_each_other_once(tmp_path):
    run = run_of(tmp_path)
    run.frozen = run.frozen._replace(sizes=[])
    run.begin([1, 2, 3], {}, {}, {})
    assert Frozen.read(tmp_path).sizes == [1, 2, 3]
    assert (tmp_path / "session.json").exists()
    run.begin([1, 2, 3], {}, {}, {})  # a coordinator that missed the reply
    with pytest.raises(FederationError, match="cannot change their rows"):
        run.begin([1, 2, 4], {}, {}, {})
    assert run.frozen.sizes == [1, 2, 3]
    assert run.epsilon is None


def test_the_other_sites_keys_are_those_pinned(tmp_path):
    run, seen = run_of(tmp_path, secure=True), []

    def accept(hellos, pins):
        seen.append((hellos, pins))
        raise SecureSumError("no")

    run._session.accept = accept
    run.frozen = run.frozen._replace(sizes=[])
    with pytest.raises(SecureSumError):
        run.begin(SIZES, {"a": 1}, {"a": "key of a", "c": "key of c", "d": "unasked"}, {})
    assert seen == [({"a": 1}, {"a": "key of a", "b": "", "c": "key of c"})]
    assert run.frozen.sizes == []  # nothing of a beginning that failed is kept
    assert not (tmp_path / "run.json").exists()


def test_a_private_study_is_charged_when_it_begins(tmp_path):
    run = run_of(tmp_path, _account=SimpleNamespace(begin=lambda: 0.25))
    run.study.privacy = SimpleNamespace()
    run.begin(SIZES, {}, {}, {})
    assert run.epsilon == 0.25


@pytest.mark.parametrize("secure", [True, False])
def test_an_account_is_opened_once_with_what_the_site_knows(tmp_path, monkeypatch, secure):
    opened = []
    monkeypatch.setattr(
        site_run, "open_account", lambda *given, **named: opened.append((given, named)) or len(opened)
    )
    monkeypatch.setattr(site_run, "bounded_sensitivity", lambda model, data: (model.dim, data))
    limits = {"max-epsilon": 2.0, "delta": 1e-5, "colluders": 1}
    run = run_of(tmp_path, secure=secure, policy={"privacy": limits}, data="rows")
    run.frozen = run.frozen._replace(study="s" * 64)
    assert run._open_account() == run._open_account() == 1
    (((ledger, name, folder, study), named),) = opened
    assert (ledger.path, ledger.max_epsilon, ledger.delta) == (tmp_path / "ledger.jsonl", 2.0, 1e-5)
    assert (name, folder, study) == (f"{IDS['run']}-{'s' * 16}", tmp_path, run.study)
    # others' noise covers this site's only in a secure sum
    assert named == {
        "sizes": SIZES,
        "site": 1,
        "sensitivity": (DIM, "rows"),
        "colluders": 1 if secure else None,
    }


@pytest.mark.parametrize("chains", [True, False])
def test_a_run_is_made_of_its_study(tmp_path, chains):
    drawn = {"sampler": {"num-rounds": 4, "local-steps": 1, "step-size": 1e-3}} if chains else {}
    tree = {"data": {"target": "y", "features": ["u", "v"]}, "model": {"family": "logistic"}, **drawn}
    study, data = make_study(tree, "a test"), SimpleNamespace(features=("u", "v"))
    Frozen("study", NAMES, False, SIZES, "rows", "").save(tmp_path)
    owner, about = Owner("b", tmp_path, None, make_policy({})), dict(IDS)
    run = SiteRun(owner, tmp_path, about, study=study, data=data)
    assert (run.site, run.folder, run.about, run.study, run.data) == (owner, tmp_path, about, study, data)
    assert (run.frozen.names, run.model.dim, run.hello, run.left, run.epsilon) == (NAMES, DIM, {}, {}, None)
    assert run._session is run._rows is run._langevin is run._account is None
    assert run._broadcast == run._shown == run._masks == ""
    assert run.answers.known == []
    if chains:  # what leaves is declared by the method, and there is no protocol to follow
        assert run.reveals == reveals_of("fa-ld")
        assert run._audit is None
        np.testing.assert_array_equal(run._root, public_root(study.sampler))
    else:  # requests are declared one by one
        assert run.reveals is None
        assert run._audit.most_rounds > 1
        assert run._audit._rows() == 100
        assert run.offer() == {}


# -- before the first round ----------------------------------------------------------------------------------

REVEALS = Reveals(("position", "value"), preparation={"mean": "mode", "spread": "hessian"})
PREPARED = {"mean": np.ones((1, DIM)), "spread": np.ones((1, DIM, DIM))}


def offering(folder, found=PREPARED, **how):
    run = run_of(folder, reveals=REVEALS, data="rows", **how)
    seen = []
    method = SimpleNamespace(offer=lambda model, data: seen.append((model, data)) or found)
    run.study.sampler.build_method = lambda: method
    return run, seen


def test_what_a_method_prepares_leaves_as_it_was_declared(tmp_path):
    run, seen = offering(tmp_path)
    found = run.offer()
    assert {name: a.shape for name, a in found.items()} == {
        "prepared_mean": (1, DIM), "prepared_spread": (1, DIM, DIM),
    }  # fmt: skip
    assert seen == [(run.model, "rows")]
    assert run.left == {"mode": 3, "hessian": 9}
    for wrong in (
        {**PREPARED, "rows": np.ones((1, DIM))},
        {"mean": np.ones((1, DIM))},
        {**PREPARED, "mean": 1.0},
    ):
        run, _ = offering(tmp_path, wrong)
        with pytest.raises(PolicyError):
            run.offer()
        assert run.left == {}
    run, seen = offering(tmp_path, secure=True)
    with pytest.raises(PolicyError, match="nothing leaves beside a secure sum"):
        run.offer()
    assert seen == []
    run.reveals = Reveals()
    assert run.offer() == {}
    run.reveals = None
    assert run.offer() == {}


def test_what_all_sites_prepared_is_passed_on_whole(tmp_path):
    run, _ = offering(tmp_path)
    right = {f"prepared_{name}": np.repeat(a, 3, axis=0) for name, a in PREPARED.items()}
    run.begin(SIZES, {}, {}, {**right, "other": np.ones(1)})
    assert run.about["prepared"] == {name.removeprefix("prepared_"): a.tolist() for name, a in right.items()}
    assert json.loads((tmp_path / "session.json").read_text())["prepared"] == run.about["prepared"]
    mean, spread = right.values()
    for wrong in (
        {}, {"prepared_mean": mean}, {**right, "prepared_mean": mean[:2]},
        {**right, "prepared_spread": spread[:2]}, {**right, "prepared_mean": mean[:, :2]},
        {**right, "prepared_more": mean},
    ):  # fmt: skip
        with pytest.raises(FederationError, match="all sites' preparation does not fit the study"):
            run.begin(SIZES, {}, {}, wrong)


# -- the order of rounds -------------------------------------------------------------------------------------


def test_a_task_is_what_is_asked_whoever_asks_again(tmp_path):
    run = run_of(tmp_path)
    arrays = {"weight": SHARES, "leaf_0": np.zeros(2)}
    task = run._task(message(arrays=arrays, saved=0))
    for values, more in (
        ({"session": "2" * 16}, {}), ({"attempt": 2}, {}), ({"saved": 7}, {}),
        ({}, {"passed_masked": np.ones(3)}),
    ):  # fmt: skip
        assert run._task(message(arrays={**arrays, **more}, **{"saved": 0, **values})) == task
    others = [
        message(arrays=arrays, saved=0, round=2),
        message(arrays=arrays, saved=0, run="3" * 16),
        message(arrays=arrays, saved=0, leaves=2),
        message("ask", arrays=arrays, saved=0),
        message(arrays={**arrays, "leaf_0": np.ones(2)}, saved=0),
        message(arrays={"weight": SHARES}, saved=0),
    ]
    assert len({task, *map(run._task, others)}) == 1 + len(others)
    for change in ({"study": "other"}, {"names": ["a", "b", "d"]}, {"sizes": [20, 30, 51]}):
        other = run_of(tmp_path)
        other.frozen = other.frozen._replace(**change)
        assert other._task(message(arrays=arrays, saved=0)) != task, change


T, U = b"task", b"other"
ORDER = [
    # known (round, attempt, task), last answered in this session, asked, chains: and audited or summed
    ([], None, (1, 1, T), False, False),
    ([], None, (9, 1, T), False, "round 9 before round 1"),
    ([], None, (2, 1, T), False, "round 2 before round 1"),
    ([], None, (10, 1, T), "no round 10: it ends after 9", "no round 10: it ends after 9"),
    ([(1, 1, T)], (1, 1), (2, 1, T), False, False),
    ([(1, 1, T)], (1, 1), (3, 1, T), False, "round 3 before round 2"),
    ([(1, 1, T)], (1, 1), (1, 2, T), True, True),
    ([(1, 1, T)], (1, 1), (1, 2, U), "answered before", "answered before"),
    ([(1, 1, T)], (1, 1), (1, 1, U), "answered before", "answered before"),
    ([(1, 1, T)], (1, 1), (1, 1, T), "answered before", "answered before"),
    ([(1, 1, T), (1, 3, T)], (1, 3), (1, 2, T), "answered before", "answered before"),
    ([(1, 1, T), (2, 1, T)], (2, 1), (1, 9, T), "answered before", "answered before"),
    # a new session after a crash: chains may be asked anew, sums that are audited or masked may not
    ([(1, 1, T), (2, 1, T)], None, (1, 1, T), True, True),
    ([(1, 1, T), (2, 1, T)], None, (2, 5, T), True, True),
    ([(1, 1, T), (2, 1, T)], None, (1, 1, U), False, "answered before"),
    ([(1, 1, T), (2, 1, T)], (1, 1), (2, 1, U), False, "answered before"),
    ([(1, 1, T), (1, 1, U)], (1, 1), (1, 2, T), True, True),
]


@pytest.mark.parametrize("kind", ["chains", "audited", "summed"])
@pytest.mark.parametrize(("known", "last", "asked", "chains", "once"), ORDER)
def test_rounds_come_in_their_order(tmp_path, kind, known, last, asked, chains, once):
    audit = SimpleNamespace(most_rounds=9) if kind == "audited" else None
    run = run_of(tmp_path, secure=kind == "summed", _audit=audit)
    run.answers.known = [Kept(n, a, t.hex(), "", {}) for n, a, t in known]
    expected = chains if kind == "chains" else once
    before = None if last is None else Last(*last, {}, b"", b"")
    if isinstance(expected, str):
        with pytest.raises(FederationError, match=expected):
            run._check_order(*asked, before)
    else:
        assert run._check_order(*asked, before) is expected


def test_no_round_before_the_sites_know_of_each_other(tmp_path):
    run = run_of(tmp_path)
    run.frozen = run.frozen._replace(sizes=[])
    with pytest.raises(FederationError, match="before the sites were told of each other"):
        run._check_order(1, 1, T, None)


def test_rounds_are_counted_by_what_was_asked(tmp_path):
    run = run_of(tmp_path, policy={"max-rounds": 2})
    run.answers.known = [Kept(1, 1, T.hex(), "", {}), Kept(1, 2, T.hex(), "", {})]
    assert run._check_order(2, 1, T, None) is False
    run.answers.known.append(Kept(2, 1, T.hex(), "", {}))
    with pytest.raises(PolicyError, match="at most 2 rounds"):
        run._check_order(3, 1, T, None)
    with pytest.raises(PolicyError, match="at most 2 rounds"):
        run._check_order(1, 1, U, None)
    assert run._check_order(1, 3, T, None) is True  # shows nothing more


@pytest.mark.parametrize("secure", [True, False])
@pytest.mark.parametrize("kind", ["ask", "round"])
def test_an_answer_is_written_down_and_given_again(tmp_path, secure, kind):
    audit = SimpleNamespace(most_rounds=9) if kind == "ask" else None
    run, made = run_of(tmp_path, secure=secure, _audit=audit), []
    masked = np.arange(4, dtype=np.uint64).reshape(2, 2)
    arrays = (
        {"masked": masked, "shape_point_values": np.array([5])} if secure else {"point_values": np.ones(5)}
    )

    def work(message, digest, task, again):
        assert run.left == {}
        assert run._broadcast == ""
        made.append((digest, task, again))
        run.left, run._broadcast, run._masks = {"value": 5}, str(again), "07" * secure
        return dict(arrays)

    setattr(run, f"_{kind}", work)
    setattr(run, "_round" if kind == "ask" else "_ask", None)  # the other is not called
    given = []

    def reply(found):
        given.append(found)
        return b"bytes %d" % len(given)

    first = message(kind)
    assert run.answer(first, b"one", reply) == b"bytes 1"
    assert run.left == {"value": 5}
    assert run.answer(first, b"one", reply) == b"bytes 1"  # the same bytes, and no work
    assert run.left == {"value": 5}  # which left once more
    task = run._task(first)
    assert run.answer(message(kind, attempt=2), b"two", reply) == b"bytes 2"
    assert made == [(b"one", task, False), (b"two", task, True)]
    kept = Answers(tmp_path)
    upload = shares.owner_hash(shares.hashes(masked, 3)) if secure else ""
    shapes = {"point_values": [5]} if secure else {}
    used = {"session": IDS["session"], "masks": "07"} if secure else {}
    assert kept.known == [Kept(1, n, task.hex(), upload, shapes, str(n == 2), **used) for n in (1, 2)]
    assert kept.last_under(IDS["session"]) == ((1, 2, b"\x07") if secure else None)
    assert kept.last() == Last(1, 2, {"value": 5}, b"two", b"bytes 2")
    assert [set(found) for found in given] == [set(arrays) | ({"hashes"} if secure else set())] * 2
    # in another process, from the disk
    other = run_of(tmp_path, secure=secure, _audit=audit)
    assert other.answer(message(kind, attempt=2), b"two", None) == b"bytes 2"
    assert other.left == {"value": 5}


# -- requests ------------------------------------------------------------------------------------------------


class Protocol:
    """In place of the audit: what it was asked, and a question of its own."""

    most_rounds = 9

    def __init__(self, scales=None):
        self.scales, self.taken, self.checked = scales, [], []
        self.models = [SimpleNamespace(dim=DIM, name=n) for n in range(3)]

    def take(self, number, sums):
        self.taken.append((number, sums))

    def check(self, number, request):
        self.checked.append((number, set(request)))
        return {"points": np.full((1, DIM), 7.0)}

    def model(self, number):
        return self.models[min(number, 3) - 1]


@pytest.fixture
def rows(monkeypatch):
    """What is made of the rows, in place of sums over them."""
    seen = SimpleNamespace(
        sites=[], requests=[], answer={"point_values": np.arange(2.0), "a": np.ones((2, 2))}
    )

    def made(model, data, name):
        seen.sites.append((model, data, name))
        return SimpleNamespace(model=model)

    monkeypatch.setattr(site_run, "make_site", made)

    def answer(site, request):
        seen.requests.append((site.model, request))
        return dict(seen.answer)

    monkeypatch.setattr(site_run, "answer", answer)
    monkeypatch.setattr(site_run, "expand", lambda request: {**request, "expanded": True})
    monkeypatch.setattr(site_run, "check_answer", lambda found, dim: ["value"])
    monkeypatch.setattr(site_run, "rounded", lambda model, name, request, found: found)
    monkeypatch.setattr(site_run, "ARRAYS", {"point_values": ("value", 1), "a": ("hessian", 0)})
    return seen


def asking(folder, protocol, **how):
    run = run_of(folder, _audit=protocol, **how)
    run.data = SimpleNamespace(rows="rows")
    fit = SimpleNamespace(method="importance", curvature=True)
    run.study = SimpleNamespace(sampler=None, fit=fit, privacy=None)
    run._sums = lambda message, number: f"sums of {number}"
    return run


ASKED = {"points": np.zeros((1, DIM))}
PASSED = {"passed_x": np.zeros(1)}
TAKES = [
    # audit, round, scales, what the coordinator shows, answered before: whether the sum before is taken
    (True, 1, None, {}, False, False),
    (True, 1, None, PASSED, False, False),
    (True, 2, None, PASSED, False, True),
    (True, 2, None, {}, False, True),  # which then says that it was not passed on
    (True, 2, None, {}, True, False),
    (True, 2, None, PASSED, True, True),  # and is compared with the one before
    (True, 3, None, {}, False, True),
    (False, 2, None, PASSED, False, False),
    (False, 2, "request", PASSED, False, True),  # it shapes the prior
    (False, 1, "request", PASSED, False, False),
    (False, 3, "request", PASSED, False, False),
    (False, 2, "request", {}, False, True),
    (False, 2, "request", {}, True, False),
]


@pytest.mark.parametrize(("audit", "number", "scales", "shown", "again", "taken"), TAKES)
def test_sums_are_taken_where_they_are_needed(tmp_path, rows, audit, number, scales, shown, again, taken):
    protocol = Protocol(scales)
    run = asking(tmp_path, protocol, policy={"audit": audit})
    found = run._ask(message("ask", {**ASKED, **shown}, round=number), b"d", b"t", again)
    assert protocol.taken == ([(number - 1, f"sums of {number - 1}")] if taken else [])
    assert protocol.checked == ([(number, {"points"})] if audit else [])
    # the site answers its own question where it audits, and the one that was asked where it does not
    ((model, request),) = rows.requests
    assert float(request["points"][0, 0]) == (7.0 if audit else 0.0)
    assert set(request) == {"points", "expanded"}
    assert model is protocol.model(number)
    assert rows.sites == [(model, "rows", "b")]
    assert found.keys() == rows.answer.keys()
    assert run.left == {"value": 2, "hessian": 4}


def test_rows_are_prepared_once_for_each_model(tmp_path, rows):
    protocol = Protocol()
    run = asking(tmp_path, protocol, policy={"audit": False})
    for number in (1, 3, 3, 4, 2):
        run._ask(message("ask", ASKED, round=number), b"d", b"t", False)
    assert [model.name for model, _, _ in rows.sites] == [0, 2, 1]


def test_a_request_is_checked_before_rows_are_touched(tmp_path, rows):
    run = asking(tmp_path, None)
    with pytest.raises(FederationError, match="takes no such requests"):
        run._ask(message("ask", ASKED), b"d", b"t", False)
    run = asking(tmp_path, Protocol())
    for request, words in (
        ({"step_states": np.zeros((1, DIM))}, "declares no request for"),
        ({"points": np.zeros((1, DIM + 1))}, "points"),
        ({"rows": np.zeros(1)}, "no request has a part"),
    ):
        with pytest.raises(PolicyError, match=words):
            run._ask(message("ask", request), b"d", b"t", False)
    run.study.fit.curvature = False
    with pytest.raises(PolicyError, match="declares no request for"):
        run._ask(message("ask", {"anchors": np.zeros((1, DIM))}), b"d", b"t", False)
    assert rows.requests == rows.sites == []
    assert run.left == {}


def test_draws_are_limited_by_the_policy(tmp_path, rows, monkeypatch):
    monkeypatch.setattr(site_run, "check_request", lambda request, dim: None)  # it has tests of its own
    run = asking(tmp_path, Protocol(), policy={"max-draws": 8})
    with pytest.raises(PolicyError, match="at most 8 draws a round"):
        run._ask(message("ask", {"proposal_count": np.asarray(9)}), b"d", b"t", False)
    assert rows.sites == []
    run._ask(message("ask", {"proposal_count": np.asarray(8)}), b"d", b"t", False)
    assert len(rows.requests) == 1
    # without the key there are no draws, whatever the limit
    asking(tmp_path, Protocol(), policy={"max-draws": 1})._ask(message("ask", ASKED), b"d", b"t", False)


@pytest.mark.parametrize("allowed", [True, False])
def test_curvature_does_not_leave_where_the_policy_forbids_it(tmp_path, rows, monkeypatch, allowed):
    run = asking(tmp_path, Protocol(), policy={"curvature": allowed})
    assert run._ask(message("ask", ASKED), b"d", b"t", False)  # values may
    monkeypatch.setattr(site_run, "check_answer", lambda found, dim: ["value", "hessian"])
    run.left = {}
    if allowed:
        assert run._ask(message("ask", ASKED), b"d", b"t", False)
    else:
        with pytest.raises(PolicyError, match="curvature may not leave it"):
            run._ask(message("ask", ASKED), b"d", b"t", False)
        assert run.left == {}


def test_what_goes_wrong_with_rows_is_not_told(tmp_path, rows, monkeypatch):
    def fails(site, request):
        raise ValueError("row 17 is 3.25")

    monkeypatch.setattr(site_run, "answer", fails)
    with pytest.raises(RowsError) as caught:
        asking(tmp_path, Protocol())._ask(message("ask", ASKED), b"d", b"t", False)
    assert caught.value.message == site_run.UNSAID
    assert "3.25" in str(caught.value.__cause__)
    with pytest.raises(RowsError), about_rows():
        raise PolicyError("whatever it is")


def test_answers_under_masks_leave_with_their_shapes_alone(tmp_path, rows):
    run = asking(tmp_path, Protocol(), secure=True, policy={"audit": False})
    found = run._ask(message("ask", ASKED, round=1, attempt=4), b"digest", b"t", False)
    assert {name: a.tolist() for name, a in found.items() if name != "masked"} == {
        "shape_point_values": [2], "shape_a": [2, 2],
    }  # fmt: skip
    assert found["shape_a"].dtype == np.int64
    ((values, given),) = run._session.asked
    assert values.tolist() == [1.0, 1.0, 1.0, 1.0, 0.0, 1.0]  # by name, whatever was answered first
    agreed = wire.digest(json.dumps(["study", NAMES, SIZES]).encode())
    bound = wire.digest(b"digest" + agreed + b"\0")  # and no audit
    assert given == {"round": 1, "attempt": 4, "digest": bound, "saturate": True}
    assert run._masks == given["digest"].hex()
    assert run.left == {"value": 2, "hessian": 4}
    run._shown = "what was shown"
    run._ask(message("ask", ASKED, round=1, attempt=5), b"digest", b"t", False)
    assert run._session.asked[-1][1]["digest"] == wire.digest(b"digest" + agreed + b"what was shown" + b"\0")


# -- sums that are passed on ---------------------------------------------------------------------------------


def test_without_masks_the_sums_are_passed_on_by_name(tmp_path):
    run = run_of(tmp_path)
    given = {"passed_point_values": np.ones(2), "passed_state_values": np.zeros(1), "points": np.ones(1)}
    assert set(run._sums(message("ask", given), 1)) == {"point_values", "state_values"}
    for wrong in ({"passed_rows": np.ones(2)}, {"passed_point_values": np.ones(2, np.float32)}):
        with pytest.raises(FederationError, match="is no sum"):
            run._sums(message("ask", {**given, **wrong}), 1)


def uploads(count=3, values=(0.5, 2.0)):
    """Unmasked uploads of sites that all have the same values."""
    return np.stack([np.column_stack([encode(list(values)), encode([1.0])]) for _ in range(count)])


def shown(right, place=1):
    """What is passed on of uploads to a site."""
    told = {"sum": decode(total(right)), "hashes": np.stack([shares.hashes(u, len(right)) for u in right])}
    return {**told, "share": shares.share(list(right), place)}


def test_masked_uploads_are_added_up_at_the_site(tmp_path):
    run, right = run_of(tmp_path, secure=True), uploads()
    own = shares.owner_hash(shares.hashes(right[1], 3))
    run.answers.known = [Kept(3, 1, "t", "", {}), Kept(4, 1, "t", own, {"b": [1], "a": []})]
    sums = run._sums(message("ask", {f"passed_{n}": a for n, a in shown(right).items()}), 4)
    assert {name: (a.shape, float(a.ravel()[0])) for name, a in sums.items()} == {
        "a": ((), 1.5),
        "b": ((1,), 6.0),
    }
    with pytest.raises(FederationError, match="sum of round 4 was not passed on"):
        run._summed({}, 4)
    with pytest.raises(FederationError, match="upload of round 3 is not its own"):
        run._summed(shown(right), 3)
    moved = right.copy()
    moved[1, 0, 0] += np.uint64(1)
    with pytest.raises(FederationError, match="upload of round 4 is not its own"):
        run._summed(shown(moved), 4)


def test_what_a_site_was_shown_is_known_when_nothing_is_shown_again(tmp_path):
    """Masks are bound to it, and to what was shown in the rounds before."""
    run = run_of(tmp_path, secure=True)
    assert run._seen(message(), 1, b"t") == ""
    told = {"passed_sum": np.ones(3), "passed_hashes": np.zeros((3, 1, 32), np.uint8)}
    first = run._seen(message(arrays=told), 2, b"t")
    alone = {**told, "passed_share": np.ones(2), "leaf_0": np.ones(1)}
    assert run._seen(message(arrays=alone), 2, b"u") == first != ""  # which is the same at all sites
    for other in (
        {**told, "passed_sum": np.full(3, 2.0)},
        {**told, "passed_hashes": told["passed_hashes"] + np.uint8(1)},
    ):
        assert run._seen(message(arrays=other), 2, b"t") not in ("", first)
    run.answers.known = [
        Kept(2, 1, b"t".hex(), "", {}, shown="old"),
        Kept(2, 2, b"t".hex(), "", {}, shown=first),
    ]
    assert run._seen(message(), 2, b"t") == first
    assert run._seen(message(), 2, b"u") == ""
    after = run._seen(message(arrays=told), 3, b"t")
    run.answers.known[-1] = run.answers.known[-1]._replace(shown="another")
    assert run._seen(message(arrays=told), 3, b"t") not in ("", after)


# -- rounds of chains ----------------------------------------------------------------------------------------


class Steps:
    """In place of local steps."""

    kinds = ("position", "value")

    def __init__(self):
        self.start, self.tasks, self.noise, self.seen = [np.zeros((CHAINS, DIM))], [], [], []

    def read(self, message):
        return [message.arrays["leaf_0"]]

    def check_noise(self, number, weight, leaves):
        self.noise.append((number, weight.tolist(), leaves[0].tolist()))

    def after(self, number, total):
        self.seen.append((number, total))
        return [np.full((CHAINS, DIM), 0.5)]

    def answer(self, task):
        self.tasks.append(task)
        energy = np.array([1.0, 3.0], np.float32)
        moved = task.leaves[0].astype(np.float32) + np.array([[1.0], [2.0]])
        return Upload(moved, energy, spent=(np.ones(2), np.zeros(2)))


def stepping(folder, *, own=None, **how):
    run = run_of(folder, **how)
    run._langevin = Steps()
    run._root = np.array([1, 2], np.uint32)
    run.frozen = run.frozen._replace(sizes=SIZES)
    return run


def round_of(run, weight=SHARES, leaf=None, number=1, again=False, saved=0, **passed):
    arrays = {"weight": weight, "leaf_0": np.zeros((CHAINS, DIM)) if leaf is None else leaf, **passed}
    return run._round(message(arrays=arrays, round=number, saved=saved), b"digest", b"task", again)


def test_without_a_secure_sum_the_upload_leaves_as_it_is(tmp_path):
    run = stepping(tmp_path)
    found = round_of(run, number=4, saved=2)
    assert found["leaf_0"].tolist() == [[1.0] * DIM, [2.0] * DIM]
    assert found["leaf_1"].tolist() == [1.0, 3.0]
    assert set(found) == {f"leaf_{i}" for i in range(4)}
    (task,) = run._langevin.tasks
    assert (task.round, task.saved, task.weight.tolist()) == (3, 2, [0.3, 0.3])
    assert task.own.tolist() == [1, 2]
    assert run.left == {"position": 6, "value": 2}


def test_in_a_secure_sum_the_weighted_part_leaves_under_masks(tmp_path):
    run = stepping(tmp_path, secure=True, policy={"audit": False})
    found = round_of(run, number=2)
    assert set(found) == {"masked"}  # a compressed upload's length tells of its site's rows
    ((values, given),) = run._session.asked
    weighted = np.asarray(0.3, float_dtype()) * np.array([1.0] * DIM + [2.0] * DIM + [1.0, 3.0])
    np.testing.assert_allclose(values, [*weighted, 1.0, 1.0, 0.0, 0.0], rtol=1e-15)
    assert (given["round"], given["saturate"]) == (2, True)
    # the weights are everybody's shares of the rows: others would single out a site
    for wrong in (np.tile([1.0, 0.0, 0.0], (CHAINS, 1)), SHARES * (1 + 1e-5)):
        with pytest.raises(SecureSumError, match="shares of the rows"):
            round_of(run, wrong)
    assert len(run._langevin.tasks) == 1
    plain = stepping(tmp_path)
    round_of(
        plain, np.tile([1.0, 0.0, 0.0], (CHAINS, 1))
    )  # where a site's own upload is seen they may be any
    assert plain._langevin.tasks[0].weight.tolist() == [0.0, 0.0]


@pytest.mark.parametrize("weight", [SHARES[0], SHARES[:1], SHARES[:, :2], SHARES[None], np.zeros(())])
def test_weights_fit_the_roster_and_the_chains(tmp_path, weight):
    with pytest.raises(FederationError, match="weights do not fit the roster"):
        round_of(stepping(tmp_path), weight)
    with pytest.raises(FederationError, match="weights do not fit the roster"):
        stepping(tmp_path)._round(message(arrays={"leaf_0": np.zeros((2, 3))}, saved=0), b"", b"", False)


def test_a_study_without_chains_takes_no_rounds(tmp_path):
    run = stepping(tmp_path)
    run.study.sampler = None
    with pytest.raises(FederationError, match="takes no such rounds"):
        round_of(run)


@pytest.mark.parametrize("again", [True, False])
@pytest.mark.parametrize(("secure", "audit"), [(True, True), (True, False), (False, True)])
def test_a_broadcast_is_compared_where_the_site_can_know_it(tmp_path, secure, audit, again):
    run, wrong = stepping(tmp_path, secure=secure, policy={"audit": audit}), np.full((CHAINS, DIM), 9.0)
    if not (secure and audit):
        round_of(run, leaf=wrong, again=again)
        assert run._langevin.tasks[0].leaves[0].tolist() == wrong.tolist()
        assert run._broadcast == ""
        return
    with pytest.raises(FederationError, match="broadcast of round 1 is not the average"):
        round_of(run, leaf=wrong, again=again)
    start = np.array([[1.0, 0.0, 0.0], [0.0, 0.0, 0.0]])
    run._langevin.start = [start]
    for leaf in (start + 1e-9, start.copy()):
        round_of(run, leaf=leaf, again=again)
        assert run._langevin.tasks[-1].leaves[0].tolist() == start.tolist()  # its own, to the last digit
        assert run._broadcast == hash_of(start)


def hash_of(leaf):
    return wire.digest(wire.hash_of(leaf).encode()).hex()


@pytest.mark.parametrize(
    ("own", "task", "number", "believed"),
    [
        (4.0, b"task", 3, True),
        (4.000000001, b"task", 3, False),
        (4.0, b"other", 3, False),
        (4.0, b"task", 2, False),
    ],
)
def test_what_was_answered_to_the_last_bit_may_be_asked_again_without_the_sum(
    tmp_path, own, task, number, believed
):
    """By a coordinator that has forgotten the round before; whatever it asks otherwise needs the sum."""
    run = stepping(tmp_path, secure=True)
    leaf = np.full((CHAINS, DIM), 4.0)
    run.answers.known = [Kept(number, 1, task.hex(), "", {}, hash_of(leaf / 4 * own))]
    if believed:
        round_of(run, leaf=leaf, number=3, again=True)
        assert run._langevin.tasks[0].leaves[0].tolist() == leaf.tolist()
        assert run._langevin.seen == []
    else:
        with pytest.raises(FederationError, match="sum of round 2 was not passed on"):
            round_of(run, leaf=leaf, number=3, again=True)
    run._summed = lambda passed, number: "total"
    with pytest.raises(FederationError, match="not the average"):  # where the sum is there it counts
        round_of(run, leaf=leaf, number=3, again=True, passed_masked=np.zeros(1))


@pytest.mark.parametrize("own", [0.5, 0.500000001])
def test_a_round_that_was_answered_follows_from_the_same_sum(tmp_path, own):
    """Two answers from starts a little apart have the same noise, and their difference has none."""
    run = stepping(tmp_path, secure=True)
    run._summed = lambda passed, number: "total"
    run.answers.known = [Kept(3, 1, b"task".hex(), "", {}, hash_of(np.full((CHAINS, DIM), own)))]
    how = {"leaf": np.full((CHAINS, DIM), 0.5), "number": 3, "again": True, "passed_masked": np.zeros(1)}
    if own == 0.5:
        round_of(run, **how)
    else:
        with pytest.raises(FederationError, match="follows now from another sum of round 2"):
            round_of(run, **how)
    assert len(run._langevin.tasks) == (own == 0.5)


def test_after_the_first_round_the_broadcast_follows_from_the_sum(tmp_path):
    run, summed = stepping(tmp_path, secure=True), []
    run._summed = lambda passed, number: summed.append((set(passed), number)) or "total"
    own = np.full((CHAINS, DIM), 0.5)
    with pytest.raises(FederationError, match="broadcast of round 3 is not the average"):
        round_of(run, number=3, passed_masked=np.zeros(1))
    round_of(run, leaf=own, number=3, passed_masked=np.zeros(1))
    assert summed == [({"masked"}, 2)] * 2
    assert run._langevin.seen == [(3, "total")] * 2


@pytest.mark.parametrize("again", [True, False])
def test_a_private_round_is_checked_each_time_and_paid_for_once(tmp_path, monkeypatch, again):
    paid, weighed = [], []
    run = stepping(tmp_path, _account=SimpleNamespace(pay=lambda releases: paid.append(releases) or 0.75))
    run.study.privacy = SimpleNamespace(client_noise="entropy")
    monkeypatch.setattr(site_run, "check_weights", lambda *given: weighed.append(given) or 2)
    round_of(run, number=5, again=again)
    ((study, sizes, place, weight),) = weighed
    assert (study, sizes, place, weight.tolist()) == (run.study, SIZES, 1, [0.3, 0.3])
    assert run._langevin.noise == [(5, [0.3, 0.3], [[0.0] * DIM] * CHAINS)]
    assert paid == ([] if again else [2])
    assert run.epsilon == (None if again else 0.75)
    expected = hmac.digest(bytes.fromhex("07" * 32), b"task", "sha256")[:8]
    assert run._langevin.tasks[0].own.tobytes() == expected
    plain = stepping(tmp_path)
    round_of(plain)
    assert plain._langevin.noise == []


def test_noise_is_secret_only_where_it_is_drawn_from_entropy(tmp_path):
    run = stepping(tmp_path)
    assert run._noise_root(b"t").tolist() == [1, 2]
    run.study.privacy = SimpleNamespace(client_noise="seed")
    assert run._noise_root(b"t").tolist() == [1, 2]
    run.study.privacy.client_noise = "entropy"
    roots = {run._noise_root(task).tobytes() for task in (b"t", b"u", b"t")}
    assert len(roots) == 2
    assert run._noise_root(b"t").dtype == np.uint32


def test_steps_are_prepared_once_with_the_study_s_settings(tmp_path, monkeypatch):
    made, offered = [], []
    method = SimpleNamespace(name="method")
    building = SimpleNamespace(prepare=lambda *given: offered.append(given) or method)
    run = run_of(tmp_path, about={**IDS, "prepared": {"mean": [[1.0], [2.0], [3.0]]}})
    run.study.sampler.build_method = lambda: building
    run.data = SimpleNamespace(elsewhere=lambda names, sizes: (names, sizes))
    run._root = "root"
    monkeypatch.setattr(
        site_run, "LangevinSite", lambda *given, **named: made.append((given, named)) or Steps()
    )
    monkeypatch.setattr(site_run, "start_of", lambda sampler, model: "start")
    monkeypatch.setattr(site_run, "private", lambda method: f"private {method.name}")
    monkeypatch.setattr(site_run, "check_weights", lambda *_: 1)
    round_of(run)
    round_of(run, number=2)
    ((given, named),) = made
    assert given == (run.model, method, run.data)
    assert named == {
        "scheme": "full", "place": (1, SIZES), "root": "root", "start": "start", "folder": tmp_path,
    }  # fmt: skip
    ((model, everybody, answers),) = offered
    assert (model, everybody) == (run.model, (NAMES, SIZES))
    assert answers["mean"].tolist() == [[1.0], [2.0], [3.0]]
    run._langevin, run._account = None, SimpleNamespace(pay=lambda releases: 0.0)
    run.study.privacy = SimpleNamespace(client_noise="seed")
    round_of(run, number=3)
    assert made[1][0][1] == "private method"


def test_what_left_is_counted_by_kind(tmp_path):
    run = run_of(tmp_path)
    run._tell({"value": 2, "nothing": 9, "position": 6})
    run._tell({"value": 3})
    assert run.left == {"value": 5, "position": 6}
