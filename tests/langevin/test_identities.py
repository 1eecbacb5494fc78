"""Settings under which two runs must agree, exactly or to rounding, each beside a pair that must not."""

from __future__ import annotations

import os

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import fald
from fald.calculus.gradients import Rows, Split, choose_without_replacement
from fald.core.keys import Stream, chain_key, client_key, normals, stream_key
from fald.langevin import inprocess
from fald.runtime import loop
from helpers import SLOW, mostly_slow, run_python

SIZES = {"ash": 6, "birch": 1, "cedar": 6, "elm": 6, "fir": 1}  # each size is compiled for itself
PRIOR_SCALE = 2.5
MODEL = fald.models.logistic_regression(3, prior_scale=PRIOR_SCALE)
ROUNDING = 2e-5
ONE = fald.with_replacement(2)
TWO = fald.without_replacement(2, allow_unequal=True)
BOTH = mostly_slow([fald.full(), ONE], [fald.full()])


def clients(sizes=None, seed=0):
    rng = np.random.default_rng(seed)
    rows = {}
    for name, size in (SIZES if sizes is None else sizes).items():
        x = rng.normal(0, 1, (size, 3)).astype(np.float32)
        rows[name] = (x, (rng.uniform(size=size) < 1 / (1 + np.exp(-x[:, 0]))).astype(np.int32))
    return rows


DATA = fald.FederatedData.from_arrays(clients())
EQUAL = fald.FederatedData.from_arrays(clients(dict.fromkeys("abcd", 6)))


def run(seed=0, data=DATA, model=MODEL, **changes):
    settings = {"num_rounds": 6, "num_chains": 2, "progress": False, **changes}
    if "method" not in settings:
        settings = {"local_steps": 3, "step_size": 0.02, **settings}
    return fald.sample(seed, model, data, **settings)


def positions(tree):
    """(chains, draws, 4) coefficients and intercept, in the order of the flat position."""
    found = tree["posterior"]
    return np.concatenate([found["coefficient"].values, found["intercept"].values[..., None]], -1)


def same(a, b):
    """Bit for bit, draws and statistics."""
    pairs = [(positions(a), positions(b))]
    pairs += [
        (a["sample_stats"][name].values, b["sample_stats"][name].values)
        for name in a["sample_stats"].data_vars
    ]
    return all(np.array_equal(x, y, equal_nan=x.dtype.kind == "f") for x, y in pairs)


def apart(a, b):
    """Largest difference between the draws of two results."""
    return np.abs(positions(a) - positions(b)).max()


def gradient(rows, theta, scale):
    """∇f of rows whose losses count ``scale`` each, with the prior in full."""
    x, y = rows
    x = np.column_stack([x, np.ones(len(x))])
    return theta / PRIOR_SCALE**2 + scale * x.T @ (1 / (1 + np.exp(-x @ theta)) - y)


def fedavg(data, drawn, *, local_steps, step_size):
    """Plain FedAvg in NumPy; ``drawn`` lists (clients, weights) of each round."""
    theta, path = np.zeros(4), []
    for members, weights in drawn:
        average = np.zeros(4)
        for c, w in zip(members, weights):
            if w > 0:
                beta = theta.copy()
                for _ in range(local_steps):
                    beta -= step_size * gradient(
                        data.client(data.names[c]), beta, data.num_rows / data.sizes[c]
                    )
                average += w * beta
        theta = average
        path.append(theta)
    return np.array(path)


def distance_to_fedavg(tree, data, local_steps):
    stats = tree["sample_stats"]
    return max(
        np.abs(
            positions(tree)[chain]
            - fedavg(
                data,
                list(zip(stats["participant"].values[chain], stats["weight"].values[chain])),
                local_steps=local_steps,
                step_size=0.02,
            )
        ).max()
        for chain in range(tree["posterior"].sizes["chain"])
    )


@pytest.mark.parametrize("participation", [fald.full(), ONE, TWO], ids=lambda p: p.scheme)
def test_temperature_zero_is_fedavg(participation):
    tree = run(temperature=0.0, participation=participation)
    assert distance_to_fedavg(tree, DATA, local_steps=3) < ROUNDING
    assert distance_to_fedavg(tree, DATA, local_steps=2) > 100 * ROUNDING
    named = run(method=fald.samplers.fedavg(local_steps=3, step_size=0.02), participation=participation)
    assert same(tree, named)


