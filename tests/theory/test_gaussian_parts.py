"""The exact law against the sampler's own steps, pushed through one unit of noise at a time.

A round is affine in its start and in every number of noise, so that running it from zero with one of them
set to 1 gives a column of the map; the law of the average is then a sum over columns, and with drawn devices
a mixture over all draws, written out here.
"""

from __future__ import annotations

import itertools
import math

import numpy as np
import pytest

from fald.core.errors import ConfigError
from fald.settings.participation import full, with_replacement, without_replacement
from fald.settings.schedules import Phases
from fald.theory import gaussian

RNG = np.random.default_rng(9)
N, D, K = 3, 2, 3
P = np.array([0.2, 0.3, 0.5])
_roots = RNG.normal(size=(N, D, D))
H = np.einsum("cij,ckj->cik", _roots, _roots) + 0.3 * np.eye(D)
X = RNG.normal(size=(N, D))
ETA = np.array([0.08, 0.05, 0.07])
START = np.array([1.0, -2.0]), np.array([[0.5, 0.2], [0.2, 0.3]])


def outcomes(scheme):
    """Weights of the clients in a round, with their probabilities."""
    if scheme == "full":
        return [(P, 1.0)]
    if scheme == "I":
        draws = [(d, math.prod(P[c] for c in d)) for d in itertools.product(range(N), repeat=2)]
    else:
        pairs = list(itertools.combinations(range(N), 2))
        draws = [(d, 1 / len(pairs)) for d in pairs]
    return [(np.bincount(d, minlength=N) / 2, chance) for d, chance in draws]


def one_round(theta, shared, own, w, *, noise, rho, tau, momentum, root, heats=(1.0,) * K):
    """The average after K local steps of each client with weight w_c, as the sampler makes them."""
    total = np.zeros(D)
    for c in np.flatnonzero(w):
        v = 1 / P[c] if noise == "paper" else 1 / w[c]
        beta, u = theta, np.zeros(D)
        for k in range(K):
            a = momentum if k else 0.0
            xi = rho * shared[k] + math.sqrt((1 - rho**2) * v) * own[c, k]
            gradient = root**2 * (H[c] @ (beta - X[c]))
            u = (
                a * u
                - (1 + a) * math.sqrt(ETA[k] / 2) * gradient
                + math.sqrt((1 - a**2) * tau * heats[k]) * root * xi
            )
            beta = beta + math.sqrt(2 * ETA[k]) * u
        total = total + w[c] * beta
    return total


def after(mean, covariance, scheme, **settings):
    """Mean and covariance after a round, by columns and by draws."""
    numbers = D + K * D + N * K * D
    first, second = np.zeros(D), np.zeros((D, D))
    for w, chance in outcomes(scheme):

        def run(z, w=w):
            parts = np.split(z, [D, D + K * D])
            return one_round(parts[0], parts[1].reshape(K, D), parts[2].reshape(N, K, D), w, **settings)

        base = run(np.zeros(numbers))
        columns = np.stack([run(e) - base for e in np.eye(numbers)], axis=1)
        middle = base + columns[:, :D] @ mean
        spread = columns[:, :D] @ covariance @ columns[:, :D].T + columns[:, D:] @ columns[:, D:].T
        first, second = first + chance * middle, second + chance * (spread + np.outer(middle, middle))
    return first, second - np.outer(first, first)


SCHEMES = {"full": full(), "I": with_replacement(2), "II": without_replacement(2, allow_unequal=True)}


