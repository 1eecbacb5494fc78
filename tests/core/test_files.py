"""Locks of folders: one process at a time, whatever happens to it."""

import subprocess
import sys

import pytest

from fald.core.errors import ConfigError
from fald.core.files import lock, sole_owner

FORK = """
import os, pathlib, sys, time
from fald.core.files import locked
with locked(pathlib.Path(sys.argv[1])):
    if not os.fork():
        sys.stdin.read()
        os._exit(0)
print("left", flush=True)
sys.stdin.read()
"""
HOLD = """
import sys, pathlib
from fald.core.files import sole_owner
with sole_owner(pathlib.Path(sys.argv[1])):
    print("held", flush=True)
    sys.stdin.read()
"""


@pytest.fixture
def holder(tmp_path):
    """Another process that holds a folder until it is told to let go."""
    process = subprocess.Popen(
        [sys.executable, "-c", HOLD, str(tmp_path / "run")],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert process.stdout.readline() == "held\n"
    yield process
    process.kill()
    process.wait()


def test_a_folder_has_one_owner_and_the_second_is_told_who(holder, tmp_path):
    with (
        pytest.raises(ConfigError, match=rf"in use by process {holder.pid} on .*since"),
        sole_owner(tmp_path / "run"),
    ):
        pytest.fail("two owners")


def test_whoever_is_killed_leaves_the_folder_free(holder, tmp_path):
    holder.kill()
    with sole_owner(tmp_path / "run", patience=30.0):
        (tmp_path / "run" / "draws").touch()
    assert [p.name for p in (tmp_path / "run").iterdir()] == ["draws"]


def test_waiting_helps_when_the_owner_leaves(holder, tmp_path):
    holder.stdin.close()
    with sole_owner(tmp_path / "run", patience=30.0):
        assert (tmp_path / "run" / "run.lock").exists()
    assert not (tmp_path / "run" / "run.lock").exists()


def test_two_locks_of_one_folder_do_not_meet(holder, tmp_path):
    with sole_owner(tmp_path / "run", "follow.lock"):
        assert (tmp_path / "run" / "run.lock").exists()


def test_a_folder_that_exists_stays_as_it_was(tmp_path):
    (tmp_path / "other").touch()
    with sole_owner(tmp_path):
        pass
    assert [p.name for p in tmp_path.iterdir()] == ["other"]


def test_a_lock_ends_with_its_block_although_a_forked_process_lives_on(tmp_path):
    """Programs that load rows fork, and what is forked has all files of its parent open."""
    command = [sys.executable, "-c", FORK, str(tmp_path / "lock")]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout.readline() == "left\n"
        with open(tmp_path / "lock") as first, open(tmp_path / "lock") as second:
            assert lock(first)
            assert not lock(second)  # the twin
