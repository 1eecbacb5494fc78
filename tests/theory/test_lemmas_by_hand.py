"""The lemmas, and what the bounds certify, against the formulas of the text, written out for one problem."""

import math

import numpy as np
import pytest

from fald import theory
from fald.core.errors import ConfigError
from fald.settings.participation import full, with_replacement, without_replacement
from fald.theory import bounds, lemmas
from fald.theory.bounds import Constants

L, M, D, N, START, GAMMA, SIGMA, TAU = 3.0, 0.5, 4, 5, 1.5, 0.7, 0.3, 1.3
PROBLEM = Constants(
    smoothness=L, strong_convexity=M, dim=D, num_clients=N, temperature=TAU, heterogeneity=GAMMA,
    gradient_noise=SIGMA, initial_distance=START,
)  # fmt: skip
KAPPA, RHO, ETA = L / M, 0.4, 0.01
HOTTEST = TAU * (RHO**2 + (1 - RHO**2) * N)
SOURCES = START**2 + HOTTEST / M + GAMMA**2 / (M**2 * D) + SIGMA**2 / M**2


def test_every_lemma_is_its_formula():
    steps = np.array([1, 2, 9])
    found = lemmas.contraction_bound(PROBLEM, step_size=ETA, squared_distance=2.0, squared_divergence=0.3)
    assert found == pytest.approx((1 - ETA * M) * 2.0 + 4 * ETA * L * 0.3)
    found = lemmas.discretisation_bound(PROBLEM, step_size=ETA)
    assert found == pytest.approx(2 * ETA**2 * D * KAPPA * L * TAU + 16 * ETA * D * TAU)
    found = lemmas.one_step_bound(PROBLEM, step_size=ETA, local_steps=steps, distance=2.0, correlation=RHO)
    added = 400 * ETA**2 * D * L**2 * SOURCES * ((steps - 1) ** 2 + KAPPA)
    np.testing.assert_allclose(found**2, (1 - ETA * M / 2) * 4.0 + added)
    found = lemmas.second_moment_bound(PROBLEM, step_size=ETA, correlation=RHO)
    heat = HOTTEST + SIGMA**2 / M + GAMMA**2 / (M * D)
    assert found == pytest.approx(D * START**2 + 6 * D / M * heat)
    found = lemmas.gradient_bound(PROBLEM, step_size=ETA, correlation=RHO)
    assert found == pytest.approx(14 * D * L**2 * SOURCES)
    assert lemmas.gradient_variance_bound(PROBLEM) == pytest.approx(D * SIGMA**2)
    noise = D * TAU * (RHO**2 + N * (1 - RHO**2))
    found = lemmas.divergence_bound(PROBLEM, step_size=ETA, local_steps=steps, correlation=RHO)
    pulled = 112 * (steps - 1) ** 2 * ETA**2 * D * L**2 * SOURCES
    np.testing.assert_allclose(found, pulled + 8 * (steps - 1) * ETA * noise)
    for scheme, share in (
        (with_replacement(2), 1 / 2), (without_replacement(2), (N - 2) / (N - 1) / 2),
        (without_replacement(N), 0.0), (full(), 0.0),
    ):  # fmt: skip
        found = lemmas.drawing_divergence_bound(
            PROBLEM, step_size=ETA, local_steps=steps, participation=scheme, correlation=RHO
        )
        apart = 28 * steps**2 * ETA**2 * D * L**2 * SOURCES + 4 * steps * ETA * noise
        np.testing.assert_allclose(found, share * apart, atol=1e-12)


@pytest.mark.parametrize(
    ("lemma", "given", "largest"),
    [
        (lemmas.contraction_bound, {"squared_distance": 1.0, "squared_divergence": 1.0}, 1 / (L + M)),
        (lemmas.discretisation_bound, {}, 1e6),
        (lemmas.one_step_bound, {"local_steps": 2, "distance": 1.0}, 1 / (2 * L)),
        (lemmas.second_moment_bound, {}, 2 / (L + M)),
        (lemmas.gradient_bound, {}, 2 / (L + M)),
        (lemmas.divergence_bound, {"local_steps": 2}, 2 / (L + M)),
        (lemmas.drawing_divergence_bound, {"local_steps": 2, "participation": full()}, 2 / (L + M)),
    ],
)
def test_every_lemma_has_its_range_of_steps(lemma, given, largest):
    lemma(PROBLEM, step_size=largest, **given)
    for wrong in ([] if largest > 100 else [1.0001 * largest]) + [0.0, -0.01, math.nan]:
        with pytest.raises(ConfigError, match="step-size must be"):
            lemma(PROBLEM, step_size=wrong, **given)
    if "local_steps" in given:
        for wrong in (0, 1.5):
            with pytest.raises(ConfigError, match="local-steps must be a whole number ≥ 1"):
                lemma(PROBLEM, step_size=0.1 * largest, **{**given, "local_steps": wrong})


