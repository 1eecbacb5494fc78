"""Every check at a site as a row of a table: kind of message, rule, and what must be refused.

Rows about numbers that leave are made from the declarations of what leaves, so that a kind of message without
a check shows, and so does a new kind that nobody thought of.
"""

import json
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest

import fald
from fald.core.errors import FederationError, PolicyError
from fald.core.reveals import KINDS, check_preparation, check_upload
from fald.core.version import __version__
from fald.federation import wire
from fald.federation.site import opening
from fald.federation.site import run as site_run
from fald.federation.site.langevin import LangevinSite, Task
from fald.federation.site.policy import make_policy
from fald.federation.site.worker import SiteSettings, SiteWorker
from fald.fewround.methods import FIT_METHODS, requests_of
from fald.fewround.site import ANSWERS, asked
from fald.langevin.method import Spent, Upload
from fald.langevin.registry import METHODS, declared, reveals_of, takes
from fald.study.schema import make_study

DIM, ROWS, CHAINS = 3, 6, 2
IDS = {"run": "0" * 16, "session": "1" * 16}
NAMES, SIZES = ["a", "b"], [ROWS, 4]
SHARES = np.tile(np.array(SIZES) / sum(SIZES), (CHAINS, 1))
START = np.zeros((CHAINS, DIM))
SAMPLER = {"num-rounds": 9, "local-steps": 2, "step-size": 1e-3, "num-chains": CHAINS, "precision": "float64"}
STUDY = {"data": {"target": "y", "features": ["u", "v"]}, "model": {"family": "logistic"}}
LANGEVIN = {**STUDY, "sampler": SAMPLER}
PRIVATE = {**STUDY, "sampler": {**SAMPLER, "clip-norm": 1.0}, "privacy": {"delta": 1e-5}}
PREPARE = site_run.SiteRun._prepare
RNG = np.random.default_rng(0)
X, Y = RNG.normal(size=(ROWS, 2)), np.arange(ROWS) % 2.0


def load(study, shift=0.0):
    return replace(fald.FederatedData.from_arrays({"a": (X + shift, Y)}), features=("u", "v"))


class Steps:
    """In place of local steps, which take long to compile."""

    kinds = ("position", "value")

    def read(self, message):
        return [message.arrays["leaf_0"]]

    def check_noise(self, number, weight, leaves):
        pass

    def answer(self, task):
        return Upload(task.leaves[0] + 0.5, np.ones(len(task.weight)))


class Site:
    """Site "a" and a coordinator that says what a row of the table tells it to."""

    def __init__(self, folder, policy="audit = false\n"):
        (folder / "POLICY.toml").write_text(policy)
        self.state = folder / "state"
        self.settings = SiteSettings("a", self.state, policy=folder / "POLICY.toml", sites=("a", "b"))
        self.worker = SiteWorker(self.settings, load)

    def say(self, kind, values, arrays=None):
        return wire.unpack(self.worker.handle(wire.pack(kind, values, arrays)))

    def ready(self, kind, study=LANGEVIN):
        """Bring it to where a message of this kind is due, and return that message."""
        messages = {
            "open": (
                {**IDS, "version": __version__, "study": study, "secure": False, "names": NAMES},
                {},
            ),
            "begin": ({**IDS, "names": NAMES, "sizes": SIZES, "hellos": None, "identities": {}}, {}),
            "ask": ({**IDS, "round": 1, "attempt": 1}, {"points": np.zeros((1, DIM))}),
            "round": (
                {**IDS, "round": 1, "attempt": 1, "leaves": 1, "saved": 0},
                {"weight": SHARES, "leaf_0": START},
            ),
            "end": (dict(IDS), {}),
        }
        for earlier in {"open": [], "begin": ["open"]}.get(kind, ["open", "begin"]):
            said = self.say(earlier, *messages[earlier])
            assert said.kind == "reply", said.values
        return messages[kind]


@pytest.fixture
def site(tmp_path, monkeypatch):
    monkeypatch.setattr(site_run.SiteRun, "_prepare", lambda self: Steps())
    monkeypatch.setattr(site_run, "answer", lambda rows, request: rows and honest(asked_kind(request)))
    return Site(tmp_path)


