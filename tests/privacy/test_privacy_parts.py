"""Settings, events and composition one by one, on numbers that can be written down by hand."""

from __future__ import annotations

import itertools
import json
import math

import numpy as np
import pytest
from scipy.stats import binom

from fald.core.errors import ConfigError, PrivacyError
from fald.privacy.compose import Loss, chord, mixed, nothing, repeated, together
from fald.privacy.events import _multiplicities, entering_weight, own_noise, step_noise
from fald.privacy.rounds import ClientLedger
from fald.privacy.settings import RunSettings
from fald.settings.fald import Setting
from fald.settings.participation import full, with_replacement, without_replacement

SIZES = (20, 30, 50)


def run(**changes):
    given = {"sizes": SIZES, "local_steps": 2, "num_rounds": 3, "step_size": 1e-3, "sensitivity": 0.7}
    return RunSettings(**{**given, **changes})


# -- settings -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("sizes", [[], [[10, 20]], [10, 0], [10, -1], [10.5, 10], [10, math.nan], 7], ids=str)
def test_sizes_are_whole_numbers_one_per_client(sizes):
    with pytest.raises(ConfigError, match="sizes must be whole numbers ≥ 1"):
        run(sizes=sizes)


def test_the_least_sizes_are_accepted_and_kept_as_whole_numbers():
    kept = run(sizes=np.array([1.0, 2.0])).sizes
    assert kept == (1, 2)
    assert all(type(n) is int for n in kept)
    assert run(sizes=[1]).num_clients == 1


@pytest.mark.parametrize(
    "steps",
    [
        [[1e-3] * 6],
        [],
        [1e-3] * 5 + [math.nan],
        [math.inf] + [1e-3] * 5,
        [1e-3] * 5 + [0.0],
        [-1e-3] + [1] * 5,
    ],
    ids=["two axes", "none", "nan", "infinite", "zero", "negative"],
)
def test_every_step_of_a_schedule_is_positive_and_finite(steps):
    with pytest.raises(ConfigError, match="one number or one per local step"):
        run(step_size=steps)


@pytest.mark.parametrize("number", [5, 7])
def test_a_schedule_has_one_step_per_local_step(number):
    with pytest.raises(ConfigError, match=f"num-rounds × local-steps = 6; got {number}"):
        run(step_size=[1e-3] * number)
    with pytest.raises(ConfigError, match="step-size must be a number > 0"):
        run(step_size=math.inf)


def test_schedules_are_written_out_from_the_first_step_on():
    eta = [float(x) for x in np.linspace(3e-3, 1e-3, 6)]
    assert run(step_size=np.array(eta)).step_size == tuple(eta)
    assert run(step_size=lambda k: 1e-3 / (1 + k)).step_size == tuple(1e-3 / (1 + k) for k in range(6))
    assert run(step_size=np.float64(2e-3)).step_size == 2e-3
    for one in (np.float64(2e-3), np.array(2e-3)):
        assert type(run(step_size=one).step_size) is float
    shorter = run(step_size=eta).first_rounds(2)
    assert (shorter.step_size, shorter.num_rounds, shorter.num_steps) == (tuple(eta[:4]), 2, 4)
    assert run().first_rounds(1).step_size == 1e-3


def test_a_bound_is_given_once_and_an_infinite_one_bounds_nothing():
    assert run().delta_gradient == 0.7
    assert run(sensitivity=None, clip_norm=0.4).delta_gradient == 0.8
    assert run(sensitivity=math.inf, clip_norm=0.4).delta_gradient == 0.8
    assert run(clip_norm=math.inf).delta_gradient == 0.7
    assert run(sensitivity=math.inf).sensitivity is None
    assert run(clip_norm=math.inf).clip_norm is None
    with pytest.raises(ConfigError, match="not both"):
        run(clip_norm=0.4)
    for none in ({"sensitivity": None}, {"sensitivity": math.inf, "clip_norm": math.inf}):
        with pytest.raises(PrivacyError, match="no bound on a row's gradient"):
            _ = run(**none).delta_gradient


def test_participation_must_fit_the_sizes():
    with pytest.raises(ConfigError, match="20 to 50 rows"):
        run(participation=without_replacement(2))
    assert run(participation=without_replacement(3, allow_unequal=True)).num_participants == 3
    assert run(participation=with_replacement(7)).num_participants == 7
    assert (run().num_participants, run().scheme) == (3, "full")


