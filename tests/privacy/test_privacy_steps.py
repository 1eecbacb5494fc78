"""Accountants, ledgers and searches one by one, where all rows are used and everything has a closed form."""

from __future__ import annotations

import itertools
import math
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
from scipy.integrate import quad
from scipy.optimize import brentq
from scipy.stats import norm

from fald.core.errors import ConfigError, PrivacyError
from fald.privacy import (
    Budget,
    Ledger,
    RunSettings,
    account,
    calibrate,
    calibration,
    pareto_front,
    step_noise,
    step_profile,
)
from fald.privacy.accountant import _plain
from fald.privacy.accountants import Releases
from fald.privacy.compose import repeated, together
from fald.privacy.pld import NoGridError, PldSteps, _anchors, _discretised
from fald.privacy.rdp import RdpSteps, _integrated_log_moment, _rounding_grid
from fald.settings.participation import with_replacement, without_replacement

DELTA = 1e-5


def run(**changes):
    given = {"sizes": [100, 300], "local_steps": 2, "num_rounds": 6, "step_size": 1e-3, "clip_norm": 0.2}
    return RunSettings(**{**given, **changes})


def gaussian_delta(epsilon, mu):
    return norm.cdf(mu / 2 - epsilon / mu) - math.exp(epsilon) * norm.cdf(-mu / 2 - epsilon / mu)


# -- one step -------------------------------------------------------------------------------------------


def hockey_stick(epsilon, z, q):
    """∫ max(0, a − e^ε b) of a = (1−q)N(0,z²) + qN(1,z²) and b = N(0,z²), the other way round below zero."""

    def a(x):
        return (1 - q) * norm.pdf(x, 0, z) + q * norm.pdf(x, 1, z)

    def b(x):
        return norm.pdf(x, 0, z)

    pair = (a, b) if epsilon >= 0 else (b, a)
    reach = np.linspace(-9 * z, 1 + 9 * z, 40)
    return sum(
        quad(lambda x: max(0.0, pair[0](x) - math.exp(epsilon) * pair[1](x)), lo, hi, limit=200)[0]
        for lo, hi in itertools.pairwise(reach)
    )


@pytest.mark.parametrize("epsilon", [-1.0, -0.1, 0.0, 0.3, 1.5])
@pytest.mark.parametrize(("z", "q"), [(0.7, 1.0), (0.7, 0.3), (2.0, 0.05)])
def test_the_profile_of_a_step_is_its_integral(epsilon, z, q):
    found = float(step_profile(epsilon, z, q))
    assert found == pytest.approx(hockey_stick(epsilon, z, q), abs=1e-7)


def test_profiles_far_out_are_those_of_logarithms():
    for z, q in ((0.05, 0.2), (0.02, 1.0)):
        for epsilon in (29.999, 30.001, 60.0):
            x = epsilon + math.log1p(-(1 - q) * math.exp(-epsilon)) - math.log(q)
            expected = q * (norm.cdf(0.5 / z - x * z) - math.exp(x + norm.logcdf(-0.5 / z - x * z)))
            assert float(step_profile(epsilon, z, q)) == pytest.approx(expected, rel=1e-9)


@pytest.mark.parametrize(("z", "q"), [(0.8, 1.0), (1.5, 0.1)])
def test_a_step_on_a_grid_is_no_better_than_itself(z, q):
    interval = 0.01
    probs, lower, infinity = _discretised(z, q, "without-replacement", interval)
    assert probs.sum() + infinity == pytest.approx(1, abs=1e-9)
    losses = (np.arange(probs.size) + lower) * interval
    for epsilon in (0.0, 0.05, 0.4, 1.0):
        over = losses > epsilon
        delta = float(np.sum(probs[over] * -np.expm1(epsilon - losses[over]))) + infinity
        exact = float(step_profile(epsilon, z, q))
        assert exact - 1e-12 <= delta <= exact + 1e-4


