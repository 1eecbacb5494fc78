"""The journal of a run: what it says, and that it survives kills, resumptions and full disks."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest

import fald
from fald.core.errors import ConfigError, Interrupted, NonFiniteError, StorageError
from fald.fewround.exchange import InProcessExchange
from fald.langevin.inprocess import InProcess
from fald.results.summary import settling
from fald.runtime import journal
from fald.runtime.journal import Journal, alive, read
from fald.runtime.records import Records
from helpers import federation, linear_model

ROWS = federation().data
MODEL = linear_model(2.0)


def sample(folder, **changes):
    settings = {
        "num_rounds": 60,
        "local_steps": 2,
        "step_size": 1e-3,
        "num_warmup": 20,
        "num_chains": 3,
        "progress": False,
        **changes,
    }
    return fald.sample(0, MODEL, ROWS, journal=folder, **settings)


def rounds(folder):
    return [line for line in read(folder) if "event" not in line]


def test_a_run_says_where_it_begins_how_it_goes_and_how_it_ends(tmp_path):
    tree = sample(tmp_path)
    start, *lines, end = read(tmp_path)
    assert (start["event"], start["round"], start["rounds_total"]) == ("start", 0, 60)
    assert start["sites"] == {name: int(size) for name, size in zip(ROWS.names, ROWS.sizes)}
    assert start["method"] == "fa-ld"
    assert (end["event"], end["status"]) == ("end", "finished")
    last = lines[-1]
    assert (last["round"], last["draws"], last["sites"]) == (60, 3 * 40, None)
    assert last["bytes_up"] == int(tree["cost"]["bytes_up"].sum())
    assert np.isfinite(last["energy"])
    table = fald.summary(tree)
    assert list(last["intervals"]) == list(table.index)


def test_the_intervals_and_r_hat_of_the_journal_are_those_of_the_draws():
    tree_of = {}

    class Kept(InProcess):
        def advance(self, problem, state, num_rounds):
            after, new, energy = super().advance(problem, state, num_rounds)
            tree_of.setdefault("records", []).append(new)
            return after, new, energy

    tree = sample(None, engine=Kept(), num_rounds=20 + 64)
    seen, table = settling(MODEL, tree_of["records"]), fald.summary(tree)
    for label, (mean, low, high) in seen["intervals"].items():
        assert np.allclose([mean, low, high], table.loc[label, ["mean", "2.5%", "97.5%"]].astype(float))
    assert seen["r_hat"] == pytest.approx(table["r_hat"].max())
    # fewer draws than a power of two, evenly spaced: the same law, not the same numbers
    fewer = settling(MODEL, tree_of["records"], most=32)
    assert fewer["intervals"] != seen["intervals"]
    assert settling(MODEL, []) == {}
    # of a chain on its way the first half and the second count alike
    way = np.linspace(-1, 1, 300)[:, None, None] * np.ones((1, 2, MODEL.dim))
    parts = [Records(np.arange(a, b), way[a:b], *[np.zeros(0)] * (len(Records._fields) - 2))
             for a, b in ((0, 70), (70, 300))]  # fmt: skip
    for mean, low, high in settling(MODEL, parts, most=32)["intervals"].values():
        np.testing.assert_allclose([mean, low, high], [0, -0.95, 0.95], atol=0.05)


def test_a_journal_changes_no_draw(tmp_path):
    assert sample(tmp_path)["posterior"].to_dataset().equals(sample(None)["posterior"].to_dataset())


def test_few_round_methods_write_every_round(tmp_path):
    tree = fald.fit(0, MODEL, ROWS, progress=False, journal=tmp_path)
    start, *lines, end = read(tmp_path)
    assert [line["round"] for line in lines] == list(range(1, tree.attrs["rounds_done"] + 1))
    assert start["rounds_total"] == 12
    assert end["status"] == "finished"
    last = lines[-1]
    table = tree["rounds"].to_dataset()
    assert last["ess"] == pytest.approx(float(table["ess"][-1]), rel=1e-5)
    assert last["k_hat"] == pytest.approx(float(table["khat"][-1]), rel=1e-5)
    assert last["bytes_up"] == ROWS.num_clients * int(table["bytes_up"].sum())
    names = [str(n) for n in table["parameter"].values]
    assert [last["intervals"][n][0] for n in names] == pytest.approx(list(table["mean"].values[-1]), rel=1e-5)


class Answering(InProcessExchange):
    """Sites whose answers take time, one of them late; they go away after some rounds."""

    left = 99

    def ask(self, request):
        if self.left == 0:
            raise KeyboardInterrupt
        self.left -= 1
        return super().ask(request)

    def replies(self):
        return {name: {"seconds": 0.1 * i, "status": "answered"} for i, name in enumerate(self.names)}


def test_sites_that_can_tell_how_they_answered_are_written_down(tmp_path):
    fald.fit(0, MODEL, ROWS, progress=False, journal=tmp_path, exchange=Answering(MODEL, ROWS))
    told = [line["sites"] for line in rounds(tmp_path)]
    assert all(set(sites) == set(ROWS.names) for sites in told)
    assert told[0][ROWS.names[1]] == {"seconds": 0.1, "status": "answered"}


def test_a_resumed_fit_goes_on_and_replays_nothing(tmp_path):
    exchange = Answering(MODEL, ROWS)
    exchange.left = 2
    with pytest.raises(Interrupted):
        fald.fit(0, MODEL, ROWS, progress=False, journal=tmp_path, checkpoint=tmp_path, exchange=exchange)
    assert read(tmp_path)[-1]["status"] == "interrupted"
    tree = fald.fit(0, MODEL, ROWS, progress=False, journal=tmp_path, checkpoint=tmp_path)
    assert [line["round"] for line in rounds(tmp_path)] == list(range(1, tree.attrs["rounds_done"] + 1))
    assert [line["round"] for line in read(tmp_path) if line.get("event") == "start"] == [0, 2]


def test_a_new_run_hides_an_older_one_and_a_resumed_run_does_not(tmp_path):
    sample(tmp_path, num_rounds=40)
    sample(tmp_path)
    assert [line["event"] for line in read(tmp_path) if "event" in line] == ["start", "end"]
    assert read(tmp_path)[0]["rounds_total"] == 60
    sample(tmp_path, num_rounds=30, checkpoint=tmp_path / "saved")
    sample(tmp_path, num_rounds=40, checkpoint=tmp_path / "saved")
    starts = [line for line in read(tmp_path) if line.get("event") == "start"]
    assert [line["round"] for line in starts] == [0, 30]


def test_what_a_kill_tears_is_left_out_and_the_next_line_starts_afresh(tmp_path):
    with Journal(tmp_path).running(round=0):
        pass
    path = tmp_path / journal.NAME
    path.write_bytes(path.read_bytes() + b'{"round": 1, "ener')
    assert [line["event"] for line in read(tmp_path)] == ["start", "end"]
    Journal(tmp_path).write(round=2)
    assert read(tmp_path)[-1]["round"] == 2


def test_a_failed_run_says_why(tmp_path):
    with pytest.raises(NonFiniteError):
        sample(tmp_path, step_size=1e6, num_rounds=200)
    end = read(tmp_path)[-1]
    assert (end["event"], end["status"]) == ("end", "failed")
    assert "non-finite" in end["message"]


def test_numbers_that_are_not_finite_become_null(tmp_path):
    one = Journal(tmp_path)
    one.write(round=1, energy=np.float32("nan"), k_hat=float("inf"), intervals={"a": np.array([1.0, np.nan])})
    content = (tmp_path / journal.NAME).read_text()
    line = json.loads(content, parse_constant=lambda name: pytest.fail(name))
    assert (line["energy"], line["k_hat"], line["intervals"]) == (None, None, {"a": [1.0, None]})


def test_a_journal_that_cannot_be_written_stops_the_run_with_its_draws(tmp_path, monkeypatch):
    with pytest.raises(StorageError, match=r"rounds\.jsonl"):
        sample(tmp_path / "missing")
    with pytest.raises(ConfigError, match="journal must be"):
        sample(3)
    real = Journal.write

    def full(self, **fields):
        if fields.get("round") == 60:
            raise StorageError("the disk is full")
        real(self, **fields)

    monkeypatch.setattr(Journal, "write", full)
    with pytest.raises(StorageError, match="disk is full") as caught:
        sample(tmp_path)
    assert caught.value.tree["posterior"].sizes["draw"] == 40


def test_an_absent_journal_is_an_error_with_a_hint(tmp_path):
    with pytest.raises(StorageError, match="cannot read"):
        read(tmp_path)


@pytest.mark.skipif(os.name == "nt", reason="locks are those of POSIX")
def test_the_lock_tells_a_living_run_from_a_killed_one(tmp_path):
    code = (
        "import sys, time; from fald.runtime.journal import Journal\n"
        "with Journal(sys.argv[1]).running(round=0):\n    time.sleep(3600)"
    )
    process = subprocess.Popen([sys.executable, "-c", code, str(tmp_path)])
    try:
        deadline = time.monotonic() + 600
        while not (tmp_path / journal.NAME).exists() or not read(tmp_path):
            assert time.monotonic() < deadline
            time.sleep(0.05)
        assert alive(tmp_path) is True
        process.send_signal(signal.SIGKILL)
        process.wait()
        assert alive(tmp_path) is False
        assert [line["event"] for line in read(tmp_path)] == ["start"]
    finally:
        process.kill()


def test_every_key_is_in_the_reference(tmp_path):
    page = Path(__file__).parents[2] / "docs" / "reference" / "file-formats.md"
    described = page.read_text(encoding="utf-8").partition("## The journal")[2].partition("## Folder of a")[0]
    sample(tmp_path)
    keys = {key for line in read(tmp_path) for key in line}
    fald.fit(0, MODEL, ROWS, progress=False, journal=tmp_path)
    keys |= {key for line in read(tmp_path) for key in line}
    assert {"energy", "k_hat", "event", "status"} <= keys
    assert {key for key in keys if f"`{key}`" not in described} == set()
