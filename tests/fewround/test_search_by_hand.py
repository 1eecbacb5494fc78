"""What the server of few rounds knows of a posterior, and how it searches: each part beside a sum by hand."""

from __future__ import annotations

import importlib
from types import SimpleNamespace

import jax.numpy as jnp
import numpy as np
import pytest
from scipy.stats import kstest
from scipy.stats import multivariate_normal as normal
from scipy.stats import t as student

import fald
from fald.fewround import adapt, certify, explorers, proposal
from fald.fewround.proposal import Proposal
from fald.fewround.search import DrawBatch, Search, State, weigh
from fald.fewround.target import Derivatives, Target, tidy
from fald.fewround.weights import Precision, Smoothed, moments
from fald.problem.model import concave


def model(logprior_fn, dim):
    return fald.Model(logprior_fn, lambda theta, row: -0.5 * jnp.sum((row - theta) ** 2), jnp.zeros(dim))


def at(position, value=0.0, curvature=(1.0, 1.0)):
    """A hilltop that curves so much downwards along each axis."""
    return Derivatives(np.array(position, float), value, np.zeros(2), -np.diag(np.array(curvature, float)))


FLAT = model(lambda theta: 0.0 * jnp.sum(theta), 2)


def test_a_posterior_that_is_no_number_is_undefined_unless_the_prior_has_no_density():
    target = Target(model(lambda theta: jnp.where(theta[0] > 0, -theta[0], -jnp.inf), 1))
    positions = np.array([-1.0, 1.0, 1.0, 1.0, 2.0])[:, None]
    values, undefined = target.posterior(positions, np.array([np.nan, np.nan, np.inf, -np.inf, 5.0]))
    np.testing.assert_array_equal(values, [-np.inf, -np.inf, -np.inf, -np.inf, 3.0])
    assert undefined.tolist() == [False, True, True, False, False]


def test_curvatures_count_by_their_size_and_a_top_is_told_from_a_saddle():
    saddle = at([0, 0], curvature=(4.0, -0.25))
    np.testing.assert_allclose(saddle.covariance(), np.diag([0.25, 4.0]))
    assert at([0, 0], curvature=(4.0, 1.0)).concave()
    assert not saddle.concave()
    assert at([0, 0], 7.0, (4.0, 1.0)).log_mass() == pytest.approx(7 - np.log(4) / 2)


def test_the_covariance_of_a_top_is_the_inverse_of_its_curvature_whatever_the_units():
    curvature = np.array([[4.0, 30.0], [30.0, 400.0]])
    here = at([0, 0])._replace(hessian=-curvature)
    np.testing.assert_allclose(here.covariance(), np.linalg.inv(curvature), rtol=1e-10)
    np.testing.assert_allclose(here.log_mass(), -np.log(np.linalg.det(curvature)) / 2)
    step, length = here._replace(gradient=np.array([1.0, 2.0])).newton()
    np.testing.assert_allclose(step, np.linalg.solve(curvature, [1.0, 2.0]))
    assert length == pytest.approx(np.sqrt(step @ curvature @ step))


def test_the_mode_of_what_the_sites_report_of_themselves_and_the_prior():
    sds, centre = np.array([2.0, 0.5]), np.array([1.0, -3.0])
    target = Target(model(lambda t: -0.5 * jnp.sum((t - centre) ** 2 / sds**2), 2))
    precision, shift = np.array([[3.0, 1.0], [1.0, 2.0]]), np.array([4.0, 5.0])
    mode, covariance = target.quadratic_mode(precision, shift, np.zeros(2))
    whole = precision + np.diag(1 / sds**2)
    np.testing.assert_allclose(mode, np.linalg.solve(whole, shift + centre / sds**2), rtol=1e-6)
    np.testing.assert_allclose(covariance, np.linalg.inv(whole), rtol=1e-5)


def test_the_mode_is_found_from_afar_where_newtons_steps_overshoot():
    target = Target(model(lambda t: -6 * jnp.sum(jnp.sqrt(1 + t**2)), 2))
    precision, shift = np.array([[0.3, 0.1], [0.1, 0.2]]), np.array([4.0, -9.0])
    mode, _ = target.quadratic_mode(precision, shift, np.array([40.0, 25.0]))
    slope = shift - precision @ mode - 6 * mode / np.sqrt(1 + mode**2)
    np.testing.assert_allclose(slope, 0, atol=1e-4)