@pytest.mark.parametrize("z", [0.6, 4.0])
def test_orders_above_the_theorem_are_integrated(z):
    """(α−1)D_α from densities, in either order of the two data sets."""
    q = 0.2
    orders = np.array([2.0, 3.0, 6.0])
    found = _integrated_log_moment(orders, z, q)
    x = np.linspace(-30 * z, 1 + 30 * z, 400_001)
    ratio = np.log1p(q * np.expm1((2 * x - 1) / (2 * z**2)))
    for order, moment in zip(orders, found):
        exact = math.log(np.trapezoid(np.exp(order * ratio) * norm.pdf(x, 0, z), x))
        assert exact <= moment * (1 + 1e-9)
        assert moment <= 1.3 * exact + 1e-3  # the other order of the two is no worse than this
    closed = orders * (orders - 1) / (2 * z**2)
    np.testing.assert_allclose(_integrated_log_moment(orders, z, 1.0), closed, rtol=1e-4)


def releases(z, counts=None, rows=10, size=10, sampling="without-replacement"):
    z = np.atleast_1d(np.asarray(z, float))
    return Releases(z, np.ones(z.size) if counts is None else np.asarray(counts), rows, size, sampling, DELTA)


def test_renyi_steps_on_all_rows_are_closed_forms():
    steps = RdpSteps(releases([2.0, 3.0]), total=lambda s: s.step(2.0))
    loss = steps.step(2.0)
    np.testing.assert_allclose(loss.log_moment, 0.5 * steps.orders * (steps.orders - 1) / 4)
    assert (loss.infinity, loss.factors, loss.transform.size) == (0.0, 1.0, 0)
    # between two multipliers the lower one counts, below all of them the step itself
    np.testing.assert_array_equal(steps.step(2.9).log_moment, loss.log_moment)
    np.testing.assert_allclose(steps.step(1.0).log_moment, 0.5 * steps.orders * (steps.orders - 1))
    composed = repeated(loss, 9)
    epsilon, order = steps.epsilon(composed, DELTA), steps.precision(composed, DELTA)[1]
    mu = 3 / 2
    exact = brentq(lambda e: gaussian_delta(e, mu) - DELTA, 0, 50)
    assert exact <= epsilon <= 1.2 * exact
    by_order = 0.5 * steps.orders * mu**2 + np.log1p(-1 / steps.orders)
    by_order -= np.log(DELTA * steps.orders) / (steps.orders - 1)
    assert epsilon == pytest.approx(by_order.min(), rel=1e-9)
    assert order == steps.orders[by_order.argmin()]
    assert math.isnan(steps.precision(composed, DELTA)[0])
    assert DELTA * 0.99 <= steps.delta(composed, epsilon) <= DELTA * 1.01
    lost = loss._replace(log_moment=np.full(steps.orders.size, math.inf))
    assert steps.epsilon(lost, DELTA) == math.inf
    assert steps.delta(lost, 1.0) == 1.0


@pytest.mark.parametrize("mu", [3.0, 1e-2, 1e-5])
def test_the_orders_reach_as_far_as_small_losses_need_them(mu):
    """Of a Gaussian the best order is near √(2 log(1/δ))/μ; the grid of orders costs a few percent."""
    steps = RdpSteps(releases(1 / mu), total=lambda s: s.step(1 / mu))
    every, delta = 1 + np.geomspace(1e-2, 1e8, 4000), 1e-12
    best = np.min(0.5 * every * mu**2 + np.log1p(-1 / every) - np.log(delta * every) / (every - 1))
    assert best * (1 - 1e-3) <= steps.epsilon(steps.step(1 / mu), delta) <= 1.05 * best


def test_on_all_rows_every_multiplier_is_charged_as_it_is():
    many = np.linspace(1.0, 4.0, 150)
    steps = RdpSteps(releases(many), total=lambda s: s.step(1.0))
    for z in many[[0, 70, 71, 149]]:
        np.testing.assert_allclose(
            steps.step(z).log_moment, 0.5 * steps.orders * (steps.orders - 1) / z**2, rtol=1e-12
        )


