"""Methods that must be others where their rules coincide, draw for draw."""

from __future__ import annotations

import math

import jax.numpy as jnp
import numpy as np
import pytest

import fald
from fald import samplers
from helpers import draws, federation, linear_model

pytestmark = pytest.mark.slow

STEP = 0.1
MODEL = linear_model(1.5)
DATA = federation((3, 5, 5, 3), prior_scale=1.5).data  # two sizes: each is compiled for itself
EQUAL = federation((4, 4, 4, 4), prior_scale=1.5).data
ALIKE = fald.FederatedData.from_arrays(
    {name: tuple(part[:4] for part in DATA.rows) for name in ("a", "b", "c")}
)


def run(method, *, data=DATA, num_rounds=15, **settings):
    tree = fald.sample(
        3, MODEL, data, method=method, num_rounds=num_rounds, num_chains=20, progress=False, **settings
    )
    return draws(tree)


def shared_noise(local_steps=1, **settings):
    """FA-LD whose noise is the one that a server would add."""
    return samplers.fald(local_steps=local_steps, step_size=STEP, correlation=1.0, **settings)


def apart(a, b):
    return float(np.abs(a - b).max())


SGLD_LIKE = {
    "qlsd": samplers.qlsd(step_size=STEP, levels=math.inf),
    "qlsd++": samplers.qlsd_plus(step_size=STEP, levels=math.inf),
    "marina": samplers.marina(step_size=STEP, probability=1.0),
    "elf": samplers.elf(step_size=STEP, fraction=1.0),
}
NOT_QUITE = {
    "qlsd": samplers.qlsd(step_size=STEP, levels=64),
    "qlsd++": samplers.qlsd_plus(step_size=STEP, levels=64),
    "marina": samplers.marina(step_size=STEP, probability=0.5, levels=64),
    "elf": samplers.elf(step_size=STEP, fraction=0.5),
}


@pytest.mark.parametrize("name", SGLD_LIKE)
def test_without_compression_it_is_sgld(name):
    sgld = run(shared_noise())
    assert apart(run(SGLD_LIKE[name]), sgld) < 1e-5
    assert apart(run(NOT_QUITE[name]), sgld) > 1e-3


@pytest.mark.parametrize("scheme", [fald.with_replacement(2), fald.without_replacement(2)])
def test_uncompressed_qlsd_of_some_clients_is_fa_ld_of_them(scheme):
    method = samplers.qlsd(step_size=STEP, levels=math.inf)
    settings = {"data": EQUAL, "participation": scheme}
    assert apart(run(method, **settings), run(shared_noise(), **settings)) < 1e-5


def test_qlsd_weighs_unequal_clients_drawn_alike():
    """Uniform draws without replacement are unbiased for unequal clients too, unlike FA-LD's average."""
    scheme = fald.without_replacement(2, allow_unequal=True)
    method = samplers.qlsd(step_size=0.05, levels=math.inf, temperature=0.0)
    whole = run(samplers.qlsd(step_size=0.05, levels=math.inf, temperature=0.0), num_rounds=1)[0, 0]
    tree = fald.sample(
        3, MODEL, DATA, method=method, num_rounds=1, num_chains=4000, participation=scheme, progress=False
    )
    moved = draws(tree)[:, 0].astype(float)
    error = moved.std(0) / math.sqrt(len(moved))
    assert np.abs((moved.mean(0) - whole) / error).max() < 4.5
    plain = fald.sample(
        3, MODEL, DATA, method=samplers.fald(local_steps=1, step_size=0.05, temperature=0.0), num_rounds=1,
        num_chains=4000, participation=scheme, progress=False,
    )  # fmt: skip
    assert np.abs((draws(plain)[:, 0].mean(0) - whole) / error).max() > 4.5


def test_dsgld_is_fa_ld_with_one_participant():
    visits = run(samplers.dsgld(local_steps=3, step_size=STEP))
    ours = samplers.fald(local_steps=3, step_size=STEP)
    np.testing.assert_array_equal(visits, run(ours, participation=fald.with_replacement(1)))
    assert apart(visits, run(ours)) > 1e-2


def test_fsgld_without_surrogates_to_speak_of_is_dsgld():
    none = samplers.Surrogates(np.zeros((4, 2, 2)), np.zeros((4, 2)))
    plain = run(samplers.dsgld(local_steps=3, step_size=STEP))
    assert apart(run(samplers.fsgld(local_steps=3, step_size=STEP, surrogates=none)), plain) < 1e-6
    assert apart(run(samplers.fsgld(local_steps=3, step_size=STEP)), plain) > 1e-2


