"""The parts of the few-round methods, each against something known."""

from dataclasses import replace

import jax.numpy as jnp
import numpy as np
import pytest
from scipy import stats

import fald
from fald.calculus.sums import gradients, hessians, log_likelihoods, make_site
from fald.core.errors import DataError
from fald.fewround import certify, exchange, explorers, importance, proposal, site, weights
from fald.fewround.climbers import Climbers, _round_hills
from fald.fewround.mixture import fit_mixture
from fald.fewround.proposal import Proposal
from fald.fewround.search import DrawBatch, Search
from fald.fewround.sobol import scrambled
from fald.fewround.target import Derivatives, Target
from helpers import federation, linear_model


def two_cores(d=3):
    rng = np.random.default_rng(0)
    a = rng.normal(size=(d, d))
    factors = np.stack([proposal.cholesky(a @ a.T + np.eye(d)), np.sqrt(2) * np.eye(d)])
    return Proposal(np.array([0.6, 0.4]), rng.normal(size=(2, d)), factors)


@pytest.mark.parametrize(("count", "dim"), [(1, 1), (2, 3), (7, 5), (1000, 8), (300, 501)])
@pytest.mark.filterwarnings("ignore:The balance properties")
def test_points_are_those_of_scipy_to_the_last_bit(count, dim):
    ours = scrambled(count, dim, np.random.Generator(np.random.Philox([5, 2])))
    theirs = stats.qmc.Sobol(dim, scramble=True, rng=np.random.Generator(np.random.Philox([5, 2])))
    assert np.array_equal(ours, theirs.random(count))


def test_ranks_are_those_of_scipy():
    for values in ([3.0, 1.0, 1.0, 2.0, -np.inf], [1.0, np.nan, 2.0], np.arange(7) % 3 - 1.0):
        assert np.array_equal(certify._ranks(np.array(values)), stats.rankdata(values), equal_nan=True)


def normalisations(density_count, repeats=20):
    """Estimates of ∫N(0, 1.5·I) = 1 from draws of a proposal and a density for ``density_count`` draws."""
    cores, target = two_cores(), stats.multivariate_normal(np.zeros(3), 1.5 * np.eye(3))
    found = []
    for seed in range(repeats):
        x = proposal.draw(cores, 4096, seed)
        found.append(np.mean(np.exp(target.logpdf(x) - proposal.log_density(cores, density_count, x))))
    return np.array(found)


def test_the_density_is_that_of_the_draws():
    found = normalisations(4096)
    assert abs(found.mean() - 1) < 4 * found.std(ddof=1) / np.sqrt(len(found))
    # the twin: so few draws that their parts have other shares, and a density that is not theirs
    wrong = normalisations(12)
    assert abs(wrong.mean() - 1) > 4 * wrong.std(ddof=1) / np.sqrt(len(wrong))


def test_draws_are_pairs_and_repeat_with_their_seed():
    cores = two_cores()
    x = proposal.draw(cores, 1000, 7)
    middle = (x[0::2] + x[1::2]) / 2
    assert all(np.min(np.abs(cores.means - m).sum(axis=1)) < 1e-12 for m in middle)
    assert np.array_equal(x, proposal.draw(cores, 1000, 7))
    assert not np.array_equal(x, proposal.draw(cores, 1000, 8))


def test_a_covariance_that_rounding_made_indefinite_has_a_factor():
    flat = np.ones((3, 3)) * [[1.0], [10.0], [100.0]] * [1.0, 10.0, 100.0]
    factor = proposal.cholesky(flat)
    assert np.all(np.diag(factor) > 0)
    np.testing.assert_allclose(factor @ factor.T, flat, rtol=1e-5)


@pytest.mark.parametrize("shape", [0.2, 0.5, 0.9])
def test_khat_is_the_shape_of_a_pareto_tail(shape):
    found = [
        weights.smooth(np.log(stats.pareto(1 / shape).rvs(8192, random_state=seed))).khat
        for seed in range(20)
    ]
    # the estimator has an error of about (1 + k)/√M with M = 3√8192 tail draws, and a pull towards 0.5
    error = (1 + shape) / np.sqrt(3 * np.sqrt(8192)) / np.sqrt(20)
    pull = 10 / (3 * np.sqrt(8192) + 10) * abs(0.5 - shape)
    assert abs(np.mean(found) - shape) < 4 * error + pull


