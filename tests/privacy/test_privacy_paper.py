"""The published bound: where it is wrong, and that the corrected one is not."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest
from scipy.stats import norm

from fald.core.errors import ConfigError
from fald.privacy import Ledger, RunSettings, paper_bound, paper_forms
from fald.privacy.paper import _amplified, _composed
from fald.settings.participation import with_replacement, without_replacement

DELTA_0 = 1e-5
# l = xθ with |x| ≤ 1, ten clients of 100 rows, one drawn, one step on all rows, ε₀ = 1
COUNTER = RunSettings(
    sizes=[100] * 10,
    local_steps=1,
    num_rounds=1,
    step_size=0.1 / (4 * math.log(1.25 / DELTA_0)),
    sensitivity=2.0,
    noise="paper",
    participation=without_replacement(1),
)


def true_delta(run, epsilon):
    """δ between the data sets of the counter-example, from the density of what the server receives.

    Client 0 holds +1 in all rows, or −1 in one of them; the other nine hold −1 throughout.
    """
    eta, p = run.step_size, 0.1
    sd = math.sqrt(2 * eta / p)
    x = np.linspace(-8, 8, 2_000_001)
    others = 0.9 * norm.pdf(x, eta * 100 / p, sd)
    whole = others + 0.1 * norm.pdf(x, -eta * 100 / p, sd)
    replaced = others + 0.1 * norm.pdf(x, -eta * 98 / p, sd)
    return np.trapezoid(np.maximum(whole - math.exp(epsilon) * replaced, 0), x)


def test_counter_example_breaks_the_published_bound():
    claim = paper_bound(COUNTER, delta_0=DELTA_0, as_published=True)
    assert claim.epsilon_gauss == pytest.approx(1)
    assert claim.epsilon == pytest.approx(0.494, abs=5e-4)
    assert claim.delta == pytest.approx(1e-6)
    truth = true_delta(COUNTER, claim.epsilon)
    assert truth == pytest.approx(7.3e-5, rel=1e-3)
    assert truth > 50 * claim.delta
    assert not claim.sound
    assert "UNSOUND" in claim.label


def test_counter_example_does_not_break_ours():
    bound = paper_bound(COUNTER, delta_0=DELTA_0)
    assert bound.sound
    assert (bound.epsilon, bound.delta) == (pytest.approx(2.0), pytest.approx(1e-6))
    assert true_delta(COUNTER, bound.epsilon) <= bound.delta
    for method in ("pld", "rdp"):
        ledger = Ledger(COUNTER, delta=1e-6, method=method)
        for epsilon in (0.1, 0.494, 1.0):
            assert true_delta(COUNTER, epsilon) <= ledger.delta_at(epsilon)[0] * (1 + 1e-6)
    # and tightly so: the pair is the worst there is
    assert Ledger(COUNTER, delta=1e-6).delta_at(0.494)[0] == pytest.approx(
        true_delta(COUNTER, 0.494), rel=1e-3
    )
    # the test can fail: nine tenths of the accounted noise would not do
    quieter = replace(COUNTER, temperature=0.81)
    assert Ledger(quieter, delta=1e-6).delta_at(0.494)[0] > 1.5 * true_delta(COUNTER, 0.494)


def test_intermediates(run):
    b = paper_bound(run(local_steps=10, num_rounds=1000, participation=without_replacement(5)), delta=1e-5)
    assert b.inclusion == 0.5
    assert b.delta_participation == pytest.approx(0.5 * (10 * b.batch_fraction * b.delta_0 + b.delta_1))
    assert b.delta == pytest.approx(1000 * b.delta_participation + b.delta_2)
    assert b.epsilon_participation == b.epsilon_round
    e = b.epsilon_step
    assert b.epsilon_round == pytest.approx(
        e * min(math.sqrt(20 * math.log(1 / b.delta_1)) + 10 * math.expm1(e), 10)
    )
    assert b.epsilon_step == pytest.approx(2 * b.batch_fraction * b.epsilon_gauss)
    assert b.to_dict()["epsilon"] == b.epsilon


def test_scheme_one_uses_the_weight_of_the_client():
    run = RunSettings(
        sizes=[100, 300],
        local_steps=1,
        num_rounds=2,
        step_size=1e-5,
        sensitivity=0.5,
        noise="paper",
        participation=with_replacement(3),
    )
    corrected = paper_bound(run, delta_0=1e-6, delta_2=1e-6)
    assert corrected.inclusion == pytest.approx(1 - 0.25**3)
    printed = paper_bound(run, delta_0=1e-6, delta_2=1e-6, as_published=True)
    assert printed.inclusion == pytest.approx(1 - 0.5**3)
    assert printed.epsilon < corrected.epsilon
    # δ_{K,s} by the printed formula
    eps, total = printed.epsilon_round, 0.0
    for s in (1, 2, 3):
        inner = 1.25 * (1e-6 / 1.25) ** (1 / s**2)
        total += math.comb(3, s) * 0.5**3 * inner * math.expm1(eps) / math.expm1(eps / s)
    assert printed.delta_participation == pytest.approx(total)
    assert printed.delta > 100 * corrected.delta


def test_realised_noise_changes_the_bound():
    base = {"sizes": [100] * 4, "local_steps": 2, "num_rounds": 3, "step_size": 1e-5, "sensitivity": 0.5}
    paper = paper_bound(RunSettings(**base, noise="paper", participation=without_replacement(2)), delta=1e-4)
    realised = paper_bound(RunSettings(**base, participation=without_replacement(2)), delta=1e-4)
    assert realised.least_weight == pytest.approx(2 / 16)  # p²v = p²S
    assert realised.epsilon_step == pytest.approx(paper.epsilon_step * math.sqrt(2))
    with pytest.raises(ConfigError, match="noise 'paper'"):
        paper_bound(RunSettings(**base, participation=without_replacement(2)), delta=1e-4, as_published=True)


def test_range_and_schedule(run):
    inside = paper_bound(run(), delta=1e-5)
    edge = paper_bound(run(step_size=inside.step_size_limit), delta=1e-5)
    assert edge.epsilon_gauss == pytest.approx(1)
    with pytest.raises(ConfigError, match="for the paper's bound to hold"):
        paper_bound(run(step_size=inside.step_size_limit * 1.0001), delta=1e-5)
    falling = run(num_rounds=4, step_size=[4e-7, 3e-7, 2e-7, 1e-7])
    assert (
        paper_bound(falling, delta=1e-5).epsilon
        == paper_bound(run(num_rounds=4, step_size=4e-7), delta=1e-5).epsilon
    )
    with pytest.raises(ConfigError, match="constant step size"):
        paper_bound(falling, delta=1e-5, as_published=True)


def test_parts_of_delta(run):
    with pytest.raises(ConfigError, match="either delta"):
        paper_bound(run(), delta=1e-5, delta_0=1e-9)
    with pytest.raises(ConfigError, match="either delta"):
        paper_bound(run())
    with pytest.raises(ConfigError, match="between 0 and 1"):
        paper_bound(run(), delta=1.5)
    with pytest.raises(ConfigError, match="either delta"):
        paper_bound(run(), delta_1=1e-9)
    for wrong in (0.0, 1.0):
        with pytest.raises(ConfigError, match="between 0 and 1"):
            paper_bound(run(), delta=wrong)
    for wrong in ({"delta_0": 0.0}, {"delta_0": 1.0}, {"delta_0": 1e-9, "delta_1": 1.0},
                  {"delta_0": 1e-9, "delta_2": 1.0}, {"delta_0": 1e-9, "delta_1": -1e-9},
                  {"delta_0": 1e-9, "delta_2": -1e-9}):  # fmt: skip
        with pytest.raises(ConfigError, match="parts of delta"):
            paper_bound(run(), **wrong)
    plain = paper_bound(run(), delta_0=1e-9)
    assert (plain.delta_1, plain.delta_2) == (0.0, 0.0)
    assert plain.epsilon == pytest.approx(plain.num_rounds * plain.epsilon_step)


def test_composition_and_amplification():
    for epsilon, count, delta in ((0.01, 1000, 1e-6), (0.3, 20, 1e-3), (2.0, 5, 1e-9)):
        advanced = math.sqrt(2 * count * math.log(1 / delta)) + count * (math.exp(epsilon) - 1)
        assert _composed(epsilon, count, delta) == pytest.approx(epsilon * min(advanced, count))
        assert _composed(epsilon, count, 0) == epsilon * count
    assert _composed(0.01, 1000, 1e-6) < 0.01 * 1000
    assert _composed(800.0, 3, 1e-6) == 2400.0  # no overflow
    for epsilon, q in ((0.1, 0.2), (3.0, 0.01), (699.0, 0.5)):
        assert _amplified(epsilon, q) == pytest.approx(math.log(1 + q * (math.exp(epsilon) - 1)))
    assert _amplified(800.0, 0.5) == pytest.approx(800 + math.log(0.5))


@pytest.mark.parametrize("noise", ["paper", "realised"])
@pytest.mark.parametrize("scheme", ["full", "I", "II"])
def test_the_chain_of_inequalities_by_hand(scheme, noise):
    """Unequal sizes, several chains, a falling step: each line of the module's text, worked out."""
    sizes = np.array([100, 100, 300]) if scheme != "II" else np.array([100, 100, 100])
    part = {"full": None, "I": with_replacement(2), "II": without_replacement(2)}[scheme]
    eta = np.geomspace(3e-7, 1e-7, 12)
    run = RunSettings(
        sizes=sizes, local_steps=3, num_rounds=4, num_chains=5, step_size=eta, temperature=0.7, noise=noise,
        correlation=0.6, batch_size=20, sensitivity=1.5, participation=part,
    )  # fmt: skip
    p = sizes / sizes.sum()
    fractions, rounds, tau = 20 / sizes, 20, 0.7 * (1 - 0.36)
    q = {"full": 1.0, "I": 1 - (1 - p.max()) ** 2, "II": 2 / 3}[scheme]
    entering = {"full": p, "I": np.ones(3), "II": np.full(3, 0.5)}[scheme]  # drawn as often as possible
    weight = p if noise == "paper" else p**2 / entering
    b = paper_bound(run, delta=1e-5)
    d0, d1, d2 = 1e-5 / (3 * fractions.max() * rounds * 3 * q), 1e-5 / (3 * rounds * q), 1e-5 / 3
    assert (b.delta_0, b.delta_1, b.delta_2) == (pytest.approx(d0), pytest.approx(d1), pytest.approx(d2))
    assert b.delta == pytest.approx(1e-5)
    assert (b.inclusion, b.num_rounds, b.batch_fraction) == (pytest.approx(q), rounds, fractions.max())
    assert b.least_weight == pytest.approx(weight.min())
    log = math.log(1.25 / d0)
    assert b.step_size == eta[0]
    assert b.step_size_limit == pytest.approx(tau * (fractions**2 * weight).min() / (1.5**2 * log))
    assert b.epsilon_gauss == pytest.approx(math.sqrt(eta[0] / b.step_size_limit))
    step = 2 * 1.5 * math.sqrt(eta[0] * log / (tau * weight.min()))
    assert b.epsilon_step == pytest.approx(step)
    assert b.epsilon_round == b.epsilon_participation == pytest.approx(_composed(step, 3, d1))
    assert b.epsilon == pytest.approx(_composed(b.epsilon_round, rounds, d2))
    assert (b.sound, b.label, b.as_published) == (True, "corrected", False)


