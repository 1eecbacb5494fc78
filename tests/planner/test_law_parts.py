"""The planner's law of a chain, part by part: against sums written out, client by client and step by step."""

from __future__ import annotations

import itertools
import math
from types import SimpleNamespace

import numpy as np
import pytest

from fald import gaussian
from fald.core.errors import ConfigError
from fald.planner import law
from fald.planner.law import Chain, Goal, Problem
from fald.settings.fald import Setting
from fald.settings.participation import full, with_replacement, without_replacement
from fald.theory.gaussian import Law

RNG = np.random.default_rng(4)
N, D = 3, 2
P = np.array([0.2, 0.3, 0.5])
SCHEMES = {
    "full": full(), "I": with_replacement(2), "II": without_replacement(2, allow_unequal=True),
}  # fmt: skip


def positive(scale=1.0):
    a = RNG.normal(size=(D, D))
    return scale * (a @ a.T + 0.5 * np.eye(D))


HESSIANS = np.stack([positive(), positive(2.0), positive(0.5)])
CENTERS = RNG.normal(size=(N, D))


def problem(**more):
    made = Problem.from_gaussian(HESSIANS, CENTERS, P)
    given = {
        name: getattr(made, name) for name in ("hessians", "gradients", "weights", "start", "parameters")
    }
    return Problem(**{**given, **more})


# -- goals and problems ---------------------------------------------------------------------------------


def test_goals_have_ranges():
    goal = Goal()
    assert (goal.bias, goal.sd_error, goal.w2, goal.ess) == (0.05, 0.05, math.inf, 2000.0)
    assert (goal.num_chains, goal.ess_per_chain) == (32, 150.0)
    for name in ("bias", "sd_error", "w2"):
        for wrong in (0.0, -1.0, math.nan):
            with pytest.raises(ConfigError, match=f"{name.replace('_', '-')} must be > 0"):
                Goal(**{name: wrong})
    for wrong in ({"num_chains": 0}, {"ess": -1.0}, {"ess_per_chain": -1.0}):
        with pytest.raises(ConfigError, match="ess must be ≥ 0 and num-chains ≥ 1"):
            Goal(**wrong)
    assert Goal(num_chains=1, ess=0.0, ess_per_chain=0.0).draws == 0.0
    assert Goal(ess=3200.0, num_chains=10).draws == 320.0
    assert Goal(ess=1000.0, num_chains=10).draws == 150.0
    assert Goal(ess=0.0).draws == 0.0
    assert Goal(ess=0.5, num_chains=1, ess_per_chain=0.0).draws == 0.5


def test_a_linear_energy_has_a_centre_far_away_and_a_flat_one_none():
    turn = np.linalg.qr(np.random.default_rng(0).normal(size=(3, 3)))[0]
    hessian = turn @ np.diag([4.0, 0.0, 0.0]) @ turn.T
    made = problem(
        hessians=np.stack([hessian, np.eye(3)]), gradients=np.stack([turn @ [5.0, 2.0, 1e-12], np.ones(3)]),
        weights=np.array([0.5, 0.5]), directions=np.stack([turn, np.eye(3)]), start=np.zeros(3),
        parameters=("a", "b", "c"),
    )  # fmt: skip
    values, basis, centers = made.spectrum
    np.testing.assert_allclose(values, [[4, 4e-9, 0], [1, 1, 1]], atol=1e-15)
    np.testing.assert_array_equal(basis, made.directions)
    np.testing.assert_allclose(centers, [[-1.25, -5e8, 0], [-1, -1, -1]], rtol=1e-6)


def test_precision_and_largest_step():
    made = problem()
    np.testing.assert_allclose(made.precision, sum(p * h for p, h in zip(P, HESSIANS)))
    most = max(np.linalg.eigvalsh(h)[-1] for h in HESSIANS)
    assert made.largest_step == pytest.approx(1 / most)
    for smoothness, wanted in ((10 * most, 10 * most), (0.1 * most, most)):
        known = problem(constants=SimpleNamespace(smoothness=smoothness))
        assert known.largest_step == pytest.approx(1 / wanted)


def test_skews_are_turned_into_the_basis():
    skews = RNG.normal(size=(N, D, D))
    made = problem(skews=skews)
    basis = made.spectrum[1]
    for c, k, i in itertools.product(range(N), range(D), range(D)):
        assert made.bends[c, i, k] == pytest.approx(basis[c, :, i] @ skews[c, k])


# -- chains ---------------------------------------------------------------------------------------------


