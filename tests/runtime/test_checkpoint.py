"""Runs that are interrupted, killed, resumed, extended, or saved on disks that fail."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import jax
import numpy as np
import pytest
import xarray as xr

import fald
from fald.core.errors import ConfigError, ExitCode, Interrupted, StorageError
from fald.core.files import write_atomically
from fald.runtime import checkpoint as checkpoint_module
from fald.runtime.checkpoint import Store


def federation(shift=0.0):
    rng = np.random.default_rng(3)
    return fald.FederatedData.from_arrays(
        {name: rng.normal(shift, 1, (size, 2)) for name, size in {"a": 5, "b": 5, "c": 1}.items()}
    )


COVARIANCE = [[1.0, 0.3], [0.3, 2.0]]
MODEL = fald.models.gaussian_location(COVARIANCE, prior_scale=3.0)
DATA = federation()
SETTINGS = {
    "num_rounds": 120,
    "local_steps": 3,
    "step_size": 0.01,
    "num_chains": 2,
    "num_warmup": 10,
    "progress": False,
}


def run(path=None, *, seed=7, model=MODEL, data=DATA, rounds_per_save=20, **changes):
    where = None if path is None else fald.Checkpoint(path, rounds=rounds_per_save)
    return fald.sample(seed, model, data, **{**SETTINGS, **changes}, checkpoint=where)


class WaitsAt(fald.InProcess):
    """Says so when some round has been done, and goes no further."""

    def __init__(self, place):
        super().__init__()
        self.place = place

    def advance(self, problem, state, num_rounds):
        if state.round >= self.place:
            print("waiting", flush=True)
            time.sleep(3600)
        return super().advance(problem, state, num_rounds)


class StopsAfter(fald.InProcess):
    """As if the user pressed Ctrl-C after some round."""

    def __init__(self, place):
        super().__init__()
        self.place = place

    def advance(self, problem, state, num_rounds):
        if state.round >= self.place:
            raise KeyboardInterrupt
        return super().advance(problem, state, num_rounds)


def run_until(path, place):
    """Run by the subprocesses below, until something stops it after round ``place``."""
    # a shell starts background jobs with SIGINT ignored, and children inherit that
    signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        run(path, rounds_per_save=10, engine=WaitsAt(int(place)))
    except Interrupted as error:
        draws = None if error.tree is None else error.tree["posterior"].sizes["draw"]
        print(json.dumps([str(error), int(error.exit_code), draws]))


def run_on_a_full_disk(path):
    """Run by a subprocess: no file may grow beyond 64 bytes after the first 60 rounds."""
    import resource

    run(path, num_rounds=60)
    resource.setrlimit(resource.RLIMIT_FSIZE, (64, resource.RLIM_INFINITY))
    try:
        run(path)
    except StorageError as error:
        print(json.dumps([str(error), int(error.exit_code), error.tree["posterior"].sizes["draw"]]))


# a process that is killed or short of disk would leave half an entry in the cache of compiled programs
NO_SHARED_CACHE = {"JAX_ENABLE_COMPILATION_CACHE": "false"}


def start_python(call, *arguments):
    code = f"import sys; sys.path[:0] = sys.argv[1:3]; import test_checkpoint as t; t.{call}(*sys.argv[3:])"
    here = Path(__file__).parent
    return subprocess.Popen(
        [sys.executable, "-c", code, str(here), str(here.parent), *map(str, arguments)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, **NO_SHARED_CACHE},
    )


def saved_round(path):
    with np.load(path / "state.npz") as state:
        return int(state["round"])


def start_and_wait(path, place):
    """A run in a process of its own that has done ``place`` rounds and waits."""
    process = start_python("run_until", path, place)
    assert process.stdout is not None
    if process.stdout.readline() != "waiting\n":
        pytest.fail(f"the run did not get there: {process.communicate()}")
    return process


def interrupt(path, place=35, **changes):
    with pytest.raises(Interrupted) as caught:
        run(path, engine=StopsAfter(place), **changes)
    return caught.value


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"participation": fald.with_replacement(2), "batch_size": 3, "thinning": 3},
        {"step_size": fald.paper_decay(50.0, 1.0), "correlation": 0.5, "num_warmup": 0},
    ],
    ids=["full", "partial", "schedule"],
)
def test_resumed_run_is_bit_identical(tmp_path, changes):
    interrupt(tmp_path, 15, **changes)
    interrupt(tmp_path, 50, **changes)
    xr.testing.assert_identical(run(tmp_path, **changes), run(**changes))


def test_interruption_keeps_draws_and_says_how_to_go_on(tmp_path):
    error = interrupt(tmp_path)
    assert error.exit_code == ExitCode.INTERRUPTED == 130
    assert "of 120" in error.message
    assert "resume" in error.hint
    kept = error.tree["posterior"].sizes["draw"]
    assert 0 < kept < 110
    xr.testing.assert_identical(error.tree["posterior"], run()["posterior"].isel(draw=slice(kept)))
    without = interrupt(None, 15)
    assert "give a checkpoint" in without.hint
    assert interrupt(None, 0).tree is None


@pytest.mark.parametrize("call", range(1, 8))
def test_interruption_while_saving(tmp_path, monkeypatch, call):
    calls = 0

    def interrupted_once(path, content):
        nonlocal calls
        write_atomically(path, content)
        calls += 1
        if calls == call:
            raise KeyboardInterrupt

    monkeypatch.setattr(checkpoint_module, "write_atomically", interrupted_once)
    if call == 1:  # run.json, before anything is sampled
        with pytest.raises(KeyboardInterrupt):
            run(tmp_path)
    else:
        with pytest.raises(Interrupted) as caught:
            run(tmp_path)
        rounds = [] if caught.value.tree is None else caught.value.tree["sample_stats"]["round"].values
        assert np.array_equal(rounds, 11 + np.arange(len(rounds)))
    xr.testing.assert_identical(run(tmp_path), run())


def test_killed_run_resumes_to_identical_draws(tmp_path):
    for place in (25, 75):
        process = start_and_wait(tmp_path, place)
        process.send_signal(signal.SIGKILL)
        process.communicate(timeout=600)
        assert process.returncode == -signal.SIGKILL
        assert place - 10 < saved_round(tmp_path) <= place + 10
    xr.testing.assert_identical(run(tmp_path), run())
    assert not list(tmp_path.glob(".*"))


def test_ctrl_c_ends_in_interrupted_and_resumes(tmp_path):
    process = start_and_wait(tmp_path, 30)
    process.send_signal(signal.SIGINT)
    out, err = process.communicate(timeout=600)
    assert process.returncode == 0, err
    message, exit_code, draws = json.loads(out)
    assert "interrupted after round" in message
    assert exit_code == 130
    assert draws >= saved_round(tmp_path) - SETTINGS["num_warmup"] >= 20
    xr.testing.assert_identical(run(tmp_path), run())


def test_full_disk_keeps_the_earlier_checkpoint(tmp_path):
    process = start_python("run_on_a_full_disk", tmp_path)
    out, err = process.communicate(timeout=600)
    assert process.returncode == 0, err
    message, exit_code, draws = json.loads(out)
    assert str(tmp_path) in message
    assert "disk is full" in message
    assert exit_code == ExitCode.STORAGE
    assert draws > 50
    assert saved_round(tmp_path) == 60
    assert sorted(p.name for p in tmp_path.iterdir() if p.name.endswith("tmp")) == []
    xr.testing.assert_identical(run(tmp_path), run())


def flip_a_byte(path):
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 0xFF
    path.write_bytes(content)


DAMAGE = {
    "state truncated": ("state.npz", lambda p: p.write_bytes(p.read_bytes()[:-40])),
    "state empty": ("state.npz", lambda p: p.write_bytes(b"")),
    "state garbage": ("state.npz", lambda p: p.write_bytes(os.urandom(500))),
    "state of another shape": ("state.npz", lambda p: np.savez(p, leaf_0=np.zeros(3), round=1, num_files=0)),
    "state without its round": ("state.npz", lambda p: np.savez(p, leaf_0=np.zeros(3))),
    "draws with a flipped byte": ("draws-00001.npz", flip_a_byte),
    "draws truncated": ("draws-00000.npz", lambda p: p.write_bytes(p.read_bytes()[:200])),
    "draws missing": ("draws-00001.npz", Path.unlink),
    "draws of something else": ("draws-00001.npz", lambda p: np.savez(p, position=np.zeros(3))),
    "run.json garbage": ("run.json", lambda p: p.write_bytes(b"\xff\x00{")),
    "run.json of another kind": ("run.json", lambda p: p.write_text("[1, 2]")),
    "run.json incomplete": ("run.json", lambda p: p.write_text('{"format": 1}')),
    "run.json missing": ("run.json", Path.unlink),
}


@pytest.mark.parametrize("name", DAMAGE)
def test_damaged_checkpoint_is_refused_by_name(tmp_path, name):
    interrupt(tmp_path)
    file, damage = DAMAGE[name]
    damage(tmp_path / file)
    with pytest.raises(StorageError, match=file) as caught:
        run(tmp_path)
    assert "damaged or missing" in caught.value.message
    assert "delete" in caught.value.hint
    assert caught.value.exit_code == ExitCode.STORAGE


def test_draws_that_do_not_belong_to_the_state_are_refused(tmp_path):
    interrupt(tmp_path)
    (tmp_path / "draws-00000.npz").write_bytes((tmp_path / "draws-00001.npz").read_bytes())
    with pytest.raises(StorageError, match="not those of the saved state"):
        run(tmp_path)


def test_no_flipped_byte_changes_what_is_read(tmp_path):
    interrupt(tmp_path)
    store = Store(tmp_path, {"settings": {}, "fingerprints": {}})
    path = tmp_path / "draws-00000.npz"
    good, clean = store._read_draws(0), path.read_bytes()
    noticed = 0
    for i in np.random.default_rng(0).choice(len(clean), 400, replace=False):
        path.write_bytes(clean[:i] + bytes([clean[i] ^ 0x21]) + clean[i + 1 :])
        try:
            found = store._read_draws(0)
        except StorageError:
            noticed += 1
            continue
        assert all(np.array_equal(a, b, equal_nan=True) for a, b in zip(found, good))
    assert noticed > 200


def custom_start(value):
    return {"initial_position": np.full(2, value)}


OTHER_RUNS = {
    "step-size (0.01 there, 0.02 now)": {"step_size": 0.02},
    "local-steps (3 there, 4 now)": {"local_steps": 4},
    "num-chains": {"num_chains": 3},
    "num-participants": {"participation": fald.with_replacement(2)},
    "seed (7 there, 8 now)": {"seed": 8},
    "the data": {"data": federation(shift=0.01)},
    "the densities of the model": {"model": fald.models.gaussian_location(COVARIANCE, prior_scale=2.9)},
    "the starting positions": custom_start(1.0),
    "the step-size schedule": {"step_size": lambda k: 0.01 / (1 + k)},
}


@pytest.mark.parametrize("different", OTHER_RUNS)
def test_another_run_is_refused(tmp_path, different):
    run(tmp_path, num_rounds=30)
    with pytest.raises(ConfigError, match="another run") as caught:
        run(tmp_path, **OTHER_RUNS[different])
    assert different in caught.value.message


def test_only_what_differs_is_named(tmp_path):
    run(tmp_path, num_rounds=30)
    with pytest.raises(ConfigError, match=r"different: correlation \(0.0 there, 0.5 now\)\n"):
        run(tmp_path, correlation=0.5)


def test_schedules_of_the_same_kind_are_told_apart(tmp_path):
    run(tmp_path, num_rounds=20, step_size=lambda k: 0.01 / (1 + k))
    with pytest.raises(ConfigError, match="schedule"):
        run(tmp_path, num_rounds=20, step_size=lambda k: 0.01 / (1 + 2 * k))


def test_starting_positions_count_for_every_chain_and_parameter(tmp_path):
    start = np.zeros((4, 2))
    run(tmp_path, num_rounds=20, num_chains=4, initial_position=start)
    start[3, 1] = 1e-3
    with pytest.raises(ConfigError, match="the starting positions"):
        run(tmp_path, num_rounds=20, num_chains=4, initial_position=start)


def test_model_name_and_precision_count(tmp_path):
    run(tmp_path, num_rounds=20)
    renamed = fald.Model(MODEL.logprior_fn, MODEL.loglikelihood_fn, MODEL.initial_position, name="mine")
    with pytest.raises(ConfigError, match="model \\('gaussian-location' there, 'mine' now\\)"):
        run(tmp_path, num_rounds=20, model=renamed)
    with jax.enable_x64(True), pytest.raises(ConfigError, match="precision \\('float32' there"):
        run(tmp_path, num_rounds=20)


def test_a_run_can_be_extended_but_not_shortened(tmp_path):
    run(tmp_path, num_rounds=50)
    xr.testing.assert_identical(run(tmp_path), run())
    with pytest.raises(ConfigError, match="has 120 rounds already; num-rounds is 119"):
        run(tmp_path, num_rounds=119)


def test_a_finished_run_is_read_back_without_sampling(tmp_path):
    first = run(tmp_path)
    xr.testing.assert_identical(run(tmp_path, engine=StopsAfter(0)), first)


def test_saves_come_at_least_every_so_many_rounds(tmp_path, monkeypatch):
    rounds = []
    save = Store.save
    monkeypatch.setattr(
        Store, "save", lambda self, state, r: rounds.append(state.round) or save(self, state, r)
    )
    run(tmp_path, rounds_per_save=25)
    assert rounds == [25, 50, 75, 100, 120]


def test_what_a_killed_save_left_is_cleaned_up(tmp_path):
    interrupt(tmp_path)
    (tmp_path / ".state.npz.1.tmp").write_bytes(b"half")
    (tmp_path / "draws-00099.npz").write_bytes(b"not counted by the state")
    xr.testing.assert_identical(run(tmp_path), run())
    assert not (tmp_path / ".state.npz.1.tmp").exists()


def test_folders_that_cannot_be_written(tmp_path):
    file = tmp_path / "file"
    file.write_text("")
    for path in (file, file / "below"):
        with pytest.raises(StorageError, match="cannot write") as caught:
            run(path)
        assert str(path) in caught.value.message
        assert caught.value.exit_code == ExitCode.STORAGE


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write everywhere")
def test_folder_without_permission(tmp_path):
    folder = tmp_path / "mine"
    folder.mkdir(mode=0o500)
    with pytest.raises(StorageError, match="Permission denied"):
        run(folder)


@pytest.mark.parametrize(
    "wrong", [{"seconds": -1.0}, {"seconds": float("nan")}, {"rounds": 0}, {"rounds": 1.5}]
)
def test_checkpoint_settings_are_checked(wrong):
    with pytest.raises(ConfigError, match="between checkpoints must be"):
        fald.Checkpoint("somewhere", **wrong)


def test_a_failed_write_leaves_the_old_file(tmp_path):
    path = tmp_path / "file"
    write_atomically(path, b"old")
    folder = tmp_path / f".file.{os.getpid()}.tmp"
    folder.mkdir()  # in the way of the temporary file
    with pytest.raises(StorageError, match="cannot write"):
        write_atomically(path, b"new")
    assert path.read_bytes() == b"old"
