"""The tight accountant piece by piece: its grid, its window, and what is read off a loss, by plain sums."""

from __future__ import annotations

import itertools
import math

import numpy as np
import pytest
from scipy.fft import rfft
from scipy.optimize import brentq
from scipy.stats import norm

from fald.privacy import pld, step_profile
from fald.privacy.accountants import ACCOUNTANTS, Releases
from fald.privacy.compose import Loss, repeated
from fald.privacy.pld import NoGridError, PldSteps, _discretised, _roundoff, _spread
from fald.privacy.rdp import RdpSteps

DELTA = 1e-5
EPS = np.finfo(float).eps


def releases(z, counts=None, rows=10, size=10, sampling="without-replacement", delta=DELTA):
    z = np.atleast_1d(np.asarray(z, float))
    return Releases(z, np.ones(z.size) if counts is None else np.asarray(counts), rows, size, sampling, delta)


def made(z, count=1, **changes):
    """Steps of one multiplier, taken so many times."""
    return PldSteps(releases(z, [count], **changes), total=lambda s: repeated(s.step(z), count))


def gaussian_delta(epsilon, mu):
    return norm.cdf(mu / 2 - epsilon / mu) - math.exp(epsilon) * norm.cdf(-mu / 2 - epsilon / mu)


def gaussian_epsilon(mu, delta=DELTA):
    return brentq(lambda e: gaussian_delta(e, mu) - delta, 0, 200, xtol=1e-13)


# -- the grid of one step -------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("z", "q", "sampling"),
    [
        (0.8, 1.0, "without-replacement"),
        (1.5, 0.1, "without-replacement"),
        (3.0, 0.02, "without-replacement"),
        (1.5, 0.1, "poisson"),
        (1.5, 1.0, "poisson"),
    ],
)
def test_a_grid_reaches_ten_standard_deviations_of_noise(z, q, sampling):
    interval = 0.02
    probs, lower, infinity = _discretised(z, q, sampling, interval)
    # the loss where the noise is 10 sd beyond the shift, with q the probability that there is one
    plain = (2 * (1 + 10 * z) - 1) / (2 * z**2)
    far = math.log1p(q * math.expm1(plain))
    if sampling == "poisson" and q < 1:
        far = min(plain, far - math.log1p(-q))
    assert lower >= -math.ceil(far / interval)
    assert probs.size + lower - 1 <= math.ceil(far / interval)
    # nothing that matters is cut, and the grid is not several times longer than needed
    assert infinity < 1e-12
    held = np.flatnonzero(probs > 1e-300) + lower
    assert held[-1] > 0.6 * far / interval
    losses = (np.arange(probs.size) + lower) * interval
    for epsilon in (0.0, 0.05, 0.41, 1.0):
        over = losses > epsilon
        delta = float(np.sum(probs[over] * -np.expm1(epsilon - losses[over]))) + infinity
        exact = float(step_profile(epsilon, z, q, sampling))
        assert exact - 1e-12 <= delta <= exact + 3e-4


def test_a_grid_of_enormous_losses_and_of_none():
    _, lower, infinity = _discretised(0.02, 0.5, "without-replacement", 10.0)  # e^1750 has no float
    assert lower >= -175
    assert infinity < 1e-9
    _, lower, _ = _discretised(1e6, 0.5, "without-replacement", 0.5)  # one point each side at least
    assert -1 <= lower <= 0


def test_poisson_on_all_rows_is_the_gaussian_mechanism():
    for epsilon in (-0.5, 0.0, 1.0):
        found = float(step_profile(epsilon, 0.9, 1.0, "poisson"))
        assert found == pytest.approx(float(step_profile(epsilon, 0.9, 1.0)), rel=1e-12)


@pytest.mark.parametrize(("z", "q"), [(4.0, 1.0), (8.0, 0.3), (2.0, 0.05), (30.0, 0.01)])
def test_the_spread_is_about_the_sd_of_a_loss(z, q):
    x = np.linspace(-9 * z, 1 + 9 * z, 200_001)
    loss = np.log1p(q * np.expm1((2 * x - 1) / (2 * z**2)))
    mass = (1 - q) * norm.pdf(x, 0, z) + q * norm.pdf(x, 1, z)
    mean = np.trapezoid(mass * loss, x)
    sd = math.sqrt(np.trapezoid(mass * (loss - mean) ** 2, x))
    assert sd * 0.99 <= float(_spread(np.array([z]), q)[0]) <= sd * 1.15


