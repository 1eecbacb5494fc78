"""Bounds in their order, and ε moving the way it must."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from dp_accounting.pld import privacy_loss_distribution as library
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st

from fald.core.errors import ConfigError
from fald.privacy import Ledger, RunSettings, account, paper_bound
from fald.settings.participation import with_replacement, without_replacement

quick = settings(max_examples=12, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck))


@st.composite
def runs(draw, *, equal=True):
    number = draw(st.integers(2, 8))
    sizes = [draw(st.integers(50, 3000))] * number
    if not equal:
        sizes = [draw(st.integers(50, 3000)) for _ in range(number)]
    scheme = draw(
        st.sampled_from([None, with_replacement, without_replacement] if equal else [None, with_replacement])
    )
    return RunSettings(
        sizes=sizes,
        local_steps=draw(st.integers(1, 8)),
        num_rounds=draw(st.integers(1, 60)),
        step_size=10.0 ** draw(st.floats(-6, -3)),
        temperature=10.0 ** draw(st.floats(-1, 1)),
        correlation=draw(st.floats(0, 0.95)),
        batch_size=draw(st.one_of(st.none(), st.integers(1, 49))),
        participation=scheme and scheme(draw(st.integers(1, number))),
        noise=draw(st.sampled_from(["paper", "realised"])),
        sensitivity=draw(st.sampled_from([0.1, 1.0])),
        num_chains=draw(st.integers(1, 2)),
    )


def lower_bound(run, delta):
    """ε of one true pair of data sets: all gradients zero but one, seen at every step, rounded down."""
    noise = account(run, delta=delta).noise
    z, q, include = noise.multiplier[0], noise.batch_fraction[0], noise.inclusion[0]
    interval = max(1e-4, q / z / 50)
    step = library.from_gaussian_mechanism(
        z,
        sampling_prob=q,
        pessimistic_estimate=False,
        use_connect_dots=False,
        value_discretization_interval=interval,
    )
    one = step.self_compose(run.local_steps, 0)
    if include < 1:
        still = library.identity(interval, pessimistic_estimate=False)
        one = one.compute_mixture(still, include)
    return one.self_compose(run.num_rounds * run.num_chains, 0).get_epsilon_for_delta(delta)


@pytest.mark.parametrize("batch", [None, 5, 30])
@pytest.mark.parametrize("participants", [2, 4])
@pytest.mark.parametrize("step_size", [1e-4, 1e-3])
def test_lower_bound_is_below_and_near(batch, participants, step_size):
    run = RunSettings(
        sizes=[100] * 4,
        local_steps=4,
        num_rounds=5,
        step_size=step_size,
        batch_size=batch,
        sensitivity=0.3,
        noise="paper",
        participation=without_replacement(participants),
    )
    low, found = lower_bound(run, 1e-5), account(run, delta=1e-5).worst
    assert 0.7 * found < low <= found
    louder = account(replace(run, temperature=4.0), delta=1e-5).worst
    assert low > louder  # twice the noise multiplier would be caught


@quick
@given(run=runs(), delta=st.sampled_from([1e-4, 1e-6]), share=st.floats(0.01, 1.0))
def test_pld_below_rdp_below_corrected_paper_bound(run, delta, share):
    pld, rdp = account(run, delta=delta), account(run, delta=delta, method="rdp")
    assume(np.isfinite(pld.worst))
    assert np.all(pld.epsilon <= rdp.epsilon * (1 + 1e-4) + 1e-9)
    # and again at a step size where the paper's bound is defined
    try:
        limit = paper_bound(replace(run, step_size=1e-15), delta=delta).step_size_limit
    except ConfigError:
        return  # the parts of δ leave (0, 1)
    inside = replace(run, step_size=limit * share)
    bound = paper_bound(inside, delta=delta)
    found = account(inside, delta=delta, method="rdp").worst
    assert account(inside, delta=delta).worst <= found * (1 + 1e-4) + 1e-9
    assert found <= bound.epsilon
    assert bound.sound


@quick
@given(run=runs(equal=False), factor=st.floats(1.02, 3.0))
def test_monotone_in_every_setting(run, factor):
    base = account(run, delta=1e-5).worst
    assume(1e-9 < base < 50)
    longer = replace(run, num_rounds=int(np.ceil(run.num_rounds * factor)))
    slack = 1 - 1e-3  # each run has a grid of its own
    assert account(replace(run, step_size=run.step_size * factor), delta=1e-5).worst >= base * slack
    assert account(longer, delta=1e-5).worst >= base * slack
    assert account(replace(run, num_chains=run.num_chains + 1), delta=1e-5).worst >= base * slack
    assert account(replace(run, temperature=run.temperature * factor), delta=1e-5).worst <= base / slack
    more = run.correlation + (1 - run.correlation) * 0.3
    assert account(replace(run, correlation=more), delta=1e-5).worst >= base * slack
    assert account(run, delta=1e-4).worst <= base / slack
    assert account(run, delta=1e-5, view="summed").worst <= base / slack


@pytest.mark.parametrize("scheme", [with_replacement, without_replacement])
@pytest.mark.parametrize("method", ["pld", "rdp"])
def test_monotone_in_participants_with_noise_of_the_paper(small, scheme, method):
    values = [account(small(participation=scheme(s)), delta=1e-5, method=method).worst for s in (1, 2, 4, 6)]
    assert np.all(np.diff(values) > 0)
    if scheme is without_replacement:
        full = account(small(), delta=1e-5, method=method).worst
        assert values[-1] == pytest.approx(full, rel=1e-12)


def test_noise_that_follows_the_draw_is_less_noise(small):
    part = without_replacement(2)
    paper = account(small(participation=part), delta=1e-5)
    realised = account(small(participation=part, noise="realised"), delta=1e-5)
    np.testing.assert_allclose(realised.noise.multiplier, paper.noise.multiplier * np.sqrt(2 / 6))
    assert realised.worst > paper.worst


def test_poisson_is_below_without_replacement(small):
    run = replace(small(), sensitivity=None, clip_norm=1.0)
    poisson = account(run, delta=1e-5, sampling="poisson").worst
    assert 0 < poisson < account(run, delta=1e-5).worst
    # the library's accountant, with the multiplier doubled as its convention asks
    z = account(run, delta=1e-5).noise.multiplier[0]
    from dp_accounting import GaussianDpEvent, NeighboringRelation, PoissonSampledDpEvent
    from dp_accounting.pld import PLDAccountant

    for scale, agrees in ((2.0, True), (1.0, False)):
        accountant = PLDAccountant(NeighboringRelation.REPLACE_ONE)
        accountant.compose(PoissonSampledDpEvent(0.05, GaussianDpEvent(scale * z)), 60)
        assert (poisson == pytest.approx(accountant.get_epsilon(1e-5), rel=1e-3)) is agrees
    schedule = replace(run, step_size=np.linspace(0.9e-4, 1.1e-4, 60))
    assert account(schedule, delta=1e-5, sampling="poisson").worst == pytest.approx(poisson, rel=2e-2)


def test_very_small_delta_and_very_large_losses_are_still_bounded(run):
    small_delta = account(run(), delta=1e-13)
    assert np.isfinite(small_delta.worst)
    assert np.isfinite(small_delta.rdp_order[0])
    huge = account(run(step_size=1e3), delta=1e-5)
    assert huge.worst > 1e5
    assert Ledger(run(num_rounds=1, step_size=1e-20), delta=1e-5).worst() < 1e-6