def by_hand(rates=(0.3, 1.6), start=(4.0, -3.0)):
    covariance = np.array([[2.0, 0.7], [0.7, 3.0]])
    turn = np.array([[0.8, -0.6], [0.6, 0.8]])
    goal = Law(np.zeros(2), np.diag([1.9, 3.2]))
    return Chain(Law(np.array([0.1, -0.2]), covariance), goal, np.array(start), np.array(rates), turn)


@pytest.mark.parametrize("rates", [(0.3, 1.6), (0.3, 1.0), (1.2, 1.9), (1e-3, 0.5)])
def test_rounds_follow_the_recursion(rates):
    """m' = (1 − r)m + r m∞ and the covariance whose limit is that of the chain; a rate above 1 alternates."""
    chain = by_hand(rates)
    left = 1 - np.array(rates)
    mean, covariance = chain.start, np.zeros((2, 2))
    added = chain.stationary.covariance * (1 - np.outer(left, left))
    for r in range(7):
        found = chain.at(r)
        np.testing.assert_allclose(found.mean, mean, rtol=1e-9, atol=1e-12)
        np.testing.assert_allclose(found.covariance, covariance, rtol=1e-9, atol=1e-12)
        mean = chain.stationary.mean + left * (mean - chain.stationary.mean)
        covariance = np.outer(left, left) * covariance + added
    assert chain.at(math.inf) is chain.stationary


def test_errors_are_those_of_parameters_in_posterior_sds():
    chain = by_hand()
    there = Law(np.array([0.5, 0.4]), np.array([[2.5, 0.1], [0.1, 2.0]]))
    for goal in (None, Law(np.array([1.0, 2.0]), np.array([[1.0, 0.2], [0.2, 4.0]]))):
        mean, covariance = chain.posterior if goal is None else goal
        own = chain.basis @ covariance @ chain.basis.T
        other = chain.basis @ there.covariance @ chain.basis.T
        shift, sd = chain.errors(there, goal)
        np.testing.assert_allclose(shift, chain.basis @ (there.mean - mean) / np.sqrt(np.diag(own)))
        np.testing.assert_allclose(sd, np.sqrt(np.diag(other) / np.diag(own)) - 1)
        narrow = chain.errors(there._replace(covariance=there.covariance / 100), goal)[1]
        np.testing.assert_allclose(narrow + 1, (sd + 1) / 10)  # also below a variance of one


def test_the_worst_error_counts_with_its_sign_left_out():
    chain = by_hand(start=(0.0, 0.0))
    shift, sd = chain.errors(chain.stationary)
    assert chain.excess(math.inf, Goal(bias=0.01, sd_error=1e9)) == pytest.approx(np.abs(shift).max() / 0.01)
    assert chain.excess(math.inf, Goal(bias=1e9, sd_error=0.02)) == pytest.approx(np.abs(sd).max() / 0.02)
    distance = gaussian.wasserstein2(*chain.stationary, *chain.posterior)
    for w2 in (1e-3, 1e-1):
        found = chain.excess(math.inf, Goal(bias=1e9, sd_error=1e9, w2=w2))
        assert found == pytest.approx(float(distance) / w2)


@pytest.mark.parametrize("rates", [(0.3, 1.6), (0.02, 0.05), (1.0, 1.97), (0.02, 1.98), (0.7, 0.7)])
@pytest.mark.parametrize(("start", "allowed"), [((4.0, -3.0), 0.06), ((-0.3, 0.2), 0.3)])
def test_arrival_is_the_first_round_from_which_on_the_goal_is_met(rates, start, allowed):
    chain, goal = by_hand(rates, start), Goal(bias=allowed, sd_error=allowed)
    towards = chain.stationary
    wrong = [r for r in range(600) if chain.excess(r, goal, towards) > 1]
    assert chain.arrival(goal, towards) == (wrong[-1] + 1 if wrong else 0)


@pytest.mark.parametrize(
    ("rates", "start", "most"),
    [
        ((0.029, 0.459), (1.1, 0.5), 0.9),
        ((0.025, 0.283), (1.26, 2.94), 2.0),
        ((0.012, 0.436), (1.02, 2.5), 2.0),
        ((0.044, 0.36), (1.16, 0.36), 2.0),
        ((0.011, 0.254), (1.05, 0.29), 0.9),
        ((0.017, 0.423), (1.19, 146.8), 0.9),
        ((0.013, 0.356), (1.15, 61.6), 2.0),
        ((0.016, 0.296), (1.04, 0.05), 2.0),
        ((0.013, 0.26), (1.12, 0.16), 2.0),
    ],
)
def test_a_goal_that_is_met_for_a_while_only_is_not_met(rates, start, most):
    """Where a fast part and a slow one cancel, errors grow again after some rounds."""
    chain, goal = by_hand(rates, start), Goal(bias=0.5, sd_error=most)
    met = [chain.excess(r, goal, chain.stationary) <= 1 for r in range(120)]
    last = max(r for r in range(120) if not met[r])
    assert any(met[:last])  # or it would show nothing
    assert chain.arrival(goal, chain.stationary) == last + 1


