"""What a client sees of a round, field by field, and what a run is said to have cost."""

from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import fald
from fald.calculus.gradients import Rows
from fald.core.keys import Stream, client_key, stream_key
from fald.langevin import client, costs
from fald.langevin.client import Setup, Visit, client_round
from fald.langevin.method import Cost, Spent
from fald.settings.participation import Drawn, full, with_replacement
from helpers import linear_model

PUBLIC, SECRET = (jax.random.key_data(jax.random.key(i)) for i in (1, 2))
RNG = np.random.default_rng(4)
A, Y = RNG.normal(size=(9, 2)).astype(np.float32), np.arange(9, dtype=np.float32)
MODEL, THETA = linear_model(2.0), jnp.array([0.3, -0.7])
OFFSET, SIZE = 2, 5
CLIENT, ROUND, STEPS = 3, 11, 4


def seen(batch_size=None, *, scheme="full", clip=None, model=MODEL, capacity=SIZE, full_batches=False):
    """The view of a client with rows 2 to 6 of nine."""
    found = []
    method = SimpleNamespace(
        about=SimpleNamespace(batch_size=batch_size),
        client_update=lambda hyper, local, message, memory: found.append((hyper, local, message, memory)),
    )
    hyper = {"local_steps": STEPS, **({} if clip is None else {"clip_norm": clip})}
    rows = Rows((jnp.asarray(A), jnp.asarray(Y)), jnp.int32(OFFSET), jnp.int32(SIZE), jnp.int32(9), capacity)
    visit = Visit((PUBLIC, SECRET), jnp.int32(CLIENT), jnp.float32(0.25), jnp.int32(ROUND))
    setup = Setup(model, method, 6, scheme, full_batches)
    client_round(setup, hyper, rows, visit, message="message", memory="memory")
    ((given, view, message, memory),) = found
    assert (given, message, memory) == (hyper, "message", "memory")
    return view, rows


def own_key(stream):
    return client_key(stream_key(SECRET, ROUND, stream), CLIENT)


def test_what_only_the_client_may_know_comes_from_its_secret_key():
    view, _ = seen()
    np.testing.assert_array_equal(view.shared_key, stream_key(PUBLIC, ROUND, Stream.SHARED_NOISE))
    np.testing.assert_array_equal(view.own_key, own_key(Stream.CLIENT_NOISE))
    np.testing.assert_array_equal(view.choice_key, own_key(Stream.CLIENT_CHOICE))
    keys = {tuple(np.asarray(k).tolist()) for k in (view.shared_key, view.own_key, view.choice_key)}
    keys |= {tuple(np.asarray(own_key(s)).tolist()) for s in (Stream.BATCH, Stream.MODEL)}
    assert len(keys) == 5


@pytest.mark.parametrize(
    ("scheme", "chance", "always"),
    [("full", 5 / 9, True), ("with-replacement", 5 / 9, False), ("without-replacement", 1 / 6, False)],
)
def test_the_place_of_a_client_in_the_round(scheme, chance, always):
    view, _ = seen(scheme=scheme)
    assert (float(view.share), float(view.weight)) == (pytest.approx(5 / 9), 0.25)
    assert (int(view.client), view.num_clients, int(view.round)) == (CLIENT, 6, ROUND)
    assert int(view.first_step) == ROUND * STEPS
    assert (float(view.chance), view.always) == (pytest.approx(chance), always)


@pytest.fixture
def asked(monkeypatch):
    """Energies and gradients that give what they were asked about; others test them."""

    def energy_fn(model, total):
        return lambda theta, batch: 0.5 * theta @ theta * batch.count + total

    def gradient_fn(model, total, clip_norm=None):
        return lambda theta, batch: (theta, batch, int(total), clip_norm)

    monkeypatch.setattr(client, "energy_fn", energy_fn)
    monkeypatch.setattr(client, "gradient_fn", gradient_fn)


def rows_of(batch):
    kept = slice(None) if batch.mask is None else np.asarray(batch.mask)
    numbers = np.asarray(batch.rows[1][kept]).astype(int)
    np.testing.assert_array_equal(batch.rows[0][kept], A[numbers])
    return sorted(numbers.tolist())


@pytest.mark.parametrize("clip", [None, 0.5])
def test_without_batches_all_rows_of_the_client_are_used(asked, clip):
    view, _ = seen(clip=clip, capacity=8)
    for theta, batch, total, cut in (view.grad(THETA, 0), view.grad(THETA, 3), view.full_grad(THETA)):
        assert (theta is THETA, rows_of(batch), total, cut) == (True, [2, 3, 4, 5, 6], 9, clip)
        assert int(batch.count) == SIZE
    assert float(view.energy(THETA, 1)) == pytest.approx(0.5 * 5 * float(THETA @ THETA) + 9)
    np.testing.assert_allclose(view.hessian(THETA), 5 * np.eye(2), rtol=1e-6)
    np.testing.assert_allclose(view.prior_grad(THETA), np.asarray(THETA) / 4, rtol=1e-6)


