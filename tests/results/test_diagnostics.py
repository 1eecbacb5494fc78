"""ESS, R-hat, drift and distances, each on chains for which the answer is known."""

from __future__ import annotations

import jax.numpy as jnp
import numpy as np
import pandas as pd
import pytest
import xarray as xr

import fald
from fald import diagnostics, gaussian
from fald.core.errors import ConfigError


def tree_of(**draws):
    """A result with given draws (chain, draw, ...)."""
    arrays = {
        name: (["chain", "draw", *[f"{name}_dim_{i}" for i in range(np.ndim(d) - 2)]], d)
        for name, d in draws.items()
    }
    return xr.DataTree.from_dict({"posterior": xr.Dataset(arrays)})


def normal_draws(shape=(4, 1000), seed=0):
    return np.random.default_rng(seed).normal(size=shape)


def autoregressive(phi, shape=(4, 4000), seed=0):
    noise = normal_draws(shape, seed) * np.sqrt(1 - phi**2)
    out = np.empty(shape)
    out[:, 0] = normal_draws(shape, seed + 1)[:, 0]
    for t in range(1, shape[1]):
        out[:, t] = phi * out[:, t - 1] + noise[:, t]
    return out


def test_independent_draws_have_nothing_against_them():
    tree = tree_of(a=normal_draws(), b=normal_draws((4, 1000, 2), seed=1))
    assert set(diagnostics.ess(tree)) == {"a", "b[0]", "b[1]"}
    assert all(0.7 * 4000 < v < 1.4 * 4000 for v in diagnostics.ess(tree).values())
    assert all(v < 1.01 for v in diagnostics.rhat(tree).values())
    assert diagnostics.verdict(tree) == []


def test_effective_sample_size_of_an_autoregression():
    phi = 0.9
    expected = 4 * 4000 * (1 - phi) / (1 + phi)
    # over twenty seeds the estimate spreads by about 7%
    assert diagnostics.ess(tree_of(a=autoregressive(phi)))["a"] == pytest.approx(expected, rel=0.28)
    assert diagnostics.ess(tree_of(a=autoregressive(0.8)))["a"] > 1.5 * expected


def test_chains_that_disagree_are_complained_about():
    shifted = normal_draws() + np.array([0.0, 0.0, 0.0, 1.0])[:, None]
    tree = tree_of(good=normal_draws(seed=1), bad=shifted, worse=3 * shifted + 2 * np.arange(4)[:, None])
    rhat = diagnostics.rhat(tree)
    assert rhat["good"] < 1.01 < rhat["bad"] < rhat["worse"]
    complaints = diagnostics.verdict(tree)
    assert complaints[0].startswith("R-hat above 1.01 for 2 of 3 parameters (worst: worse ")
    assert complaints[1].startswith("effective sample size below 400 for 2 of 3 parameters (worst: worse ")


def test_few_effective_draws_are_complained_about():
    tree = tree_of(slow=autoregressive(0.995, (4, 1000)), slower=autoregressive(0.999, (4, 1000), seed=3))
    (complaint,) = [c for c in diagnostics.verdict(tree) if "effective" in c]
    worst = min(diagnostics.ess(tree), key=diagnostics.ess(tree).get)
    assert f"for 2 of 2 parameters (worst: {worst} " in complaint


def test_what_cannot_be_computed_counts_as_bad():
    for tree in (tree_of(a=normal_draws((4, 3))), tree_of(a=np.ones((4, 100)))):
        complaints = " ".join(diagnostics.verdict(tree))
        assert "R-hat above 1.01 for 1 of 1 parameters (worst: a nan)" in complaints


def two_sites():
    """Curvatures 1 and 4, centers −1 and +1, equally many rows."""
    rows = np.zeros(4)
    return fald.FederatedData.from_arrays(
        {
            "left": {"x": rows - 1.0, "curvature": rows + 0.125},
            "right": {"x": rows + 1.0, "curvature": rows + 0.5},
        }
    )


QUADRATIC = fald.Model(
    logprior_fn=lambda theta: 0.0 * jnp.sum(theta),
    loglikelihood_fn=lambda theta, row: -0.5 * row["curvature"] * jnp.sum((theta - row["x"]) ** 2),
    initial_position=jnp.zeros(2),
)


