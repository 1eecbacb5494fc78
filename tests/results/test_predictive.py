"""Outcomes beside simulated ones: every number of the comparison by hand, on simulations made up for it."""

import numpy as np
import pytest

from fald.results import predictive
from fald.results.predictive import compare

RNG = np.random.default_rng(5)
EXPECTED = np.linspace(-1.0, 1.0, 45)
SIMULATED = EXPECTED[:, None] + RNG.normal(size=(45, 199))
SEEN = EXPECTED + RNG.normal(size=45)
PARTS = {"a": slice(0, 10), "b": slice(10, 19), "c": slice(19, 45)}


def p_value(seen, simulated, two_sided):
    above = (1 + np.sum(simulated >= seen)) / (1 + len(simulated))
    below = (1 + np.sum(simulated <= seen)) / (1 + len(simulated))
    return min(1.0, 2 * min(above, below)) if two_sided else above


def told(found, seen, simulated, *, two_sided):
    assert found["seen"] == pytest.approx(seen)
    assert found["expected"] == pytest.approx(simulated.mean())
    assert found["distance"] == pytest.approx((seen - simulated.mean()) / simulated.std())
    assert found["p_value"] == pytest.approx(p_value(seen, simulated, two_sided))


@pytest.mark.parametrize("scale", [0.5, 1.0, 2.0])
def test_three_discrepancies_are_their_sums(scale):
    seen = scale * SEEN
    found = compare(seen, EXPECTED, SIMULATED, parts=PARTS, tail=0.05)
    assert (found["draws"], found["rows"]) == (199, 45)
    means = {n: SIMULATED[p].mean(axis=0) for n, p in PARTS.items()}
    site = sum((seen[p].mean() - means[n].mean()) ** 2 / means[n].var() for n, p in PARTS.items())
    told(
        found["site_means"], site, sum((m - m.mean()) ** 2 / m.var() for m in means.values()), two_sided=False
    )
    squares = np.mean((SIMULATED - EXPECTED[:, None]) ** 2, axis=0)
    told(found["squared_error"], np.mean((seen - EXPECTED) ** 2), squares, two_sided=True)
    bins = [np.arange(0, 23), np.arange(23, 45)]  # of at least twenty rows, in the order of what is expected

    def apart(outcomes):
        parts = [len(b) * np.abs(outcomes[b].mean(axis=0) - EXPECTED[b].mean()) for b in bins]
        return sum(parts) / 45

    told(found["calibration_error"], apart(seen), apart(SIMULATED), two_sided=False)
    assert [b["rows"] for b in found["bins"]] == [23, 22]
    for b, shown in zip(bins, found["bins"]):
        assert shown["predicted"] == pytest.approx(EXPECTED[b].mean())
        assert shown["seen"] == pytest.approx(seen[b].mean())


def test_sites_have_means_intervals_and_at_least_ten_rows_if_they_are_shown():
    found = compare(SEEN, EXPECTED, SIMULATED, parts=PARTS, tail=0.05)
    assert [(s["client"], s["rows"]) for s in found["sites"]] == [("a", 10), ("b", 9), ("c", 26)]
    for site, part in zip(found["sites"], PARTS.values()):
        means = SIMULATED[part].mean(axis=0)
        assert site["expected"] == pytest.approx(means.mean())
        assert [site["low"], site["high"]] == pytest.approx(np.quantile(means, [0.05, 0.95]).tolist())
        if site["client"] == "b":
            assert (site["seen"], site["distance"]) == (None, None)
        else:
            assert site["seen"] == pytest.approx(SEEN[part].mean())
            assert site["distance"] == pytest.approx((SEEN[part].mean() - means.mean()) / means.std())


def test_p_values_count_what_was_seen_among_the_simulated():
    simulated = np.arange(1.0, 100.0)
    for seen, above, both in ((100.0, 0.01, 0.02), (0.0, 1.0, 0.02), (50.0, 0.51, 1.0), (97.0, 0.04, 0.08)):
        assert predictive._discrepancy(seen, simulated)["p_value"] == pytest.approx(both)
        assert predictive._discrepancy(seen, simulated, two_sided=False)["p_value"] == pytest.approx(above)
    equal = np.full(99, 0.1) * (1 + 1e-12 * np.arange(99))  # but for rounding
    assert predictive._discrepancy(0.1 * (1 + 5e-12), equal)["p_value"] == 1.0


def test_outcomes_all_but_certain_have_a_distance():
    found = compare(np.ones(20), np.ones(20), np.ones((20, 150)), parts={"a": slice(0, 20)}, tail=0.05)
    assert found["site_means"]["seen"] == 0.0
    assert found["sites"][0]["distance"] == 0.0


def test_the_mean_of_coins_has_the_variance_of_chances_and_of_throws():
    chance = np.clip(0.5 + 0.1 * RNG.normal(size=(40, 300)) + 0.1 * RNG.normal(size=300), 0.01, 0.99)
    found = predictive._of_coins(0.7, chance)
    variance = chance.mean(axis=0).var() + np.mean(np.sum(chance * (1 - chance), axis=0)) / 40**2
    assert found["expected"] == pytest.approx(chance.mean())
    assert found["distance"] == pytest.approx((0.7 - chance.mean()) / np.sqrt(variance))
