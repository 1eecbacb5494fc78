"""Composition: against closed forms, against the library's own, and against step-by-step work."""

from __future__ import annotations

import math

import numpy as np
import pytest
from dp_accounting.pld import privacy_loss_distribution as library
from scipy.optimize import brentq
from scipy.stats import binom, norm

from fald.privacy import Ledger, RunSettings, account, step_noise, step_profile
from fald.privacy.accountants import Releases
from fald.privacy.events import _multiplicities
from fald.privacy.rdp import RdpSteps
from fald.settings.participation import with_replacement, without_replacement

DELTA = 1e-5


def gaussian_epsilon(mu, delta):
    """ε of N(0,1) against N(μ,1), in closed form."""

    def excess(e):
        return norm.cdf(mu / 2 - e / mu) - math.exp(e) * norm.cdf(-mu / 2 - e / mu) - delta

    return brentq(excess, 0, 200, xtol=1e-13)


def library_step(z, fraction, interval):
    """One step as the library's own object, from the pointwise maximum of its two profiles."""
    from dp_accounting.pld import pld_pmf

    k = math.ceil(math.log1p(fraction * math.expm1(0.5 / z**2 + 10 / z)) / interval)
    deltas = step_profile(np.arange(-k, k + 1) * interval, z, fraction)
    pmf = pld_pmf.create_pmf_pessimistic_connect_dots_fixed_gap(interval, -k, k, deltas)
    return library.PrivacyLossDistribution(pmf)


@pytest.mark.parametrize("rounds", [1, 37, 4000])
@pytest.mark.parametrize("chains", [1, 3])
def test_all_rows_is_one_gaussian(rounds, chains):
    run = RunSettings(
        sizes=[50, 150], local_steps=2, num_rounds=rounds, step_size=2e-3, sensitivity=0.7, num_chains=chains
    )
    z = np.sqrt(2 * np.array([0.25, 0.75]) / 2e-3) / 0.7
    report = account(run, delta=DELTA)
    expected = [gaussian_epsilon(math.sqrt(2 * rounds * chains) / zc, DELTA) for zc in z]
    np.testing.assert_allclose(report.epsilon, expected, rtol=2e-4)
    assert np.all(report.epsilon >= np.array(expected) * (1 - 1e-9))
    wrong = [gaussian_epsilon(math.sqrt(2 * rounds * chains) / (1.1 * zc), DELTA) for zc in z]
    assert np.all(report.epsilon > np.array(wrong) * 1.01)


def test_all_rows_with_a_schedule_adds_squares():
    eta = 1e-3 / (1 + np.arange(200.0)) ** 0.55
    run = RunSettings(sizes=[100, 100], local_steps=4, num_rounds=50, step_size=eta, sensitivity=1.0)
    z = np.sqrt(2 * 0.5 / eta)
    expected = gaussian_epsilon(math.sqrt(np.sum(1 / z**2)), DELTA)
    found = account(run, delta=DELTA).worst
    assert expected * (1 - 1e-9) <= found <= expected * (1 + 5e-4)


def test_one_step_is_read_off_its_profile():
    run = RunSettings(
        sizes=[400], local_steps=1, num_rounds=1, step_size=0.05, batch_size=40, sensitivity=0.3
    )
    z = 0.1 / 0.3 * math.sqrt(2 / 0.05)
    expected = brentq(lambda e: step_profile(e, z, 0.1) - 1e-4, 0, 10)
    assert account(run, delta=1e-4).worst == pytest.approx(expected, rel=1e-4)
    delta = Ledger(run, delta=1e-4).delta_at(0.1)[0]
    assert delta == pytest.approx(float(step_profile(0.1, z, 0.1)), rel=1e-3)


@pytest.mark.parametrize(("z_scale", "agrees"), [(1.0, True), (1.1, False), (2.0, False)])
def test_agrees_with_the_library_composition(small, z_scale, agrees):
    settings = small(participation=without_replacement(2))
    z = step_noise(settings).multiplier[0] * z_scale
    interval = 2e-4
    one_round = library_step(z, 0.05, interval).self_compose(3)
    mixed = one_round.compute_mixture(library.identity(interval), 1 / 3)
    expected = mixed.self_compose(20).get_epsilon_for_delta(DELTA)
    assert (account(settings, delta=DELTA).worst == pytest.approx(expected, rel=1e-3)) is agrees