def test_orders_near_the_best_give_what_all_orders_give():
    z, count = [1.5, 2.0, 3.0], 300
    few = RdpSteps(
        releases(z, [count] * 3, 10, 100), total=lambda s: together(repeated(s.step(x), count) for x in z)
    )
    moments = [RdpSteps(releases(x, [count], 10, 100), total=lambda s: s.step(1.0)).step(x) for x in z]
    every = RdpSteps(releases(z[0], [count], 10, 100), total=lambda s: s.step(1.0))
    epsilon = every.epsilon(together(repeated(loss, count) for loss in moments), DELTA)
    found = few.epsilon(together(repeated(few.step(x), count) for x in z), DELTA)
    assert few.orders.size <= 5 < every.orders.size
    assert epsilon <= found * (1 + 1e-12) <= 1.001 * epsilon


def test_multipliers_are_rounded_down_onto_a_grid():
    few = np.array([1.0, 1.5, 4.0])
    np.testing.assert_array_equal(_rounding_grid(few, 3), few)
    many = np.linspace(1.0, 4.0, 50)
    grid = _rounding_grid(many, 10)
    assert grid[0] == 1.0
    assert grid[-1] == pytest.approx(4.0)
    np.testing.assert_allclose(np.diff(np.log(grid)), math.log(4) / 9)


@pytest.mark.parametrize("mu", [0.3, 1.5])
def test_loss_distributions_on_all_rows_are_those_of_a_gaussian(mu):
    count = 16
    z = math.sqrt(count) / mu
    steps = PldSteps(releases(z, [count]), total=lambda s: repeated(s.step(z), count))
    loss = repeated(steps.step(z), count)
    exact = brentq(lambda e: gaussian_delta(e, mu) - DELTA, 0, 50)
    assert exact <= steps.epsilon(loss, DELTA) <= exact * 1.002
    for epsilon in (0.0, 0.5 * exact, exact):
        delta = gaussian_delta(epsilon, mu)
        assert delta * (1 - 1e-9) <= steps.delta(loss, epsilon) <= delta * 1.01
    assert steps.epsilon(loss, 0.99) == 0.0
    assert steps.epsilon(loss, 1e-300) == math.inf
    assert steps.precision(loss, DELTA)[0] == steps.interval
    # between two multipliers an upper bound that is near
    wide = PldSteps(releases([z, 1.3 * z], [8, 8]), total=lambda s: repeated(s.step(z), count))
    for between in (1.05 * z, 1.15 * z, 1.25 * z):
        found = wide.epsilon(repeated(wide.step(between), count), DELTA)
        mid = brentq(lambda e, b=between: gaussian_delta(e, math.sqrt(count) / b) - DELTA, 0, 50)
        assert mid <= found <= 1.1 * mid
    outside = wide.epsilon(repeated(wide.step(2 * z), count), DELTA)
    assert outside == pytest.approx(brentq(lambda e: gaussian_delta(e, mu / 2) - DELTA, 0, 50), rel=0.02)


def test_losses_that_no_grid_holds_are_refused():
    with pytest.raises(NoGridError):
        PldSteps(releases(1e-4), total=lambda s: s.step(1e-4))
    instead = account(run(step_size=1e7), delta=DELTA)  # by Rényi divergences
    assert np.all(np.isfinite(instead.epsilon))
    assert np.all(np.isfinite(instead.rdp_order))


def test_few_multipliers_are_kept_and_many_are_covered():
    few = np.linspace(1, 2, 32)
    for sampling, fraction in (("without-replacement", 0.1), ("poisson", 0.1)):
        anchors, between = _anchors(few, sampling, fraction)
        np.testing.assert_array_equal(anchors, few)
        assert between
    many = np.linspace(1, 2, 500)
    for sampling, fraction, ratio in (
        ("without-replacement", 0.1, 1.02), ("poisson", 1.0, 1.02), ("poisson", 0.1, 1.005),
    ):  # fmt: skip
        anchors, between = _anchors(many, sampling, fraction)
        assert between is (ratio == 1.02)
        assert (anchors[0], anchors[-1]) == (1.0, 2.0)
        assert np.max(anchors[1:] / anchors[:-1]) <= ratio * (1 + 1e-12)
        assert anchors.size == math.ceil(math.log(2) / math.log(ratio)) + 1
    # as many as would cover them are kept as they are, and have nothing between them
    for sampling, top, number in (("without-replacement", 3.0, 57), ("poisson", 1.2, 38)):
        for size in (number - 20, number, number + 1):
            if size > 32:
                anchors, between = _anchors(np.linspace(1, top, size), sampling, 0.1)
                assert np.array_equal(anchors, np.linspace(1, top, size)) is (size <= number)
                assert between is (size <= number or sampling == "without-replacement")
    narrow = np.linspace(1, 1.0001, 40)
    assert _anchors(narrow, "without-replacement", 0.1)[0].size == 2