def test_the_search_for_that_mode_is_told_one_energy_twice(monkeypatch):
    """Its values alone and with derivatives, of which the gradient is that of differences."""
    target = Target(model(lambda t: -6 * jnp.sum(jnp.sqrt(1 + t**2)), 2))
    precision, shift = np.array([[0.3, 0.1], [0.1, 0.2]]), np.array([4.0, -9.0])
    module, found = importlib.import_module("fald.fewround.target"), []

    def looked(report, values, start, **others):
        for theta in np.array([[1.0, 2.0], [-0.5, 3.0]]):
            here = report(theta)
            around = theta + 1e-5 * np.array([[0, 0], [1, 0], [0, 1], [-1, 0], [0, -1]])
            level = values(around)
            found.append(here.value - level[0])
            np.testing.assert_allclose(here.gradient, (level[1:3] - level[3:]) / 2e-5, rtol=1e-5)
        return descend(report, values, start, **others)

    descend = module.descend
    monkeypatch.setattr(module, "descend", looked)
    target.quadratic_mode(precision, shift, np.zeros(2))
    np.testing.assert_allclose(found, 0, atol=1e-9)


def test_a_prior_whose_top_is_out_of_reach_is_looked_at_where_it_begins():
    mean, covariance = Target(model(lambda t: t[0] - 1e-12 * t[0] ** 2 - t[1] ** 2, 2)).prior_scale()
    np.testing.assert_array_equal(mean, 0)
    np.testing.assert_allclose(np.sqrt(np.diag(covariance)), [1e3, np.sqrt(0.5)], rtol=1e-6)


def test_what_is_no_density_is_none():
    assert tidy(np.array([np.nan, np.inf, -np.inf, 2.0])).tolist() == [-np.inf, -np.inf, -np.inf, 2.0]


@pytest.mark.parametrize("widest", [1e3, 50.0])
def test_the_prior_is_as_wide_as_it_says_and_no_wider_than_is_asked(widest):
    sds = np.array([2.0, 100.0, 1e6])
    mean, covariance = Target(model(lambda t: -0.5 * jnp.sum((t - 1) ** 2 / sds**2), 3)).prior_scale(widest)
    np.testing.assert_allclose(np.sqrt(np.diag(covariance)), np.minimum(sds, widest), rtol=1e-6)
    np.testing.assert_allclose(mean, 1.0, rtol=1e-4)


def test_a_prior_that_curves_upwards_is_wide_there_and_a_flat_one_has_a_scale_of_its_own():
    target = Target(model(lambda t: -0.5 * t[0] ** 2 + t[1] ** 2 / 8, 2))
    _, covariance = target.prior_scale()
    np.testing.assert_allclose(np.diag(covariance), [1.0, 4 * 1000.0], rtol=1e-6)
    np.testing.assert_allclose(Target(FLAT).prior_scale()[1], 25 * np.eye(2))


@pytest.mark.parametrize(("lost", "known"), [(0, True), (4, True), (5, False)])
def test_a_hessian_is_regressed_from_two_gradients_for_each_parameter(lost, known):
    rng = np.random.default_rng(0)
    bend = np.array([[2.0, 0.5], [0.5, 1.0]])
    positions = rng.normal(size=(10, 2))
    grads = -positions @ bend
    grads[10 - lost :] = np.nan
    sums = {"state_values": np.arange(10.0), "state_gradients": grads}
    found, smoothed = Target(FLAT).regressed(sums, positions, 8)
    assert [here.value for here in found] == [0.0, 1.0]
    if known:
        np.testing.assert_allclose(smoothed.hessian, -bend, atol=1e-9)
        np.testing.assert_allclose(smoothed.position, positions[2 : 10 - lost].mean(0))
        np.testing.assert_allclose(smoothed.gradient, grads[2 : 10 - lost].mean(0))
    else:
        assert np.isnan(smoothed.hessian).all()