def test_scheme_one_with_realised_noise_is_a_mixture_over_draws():
    sizes, draws, eta = np.array([200, 300, 500]), 3, 3e-3
    run = RunSettings(
        sizes=sizes,
        local_steps=2,
        num_rounds=15,
        step_size=eta,
        batch_size=20,
        sensitivity=0.4,
        participation=with_replacement(draws),
    )
    report, interval = account(run, delta=DELTA), 5e-4
    for c, p in enumerate(sizes / 1000):
        fraction = 20 / sizes[c]
        total = None
        for s in range(1, draws + 1):
            z = fraction / 0.4 * math.sqrt(2 * eta * draws / s) * p / eta  # v = 1/w = S/s
            part = library_step(z, fraction, interval).self_compose(2)
            weight = binom.pmf(s, draws, p)
            before = binom.cdf(s - 1, draws, p)
            base = library.identity(interval) if total is None else total
            total = part.compute_mixture(base, weight / (before + weight))
        expected = total.self_compose(15).get_epsilon_for_delta(DELTA)
        assert report.epsilon[c] == pytest.approx(expected, rel=2e-3)
        assert report.noise.inclusion[c] == pytest.approx(1 - (1 - p) ** draws)
    # as if a client drawn twice still had the noise of one drawn once
    naive = account(
        RunSettings(
            sizes=sizes,
            local_steps=2,
            num_rounds=15,
            step_size=eta / 3,
            batch_size=20,
            sensitivity=0.4 * math.sqrt(0.2),
            noise="paper",
            participation=with_replacement(draws),
        ),
        delta=DELTA,
    )
    assert not np.allclose(naive.epsilon, report.epsilon, rtol=1e-2)


@pytest.mark.parametrize("participants", [None, 3])
def test_a_schedule_is_composed_step_by_step(small, participants):
    eta = np.geomspace(4e-4, 4e-5, 42)  # more values than are kept exactly, so chords are used
    part = None if participants is None else without_replacement(participants)
    settings = small(num_rounds=14, step_size=eta, participation=part)
    z, interval, total = step_noise(settings).multiplier[0], 1e-3, None
    for r in range(14):
        steps = [library_step(z[3 * r + k], 0.05, interval) for k in range(3)]
        one = steps[0].compose(steps[1]).compose(steps[2])
        if participants:
            one = one.compute_mixture(library.identity(interval), participants / 6)
        total = one if total is None else total.compose(one)
    expected = total.get_epsilon_for_delta(DELTA)
    found = account(settings, delta=DELTA)
    assert found.worst == pytest.approx(expected, rel=5e-4)
    for method in ("pld", "rdp"):
        rows = [
            account(small(num_rounds=14, step_size=e, participation=part), delta=DELTA, method=method).worst
            for e in eta[[-1, 0]]
        ]
        assert rows[0] < account(settings, delta=DELTA, method=method).worst < rows[1]


def test_a_constant_schedule_is_a_constant(small):
    constant, scheduled = small(), small(step_size=np.full(60, 1e-4))
    assert account(constant, delta=DELTA).worst == account(scheduled, delta=DELTA).worst


def test_local_steps_or_rounds_are_the_same_for_full_participation(small):
    a = account(small(local_steps=3, num_rounds=20), delta=DELTA).worst
    b = account(small(local_steps=60, num_rounds=1), delta=DELTA).worst
    assert a == pytest.approx(b, rel=1e-9)


def test_order_and_labels_of_clients_do_not_matter():
    sizes = np.array([100, 400, 250])
    common = {"local_steps": 2, "num_rounds": 30, "step_size": 1e-4, "batch_size": 10, "sensitivity": 1.0}
    one = account(RunSettings(sizes=sizes, **common), delta=DELTA).epsilon
    other = account(RunSettings(sizes=sizes[::-1], **common), delta=DELTA).epsilon
    np.testing.assert_array_equal(one, other[::-1])
    assert one[0] > one[2] > one[1]


