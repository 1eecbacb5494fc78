"""Schedules, chains, partial participation, crashes and unequal sizes together, against slow sums.

Where clients use all their rows, every step is a Gaussian mechanism: given who takes part, the whole run is
one, and δ(ε) is a finite mixture of closed forms. The mixture is written out here round by round.
"""

from __future__ import annotations

import math
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from scipy.optimize import brentq
from scipy.stats import binom, norm

from fald.core.errors import ConfigError, PrivacyError
from fald.federation.site.account import Account
from fald.federation.site.ledger import SiteLedger
from fald.langevin.fald import fald
from fald.langevin.guard import Guard
from fald.privacy import Ledger, RunSettings, account, calibrate
from fald.privacy.calibration import Budget
from fald.privacy.protection import Protection
from fald.settings.participation import full, with_replacement, without_replacement
from fald.settings.schedules import paper_decay

DELTA = 1e-5
few = settings(deadline=None, derandomize=True, suppress_health_check=list(HealthCheck), database=None)


# -- the slow way ---------------------------------------------------------------------------------------


def multiplier(run, client, eta, times):
    """z = (noise of a step) / (how far one replaced row moves it), from the step itself."""
    n, own = sum(run.sizes), run.sizes[client]
    share = own / n
    entering = {"full": share, "without-replacement": 1 / max(1, run.num_participants)}.get(
        run.participation.scheme, times / max(1, run.num_participants)
    )
    v = 1 / share if run.noise == "paper" else 1 / entering
    noise = math.sqrt(2 * eta * run.temperature * (1 - run.correlation**2) * v)
    bound = run.sensitivity if run.clip_norm is None else 2 * run.clip_norm
    rows = own if run.batch_size is None else min(own, run.batch_size)
    moved = eta * (n / rows) * bound  # the gradient of a batch counts for all rows
    return noise / moved


def ways(run, client):
    """Times drawn in a round, with their probabilities."""
    scheme, s = run.participation.scheme, run.num_participants
    if scheme == "full":
        return [(1, 1.0)]
    if scheme == "without-replacement":
        return [(1, s / len(run.sizes)), (0, 1 - s / len(run.sizes))]
    share = run.sizes[client] / sum(run.sizes)
    return [(k, float(binom.pmf(k, s, share))) for k in range(s + 1)]


def steps_of(run):
    eta = np.broadcast_to(np.asarray(run.step_size, float), run.num_rounds * run.local_steps)
    return eta.reshape(run.num_rounds, run.local_steps)


def slow_epsilon(run, client, delta=DELTA, noisier=1.0):
    """ε of one client by enumerating who takes part; all rows in every step."""
    law = {0.0: 1.0}  # Σ 1/z² of the run so far, with its probability
    for _ in range(run.num_chains):
        for etas in steps_of(run):
            after = {}
            for spent, chance in law.items():
                for times, p in ways(run, client):
                    more = (
                        sum((noisier * multiplier(run, client, e, times)) ** -2 for e in etas) if times else 0
                    )
                    key = float(f"{spent + more:.13g}")
                    after[key] = after.get(key, 0.0) + chance * p
            law = after

    def excess(epsilon):
        total = 0.0
        for squared, chance in law.items():
            if squared > 0:
                mu = math.sqrt(squared)
                total += chance * (
                    norm.cdf(mu / 2 - epsilon / mu) - math.exp(epsilon + norm.logcdf(-mu / 2 - epsilon / mu))
                )
        return total - delta

    return 0.0 if excess(0.0) <= 0 else brentq(excess, 0.0, 500.0, xtol=1e-12, rtol=1e-12)


