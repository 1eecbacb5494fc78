"""Noise of private runs: what is really added has the sd that is accounted for, or the run is refused."""

import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import fald
from fald.calculus.gradients import Rows, clip_rows
from fald.core.errors import PrivacyError
from fald.langevin.client import Setup, Visit, client_round
from fald.langevin.safety import accounted_sd, as_used, check_noise, farthest
from helpers import linear_model

CHAINS = 4000
MODEL = fald.models.gaussian_location([[1.0]])


def program(method, size, total, dtype):
    """A client's uploads of one round in many chains, compiled once for all settings."""
    skeleton, _ = method.split()

    setup = Setup(MODEL, skeleton, 2, "full")

    @jax.jit
    def run(hyper, weight, position):
        rows = Rows(jnp.zeros((size, 1), dtype), jnp.int32(0), jnp.int32(size), jnp.int32(total), size, True)

        def one(key):
            visit = Visit((jnp.array([1, 2], jnp.uint32), key), jnp.int32(0), weight, jnp.int32(0))
            return client_round(setup, hyper, rows, visit, message=position, memory=())[0].position

        return jax.vmap(one)(jnp.stack([jnp.arange(CHAINS, dtype=jnp.uint32)] * 2, axis=1))

    return run


def random_settings(rng):
    return {
        "step_size": float(10 ** rng.uniform(-46, 30))
        if rng.random() < 0.3
        else float(10 ** rng.uniform(-9, 0)),
        "temperature": float(10 ** rng.uniform(-12, 8)) if rng.random() < 0.3 else 1.0,
        "correlation": float(1 - 10 ** rng.uniform(-9, 0))
        if rng.random() < 0.3
        else float(rng.uniform(0.01, 0.99)),
        "clip_norm": float(10 ** rng.uniform(-36, 20)) if rng.random() < 0.3 else 1.0,
    }


def off(run, method, place, share):
    """Standard errors by which the sd of what a round adds is off the accounted one."""
    start = jnp.full(1, place, jnp.float32)
    added = np.asarray(run(method.split()[1], jnp.float32(share), start), float)[:, 0]
    added -= np.median(added)  # its drift, which all chains share
    return abs(added.std() / accounted_sd(method, share, share) - 1) * math.sqrt(2 * CHAINS)


def test_noise_on_uploads_has_the_accounted_sd_or_is_refused():
    rng = np.random.default_rng(5)
    run, share, refused = None, 20 / 50, 0
    for _ in range(200):
        place = float(rng.choice([0.0, 1.0, 300.0]))
        method = fald.samplers.fald(local_steps=1, **random_settings(rng))
        run = run or program(method, 20, 50, jnp.float32)
        try:
            check_noise(method, share, share, place)
        except PrivacyError:
            refused += 1
            continue
        assert off(run, method, place, share) < 4
    assert 20 < refused < 150


def test_what_is_refused_had_no_such_noise():
    """The twin: correlation so near to 1 that float32 has no noise left."""
    method = fald.samplers.fald(local_steps=1, step_size=1e-3, correlation=1 - 1e-8, clip_norm=1.0)
    with pytest.raises(PrivacyError, match="correlation of a private run"):
        as_used(method)
    like = fald.samplers.fald(local_steps=1, step_size=1e-3, correlation=0.5, clip_norm=1.0)
    run = program(like, 20, 50, jnp.float32)
    assert np.ptp(np.asarray(run(method.split()[1], jnp.float32(0.4), jnp.zeros(1, jnp.float32)))) == 0


def test_noise_that_is_a_tenth_too_small_would_be_seen():
    """The twin of the 200 settings: the same measurement tells an sd from one 10% smaller."""
    method = fald.samplers.fald(local_steps=1, step_size=1e-3, correlation=0.5, clip_norm=1.0)
    run = program(method, 20, 50, jnp.float32)
    assert off(run, method, 1.0, 0.4) < 4
    less = fald.samplers.fald(local_steps=1, step_size=0.81e-3, correlation=0.5, clip_norm=1.0)
    assert off(lambda hyper, *where: run(less.split()[1], *where), method, 1.0, 0.4) > 4


