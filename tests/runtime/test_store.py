"""The folder of a checkpoint by itself: what it takes back, and what it refuses."""

import json

import numpy as np
import pytest

from fald.core.errors import ConfigError, StorageError
from fald.core.files import pack, unpack
from fald.runtime.checkpoint import Checkpoint, Store, as_checkpoint
from fald.runtime.records import Records, RunState

ABOUT = {"settings": {"local_steps": 3, "seed": 7}, "fingerprints": {"rows": "abc"}}


def records(rounds, value=0.0):
    filled = {name: np.full((len(rounds), 2), value) for name in Records._fields}
    return Records(**{**filled, "round": np.asarray(rounds)})


def state(number, value=1.0):
    return RunState(number, np.full((2, 3), value, np.float32), {"kept": np.full(2, 2 * value)})


@pytest.fixture
def store(tmp_path):
    made = Store(tmp_path / "run", ABOUT)
    assert made.open() is False
    return made


def again(store, **changes):
    return Store(store.path, {**ABOUT, **changes})


def test_what_is_saved_comes_back(store):
    first, second, third = records([1, 2], 0.1), records([3, 4], 0.2), records([5], 0.3)
    store.save(state(4), [first, second])
    assert store.saved_round == 4
    store.save(state(4), [first, second])  # harmless
    store.save(state(5, 9.0), [first, second, third])
    assert sorted(p.name for p in store.path.glob("draws-*")) == ["draws-00000.npz", "draws-00001.npz"]
    other = again(store)
    assert other.open() is True
    back, drawn = other.load(state(0, 0.0))
    assert (back.round, other.saved_round) == (5, 5)
    np.testing.assert_array_equal(back.server, state(5, 9.0).server)
    np.testing.assert_array_equal(back.memory["kept"], [18.0, 18.0])
    assert np.concatenate([d.round for d in drawn]).tolist() == [1, 2, 3, 4, 5]
    for name in Records._fields:
        if name != "round":
            wanted = [getattr(r, name) for r in (first, second, third)]
            np.testing.assert_array_equal(
                np.concatenate([getattr(d, name) for d in drawn]), np.concatenate(wanted)
            )
    # it goes on after them, and saves no draw twice
    other.save(state(6), [*drawn, records([6])])
    assert again(store).load(state(0))[1][-1].round.tolist() == [6]


def test_only_draws_up_to_the_state_are_saved(store):
    store.save(state(2), [records([1, 2]), records([3, 4]), records([])])
    assert unpack(store.path / "draws-00000.npz")["round"].tolist() == [1, 2]
    store.save(state(4), [records([1, 2]), records([3, 4])])
    assert unpack(store.path / "draws-00001.npz")["round"].tolist() == [3, 4]
    store.save(state(5), [records([1, 2]), records([3, 4])])  # a round without draws
    assert not (store.path / "draws-00002.npz").exists()
    assert store.saved_round == 5


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"settings": {"local_steps": 4, "seed": 7}}, r"local-steps \(3 there, 4 now\)"),
        ({"settings": {"local_steps": 3}}, r"seed \(7 there, None now\)"),
        ({"settings": {**ABOUT["settings"], "noise": "paper"}}, "noise"),
        ({"fingerprints": {"rows": "abd"}}, "different: rows"),
        ({"fingerprints": {"rows": "abc", "model": "x"}}, "different: model"),
        ({"fingerprints": {}}, "different: rows"),
        ({"format": 2}, "the format of the checkpoint"),
    ],
)
def test_another_run_is_refused(store, change, words):
    store.save(state(1), [records([1])])
    with pytest.raises(ConfigError, match=words):
        again(store, **change).open()
    assert again(store).open() is True