def asked_kind(request):
    return asked({name: a for name, a in request.items() if name != "draws"})[0]


def honest(kind, **changes):
    """An answer with arrays of the declared shapes; ``changes`` by name."""
    arrays = {
        name: np.ones((2,) * front + (DIM,) * KINDS[number].axes)
        for name, (number, front) in ANSWERS[kind].arrays.items()
    }
    return {**arrays, **changes}


# -- the messages ------------------------------------------------------------------------------------------

EVERY, LATER, ROUNDS = ("open", "begin", "ask", "round", "end"), ("begin", "ask", "round"), ("ask", "round")
STUDY_OF = {"ask": STUDY}

RULES = {
    "no run": (EVERY, {"run": None}, "16 hexadecimal digits"),
    "a path for a run": (EVERY, {"run": "../../../../etc"}, "16 hexadecimal digits"),
    "a run of other letters": (EVERY, {"run": "G" * 16}, "16 hexadecimal digits"),
    "a run too short": (EVERY, {"run": "0" * 15}, "16 hexadecimal digits"),
    "a run too long": (EVERY, {"run": "0" * 17}, "16 hexadecimal digits"),
    "a number for a run": (EVERY, {"run": 10**15}, "16 hexadecimal digits"),
    "no session": (("open",), {"session": None}, "16 hexadecimal digits"),
    "another run": (LATER, {"run": "2" * 16}, "knows no such run"),
    "another session": (LATER, {"session": "2" * 16}, "earlier session"),
    "another version": (("open",), {"version": "0.0"}, "coordinator 0.0"),
    "a site that is absent": (("open",), {"names": ["b", "c"]}, "roster must name this site once"),
    "other sites": (("begin",), {"names": ["a", "c"]}, "sites of a run cannot change"),
    "names out of order": (("open", "begin"), {"names": ["b", "a"]}, "names of sites, in order"),
    "a name twice": (("open", "begin"), {"names": ["a", "a"]}, "names of sites, in order"),
    "a size too few": (("begin",), {"sizes": [ROWS]}, "sites of a run cannot change"),
    "another size": (("begin",), {"sizes": [ROWS + 1, 4]}, "another number of rows"),
    "a size below one": (("begin",), {"sizes": [ROWS, 0]}, "rows of every site"),
    "a value beside": (EVERY, {"among": ["a"]}, "should not have"),
    "round zero": (ROUNDS, {"round": 0}, "a number of rounds"),
    "a negative round": (ROUNDS, {"round": -1}, "a number of rounds"),
    "a round that wraps": (ROUNDS, {"round": 2**32 + 1}, "a number of rounds"),
    "half a round": (ROUNDS, {"round": 1.5}, "a number of rounds"),
    "attempt zero": (ROUNDS, {"attempt": 0}, "a number of attempts"),
    "rounds beyond the study": (ROUNDS, {"round": 40}, "has no round 40"),
    "a round left out": (("ask",), {"round": 2}, "before round 1"),
}  # fmt: skip
CASES = [(rule, kind) for rule, (kinds, _, _) in RULES.items() for kind in kinds]


@pytest.mark.parametrize(("rule", "kind"), CASES)
def test_a_message_is_refused(site, rule, kind):
    values, arrays = site.ready(kind, STUDY_OF.get(kind, LANGEVIN))
    _, change, words = RULES[rule]
    said = site.say(kind, {**values, **change}, arrays)
    assert said.kind == "refusal", rule
    assert words in said.values["message"]
    assert not said.arrays
    assert not list(site.state.glob("runs/*/last-*.bin"))
    # the twin: without that change it is answered
    answered = site.say(kind, values, arrays)
    assert answered.kind == "reply", answered.values
    assert {key: answered.values[key] for key in IDS} == IDS


@pytest.mark.parametrize("kind", ["Hello", "rounds", "reply", "refusal", ""])
def test_other_kinds_of_messages_are_refused(site, kind):
    assert "unknown kind of message" in site.say(kind, IDS).values["message"]
    assert site.say("hello", {}).values["protocol"] == wire.PROTOCOL