def test_rows_of_a_step_and_weights():
    some = run(batch_size=25)
    np.testing.assert_array_equal(some.batch_rows, [20, 25, 25])
    np.testing.assert_allclose(some.batch_fraction, [1, 25 / 30, 0.5])
    np.testing.assert_array_equal(run().batch_rows, SIZES)
    np.testing.assert_array_equal(run().batch_fraction, 1)
    np.testing.assert_allclose(run().weights, [0.2, 0.3, 0.5])


def test_settings_of_a_run_come_from_those_of_the_method():
    clipped = Setting(local_steps=2, step_size=1e-3, clip_norm=0.3, correlation=0.5)
    free = Setting(local_steps=2, step_size=1e-3)
    length = {"sizes": SIZES, "num_rounds": 3}
    assert RunSettings.of(clipped, sensitivity=9.0, **length).delta_gradient == 0.6
    assert RunSettings.of(clipped, sensitivity=9.0, **length).correlation == 0.5
    assert RunSettings.of(free, sensitivity=9.0, **length).delta_gradient == 9.0
    assert RunSettings.of(free, sensitivity=9.0, step_size=2e-3, **length).step_size == 2e-3
    assert RunSettings.of(free, **length).num_chains == 1


class Tree(dict):
    """As much of a result as its settings are read from."""

    def __init__(self, settings, privacy=None):
        size = type("Array", (), {"values": np.array(SIZES)})
        super().__init__(constant_data={"size": size})
        self.attrs = {"settings": json.dumps(settings), "privacy": json.dumps(privacy)}


RECORD = {
    "step_size": 1e-3, "local_steps": 2, "correlation": 0.4, "temperature": 0.5, "noise": "paper",
    "batch_size": 10, "clip_norm": None, "participation": "without-replacement", "num_participants": 2,
    "num_rounds": 3, "num_chains": 4, "privacy": None,
}  # fmt: skip


def test_settings_of_a_result():
    found = RunSettings.from_tree(Tree(RECORD))
    assert found == run(
        sensitivity=None, correlation=0.4, temperature=0.5, noise="paper", batch_size=10, num_chains=4,
        participation=without_replacement(2, allow_unequal=True),
    )  # fmt: skip
    private = RunSettings.from_tree(Tree(RECORD | {"privacy": {}}, {"settings": {"sensitivity": 1.5}}))
    assert private.delta_gradient == 1.5
    decay = {"schedule": "PaperDecay", "smoothness": 5.0, "strong_convexity": 1.0}
    steps = RunSettings.from_tree(Tree(RECORD | {"step_size": decay})).step_size
    assert len(steps) == 6
    assert steps[0] > steps[5] > 0
    with pytest.raises(PrivacyError, match="does not record the step sizes"):
        RunSettings.from_tree(Tree(RECORD | {"step_size": {"schedule": "mine"}}))


# -- events ---------------------------------------------------------------------------------------------


def test_weights_and_noise_of_one_client():
    assert entering_weight(0.2, "full", 3, 1) == 0.2
    assert entering_weight(0.2, "without-replacement", 4, 1) == 0.25
    assert entering_weight(0.2, "with-replacement", 4, 3) == 0.75
    assert own_noise(0.2, 0.75, "paper") == pytest.approx(0.2 / math.sqrt(0.2))
    assert own_noise(0.2, 0.75, "realised") == pytest.approx(0.2 / math.sqrt(0.75))


SCHEMES = [full(), with_replacement(2), without_replacement(2, allow_unequal=True)]


