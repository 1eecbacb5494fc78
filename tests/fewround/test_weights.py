"""Importance weights against the published formulas, written out one number at a time."""

import math

import numpy as np
import pytest

from fald.fewround import weights as w


def slow_fit(x):
    """Zhang and Stephens (2009), steps of their section 3, with the prior of Vehtari et al. (2024)."""
    n = len(x)
    m = 30 + math.floor(math.sqrt(n))
    b = [
        1 / x[-1] + (1 - math.sqrt(m / (j - 0.5))) / (3 * x[math.floor(n / 4 + 0.5) - 1])
        for j in range(1, m + 1)
    ]

    def k(theta):
        return sum(math.log(1 - theta * each) for each in x) / n

    levels = [n * (math.log(-each / k(each)) - k(each) - 1) for each in b]
    shares = [1 / sum(math.exp(other - level) for other in levels) for level in levels]
    centre = sum(each * share for each, share in zip(b, shares))
    shape = k(centre)
    return (n * shape + 10 * 0.5) / (n + 10), -shape / centre


@pytest.mark.parametrize("n", [5, 8, 30, 90])
@pytest.mark.parametrize("shape", [0.1, 0.6])
def test_a_tail_is_fitted_by_the_published_formulas(n, shape):
    x = np.sort(np.random.default_rng(n).pareto(1 / shape, n))
    np.testing.assert_allclose(w.fit_tail(x), slow_fit(x.tolist()), rtol=1e-9)


