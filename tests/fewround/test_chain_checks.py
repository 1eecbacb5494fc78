"""Conditions of chains that follow a learned gradient, each by itself at its border."""

from types import SimpleNamespace

import numpy as np
import pytest

from fald.fewround import chains
from fald.fewround.certify import Condition, quantile

COUNT, NAMES = 4000, ["a", "b"]
RNG = np.random.default_rng(0)


def exact(count=COUNT):
    """(13, M) numbers with mean zero, unit variance and no correlation at all."""
    z = np.linalg.qr(RNG.standard_normal((count, 13)))[0]
    z = np.linalg.qr(np.column_stack([np.ones(count), z]))[0][:, 1:] * np.sqrt(count)
    return z.T


Z = exact()


SCALES, PLACES = np.array([0.01, 30.0]), np.array([7.0, -400.0])


def failing(old, previous, new, energies=None, accepted=0.9, tolerance=0.05, extra=False):
    """The conditions that object, with parameters of different units far from zero."""
    energies = [Z[6], Z[7], Z[8]] if energies is None else energies
    ends = [np.column_stack(pair) * SCALES + PLACES for pair in (old, previous, new)]
    checks = chains.chain_checks(
        ends,
        energies,
        accepted=accepted,
        least=0.5,
        tolerance=tolerance,
        names=NAMES[:1] if extra else NAMES,
    )
    assert [c.name for c in checks] == ["movement", "bias", "settled", "acceptance"]
    return {c.name: c.sentence for c in checks if not c.holds}


OLD, PREVIOUS, NEW = (Z[0], Z[1]), (Z[2], Z[3]), (Z[4], Z[5])


def mixed(a, b, r):
    """A column whose correlation with ``a`` is r."""
    return r * a + np.sqrt(1 - r**2) * b


def test_chains_at_rest_pass():
    assert failing(OLD, PREVIOUS, NEW) == {}


@pytest.mark.parametrize("which", [0, 1])
def test_what_is_remembered(which):
    for r, holds in ((chains._STILL - 0.01, True), (chains._STILL + 0.01, False)):
        new = [mixed(OLD[j], NEW[j], r) if j == which else NEW[j] for j in range(2)]
        found = failing(OLD, PREVIOUS, new)
        assert ("movement" not in found) == holds
        assert holds or f"in {NAMES[which]})" in found["movement"]
        # the energy alone
        found = failing(OLD, PREVIOUS, NEW, [Z[6], Z[7], mixed(Z[6], Z[8], r)])
        assert ("movement" not in found) == holds
        assert holds or "in their energy)" in found["movement"]
    # the distance from the middle alone: the same size, with a sign of its own
    signs = np.sign(Z[9])
    far = np.abs(OLD[which]) * signs
    new = [far if j == which else NEW[j] for j in range(2)]
    assert "movement" in failing(OLD, PREVIOUS, new)


def test_one_that_never_moves_is_remembered():
    assert chains._correlation(np.ones(50), Z[0][:50]) == 1.0
    assert chains._correlation(Z[0][:9], Z[1][:9]) == 1.0  # too few to tell
    assert chains._correlation(Z[0][:10], -Z[0][:10]) == pytest.approx(-1.0)
    gaps = np.r_[np.nan, Z[0][1:30]]
    assert chains._correlation(gaps, Z[0][:30]) == pytest.approx(1.0)
    assert chains._correlation(-Z[0][:30], gaps) == pytest.approx(-1.0)
    np.testing.assert_allclose(chains._remaining(np.array([-0.5, 0.0, 0.5, 0.999])), [0.0, 0.0, 1.0, 99.0])


@pytest.mark.parametrize("sign", [1, -1])
@pytest.mark.parametrize("which", [0, 1])
def test_the_way_that_is_left(sign, which):
    """What is forgotten at a rate r has r/(1 − r) of its way to go: a third of the tolerance is for it."""
    r = chains._STILL / 2
    edge = 0.05 / 3 * (1 - r) / r
    for far, holds in ((0.98 * edge, True), (1.02 * edge, False)):
        new = [10.0 * mixed(OLD[j], NEW[j], r if j == which else 0.0) for j in range(2)]
        old = [10.0 * (OLD[j] + (sign * far if j == which else 0.0)) for j in range(2)]
        found = failing(old, [10.0 * p for p in PREVIOUS], new)
        assert ("bias" not in found) == holds, found
        assert holds or found["bias"].startswith(f"{NAMES[which]} is still on its way")


@pytest.mark.parametrize("sign", [1, -1])
@pytest.mark.parametrize("which", [0, 1])
def test_the_way_that_is_left_to_a_spread(sign, which):
    """Draws that keep their size and forget their sign: only their sd is on its way."""
    kept = np.sign(Z[9]) * np.sqrt(OLD[which] ** 2 + Z[10] ** 2)
    kept = (kept - kept.mean()) / kept.std()
    r = chains._correlation(OLD[which] ** 2, kept**2)
    edge = 0.05 / 3 * (1 - r) / r
    for far, holds in ((0.98 * edge, True), (1.02 * edge, False)):
        old = [OLD[j] * (1 + (sign * far if j == which else 0.0)) for j in range(2)]
        found = failing(old, PREVIOUS, [kept if j == which else NEW[j] for j in range(2)])
        assert ("bias" not in found) == holds, found
        assert holds or found["bias"].startswith(f"{NAMES[which]} is still on its way")


