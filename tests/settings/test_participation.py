"""Who takes part: the laws of the three schemes, their weights, and refusals."""

from __future__ import annotations

import functools
import itertools
import json
from collections import Counter

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import stats

import fald
from fald.core.errors import ConfigError
from fald.core.keys import Stream, stream_key
from fald.settings import participation
from fald.settings.participation import check_participation, draw, num_slots

SIZES = (1, 2, 3, 4)
NUM_ROUNDS = 20_000


def offsets_of(sizes):
    return jnp.asarray(np.concatenate([[0], np.cumsum(sizes)]), jnp.int32)


@functools.cache
def many(scheme, sizes=SIZES, seed=0):
    """(rounds, slots) clients and weights of many rounds."""

    def one(r):
        return draw(scheme, stream_key(jax.random.key(seed), r, Stream.PARTICIPATION), offsets_of(sizes))

    drawn = jax.jit(jax.vmap(one))(jnp.arange(NUM_ROUNDS))
    return np.asarray(drawn.client), np.asarray(drawn.weight)


def multiplicities(clients, weights, s, num_clients):
    """(rounds, clients) how often each client was drawn."""
    times = np.zeros((len(clients), num_clients), int)
    np.add.at(times, (np.arange(len(clients))[:, None], clients), np.rint(weights * s).astype(int))
    return times


def p_value(outcomes, probabilities):
    """Chi-square p-value of outcomes (a list) against their probabilities (a dict)."""
    counts = Counter(outcomes)
    assert set(counts) <= set(probabilities)
    found = np.array([counts[k] for k in probabilities])
    expected = np.array(list(probabilities.values())) * len(outcomes)
    # rare outcomes together: the chi-square law needs a few of each
    rare = expected < 10
    if rare.any():
        found, expected = (np.append(a[~rare], a[rare].sum()) for a in (found, expected))
    return stats.chisquare(found, expected).pvalue


def multinomial(s, p):
    """Probability of every vector of multiplicities."""
    vectors = [v for v in itertools.product(range(s + 1), repeat=len(p)) if sum(v) == s]
    return {v: float(stats.multinomial.pmf(v, s, p)) for v in vectors}


@pytest.mark.parametrize("s", [1, 3, 6])
def test_scheme_one_draws_clients_by_their_share(s):
    p = np.array(SIZES) / sum(SIZES)
    times = multiplicities(*many(fald.with_replacement(s)), s, len(SIZES))
    outcomes = [tuple(row) for row in times.tolist()]
    assert p_value(outcomes, multinomial(s, p)) > 1e-3
    # twins: clients drawn uniformly, and the smaller ones a tenth too often
    assert p_value(outcomes, multinomial(s, np.full(4, 0.25))) < 1e-9
    assert p_value(outcomes, multinomial(s, p * [1.1, 1.1, 1.1, 0.85])) < 1e-9


def test_scheme_one_probabilities_are_exactly_the_shares(monkeypatch):
    total = sum(SIZES)
    # every row once: what the generator does with equal chances
    monkeypatch.setattr(participation, "integers", lambda key, step, count, span: jnp.arange(count))
    clients, weights = draw(fald.with_replacement(total), jax.random.key(0), offsets_of(SIZES))
    found = {int(c): float(w) for c, w in zip(clients, weights) if w > 0}
    assert found == {c: np.float32(size) / np.float32(total) for c, size in enumerate(SIZES)}


@pytest.mark.parametrize("s", [1, 2, 3])
def test_scheme_two_draws_every_set_equally_often(s):
    scheme = fald.without_replacement(s, allow_unequal=True)
    clients, weights = many(scheme)
    outcomes = [tuple(row) for row in clients.tolist()]
    sets = list(itertools.combinations(range(4), s))
    assert p_value(outcomes, dict.fromkeys(sets, 1 / len(sets))) > 1e-3
    assert np.all(weights == np.float32(1 / s))
    # the twin: the first client ten per cent too often
    wrong = {c: (1.1 if 0 in c else 1.0) for c in sets}
    total = sum(wrong.values())
    assert p_value(outcomes, {c: v / total for c, v in wrong.items()}) < 1e-5


def test_all_of_scheme_two_and_full_participation():
    clients, weights = many(fald.without_replacement(4, allow_unequal=True))
    assert np.all(clients == np.arange(4))
    assert np.all(weights == 0.25)
    clients, weights = many(fald.full())
    assert np.all(clients == np.arange(4))
    np.testing.assert_allclose(weights[0], np.array(SIZES) / 10, rtol=1e-6)


def test_rounds_are_drawn_independently():
    clients, _ = many(fald.without_replacement(1, allow_unequal=True))
    pairs = list(zip(clients[:-1:2, 0].tolist(), clients[1::2, 0].tolist()))
    assert p_value(pairs, dict.fromkeys(itertools.product(range(4), repeat=2), 1 / 16)) > 1e-3


compiled_draw = jax.jit(draw, static_argnums=0)