def test_smoothing_gives_no_weight_to_draws_without_density():
    logs = np.full(8192, -1e6)
    logs[[3, 4000]] = 0.0
    found = weights.smooth(logs)
    assert np.isinf(found.khat)
    assert found.ess == pytest.approx(2)
    assert np.isinf(weights.tail_shape(np.exp(logs)))
    # the twin: a tail that is long, and there
    assert weights.smooth(-2 * np.log(np.arange(1, 8193))).khat < 3


def test_errors_of_mean_and_sd_are_what_repetition_shows():
    law = stats.multivariate_normal([0.3, -0.2], [[1.3, 0.4], [0.4, 0.8]])
    core = proposal.gaussian(np.zeros(2), 1.5 * np.eye(2))
    means, sds, said = [], [], []
    rng = np.random.default_rng(1)
    for _ in range(200):
        # plain normals instead of Sobol points, whose precision is better than what is said
        z = rng.standard_normal((500, 2)) * np.sqrt(1.5)
        x = np.stack([z, -z], axis=1).reshape(-1, 2)
        w = weights.smooth(law.logpdf(x) - stats.multivariate_normal(cov=1.5 * np.eye(2)).logpdf(x)).weights
        own = weights.moments(x, w)
        means.append(own.mean / np.sqrt([1.3, 0.8]))
        sds.append(own.sd / np.sqrt([1.3, 0.8]))
        said.append(np.stack(weights.precision(x, w)[:2]))
    assert core.dim == 2
    told = np.sqrt(np.mean(np.square(said), axis=0))
    shown = np.stack([np.std(means, axis=0), np.std(sds, axis=0)])
    # the sd of 200 values is known to 5%
    np.testing.assert_allclose(told, shown, rtol=0.2)
    # the twin: counting both of a pair says too little of the error of an sd
    squares = (x - own.mean) ** 2
    alone = np.sqrt(np.sum((w[:, None] * (squares - own.sd**2)) ** 2, axis=0)) / (2 * own.sd**2)
    assert np.all(alone < 0.8 * shown[1])


def test_resampling_takes_every_draw_as_often_as_its_weight_says():
    w = np.random.default_rng(0).dirichlet(np.ones(50))
    counts = np.bincount(weights.resample(w, 1000, 0.3), minlength=50)
    assert np.all(np.abs(counts - 1000 * w) <= 1)


def test_kept_draws_have_the_sds_of_heavy_tailed_draws():
    def off(chosen):
        kept = x[chosen]
        return max(np.abs((kept.mean(0) - own.mean) / own.sd).max(), np.abs(kept.std(0) / own.sd - 1).max())

    rng = np.random.default_rng(5)
    wide = rng.random(40_000) < 0.3
    x = rng.normal(size=(40_000, 3)) * np.where(wide, 20.0, 1.0)[:, None]
    w = np.where(wide, 0.01 / 0.3, 0.99 / 0.7)  # a hundredth of the mass is 20 times as wide
    w = w / w.sum()
    own = weights.moments(x, w)
    assert off(weights.keep(x, w, 4000, rng)) < 0.005
    # the twin: by resampling alone, as often as not
    assert np.median([off(weights.resample(w, 4000, u)) for u in rng.random(20)]) > 0.02


def test_a_mixture_has_as_many_cores_as_the_draws_ask_for():
    rng = np.random.default_rng(0)
    flat = np.full(6000, 1 / 6000)
    assert len(fit_mixture(rng.normal(size=(6000, 3)), flat, 0).weights) == 1
    apart = rng.normal(size=(6000, 3)) + np.where(rng.random(6000) < 0.3, 6.0, 0.0)[:, None]
    found = fit_mixture(apart, flat, 0)
    assert len(found.weights) == 2
    assert sorted(found.weights) == pytest.approx([0.3, 0.7], abs=0.03)


def sites_of(model, data):
    return [make_site(model, data.client(name), name) for name in data.names]


def test_answers_of_sites_add_up_to_the_answer_of_all_rows():
    fed, model = federation(), linear_model(2.0)
    rng = np.random.default_rng(0)
    everyone, sites = make_site(model, fed.data.rows, "all"), sites_of(model, fed.data)
    positions = rng.normal(size=(11, 2))
    for evaluate in (lambda s: (log_likelihoods(s, positions),), lambda s: gradients(s, positions)):
        together, apart = evaluate(everyone), zip(*[evaluate(s) for s in sites])
        for one, many in zip(together, apart):
            np.testing.assert_allclose(one, np.sum(many, axis=0), rtol=1e-10)
    values, grads, second = hessians(everyone, positions)
    step = 1e-5 * np.eye(2)
    numeric = [
        (log_likelihoods(everyone, p + step) - log_likelihoods(everyone, p - step)) / 2e-5 for p in positions
    ]
    np.testing.assert_allclose(grads, numeric, rtol=1e-4, atol=1e-6)
    np.testing.assert_allclose(second[0], second[1])  # quadratic
    assert values.shape == (11,)