@pytest.mark.parametrize("noise", ["paper", "realised"])
@pytest.mark.parametrize("part", SCHEMES, ids=lambda p: p.scheme)
def test_multipliers_come_from_the_step_itself(part, noise):
    """sd of a step's own noise over how far one replaced row moves it; and with which chance."""
    settings = run(
        participation=part, noise=noise, batch_size=25, temperature=0.5, correlation=0.6, step_size=4e-3,
        num_chains=2,
    )  # fmt: skip
    found, p = step_noise(settings), np.array(SIZES) / 100
    chances = [
        {
            "full": {1: 1.0},
            "without-replacement": {1: 2 / 3},
            "with-replacement": {k: float(binom.pmf(k, 2, share)) for k in (1, 2)},
        }[part.scheme]
        for share in p
    ]
    for c, share in enumerate(p):
        rows = min(25, SIZES[c])
        z = {}
        for times in chances[c]:
            w = {"full": share, "without-replacement": 0.5}.get(part.scheme, times / 2)
            v = 1 / share if noise == "paper" else 1 / w
            sd = math.sqrt(2 * 4e-3 * 0.5 * (1 - 0.36) * v)
            z[times] = sd / (4e-3 * 100 / rows * 0.7)
            assert found.presence(c, times).own * found.step[0] == pytest.approx(z[times])
            assert found.presence(c, times).last == found.presence(c, times).own
            assert found.presence(c, times).probability == 1
        assert found.multiplier.shape == (3,)
        assert found.multiplier[c] == pytest.approx(z[1])
        assert found.inclusion[c] == pytest.approx(sum(chances[c].values()))
        expected = {}
        for times, chance in chances[c].items():
            key = round(z[times], 9)
            expected[key] = expected.get(key, 0) + chance
        ways = {round(way.own * found.step[0], 9): way.probability for way in found.presences[c]}
        assert ways == pytest.approx(expected)
        assert len(found.presences[c]) == len(expected)  # alike ways are one
    assert (found.num_rounds, found.local_steps, found.num_chains) == (3, 2, 2)
    np.testing.assert_array_equal(found.batch_rows, [20, 25, 25])


def test_one_factor_for_all_steps_or_one_for_each():
    eta = np.array([1e-3, 2e-3, 1e-3, 1e-3, 5e-4, 1e-3])
    found = step_noise(run(step_size=eta))
    np.testing.assert_allclose(found.step, np.sqrt(2 / eta))
    np.testing.assert_allclose(found.multiplier, np.outer(found.client, np.sqrt(2 / eta)))
    assert found.multiplier.shape == (3, 6)
    assert step_noise(run(step_size=[1e-3] * 6)).step.shape == (1,)
    assert step_noise(run(step_size=[1e-3] * 5 + [2e-3])).step.shape == (6,)


def test_when_the_number_of_draws_matters():
    expected = {
        ("full", "realised", "server"): False, ("full", "realised", "summed"): False,
        ("with-replacement", "realised", "server"): True, ("with-replacement", "paper", "server"): False,
        ("with-replacement", "paper", "summed"): True, ("with-replacement", "realised", "summed"): True,
        ("without-replacement", "realised", "summed"): False,
    }  # fmt: skip
    for (scheme, noise, view), matters in expected.items():
        part = next(p for p in SCHEMES if p.scheme == scheme)
        assert step_noise(run(participation=part, noise=noise), view=view).times_matter is matters


def least_noise_of_others(part, noise, client, times, colluders):
    """Σ w²v over honest participants other than the client, least over draws and over who colludes."""
    p, n = np.array(SIZES) / 100, 3
    others = [c for c in range(n) if c != client]
    s = part.num_participants
    if part.scheme == "full":
        draws = [dict.fromkeys(others, 1)]
    elif part.scheme == "without-replacement":
        draws = [dict.fromkeys(chosen, 1) for chosen in itertools.combinations(others, s - 1)]
    else:
        draws = [
            {c: drawn.count(c) for c in set(drawn)} for drawn in itertools.product(others, repeat=s - times)
        ]
    least = math.inf
    for drawn in draws:
        for against in itertools.combinations(others, min(colluders, len(others))):
            total = 0.0
            for c, k in drawn.items():
                w = {"full": p[c], "without-replacement": 1 / (s or 1)}.get(part.scheme, k / (s or 1))
                total += 0.0 if c in against else w**2 / (p[c] if noise == "paper" else w)
            least = min(least, total)
    return least


