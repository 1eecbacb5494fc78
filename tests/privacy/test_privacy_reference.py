"""Reference values of the audit of the published theorem, each with a twin that must fail."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from fald.core.errors import ConfigError
from fald.privacy import account, paper_bound, step_noise
from fald.settings.participation import without_replacement

# K, S, η, batch, z, published ε, corrected ε, RDP ε, PLD ε at N=10, p=.1, n_c=6000, Δ=2, T=1e4, δ=1e-5
TABLE = [
    (1, 10, 1e-7, 200, 23.5702, 11.68306291933, 11.68306291933, 1.16583, 0.50606),
    (10, 10, 1e-7, 200, 23.5702, 59.99113999439, 59.99113999439, 1.16583, 0.50606),
    (1, 10, 1e-6, 200, 7.45356, 58.08981384048, 58.08981384048, 4.20864, 1.86751),
    (10, 10, 1e-5, 200, 2.35702, None, None, 18.1008, 8.15160),
    (10, 5, 1e-7, 200, 23.5702, 22.18284978118, 58.21363102179, 0.803093, 0.34739),
    (1, 10, 1e-6, None, 223.607, 66.16781219171, 66.16781219171, 1.91425, 1.76008),
]
PLD, RDP, PUBLISHED = 5e-4, 1e-4, 1e-10
DELTA = 1e-5


@pytest.fixture(params=TABLE, ids=lambda row: f"K{row[0]}-S{row[1]}-eta{row[2]}-b{row[3]}")
def row(request, run):
    k, s, eta, batch, *values = request.param
    part = None if s == 10 else without_replacement(s)
    changes = {"local_steps": k, "num_rounds": 10_000 // k, "step_size": eta, "batch_size": batch}
    return run(participation=part, **changes), values


def test_noise_multiplier(row):
    settings, (z, *_) = row
    np.testing.assert_allclose(step_noise(settings).multiplier, z, rtol=3e-6)


def test_published_and_corrected(row):
    settings, (_, published, corrected, *_) = row
    if published is None:
        with pytest.raises(ConfigError, match="step-size must be ≤"):
            paper_bound(settings, delta=DELTA)
        return
    assert paper_bound(settings, delta=DELTA, as_published=True).epsilon == pytest.approx(
        published, rel=PUBLISHED
    )
    bound = paper_bound(settings, delta=DELTA)
    assert bound.epsilon == pytest.approx(corrected, rel=PUBLISHED)
    assert bound.delta == pytest.approx(DELTA, rel=1e-12)


def test_pld(row):
    settings, (*_, expected) = row
    report = account(settings, delta=DELTA)
    assert report.worst == pytest.approx(expected, rel=PLD)
    assert np.all(report.epsilon == report.worst)


def test_rdp(row):
    settings, (*_, expected, _) = row
    assert account(settings, delta=DELTA, method="rdp").worst == pytest.approx(expected, rel=RDP)


@pytest.mark.parametrize("method", ["pld", "rdp"])
def test_a_tenth_more_noise_is_seen(row, method):
    settings, (*_, rdp, pld) = row
    louder = account(replace(settings, temperature=1.21), delta=DELTA, method=method).worst
    expected, tolerance = (pld, PLD) if method == "pld" else (rdp, RDP)
    assert louder < expected * (1 - 20 * tolerance)


def test_summed_view_of_single_steps(run):
    settings = run(step_size=1e-6)
    report = account(settings, delta=DELTA, view="summed")
    way = report.noise.presences[0][0]
    assert way.last * report.noise.step[0] == pytest.approx(23.5702, rel=3e-6)
    assert report.worst == pytest.approx(0.50606, rel=PLD)
    assert account(settings, delta=DELTA).worst > 3 * report.worst
