"""The worker of a site part by part: what it lets in, what it writes down, and what a refusal says."""

import contextlib
import json
from dataclasses import replace
from types import SimpleNamespace

import jax
import numpy as np
import pandas as pd
import pytest

import fald
from fald.core import errors
from fald.core.errors import FederationError, PolicyError, PrivacyError, SecureSumError, StorageError
from fald.core.version import __version__
from fald.federation import wire
from fald.federation.secure.session import Identity
from fald.federation.site import worker as site_worker
from fald.federation.site.record import RECORD, read_record
from fald.federation.site.run import UNSAID, Frozen, RowsError, study_digest
from fald.federation.site.worker import SiteSettings, SiteWorker
from fald.study.schema import make_study

IDS = {"run": "0" * 16, "session": "1" * 16}
STUDY = {"data": {"target": "y", "features": ["u", "v"]}, "model": {"family": "logistic"}, "title": "Aspirin"}
NAMES, ROWS = ["a", "b"], 6
X, Y = np.arange(12.0).reshape(ROWS, 2) % 5, np.arange(ROWS) % 2.0
OPEN = {**IDS, "version": __version__, "study": STUDY, "secure": False, "names": NAMES}
BEGIN = {**IDS, "names": NAMES, "sizes": [ROWS, 4], "hellos": None, "identities": {}}


def rows_of(shift=0.0, count=1):
    clients = {f"client {i}": (X + shift, Y) for i in range(count)}
    return replace(fald.FederatedData.from_arrays(clients), features=("u", "v"))


class Run:
    """In place of a run: it remembers what it was asked."""

    made = []  # noqa: RUF012

    def __init__(self, owner, folder, about, *, study, data):
        self.site, self.folder, self.about, self.study, self.data = owner, folder, about, study, data
        self.frozen, self.left, self.epsilon, self.wants_sums = Frozen.read(folder), {}, None, True
        self.hello, self.calls = {"name": "a"}, []
        self.answers = SimpleNamespace(read=lambda: self.calls.append("read"))
        self.made.append(self)

    def introduce(self):
        (self.folder / "session.json").write_text(json.dumps(self.about))

    def offer(self):
        self.left = {"mode": 3}
        return {"prepared_mode": np.ones((1, 3))}

    def restore(self):
        self.calls.append("restore")

    def begin(self, sizes, hellos, pins, arrays, *, pin):
        self.calls.append(("begin", sizes, hellos, pins, dict(arrays)))
        self.epsilon = 0.5
        pin()

    def answer(self, message, digest, reply):
        self.calls.append((message.kind, digest, jax.config.jax_enable_x64))
        self.left, self.epsilon = {"value": 7}, 0.25
        return reply({"x": np.ones(2)})


class Site:
    """Site "a", whose rows come from a program unless a table is given."""

    def __init__(self, folder, policy="", *, table=False, **settings):
        folder.mkdir(exist_ok=True)
        (folder / "POLICY.toml").write_text(policy)
        self.state, self.rows = folder / "state", rows_of()
        if table:
            settings["data"] = folder / "rows.csv"
            pd.DataFrame(X, columns=["u", "v"]).assign(y=Y).to_csv(folder / "rows.csv", index=False)
        known = {"policy": folder / "POLICY.toml", "sites": tuple(NAMES), "coordinator": "boss", **settings}
        self.settings = SiteSettings("a", self.state, **known)
        self.worker = SiteWorker(self.settings, None if table else lambda study: self.rows)

    def again(self):
        self.worker = SiteWorker(self.settings, lambda study: self.rows)
        return self

    def say(self, kind, values=None, arrays=None):
        return wire.unpack(self.worker.handle(wire.pack(kind, values or {}, arrays)))

    def refused(self, kind, values, arrays=None):
        reply = self.say(kind, values, arrays)
        assert reply.kind == "refusal", reply.values
        assert not reply.arrays
        return reply.values["message"]

    def replied(self, kind, values, arrays=None):
        reply = self.say(kind, values, arrays)
        assert reply.kind == "reply", reply.values
        return reply

    @property
    def status(self):
        return json.loads((self.state / "status.json").read_text())

    @property
    def log(self):
        return (self.state / "site.log").read_text()

    @property
    def folder(self):
        return self.state / "runs" / IDS["run"]


@pytest.fixture
def site(tmp_path, monkeypatch):
    monkeypatch.setattr(site_worker, "SiteRun", Run)
    Run.made.clear()
    return Site(tmp_path)