def test_local_quadratics_of_a_linear_model_are_exact():
    fed, model = federation(), linear_model(2.0)
    request = {"local_start": np.zeros(2)}
    sums = exchange.total(site.answer(s, request) for s in sites_of(model, fed.data))
    everyone = make_site(model, fed.data.rows, "all")
    _, grads, second = hessians(everyone, np.zeros((1, 2)))
    np.testing.assert_allclose(sums["local_precision"], -second[0], rtol=1e-9)
    np.testing.assert_allclose(sums["local_shift"], grads[0], rtol=1e-6, atol=1e-8)
    assert sums["local_sites"] == len(fed.data.names)


def test_a_site_that_draws_otherwise_says_so():
    core = proposal.gaussian(np.zeros(2), np.eye(2))
    request = {
        "proposal_weights": core.weights,
        "proposal_means": core.means,
        "proposal_factors": core.factors,
        "proposal_count": np.asarray(100),
        "proposal_seed": np.asarray(3),
        "proposal_checksum": site.checksum(proposal.draw(core, 100, 3)),
    }
    assert site.expand(request)["draws"].shape == (100, 2)
    with pytest.raises(DataError, match="other parameters"):
        site.expand({**request, "proposal_seed": np.asarray(4)})


@pytest.mark.parametrize("which", [0, 1])
def test_draws_of_every_core_are_those_of_the_server(which):
    cores = two_cores()
    request = dict(zip(("proposal_weights", "proposal_means", "proposal_factors"), cores))
    request |= {"proposal_count": np.asarray(600), "proposal_seed": np.asarray(3)}
    request["proposal_checksum"] = site.checksum(proposal.draw(cores, 600, 3))
    assert len(site.expand(request)["draws"]) == proposal.strata(cores, 600).total
    moved = cores.means.copy()
    moved[which] += 1e-3
    with pytest.raises(DataError, match="other parameters"):
        site.expand({**request, "proposal_means": moved})


def test_the_whole_of_several_cores_has_the_moments_of_their_draws():
    cores = two_cores()
    mean, covariance = proposal.overall(cores)
    rng = np.random.default_rng(0)
    z = rng.standard_normal((40000, 3))
    which = rng.choice(2, 40000, p=cores.weights)
    x = cores.means[which] + np.einsum("cij,cj->ci", cores.factors[which], z)
    np.testing.assert_allclose(mean, x.mean(0), atol=5 * x.std(0).max() / 200)
    fourth = np.sqrt(np.mean((x - x.mean(0)) ** 4))
    np.testing.assert_allclose(covariance, np.cov(x.T), atol=5 * fourth / 200)
    # the twin: cores that stand apart count by their weights
    apart = cores.means - mean
    assert np.abs(apart.T @ apart - (cores.weights[:, None] * apart).T @ apart).max() > 10 * fourth / 200


def test_where_the_posterior_rises_for_ever_the_place_of_most_mass_stands_for_the_mode():
    """A funnel of eight effects: its neck is higher than all else, and holds next to nothing."""

    def logprior_fn(theta):
        log_scale, effects = theta[0], theta[1:]
        spread = -jnp.sum(effects**2) / 2 * jnp.exp(-2 * log_scale) - 8 * log_scale
        return spread + log_scale - jnp.exp(2 * log_scale) / 50

    funnel = fald.Model(logprior_fn, lambda theta, row: row.sum() * theta.sum(), np.zeros(9))
    known = np.diag([0.0] + [1.0] * 8)  # the sites say nothing of the scale
    mean, covariance = Target(funnel).quadratic_mode(known, np.linspace(-3, 3, 9), np.zeros(9))
    assert abs(mean[0]) < 4
    assert np.sqrt(np.diag(covariance)).min() > 0.01
    search = Search.make(funnel, seed=0, tolerance=0.05)
    bulk = Derivatives(np.zeros(9), 0.0, np.zeros(9), -np.eye(9))
    neck = Derivatives(np.ones(9), 50.0, np.zeros(9), np.diag([1.0] + [-1.0] * 8))
    search.improve([bulk, neck])
    assert search.best is bulk
    assert not certify.funnel(search.best, search.highest).holds
    top = neck._replace(hessian=-np.eye(9))
    search.improve([top])
    assert search.best is top
    assert certify.funnel(search.best, search.highest).holds