def test_batches_are_drawn_with_the_secret_key_anew_in_every_step(asked):
    view, rows = seen(3, full_batches=True)
    drawn = []
    for step in range(4):
        _, batch, total, _ = view.grad(THETA, step)
        wanted = rows.some(own_key(Stream.BATCH), step, 3)
        np.testing.assert_array_equal(batch.rows[1], wanted.rows[1])
        assert (batch.mask, int(batch.count), total) == (None, 3, 9)
        assert float(view.energy(THETA, step)) == pytest.approx(1.5 * float(THETA @ THETA) + 9)
        drawn.append(tuple(rows_of(batch)))
    assert len(set(drawn)) > 1
    assert rows_of(view.full_grad(THETA)[1]) == [2, 3, 4, 5, 6]
    assert seen(3, full_batches=False)[0].grad(THETA, 0)[1].mask is not None


def test_a_model_that_draws_at_random_has_the_secret_key_of_the_step():
    @fald.models.takes_key
    def drawing(theta, row, key):
        return jax.random.normal(key) + 0 * jnp.sum(theta)

    noisy = fald.Model(lambda theta: jnp.zeros(()), drawing, jnp.zeros(2))
    view, _ = seen(model=noisy)
    energies = [float(view.energy(THETA, step)) for step in (0, 0, 1)]
    assert energies[0] == energies[1] != energies[2]


# -- costs ----------------------------------------------------------------------------------------------


def run_of(cost, *, scheme=None, batch_size=None, sizes=(4, 10, 7), chains=2):
    method = SimpleNamespace(cost=lambda dim: cost, about=SimpleNamespace(batch_size=batch_size))
    data = SimpleNamespace(num_clients=len(sizes), sizes=np.array(sizes))
    model = SimpleNamespace(dim=3)
    return SimpleNamespace(
        method=method, data=data, model=model, num_chains=chains, participation=scheme or full()
    )


EACH, ONCE = Spent(1, 12, 20, 5, 1), Spent(2, 100, 200, 0, 3)


def test_where_all_take_part_rounds_say_what_a_run_has_cost():
    run = run_of(Cost(EACH, ONCE), batch_size=6)
    assert costs.start(run) == ()
    assert costs.count((), None, (), 3) == ()
    found = costs.totals(run, (), 10)
    assert found["rounds"].tolist() == [12, 12]
    assert found["bytes_up"].tolist() == [[220] * 3] * 2
    assert found["bytes_down"].tolist() == [[400] * 3] * 2
    assert found["gradients"].tolist() == [[10 * 6 + 3] * 3] * 2
    # batches of six rows, or of all that there are; and all rows where those are asked for
    assert found["row_gradients"][0].tolist() == [50 * b + 13 * n for b, n in ((4, 4), (6, 10), (6, 7))]
    whole = costs.totals(run_of(Cost(EACH, ONCE)), (), 10)
    assert whole["row_gradients"][1].tolist() == [63 * 4, 63 * 10, 63 * 7]


def test_drawn_clients_pay_for_the_rounds_they_took_part_in():
    run = run_of(Cost(EACH), scheme=with_replacement(2))
    tally = costs.start(run)
    assert tally.shape == (3, 2)
    rounds = (([0, 2], [1, 1]), ([0, 0], [2, 1]))  # by chain; a weight of zero is an empty slot
    weights = (([0.5, 0.5], [1.0, 0.0]), ([1.0, 0.0], [0.5, 0.5]))
    for drawn, weight in zip(rounds, weights):
        tally = costs.count(tally, Drawn(jnp.array(drawn), jnp.array(weight)), (), 3)
    assert np.asarray(tally).tolist() == [[2, 0], [0, 2], [1, 1]]
    found = costs.totals(run, tally, 2)
    assert found["rounds"].tolist() == [2, 2]
    assert found["gradients"].tolist() == [[12, 0, 6], [0, 12, 6]]


