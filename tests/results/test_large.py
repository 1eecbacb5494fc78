"""Results of large models: few numbers are looked at, in little memory and time; and back to positions."""

from __future__ import annotations

import tracemalloc

import jax.numpy as jnp
import numpy as np
import pytest
import xarray as xr

import fald
from fald.core.errors import DataError
from fald.results import tree as trees
from fald.results.diagnostics import verdict


def model_of(position, **others):
    return fald.Model(
        lambda p: jnp.zeros(()), lambda p, x: jnp.zeros(()), initial_position=position, **others
    )


def test_a_million_numbers_are_summarised_in_little_memory():
    chains, kept = 2, 20
    model = model_of({"big": jnp.zeros((1000, 996)), "bias": jnp.zeros(60), "other": jnp.zeros((20, 197))})
    flat = np.random.default_rng(0).standard_normal((chains, kept, model.dim), np.float32)
    assert model.dim == 1_000_000
    verdict(xr.DataTree.from_dict(trees.posterior_groups(model, flat[:, :4])))  # loads what it needs
    tracemalloc.start()
    tree = xr.DataTree.from_dict(trees.posterior_groups(model, flat))
    table, said = fald.summary(tree), verdict(tree)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert len(table) == 3 * 4
    assert said  # 40 draws are not enough
    assert peak <= 0.3 * flat.nbytes
    np.testing.assert_allclose(table.loc["big: norm", "mean"], np.sqrt(996_000), rtol=1e-3)
    of_draws = np.linalg.norm(flat[:, :, 60 : 60 + 996_000], axis=2)
    np.testing.assert_allclose(trees.draws_by_row(tree)["big: norm"][1], of_draws, rtol=1e-5)
    assert 0.3 < table.loc["big: projection 2", "sd"] < 2  # of unit variance, as the draws


def test_projections_see_a_chain_that_is_elsewhere():
    model = model_of({"w": jnp.zeros(5000)})
    flat = np.random.default_rng(0).standard_normal((4, 50, 5000), np.float32)
    flat[1] += 3 * np.random.default_rng(1).standard_normal(5000, np.float32)
    tree = xr.DataTree.from_dict(trees.posterior_groups(model, flat))
    assert fald.summary(tree)["r_hat"].max() > 1.3
    flat[1] = np.random.default_rng(2).standard_normal((50, 5000), np.float32)  # the twin
    tree = xr.DataTree.from_dict(trees.posterior_groups(model, flat))
    assert fald.summary(tree)["r_hat"].max() < 1.1


def test_positions_have_the_structure_of_the_model():
    start = {
        "layer": {"kernel": jnp.ones((2, 3)), "a.b": jnp.zeros(1)},
        "list": [jnp.zeros(2), jnp.zeros(())],
    }
    model = model_of(start)
    flat = np.random.default_rng(0).standard_normal((2, 4, model.dim)).astype(np.float32)
    tree = xr.DataTree.from_dict(trees.posterior_groups(model, flat))
    expected = model.unravel(flat[1, 2])
    for found in (fald.positions(tree)[1, 2], fald.positions(tree, model)[1, 2]):
        np.testing.assert_array_equal(found["layer"]["kernel"], expected["layer"]["kernel"])
        np.testing.assert_array_equal(found["layer"]["a.b"], expected["layer"]["a.b"])
        np.testing.assert_array_equal(found["list"][1], expected["list"][1])
    bare = model_of(jnp.zeros(3))
    tree = xr.DataTree.from_dict(trees.posterior_groups(bare, flat[..., :3]))
    np.testing.assert_array_equal(fald.positions(tree)[0, 1], flat[0, 1, :3])
    with pytest.raises(DataError, match="not one of model"):
        fald.positions(tree, model)
    squared = model_of({"x": jnp.zeros(3)}, constrain_fn=lambda p: {"y": p["x"] ** 2})
    tree = xr.DataTree.from_dict(trees.posterior_groups(squared, flat[..., :3]))
    np.testing.assert_array_equal(fald.positions(tree, squared)[0, 1]["x"], flat[0, 1, :3])
    with pytest.raises(DataError, match="does not say"):
        fald.positions(tree)


@pytest.mark.slow
def test_a_run_goes_on_from_a_result():
    data = fald.FederatedData.from_arrays({"a": np.ones((30, 1)), "b": np.zeros((10, 1))})
    model = fald.models.gaussian_location([[1.0]])
    settings = {"local_steps": 2, "step_size": 2e-3, "progress": False}
    found = fald.sample(0, model, data, num_rounds=300, temperature=0.0, num_chains=1, **settings)
    tree = fald.sample(
        0, model, data, num_rounds=1, initial_position=found, num_chains=3, temperature=1e-9, **settings
    )
    np.testing.assert_allclose(fald.positions(tree, model)[:, 0], [[0.75]] * 3, atol=0.01)
    found = fald.sample(0, model, data, num_rounds=5, num_chains=2, **settings)
    chains = fald.positions(found, model).last(3)
    assert len(np.unique(chains)) == 3  # an earlier draw rather than the same again


@pytest.mark.filterwarnings("error")
def test_one_draw_has_a_table_without_spread():
    model = model_of({"w": jnp.zeros(3)})
    tree = xr.DataTree.from_dict(trees.posterior_groups(model, np.ones((1, 1, 3), np.float32)))
    table = fald.summary(tree)
    assert table["mean"].tolist() == [1, 1, 1]
    assert table["sd"].isna().all()
