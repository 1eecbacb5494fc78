"""Attacks on sites by hand-made messages: each got more than the protocol gives, and is refused now."""

import fcntl
import json
import threading
import time
from dataclasses import replace

import numpy as np
import pytest
from hostile import (
    FEW_ROUND,
    IDS,
    NAMES,
    PRIVATE,
    SHARES,
    SIZES,
    START,
    STUDY,
    Coordinator,
    honest_server,
    kinds,
    said,
    summed,
    sums,
    uploads,
    without_none,
)

from fald.core.errors import ConfigError, PrivacyError, SecureSumError
from fald.core.version import __version__
from fald.federation import wire
from fald.federation.coordinator import sites
from fald.federation.secure.fixed_point import add, encode, total
from fald.federation.secure.session import Identity, Session, split, unmask_sum
from fald.federation.site.langevin import LangevinSite
from fald.federation.site.ledger import SiteLedger
from fald.federation.site.policy import make_policy
from fald.federation.site.record import read_record
from fald.federation.site.run import UNSAID, SiteRun
from fald.federation.site.worker import SiteWorker


@pytest.fixture
def coordinator(tmp_path):
    return Coordinator(tmp_path)


def begun(coordinator, study=STUDY):
    assert kinds(coordinator.begin(coordinator.open(study))) == ["reply"] * 3
    return coordinator


# -- 1: questions of the coordinator's own ------------------------------------------------------------------


def row_finding_states(count=40, slope=1e5):
    """States θ = (K, 0, −Kc): their gradient jumps by one row where c passes its first column."""
    cuts = np.linspace(-2, 2, count)
    return np.stack([np.full(count, slope), np.zeros(count), -slope * cuts], axis=1)


def test_states_that_single_out_rows_are_not_answered(coordinator):
    begun(coordinator, FEW_ROUND)
    for reply in coordinator.ask({"states": row_finding_states()}).values():
        assert "not the one that the protocol asks" in said(reply)


def test_without_the_audit_such_states_give_rows(tmp_path):
    """The twin: a site that switches the audit off gives single rows away, to the digits of the grid."""
    coordinator = begun(Coordinator(tmp_path, policy="audit = false\n"), FEW_ROUND)
    found = sums(coordinator.ask({"states": row_finding_states(2000)}))["state_gradients"]
    jumps = np.abs(np.diff(found[:, 1]))
    jumps = jumps[jumps > 0.05]
    rows = np.abs(np.concatenate([r["v"].values[np.abs(r["u"]) < 2] for r in coordinator.rows.values()]))
    near = np.min(np.abs(rows[:, None] - jumps), axis=1)
    assert np.mean(near < 1e-3) > 0.5


def test_honest_rounds_are_answered_and_the_next_lie_is_not(coordinator):
    begun(coordinator, FEW_ROUND)
    server = honest_server(FEW_ROUND)
    request = next(server)
    first = coordinator.ask(request)
    request = server.send(sums(first))
    moved = {**request, "points": np.asarray(request["points"]) * 1.001}
    for reply in coordinator.ask(moved, 2, passed=uploads(first)).values():
        assert "not the one that the protocol asks" in said(reply)
    assert kinds(coordinator.ask(request, 2, passed=uploads(first))) == ["reply"] * 3


def test_a_request_within_the_tolerance_moves_nothing(tmp_path):
    """The site answers its own question, so that a small lie changes no digit of the answer."""
    answers = []
    for i, factor in enumerate((1.0, 1 + 1e-12)):
        (tmp_path / str(i)).mkdir()
        coordinator, server = begun(Coordinator(tmp_path / str(i)), FEW_ROUND), honest_server(FEW_ROUND)
        first = coordinator.ask(next(server))
        request = server.send(sums(first))
        moved = {**request, "points": np.asarray(request["points"]) * factor}
        assert np.array_equal(moved["points"], request["points"]) == (i == 0)
        answers.append(sums(coordinator.ask(moved, 2, passed=uploads(first))))
    assert all(np.array_equal(answers[0][name], answers[1][name]) for name in answers[0])


def test_sums_that_were_not_given_do_not_steer_the_protocol(coordinator):
    begun(coordinator, FEW_ROUND)
    server = honest_server(FEW_ROUND)
    first = coordinator.ask(next(server))
    request = server.send(sums(first))
    right = uploads(first)
    nothing = coordinator.ask(request, 2)
    wrong = right.copy()
    wrong[0] += np.uint64(1)
    others = right.copy()
    others[1:] = others[[2, 1]]
    others[2] += np.uint64(1)
    for replies in (nothing, coordinator.ask(request, 2, passed=wrong)):
        assert "refusal" in kinds(replies)
    assert "do not cancel" in said(coordinator.ask(request, 2, passed=others)["a"])
    assert kinds(coordinator.ask(request, 2, passed=right)) == ["reply"] * 3


def test_an_upload_cannot_be_changed_although_its_masks_cancel(coordinator):
    """Only the site itself can tell that its upload was added to; and all sites must be told the same."""
    begun(coordinator, FEW_ROUND)
    server = honest_server(FEW_ROUND)
    first = coordinator.ask(next(server))
    moved = uploads(first)
    moved[1, 1, 0] += np.uint64(1)  # 2⁶⁴ steps of 2⁻⁵⁶ more in one entry of the site b
    shapes = {
        n.removeprefix("shape_"): tuple(a) for n, a in first["a"].arrays.items() if n.startswith("shape_")
    }
    request = server.send(split(unmask_sum(list(moved)), shapes))
    assert "not its own" in said(coordinator.ask(request, 2, passed=moved)["b"])
    told = coordinator.ask(request, 2, attempt=2, passed=uploads(first))["b"]
    assert "not the one that the protocol asks" in said(told)