def test_an_explorer_on_the_same_hill_is_dismissed_and_another_hill_is_a_mode():
    from fald.fewround.target import Derivatives, Target

    def at(x):
        """Two normals of sd 1 at −4 and 4."""
        parts = np.exp([-((x + 4) ** 2) / 2, -((x - 4) ** 2) / 2])
        total = parts.sum()
        first = np.array([-(x + 4), -(x - 4)])
        slope = float(parts @ first / total)
        bend = float(parts @ (first**2 - 1) / total) - slope**2
        return Derivatives(np.array([x]), float(np.log(total)), np.array([slope]), np.array([[bend]]))

    modes = explorers.Modes(Target(linear_model(2.0)), main=at(-4.0))
    modes.send(np.array([[-9.0], [3.0]]))
    for _ in range(10):
        known = modes.known
        places = [at(float(e.position[0])) for e in modes.active]
        along = np.array([at(float(p[0])).value for p in modes.paths(known)])
        modes.receive(places, along, known)
    assert modes.dismissed == 1
    assert [round(float(m.position[0]), 2) for m in modes.relevant()] == [-4.0, 4.0]
    # a higher place on another hill takes the lead, and the hill before it is not forgotten
    modes = explorers.Modes(Target(linear_model(2.0)), main=at(-4.0))
    modes.lead(at(3.9)._replace(value=1.0))
    assert len(modes.relevant()) == 2
    modes.lead(at(3.95)._replace(value=2.0))
    assert len(modes.relevant()) == 2


def test_proposals_are_fitted_to_the_tails_on_which_an_sd_rests():
    from fald.fewround.adapt import for_moments
    from fald.fewround.search import State

    def fitted(tail):
        """Mean square by the weights a mixture is fitted to, over that by the weights of the draws."""
        x = np.random.default_rng(2).normal(size=(4000, 1))
        logs = tail(x[:, 0]) + x[:, 0] ** 2 / 2
        smoothed, own = weights.smooth(logs), weights.moments(x, weights.smooth(logs).weights)
        known = weights.precision(x, smoothed.weights)
        state = State(smoothed, smoothed, known, own, own, x, logs)
        return float(for_moments(state) @ x[:, 0] ** 2 / (smoothed.weights @ x[:, 0] ** 2))

    assert fitted(lambda x: -np.abs(x) / 2) > 1.2
    assert fitted(lambda x: -(x**2) / 2 / 0.9) == pytest.approx(1.0)


@pytest.mark.parametrize(("below", "lost"), [(np.inf, True), (1001.0, True), (999.0, False)])
def test_a_proposal_that_is_lost_begins_again_at_the_highest_point_known(below, lost):
    """As where a site of as many rows as parameters says that its residuals are nothing."""
    from fald.fewround.adapt import adapt
    from fald.fewround.search import DrawBatch, State

    model = replace(
        fald.models.logistic_regression(1), logprior_fn=lambda p: 0.0 * p["intercept"]
    )  # undeclared
    search = Search.make(model, seed=0, tolerance=0.05)
    search.improve([Derivatives(np.array([1.0, 2.0]), -3.0, np.zeros(2), -np.diag([1.0, 4.0]))])
    astray = proposal.gaussian(np.array([1e6, 0.0]), np.eye(2))
    x = proposal.draw(astray, 256, 0)
    values = -3.0 - below - 1e6 * np.arange(len(x))
    search.batches.append(DrawBatch(2, astray, len(x), x, values, {}))
    alone, own = weights.smooth(values), weights.moments(x, np.full(len(x), 1 / len(x)))
    state = State(alone, alone, weights.precision(x, alone.weights), own, own, x, values)
    found = adapt(search, state, astray)
    assert (abs(found.means[0][0] - 1.0) < 1e-12) == lost
    if lost:
        np.testing.assert_allclose(found.factors[0], np.diag([1.0, 0.5]))