def test_a_goal_that_is_never_met_has_no_arrival():
    chain = by_hand()
    limit = chain.excess(math.inf, Goal(bias=1.0, sd_error=1.0))
    assert chain.arrival(Goal(bias=0.999 * limit, sd_error=0.999 * limit)) is None
    assert chain.arrival(Goal(bias=1.001 * limit, sd_error=1.001 * limit)) is not None


@pytest.mark.parametrize("rates", [(0.3, 0.05), (1.6, 1.9), (0.3, 1.9)])
@pytest.mark.parametrize("thinning", [1, 2, 5])
def test_autocorrelation_times_are_sums_over_lags(thinning, rates):
    """Draws that alternate count as independent: no more is promised than one effective draw of each."""
    chain = by_hand(rates)
    left = np.diag((1 - chain.rates) ** thinning)
    sums, power = np.zeros((2, 2)), np.eye(2)
    for _ in range(2000):
        power = power @ left
        sums += power @ chain.stationary.covariance
    own = np.diag(chain.basis @ chain.stationary.covariance @ chain.basis.T)
    lagged = np.diag(chain.basis @ sums @ chain.basis.T)
    np.testing.assert_allclose(chain.autocorrelation_time(thinning), np.maximum(1 + 2 * lagged / own, 1))
    assert (thinning == 1 and rates[0] > 1) <= bool(np.all(1 + 2 * lagged / own < 1))  # the twin


# -- what a setting does --------------------------------------------------------------------------------


@pytest.mark.parametrize("steps", [1, 6])
@pytest.mark.parametrize("scheme", sorted(SCHEMES))
@pytest.mark.parametrize("rho", [0.0, 0.6])
def test_batches_add_what_their_gradients_scatter(scheme, steps, rho):
    sizes, scatters = np.array([4, 30, 66]), np.stack([positive(0.1), positive(0.2), positive(0.3)])
    made = problem(scatters=scatters, sizes=sizes)
    common = {"correlation": rho, "participation": SCHEMES[scheme], "temperature": 0.7}
    whole, some = (Setting(steps, 0.1, batch_size=b, **common) for b in (None, 10))
    drawn = gaussian.drawn(P, some)
    chance, spread, _ = drawn
    rounds = law._rounds(made.spectrum[0], some, drawn)
    found = law._added(made, some, rounds) - law._added(made, whole, rounds)
    expected = np.zeros((D, D))
    for c in range(N):
        noise = 100**2 / 10 * max(0.0, 1 - 10 / sizes[c]) * scatters[c]
        share = (1 - spread) * chance[c] ** 2 + spread * chance[c]
        step = np.eye(D)
        for _ in range(steps):
            expected += share * 0.1**2 * step @ noise @ step.T
            step = step @ (np.eye(D) - 0.1 * HESSIANS[c])
    np.testing.assert_allclose(found, expected, rtol=1e-9, atol=1e-12)
    unknown = problem(scatters=scatters)
    np.testing.assert_allclose(law._added(unknown, some, rounds), law._added(made, whole, rounds))


@pytest.mark.parametrize(
    "factors", [(0.99, 0.9), (0.999, 0.95), (-0.5, 0.9), (1.0, 1.0), (0.0, 0.5), (1.001, 1.0)], ids=str
)
@pytest.mark.parametrize("steps", [1, 2, 5, 60, 300])
def test_shared_noise_adds_coherently_over_clients(factors, steps):
    basis = np.linalg.qr(RNG.normal(size=(N, D, D)))[0]
    powers = np.array([factors, factors[::-1], factors])[:, :, None] ** np.arange(steps)
    found = law._shared(basis, SimpleNamespace(left=powers, chance=P))
    expected = np.zeros((D, D))
    for j in range(steps):
        mixed = sum(p * q @ np.diag(x[:, j]) @ q.T for p, q, x in zip(P, basis, powers))
        expected += mixed @ mixed.T
    np.testing.assert_allclose(found, expected, rtol=1e-5)


def heat_of_a_client(scheme, noise, share, number):
    """E[w v] / E[w] of one client over all that can be drawn."""
    if scheme == "full":
        return 1 / share
    total, mean = 0.0, 0.0
    if scheme == "I":
        for drawn in itertools.product((0, 1), repeat=number):
            chance = math.prod(share if d else 1 - share for d in drawn)
            w = sum(drawn) / number
            v = (1 / share if noise == "paper" else 1 / w) if w else 0.0
            total, mean = total + chance * w * v, mean + chance * w
        return total / mean
    w = 1 / number
    return 1 / share if noise == "paper" else 1 / w