def test_both_logs_have_both_digests(coordinator):
    begun(coordinator, FEW_ROUND)
    text = said(coordinator.ask({"states": row_finding_states()})["a"])
    own, theirs = [word for word in text.replace(",", " ").split() if len(word) == 16]
    log = (coordinator.workers["a"].settings.state / "site.log").read_text()
    assert own in log and theirs in log and own != theirs  # noqa: PT018


def test_a_request_without_curvature_in_the_study_gets_none(tmp_path):
    coordinator = Coordinator(tmp_path, policy="curvature = false\n")
    assert "curvature" in said(coordinator.open(FEW_ROUND)["a"])
    begun(coordinator, {**FEW_ROUND, "fit": {"curvature": False}})
    for reply in coordinator.ask({"anchors": np.zeros((1, 3))}).values():
        assert "declares no request" in said(reply)


# -- 2: noise that is accounted for and not there -----------------------------------------------------------


@pytest.mark.parametrize(
    "change",
    [
        {"correlation": 1 - 1e-8},
        {"step-size": 1e24, "clip-norm": 1e-34},
        {"step-size": 1e-44},
        {"temperature": 1e-30},
        {"clip-norm": 1e-20},
        {"clip-norm": 1e30},
    ],
)
@pytest.mark.parametrize("precision", ["float32", "float64"])
def test_settings_whose_noise_rounding_takes_away_are_refused(coordinator, change, precision):
    sampler = {**PRIVATE["sampler"], "precision": precision, **change}
    replies = coordinator.begin(coordinator.open({**PRIVATE, "sampler": sampler}))
    assert "of a private run must be between" in said(replies["a"])
    assert not (coordinator.workers["a"].settings.state / "ledger.jsonl").exists()


def test_a_round_at_parameters_that_swallow_the_noise_is_refused_and_not_charged(tmp_path):
    coordinator = begun(Coordinator(tmp_path, secure=False, policy="unsummed = true\n"), PRIVATE)
    releases = coordinator.workers["a"]._folder(coordinator.ids["run"]) / "releases.json"
    assert "last digits" in said(coordinator.round(position=START + 1e14)["a"])
    assert json.loads(releases.read_text()) == {"releases": 0}
    assert coordinator.round(position=START + 1e8)["a"].kind == "reply"
    assert json.loads(releases.read_text()) == {"releases": 2}


def test_noise_lost_beside_large_parameters_is_refused():
    from fald.langevin.fald import fald
    from fald.langevin.safety import check_noise

    method = fald(local_steps=1, step_size=1e-6, clip_norm=1.0)
    check_noise(method, 0.5, 0.5, largest=1.0)
    with pytest.raises(PrivacyError, match="last digits"):
        check_noise(method, 0.5, 0.5, largest=1e6)


def test_a_prior_that_swallows_the_noise_is_refused_and_not_charged(tmp_path):
    """A study may declare any prior; a narrow one moves parameters so far that no noise is left."""
    study = {**PRIVATE, "model": {"family": "logistic", "prior-scale": 1e-9}}
    coordinator = begun(Coordinator(tmp_path, secure=False, policy="unsummed = true\n"), study)
    assert "last digits" in said(coordinator.round(position=START + 1.0)["a"])
    releases = coordinator.workers["a"]._folder(coordinator.ids["run"]) / "releases.json"
    assert json.loads(releases.read_text()) == {"releases": 0}


# -- 3: what a refusal tells --------------------------------------------------------------------------------


def opening(coordinator, **data):
    study = {**FEW_ROUND, "data": {**STUDY["data"], **data}, "model": {"family": "poisson"}}
    return coordinator.open(study)["a"]


def test_errors_do_not_bisect_a_column(tmp_path):
    """A Poisson target must not be negative, so that shifting it asks for its least value, bit by bit."""
    coordinator = Coordinator(tmp_path)
    replies = [opening(coordinator, scaling={"y": {"center": c, "scale": 1}}) for c in (0.5, 2.0)]
    replies.append(opening(coordinator, categories={"u": ["left", "right"]}))
    assert {said(reply) for reply in replies} == {UNSAID}
    assert {reply.values["error"] for reply in replies} == {"FederationError"}


def test_forbidden_columns_are_refused_before_rows_are_read(tmp_path):
    coordinator = Coordinator(tmp_path, policy='allowed-columns = ["y", "u"]\n')
    read = []
    coordinator.workers["a"]._load = lambda study: read.append(study)
    for center in (0.5, 2.0):
        assert "(allowed-columns)" in said(
            opening(coordinator, scaling={"v": {"center": center, "scale": 1}})
        )
    assert read == []


def test_failed_openings_are_counted_on_disk_and_limited(tmp_path):
    coordinator = Coordinator(tmp_path, policy="max-failed-opens = 3\n")
    for i in range(3):
        assert said(opening(coordinator, scaling={"y": {"center": i + 0.5, "scale": 1}})) == UNSAID
        coordinator.again("a")
    assert "(max-failed-opens)" in said(coordinator.open()["a"])
    path = coordinator.workers["a"].settings.state / "failed.json"
    path.write_text(json.dumps([time.time() - 90_000] * 3))
    assert coordinator.open()["a"].kind == "reply"


