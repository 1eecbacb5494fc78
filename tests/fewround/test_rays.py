"""The look at everything far away, by hand: directions, sums along rays, and the wide cores that follow."""

import numpy as np
import pytest
from scipy.special import gammaln

from fald.fewround import rays
from fald.fewround.proposal import Proposal
from fald.fewround.rays import (
    RADII,
    Far,
    Rays,
    cast,
    continued,
    families,
    far,
    joined,
    tops,
    wide_cores,
    widened,
)  # fmt: skip

R = len(RADII)
COVARIANCE = np.array([[4.0, 1.2, 0.0], [1.2, 1.0, 0.1], [0.0, 0.1, 0.25]])
CENTRE = np.array([1.0, -2.0, 3.0])


def test_families_a_ray_may_stand_for():
    assert [families(d) for d in (1, 2, 3, 4, 10, 121)] == [
        [1], [1, 2], [1, 2, 3], [1, 2, 4], [1, 2, 5, 10], [1, 2, 60, 121],
    ]  # fmt: skip


def test_radii_reach_far():
    assert (RADII[0], R) == (0.5, 32)
    assert RADII[-1] == pytest.approx(1000.0)
    np.testing.assert_allclose(np.diff(np.log(RADII)), np.log(2000) / 31)


# -- directions ---------------------------------------------------------------------------------------------


def has(directions, way):
    """Whether one of some directions leads along a way, forwards; nearer ones count as one."""
    return np.max(directions @ (way / np.linalg.norm(way))) > 0.999