@pytest.mark.parametrize("kind", ROUNDS)
def test_a_round_before_the_beginning_is_refused(site, kind):
    study = STUDY_OF.get(kind, LANGEVIN)
    values, arrays = site.ready("begin", study)
    due = Site.ready
    message = due(SimpleNamespace(say=lambda *a: SimpleNamespace(kind="reply")), kind, study)
    assert "before the sites were told" in site.say(kind, *message).values["message"]
    site.say("begin", values, arrays)
    assert site.say(kind, *message).kind == "reply"


@pytest.mark.parametrize("kind", ROUNDS)
def test_a_round_is_answered_once(site, kind):
    values, arrays = site.ready(kind, STUDY_OF.get(kind, LANGEVIN))
    assert site.say(kind, values, arrays).kind == "reply"
    values = {**values, "round": 2}
    other = {name: a + 1.0 if name in ("points", "leaf_0") else a for name, a in arrays.items()}
    first = site.worker.handle(wire.pack(kind, values, arrays))
    assert wire.unpack(first).kind == "reply"
    assert site.worker.handle(wire.pack(kind, values, arrays)) == first  # the same question, the same bytes
    refused = [
        (values, other),
        ({**values, "attempt": 2}, other),
        ({**values, "round": 1}, arrays),
        ({**values, "round": 1, "attempt": 9}, arrays),
    ]
    for changed, numbers in refused:
        said = site.say(kind, changed, numbers)
        assert "answered before" in said.values["message"], changed
    assert site.say(kind, {**values, "attempt": 2}, arrays).kind == "reply"
    # a process that begins anew remembers
    site.worker = SiteWorker(site.settings, load)
    assert "answered before" in site.say(kind, {**values, "attempt": 2}, other).values["message"]
    assert site.say(kind, {**values, "round": 3}, other).kind == "reply"


@pytest.mark.parametrize("kind", ROUNDS)
def test_a_policy_limits_the_rounds_that_are_answered(site, kind):
    values, arrays = site.ready(kind, STUDY_OF.get(kind, LANGEVIN))
    run = site.worker._run
    run.site = run.site._replace(policy=make_policy({"max-rounds": 2, "audit": False}))
    assert [site.say(kind, {**values, "round": n}, arrays).kind for n in (1, 2)] == ["reply"] * 2
    assert "at most 2 rounds" in site.say(kind, {**values, "round": 3}, arrays).values["message"]
    assert site.say(kind, {**values, "round": 2, "attempt": 2}, arrays).kind == "reply"  # shows nothing more


def test_a_roster_does_not_change_and_rows_do_not_either(site, monkeypatch):
    values, arrays = site.ready("begin")
    assert site.say("begin", values, arrays).kind == "reply"
    assert site.say("begin", values, arrays).kind == "reply"
    for change in ({"sizes": [ROWS, 5]}, {"names": ["a", "c"]}):
        assert "cannot change" in site.say("begin", {**values, **change}, arrays).values["message"]
    opened, _ = Site.ready(site, "open")
    two = fald.FederatedData.from_arrays({"a": (X, Y), "b": (X, Y)})
    monkeypatch.setattr(site.worker, "_load", lambda study: replace(two, features=("u", "v")))
    assert site.say("open", opened).values["message"] == site_run.UNSAID  # its log says which
    assert "must give one client's rows" in (site.state / "site.log").read_text()
    monkeypatch.setattr(site.worker, "_load", lambda study: load(study, shift=1e-3))
    assert "rows have changed" in site.say("open", opened).values["message"]


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"weight": SHARES[:, :1]}, "weights do not fit the roster"),
        ({"weight": SHARES[0]}, "weights do not fit the roster"),
        ({"weight": np.hstack([SHARES, SHARES])}, "weights do not fit the roster"),
    ],
)
def test_weights_of_another_roster_are_refused(site, change, words):
    values, arrays = site.ready("round")
    assert words in site.say("round", values, {**arrays, **change}).values["message"]