def test_the_spread_of_little_noise_is_that_of_a_loss_that_is_there_or_not():
    # far below one the first form overflows; the second is √q of a Gaussian's mean and sd
    z, q = np.array([0.1, 0.01]), 0.04
    np.testing.assert_allclose(_spread(z, q), 0.2 * (1 / z + 0.5 / z**2))


# -- the grid of a run ----------------------------------------------------------------------------------


def test_the_grid_has_so_many_points_to_a_standard_deviation():
    """32 to that of a step, 20 where steps follow a schedule, and always enough for the whole."""
    z = 4.0
    step = float(_spread(np.array([z]), 1.0)[0])
    assert made(z).interval == pytest.approx(min(step / 32, 16 * step / 2**14))
    assert made(z, 40_000).interval == pytest.approx(step / 32)  # a step is finer than the whole needs
    few = np.linspace(z, 1.01 * z, 3)
    three = PldSteps(releases(few, [5e4] * 3), total=lambda s: s.step(z))
    whole = math.sqrt(np.sum(5e4 * _spread(few, 1.0) ** 2))
    assert three.interval == pytest.approx(whole / math.sqrt(1.5e5) / 32)
    many = np.linspace(z, 1.5 * z, 200)  # covered by fewer, between which there are chords
    chords = PldSteps(releases(many, [1e4] * 200), total=lambda s: s.step(z))
    root = math.sqrt(np.mean(_spread(many, 1.0) ** 2))
    assert chords.interval == pytest.approx(root / 20)
    half = many[::2]
    short = PldSteps(releases(half), total=lambda s: s.step(z))
    assert short.interval == pytest.approx(16 * math.sqrt(np.sum(_spread(half, 1.0) ** 2)) / 2**12)
    kept = np.geomspace(z, 3 * z, 33)  # more than 32, all of them kept
    all_kept = PldSteps(releases(kept, [1e4] * 33), total=lambda s: s.step(z))
    assert all_kept.interval == pytest.approx(math.sqrt(np.mean(_spread(kept, 1.0) ** 2)) / 20)