# -- ledgers --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("scheduled", [False, True], ids=["constant", "schedule"])
def test_a_ledger_answers_in_any_order(scheduled):
    eta = 1e-3 / (1 + np.arange(12.0)) if scheduled else 1e-3
    ledger = Ledger(run(step_size=eta), delta=DELTA, method="rdp")
    alone = [Ledger(run(step_size=eta), delta=DELTA, method="rdp").worst(r) for r in range(7)]
    assert alone[0] == 0
    assert all(a < b for a, b in itertools.pairwise(alone))
    for rounds in (3, 6, 2, 2, 5, 0, 1):
        assert ledger.worst(rounds) == pytest.approx(alone[rounds], rel=1e-12)
    assert ledger.worst() == pytest.approx(alone[6], rel=1e-12)
    for budget, rounds in ((alone[4], 4), (alone[4] * (1 - 1e-9), 3), (0.0, 0), (alone[1], 1), (99.0, 6)):
        assert ledger.max_rounds(budget) == rounds
    for wrong in (-1, 7):
        with pytest.raises(ConfigError, match="between 0 and 6"):
            ledger.epsilon(wrong)
    assert ledger.delta_at(alone[3], 3)[0] == pytest.approx(DELTA, rel=1e-6)
    assert ledger.epsilon().shape == (2,)
    assert ledger.worst() == ledger.epsilon()[0] > ledger.epsilon()[1]


def test_a_budget_that_some_rounds_spend_to_the_last_digit_affords_exactly_these():
    ledger = Ledger(run(num_rounds=50), delta=DELTA, method="rdp")
    assert [ledger.max_rounds(ledger.worst(rounds)) for rounds in range(51)] == list(range(51))


def test_the_client_that_loses_most_decides_how_many_rounds():
    for sizes in ([100, 300], [300, 100], [300, 100, 200]):
        ledger = Ledger(run(sizes=sizes), delta=DELTA, method="rdp")
        each = [
            max(r for r in range(7) if ledger.epsilon(r)[c] <= ledger.worst(3)) for c in range(len(sizes))
        ]
        assert ledger.max_rounds(ledger.worst(3)) == min(each) == 3


def test_reports_say_what_they_rest_on():
    ledger = Ledger(run(num_chains=2, participation=with_replacement(2)), delta=DELTA, method="rdp")
    report = ledger.report(4)
    assert report.settings.num_rounds == 4
    assert report.worst == ledger.worst(4)
    assert report.worst_client == 0
    np.testing.assert_allclose(report.rounds_taken_part, ledger.noise.inclusion * 8)
    assert np.all(np.isnan(report.grid_interval))
    assert np.all(np.isfinite(report.rdp_order))
    told = report.to_dict()
    assert told["epsilon"] == report.worst
    assert told["sampling"] == "all rows"
    assert [c["rows"] for c in told["clients"]] == [100, 300]
    assert told["clients"][1]["epsilon"] == report.epsilon[1]
    assert told["clients"][0]["grid_interval"] is None
    assert told["settings"]["sensitivity"] == 0.4
    assert told["settings"]["num_rounds"] == 4
    eta = 1e-3 / (1 + np.arange(12.0))
    falling = Ledger(run(step_size=eta, batch_size=50), delta=DELTA, method="rdp").report(2).to_dict()
    assert falling["settings"]["step_size_least"] == eta[3]
    assert falling["settings"]["step_size_largest"] == eta[0]
    assert falling["sampling"] == "without-replacement"
    least = step_noise(run(step_size=eta, batch_size=50)).multiplier[:, :4].min(axis=1)
    assert falling["clients"][1]["noise_multiplier"] == pytest.approx(least[1])
    assert [_plain(x) for x in (1.5, math.nan, math.inf)] == [1.5, None, "infinite"]


