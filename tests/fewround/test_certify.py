"""Every condition of *reached* by itself: made-up draws to which exactly one of them must object."""

import numpy as np
import pytest

from fald.fewround import certify, rays, weights
from fald.fewround.target import Derivatives
from fald.fewround.weights import Moments, Precision, Smoothed, distinct

NAMES, TOLERANCE, COUNT = ["a", "b"], 0.05, 8192
FLAT = np.full(COUNT, 1 / COUNT)
RNG = np.random.default_rng(0)
DRAWS = RNG.standard_normal((COUNT, 2))


def gaussian_rays(far=0.0, width=10.0, weights=0.0):
    """Rays through a normal with so much of its mass in a wide one, and the log weights of draws there."""
    cast = rays.cast(np.zeros(2), np.eye(2), np.zeros((0, 2)), np.random.default_rng(1))
    narrow, r = np.log1p(-far) - rays.RADII**2 / 2, rays.RADII
    wide = np.log(max(far, 1e-300)) - 2 * np.log(width) - (r / width) ** 2 / 2
    values = np.tile(np.logaddexp(narrow, wide), (len(cast.directions), 1))
    return cast, rays.far(values, np.full_like(values, weights), 2, count=COUNT, quantile=certify.quantile(2))


def tails(power):
    """Values at the probes of a density that falls like a power of the distance, along two directions."""
    return np.concatenate([np.full(2, -power * np.log(distance)) for distance in certify.PROBES])


def top(gradient=0.0, curvature=1.0):
    return Derivatives(np.zeros(2), 0.0, np.array([gradient, 0.0]), -curvature * np.eye(2))


GOOD = {
    "newest": Smoothed(FLAT, 0.3, 5000.0),
    "pooled": Smoothed(FLAT, 0.3, 5000.0),
    "count": COUNT,
    "precision": Precision(np.full(2, 0.01), np.full(2, 0.01), np.full(2, 0.3)),
    "moments": Moments(np.zeros(2), np.eye(2)),
    "all_moments": Moments(np.zeros(2), np.eye(2)),
    "tails": tails(400.0),
    "undefined": np.zeros(COUNT, bool),
    "best": top(),
    "highest": 0.0,
    "gain": 0.0,
    "modes": 1,
    "under_way": 0,
    "batches": 2,
    "rays": gaussian_rays(),
    "starts": DRAWS,
    "ends": RNG.standard_normal((COUNT, 2)),
    "slopes": -DRAWS,
}


def judged(**changes):
    """Names of the conditions that object."""
    x = {**GOOD, **changes}
    distance = np.max(DRAWS**2, axis=1)
    checks = [
        certify.khat(x["newest"], x["count"]),
        certify.pooled_khat(x["pooled"]),
        certify.means_precise(x["precision"], TOLERANCE, NAMES),
        certify.sds_precise(x["precision"], TOLERANCE, NAMES),
        certify.moments_exist(x["precision"], NAMES),
        certify.agreement(x["moments"], x["all_moments"], TOLERANCE, NAMES),
        certify.tails(x["tails"], np.eye(2), 0.0, np.ones(2), names=NAMES),
        certify.far_mass(*x["rays"], TOLERANCE, NAMES),
        certify.defined(x["undefined"], FLAT, distance, TOLERANCE),
        certify.mode(x["best"], x["gain"]),
        certify.funnel(x["best"], x["highest"]),
        certify.one_mode(x["modes"]),
        certify.explored(x["under_way"]),
        certify.two_rounds(x["batches"]),
        certify.forgotten(x["starts"], x["ends"], NAMES),
        certify.scores(DRAWS, x["slopes"], TOLERANCE, NAMES),
    ]
    assert all(check.sentence for check in checks)
    return [check.name for check in checks if not check.holds]


def precision(**changes):
    return GOOD["precision"]._replace(**{name: np.array(value) for name, value in changes.items()})


def test_nobody_objects_to_what_is_good():
    assert judged() == []


WRONG = {
    "k-hat": [{"newest": Smoothed(FLAT, 0.71, 5000.0)}, {"newest": Smoothed(FLAT, 0.65, 90.0), "count": 100}],
    "pooled k-hat": [{"pooled": Smoothed(FLAT, 0.71, 5000.0)}],
    "precision of means": [{"precision": precision(mean=[0.01, 0.05 / 2.4])}],
    "precision of sds": [{"precision": precision(sd=[0.05 / 2.4, 0.01])}],
    "moments": [{"precision": precision(khat=[0.3, 0.71])}],
    "agreement": [
        {"all_moments": Moments(np.array([0.0, 0.051]), np.eye(2))},
        {"all_moments": Moments(np.zeros(2), np.diag([1.0, 1.052**2]))},
    ],
    "tails": [{"tails": tails(2.9)}, {"tails": np.zeros(4)}],
    "far mass": [{"rays": gaussian_rays(far=0.01, weights=8.0)}],
    "numbers": [{"undefined": DRAWS[:, 0] > 2.0}],
    "mode": [
        {"best": None},
        {"best": top(gradient=0.6), "gain": 0.1},
        {"best": top(curvature=-1.0), "gain": 0.1},
    ],
    "funnel": [{"highest": 0.06}, {"highest": np.inf}],
    "one mode": [{"modes": 2}],
    "explorers": [{"under_way": 1}],
    "rounds": [{"batches": 1}],
    "R-hat": [
        {"ends": 0.2 * DRAWS + np.sqrt(0.96) * GOOD["ends"]},
        {"ends": GOOD["ends"] * np.where(np.abs(DRAWS) > 0.67, 1.3, 0.7)},
    ],
    "scores": [{"slopes": -(DRAWS + 0.06)}, {"slopes": -DRAWS / 1.08}, {"slopes": -(DRAWS**5)}],
}


