"""Energies and gradients of a client against NumPy, on rows that are whole, masked, batched or split."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import fald
from fald.calculus import gradients as g
from helpers import linear_model

ROWS, TOTAL = 7, 20
RNG = np.random.default_rng(2)
A, Y = RNG.normal(size=(ROWS, 2)).astype(np.float32), RNG.normal(size=ROWS).astype(np.float32)
THETA = jnp.array([0.4, -1.3])
MODEL = linear_model(2.0)


@pytest.fixture(autouse=True)
def by_hand():
    with jax.disable_jit():
        yield


def batch(keep=slice(None), mask=None):
    a, y = A[keep], Y[keep]
    count = len(a) if mask is None else int(np.sum(mask))
    return g.Batch(
        (jnp.asarray(a), jnp.asarray(y)), None if mask is None else jnp.asarray(mask), jnp.asarray(count)
    )


MASK = np.array([1, 1, 0, 1, 0, 1, 0], bool)


@pytest.mark.parametrize("mask", [None, MASK], ids=["whole", "masked"])
@pytest.mark.parametrize("keep", [slice(None), slice(0, 7, 1)])
def test_energy_and_gradient_are_scaled_to_all_rows(mask, keep):
    used = np.ones(ROWS, bool) if mask is None else mask
    theta = np.asarray(THETA, float)
    off = Y[used] - A[used] @ theta
    scale = TOTAL / used.sum()
    energy = 0.5 * theta @ theta / 4 + scale * 0.5 * np.sum(off**2)
    gradient = theta / 4 - scale * A[used].T @ off
    np.testing.assert_allclose(g.energy_fn(MODEL, TOTAL)(THETA, batch(keep, mask)), energy, rtol=1e-5)
    np.testing.assert_allclose(g.gradient_fn(MODEL, TOTAL)(THETA, batch(keep, mask)), gradient, rtol=1e-5)


@pytest.mark.parametrize("mask", [None, MASK], ids=["whole", "masked"])
@pytest.mark.parametrize("norm", [0.5, 1.5, 100.0])
def test_each_row_is_cut_and_the_prior_is_not(mask, norm):
    used = np.ones(ROWS, bool) if mask is None else mask
    theta = np.asarray(THETA, float)
    rows = A[used] * (Y[used] - A[used] @ theta)[:, None]
    lengths = np.linalg.norm(rows, axis=1)
    cut = rows * np.minimum(1, norm / lengths)[:, None]
    wanted = theta / 4 - TOTAL / used.sum() * cut.sum(0)
    found = g.gradient_fn(MODEL, TOTAL, clip_norm=norm)(THETA, batch(mask=mask))
    np.testing.assert_allclose(found, wanted, rtol=1e-5)
    assert norm < 100 or np.allclose(found, g.gradient_fn(MODEL, TOTAL)(THETA, batch(mask=mask)), rtol=1e-5)


@pytest.mark.parametrize("size", [1e-30, 1e-13, 0.9e-12, 1e-6, 1.0, 1e6, 1.1e12, 1e13, 1e30])
def test_gradients_of_every_size_are_cut_to_the_norm(size):
    """Squares of the largest and of the smallest leave the range of numbers."""
    rows = jnp.asarray(np.float32(size) * np.float32([[3, 4], [-3, 4], [0, -5]]))
    for clip in (0.5 * size, 2.5 * size, 4.999 * size):
        same, factor = g.clip_rows(rows, np.float32(clip))
        np.testing.assert_array_equal(same, rows)
        np.testing.assert_allclose(factor, clip / (5 * size), rtol=1e-5)
    for clip in (5.001 * size, 50 * size):
        np.testing.assert_array_equal(g.clip_rows(rows, np.float32(clip))[1], 1)


@pytest.mark.parametrize("wrong", [np.nan, np.inf, -np.inf])
def test_a_row_that_is_no_number_counts_as_zero(wrong):
    same, factor = g.clip_rows(jnp.asarray([[wrong, 1.0], [3.0, 4.0], [wrong, wrong]]), 2.5)
    np.testing.assert_array_equal(same, [[0, 0], [3, 4], [0, 0]])
    np.testing.assert_allclose(factor, [1, 0.5, 1])


def test_a_row_without_gradient_is_cut_to_nothing():
    a = jnp.zeros((1, 2))
    found = g.gradient_fn(MODEL, 1, clip_norm=1.0)(THETA, g.Batch((a, jnp.ones(1)), None, jnp.asarray(1)))
    np.testing.assert_allclose(found, THETA / 4)


@pytest.mark.parametrize("head", [1, 3])
def test_split_rows_stand_for_the_whole(head):
    whole = jnp.asarray(A)
    split = g.Split(whole[:head], whole[head:])
    assert g._num_rows((split, jnp.asarray(Y))) == g._num_rows((whole, whole)) == ROWS
    for start in (0, head - 1, head, ROWS - 2):
        for length in (1, ROWS - start):
            np.testing.assert_array_equal(g._slice(split, start, length), whole[start : start + length])
            np.testing.assert_array_equal(g._slice(whole, start, length), whole[start : start + length])
    index = jnp.array([6, 0, head, head - 1, 2])
    np.testing.assert_array_equal(g._take(split, index), whole[index])
    np.testing.assert_array_equal(g._take(g.Split(whole[:head, 0], whole[head:, 0]), index), whole[index, 0])


def test_all_rows_of_a_client_repeat_the_last_under_a_mask():
    rows = g.Rows(jnp.arange(ROWS), 2, 3, ROWS)
    exact = rows._replace(capacity=3, exact=True).all()
    assert (exact.rows.tolist(), exact.mask, exact.count) == ([2, 3, 4], None, 3)
    padded = rows._replace(capacity=5).all()
    assert padded.rows.tolist() == [2, 3, 4, 4, 4]
    assert padded.mask.tolist() == [True, True, True, False, False]
    assert padded.count == 3
    held = rows._replace(capacity=5).hold()
    assert held.all() is held.held
    assert held.held.rows.tolist() == padded.rows.tolist()


@pytest.mark.parametrize(("size", "wanted"), [(5, 3), (3, 3), (2, 2), (1, 1)])
def test_batches_are_of_the_client(size, wanted):
    rows, key = g.Rows(jnp.arange(100), 10, size, 100), jax.random.key_data(jax.random.key(0))
    found = rows.some(key, 4, 3)
    taken = np.asarray(found.rows)[np.asarray(found.mask)]
    assert len(set(taken.tolist())) == wanted == int(found.count)
    assert set(np.asarray(found.rows).tolist()) <= set(range(10, 10 + size))  # also behind the mask
    if size >= 3:
        full = rows.some(key, 4, 3, always_full=True)
        assert (full.mask, int(full.count)) == (None, 3)
        assert full.rows.tolist() == found.rows.tolist()


def test_the_mode_is_that_of_at_most_two_thousand_rows_evenly_spaced():
    rng = np.random.default_rng(0)
    x, y = rng.normal(size=(4001, 2)).astype(np.float32), rng.normal(size=4001).astype(np.float32)
    data = fald.FederatedData.from_arrays({"a": (x[:1000], y[:1000]), "b": (x[1000:], y[1000:])})
    taken = np.linspace(0, 4000, 2000).round().astype(int)
    gram = np.eye(2) / 4 + 4001 / 2000 * x[taken].T @ x[taken]
    mode = np.linalg.solve(gram, 4001 / 2000 * x[taken].T @ y[taken])
    whole = np.linalg.solve(np.eye(2) / 4 + x.T @ x, x.T @ y)
    with jax.disable_jit(False):
        found = np.asarray(g.pooled_mode(MODEL, data, jnp.zeros(2)))
    np.testing.assert_allclose(found, mode, atol=3e-4)
    assert np.abs(mode - whole).max() > 1e-3  # the twin


def test_curvature_and_mode_of_quadratics():
    sizes = {"a": 7, "b": 3}
    data = fald.FederatedData.from_arrays({n: (A[:k] * (1 + k), Y[:k]) for n, k in sizes.items()})
    padded = g.client_rows(data, 1, 5)
    assert padded.mask.tolist() == [True] * 3 + [False] * 2
    assert int(padded.count) == 3
    np.testing.assert_array_equal(padded.rows[1], [*Y[:3], Y[2], Y[2]])
    assert len(g.client_rows(data, 0, 4).rows[1]) == int(g.client_rows(data, 0, 4).count) == 4
    with jax.disable_jit(False):
        clients, found = g.largest_curvatures(MODEL, data, [1, 0], THETA)
        assert clients == [1, 0]
        hessians = [np.eye(2) / 4 + 10 / k * (A[:k] * (1 + k)).T @ (A[:k] * (1 + k)) for k in (3, 7)]
        np.testing.assert_allclose(found, [np.linalg.eigvalsh(h)[-1] for h in hessians], rtol=0.02)
        x, y = np.concatenate([A[:7] * 8, A[:3] * 4]), np.concatenate([Y[:7], Y[:3]])
        mode = np.linalg.solve(np.eye(2) / 4 + x.T @ x, x.T @ y)
        np.testing.assert_allclose(g.pooled_mode(MODEL, data, THETA), mode, atol=0.02)


def test_a_preconditioned_step_meets_the_scaled_curvature():
    data = fald.FederatedData.from_arrays({"a": (A, Y)})
    root = np.array([0.5, 3.0])
    hessian = np.eye(2) / 4 + A.T @ A
    with jax.disable_jit(False):
        plain = g.largest_curvatures(MODEL, data, [0], THETA)[1]
        met = g.largest_curvatures(MODEL, data, [0], THETA, root=root)[1]
    scaled = root[:, None] * hessian * root
    np.testing.assert_allclose(met, np.linalg.eigvalsh(scaled)[-1:], rtol=0.01)
    np.testing.assert_allclose(plain, np.linalg.eigvalsh(hessian)[-1:], rtol=0.01)
    assert abs(met[0] / plain[0] - 1) > 0.5


def test_where_there_is_no_curvature_none_is_found():
    flat = fald.Model(lambda theta: jnp.zeros(()), lambda theta, row: jnp.sum(theta), jnp.zeros(2))
    data = fald.FederatedData.from_arrays({"a": jnp.ones((3, 1))})
    with jax.disable_jit(False):
        assert g.largest_curvatures(flat, data, [0], THETA)[1].tolist() == [0.0]


def test_what_may_be_looked_at_is_bounded(monkeypatch):
    """Rows × clients × looks × 2.5 × operations of a row stay below 1.5e10."""
    cost = [1.0]
    monkeypatch.setattr(g, "_operations", lambda model, data: cost[0])
    sizes = {f"s{i}": np.zeros(n) for i, n in enumerate((300, 5000, 40, 800))}
    data = fald.FederatedData.from_arrays(sizes)

    def looked(clients, looks, operations):
        cost[0] = operations
        return g.affordable(MODEL, data, clients, looks)

    assert looked([0, 1, 2, 3], 12, 0.0) == ([0, 1, 2, 3], 1000)  # no more than a thousand
    assert looked([0, 2], 12, 1.0) == ([0, 2], 300)  # nor than the largest of them has
    # 1.5e10 / (10 · 2.5 · 1e6) = 600 rows in all: 150 of each
    assert looked([0, 1, 2, 3], 10, 1e6) == ([0, 1, 2, 3], 150)
    assert looked([0, 1, 2, 3], 20, 1e6) == ([0, 1, 2, 3], 75)
    # below 64 of each there are fewer clients, evenly spaced: 120 rows are 64 of one
    assert looked([3, 1, 2, 0], 50, 1e6) == ([3], 64)
    assert looked([3, 1, 2, 0], 30, 1e6) == ([3, 1, 0], 64)  # 200 rows
    assert looked([3, 1, 2, 0], 60, 1e7) == ([3], 10)
    assert looked([3, 1, 2, 0], 60, 1e12) == ([3], 1)


def test_operations_are_those_of_a_gradient_of_one_row():
    wide = fald.Model(
        lambda t: jnp.zeros(()), lambda t, row: -0.5 * (row[-1] - row[:-1] @ t) ** 2, jnp.zeros(1000)
    )
    data = fald.FederatedData.from_arrays({"a": np.zeros((3, 1001), np.float32)})
    with jax.disable_jit(False):
        assert 2000 <= g._operations(wide, data) <= 10_000  # a product of 1,000 forwards, one backwards


@pytest.mark.parametrize("size", [5, 256, 700])
def test_squares_are_of_the_first_rows_and_stand_for_all(size):
    rng = np.random.default_rng(1)
    a, y = rng.normal(size=(size, 2)).astype(np.float32), rng.normal(size=size).astype(np.float32)
    data = fald.FederatedData.from_arrays({"a": (a, y), "b": (A, Y)})
    start = np.asarray(MODEL.flat_initial_position, float)
    with jax.disable_jit(False):
        found = g.squared_gradients(MODEL, data)
    assert found.shape == (2, 2)
    for (x, z), squares in zip(((a, y), (A, Y)), found):
        own = (x * (z - x @ start)[:, None])[:256] ** 2
        np.testing.assert_allclose(squares, own.sum(0) * max(1, len(x) / 256), rtol=1e-4)


def test_descent_goes_down_from_afar_and_stays_where_nothing_is_better():
    """A descent from far away needs short steps first; from the mode itself it must not leave."""
    data = fald.FederatedData.from_arrays({"a": (A, Y)})
    mode = np.linalg.solve(np.eye(2) / 4 + A.T @ A, A.T @ Y)
    with jax.disable_jit(False):
        for start in ([1e3, -1e3], mode):
            found = g.pooled_mode(MODEL, data, jnp.asarray(start, jnp.float32))
            np.testing.assert_allclose(found, mode, atol=2e-3)
    cliff = fald.Model(
        lambda theta: jnp.where(theta[0] < 0, jnp.nan, -theta[0]), lambda theta, row: 0.0 * row, jnp.ones(1)
    )
    rows = fald.FederatedData.from_arrays({"a": np.zeros(4, np.float32)})
    with jax.disable_jit(False):  # beyond zero there is no energy: the descent ends before
        assert 0 <= float(g.pooled_mode(cliff, rows, jnp.ones(1))[0]) < 1e-6


def test_the_mode_of_a_large_model_is_that_of_fewer_rows(monkeypatch):
    rng = np.random.default_rng(3)
    x, y = rng.normal(size=(90, 2)).astype(np.float32), rng.normal(size=90).astype(np.float32)
    data = fald.FederatedData.from_arrays({"a": (x, y)})
    monkeypatch.setattr(g, "_operations", lambda model, data: 1.5e10 / (200 * 2.5) / 30)
    taken = np.linspace(0, 89, 30).round().astype(int)
    gram, right = np.eye(2) / 4 + 3 * x[taken].T @ x[taken], 3 * x[taken].T @ y[taken]
    with jax.disable_jit(False):
        found = g.pooled_mode(MODEL, data, jnp.zeros(2))
    np.testing.assert_allclose(found, np.linalg.solve(gram, right), atol=1e-3)