@pytest.mark.parametrize("noise", ["paper", "realised"])
@pytest.mark.parametrize("colluders", [0, 1, 2])
@pytest.mark.parametrize(
    "part", [*SCHEMES, with_replacement(3)], ids=lambda p: f"{p.scheme}-{p.num_participants}"
)
def test_a_sum_is_covered_by_the_least_noise_that_honest_sites_add(part, noise, colluders):
    settings = run(participation=part, noise=noise, batch_size=25)
    found, p = step_noise(settings, view="summed", num_colluders=colluders), np.array(SIZES) / 100
    assert (found.view, found.num_colluders) == ("summed", colluders)
    for c in range(3):
        for times in range(1, (part.num_participants or 1) + 1 if part.scheme == "with-replacement" else 2):
            way = found.presence(c, times)
            w = entering_weight(p[c], part.scheme, part.num_participants or 3, times)
            v = 1 / (w if noise == "realised" else p[c])
            fraction = min(25, SIZES[c]) / SIZES[c]
            assert way.own == pytest.approx(fraction * p[c] * math.sqrt(v) / 0.7)
            # a row moves the sum by w/p of what it moves the client's own step
            others = ((way.last * 0.7 / (fraction * p[c] / w)) ** 2) - w**2 * v
            least = least_noise_of_others(part, noise, c, times, colluders)
            assert others <= least + 1e-12
            if noise == "realised" or part.scheme != "with-replacement":
                assert others == pytest.approx(least, abs=1e-12)
            elif colluders == 0 and times < part.num_participants:
                rest, s, apart = part.num_participants - times, part.num_participants, np.delete(p, c)
                assert others == pytest.approx(max(rest**2 / apart.sum(), rest / apart.max()) / s**2)
        if part.scheme == "with-replacement":  # a client that is drawn more often leaves others less room
            ways = [found.presence(c, times)[1:] for times in range(1, part.num_participants + 1)]
            assert [way[1:] for way in found.presences[c]] == ways


def test_one_client_alone_is_covered_by_nobody():
    found = step_noise(run(sizes=[10], participation=with_replacement(2)), view="summed")
    assert found.presence(0, 1).last == pytest.approx(math.sqrt(2) * found.presence(0, 2).last)
    assert found.presence(0, 2).last == found.presence(0, 2).own


@pytest.mark.parametrize("size", [1, 17, 80, 99])
def test_chances_of_taking_part_are_at_most_one(size):
    for draws in (3, 40, 300):
        found = step_noise(run(sizes=[size, 100 - size], participation=with_replacement(draws)))
        expected = 1 - (1 - np.array([size, 100 - size]) / 100) ** draws
        np.testing.assert_allclose(found.inclusion, expected, rtol=1e-12)
        assert np.all(found.inclusion <= 1)


def test_who_colludes_and_what_is_seen_have_ranges():
    for number in (0, 2):
        assert step_noise(run(), view="summed", num_colluders=number).num_colluders == number
    with pytest.raises(ConfigError, match="less than the number of clients, 3; got 3"):
        step_noise(run(), view="summed", num_colluders=3)
    with pytest.raises(ConfigError, match="num-colluders"):
        step_noise(run(), view="summed", num_colluders=-1)
    with pytest.raises(ConfigError, match="view must be"):
        step_noise(run(), view="client")
    for nothing_left in ({"correlation": 1.0}, {"temperature": 0.0}):
        with pytest.raises(PrivacyError, match="ε is infinite"):
            step_noise(run(**nothing_left))


@pytest.mark.parametrize(("draws", "p"), [(1, 0.2), (2, 0.5), (6, 0.1), (8, 0.3), (30, 0.001)])
def test_few_draws_are_classes_of_their_own(draws, p):
    classes = dict(_multiplicities(draws, p))
    for k in range(1, min(draws, 8) + 1):
        if binom.pmf(k, draws, p) > 1e-15:
            assert classes[k] == pytest.approx(binom.pmf(k, draws, p), rel=1e-9)
    assert sum(classes.values()) == pytest.approx(-math.expm1(draws * math.log1p(-p)), rel=1e-14)
    assert _multiplicities(5, 1.0) == [(5, 1.0)]


# -- composition ----------------------------------------------------------------------------------------

POINTS = 64
ORDERS = np.array([-3.0, -0.5, 0.7, 2.0])


def loss(law, infinity=0.0, factors=1.0):
    """The loss of a mechanism with so many losses on the grid, at their probabilities."""
    pmf = np.zeros(POINTS)
    for place, chance in law.items():
        pmf[place % POINTS] += chance
    moments = np.log(sum(c * np.exp(ORDERS * place * 0.1) for place, c in law.items()))
    return Loss(np.fft.rfft(pmf), moments, infinity, factors)


