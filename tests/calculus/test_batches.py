"""Batches: every subset equally likely, the right rows, and unbiased energies."""

from __future__ import annotations

import itertools
import math
from collections import Counter

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import stats

from fald.calculus import gradients
from fald.calculus.gradients import Batch, Rows, choose_without_replacement, energy_fn
from fald.core.keys import client_key
from helpers import federation, linear_model

NUM_DRAWS = 24_000


def many(chooser, population, count, seed=0):
    """(draws, count) indices of many draws, as tuples."""
    keys = jax.vmap(lambda i: client_key(jax.random.key_data(jax.random.key(seed)), i))(jnp.arange(NUM_DRAWS))
    return [
        tuple(row)
        for row in np.asarray(jax.jit(jax.vmap(lambda k: chooser(k, population, count)))(keys)).tolist()
    ]


def p_value(outcomes, possible):
    """Chi-square p-value against equal chances; zero if something impossible came up."""
    counts = Counter(outcomes)
    if not set(counts) <= set(possible):
        return 0.0
    return stats.chisquare([counts[k] for k in possible]).pvalue


def with_replacement(key, population, count):
    return jax.random.randint(key, (count,), 0, population)


def naive_shuffle(key, population, count):
    """Swaps every position with any other one: not uniform, a well-known mistake."""
    other = jax.random.randint(key, (population,), 0, population)

    def swap(i, a):
        return a.at[i].set(a[other[i]]).at[other[i]].set(a[i])

    return jax.lax.fori_loop(0, population, swap, jnp.arange(population))[:count]


@pytest.mark.parametrize(("population", "count"), [(4, 1), (4, 2), (4, 4), (5, 3), (6, 2)])
def test_every_subset_in_every_order_equally_often(population, count):
    outcomes = many(choose_without_replacement, population, count)
    assert p_value(outcomes, list(itertools.permutations(range(population), count))) > 1e-3
    sets = [tuple(sorted(o)) for o in outcomes]
    assert count == population or p_value(sets, list(itertools.combinations(range(population), count))) > 1e-3


@pytest.mark.parametrize("mistaken", [with_replacement, naive_shuffle])
def test_other_samplers_are_rejected(mistaken):
    outcomes = many(mistaken, 4, 3)
    assert p_value(outcomes, list(itertools.permutations(range(4), 3))) < 1e-9


@pytest.mark.parametrize(("population", "count"), [(1, 1), (4, 2), (4, 4), (5, 3), (6, 6)])
def test_choices_of_the_generator_map_one_to_one_to_outcomes(population, count, monkeypatch):
    choices = jnp.asarray(list(itertools.product(*[range(population - i) for i in range(count)])))
    monkeypatch.setattr(gradients, "integers", lambda key, step, number, span: key.astype(jnp.int32))
    outcomes = jax.jit(jax.vmap(lambda c: choose_without_replacement(c, population, count)))(choices)
    assert len(choices) == math.perm(population, count)
    assert {tuple(o) for o in outcomes.tolist()} == set(itertools.permutations(range(population), count))


compiled = jax.jit(choose_without_replacement, static_argnums=2)


@settings(max_examples=60, deadline=None)
@given(
    population=st.integers(1, 2**31 - 1) | st.integers(1, 40),
    count=st.sampled_from([1, 2, 7, 33]),
    seed=st.integers(0, 2**31 - 1),
)
def test_indices_are_distinct_and_in_range(population, count, seed):
    chosen = compiled(jax.random.key(seed), population, count).tolist()
    real, rest = chosen[:population], chosen[population:]
    assert len(set(real)) == len(real) == min(population, count)
    assert all(0 <= c < population for c in real)
    assert rest == list(range(population, count))


@pytest.mark.parametrize("population", [3000, 2**31 - 1])
def test_what_no_population_exceeds_changes_no_index(population):
    key, count = jax.random.key(2), 2048
    chosen = choose_without_replacement(key, population, count)
    assert len(set(chosen.tolist())) == count
    np.testing.assert_array_equal(choose_without_replacement(key, population, count, most=population), chosen)
    # of so many positions the first ones are hardly ever drawn: nothing of an index is cut off
    assert np.sum(np.asarray(chosen) < count) < 3 or population == 3000


def test_population_may_be_traced():
    key = jax.random.key(1)
    traced = jax.jit(jax.vmap(lambda n: choose_without_replacement(key, n, 5)))(jnp.array([1, 3, 5, 8, 1000]))
    for n, chosen in zip([1, 3, 5, 8, 1000], traced.tolist()):
        assert chosen == choose_without_replacement(key, n, 5).tolist()