# -- what is there from the beginning -----------------------------------------------------------------------


def test_a_site_has_a_folder_and_a_key_of_its_own(tmp_path):
    site = Site(tmp_path, "max-seconds = 9\nmax-megabytes = 11\n", table=True)
    assert site.state.stat().st_mode & 0o777 == 0o700
    first = site.worker.identity.public
    assert Site(tmp_path).worker.identity.public == first  # the same in every process
    inside = site.worker._confined
    assert inside._limits == (9.0, 11)
    assert inside._settings == {
        "name": "a", "state": str(site.state), "data": str(tmp_path / "rows.csv"),
        "policy": str(tmp_path / "POLICY.toml"), "pins": None, "coordinator": "boss", "sites": ("a", "b"),
    }  # fmt: skip
    assert inside._log == site.state / "site.log"
    assert SiteWorker(site.settings, confined=True)._is_confined
    assert not site.worker._is_confined
    deep = SiteWorker(replace(site.settings, state=tmp_path / "deep" / "er" / "state"))
    assert deep.identity.public != first


def test_a_hello_says_names_and_versions(site):
    said = site.replied("hello", {}).values
    assert {"site", "version", "versions", "protocol", "identity"} <= set(said)
    assert (said["site"], said["version"], said["protocol"]) == ("a", __version__, wire.PROTOCOL)
    assert said["identity"] == site.worker.identity.public
    (line,) = read_record(site.state)
    assert (line["asked"], line["left"]) == ("hello", {"versions, clock and public key": 1})
    assert not (site.state / "status.json").exists()


# -- what is written down -----------------------------------------------------------------------------------


def test_every_message_is_recorded_with_what_left(site):
    opened = wire.pack("open", OPEN)
    assert wire.unpack(site.worker.handle(opened)).kind == "reply"
    site.replied("begin", BEGIN)
    asked = {**IDS, "round": 3, "attempt": 1}
    site.replied("ask", asked, {"points": np.ones((1, 3))})
    site.refused("ask", {**asked, "session": "2" * 16})
    site.refused("open", {**OPEN, "names": ["b"]})
    first, second, third, fourth, fifth = read_record(site.state)
    assert (first["asked"], first["by"], first["run"], first["title"]) == (
        "open",
        "boss",
        IDS["run"],
        "Aspirin",
    )
    assert (first["columns"], first["study"]) == (["y", "u", "v"], study_digest(STUDY))
    assert first["sites"] == OPEN["names"]
    assert first["left"] == {"number of rows": 1, "mode": 3}
    assert first["digest"] == wire.digest(opened).hex()
    assert "round" not in first
    assert (second["asked"], second["epsilon"]) == ("begin", 0.5)
    assert (third["asked"], third["round"], third["left"], third["epsilon"]) == ("ask", 3, {"value": 7}, 0.25)
    assert "refused" not in third
    assert (fourth["asked"], fourth["left"]) == ("ask", {})
    assert "earlier session" in fourth["refused"]
    assert len(fourth["digest"]) == 64
    assert "roster must name this site" in fifth["refused"]


def test_a_reply_says_which_message_it_answers(site):
    opened = site.replied("open", OPEN).values
    assert {key: opened[key] for key in ("site", *IDS)} == {"site": "a", **IDS}
    site.replied("begin", BEGIN)
    said = site.replied("ask", {**IDS, "round": 3, "attempt": 2}, {"points": np.ones((1, 3))})
    assert said.values == {"site": "a", **IDS, "round": 3, "attempt": 2}
    assert said.arrays["x"].tolist() == [1.0, 1.0]
    refusal = site.say("ask", {**IDS, "session": "2" * 16, "round": 4, "attempt": 1}).values
    assert {key: refusal[key] for key in ("site", "session", "round")} == {
        "site": "a",
        "session": "2" * 16,
        "round": 4,
    }


def test_the_status_shows_how_far_a_run_is(site):
    site.replied("open", OPEN)
    assert (site.status["site"], site.status["run"], site.status["round"]) == ("a", IDS["run"], 0)
    assert "at most 5 rows" in site.log or site.status["warnings"] == []
    site.replied("begin", BEGIN)
    site.replied("ask", {**IDS, "round": 3, "attempt": 1}, {"points": np.ones((1, 3))})
    assert (site.status["run"], site.status["round"]) == (IDS["run"], 3)
    site.refused("ask", {**IDS, "session": "2" * 16, "round": 4, "attempt": 1})
    assert "earlier session" in site.status["refused"]
    site.replied("end", IDS)
    assert site.status["finished"] == IDS["run"]
    assert site.status["time"] > 1e9


