"""Bounds against the formulas of the theorems, written out term by term."""

import math

import numpy as np
import pytest

from fald.core.errors import ConfigError
from fald.settings.participation import full, with_replacement, without_replacement
from fald.theory import bounds
from fald.theory.bounds import BoundSettings, Constants

L, M, D, N, START, GAMMA, SIGMA, TAU = 3.0, 0.5, 4, 5, 1.5, 0.7, 0.3, 1.3
LEAST = 0.1
PROBLEM = Constants(
    smoothness=L, strong_convexity=M, dim=D, num_clients=N, min_weight=LEAST, temperature=TAU,
    heterogeneity=GAMMA, gradient_noise=SIGMA, initial_distance=START,
)  # fmt: skip
EQUAL = Constants(
    smoothness=L, strong_convexity=M, dim=D, num_clients=N, temperature=TAU, heterogeneity=GAMMA,
    gradient_noise=SIGMA, initial_distance=START,
)  # fmt: skip


def sources(rho, least):
    hot = TAU * (rho**2 + (1 - rho**2) / least)
    return [START**2, hot / M, GAMMA**2 / (M**2 * D), SIGMA**2 / M**2]


@pytest.mark.parametrize("rho", [0.0, 0.4, 1.0])
@pytest.mark.parametrize("steps", [1, 2, 6])
@pytest.mark.parametrize("problem", [PROBLEM, EQUAL], ids=["unequal", "equal"])
def test_constant_steps_of_all_devices(rho, steps, problem):
    eta, rounds, kappa = 0.01, 7, L / M
    least = problem.min_weight or 1 / N
    found = bounds.fixed_step_bound(
        problem, step_size=eta, local_steps=steps, num_rounds=rounds, correlation=rho
    )
    parts = sources(rho, least)
    np.testing.assert_allclose(problem.sources(rho), parts)
    assert problem.client_temperature(rho) == pytest.approx(TAU * (rho**2 + (1 - rho**2) / least))
    root = 30 * kappa * math.sqrt(eta * M * D) * math.sqrt(((steps - 1) ** 2 + kappa) * sum(parts))
    start = (1 - eta * M / 4) ** (steps * rounds) * math.sqrt(2 * D) * (START + math.sqrt(TAU / M))
    assert found.initialisation == pytest.approx(start)
    assert found.local_error == pytest.approx(root)
    named = [
        found.discretisation_and_drift,
        found.injected_noise,
        found.heterogeneity,
        found.stochastic_gradient,
    ]
    np.testing.assert_allclose(named, [root * each / sum(parts) for each in parts])
    assert found.partial_participation == 0.0
    assert found.total == pytest.approx(start + root)
    assert found.drift_share == pytest.approx((steps - 1) ** 2 / ((steps - 1) ** 2 + kappa))


@pytest.mark.parametrize("rho", [0.0, 0.4, 1.0])
@pytest.mark.parametrize("draws", [1, 2, N])
@pytest.mark.parametrize("scheme", [with_replacement, without_replacement])
def test_drawn_devices_add_a_term(rho, draws, scheme):
    eta, steps = 0.01, 6
    found = bounds.fixed_step_bound(
        EQUAL, step_size=eta, local_steps=steps, num_rounds=7, correlation=rho, participation=scheme(draws)
    )
    x = eta * M * steps
    c_k = x / (1 - math.exp(-x / 2))
    c_s = 1.0 if scheme is with_replacement else (N - draws) / (N - 1)
    heat = c_k * D * TAU / M * (rho**2 + N * (1 - rho**2))
    assert found.partial_participation == pytest.approx(2 * math.sqrt(heat / draws * c_s))
    whole = bounds.fixed_step_bound(EQUAL, step_size=eta, local_steps=steps, num_rounds=7, correlation=rho)
    assert found.total == pytest.approx(whole.total + found.partial_participation)
    run = BoundSettings(eta, steps, rho, scheme(draws))
    assert float(bounds.drawing_heat(EQUAL, run)) == pytest.approx(heat)
    assert float(bounds.drawing_heat(EQUAL, run._replace(step_size=0.0))) == pytest.approx(2 * heat / c_k)
    assert bounds.thinning(EQUAL, full()) == 0.0


def test_decaying_steps():
    for steps, rounds in ((1, 0), (3, 40)):
        eta, kappa = 1 / (2 * L + M * steps * rounds / 12), L / M
        found = bounds.decaying_step_bound(PROBLEM, local_steps=steps, num_rounds=rounds, correlation=0.4)
        root = (
            45
            * kappa
            * math.sqrt(((steps - 1) ** 2 + kappa) * sum(sources(0.4, LEAST)))
            * math.sqrt(eta * M * D)
        )
        assert found.total == pytest.approx(root)
        assert found.initialisation == 0.0
    assert bounds.initial_distance_bound(PROBLEM) == pytest.approx(
        math.sqrt(2) * (math.sqrt(D) * START + math.sqrt(D * TAU / M))
    )