@pytest.mark.parametrize("name", ["distance", "squared_distance", "squared_divergence"])
def test_distances_are_not_negative(name):
    run, given = {"step_size": ETA}, {"squared_distance": 1.0, "squared_divergence": 1.0}
    lemma, given = (
        (lemmas.one_step_bound, {"local_steps": 2, "distance": 1.0})
        if name == "distance"
        else (lemmas.contraction_bound, given)
    )
    lemma(PROBLEM, **run, **{**given, name: 0.0})
    with pytest.raises(ConfigError, match=f"{name.replace('_', '-')} must be ≥ 0"):
        lemma(PROBLEM, **run, **{**given, name: -1e-9})


def test_other_units_are_those_of_each_constant():
    found = lemmas.rescaled(PROBLEM, length=10.0, energy=3.0)
    assert found.smoothness == pytest.approx(L * 3 / 100)
    assert found.strong_convexity == pytest.approx(M * 3 / 100)
    assert (found.temperature, found.initial_distance) == (pytest.approx(3 * TAU), pytest.approx(10 * START))
    assert (found.heterogeneity, found.gradient_noise) == (
        pytest.approx(0.3 * GAMMA), pytest.approx(0.3 * SIGMA),
    )  # fmt: skip
    assert (found.dim, found.num_clients) == (D, N)
    assert lemmas.rescaled(PROBLEM) == PROBLEM
    for name in ("length", "energy"):
        for wrong in (0.0, -1.0, math.inf, math.nan):
            with pytest.raises(ConfigError, match=f"{name} must be a finite number > 0"):
                lemmas.rescaled(PROBLEM, **{name: wrong})


# -- what is certified ----------------------------------------------------------------------------------


def start_bound():
    return math.sqrt(2 * D) * (START + math.sqrt(TAU / M))


def local_error(eta, steps):
    return 30 * KAPPA * math.sqrt(eta * M * D * ((steps - 1) ** 2 + KAPPA) * SOURCES)


@pytest.mark.parametrize(("epsilon", "steps"), [(5.0, 1), (5.0, 4), (9000.0, 2)])
def test_half_of_an_accuracy_goes_to_the_local_error_and_the_rest_to_the_start(epsilon, steps):
    found = theory.complexity(epsilon, PROBLEM, local_steps=steps, correlation=RHO)
    eta = min(1 / (2 * L), (epsilon / 2 / local_error(1.0, steps)) ** 2)
    assert found.step_size == pytest.approx(eta)
    left = epsilon - local_error(eta, steps)
    taken = max(0.0, math.log(left / start_bound()) / math.log(1 - eta * M / 4))
    assert found.num_steps == math.ceil(taken)
    assert found.num_rounds == math.ceil(math.ceil(taken) / steps)
    assert found.num_participants is None
    assert (
        (epsilon == 9000.0) == (found.num_steps == 0) == (eta == 1 / (2 * L))
    )  # a goal that the start meets


@pytest.mark.parametrize("scheme", [with_replacement(3), without_replacement(3)])
def test_with_drawn_devices_half_of_what_drawing_leaves_is_used(scheme):
    share = 1 / 3 if scheme.scheme == "with-replacement" else (N - 3) / (N - 1) / 3
    floor = 2 * math.sqrt(2 * D * TAU / M * (RHO**2 + N * (1 - RHO**2)) * share)
    run = {"local_steps": 2, "correlation": RHO, "participation": scheme}
    found = theory.complexity(floor + 2.0, PROBLEM, **run)

    def lasting(eta):
        made = bounds.fixed_step_bound(PROBLEM, step_size=eta, num_rounds=10**9, **run)
        return made.local_error + made.partial_participation

    assert lasting(found.step_size) <= floor + 1.0 < lasting(found.step_size * 1.0001)
    at = bounds.fixed_step_bound(PROBLEM, step_size=found.step_size, num_rounds=found.num_rounds, **run)
    before = bounds.fixed_step_bound(
        PROBLEM, step_size=found.step_size, num_rounds=found.num_rounds - 1, **run
    )
    assert at.total <= floor + 2.0 < before.total
    for out_of_reach in (floor, 0.9 * floor, [floor + 2.0, 0.9 * floor]):
        with pytest.raises(ConfigError, match="which drawing 3 of 5 devices leaves at any step size"):
            theory.complexity(out_of_reach, PROBLEM, **run)