def test_temperature_above_zero_is_not_fedavg():
    assert distance_to_fedavg(run(temperature=1e-3), DATA, local_steps=3) > 100 * ROUNDING


def sgld(data, seed, chain, *, num_rounds, step_size, temperature, batch_size=None):
    """Plain SGLD on one client, with the numbers addressed to (chain, round, stream, client 0, step 0)."""
    key = chain_key(jax.random.key(seed), chain)
    rows, theta, path = data.client(data.names[0]), np.zeros(4), []
    for r in range(num_rounds):
        batch, scale = rows, 1.0
        if batch_size is not None:
            address = client_key(stream_key(key, r, Stream.BATCH), 0)
            index = np.asarray(choose_without_replacement(address, data.num_rows, batch_size, step=0))
            batch, scale = tuple(part[index] for part in rows), data.num_rows / batch_size
        noise = np.asarray(normals(client_key(stream_key(key, r, Stream.CLIENT_NOISE), 0), 0, 4), float)
        theta = (
            theta - step_size * gradient(batch, theta, scale) + np.sqrt(2 * step_size * temperature) * noise
        )
        path.append(theta)
    return np.array(path)


@pytest.mark.parametrize("batch_size", [None, 5])
def test_one_client_and_one_local_step_are_sgld(batch_size):
    data = fald.FederatedData.from_arrays(clients({"only": 20}))
    settings = {"step_size": 0.02, "temperature": 0.7, "batch_size": batch_size}
    tree = run(3, data, local_steps=1, **settings)
    plain = np.array([sgld(data, 3, chain, num_rounds=6, **settings) for chain in range(2)])
    assert np.abs(positions(tree) - plain).max() < ROUNDING
    other = np.array([sgld(data, 4, chain, num_rounds=6, **settings) for chain in range(2)])
    assert np.abs(positions(tree) - other).max() > 100 * ROUNDING
    assert same(tree, run(3, data, method=fald.samplers.sgld(**settings)))


def test_one_local_step_of_all_clients_is_sgld_on_the_pooled_rows():
    tree = run(1, local_steps=1)
    key, theta, pooled, path = chain_key(jax.random.key(1), 0), np.zeros(4), DATA.rows, []
    for r in range(6):
        noise = np.zeros(4)
        for c, p in enumerate(DATA.weights):
            address = client_key(stream_key(key, r, Stream.CLIENT_NOISE), c)
            noise += np.sqrt(p) * np.asarray(normals(address, 0, 4))
        theta = theta - 0.02 * gradient(pooled, theta, 1.0) + np.sqrt(2 * 0.02) * noise
        path.append(theta)
    assert np.abs(positions(tree)[0] - path).max() < ROUNDING
    assert same(tree, run(1, method=fald.samplers.sgld(step_size=0.02)))
    assert np.abs(positions(run(1, local_steps=2))[0] - path).max() > 100 * ROUNDING


def test_with_shared_noise_and_one_local_step_the_split_into_clients_does_not_matter():
    pooled = fald.FederatedData(DATA.rows, np.array([0, DATA.num_rows]), ("all",))
    settings = {"local_steps": 1, "correlation": 1.0}
    assert apart(run(**settings), run(data=pooled, **settings)) < ROUNDING
    settings["local_steps"] = 3
    assert apart(run(**settings), run(data=pooled, **settings)) > 100 * ROUNDING


@pytest.mark.parametrize("participation", [fald.full(), ONE], ids=lambda p: p.scheme)
def test_order_of_clients_does_not_matter_but_their_names_do(participation):
    rows = clients()
    names = list(rows)
    permuted = fald.FederatedData.from_arrays(
        {name: rows[name] for name in [names[i] for i in (3, 0, 4, 2, 1)]}
    )
    first = run(participation=participation)
    assert same(first, run(data=permuted, participation=participation))
    renamed = fald.FederatedData.from_arrays(dict(zip(reversed(names), rows.values())))
    assert apart(first, run(data=renamed, participation=participation)) > 100 * ROUNDING
    # without randomness only the order of summation is left of a name
    still = {"temperature": 0.0}
    assert apart(run(**still), run(data=renamed, **still)) < ROUNDING