@settings(max_examples=30, deadline=None)
@given(
    sizes=st.sampled_from([(1,), (5, 1), (3, 3, 3), (1, 2, 3, 4, 50)]),
    s=st.sampled_from([1, 2, 5, 9]),
    seed=st.integers(0, 2**31 - 1),
    with_replacement=st.booleans(),
)
def test_weights_are_multiplicities_of_distinct_clients(sizes, s, seed, with_replacement):
    scheme = fald.with_replacement(s) if with_replacement else fald.without_replacement(s, allow_unequal=True)
    if not with_replacement and s > len(sizes):
        with pytest.raises(ConfigError):
            scheme.check(np.array(sizes))
        return
    clients, weights = (np.asarray(a) for a in compiled_draw(scheme, jax.random.key(seed), offsets_of(sizes)))
    assert clients.shape == weights.shape == (num_slots(scheme, len(sizes)),)
    assert np.all(np.diff(clients) >= 0)
    assert clients.min() >= 0
    assert clients.max() < len(sizes)
    assert weights.sum() == pytest.approx(1, abs=1e-6)
    np.testing.assert_allclose(weights * s, np.rint(weights * s), atol=1e-5)
    taking_part = clients[weights > 0]
    assert len(set(taking_part.tolist())) == len(taking_part)
    # an empty slot repeats a client that takes part
    assert set(clients.tolist()) == set(taking_part.tolist())


@pytest.mark.parametrize("make", [fald.with_replacement, fald.without_replacement])
@pytest.mark.parametrize("s", [0, -1, 2.5, True, None, "2"])
def test_number_of_participants_must_be_a_whole_number(make, s):
    with pytest.raises(ConfigError, match="num-participants must be a whole number ≥ 1"):
        make(s).check(np.array([3, 3, 3]))


def test_more_participants_than_clients():
    with pytest.raises(ConfigError, match="got 4 with 3 clients"):
        fald.without_replacement(4).check(np.array([3, 3, 3]))
    fald.with_replacement(4).check(np.array([3, 3, 3]))


def test_scheme_two_refuses_unequal_clients_unless_told_otherwise():
    with pytest.raises(ConfigError, match="2 to 5 rows") as caught:
        fald.without_replacement(2).check(np.array([2, 5, 3]))
    assert "allow-unequal" in str(caught.value.hint)
    fald.without_replacement(2, allow_unequal=True).check(np.array([2, 5, 3]))
    fald.without_replacement(2).check(np.array([4, 4, 4]))


@pytest.mark.parametrize("make", [fald.with_replacement, fald.without_replacement])
def test_one_participant_and_all_of_them_are_allowed(make):
    for s in (1, 3, np.int64(2)):
        make(s).check(np.array([3, 3, 3]))
    assert type(make(np.int64(2)).num_participants) is int
    make(1).check(np.array([3]))


def test_participation_is_made_by_the_three_functions():
    assert check_participation(None) is None
    assert check_participation(fald.full()) == fald.full()
    for wrong in ("full", 3, {"scheme": "full"}):
        with pytest.raises(ConfigError, match=r"participation must be fald\.full"):
            check_participation(wrong)


def test_draws_are_words_of_one_stream(monkeypatch):
    """A slot's row is the first word of the key, so that no other draw of the round repeats it."""
    asked = []

    def words(key, step, count, span):
        asked.append((step, count, int(span)))
        return jnp.zeros(count, jnp.int32)

    monkeypatch.setattr(participation, "integers", words)
    draw(fald.with_replacement(5), jax.random.key(0), offsets_of(SIZES))
    assert asked == [(0, 5, 10)]


class TestThroughSample:
    data = fald.FederatedData.from_arrays({"a": np.zeros((2, 1)), "b": np.ones((3, 1)), "c": np.ones((3, 1))})
    model = fald.models.gaussian_location([[1.0]])

    def run(self, scheme):
        options = {"num_rounds": 5, "local_steps": 1, "step_size": 0.01, "num_chains": 3, "progress": False}
        return fald.sample(0, self.model, self.data, participation=scheme, **options)

    @pytest.mark.parametrize(
        "scheme", [fald.with_replacement(0), fald.without_replacement(4), fald.without_replacement(2)]
    )
    def test_refusals(self, scheme):
        with pytest.raises(ConfigError):
            self.run(scheme)

    def test_results_say_who_took_part(self):
        tree = self.run(fald.with_replacement(np.int64(4)))
        found = tree["sample_stats"]
        assert found["participant"].shape == found["weight"].shape == (3, 5, 4)
        np.testing.assert_allclose(found["weight"].sum("slot"), 1, atol=1e-6)
        # each chain and each round draws its own participants
        times = multiplicities(
            found["participant"].values.reshape(15, 4), found["weight"].values.reshape(15, 4), 4, 3
        )
        assert len({tuple(row) for row in times.tolist()}) > 5
        assert json.loads(tree.attrs["settings"])["num_participants"] == 4