def test_settings_are_arrays_that_broadcast():
    found = bounds.fixed_step_bound(PROBLEM, step_size=[[0.01], [0.02]], local_steps=[1, 2, 3], num_rounds=5)
    assert found.total.shape == found.heterogeneity.shape == (2, 3)
    one = bounds.fixed_step_bound(PROBLEM, step_size=0.02, local_steps=3, num_rounds=5)
    assert found.total[1, 2] == pytest.approx(one.total)
    still = Constants(smoothness=L, strong_convexity=M, dim=D, temperature=0.0)
    nothing = bounds.fixed_step_bound(still, step_size=0.01, local_steps=1, num_rounds=1)
    assert (nothing.total, nothing.heterogeneity) == (0.0, 0.0)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"step_size": 1 / (2 * L) * 1.0001}, "step-size must be ≤ 1/\\(2L\\)"),
        ({"step_size": 0.0}, "step-size must be > 0"),
        ({"step_size": math.nan}, "step-size must be > 0"),
        ({"local_steps": 0}, "local-steps must be a whole number ≥ 1"),
        ({"local_steps": 1.5}, "local-steps must be a whole number"),
        ({"num_rounds": -1}, "num-rounds must be a whole number ≥ 0"),
        ({"num_rounds": math.inf}, "num-rounds must be a whole number"),
        ({"correlation": -0.01}, "correlation must be between 0 and 1"),
        ({"correlation": 1.01}, "correlation must be between 0 and 1"),
        ({"participation": without_replacement(2)}, "without replacement the bound needs min-weight"),
        ({"participation": without_replacement(N + 1)}, "num-participants"),
    ],
)
def test_settings_out_of_range(change, words):
    run = {"step_size": 1 / (2 * L), "local_steps": 1, "num_rounds": 0}
    bounds.fixed_step_bound(PROBLEM, **run)
    with pytest.raises(ConfigError, match=words):
        bounds.fixed_step_bound(PROBLEM, **{**run, **change})


@pytest.mark.parametrize(
    "change",
    [
        {"smoothness": 0.4}, {"strong_convexity": 0.0}, {"dim": 0}, {"num_clients": 0}, {"min_weight": 0.0},
        {"min_weight": 0.21}, {"temperature": -1.0}, {"heterogeneity": -1.0}, {"gradient_noise": -1.0},
        {"initial_distance": -1.0}, {"smoothness": math.inf},
    ],
)  # fmt: skip
def test_constants_out_of_range(change):
    given = {"smoothness": L, "strong_convexity": M, "dim": D, "num_clients": N, "min_weight": 0.2}
    Constants(**given)
    with pytest.raises(ConfigError):
        Constants(**{**given, **change})


def test_the_smallest_numbers_that_are_allowed():
    """Zero where a number may vanish, and a border of a rule itself."""
    assert bounds.checked("x", 0.0) == 0.0
    for wrong, above in ((-1e-300, False), (0.0, True), (np.nan, False), (np.inf, True)):
        with pytest.raises(ConfigError, match="x must be"):
            bounds.checked("x", wrong, above=above)
    assert bounds.checked_step("1/L", 0.1, 0.1) == 0.1
    with pytest.raises(ConfigError, match="2 times that"):
        bounds.checked_step("1/L", 0.1, [0.05, 0.2])
    assert bounds.whole("k", [1, 2], 1).tolist() == [1.0, 2.0]
    for wrong in (0, 1.5, np.inf, np.nan):
        with pytest.raises(ConfigError, match="k must be a whole number ≥ 1"):
            bounds.whole("k", wrong, 1)
    nothing = Constants(smoothness=L, strong_convexity=M, dim=D, initial_distance=0.0, temperature=0.0)
    found = bounds.fixed_step_bound(nothing, step_size=0.01, local_steps=3, num_rounds=5)
    assert found.total == 0.0
    # weights that are equal up to rounding are equal, and others are not
    for least, allowed in ((1 / N * (1 - 5e-7), True), (1 / N * (1 - 2e-6), False)):
        given = Constants(smoothness=L, strong_convexity=M, dim=D, num_clients=N, min_weight=least)
        if allowed:
            assert bounds.thinning(given, without_replacement(2)) == pytest.approx((N - 2) / (2 * (N - 1)))
        else:
            with pytest.raises(ConfigError, match="min-weight = 1/num-clients"):
                bounds.thinning(given, without_replacement(2))