def synthetic(steps, mean, sd, infinity=0.0, factors=1.0):
    """A loss with the moments of N(mean, sd²), and its distribution on the grid of ``steps``."""
    at = np.arange(-steps.size // 3, steps.size // 3)
    pmf = np.diff(norm.cdf((np.append(at, at[-1] + 1) - 0.5) * steps.interval, mean, sd))
    moments = steps._orders * mean + 0.5 * steps._orders**2 * sd**2
    folded = np.bincount(at % steps.size, pmf, steps.size)
    return Loss(np.asarray(rfft(folded)), moments, infinity, factors), at * steps.interval, pmf


@pytest.mark.parametrize("count", [16, 1000])
def test_the_window_is_that_of_a_chernoff_bound(count):
    """For a Gaussian loss of the expected sd it is mean ± sd·√(2 log 1/tail), the tail 1e-7 of δ."""
    steps = made(8.0, count)
    far = math.sqrt(2 * math.log(1e7 / DELTA))
    sd = math.sqrt(count) * float(_spread(np.array([8.0]), 1.0)[0])
    for mean in (0.0, 0.3 * sd):
        loss, _, _ = synthetic(steps, mean, sd)
        low, high = steps._window(loss)
        assert low == math.floor((mean - far * sd) / steps.interval)
        assert high == math.ceil((mean + far * sd) / steps.interval)
    # the window always has zero and a point above it, and where nothing bounds the loss there is none
    assert steps._window(synthetic(steps, 100 * sd, 1e-3 * sd)[0])[0] == 0
    assert steps._window(synthetic(steps, -100 * sd, 1e-3 * sd)[0])[1] == 1
    for size in (math.inf, math.nan):
        with pytest.raises(NoGridError):
            steps._window(loss._replace(log_moment=np.full(steps._orders.size, size)))
    # the size of the transform holds the window of the whole run
    low, high = steps._window(repeated(steps.step(8.0), count))
    assert high - low + 2 <= steps.size <= 1.1 * (high - low + 2) + 16


@pytest.mark.parametrize("infinity", [0.0, 1e-4])
def test_what_is_read_off_a_loss_is_a_plain_sum(infinity):
    steps = made(8.0, 16)
    loss, losses, pmf = synthetic(steps, 0.2, 0.5, infinity)
    slack = infinity + _roundoff(loss) * math.sqrt(np.sum(pmf**2) * steps.size)
    cut = math.exp(np.min((loss.log_moment - steps._orders * (steps._window(loss)[1] + 0.5) * steps.interval)[
        steps._orders > 0]))  # fmt: skip
    assert cut <= 1e-7 * DELTA * 1.01

    def delta(epsilon):
        over = losses > epsilon
        return float(np.sum(pmf[over] * -np.expm1(epsilon - losses[over]))) + slack

    for epsilon in (0.0, 0.3 * steps.interval, 0.1, 0.7321, 1.9):
        assert steps.delta(loss, epsilon) == pytest.approx(delta(epsilon), rel=1e-6, abs=1e-11)
    for wanted in (0.1, 1e-2, 1e-3, 2e-4):
        exact = brentq(lambda e, w=wanted: delta(e) - w, 0, 5, xtol=1e-13)
        assert steps.epsilon(loss, wanted) == pytest.approx(exact, rel=1e-7)
    assert steps.epsilon(loss, 0.999) == 0.0
    for beyond in (50.0, 1e6, math.inf):
        assert steps.delta(loss, beyond) == pytest.approx(infinity, abs=1e-9)
    if infinity:  # no ε has a δ below the probability of an infinite loss
        assert steps.epsilon(loss, 0.99 * infinity) == math.inf
    grid, upper, lower = steps._excess(loss)
    np.testing.assert_allclose(np.diff(grid), steps.interval)
    for j in (0, 5, 700):
        over = losses > grid[j] + 1e-9
        assert upper[j] == pytest.approx(pmf[over].sum() + slack, abs=1e-10)
        assert lower[j] == pytest.approx(np.sum(pmf[over] * np.exp(grid[j] - losses[over])), abs=1e-10)


def test_all_that_a_transform_leaves_out_counts_against_delta():
    """Rounding of many factors, losses beyond the window, and infinite ones."""
    steps = made(8.0, 16)
    loss, _, pmf = synthetic(steps, 0.2, 0.5)
    least = steps._excess(loss)[1][-1]
    for factors in (1e6, 1e9):
        many = steps._excess(loss._replace(factors=factors))[1][-1]
        # by Parseval: the relative error of each of so many products, times the root mean square
        error = 2 * EPS * (factors + 32) * math.sqrt(np.sum(pmf**2) * steps.size)
        assert many - least == pytest.approx(error, rel=2e-3)
    assert _roundoff(loss._replace(factors=0.0)) == pytest.approx(64 * EPS)
    assert steps._excess(loss._replace(infinity=0.125))[1][-1] - least == pytest.approx(0.125)
    # twice the sd of what the grid was made for: the window is cut, and the rest is bounded and counted
    wide = loss._replace(log_moment=1000 * loss.log_moment)
    low, _ = steps._window(wide)
    end = (low + steps.size - 1 + 0.5) * steps.interval
    bound = np.min((wide.log_moment - steps._orders * end)[steps._orders > 0])
    assert steps._excess(wide)[1][-1] - least == pytest.approx(math.exp(min(0.0, bound)), rel=1e-6)


def test_where_the_discounted_mass_is_below_any_number_the_next_point_is_safe(monkeypatch):
    steps, grid = made(8.0, 16), np.arange(4.0)
    monkeypatch.setattr(steps, "_excess", lambda loss: (grid, np.array([0.5, 0.5, 0.5, 0.0]), np.zeros(4)))
    assert steps.epsilon(None, 0.1) == 3.0


def test_rounding_that_would_show_at_delta_is_refused():
    limit = 10 * 4 * 2 * EPS * (1 + 32)  # a tenth of δ is what rounding may take
    with pytest.raises(NoGridError, match="round-off"):
        made(4.0, delta=0.98 * limit)
    made(4.0, delta=1.02 * limit)

    def leaking(steps):
        return steps.step(4.0)._replace(infinity=0.11 * DELTA)

    with pytest.raises(NoGridError, match="round-off"):
        PldSteps(releases(4.0), total=leaking)


def test_a_run_too_wide_for_a_grid_gets_a_coarser_one(monkeypatch):
    fine = made(4.0, 100)
    monkeypatch.setattr(pld, "_MOST_SIZE", 3000)
    coarse = made(4.0, 100)
    low, high = coarse._window(repeated(coarse.step(4.0), 100))
    assert 3000 / 2 < high - low < 3000
    assert fine.size > 2 * coarse.size
    assert fine.interval < coarse.interval
    exact = gaussian_epsilon(10 / 4)
    for steps, near in ((fine, 1e-4), (coarse, 1e-2)):
        assert exact <= steps.epsilon(repeated(steps.step(4.0), 100), DELTA) <= exact * (1 + near)
    monkeypatch.setattr(pld, "_WIDEST_INTERVAL", 0.9 * coarse.interval)
    with pytest.raises(NoGridError, match="too large"):
        made(4.0, 100)


@pytest.mark.parametrize(("z", "count"), [(0.5, 1), (1.0, 4), (20.0, 400), (300.0, 1000)])
def test_composed_gaussians_are_one_gaussian(z, count):
    steps, mu = made(z, count), math.sqrt(count) / z
    loss, exact = repeated(steps.step(z), count), gaussian_epsilon(mu)
    assert exact <= steps.epsilon(loss, DELTA) <= exact * (1 + 2e-4)
    for epsilon in (0.0, 0.5 * exact, exact):
        delta = gaussian_delta(epsilon, mu)
        assert delta * (1 - 1e-9) <= steps.delta(loss, epsilon) <= delta * 1.005
    assert steps.precision(loss, DELTA)[0] == steps.interval
    assert math.isnan(steps.precision(loss, DELTA)[1])


# -- multipliers between those of the grid --------------------------------------------------------------


@pytest.mark.parametrize("rows", [10, 3])
@pytest.mark.parametrize("least", [2.0, 0.4])  # with little noise the total variation is far from linear
def test_chords_keep_the_total_variation_and_lie_above(rows, least):
    ends = [least, 1.3 * least]
    steps = PldSteps(releases(ends, [8, 8], rows=rows), total=lambda s: repeated(s.step(least), 16))
    for z in [*(least * np.array([1.0, 1.05, 1.15, 1.275])), ends[1]]:
        loss = steps.step(z)
        total, low, high = (float(step_profile(0.0, at, rows / 10)) for at in (z, *ends))
        assert steps.delta(loss, 0.0) == pytest.approx(total, rel=1e-4)
        share = (total - high) / (low - high)
        for epsilon in (0.1, 0.5, 1.0):
            exact, low_end, high_end = (float(step_profile(epsilon, at, rows / 10)) for at in (z, *ends))
            chord = share * low_end + (1 - share) * high_end
            assert exact - 1e-12 <= steps.delta(loss, epsilon)
            assert steps.delta(loss, epsilon) == pytest.approx(chord, rel=1e-3, abs=1e-7)
    assert steps.step(ends[1]) is steps.step(ends[1])
    for outside in (0.75 * least, 2.5 * least):  # its own grid
        own = float(step_profile(0.3, outside, rows / 10))
        assert own - 1e-12 <= steps.delta(steps.step(outside), 0.3) <= own * 1.001 + 1e-7


def test_poisson_multipliers_are_rounded_down_instead():
    many = np.linspace(2.0, 2.6, 100)
    steps = PldSteps(releases(many, rows=3, sampling="poisson"), total=lambda s: repeated(s.step(2.0), 100))
    anchors = np.unique(steps._anchors)
    between = float(np.sqrt(anchors[4] * anchors[5]))
    assert steps.step(between) is steps.step(float(anchors[4]))
    assert steps.fraction == 0.3
    exact = float(step_profile(0.3, between, 0.3, "poisson"))
    assert exact <= steps.delta(steps.step(between), 0.3) <= 1.05 * exact
    for low, high in itertools.pairwise(anchors):
        assert high / low <= 1.005 * (1 + 1e-12)


def test_where_there_is_no_grid_renyi_divergences_take_its_place():
    tight = ACCOUNTANTS["pld"].steps(releases(4.0), lambda s: s.step(4.0))
    assert isinstance(tight, PldSteps)
    loose = ACCOUNTANTS["pld"].steps(releases(1e-4), lambda s: s.step(1e-4))
    assert isinstance(loose, RdpSteps)
    assert "Rényi" in ACCOUNTANTS["pld"].instead