@pytest.mark.parametrize("scheme", ["full", "II"])
def test_the_closed_forms_by_hand(scheme):
    part = None if scheme == "full" else without_replacement(2)
    run = RunSettings(
        sizes=[100] * 4, local_steps=3, num_rounds=40, num_chains=2, step_size=1e-12, temperature=0.7,
        noise="paper", correlation=0.6, batch_size=20, sensitivity=1.5, participation=part,
    )  # fmt: skip
    parts = {"delta_0": 1e-9, "delta_1": 1e-8, "delta_2": 1e-6}
    for as_published in (False, True):
        f = paper_forms(run, **parts, as_published=as_published)
        q = 0.5 if as_published and scheme == "II" else 1.0
        drawn, K, E, T, heat = 0.5 if scheme == "II" else 1.0, 3, 80, 240, 0.7 * 0.64 * 0.25
        c2, first, second = 2 * math.log(1.25e9), math.log(1e8), math.log(1e6)
        assert f.bound.sound is (not as_published or scheme == "full")
        assert f.simple_epsilon == pytest.approx(
            E * math.log(1 + q * (math.exp(K * f.bound.epsilon_step) - 1))
        )
        assert f.simple_delta == pytest.approx(drawn * 0.2 * T * 1e-9)
        small = min(
            math.log(1 + math.sqrt(2 * first / K)) ** 2,
            math.log(1 + math.sqrt(2 * second / E) / q) ** 2 / (8 * K * first),
        )
        limit = heat / (2 * 1.5**2 * c2) * small
        assert f.step_size_limit == pytest.approx(min(limit, f.bound.step_size_limit))
        assert f.step_size_order == pytest.approx(heat * second / (16 * q**2 * 1.5**2 * T * (c2 / 2) * first))
        inner = 4 * math.sqrt(c2) * 1.5 * math.sqrt(1e-12 * K * first / heat)
        assert f.closed_epsilon == pytest.approx(
            2 * math.sqrt(2 * E * second) * math.log(1 + q * (math.exp(inner) - 1))
        )
        order = 16 * 1.5 * math.sqrt(1e-12 * T * (c2 / 2) * first * second / heat)
        assert f.epsilon_order == pytest.approx(q * order)
    for wrong in ({"delta_1": 0.0}, {"delta_1": 1.0}, {"delta_2": 0.0}, {"delta_2": 1.0}):
        with pytest.raises(ConfigError, match="between 0 and 1"):
            paper_forms(run, **{**parts, **wrong})


def test_one_client_is_always_drawn():
    run = RunSettings(
        sizes=[100], local_steps=1, num_rounds=2, step_size=1e-9, sensitivity=0.5, noise="paper",
        participation=with_replacement(3),
    )  # fmt: skip
    printed = paper_bound(run, delta_0=1e-6, as_published=True)
    assert printed.inclusion == 1.0
    assert printed.sound
    assert printed.label == "as published"