def test_noise_is_measured_on_what_is_added(monkeypatch):
    from fald.langevin import safety

    method, drawn = fald.samplers.fald(local_steps=1, step_size=1e-3, clip_norm=1.0), safety.injected
    for factor in (0.8, 0.0, 1.2, math.nan):
        monkeypatch.setattr(safety, "injected", lambda *a, f=factor, **k: f * drawn(*a, **k))
        with pytest.raises(PrivacyError, match="is accounted for"):
            check_noise(method, 0.4, 0.4, 1.0)


def test_settings_are_accounted_as_the_sampler_has_them():
    method = fald.samplers.fald(local_steps=1, step_size=1e-5, correlation=0.3, clip_norm=0.1)
    used = as_used(method)
    assert used["step_size"] == float(np.float32(1e-5)) != 1e-5
    assert used["correlation"] == float(np.float32(0.3))


@pytest.mark.parametrize(
    ("name", "least", "most"),
    [
        ("step_size", 2.0**-60, 2.0**20),
        ("temperature", 2.0**-20, 2.0**20),
        ("correlation", 0.0, 0.999),
        ("clip_norm", 2.0**-30, 2.0**30),
    ],
)
def test_settings_have_bounds_and_the_borders_are_inside(name, least, most):
    usual = {"local_steps": 1, "step_size": 1e-3, "clip_norm": 1.0}
    for value in (least, most):
        method = fald.samplers.fald(**{**usual, name: value})
        if name == "correlation" and value:  # in float32 a little more than 0.999
            value = 0.9989
            method = fald.samplers.fald(**{**usual, name: value})
        assert as_used(method)[name] == pytest.approx(value)
    beyond = [1.001 * most] if name == "correlation" else [0.99 * least, 1.01 * most]
    for value in beyond:
        with pytest.raises(PrivacyError, match=f"{name.replace('_', '-')} of a private run"):
            as_used(
                fald.samplers.fald(**{**usual, name: min(value, 1.0) if name == "correlation" else value})
            )
    assert as_used(fald.samplers.fald(local_steps=1, step_size=1e-3))["clip_norm"] is None


def test_a_schedule_is_accounted_at_its_step():
    method = fald.samplers.fald(local_steps=1, step_size=fald.schedules.polynomial(0.1, 10.0, power=1.0))
    assert as_used(method)["step_size"] == pytest.approx(0.1)
    assert as_used(method, 10)["step_size"] == pytest.approx(0.05)
    assert accounted_sd(method, 0.5, 0.5, 10) == pytest.approx(math.sqrt(2 * 0.05 / 0.5))
    check_noise(method, 0.5, 0.5, 1.0, step=10)


@pytest.mark.parametrize("correlation", [0.0, 0.6])
@pytest.mark.parametrize("noise", ["paper", "realised"])
def test_the_accounted_sd_is_that_of_the_formula(noise, correlation):
    method = fald.samplers.fald(
        local_steps=3, step_size=2**-7, temperature=0.5, correlation=correlation, noise=noise, clip_norm=1.0
    )
    v = 1 / 0.25 if noise == "paper" else 1 / 0.5
    expected = math.sqrt(2 * 2**-7 * 0.5 * (1 - correlation**2) * v)
    assert accounted_sd(method, 0.25, 0.5) == pytest.approx(expected, rel=1e-6)
    check_noise(method, 0.25, 0.5, 3.0)