def law_of(first, second):
    """The law of the sum."""
    out = {}
    for (a, p), (b, q) in itertools.product(first.items(), second.items()):
        out[a + b] = out.get(a + b, 0.0) + p * q
    return out


def assert_same(found, law, infinity, factors):
    expected = loss(law, infinity, factors)
    np.testing.assert_allclose(found.transform, expected.transform, atol=1e-14)
    np.testing.assert_allclose(found.log_moment, expected.log_moment, atol=1e-14)
    assert found.infinity == pytest.approx(infinity)
    assert found.factors == factors


ONE, TWO, THREE = {-1: 0.4, 2: 0.6}, {0: 0.5, 3: 0.5}, {-2: 0.1, 0: 0.2, 5: 0.7}


def test_mechanisms_together_add_their_losses():
    a, b, c = loss(ONE, 0.01, 1.0), loss(TWO, 0.02, 5.0), loss(THREE, 0.04, 7.0)
    before = a.transform.copy()
    assert together([a]) is a
    assert_same(together([a, b]), law_of(ONE, TWO), 0.03, 6.0)
    assert_same(together([a, b, c]), law_of(law_of(ONE, TWO), THREE), 0.07, 13.0)
    np.testing.assert_array_equal(a.transform, before)  # nothing is changed in place


def test_a_repeated_mechanism_adds_its_own_loss():
    a = loss(ONE, 0.01, 2.0)
    assert repeated(a, 1) is a
    assert_same(repeated(a, 3), law_of(law_of(ONE, ONE), ONE), 0.03, 6.0)
    beyond = a._replace(log_moment=np.full(ORDERS.size, math.inf))
    for none in (repeated(a, 0), repeated(beyond, 0), nothing(a), nothing(beyond)):
        assert_same(none, {0: 1.0}, 0.0, 0.0)


def test_a_mechanism_by_chance_is_a_mixture():
    a, b = loss(ONE, 0.01, 2.0), loss(TWO, 0.05, 5.0)
    before = a.transform.copy()
    assert mixed([a], [1.0]) is a
    assert mixed([b, a], [0.0, 1.0]) is a
    half = {k: 0.5 * v for k, v in ONE.items()} | {0: 0.5}
    assert_same(mixed([a], [0.5]), half, 0.005, 3.0)
    assert_same(mixed([a, b], [0.5, 0.0]), half, 0.005, 3.0)
    both = {-1: 0.08, 2: 0.12, 0: 0.25, 3: 0.25}
    assert_same(mixed([a, b], [0.2, 0.5]), both | {0: 0.25 + 0.3}, 0.027, 6.0)
    whole = {-1: 0.16, 2: 0.24, 0: 0.3, 3: 0.3}
    with np.errstate(all="raise"):
        assert_same(mixed([a, b], [0.4, 0.6]), whole, 0.034, 6.0)
    assert_same(chord(a, b, 0.4), whole, 0.034, 6.0)
    assert_same(chord(b, a, 0.6), whole, 0.034, 6.0)
    assert_same(mixed([b, a], [0.6, 0.4]), whole, 0.034, 6.0)
    # chances that rounding made more than one leave nothing idle
    more = mixed([a, b], [0.4, 0.6 + 1e-3])
    assert more.transform[0].real == pytest.approx(1.001)
    assert mixed([a, b], [1.0, 1e-3]).transform[0].real == pytest.approx(1.001)
    beyond = b._replace(log_moment=np.full(ORDERS.size, math.inf))
    for infinite in (chord(a, beyond, 0.4), chord(beyond, a, 0.4), mixed([a, beyond], [0.4, 0.3])):
        assert np.all(infinite.log_moment == math.inf)
    np.testing.assert_array_equal(a.transform, before)


# -- rounds of one client -------------------------------------------------------------------------------


def closed(z, orders):
    """log E[e^{sL}] of a Gaussian mechanism on all rows."""
    return 0.5 * orders * (orders - 1) / z**2