@pytest.mark.parametrize(
    ("name", "which"), [(name, i) for name, cases in WRONG.items() for i in range(len(cases))]
)
def test_exactly_one_condition_objects(name, which):
    assert judged(**WRONG[name][which]) == [name]


BORDERLINE = {
    "k-hat just below its limit": {"newest": Smoothed(FLAT, 0.69, 5000.0)},
    "nearly equal weights with any tail": {"pooled": Smoothed(FLAT, 0.9, 0.8 * COUNT)},
    "errors within the tolerance for two parameters": {"precision": precision(mean=[0.05 / 2.6, 0.01])},
    "variances that exist": {"tails": tails(3.1)},
    "a tail that has fallen so far that it is of no consequence": {"tails": np.full(4, -1000.0)},
    "far mass that draws have sampled": {"rays": gaussian_rays(far=0.01, weights=-3.0)},
    "far mass that is little": {"rays": gaussian_rays(far=1e-5, weights=50.0)},
    "no number where nothing is": {"undefined": np.max(np.abs(DRAWS), axis=1) > 3.9},
    "an edge or a kink, where no step rises": {"best": top(gradient=3.0), "gain": 0.0},
}


@pytest.mark.parametrize("case", list(BORDERLINE))
def test_nobody_objects_to(case):
    assert judged(**BORDERLINE[case]) == []


def test_more_coordinates_need_more_precision():
    many = Precision(np.full(50, 0.05 / 2.6), np.full(50, 0.01), np.zeros(50))
    assert not certify.means_precise(many, TOLERANCE, [f"x{i}" for i in range(50)]).holds


def test_missed_far_mass_asks_for_cores_as_wide_as_it():
    cast, found = gaussian_rays(far=0.01, width=10.0, weights=8.0)
    wide = rays.wide_cores(cast, found, TOLERANCE / 2)
    assert wide is not None
    widest = np.sqrt(np.max(np.sum(wide.factors**2, axis=2), axis=1))
    assert np.all((widest > 5) & (widest < 20))
    proposal = rays.widened(rays.Proposal(np.ones(1), np.zeros((1, 2)), np.eye(2)[None]), wide)
    assert proposal.weights.sum() == pytest.approx(1)
    assert np.array_equal(proposal.factors[0], np.eye(2))
    # the twin: what is sampled needs none
    assert rays.wide_cores(*gaussian_rays(far=0.01, weights=-3.0), TOLERANCE / 2) is None


@pytest.mark.parametrize(("end", "holds"), [([-1e30, -1e29], True), ([-10.0, -9.0], False)])
def test_a_tail_that_rises_at_its_end_counts_by_its_height_there(end, holds):
    """A likelihood of survival times falls by 10³⁰ nats and rises by 10²⁹ again as its shape goes to zero."""
    cast = rays.cast(np.zeros(1), np.eye(1), np.zeros((0, 1)), np.random.default_rng(1))
    values = np.tile(-(rays.RADII**2) / 2, (len(cast.directions), 1))
    values[:, -2:] = end
    found = rays.far(values, values + 30.0, 1, count=COUNT, quantile=certify.quantile(1))
    assert certify.far_mass(cast, found, TOLERANCE, NAMES[:1]).holds == holds


@pytest.mark.parametrize(("degrees", "holds"), [(2.2, False), (30.0, True)])
def test_what_a_power_tail_has_beyond_all_rays_counts(degrees, holds):
    cast = rays.cast(np.zeros(1), np.eye(1), np.zeros((0, 1)), np.random.default_rng(1))
    values = np.tile(-(degrees + 1) / 2 * np.log1p(rays.RADII**2 / degrees), (len(cast.directions), 1))
    # along the rays themselves the draws could not be better
    found = rays.far(values, np.full_like(values, -30.0), 1, count=COUNT, quantile=certify.quantile(1))
    assert certify.far_mass(cast, found, TOLERANCE, ["a"]).holds is holds


def test_copies_of_a_chain_that_have_not_parted_are_one_draw():
    draws = np.repeat(np.random.default_rng(2).standard_normal((1024, 2)), 25, axis=0)
    # the mean gradient of 1,024 draws is off by three or four standard errors of 25,600
    assert certify.scores(draws, -draws, TOLERANCE, ["a", "b"]).holds
    # the twin: copies that differ by rounding count as draws of their own
    apart = draws + 1e-9 * np.arange(len(draws))[:, None]
    assert not certify.scores(apart, -apart, TOLERANCE, ["a", "b"]).holds
    # and what is true of the draws is not hidden by counting them once
    assert not certify.scores(draws, -draws - 0.2, TOLERANCE, ["a", "b"]).holds
    index, shares = distinct(draws)
    np.testing.assert_allclose(weights.precision(draws[index], shares).mean, 1 / np.sqrt(1024), rtol=0.1)


def test_scores_of_strongly_correlated_parameters_are_known_well_enough():
    rng = np.random.default_rng(0)
    covariance = np.array([[1.0, 0.9995], [0.9995, 1.0]])
    draws = rng.multivariate_normal(np.zeros(2), covariance, 6400)
    slopes = -np.linalg.solve(covariance, draws.T).T
    assert certify.scores(draws, slopes, TOLERANCE, ["a", "b"]).holds
    # the twin: chains that sit a tenth of an sd off, along the direction in which they hardly spread
    off = 0.1 * np.sqrt(1 - 0.9995) * np.array([1.0, -1.0]) / np.sqrt(2)
    assert not certify.scores(
        draws + off, slopes - np.linalg.solve(covariance, off), TOLERANCE, ["a", "b"]
    ).holds