def test_ledger_after_some_rounds_is_the_account_of_that_many(small):
    for part in (None, without_replacement(2), with_replacement(4)):
        for method in ("pld", "rdp"):
            ledger = Ledger(small(num_rounds=40, participation=part), delta=DELTA, method=method)
            for rounds in (7, 40, 3, 20):
                alone = account(small(num_rounds=rounds, participation=part), delta=DELTA, method=method)
                assert ledger.worst(rounds) == pytest.approx(alone.worst, rel=1e-3)
            assert ledger.worst(0) == 0
            budget = ledger.worst(20)
            assert ledger.max_rounds(budget) == 20
            assert ledger.max_rounds(budget * 0.9999) == 19
            assert ledger.max_rounds(1e9) == 40
            assert ledger.max_rounds(0.0) == 0
            assert ledger.report(20).worst == budget
            assert ledger.report(20).settings.num_rounds == 20


def test_ledger_of_a_schedule(small):
    ledger = Ledger(small(step_size=np.geomspace(1e-4, 1e-5, 60)), delta=DELTA)
    values = [ledger.worst(r) for r in range(21)]
    assert np.all(np.diff(values) > 0)
    assert ledger.max_rounds(values[13] * (1 + 1e-12)) == 13
    assert ledger.report(13).settings.num_steps == 39


def test_delta_at_inverts_epsilon(small):
    for method in ("pld", "rdp"):
        ledger = Ledger(small(), delta=DELTA, method=method)
        assert ledger.delta_at(ledger.worst())[0] == pytest.approx(DELTA, rel=1e-6)


def test_realised_participation(small):
    part = without_replacement(2)
    settings = small(participation=part)
    table = np.zeros((20, 6), int)
    table[:, 0] = 1
    table[:5, 1] = 1
    report = account(settings, delta=DELTA, participation="realised", times_drawn=table)
    always = account(small(participation=None), delta=DELTA).worst
    assert report.epsilon[0] == pytest.approx(always, rel=1e-9)
    five = account(small(num_rounds=5), delta=DELTA).worst
    assert report.epsilon[1] == pytest.approx(five, rel=1e-9)
    assert np.all(report.epsilon[2:] == 0)
    counts = account(settings, delta=DELTA, participation="realised", times_drawn=table.sum(0))
    np.testing.assert_allclose(counts.epsilon, report.epsilon, rtol=1e-12)
    np.testing.assert_array_equal(counts.rounds_taken_part, [20, 5, 0, 0, 0, 0])
    hidden = account(settings, delta=DELTA).worst
    assert five < hidden < always


def test_realised_draws_of_scheme_one_count_multiplicity(small):
    settings = small(participation=with_replacement(4), noise="realised")
    once, twice = np.zeros((20, 6), int), np.zeros((20, 6), int)
    once[:10, 0], twice[:10, 0] = 1, 2
    a, b = (
        account(settings, delta=DELTA, participation="realised", times_drawn=t).epsilon[0]
        for t in (once, twice)
    )
    half = account(
        small(sizes=[500] * 6, participation=with_replacement(4), noise="realised", temperature=0.5),
        delta=DELTA,
        participation="realised",
        times_drawn=once,
    ).epsilon[0]
    assert a < b
    assert b == pytest.approx(half, rel=1e-9)


def test_large_orders_agree_with_the_gaussian_and_stay_below_the_theorem():
    from fald.privacy.rdp import _integrated_log_moment

    orders = np.array([2.0, 16.0, 333.0, 2000.0])
    closed = orders * (orders - 1) / (2 * 400.0**2)
    np.testing.assert_allclose(_integrated_log_moment(orders, 400.0, 1.0), closed, rtol=1e-5)
    assert np.all(_integrated_log_moment(orders, 400.0, 1.0) >= closed)
    releases = Releases(np.array([20.0]), np.ones(1), 10, 100, "without-replacement", 1e-5)
    steps = RdpSteps(releases, total=lambda s: s.step(20.0))
    few = np.array([2.0, 8.0, 40.0])
    assert np.all(_integrated_log_moment(few, 20.0, 0.1) < steps._theorem(20.0, few))