@pytest.mark.parametrize("momentum", [0.0, 0.7])
@pytest.mark.parametrize("noise", ["realised", "paper"])
@pytest.mark.parametrize("rho", [0.0, 0.6])
@pytest.mark.parametrize("scheme", SCHEMES)
def test_the_law_of_two_rounds_is_that_of_the_samplers_steps(scheme, rho, noise, momentum):
    settings = {"noise": noise, "rho": rho, "tau": 0.7, "momentum": momentum}
    run = {
        "step_size": np.tile(ETA, 2), "local_steps": K, "num_rounds": 2, "temperature": 0.7,
        "correlation": rho, "participation": SCHEMES[scheme], "noise": noise, "momentum": momentum,
        "initial_position": START[0], "initial_covariance": START[1],
    }  # fmt: skip
    path = gaussian.law(H, X, P, **run)
    mean, covariance = START
    for r in range(2):
        np.testing.assert_allclose(path.mean[r], mean, rtol=1e-10)
        np.testing.assert_allclose(path.covariance[r], covariance, rtol=1e-10)
        mean, covariance = after(mean, covariance, scheme, **settings, root=np.ones(D))
    np.testing.assert_allclose(path.mean[2], mean, rtol=1e-10)
    np.testing.assert_allclose(path.covariance[2], covariance, rtol=1e-10)
    # the twin: a tenth more temperature
    hotter = gaussian.law(H, X, P, **{**run, "temperature": 0.77}).covariance[2]
    assert np.max(np.abs(hotter / covariance - 1)) > 0.02


@pytest.mark.parametrize("momentum", [0.0, 0.7])
@pytest.mark.parametrize("rho", [0.0, 0.6, 1.0])
@pytest.mark.parametrize("scheme", ["full", "I"])
def test_phases_have_temperatures_of_their_own(scheme, rho, momentum):
    heats = np.array([1.0, 0.5, 0.2])
    rows = [(k, 1, ETA[k], ETA[k], heats[k]) for k in range(K)]
    path = gaussian.law(
        H, X, P, step_size=Phases(np.array([*rows, (2.0**31, *rows[-1][1:])])), local_steps=K, num_rounds=1,
        temperature=0.7, correlation=rho, participation=SCHEMES[scheme], momentum=momentum,
    )  # fmt: skip
    settings = {"noise": "realised", "rho": rho, "tau": 0.7, "momentum": momentum, "root": np.ones(D)}
    mean, covariance = after(np.zeros(D), np.zeros((D, D)), scheme, **settings, heats=heats)
    np.testing.assert_allclose(path.mean[1], mean, rtol=1e-5)
    np.testing.assert_allclose(path.covariance[1], covariance, rtol=1e-5)


@pytest.mark.parametrize("momentum", [0.0, 0.7])
def test_preconditioned_steps_are_plain_ones_in_other_coordinates(momentum):
    m = np.array([0.25, 2.0])
    energies = gaussian.preconditioned(H, X, P, m)
    run = {"step_size": ETA, "local_steps": K, "num_rounds": 1, "temperature": 0.7, "momentum": momentum}
    path = gaussian.law(*energies, **run)
    settings = {"noise": "realised", "rho": 0.0, "tau": 0.7, "momentum": momentum}
    mean, covariance = after(np.zeros(D), np.zeros((D, D)), "full", **settings, root=np.sqrt(m))
    np.testing.assert_allclose(np.sqrt(m) * path.mean[1], mean, rtol=1e-10)
    np.testing.assert_allclose(np.outer(*[np.sqrt(m)] * 2) * path.covariance[1], covariance, rtol=1e-10)
    for wrong in ([0.25, 0.0], [0.25, -1.0], [0.25], [0.25, np.nan]):
        with pytest.raises(ConfigError, match="preconditioner"):
            gaussian.preconditioned(H, X, P, wrong)


@pytest.mark.parametrize("momentum", [0.0, 0.7])
@pytest.mark.parametrize("scheme", SCHEMES)
def test_a_round_leaves_the_stationary_law_as_it_is(scheme, momentum):
    run = {"local_steps": K, "correlation": 0.6, "participation": SCHEMES[scheme], "momentum": momentum}
    run |= {"temperature": 0.7, "noise": "paper", "step_size": 0.06}
    fixed = gaussian.stationary(H, X, P, **run)
    start = {"initial_position": fixed.mean, "initial_covariance": fixed.covariance}
    path = gaussian.law(H, X, P, num_rounds=1, **run, **start)
    np.testing.assert_allclose(path.mean[1], fixed.mean, rtol=1e-10)
    np.testing.assert_allclose(path.covariance[1], fixed.covariance, rtol=1e-9)


