"""Momentum and preconditioning against their exact law on Gaussian energies, and twins that must be told."""

from __future__ import annotations

import dataclasses
import sys

import jax.numpy as jnp
import numpy as np
import pytest

import fald
from fald import gaussian
from fald.calculus.gradients import squared_gradients
from fald.core.errors import ConfigError, DataError, PrivacyError
from fald.core.reveals import check_upload
from fald.langevin import noise as steps
from helpers import START, deviations, draws, federation, linear_model, mostly_slow

NUM_CHAINS = 20_000
LIMIT = 4.0
MODEL = linear_model()
FEDERATION = federation((2, 2, 8, 8))
SCHEMES = {
    "full": fald.full(),
    "I": fald.with_replacement(2),
    "II": fald.without_replacement(2, allow_unequal=True),
}
VARIANTS = {
    "momentum": {"momentum": 0.7},
    "rms": {"preconditioner": "rms"},
    "both": {"momentum": 0.7, "preconditioner": "rms"},
}
USUAL = {"local_steps": 5, "step_size": 0.1, "num_rounds": 4}
SETTINGS = [(s, n, r) for s in SCHEMES for n in ("realised", "paper") for r in (0.0, 0.6, 1.0)]
CASES = [(variant, *setting) for variant in VARIANTS for setting in SETTINGS]
QUICK = {
    ("momentum", "full", "realised", 0.6),
    ("momentum", "I", "paper", 0.6),
    ("both", "II", "realised", 0.0),
}


def scaling(model=MODEL) -> np.ndarray:
    """M of ``preconditioner="rms"``, from its definition and the rows."""
    a, y = (np.asarray(part, float) for part in FEDERATION.data.rows)
    theta = np.asarray(model.flat_initial_position, float)
    s = np.sqrt((((y - a @ theta)[:, None] * a) ** 2).sum(0))
    mean = np.sqrt((s**2).mean())
    return mean / (s + mean / 10)


def sampled(seed=3, model=MODEL, **settings) -> np.ndarray:
    """The last draw of many chains."""
    given = {**USUAL, **settings}
    given |= {"num_warmup": given["num_rounds"] - 1, "num_chains": NUM_CHAINS, "progress": False}
    return draws(fald.sample(seed, model, FEDERATION.data, **given))[:, -1]


def largest(sample: np.ndarray, **settings) -> float:
    """The largest deviation from the exact law of the settings."""
    given = {**USUAL, **settings}
    root = np.sqrt(scaling()) if given.pop("preconditioner", None) == "rms" else np.ones(2)
    energies = gaussian.preconditioned(*FEDERATION.energies, root**2)
    path = gaussian.law(*energies, initial_position=START / root, **given)
    mean, covariance = root * path.mean[-1], np.outer(root, root) * path.covariance[-1]
    return np.abs(deviations(sample, mean, covariance)).max()


@pytest.mark.parametrize(("variant", "scheme", "noise", "correlation"), mostly_slow(CASES, QUICK))
def test_draws_follow_the_exact_law_and_hotter_ones_do_not(variant, scheme, noise, correlation):
    given = {"participation": SCHEMES[scheme], "noise": noise, "correlation": correlation}
    given |= VARIANTS[variant]
    assert largest(sampled(**given), **given) < LIMIT
    assert largest(sampled(temperature=1.1**2, **given), **given) > 2 * LIMIT


def test_laws_of_other_settings_are_told_apart():
    sample = sampled(**VARIANTS["both"])
    assert largest(sample, **VARIANTS["both"]) < LIMIT
    for other in ({"momentum": 0.7}, {"preconditioner": "rms"}, {"momentum": 0.6, "preconditioner": "rms"}):
        assert largest(sample, **other) > LIMIT, other


@pytest.mark.slow
def test_steps_that_follow_a_schedule():
    schedule = fald.schedules.cosine(0.2, 20, last=0.02)
    sample = sampled(step_size=schedule, momentum=0.7)
    assert largest(sample, step_size=schedule, momentum=0.7) < LIMIT
    assert largest(sample, step_size=0.2, momentum=0.7) > LIMIT


def test_a_velocity_that_is_kept_between_rounds_is_told_apart(monkeypatch):
    """The twin of drawing velocities anew: a first step that begins as all others do."""
    whole = steps.underdamped_steps

    def wrong(count, momentum, moves, start):
        gradient, noise, size = moves
        shifted = (lambda t, k: gradient(t, k - 1), lambda k, v: noise(k - 1, v), lambda k: size(k - 1))
        return whole(count + 1, momentum, shifted, start)

    monkeypatch.setattr(sys.modules["fald.langevin.fald"], "underdamped_steps", wrong)
    sample = sampled(model=dataclasses.replace(MODEL), momentum=0.7)
    assert largest(sample, momentum=0.7) > 2 * LIMIT