def test_what_noise_is_added_to_is_the_parameter_or_the_step_of_the_prior():
    method = fald.samplers.fald(local_steps=1, step_size=0.25, clip_norm=1.0)
    places = jnp.array([[2.0, 3.0], [-1.0, -4.0]])
    assert farthest(linear_model(2.0), method, places) == 4.0  # steps of the prior are η/4 of a parameter
    assert farthest(linear_model(0.25), method, places) == 0.25 * 4.0 / 0.25**2
    assert math.isnan(farthest(linear_model(2.0), method, places * jnp.nan))
    falling = fald.samplers.fald(local_steps=1, step_size=fald.schedules.polynomial(0.5, 10.0, power=1.0))
    for step, eta in ((0, 0.5), (10, 0.25)):
        assert farthest(linear_model(0.25), falling, places, step) == pytest.approx(eta * 4.0 / 0.25**2)


def test_noise_must_span_so_many_of_the_last_digits():
    """256 units of the last place of the largest parameter; zero parameters are no limit."""
    method = fald.samplers.fald(local_steps=1, step_size=2**-11, clip_norm=1.0)
    sd = accounted_sd(method, 1.0, 1.0)
    limit = sd / (256 * float(np.finfo(np.float32).eps))
    check_noise(method, 1.0, 1.0, 0.99 * limit)
    with pytest.raises(PrivacyError, match="lost in the last digits"):
        check_noise(method, 1.0, 1.0, 1.01 * limit)
    check_noise(method, 1.0, 1.0, 0.0)
    for wrong in (math.inf, math.nan):
        with pytest.raises(PrivacyError):
            check_noise(method, 1.0, 1.0, wrong)


def test_a_little_more_or_less_noise_than_accounted_is_seen(monkeypatch):
    """Six standard errors of 4,096 draws, 6.6%, either way; the measurement is off by less than four."""
    from fald.langevin import safety

    method, drawn = fald.samplers.fald(local_steps=1, step_size=1e-3, clip_norm=1.0), safety.injected
    own = np.asarray(safety._noise(method, 0.4, 0.4, 0), float)
    assert own.size == 4096
    off = np.sqrt(np.mean(own**2)) / accounted_sd(method, 0.4, 0.4)
    assert abs(off - 1) < 4 / math.sqrt(2 * 4096)
    allowed = 6 / math.sqrt(2 * 4096)
    for factor, passes in ((1 + 0.98 * allowed, True), (1 - 0.98 * allowed, True),
                           (1 + 1.02 * allowed, False), (1 - 1.02 * allowed, False)):  # fmt: skip
        monkeypatch.setattr(safety, "injected", lambda *a, f=factor / off, **k: f * drawn(*a, **k))
        if passes:
            check_noise(method, 0.4, 0.4, 0.0)
        else:
            with pytest.raises(PrivacyError, match="is accounted for"):
                check_noise(method, 0.4, 0.4, 0.0)


def test_other_steps_have_other_noise_of_their_own_part_alone():
    from fald.langevin import safety

    method = fald.samplers.fald(local_steps=1, step_size=1e-3, correlation=0.6, clip_norm=1.0)
    first, again, later = (np.asarray(safety._noise(method, 0.4, 0.4, step)) for step in (0, 0, 1))
    np.testing.assert_array_equal(first, again)
    assert abs(np.corrcoef(first, later)[0, 1]) < 5 / math.sqrt(4096)


@pytest.mark.parametrize("size", [1e-42, 1e-30, 1e-3, 1.0, 1e20, 1.5e38, 3e38])
@pytest.mark.parametrize("clip", [1e-34, 1e-6, 1.0, 1e6])
def test_no_row_passes_its_bound(size, clip):
    rows = np.float32(size) * np.array([[1, 0, 0], [0.5, -0.5, 0.7], [1, 1, 1]], np.float32)
    cut, factor = clip_rows(jnp.asarray(rows), jnp.float32(clip))
    norms = np.linalg.norm(np.asarray(cut, float) * np.asarray(factor, float)[:, None], axis=1)
    assert (norms <= clip * (1 + 1e-5)).all()
    small = np.linalg.norm(rows.astype(float), axis=1) < clip * (1 - 1e-5)
    np.testing.assert_array_equal(np.asarray(factor)[small], 1)
