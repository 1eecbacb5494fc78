"""The hockey-stick profile of one step, against direct integration and against the library."""

from __future__ import annotations

import math

import numpy as np
import pytest
from dp_accounting.pld import privacy_loss_mechanism as mechanism
from hypothesis import given
from hypothesis import strategies as st
from scipy.special import erf
from scipy.stats import norm

from fald.privacy import step_profile

EPSILONS = np.array([-2.0, -0.3, -0.01, 0.0, 0.01, 0.1, 0.7, 2.0])
CASES = [(0.5, 0.2), (1.0, 1.0), (2.0, 0.05), (10.0, 0.3), (0.8, 0.9)]


def hockey_stick(upper, lower, epsilon):
    """∫ (upper − e^ε lower)₊ by the trapezoidal rule."""
    x = np.linspace(-15.0, 15.0, 60_001)
    return np.trapezoid(np.maximum(upper(x) - math.exp(epsilon) * lower(x), 0.0), x)


def mixture(fraction, shift):
    return lambda x: (1 - fraction) * norm.pdf(x) + fraction * norm.pdf(x - shift)


@pytest.mark.parametrize(("z", "q"), CASES)
def test_is_the_larger_of_adding_and_removing(z, q):
    for epsilon in EPSILONS:
        remove = hockey_stick(mixture(q, 1 / z), norm.pdf, epsilon)
        add = hockey_stick(norm.pdf, mixture(q, 1 / z), epsilon)
        assert step_profile(epsilon, z, q) == pytest.approx(max(remove, add), rel=1e-6, abs=1e-9)


@pytest.mark.parametrize(("z", "q"), CASES)
def test_agrees_with_the_library(z, q):
    kinds = [mechanism.AdjacencyType.REMOVE, mechanism.AdjacencyType.ADD]
    pairs = [mechanism.GaussianPrivacyLoss(z, sampling_prob=q, adjacency_type=kind) for kind in kinds]
    expected = np.max([pair.get_delta_for_epsilon(EPSILONS) for pair in pairs], axis=0)
    np.testing.assert_allclose(step_profile(EPSILONS, z, q), expected, rtol=1e-9, atol=1e-13)


@pytest.mark.parametrize("epsilon", [0.0, 0.1, 0.7])
def test_bounds_every_replacement_of_a_row(epsilon):
    # gradients of the rest of the batch at 0; the row moves from a to b with |a − b| ≤ 1, and any row
    # that takes its place in the batch is within 1 of both
    z, q = 1.3, 0.2
    bound = step_profile(epsilon, z, q)
    for a in np.linspace(-1, 1, 7):
        for b in np.linspace(-1, 1, 7):
            if abs(a - b) <= 1:
                found = hockey_stick(mixture(q, a / z), mixture(q, b / z), epsilon)
                assert found <= bound * (1 + 1e-6) + 1e-10


def test_poisson_pair_and_the_factor_two():
    z, q = 1.1, 0.15
    for epsilon in (0.05, 0.4, 1.0):
        expected = hockey_stick(mixture(q, 0.5 / z), mixture(q, -0.5 / z), epsilon)
        assert step_profile(epsilon, z, q, "poisson") == pytest.approx(expected, rel=1e-5)
        # the library doubles the sensitivity itself: with z in place of 2z it charges 2Δ
        doubled = mechanism.GaussianPrivacyLoss(
            z, sampling_prob=q, adjacency_type=mechanism.AdjacencyType.REPLACE
        ).get_delta_for_epsilon(epsilon)
        assert doubled > 1.5 * expected
        assert step_profile(epsilon, z, q, "poisson") <= step_profile(epsilon, z, q)


@given(
    low=st.floats(0.2, 50),
    ratio=st.floats(1.0001, 2.0),
    where=st.floats(0.0, 1.0),
    q=st.floats(0.001, 1.0),
    epsilon=st.floats(-5, 5),
)
def test_chord_between_two_multipliers_dominates(low, ratio, where, q, epsilon):
    z = np.array([low, low * ratio**where, low * ratio])
    tv = erf(1 / (math.sqrt(8) * z))
    share = (tv[1] - tv[2]) / (tv[0] - tv[2])
    chord = share * step_profile(epsilon, z[0], q) + (1 - share) * step_profile(epsilon, z[2], q)
    assert step_profile(epsilon, z[1], q) <= chord + 1e-13


def test_chord_in_the_inverse_multiplier_would_not_dominate():
    # in 1/z the profile is concave at ε = 0, so a chord there would be no upper bound
    low, high = 0.5, 1.0
    middle = 2 / (1 / low + 1 / high)
    chord = 0.5 * (step_profile(0.0, low, 1.0) + step_profile(0.0, high, 1.0))
    assert step_profile(0.0, middle, 1.0) > chord


@given(z=st.floats(0.1, 100), q=st.floats(0.001, 1.0), epsilon=st.floats(-10, 10))
def test_less_noise_and_more_rows_never_help(z, q, epsilon):
    value = step_profile(epsilon, z, q)
    assert max(0.0, 1 - math.exp(epsilon)) - 1e-12 <= value <= 1
    assert step_profile(epsilon, 0.9 * z, q) >= value - 1e-13
    assert step_profile(epsilon, z, min(1.0, 1.1 * q)) >= value - 1e-13