def test_what_uploads_say_is_summed_beyond_one_word():
    run = run_of(Cost(), chains=1)
    tally = costs.start(run)
    assert isinstance(tally, Spent)
    drawn = Drawn(jnp.array([[0, 1, 2]]), jnp.array([[0.2, 0.8, 0.0]]))
    most = 2**32 - 5
    for _ in range(3):
        spent = Spent(jnp.full((3, 1), 1), jnp.array([[most], [7], [9]], jnp.uint32), 3, 2, 0)
        tally = costs.count(tally, drawn, spent, 3)
    found = costs.totals(run, tally, 3)
    assert found["rounds"].tolist() == [3]
    name = Spent._fields[1]
    assert found[name].tolist() == [[3 * most, 21, 0]]
    assert found["gradients"].tolist() == [[6, 6, 0]]


def test_drawn_clients_pay_for_their_preparation_and_the_server_waits_in_every_round():
    run = run_of(Cost(EACH, ONCE), scheme=with_replacement(1), batch_size=6)
    tally = costs.start(run)
    for drawn in ([[0], [1]], [[2], [1]], [[1], [0]], [[0], [2]]):
        tally = costs.count(tally, Drawn(jnp.array(drawn), jnp.ones((2, 1))), (), 3)
    found = costs.totals(run, tally, 4)  # no client took part in all of them
    times = np.array([[2, 1, 1], [1, 2, 1]])
    assert found["rounds"].tolist() == [4 + 2] * 2
    assert found["bytes_up"].tolist() == (12 * times + 100).tolist()
    assert found["bytes_down"].tolist() == (20 * times + 200).tolist()
    assert found["gradients"].tolist() == (6 * times + 3).tolist()
    rows = 5 * times * [4, 6, 6] + (times + 3) * [4, 10, 7]
    assert found["row_gradients"].tolist() == rows.tolist()
    assert all(values.dtype == np.int64 for values in found.values())


def uploads(run, asked):
    """Counters after rounds of all, of whom some were asked for an answer: (rounds, clients, chains)."""
    tally = costs.start(run)
    drawn = Drawn(jnp.tile(jnp.arange(3), (2, 1)), jnp.full((2, 3), 1 / 3))
    for exchanges in asked:
        asked_of = jnp.array(exchanges)
        spent = Spent(asked_of, 12 * asked_of, jnp.uint32(2**31), 5, jnp.array([[0, 1]] * 3))
        tally = costs.count(tally, drawn, spent, 3)
    return tally


ASKED = [[[1, 1], [0, 1], [0, 0]], [[0, 0], [1, 0], [0, 0]], [[1, 0], [0, 0], [0, 0]], [[0, 0]] * 3]


def test_the_server_of_all_clients_waits_where_some_client_was_asked():
    run = run_of(Cost(None, ONCE), batch_size=6)
    found = costs.totals(run, uploads(run, ASKED), 4)
    asked = np.sum(ASKED, axis=0).T
    assert asked.tolist() == [[2, 1, 0], [1, 1, 0]]
    assert found["rounds"].tolist() == [2 + 2, 1 + 2]
    assert found["bytes_up"].tolist() == (12 * asked + 100).tolist()
    assert found["bytes_down"].tolist() == [[4 * 2**31 + 200] * 3] * 2
    assert found["gradients"].tolist() == [[20 + 3] * 3, [24 + 3] * 3]
    whole = np.array([4, 10, 7])
    assert found["row_gradients"].tolist() == [
        (20 * np.array([4, 6, 6]) + full * whole).tolist() for full in (3, 7)
    ]
    drawn = run_of(Cost(None, ONCE), scheme=with_replacement(3))
    assert costs.totals(drawn, uploads(drawn, ASKED), 4)["rounds"].tolist() == [4 + 2] * 2


def test_counters_begin_at_zero_for_every_client_and_chain():
    tally = costs.start(run_of(Cost()))
    assert isinstance(tally, Spent)
    for part in (word for words in tally for word in words):
        assert (part.shape, part.dtype, int(part.sum())) == ((3, 2), np.uint32, 0)
    drawn = costs.start(run_of(Cost(EACH), scheme=with_replacement(2)))
    assert (drawn.shape, drawn.dtype, int(drawn.sum())) == ((3, 2), np.uint32, 0)


def test_a_sum_that_fills_a_word_to_its_end_goes_on_in_the_next():
    run = run_of(Cost(), chains=1)
    drawn = Drawn(jnp.array([[0, 1]]), jnp.array([[0.5, 0.5]]))
    tally, wanted = costs.start(run), np.zeros(3, int)
    for amounts in ([2**32 - 1, 2**32 - 1], [0, 1], [0, 2**32 - 1], [1, 0], [2**31, 1]):
        spent = Spent(1, jnp.array(amounts, jnp.uint32)[:, None], 0, 0, 0)
        tally = costs.count(tally, drawn, spent, 3)
        wanted += [*amounts, 0]
        assert costs.totals(run, tally, 1)["bytes_up"].tolist() == [wanted.tolist()]
