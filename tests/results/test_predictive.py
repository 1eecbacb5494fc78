"""Outcomes beside simulated ones: every number of the comparison by hand, on simulations made up for it."""

from types import SimpleNamespace

import numpy as np
import pytest

from fald.core.errors import ConfigError, DataError
from fald.results import predictive
from fald.results.predictive import compare, predictive_checks

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
        simulated = SIMULATED[b].mean(axis=0)
        assert shown["expected"] == pytest.approx(simulated.mean())
        assert [shown["low"], shown["high"]] == pytest.approx(np.quantile(simulated, [0.05, 0.95]).tolist())


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


@pytest.mark.parametrize(
    ("seen", "slack"), [(0.0, 1e-9), (0.5, 1e-9), (-1.0, 1e-9), (1000.0, 1e-6), (-1000.0, 1e-6)]
)
def test_values_are_equal_within_a_billionth_of_the_larger_of_them_and_one(seen, slack):
    for away, above, both in ((-1.01, 0.01, 0.02), (-0.99, 1.0, 1.0), (0.99, 1.0, 1.0), (1.01, 1.0, 0.02)):
        simulated = np.full(99, seen + away * slack)
        assert predictive._discrepancy(seen, simulated)["p_value"] == pytest.approx(both)
        assert predictive._discrepancy(seen, simulated, two_sided=False)["p_value"] == pytest.approx(above)


@pytest.mark.parametrize("border", [-1e-9, 1e-9])
def test_a_value_on_the_border_is_equal(border):
    assert predictive._discrepancy(0.0, np.full(99, border))["p_value"] == 1.0


def test_outcomes_all_but_certain_have_a_distance():
    found = compare(np.ones(20), np.ones(20), np.ones((20, 150)), parts={"a": slice(0, 20)}, tail=0.05)
    assert found["site_means"]["seen"] == 0.0
    assert found["sites"][0]["distance"] == 0.0
    # sds and variances count as at least 1e-12
    assert predictive._distance(3.0, np.full(150, 2.0)) == pytest.approx(1e12)
    assert predictive._of_coins(0.5, np.ones((20, 150))) == {
        "expected": 1.0,
        "distance": pytest.approx(-5e11),
    }
    seen, simulated = predictive._site_means(np.full(20, 0.5), np.ones((20, 150)), [slice(0, 20)])
    assert (seen, simulated.tolist()) == (pytest.approx(0.25e12), [0.0] * 150)


@pytest.mark.parametrize(
    ("rows", "count"),
    [(1, 1), (5, 1), (39, 1), (40, 2), (59, 2), (60, 3), (199, 9), (200, 10), (220, 10), (1000, 10)],
)
def test_rows_of_similar_prediction_are_ten_groups_or_so_many_that_twenty_are_in_each(rows, count):
    expected = np.arange(rows)[::-1] // 2.0  # pairs of equal predictions, the largest in front
    found = predictive._bins(expected)
    assert len(found) == count
    assert max(map(len, found)) - min(map(len, found)) <= 1
    order = sorted(range(rows), key=lambda row: (expected[row], row))  # equal ones stay in their order
    assert np.concatenate(found).tolist() == order


def test_equal_predictions_stay_in_their_order():
    expected = np.tile([1.0, 0.0], 500)
    assert np.concatenate(predictive._bins(expected)).tolist() == [*range(1, 1000, 2), *range(0, 1000, 2)]


def test_the_mean_of_coins_has_the_variance_of_chances_and_of_throws():
    chance = np.clip(0.5 + 0.1 * RNG.normal(size=(40, 300)) + 0.1 * RNG.normal(size=300), 0.01, 0.99)
    found = predictive._of_coins(0.7, chance)
    variance = chance.mean(axis=0).var() + np.mean(np.sum(chance * (1 - chance), axis=0)) / 40**2
    assert found["expected"] == pytest.approx(chance.mean())
    assert found["distance"] == pytest.approx((0.7 - chance.mean()) / np.sqrt(variance))


def test_a_coin_falls_on_one_where_a_number_is_below_its_chance(monkeypatch):
    chance = RNG.random((7, 50))
    found = predictive._coins(chance, 3)
    assert found.dtype == float
    np.testing.assert_array_equal(found, np.random.default_rng(3).random((7, 50)) < chance)
    assert not np.array_equal(found, predictive._coins(chance, 4))
    monkeypatch.setattr(np.random, "default_rng", lambda seed: SimpleNamespace(random=np.zeros))
    assert predictive._coins(np.array([[0.0, 1e-300, 1.0]]), 0).tolist() == [[0.0, 1.0, 1.0]]