def test_people_at_the_site_are_warned_of_few_rows(site):
    few = fald.FederatedData.from_arrays({"a": (X[:4], Y[:4])})
    site.rows = replace(few, features=("u", "v"))
    site.replied("open", OPEN)
    (warning,) = site.status["warnings"]
    assert "at most 5 rows for 3 parameters" in warning
    assert f"warning: {warning}" in site.log
    assert f"run {IDS['run']}: accepted, 4 rows" in site.log


def test_a_log_begins_anew_when_it_is_long(site, monkeypatch):
    site.worker.log("first\x1b[2J\nline")
    assert site.log.endswith("first?[2J\nline\n")
    monkeypatch.setattr(site_worker, "_LARGEST_LOG", len(site.log))
    site.worker.log("second")
    assert "first" in site.log
    site.worker.log("third")
    assert "second" not in site.log
    assert "second" in (site.state / "site.1.log").read_text()


# -- refusals -----------------------------------------------------------------------------------------------


def raised_in_fald(error):
    """The error, as if a module of fald had raised it."""
    try:
        exec(compile("raise error", "fald.py", "exec"), {"__name__": "fald.somewhere", "error": error})
    except Exception as found:
        return found


OWN = "a file of its own, such as its privacy ledger, is damaged or cannot be written"
REFUSALS = [
    (PolicyError("words", hint="h"), "words", "h", "PolicyError"),
    (SecureSumError("words", hint="h"), "words", "h", "SecureSumError"),
    (FederationError("words", hint="h"), "words", "h", "FederationError"),
    (PrivacyError("words", hint="h"), "words", "h", "PrivacyError"),
    (RowsError("words"), UNSAID, "the site's own log says what", "FederationError"),
    (errors.ConfigError("words"), UNSAID, "the site's own log says what", "FederationError"),
    (errors.DataError("words"), UNSAID, "the site's own log says what", "FederationError"),
    (ValueError("words"), UNSAID, "the site's own log says what", "FederationError"),
    (KeyError("words"), UNSAID, "the site's own log says what", "FederationError"),
    (StorageError("words"), OWN, "the site's own log says which", "FederationError"),
]


@pytest.mark.parametrize(("error", "said", "hint", "kind"), REFUSALS)
def test_a_refusal_has_words_of_rules_and_none_of_rows(site, error, said, hint, kind):
    site.worker._told = {"asked": "ask"}
    reply = wire.unpack(site.worker._refuse({"run": "r"}, raised_in_fald(error)))
    assert reply.kind == "refusal"
    assert reply.values == {"site": "a", "run": "r", "error": kind, "message": said, "hint": hint}
    assert "words" in site.log
    assert site.status["refused"] == said
    (entry,) = read_record(site.state)
    assert (entry["asked"], entry["refused"], entry["left"]) == ("ask", said, {})


@pytest.mark.parametrize("kind", [PolicyError, SecureSumError, FederationError, PrivacyError])
def test_the_words_of_others_are_not_told(site, kind):
    """A package may raise our own errors with a row in them, or make one without raising it."""
    try:
        raise kind("words")
    except kind as error:
        raised = error
    for error in (raised, kind("words")):
        assert wire.unpack(site.worker._refuse({}, error)).values["message"] == UNSAID
    assert "words" in site.log


def test_a_refusal_is_short_and_comes_even_where_the_record_is_broken(site):
    long = raised_in_fald(FederationError("x" * 5000))
    assert wire.unpack(site.worker._refuse({}, long)).values["message"] == "x" * 1000
    assert "x" * 5000 in site.log  # all of it; of millions the beginning
    site.worker.log("§" * 1_000_000)
    assert site.log.count("§") == 100_000
    (site.state / RECORD).write_text("")
    reply = wire.unpack(site.worker._refuse({}, long))
    assert reply.kind == "refusal"
    assert "is broken" in site.log
    # and nothing is answered any more, because nothing can be written down
    assert site.refused("open", OPEN) == OWN