def test_studies_opened_at_once_are_counted_one_after_the_other(tmp_path, monkeypatch):
    coordinator = Coordinator(tmp_path, policy="max-failed-opens = 1\n")
    other, rows, found = SiteWorker(coordinator.workers["a"].settings), SiteWorker._rows, {}
    study = {**FEW_ROUND, "data": {**STUDY["data"], "scaling": {"y": {"center": 0.5, "scale": 1}}}}
    values = {"version": __version__, "study": without_none({**study, "model": {"family": "poisson"}})}
    asked = wire.pack("open", {**IDS, "run": "9" * 16, **values, "secure": True, "names": NAMES})
    rival = threading.Thread(target=lambda: found.update(rival=wire.unpack(other.handle(asked))))

    def slow(self, study):
        monkeypatch.setattr(SiteWorker, "_rows", rows)
        rival.start()
        rival.join(1.0)  # without a lock it is done by then
        return rows(self, study)

    monkeypatch.setattr(SiteWorker, "_rows", slow)
    monkeypatch.setattr(SiteWorker, "_note", lambda *_, **__: None)  # written by process, not by thread
    ids = {**IDS, **values, "secure": True, "names": NAMES}
    assert said(wire.unpack(coordinator.workers["a"].handle(wire.pack("open", ids)))) == UNSAID
    rival.join()
    assert "(max-failed-opens)" in said(found["rival"])


# -- 4: uploads that are more than sums ---------------------------------------------------------------------


@pytest.mark.parametrize("method", ["fsgld", "laplace", "scaffold-2"])
def test_nothing_leaves_beside_a_secure_sum(coordinator, method):
    settings = {"num-rounds": 10, "num-chains": 2, "step-size": 1e-3, "local-steps": 2, "method": method}
    reply = coordinator.open({**STUDY, "sampler": settings})["a"]
    said(reply)
    assert not reply.arrays


# -- 5: parameters at which a row overflows -----------------------------------------------------------------


def test_parameters_that_are_no_numbers_are_refused(coordinator):
    begun(coordinator)
    for bad in (np.nan, np.inf):
        assert "not finite" in said(coordinator.round(position=START + bad)["a"])


def test_rows_that_overflow_are_no_refusal(tmp_path):
    """A refusal would name the site and tell whether one of its rows is large."""
    coordinator = begun(Coordinator(tmp_path, policy="audit = false\n"))
    replies = coordinator.round(position=START + 1e300)
    assert kinds(replies) == ["reply"] * 3
    assert not np.isfinite(unmask_sum(list(uploads(replies)))).all()


def test_how_many_rows_overflow_is_not_told(tmp_path):
    """Otherwise moving the place at which rows overflow would count those beyond it: each value in turn."""
    study = {**FEW_ROUND, "model": {"family": "poisson"}}
    places = np.array([[0.0, 0.0, 0.0], [1e5, 0.0, 1e5], [1e5, 0.0, -5e4]])  # none; u > −1; u > 1/2
    coordinator = begun(Coordinator(tmp_path, policy="audit = false\n"), study)
    beyond = [[(rows["u"] > c).sum() for rows in coordinator.rows.values()] for c in (-0.99, 0.51)]
    assert all(min(counts) > 0 for counts in beyond)
    assert sum(beyond[0]) > 2 * sum(beyond[1])
    replies = coordinator.ask({"points": places})
    assert kinds(replies) == ["reply"] * 3
    words = total(uploads(replies))
    assert np.array_equal(words[:, 1], words[:, 2])
    assert np.isfinite(unmask_sum(list(uploads(replies)))).tolist() == [True, False, False]


def test_a_row_whose_gradient_is_no_number_counts_as_zero():
    from fald.calculus.gradients import clip_rows

    rows = np.array([[np.nan, 1.0], [np.inf, 0.0], [3.0, 4.0], [1e-30, 0.0], [1e30, 1e30]], np.float32)
    cut, factor = clip_rows(rows, np.float32(1e-34))
    norms = np.linalg.norm(np.asarray(cut, float) * np.asarray(factor, float)[:, None], axis=1)
    assert np.isfinite(norms).all()
    assert (norms <= 1e-34 * (1 + 1e-5)).all()


def test_a_private_round_in_which_rows_overflow_is_numbers_and_is_charged(tmp_path):
    """Whether a row overflows shows in nothing: not in a mark, not in a refusal, not in the ledger."""
    study = {**PRIVATE, "model": {"family": "poisson"}}
    coordinator = begun(Coordinator(tmp_path, secure=False, policy="unsummed = true\n"), study)
    place = np.tile([1e5, 0.0, 0.0], (2, 1))  # exp(1e5 u) of every row with u > .007
    assert (coordinator.rows["a"]["u"] > 0.01).any()
    reply = coordinator.round(position=place)["a"]
    assert np.isfinite(reply.arrays["leaf_0"]).all()
    releases = coordinator.workers["a"]._folder(coordinator.ids["run"]) / "releases.json"
    assert json.loads(releases.read_text()) == {"releases": 2}


def test_a_private_round_that_fails_at_the_rows_is_charged_as_if_answered(tmp_path, monkeypatch):
    coordinator = begun(Coordinator(tmp_path), PRIVATE)

    def fails(self, task):
        raise FloatingPointError("a row of 17.5 overflows")

    monkeypatch.setattr(LangevinSite, "answer", fails)
    assert {said(reply) for reply in coordinator.round().values()} == {UNSAID}
    begun_, failed = read_record(coordinator.workers["a"].settings.state)[-2:]
    assert failed["epsilon"] == begun_["epsilon"] > 0
    releases = coordinator.workers["a"]._folder(coordinator.ids["run"]) / "releases.json"
    assert json.loads(releases.read_text()) == {"releases": 2}


# -- 6: noise that others claim -----------------------------------------------------------------------------


def spent(coordinator, sizes):
    opened = coordinator.open(PRIVATE)
    coordinator.begin(opened, sizes=dict.fromkeys(NAMES, sizes))
    return json.loads((coordinator.workers["a"].settings.state / "ledger.jsonl").read_text())["epsilon"]