class TestTheLaw:
    """By hand, and where it must not depend on momentum."""

    def test_one_local_step_is_that_of_fa_ld(self):
        given = {"step_size": 0.1, "local_steps": 1, "num_rounds": 5}
        plain, other = (gaussian.law(*FEDERATION.energies, momentum=a, **given) for a in (0.0, 0.9))
        np.testing.assert_allclose(plain.covariance, other.covariance, rtol=1e-12, atol=1e-15)
        np.testing.assert_allclose(plain.mean, other.mean, rtol=1e-12)

    @pytest.mark.parametrize("momentum", [0.0, 0.5, 0.95])
    def test_one_client_has_the_covariance_of_plain_steps(self, momentum):
        curvature, eta = 2.0, 0.3
        found = gaussian.stationary(
            [[[curvature]]], [[1.0]], [1.0], step_size=eta, local_steps=7, momentum=momentum
        )
        np.testing.assert_allclose(found.covariance, [[1 / (curvature * (1 - eta * curvature / 2))]])
        np.testing.assert_allclose(found.mean, [1.0])

    def test_is_what_the_recursion_of_position_and_velocity_gives(self):
        """A discrete Lyapunov recursion over positions and velocities of all clients, step by step."""
        H, x, p = FEDERATION.energies
        a, eta, d, n, tau = 0.7, 0.1, 2, len(FEDERATION.weights), 1.3
        mean, covariance = START, np.diag([0.5, 2.0])
        for _ in range(3):
            # state: every client's position, then every client's velocity
            m = np.concatenate([np.tile(mean, n), np.zeros(n * d)])
            C = np.zeros((2 * n * d,) * 2)
            C[: n * d, : n * d] = np.kron(np.ones((n, n)), covariance)
            for k in range(5):
                kept = a if k else 0.0
                own = (1 - kept**2) * tau * np.kron((1 - 0.36) * np.diag(1 / p) + 0.36, np.eye(d))
                curvature = np.zeros((n * d, n * d))
                for c in range(n):
                    curvature[c * d : (c + 1) * d, c * d : (c + 1) * d] = H[c]
                kick = -(1 + kept) * np.sqrt(eta / 2) * curvature
                move = np.sqrt(2 * eta)
                eye = np.eye(n * d)
                step = np.block([[eye + move * kick, move * kept * eye], [kick, kept * eye]])
                push = np.concatenate([-move * kick @ x.ravel(), -kick @ x.ravel()])
                spread = np.vstack([move * eye, eye])
                m = step @ m + push
                C = step @ C @ step.T + spread @ own @ spread.T
            average = np.kron(p, np.eye(d))
            mean = average @ m[: n * d]
            covariance = average @ C[: n * d, : n * d] @ average.T
        found = gaussian.law(
            H, x, p, step_size=eta, local_steps=5, num_rounds=3, momentum=a, correlation=0.6, temperature=tau,
            initial_position=START, initial_covariance=np.diag([0.5, 2.0]),
        )  # fmt: skip
        np.testing.assert_allclose(found.mean[-1], mean, rtol=1e-10)
        np.testing.assert_allclose(found.covariance[-1], covariance, rtol=1e-10)

    def test_long_runs_come_to_the_stationary_law(self):
        given = {"step_size": 0.1, "local_steps": 5, "momentum": 0.7}
        given |= {"participation": SCHEMES["I"], "correlation": 0.4}
        path = gaussian.law(*FEDERATION.energies, num_rounds=2000, **given)
        fixed = gaussian.stationary(*FEDERATION.energies, **given)
        np.testing.assert_allclose(path.mean[-1], fixed.mean, rtol=1e-6)
        np.testing.assert_allclose(path.covariance[-1], fixed.covariance, rtol=1e-6)


@pytest.mark.parametrize("variant", VARIANTS)
def test_resumed_equals_uninterrupted(variant, tmp_path):
    given = {"local_steps": 5, "step_size": 0.1, "num_chains": 3, "progress": False, **VARIANTS[variant]}
    whole = fald.sample(1, MODEL, FEDERATION.data, num_rounds=9, **given)
    where = fald.Checkpoint(tmp_path, rounds=1)
    fald.sample(1, MODEL, FEDERATION.data, num_rounds=4, checkpoint=where, **given)
    resumed = fald.sample(1, MODEL, FEDERATION.data, num_rounds=9, checkpoint=where, **given)
    np.testing.assert_array_equal(draws(whole), draws(resumed))
    other = fald.sample(1, MODEL, FEDERATION.data, num_rounds=9, **{**given, "momentum": 0.71})
    assert not np.array_equal(draws(whole), draws(other))