@pytest.mark.parametrize("blocked", ["record.seal", "status.json", "runs"])
def test_a_refusal_comes_even_where_nothing_can_be_written(site, blocked):
    """As on a full disk: the coordinator is told what is wrong with the site, not that nobody is there."""
    if blocked == "runs":
        (site.state / blocked).write_text("no folder")
    else:
        (site.state / blocked / "in the way").mkdir(parents=True)
    assert site.refused("open", OPEN) == OWN
    assert str(site.state / blocked) in site.log


def test_without_a_log_its_words_are_printed(site, capfd):
    (site.state / "site.log").mkdir()
    assert "unknown kind" in site.refused("x", {})
    printed = capfd.readouterr().err
    assert "unknown kind" in printed
    assert f"cannot write {site.state / 'site.log'}" in printed


def test_nothing_that_is_no_message_is_read(site):
    reply = wire.unpack(site.worker.handle(b"nonsense"))
    assert "not a message" in reply.values["message"]
    assert "unknown kind" in site.refused("x" * 100, {})
    first, second = read_record(site.state)
    assert (first["asked"], second["asked"]) == ("", "x" * 40)
    assert first["by"] == "boss"
    assert first["digest"] == wire.digest(b"nonsense").hex()


# -- which run ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["begin", "ask", "end"])
def test_a_run_that_nobody_opened_is_not_known(site, kind):
    values = {"begin": BEGIN, "ask": {**IDS, "round": 1, "attempt": 1}, "end": IDS}[kind]
    assert "knows no such run" in site.refused(kind, values)
    assert not site.folder.exists()


def test_a_run_has_a_folder_for_its_owner_and_one_process_at_a_time(site, monkeypatch):
    held = []

    @contextlib.contextmanager
    def locked(path):
        held.append(path)
        yield

    monkeypatch.setattr(site_worker, "locked", locked)
    site.replied("open", OPEN)
    assert site.folder.stat().st_mode & 0o777 == 0o700
    assert site.folder.parent.stat().st_mode & 0o777 in (0o700, 0o755)
    assert held == [site.folder / "lock", site.state / "opening.lock"]
    site.replied("begin", BEGIN)
    assert held[2:] == [site.folder / "lock", site.state / "pins.lock"]


def test_a_message_belongs_to_the_session_that_is_open(site):
    site.replied("open", OPEN)
    site.replied("open", {**OPEN, "session": "2" * 16})
    assert "an earlier session" in site.refused("begin", BEGIN)
    site.replied("begin", {**BEGIN, "session": "2" * 16})


def test_another_process_reads_a_run_from_the_disk_once(site):
    double = {
        **STUDY,
        "sampler": {"num-rounds": 3, "local-steps": 1, "step-size": 1e-3, "precision": "float64"},
    }
    site.replied("open", {**OPEN, "study": double})
    ask = {**IDS, "round": 1, "attempt": 1, "leaves": 1, "saved": 0}
    site.replied("round", ask, {"weight": np.ones((1, 2))})
    assert len(Run.made) == 1
    jax.config.update("jax_enable_x64", False)  # another study was looked at since
    site.again().replied("round", ask, {"weight": np.ones((1, 2))})
    site.replied("round", {**ask, "round": 2}, {"weight": np.ones((1, 2))})
    assert len(Run.made) == 2
    found = Run.made[1]
    assert found.calls[0] == "restore"
    assert [c for c in found.calls if c == "read"] == [
        "read"
    ] * 2  # what others answered, before each message
    assert [c[2] for c in found.calls if c[0] == "round"] == [True, True]
    assert (found.about["session"], found.data.num_rows, found.data.part) == (IDS["session"], ROWS, True)
    jax.config.update("jax_enable_x64", False)  # a study that was refused had another precision
    site.replied("round", {**ask, "round": 3}, {"weight": np.ones((1, 2))})
    assert [c[2] for c in found.calls if c[0] == "round"] == [True] * 3
    # a second run in between
    other = {"run": "5" * 16, "session": "6" * 16}
    site.replied("open", {**OPEN, **other})
    assert not jax.config.jax_enable_x64
    site.replied("round", {**ask, "round": 4}, {"weight": np.ones((1, 2))})
    assert Run.made[-1].about["run"] == IDS["run"]
    assert jax.config.jax_enable_x64
    jax.config.update("jax_enable_x64", False)