def climbed(share, width, rounds, watched=False, *, d=20, apart=6.0):
    """What climbers around N(0, I) find of N(c, width² I) with that share, so many sds away."""
    centre = np.zeros(d)
    centre[:4] = apart / 2

    def derivatives(x):
        near, far = -np.sum(x**2, axis=1) / 2, -np.sum((x - centre) ** 2, axis=1) / 2 / width**2
        near, far = near + np.log1p(-share), far + np.log(share or 1e-300) - d * np.log(width)
        value = np.logaddexp(near, far)
        slope = -np.exp(near - value)[:, None] * x
        return value, slope - np.exp(far - value)[:, None] * (x - centre) / width**2

    climbers = Climbers(proposal.gaussian(np.zeros(d), np.eye(d)), np.random.default_rng(3), 1000.0)
    found = []
    for _ in range(rounds):
        along = derivatives(climbers.paths(np.zeros(d)))[0]
        seen, lines = climbers.lookouts, climbers.far_lookouts
        found.append(climbers.climb(*derivatives(climbers.positions), along))
        if watched:
            climbers.watch(seen, derivatives(seen)[0] + np.sum(seen**2, axis=1) / 2)
            if len(lines):
                climbers.watch_far(derivatives(lines)[0])
    return [np.linalg.norm(f - centre, axis=1) for f in found], len(climbers.positions)


def test_climbers_find_another_hill_among_many_parameters():
    found, _ = climbed(0.1, 1.0, 2)
    assert len(found[1]) > 0
    assert found[1].max() < 3
    # a wider hill is seen from the shells
    assert climbed(0.1, 1.5, 1)[0][0].min() < 1.5
    # where there is none, nothing is found, and nobody goes on
    found, left = climbed(0.0, 1.0, 2)
    assert [len(f) for f in found] == [0, 0]
    assert left == 0


def test_hills_to_which_nobody_could_be_sent_are_kept_for_the_next_round():
    angles = 2 * np.pi * np.arange(12) / 12
    tops = np.concatenate([np.zeros((1, 2)), 24 * np.stack([np.cos(angles), np.sin(angles)], axis=1)])

    def derivatives(x):
        levels = -np.sum((x[:, None] - tops) ** 2, axis=2) / 2
        value = np.logaddexp.reduce(levels, axis=1)
        return value, np.exp(levels - value[:, None]) @ tops - x

    climbers, met = Climbers(proposal.gaussian(np.zeros(2), np.eye(2)), np.random.default_rng(3)), []
    for number in range(4):
        along = derivatives(climbers.paths(np.zeros(2)))[0]
        for place in climbers.climb(*derivatives(climbers.positions), along):
            met.append(int(np.argmin(np.sum((tops - place) ** 2, axis=1))))
        assert climbers.waiting == 0 or number < 3
    assert set(met) >= set(range(1, 13))


def test_two_slopes_tell_the_top_of_a_round_hill():
    top, curve = np.r_[5.0, 1.0, np.zeros(4)], 3.0
    places = top + np.random.default_rng(2).normal(size=(3, 6))
    slopes, values = curve * (top - places), 1.0 - curve / 2 * np.sum((places - top) ** 2, axis=1)
    np.testing.assert_allclose(_round_hills(places, slopes, values), top[None], atol=1e-12)
    # not the known hill, nor one of no mass, nor slopes that belong together by chance
    for others in ((places, -places, values), (places, slopes, values - 30), (places, slopes[::-1], values)):
        assert len(_round_hills(*others)) == 0


def test_lookouts_find_a_narrow_hill_among_many_parameters():
    # fewer than one in a thousand places around the known mode belong to it
    found, _ = climbed(0.1, 0.7, 3, watched=True)
    assert found[2].min() < 3
    # nobody else is on it by then, and where there is none nothing is found
    assert len(climbed(0.1, 0.7, 3)[0][2]) == 0
    assert sum(len(f) for f in climbed(0.0, 0.7, 3, watched=True)[0]) == 0


def test_lookouts_find_a_narrow_hill_far_out():
    # fewer than one in a thousand lines from the known mode cross what belongs to it
    found, _ = climbed(0.25, 0.7, 3, watched=True, d=10, apart=33.0)
    assert found[2].min() < 3
    assert len(climbed(0.25, 0.7, 3, d=10, apart=33.0)[0][2]) == 0
    assert sum(len(f) for f in climbed(0.0, 0.7, 3, watched=True, d=10)[0]) == 0