@st.composite
def runs(draw, *, batches=False, rounds=4):
    number, scheme = draw(st.integers(2, 4)), draw(st.sampled_from(["full", "I", "II"]))
    sizes = [draw(st.integers(20, 200)) for _ in range(number)]
    s = draw(st.integers(1, number if scheme == "II" else 3))
    part = {"full": full(), "I": with_replacement(s), "II": without_replacement(s, allow_unequal=True)}[
        scheme
    ]
    num_rounds, local_steps = draw(st.integers(1, rounds)), draw(st.integers(1, 3))
    scale = 10.0 ** draw(st.floats(-1.3, 0.3))
    run = RunSettings(
        sizes=sizes,
        local_steps=local_steps,
        num_rounds=num_rounds,
        num_chains=draw(st.integers(1, 3)),
        step_size=1.0,
        temperature=draw(st.sampled_from([0.5, 1.0, 3.0])),
        correlation=draw(st.sampled_from([0.0, 0.6, 0.95])),
        batch_size=draw(st.integers(5, 60)) if batches else None,
        participation=part,
        noise=draw(st.sampled_from(["paper", "realised"])),
        **draw(st.sampled_from([{"sensitivity": 0.7}, {"clip_norm": 0.4}])),
    )
    # steps for which a round has a multiplier of a few: ε between a tenth and ten
    unit = (multiplier(run, 0, 1.0, 1) * scale) ** 2
    shape = 1 / (1 + 0.3 * np.arange(num_rounds * local_steps)) if draw(st.booleans()) else None
    return replace(run, step_size=float(unit) if shape is None else unit * shape)


@settings(few, max_examples=25)
@given(run=runs(), client=st.integers(0, 3))
def test_epsilon_is_that_of_the_slow_sum_and_never_below_it(run, client):
    client %= len(run.sizes)
    found, slow = account(run, delta=DELTA).epsilon[client], slow_epsilon(run, client)
    if not math.isfinite(found) or slow > 60:
        return  # beyond any grid
    assert found >= slow * (1 - 1e-9)
    assert found <= slow * 1.01 + 1e-3
    # the twin: a tenth more noise is seen, wherever there is anything to see
    if slow > 0.3:
        assert found > 1.02 * slow_epsilon(run, client, noisier=1.1)


def removed(run, client, interval, *, up):
    """ε of data sets that differ by a row that is there or not, by plain convolution of rounded losses."""

    def step(eta, times):
        z = multiplier(run, client, eta, times)
        q = min(1.0, (run.batch_size or math.inf) / run.sizes[client])
        x = np.linspace(-9 * z, 1 + 9 * z, 4001)
        edges = norm.cdf(x / z), norm.cdf((x - 1) / z)
        p = np.diff((1 - q) * edges[0] + q * edges[1])
        loss = np.log1p(q * np.expm1((2 * x - 1) / (2 * z**2)))
        places = np.floor((loss[1:] if up else loss[:-1]) / interval).astype(int) + up
        lost = 1 - p.sum()
        low = places.min()
        return np.bincount(places - low, p), low, lost

    law, low, lost = np.ones(1), 0, 0.0
    for _ in range(run.num_chains):
        for etas in steps_of(run):
            mixed, start = None, 0
            for times, chance in ways(run, client):
                one, base = np.ones(1), 0
                for eta in etas if times else []:
                    pmf, at, away = step(eta, times)
                    one, base = np.convolve(one, pmf), base + at
                    lost += away
                if mixed is None:
                    mixed, start = chance * one, base
                    continue
                first = min(start, base)
                wide = np.zeros(max(start + len(mixed), base + len(one)) - first)
                wide[start - first :][: len(mixed)] += mixed
                wide[base - first :][: len(one)] += chance * one
                mixed, start = wide, first
            law, low = np.convolve(law, mixed), low + start
    losses = (np.arange(len(law)) + low) * interval

    def excess(epsilon):
        over = losses > epsilon
        return float(np.sum(law[over] * -np.expm1(epsilon - losses[over]))) + (lost if up else 0.0) - DELTA

    return 0.0 if excess(0.0) <= 0 else brentq(excess, 0.0, 500.0, xtol=1e-9)