def test_tables_of_draws_have_their_shapes():
    drawn = run(sizes=[100] * 3, participation=without_replacement(2), num_chains=2)

    def epsilon(times, settings=drawn, **options):
        how = {"delta": DELTA, "method": "rdp", "participation": "realised"}
        return account(settings, times_drawn=times, **{**how, **options})

    table = np.zeros((2, 6, 3), int)
    table[0, :4, 0] = table[1, :2, 0] = table[0, 0, 1] = 1
    counts = epsilon([6, 1, 0])
    found = epsilon(table)
    np.testing.assert_allclose(found.epsilon, counts.epsilon, rtol=1e-12)
    np.testing.assert_array_equal(found.rounds_taken_part, [6, 1, 0])
    assert found.epsilon[2] == 0.0
    assert found.epsilon[0] > found.epsilon[1] > 0
    one = replace(drawn, num_chains=1)
    np.testing.assert_allclose(epsilon(table[0], one).epsilon, epsilon(table[:1], one).epsilon)
    assert epsilon([12, 12, 0]).rounds_taken_part.tolist() == [12, 12, 0]
    for wrong, words in (
        ([13, 0, 0], "between 0 and 12"), ([-1, 0, 0], "between 0 and 12"), (table[0], "shape"),
        (table - 1, "whole numbers"), (table * 0.5, "whole numbers"), (2 * table, "more often"),
        (table[:, :, :2], "shape"), (None, "needs times-drawn"),
    ):  # fmt: skip
        with pytest.raises(ConfigError, match=words):
            epsilon(wrong)
    for twice in ({"noise": "realised"}, {"step_size": 1e-3 / (1 + np.arange(12.0)), "noise": "paper"}):
        with pytest.raises(ConfigError, match="not enough"):
            epsilon([1, 1, 0], replace(drawn, participation=with_replacement(2), **twice))
    part = replace(drawn, participation=with_replacement(2), noise="paper")
    np.testing.assert_allclose(epsilon(2 * table, part).epsilon, epsilon(table, part).epsilon)
    less = replace(part, noise="realised")  # whoever is drawn twice adds less noise
    assert np.all(epsilon(2 * table, less).epsilon[:2] > 1.2 * epsilon(table, less).epsilon[:2])
    with pytest.raises(ConfigError, match="more often"):
        epsilon(3 * table, part)
    everybody = replace(drawn, participation=None)
    half = np.ones((2, 6, 3), int)
    half[:, 3:] = 0
    assert epsilon(half, everybody).epsilon[0] < epsilon(None, everybody).epsilon[0]
    with pytest.raises(ConfigError, match="only read"):
        account(drawn, delta=DELTA, times_drawn=table)


def test_poisson_needs_a_norm_only_where_there_are_batches():
    free = run(clip_norm=None, sensitivity=0.4)
    assert account(free, delta=DELTA, method="rdp", sampling="poisson").worst > 0
    with pytest.raises(PrivacyError, match="norm of a row"):
        account(replace(free, batch_size=10), delta=DELTA, method="rdp", sampling="poisson")
    clipped = account(run(batch_size=10), delta=DELTA, method="rdp", sampling="poisson")
    assert clipped.sampling == clipped.to_dict()["sampling"] == "poisson"


def test_clients_that_never_take_part_lose_nothing_and_stop_nobody():
    drawn = run(sizes=[100] * 3, participation=without_replacement(2), num_chains=2)
    table = np.zeros((2, 6, 3), int)
    table[:, :, 1] = 1
    how = {"delta": DELTA, "method": "rdp", "participation": "realised"}
    ledger = Ledger(drawn, times_drawn=table, **how)
    assert [e > 0 for e in ledger.epsilon()] == [False, True, False]
    assert ledger.delta_at(0.1).tolist()[::2] == [0.0, 0.0]
    assert ledger.max_rounds(ledger.worst(4)) == 4
    report = ledger.report()
    assert (report.worst_client, report.participation) == (1, "realised")
    assert np.isnan(report.rdp_order).tolist() == [True, False, True]
    nobody = Ledger(drawn, times_drawn=np.zeros((2, 6, 3), int), **how)
    assert (nobody.worst(), nobody.max_rounds(0.0)) == (0.0, 6)