def thin_directions(share):
    """Directions of mass far out that climbers see around N(0, I) with so much mass in seven thin ridges."""
    rng, d = np.random.default_rng(4), 6
    ways = rng.standard_normal((7, d))
    ways /= np.linalg.norm(ways, axis=1)[:, None]

    def derivatives(x):
        square, along = np.sum(x**2, axis=1), x @ ways.T
        bulk = np.log1p(-7 * share) - square / 2
        ridges = np.log((share or 1e-300) / 25) - (square[:, None] - along**2 * (1 - 25**-2)) / 2
        value = np.logaddexp(bulk, np.logaddexp.reduce(ridges, axis=1))
        parts = np.exp(ridges - value[:, None])
        return value, (parts * along * (1 - 25**-2)) @ ways - x

    climbers = Climbers(proposal.gaussian(np.zeros(d), np.eye(d)), np.random.default_rng(3))
    climbers.climb(*derivatives(climbers.positions), derivatives(climbers.paths(np.zeros(d)))[0])
    found = climbers.thin
    return np.abs(ways @ found.T).max(axis=1, initial=0.0), len(found)


def test_climbers_see_thin_ridges_in_several_directions():
    seen, count = thin_directions(0.005)
    assert seen.min() > 0.99
    assert count <= 16
    assert thin_directions(0.0)[0].max() == 0.0


def test_others_climb_later_only_from_where_draws_are_sparse():
    draws = np.linspace(-3, 3, 8)[:, None]
    log_density = np.zeros(8)
    values = np.where(np.arange(8) == 5, np.log(25.0), np.log(15.0)) + 2.0
    batch = DrawBatch(1, proposal.gaussian(np.zeros(1), np.eye(1)), 8, draws, values, {1: log_density})
    for count in (1, 2):
        assert [len(part) for part in importance._sparse([batch] * count, 2.0)] == [8, 8]
    places, level = importance._sparse([batch] * 3, 2.0)
    assert (places.tolist(), level.tolist()) == ([draws[5].tolist()], [values[5]])
    climbers = Climbers(proposal.gaussian(np.zeros(1), np.eye(1)), np.random.default_rng(0))
    climbers.rest()
    climbers.watch(places[:0], level[:0])
    assert len(climbers.positions) == 0
    climbers.watch(places, level)
    np.testing.assert_allclose(climbers.positions, places)


def test_nobody_is_sent_apart_twice_to_one_place():
    modes = explorers.Modes(Target(linear_model(2)))
    modes.main = Derivatives(np.zeros(2), 0.0, np.zeros(2), -np.eye(2))
    modes.send_apart(np.array([[0.5, 0.0], [6.0, 0.0], [6.5, 0.0], [0.0, 6.0]]))
    assert [e.position.tolist() for e in modes.active] == [[6.0, 0.0], [0.0, 6.0]]
    modes.active = []
    modes.send_apart(np.array([[6.0, 0.9], [6.0, 1.1]]))
    assert [e.position.tolist() for e in modes.active] == [[6.0, 1.1]]


def test_climbers_leave_places_without_density():
    climbers = Climbers(proposal.gaussian(np.zeros(2), np.eye(2)), np.random.default_rng(0))
    count = len(climbers.positions)
    values = np.where(np.arange(count) % 2, -np.inf, -1.0)
    slopes = np.where(np.arange(count)[:, None] % 4 == 2, np.nan, np.ones((count, 2)))
    assert len(climbers.climb(values, slopes, np.zeros(0))) == 0
    assert 0 < len(climbers.positions) <= count // 4
    nowhere = np.full(len(climbers.positions), -np.inf)
    climbers.climb(nowhere, np.full((len(nowhere), 2), np.nan), np.full(12 * len(nowhere), -np.inf))
    assert np.isfinite(climbers.positions).all()


def test_a_single_draw_with_all_the_weight_certifies_nothing(recwarn):
    alone, spread = np.eye(8)[3], np.full(8, 1 / 8)
    positions = np.random.default_rng(0).normal(size=(8, 2))
    known = weights.precision(positions, alone)
    assert np.isinf([known.mean, known.sd]).all()
    assert np.isfinite(weights.precision(positions, spread).sd).all()
    names, newest = ["a", "b"], weights.moments(positions, alone)
    assert not certify.agreement(newest, weights.moments(positions, spread), 0.05, names).holds
    assert certify.agreement(*[weights.moments(positions, spread)] * 2, 0.05, names).holds
    assert not recwarn.list