class TestThePreconditioner:
    """What clients send for it, and where it is taken."""

    def test_squares_are_those_of_all_rows(self):
        a, y = (np.asarray(part, float) for part in FEDERATION.data.client("site-002"))
        expected = (((y - a @ START)[:, None] * a) ** 2).sum(0)
        np.testing.assert_allclose(squared_gradients(MODEL, FEDERATION.data)[2], expected, rtol=1e-5)

    def test_of_a_large_client_some_rows_stand_for_all(self):
        row = np.ones((1, 2), np.float32), np.ones(1, np.float32)
        clients = {n: tuple(np.repeat(a, k, 0) for a in row) for n, k in (("a", 1), ("b", 1000))}
        one, many = squared_gradients(MODEL, fald.FederatedData.from_arrays(clients))
        np.testing.assert_allclose(many, 1000 * one, rtol=1e-5)

    def test_is_taken_at_the_start_that_was_given(self):
        here = np.array([0.3, 2.0], np.float32)
        given = {"local_steps": 2, "step_size": 0.1, "num_rounds": 3, "num_chains": 2, "progress": False}
        moved = dataclasses.replace(MODEL, initial_position=jnp.asarray(here))
        one = fald.sample(1, MODEL, FEDERATION.data, preconditioner="rms", initial_position=here, **given)
        two = fald.sample(1, moved, FEDERATION.data, preconditioner="rms", **given)
        np.testing.assert_array_equal(draws(one), draws(two))

    def test_counts_in_the_step_check(self):
        given = {"local_steps": 2, "step_size": 0.1, "num_rounds": 3, "num_chains": 1, "progress": False}
        found = fald.sample(1, MODEL, FEDERATION.data, preconditioner="rms", **given)
        root = np.sqrt(scaling())
        met = 0.1 * np.linalg.eigvalsh(FEDERATION.hessians * np.outer(root, root)).max()
        assert found.attrs["step_times_curvature"] == pytest.approx(met, rel=0.02)

    def test_without_gradients_it_is_refused(self):
        flat = fald.Model(lambda t: -jnp.sum(t**2), lambda t, row: 0.0 * t[0], jnp.zeros(2))
        with pytest.raises(DataError, match="gradients at the start"):
            fald.sample(0, flat, FEDERATION.data, num_rounds=2, local_steps=1, step_size=0.1,
                        preconditioner="rms", progress=False)  # fmt: skip


class TestWhatLeaves:
    """Momentum sends what FA-LD does; a preconditioner sends squares before the first round."""

    def test_is_declared(self):
        plain, fast, scaled = (
            fald.samplers.fald(local_steps=2, step_size=0.1, **given).about.reveals
            for given in ({}, {"momentum": 0.9}, {"preconditioner": "rms"})
        )
        assert fast.uploads == plain.uploads == scaled.uploads
        check_upload(fast, [np.zeros((4, 3)), np.zeros(4)], [], dim=3)
        assert fast.sums
        assert not scaled.sums
        assert scaled.preparation == {"squares": "squares"}
        assert scaled.curvature
        assert plain.accounted
        assert not fast.accounted
        assert not scaled.accounted

    @pytest.mark.parametrize("variant", VARIANTS)
    def test_private_runs_are_refused(self, variant):
        with pytest.raises(PrivacyError, match="no privacy accounting"):
            fald.sample(0, MODEL, FEDERATION.data, num_rounds=2, local_steps=2, step_size=0.1, clip_norm=1.0,
                        privacy=fald.privacy.Protection(delta=1e-5), progress=False,
                        **VARIANTS[variant])  # fmt: skip
        with pytest.raises(ConfigError, match="no privacy accounting"):
            fald.privacy.RunSettings(local_steps=2, step_size=0.1, sizes=[5, 5], num_rounds=2, clip_norm=1.0,
                                     **VARIANTS[variant])  # fmt: skip

    def test_settings_out_of_range_are_refused(self):
        for given, match in (({"momentum": 1.0}, "below 1"), ({"preconditioner": "adam"}, "'rms'")):
            with pytest.raises(ConfigError, match=match):
                fald.samplers.fald(local_steps=2, step_size=0.1, **given)