@pytest.mark.parametrize(
    ("count", "length"), [(10, 2), (25, 5), (225, 45), (230, 46), (1000, 95), (10_000, 300)]
)
def test_a_tail_is_a_fifth_or_three_roots(count, length):
    assert w._tail_length(count) == length == min(count // 5, math.ceil(3 * math.sqrt(count)))


@pytest.mark.parametrize("count", [25, 400])
def test_the_shape_of_a_tail_is_that_of_its_largest_values(count):
    values = np.random.default_rng(count).permutation(np.random.default_rng(0).pareto(2.0, count) + 1)
    top = np.sort(values)[-w._tail_length(count) - 1 :]
    assert w.tail_shape(values) == pytest.approx(slow_fit((top[1:] - top[0]).tolist())[0], rel=1e-9)
    assert w.tail_shape(1e6 * values) == pytest.approx(w.tail_shape(values), rel=1e-9)
    assert w.tail_shape(1e-15 * values) == pytest.approx(w.tail_shape(values), rel=1e-6)


def test_tails_that_are_no_tails():
    assert w.tail_shape(np.arange(24.0)) == np.inf  # four values tell nothing
    assert np.isfinite(w.tail_shape(np.arange(25.0) ** 2))
    assert w.tail_shape(np.r_[np.arange(99.0), np.inf]) == np.inf
    equal = np.r_[np.zeros(50), np.full(50, 1e8)]
    assert w.tail_shape(equal) == 0.0
    assert w.tail_shape(equal + np.r_[np.zeros(99), 0.05]) == 0.0  # to rounding
    assert w.tail_shape(equal + np.r_[np.zeros(99), 0.2]) > 0.0
    tied = np.r_[np.full(90, 0.5), np.ones(5), 1.0 + np.arange(1, 6)]
    assert np.isfinite(w.tail_shape(tied))
    # a tail that begins at nothing rests on its few largest values
    assert w.tail_shape(np.where(tied > 0.5, tied, 0.0)) == np.inf


def slow_smooth(logs):
    logs = [-math.inf if math.isnan(each) else each for each in logs]
    raw = [math.exp(each - max(logs)) for each in logs]
    order = sorted(range(len(raw)), key=lambda i: raw[i])
    length = w._tail_length(len(raw))
    tail, cutoff = order[-length:], raw[order[-length - 1]]
    shape, scale = slow_fit([raw[i] - cutoff for i in tail])
    for place, i in enumerate(tail):
        p = (place + 0.5) / length
        raw[i] = min(1.0, cutoff + scale * ((1 - p) ** -shape - 1) / shape)
    return shape, [each / sum(raw) for each in raw]


@pytest.mark.parametrize("count", [25, 60, 500])
@pytest.mark.parametrize("spread", [0.5, 2.0])
def test_weights_are_smoothed_by_the_published_formulas(count, spread):
    logs = np.random.default_rng(count).normal(0, spread, count) - 1234.5
    logs[3] = np.nan
    found = w.smooth(logs)
    shape, wanted = slow_smooth(logs.tolist())
    assert found.khat == pytest.approx(shape, rel=1e-9)
    np.testing.assert_allclose(found.weights, wanted, rtol=1e-8, atol=1e-300)
    assert found.ess == pytest.approx(1 / sum(each**2 for each in wanted), rel=1e-8)
    assert found.weights[3] == 0.0
    assert found.weights.sum() == pytest.approx(1.0)


def test_weights_of_few_draws_and_of_none():
    few = w.smooth(np.log(np.arange(1.0, 25.0)))  # four make no tail: as they are
    assert few.khat == np.inf
    np.testing.assert_allclose(few.weights, np.arange(1.0, 25.0) / 300)
    assert w.smooth(np.zeros(25)).khat == 0.0
    nearly = w.smooth(np.r_[np.zeros(24), 5e-10])
    assert nearly.khat == 0.0
    assert w.smooth(np.r_[np.linspace(0, 1e-3, 25)]).khat != 0.0
    for logs in (np.full(4, -np.inf), np.full(4, np.nan), np.array([0.0, np.inf, 0.0, 0.0])):
        nothing = w.smooth(logs)
        np.testing.assert_allclose(nothing.weights, 0.25)
        assert (nothing.khat, nothing.ess) == (np.inf, 1.0)
    assert w.smooth(np.zeros(0)).weights.shape == (0,)
    assert w.smooth(np.full(1, -np.inf)).weights.tolist() == [1.0]


def test_moments_and_their_errors_by_hand():
    rng = np.random.default_rng(1)
    x, p = rng.normal([3.0, -5.0], [0.1, 20.0], (40, 2)), rng.dirichlet(np.ones(40))
    found = w.moments(x, p)
    mean = sum(a * b for a, b in zip(p, x))
    covariance = sum(a * np.outer(b - mean, b - mean) for a, b in zip(p, x))
    np.testing.assert_allclose(found.mean, mean)
    np.testing.assert_allclose(found.covariance, covariance)
    np.testing.assert_allclose(found.sd, np.sqrt(np.diag(covariance)))
    precise = w.precision(x, p)
    for j in range(2):
        v = covariance[j, j]
        gaps = [p[i] * (x[i, j] - mean[j]) + p[i + 1] * (x[i + 1, j] - mean[j]) for i in range(0, 40, 2)]
        squares = [
            sum(p[k] * ((x[k, j] - mean[j]) ** 2 - v) for k in (i, i + 1)) for i in range(0, 40, 2)
        ]  # fmt: skip
        assert precise.mean[j] == pytest.approx(math.sqrt(sum(g**2 for g in gaps) / v))
        # a standard error of a variance, over 2v, is that of the log of an sd
        assert precise.sd[j] == pytest.approx(math.sqrt(sum(s**2 for s in squares)) / (2 * v))
        assert precise.khat[j] == pytest.approx(w.tail_shape(p * (x[:, j] - mean[j]) ** 2))
    alone = w.precision(x, np.eye(40)[0])
    assert np.all(np.isinf(alone.mean))
    assert np.all(np.isinf(alone.sd))


@pytest.mark.parametrize("offset", [0.0, 0.5, 0.999])
def test_resampling_by_hand(offset):
    p = np.array([0.1, 0.0, 0.6, 0.3])
    edges = np.cumsum(p)
    wanted = [int(np.argmax(edges >= (i + offset) / 10 - 1e-15)) for i in range(10)]
    found = w.resample(5 * p, 10, offset)
    assert found.shape == (10,)
    assert np.abs(np.bincount(found, minlength=4) - 10 * p).max() <= 1
    assert np.bincount(found, minlength=4)[1] == 0 or offset == 0.0
    if offset == 0.5:
        assert found.tolist() == wanted
    assert w.resample(np.array([0.5, 0.5 - 1e-16]), 4, 1.0).max() == 1


def test_a_tail_that_begins_at_nothing_cannot_be_smoothed():
    few = np.r_[np.full(950, -np.inf), np.linspace(-1, 0, 50)]
    assert w.smooth(few).khat == np.inf
    assert w.smooth(np.r_[np.full(950, -900.0), np.linspace(-1, 0, 50)]).khat == np.inf
    assert w.smooth(np.r_[np.full(950, -1.0), np.linspace(-1, 0, 50)]).khat < np.inf
    found = w.smooth(few)
    np.testing.assert_array_equal(found.weights[:950], 0)  # what has no density gets no weight
    assert found.weights.sum() == pytest.approx(1)


def test_resampling_ends_at_the_last_entry():
    """Rounding may leave the sum of the shares below one."""
    short = next(
        weights
        for weights in (np.random.default_rng(seed).random(999) for seed in range(999))
        if np.cumsum(weights)[-1] / np.sum(weights) < 1
    )
    assert w.resample(short, 1, 1.0).tolist() == [998]
    np.testing.assert_array_equal(w.resample(np.array([1.0, 2.0, 1.0]), 4, 0.5), [0, 1, 1, 2])
    np.testing.assert_array_equal(w.resample(np.array([0.5, 0.0, 0.5]), 2, 0.1), [0, 2])


@pytest.mark.parametrize("count", [400, 2000])
@pytest.mark.parametrize("seed", range(3))
def test_kept_draws_have_the_means_and_sds_of_all(count, seed):
    """With weights, heavy and skewed tails, and parameters of different units far from zero."""
    rng = np.random.default_rng(seed)
    values = np.column_stack(
        [
            1e3 + rng.standard_t(3, 6000),
            -50 + 1e-3 * rng.gamma(0.5, size=6000),
            20 * rng.standard_normal(6000),
        ]
    )
    weights = rng.gamma(0.3, size=6000)
    weights /= weights.sum()
    kept = w.keep(values, weights, count, np.random.default_rng(seed))
    assert kept.shape == (count,)
    exact = w.moments(values, weights)
    assert np.all(np.abs(values[kept].mean(axis=0) - exact.mean) <= 2.01e-3 * exact.sd)
    assert np.all(np.abs(values[kept].std(axis=0) / exact.sd - 1) <= 2.1e-3)
    # the twin: the same draws without exchanges, and how many draws are others
    plain = w.resample(weights, count, float(np.random.default_rng(seed).random()))
    assert np.abs(values[plain].std(axis=0) / exact.sd - 1).max() > 4e-3
    # no more draws are exchanged than are needed
    assert np.mean(np.isin(plain, kept)) > 0.5


def test_draws_that_are_right_already_stay():
    values = np.repeat([[-1.0], [1.0]], 500, axis=0)
    weights = np.full(1000, 1e-3)
    kept = w.keep(values, weights, 100, np.random.default_rng(0))
    np.testing.assert_array_equal(kept, w.resample(weights, 100, float(np.random.default_rng(0).random())))
    assert len(w.keep(values, weights, 1, np.random.default_rng(0))) == 1
