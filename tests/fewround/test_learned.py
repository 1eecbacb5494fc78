"""The surrogate that chains follow, and what their end is judged by."""

from types import SimpleNamespace

import jax.numpy as jnp
import numpy as np
import pytest

from fald.fewround import learned
from fald.fewround.certify import quantile
from fald.fewround.chains import chain_checks
from fald.fewround.surrogate import blank, learn, wander


def misfit(surrogate, z, wanted):
    both = surrogate.quadratic + surrogate.quadratic.T
    bent = 1 / (1 + np.exp(-(z @ surrogate.ridges + surrogate.offsets))) * surrogate.heights
    return float(np.mean((bent @ surrogate.ridges.T + z @ both + surrogate.slope - wanted) ** 2))


@pytest.mark.parametrize("honest", [True, False])
def test_gradients_of_unseen_states_are_predicted(honest):
    rng = np.random.default_rng(0)
    ridges = rng.normal(size=(6, 12))
    z = rng.normal(size=(3000, 6))
    slopes = (1 / (1 + np.exp(-z @ ridges)) - 0.5) @ ridges.T
    old, fresh = slice(0, 2000), slice(2000, None)
    given = slopes[old] if honest else rng.permutation(slopes[old])
    surrogate = learn(blank(6, rng), z[old], given, rng, steps=2000, rate=0.02)
    left = misfit(surrogate, z[fresh], slopes[fresh]) / np.mean(slopes[fresh] ** 2)
    # the twin is taught the gradients of other states
    assert left < 0.02 if honest else left > 0.9


def test_chains_follow_the_density_of_the_surrogate():
    rng = np.random.default_rng(1)
    flat = blank(2, rng)
    quadratic = jnp.asarray([[-0.5, 0.0], [0.0, 0.25]], jnp.float32)
    flat = flat._replace(heights=0 * flat.heights, quadratic=quadratic, slope=jnp.asarray([1.0, 0.0]))
    start = rng.standard_normal((8192, 2))
    z = wander(flat, start, 3, trajectories=6, steps=10)
    # log density -|z|^2/2 + z.Qz + g.z: precisions 1 - 2Q and means g/(1 - 2Q)
    mean, sd = np.array([0.5, 0.0]), np.array([0.5, 2.0]) ** 0.5

    def off(z):
        return np.max(np.abs(z.mean(0) - mean) / sd), np.max(np.abs(z.std(0) / sd - 1))

    assert max(off(z)) < 4.5 / np.sqrt(len(z))
    assert max(off(start)) > 0.2  # the twin: chains that stay
    inside = wander(flat, start[np.sum(start**2, axis=1) < 4], 3, trajectories=6, steps=10, bound=4.0)
    assert np.max(np.sum(inside**2, axis=1)) < 4


def test_chains_leave_where_the_surrogate_is_stiff():
    """A kink that was learned at few states curves hundreds of times as much as a normal does."""
    rng = np.random.default_rng(8)

    def moved(curvature):
        stiff = blank(2, rng)
        quadratic = jnp.asarray([[(1 - curvature) / 2, 0.0], [0.0, 0.0]], jnp.float32)
        stiff = stiff._replace(heights=0 * stiff.heights, quadratic=quadratic)
        start = (rng.standard_normal((1000, 2)) * [curvature**-0.5, 1.0]).astype(np.float32)
        return np.mean(np.any(wander(stiff, start, 3, trajectories=6, steps=10) != start, axis=1))

    assert moved(500.0) > 0.9
    assert moved(1e6) < 0.05  # the twin: no step is short enough


def settled(shift, seed):
    rng = np.random.default_rng(seed)
    ends = [rng.standard_normal((6400, 121)) for _ in range(3)]
    ends[2][:, 7] += shift
    energies = [rng.standard_normal(6400) for _ in range(3)]
    names = [str(i) for i in range(121)]
    found = chain_checks(ends, energies, accepted=0.8, least=0.5, tolerance=0.05, names=names)
    return [c for c in found if not c.holds]


def test_chains_at_rest_are_called_settled():
    assert not any(settled(0.0, seed) for seed in range(3))
    # the twin: one of 121 means moved by twice what chance moves it
    assert [c.name for c in settled(2 * quantile(121) * np.sqrt(2 / 6400), 0)] == ["settled"]


