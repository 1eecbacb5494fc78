"""Split-HMC in its parts: when the surrogate is believed, what moves chains, and who has the last word."""

from types import SimpleNamespace

import jax.numpy as jnp
import numpy as np
import pytest

from fald.fewround import learned
from fald.fewround.certify import Condition
from fald.fewround.chains import Frame, chains_outcome
from fald.fewround.learned import LearnedDraws, Learner
from fald.fewround.surrogate import blank

PLAIN = Frame(np.zeros(2), np.eye(2))


def end(server):
    """What a server gives at its end, whatever it asks."""
    try:
        next(server)
        while True:
            server.send({"point_values": None})
    except StopIteration as done:
        return done.value


def giving(value):
    """A server that gives a value and asks nothing."""
    return value
    yield


def outcome(*failed, seed=0):
    draws = np.random.default_rng(seed).standard_normal((40, 2))
    conditions = [Condition(name, False, f"{name} does not hold") for name in failed]
    return chains_outcome(draws, conditions, 0.1, [])


# -- the last word -----------------------------------------------------------------------------------------


@pytest.fixture
def ended(monkeypatch):
    """How split-HMC of so many parameters ends, given how its chains and importance sampling do."""

    def run(dim, chains, last=None):
        asked, fitted = [], object()

        def run_chains(model, frame, **settings):
            asked.append((settings["max_rounds"], settings["strict"]))
            return giving(chains)

        def fit_mixture(positions, weights, seed, *, most):
            assert positions is chains.positions
            asked.append("fit")
            return fitted

        def certified(search, start, first, final):
            assert start is fitted
            asked.append((first, final))
            return giving((last, None))

        monkeypatch.setattr(learned, "run_chains", run_chains)
        monkeypatch.setattr(learned, "fit_mixture", fit_mixture)
        monkeypatch.setattr(learned, "certified_rounds", certified)
        search = SimpleNamespace(make=lambda model, **common: SimpleNamespace(seed=5))
        monkeypatch.setattr(learned, "Search", search)
        model = SimpleNamespace(dim=dim)
        found = end(
            learned.split_hmc(model, np.zeros(dim), np.eye(dim), max_rounds=30, seed=5, tolerance=0.1)
        )
        return found, asked

    return run


FRESH = [(25, False), "fit", (1000, 1004)]


def test_fresh_draws_have_the_last_word_up_to_sixty_parameters(ended):
    chains, last = outcome(), outcome(seed=1)
    found, asked = ended(60, chains, last)
    assert asked == FRESH
    assert found.reached
    assert found.method == "split-hmc"
    assert found.positions is last.positions


def test_chains_that_fresh_draws_do_not_confirm_are_not_reached(ended):
    chains, last = outcome(), outcome("k-hat", "far mass", seed=1)
    found, asked = ended(2, chains, last)
    assert asked == FRESH
    assert not found.reached
    assert found.failed == ("k-hat", "far mass")
    assert "does not confirm the chains of split-HMC: k-hat does not hold; far" in found.reason
    assert found.positions is chains.positions
    assert "integrate them out" in found.advice


@pytest.mark.parametrize("dim", [60, 61])
@pytest.mark.parametrize("chains", [None, outcome("bias")])
def test_chains_that_did_not_end_well_are_asked_no_more(ended, dim, chains):
    found, asked = ended(dim, chains, outcome())
    assert found is chains
    assert asked == [(30, True) if dim > 60 else (25, False)]


def test_with_more_parameters_the_chains_themselves_must_show_more(ended):
    chains = outcome()
    assert ended(61, chains, outcome("k-hat")) == (chains, [(30, True)])


# -- the chains --------------------------------------------------------------------------------------------


class Walker:
    """In place of a learned surrogate, a standard normal: ``step`` makes new states of those at first."""

    def __init__(self, step, logdensity, forgets=False):
        self.frame, self.rounds, self.trace = PLAIN, 0, []
        self._step, self._logdensity, self._forgets = step, logdensity, forgets
        self._first = None

    def walk(self, z):
        self._first = z if self._first is None else self._first
        return self._step(self._first)

    def decide(self, z):
        yield {}
        self.rounds += 1
        value = self._logdensity(z)
        return value, value + (0.0 if self._forgets else np.sum(z**2, axis=1) / 2)


def chained(monkeypatch, walker, *, most=30, strict=False, shown=(), seed=1):
    """The outcome of chains that begin as draws of the surrogate, and how often they were shown."""
    times = []

    def drawn(learner, count, rounds):
        z = np.random.default_rng(seed).standard_normal((count, 2))
        value, off = end_of(walker.decide(z))
        walker.rounds = 0
        weights = np.exp(off - off.max())
        return giving(LearnedDraws(z, value, off, weights / weights.sum(), 0.1))

    def end_of(server):
        next(server)
        with pytest.raises(StopIteration) as done:
            server.send({})
        return done.value.value

    def show(*given, **more):
        times.append(walker.rounds)
        return giving(list(shown))

    model = SimpleNamespace(dim=2, parameter_names=("a", "b"))
    monkeypatch.setattr(learned, "Target", lambda model: SimpleNamespace(dim=2, model=model))
    monkeypatch.setattr(learned, "Learner", lambda *given: walker)
    monkeypatch.setattr(learned, "_drawn", drawn)
    monkeypatch.setattr(learned, "_shown", show)
    chains = learned.run_chains(model, PLAIN, seed=3, tolerance=0.1, max_rounds=most, strict=strict)
    return end(chains), times


