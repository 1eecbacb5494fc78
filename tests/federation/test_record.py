"""The record of a site: every request, and every change of it is seen."""

import datetime
import hashlib
import json

import pytest

from fald.core.errors import StorageError
from fald.federation.secure.session import Identity
from fald.federation.site import record as site_record
from fald.federation.site.record import RECORD, SEAL, Record, as_rows, read_record


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
    "a line added": lambda parts: [*parts, parts[-1]],
    "two lines added": lambda parts: [*parts, *following(parts, 2)],
    "an empty line added": lambda parts: [*parts, "\n"],
    "a list for a line": lambda parts: ["[]\n", *parts[1:]],
    "a line without its hash": lambda parts: [parts[0].replace("before", "after"), *parts[1:]],
    "a line spelt otherwise": lambda parts: [*parts[:4], parts[4].replace(": 6", ":  6")],
    "the last line written anew": lambda parts: [*parts[:4], *following(parts[:4], 1, round=7)],
}


def following(parts, count, **changes):
    """Lines that go on from others by the letter, as somebody without the key can write them."""
    added = []
    for number in range(len(parts), len(parts) + count):
        before = hashlib.sha256([*parts, *added][-1].rstrip("\n").encode()).hexdigest()
        entry = {**json.loads(parts[-1]), "line": number + 1, "before": before, **changes}
        added.append(json.dumps(entry, sort_keys=True) + "\n")
    return added


def test_a_record_that_nobody_touched_is_read(state):
    entries = read_record(state)
    assert [entry["line"] for entry in entries] == [1, 2, 3, 4, 5]
    assert [(e["asked"], e["round"], e["left"]) for e in entries] == [
        ("round", n, {"position": 6}) for n in range(5)
    ]
    now = datetime.datetime.now(datetime.UTC)
    for entry in entries:
        at = datetime.datetime.fromisoformat(entry["time"])
        assert (at.utcoffset(), at.microsecond) == (datetime.timedelta(0), 0)
        assert abs(now - at) < datetime.timedelta(hours=1)
    assert entries[0]["before"] == "0" * 64  # as records that are kept somewhere have it
    assert lines(state)[0].startswith('{"asked"')  # names in order, so that a line has one spelling


def test_there_may_be_no_record_yet(tmp_path):
    Identity.create(tmp_path / "identity.pem")
    assert read_record(tmp_path) == []


def test_a_crash_before_the_first_seal_leaves_one_line_at_most(state):
    first = lines(state)[0]
    (state / SEAL).unlink()
    (state / RECORD).write_text(first)
    assert [entry["line"] for entry in read_record(state)] == [1]
    Record(state, Identity.load(state / "identity.pem")).add({"asked": "end"})
    assert [entry["line"] for entry in read_record(state)] == [1, 2]
    (state / SEAL).unlink()
    for adds in (False, True):
        with pytest.raises(StorageError, match=r"record\.seal is missing"):
            Record(state, Identity.load(state / "identity.pem")).add({}) if adds else read_record(state)


@pytest.mark.parametrize(
    ("seal", "words"),
    [
        ("", "cannot be read .JSONDecodeError"), ("[]", "cannot be read .TypeError"),
        ("{}", "cannot be read .KeyError"),
        ('{"lines": "x", "hash": "", "signature": ""}', "cannot be read .ValueError"),
        ('{"lines": 5, "hash": "00", "signature": "00"}', "not signed by this site's key"),
    ],
)  # fmt: skip
def test_a_seal_that_is_none(state, seal, words):
    (state / SEAL).write_text(seal)
    with pytest.raises(StorageError, match=words) as caught:
        read_record(state)
    assert "answers nothing until" in caught.value.hint


@pytest.mark.parametrize("change", [{"lines": 4}, {"lines": 6}, {"hash": "0" * 64}])
def test_a_seal_says_one_thing(state, change):
    """Another number of lines, or another hash, under the signature of the true one."""
    seal = json.loads((state / SEAL).read_text())
    (state / SEAL).write_text(json.dumps({**seal, **change}))
    with pytest.raises(StorageError, match="not signed by this site's key"):
        read_record(state)


def test_an_earlier_seal_does_not_hide_lines(state):
    """One line more than sealed is a crash; two are not."""
    seals = []
    record = Record(state, Identity.load(state / "identity.pem"))
    for _ in range(2):
        seals.append((state / SEAL).read_bytes())
        record.add({"asked": "round"})
    (state / SEAL).write_bytes(seals[1])
    assert len(read_record(state)) == 7
    (state / SEAL).write_bytes(seals[0])
    with pytest.raises(StorageError, match="5 lines were sealed, and 7 are there"):
        read_record(state)
    with pytest.raises(StorageError, match="not the one that was sealed"):
        record.add({"asked": "round"})


@pytest.mark.parametrize("last", [b"{\n", b"[]\n", b'{"line": 6}\n', b"nothing\n", b"\xff\n"])
def test_nothing_is_added_behind_a_line_that_is_none(state, last):
    with open(state / RECORD, "ab") as file:
        file.write(last)
    with pytest.raises(StorageError, match="not the one that was sealed"):
        Record(state, Identity.load(state / "identity.pem")).add({"asked": "round"})