def test_narrowed_orders_lose_nothing(small):
    settings = small(participation=with_replacement(4), noise="realised", step_size=1e-5)
    found = account(settings, delta=DELTA, method="rdp")
    noise, orders = found.noise, np.concatenate([np.arange(1.5, 11, 0.1), np.arange(11.0, 64.0)])
    moments = [np.full(orders.size, math.log1p(-noise.inclusion[0]))]
    for way in noise.presences[0]:
        z = np.array([way.own * noise.step[0]])
        releases = Releases(z, np.ones(1), 25, 500, "without-replacement", DELTA)
        steps = RdpSteps(releases, total=lambda s: s.step(1.0))
        moments.append(math.log(way.probability) + 3 * steps._theorem(float(z[0]), orders))
    divergence = 20 * np.logaddexp.reduce(moments) / (orders - 1)
    best = np.min(divergence + np.log1p(-1 / orders) - np.log(DELTA * orders) / (orders - 1))
    assert found.worst == pytest.approx(best, rel=1e-4)


def test_summed_view_of_rounds_covers_the_last_step_only(small):
    full = small(sizes=[500] * 6)
    own = account(full, delta=DELTA).worst
    summed = account(full, delta=DELTA, view="summed")
    step, way = summed.noise.step[0], summed.noise.presences[0][0]
    assert way.last / way.own == pytest.approx(math.sqrt(6))
    interval = 2e-4
    inner = library_step(way.own * step, 0.05, interval).self_compose(2)
    last = library_step(way.last * step, 0.05, interval)
    expected = inner.compose(last).self_compose(20).get_epsilon_for_delta(DELTA)
    assert summed.worst == pytest.approx(expected, rel=1e-3)
    colluding = [account(full, delta=DELTA, view="summed", num_colluders=k).worst for k in range(6)]
    assert np.all(np.diff(colluding) > 0)
    assert colluding[-1] == pytest.approx(own, rel=1e-9)


@pytest.mark.parametrize("noise", ["paper", "realised"])
@pytest.mark.parametrize("part", [without_replacement(4), with_replacement(4)], ids=["II", "I"])
def test_summed_view_never_costs_more(small, noise, part):
    settings = small(noise=noise, participation=part)
    server = account(settings, delta=DELTA).worst
    values = [account(settings, delta=DELTA, view="summed", num_colluders=k).worst for k in (0, 1, 3)]
    assert values[0] < server * 0.99
    assert values[0] <= values[1] <= values[2] <= server * (1 + 1e-9)


def test_noise_of_honest_participants_is_the_least_possible():
    # every outcome of the draw leaves at least as much noise in the sum as the accountant assumes
    rng = np.random.default_rng(5)
    sizes = np.array([100, 200, 300, 400])
    p = sizes / sizes.sum()
    common = {"sizes": sizes, "local_steps": 1, "num_rounds": 1, "step_size": 2.0, "sensitivity": 1.0}
    for noise in ("paper", "realised"):
        run = RunSettings(**common, noise=noise, participation=with_replacement(3))
        events = step_noise(run, view="summed")
        for _ in range(300):
            times = rng.multinomial(3, p)
            weight = times / 3
            v = np.divide(1.0, weight, out=np.zeros(4), where=times > 0) if noise == "realised" else 1 / p
            total = np.sum(weight**2 * v)
            for c in np.flatnonzero(times):
                z = math.sqrt(total) * p[c] / weight[c]
                assert events.presence(c, int(times[c])).last <= z * (1 + 1e-12)


@pytest.mark.parametrize(("draws", "p"), [(1, 0.3), (5, 0.2), (40, 0.02), (200, 0.5), (3000, 0.4), (4, 1.0)])
def test_classes_of_draws_keep_the_probability_and_round_up(draws, p):
    classes = _multiplicities(draws, p)
    assert len(classes) < 250
    assert sum(mass for _, mass in classes) == pytest.approx(1 - (1 - p) ** draws, rel=1e-12)
    at_least = [sum(mass for t, mass in classes if t >= s) for s in range(1, draws + 1)]
    true = binom.sf(np.arange(draws), draws, p)
    assert np.all(np.array(at_least) >= true - 1e-14)  # never fewer draws than there are
    mean = sum(t * mass for t, mass in classes)
    assert draws * p <= mean * (1 + 1e-12) <= draws * p * 1.03