def fresh(seed=2):
    rng = np.random.default_rng(seed)
    return lambda first: rng.standard_normal(first.shape)


def standard(z):
    return -np.sum(z**2, axis=1) / 2


@pytest.mark.parametrize("forgets", [False, True])
def test_chains_have_the_law_of_the_posterior_whatever_the_surrogate(monkeypatch, forgets):
    """The twin forgets what the surrogate says of a move."""

    def logdensity(z):
        return -np.sum((z - 0.5) ** 2, axis=1) / 2 / 0.8**2

    found, _ = chained(monkeypatch, Walker(fresh(), logdensity, forgets), most=12)
    size = np.sqrt(2 / len(found.positions))  # a chain that stays is worth less
    off = np.abs(found.positions.mean(0) - 0.5) / 0.8, np.abs(found.positions.std(0) / 0.8 - 1)
    right = off[0].max() < 4.5 * size and off[1].max() < 4.5 * size
    assert right != forgets


@pytest.mark.parametrize(("strict", "decisions"), [(False, 6), (True, 8)])
def test_the_end_is_looked_at_after_some_decisions(monkeypatch, strict, decisions):
    walker = Walker(fresh(), standard)
    found, shown = chained(monkeypatch, walker, strict=strict)
    assert found.reached
    assert walker.rounds == decisions + strict  # one for chains that begin further apart
    assert shown == ([walker.rounds] if strict else [])


def test_too_few_rounds_are_no_end(monkeypatch):
    found, shown = chained(monkeypatch, Walker(fresh(), standard), most=6, strict=True)
    assert (found.reached, found.failed, shown) == (False, ("rounds",), [])


def test_what_chains_do_not_show_keeps_them_from_their_end(monkeypatch):
    wanting = [Condition("scores", False, "off"), Condition("moments", True, "")]
    found, shown = chained(monkeypatch, Walker(fresh(), standard), strict=True, shown=wanting)
    assert (found.reached, found.failed, len(shown)) == (False, ("scores",), 1)


@pytest.mark.parametrize("memory", [0.0, 0.25])
def test_chains_that_began_apart_must_be_alike(monkeypatch, memory):
    """Those from the middle go one way, and those from both ends the other: no correlation sees it."""
    step = fresh()

    def apart(first):
        away = np.abs(first[:, :1])
        return step(first) + memory * np.where(away > np.median(away), 1.0, -1.0) * [[1.0, 0.0]]

    found, shown = chained(monkeypatch, Walker(apart, standard, forgets=False), most=16, strict=memory > 0)
    assert found.reached is (memory == 0)
    if memory:
        assert found.failed == ("R-hat",)
        assert shown == []  # who does not pass is asked no more


# -- learning ----------------------------------------------------------------------------------------------


def learner(spread=1.0, usable=1.0):
    """One that has learned the standard normal, of a posterior with another spread, or only in a part."""

    def gradients(positions, sums):
        value = -np.sum(positions**2, axis=1) / 2 / spread**2
        value[np.arange(len(value)) % 100 >= 100 * usable] = np.nan
        return value, -positions / spread**2

    rng = np.random.default_rng(7)
    made = Learner(SimpleNamespace(dim=2, gradients=gradients), PLAIN, rng, [])
    flat = blank(2, rng)
    made.surrogate = flat._replace(heights=jnp.zeros_like(flat.heights))
    made.z = rng.standard_normal((6400, 2))
    return made


@pytest.mark.parametrize(
    ("spread", "shift", "stretch", "good"),
    [
        (1.0, 0.0, 1.0, True), (1.0, 0.14, 1.0, True), (1.0, 0.157, 1.0, False), (1.0, 0.0, 1.12, True),
        (1.0, 0.0, 1.2, False), (0.4, 0.0, 1.0, False), (2.5, 0.0, 1.0, False),
    ],
)  # fmt: skip
def test_a_surrogate_is_good_that_predicts_fresh_states_and_stays(spread, shift, stretch, good):
    made = learner(spread)
    known = end(made.ask())
    assert not made.good  # one round says nothing of the next
    made._seen.append(known)
    made.z = made.z * stretch + shift
    end(made.ask())
    assert (made.good, made.lost, made.rounds, len(made.trace)) == (good, False, 2, 2)


@pytest.mark.parametrize(("usable", "lost"), [(0.12, False), (0.08, True), (0.0, True)])
def test_a_surrogate_that_leads_where_nothing_is_known_is_lost(usable, lost):
    made = learner(usable=usable)
    known = end(made.ask())
    assert made.lost is lost
    assert len(known.positions) == len(known.slopes) == 9600
    assert len(known.followed) == 6400  # always as many, some of them again