def run(**changes):
    settings = {"num_rounds": 100, "local_steps": 5, "step_size": 0.02, "num_chains": 2, "progress": False}
    return fald.sample(0, QUADRATIC, two_sites(), **{**settings, **changes})


def test_drift_equals_the_deterministic_one():
    tree = run(temperature=0.0, num_rounds=2000, num_warmup=1000)
    table = diagnostics.client_drift(tree)
    assert table.index.tolist() == ["left", "right"]
    assert table["rows"].tolist() == [4, 4]
    assert table["share"].tolist() == [0.5, 0.5]
    assert table["took_part"].tolist() == [2000, 2000]
    shrink = (1 - 0.02 * np.array([1.0, 4.0])) ** 5
    center = np.array([-1.0, 1.0])
    fixed = np.dot(1 - shrink, center) / (2 - shrink.sum())
    ends = shrink * fixed + (1 - shrink) * center
    expected = np.sqrt(2) * np.abs(ends - ends.mean())
    np.testing.assert_allclose(table["mean_drift"], expected, rtol=1e-3)
    np.testing.assert_allclose(table["max_drift"], expected, rtol=1e-3)


@pytest.mark.parametrize("scheme", [fald.with_replacement(2), fald.without_replacement(1)], ids=["I", "II"])
def test_drift_counts_only_those_who_took_part(scheme):
    tree = run(participation=scheme)
    stats = tree["sample_stats"]
    table = diagnostics.client_drift(tree)
    for index, name in enumerate(("left", "right")):
        took_part = (stats["participant"].values == index) & (stats["weight"].values > 0)
        drift = stats["drift"].values[took_part]
        assert table.loc[name, "took_part"] == took_part.sum()
        assert table.loc[name, "mean_drift"] == pytest.approx(drift.mean(), rel=1e-5)
        assert table.loc[name, "max_drift"] == pytest.approx(drift.max(), rel=1e-5)
    if scheme.scheme == "without-replacement":
        assert table["took_part"].sum() == 200
        assert (table["max_drift"] == 0).all()


def test_a_client_that_never_took_part_has_no_drift():
    tree = run(participation=fald.without_replacement(1), num_rounds=1, num_chains=1)
    table = diagnostics.client_drift(tree)
    assert sorted(table["took_part"]) == [0, 1]
    assert table["mean_drift"].isna().sum() == 1
    assert pd.api.types.is_integer_dtype(table["took_part"])


def test_clients_of_whom_only_the_sum_is_known_took_part():
    tree = run(num_rounds=10)
    stats = tree["sample_stats"].to_dataset()
    tree["sample_stats"] = xr.DataTree(stats.assign(drift=np.nan * stats["drift"]))
    table = diagnostics.client_drift(tree)
    assert table["took_part"].tolist() == [20, 20]
    assert table["mean_drift"].isna().all()


def test_distance_of_shifted_samples_is_the_shift():
    a = normal_draws((500, 3))
    shift = np.array([1.0, -2.0, 0.5])
    assert diagnostics.wasserstein2(a, a) == pytest.approx(0, abs=1e-6)
    assert diagnostics.wasserstein2(a, a + shift) == pytest.approx(np.linalg.norm(shift), rel=1e-9)
    assert diagnostics.wasserstein2(a, 2 * a + shift) > np.linalg.norm(shift)


def test_distance_of_samples_is_near_that_of_their_laws():
    rng = np.random.default_rng(3)
    mean, covariance = np.array([2.0, 0.0]), np.array([[4.0, 1.0], [1.0, 1.0]])
    exact = gaussian.wasserstein2(np.zeros(2), np.eye(2), mean, covariance)
    pairs = [
        diagnostics.wasserstein2(rng.normal(size=(1000, 2)), rng.multivariate_normal(mean, covariance, 1000))
        for _ in range(12)
    ]
    error = np.std(pairs, ddof=1) / np.sqrt(12)
    # two samples of one law are already apart by about 0.1, which adds in squares
    assert -4 * error < np.mean(pairs) - exact < 4 * error + 0.1**2 / exact
    wrong = gaussian.wasserstein2(np.zeros(2), np.eye(2), mean, 1.1**2 * covariance)
    assert not -4 * error < np.mean(pairs) - wrong