def test_reports_keep_the_view_and_the_options_they_were_asked_with():
    together = run(sizes=[100] * 4)
    ledger = Ledger(together, delta=1e-4, method="rdp", view="summed", num_colluders=2)
    report = ledger.report(3)
    assert (report.view, report.num_colluders, report.delta, report.method) == ("summed", 2, 1e-4, "rdp")
    assert (report.noise.view, report.noise.num_colluders) == ("summed", 2)
    assert (report.participation, report.sampling) == ("hidden", "without-replacement")
    assert (
        report.worst == ledger.worst(3) > Ledger(together, delta=1e-4, method="rdp", view="summed").worst(3)
    )
    told = report.to_dict()
    assert (told["view"], told["num_colluders"], told["delta"], told["upper_bound"]) == (
        "summed",
        2,
        1e-4,
        True,
    )
    assert (told["settings"]["local_steps"], told["settings"]["num_chains"]) == (2, 1)
    assert told["settings"]["scheme"] == "full"
    assert told["clients"][3]["weight"] == 0.25
    whole = ledger.report()
    assert whole.settings.num_rounds == 6
    assert whole.rounds_taken_part.tolist() == [6.0] * 4
    by_default = account(together, delta=1e-4)
    assert (by_default.method, by_default.view, by_default.num_colluders) == ("pld", "server", 0)


def test_realised_participation_is_counted_up_to_the_round_asked_for():
    drawn = run(sizes=[100] * 3, participation=without_replacement(2))
    table = np.zeros((6, 3), int)
    table[[0, 3, 5], 0] = 1
    how = {"delta": DELTA, "method": "rdp", "participation": "realised"}
    ledger = Ledger(drawn, times_drawn=table, **how)
    assert [ledger.report(r).rounds_taken_part[0] for r in (1, 3, 4, 6)] == [1.0, 1.0, 2.0, 3.0]
    assert ledger.worst(1) == ledger.worst(3) < ledger.worst(4) < ledger.worst(6)
    assert ledger.max_rounds(ledger.worst(1)) == 3  # rounds without it are free


# -- searches -------------------------------------------------------------------------------------------


def spent(settings):
    return account(settings, delta=DELTA, method="rdp").worst


def test_the_largest_correlation_step_and_rounds_keep_the_budget_and_no_more():
    base = run()
    budget = Budget(2 * spent(base), DELTA)
    how = {"method": "rdp"}
    rho = calibrate(budget, base, vary="correlation", **how)
    assert not rho.at_limit
    assert spent(replace(base, correlation=rho.value)) <= budget.epsilon
    assert spent(replace(base, correlation=math.sqrt(1 - 0.99 * (1 - rho.value**2)))) > budget.epsilon
    held = calibrate(budget, base, vary="correlation", most=0.2, **how)
    assert (held.value, held.at_limit) == (0.2, True)
    for first in (1e-3, 1e-1):
        eta = calibrate(budget, run(step_size=first), vary="step-size", **how)
        assert spent(run(step_size=eta.value)) <= budget.epsilon < spent(run(step_size=1.005 * eta.value))
        assert (eta.vary, eta.at_limit) == ("step_size", False)
    held = calibrate(budget, base, vary="step_size", most=1.5e-3, **how)
    assert held.at_limit
    assert held.value == pytest.approx(1.5e-3)
    assert held.value <= 1.5e-3
    rounds = calibrate(budget, base, vary="num_rounds", **how)
    assert spent(run(num_rounds=rounds.value)) <= budget.epsilon < spent(run(num_rounds=rounds.value + 1))
    for most, limited in ((rounds.value, True), (rounds.value + 1, False), (rounds.value - 1, True)):
        found = calibrate(budget, base, vary="num_rounds", most=most, **how)
        assert (found.value, found.at_limit) == (min(most, rounds.value), limited)
    tight = Budget(0.5 * spent(run(num_rounds=1)), DELTA)
    for vary in ("correlation", "num_rounds"):
        with pytest.raises(PrivacyError, match="the least ε is"):
            calibrate(tight, base, vary=vary, **how)