def test_the_end_forgets_keys_and_the_last_reply(site):
    site.replied("open", OPEN)
    (site.folder / "last-0.bin").write_bytes(b"")
    site.replied("end", IDS)
    assert not (site.folder / "session.json").exists()
    assert not (site.folder / "last-0.bin").exists()
    assert (site.folder / "run.json").exists()  # a run that is resumed is the same run
    assert site.worker._run is None
    assert "knows no such run" in site.refused("begin", BEGIN)
    site.replied("end", IDS)  # again


# -- opening ------------------------------------------------------------------------------------------------


def test_what_a_site_tells_when_it_takes_part(site):
    said = site.replied("open", OPEN)
    assert (said.values["rows"], said.values["features"], said.values["audits"]) == (ROWS, ["u", "v"], True)
    assert said.values["hello"] == {"name": "a"}
    types = {name: (a.shape, a.dtype.name) for name, a in said.arrays.items()}
    floats = rows_of().rows[0].dtype.name
    assert types == {"row_0": ((0, 2), floats), "row_1": ((0,), floats), "prepared_mode": ((1, 3), "float64")}
    (run,) = Run.made
    assert run.about == {**IDS, "study": STUDY}
    assert (run.site.name, run.site.state, run.folder) == ("a", site.state, site.folder)


def test_a_run_is_the_same_study_rows_and_sites_for_ever(site):
    site.replied("open", OPEN)
    first = Frozen.read(site.folder)
    assert (first.study, first.names, first.secure, first.sizes) == (study_digest(STUDY), NAMES, False, [])
    assert len(bytes.fromhex(first.secret)) == 32
    site.replied("open", {**OPEN, "session": "2" * 16})
    assert Frozen.read(site.folder) == first  # its secret among it
    other = {**STUDY, "model": {"family": "logistic", "prior-scale": 1.0}}
    assert "known here with another study" in site.refused("open", {**OPEN, "study": other})
    assert "known here with another study" in site.refused("open", {**OPEN, "names": ["a", "c"]})
    site.worker.policy = site.worker.policy.model_copy(update={"unsummed": True})
    assert "known here with another study" in site.refused("open", {**OPEN, "secure": True})
    site.rows = rows_of(shift=1e-3)
    assert "rows have changed" in site.refused("open", OPEN)
    assert Frozen.read(site.folder) == first
    site.replied("open", {**OPEN, "run": "5" * 16})
    second = Frozen.read(site.state / "runs" / ("5" * 16))
    assert second.secret != first.secret
    assert second.fingerprint != first.fingerprint


def test_the_policy_decides_before_rows_are_read(tmp_path):
    site = Site(tmp_path, 'allowed-columns = ["y", "u"]\n')
    read = []
    site.worker._load = read.append
    assert "'v' (allowed-columns)" in site.refused("open", OPEN)
    assert "roster must name this site" in Site(tmp_path).refused("open", {**OPEN, "names": ["b", "c"]})
    assert read == []
    assert not (site.state / "failed.json").exists()


def test_a_private_study_must_have_an_account(site):
    private = {**STUDY, "privacy": {"delta": 1e-5}}
    drawn = {"num-rounds": 3, "local-steps": 1, "step-size": 1e-3}
    said = site.refused("open", {**OPEN, "study": {**private, "sampler": {**drawn, "method": "fsgld"}}})
    assert "no privacy accounting" in said
    assert Run.made == []
    site.replied("open", {**OPEN, "study": {**private, "sampler": {**drawn, "clip-norm": 1.0}}})


def test_other_versions_are_refused_and_nothing_is_kept(site):
    said = site.refused("open", {**OPEN, "version": "0.0\x1b" + "z" * 300})
    assert said.startswith(f"it has fald {__version__}, the coordinator 0.0?zzz")
    assert len(said) < 200
    assert not site.folder.exists()


def test_studies_that_do_not_fit_are_counted_and_told_in_one_way(tmp_path):
    site = Site(tmp_path, "minimum-rows = 7\nmax-failed-opens = 2\n")
    assert site.refused("open", OPEN) == UNSAID  # how many rows there are is not told
    assert "fewer rows than it wants" in site.log
    site.worker._load = lambda study: 1 / 0
    assert site.refused("open", OPEN) == UNSAID
    assert "ZeroDivisionError" in site.log
    assert len(json.loads((site.state / "failed.json").read_text())) == 2
    assert "(max-failed-opens)" in site.refused("open", OPEN)


