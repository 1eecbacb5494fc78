"""Rows that a function reads: the draws of the same rows as arrays, and little in memory."""

from __future__ import annotations

import sys
import threading

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import fald
from fald.core.errors import ConfigError, DataError, NonFiniteError
from helpers import run_python

WIDTH = 6
MODEL = fald.models.softmax_regression(WIDTH, 2)
SETTINGS = {
    "num_rounds": 5, "local_steps": 3, "step_size": 1e-3, "batch_size": 8, "num_chains": 2, "progress": False
}  # fmt: skip


def arrays(sizes=(30, 20, 10), width=WIDTH):
    rng = np.random.default_rng(0)
    return fald.FederatedData.from_arrays(
        {
            name: (rng.random((n, width)) < 0.5, rng.integers(0, 2, n, dtype=np.uint8))
            for name, n in zip("abc", sizes)
        }
    )


def to_read(data, read=None):
    """The same rows, to be read."""

    def usual(client, index):
        assert np.all(np.diff(index) > 0)
        return jax.tree.map(lambda a: a[index], data.client(client))

    return fald.FederatedData.from_read(read or usual, dict(zip(data.names, data.sizes)))


def draws(data, model=MODEL, **changes):
    return fald.sample(3, model, data, **{**SETTINGS, **changes})


def positions(tree):
    return np.concatenate([v.values.ravel() for v in tree["posterior"].values()])


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"num_chains": 1, "local_steps": 5},
        {"participation": fald.with_replacement(2)},
        {"participation": fald.without_replacement(2, allow_unequal=True), "clip_norm": 1.0},
        {"momentum": 0.5, "preconditioner": "rms"},
        {"batch_size": 15, "thinning": 2},
    ],
    ids=["full", "one chain", "drawn with", "drawn without, clipped", "momentum", "more than a client has"],
)
@pytest.mark.filterwarnings("ignore:batch-size 15 is more")
def test_draws_are_those_of_the_same_rows_as_arrays(changes):
    data = arrays()
    wanted, found = draws(data, **changes), draws(to_read(data), **changes)
    np.testing.assert_array_equal(positions(found), positions(wanted))
    np.testing.assert_allclose(found["sample_stats"]["energy"], wanted["sample_stats"]["energy"], rtol=1e-6)

    def other(client, index):
        x, y = jax.tree.map(lambda a: a[index], data.client(client))
        return x, 1 - y

    changed = draws(to_read(data, other), **changes)
    assert np.mean(positions(changed) != positions(wanted)) > 0.9


def test_clients_on_threads_read_the_same_rows():
    data, model = arrays((200, 150, 140), 784), fald.models.softmax_regression(784, 2)
    settings = {"num_rounds": 3, "num_chains": 1, "batch_size": 128, "step_size": 1e-5}
    wanted, found = (draws(d, model, **settings) for d in (data, to_read(data)))
    assert found.attrs["layout"] == wanted.attrs["layout"] == "clients on threads"
    np.testing.assert_array_equal(positions(found), positions(wanted))


def test_batches_of_a_private_run_follow_from_what_nobody_may_know(monkeypatch):
    protection = fald.privacy.Protection(delta=1e-5)
    settings = {"privacy": protection, "clip_norm": 1.0, "num_chains": 1, "num_rounds": 3}
    words, data = np.array([5, 6], np.uint32), arrays()
    monkeypatch.setattr("fald.langevin.sampling.secret_words", lambda: words)
    wanted, found = (positions(draws(d, **settings)) for d in (data, to_read(data)))
    np.testing.assert_array_equal(found, wanted)
    words = np.array([5, 7], np.uint32)
    assert not np.array_equal(positions(draws(to_read(data), **settings)), wanted)


def test_no_row_is_read_that_no_batch_takes():
    data, asked = arrays((3000, 2000, 1000)), []

    def read(client, index):
        asked.append(len(index))
        return jax.tree.map(lambda a: a[index], data.client(client))

    lazy = to_read(data, read)
    asked.clear()
    draws(lazy, step_check=False)
    # five rounds of each client, and the one read ahead, unless the run has ended before that began
    assert len(asked) in (5 * 3, (5 + 1) * 3)
    assert sum(asked) <= 6 * 3 * 2 * 3 * 8
    asked.clear()
    list(map(lazy.client, "abc"))
    assert sum(asked) == 6000  # the twin: all rows would be noticed


def test_the_next_round_is_read_while_clients_work():
    data, begun, seen = arrays(), threading.Semaphore(0), []

    def read(client, index):
        if client == "a":
            begun.release()
        return jax.tree.map(lambda a: a[index], data.client(client))

    lazy = to_read(data, read)
    while begun.acquire(blocking=False):
        pass

    def look(number, positions, stats):
        seen.append([begun.acquire(timeout=60) for _ in range(2 if number == 1 else 1)])

    draws(lazy, callback=look, step_check=False)
    assert seen == [[True, True], [True], [True], [True], [True]]


def test_a_resumed_run_has_the_draws_of_one_that_was_not_stopped(tmp_path):
    data = arrays()
    draws(to_read(data), num_rounds=2, checkpoint=tmp_path)
    resumed = draws(to_read(data), checkpoint=tmp_path)
    np.testing.assert_array_equal(positions(resumed), positions(draws(data)))

    def other(client, index):
        x, y = jax.tree.map(lambda a: a[index], data.client(client))
        return x, 1 - y

    with pytest.raises(ConfigError, match="the data"):
        draws(to_read(data, other), checkpoint=tmp_path)