@pytest.mark.parametrize("sign", [1, -1])
@pytest.mark.parametrize("which", [0, 1])
def test_what_still_moves(sign, which):
    noise = quantile(2) * np.sqrt(2 / COUNT)
    for tolerance in (0.05, 0.2):
        edge = max(tolerance, noise)
        for move, holds in ((edge - 1e-6, True), (edge + 1e-6, False)):
            shifted = [7.0 * (p + (sign * move if j == which else 0.0)) for j, p in enumerate(PREVIOUS)]
            wider = [7.0 * p * (1 + (sign * move if j == which else 0.0)) for j, p in enumerate(PREVIOUS)]
            for previous in (shifted, wider):
                new, old = [7.0 * n for n in NEW], [7.0 * o for o in OLD]
                found = failing(old, previous, new, tolerance=tolerance)
                assert ("settled" not in found) == holds
                assert holds or found["settled"].startswith(f"{NAMES[which]} still moved")
    assert noise > 0.05


def test_acceptance_and_reported_quantities():
    assert failing(OLD, PREVIOUS, NEW, accepted=0.5) == {}
    assert list(failing(OLD, PREVIOUS, NEW, accepted=0.4999)) == ["acceptance"]
    new = (NEW[0], mixed(OLD[1], NEW[1], 0.9))
    assert "in reported quantity 1)" in failing(OLD, PREVIOUS, new, extra=True)["movement"]


# -- what chains are made of ----------------------------------------------------------------------------


def test_a_frame_makes_its_gaussian_standard():
    factor = np.array([[2.0, 0, 0], [-1.0, 0.5, 0], [0.3, 4.0, 1.5]])
    frame = chains.Frame(np.array([1.0, -20.0, 300.0]), factor)
    z = np.random.default_rng(0).standard_normal((5, 3))
    positions = frame.positions(z)
    for one, at in zip(z, positions):
        np.testing.assert_allclose(at, frame.mean + factor @ one)
    np.testing.assert_allclose(frame.inward(positions), z, atol=1e-9)
    # of a normal density with this mean and covariance nothing is left over
    slopes = -(positions - frame.mean) @ np.linalg.inv(factor @ factor.T)
    np.testing.assert_allclose(frame.leftover(z, slopes), 0, atol=1e-9)
    steeper = frame.leftover(z, slopes + np.array([0, 0, 1.0]))
    np.testing.assert_allclose(steeper, np.tile(factor[2], (5, 1)), atol=1e-9)


def test_gradients_that_are_no_numbers_are_zero_without_density():
    value = np.array([1.0, np.nan, 3.0, np.inf, 5.0, -np.inf])
    slope = np.array([[1.0, 2], [1, 2], [np.nan, 2], [1, 2], [1, np.inf], [1, 2]])
    target = SimpleNamespace(gradients=lambda positions, sums: (value.copy(), slope.copy()))
    asking = chains.gradients(target, np.zeros((6, 2)))
    assert list(next(asking)) == ["states"]
    with pytest.raises(StopIteration) as done:
        asking.send({})
    found, gradient = done.value.value
    np.testing.assert_array_equal(found, [1.0, *[-np.inf] * 5])
    np.testing.assert_array_equal(gradient, [[1, 2], *[[0, 0]] * 5])


def test_a_round_and_the_end_of_chains_are_summed_up():
    positions = np.array([[1.0, 10], [2, 40], [6, 10]])
    row = chains.trace_row(positions, khat=0.3, ess=2.0, accepted=0.9)
    np.testing.assert_allclose(row["mean"], [3, 20])
    np.testing.assert_allclose(row["sd"], positions.std(axis=0))
    assert (row["draws"], row["khat"], row["ess"], row["accepted"], row["explorers"]) == (3, 0.3, 2.0, 0.9, 0)
    plain = chains.trace_row(positions)
    assert all(np.isnan(plain[name]) for name in ("khat", "ess", "newton"))
    failed = [Condition("bias", False, "x is on its way"), Condition("settled", False, "x moved")]
    for wrong in ([], failed):
        found = chains.chains_outcome(positions, wrong, 0.4, [row])
        assert found.reached is not bool(wrong)
        assert found.reason == ("x is on its way; x moved" if wrong else "")
        assert bool(found.advice) is bool(wrong)
        assert found.failed == (("bias", "settled") if wrong else ())
        np.testing.assert_allclose(found.weights, [1 / 3] * 3)
        np.testing.assert_allclose(found.mean, [3, 20])
        np.testing.assert_allclose(found.covariance, np.cov(positions.T))
        assert (found.khat, found.ess, found.modes.shape, found.trace) == (0.4, 3.0, (0, 2), [row])
    assert chains.chains_outcome(positions[:, :1], [], 0.4, []).covariance.shape == (1, 1)
