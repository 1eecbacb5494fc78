"""The steps that a site takes, against the same written out in NumPy."""

import functools
from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import fald
from fald.core.errors import FederationError
from fald.federation.site import langevin
from fald.federation.site.audit import next_broadcast
from fald.federation.site.langevin import LangevinSite, Task
from fald.federation.wire import Message
from fald.lab.methods.scaffold import scaffold
from helpers import linear_model


@pytest.mark.parametrize(("batch_size", "option"), [(None, None), (99, 2)], ids=["fa-ld", "scaffold"])
def test_local_steps_at_a_site_are_those_written_out(tmp_path, batch_size, option):
    """Without noise, K gradient steps on the site's rows, scaled to all; nothing where it was not drawn."""
    rng = np.random.default_rng(1)
    x, y = rng.normal(size=(7, 2)).astype(np.float32), rng.normal(size=7).astype(np.float32)
    data = replace(fald.FederatedData.from_arrays({"b": (x, y)}), part=True)
    model, settings = linear_model(2.0), {"local_steps": 3, "step_size": 0.01, "temperature": 0.0}
    kind = fald.samplers.fald if option is None else functools.partial(scaffold, option=option)
    method = kind(**settings, batch_size=batch_size)
    start, root = np.array([[0.5, -1.0], [2.0, 0.0]], np.float32), np.zeros(2, np.uint32)
    with jax.disable_jit():
        site = LangevinSite(
            model, method, data, scheme="full", place=(1, [13, 7]), root=root, start=start, folder=tmp_path
        )
        leaves = [np.asarray(leaf) for leaf in jax.tree.leaves(jax.vmap(method.init)(jnp.asarray(start))[0])]
        upload = site.answer(Task(0, np.array([0.35, 0.0]), leaves, 0, root))
    theta = start[0].astype(float)
    energy = theta @ theta / 8 + 20 / 7 * 0.5 * np.sum((y - x @ theta) ** 2)
    for _ in range(3):
        theta = theta - 0.01 * (theta / 4 - 20 / 7 * x.T @ (y - x @ theta))
    np.testing.assert_allclose(upload.position, [theta, [0.0, 0.0]], rtol=1e-4, atol=1e-6)
    np.testing.assert_allclose(upload.energy, [energy, 0.0], rtol=1e-4)
    kept = site._recall(Task(1, np.ones(2), [], 0, root))
    if option == 2:  # the control of the chain that drew the site, and none in the other
        moved = (start[0] - theta) / (3 * 0.01)
        np.testing.assert_allclose(kept, [moved, [0.0, 0.0]], rtol=1e-3, atol=1e-5)


def site_of(folder, start, **settings):
    """A site with three of ten rows, and its method."""
    data = fald.FederatedData.from_arrays({"b": (np.ones((3, 2), np.float32), np.ones(3, np.float32))})
    method = fald.samplers.fald(**{"local_steps": 4, "step_size": 0.01, **settings})
    rows = replace(data, part=True)
    root = np.zeros(2, np.uint32)
    given = {"scheme": "full", "place": (1, [7, 3]), "root": root, "start": start, "folder": folder}
    return LangevinSite(linear_model(2.0), method, rows, **given), method


START = np.array([[0.5, -1.0], [2.0, 0.0]], np.float32)


def test_noise_is_checked_with_what_the_round_is(tmp_path, monkeypatch):
    """Share, largest weight, largest number of a step, steps of the run before; nothing where not drawn."""
    seen = []
    monkeypatch.setattr(langevin, "check_noise", lambda method, *given, step: seen.append((*given, step)))
    site, _ = site_of(tmp_path, START, clip_norm=1.0)
    site.check_noise(6, np.array([0.2, 0.3]), [np.array([[1.0, -7.0]])])
    site.check_noise(1, np.array([0.2, 0.0]), [np.array([[0.25, -0.5]])])
    site.check_noise(1, np.zeros(2), [START])
    site.check_noise(1, np.zeros(0), [START])
    assert seen == [(pytest.approx(0.3), 0.3, 7.0, 20), (pytest.approx(0.3), 0.2, 0.5, 0)]


def test_the_broadcast_after_a_round_is_made_of_the_sum(tmp_path):
    site, method = site_of(tmp_path, START)
    total = np.arange(6.0, dtype=np.float32)
    (expected,) = jax.tree.leaves(
        next_broadcast(method, np.zeros(2, np.uint32), 3, before=START, total=total)
    )
    (found,) = site.after(3, total)
    np.testing.assert_allclose(found, expected, rtol=1e-6)
    (other,) = site.after(3, total + 1)
    assert np.abs(other - expected).min() > 0.1


@pytest.mark.parametrize(
    "arrays",
    [
        {},
        {"leaf_1": START},
        {"leaf_0": START, "leaf_1": START},
        {"leaf_0": START[:1]},
        {"leaf_0": START.astype(np.float64)},
    ],
    ids=["none", "another name", "one more", "another shape", "another type"],
)
def test_a_broadcast_has_the_leaves_of_the_method(tmp_path, arrays):
    site, _ = site_of(tmp_path, START)
    (leaf,) = site.read(Message("round", {}, {"leaf_0": START, "weight": np.ones(2)}))
    np.testing.assert_array_equal(leaf, START)
    with pytest.raises(FederationError, match="does not fit the study"):
        site.read(Message("round", {}, {"weight": np.ones(2), **arrays}))