def test_a_folder_that_cannot_be_made_is_named(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(StorageError, match="file"):
        Store(tmp_path / "file" / "run", ABOUT).open()


def test_what_a_kill_left_may_be_gone_already(store, monkeypatch):
    left = store.path / ".draws.npz.tmp"
    monkeypatch.setattr(type(left), "glob", lambda self, pattern: iter([left]))
    assert again(store).open() is False


def test_what_the_run_is_can_be_compared_as_text(store):
    about = json.loads((store.path / "run.json").read_text())
    assert about == {"format": 1, **ABOUT}
    assert (store.path / "run.json").read_text() == json.dumps(about, indent=1, sort_keys=True)


def test_folders_that_are_damaged_or_half_written(store):
    left = store.path / ".state.npz.tmp"
    left.write_bytes(b"half")
    assert again(store).open() is False
    assert not left.exists()
    about = store.path / "run.json"
    for text in ("{", "[]", '{"format": 1}'):
        about.write_text(text)
        with pytest.raises(StorageError, match=r"run\.json"):
            again(store).open()
    about.unlink()
    store.save(state(1), [])
    with pytest.raises(StorageError, match="without it"):
        again(store).open()


def test_states_that_do_not_fit_are_damaged(store):
    store.save(state(1), [records([1])])
    path = store.path / "state.npz"
    good = unpack(path)
    float64 = {**good, "leaf_0": good["leaf_0"].astype(np.float64)}
    short = {**good, "leaf_0": good["leaf_0"][:1]}
    for wrong in (float64, short, {k: v for k, v in good.items() if k != "leaf_1"},
                  {k: v for k, v in good.items() if k != "num_files"},
                  {k: v for k, v in good.items() if k != "round"}):  # fmt: skip
        path.write_bytes(pack(wrong))
        with pytest.raises(StorageError, match=r"state\.npz"):
            again(store).load(state(0))
    path.write_bytes(pack(good))
    assert again(store).load(state(0))[0].round == 1
    draws = store.path / "draws-00000.npz"
    kept = unpack(draws)
    for wrong in ({**kept, "more": np.ones(1)}, {k: v for k, v in kept.items() if k != "round"}):
        draws.write_bytes(pack(wrong))
        with pytest.raises(StorageError, match="it holds"):
            again(store).load(state(0))


def test_answers_are_those_to_the_same_question(store):
    question = np.array([1.0, 2e-3])
    assert store.answered_rounds() == 0
    store.save_answers(1, {"values": np.arange(3.0)}, question)
    store.save_answers(2, {"values": np.arange(4.0)}, question + 1)
    store.save_answers(4, {}, question)
    assert store.answered_rounds() == 2  # in a row, for another follows
    assert store.load_answers(1, question)["values"].tolist() == [0.0, 1.0, 2.0]
    assert set(store.load_answers(1, question * (1 + 1e-7))) == {"values"}
    store.save_answers(3, {}, np.zeros(1))
    assert store.load_answers(3, np.full(1, 5e-10)) == {}
    with pytest.raises(StorageError, match="another question"):
        store.load_answers(3, np.full(1, 5e-9))
    for other in (question * (1 + 1e-5), question + np.array([0.0, 1e-7]), question[:1], question + 1):
        with pytest.raises(StorageError, match="another question"):
            store.load_answers(1, other)
    (store.path / "round-0005.npz").write_bytes(pack({"values": np.ones(1)}))
    for any_question in (question, np.zeros(1)):
        with pytest.raises(StorageError, match="another question"):
            store.load_answers(5, any_question)


def test_what_else_is_saved_with_a_state_keeps_its_name(store):
    store.save(state(2), [records([1, 2])], {"seen": np.arange(3), "x": np.ones(1)})
    other = again(store)
    other.load(state(0))
    assert {name: a.tolist() for name, a in other.extra.items()} == {"seen": [0, 1, 2], "x": [1.0]}


def test_rounds_that_were_begun_count(store):
    assert store.begun_rounds() == 0
    store.begin_rounds(17)
    assert again(store).begun_rounds() == 17
    for text in ("{", "{}", '{"rounds": "many"}', '{"rounds": null}'):
        (store.path / "begun.json").write_text(text)
        with pytest.raises(StorageError, match=r"begun\.json"):
            store.begun_rounds()


def test_where_and_how_often(tmp_path):
    assert as_checkpoint(None) is None
    assert as_checkpoint(str(tmp_path)) == Checkpoint(str(tmp_path), 5.0, None)
    given = Checkpoint(tmp_path, 0, 1)
    assert as_checkpoint(given) is given
    with pytest.raises(ConfigError, match="checkpoint must be a folder"):
        as_checkpoint(3)
    for wrong in ({"seconds": -1e-9}, {"seconds": float("nan")}, {"rounds": 0}, {"rounds": 1.5}):
        with pytest.raises(ConfigError, match="between checkpoints"):
            Checkpoint(tmp_path, **wrong)
    about = json.loads(
        (lambda s: (s.open(), (s.path / "run.json").read_text())[1])(Store(tmp_path / "x", ABOUT))
    )
    assert about == {"format": 1, **ABOUT}
