"""Chains that leave the finite numbers: where, why, and a step size that mends it."""

from __future__ import annotations

import re

import jax.numpy as jnp
import numpy as np
import pytest

import fald
from fald.core.errors import ExitCode, NonFiniteError
from helpers import mostly_slow


def federation(outcome_fn, scale=1.0, sizes=(40, 17, 3)):
    rng = np.random.default_rng(0)
    clients = {}
    for name, size in zip(["Aachen", "Bonn", "Celle"], sizes):
        X = scale * rng.normal(size=(size, 2))
        clients[name] = (X, outcome_fn(rng, X @ np.array([1.0, -0.5])))
    return fald.FederatedData.from_arrays(clients)


CASES = {
    "linear": (
        fald.models.linear_regression(["age", "dose"]),
        federation(lambda rng, mean: mean + 0.3 * rng.normal(size=len(mean))),
    ),
    "logistic": (
        fald.models.logistic_regression(["age", "dose"]),
        federation(lambda rng, mean: (mean > 0).astype(float), scale=50.0),
    ),
    "poisson": (
        fald.models.poisson_regression(["age", "dose"]),
        federation(lambda rng, mean: rng.poisson(np.exp(3 + mean)).astype(float)),
    ),
}


def run(model, data, step_size, num_rounds=200, num_chains=2, **changes):
    return fald.sample(
        1,
        model,
        data,
        num_rounds=num_rounds,
        local_steps=4,
        step_size=step_size,
        num_chains=num_chains,
        progress=False,
        **changes,
    )


def diverges(model, data, step_size, **changes) -> NonFiniteError:
    with pytest.raises(NonFiniteError) as caught:
        run(model, data, step_size, **changes)
    return caught.value


def advised(error) -> float:
    return float(re.search(r"(?:step-size|below) ([0-9.e+-]+) \(0\.2 divided", error.hint).group(1))


@pytest.mark.parametrize("name", mostly_slow(CASES, ["logistic"]))
def test_too_large_step_is_explained_and_the_advice_works(name):
    model, data = CASES[name]
    error = diverges(model, data, 20.0)
    assert error.exit_code == ExitCode.NON_FINITE == 4
    assert re.search(r"in round \d+", error.message)
    assert "chain" in error.message
    assert "step-size 20 times the curvature" in error.message
    assert re.search(r"client '(Aachen|Bonn|Celle)' \(\d+ of 60 rows\)", error.message)
    assert any(p in error.message for p in model.parameter_names)
    tree = run(model, data, advised(error))
    assert all(np.isfinite(v.values).all() for v in tree["posterior"].data_vars.values())


def two_sites(large_rows):
    """For ``SLOPE``, energies of curvature 63 · 0.1² + 1 and 63 · large_rows² + 1."""
    X = np.concatenate([np.full((60, 1), 0.1), np.full((3, 1), large_rows)])
    y = np.zeros(63)
    return fald.FederatedData.from_arrays({"big": (X[:60], y[:60]), "small": (X[60:], y[60:])})


SLOPE = fald.Model(
    logprior_fn=lambda p: -0.5 * p["slope"] ** 2,
    loglikelihood_fn=lambda p, row: -0.5 * (row[1] - row[0][0] * p["slope"]) ** 2,
    initial_position={"slope": jnp.array(1.0)},
)


def test_curvature_client_and_threshold_are_exact_for_a_quadratic():
    data = two_sites(large_rows=2.0)
    curvature = 63 * 2.0**2 + 1
    error = diverges(SLOPE, data, 1.0)
    assert f"times the curvature {curvature:.4g} of client 'small' (3 of 63 rows)" in error.message
    assert advised(error) == pytest.approx(0.2 / curvature, rel=0.03)
    run(SLOPE, data, 1.8 / curvature)
    # for one client the threshold of 2 is exact
    lone = fald.FederatedData.from_arrays({"small": data.client("small")})
    steep = lone.num_rows * 2.0**2 + 1
    run(SLOPE, lone, 1.9 / steep)
    diverges(SLOPE, lone, 2.2 / steep, num_rounds=3000)


def test_draws_before_the_divergence_are_kept_and_finite():
    lone = fald.FederatedData.from_arrays({"only": two_sites(2.0).client("small")})
    error = diverges(SLOPE, lone, 0.25, num_rounds=3000, thinning=2)
    failed = int(re.search(r"in round (\d+)", error.message).group(1))
    kept = error.tree["sample_stats"]
    assert 0 < kept.sizes["draw"] <= failed // 2
    assert kept["round"].values[-1] < failed
    assert np.isfinite(error.tree["posterior"]["slope"].values).all()
    assert np.isfinite(kept["energy"].values).all()
    assert error.tree.attrs["method"] == "fa-ld"


