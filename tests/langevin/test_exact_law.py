"""Draws against the exact law of a Gaussian federation, and twins that must be told from it."""

from __future__ import annotations

import dataclasses
import itertools
import sys
from typing import ClassVar

import jax
import numpy as np
import pytest

import fald
from fald import gaussian
from fald.calculus.gradients import Rows
from fald.langevin import rounds
from fald.langevin.noise import own_variance
from helpers import START, deviations, draws, federation, linear_model, mostly_slow, quadratics

NUM_CHAINS = 20_000
NUM_KEPT = 3
LIMIT = 4.0
MODEL = linear_model()
FEDERATION = federation((2, 2, 8, 8))  # each size is compiled for itself
SCHEMES = {
    "full": fald.full(),
    "I": fald.with_replacement(2),
    "II": fald.without_replacement(2, allow_unequal=True),
}
# local steps -> step size and rounds between kept draws: K·η grows to one, where clients part most
STEPS = {1: (0.3, 4), 4: (0.15, 2), 20: (0.05, 1)}
# one of each scheme is quick; the whole grid is not
QUICK = {("full", "realised", 0.6, 4), ("I", "realised", 0.6, 4), ("II", "paper", 0.6, 4)}


def grid(all_local_steps):
    return mostly_slow(
        itertools.product(SCHEMES, ["realised", "paper"], [0.0, 0.6, 1.0], all_local_steps), QUICK
    )


def sampled(
    seed, local_steps, *, model=MODEL, problem=FEDERATION, num_chains=NUM_CHAINS, step_size=None, **settings
):
    """(chains, NUM_KEPT, dim) draws, a few rounds apart."""
    usual, thinning = STEPS[local_steps]
    tree = fald.sample(
        seed,
        model,
        problem.data,
        num_rounds=NUM_KEPT * thinning,
        thinning=thinning,
        local_steps=local_steps,
        step_size=usual if step_size is None else step_size,
        num_chains=num_chains,
        progress=False,
        **settings,
    )
    return draws(tree)


def expected(local_steps, *, problem=FEDERATION, step_size=None, **settings) -> gaussian.Law:
    """The exact law at the rounds that ``sampled`` keeps."""
    usual, thinning = STEPS[local_steps]
    path = gaussian.law(
        *problem.energies,
        step_size=usual if step_size is None else step_size,
        local_steps=local_steps,
        num_rounds=NUM_KEPT * thinning,
        initial_position=START,
        **settings,
    )
    return gaussian.Law(path.mean[thinning::thinning], path.covariance[thinning::thinning])


def largest(sample: np.ndarray, law: gaussian.Law) -> float:
    """The largest deviation of any mean or covariance at any kept round."""
    return max(
        np.abs(deviations(sample[:, r], law.mean[r], law.covariance[r])).max() for r in range(NUM_KEPT)
    )


@pytest.mark.parametrize(("scheme", "noise", "correlation", "local_steps"), grid(STEPS))
def test_draws_follow_the_exact_law(scheme, noise, correlation, local_steps):
    settings = {"participation": SCHEMES[scheme], "noise": noise, "correlation": correlation}
    sample = sampled(local_steps, local_steps, **settings)
    assert largest(sample, expected(local_steps, **settings)) < LIMIT


@pytest.mark.parametrize(("scheme", "noise", "correlation", "local_steps"), grid([4]))
def test_noise_ten_percent_too_large_is_rejected(scheme, noise, correlation, local_steps):
    settings = {"participation": SCHEMES[scheme], "noise": noise, "correlation": correlation}
    sample = sampled(local_steps, local_steps, temperature=1.1**2, **settings)
    assert largest(sample, expected(local_steps, **settings)) > 2 * LIMIT


@pytest.mark.slow
def test_draws_in_double_precision_follow_the_exact_law():
    settings = {"participation": SCHEMES["I"], "correlation": 0.6}
    with jax.enable_x64(True):
        sample = sampled(1, 4, **settings)
        hot = sampled(1, 4, temperature=1.1**2, **settings)
    assert sample.dtype == np.float64
    assert largest(sample, expected(4, **settings)) < LIMIT
    assert largest(hot, expected(4, **settings)) > 2 * LIMIT


def mistaken_laws(settings):
    """Laws of samplers that make one mistake each."""
    H, _, p = FEDERATION.energies
    scheme, noise = settings["participation"], settings["noise"]
    laws = {
        "no 1/p in the energy": expected(
            20, problem=FEDERATION._replace(hessians=H * p[:, None, None]), **settings
        ),
        "step 10% off": expected(20, step_size=1.1 * STEPS[20][0], **settings),
    }
    if scheme.scheme != "without-replacement":
        equal = FEDERATION._replace(weights=np.full(len(p), 1 / len(p)))
        laws["equal weights"] = expected(20, problem=equal, **settings)
    if scheme.scheme == "full":
        laws["all noise shared"] = expected(20, **{**settings, "correlation": 1.0})
        return laws
    other_noise = {"realised": "paper", "paper": "realised"}[noise]
    laws["the other noise"] = expected(20, **{**settings, "noise": other_noise})
    more = dataclasses.replace(scheme, num_participants=3)
    laws["one participant more"] = expected(20, **{**settings, "participation": more})
    if noise == "paper":
        # with realised noise the average is as hot at any correlation
        laws["correlation 10% off"] = expected(20, **{**settings, "correlation": 0.66})
    return laws