def test_scaffold_of_equal_clients_is_fa_ld():
    ours = run(shared_noise(4), data=ALIKE)
    second = samplers.scaffold(local_steps=4, step_size=STEP, option=2, correlation=1.0)
    assert apart(run(second, data=ALIKE), ours) < 1e-4
    assert apart(run(second), run(shared_noise(4))) > 1e-2
    # option I moves in every second round; without noise rounds can be matched
    still = run(samplers.fedavg(local_steps=4, step_size=STEP), data=ALIKE, num_rounds=7)
    first = samplers.scaffold(local_steps=4, step_size=STEP, option=1, temperature=0.0)
    assert apart(run(first, data=ALIKE, num_rounds=14)[:, 1::2], still) < 1e-4
    apart_ones = run(samplers.fedavg(local_steps=4, step_size=STEP), num_rounds=7)
    assert apart(run(first, num_rounds=14)[:, 1::2], apart_ones) > 1e-2


def test_vr_fald_that_always_synchronises_is_sgld_with_exact_gradients():
    """With both probabilities one every step starts at its own control point: batches cancel."""
    method = samplers.vr_fald(step_size=STEP, sync=1.0, refresh=1.0, temperature=0.0, batch_size=2)
    sgld = run(samplers.fald(local_steps=1, step_size=STEP, temperature=0.0), num_rounds=7)
    assert apart(run(method, num_rounds=15)[:, 1::2][:, :7], sgld) < 1e-4
    batches = samplers.fald(local_steps=1, step_size=STEP, temperature=0.0, batch_size=2)
    assert apart(run(batches, num_rounds=7), sgld) > 1e-2


def test_qlsd_plus_with_batches_of_everything_is_that_with_exact_gradients():
    exact = run(samplers.qlsd_plus(step_size=STEP, levels=math.inf))
    batched = samplers.qlsd_plus(step_size=STEP, levels=math.inf, batch_size=100, refresh=4)
    assert apart(run(batched), exact) < 1e-4
    few = samplers.qlsd_plus(step_size=STEP, levels=math.inf, batch_size=1, refresh=4)
    assert apart(run(few), exact) > 1e-3


def test_complete_graph_keeps_equal_nodes_together():
    """On a complete graph W averages, so the mean moves as SGLD evaluated at the nodes."""
    still = samplers.de_sgld(step_size=STEP / 20, graph="complete", temperature=0.0)
    sgld = samplers.fald(local_steps=1, step_size=STEP / 20, temperature=0.0)
    assert apart(run(still, data=ALIKE), run(sgld, data=ALIKE)) < 1e-5
    assert apart(run(still, num_rounds=300)[:, -1], run(sgld, num_rounds=300)[:, -1]) > 1e-4


def test_fedpa_of_one_sample_averages_where_sgd_went():
    """One sample has no scatter: Δ = θ − μ̂, so a full server step lands on the averaged means."""
    method = samplers.fedpa(step_size=STEP, local_steps=1, num_burn=3, num_samples=1, server_step=1.0)
    assert apart(run(method), run(samplers.fedavg(local_steps=4, step_size=STEP))) < 1e-5
    shrunk = samplers.fedpa(step_size=STEP, local_steps=2, num_burn=0, num_samples=3, server_step=1.0)
    samples, theta = [], np.asarray(draws_start(), float)
    start = theta.copy()
    for name, share in zip(DATA.names, DATA.weights):
        a, y = (np.asarray(part, float) for part in DATA.client(name))
        x, own = start.copy(), []
        for _ in range(3):
            path = []
            for _ in range(2):
                x = x - STEP * (a.T @ (a @ x - y) / share + x / 1.5**2)
                path.append(x)
            own.append(np.mean(path, axis=0))
        ratio = 1 / (1 + 2 * 0.1)
        covariance = ratio * np.eye(2) + (1 - ratio) * np.cov(np.array(own).T)
        samples.append(share * np.linalg.solve(covariance, start - np.mean(own, axis=0)))
    expected = start - np.sum(samples, axis=0)
    assert np.abs(run(shrunk, num_rounds=1)[0, 0] - expected).max() < 1e-4


def draws_start():
    return jnp.asarray(MODEL.flat_initial_position)