def failing(what, after=0):
    """A function whose reads of client b fail, after some."""
    data, reads = arrays(), []

    def read(client, index):
        x, y = jax.tree.map(lambda a: a[index], data.client(client))
        reads.append(client)
        return what(x, y) if client == "b" and reads.count("b") > after else (x, y)

    return to_read(data, read)


def broken(x, y):
    raise OSError("the disk is gone")


@pytest.mark.parametrize(
    ("what", "said"),
    [
        (broken, r"rows of client 'b' could not be read: OSError: the disk is gone"),
        (
            lambda x, y: (x[:, :3], y),
            r"client 'b': asked for .* read gave \('bool\[\d+, 3\]', 'uint8\[\d+\]'\)",
        ),
        (lambda x, y: (x[1:], y[1:]), r"client 'b': asked for \d+ rows, read gave"),
        (lambda x, y: (x.astype(float), y), r"client 'b': .*float64.* expected \('bool"),
        (lambda x, y: x, r"client 'b': asked for"),
    ],
    ids=["raises", "width", "number", "type", "structure"],
)
def test_what_cannot_be_read_is_said_with_the_client(what, said):
    with pytest.raises(DataError, match=said) as caught:
        draws(failing(what, after=5), step_check=False)
    assert caught.value.tree is not None  # draws up to there
    assert 0 < caught.value.tree["posterior"].sizes["draw"] < 5


def test_a_missing_value_is_said_with_its_row():
    def read(client, index):
        x = np.ones((len(index), 2))
        x[index == 7] = np.nan if client == "b" else 1
        return x

    with pytest.raises(DataError, match=r"client 'b' has a missing or infinite value in row 7"):
        fald.FederatedData.from_read(read, {"a": 9, "b": 9})


@pytest.mark.parametrize(
    "method",
    [
        fald.samplers.fald(local_steps=2, step_size=1e-3),
        fald.samplers.qlsd(step_size=1e-3, batch_size=8),
    ],
    ids=["no batches", "another method"],
)
def test_what_may_need_all_rows_is_refused(method):
    with pytest.raises(ConfigError, match="rows that a function reads are for FA-LD in batches"):
        fald.sample(0, MODEL, to_read(arrays()), num_rounds=2, method=method, progress=False)


@pytest.mark.parametrize(
    ("read", "sizes", "said"),
    [
        (None, {"a": 1}, "from_read needs a function"),
        (lambda client, index: np.ones(len(index)), {}, "from_read needs a function"),
        (lambda client, index: np.ones(len(index)), {"a": 2.5}, "client 'a' needs a number of rows; got 2.5"),
        (lambda client, index: np.ones(2), {"a": 2}, r"asked for row 0, read gave float64\[2\]"),
        (lambda client, index: np.array(["x"]), {"a": 2}, r"read gave <U1\[1\]; numbers are needed"),
        (lambda client, index: None, {"a": 2}, r"read gave nothing"),
        (
            lambda client, index: np.load("/no/such/file"),
            {"a": 2},
            "rows of client 'a' could not be read: File",
        ),
        (lambda client, index: [1, 2], {"a": 2}, r"asked for row 0, read gave int64\[\]"),
    ],
)
def test_a_function_that_gives_no_rows_is_refused_at_once(read, sizes, said):
    with pytest.raises(DataError, match=said):
        fald.FederatedData.from_read(read, sizes)


MEMORY = """
import sys
import numpy as np, fald

def anonymous():
    with open("/proc/self/status") as lines:
        return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("RssAnon:"))

def read(client, index):
    return (index[:, None] * np.arange(1, 101) % 251).astype(np.uint8), (index % 2).astype(np.uint8)

rows = int(sys.argv[1])
data = fald.FederatedData.from_read(read, {name: rows // 10 for name in "0123456789"})
kept = [data.client(name) for name in "0123456789"] if sys.argv[2] == "all" else None
seen = []
fald.sample(
    0, fald.models.softmax_regression(100, 2), data, num_rounds=6, local_steps=2, step_size=1e-9,
    batch_size=20, num_chains=1, progress=False, callback=lambda *about: seen.append(anonymous()),
)
print(max(seen))
"""


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_memory_does_not_grow_with_the_rows():
    few, many, kept = (
        float(run_python(MEMORY, *arguments))
        for arguments in (("1000", ""), ("3000000", ""), ("3000000", "all"))
    )
    assert many - few < 0.1 * 3e8
    assert kept - few > 0.5 * 3e8  # the twin has all rows in memory


def test_a_chain_that_leaves_the_finite_numbers_is_explained_as_with_arrays():
    model = fald.Model(lambda p: -0.5 * p**2, lambda p, row: -((p - row[0].sum()) ** 4), jnp.zeros(()))
    said = []
    for data in (arrays(), to_read(arrays())):
        with pytest.raises(NonFiniteError) as caught:
            draws(data, model, step_size=0.5, num_chains=1, num_rounds=30, step_check=False)
        said.append(str(caught.value))
    assert said[0] == said[1]
    assert "client '" in said[0]


def test_a_fit_reads_all_rows():
    data = arrays()
    found, wanted = (fald.fit(0, MODEL, d, progress=False) for d in (to_read(data), data))
    np.testing.assert_array_equal(positions(found), positions(wanted))