# -- what is compared: outcomes, expectations and simulations of a model ----------------------------------


@pytest.fixture
def outcomes(monkeypatch):
    """The outcomes of a model whose draws are given as they are; nothing is compiled."""

    def expected(model, at, x):
        return model.predict_fn(np.asarray(at), np.asarray(x))

    def simulated(model, at, x, seed):
        return model.simulate_fn(np.asarray(at), np.asarray(x), seed)

    monkeypatch.setattr(predictive, "flat_positions", lambda model, tree: tree)
    monkeypatch.setattr(predictive, "expected_outcomes", expected)
    monkeypatch.setattr(predictive, "simulated_outcomes", simulated)

    def found(seen, predict, simulate=None, *, draws=100, num_rows=None, rows=None, seed=0):
        model = SimpleNamespace(predict_fn=predict, simulate_fn=simulate, unravel=lambda position: position)
        rows = (np.arange(len(seen)) + 10.0, np.asarray(seen)) if rows is None else rows
        data = SimpleNamespace(rows=rows, num_rows=num_rows or len(seen))
        return predictive._outcomes(model, np.arange(2.0 * draws).reshape(draws, 2), data, seed)

    return found


def sums(at, x):
    return x[:, None] + at[:, 0]


def numbered(at, x, seed):
    return 1000.0 * seed + sums(at, x)


@pytest.mark.parametrize(
    ("draws", "num_rows", "taken"),
    [
        *[(100, 2, 100), (250, 2, 250), (400, 2, 400), (401, 2, 400), (1000, 2, 400)],
        *[(1000, 100_000, 400), (1000, 100_001, 399), (1000, 400_000, 100), (150, 400_000, 100)],
    ],
)
def test_draws_are_taken_evenly_from_the_first_to_the_last(outcomes, draws, num_rows, taken):
    seen, means, simulated, outcome = outcomes(
        [0.5, 2.5], sums, numbered, draws=draws, num_rows=num_rows, seed=7
    )
    assert (seen.tolist(), outcome) == ([0.5, 2.5], "mean outcome")
    places = (means[0] - 10) / 2  # the first number of a draw is twice its place
    assert (len(places), places[0], places[-1]) == (taken, 0, draws - 1)
    step = (draws - 1) / (taken - 1)
    assert set(np.diff(places)) <= {np.floor(step), np.ceil(step)}
    np.testing.assert_array_equal(means[1], means[0] + 1)
    np.testing.assert_array_equal(simulated, means + 7000)
    assert means.dtype == simulated.dtype == seen.dtype == float


@pytest.mark.parametrize(
    "rows",
    [
        np.ones((2, 3)),
        [np.ones(3), np.ones(3)],
        (np.ones(3),),
        (np.ones(3), np.ones(3), np.ones(3)),
        (np.ones(3), np.ones((3, 2))),
        (np.ones(3), 1.0),
    ],
    ids=["array", "list", "alone", "three", "matrix", "number"],
)
def test_rows_must_be_features_and_outcomes(outcomes, rows):
    with pytest.raises(DataError, match="does not predict outcomes from features"):
        outcomes([1.5] * 3, sums, numbered, rows=rows)


def test_what_cannot_be_compared_is_refused(outcomes):
    assert outcomes([1.5], sums, numbered)[3] == "mean outcome"
    with pytest.raises(DataError, match="does not predict outcomes from features"):
        outcomes([1.5], None, numbered)
    with pytest.raises(DataError, match="400,001 rows are too many"):
        outcomes([1.5], sums, numbered, num_rows=400_001)
    with pytest.raises(DataError, match="it takes 100 draws, and there are 99"):
        outcomes([1.5], sums, numbered, draws=99)
    with pytest.raises(DataError, match="cannot simulate outcomes"):
        outcomes([1.5], sums)


CHANCES = np.linspace(0.0, 1.0, 300).reshape(3, 100)  # impossible and certain outcomes among them


@pytest.mark.parametrize("seen", [[0, 1, 1], [0, 0, 0], [1, 1, 1]])
def test_outcomes_of_zero_and_one_with_chances_are_coins(outcomes, seen):
    found, means, simulated, outcome = outcomes(seen, lambda at, x: CHANCES, seed=5)
    assert (found.tolist(), outcome) == (seen, "share of rows with the outcome")
    np.testing.assert_array_equal(means, CHANCES)
    np.testing.assert_array_equal(simulated, np.random.default_rng(5).random((3, 100)) < CHANCES)