def test_steps_and_keys_choose_anew():
    def chosen(seed, step):
        return choose_without_replacement(jax.random.key(seed), 1000, 8, step).tolist()

    assert chosen(0, 0) == chosen(0, 0)
    assert len({tuple(chosen(seed, step)) for seed in (0, 1) for step in (0, 1, 2)}) == 6


ROWS = (jnp.arange(12.0)[:, None] * jnp.ones(2), jnp.arange(12))


def test_batch_holds_distinct_rows_of_its_client():
    batch = Rows(ROWS, 4, 6, 12).some(jax.random.key(0), 3, 5)
    assert int(batch.count) == 5
    assert bool(batch.mask.all())
    assert set(batch.rows[1].tolist()) <= set(range(4, 10))
    assert len(set(batch.rows[1].tolist())) == 5
    np.testing.assert_array_equal(batch.rows[0][:, 0], batch.rows[1])


def test_client_smaller_than_the_batch_is_taken_whole():
    batch = Rows(ROWS, 9, 3, 12).some(jax.random.key(0), 0, 5)
    assert int(batch.count) == 3
    assert batch.mask.tolist() == [True, True, True, False, False]
    assert sorted(batch.rows[1][:3].tolist()) == [9, 10, 11]
    # what stands behind the mask are rows of the same client
    assert set(batch.rows[1].tolist()) == {9, 10, 11}


@pytest.mark.parametrize(
    ("offset", "size", "capacity", "exact"), [(0, 4, 4, True), (4, 3, 5, False), (9, 3, 20, False)]
)
def test_all_rows_of_a_client(offset, size, capacity, exact):
    batch = Rows(ROWS, offset, size, 12, capacity, exact).all()
    mask = np.ones(capacity, bool) if batch.mask is None else np.asarray(batch.mask)
    assert np.asarray(batch.rows[1])[mask].tolist() == list(range(offset, offset + size))
    assert set(batch.rows[1].tolist()) == set(range(offset, offset + size))


def test_energy_of_batches_is_unbiased():
    data = federation().data
    energy, theta = energy_fn(linear_model(2.0), data.num_rows), jnp.array([0.3, -0.7])
    rows = tuple(jnp.asarray(part) for part in data.client("site-002"))
    whole = energy(theta, Batch(rows, None, jnp.asarray(5)))

    def of_subset(index, count):
        return energy(theta, Batch(tuple(part[index] for part in rows), None, jnp.asarray(count)))

    index = jnp.asarray(list(itertools.combinations(range(5), 2)))
    assert float(jax.vmap(lambda i: of_subset(i, 2))(index).mean()) == pytest.approx(float(whole), rel=1e-5)
    assert float(jax.vmap(lambda i: of_subset(i, 3))(index).mean()) != pytest.approx(float(whole), rel=1e-2)


def test_masked_rows_do_not_count():
    data = federation().data
    energy, theta = energy_fn(linear_model(2.0), data.num_rows), jnp.array([0.3, -0.7])
    rows = tuple(jnp.asarray(part) for part in data.rows)
    exact = energy(theta, Rows(rows, 2, 3, 5, 3, True).all())
    padded = Rows(rows, 2, 3, 5, 8, False).all()
    assert float(energy(theta, padded)) == pytest.approx(float(exact), rel=1e-6)
    assert float(energy(theta, padded._replace(mask=None))) != pytest.approx(float(exact), rel=1e-2)


@pytest.mark.parametrize("most", [400, 2**31])
@pytest.mark.parametrize("count", [1, 2, 7, 256, 257])
def test_last_equal_in_one_word_and_in_two(count, most):
    values = np.random.default_rng(count).integers(0, max(1, count // 3), count)
    # the largest allowed, which would not fit beside its place if the words were too short
    values[count // 2 :: 5] = most - 1
    found = np.asarray(gradients._last_equal(jnp.asarray(values, jnp.int32), most))
    expected = [max((j for j in range(i) if values[j] == v), default=-1) for i, v in enumerate(values)]
    assert found.tolist() == expected


def test_values_too_large_for_one_word_are_not_packed():
    values = jnp.asarray([5, 5 + 2**30, 5, 5 + 2**29, 2**31 - 1], jnp.int32)
    assert gradients._last_equal(values, 2**31).tolist() == [-1, -1, 0, -1, -1]
    assert gradients._last_equal(values[:3], 2**31).tolist() == [-1, -1, 0]
