"""What the bounds certify satisfies them, one step less does not, and it reacts with the right sign."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fald import gaussian, theory
from fald.core.errors import ConfigError
from fald.settings.participation import full, with_replacement, without_replacement
from fald.settings.schedules import paper_decay

DRAWN = {"with-replacement": with_replacement, "without-replacement": without_replacement}
GOOD = theory.Constants(smoothness=4.0, strong_convexity=1.0, dim=3, num_clients=20, initial_distance=1.0)

problems = st.builds(
    lambda m, kappa, **rest: theory.Constants(smoothness=m * kappa, strong_convexity=m, **rest),
    m=st.floats(0.01, 100),
    kappa=st.floats(1, 100),
    dim=st.integers(1, 20),
    num_clients=st.integers(2, 50),
    temperature=st.floats(0.01, 100),
    heterogeneity=st.floats(0.01, 100),
    initial_distance=st.floats(0.01, 100),
)


def changed(constants, **change):
    return theory.Constants(**{**vars(constants), **change})


@settings(max_examples=100, deadline=None)
@given(c=problems, K=st.integers(1, 50), rho=st.floats(0, 1), epsilon=st.floats(1e-3, 1e3))
def test_decaying_steps_are_certified_and_tight(c, K, rho, epsilon):
    plan = theory.decaying_step_complexity(epsilon, c, local_steps=K, correlation=rho)

    def bound(rounds):
        return theory.decaying_step_bound(c, local_steps=K, num_rounds=rounds, correlation=rho).total

    assert bound(plan.num_rounds) <= epsilon * (1 + 1e-9)
    if plan.num_rounds > 0:
        assert bound(plan.num_rounds - 1) > epsilon * (1 - 1e-9)
    assert plan.num_rounds == math.ceil(plan.num_steps / K)
    steps = paper_decay(c.smoothness, c.strong_convexity)
    assert plan.step_size == pytest.approx(float(steps(K * plan.num_rounds)))


def test_decaying_steps_save_the_logarithm():
    # k ~ d/ε² against d/ε² · log: the ratio of the two grows, and k ε² settles
    epsilon = np.array([1e-2, 1e-3, 1e-4])
    decaying = theory.decaying_step_complexity(epsilon, GOOD, local_steps=3).num_steps
    fixed = theory.complexity(epsilon, GOOD, local_steps=3).num_steps
    np.testing.assert_allclose(decaying * epsilon**2, decaying[-1] * epsilon[-1] ** 2, rtol=1e-3)
    assert (np.diff(fixed / decaying) > 0).all()
    for worse in ({"dim": 4}, {"temperature": 2.0}, {"initial_distance": 3.0}, {"smoothness": 5.0}):
        other = theory.decaying_step_complexity(0.01, changed(GOOD, **worse), local_steps=3)
        assert other.num_steps > decaying[0]


def test_decaying_complexity_is_enough_for_the_exact_law():
    rng = np.random.default_rng(0)
    hessians, centers = np.eye(1)[None] * rng.uniform(1, 1.3, (4, 1, 1)), rng.standard_normal((4, 1))
    weights = np.full(4, 0.25)
    goal = gaussian.target(hessians, centers, weights)
    slopes = np.einsum("cij,cj->ci", hessians, goal.mean - centers)
    c = theory.Constants(
        smoothness=hessians.max(), strong_convexity=hessians.min(), dim=1, num_clients=4,
        heterogeneity=np.abs(slopes).max(), initial_distance=float(np.abs(goal.mean)[0]),
    )  # fmt: skip
    plan = theory.decaying_step_complexity(20.0, c, local_steps=2)
    assert 10 < plan.num_rounds < 10_000
    path = gaussian.law(
        hessians, centers, weights, local_steps=2, num_rounds=int(plan.num_rounds),
        step_size=paper_decay(c.smoothness, c.strong_convexity),
    )  # fmt: skip
    assert gaussian.wasserstein2(path.mean[-1], path.covariance[-1], *goal) <= 20.0


@settings(max_examples=100, deadline=None)
@given(
    c=problems, K=st.integers(1, 50), rho=st.floats(0, 1), epsilon=st.floats(1e-2, 1e3),
    scheme=st.sampled_from(sorted(DRAWN)),
)  # fmt: skip
def test_each_third_is_kept_with_the_fewest_devices(c, K, rho, epsilon, scheme):
    plan = theory.drawn_complexity(epsilon, c, local_steps=K, correlation=rho, scheme=scheme)
    S, run = int(plan.num_participants), {"step_size": plan.step_size, "local_steps": K, "correlation": rho}
    assert scheme == "with-replacement" or c.num_clients >= S
    bound = theory.fixed_step_bound(c, num_rounds=plan.num_rounds, participation=DRAWN[scheme](S), **run)
    for term in (bound.initialisation, bound.local_error, bound.partial_participation):
        assert term <= epsilon / 3 * (1 + 1e-9)
    assert bound.total <= epsilon * (1 + 1e-9)
    if S > 1:
        fewer = theory.fixed_step_bound(c, num_rounds=0, participation=DRAWN[scheme](S - 1), **run)
        assert fewer.partial_participation > epsilon / 3 * (1 - 1e-9)
    if plan.num_rounds > 1:
        sooner = theory.fixed_step_bound(c, num_rounds=plan.num_rounds - 1, **run)
        assert sooner.initialisation > epsilon / 3 * (1 - 1e-9)


def test_devices_needed_react_with_the_right_sign():
    def devices(epsilon=4.0, c=GOOD, **change):
        return theory.drawn_complexity(epsilon, c, **{"local_steps": 2, "correlation": 0.5, **change})

    base = devices(scheme="with-replacement").num_participants
    assert devices(2.0, scheme="with-replacement").num_participants == pytest.approx(4 * base, rel=0.01)
    assert devices(c=changed(GOOD, dim=6), scheme="with-replacement").num_participants > 1.9 * base
    assert devices(scheme="with-replacement", correlation=0.9).num_participants < base
    assert devices().num_participants < base
    assert devices(1e9).num_participants == 1
    with pytest.raises(ConfigError, match="scheme must be one of with-replacement, without-replacement"):
        devices(scheme="full")
    with pytest.raises(ConfigError, match=r"needs min-weight = 1/num-clients = 0\.05; got 0\.01"):
        devices(c=changed(GOOD, min_weight=0.01))
    with pytest.raises(ConfigError, match="epsilon must be > 0; got 0"):
        devices(0.0)


@settings(max_examples=40, deadline=None)
@given(
    far=st.floats(100, 1e6), K=st.integers(1, 20), rounds=st.integers(10**4, 10**8), rho=st.floats(0, 1),
    scheme=st.sampled_from([full(), with_replacement(3), without_replacement(3)]),
)  # fmt: skip
def test_best_step_size_is_the_best_of_many(far, K, rounds, rho, scheme):
    c = changed(GOOD, initial_distance=far)
    run = {"local_steps": K, "num_rounds": rounds, "correlation": rho, "participation": scheme}
    tried = np.geomspace(1e-14, 1, 3000) / (2 * c.smoothness)
    totals = theory.fixed_step_bound(c, step_size=tried, **run).total
    start = theory.fixed_step_bound(c, step_size=tried[0], **{**run, "num_rounds": 0})
    if totals.min() >= 0.999 * (start.initialisation + start.partial_participation):
        return  # at the border of what the function refuses
    best = theory.best_step_size(c, **run)
    assert best <= 1 / (2 * c.smoothness)
    assert theory.fixed_step_bound(c, step_size=best, **run).total <= totals.min() * (1 + 1e-9)


def test_best_step_size_falls_with_the_length_of_the_run():
    c = changed(GOOD, initial_distance=1e4)
    found = [theory.best_step_size(c, local_steps=2, num_rounds=n) for n in (10**6, 10**7, 10**8)]
    assert found[0] > found[1] > found[2]
    # almost like 1/T: ten times as long, a little more than a tenth
    assert 1 < 10 * found[2] / found[1] < 2
    with pytest.raises(ConfigError, match="num-rounds = 3 is too few"):
        theory.best_step_size(c, local_steps=2, num_rounds=3)


def test_best_local_steps_grow_like_the_sixth_root_of_the_steps():
    # at fixed ε, d, m and H the steps T grow like κ³, and K like √κ
    kappa = np.geomspace(1e2, 1e6, 9)
    K, T = [], []
    for value in kappa:
        c = theory.Constants(
            smoothness=value, strong_convexity=1.0, dim=2, num_clients=5, initial_distance=1.0
        )
        K.append(theory.best_local_steps(c))
        T.append(theory.complexity(1e-3, c, local_steps=K[-1]).num_steps)
    slope = np.polyfit(np.log(T), np.log(K), 1)[0]
    assert slope == pytest.approx(1 / 6, abs=0.01)
    assert slope < 0.25  # nowhere near the square root