@pytest.mark.parametrize(
    ("seen", "means"),
    [
        ([0, 1, 2], CHANCES),
        ([0, 2, 2], CHANCES),
        ([0, 1, 0.5], CHANCES),
        ([1, 1, -1], CHANCES),
        ([0, 1, 1], CHANCES - 1e-9),
        ([0, 1, 1], CHANCES + 1e-9),
        ([0, 1, 1], 5 * CHANCES - 1),
    ],
)
def test_other_outcomes_or_expectations_are_simulated_by_the_model(outcomes, seen, means):
    found = outcomes(seen, lambda at, x: means, numbered, seed=5)
    assert (found[0].tolist(), found[3]) == (seen, "mean outcome")
    np.testing.assert_array_equal(found[1], means)
    np.testing.assert_array_equal(found[2][:, 0], [5010, 5011, 5012])


def test_of_several_classes_the_likeliest_is_right_or_wrong(outcomes):
    means = np.full((4, 100, 3), 0.25)
    tops = [2, 0, 1, 2]
    for row, top in enumerate(tops):
        means[row, :, top] += 0.25 * np.arange(100) / 99  # but for the first draw the likeliest
        means[row, 0, (top + 1) % 3] = 0.6
    right, chance, simulated, outcome = outcomes([2, 0, 0, 1], lambda at, x: means, seed=5)
    assert (right.tolist(), outcome) == ([1, 1, 0, 0], "share of rows in their likeliest class")
    np.testing.assert_array_equal(chance, [means[row, :, top] for row, top in enumerate(tops)])
    np.testing.assert_array_equal(simulated, np.random.default_rng(5).random((4, 100)) < chance)


# -- all together -----------------------------------------------------------------------------------------

DATA = SimpleNamespace(names=tuple(PARTS), offsets=np.array([0, 10, 19, 45]))
CHAIN = SimpleNamespace(attrs={"kind": "chain"})
CHANCE = np.clip(0.5 + EXPECTED[:, None] / 4 + 0.1 * RNG.normal(size=(45, 30)), 0.01, 0.99)


@pytest.fixture
def given(monkeypatch):
    """What is compared, as the outcomes of a model would have it, and what they were asked for."""
    asked = {}

    def give(outcome):
        def made(model, tree, data, seed):
            asked.update(model=model, tree=tree, data=data, seed=seed)
            return SEEN, CHANCE, SIMULATED, outcome

        monkeypatch.setattr(predictive, "_outcomes", made)
        return asked

    return give


def test_checks_compare_what_is_expected_on_average_over_draws(given):
    asked = given("mean outcome")
    found = predictive_checks("model", CHAIN, DATA, level=0.75, seed=7)
    assert asked == {"model": "model", "tree": CHAIN, "data": DATA, "seed": 7}
    compared = compare(SEEN, CHANCE.mean(axis=1), SIMULATED, parts=PARTS, tail=0.125)
    assert found == {"outcome": "mean outcome", "level": 0.75, **compared}


def test_checks_have_intervals_of_95_percent_and_seed_zero(given):
    asked = given("mean outcome")
    found = predictive_checks("model", CHAIN, DATA)
    assert (asked["seed"], found["level"]) == (0, 0.95)
    ends = np.quantile(SIMULATED[:10].mean(axis=0), [0.025, 0.975])
    assert [found["sites"][0]["low"], found["sites"][0]["high"]] == pytest.approx(ends.tolist())


@pytest.mark.parametrize(
    "outcome", ["share of rows in their likeliest class", "share of rows with the outcome"]
)
def test_shares_of_sites_that_are_shown_are_compared_with_their_law(given, outcome):
    given(outcome)
    found = predictive_checks("model", CHAIN, DATA, level=0.75)
    compared = compare(SEEN, CHANCE.mean(axis=1), SIMULATED, parts=PARTS, tail=0.125)
    for site in (compared["sites"][0], compared["sites"][2]):  # the other has nine rows
        site |= predictive._of_coins(site["seen"], CHANCE[PARTS[site["client"]]])
    assert found == {"outcome": outcome, "level": 0.75, **compared}
    assert found["sites"][1]["distance"] is None


def test_checks_need_a_level_and_a_posterior(given):
    given("mean outcome")
    for level in (0, 1, 95):
        with pytest.raises(ConfigError, match="level must be between 0 and 1"):
            predictive_checks("model", CHAIN, DATA, level=level)
    with pytest.raises(DataError, match="gives a point estimate"):
        predictive_checks("model", SimpleNamespace(attrs={"kind": "point estimate"}), DATA)