def shown(draws, values=lambda x: -np.sum(x**2, axis=1) / 2, slopes=lambda x: -x, certified=None):
    """Names of the conditions that object to ends of chains, of a posterior that is a standard normal."""

    def posterior(positions, sums):
        found = values(positions)
        return np.where(np.isnan(found), -np.inf, found), np.isnan(found)

    target = SimpleNamespace(
        dim=draws.shape[1], model=SimpleNamespace(parameter_names=tuple("abcdefgh"[: draws.shape[1]])),
        gradients=lambda positions, sums: (None, slopes(positions)),
        posterior=posterior,
    )  # fmt: skip
    last = [draws[: len(draws) // 2], draws[len(draws) // 2 :]]
    newest = last[1] if certified is None else certified
    asking = learned._shown(target, last, newest, np.random.default_rng(3), tolerance=0.05)
    request = next(asking)
    assert set(request) == {"states", "points"}
    with pytest.raises(StopIteration) as done:
        asking.send({"point_values": None})
    checks = done.value.value
    assert [c.name for c in checks] == [
        "precision of means", "precision of sds", "moments", "scores", "far mass", "numbers",
    ]  # fmt: skip
    return [c.name for c in checks if not c.holds]


def test_chains_that_have_the_last_word_must_show_six_things():
    draws = np.random.default_rng(4).standard_normal((24_000, 2))
    assert shown(draws) == []
    few = draws[-1000:]
    assert shown(draws, certified=few) == ["precision of means", "precision of sds"]
    heavy = np.random.default_rng(5).standard_t(1.5, (12_000, 1))
    assert "moments" in shown(draws, certified=np.hstack([draws[-12_000:], heavy]))
    assert shown(draws, slopes=lambda x: -x - 0.06) == ["scores"]
    wide = -np.log(100.0) - 5.0

    def both(x):
        return np.logaddexp(-np.sum(x**2, axis=1) / 2, wide - np.sum(x**2, axis=1) / 200)

    assert shown(draws, values=both) == ["far mass"]

    def near(level, border):
        return lambda x: np.where(np.sum(x**2, axis=1) < border**2, level(x), np.nan)

    # a wide part whose values are not numbers further out is not seen as mass; a normal has none there
    assert shown(draws, values=near(both, 8.0)) == ["numbers"]
    assert shown(draws, values=near(lambda x: -np.sum(x**2, axis=1) / 2, 3.0)) == []


def test_what_is_wide_in_every_direction_is_missed_and_a_skewed_coordinate_is_not():
    draws = np.random.default_rng(4).standard_normal((24_000, 8))

    def skewed(width):
        return lambda x: -np.sum(x**2, axis=1) / 2 + np.maximum(x[:, 0], 0) ** 2 * (1 - width**-2.0) / 2

    def mixed(share):
        square = np.log1p(-share), np.log(share) - 8 * np.log(3)
        return lambda x: np.logaddexp(
            square[0] - np.sum(x**2, axis=1) / 2, square[1] - np.sum(x**2, axis=1) / 18
        )

    assert (
        shown(draws, values=skewed(1.8)) == []
    )  # in eight dimensions a tenth of its second moment seems far out
    assert shown(draws, values=skewed(4.0)) == ["far mass"]  # a tail of its own
    assert shown(draws, values=mixed(0.001)) == []
    assert shown(draws, values=mixed(0.02)) == ["far mass"]


@pytest.mark.parametrize("wall", [2.0, np.inf])
def test_no_chain_begins_on_a_wall(wall):
    """There a surrogate that puts the posterior lower still holds a chain for ever; the twin has no wall."""
    z = np.random.default_rng(6).standard_normal((2000, 3)).clip(-1, 1)

    def level(z):
        return np.where(z[:, 0] > wall, -500.0, -np.sum(z**2, axis=1) / 2)

    def decide(away):
        yield {}
        return level(away), np.where(away[:, 0] > wall, 20.0, 0.0)

    moving = learned._apart(
        SimpleNamespace(decide=decide), (z, level(z), np.zeros(2000)), np.random.default_rng(7)
    )
    next(moving)
    with pytest.raises(StopIteration) as done:
        moving.send({})
    there, value, off = done.value.value
    moved = np.abs(there - z).max(axis=1)
    assert not moved[1::2].any()
    assert moved[0::2][moved[0::2] > 0].min() >= learned._DISPERSED / 2
    np.testing.assert_array_equal(value, level(there))
    stayed = np.mean(moved[0::2] == 0)
    if np.isfinite(wall):
        assert there[:, 0].max() <= wall
        assert off.max() == 0
        assert 0.02 < stayed < 0.17  # of those sent up the first of three coordinates, most
    else:
        assert stayed < 0.02  # corners
