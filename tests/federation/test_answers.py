"""What a site remembers of its answers: on its disk, whole lines only, and for every process that answers."""

from pathlib import Path

import pytest

from fald.core.errors import StorageError
from fald.federation.site import answers as site_answers
from fald.federation.site.answers import Answers, Kept, Last


def kept(number, attempt=1, task="aa", upload="ff", broadcast="cc"):
    return Kept(number, attempt, task, upload, {"points": [2, 3]}, broadcast)


def last(number, attempt=1):
    return Last(number, attempt, {"value": number}, bytes([number, 0, 255]), b"reply of the site")


def test_nothing_was_answered_at_the_beginning(tmp_path):
    answers = Answers(tmp_path)
    assert (answers.known, answers.highest, answers.distinct, answers.of(1), answers.last()) == (
        [],
        0,
        0,
        [],
        None,
    )
    answers.forget_last()  # there is none, which is no error


def test_an_answer_is_known_to_every_process_before_it_leaves(tmp_path):
    mine, theirs = Answers(tmp_path), Answers(tmp_path)
    for number, attempt, task in ((1, 1, "aa"), (3, 1, "bb"), (3, 2, "bb"), (2, 1, "cc"), (2, 2, "dd")):
        mine.add(kept(number, attempt, task), last(number, attempt))
    assert theirs.known == []
    theirs.read()
    for answers in (mine, theirs, Answers(tmp_path)):
        assert (answers.highest, answers.distinct) == (3, 4)  # the same task again is no other answer
        assert answers.of(3) == [kept(3, 1, "bb"), kept(3, 2, "bb")]
        assert [(a.round, a.attempt) for a in answers.of(2)] == [(2, 1), (2, 2)]
        assert answers.of(4) == []
        assert answers.last() == last(2, 2)
    theirs.add(kept(4), last(4))  # each goes on from what the other has written
    mine.read()
    assert [a.round for a in mine.known] == [1, 3, 3, 2, 2, 4]
    assert mine.distinct == 5  # a task of another round is another answer
    assert mine.last() == last(4)  # the other's, although this process knows one of its own
    mine.forget_last()
    assert theirs.last() is None
    assert mine.highest == 4  # a new session forgets the reply, not that there was one


def test_what_is_known_is_not_read_again(tmp_path):
    answers = Answers(tmp_path)
    answers.add(kept(1), last(1))
    path = tmp_path / "answers.jsonl"
    path.write_bytes(
        b"x" * path.stat().st_size
    )  # of the same length, so that only a second look would see it
    answers.read()
    assert answers.highest == 1


def test_a_process_knows_its_own_last_reply_and_reads_that_of_another(tmp_path, monkeypatch):
    mine, theirs = Answers(tmp_path), Answers(tmp_path)
    mine.add(kept(1), last(1))
    read, read_bytes = [], Path.read_bytes
    monkeypatch.setattr(Path, "read_bytes", lambda self: read.append(self.name) or read_bytes(self))
    assert mine.last() == mine.last() == last(1)
    assert read == []  # what this process has answered it knows
    theirs.read()
    assert theirs.last() == theirs.last() == last(1)
    theirs.add(kept(2), last(2))
    mine.read()
    assert mine.last() == last(2)
    assert [name for name in read if name.startswith("last")] == ["last-1.bin", "last-0.bin"]


def killed(path, line):
    raise KeyboardInterrupt


def test_a_crash_between_a_reply_and_its_line_leaves_the_reply_before(tmp_path, monkeypatch):
    answers = Answers(tmp_path)
    for number in (1, 2):
        answers.add(kept(number), last(number))
        with monkeypatch.context() as crash:
            crash.setattr(site_answers, "append_line", killed)
            with pytest.raises(KeyboardInterrupt):
                answers.add(kept(number + 1), last(9))
        for process in (answers, Answers(tmp_path)):
            assert process.last() == last(number)
            assert process.highest == number


def test_masks_that_were_used_are_known_by_their_session(tmp_path):
    answers = Answers(tmp_path)
    assert answers.last_under("s") is None
    for number, attempt, session, masks in (
        (2, 2, "s", "0a"),
        (2, 1, "s", "0b"),
        (3, 1, "t", "0c"),
        (9, 1, "", ""),
    ):
        answers.add(Kept(number, attempt, "t", "", {}, session=session, masks=masks), last(number))
    for process in (answers, Answers(tmp_path)):
        assert process.last_under("s") == (2, 2, b"\n")
        assert process.last_under("t") == (3, 1, b"\x0c")
        assert process.last_under("u") is None


def test_an_answer_has_no_broadcast_unless_it_says_so():
    assert Kept(1, 1, "t", "", {}).broadcast == ""


def test_a_line_without_an_end_never_left(tmp_path):
    answers = Answers(tmp_path)
    answers.add(kept(1), last(1))
    path = tmp_path / "answers.jsonl"
    whole = path.read_bytes()
    path.write_bytes(whole + whole[:-5])
    assert Answers(tmp_path).known == [kept(1)]


@pytest.mark.parametrize("line", [b"{\n", b"[1]\n", b'{"round": 1}\n', b"\n", b"\xff\n"])
def test_a_damaged_line_stops_the_site(tmp_path, line):
    """Going on without it would answer a round twice."""
    answers = Answers(tmp_path)
    answers.add(kept(1), last(1))
    with open(tmp_path / "answers.jsonl", "ab") as file:
        file.write(line)
    with pytest.raises(StorageError, match=r"answers\.jsonl"):
        answers.read()
    with pytest.raises(StorageError, match=r"answers\.jsonl"):
        Answers(tmp_path)


def test_what_cannot_be_written_does_not_leave(tmp_path):
    answers = Answers(tmp_path)
    (tmp_path / "answers.jsonl").mkdir()
    with pytest.raises(StorageError):
        answers.add(kept(1), last(1))
    assert answers.known == []
    assert answers.last() is None
