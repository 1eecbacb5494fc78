"""Clients or groups of chains on threads: the numbers of one program, however many threads there are."""

from __future__ import annotations

import numpy as np
import pytest

import fald
from fald import samplers
from fald.core.errors import ConfigError
from fald.langevin import inprocess
from fald.runtime import compiler
from helpers import draws, federation, linear_model

MODEL = linear_model(2.0)
DATA = federation((6, 9, 9, 6, 6)).data
ONE, TWO = fald.with_replacement(3), fald.without_replacement(3, allow_unequal=True)
METHODS = {
    "full": {"method": samplers.fald(local_steps=3, step_size=0.02, batch_size=4, correlation=0.4)},
    "I": {"method": samplers.fald(local_steps=3, step_size=0.02), "participation": ONE},
    "memory": {"method": samplers.scaffold(local_steps=3, step_size=0.02, option=2), "participation": TWO},
}
NAMES = ["full", "memory", pytest.param("I", marks=pytest.mark.slow)]


@pytest.fixture
def on_threads(monkeypatch):
    """Every run visits its clients on threads, one by one."""
    monkeypatch.setattr(inprocess, "_WORK_ON_THREADS", 0)
    monkeypatch.setattr(inprocess, "_WORK_AT_ONCE", 1)


@pytest.fixture
def in_groups(monkeypatch):
    """Every two chains run on a thread of their own."""
    monkeypatch.setattr(inprocess, "_CHAINS_OF_GROUP", 2)


def run(name, num_threads=2, num_chains=2, **settings):
    engine = settings.pop("engine", None) or fald.InProcess(num_threads=num_threads)
    settings = {"num_rounds": 5, "num_warmup": 1, "thinning": 2, "progress": False, **settings}
    return fald.sample(1, MODEL, DATA, engine=engine, num_chains=num_chains, **METHODS[name], **settings)


def same(a, b):
    stats = [(a["sample_stats"][k].values, b["sample_stats"][k].values) for k in a["sample_stats"].data_vars]
    pairs = [(draws(a), draws(b)), *stats]
    return all(np.array_equal(x, y, equal_nan=x.dtype.kind == "f") for x, y in pairs) and a[
        "cost"
    ].to_dataset().equals(b["cost"].to_dataset())


@pytest.mark.parametrize("name", NAMES)
def test_threads_give_the_numbers_of_one_program(name, monkeypatch):
    together = run(name)
    monkeypatch.setattr(inprocess, "_WORK_ON_THREADS", 0)
    monkeypatch.setattr(inprocess, "_WORK_AT_ONCE", 1)
    found = [run(name, num_threads) for num_threads in (1, 3)]
    assert same(*found)
    np.testing.assert_allclose(draws(found[0]), draws(together), rtol=0, atol=2e-5)
    assert not np.array_equal(draws(together), draws(run(name, num_rounds=7))[:, 1:3])


def test_one_chain_is_that_of_a_run_with_many(on_threads):
    np.testing.assert_allclose(
        draws(run("full", num_chains=1))[0], draws(run("full", num_chains=3))[0], rtol=0, atol=2e-5
    )


def test_uploads_of_other_clients_would_be_noticed(on_threads):
    class Mixed(fald.InProcess):
        def _on_threads(self, tasks):
            parts = super()._on_threads(tasks)
            return [parts[1], parts[0], *parts[2:]]

    assert not same(run("full"), run("full", engine=Mixed(num_threads=2)))


@pytest.mark.parametrize("name", NAMES)
def test_chains_in_groups_are_those_of_one_program(name, monkeypatch):
    together = run(name, num_chains=6)
    monkeypatch.setattr(inprocess, "_CHAINS_OF_GROUP", 2)
    found = [run(name, num_threads, num_chains=6) for num_threads in (1, 3)]
    assert same(*found)
    np.testing.assert_allclose(draws(found[0]), draws(together), rtol=0, atol=2e-5)
    for part in ("participant", "weight"):
        assert together["sample_stats"][part].equals(found[0]["sample_stats"][part])
    assert together["cost"].to_dataset().equals(found[0]["cost"].to_dataset())


def test_chains_of_another_group_would_be_noticed(in_groups):
    class Mixed(fald.InProcess):
        def _on_threads(self, tasks):
            return super()._on_threads(tasks)[::-1]

    right, wrong = run("full", num_chains=4), run("full", num_chains=4, engine=Mixed(num_threads=2))
    assert not np.allclose(draws(right), draws(wrong), rtol=0, atol=2e-5)


def test_groups_are_equal_and_only_where_steps_are_short():
    def groups(num_chains, dim=2):
        data = fald.FederatedData.from_arrays({name: np.zeros((1, dim)) for name in "ab"})
        model, method = fald.models.gaussian_location(np.eye(dim)), samplers.fald(local_steps=1, step_size=1)
        problem = inprocess.Assignment(np.zeros(2), model, data, method, fald.full(), num_chains, 0, 1)
        return inprocess._layout(problem, None)[1].groups

    assert [groups(n) for n in (1, 128, 255, 256, 300, 301, 384)] == [1, 1, 1, 2, 2, 1, 3]
    assert groups(256, dim=200) == 1


@pytest.mark.parametrize("way", ["on_threads", "in_groups"])
def test_resumed_equals_uninterrupted(way, request, tmp_path):
    request.getfixturevalue(way)
    run("memory", num_rounds=3, num_chains=4, checkpoint=fald.Checkpoint(tmp_path, rounds=1))
    resumed = run("memory", num_rounds=9, num_chains=4, checkpoint=fald.Checkpoint(tmp_path, rounds=1))
    assert same(run("memory", num_rounds=9, num_chains=4), resumed)


def test_large_clients_go_to_threads_and_small_ones_do_not():
    def apart(local_steps, batch_size, features):
        rows = {name: (np.zeros((400, features), np.uint8), np.arange(400) % 3) for name in "abcd"}
        data = fald.FederatedData.from_arrays(rows)
        model = fald.models.softmax_regression(features, 3)
        method = samplers.fald(local_steps=local_steps, step_size=1e-6, batch_size=batch_size)
        problem = inprocess.Assignment(np.zeros(2), model, data, method, fald.full(), 1, 0, 1)
        return inprocess._layout(problem, None)[1].apart

    assert apart(50, 200, 784)
    assert not apart(1, 20, 5)


def test_number_of_threads_is_checked():
    with pytest.raises(ConfigError, match="num-threads"):
        fald.InProcess(num_threads=0)


def test_options_that_the_compiler_does_not_know_are_left_out(monkeypatch):
    monkeypatch.setattr(compiler, "_OPTIONS", {**compiler._OPTIONS, "xla_no_such_option": True})
    assert "xla_no_such_option" not in compiler.options(one_thread=True)
    assert compiler.options()["xla_cpu_prefer_vector_width"] == 512


def test_what_is_the_same_in_every_draw_is_kept_once():
    stats = run("full")["sample_stats"]
    assert stats["weight"].values.strides[1] == 0 < stats["drift"].values.strides[1]
    assert np.allclose(stats["weight"].values[1, 1], DATA.weights)
    assert stats["participant"].values[0, 1].tolist() == [0, 1, 2, 3, 4]