def test_the_ledger_does_not_count_noise_of_others(tmp_path):
    """With a secure sum others' noise would hide this site's rows, if they were honest and had any."""
    for name in ("with", "without"):
        (tmp_path / name).mkdir()
    together = spent(Coordinator(tmp_path / "with"), SIZES)
    alone = Coordinator(tmp_path / "without", secure=False, policy="unsummed = true\n")
    assert together == pytest.approx(spent(alone, SIZES), rel=1e-9)


def test_colluders_are_taken_as_the_largest(tmp_path):
    """One that claims two thousand million rows takes all other noise away."""
    charged = []
    for i, (policy, sizes) in enumerate(
        [("", [20, 30, 50]), ("colluders = 1\n", [20, 30, 50]), ("colluders = 0\n", [20, 30, 50])]
    ):
        (tmp_path / str(i)).mkdir()
        text = f"[privacy]\n{policy}" if policy else None
        charged.append(spent(Coordinator(tmp_path / str(i), policy=text), sizes))
    assert charged[0] > charged[1] > charged[2]


# -- 7, 8: rounds out of range, and the same noise twice ----------------------------------------------------


@pytest.mark.parametrize("secure", [True, False])
def test_rounds_that_the_study_has_not_are_refused(tmp_path, secure):
    coordinator = begun(Coordinator(tmp_path, secure, policy="unsummed = true\n"))
    for number in (-1, 0, 11, 2**31 - 1, 2**31, 2**40, 1.5, "1", True):
        said(coordinator.round(number=number)["a"])


def private_upload(coordinator, **how):
    reply = coordinator.round(**how)["a"]
    assert reply.kind == "reply", reply.values
    return reply.arrays["leaf_0"]


def test_no_two_tasks_get_the_same_noise(tmp_path):
    coordinator = Coordinator(tmp_path, secure=False, policy="unsummed = true\n")
    begun(coordinator, PRIVATE)
    first = private_upload(coordinator)
    assert np.array_equal(first, private_upload(coordinator))  # the same message, the same reply
    coordinator.again("a")
    assert np.array_equal(first, private_upload(coordinator))  # from the disk
    coordinator.ids["session"] = "4" * 16
    begun(coordinator, PRIVATE)
    assert np.array_equal(first, private_upload(coordinator))  # the same task after a crash
    coordinator.ids["session"] = "5" * 16
    begun(coordinator, PRIVATE)
    other = private_upload(coordinator, position=START + 1e-3)  # another task in the same round
    assert np.abs(other - 1e-3 - first).mean() > 1e-2


def test_two_workers_on_one_folder_know_of_each_other(coordinator):
    begun(coordinator)
    first = coordinator.workers["a"]
    assert coordinator.round()["a"].kind == "reply"
    coordinator.again("a")
    arrays = {"weight": np.tile(SHARES, (2, 1)), "leaf_0": START + 1}
    values = {"round": 1, "attempt": 2, "leaves": 1, "saved": 0}
    for worker in (coordinator.workers["a"], first):
        content = wire.pack("round", {**coordinator.ids, **values}, arrays)
        assert "answered before" in said(wire.unpack(worker.handle(content)))


def test_what_another_process_has_answered_is_read_before_each_message(coordinator):
    """Both processes have opened the run before one of them answers."""
    begun(coordinator)
    first = coordinator.workers["a"]
    coordinator.again("a")
    assert "has no round 11" in said(coordinator.round(number=11)["a"])
    second, coordinator.workers["a"] = coordinator.workers["a"], first
    assert coordinator.round()["a"].kind == "reply"
    coordinator.workers["a"] = second
    assert "answered before" in said(coordinator.round(position=START + 1, attempt=2)["a"])


def test_no_other_process_answers_a_run_meanwhile(coordinator, monkeypatch):
    begun(coordinator)
    seen = []

    def answer(self, message, digest, reply):
        with open(self.folder / "lock", "a") as file, pytest.raises(BlockingIOError):
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        seen.append(message.kind)
        return reply({})

    monkeypatch.setattr(SiteRun, "answer", answer)
    assert coordinator.round()["a"].kind == "reply"
    assert seen


def test_start_and_root_are_the_study_s(coordinator):
    opened = coordinator.open()
    identities = {name: worker.identity.public for name, worker in coordinator.workers.items()}
    hellos = {name: reply.values["hello"] for name, reply in opened.items()}
    values = {"names": NAMES, "sizes": SIZES, "hellos": hellos, "identities": identities}
    for extra in ({"start": np.zeros((1000, 3))}, {"root": np.ones(2, np.uint32)}):
        assert "should not have" in said(coordinator.say("a", "begin", values, extra))


def test_a_broadcast_must_be_the_average(coordinator):
    begun(coordinator)
    assert "not the average" in said(coordinator.round(position=START + 1)["a"])
    first = coordinator.round()
    average = summed(first)[:6].reshape(2, 3)
    shown = uploads(first)
    assert "not passed on" in said(coordinator.round(position=average, number=2)["a"])
    moved = coordinator.round(position=average + 1e-3, number=2, passed=shown)
    assert "not the average" in said(moved["b"])
    assert kinds(coordinator.round(position=average, number=2, passed=shown)) == ["reply"] * 3