@pytest.mark.parametrize("factor", [1 + 1e-5, 1 - 1e-5, 2.0, -1.0, np.nan])
@pytest.mark.parametrize("chain", range(CHAINS))
def test_a_private_round_is_paid_for_and_has_its_own_weights(site, factor, chain):
    values, arrays = site.ready("round", PRIVATE)
    path = site.state / "runs" / IDS["run"] / "releases.json"
    wrong = SHARES.copy()
    wrong[chain, 0] *= factor
    said = site.say("round", values, {**arrays, "weight": wrong})
    assert ("not finite" if np.isnan(factor) else "privacy of the study") in said.values["message"]
    assert json.loads(path.read_text())["releases"] == 0
    one = SHARES.copy()
    one[1 - chain, 0] = 0.0  # drawn in one chain only
    site.say("round", values, {**arrays, "weight": one})
    assert json.loads(path.read_text())["releases"] == 1
    assert site.say("round", {**values, "attempt": 2}, {**arrays, "weight": one}).kind == "reply"
    assert json.loads(path.read_text())["releases"] == 1  # asked again, it shows nothing more
    site.say("round", {**values, "round": 3}, arrays)
    assert json.loads(path.read_text())["releases"] == 3


def test_requests_and_rounds_are_not_exchanged(site, tmp_path, monkeypatch):
    values, arrays = site.ready("ask", LANGEVIN)
    assert "takes no such requests" in site.say("ask", values, arrays).values["message"]
    monkeypatch.setattr(site_run.SiteRun, "_prepare", PREPARE)
    (tmp_path / "other").mkdir()
    site = Site(tmp_path / "other")
    other, numbers = site.ready("round", STUDY)
    assert "takes no such rounds" in site.say("round", other, numbers).values["message"]


# -- what leaves, by its declarations ----------------------------------------------------------------------

REQUEST = {
    "point": {"points": np.zeros((2, DIM))},
    "state": {"states": np.zeros((2, DIM))},
    "anchor": {"anchors": np.zeros((2, DIM))},
    "local": {"local_start": np.zeros(DIM)},
    "step": {"step_states": np.zeros((2, DIM))},
    "draw": {"proposal_weights": np.ones(1)},
    "smooth": {"smooth": np.asarray(1)},
}
ALLOWED = [(m, c, k) for m in FIT_METHODS for c in (True, False) for k in requests_of(m, c)]
FORBIDDEN = [
    (m, c, k) for m in FIT_METHODS for c in (True, False) for k in ANSWERS if k not in requests_of(m, c)
]


def requesting(site, method, curvature, monkeypatch):
    """A site that has begun a study of a few-round method."""
    values, _ = site.ready("ask", STUDY)
    fit = SimpleNamespace(method=method, curvature=curvature)
    monkeypatch.setattr(site.worker._run, "study", SimpleNamespace(sampler=None, fit=fit, privacy=None))
    monkeypatch.setattr(site_run, "make_site", lambda *_: SimpleNamespace(model=None))
    return values


def test_every_kind_of_request_has_a_row():
    assert set(REQUEST) == set(ANSWERS)
    assert all(asked(request) == [kind] for kind, request in REQUEST.items())
    for odd in ("point", "pointss", "x", "masked", "proposal", "draws", ""):
        with pytest.raises(PolicyError, match="no request has a part"):
            asked({odd: np.zeros(1)})


@pytest.mark.parametrize(("method", "curvature", "kind"), FORBIDDEN)
def test_requests_that_the_method_does_not_declare_are_refused(site, monkeypatch, method, curvature, kind):
    values = requesting(site, method, curvature, monkeypatch)
    for request in (REQUEST[kind], {**REQUEST[kind], **REQUEST["point"]}):
        said = site.say("ask", values, request)
        assert said.kind == "refusal"
        assert "declares no request" in said.values["message"]
        assert not said.arrays


