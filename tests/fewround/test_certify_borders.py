"""Conditions of *reached* at their borders, with parameters of different scales."""

from types import SimpleNamespace

import numpy as np
import pytest
from scipy.special import ndtri
from scipy.stats import norm, rankdata

from fald.fewround import certify
from fald.fewround.target import Derivatives
from fald.fewround.weights import Moments, Precision, Smoothed

NAMES = ["a", "b", "c"]
SD = np.array([0.1, 1.0, 50.0])
LEAST = 1e-9


def test_quantile_covers_means_and_sds_of_all_coordinates():
    for k in (1, 2, 50):
        # two-sided, 2k statements
        assert 2 * k * 2 * norm.sf(certify.quantile(k)) == pytest.approx(0.05)


@pytest.mark.parametrize(("count", "limit"), [(100, 0.5), (1000, 2 / 3), (2**12, 0.7), (10**6, 0.7)])
def test_the_limit_of_khat_depends_on_the_number_of_draws(count, limit):
    assert certify.khat_limit(count) == pytest.approx(limit)
    for shape, holds in ((limit - LEAST, True), (limit + LEAST, False)):
        found = certify.khat(Smoothed(np.ones(1), shape, 1e9), count)
        assert (found.name, found.holds) == ("k-hat", holds)
    assert not certify.khat(Smoothed(np.ones(1), np.nan, 1e9), count).holds


def test_pooled_khat_or_nearly_equal_weights():
    weights = np.full(1000, 1e-3)
    for shape, ess, holds in (
        (0.7 - LEAST, 1.0, True), (0.7, 1.0, False), (9.0, 700.0, False), (9.0, 700.1, True),
        (np.inf, 1.0, False),
    ):  # fmt: skip
        assert certify.pooled_khat(Smoothed(weights, shape, ess)).holds == holds


@pytest.mark.parametrize("which", range(3))
@pytest.mark.parametrize("what", ["mean", "sd"])
def test_precision_of_the_worst_coordinate(which, what):
    check = {"mean": certify.means_precise, "sd": certify.sds_precise}[what]
    z = certify.quantile(3)
    for error, holds in ((0.05 / z - LEAST, True), (0.05 / z + LEAST, False)):
        errors = {"mean": np.full(3, 1e-3), "sd": np.full(3, 1e-3)}
        errors[what][which] = error
        found = check(Precision(errors["mean"], errors["sd"], np.zeros(3)), 0.05, NAMES)
        assert (found.name, found.holds) == (f"precision of {what}s", holds)
        assert f"the {what} of {NAMES[which]} is known to 0.050 sd" in found.sentence
        # so many draws more would do
        grow = certify.needed_factor(Precision(errors["mean"], errors["sd"], np.zeros(3)), 0.05)
        assert grow == pytest.approx((z * error / 0.05) ** 2)
    huge = Precision(np.array([0.0, 2.0, 0.0]), np.array([1.0, 0.0, 0.0]), np.zeros(3))
    assert certify.needed_factor(huge, 0.1) == pytest.approx((z * 2.0 / 0.1) ** 2)


@pytest.mark.parametrize("which", range(3))
def test_moments_exist(which):
    for shape, holds in ((0.7 - LEAST, True), (0.7, False), (np.inf, False)):
        shapes = np.full(3, 0.1)
        shapes[which] = shape
        found = certify.moments_exist(Precision(np.zeros(3), np.zeros(3), shapes), NAMES)
        assert (found.name, found.holds) == ("moments", holds)
        assert f"the sd of {NAMES[which]} rests" in found.sentence