def test_a_broadcast_asked_again_is_answered_at_the_site_s_own(tmp_path):
    """Otherwise a lie within the tolerance would get, in a second attempt, a second sum beside the first."""
    coordinator = begun(Coordinator(tmp_path))
    first = coordinator.round()
    average, shown = summed(first)[:6].reshape(2, 3), uploads(first)
    lie = {"position": average + 0.9e-8 * np.abs(average).max(), "number": 2}
    both = [summed(coordinator.round(**lie, attempt=n, passed=shown)) for n in (1, 2)]
    assert np.array_equal(*both)
    assert "not passed on" in said(coordinator.round(**lie, attempt=3)["a"])
    # nor may a site in league say afterwards that it had uploaded a little more
    little = np.zeros(shown.shape[2])
    little[0] = 1e-9 * np.abs(average).max()
    told = np.stack([*shown[:2], add(shown[2], encode(little))])
    replies = coordinator.round(**lie, attempt=4, passed=told)
    assert "another sum of round 1" in said(replies["a"])
    assert "another sum of round 1" in said(replies["b"])


def lies(first, more):
    """Uploads with one sum that is none of theirs: to each site another's is changed, by ``more``."""
    changed = {"a": 1, "b": 2, "c": 0}
    found = {name: uploads(first) for name in NAMES}
    for name, place in changed.items():
        found[name][place] = add(found[name][place], encode(more))
    return found


@pytest.mark.parametrize("again", [True, False])
def test_what_was_shown_to_each_site_differently_binds_its_masks_ever_after(coordinator, again):
    """Each finds its own upload there, and one sum; asked again without, they would answer alike."""
    begun(coordinator)
    first = coordinator.round()
    right = summed(first)
    more = np.where(np.arange(len(right) + 1) < 6, 0.5, 0.0)
    average = (right + more[:-1])[:6].reshape(2, 3)
    replies = coordinator.round(position=average, number=2, passed=lies(first, more))
    if again:
        replies = coordinator.round(position=average, number=2, attempt=2)
    assert kinds(replies) == ["reply"] * 3
    with pytest.raises(SecureSumError, match="do not cancel"):
        unmask_sum(list(uploads(replies)))


@pytest.mark.parametrize("again", [True, False])
def test_nor_do_sites_answer_requests_alike_that_rest_on_what_each_was_shown(coordinator, again):
    begun(coordinator, FEW_ROUND)
    server = honest_server(FEW_ROUND)
    first = coordinator.ask(next(server))
    more = np.zeros(uploads(first).shape[2])
    more[0] = 0.5
    told = lies(first, more)
    shapes = {
        n.removeprefix("shape_"): tuple(a) for n, a in first["a"].arrays.items() if n.startswith("shape_")
    }
    request = server.send(split(unmask_sum(list(told["a"])), shapes))
    replies = coordinator.ask(request, 2, passed=told)
    if again:
        replies = coordinator.ask(request, 2, attempt=2)
    assert kinds(replies) == ["reply"] * 3
    with pytest.raises(SecureSumError, match="do not cancel"):
        unmask_sum(list(uploads(replies)))
    if again:  # nor in the rounds that follow
        replies = coordinator.ask(request, 2, attempt=3, passed=uploads(first))
        assert "refusal" in kinds(replies)


@pytest.mark.parametrize("process", ["the same", "another"])
def test_a_sum_that_came_with_a_refused_request_must_come_again(coordinator, process):
    """Its copy of the server has the sum, but no answer yet binds its masks to what it was shown alone."""
    begun(coordinator, FEW_ROUND)
    server = honest_server(FEW_ROUND)
    first = coordinator.ask(next(server))
    more = np.zeros(uploads(first).shape[2])
    more[0] = 0.5
    told = lies(first, more)
    shapes = {
        n.removeprefix("shape_"): tuple(a) for n, a in first["a"].arrays.items() if n.startswith("shape_")
    }
    request = server.send(split(unmask_sum(list(told["a"])), shapes))
    odd = {**request, "points": np.asarray(request["points"]) * 1.001}
    assert kinds(coordinator.ask(odd, 2, passed=told)) == ["refusal"] * 3
    if process == "another":
        for name in NAMES:
            coordinator.again(name)
    for reply in coordinator.ask(request, 2, attempt=2).values():
        assert "not passed on" in said(reply)


def test_a_process_that_takes_a_run_over_answers_from_the_same_rows(coordinator):
    """Another row more or less, and the difference of two sums would be that row's."""
    begun(coordinator)
    assert kinds(coordinator.round()) == ["reply"] * 3
    table = coordinator.workers["a"].settings.data
    lines = table.read_text().splitlines(keepends=True)
    table.write_text("".join([*lines[:-1], "9.0,9.0,1\n"]))
    coordinator.again("a")
    assert "rows have changed" in said(coordinator.round(attempt=2)["a"])
    table.write_text("".join(lines))
    coordinator.again("a")
    assert coordinator.round(attempt=3)["a"].kind == "reply"


def test_a_coordinator_that_has_forgotten_a_round_may_ask_it_again(coordinator):
    """It may have saved less than it has shown when it was killed; the same question is no new one."""
    begun(coordinator)
    first = coordinator.round()
    average = summed(first)[:6].reshape(2, 3)
    second = coordinator.round(position=average, number=2, passed=uploads(first))
    coordinator.ids["session"] = "4" * 16
    begun(coordinator)
    assert np.array_equal(summed(coordinator.round(position=average, number=2)), summed(second))
    assert "not passed on" in said(
        coordinator.round(position=summed(second)[:6].reshape(2, 3), number=3)["a"]
    )