def test_studies_are_counted_by_what_they_ask(tmp_path, monkeypatch):
    monkeypatch.setattr(site_worker, "SiteRun", Run)
    site = Site(tmp_path, "max-studies = 1\n")
    site.replied("open", OPEN)
    site.replied("open", {**OPEN, "study": {**STUDY, "title": "other"}})
    other = {**STUDY, "model": {"family": "logistic", "prior-scale": 1.0}}
    assert "(max-studies)" in site.refused("open", {**OPEN, "study": other, "run": "5" * 16})


@pytest.mark.parametrize("given", [lambda: rows_of(count=2), lambda: rows_of().elsewhere(["a"], [ROWS])])
def test_a_program_gives_the_rows_of_one_client(site, given):
    site.rows = given()
    assert site.refused("open", OPEN) == UNSAID
    assert "must give one client's rows" in site.log


def test_missing_columns_are_named(tmp_path):
    site = Site(tmp_path, table=True)
    study = {**STUDY, "data": {"target": "outcome", "features": ["u", "z", "v"]}}
    assert site.refused("open", {**OPEN, "study": study}) == "its table has no column 'outcome', 'z'"
    assert not (site.state / "failed.json").exists()
    without = Site(tmp_path / "none")
    without.worker = SiteWorker(without.settings)
    assert "no table was given to this site" in without.refused("open", OPEN)


def test_the_table_of_the_site_gives_its_rows(tmp_path, monkeypatch):
    monkeypatch.setattr(site_worker, "SiteRun", Run)
    Run.made.clear()
    Site(tmp_path, table=True).replied("open", OPEN)
    (run,) = Run.made
    assert (run.data.num_rows, run.data.part, list(run.data.names)) == (ROWS, True, ["a"])
    np.testing.assert_allclose(run.data.rows[0], X)
    np.testing.assert_allclose(run.data.rows[1], Y)


def test_models_that_read_their_own_files_have_no_columns_to_miss(tmp_path, monkeypatch):
    site = Site(tmp_path, table=True)
    study = make_study({**STUDY, "data": {"target": "outcome", "features": ["z"]}}, "a test")
    with pytest.raises(FederationError, match="no column"):
        site.worker._check_columns(study)
    monkeypatch.setattr(type(study), "encodes", property(lambda self: False))
    site.worker._check_columns(study)
    (tmp_path / "rows.csv").unlink()
    monkeypatch.undo()
    with pytest.raises(RowsError):
        site.worker._check_columns(study)
    Site(tmp_path).worker._check_columns(study)  # rows from a program


# -- the other sites ----------------------------------------------------------------------------------------

PINNED = {"a": "key a", "b": "key b", "c": "key c"}


@pytest.mark.parametrize(
    ("names", "secure", "known", "subsets", "words"),
    [
        (["a", "b", "c"], True, PINNED, [], None),
        (["a", "b"], True, PINNED, [], "they differ in 'c'"),
        (["a", "b", "c", "d"], True, PINNED, [], "they differ in 'd'"),
        (["a", "b", "d"], True, PINNED, [], "they differ in 'c', 'd'"),
        (["a", "b"], True, PINNED, [["b", "a"]], None),
        (["a", "c"], True, PINNED, [["b", "a"]], "they differ in 'b'"),
        (["a", "b"], False, PINNED, [], None),
        (["a", "b", "c"], True, {}, [], None),  # nothing is known yet
        (["b", "c"], False, PINNED, [], "roster must name this site"),
        (["b", "c"], True, PINNED, [["b", "c"]], "roster must name this site"),
    ],
)
def test_a_sum_is_over_the_sites_known_here(tmp_path, names, secure, known, subsets, words):
    site = Site(tmp_path, f"allowed-subsets = {json.dumps(subsets)}\n", sites=tuple(known))
    if words is None:
        site.worker._check_sites(names, secure)
    else:
        with pytest.raises((FederationError, SecureSumError), match=words):
            site.worker._check_sites(names, secure)