@pytest.mark.parametrize(("away", "share", "counts"), [
    (5.0, 3e-4, True), (5.0, 3e-5, False), (0.9, 1.1e-3, True), (0.9, 0.9e-3, False), (0.4, 1.0, False),
])  # fmt: skip
def test_a_mode_counts_by_its_mass_and_how_far_it_stands(away, share, counts):
    main = at([0, 0])
    other = at([away, 0], np.log(share))
    modes = explorers.Modes(Target(FLAT), main=main, others=[other])
    assert len(modes.relevant()) == 1 + counts


def test_an_explorer_is_on_a_hill_where_it_has_climbed_or_begins_high_enough():
    fresh = explorers.Explorer(np.zeros(2))
    plain = explorers.plain(2)
    assert fresh.on_a_hill(at([0, 0], 10.1 - plain), 10.0)
    assert not fresh.on_a_hill(at([0, 0], 9.9 - plain), 10.0)
    climbed = explorers.Explorer(np.zeros(2), at([0, 0], 1.0))
    assert climbed.on_a_hill(at([0, 0], 1.0), 99.0)
    assert not climbed.on_a_hill(at([0, 0], 0.99), 0.0)


@pytest.mark.parametrize(("value", "dip", "dismissed"), [
    (2.0, 0.05, 1), (2.0, 0.1, 1), (2.0, 0.11, 0), (2.0, 0.5, 0), (-1.0, 0.5, 0),
])  # fmt: skip
def test_a_path_without_a_valley_leads_to_the_same_hill(value, dip, dismissed):
    """The path is level, below both of its ends: that is the valley."""
    modes = explorers.Modes(Target(FLAT), main=at([0, 0], 0.0))
    modes.send(np.array([[6.0, 0.0]]))
    here = at([6, 0], value)._replace(gradient=np.array([-3.0, 0.0]))
    way = np.full(len(modes.paths(modes.known)), min(value, 0.0) - dip)
    modes.receive([here], way, modes.known)
    assert (modes.dismissed, len(modes.active)) == (dismissed, 1 - dismissed)


def test_an_explorer_that_begins_where_there_is_no_density_is_dismissed():
    modes = explorers.Modes(Target(FLAT), main=at([0, 0], 0.0))
    modes.send(np.array([[6.0, 0.0]]))
    nowhere = at([6, 0], -np.inf)._replace(gradient=np.full(2, np.nan))
    modes.receive([nowhere], np.zeros(len(modes.paths(modes.known))), modes.known)
    assert (modes.dismissed, modes.active) == (1, [])


def test_scouts_are_a_wide_law_around_the_prior():
    centre, factor = np.array([3.0, -1.0]), np.array([[2.0, 0.0], [1.0, 0.5]])
    drawn = explorers.scouts(centre, factor @ factor.T, np.random.default_rng(0))
    white = np.linalg.solve(factor, (drawn - centre).T)
    assert drawn.shape == (explorers.NUM_SCOUTS, 2)
    for along in (*white, (white[0] + white[1]) / np.sqrt(2)):
        assert kstest(along, student(5).cdf).pvalue > 1e-3
    assert kstest(white[0], "norm").pvalue < 1e-2  # the twin
    assert np.corrcoef(np.abs(white))[0, 1] > 0.05  # what is far is so in all directions


def test_promising_scouts_are_the_highest_and_others_among_the_high():
    values = -10.0 * np.arange(1000.0)
    places = np.arange(1000.0)[:, None]
    chosen = explorers.promising(places, values, np.random.default_rng(0), 9)[:, 0]
    assert len(set(chosen)) == len(chosen) == 9
    assert chosen[0] == 0
    assert 8 < chosen.max() < 150
    values[0], values[1:4] = np.nan, (-np.inf, np.nan, np.inf)
    assert explorers.promising(places, values, np.random.default_rng(0), 9)[0, 0] == 4
    assert len(explorers.promising(places[:4], values[:4], np.random.default_rng(0), 9)) == 0
    assert explorers.promising(places, values, np.random.default_rng(0), 1).tolist() == [[4.0]]
    # where few are as high, all of them are in play
    level = np.r_[np.zeros(30), np.full(970, -1e4)]
    found = [explorers.promising(places, level, np.random.default_rng(s), 5)[:, 0] for s in range(100)]
    assert set(np.concatenate(found)) == set(range(30))


