"""Calibration: within the budget always, and close to it."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from fald.core.errors import ConfigError, PrivacyError
from fald.privacy import Budget, RunSettings, account, calibrate, pareto_front
from fald.settings.participation import with_replacement, without_replacement

BUDGET = Budget(0.8, 1e-5)


def base(**changes):
    common = {
        "sizes": [500] * 6,
        "local_steps": 3,
        "num_rounds": 40,
        "step_size": 1e-5,
        "batch_size": 25,
        "sensitivity": 2.0,
        "noise": "paper",
        "participation": without_replacement(3),
    }
    return RunSettings(**{**common, **changes})


@pytest.mark.parametrize("method", ["pld", "rdp"])
def test_correlation(method):
    found = calibrate(BUDGET, base(), vary="correlation", method=method)
    again = account(found.settings, delta=1e-5, method=method)
    assert again.worst == found.report.worst <= BUDGET.epsilon
    noise = (1 - found.value**2) * 0.99  # a half per cent less noise multiplier
    beyond = replace(found.settings, correlation=np.sqrt(1 - noise))
    assert account(beyond, delta=1e-5, method=method).worst > BUDGET.epsilon


def test_step_size_up_and_down():
    up = calibrate(BUDGET, base(step_size=1e-6), vary="step-size")
    down = calibrate(BUDGET, base(step_size=1e-2), vary="step_size")
    assert up.value == pytest.approx(down.value, rel=5e-3)
    for found in (up, down):
        assert found.report.worst <= BUDGET.epsilon
        assert (
            account(replace(found.settings, step_size=found.value * 1.01), delta=1e-5).worst > BUDGET.epsilon
        )


def test_step_size_keeps_the_shape_of_a_schedule():
    shape = np.linspace(2.0, 1.0, 120) * 1e-6
    found = calibrate(BUDGET, base(step_size=shape), vary="step_size", tolerance=0.01)
    np.testing.assert_allclose(np.array(found.settings.step_size) / shape, found.value / shape.max())
    assert 0.95 * BUDGET.epsilon < found.report.worst <= BUDGET.epsilon
    capped = calibrate(BUDGET, base(), vary="step_size", most=1e-6)
    assert capped.at_limit
    assert capped.value <= 1e-6


@pytest.mark.parametrize("method", ["pld", "rdp"])
def test_rounds(method):
    found = calibrate(BUDGET, base(), vary="num_rounds", method=method)
    assert found.report.worst <= BUDGET.epsilon
    more = replace(found.settings, num_rounds=int(found.value) + 1)
    assert account(more, delta=1e-5, method=method).worst > BUDGET.epsilon
    assert not found.at_limit


def test_rounds_of_a_schedule_end_with_it():
    found = calibrate(BUDGET, base(step_size=np.full(120, 1e-9)), vary="num_rounds")
    assert found.value == 40
    assert found.at_limit
    stops = calibrate(BUDGET, base(step_size=np.linspace(1e-5, 4e-4, 120)), vary="num_rounds")
    assert stops.value < 40
    assert len(stops.settings.step_size) == 3 * stops.value


def test_participants():
    run = base(step_size=3e-5)
    found = calibrate(BUDGET, run, vary="num_participants")
    assert 1 <= found.value < 6
    assert found.report.worst <= BUDGET.epsilon
    more = replace(run, participation=without_replacement(int(found.value) + 1))
    assert account(more, delta=1e-5).worst > BUDGET.epsilon
    with pytest.raises(ConfigError, match="where clients are drawn"):
        calibrate(BUDGET, base(participation=None), vary="num_participants")


def test_front_falls_and_every_point_keeps_the_budget():
    run = base(step_size=2e-5)
    front = pareto_front(BUDGET, run)
    rho = [p.correlation for p in front if p.correlation is not None]
    assert len(rho) >= 3
    assert np.all(np.diff(rho) < 0)
    for point in front:
        if point.correlation is None:
            assert point.epsilon > BUDGET.epsilon
        else:
            at = replace(
                run, correlation=point.correlation, participation=without_replacement(point.num_participants)
            )
            assert account(at, delta=1e-5).worst <= BUDGET.epsilon
    assert [p.num_participants for p in pareto_front(BUDGET, run, num_participants=[4, 2])] == [4, 2]


def test_front_rises_where_noise_follows_the_number_of_participants():
    front = pareto_front(BUDGET, base(step_size=5e-6, noise="realised"), num_participants=[2, 4, 6])
    assert np.all(np.diff([p.correlation for p in front]) > 0)


@pytest.mark.parametrize("vary", ["correlation", "num_rounds", "num_participants"])
def test_infeasible_says_so(vary):
    with pytest.raises(PrivacyError, match="the least ε is") as error:
        calibrate(Budget(1e-3, 1e-9), base(step_size=1e-2), vary=vary)
    assert error.value.hint


def test_bad_requests():
    with pytest.raises(ConfigError, match="epsilon must be > 0"):
        Budget(0.0, 1e-5)
    with pytest.raises(ConfigError, match="delta must be"):
        Budget(1.0, 0.0)
    with pytest.raises(ConfigError, match="vary must be one of"):
        calibrate(BUDGET, base(), vary="temperature")
    with pytest.raises(ConfigError, match="realised"):
        calibrate(BUDGET, base(), vary="correlation", participation="realised")
    with pytest.raises(PrivacyError, match="infinite"):
        calibrate(BUDGET, base(sensitivity=None), vary="correlation")


@settings(max_examples=8, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck))
@given(
    epsilon=st.floats(0.05, 8.0),
    delta=st.sampled_from([1e-4, 1e-6, 1e-8]),
    vary=st.sampled_from(["correlation", "step_size", "num_rounds", "num_participants"]),
    noise=st.sampled_from(["paper", "realised"]),
    scheme=st.sampled_from([with_replacement, without_replacement]),
    step_size=st.sampled_from([1e-6, 1e-5, 1e-4]),
)
def test_never_exceeds_the_budget(epsilon, delta, vary, noise, scheme, step_size):
    run = base(noise=noise, participation=scheme(3), step_size=step_size)
    try:
        found = calibrate(
            Budget(epsilon, delta),
            run,
            vary=vary,
            tolerance=0.02,
            **({"most": 500} if vary == "num_rounds" else {}),
        )
    except PrivacyError:
        return
    assert account(found.settings, delta=delta).worst <= epsilon