@pytest.mark.parametrize("noise", mostly_slow(["realised", "paper"], ["realised"]))
def test_drawing_all_clients_without_replacement_is_full_participation(noise):
    whole = run(data=EQUAL, noise=noise)
    assert apart(whole, run(data=EQUAL, noise=noise, participation=fald.without_replacement(4))) < ROUNDING
    assert (
        apart(whole, run(data=EQUAL, noise=noise, participation=fald.without_replacement(3))) > 100 * ROUNDING
    )


@pytest.mark.parametrize("participation", BOTH, ids=lambda p: p.scheme)
def test_padding_changes_nothing(participation, monkeypatch):
    # chains one after the other: side by side, all clients are padded to the largest anyway
    monkeypatch.setattr(inprocess, "_GATHER_BYTES", 0)
    exact = run(participation=participation)
    # the last class has no members
    engine = fald.InProcess(capacities=(3, 50, 100))
    assert apart(exact, run(participation=participation, engine=engine)) < ROUNDING
    assert apart(exact, run(1, participation=participation)) > 100 * ROUNDING


def test_capacities_must_hold_the_largest_client():
    with pytest.raises(fald.errors.ConfigError, match="largest client"):
        run(engine=fald.InProcess(capacities=(2, 5)))


def test_padding_rows_that_counted_would_be_noticed(monkeypatch):
    exact = run()
    real = Rows.all
    monkeypatch.setattr(Rows, "all", lambda rows: real(rows)._replace(mask=None))
    fresh = fald.models.logistic_regression(3, prior_scale=PRIOR_SCALE)
    assert apart(exact, run(model=fresh, engine=fald.InProcess(capacities=(9,)))) > 100 * ROUNDING


@pytest.mark.parametrize(("participation", "batch_size"), mostly_slow([(ONE, None), (TWO, 4)], [(ONE, None)]))
def test_chains_side_by_side_or_one_after_the_other_are_the_same(participation, batch_size, monkeypatch):
    together = run(participation=participation, batch_size=batch_size)
    monkeypatch.setattr(inprocess, "_GATHER_BYTES", 0)
    assert apart(together, run(participation=participation, batch_size=batch_size)) < ROUNDING
    assert apart(together, run(1, participation=participation, batch_size=batch_size)) > 100 * ROUNDING