def test_equal_curvatures_have_a_covariance_that_momentum_does_not_change():
    """τ/(λ(1 − ηλ/2)), however many local steps."""
    for momentum, steps in itertools.product((0.0, 0.5, 0.9), (1, 4)):
        run = {"step_size": 0.2, "local_steps": steps, "temperature": 0.7, "momentum": momentum}
        fixed = gaussian.stationary([[3.0]], [[1.0]], [1.0], **run)
        assert fixed.covariance[0, 0] == pytest.approx(0.7 / (3 * (1 - 0.1 * 3)))


def test_one_coordinate_that_diverges_is_enough():
    """Its mean stays at zero and the other coordinate is at rest: only a variance leaves the numbers."""
    run = {"step_size": 0.1, "local_steps": 1, "num_rounds": 400}
    hessian, centre = np.diag([1.0, 100.0]), np.zeros((1, 2))
    # the variance is multiplied by 81 in a round, from 2η in the first
    first = math.ceil((math.log(np.finfo(float).max) - math.log(0.2 / 80 * 81)) / math.log(81)) + 1
    with pytest.raises(ConfigError, match="finite numbers in round") as refused:
        gaussian.law(hessian, centre, [1.0], **run)
    assert abs(int(str(refused.value).split("round ")[1].split(":")[0]) - first) <= 1
    assert "the largest is 10" in str(refused.value)


def test_the_first_round_that_is_near_enough():
    path = gaussian.law(
        [[[2.0]]], [[0.0]], [1.0], step_size=0.1, local_steps=2, num_rounds=40, initial_position=[9.0]
    )
    goal = gaussian.stationary([[[2.0]]], [[0.0]], [1.0], step_size=0.1, local_steps=2)
    away = [abs(path.mean[r, 0]) for r in range(41)]
    spread = [abs(math.sqrt(path.covariance[r, 0, 0]) - math.sqrt(goal.covariance[0, 0])) for r in range(41)]
    distance = np.hypot(away, spread)
    for r in (1, 7, 30):
        assert gaussian.rounds_to(float(distance[r]) * (1 + 1e-9), path, goal) == r
        assert gaussian.rounds_to(float(distance[r]) * (1 - 1e-9), path, goal) == r + 1
    assert gaussian.rounds_to(100.0, path, goal) == 0
    assert gaussian.rounds_to(0.5 * float(distance[40]), path, goal) is None


def test_drawn_devices_by_their_moments():
    """q_c = E[w_c], Cov(w_a, w_b) = f(q_a δ_ab − q_a q_b), and k_c = E[w_c² v_c]."""
    from fald.settings.fald import Setting

    for scheme, noise in itertools.product(SCHEMES, ("realised", "paper")):
        run = Setting(1, 1.0, participation=SCHEMES[scheme], noise=noise)
        chance, spread, own = gaussian.drawn(P, run)
        all_w = outcomes(scheme)
        q = sum(p * w for w, p in all_w)
        np.testing.assert_allclose(chance, q)
        cross = sum(p * np.outer(w, w) for w, p in all_w) - np.outer(q, q)
        np.testing.assert_allclose(cross, spread * (np.diag(q) - np.outer(q, q)), atol=1e-12)
        v = [1 / P if noise == "paper" else np.divide(1, w, out=np.zeros(N), where=w > 0) for w, _ in all_w]
        np.testing.assert_allclose(own, sum(p * w**2 * x for (w, p), x in zip(all_w, v)))
    equal = np.full(3, 1 / 3)
    strict = Setting(1, 1.0, participation=without_replacement(2))
    np.testing.assert_allclose(gaussian.drawn(equal, strict)[0], equal)
    with pytest.raises(ConfigError, match=r"0\.2 to 0\.5"):
        gaussian.drawn(P, strict)
    alone = Setting(1, 1.0, participation=without_replacement(1))
    assert gaussian.drawn(np.ones(1), alone)[1] == 0.0