def received(modes, here, known=None):
    """An explorer that sees another hill from where it is; what the paths to known modes say is a valley."""
    known = modes.known if known is None else known
    way = np.full(len(modes.paths(known)), -1e6)
    return modes.receive([here], way, known)


def test_an_explorer_goes_so_far_as_it_has_been_led_up():
    """A hill of sd 1 at 0: five sds at first, then ten; a sixteenth after a step that led down."""

    def hill(x):
        return Derivatives(np.array([x, 0.0]), -x * x / 2, np.array([-x, 0.0]), -np.eye(2))

    modes = explorers.Modes(Target(FLAT), main=at([500, 0], 0.0))
    modes.send(np.array([[40.0, 0.0]]))
    places = [40.0]
    for _ in range(3):
        received(modes, hill(places[-1]))
        places.append(float(modes.active[0].position[0]))
    assert places == pytest.approx([40, 35, 25, 5])
    received(modes, hill(places[-1])._replace(value=-1e9))  # lower than the place before
    assert modes.active[0].position[0] == pytest.approx(25 - 20 / 16)
    nan = hill(0.0)._replace(value=-np.inf, gradient=np.full(2, np.nan))
    received(modes, nan)  # no number at all
    assert modes.active[0].position[0] == pytest.approx(25 - 20 / 256)
    assert modes.active[0].best.position[0] == 25
    for _ in range(8):
        if modes.active:
            received(modes, nan)
    assert (modes.dismissed, modes.active) == (1, [])


def test_an_explorer_on_top_of_a_hill_of_its_own_is_a_mode_and_one_that_is_known_is_none():
    for place, count in (([9.0, 0.0], 1), ([500.5, 0.0], 1), ([500.49, 0.0], 0)):
        modes = explorers.Modes(Target(FLAT), main=at([500, 0], 0.0))
        modes.send(np.array([place]))
        received(modes, at(place, -1.0))
        assert (len(modes.others), modes.dismissed, modes.active) == (count, 1 - count, [])
    modes = explorers.Modes(Target(FLAT), main=at([500, 0], 0.0))
    modes.send(np.array([[9.0, 0.0]]))
    received(modes, at([9.0, 0.0], curvature=(1.0, -1.0)))  # a saddle is none
    assert modes.others == []


def test_the_hill_of_any_known_mode_is_known():
    known = [at([0, 0], 0.0), at([9, 0], 0.0)]
    modes = explorers.Modes(Target(FLAT), main=known[0], others=known[1:])
    modes.send(np.array([[6.0, 0.0]]))
    here = at([6, 0], -1.0)
    flat, deep = np.full(23, -0.5), np.full(23, -50.0)
    assert modes.receive([here], np.concatenate([deep, flat]), known) == []
    assert (modes.dismissed, modes.active) == (1, [])
    modes.send(np.array([[6.0, 0.0]]))
    assert modes.receive([here], np.concatenate([flat, deep]), known) == [here]  # it may be a higher place


def test_so_many_explorers_are_under_way_and_none_where_there_is_one_mode():
    modes = explorers.Modes(Target(FLAT))
    modes.send(np.zeros((20, 2)))
    modes.send(np.zeros((20, 2)))
    assert len(modes.active) == 24
    alone = explorers.Modes(Target(FLAT), single=True)
    alone.send(np.zeros((20, 2)))
    assert alone.active == []


def batch(number, centre, size, log_mass=0.0):
    current = proposal.gaussian(np.full(2, centre), (1 + number) * np.eye(2))
    x = proposal.draw(current, size, number)
    return DrawBatch(number, current, size, x, normal([0.3, 0.0], np.eye(2)).logpdf(x) + log_mass, {})