@pytest.mark.slow
@pytest.mark.parametrize("noise", ["realised", "paper"])
@pytest.mark.parametrize("scheme", SCHEMES)
def test_laws_of_mistaken_samplers_are_rejected(scheme, noise):
    settings = {"participation": SCHEMES[scheme], "noise": noise, "correlation": 0.6}
    sample = sampled(20, 20, **settings)
    found = {name: largest(sample, law) for name, law in mistaken_laws(settings).items()}
    assert min(found.values()) > LIMIT, found


def realised(noise, share, weight):
    return own_variance("realised", share, weight)


def paper(noise, share, weight):
    return own_variance("paper", share, weight)


def dropped(noise, share, weight):
    return 1.0


MISTAKEN_VARIANCE = {
    "w_c instead of p_c, I": ("I", "paper", realised),
    "w_c instead of p_c, II": ("II", "paper", realised),
    "p_c instead of w_c, I": ("I", "realised", paper),
    "p_c instead of w_c, II": ("II", "realised", paper),
    "p_c dropped": ("full", "paper", dropped),
}


@pytest.mark.slow
@pytest.mark.parametrize("mistake", MISTAKEN_VARIANCE)
def test_sampler_with_a_mistake_in_its_noise_is_rejected(mistake, monkeypatch):
    scheme, noise, variance = MISTAKEN_VARIANCE[mistake]
    settings = {"participation": SCHEMES[scheme], "noise": noise}
    # the package's attribute of this name is the function
    monkeypatch.setattr(sys.modules["fald.langevin.fald"], "own_variance", variance)
    sample = sampled(4, 4, model=dataclasses.replace(MODEL), **settings)
    assert largest(sample, expected(4, **settings)) > 2 * LIMIT


@pytest.mark.slow
@pytest.mark.parametrize("scheme", ["full", "I"])
def test_sampler_without_the_share_in_its_energy_is_rejected(scheme, monkeypatch):
    # a client that takes its own rows for those of all clients has ℓ^c for its energy, not ℓ^c/p_c
    monkeypatch.setattr(rounds, "Rows", lambda *given: Rows(*given)._replace(total=given[2]))
    sample = sampled(4, 4, model=dataclasses.replace(MODEL), participation=SCHEMES[scheme])
    assert largest(sample, expected(4, participation=SCHEMES[scheme])) > 2 * LIMIT


@pytest.mark.slow
@pytest.mark.parametrize("scheme", ["full", "I"])
def test_prior_enters_every_client_energy_in_full(scheme):
    sizes, scale = (1, 1, 4, 8, 8), 1.2
    problem = federation(sizes, prior_scale=scale)
    settings = {"participation": SCHEMES[scheme], "correlation": 0.6}
    sample = sampled(4, 4, model=linear_model(scale), problem=problem, **settings)
    assert largest(sample, expected(4, problem=problem, **settings)) < LIMIT
    # a prior of which each client has only its share
    each = [quadratics(problem.data, scale / np.sqrt(p)) for p in problem.weights]
    H, x = (np.array([parts[k][c] for c, parts in enumerate(each)]) for k in range(2))
    wrong = problem._replace(hessians=H, centers=x)
    assert largest(sample, expected(4, problem=wrong, **settings)) > 2 * LIMIT


@pytest.mark.slow
def test_decaying_steps_follow_the_law_with_those_steps():
    H = np.linalg.eigvalsh(FEDERATION.hessians)
    schedule = fald.paper_decay(float(H.max()), float(H.max()) / 2)
    sample = sampled(4, 4, step_size=schedule)
    assert largest(sample, expected(4, step_size=schedule)) < LIMIT
    constant = expected(4, step_size=schedule(0))
    each_round_anew = expected(4, step_size=np.tile([schedule(k) for k in range(4)], 2 * NUM_KEPT))
    assert min(largest(sample, constant), largest(sample, each_round_anew)) > LIMIT


COLD = 0.1  # injected noise small enough to see that of batches


def sampling_covariance(a, y, total, batch_size, mean, covariance, corrected=True):
    """E Cov of (n/b) Σ_{batch} ∇l_i(θ) over batches without replacement, θ with these two moments.

    ∇l_i(θ) = a_i(a_iᵀθ − y_i) is affine in θ, so two moments of θ are enough.
    """
    size = len(a)
    if batch_size >= size:
        return np.zeros((a.shape[1], a.shape[1]))
    linear = np.einsum("ip,iq->ipq", a, a)
    linear, constant = linear - linear.mean(0), a * y[:, None] - (a * y[:, None]).mean(0)
    gap = linear @ mean - constant
    scatter = gap.T @ gap + np.einsum("ipq,qr,isr->ps", linear, covariance, linear)
    remaining = 1 - batch_size / size if corrected else 1.0
    return total**2 * remaining / batch_size * scatter / (size - 1)