@pytest.fixture
def by_hand(monkeypatch):
    """Searches in which ε is a function of settings, and which remember what they asked."""
    hand = SimpleNamespace(epsilon=lambda settings: 0.0, affordable=0, asked=[], horizons=[])

    def accounted(settings, **_):
        hand.asked.append(settings)
        return SimpleNamespace(worst=hand.epsilon(settings), settings=settings)

    def ledger(settings, **_):
        hand.horizons.append(settings.num_rounds)
        return SimpleNamespace(max_rounds=lambda epsilon: min(hand.affordable, settings.num_rounds))

    monkeypatch.setattr(calibration, "account", accounted)
    monkeypatch.setattr(calibration, "Ledger", ledger)
    return hand


@pytest.mark.parametrize("guess", [0, 1, 20, 497, 500, 503, 900, 1024])
def test_a_run_of_another_length_has_digits_of_its_own(by_hand, guess):
    """The ledger of a longer run may be off by some rounds; what counts is the run as it will be."""
    by_hand.epsilon, by_hand.affordable = (lambda settings: settings.num_rounds / 100), guess
    found = calibrate(Budget(5.0, DELTA), run(), vary="num_rounds")
    assert (found.value, found.report.worst, found.at_limit) == (500, 5.0, False)
    held = calibrate(Budget(5.0, DELTA), run(), vary="num_rounds", most=300)
    assert (held.value, held.at_limit) == (300, True)
    with pytest.raises(PrivacyError, match="no number of rounds"):
        calibrate(Budget(0.0099, DELTA), run(), vary="num_rounds")


@pytest.mark.parametrize(
    ("rounds", "most", "horizons"),
    [
        (1023, None, [1024]), (1024, None, [1024, 8192]), (9000, None, [1024, 8192, 65536]),
        (9000, 2000, [1024, 2000]), (9000, 500, [500]),
    ],
)  # fmt: skip
def test_rounds_are_looked_for_farther_and_farther(by_hand, rounds, most, horizons):
    by_hand.epsilon, by_hand.affordable = (lambda settings: settings.num_rounds), rounds
    found = calibrate(Budget(float(rounds), DELTA), run(), vary="num_rounds", most=most)
    assert (found.value, by_hand.horizons) == (min(rounds, most or rounds), horizons)
    assert found.at_limit is (most is not None)
    by_hand.horizons.clear()
    falling = run(step_size=1e-3 / (1 + np.arange(12.0)))  # a schedule ends where it ends
    found = calibrate(Budget(float(rounds), DELTA), falling, vary="num_rounds")
    assert (found.value, found.at_limit, by_hand.horizons) == (6, True, [6])


@pytest.mark.parametrize("most", [1.5, 10.0, 100.0, 1000.0])
def test_a_step_is_not_looked_for_far_beyond_its_limit(by_hand, most):
    """Of a schedule the largest step is limited, and found where any step keeps the budget."""
    shape = 1e-3 * np.linspace(1.0, 0.1, 12)
    for steps in (1e-3, shape):
        by_hand.asked.clear()
        found = calibrate(Budget(1.0, DELTA), run(step_size=steps), vary="step_size", most=most * 1e-3)
        assert found.at_limit
        assert found.value == pytest.approx(most * 1e-3)
        assert max(np.max(s.step_size) for s in by_hand.asked) <= 256 * most * 1e-3
    assert np.asarray(found.settings.step_size) == pytest.approx(most * shape)