def test_recent_rounds_are_weighed_by_the_mixture_of_their_proposals():
    search = Search.make(FLAT, seed=0, tolerance=0.05)
    search.batches = [batch(i, c, n, 4.0) for i, (c, n) in enumerate([(9.0, 512), (0.5, 600), (0.0, 2048)])]
    state = weigh(search)
    x = np.concatenate([b.positions for b in search.batches])
    sizes = np.array([len(b.positions) for b in search.batches])
    parts = np.array([np.exp(proposal.log_density(b.proposal, b.count, x)) for b in search.batches])
    mixture = np.log(sizes @ parts / sizes.sum())
    values = np.concatenate([b.values for b in search.batches])
    np.testing.assert_allclose(state.all_logs, values - mixture, rtol=1e-9)
    np.testing.assert_array_equal(state.all_positions, x)
    # the mass of the posterior, by the newest draws alone
    last = search.batches[-1]
    ratios = np.exp(last.values - proposal.log_density(last.proposal, last.count, last.positions))
    assert state.log_mass == pytest.approx(np.log(ratios.mean()), abs=1e-9)
    assert state.log_mass == pytest.approx(4.0, abs=5 * ratios.std() / ratios.mean() / np.sqrt(len(ratios)))
    np.testing.assert_allclose(state.newest.weights @ last.positions, state.moments.mean)


def test_newtons_method_climbs_alone_while_it_is_far_from_the_only_top():
    hill = fald.Model(concave(lambda theta: -jnp.sum(theta**2)),
                      concave(lambda theta, row: jnp.sum(theta * row)), jnp.zeros(2))  # fmt: skip
    far = at([0, 0])._replace(gradient=np.array([2.1, 0.0]))
    for model_of, best, batches, fitting, climbing in (
        (hill, far, 3, False, True), (hill, None, 0, False, True), (hill, far, 4, False, False),
        (hill, far, 0, True, False), (FLAT, far, 0, False, False),
        (hill, far._replace(gradient=np.array([1.9, 0.0])), 0, False, False),
    ):  # fmt: skip
        search = Search.make(model_of, seed=0, tolerance=0.05)
        search.best, search.batches, search.fitting = best, [None] * batches, fitting
        assert search.climbing is climbing
        assert search.concave is (model_of is hill)


@pytest.mark.parametrize(("dim", "sizes"), [
    (2, (4096, 128, 65536, True, False)), (16, (4096, 256, 262144, True, False)),
    (60, (8192, 512, 262144, True, False)), (61, (8192, 256, 262144, True, True)),
    (201, (8192, 256, 262144, False, True)), (500, (16384, 256, 262144, False, True)),
])  # fmt: skip
def test_how_much_is_asked_for_follows_from_the_parameters(dim, sizes):
    s = Search.make(model(lambda theta: 0.0 * jnp.sum(theta), dim), seed=0, tolerance=0.05)
    assert (s.first_draws, s.num_smoothed, s.most_draws, s.hessians, s.many) == sizes
    assert not Search.make(FLAT, seed=0, tolerance=0.05, curvature=False).hessians


def test_the_trace_says_where_newtons_method_is():
    search = Search.make(FLAT, seed=0, tolerance=0.05)
    search.note(draws=3)
    search.best = at([0, 0])._replace(gradient=np.array([3.0, 4.0]))
    search.note(khat=0.5)
    first, second = search.trace
    assert first["draws"] == 3
    assert np.isnan([first["newton"], first["khat"], second["ess"]]).all()
    assert (second["newton"], second["khat"], second["draws"], second["explorers"]) == (5.0, 0.5, 0, 0)


def test_reported_quantities_are_certified_with_the_newest_draws():
    search = Search.make(FLAT, seed=0, tolerance=0.05, report=lambda x: x**2)
    search.batches = [batch(0, 0.0, 512), batch(1, 0.0, 512)]
    state = weigh(search)
    last = search.batches[-1].positions
    np.testing.assert_array_equal(state.certified, np.concatenate([last, last**2], axis=1))
    assert len(state.precision.sd) == 4


def test_only_so_many_rounds_are_pooled():
    search = Search.make(FLAT, seed=0, tolerance=0.05)
    search.batches = [batch(i, 0.0, 256) for i in range(6)]
    assert len(weigh(search).all_positions) == sum(len(b.positions) for b in search.batches[2:])