def test_sites_that_are_pinned_count_before_those_told_at_joining(tmp_path):
    site = Site(tmp_path, sites=("a", "b"))
    assert site.worker._known_sites() == {"a", "b"}
    (site.state / "pins.json").write_text(json.dumps(PINNED))
    assert site.worker._known_sites() == {"a", "b", "c"}
    (tmp_path / "own.json").write_text(json.dumps({"a": "1", "d": "2"}))
    own = Site(tmp_path, pins=tmp_path / "own.json")
    assert own.worker._known_sites() == {"a", "d"}
    assert own.worker._known_pins() == {"a": "1", "d": "2"}
    missing = Site(tmp_path, pins=tmp_path / "gone.json")
    assert missing.worker._known_pins() == {}  # so that no key is believed
    assert Site(tmp_path / "new").worker._known_pins() is None


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"names": ["a", "c"]}, "sites of a run cannot change"),
        ({"names": ["a"], "sizes": [ROWS]}, "sites of a run cannot change"),
        ({"sizes": [ROWS]}, "sites of a run cannot change"),
        ({"sizes": [ROWS, 4, 5]}, "sites of a run cannot change"),
        ({"sizes": [ROWS + 1, 4]}, "another number of rows"),
        ({"sizes": [4, ROWS]}, "another number of rows"),
    ],
)
def test_a_run_begins_with_its_own_sites_and_rows(site, change, words):
    site.replied("open", OPEN)
    assert words in site.refused("begin", {**BEGIN, **change})
    (run,) = Run.made
    assert run.calls == ["read"]
    site.replied("begin", BEGIN, {"prepared_mode": np.ones((2, 3))})
    kind, sizes, hellos, pins, arrays = run.calls[-1]
    assert (kind, sizes, hellos, pins, list(arrays)) == ("begin", [ROWS, 4], {}, {}, ["prepared_mode"])
    assert not (site.state / "pins.json").exists()


def test_keys_seen_first_are_kept_once_all_have_signed(tmp_path, monkeypatch):
    monkeypatch.setattr(site_worker, "SiteRun", Run)
    Run.made.clear()
    site, names = Site(tmp_path, sites=()), ["a", "b", "c"]
    site.replied("open", {**OPEN, "secure": True, "names": names})
    values = {**BEGIN, "names": names, "sizes": [ROWS, 4, 5], "hellos": {"b": 1}}
    told = {"identities": {"c": "key c", "b": "key b", "d": "unasked"}}
    first, pins = {"a": "", "b": "key b", "c": "key c"}, site.state / "pins.json"
    with monkeypatch.context() as failing:
        failing.setattr(Run, "begin", lambda *_, **__: 1 / 0)
        site.refused("begin", {**values, **told})
    assert not pins.exists()  # a beginning that is refused pins nobody
    site.replied("begin", {**values, **told})
    run = Run.made[-1]  # read anew: what was refused does not count
    assert run.calls[-1][2:4] == ({"b": 1}, first)
    assert json.loads(pins.read_text()) == first
    assert list(json.loads(pins.read_text())) == names
    assert "pinned the keys of a, b, c as announced in the first run" in site.log
    # later ones are not believed
    site.replied("begin", {**values, "identities": {"b": "other"}})
    assert run.calls[-1][3] == first
    assert json.loads(pins.read_text()) == first
    # nor any where the site has a file of its own, which is not copied
    (tmp_path / "own.json").write_text(json.dumps(first))
    own = Site(tmp_path / "own", sites=(), pins=tmp_path / "own.json")
    own.replied("open", {**OPEN, "secure": True, "names": names})
    own.replied("begin", {**values, **told})
    assert not (own.state / "pins.json").exists()


# -- models of other packages -------------------------------------------------------------------------------


class Process:
    """In place of the process for such models."""

    def __init__(self):
        self.asked, self.stopped, self.error = [], 0, None

    def handle(self, content, family):
        self.asked.append((wire.unpack(content).kind, family))
        if self.error is not None:
            raise self.error
        return wire.pack("reply", {"by": "process"})

    def stop(self):
        self.stopped += 1


@pytest.fixture
def outside(tmp_path, monkeypatch):
    monkeypatch.setattr(site_worker, "versions", lambda family: f"versions of {family}")
    site = Site(tmp_path, 'allowed-models = ["package:model"]\nmax-failed-opens = 2\n', table=True)
    site.worker._confined = Process()
    return site


OUTSIDE = {
    **OPEN,
    "version": "versions of package:model",
    "study": {**STUDY, "model": {"family": "package:model"}},
}


def opened_outside(site):
    """As the process leaves the run's folder behind."""
    site.replied("open", OUTSIDE)
    about = {**IDS, "study": OUTSIDE["study"]}
    (site.folder / "session.json").write_text(json.dumps(about))


