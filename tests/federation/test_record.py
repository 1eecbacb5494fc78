"""The record of a site: every request, and every change of it is seen."""

import json

import pytest
from hostile import FEW_ROUND, NAMES, Coordinator, honest_server, kinds
from typer.testing import CliRunner

from fald.cli.federation import app
from fald.core.errors import StorageError
from fald.federation.secure.session import Identity
from fald.federation.site.record import RECORD, SEAL, Record, read_record


@pytest.fixture
def state(tmp_path):
    """A record of five lines."""
    record = Record(tmp_path, Identity.create(tmp_path / "identity.pem"))
    for number in range(5):
        record.add({"asked": "round", "round": number, "left": {"position": 6}})
    return tmp_path


def lines(state):
    return (state / RECORD).read_text().splitlines(keepends=True)


def changed(parts):
    return [*parts[:2], parts[2].replace('"position": 6', '"position": 5'), *parts[3:]]


TAMPERED = {
    "a line changed": changed,
    "a line removed": lambda parts: [*parts[:2], *parts[3:]],
    "two lines exchanged": lambda parts: [parts[0], parts[2], parts[1], *parts[3:]],
    "a line repeated": lambda parts: [*parts[:3], parts[2], *parts[3:]],
    "the last line removed": lambda parts: parts[:-1],
    "everything removed": lambda parts: [],
}


def test_a_record_that_nobody_touched_is_read(state):
    assert [entry["line"] for entry in read_record(state)] == [1, 2, 3, 4, 5]


@pytest.mark.parametrize("how", TAMPERED)
def test_tampering_is_seen(state, how):
    (state / RECORD).write_text("".join(TAMPERED[how](lines(state))))
    with pytest.raises(StorageError, match="is broken"):
        read_record(state)


def test_a_record_cannot_be_written_anew_without_the_key(state, tmp_path):
    other = tmp_path / "other"
    other.mkdir()
    forged = Record(other, Identity.create(other / "identity.pem"))
    forged.add({"asked": "nothing"})
    for name in (RECORD, SEAL):
        (state / name).write_bytes((other / name).read_bytes())
    with pytest.raises(StorageError, match="not signed by this site's key"):
        read_record(state)


def test_nothing_is_added_to_a_record_that_was_cut(state):
    (state / RECORD).write_text("".join(lines(state)[:3]))
    with pytest.raises(StorageError, match="not the one that was sealed"):
        Record(state, Identity.load(state / "identity.pem")).add({"asked": "round"})


def test_a_crash_before_the_seal_loses_nothing(state):
    before = (state / SEAL).read_bytes()
    record = Record(state, Identity.load(state / "identity.pem"))
    record.add({"asked": "round", "round": 9})
    (state / SEAL).write_bytes(before)
    assert len(read_record(state)) == 6
    record.add({"asked": "end"})
    assert [entry["line"] for entry in read_record(state)] == [1, 2, 3, 4, 5, 6, 7]


def test_a_study_is_told_in_words(tmp_path):
    coordinator = Coordinator(tmp_path)
    coordinator.begin(coordinator.open({**FEW_ROUND, "title": "Aspirin <b>"}))
    assert kinds(coordinator.ask(next(honest_server(FEW_ROUND)))) == ["reply"] * 3
    coordinator.ask({"states": [[1e5, 0.0, 0.0]]}, 2)
    home = tmp_path / "a"
    (home / "site.toml").write_text('name = "a"\n')
    document = json.loads(CliRunner().invoke(app, ["log", str(home), "--json"]).output)
    opened, _, answered, refused = document["record"]
    assert (opened["asked"], opened["title"], opened["columns"]) == ("open", "Aspirin <b>", ["y", "u", "v"])
    assert opened["left"] == {"number of rows": 1}
    assert {"value", "hessian", "precision"} <= set(answered["left"])
    assert "not passed on" in refused["refused"]
    assert refused["left"] == {}
    text = CliRunner().invoke(app, ["log", str(home)]).output
    assert "4 requests, the record is whole" in text
    page = tmp_path / "record.html"
    assert CliRunner().invoke(app, ["log", str(home), "--page", str(page)]).exit_code == 0
    assert "Aspirin &lt;b&gt;" in page.read_text()
    path = home / "state" / RECORD
    path.write_text(path.read_text().replace("Aspirin", "Placebo"))
    assert isinstance(CliRunner().invoke(app, ["log", str(home)]).exception, StorageError)
    assert coordinator.say("a", "end").kind == "reply"  # its last line is untouched, and it goes on
    assert NAMES[0] == document["site"]