def test_rays_go_along_coordinates_axes_and_suspicions_and_at_random_both_ways():
    thin = np.array([[1.0, 1.0, 1.0]])
    found = cast(CENTRE, COVARIANCE, thin, np.random.default_rng(0))
    np.testing.assert_allclose(found.factor @ found.factor.T, COVARIANCE, atol=1e-12)
    assert np.array_equal(found.factor, np.tril(found.factor))
    np.testing.assert_array_equal(found.centre, CENTRE)
    np.testing.assert_allclose(np.linalg.norm(found.directions, axis=1), 1.0)
    special, others = found.directions[: found.special], found.directions[found.special :]
    sd = np.sqrt(np.diag(COVARIANCE))
    axes = np.linalg.eigh(COVARIANCE / np.outer(sd, sd))[1].T * sd  # of the correlations, in parameters
    ways = np.linalg.solve(found.factor, np.concatenate([np.eye(3), COVARIANCE, axes, thin]).T).T
    for way in ways:
        assert has(special, way)
        assert has(special, -way)
    half = found.special // 2
    np.testing.assert_array_equal(special[:half], -special[half:])
    drawn = np.random.default_rng(0).standard_normal((24, 3))
    assert 40 <= len(others) <= 48  # but for those that are near to another
    np.testing.assert_array_equal(others[: len(others) // 2], -others[len(others) // 2 :])
    for way in drawn:
        assert has(found.directions, way)


def test_equal_directions_are_taken_once():
    found = cast(np.zeros(3), np.eye(3), np.zeros((0, 3)), np.random.default_rng(1))
    assert found.special == 6
    assert len(found.directions) == 54
    one = cast(np.zeros(1), np.eye(1), np.zeros((0, 1)), np.random.default_rng(1))
    assert (one.directions.tolist(), one.special) == ([[1.0], [-1.0]], 2)
    for cosine, more in ((0.9985, 2), (0.9992, 0), (-0.9992, 0)):
        thin = np.array([[cosine, np.sqrt(1 - cosine**2), 0.0]])
        assert cast(np.zeros(3), np.eye(3), thin, np.random.default_rng(1)).special == 6 + more


def test_positions_lie_on_the_rays():
    factor = np.array([[2.0, 0.0], [1.0, 3.0]])
    found = Rays(np.array([5.0, 7.0]), factor, np.array([[1.0, 0.0], [0.0, -1.0]]), 2).positions
    assert found.shape == (2 * R, 2)
    np.testing.assert_allclose(found[:R], np.array([5.0, 7.0]) + RADII[:, None] * [2.0, 1.0])
    np.testing.assert_allclose(found[R:], np.array([5.0, 7.0]) + RADII[:, None] * [0.0, -3.0])


# -- what lies far out --------------------------------------------------------------------------------------


def test_sums_go_on_beyond_the_last_place():
    falling = np.log(0.25) * np.arange(4.0)
    np.testing.assert_allclose(rays._summed(falling[None]), np.log(4 / 3))
    # what rises or stays at the end is taken to stay nearly for ever
    for last in (0.0, 1.0):
        np.testing.assert_allclose(rays._summed(np.array([[0.0, 0.0, last]])), last + np.log(1e12), rtol=0.01)
    nothing = np.array([[0.0, 0.0, -np.inf], [0.0, -np.inf, -np.inf]])
    with np.errstate(invalid="ignore"):
        np.testing.assert_allclose(rays._summed(nothing), [np.log(2.0), 0.0])


def by_hand(values, log_weights, k, count, quantile):
    """Share and error of one ray and family, by plain sums over the geometric grid; nothing at its end."""
    density, w = np.exp(values), np.exp(log_weights)
    out = np.sqrt(k + 2) + 4 < RADII
    second = np.sum(density * RADII ** (k + 2))
    share = np.sum((density * RADII ** (k + 2))[out]) / second
    noise = np.sum((density * w * RADII ** (k + 4))[out]) * np.sum(density * RADII**k) / second**2
    return share, quantile / 2 * np.sqrt(noise / count)


@pytest.mark.parametrize("dim", [1, 2, 7])
def test_share_and_error_are_those_of_plain_sums(dim):
    rng = np.random.default_rng(dim)
    values = -0.5 * np.log1p(RADII**2) * (dim + 2 + rng.uniform(0, 2, (4, 1)))
    values[:, 26:] = -1e5 * np.arange(1, 7)  # beyond all that counts
    weights = rng.normal(size=(4, R))
    found = far(values, weights, dim, count=500, quantile=2.5)
    assert found.share.shape == found.error.shape == found.width.shape == (4, len(families(dim)))
    for i in range(4):
        for j, k in enumerate(families(dim)):
            share, error = by_hand(values[i], weights[i], k, 500, 2.5)
            np.testing.assert_allclose([found.share[i, j], found.error[i, j]], [share, error], rtol=1e-6)
            out = np.sqrt(k + 2) + 4 < RADII
            peak = RADII[out][np.argmax((values[i] + (k + 2) * np.log(RADII))[out])]
            assert found.width[i, j] == pytest.approx(max(peak / np.sqrt(k + 1), 1.5))
    assert found.share.max() > 0.05  # the twin: a test of zeros tests nothing


def test_widths_are_those_of_a_gaussian_with_the_same_peak():
    """The second moment of a Gaussian of width s peaks at s·√(k + 1) along its ray."""
    for width in (20.0, 60.0):
        values = -((RADII / width) ** 2) / 2
        found = far(values[None], np.zeros((1, R)), 2, count=100, quantile=2.0)
        for j, k in enumerate((1, 2)):
            assert found.width[0, j] == pytest.approx(width * np.sqrt((k + 2) / (k + 1)), rel=0.15)
    narrow = far(-(RADII[None] ** 2), np.zeros((1, R)), 2, count=100, quantile=2.0)
    assert (narrow.width >= 1.5).all()


def test_nothing_anywhere_and_weights_beyond_all_numbers():
    empty = far(np.full((1, R), -np.inf), np.zeros((1, R)), 2, count=100, quantile=2.0)
    assert (empty.share == 0).all()
    assert (empty.error == 0).all()
    values = np.where(RADII < 900, -np.log(RADII) * 6, -1e6)[None]
    found = far(values, np.full((1, R), 5000.0), 1, count=100, quantile=2.0)
    np.testing.assert_allclose(found.error, np.exp(300.0) / 10)
    # where the density of draws is not known, all that lies far out is missed, whatever has no density
    values[0, -2:] = -np.inf
    unknown = far(values, np.full((1, R), np.inf), 1, count=100, quantile=2.0)
    np.testing.assert_allclose(unknown.missed, unknown.share / 2)
    assert unknown.share.max() > 1e-4


def test_what_may_be_missed_is_the_less_of_both():
    found = Far(np.array([[0.2, 0.9]]), np.array([[0.3, 0.1]]), np.ones((1, 2)))
    assert found.missed.tolist() == [[0.1, 0.1]]


# -- wide cores ---------------------------------------------------------------------------------------------


def looked(directions, special, missed, width=3.0):
    """Rays and what was found along them; ``missed`` by direction in the first family, or by family."""
    directions = np.asarray(directions, float)
    directions = directions / np.linalg.norm(directions, axis=1, keepdims=True)
    d = directions.shape[1]
    shape = (len(directions), len(families(d)))
    off = np.zeros(shape)
    given = np.asarray(missed, float).reshape(len(directions), -1)
    off[:, : given.shape[1]] = given
    wide = np.broadcast_to(np.asarray(width, float), shape)
    factor = np.diag(np.arange(1.0, d + 1))
    return Rays(np.arange(d) * 1.0, factor, directions, special), Far(2 * off, off, wide)


def spreads(found, rays_):
    """Covariances of the cores in the coordinates of the rays."""
    inverse = np.linalg.inv(rays_.factor)
    return [inverse @ f @ f.T @ inverse.T for f in found.factors]


E = np.eye(3)


def test_no_core_where_nothing_is_missed():
    assert wide_cores(*looked(E, 3, [0.05, 0.05, 0.05]), limit=0.05) is None
    assert wide_cores(*looked(E, 3, [0.05, 0.0501, 0.05]), limit=0.05) is not None


def test_a_core_is_wide_along_the_direction_that_showed_it():
    rays_, found = looked([*E, *-E], 6, [0, 0.2, 0, 0, 0.1, 0], width=3.0)
    cores = wide_cores(rays_, found, 0.05)
    np.testing.assert_allclose(spreads(cores, rays_), [np.diag([1.0, 9.0, 1.0])])
    assert cores.weights.tolist() == [1.0]
    assert cores.means.tolist() == [[0.0, 1.0, 2.0]]


def test_the_width_is_the_largest_of_the_families_that_missed():
    rays_, found = looked(E, 3, [[0, 0, 0], [0.1, 0.2, 0], [0, 0, 0]])
    found = found._replace(width=np.array([[9.0] * 3, [2.0, 4.0, 8.0], [9.0] * 3]))
    np.testing.assert_allclose(spreads(wide_cores(rays_, found, 0.05), rays_), [np.diag([1.0, 16.0, 1.0])])


def test_several_directions_have_a_core_each_and_one_together():
    rays_, found = looked(E, 3, [0.1, 0.0, 0.2], width=[[2.0] * 3, [9.0] * 3, [3.0] * 3])
    cores = wide_cores(rays_, found, 0.05)
    expected = [np.diag([1.0, 1.0, 9.0]), np.diag([4.0, 1.0, 1.0]), np.diag([4.0, 1.0, 9.0])]
    np.testing.assert_allclose(spreads(cores, rays_), expected, atol=1e-12)  # the worst first
    np.testing.assert_allclose(cores.weights, 1 / 3)
    assert cores.means.shape == (3, 3)


@pytest.mark.parametrize(("cosine", "count"), [(0.89, 3), (0.91, 1), (-0.91, 1)])
def test_directions_that_are_alike_count_once(cosine, count):
    near = [cosine, np.sqrt(1 - cosine**2), 0.0]
    rays_, found = looked([E[0], near], 2, [0.2, 0.1])
    assert len(wide_cores(rays_, found, 0.05).weights) == count


def test_of_many_directions_the_eight_worst_have_cores():
    directions = np.eye(10)
    missed = 0.1 + 0.01 * np.arange(10)
    rays_, found = looked(directions, 10, np.repeat(missed[:, None], 4, axis=1))
    cores = spreads(wide_cores(rays_, found, 0.05), rays_)
    assert len(cores) == 9 + 1  # eight, all of them together, and one wide everywhere
    assert [int(np.argmax(np.diag(core))) for core in cores[:8]] == [9, 8, 7, 6, 5, 4, 3, 2]
    np.testing.assert_allclose(np.diag(cores[8]), [1, 1] + [9] * 8)
    np.testing.assert_allclose(cores[9], 9 * np.eye(10), atol=1e-12)


@pytest.mark.parametrize(("bad", "everywhere"), [(1, False), (2, True)])
def test_what_random_directions_show_is_everywhere(bad, everywhere):
    """More than a fifth of them, in the family of all dimensions."""
    rng = np.random.default_rng(0)
    directions = np.concatenate([E, rng.normal(size=(5, 3))])
    missed = np.zeros((8, 3))
    missed[0, 0] = 0.2
    missed[3 : 3 + bad, 2] = 0.2
    widths = np.full((8, 3), 3.0)
    widths[3:5, 2] = 4.0, 6.0
    widths[5:, 2] = 50.0  # of directions that missed nothing
    rays_, found = looked(directions, 3, missed)
    cores = spreads(wide_cores(rays_, found._replace(width=widths), 0.05), rays_)
    expected = [np.diag([9.0, 1.0, 1.0])] + [25 * np.eye(3)] * everywhere
    np.testing.assert_allclose(cores, expected, atol=1e-12)


def test_without_random_directions_all_of_them_tell():
    rays_, found = looked(E, 3, [[0.2] * 3, [0.2] * 3, [0.0] * 3], width=[[3.0] * 3, [5.0] * 3, [50.0] * 3])
    cores = spreads(wide_cores(rays_, found, 0.05), rays_)
    np.testing.assert_allclose(cores[-1], 16 * np.eye(3), atol=1e-12)
    assert len(cores) == 4
    # one parameter has no other directions
    rays_, found = looked([[1.0], [-1.0]], 2, [0.2, 0.2])
    np.testing.assert_allclose(spreads(wide_cores(rays_, found, 0.05), rays_), [[[9.0]]])


def test_few_random_directions_alone_have_one_core():
    directions = np.concatenate([E, np.eye(3)[::-1] + 0.3, -np.eye(3)[::-1] + 0.3, E + 0.1])
    missed = np.zeros((12, 3))
    missed[4, 0], missed[5, 1] = 0.1, 0.3
    widths = np.full((12, 3), 9.0)
    widths[5] = 7.0, 2.0, 7.0
    rays_, found = looked(directions, 3, missed)
    (core,) = spreads(wide_cores(rays_, found._replace(width=widths), 0.05), rays_)
    u = rays_.directions[5]
    np.testing.assert_allclose(core, np.eye(3) + 3 * np.outer(u, u), atol=1e-12)
    # and rays without any chosen direction
    rays_, found = looked(directions, 0, missed)
    (core,) = spreads(wide_cores(rays_, found._replace(width=widths), 0.05), rays_)
    np.testing.assert_allclose(core, np.eye(3) + 3 * np.outer(u, u), atol=1e-12)


def cores_of(count, mark):
    return Proposal(
        np.full(count, 1 / count), np.full((count, 2), mark), np.repeat(np.eye(2)[None] * mark, count, 0)
    )


def test_the_newer_cores_come_first_and_the_oldest_are_forgotten():
    assert joined(None, None) is None
    one = cores_of(5, 1.0)
    assert joined(one, None) is one
    assert joined(None, one) is one
    both = joined(one, cores_of(4, 2.0))
    assert both.means[:, 0].tolist() == [2.0] * 4 + [1.0] * 5
    assert both.factors[:, 1, 1].tolist() == [2.0] * 4 + [1.0] * 5
    np.testing.assert_allclose(both.weights, 1 / 9)
    many = joined(cores_of(8, 1.0), cores_of(7, 2.0))
    assert many.means[:, 0].tolist() == [2.0] * 7 + [1.0] * 5
    np.testing.assert_allclose(many.weights, 1 / 12)


def test_wide_cores_take_three_tenths_of_a_proposal():
    base = cores_of(2, 1.0)
    assert widened(base, None) is base
    found = widened(base, cores_of(3, 2.0))
    np.testing.assert_allclose(found.weights, [0.35] * 2 + [0.1] * 3)
    assert found.means[:, 0].tolist() == [1.0] * 2 + [2.0] * 3
    assert found.factors[:, 0, 0].tolist() == [1.0] * 2 + [2.0] * 3


def test_the_top_beyond_the_deepest_valley():
    level = np.full((3, R), -9.0)
    level[0, [0, 5, 9]] = 0.0, -4.0, -1.0  # two hills behind the first: the higher one, beyond the low place
    level[1] = -np.arange(R)  # falls all the way: its own beginning
    level[2, :3] = 0.0, -np.inf, -2.0
    level[2, 3:] = -np.inf
    assert (tops(level, np.array([0, 1, 2])) - R * np.arange(3)).tolist() == [9, 0, 2]
    assert tops(level, np.array([2])).tolist() == [2 * R + 2]
    assert tops(level, np.array([], int)).dtype.kind == "i"


# -- what is but rounding -----------------------------------------------------------------------------------


def test_twins_lie_hard_beside_the_places():
    found = cast(CENTRE, COVARIANCE, np.zeros((0, 3)), np.random.default_rng(0), twins=True)
    plain = cast(CENTRE, COVARIANCE, np.zeros((0, 3)), np.random.default_rng(0))
    count = len(plain.directions) * R
    assert (len(plain.positions), len(found.positions)) == (count, 3 * count)
    np.testing.assert_array_equal(found.positions[:count], plain.positions)
    for i, shift in ((1, 1e-6), (2, -1.7e-6)):
        apart = found.positions[i * count : (i + 1) * count] - found.positions[:count]
        np.testing.assert_allclose(apart, shift * (plain.positions - CENTRE), rtol=1e-3, atol=1e-12)


def test_what_lies_beyond_rounding_is_not_known_and_steep_places_are():
    line = Rays(np.zeros(1), np.eye(1), np.array([[1.0], [-1.0]]), 2, twins=True)
    three = np.zeros((3, 2, R))
    three[:, 0, 5:] = -1000.0
    three[1, 0, 7] += 10.9  # a hundredth of the depth, and one nat
    three[2, 1, 9] = 1.1
    found = line.levels(three.ravel())
    np.testing.assert_array_equal(found[0], three[0, 0])
    assert np.isneginf(found[1, 9:]).all()
    assert (found[1, :9] == 0).all()
    three[1, 0, 7] += 0.2
    assert np.isneginf(line.levels(three.ravel())[0, 7:]).all()
    assert np.isfinite(Rays(*line[:4]).levels(three[0].ravel())).all()


def counted(log_r):
    """Log pmf of a negative binomial as it is usually written, rounding beyond r = 10^12; and a prior."""
    r, y = np.exp(log_r), 40.0
    both = np.logaddexp(3.0, log_r)
    pmf = gammaln(y + r) - gammaln(r) - gammaln(y + 1) + r * (log_r - both) + y * (3.0 - both)
    return 200 * pmf - log_r**2 / 8


def test_rounding_is_not_taken_for_mass():
    """A rise of hundreds of nats at log r = 37 is rounding; the same rise of a smooth density is mass."""

    def share(value_fn, twins):
        """How often of 201 times far mass was seen."""
        seen = 0
        for centre in np.linspace(3.9, 4.1, 201):
            line = Rays(np.array([centre]), 0.25 * np.eye(1), np.ones((1, 1)), 1, twins=twins)
            levels = line.levels(value_fn(line.positions[:, 0]))
            found = far(levels, np.full(levels.shape, np.inf), 1, count=4096, quantile=2.0)
            seen += found.share.max() > 1e-6
        return seen

    def smooth(log_r):
        real = np.logaddexp(counted(np.minimum(log_r, 20.0)), -1e3 * (log_r / 36 - 1) ** 2 + 500)
        return real - log_r**2 / 8

    assert np.max(counted(np.linspace(25, 40, 2000))) > counted(4.0) + 100
    assert share(counted, twins=False) > 30
    assert share(counted, twins=True) <= 6  # where the one place before the highest looks sound by chance
    assert share(smooth, twins=True) == 201


# -- where values are not numbers ---------------------------------------------------------------------------


def beyond(log_density, border, dim=3):
    """What may lie where the values of a density by its radius are not numbers, from a border on."""
    values = np.tile(log_density(RADII), (2, 1))
    undefined = np.array([border < RADII, np.zeros(R, bool)])
    return rays.unknown(np.where(undefined, -np.inf, values), undefined, dim), undefined


def slab(r, share=0.03, width=15.0, dim=3):
    wide = np.log(share) - dim * np.log(width) - (r / width) ** 2 / 2
    return np.logaddexp(np.log1p(-share) - r**2 / 2, wide)


def test_what_may_lie_where_values_are_not_numbers():
    found, _ = beyond(slab, 8.0)
    assert found.missed[0].max() > 0.3  # nearly all of the variance lies in the slab
    assert found.missed[1].max() == 0.0  # values are numbers along the other ray
    # a Gaussian has nothing there, wherever its values end, and a tail that rises a little nothing more
    for border in (0.9, 3.0, 8.0):
        assert beyond(lambda r: -(r**2) / 2, border)[0].missed.max() < 1e-4
    assert beyond(lambda r: np.where(r > 7, -1e6 + r, -(r**2) / 2), 9.0)[0].missed.max() < 1e-4
    # no less than where all values are numbers
    full = far(np.tile(slab(RADII), (2, 1)), np.zeros((2, R)), 3, count=100, quantile=2.0).share[0]
    assert np.all(found.share[0] > full)


def test_values_are_continued_only_from_numbers():
    level = -(RADII[None] ** 2) / 2
    np.testing.assert_allclose(continued(level, RADII[None] > 6), level)
    early = RADII[None] > 0.7
    np.testing.assert_array_equal(continued(level, early), level)  # two numbers are too few
    edge = np.where(RADII > 4, -np.inf, level)
    np.testing.assert_array_equal(continued(edge, RADII[None] > 10), edge)  # no density is a number