def test_a_line_that_follows_must_have_the_number_and_the_hash(state):
    parts = lines(state)
    for wrong in ({"line": 7}, {"before": "0" * 64}):
        (state / RECORD).write_text("".join([*parts, *following(parts, 1, **wrong)]))
        with pytest.raises(StorageError, match="not the one that was sealed"):
            Record(state, Identity.load(state / "identity.pem")).add({"asked": "round"})
    (state / RECORD).write_text("".join([*parts, *following(parts, 1)]))  # the twin
    Record(state, Identity.load(state / "identity.pem")).add({"asked": "round"})
    assert len(read_record(state)) == 7


def test_long_words_are_cut_where_a_line_would_become_unreadable(tmp_path):
    record = Record(tmp_path, Identity.create(tmp_path / "identity.pem"))
    told = {
        "title": "x" * 1000, "longer": "x" * 1001, "many": list(range(200)), "more": list(range(203)),
        "inside": {"a": ["y" * 2000], "n": 7, "none": None},
    }  # fmt: skip
    record.add(told)
    (entry,) = read_record(tmp_path)
    assert (entry["title"], entry["longer"]) == ("x" * 1000, "x" * 1000 + "…")
    assert entry["many"] == list(range(200))
    assert entry["more"] == [*range(200), "and 3 more"]
    assert entry["inside"] == {"a": ["y" * 1000 + "…"], "n": 7, "none": None}


def test_one_long_line_is_an_end_like_any_other(tmp_path):
    identity = Identity.create(tmp_path / "identity.pem")
    Record(tmp_path, identity).add({"columns": ["z" * 900] * 100})
    Record(tmp_path, identity).add({"asked": "end"})  # by another process, which does not know the end
    assert [entry["line"] for entry in read_record(tmp_path)] == [1, 2]


def test_the_end_of_a_long_record_is_found(tmp_path):
    """Only its last megabyte is read, in which the last line must lie whole."""
    identity = Identity.create(tmp_path / "identity.pem")
    record = Record(tmp_path, identity)
    for number in range(4):
        record.add({"columns": [f"{number} {i} " + "z" * 900 for i in range(200)], "more": ["z" * 900] * 200})
    assert (tmp_path / RECORD).stat().st_size > 1 << 20
    Record(tmp_path, identity).add({"asked": "end"})
    assert [entry["line"] for entry in read_record(tmp_path)] == [1, 2, 3, 4, 5]


def test_a_table_for_people():
    heads, (full, bare, refused) = as_rows(
        [
            {"line": 1, "time": "t1", "asked": "round", "title": "T", "run": "r", "round": 3, "by": "host",
             "sites": ["a", "b"], "digest": "0123456789abcdef0", "columns": ["y", "x"],
             "left": {"position": 6000, "value": 2}, "epsilon": 0.123456},
            {"line": 2, "time": "t2", "run": "r", "epsilon": None, "left": {}},
            {"line": 3, "time": "t3", "refused": "no", "epsilon": 0.0},
        ]
    )  # fmt: skip
    assert len(heads) == len(full) == 12
    assert full[:8] == ["1", "t1", "round", "host", "T", "a, b", "3", "y, x"]
    assert full[8:] == ["position (6,000), value (2)", "0.1235", "answered", "0123456789abcdef"]
    assert bare == ["2", "t2", "", "", "r", "", "", "", "nothing", "", "answered", ""]
    assert refused == ["3", "t3", "", "", "", "", "", "", "nothing", "0", "refused: no", ""]


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


def test_an_end_that_a_process_has_sealed_it_knows_until_a_file_changes(state, monkeypatch):
    mine, theirs = (Record(state, Identity.load(state / "identity.pem")) for _ in range(2))
    looked, end = [], Record._end
    monkeypatch.setattr(Record, "_end", lambda self: looked.append(self) or end(self))
    for one in (mine, mine, theirs, mine, mine):
        one.add({"asked": "round"})
    assert looked == [mine, theirs, mine]
    assert [entry["line"] for entry in read_record(state)] == list(range(1, 11))
    (state / RECORD).write_text("".join(lines(state)[:-1]))
    with pytest.raises(StorageError, match="not the one that was sealed"):
        mine.add({"asked": "round"})


def test_a_crash_before_the_seal_loses_nothing(state):
    before = (state / SEAL).read_bytes()
    record = Record(state, Identity.load(state / "identity.pem"))
    record.add({"asked": "round", "round": 9})
    (state / SEAL).write_bytes(before)
    assert len(read_record(state)) == 6
    record.add({"asked": "end"})
    assert [entry["line"] for entry in read_record(state)] == [1, 2, 3, 4, 5, 6, 7]


def test_a_disk_on_which_no_seal_finds_room_leaves_one_line_at_most(state, monkeypatch):
    """Lines may fit where a new file does not: when there is room again, the record goes on."""
    identity, write = Identity.load(state / "identity.pem"), site_record.write_atomically

    def full(path, content):
        raise StorageError(f"cannot write {path}: the disk is full")

    monkeypatch.setattr(site_record, "write_atomically", full)
    for made in (Record(state, identity), Record(state, identity)):
        for _ in range(3):
            with pytest.raises(StorageError, match="the disk is full"):
                made.add({"asked": "round", "round": 5})
    assert len(lines(state)) == 6
    monkeypatch.setattr(site_record, "write_atomically", write)
    made.add({"asked": "round", "round": 6})
    assert [entry.get("round") for entry in read_record(state)] == [0, 1, 2, 3, 4, 5, 6]
