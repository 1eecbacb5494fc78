"""What the live page is told about a run: how far, how fast, and whether it still lives."""

import json

import pytest

from fald.core.errors import ConfigError
from fald.pages.watch import Follower
from fald.runtime import journal
from fald.runtime.journal import Journal

SITES = {"north": 30, "south": 10}


class Clock:
    now = 1000.0

    def __call__(self):
        return self.now


@pytest.fixture
def clock(monkeypatch):
    """One clock for the run and for who follows it."""
    made = Clock()
    monkeypatch.setattr(journal.time, "time", made)
    return made


@pytest.fixture
def run(tmp_path, clock):
    (tmp_path / "study.json").write_text(json.dumps({"title": "A study"}))
    return Journal(tmp_path), Follower(tmp_path, clock)


def begin(notes, round_number=0, total=100, **more):
    notes.write(event="start", round=round_number, rounds_total=total, sites=SITES, method="fa-ld", **more)


def test_a_run_that_has_written_nothing_is_waited_for(run):
    state = run[1].state({})
    assert (state["status"], state["title"], state["series"]) == ("waiting", "A study", {})


def test_rounds_rate_and_time_left(run, clock):
    notes, follower = run
    begin(notes)
    for number in (10, 20, 30):
        clock.now += 5
        notes.write(round=number, energy=float(number), draws=number)
    state = follower.state({})
    assert (state["status"], state["round"], state["rounds_total"]) == ("running", 30, 100)
    assert state["rate"] == pytest.approx(2.0)
    assert state["eta"] == pytest.approx(35.0)
    assert state["elapsed"] == pytest.approx(15.0)
    assert state["series"]["energy"] == {"round": [10, 20, 30], "value": [10.0, 20.0, 30.0]}
    clock.now += 10
    assert follower.state({})["eta"] == pytest.approx(25.0)


def test_only_what_is_new_is_sent(run):
    notes, follower = run
    begin(notes)
    first = follower.state({})
    again = follower.state({"seen": first["version"]})
    assert "series" not in again
    assert again["status"] == "running"
    notes.write(round=1, energy=1.0)
    assert "series" in follower.state({"seen": first["version"]})


@pytest.mark.parametrize(
    ("gap", "silence", "status"), [(1, 20, "running"), (1, 40, "stalled"), (60, 300, "running")]
)
def test_silence_is_judged_by_the_pace_of_the_run(run, clock, gap, silence, status):
    notes, follower = run
    begin(notes)
    for number in (1, 2, 3):
        clock.now += gap
        notes.write(round=number)
        line = json.loads(notes.path.read_text().splitlines()[-1])
        line["seconds"] = gap  # the journal measures with another clock than this test
        lines = notes.path.read_text().splitlines()
        notes.path.write_text("\n".join([*lines[:-1], json.dumps(line)]) + "\n")
    clock.now += silence
    assert follower.state({})["status"] == status


def test_a_run_whose_process_is_gone_died(run):
    notes, follower = run
    begin(notes)
    notes.write(round=1)
    assert follower.state({})["status"] == "running"
    notes.close()  # the lock goes with the process
    assert follower.state({})["status"] == "died"


@pytest.mark.parametrize("status", ["finished", "interrupted", "failed"])
def test_the_last_line_says_how_a_run_ended(run, status):
    notes, follower = run
    begin(notes)
    notes.write(event="end", status=status, message="because")
    notes.close()
    state = follower.state({})
    assert (state["status"], state["message"]) == (status, "because")


def test_a_resumed_run_forgets_the_rounds_that_are_run_again(run):
    notes, follower = run
    begin(notes)
    for number in (10, 20, 30):
        notes.write(round=number, energy=1.0)
    assert follower.state({})["round"] == 30
    begin(notes, round_number=20)
    assert follower.state({})["round"] == 20
    notes.write(round=25, energy=2.0)
    state = follower.state({})
    assert state["series"]["energy"] == {"round": [10, 20, 25], "value": [1.0, 1.0, 2.0]}
    assert state["parts"] == 2
    begin(notes)
    assert follower.state({})["series"] == {}


def test_a_line_that_is_being_written_is_read_when_it_is_whole(run):
    notes, follower = run
    begin(notes)
    with open(notes.path, "ab") as file:
        file.write(b'{"round": 1, "ene')
        file.flush()
        assert follower.state({})["round"] == 0
        file.write(b'rgy": 4.0, "time": 1000}\n')
    assert follower.state({})["numbers"]["energy"] == 4.0


def test_sites_that_do_not_answer_show(run):
    notes, follower = run
    begin(notes)
    for status in ("answered", "late"):
        sites = {"north": {"seconds": 0.5, "status": "answered"}, "south": {"seconds": 9.0, "status": status}}
        notes.write(round=1 if status == "answered" else 2, sites=sites)
    north, south = follower.state({})["sites"]
    assert (north["share"], north["counts"]) == (0.75, {"answered": 2})
    assert (south["status"], south["seconds"], south["counts"]) == ("late", 9.0, {"answered": 1, "late": 1})


def test_long_runs_are_thinned_and_keep_their_last_line(run):
    notes, follower = run
    begin(notes, total=5000)
    for number in range(1, 2001):
        notes.write(
            round=number, energy=0.5, intervals={"a": [0.0, -1.0, number]} if number % 10 == 0 else None
        )
    state = follower.state({})
    assert len(state["series"]["energy"]["round"]) == 400
    assert state["series"]["energy"]["round"][-1] == 2000
    (only,) = state["intervals"]
    assert (only["high"], len(only["history"])) == (2000, 60)


def test_the_result_is_what_the_run_wrote(run, tmp_path):
    table = [{"parameter": "a", "mean": 1.5, "2.5%": 1.0, "97.5%": 2.0}] * 40
    (tmp_path / "summary.json").write_text(json.dumps({"summary": table, "level": 0.95, "complaints": []}))
    state = run[1].state({})
    assert state["status"] == "finished"  # by a version that kept no journal
    assert state["result"]["num_parameters"] == 40
    assert state["result"]["summary"] == table[: journal.MOST_PARAMETERS]
    (tmp_path / "summary.json").write_text('{"summary": [')
    assert run[1].state({})["result"] is None


def test_another_folder_is_refused(tmp_path):
    with pytest.raises(ConfigError, match="no such folder"):
        Follower(tmp_path / "missing")
    with pytest.raises(ConfigError, match="not the folder of a run"):
        Follower(tmp_path)
