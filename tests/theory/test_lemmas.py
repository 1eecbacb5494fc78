"""The lemmas bound exact laws and simulations, react with the right sign, and know their ranges."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fald import gaussian, theory
from fald.core.errors import ConfigError
from fald.settings.participation import full, with_replacement, without_replacement
from helpers import random_federation

GOOD = theory.Constants(smoothness=4.0, strong_convexity=1.0, dim=3, num_clients=5, initial_distance=1.0)


def changed(constants, **change):
    return theory.Constants(**{**vars(constants), **change})


def curved(rng, m, L, d):
    """Gradient of an energy that is no quadratic, with curvatures from m to L in every direction."""
    basis, place = np.linalg.qr(rng.standard_normal((d, d)))[0], rng.standard_normal(d)
    sharp = 10.0 ** rng.uniform(-1, 2, d)

    def gradient(theta):
        along = (theta - place) @ basis
        return (m * along + (L - m) * np.tanh(sharp * along) / sharp) @ basis.T

    return gradient


@pytest.mark.parametrize("seed", range(30))
def test_contraction_holds_for_any_points(seed):
    rng = np.random.default_rng(seed)
    n, d, m = int(rng.integers(1, 8)), int(rng.integers(1, 6)), 10.0 ** rng.uniform(-2, 2)
    L = m * 10.0 ** rng.uniform(0, 3)
    c = theory.Constants(smoothness=L, strong_convexity=m, dim=d, num_clients=n)
    clients, p = [curved(rng, m, L, d) for _ in range(n)], rng.dirichlet(np.ones(n))
    eta = rng.choice([1.0, 0.5, 1e-3]) / (L + m)
    largest = 0.0
    for _ in range(200):
        spread = 10.0 ** rng.uniform(-4, 2) * rng.standard_normal((n, d))
        local, bar = rng.standard_normal(d) + spread, 10.0 ** rng.uniform(-2, 1) * rng.standard_normal(d)
        theta = p @ local
        drift = sum(w * (g(bar) - g(own)) for w, g, own in zip(p, clients, local))
        left = np.sum((bar - theta - eta * drift) ** 2)
        apart, divergence = np.sum((bar - theta) ** 2), p @ np.sum((local - theta) ** 2, 1)
        bound = theory.contraction_bound(
            c, step_size=eta, squared_distance=apart, squared_divergence=divergence
        )
        largest = max(largest, left / bound)
        more = {"squared_distance": 2 * apart, "squared_divergence": divergence}
        assert theory.contraction_bound(c, step_size=eta, **more) > bound
    assert largest <= 1


def test_contraction_is_nearly_reached():
    # the twin: on an isotropic quadratic with clients together, left/bound is 1 − ηm
    c = theory.Constants(smoothness=1.0, strong_convexity=1.0, dim=1)
    bound = theory.contraction_bound(c, step_size=0.1, squared_distance=1.0, squared_divergence=0.0)
    assert 0.9 * bound == pytest.approx(0.9**2)
    assert theory.contraction_bound(c, step_size=0.2, squared_distance=1.0, squared_divergence=0.0) < bound
    apart = {"squared_distance": 0.0, "squared_divergence": 1.0}
    assert theory.contraction_bound(c, step_size=0.2, **apart) > theory.contraction_bound(
        c, step_size=0.1, **apart
    )


@settings(max_examples=200, deadline=None)
@given(
    curvatures=st.lists(st.floats(0.01, 100), min_size=1, max_size=10), tau=st.floats(0.01, 10),
    share=st.floats(1e-4, 1.99),
)  # fmt: skip
def test_diffusion_moves_less_than_the_discretisation_bound(curvatures, tau, share):
    h = np.array(curvatures)
    c = theory.Constants(
        smoothness=h.max(), strong_convexity=h.min(), dim=len(h), num_clients=1, temperature=tau
    )
    eta = share / c.strong_convexity
    # an Ornstein-Uhlenbeck process in its stationary law, over the whole step
    moved = np.sum(2 * tau / h * -np.expm1(-eta * h))
    bound = theory.discretisation_bound(c, step_size=eta)
    assert moved <= bound
    assert theory.discretisation_bound(c, step_size=2 * eta) > bound
    assert theory.discretisation_bound(changed(c, temperature=2 * tau), step_size=eta) > bound


def test_discretisation_bound_is_within_ten_of_short_steps():
    c = theory.Constants(smoothness=1.0, strong_convexity=1.0, dim=2, temperature=3.0)
    moved = 2 * 2 * 3.0 * -np.expm1(-1e-4)
    assert moved > theory.discretisation_bound(c, step_size=1e-4) / 10


@pytest.mark.parametrize("seed", range(100))
def test_one_step_bound_covers_every_step_and_every_round_of_the_exact_law(seed):
    rng = np.random.default_rng(seed)
    problem, goal, start, c, run, step, _ = random_federation(rng, False)
    K, rho = (1 if seed % 2 else run["local_steps"]), run["correlation"]
    settings = {"temperature": c.temperature, "correlation": rho}
    path = gaussian.law(
        *problem, step_size=step, local_steps=K, num_rounds=30, initial_position=start, **settings
    )
    limit = gaussian.stationary(*problem, step_size=step, local_steps=K, **settings)
    rest = float(gaussian.wasserstein2(*limit, *goal))
    exact = gaussian.wasserstein2(*path, *goal)
    bound = np.append(exact[:-1], rest)
    for _ in range(K):
        bound = theory.one_step_bound(c, step_size=step, local_steps=K, distance=bound, correlation=rho)
    assert (np.append(exact[1:], rest) <= bound * (1 + 1e-12)).all()
    # the twin: contraction alone, without what a step adds, would leave less than the limit's distance
    assert rest * (1 - step * c.strong_convexity / 2) ** (K / 2) < rest
    # from inside a round: K − 1 steps of clients that started together
    if K > 1:
        inner = gaussian.law(
            *problem, step_size=step, local_steps=K - 1, num_rounds=1, initial_position=path.mean[-2],
            initial_covariance=path.covariance[-2], **settings,
        )  # fmt: skip
        before = float(gaussian.wasserstein2(inner.mean[-1], inner.covariance[-1], *goal))
        after = theory.one_step_bound(c, step_size=step, local_steps=K, distance=before, correlation=rho)
        assert exact[-1] <= after


@settings(max_examples=60, deadline=None)
@given(share=st.floats(0.001, 1), K=st.integers(1, 30), rho=st.floats(0, 1), rounds=st.integers(0, 20))
def test_fixed_step_bound_follows_from_one_step_bounds(share, K, rho, rounds):
    eta = share / (2 * GOOD.smoothness)
    run = {"step_size": eta, "local_steps": K, "correlation": rho}
    distance = theory.initial_distance_bound(GOOD)
    for _ in range(rounds * K):
        distance = theory.one_step_bound(GOOD, distance=distance, **run)
    assert distance <= theory.fixed_step_bound(GOOD, num_rounds=rounds, **run).total * (1 + 1e-12)


def simulated(rng, federation, sigma, participation, chains=400):
    """Largest squared quantities of three rounds of clients with noisy gradients, by name."""
    (H, x, p), goal, start, c, run, step, _ = federation
    eta, rho, K = min(5 * step, 1 / c.smoothness), run["correlation"], run["local_steps"]
    n, d = x.shape
    theta = np.tile(start, (chains, n, 1))
    own = np.sqrt((1 - rho**2) / p)[:, None]
    found = dict.fromkeys(("second_moment", "gradient", "gradient_variance", "drawing"), 0.0)

    def see(name, value):
        found[name] = max(found[name], float(value))

    for _ in range(3):
        for _ in range(K):
            see("second_moment", np.sum((theta - goal.mean) ** 2, -1).mean(0).max())
            error = sigma * rng.standard_normal((chains, n, d))
            drift = np.einsum("cpq,ncq->ncp", H, theta - x) + error
            see("gradient", np.sum(drift**2, -1).mean(0).max())
            see("gradient_variance", np.sum(np.einsum("c,ncp->np", p, error) ** 2, -1).mean())
            noise = rho * rng.standard_normal((chains, 1, d)) + own * rng.standard_normal((chains, n, d))
            theta = theta - eta * drift + np.sqrt(2 * eta * c.temperature) * noise
        average = np.einsum("c,ncp->np", p, theta)
        weights = np.zeros((chains, n))
        for i in range(chains):
            if participation.scheme == "with-replacement":
                np.add.at(weights[i], rng.choice(n, participation.num_participants, p=p), 1.0)
            else:
                weights[i, rng.choice(n, participation.num_participants, replace=False)] = 1.0
        weights /= participation.num_participants
        drawn = np.einsum("nc,ncp->np", weights, theta)
        see("drawing", np.sum((drawn - average) ** 2, -1).mean())
        theta = np.repeat(drawn[:, None], n, 1)
    return found, {"step_size": eta, "correlation": rho}, K


@pytest.mark.parametrize("seed", range(12))
@pytest.mark.parametrize("scheme", [with_replacement, without_replacement])
def test_lemmas_bound_what_is_simulated(seed, scheme):
    rng = np.random.default_rng(seed)
    federation = random_federation(rng, scheme is without_replacement)
    constants, draws = federation[3], federation[6]
    sigma = 10.0 ** rng.uniform(-1, 1) * constants.smoothness
    c, participation = changed(constants, gradient_noise=sigma), scheme(draws)
    found, run, K = simulated(rng, federation, sigma, participation)
    bounds = {
        "second_moment": theory.second_moment_bound(c, **run),
        "gradient": theory.gradient_bound(c, **run),
        "gradient_variance": theory.gradient_variance_bound(c),
        "drawing": theory.drawing_divergence_bound(c, local_steps=K, participation=participation, **run),
    }
    everyone = scheme is without_replacement and draws == c.num_clients
    for name, value in found.items():
        assert value <= bounds[name] * (1 + 1e-12) + 1e-20 * everyone * c.initial_distance**2, name
        if not (name == "drawing" and everyone):
            assert value > 0
    # what is measured is within three orders of magnitude of some bound: a thousandth of it would be too low
    assert any(1000 * found[name] > bounds[name] for name in found)
    # the start alone is already dD², so that a bound without it would be too low
    assert found["second_moment"] >= c.dim * c.initial_distance**2 * (1 - 1e-9)


def test_drawing_divergence_is_nearly_reached_by_pure_noise():
    # flat enough that only noise matters, ρ = 0: E‖β−θ‖² = (C_S/S)(1 − 1/N)·2KηdτN, the bound has 4
    c = theory.Constants(smoothness=1.0, strong_convexity=1.0, dim=2, num_clients=50)
    run = {"step_size": 1e-9, "local_steps": 7, "participation": with_replacement(10)}
    exact = (1 - 1 / 50) / 10 * 2 * 7 * 1e-9 * 2 * 50
    bound = theory.drawing_divergence_bound(c, **run)
    assert exact <= bound < 2.1 * exact


@settings(max_examples=50, deadline=None)
@given(factor=st.floats(1.1, 10), rho=st.floats(0, 0.8), K=st.integers(1, 50), share=st.floats(0.01, 0.5))
def test_lemmas_react_with_the_right_sign(factor, rho, K, share):
    base = changed(GOOD, heterogeneity=1.0, gradient_noise=1.0)
    run = {"step_size": share * 2 / 5 / factor, "correlation": rho}

    def values(c=base, K=K, S=2, **change):
        now = {**run, **change}
        drawn = {
            s.__name__: theory.drawing_divergence_bound(c, local_steps=K, participation=s(S), **now)
            for s in (with_replacement, without_replacement)
        }
        step = {**now, "step_size": now["step_size"] / 4}
        return {
            "second": theory.second_moment_bound(c, **now),
            "gradient": theory.gradient_bound(c, **now),
            "divergence": theory.divergence_bound(c, local_steps=K, **now),
            "one": theory.one_step_bound(c, local_steps=K, distance=1.0, **step),
            **drawn,
        }

    here = values()
    for source in ("temperature", "heterogeneity", "gradient_noise", "initial_distance"):
        there = values(changed(base, **{source: factor * getattr(base, source)}))
        assert all(there[name] >= here[name] for name in here)
        assert there["second"] > here["second"]
        assert there["gradient"] > here["gradient"]
    cooler, longer = values(correlation=rho + 0.1), values(K=K + 1)
    bolder = values(step_size=factor * run["step_size"])
    assert all(cooler[name] <= here[name] for name in here)
    assert all(longer[name] >= here[name] for name in here)
    drawn = ("with_replacement", "without_replacement")
    assert all(longer[name] > here[name] and bolder[name] > here[name] for name in drawn)
    assert all(values(S=3)[name] < here[name] for name in drawn)
    assert values(S=5)["without_replacement"] == 0
    noisier = changed(base, gradient_noise=factor)
    assert theory.gradient_variance_bound(noisier) > theory.gradient_variance_bound(base)


def test_a_round_of_all_clients_draws_nothing():
    assert theory.drawing_divergence_bound(GOOD, step_size=0.1, local_steps=3, participation=full()) == 0


@settings(max_examples=60, deadline=None)
@given(
    a=st.floats(1e-3, 1e3), b=st.floats(1e-3, 1e3), share=st.floats(0.01, 1), K=st.integers(1, 40),
    rho=st.floats(0, 1),
)  # fmt: skip
def test_no_bound_depends_on_the_units(a, b, share, K, rho):
    c = changed(GOOD, heterogeneity=2.0, gradient_noise=0.7, temperature=1.3)
    other = theory.rescaled(c, length=a, energy=b)
    assert other.condition_number == pytest.approx(c.condition_number)
    eta = share / (2 * c.smoothness)
    run = {"local_steps": K, "correlation": rho}

    def both(fn, power, **more):
        here = fn(c, **{"step_size": eta, **run, **more})
        there = fn(other, **{"step_size": a**2 / b * eta, **run, **more})
        here, there = (getattr(value, "total", value) for value in (here, there))
        assert there == pytest.approx(a**power * here)

    for scheme in (full(), with_replacement(2), without_replacement(2)):
        both(theory.fixed_step_bound, 1, num_rounds=50, participation=scheme)
        both(theory.drawing_divergence_bound, 2, participation=scheme)
    both(theory.divergence_bound, 2)
    step = {"step_size": eta, "correlation": rho}
    scaled = {"step_size": a**2 / b * eta, "correlation": rho}
    moments = theory.second_moment_bound(c, **step), theory.second_moment_bound(other, **scaled)
    assert moments[1] == pytest.approx(a**2 * moments[0])
    gradients = theory.gradient_bound(c, **step), theory.gradient_bound(other, **scaled)
    assert gradients[1] == pytest.approx((b / a) ** 2 * gradients[0])
    plans = [theory.complexity(e, p, local_steps=K, correlation=rho) for e, p in ((0.1, c), (0.1 * a, other))]
    assert plans[1].num_steps == pytest.approx(plans[0].num_steps, rel=1e-6)
    # the twin: a step size that is not rescaled with them
    wrong = theory.fixed_step_bound(other, step_size=a**2 / b * eta / 2, num_rounds=50, **run).total
    assert wrong != pytest.approx(a * theory.fixed_step_bound(c, step_size=eta, num_rounds=50, **run).total)


@settings(max_examples=60, deadline=None)
@given(eta=st.floats(1e-6, 0.1), m=st.floats(0.01, 10), D=st.floats(0, 10), sigma=st.floats(0, 10))
def test_the_remark_on_scales(eta, m, D, sigma):
    # K = 1, τ = 1, γ = 0: √(ηdmH₀) ≤ √(ηdm)D + √(ηd/min p) + σ√(ηd/m); the printed middle term leaves 1/p out
    c = theory.Constants(
        smoothness=m, strong_convexity=m, dim=3, num_clients=4, gradient_noise=sigma, initial_distance=D
    )
    root = math.sqrt(eta * 3 * m * c.sources().sum())
    parts = math.sqrt(eta * 3 * m) * D, math.sqrt(eta * 3 * 4), sigma * math.sqrt(eta * 3 / m)
    assert root <= sum(parts) * (1 + 1e-12)
    assert root >= max(parts) * (1 - 1e-12)


BEYOND = {"step_size": 1.9, "correlation": 0.0}


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda c: theory.second_moment_bound(c, **BEYOND), r"step-size must be ≤ 2/\(L\+m\) = 0.4; got 1.9"),
        (lambda c: theory.gradient_bound(c, **BEYOND), r"step-size must be ≤ 2/\(L\+m\)"),
        (
            lambda c: theory.drawing_divergence_bound(
                c, local_steps=2, participation=with_replacement(2), **BEYOND
            ),
            r"step-size must be ≤ 2/\(L\+m\)",
        ),
        (
            lambda c: theory.contraction_bound(c, step_size=0.3, squared_distance=1, squared_divergence=1),
            r"step-size must be ≤ 1/\(L\+m\) = 0.2; got 0.3",
        ),
        (
            lambda c: theory.contraction_bound(c, step_size=0.1, squared_distance=-1, squared_divergence=1),
            "squared-distance must be ≥ 0; got -1",
        ),
        (lambda c: theory.discretisation_bound(c, step_size=0), "step-size must be > 0; got 0"),
        (
            lambda c: theory.one_step_bound(c, step_size=0.2, local_steps=1, distance=1.0),
            r"step-size must be ≤ 1/\(2L\) = 0.125; got 0.2",
        ),
        (
            lambda c: theory.one_step_bound(c, step_size=0.1, local_steps=1, distance=math.nan),
            "distance must be ≥ 0; got nan",
        ),
        (
            lambda c: theory.drawing_divergence_bound(
                changed(c, min_weight=0.1), step_size=0.1, local_steps=1, participation=without_replacement(2)
            ),
            r"needs min-weight = 1/num-clients = 0\.2; got 0\.1",
        ),
        (lambda c: theory.rescaled(c, length=0), "length must be a finite number > 0; got 0"),
    ],
)
def test_failed_preconditions_are_named(call, message):
    with pytest.raises(ConfigError, match=message):
        call(GOOD)


def test_steps_that_the_paper_allows_and_that_diverge():
    # η < 2/m, yet a client of curvature L leaves every bound after a few steps
    c = theory.Constants(smoothness=10.0, strong_convexity=1.0, dim=1, num_clients=1, initial_distance=1.0)
    eta, moment = 1.9, 1.0
    assert eta < 2 / c.strong_convexity
    for _ in range(3):
        moment = (1 - eta * c.smoothness) ** 2 * moment + 2 * eta
    allowed = 2 / (c.smoothness + c.strong_convexity)
    assert moment > 1000 * theory.second_moment_bound(c, step_size=allowed)
    assert c.smoothness**2 * moment > 100 * theory.gradient_bound(c, step_size=allowed)