@pytest.mark.parametrize("largest", [1e-9, 0.3e-3, 1e-3, 0.02, 7.0])
def test_a_step_is_found_from_wherever_the_search_begins(by_hand, largest):
    by_hand.epsilon = lambda settings: float(np.max(settings.step_size)) / largest
    for tolerance in (1e-3, 0.1):
        found = calibrate(Budget(1.0, DELTA), run(), vary="step_size", tolerance=tolerance)
        assert largest * (1 - 2.2 * tolerance) <= found.value <= largest
        assert not found.at_limit
    by_hand.epsilon = lambda settings: 2.0
    with pytest.raises(PrivacyError, match="no step-size keeps the budget"):
        calibrate(Budget(1.0, DELTA), run(), vary="step_size")


@pytest.mark.parametrize("scale", [1.0, 1.5, 30.0, 1e5])
def test_a_correlation_is_found_in_the_factor_of_the_noise(by_hand, scale):
    """ε that grows with 1/√(1−ρ²), of which the largest that keeps the budget is wanted."""
    by_hand.epsilon = lambda settings: 1 / math.sqrt(1 - settings.correlation**2)
    found = calibrate(Budget(scale, DELTA), run(), vary="correlation")
    assert scale * (1 - 2e-3) <= by_hand.epsilon(found.settings) <= scale
    assert not found.at_limit
    with pytest.raises(PrivacyError, match="no correlation keeps the budget"):
        calibrate(Budget(0.999, DELTA), run(), vary="correlation")


def test_where_no_number_of_participants_will_do_the_least_epsilon_is_told(by_hand):
    """With noise that follows the weights, ε need not grow with the number."""
    by_hand.epsilon = lambda settings: {4: 3.0, 3: 2.25, 2: 2.5, 1: 4.0}[settings.num_participants]
    drawn = run(sizes=[100] * 4, participation=without_replacement(2))
    with pytest.raises(PrivacyError, match=r"the least ε is 2\.25"):
        calibrate(Budget(2.0, DELTA), drawn, vary="num_participants")
    assert calibrate(Budget(2.25, DELTA), drawn, vary="num_participants").value == 3
    assert calibrate(Budget(2.5, DELTA), drawn, vary="num_participants", most=2).value == 2


def test_the_most_participants_are_found_from_above():
    base = run(sizes=[100] * 4, participation=without_replacement(1), noise="paper")
    each = [spent(replace(base, participation=without_replacement(s))) for s in range(1, 5)]
    assert each == sorted(each)
    how = {"vary": "num_participants", "method": "rdp"}
    for number in range(1, 5):
        found = calibrate(Budget(each[number - 1], DELTA), base, **how)
        assert (found.value, found.at_limit) == (number, number == 4)
    held = calibrate(Budget(each[3], DELTA), base, most=2, **how)
    assert (held.value, held.at_limit) == (2, True)
    with pytest.raises(PrivacyError, match=f"least ε is {each[0]:.4g}"):
        calibrate(Budget(0.99 * each[0], DELTA), base, **how)
    front = pareto_front(Budget(1.01 * each[1], DELTA), base, method="rdp", tolerance=0.05)
    assert [p.num_participants for p in front] == [1, 2, 3, 4]
    assert [p.correlation is None for p in front] == [False, False, True, True]
    assert front[2].epsilon == pytest.approx(each[2])


@pytest.mark.parametrize(
    ("epsilon", "delta"), [(0.0, DELTA), (-1.0, DELTA), (math.inf, DELTA), (1.0, 0.0), (1.0, 1.0)]
)
def test_budgets_have_ranges(epsilon, delta):
    with pytest.raises(ConfigError, match="must be"):
        Budget(epsilon, delta)
    with pytest.raises(ConfigError, match="must be"):
        calibrate((epsilon, delta), run(), vary="num_rounds")


def test_searches_refuse_what_they_cannot_do():
    good = Budget(1.0, DELTA)
    for tolerance in (0.0, 1.0):
        with pytest.raises(ConfigError, match="tolerance"):
            calibrate(good, run(), vary="num_rounds", tolerance=tolerance)
    with pytest.raises(ConfigError, match="where clients are drawn"):
        calibrate(good, run(), vary="num_participants")
    with pytest.raises(ConfigError, match="vary must be one of"):
        calibrate(good, run(), vary="temperature")
    with pytest.raises(ConfigError, match="no realised participation"):
        calibrate(good, run(), vary="num_rounds", participation="realised")