@pytest.mark.parametrize("kind", list(ANSWERS))
def test_answers_are_compared_with_their_declaration(site, monkeypatch, kind):
    method = next(m for m in FIT_METHODS if kind in requests_of(m))
    values = requesting(site, method, True, monkeypatch)
    monkeypatch.setattr(site_run, "expand", dict)
    monkeypatch.setattr(site_run, "check_request", lambda request, dim: None)  # it has tests of its own

    def answered(number, **changes):
        monkeypatch.setattr(site_run, "answer", lambda rows, request: honest(kind, **changes))
        return site.say("ask", {**values, "round": number}, REQUEST[kind])

    for name, right in honest(kind).items():
        for wrong in (right[None], np.ones((*right.shape, DIM)), np.ones((*right.shape[:-1], DIM + 1))):
            if ANSWERS[kind].arrays[name][1] and wrong.shape[1:] == right.shape[1:]:
                continue  # another number of points
            said = answered(1, **{name: wrong})
            assert "cannot be of the kind" in said.values["message"], (name, wrong.shape)
    assert "'rows' of its answer is not declared" in answered(1, rows=X).values["message"]
    right = answered(1)
    assert {name: a.shape for name, a in right.arrays.items()} == {
        n: a.shape for n, a in honest(kind).items()
    }
    # a site whose policy changed since the study was opened keeps its curvature
    run = site.worker._run
    run.site = run.site._replace(policy=make_policy({"curvature": False, "audit": False}))
    said = answered(2)
    curved = any(KINDS[number].curvature for number, _ in ANSWERS[kind].arrays.values())
    assert (said.kind == "refusal") == curved
    assert not curved or "curvature may not leave it" in said.values["message"]


class Fake:
    """A site of the chains whose local steps give any upload."""

    def __init__(self, reveals):
        self.reveals, self.kept = reveals, []
        arrays = [self.array(kind) for kind in reveals.uploads]
        self.right = Upload(arrays[0], arrays[1], extra=tuple(arrays[2:]))

    @staticmethod
    def array(kind):
        value = 0.0 if kind == "nothing" else 1.0
        return np.full((CHAINS, *(DIM,) * KINDS[kind].axes), value)

    def answer(self, upload):
        site = object.__new__(LangevinSite)
        site._message, site._chains, site._dim = [START], CHAINS, DIM
        site._reveals, site._rows, site._numbers, site._root = self.reveals, None, None, None
        site._client, site._start, site._memory = 0, None, None
        site._run = lambda *_, **__: (upload, None)
        site._keep = lambda task, memory: self.kept.append(task.round)
        return site.answer(Task(0, SHARES[:, 0], [START], 0, np.zeros(2, np.uint32)))


@pytest.mark.parametrize("name", [n for n in METHODS if declared(n) is not None])
def test_uploads_are_compared_with_what_the_method_declares(name):
    reveals = reveals_of(name)
    fake = Fake(reveals)
    assert fake.answer(fake.right._replace(spent=Spent(*[np.ones(CHAINS)] * 5))) is not None
    assert fake.kept == [0]
    leaves = [fake.right.position, fake.right.energy, *fake.right.extra]
    for i, (kind, right) in enumerate(zip(reveals.uploads, leaves)):
        others = [right[..., None], right[:, None]]
        others += [right + 1.0] if kind == "nothing" else []
        for wrong in others:
            changed = [*leaves[:i], wrong, *leaves[i + 1 :]]
            with pytest.raises(PolicyError):
                fake.answer(Upload(changed[0], changed[1], extra=tuple(changed[2:])))
    with pytest.raises(PolicyError, match=f"{len(leaves) + 1} arrays where it declares {len(leaves)}"):
        fake.answer(fake.right._replace(extra=(*fake.right.extra, np.ones((CHAINS, DIM)))))
    with pytest.raises(PolicyError, match="of the kind 'count'"):
        check_upload(reveals, leaves, [np.ones((CHAINS, DIM))], DIM)
    with pytest.raises(PolicyError, match="of the kind 'count'"):
        fake.answer(fake.right._replace(spent=Spent(*[np.ones((CHAINS, DIM))] * 5)))
    assert fake.kept == [0]  # nothing is kept of a round that is not sent