def by_hand(settings, client, times, rounds, orders):
    """The log moments of some rounds, from the steps that were made; ``times`` (chains, rounds) or None."""
    found = step_noise(settings, view="summed")
    eta = np.broadcast_to(np.sqrt(2 / np.asarray(settings.step_size)), settings.num_steps)
    etas = eta.reshape(settings.num_rounds, settings.local_steps)
    total = np.zeros(orders.size)
    for chain, r in itertools.product(range(settings.num_chains), rounds):

        def made(way, r=r):
            *earlier, last = etas[r]
            return sum(closed(way.own * each, orders) for each in earlier) + closed(way.last * last, orders)

        if times is not None:
            if times[chain, r]:
                total += made(found.presence(client, times[chain, r]))
            continue
        ways = found.presences[client]
        logs = [np.log(way.probability) + made(way) for way in ways]
        idle = 1 - sum(way.probability for way in ways)
        if idle > 1e-12:
            logs.append(np.full(orders.size, math.log(idle)))
        total += np.logaddexp.reduce(logs, axis=0)
    return total


@pytest.mark.parametrize("scheduled", [False, True], ids=["constant", "schedule"])
@pytest.mark.parametrize("hidden", [True, False], ids=["hidden", "realised"])
@pytest.mark.parametrize("part", [full(), with_replacement(3)], ids=lambda p: p.scheme)
def test_rounds_of_a_client_are_the_sum_of_its_steps(part, hidden, scheduled):
    """By Rényi divergences on all rows, which have a closed form."""
    number, chains = 20, 2
    eta = 1e-3 / (1 + 0.1 * np.arange(3 * number)) if scheduled else 1e-3
    settings = run(local_steps=3, num_rounds=number, num_chains=chains, step_size=eta, participation=part)
    noise = step_noise(settings, view="summed")
    times = None
    if not hidden:
        most = 1 if part.scheme == "full" else 3
        times = np.random.default_rng(3).integers(0, most + 1, (chains, number))
    client = 1
    ledger = ClientLedger(noise, client, times, delta=1e-5, method="rdp", sampling="without-replacement")
    assert not ledger.idle
    assert ledger.constant is not scheduled
    orders = ledger.steps.orders
    for start, stop in ((0, number), (0, 1), (4, 9), (7, 7)):
        expected = by_hand(settings, client, times, range(start, stop), orders)
        found = ledger.advance(None, start, stop)
        np.testing.assert_allclose(found.log_moment, expected, rtol=1e-9, atol=1e-12)
        further = ledger.advance(found, stop, number)
        expected = expected + by_hand(settings, client, times, range(stop, number), orders)
        np.testing.assert_allclose(further.log_moment, expected, rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("scheduled", [False, True], ids=["constant", "schedule"])
def test_the_multipliers_of_a_run_are_counted(scheduled):
    eta = 1e-3 * np.array([1.0, 2, 1, 4, 1, 2]) if scheduled else 1e-3
    settings = run(step_size=eta, num_chains=2, participation=with_replacement(2), noise="realised")
    noise = step_noise(settings, view="summed")
    steps = np.broadcast_to(np.sqrt(2 / np.asarray(eta)), 6).reshape(3, 2)
    times = np.array([[0, 1, 2], [1, 1, 0]])

    def counted(table):
        out = {}
        for (_, r), (way, chance) in table:
            for z in (way.own * steps[r, 0], way.last * steps[r, 1]):
                out[round(float(z), 9)] = out.get(round(float(z), 9), 0.0) + chance
        return out

    places = list(itertools.product(range(2), range(3)))
    given = counted([((c, r), (noise.presence(0, times[c, r]), 1.0)) for c, r in places if times[c, r]])
    chance = counted([(place, (way, way.probability)) for place in places for way in noise.presences[0]])
    for drawn, expected in ((times, given), (None, chance)):
        how = {"delta": 1e-5, "method": "rdp", "sampling": "without-replacement"}
        z, counts = ClientLedger(noise, 0, drawn, **how)._multipliers()
        found = {key: sum(counts[np.isclose(z, key, rtol=1e-8)]) for key in expected}
        assert found == pytest.approx(expected)
        assert counts.sum() == pytest.approx(sum(expected.values()))
    for method in ("rdp", "pld"):
        assert ClientLedger(noise, 0, np.zeros((2, 3), int), **how | {"method": method}).idle


@pytest.mark.parametrize("other", [{"momentum": 0.5}, {"preconditioner": "rms"}])
def test_what_no_accountant_covers_is_refused(other):
    with pytest.raises(ConfigError, match="no privacy accounting for momentum and preconditioners"):
        run(**other)