@pytest.mark.parametrize("study", [STUDY, FEW_ROUND], ids=["chains", "few rounds"])
@pytest.mark.parametrize("silent", ["c", "abc"])
def test_sites_that_audit_and_sites_that_do_not_give_no_sum_together(coordinator, study, silent):
    """Those answer their own question, these what was asked: a lie within the tolerance moved one alone."""
    for name in silent:
        settings = coordinator.workers[name].settings
        path = settings.state / "no-audit.toml"
        path.write_text("audit = false\n")
        coordinator.workers[name] = SiteWorker(replace(settings, policy=path))
    begun(coordinator, study)
    replies = coordinator.round() if study is STUDY else coordinator.ask(next(honest_server(study)))
    if len(silent) == 3:
        assert len(summed(replies))
    else:
        with pytest.raises(SecureSumError, match="do not cancel"):
            summed(replies)


# -- 10, 11: one id for several runs ------------------------------------------------------------------------


def test_a_run_does_not_go_on_without_a_site(coordinator):
    begun(coordinator)
    values = {"version": __version__, "study": STUDY, "secure": True, "names": ["a", "b", "d"]}
    assert "not those known here" in said(coordinator.say("a", "open", values))
    coordinator.ids["run"] = "3" * 16
    assert "not those known here" in said(coordinator.say("a", "open", values))


def test_subsets_may_be_allowed_by_the_site_alone(tmp_path):
    coordinator = begun(Coordinator(tmp_path, policy='allowed-subsets = [["a", "b", "d"]]\n'))
    coordinator.ids["run"] = "3" * 16
    values = {"version": __version__, "study": STUDY, "secure": True, "names": ["a", "b", "d"]}
    assert coordinator.say("a", "open", values).kind == "reply"
    shown = [e["sites"] for e in read_record(coordinator.workers["a"].settings.state) if e["asked"] == "open"]
    assert shown == [NAMES, ["a", "b", "d"]]


@pytest.mark.parametrize(
    "change",
    [{"model": {"family": "logistic", "prior-scale": 1.0}}, {"sampler": {**STUDY["sampler"], "seed": 5}}],
)
def test_one_id_is_one_study(coordinator, change):
    begun(coordinator)
    assert "another study" in said(coordinator.open({**STUDY, **change})["a"])
    coordinator.secure = False
    assert "unsummed" in said(coordinator.open()["a"])


# -- 12: limits that were walked around ---------------------------------------------------------------------


def test_rounds_are_counted_over_sessions(tmp_path):
    coordinator = Coordinator(tmp_path, secure=False, policy="unsummed = true\nmax-rounds = 10\n")
    for session in range(3):
        coordinator.ids["session"] = f"{session:016x}"
        begun(coordinator)
        replies = [coordinator.round(position=START + session, number=n) for n in range(1, 6)]
        expected = ["reply"] * 5 if session < 2 else ["refusal"] * 5
        assert [r["a"].kind for r in replies] == expected


def test_privacy_that_is_required_needs_a_limit():
    with pytest.raises(ConfigError, match="needs 'max-epsilon'"):
        make_policy({"privacy": {"required": True}})


# -- 13: who decides about the secure sum -------------------------------------------------------------------


def test_three_sites_send_no_upload_of_their_own_by_default(tmp_path):
    coordinator = Coordinator(tmp_path, secure=False)
    assert "(unsummed)" in said(coordinator.open()["a"])


def test_a_first_run_of_two_sites_is_not_believed(tmp_path):
    """Before it has pins a site sends single uploads only if its own files know of two sites."""
    coordinator = Coordinator(tmp_path, secure=False)
    asked = {"version": __version__, "study": without_none(FEW_ROUND), "secure": False, "names": ["a", "b"]}
    settings = coordinator.workers["a"].settings
    for known, kind in ((), "refusal"), (("a", "b", "c"), "refusal"), (("a", "b"), "reply"):
        coordinator.workers["a"] = SiteWorker(replace(settings, sites=known))
        assert coordinator.say("a", "open", asked).kind == kind


def test_a_first_secure_sum_is_over_the_sites_that_joined(tmp_path):
    coordinator = Coordinator(tmp_path)
    settings = coordinator.workers["a"].settings
    coordinator.workers["a"] = SiteWorker(replace(settings, sites=("a", "b", "c", "d")))
    assert "differ in 'd'" in said(coordinator.open()["a"])


def test_a_beginning_that_is_refused_pins_nobody(coordinator):
    """Two keys of three, announced once, would make this a federation of two: with single uploads allowed."""
    opened = coordinator.open(FEW_ROUND)
    hellos = {name: reply.values["hello"] for name, reply in opened.items()}
    keys = {name: worker.identity.public for name, worker in coordinator.workers.items()}
    values = {"names": NAMES, "sizes": SIZES, "hellos": hellos}
    for announced in ({"a": keys["a"], "b": keys["b"]}, {**keys, "c": keys["b"]}, {}, {"a": 1, "b": [2]}):
        said(coordinator.say("a", "begin", {**values, "identities": announced}))
    coordinator.ids["run"], alone = "7" * 16, {"study": without_none(FEW_ROUND), "secure": False}
    asked = {"version": __version__, "names": ["a", "b"], **alone}
    assert "(unsummed)" in said(coordinator.say("a", "open", asked))
    coordinator.ids["run"] = "0" * 16
    more = {**keys, "d": keys["a"]}
    assert coordinator.say("a", "begin", {**values, "identities": more}).kind == "reply"
    assert set(json.loads((coordinator.workers["a"].settings.state / "pins.json").read_text())) == set(NAMES)