def state_of(x, weights, khat=0.0, values=None):
    """What draws with such weights say; tempered, ``values`` are their logarithms."""
    smoothed = Smoothed(weights, khat, 1 / np.sum(weights**2))
    known = Precision(np.zeros(2), np.zeros(2), np.zeros(2))
    own = moments(x, weights)
    logs = np.log(weights) if values is None else values
    return State(smoothed, smoothed, known, own, own, x, logs, x)


def test_of_several_modes_none_has_less_than_a_twentieth_of_the_highest():
    search = Search.make(FLAT, seed=0, tolerance=0.05)
    search.best = search.modes.main = at([0, 0])
    search.modes.others = [at([9, 0], np.log(1e-4)), at([0, 9], np.log(0.5), (4.0, 1.0))]
    one = np.array([1.0] + [0.0] * 9)
    found = adapt.adapt(search, state_of(np.zeros((10, 2)), one, 2.0, np.zeros(10)), at_one())
    by_mass = np.array([1.0, 0.05, 0.25])  # of half the width, the last has half of its height in mass
    np.testing.assert_allclose(found.weights, by_mass / by_mass.sum())
    np.testing.assert_allclose(found.means, [[0, 0], [9, 0], [0, 9]])
    np.testing.assert_allclose(found.factors[2], np.diag([0.5, 1.0]))


def at_one():
    return proposal.gaussian(np.ones(2), np.eye(2))


def test_weights_that_need_no_tempering_give_the_moments_of_the_draws():
    rng = np.random.default_rng(1)
    x = rng.normal(size=(500, 2))
    search = Search.make(FLAT, seed=0, tolerance=0.05)
    best = at([0, 0])
    search.smoothed = at([1.0, 1.0])
    search.batches.append(DrawBatch(1, at_one(), 500, x, np.zeros(500), {}))
    found = adapt._tempered(search, state_of(x, np.full(500, 1 / 500)), at_one(), best)
    np.testing.assert_allclose(found.means[0], x.mean(0))
    np.testing.assert_allclose(found.factors[0] @ found.factors[0].T, np.cov(x.T, ddof=0))


@pytest.mark.parametrize("widened", [1.0, 1.5])
def test_as_many_draws_are_foreseen_as_pairs_of_a_proposal_need(widened):
    """Of N(0, s²) draws, a mean needs E_π[r z²] of them and an sd E_π[r (z² − 1)²]/2, r = π/proposal."""
    z, step = np.linspace(-12, 12, 20001, retstep=True)
    posterior = np.exp(-(z**2) / 2) / np.sqrt(2 * np.pi) * step
    logs = -(z**2) / 2 - np.log(2 * np.pi) / 2
    density = -(z**2) / 2 / widened**2 - np.log(widened) - np.log(2 * np.pi) / 2
    smoothed = Smoothed(posterior / posterior.sum(), 0.0, 1.0)
    state = SimpleNamespace(newest=smoothed, certified=z[:, None], log_mass=0.0,
                            precision=SimpleNamespace(khat=np.zeros(1)))  # fmt: skip
    found = adapt._foreseen(state, SimpleNamespace(values=logs), density, 0.05)
    # moments of π·r ∝ exp(−z²(1 − 1/(2 s²))): a normal of variance v, whose mass is s·√v
    v = 1 / (2 - 1 / widened**2)
    mass = widened * np.sqrt(v)
    worst = max(mass * v, mass * (3 * v**2 - 2 * v + 1) / 2)
    assert found == pytest.approx((certify.quantile(1) / 0.05) ** 2 * worst, rel=1e-3)


def test_without_any_place_known_a_proposal_is_twice_as_wide():
    search = Search.make(FLAT, seed=0, tolerance=0.05)
    one = np.array([1.0] + [0.0] * 9)
    current = Proposal(np.ones(1), np.zeros((1, 2)), np.eye(2)[None])
    found = adapt.adapt(search, state_of(np.zeros((10, 2)), one, 2.0, np.zeros(10)), current)
    np.testing.assert_allclose(found.factors, 2 * current.factors)