def expected_with_batches(local_steps, batch_size, *, participation, corrected=True):
    """The exact law plus what batches add to it, for noise scales that do not depend on the draw.

    Given everything before it, the error of a batch has mean zero and is independent between clients:
    it adds Σ_c E[w_c²] X_c, where X_c grows along the local steps from the moments of β^c.
    """
    step_size, thinning = STEPS[local_steps]
    H, x, p = FEDERATION.energies
    d, s = len(START), participation.num_participants
    squared_weight = p**2 if participation.scheme == "full" else (1 - 1 / s) * p**2 + p / s
    mean, covariance, kept = START, np.zeros((d, d)), []
    for r in range(NUM_KEPT * thinning):
        path = gaussian.law(
            H,
            x,
            p,
            step_size=step_size,
            local_steps=local_steps,
            num_rounds=1,
            participation=participation,
            noise="paper",
            temperature=COLD,
            initial_position=mean,
            initial_covariance=covariance,
        )
        following = path.covariance[1]
        for c, name in enumerate(FEDERATION.data.names):
            a, y = (np.asarray(part, float) for part in FEDERATION.data.client(name))
            A = np.eye(d) - step_size * H[c]
            own_mean, own, added = mean, covariance, np.zeros((d, d))
            for _ in range(local_steps):
                error = step_size**2 * sampling_covariance(
                    a, y, FEDERATION.data.num_rows, batch_size, own_mean, own, corrected
                )
                own_mean = A @ own_mean + (np.eye(d) - A) @ x[c]
                own = A @ own @ A + 2 * step_size * COLD / p[c] * np.eye(d) + error
                added = A @ added @ A + error
            following = following + squared_weight[c] * added
        mean, covariance = path.mean[1], following
        if (r + 1) % thinning == 0:
            kept.append((mean, covariance))
    return gaussian.Law(np.array([m for m, _ in kept]), np.array([C for _, C in kept]))


@pytest.mark.slow
@pytest.mark.parametrize("local_steps", [1, 4])
@pytest.mark.parametrize("scheme", ["full", "I"])
def test_batches_leave_the_mean_and_add_their_covariance(scheme, local_steps):
    settings = {"participation": SCHEMES[scheme], "noise": "paper", "temperature": COLD}
    sample = sampled(3, local_steps, batch_size=2, **settings)
    assert largest(sample, expected_with_batches(local_steps, 2, participation=SCHEMES[scheme])) < LIMIT
    with_replacement = expected_with_batches(local_steps, 2, participation=SCHEMES[scheme], corrected=False)
    assert largest(sample, expected(local_steps, **settings)) > LIMIT
    assert largest(sample, with_replacement) > LIMIT


class TestFewOfManyDevices:
    """S = 10 of N = 50 clients of equal size, Scheme II, where the paper's noise is N/S times too hot."""

    problem = federation((3,) * 50, spread=1.0, seed=1)
    settings: ClassVar = {"step_size": 0.01, "local_steps": 5, "participation": fald.without_replacement(10)}
    target = gaussian.target(*problem.energies)

    def distance(self, law):
        """W2 to the posterior, in units of the posterior's standard deviation."""
        return float(gaussian.wasserstein2(*law, *self.target) / np.sqrt(np.trace(self.target.covariance)))

    def test_by_law(self):
        realised = gaussian.stationary(*self.problem.energies, noise="realised", **self.settings)
        paper = gaussian.stationary(*self.problem.energies, noise="paper", **self.settings)
        assert self.distance(realised) <= 0.05
        assert self.distance(paper) > 1

    @pytest.mark.slow
    @pytest.mark.parametrize("noise", ["realised", "paper"])
    def test_by_sampling(self, noise):
        num_chains, num_rounds = 4000, 120
        start = np.random.default_rng(0).multivariate_normal(*self.target, num_chains)
        tree = fald.sample(
            0,
            MODEL,
            self.problem.data,
            num_rounds=num_rounds,
            num_warmup=num_rounds - 1,
            num_chains=num_chains,
            noise=noise,
            initial_position=start,
            progress=False,
            **self.settings,
        )
        last = draws(tree)[:, 0]
        found = self.distance((last.mean(0), np.cov(last.T)))
        assert found <= 0.05 if noise == "realised" else found > 1
        path = gaussian.law(
            *self.problem.energies,
            noise=noise,
            num_rounds=num_rounds,
            initial_position=self.target.mean,
            initial_covariance=self.target.covariance,
            **self.settings,
        )
        assert np.abs(deviations(last, path.mean[-1], path.covariance[-1])).max() < LIMIT