def first_runs(coordinator):
    """What begins two runs that a site has opened, with and without a fourth site, before either began."""
    begins, keys = [], {}
    for run, names in (("3" * 16, [*NAMES, "d"]), ("4" * 16, NAMES)):
        ids = {**coordinator.ids, "run": run}
        asked = {"version": __version__, "study": without_none(FEW_ROUND), "secure": True, "names": names}
        worker = coordinator.workers["a"]
        opened = wire.unpack(worker.handle(wire.pack("open", {**ids, **asked})))
        others = {n: keys.setdefault(n, Identity.generate()) for n in names if n != "a"}
        hellos = {n: Session(k, n, f"{run} {ids['session']}").hello() for n, k in others.items()}
        identities = {"a": worker.identity.public, **{n: k.public for n, k in others.items()}}
        about = {"names": names, "sizes": [*SIZES, 7][: len(names)], "identities": identities}
        about["hellos"] = {"a": opened.values["hello"], **hellos}
        begins.append(wire.pack("begin", {**ids, **about}))
    return begins


def test_runs_opened_before_any_has_begun_have_the_sites_of_the_first(coordinator):
    """The difference of their sums would be the fourth site's numbers."""
    first, second = first_runs(coordinator)
    worker = coordinator.workers["a"]
    assert wire.unpack(worker.handle(first)).kind == "reply"
    assert "differ in 'd'" in said(wire.unpack(worker.handle(second)))


def test_of_two_runs_that_begin_at_once_one_pins_its_sites(coordinator, monkeypatch):
    first, second = first_runs(coordinator)
    found, begin = {}, SiteRun.begin
    other = SiteWorker(coordinator.workers["a"].settings)
    rival = threading.Thread(target=lambda: found.update(second=wire.unpack(other.handle(second))))

    def slow(self, *args, **named):
        monkeypatch.setattr(SiteRun, "begin", begin)
        rival.start()
        rival.join(1.0)  # without a lock it is done by then
        return begin(self, *args, **named)

    monkeypatch.setattr(SiteRun, "begin", slow)
    monkeypatch.setattr(SiteWorker, "_note", lambda *_, **__: None)  # written by process, not by thread
    found["first"] = wire.unpack(coordinator.workers["a"].handle(first))
    rival.join()
    assert found["first"].kind == "reply"
    assert "differ in 'd'" in said(found["second"])


class Killed(BaseException):
    """What ends a process on the spot."""


def test_no_run_goes_on_whose_process_was_killed_before_it_had_pinned(coordinator, monkeypatch):
    """A coordinator may end a site's process; a second first run, without a site, would show its numbers."""

    def kill(self, keys):
        raise Killed

    opened = coordinator.open()
    with monkeypatch.context() as once:
        once.setattr(SiteWorker, "_pin", kill)
        with pytest.raises(Killed):
            coordinator.begin(opened)
    coordinator.again("a")
    assert "before the sites were told of each other" in said(coordinator.round()["a"])
    assert kinds(coordinator.begin(opened)) == ["reply"] * 3
    assert coordinator.round()["a"].kind == "reply"


def test_a_beginning_that_is_refused_is_none(tmp_path):
    """Its keys were accepted and nobody was pinned: rounds after it would be those of a run without pins."""
    coordinator = Coordinator(tmp_path, policy="[privacy]\nmax-epsilon = 1000\ndelta = 1e-3\n")
    study = {**PRIVATE, "privacy": {"delta": 1e-5, "max-epsilon": 1000.0}}
    begun(coordinator, study)
    for worker in coordinator.workers.values():
        ledger = SiteLedger(worker.settings.state / "ledger.jsonl", 1000.0, 1e-3)
        ledger.reserve("before", 1000 - 1.9 * ledger.spent(1e-3), 1e-5)
    coordinator.ids["run"] = "2" * 16
    for reply in coordinator.begin(coordinator.open(study)).values():
        assert "over all studies" in said(reply)
    for reply in coordinator.round().values():  # a few of its rounds would be within the budget
        assert "before the sites were told of each other" in said(reply)


# -- 14: requests of any size -------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "request_",
    [
        {"anchors": np.zeros((2**10 + 1, 3))},  # what explorers ask for
        {"states": np.zeros((2**16 + 1, 3))},
        {"points": np.zeros((2**18 + 1, 3))},
        {"proposal_count": np.asarray(2**18 + 1)},
    ],
    ids=lambda request: next(iter(request)),
)
def test_requests_larger_than_any_of_the_protocol_are_refused_without_the_audit_too(tmp_path, request_):
    coordinator = begun(Coordinator(tmp_path, policy="audit = false\n"), FEW_ROUND)
    name = next(iter(request_))
    assert f"the part {name!r} of a request" in said(coordinator.ask(request_)["a"])
    within = {"anchors": np.zeros((2, 3))} if name == "anchors" else {"points": np.zeros((3, 3))}
    assert kinds(coordinator.ask(within)) == ["reply"] * 3


def test_draws_are_limited_by_the_policy(tmp_path):
    coordinator = begun(Coordinator(tmp_path, policy="max-draws = 100\n"), FEW_ROUND)
    server = honest_server(FEW_ROUND)
    first = coordinator.ask(next(server))
    request = server.send(sums(first))
    assert int(request["proposal_count"]) > 100
    assert "(max-draws" in said(coordinator.ask(request, 2, passed=uploads(first))["a"])


# -- also: work, and words ----------------------------------------------------------------------------------


@pytest.mark.parametrize("key", ["local-steps", "num-chains", "num-rounds"])
def test_work_is_limited_by_default(coordinator, key):
    reply = coordinator.open({**STUDY, "sampler": {**STUDY["sampler"], key: 2_000_000}})["a"]
    assert "(max-" in said(reply)


@pytest.mark.parametrize("options", [{"num-burn": 10**9}, {"num-fit": 10**9}])
def test_work_by_options_of_a_method_is_limited_too(tmp_path, options):
    sampler = {**STUDY["sampler"], "method": "consensus", "options": options}
    coordinator = Coordinator(tmp_path, secure=False, policy="unsummed = true\n")
    assert "(max-local-steps)" in said(coordinator.open({**STUDY, "sampler": sampler})["a"])