@pytest.mark.parametrize("which", range(3))
@pytest.mark.parametrize("sign", [1, -1])
def test_agreement_in_sds_of_each_parameter(which, sign):
    newest = Moments(np.array([3.0, -2.0, 7.0]), np.diag(SD**2))
    for off, holds in ((0.05 - 1e-7, True), (0.05 + 1e-7, False)):
        mean, sd = newest.mean.copy(), SD.copy()
        mean[which] += sign * off * SD[which]
        found = certify.agreement(newest, Moments(mean, np.diag(SD**2)), 0.05, NAMES)
        assert (found.name, found.holds) == ("agreement", holds)
        assert f"disagree on {NAMES[which]} by 0.050 sd" in found.sentence
        sd[which] *= 1 + sign * off
        found = certify.agreement(newest, Moments(newest.mean, np.diag(sd**2)), 0.05, NAMES)
        assert found.holds == holds
        assert f"disagree on {NAMES[which]} by" in found.sentence
    none = Moments(newest.mean, np.diag([0.0, 1.0, 1.0]))
    with np.errstate(over="ignore"):
        assert not certify.agreement(none, newest, 0.05, NAMES).holds


def test_directions_of_tails_are_one_sd_long_and_both_ways():
    mean, mode = np.array([1.0, 2.0]), np.array([1.0, 5.0])
    covariance = np.array([[0.01, 0.15], [0.15, 4.0]])  # sds 0.1 and 2, correlation 0.75
    sd = np.array([0.1, 2.0])
    far = np.array([[1.3, 2.0], [1.0, 2.0]])  # the second is the mean itself, and leads nowhere
    ways = certify.tail_directions(mean, mode, covariance, far)
    np.testing.assert_allclose(np.sqrt(np.sum((ways / sd) ** 2, axis=1)), 1.0)
    half = len(ways) // 2
    np.testing.assert_allclose(ways[half:], -ways[:half])
    white = ways[:half] / sd
    expected = [
        [1, 0], [0, 1],  # alone
        np.array([1, 0.75]) / 1.25, np.array([0.75, 1]) / 1.25,  # with what moves with them
        np.array([-1, 1]) / np.sqrt(2), np.array([1, 1]) / np.sqrt(2),  # principal axes of the correlations
        [0, -1], [1, 0],  # from the mode to the mean, and to a far draw
    ]  # fmt: skip
    assert half == len(expected)
    for way in expected:
        assert np.min(np.abs(np.abs(white @ way) - 1)) < 1e-12, way
    for here in white:
        assert max(abs(here @ way) for way in np.array(expected, float)) > 1 - 1e-12
    points = certify.tail_points(mean, ways)
    np.testing.assert_allclose(points[: len(ways)], mean + 100 * ways)
    np.testing.assert_allclose(points[len(ways) :], mean + 1000 * ways)