@pytest.mark.parametrize("participation", BOTH, ids=lambda p: p.scheme)
def test_chunks_change_nothing(participation, monkeypatch):
    settings = {"num_rounds": 21, "num_warmup": 4, "thinning": 3, "participation": participation}
    usual = run(**settings)
    monkeypatch.setattr(loop, "_CHUNK_SECONDS", 0.0)
    assert same(usual, run(**settings))
    monkeypatch.setattr(loop, "_CHUNK_SECONDS", 100.0)
    monkeypatch.setattr(inprocess, "_MOST_DRAWS", 2)
    assert same(usual, run(**settings))
    every = run(**{**settings, "thinning": 1})
    assert np.array_equal(positions(every)[:, 2::3], positions(usual)[:, : 17 // 3])
    assert not same(usual, run(**{**settings, "num_warmup": 5, "num_rounds": 22}))


@pytest.mark.parametrize(
    "settings", [pytest.param({}, marks=pytest.mark.slow), {"participation": TWO, "batch_size": 4}]
)
def test_a_chain_does_not_depend_on_how_many_there_are(settings):
    many, few = run(num_chains=4, **settings), run(num_chains=2, **settings)
    assert np.abs(positions(many)[:2] - positions(few)).max() < ROUNDING
    assert np.abs(positions(many)[2:] - positions(few)).max() > 100 * ROUNDING


def test_key_decides_the_draws():
    settings = {"participation": ONE, "correlation": 0.6, "batch_size": 4}
    first = run(5, **settings)
    assert same(first, run(5, **settings))
    assert same(first, run(jax.random.key(5), **settings))
    assert same(first, run(jax.random.PRNGKey(5), **settings))
    assert apart(first, run(6, **settings)) > 100 * ROUNDING


@pytest.mark.parametrize("settings", [{}, {"participation": ONE, "batch_size": 4, "correlation": 0.6}])
@pytest.mark.parametrize("stop", [1, 4, 8])
def test_resumed_run_is_the_uninterrupted_one(settings, stop, tmp_path):
    settings = {**settings, "num_warmup": 1, "thinning": 2}
    whole = run(num_rounds=12, **settings)
    checkpoint = fald.Checkpoint(tmp_path / "run", rounds=2)
    if stop - 1 >= 2:
        first = run(num_rounds=stop, checkpoint=checkpoint, **settings)
        assert np.array_equal(positions(first), positions(whole)[:, : (stop - 1) // 2])
    assert same(whole, run(num_rounds=12, checkpoint=checkpoint, **settings))


def test_run_that_only_starts_where_another_ended_is_not_its_continuation():
    whole, first = run(num_rounds=8), run(num_rounds=4)
    last = {name: first["posterior"][name].values[:, -1] for name in ("coefficient", "intercept")}
    anew = run(num_rounds=4, initial_position=last)
    assert np.abs(positions(anew) - positions(whole)[:, 4:]).max() > 100 * ROUNDING


PINNED = """
import os, sys
cpus = sorted(os.sched_getaffinity(0))
os.sched_setaffinity(0, cpus[: int(sys.argv[1])])
import numpy as np, fald
rng = np.random.default_rng(0)
rows = {n: (rng.normal(size=(300, 64)).astype(np.float32), rng.integers(0, 10, 300)) for n in "abc"}
data, model = fald.FederatedData.from_arrays(rows), fald.models.softmax_regression(64, 10)
settings = dict(num_rounds=5, local_steps=3, step_size=1e-4, num_chains=8, progress=False)
trees = [fald.sample(seed, model, data, **settings) for seed in (0, 1)]
np.save(sys.argv[2], np.stack([tree["posterior"]["coefficient"].values for tree in trees]))
"""


@SLOW
@pytest.mark.skipif(len(os.sched_getaffinity(0)) < 2, reason="needs two processors")
def test_number_of_threads_changes_nothing(tmp_path):
    found = []
    for threads in (1, 2):
        run_python(PINNED, str(threads), str(tmp_path / "draws.npy"))
        found.append(np.load(tmp_path / "draws.npy"))
    one, two = found
    assert np.abs(one - two).max() < 1e-6
    assert np.abs(one[0] - two[1]).max() > 1e-3


def test_one_switch_decides_the_precision():
    script = """
import numpy as np, fald
data = fald.FederatedData.from_arrays({"a": np.ones((3, 1)), "b": np.zeros((2, 1))})
tree = fald.sample(0, fald.models.gaussian_location([[1.0]]), data, num_rounds=2, local_steps=1,
                   step_size=0.1, progress=False)
print(tree["posterior"]["location"].dtype, tree["sample_stats"]["drift"].dtype)
"""
    assert run_python(script, env={"JAX_ENABLE_X64": "1"}).split() == ["float64", "float64"]
    assert positions(run()).dtype == np.float32


def test_float64_agrees_to_its_own_rounding():
    with jax.enable_x64(True):
        tree = run(temperature=0.0, participation=ONE)
        assert distance_to_fedavg(tree, DATA, local_steps=3) < 1e-13
        assert positions(tree).dtype == np.float64
        assert tree["sample_stats"]["energy"].dtype == np.float64
        assert fald.results.tree.settings_of(tree)["precision"] == "float64"
    # what single precision leaves is far above that tolerance
    single = run(temperature=0.0, participation=ONE)
    assert positions(single).dtype == np.float32
    assert distance_to_fedavg(single, DATA, local_steps=3) > 1e-10


class TestClientsThatAreNotDrawn:
    @pytest.mark.parametrize(
        ("participation", "batch_size", "gather_bytes"),
        mostly_slow(
            [(ONE, None, 0), (ONE, 4, 2**24), (TWO, None, 2**24), (fald.full(), None, 0)],
            [(ONE, None, 0), (TWO, None, 2**24)],
        ),
    )
    def test_are_never_evaluated(self, participation, batch_size, gather_bytes, monkeypatch):
        monkeypatch.setattr(inprocess, "_GATHER_BYTES", gather_bytes)
        seen = set()

        def loglikelihood_fn(theta, example):
            x, client = example
            jax.debug.callback(lambda c: seen.add(int(c)), client)
            return -0.5 * jnp.sum((x - theta) ** 2)

        model = fald.Model(lambda theta: 0.0 * jnp.sum(theta), loglikelihood_fn, jnp.zeros(3))
        rows = (DATA.rows[0], np.repeat(np.arange(DATA.num_clients), DATA.sizes))
        data = fald.FederatedData(rows, DATA.offsets, DATA.names)
        for seed in range(4):
            seen.clear()
            settings = {
                "participation": participation,
                "batch_size": batch_size,
                "num_chains": 1,
                "num_rounds": 1,
                "step_check": False,  # it looks at every client
            }
            stats = run(seed, data, model, **settings)["sample_stats"]
            jax.effects_barrier()
            assert seen == set(stats["participant"].values.ravel().tolist())

    def test_may_hold_anything(self):
        settings = {"participation": TWO, "num_rounds": 3, "num_chains": 1}
        clean = run(2, **settings)
        drawn = set(clean["sample_stats"]["participant"].values.ravel().tolist())
        undrawn = sorted(set(range(DATA.num_clients)) - drawn)
        assert undrawn

        def spoilt(client):
            x = DATA.rows[0].copy()
            x[DATA.offsets[client] : DATA.offsets[client + 1]] = np.nan
            return fald.FederatedData((x, DATA.rows[1]), DATA.offsets, DATA.names)

        assert same(clean, run(2, spoilt(undrawn[0]), **settings))
        with pytest.raises(fald.errors.NonFiniteError):
            run(2, spoilt(min(drawn)), **settings)


def misaligned(array):
    """A copy that starts 16 bytes after a 64-byte boundary, as NumPy's large arrays do."""
    buffer = np.empty(array.nbytes + 128, np.uint8)
    start = -buffer.ctypes.data % 64 + 16
    copy = buffer[start : start + array.nbytes].view(array.dtype).reshape(array.shape)
    copy[:] = array
    return copy


class TestRowsReadInPlace:
    data = fald.FederatedData(tuple(misaligned(part) for part in DATA.rows), DATA.offsets, DATA.names)

    @pytest.mark.parametrize(
        "settings",
        mostly_slow(
            [{}, {"participation": ONE}, {"participation": TWO, "batch_size": 4}],
            [{}, {"participation": TWO, "batch_size": 4}],
        ),
    )
    def test_give_the_same_draws(self, settings, monkeypatch):
        copied = run(data=self.data, **settings)
        monkeypatch.setattr(inprocess, "_IN_PLACE_BYTES", 0)
        assert same(copied, run(data=self.data, **settings))

    def test_are_not_copied(self, monkeypatch):
        monkeypatch.setattr(inprocess, "_IN_PLACE_BYTES", 0)
        for part in self.data.rows:
            split = inprocess.as_device(part)
            assert isinstance(split, Split)
            assert split.rest.unsafe_buffer_pointer() == part[len(split.head) :].ctypes.data
            assert np.array_equal(np.concatenate(split), part)
        # rows of 64 bytes never reach a boundary from 16 bytes after one
        assert not isinstance(inprocess.as_device(misaligned(np.zeros((9, 16), np.float32))), Split)


def test_both_halves_of_a_seed_count():
    data = fald.FederatedData.from_arrays({"a": np.array([[1.0], [2.0]])})
    model = fald.models.gaussian_location([[1.0]])
    settings = {"num_rounds": 3, "local_steps": 1, "step_size": 0.01, "progress": False}
    draws = [fald.sample(seed, model, data, **settings)["posterior"]["location"] for seed in (5, 5 + 2**32)]
    assert not np.array_equal(*draws)
    key = fald.sample(jax.random.key(5), model, data, **settings)["posterior"]["location"]
    np.testing.assert_array_equal(draws[0], key)
    for bad in (-1, 2**63):
        with pytest.raises(fald.errors.ConfigError, match="seed"):
            fald.sample(bad, model, data, **settings)