@pytest.mark.parametrize("name", [n for n in METHODS if declared(n) and reveals_of(n).preparation])
def test_preparations_are_compared_with_what_the_method_declares(name):
    reveals = reveals_of(name)
    right = {key: np.ones((1, *(DIM,) * KINDS[kind].axes)) for key, kind in reveals.preparation.items()}
    check_preparation(reveals, right, DIM)
    for key in right:
        for wrong in (
            {**right, key: right[key][..., None]},
            {k: a for k, a in right.items() if k != key},
            {**right, "rows": X},
        ):
            with pytest.raises(PolicyError):
                check_preparation(reveals, wrong, DIM)
    # what the coordinator passes on of all sites is held to the same declaration
    run = object.__new__(site_run.SiteRun)
    run.reveals, run.model = reveals, SimpleNamespace(dim=DIM)

    def passed_on(changes, count=2):
        both = {key: np.concatenate([a, a]) for key, a in right.items()}
        given = {f"{wire.PREPARED}{key}": a for key, a in {**both, **changes}.items() if a is not None}
        return run._prepared({"start": START, **given}, count)

    assert set(passed_on({})) == set(right)
    first = next(iter(right))
    for changes, count in (({first: None}, 2), ({"rows": X}, 2), ({first: right[first]}, 2), ({}, 3),
                           ({first: np.ones((2, DIM + 1, DIM + 1))}, 2)):  # fmt: skip
        with pytest.raises(FederationError, match="does not fit the study"):
            passed_on(changes, count)
    method = SimpleNamespace(offer=lambda model, data: {**right, "rows": X})
    sampler = SimpleNamespace(build_method=lambda: method)
    run.frozen, run.left = SimpleNamespace(secure=False), {}
    run.study, run.data = SimpleNamespace(require_any_sampler=lambda: sampler), None
    with pytest.raises(PolicyError):
        run.offer()
    method.offer = lambda model, data: right
    assert set(run.offer()) == {f"{wire.PREPARED}{key}" for key in right}
    run.frozen.secure = True
    with pytest.raises(PolicyError, match="beside a secure sum"):
        run.offer()


@pytest.mark.parametrize("name", list(METHODS))
def test_policies_decide_by_what_the_method_declares(name):
    about = declared(name)
    known = {"step-size": 1e-3, "local-steps": 1}
    own = {key: value for key, value in known.items() if key.replace("-", "_") in takes(name)}
    study = make_study({**STUDY, "sampler": {"num-rounds": 4, "method": name, **own}}, "study.toml")
    reveals = study.sampler.build_method().about.reveals
    proposal = opening.enquiry_of(study, False, 2)
    assert (proposal.curvature, proposal.sums, proposal.declared) == (
        any(KINDS[kind].curvature for kind in reveals.kinds), reveals.sums, reveals.declared,
    )  # fmt: skip
    assert (proposal.method, proposal.few_round, proposal.rounds) == (name, False, 4)
    make_policy({}).check(proposal)

    def refused(policy, secure):
        try:
            make_policy(policy).check(opening.enquiry_of(study, secure, 2))
        except PolicyError as error:
            return error.message
        return ""

    assert ("(curvature)" in refused({"curvature": False}, False)) == reveals.curvature
    assert ("(secure-sum)" in refused({}, True)) == (not reveals.sums)
    assert "(unsummed)" in refused({"unsummed": False}, False)
    assert about is None or about.reveals.curvature == reveals.curvature


@pytest.mark.parametrize("method", list(FIT_METHODS))
@pytest.mark.parametrize("curvature", [True, False])
def test_policies_decide_by_what_few_round_methods_ask_for(method, curvature):
    if method == "langevin" or not requests_of(method, curvature):
        return
    study = make_study(
        {**STUDY, "fit": {"method": method, "curvature": curvature, "max-rounds": 7}}, "study.toml"
    )
    proposal = opening.enquiry_of(study, True, 3)
    numbers = {n for kind in requests_of(method, curvature) for n, _ in ANSWERS[kind].arrays.values()}
    assert proposal.curvature == any(KINDS[n].curvature for n in numbers)
    assert (proposal.method, proposal.few_round, proposal.rounds, proposal.chains) == (method, True, 7, 1)
    assert proposal.secure_sum
    assert proposal.columns == ("y", "u", "v")


def test_messages_of_a_round_must_fit_the_study():
    fake = Fake(reveals_of("fa-ld"))
    site = object.__new__(LangevinSite)
    site._message = [START]
    assert site.read(wire.Message("round", {}, {"leaf_0": START}))[0] is START
    for leaves in ([], [START, START], [START[:1]], [START[:, :2]], [START.astype(np.float32)]):
        with pytest.raises(FederationError, match="does not fit the study"):
            site.read(wire.Message("round", {}, {f"leaf_{i}": a for i, a in enumerate(leaves)}))
    with pytest.raises(FederationError, match="does not fit the study"):
        site.read(wire.Message("round", {}, {"leaf_1": START}))
    assert fake.answer(fake.right).position.shape == (CHAINS, DIM)