@settings(few, max_examples=8)
@given(run=runs(batches=True, rounds=3), client=st.integers(0, 3))
def test_epsilon_with_batches_is_between_slow_bounds(run, client):
    client %= len(run.sizes)
    if (
        run.num_chains * run.num_rounds * run.local_steps > 12
        or multiplier(run, client, steps_of(run).max(), 3) < 0.35
    ):
        return
    found = account(run, delta=DELTA).epsilon[client]
    low = removed(run, client, 0.01, up=False)
    assert found >= low
    # removing a row is nearly the worst that can be done; a tenth less noise shows more than that is off
    assert found <= 1.1 * removed(run, client, 0.01, up=True) + 0.02


@pytest.mark.slow
def test_a_hundred_and_twenty_distinct_steps_by_both_accountants():
    eta = 0.02 / (1 + 0.05 * np.arange(120))
    base = RunSettings(
        sizes=[80, 120, 200], local_steps=3, num_rounds=40, step_size=eta, clip_norm=0.02, num_chains=2,
        participation=with_replacement(2), noise="paper", correlation=0.3,
    )  # fmt: skip
    for run in (base, replace(base, batch_size=20), replace(base, batch_size=20, participation=full())):
        tight, loose = (Ledger(run, delta=DELTA, method=m) for m in ("pld", "rdp"))
        assert len(np.unique(tight.noise.step)) == 120
        for rounds in (7, 40):
            assert np.all(loose.epsilon(rounds) >= tight.epsilon(rounds))
        assert np.all(loose.epsilon(40) <= 3 * tight.epsilon(40))
    one = replace(base, num_chains=1, participation=full())
    for client in range(3):
        exact = slow_epsilon(one, client)
        assert exact * (1 - 1e-9) <= account(one, delta=DELTA).epsilon[client] <= 1.01 * exact


# -- how many rounds a budget allows --------------------------------------------------------------------


@settings(few, max_examples=10)
@given(run=runs(rounds=6), method=st.sampled_from(["pld", "rdp"]), share=st.floats(0.0, 1.0))
def test_the_largest_number_of_rounds_is_found_exactly(run, method, share):
    ledger = Ledger(run, delta=DELTA, method=method)
    after = [ledger.worst(r) for r in range(run.num_rounds + 1)]
    assert after[0] == 0.0
    assert after == sorted(after)
    budgets = [*after, *(e * (1 - 1e-9) for e in after[1:]), after[1] / 2, share * after[-1]]
    for budget in budgets:
        if math.isfinite(budget):
            assert ledger.max_rounds(budget) == max(r for r, e in enumerate(after) if e <= budget)


@pytest.mark.parametrize("scheduled", [False, True])
def test_calibration_of_rounds_at_none_one_and_all(scheduled):
    eta = 1e-3 / (1 + np.arange(12.0)) if scheduled else 1e-3
    run = RunSettings(
        sizes=[100, 300], local_steps=2, num_rounds=6, step_size=eta, clip_norm=0.2, num_chains=2
    )
    lengths = [account(run.first_rounds(r), delta=DELTA).worst for r in range(1, 7)]
    for rounds in (1, 2, 5):
        budget = Budget((lengths[rounds - 1] + lengths[rounds]) / 2, DELTA)
        found = calibrate(budget, run, vary="num_rounds")
        assert (found.value, found.at_limit) == (rounds, False)
        assert found.report.worst == pytest.approx(lengths[rounds - 1], rel=1e-6)
    with pytest.raises(PrivacyError, match="one round already spends"):
        calibrate(Budget(0.99 * lengths[0], DELTA), run, vary="num_rounds")
    exact = calibrate(Budget(lengths[0], DELTA), run, vary="num_rounds")
    assert exact.value == 1
    if scheduled:
        assert calibrate(Budget(2 * lengths[-1], DELTA), run, vary="num_rounds").value == 6
    limited = calibrate(Budget(2 * lengths[-1], DELTA), run, vary="num_rounds", most=3)
    assert (limited.value, limited.at_limit) == (3, True)