def test_distance_between_results_follows_names():
    a, b = normal_draws((2, 300)), normal_draws((2, 300), seed=1) + 5
    one, two = tree_of(a=a, b=b), tree_of(b=b, a=a)
    assert diagnostics.wasserstein2(one, two) == pytest.approx(0, abs=1e-6)
    array = np.stack([a.ravel(), b.ravel()], axis=1)
    assert diagnostics.wasserstein2(one, array) == pytest.approx(0, abs=1e-6)
    assert diagnostics.wasserstein2(two, array) > 5
    assert diagnostics.wasserstein2(one, jnp.asarray(array)) < 1e-3
    with pytest.raises(ConfigError, match="different parameters"):
        diagnostics.wasserstein2(one, tree_of(a=a, c=b))


def test_samples_that_cannot_be_compared():
    with pytest.raises(ConfigError, match="3 and 2 parameters"):
        diagnostics.wasserstein2(np.ones((5, 3)), np.ones((5, 2)))
    for wrong in (np.ones(5), np.ones((0, 2))):
        with pytest.raises(ConfigError, match="must be an array"):
            diagnostics.wasserstein2(wrong, np.ones((5, 2)))


def test_only_so_many_draws_are_used():
    a = np.arange(100.0)[:, None]
    assert diagnostics.wasserstein2(a, a + 1, most=10) == pytest.approx(1.0)


def test_distance_along_a_run_is_that_of_the_moments():
    draws = normal_draws((50, 64, 2)) + np.linspace(3, 0, 64)[:, None]  # a start far off, forgotten linearly
    exact = gaussian.Law(np.zeros(2), np.eye(2))
    table = diagnostics.distance(tree_of(a=draws), exact, window=1, points=3)
    assert table["round"].tolist() == [1, 8, 64]
    assert table["draws"].tolist() == [50] * 3
    for at, line in zip((0, 7, 63), table.itertuples()):
        mean, joint = draws[:, at].mean(0), np.cov(draws[:, at], rowvar=False)
        assert line.mean_error == pytest.approx(np.abs(mean).max())
        assert line.sd_error == pytest.approx(np.abs(np.sqrt(np.diag(joint)) - 1).max())
        assert line.w2 == pytest.approx(float(gaussian.wasserstein2(mean, joint, *exact)))
    # without a window the later half counts, however far the start was
    later = diagnostics.distance(tree_of(a=draws), exact, points=1)
    assert later["draws"].tolist() == [50 * 32]
    assert later["mean_error"][0] == pytest.approx(np.abs(draws[:, 32:].mean((0, 1))).max())


def test_distance_knows_references_of_three_kinds():
    ours, theirs = tree_of(a=normal_draws(), b=normal_draws(seed=1)), normal_draws((4, 1000), seed=2)
    swapped = tree_of(b=theirs + 1, a=theirs)  # the order of parameters is that of their names
    flat = np.stack([theirs.ravel(), theirs.ravel() + 1], axis=1)
    law = flat.mean(0), np.cov(flat, rowvar=False)
    lines = [diagnostics.distance(ours, other, points=1).iloc[0] for other in (swapped, flat, law)]
    for line in lines[1:]:
        np.testing.assert_allclose(line, lines[0], rtol=1e-9)
    assert lines[0]["mean_error"] == pytest.approx(1, abs=0.1)


@pytest.mark.parametrize(
    ("reference", "said"),
    [
        (tree_of(b=normal_draws()), "different parameters"),
        (normal_draws((100, 2)), "1 parameters, and the reference 2"),
        (normal_draws((1, 1)), "two draws"),
        (np.ones((9, 1)), "positive variances"),
        ((np.zeros(1), np.eye(2)), "square matrix"),
        (np.zeros(3), "array"),
    ],
)
def test_distance_refuses_what_is_no_reference(reference, said):
    with pytest.raises(ConfigError, match=said):
        diagnostics.distance(tree_of(a=normal_draws()), reference)


def test_many_parameters_have_no_joint_distance():
    tree = tree_of(a=normal_draws((2, 10, 1001)))
    line = diagnostics.distance(tree, normal_draws((50, 1001)), points=1).iloc[0]
    assert np.isnan(line["w2"])
    assert line["mean_error"] > 0