@pytest.mark.parametrize("noise", ["realised", "paper"])
@pytest.mark.parametrize("scheme", sorted(SCHEMES))
@pytest.mark.parametrize("rho", [0.0, 0.6])
def test_third_order_terms_are_their_sums(scheme, noise, rho):
    """δm and the changed curvatures of the module's formulas, client by client and step by step."""
    eta, steps, temperature = 0.1, 4, 0.7
    skews = 0.2 * RNG.normal(size=(N, D, D))
    run = {"correlation": rho, "participation": SCHEMES[scheme], "noise": noise}
    setting = Setting(steps, eta, temperature=temperature, **run)
    plain, bent = problem(), problem(skews=skews)
    goal = gaussian.target(HESSIANS, CENTERS, P, temperature)
    exact = gaussian.stationary(
        HESSIANS, CENTERS, P, step_size=eta, local_steps=steps, temperature=temperature, **run
    )
    chance = np.full(N, 1 / N) if scheme == "II" else P
    gains, pulls = np.zeros((D, D)), np.zeros(D)
    for c in range(N):
        inside = np.eye(D) - eta * HESSIANS[c]
        gains += chance[c] * (np.eye(D) - np.linalg.matrix_power(inside, steps))
        heat = heat_of_a_client(scheme, noise, P[c], 2)
        local = exact.covariance
        added = 2 * eta * temperature * ((1 - rho**2) * heat + rho**2) * np.eye(D)
        for j in range(steps):
            basis = plain.spectrum[1][c]
            hotter = [q @ (local - goal.covariance) @ q for q in basis.T]
            force = -0.5 * sum(h * skews[c, k] for k, h in enumerate(hotter))
            pulls += chance[c] * eta * np.linalg.matrix_power(inside, steps - 1 - j) @ force
            local = inside @ local @ inside + added
    mean = exact.mean - goal.mean + np.linalg.solve(gains, pulls)
    found = law.chain(bent, setting)
    np.testing.assert_allclose(found.basis @ found.stationary.mean, mean, rtol=1e-7, atol=1e-10)
    # the covariance is that of curvatures where the local chains spend their steps
    changed, clipped = [], []
    for c in range(N):
        values, basis = np.linalg.eigvalsh(HESSIANS[c]), plain.spectrum[1][c]
        inside, center = np.eye(D) - eta * HESSIANS[c], CENTERS[c] - goal.mean
        usual = np.mean(
            [center + np.linalg.matrix_power(inside, j) @ (mean - center) for j in range(steps)], axis=0
        )
        change = np.array([skews[c, k] @ usual for k in range(D)])
        clipped.append(np.clip(change, -0.5 * values, 0.5 * values))
        changed.append(basis @ np.diag(values + clipped[-1]) @ basis.T)
    expected = gaussian.stationary(
        np.stack(changed), CENTERS, P, step_size=eta, local_steps=steps, temperature=temperature, **run
    )
    covariance = found.basis @ found.stationary.covariance @ found.basis.T
    np.testing.assert_allclose(covariance, expected.covariance, rtol=1e-7)
    assert not np.allclose(covariance, exact.covariance, rtol=0.01)  # the twin


@pytest.mark.parametrize("sign", [1, -1])
def test_a_curvature_changes_by_at_most_half(sign):
    """Far from the mode the third-order term would make a curvature negative, or anything."""
    hessians, centers = np.array([[[2.0]], [[2.0]]]), np.array([[-1.0], [1.0]])
    made = Problem.from_gaussian(hessians, centers, [0.5, 0.5])
    far = Problem(
        made.hessians, made.gradients, made.weights, made.start, made.parameters,
        skews=sign * np.array([[[1e3]], [[-1e3]]]),
    )  # fmt: skip
    setting = Setting(3, 0.1)
    found = law.chain(far, setting).stationary.covariance
    factor = 1 - 0.5 * sign
    expected = gaussian.stationary(factor * hessians, centers, [0.5, 0.5], step_size=0.1, local_steps=3)
    np.testing.assert_allclose(found, expected.covariance, rtol=1e-9)


def test_schedules_and_temperature_zero_have_no_law():
    with pytest.raises(ConfigError, match="got a schedule"):
        law.chain(problem(), Setting(2, lambda k: 0.1))
    with pytest.raises(ConfigError, match="no law"):
        law.chain(problem(), Setting(2, 0.1, temperature=0.0))
    for other in ({"momentum": 0.5}, {"preconditioner": "rms"}):
        with pytest.raises(ConfigError, match="momentum and preconditioner must be left out"):
            law.chain(problem(), Setting(2, 0.1, **other))