def test_decaying_steps_and_thirds_by_hand():
    epsilon, steps = 200.0, 3
    found = theory.decaying_step_complexity(epsilon, PROBLEM, local_steps=steps, correlation=RHO)
    heat = 2025 * KAPPA**2 * ((steps - 1) ** 2 + KAPPA) * SOURCES * M * D
    needed = math.ceil(12 / M * (heat / epsilon**2 - 2 * L))
    assert (found.num_steps, found.num_rounds) == (needed, math.ceil(needed / steps))
    assert found.step_size == pytest.approx(1 / (2 * L + M * steps * found.num_rounds / 12))
    assert theory.decaying_step_complexity(1e9, PROBLEM, local_steps=steps).num_steps == 0
    epsilon = 6.0
    for scheme in ("with-replacement", "without-replacement"):
        found = theory.drawn_complexity(epsilon, PROBLEM, local_steps=steps, correlation=RHO, scheme=scheme)
        eta = (epsilon / 3 / local_error(1.0, steps)) ** 2
        assert found.step_size == pytest.approx(eta)
        taken = math.ceil(math.log(epsilon / 3 / start_bound()) / math.log(1 - eta * M / 4))
        assert (found.num_steps, found.num_rounds) == (taken, math.ceil(taken / steps))
        x = eta * M * steps
        c_k = x / (1 - math.exp(-x / 2))
        a = 36 * c_k * D * TAU * (RHO**2 + N * (1 - RHO**2)) / (M * epsilon**2)
        wanted = a if scheme == "with-replacement" else N / (1 + (N - 1) / a)
        assert found.num_participants == math.ceil(wanted) > 1
    for certify in (theory.complexity, theory.decaying_step_complexity, theory.drawn_complexity):
        own = certify(epsilon, PROBLEM, local_steps=steps)  # by default all noise is the clients' own
        assert own == certify(epsilon, PROBLEM, local_steps=steps, correlation=0.0)
        assert own.num_steps > certify(epsilon, PROBLEM, local_steps=steps, correlation=1.0).num_steps
        for wrong in (0.0, -1.0, [1.0, 0.0]):
            with pytest.raises(ConfigError, match="epsilon must be > 0"):
                certify(wrong, PROBLEM, local_steps=steps)
        for wrong in (0, 1.5):
            with pytest.raises(ConfigError, match="local-steps must be a whole number ≥ 1"):
                certify(epsilon, PROBLEM, local_steps=wrong)
    with pytest.raises(ConfigError, match="scheme must be one of with-replacement, without-replacement"):
        theory.drawn_complexity(epsilon, PROBLEM, local_steps=1, scheme="full")
    alone = Constants(smoothness=L, strong_convexity=M, dim=D)
    assert theory.drawn_complexity(epsilon, alone, local_steps=1).num_participants == 1
    assert theory.drawn_complexity(1e9, PROBLEM, local_steps=1).num_participants == 1


@pytest.mark.parametrize("kappa", [1.0, 3.0, 6.0, 33.0, 500.0, 1e6])
def test_the_best_local_steps_have_the_fewest_rounds_of_the_bound(kappa):
    problem = Constants(smoothness=kappa, strong_convexity=1.0, dim=2, num_clients=5, initial_distance=1.0)
    K = np.arange(1, 3000)
    best = K[np.argmin(((K - 1) ** 2 + kappa) / K)]
    assert theory.best_local_steps(problem) == best
    # as long as the largest step does not bind, the rounds of an accuracy say the same
    assert theory.best_local_steps(problem, 1e-3) == best
    epsilon = 3e3  # and where it binds, the fewest of all
    rounds = theory.complexity(epsilon, problem, local_steps=K, correlation=0.3).num_steps / K
    found = theory.best_local_steps(problem, epsilon, correlation=0.3)
    assert rounds[found - 1] <= rounds.min() * 1.001 + 1


def test_of_the_local_steps_on_both_sides_of_the_root_the_better_is_taken():
    K = np.arange(1, 100)
    for kappa in np.arange(1.0, 400.0, 1.7):
        problem = Constants(smoothness=kappa, strong_convexity=1.0, dim=2, num_clients=5)
        rounds = ((K - 1) ** 2 + kappa) / K
        assert rounds[theory.best_local_steps(problem) - 1] == pytest.approx(rounds.min(), rel=1e-12)


def test_where_nothing_is_to_be_reached_one_step_is_enough():
    still = Constants(smoothness=9.0, strong_convexity=1.0, dim=2, num_clients=5, temperature=0.0)
    assert not still.sources().any()
    assert theory.best_local_steps(still, 0.1) == 1


def test_the_best_step_of_a_run_is_the_least_of_its_bound_or_refused():
    far = Constants(smoothness=L, strong_convexity=M, dim=D, num_clients=N, initial_distance=1e4)
    run = {"local_steps": 3, "correlation": RHO, "participation": with_replacement(2)}
    best = theory.best_step_size(far, num_rounds=10**6, **run)

    def total(eta):
        return bounds.fixed_step_bound(far, step_size=eta, num_rounds=10**6, **run).total

    assert total(best) < min(total(1.01 * best), total(best / 1.01))
    longer = theory.best_step_size(far, num_rounds=10**8, **run)
    assert longer < best / 10
    assert theory.best_step_size(far, num_rounds=10**6, **{**run, "local_steps": 1}) != best
    with pytest.raises(ConfigError, match="num-rounds = 2 is too few"):
        theory.best_step_size(far, num_rounds=2, **run)
    plain = {"local_steps": 3, "num_rounds": 10**6}
    assert theory.best_step_size(far, **plain) == theory.best_step_size(far, **plain, correlation=0.0)
    hot = Constants(
        smoothness=L, strong_convexity=M, dim=D, num_clients=N, temperature=3e6, initial_distance=1e4
    )
    own, shared = (theory.best_step_size(hot, **plain, correlation=rho) for rho in (0.0, 1.0))
    assert own < 0.95 * shared
    assert theory.best_step_size(hot, **plain) == own