def test_a_process_of_its_own_answers_for_such_a_model(outside):
    opened_outside(outside)
    assert outside.replied("ask", {**IDS, "round": 1, "attempt": 1}).values == {"by": "process"}
    process = outside.worker._confined
    assert process.asked == [("open", "package:model"), ("ask", "package:model")]
    assert process.stopped == 1  # an opening begins another, which imports what is installed now
    assert not (outside.state / RECORD).exists()  # the process writes its own lines
    outside.replied("end", IDS)
    assert process.stopped == 2


def test_such_a_model_must_be_named_and_have_the_same_version(outside):
    other = {**OUTSIDE, "study": {**STUDY, "model": {"family": "package:other"}}}
    assert "'package:other' (allowed-models)" in outside.refused("open", other)
    assert "it has fald versions of package:model" in outside.refused("open", {**OUTSIDE, "version": "1.0"})
    assert outside.worker._confined.asked == []
    assert not outside.folder.exists()


def test_a_model_that_exceeded_its_limits_stays_refused_in_its_session(outside):
    process = outside.worker._confined
    process.error = raised_in_fald(PolicyError("takes more than 2 s", hint="a smaller study"))
    for _ in range(2):
        reply = outside.say("open", OUTSIDE).values
        assert (reply["message"], reply["hint"]) == ("takes more than 2 s", "a smaller study")
    assert len(process.asked) == 1  # the second time it is not even tried
    assert len(json.loads((outside.state / "failed.json").read_text())) == 1
    process.error = None
    assert outside.replied("open", {**OUTSIDE, "session": "2" * 16}).values == {"by": "process"}
    (outside.folder / "session.json").write_text(json.dumps({"study": OUTSIDE["study"]}))
    process.error = raised_in_fald(PolicyError("ended"))
    assert outside.refused("ask", {**IDS, "session": "2" * 16, "round": 1, "attempt": 1}) == "ended"
    assert len(json.loads((outside.state / "failed.json").read_text())) == 1  # only openings are counted
    process.error = raised_in_fald(FederationError("does not start"))
    assert outside.refused("ask", {**IDS, "session": "3" * 16, "round": 1, "attempt": 1}) == "does not start"
    process.error = None
    outside.replied("ask", {**IDS, "session": "3" * 16, "round": 1, "attempt": 1})  # which is no limit


def test_such_a_model_reads_no_rows_of_a_program(outside):
    outside.worker._load = lambda study: rows_of()
    assert "this site's rows come from a program" in outside.refused("open", OUTSIDE)


def test_inside_the_process_the_worker_answers_itself(outside, monkeypatch):
    inside = SiteWorker(outside.settings, confined=True)
    inside._confined = Process()
    monkeypatch.setattr(inside, "_open", lambda message: ({"by": "worker"}, {}))
    assert wire.unpack(inside.handle(wire.pack("open", OUTSIDE))).values["by"] == "worker"
    assert inside._confined.asked == []


@pytest.mark.parametrize("model", [3, [], None, {"family": 5}, {"family": None}, {}])
def test_a_study_without_a_family_is_refused_like_any_other(site, model):
    assert site.refused("open", {**OPEN, "study": {**STUDY, "model": model}}) == UNSAID


def test_the_version_of_such_a_model_is_part_of_the_study(site, monkeypatch):
    """A run does not go on with another version of its model."""
    told, terms = [], []
    monkeypatch.setattr(site_worker, "study_digest", lambda tree: told.append(tree) or "digest")
    monkeypatch.setattr(site_worker, "check_terms", lambda model, data: terms.append(data.num_rows))
    site.replied("open", OPEN)
    (site.state / "runs" / ("5" * 16)).mkdir()
    monkeypatch.setattr(site_worker, "is_outside", lambda family: True)
    site.worker._open(wire.Message("open", {**OPEN, "run": "5" * 16}, {}))
    assert told == [STUDY, {**STUDY, "at": __version__}]
    assert terms == [ROWS]  # and what it makes of the rows is looked at, once


def test_rows_must_fit_the_model(site, monkeypatch):
    seen = []
    monkeypatch.setattr(
        site_worker, "check_model", lambda model, data: seen.append((model.dim, data.part)) or 1 / 0
    )
    assert site.refused("open", OPEN) == UNSAID
    assert seen == [(3, True)]
    assert len(json.loads((site.state / "failed.json").read_text())) == 1


def test_identities_are_loaded_and_not_made_anew(tmp_path):
    site = Site(tmp_path)
    assert Identity.load(site.state / "identity.pem").public == site.worker.identity.public