def test_divergence_in_warm_up_keeps_nothing():
    error = diverges(SLOPE, two_sites(2.0), 5.0, num_warmup=100)
    assert error.tree is None
    assert "parameter 'slope'" in error.message


@pytest.mark.parametrize(
    "participation",
    [fald.with_replacement(2), fald.without_replacement(1, allow_unequal=True)],
    ids=["I", "II"],
)
def test_partial_participation(participation):
    error = diverges(SLOPE, two_sites(2.0), 2.0, participation=participation)
    assert re.search(r"client '(big|small)'", error.message)
    run(SLOPE, two_sites(2.0), advised(error), participation=participation)


def test_schedules_are_explained_too():
    error = diverges(SLOPE, two_sites(2.0), lambda k: 1e-4 * (1 + k), num_rounds=3000)
    assert "step-size" in error.message
    assert "schedule" in error.hint
    worst = advised(error)
    run(SLOPE, two_sites(2.0), lambda k: worst / (1 + 0.01 * k))


WEAK_LOG = fald.Model(
    logprior_fn=lambda p: -0.5 * p["rate"] ** 2,
    loglikelihood_fn=lambda p, x: 0.01 * x * jnp.log(p["rate"]),
    initial_position={"rate": jnp.array(0.8)},
)
ONES = fald.FederatedData.from_arrays({"a": np.ones(5), "b": np.ones(3)})


def test_energy_that_is_not_a_number_stops_a_chain_whose_gradient_is_finite():
    error = diverges(WEAK_LOG, ONES, 1e-2, num_rounds=2000)
    assert error.exit_code == 4
    assert "non-finite energy in round" in error.message
    assert "client 'a'" in error.message
    assert "rate = -" in error.message
    assert "not the likely cause" in error.message
    assert "log of a negative number" in error.hint
    kept = error.tree["posterior"]["rate"].values
    assert kept.size > 0
    assert np.all(kept > 0)
    assert np.isfinite(error.tree["sample_stats"]["energy"].values).all()


def test_the_client_with_the_bad_rows_is_named():
    model = fald.Model(
        logprior_fn=lambda p: -0.5 * p["level"] ** 2,
        loglikelihood_fn=lambda p, x: jnp.log(x) * p["level"],
        initial_position={"level": jnp.array(1.0)},
    )
    data = fald.FederatedData.from_arrays({"good": np.array([1.0, 2.0]), "bad": np.array([2.0, -1.0, 3.0])})
    error = diverges(model, data, 1e-3)
    assert "client 'bad' (3 of 5 rows)" in error.message
    assert "round 1," in error.message
    assert "check the model" in error.hint
    assert error.tree is None


def test_a_row_with_a_missing_value_is_named():
    rows = np.ones((5, 2), np.float32)
    model = fald.models.gaussian_location(np.eye(2).tolist())
    for bad in (None, 3):
        if bad is not None:
            rows[bad, 1] = np.nan
        data = fald.FederatedData(rows, np.array([0, 2, 5]), ("good", "other"))
        if bad is None:
            run(model, data, 1e-3)
        else:
            error = diverges(model, data, 1e-3)
            assert "client 'other'" in error.message
            assert error.message.endswith("a missing or infinite value in row 1")


def test_a_prior_without_a_value_is_named():
    model = fald.Model(
        logprior_fn=lambda p: jnp.log(p["mean"]),
        loglikelihood_fn=lambda p, x: -0.5 * (x - p["mean"]) ** 2,
        initial_position={"mean": jnp.array(-1.0), "other": jnp.array(1.0)},
    )
    error = diverges(model, ONES, 1e-4)
    assert "round 1, the log prior, chain 0, with parameters mean = -1, other = 1" in error.message


def test_the_same_failure_however_rounds_are_cut(tmp_path):
    lone = fald.FederatedData.from_arrays({"only": two_sites(2.0).client("small")})
    first = diverges(SLOPE, lone, 0.25, num_rounds=3000)
    where = fald.Checkpoint(tmp_path, rounds=1)
    again = diverges(SLOPE, lone, 0.25, num_rounds=3000, checkpoint=where)
    resumed = diverges(SLOPE, lone, 0.25, num_rounds=3000, checkpoint=where)
    assert str(first) == str(again) == str(resumed)
    for other in (again, resumed):
        assert other.tree.identical(first.tree)


def test_clients_that_keep_their_energies_keep_their_curvature():
    method = fald.samplers.fald(local_steps=4, step_size=5.0).without_energy()
    with pytest.raises(NonFiniteError) as caught:
        fald.sample(1, SLOPE, two_sites(2.0), method=method, num_rounds=100, num_chains=2, progress=False)
    assert "parameter 'slope'" in caught.value.message
    assert "curvature" not in str(caught.value)
    assert "smaller step-size" in caught.value.hint