# -- crashes --------------------------------------------------------------------------------------------


def problem(step_size, chains=2, sizes=(100, 300), part=None):
    return SimpleNamespace(
        method=fald(local_steps=2, step_size=step_size, clip_norm=0.2),
        participation=part or full(),
        data=SimpleNamespace(sizes=np.array(sizes), names=("a", "b")),
        num_chains=chains,
        num_warmup=0,
        num_kept=lambda rounds: rounds,
        model=SimpleNamespace(sensitivity_fn=None, origin=""),
    )


@pytest.mark.parametrize("step_size", [1e-3, paper_decay(500.0, 500.0)], ids=["constant", "decaying"])
@pytest.mark.parametrize("lost", [0, 1, 3])
@pytest.mark.parametrize("part", [full(), with_replacement(2)], ids=["full", "I"])
def test_rounds_lost_in_a_crash_are_paid_for_at_the_largest_step(step_size, lost, part):
    given = problem(step_size, part=part)
    eta = [float(step_size(k)) if callable(step_size) else step_size for k in range(20)]

    def spent(rounds):
        """ε of the lost rounds, at the largest step, and of the first rounds of the run."""
        steps = [max(eta)] * (2 * lost) + eta[: 2 * rounds]
        run = RunSettings(
            sizes=[100, 300], local_steps=2, num_rounds=lost + rounds, step_size=np.array(steps),
            clip_norm=0.2, num_chains=2, participation=part,
        )  # fmt: skip
        return account(run, delta=DELTA).worst

    budget = (spent(4) + spent(5)) / 2
    guard = Guard(Protection(DELTA, max_epsilon=budget), given, 10, lost)
    assert guard.num_rounds == 4
    assert guard.epsilon(4) == pytest.approx(spent(4), rel=1e-3)
    assert guard.epsilon(0) == guard.epsilon(1) == pytest.approx(spent(1), rel=1e-3)
    guard.rounds_begun = 4
    assert guard.statement().data["epsilon"] <= budget
    assert guard.statement().data["epsilon"] == pytest.approx(spent(4), rel=1e-3)
    with pytest.raises(PrivacyError, match="does not allow one more round"):
        Guard(Protection(DELTA, max_epsilon=0.99 * spent(1)), given, 10, lost)
    assert Guard(Protection(DELTA, max_epsilon=1.01 * spent(1)), given, 10, lost).num_rounds == 1
    assert Guard(Protection(DELTA, max_epsilon=1.01 * spent(10)), given, 10, lost).num_rounds == 10
    assert Guard(Protection(DELTA), given, 10, lost).num_rounds == 10


@settings(few, max_examples=60)
@given(
    events=st.lists(st.sampled_from(["round", "round", "one chain", "crash", "lost"]), max_size=40),
    limit=st.none() | st.floats(0.05, 1.2),
    budget=st.floats(0.1, 2.0),
    planned=st.integers(1, 30),
)
def test_a_site_never_overruns_its_budget_whatever_crashes(tmp_path_factory, events, limit, budget, planned):
    """Two studies by turns; a crash comes before, between or after the charge, the count and the answer."""
    folder = tmp_path_factory.mktemp("site")

    def cost(releases):
        return 0.1 * math.sqrt(releases)

    def opened(study):
        ledger = SiteLedger(folder / "ledger.jsonl", budget, 1e-5)
        made = Account(
            ledger, study, folder / f"{study}.json", cost, delta=1e-6, planned=planned, max_epsilon=limit
        )
        try:
            made.begin()
        except PrivacyError:
            return None
        return made

    accounts, made = {name: opened(name) for name in ("first", "second")}, {"first": 0, "second": 0}
    for i, event in enumerate(events):
        name = ("first", "second")[i % 2]
        current = accounts[name]
        if event == "crash":
            accounts[name] = opened(name)
        elif event == "lost":  # the count of a run is gone: all that was paid for counts as used
            (folder / f"{name}.json").unlink(missing_ok=True)
            accounts[name] = opened(name)
        elif current is not None:
            releases = 2 if event == "round" else 1
            try:
                current.pay(releases)
            except PrivacyError:
                continue
            made[name] += releases
    spent = {name: cost(count) if count else 0.0 for name, count in made.items()}
    assert sum(spent.values()) <= budget * (1 + 1e-9)
    assert limit is None or max(spent.values()) <= limit * (1 + 1e-9)
    charged = SiteLedger(folder / "ledger.jsonl").charges()
    for name, count in made.items():
        if count:
            assert charged[name].rounds >= count
            assert charged[name].epsilon >= spent[name] - 1e-12