def test_a_direction_in_which_draws_are_not_spread_is_none_to_look_along():
    covariance = np.array([[1.0, 2.0], [2.0, 4.0]])  # one moves with the other alone
    ways = certify.tail_directions(np.zeros(2), np.array([-1.0, -2.0]), covariance, np.zeros((0, 2)))
    white = ways[: len(ways) // 2] / np.sqrt(np.diag(covariance))
    together = np.abs(white @ np.array([1, 1]) / np.sqrt(2))
    assert sorted(together.round(6)) == pytest.approx([np.sqrt(0.5)] * 2 + [1.0] * 4, abs=1e-6)


def falling(powers, top=0.0):
    """Values at both probes of tails that fall like r^(-power), one for each direction."""
    return np.concatenate([top - np.asarray(powers) * np.log(r) for r in certify.PROBES])


@pytest.mark.parametrize(("moving", "power"), [(1, 3.0), (2, 4.0), (3, 5.0)])
@pytest.mark.parametrize("which", [0, 1])
def test_variances_exist_jointly_above_a_power_that_grows_with_what_moves(moving, power, which):
    """∫ r² r^(-s) r^(k-1) dr is finite where s > 3 + (k - 1)."""
    directions = np.zeros((2, 3))
    directions[1 - which, 0] = SD[0]
    directions[which, :moving] = SD[:moving]
    for off, holds in ((1e-6, True), (-1e-6, False)):
        powers = np.full(2, 20.0)
        powers[which] = power + off
        found = certify.tails(falling(powers), directions, 0.0, SD, names=NAMES)
        assert (found.name, found.holds) == ("tails", holds)
        if not holds:
            assert all(name in found.sentence for name in NAMES[:moving])
            assert not any(f" {name}:" in found.sentence for name in NAMES[moving:])
    # a coordinate that moves by less than a tenth of an sd does not count
    directions[which, 2] = 0.09 * SD[2]
    if moving < 3:
        powers = np.full(2, 20.0)
        powers[which] = power + 0.1
        assert certify.tails(falling(powers), directions, 0.0, SD, names=NAMES).holds
        directions[which, 2] = 0.11 * SD[2]
        assert not certify.tails(falling(powers), directions, 0.0, SD, names=NAMES).holds


def test_a_tail_that_has_fallen_far_or_is_no_number():
    one = np.array([[1.0, 0.0, 0.0]])
    for fall, holds in ((200.0 + LEAST, True), (200.0, False)):
        assert certify.tails(np.full(2, -fall + 7.0), one, 7.0, np.ones(3), names=NAMES).holds == holds
    # where it falls slowly, the farther place says whether it has fallen far
    for shift, holds in ((1.0, True), (-2.0, False)):
        values = np.array([-198.0, -200.0]) - shift
        assert certify.tails(values, one, 0.0, np.ones(3), names=NAMES).holds == holds
    for far, holds in ((-np.inf, True), (np.nan, True), (0.0, False), (np.inf, False)):
        assert certify.tails(np.array([0.0, far]), one, 0.0, np.ones(3), names=NAMES).holds == holds
    assert certify.tails(np.array([-np.inf, -np.inf]), one, 0.0, np.ones(3), names=NAMES).holds


@pytest.mark.parametrize("which", [0, 1])
def test_mass_far_out_may_take_half_of_the_tolerance(which):
    factor = np.diag(SD)
    cast = SimpleNamespace(factor=factor, directions=np.array([[1.0, 0.0, 0.0], [0.0, 0.6, 0.8]]))
    for most, holds in ((0.025, True), (0.025 + LEAST, False)):
        missed, share = np.full((2, 4), 1e-4), np.full((2, 4), 0.1)
        missed[which, 2], share[which, 1] = most, 0.3
        found = certify.far_mass(cast, SimpleNamespace(missed=missed, share=share), 0.05, NAMES)
        assert (found.name, found.holds) == ("far mass", holds)
        assert "up to 30% of the variance along" in found.sentence
        assert ("along a lies" in found.sentence) == (which == 0)
        assert ("along c, b lies" in found.sentence) == (which == 1)


@pytest.mark.parametrize(("distance", "most"), [(0.5, 0.025), (1.0, 0.025), (4.0, 0.025 / 4)])
def test_undefined_draws_may_take_half_of_the_tolerance_from_a_variance(distance, most):
    undefined = np.array([False, True, False])
    for mass, holds in ((most - LEAST, True), (most + LEAST, False)):
        expected = np.array([0.5, mass, 0.5])
        found = certify.defined(undefined, expected, np.array([9.0, distance, 9.0]), 0.05)
        assert (found.name, found.holds) == ("numbers", holds)
        assert "at 1 of 3" in found.sentence
    assert certify.defined(np.zeros(3, bool), np.ones(3), np.ones(3), 0.05).holds


def test_a_mode_was_found_or_no_step_rises():
    def at(gradient, curvature=-1.0):
        return Derivatives(np.zeros(1), 0.0, np.array([gradient]), np.array([[curvature]]))

    cases = [
        (at(0.499), 9.0, True),  # arrived
        (at(0.501), 9.0, False),
        (at(0.0, 1.0), 9.0, False),  # a saddle
        (at(0.501), 0.05 - LEAST, True),
        (at(0.501), 0.05, False),
        (at(3.0, 1.0), 0.0, True),
        (None, 0.0, False),
    ]
    for best, gain, holds in cases:
        assert certify.mode(best, gain).holds == holds, (best, gain)


@pytest.mark.parametrize(
    ("check", "right", "wrong"),
    [
        (certify.one_mode, [1], [0, 2, 3]),
        (certify.explored, [0], [1, 5]),
        (certify.two_rounds, [2, 3], [0, 1]),
    ],
)
def test_counts(check, right, wrong):
    assert all(check(n).holds for n in right)
    assert not any(check(n).holds for n in wrong)


def test_rhat_between_quarters_is_its_formula():
    rng = np.random.default_rng(3)
    start, end = rng.normal(size=(2, 403))
    ranks = ndtri((rankdata(end) - 3 / 8) / (403 + 1 / 4))
    order = np.argsort(start)
    groups = [ranks[order[np.arange(403) * 4 // 403 == k]] for k in range(4)]
    between = np.var([g.mean() for g in groups], ddof=1)
    within = np.mean([np.var(g, ddof=1) for g in groups])
    assert certify._rhat(start, end) == pytest.approx(np.sqrt(1 + between / within), rel=1e-12)
    assert certify._rhat(start, np.ones(403)) == np.inf
    # equal starts keep their order, so that groups are of equal size
    assert np.isfinite(certify._rhat(np.zeros(403), end))


@pytest.mark.parametrize("which", [0, 1])
def test_rhat_of_the_worst_coordinate_at_its_limit(which, monkeypatch):
    rng = np.random.default_rng(4)
    starts, ends = rng.normal(size=(2, 400, 2))
    for value, holds in ((1.01 - LEAST, True), (1.01, False)):
        for kind in range(3):  # the coordinate, its fold, and its fold against where it began
            seen = iter([1.0] * (3 * which + kind) + [value] + [1.0] * 6)
            monkeypatch.setattr(certify, "_rhat", lambda a, b, seen=seen: next(seen))
            found = certify.forgotten(starts, ends, NAMES)
            assert (found.name, found.holds) == ("R-hat", holds)
            assert f"still differ in {NAMES[which]} " in found.sentence
    monkeypatch.undo()
    calls = []
    monkeypatch.setattr(certify, "_rhat", lambda a, b: calls.append((a, b)) or 1.0)
    certify.forgotten(starts, ends, NAMES)
    folded = [np.abs(x[:, 0] - np.median(x[:, 0])) for x in (starts, ends)]
    for got, wanted in zip(calls[:3], [(starts[:, 0], ends[:, 0]), folded, (starts[:, 0], folded[1])]):
        np.testing.assert_allclose(got, wanted)


def test_scores_are_judged_by_their_standard_errors():
    rng = np.random.default_rng(5)
    factor = np.array([[0.1, 0.0], [1.0, 3.0]])
    white = rng.standard_normal((4000, 2))
    draws = white @ factor.T
    covariance = np.cov(draws.T)
    slopes = -np.linalg.solve(covariance, (draws - draws.mean(0)).T).T
    assert certify.scores(draws, slopes, 0.05, NAMES).holds
    # in coordinates of unit covariance the first identity has error 1/√M, the second about √2/√M
    most = ndtri(1 - 0.01 / 8)
    lower = np.linalg.cholesky(covariance)
    for j, name in enumerate("ab"):
        away = np.zeros(2)
        away[j] = most / np.sqrt(4000) + 0.05 / 3  # which chains may be on their way yet
        for factor_of, holds in ((0.95, True), (1.05, False)):
            found = certify.scores(draws, slopes + np.linalg.solve(lower.T, factor_of * away), 0.05, NAMES)
            assert (found.name, found.holds) == ("scores", holds)
            assert holds or f"along {name}:" in found.sentence
    # what is not known to four times the tolerance says nothing
    short = slice(0, 500)
    tolerance = most * np.sqrt(1 / 500) / 4
    own = np.linalg.solve(np.cov(draws[short].T), (draws[short] - draws[short].mean(0)).T).T
    assert certify.scores(draws[short], -own, 1.2 * tolerance, NAMES).holds
    vague = certify.scores(draws[short], -own, 0.8 * tolerance, NAMES)
    assert (vague.name, vague.holds) == ("precision of scores", False)
    assert "is not known: a standard error of" in vague.sentence
    wrong = certify.scores(draws[short], -2 * own, 0.8 * tolerance, NAMES)
    assert (wrong.name, wrong.holds) == ("scores", False)
    assert not certify.scores(draws, np.full_like(slopes, np.nan), 0.05, NAMES).holds


def test_copies_of_a_draw_are_one_observation_of_the_scores():
    """The halves of the draws are off to both sides, so that all of them must count, and none twice."""
    draws = np.random.default_rng(6).standard_normal((4000, 2))
    slopes = -draws + np.where(np.arange(4000) < 2000, 0.5, -0.5)[:, None]
    whole = certify.scores(draws, slopes, 0.1, NAMES)
    twice = certify.scores(np.repeat(draws, 2, axis=0), np.repeat(slopes, 2, axis=0), 0.1, NAMES)
    assert whole.holds
    assert twice.holds
    assert whole.name == twice.name == "scores"
    assert not certify.scores(draws[:2000], slopes[:2000], 0.1, NAMES).holds  # the twin
    # of as many draws, copies know less
    few, many = np.repeat(draws[:300], 10, axis=0), draws[:3000]
    assert certify.scores(many, -many, 0.03, NAMES).name == "scores"
    assert certify.scores(few, -few, 0.03, NAMES).name == "precision of scores"


@pytest.mark.parametrize("length", [0.01, 1.0, 100.0])
def test_what_moves_along_a_tail_is_a_matter_of_proportion(length):
    """Parameters that move by more than a tenth of the one that moves most, however long a direction is."""
    for second, moving in ((0.09, 1), (0.11, 2)):
        directions = length * SD * np.array([[1.0, second, 0.0]])
        for power, holds in ((2 + moving - 0.01, False), (2 + moving + 0.01, True)):
            values = np.array([0.0, -power * np.log(10)])
            found = certify.tails(values, directions, 0.0, SD, names=NAMES)
            assert found.holds == holds
            assert ("along a, b:" in found.sentence) == (moving == 2)
            assert ("along a:" in found.sentence) == (moving == 1)


@pytest.mark.parametrize("length", [0.01, 1.0])
def test_mass_far_out_names_what_moves(length):
    rays = SimpleNamespace(
        factor=np.diag(SD), directions=length * np.array([[0.0, 1.0, 0.5], [1.0, 0.05, 0.0]])
    )
    for worst, named in ((0, "along b, c lies"), (1, "along a lies")):
        missed = np.zeros((2, 3))
        missed[worst, 1] = 1.0
        found = certify.far_mass(rays, SimpleNamespace(missed=missed, share=np.ones((2, 3))), 0.05, NAMES)
        assert not found.holds
        assert named in found.sentence


def exact_draws(count=400):
    """(M, 1) numbers with mean 0, variance 1 as the check has it, and their squares as they come."""
    z = np.sort(np.random.default_rng(0).standard_normal(count))
    z = (z - z[::-1]) / 2  # symmetric
    return (z / z.std(ddof=1))[:, None]


@pytest.mark.parametrize("sign", [1, -1])
@pytest.mark.parametrize("place", [0.0, 1e4])
def test_the_mean_gradient_may_be_off_by_its_standard_error(sign, place):
    z = exact_draws()
    most = ndtri(1 - 0.01 / 4)  # two-sided, two identities
    errors = z.std() / np.sqrt(len(z)), (z**2).std() / np.sqrt(len(z))
    for factor, holds in ((0.999, True), (1.001, False)):
        found = certify.scores(place + z, -z + sign * (factor * most * errors[0] + 0.1 / 3), 0.1, ["a"])
        assert found.holds == holds
        # an sd that is off by so much is twice as far off in its square; the error grows with the slope
        slope = (1 - sign * 2 * 0.1 / 3) / ((z**2).mean() + sign * factor * most * errors[1])
        assert certify.scores(place + z, -slope * z, 0.1, ["a"]).holds == holds
    # several parameters of different units and places
    other = np.random.default_rng(1).permutation(z)
    both = np.column_stack([z, 50 * other])
    slopes = -(both @ np.linalg.inv(np.cov(both.T)))
    assert certify.scores(both + np.array([place, -3 * place]), slopes, 0.1, ["a", "b"]).holds
    assert not certify.scores(both + np.array([place, -3 * place]), 1.5 * slopes, 0.1, ["a", "b"]).holds


def test_sds_must_be_known_as_well_as_means():
    """A square that is known to 2x tells the sd to x: it decides where tails are heavy."""
    z = exact_draws() ** 3
    z /= z.std(ddof=1)
    border = ndtri(1 - 0.01 / 4) * (z**2).std() / np.sqrt(len(z)) / 8
    for factor, name, holds in ((1.02, "scores", True), (0.98, "precision of scores", False)):
        found = certify.scores(z, -z, factor * border, ["a"])
        assert (found.name, found.holds) == (name, holds)


def test_chains_that_are_copies_count_as_many_in_means_of_gradients():
    z = exact_draws()
    draws = np.concatenate([z, z[:100]])  # of the lowest two each
    slopes = -(draws - draws.mean()) / draws.var(ddof=1)
    assert certify.scores(draws, slopes, 0.06, ["a"]).holds
    other = np.concatenate([z, z[-100:]])  # the twin: of the highest
    assert not certify.scores(other, np.concatenate([slopes[:400], slopes[300:400]]), 0.06, ["a"]).holds


def test_gradients_without_errors_are_judged_without_warnings():
    z = exact_draws()
    with np.errstate(all="raise"):
        assert not certify.scores(z, np.ones_like(z), 1.0, ["a"]).holds
        assert not certify.scores(z, np.full_like(z, np.nan), 1.0, ["a"]).holds


def test_equal_values_share_the_middle_of_their_ranks():
    assert certify._ranks(np.array([2.0, 7.0, 2.0, -1.0, 2.0, 7.0])).tolist() == [
        3.0,
        5.5,
        3.0,
        1.0,
        3.0,
        5.5,
    ]
    assert np.isnan(certify._ranks(np.array([1.0, np.nan, 2.0]))).all()


def test_no_more_than_all_of_the_posterior_is_said_to_be_missing():
    found = certify.defined(np.array([True, False]), np.array([1e9, 0.5]), np.ones(2), 0.05)
    assert not found.holds
    assert "about 100.0% of the posterior" in found.sentence


@pytest.mark.parametrize(("width", "holds"), [(1.0, True), (1e-3, False)])
def test_a_top_that_no_draw_was_near_withholds_the_certificate(width, holds):
    """Draws of N(0, I) with even weights; the top is that of a normal so wide that has all of the mass."""
    rng, precision = np.random.default_rng(0), np.eye(5) / width**2
    top = -5 * np.log(width) - 2.5 * np.log(2 * np.pi)
    best = Derivatives(np.zeros(5), top, np.zeros(5), -precision)
    draws, weights = rng.standard_normal((4000, 5)), np.full(4000, 1 / 4000)
    assert certify.bulk(best, draws, weights, 0.0).holds == holds
    assert certify.bulk(best, draws, weights, 5.0).holds  # the top holds little of so much mass
    assert certify.bulk(None, draws, weights, 0.0).holds


@pytest.mark.parametrize("dim", [1, 8, 40])
def test_around_the_top_is_where_nearly_all_of_a_normal_lies(dim):
    """Within four sds of the squared length of its draws; half of what is expected there must be there."""
    flat = -dim / 2 * np.log(2 * np.pi)
    best = Derivatives(np.ones(dim), flat, np.zeros(dim), -np.eye(dim))
    reach = np.sqrt(dim + 4 * np.sqrt(2 * dim))
    draws = np.ones((2, dim))
    draws[:, 0] += np.array([1 - LEAST, 1 + LEAST]) * reach  # one just inside, one just outside
    for inside, holds in ((0.5, True), (0.491, True), (0.489, False), (0.0, False)):
        found = certify.bulk(best, draws, np.array([inside, 1 - inside]), 0.0)
        assert (found.name, found.holds) == ("bulk", holds)
    for mass, holds in ((0.019, True), (0.021, False)):  # of which this is around the top
        assert certify.bulk(best, draws, np.array([0.0, 1.0]), -np.log(mass)).holds == holds


def test_chains_that_are_no_numbers_have_forgotten_nothing():
    rng = np.random.default_rng(8)
    starts, ends = rng.normal(size=(2, 400, 1))
    assert np.isfinite(certify._rhat(starts[:, 0], ends[:, 0]))
    for place in (0, 399):
        broken = ends.copy()
        broken[place] = np.nan
        assert certify._rhat(starts[:, 0], broken[:, 0]) == np.inf
        assert not certify.forgotten(starts, broken, NAMES).holds