def test_a_model_of_any_size_is_not_built(coordinator):
    model = {"family": "softmax", "num-classes": 10**8}
    assert said(coordinator.open({**FEW_ROUND, "model": model})["a"]) == UNSAID
    deep = {"family": "mlp", "num-classes": 2, "options": {"hidden": [10**5, 10**5]}}
    assert "more parameters" in said(coordinator.open({**FEW_ROUND, "model": deep})["a"])


def test_levels_without_number_are_not_encoded(coordinator):
    """A table of so many columns would end the site's process."""
    levels = {"u": [str(i) for i in range(30_000)]}
    study = {**FEW_ROUND, "data": {**STUDY["data"], "categories": levels}}
    assert "more parameters" in said(coordinator.open(study)["a"])


def test_studies_are_counted_on_disk_and_limited(tmp_path):
    """Studies whose scalings cut a column at places of their own are the states of attack 1, one by one."""
    coordinator = Coordinator(tmp_path, policy="max-studies = 2\n")
    replies = []
    for run, cut in (1, 0.1), (2, 0.1), (2, 0.1), (1, 0.1), (3, 0.1), (4, 0.3):
        coordinator.ids["run"] = f"{run:016x}"
        scaling = {"u": {"center": cut, "scale": 1e-6}}
        replies.append(coordinator.open({**FEW_ROUND, "data": {**STUDY["data"], "scaling": scaling}})["a"])
        coordinator.again("a")
    assert [reply.kind for reply in replies] == ["reply"] * 4 + ["refusal"] * 2
    assert "(max-studies)" in said(replies[-1])


def test_other_studies_under_a_known_id_do_not_reach_the_rows(tmp_path):
    """Refused after the rows were read, each would tell whether it fits them, and none would count."""
    coordinator = Coordinator(tmp_path)
    assert opening(coordinator, scaling={"y": {"center": -1.0, "scale": 1}}).kind == "reply"
    worker, read = coordinator.workers["a"], []
    worker._load = lambda study: read.append(study)
    for center in (0.0, 0.5, 2.0):
        assert "another study" in said(opening(coordinator, scaling={"y": {"center": center, "scale": 1}}))
    assert read == []


@pytest.mark.parametrize(
    "long",
    [
        {"title": "x" * 3_000_000},
        {"data": {"target": "y" * 999, "features": ["u"] * 9999}},
        {"data": {"target": "y", "features": [f"{i}{chr(0x1F600) * 997}" for i in range(200)]}},
    ],
)
def test_no_study_makes_the_record_unreadable(coordinator, long):
    """A line longer than what is read of the record's end would stop the site for good."""
    coordinator.open({**FEW_ROUND, **long})
    coordinator.again("a")  # which reads the end of the record from the disk
    coordinator.ids["run"] = "9" * 16
    assert coordinator.open(FEW_ROUND)["a"].kind == "reply"
    assert max(map(len, (coordinator.workers["a"].settings.state / "record.jsonl").open())) < 2_500_000


def test_a_refused_study_does_not_change_the_precision_of_a_run(tmp_path):
    found = []
    for disturbed in (False, True):
        (tmp_path / str(disturbed)).mkdir()
        coordinator = begun(Coordinator(tmp_path / str(disturbed)))
        if disturbed:
            coordinator.ids["run"] = "9" * 16
            other = {**STUDY["sampler"], "precision": "float32", "num-rounds": 10**7}
            assert kinds(coordinator.open({**STUDY, "sampler": other})) == ["refusal"] * 3
            coordinator.ids["run"] = "0" * 16
        found.append(summed(coordinator.round()))
    assert np.array_equal(*found)


def test_what_leaves_once_more_is_recorded_once_more(coordinator):
    """A reply that got lost, or whose line could not be written, leaves when the same message comes again."""
    begun(coordinator, FEW_ROUND)
    request = next(honest_server(FEW_ROUND))
    coordinator.ask(request)
    coordinator.again("a")
    coordinator.ask(request)
    first, again = (e["left"] for e in read_record(coordinator.workers["a"].settings.state)[-2:])
    assert first == again
    assert first["value"] > 0


def test_terminal_escapes_are_neutralised(coordinator):
    escape = "\x1b]0;owned\x07"
    coordinator.open({**STUDY, "title": escape})
    coordinator.workers["a"].log(f"words of somebody else: {escape}")
    state = coordinator.workers["a"].settings.state
    assert "\x1b" not in (state / "record.jsonl").read_text() + (state / "site.log").read_text()
    assert "\\u001b" not in (state / "record.jsonl").read_text()
    values = {"version": escape, "study": STUDY, "secure": True, "names": NAMES}
    assert "\x1b" not in said(coordinator.say("a", "open", values))


def test_terminal_escapes_of_a_site_are_neutralised_at_the_coordinator():
    refusal = wire.Message("refusal", {"message": "no\x1b[2J\n way"}, {})
    assert sites._text(refusal, "message") == "no?[2J way"


def test_masks_of_another_task_give_noise(coordinator):
    """The twin of all sums above: uploads of different sessions do not add up to anything."""
    begun(coordinator)
    first = coordinator.round()
    coordinator.ids["session"] = "5" * 16
    begun(coordinator)
    again = coordinator.round()
    assert np.array_equal(summed(first), summed(again))
    with pytest.raises(SecureSumError, match="do not cancel"):
        unmask_sum([first["a"].arrays["masked"], *[again[n].arrays["masked"] for n in "bc"]])