@pytest.mark.parametrize("limit", [0.1, 0.2, 0.2999, 0.3, 0.31, 5.0])
def test_the_most_releases_that_a_study_may_make_are_found_exactly(tmp_path, limit):
    def cost(releases):
        return 0.1 * releases

    one = Account(
        SiteLedger(tmp_path / "l.jsonl"), "run", tmp_path / "r.json", cost, delta=1e-6,
        planned=7, max_epsilon=limit,
    )  # fmt: skip
    expected = max(n for n in range(8) if cost(n) <= limit)
    assert one._affordable(7) == expected
    one.begin()
    assert SiteLedger(tmp_path / "l.jsonl").charged("run").rounds == expected


def test_nothing_is_affordable_below_the_first_release(tmp_path):
    one = Account(
        SiteLedger(tmp_path / "l.jsonl"), "run", tmp_path / "r.json", lambda n: 0.1 * n, delta=1e-6,
        planned=7, max_epsilon=0.05,
    )  # fmt: skip
    one.begin()
    with pytest.raises(PrivacyError, match="is spent at this site"):
        one.pay(1)
    assert one.used == 0


# -- who took part --------------------------------------------------------------------------------------


@settings(few, max_examples=10)
@given(run=runs(), seed=st.integers(0, 100))
def test_realised_participation_is_the_sum_of_what_happened(run, seed):
    rng, scheme = np.random.default_rng(seed), run.participation.scheme
    shape = (run.num_chains, run.num_rounds, len(run.sizes))
    if scheme == "full":
        times = np.ones(shape, int)
    elif scheme == "without-replacement":
        order = np.argsort(rng.random(shape), axis=2)
        times = (order < run.num_participants).astype(int)
    else:
        times = rng.multinomial(run.num_participants, run.weights, shape[:2])
    report = account(run, delta=DELTA, participation="realised", times_drawn=times)
    for client in range(len(run.sizes)):
        squared = sum(
            multiplier(run, client, eta, int(times[c, r, client])) ** -2
            for c in range(shape[0]) for r in range(shape[1]) for eta in steps_of(run)[r]
            if times[c, r, client]
        )  # fmt: skip
        found = report.epsilon[client]
        assert report.rounds_taken_part[client] == np.sum(times[:, :, client] > 0)
        if squared == 0:
            assert found == 0.0
            continue
        mu = math.sqrt(squared)
        if mu > 8:
            continue

        def excess(e, mu=mu):
            return norm.cdf(mu / 2 - e / mu) - math.exp(e + norm.logcdf(-mu / 2 - e / mu)) - DELTA

        slow = brentq(excess, 0.0, 500.0, xtol=1e-12) if excess(0.0) > 0 else 0.0
        assert slow * (1 - 1e-9) <= found <= 1.01 * slow + 1e-3
    if run.num_participants < run.num_clients or scheme == "with-replacement":
        with pytest.raises(ConfigError):
            account(run, delta=DELTA, participation="realised", times_drawn=times + run.num_participants + 1)