def test_a_move_is_judged_by_what_the_surrogate_does_not_say_of_it():
    """With log density -|z|²/2 + 3 z_1 of the surrogate, and the target a standard normal."""
    made = learner()
    made.frame = Frame(np.array([1.0, 0.0]), 2 * np.eye(2))
    made.surrogate = made.surrogate._replace(slope=jnp.asarray([3.0, 0.0]))
    made._target.values = lambda positions, sums: -np.sum(positions**2, axis=1) / 2
    z = np.array([[1.0, 2.0], [0.0, -1.0]])
    asking = made.decide(z)
    np.testing.assert_array_equal(next(asking)["points"], [[3.0, 4.0], [1.0, -2.0]])
    with pytest.raises(StopIteration) as done:
        asking.send({"point_values": None})
    value, off = done.value.value
    np.testing.assert_allclose(value, [-12.5, -2.5])
    np.testing.assert_allclose(off, [-12.5 + 2.5 - 3.0, -2.5 + 0.5], rtol=1e-6)
    assert made.rounds == 1


def test_states_of_three_rounds_are_learned_from_and_followed(monkeypatch):
    made, taught, walked = learner(), [], []

    def learn(surrogate, z, wanted, rng, *, steps, rate):
        taught.append((len(z), wanted, steps, rate))
        return surrogate

    def wander(surrogate, z, seed, **how):
        walked.append((z, seed, how))
        return z

    monkeypatch.setattr(learned, "learn", learn)
    monkeypatch.setattr(learned, "wander", wander)
    for count in range(4):
        known = end(made.ask())._replace(slopes=np.full((9600, 2), float(count)))
        made.study(known)
        z, _, how = walked[-1]
        assert (how["trajectories"], how["steps"]) == (6, 10)
        assert how["bound"] == pytest.approx(1.4 * np.max(np.sum(z**2, axis=1)))
        np.testing.assert_allclose(np.cov(z.T), np.eye(2), atol=1e-6)  # all parameters mix alike
        assert made.z is z
    assert [(size, *how) for size, _, *how in taught] == [(28_800, 4000, 0.02)] + 3 * [(28_800, 3000, 0.01)]
    assert len({seed for _, seed, _ in walked}) == 4
    # the oldest round goes: gradients of rounds 1 to 3, without those of the Gaussian
    slopes = taught[-1][1] - made._home.inward(np.concatenate([one.positions for one in made._seen]))
    assert [set(part.ravel()) for part in np.split(np.round(slopes, 6), 3)] == [{1.0}, {2.0}, {3.0}]


@pytest.mark.parametrize(("tolerance", "extra", "count"), [(0.1, 0, 2560), (0.1, 3, 3328), (0.05, 0, 9984)])
def test_so_many_chains_are_run_as_all_quantities_together_need(monkeypatch, tolerance, extra, count):
    """Half of the tolerance is for their number: (2 q / tolerance)², in steps of 256."""
    asked = []

    def drawn(learner, count, rounds):
        asked.append((count, rounds))
        return giving(None)

    monkeypatch.setattr(learned, "Target", lambda model: SimpleNamespace(dim=2, model=model))
    monkeypatch.setattr(learned, "_drawn", drawn)
    report = (lambda positions: np.ones((len(positions), extra))) if extra else None
    chains = learned.run_chains(None, PLAIN, seed=1, tolerance=tolerance, max_rounds=14, report=report)
    assert end(chains) is None
    assert asked == [(count, 14 - 6 - 1)]


class Pupil:
    """Learns in a number of rounds, and its draws have weights with a tail."""

    def __init__(self, good_from, tail, lost_at=99):
        self.rounds, self.trace, self.frame, self.studied = 0, [], PLAIN, 0
        self.good_from, self.tail, self.lost_at = good_from, tail, lost_at
        self.good = self.lost = False
        self.z = np.random.default_rng(8).standard_normal((6400, 2))

    def ask(self):
        self.rounds += 1
        self.good, self.lost = self.studied >= self.good_from, self.studied >= self.lost_at
        return giving("known")

    def study(self, known):
        assert known == "known"
        self.studied += 1

    def walk(self, z):
        return z

    def decide(self, z):
        self.rounds += 1
        rng = np.random.default_rng(9)
        return giving((np.arange(len(z)), self.tail * rng.standard_exponential(len(z))))


def test_chains_begin_with_as_many_draws_of_light_weights():
    pupil = Pupil(3, 0.2)
    found = end(learned._drawn(pupil, 1024, 10))
    assert len(found.z) == len(found.weights) == 1024
    assert found.khat < 0.5
    assert (pupil.studied, pupil.rounds, len(pupil.trace)) == (3, 5, 1)
    np.testing.assert_array_equal(found.value, np.arange(1024))
    # not while weights are heavy, not of a surrogate that is lost, and not after so many rounds
    heavy = Pupil(3, 0.9)
    assert end(learned._drawn(heavy, 1024, 10)) is None
    assert heavy.studied > 3
    assert end(learned._drawn(Pupil(3, 0.2, lost_at=2), 1024, 10)) is None
    assert end(learned._drawn(Pupil(9, 0.2), 1024, 9)) is None
