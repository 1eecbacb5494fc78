"""A round of all chains, in every layout, against loops over chains and participants."""

import functools
from dataclasses import dataclass

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import fald
from fald.calculus.gradients import Rows
from fald.core.keys import Stream, chain_key, stream_key
from fald.core.reveals import Reveals
from fald.langevin.client import Setup, Visit, client_round
from fald.langevin.method import Cost, Peer, Spent, Upload
from fald.langevin.rounds import Given, Layout, Rounds, SizeClass, Tables, row_numbers
from fald.langevin.server import Server, average
from fald.settings.participation import draw, full, num_slots, with_replacement, without_replacement
from helpers import SLOW, linear_model

MODEL = linear_model(2.0)
SIZES = (3, 2, 3, 2)
OFFSETS = np.concatenate([[0], np.cumsum(SIZES)]).astype(np.int32)
RNG = np.random.default_rng(6)
A, Y = RNG.normal(size=(10, 2)).astype(np.float32), RNG.normal(size=10).astype(np.float32)
ROOTS = tuple(jax.random.key_data(jax.random.key(i)) for i in (1, 2))
SCHEMES = {"full": full(), "I": with_replacement(3), "II": without_replacement(2, allow_unequal=True)}
ROUND, FIRST = 5, 7


def words(key):
    """The two words of a key as numbers, which show which key it is."""
    return key.astype(jnp.float32) * 2.0**-33


@dataclass(frozen=True, kw_only=True)
class Tracer(Peer):
    """Shows in its numbers which rows, keys, weight, message and memory it was given."""

    reveals = Reveals(("position", "value"), sums=True)

    def cost(self, dim):
        return Cost(Spent(1))

    def client_update(self, hyper, local, message, memory):
        noise = words(local.own_key) + 2 * words(local.shared_key)
        move = hyper["step_size"] * local.grad(message, 1)
        position = message - move + noise * local.weight + memory + 0.01 * local.client
        return Upload(position, local.energy(message, 0)), memory + position

    def server_update(self, hyper, state, uploads, server):
        return average(uploads.position, server.weights) + words(server.noise_key)


METHOD, HYPER = Tracer(step_size=0.05, batch_size=None).split()
HYPER = dict(HYPER)


def tables(classes, class_of):
    members = [np.flatnonzero(np.asarray(class_of) == k).astype(np.int32) for k in range(len(classes))]
    order = np.argsort(np.concatenate(members)).astype(np.int32)
    rows = (jnp.asarray(A), jnp.asarray(Y))
    return Tables(
        rows,
        jnp.asarray(OFFSETS),
        jnp.asarray(class_of),
        tuple(map(jnp.asarray, members)),
        jnp.asarray(order),
    )


TWO = [SizeClass(3, True, 2, 2), SizeClass(2, True, 2)], [0, 1, 0, 1]
ONE = [SizeClass(3, False, 4)], [0, 0, 0, 0]


def made(scheme, num_chains, classes, *, together=False, one_by_one=False, method=METHOD):
    layout = Layout(tuple(classes), together, False, False, 1, one_by_one)
    return Rounds(method, SCHEMES[scheme], num_chains, model=MODEL, num_clients=4, layout=layout)


def start(scheme, num_chains):
    server = jnp.asarray(RNG.normal(size=(num_chains, 2)), jnp.float32)
    memory = jnp.asarray(0.1 * RNG.normal(size=(4, num_chains, 2)), jnp.float32)
    counters = () if scheme == "full" else jnp.zeros((4, num_chains), jnp.uint32)
    return server, (memory, counters)


@functools.partial(jax.jit, static_argnums=(0, 1))
def visited(method, scheme, size, visit, message, memory):
    """What one client does in one round of one chain, from its own rows alone."""
    total = jnp.int32(10)
    rows = Rows((jnp.asarray(A), jnp.asarray(Y)), jnp.asarray(OFFSETS)[visit.client], size, total, 3)
    return client_round(Setup(MODEL, method, 4, scheme), HYPER, rows, visit, message=message, memory=memory)


def by_loops(scheme, num_chains, state, method=METHOD):
    """The same, one chain and one participant at a time."""
    server, (memory, _) = state
    after, kept, found = [], np.array(memory), []
    taken = np.zeros((4, num_chains), int)
    for ch in range(num_chains):
        keys = tuple(chain_key(root, FIRST + ch) for root in ROOTS)
        chosen = draw(SCHEMES[scheme], stream_key(keys[1], ROUND, Stream.PARTICIPATION), jnp.asarray(OFFSETS))
        uploads, weights = [], []
        for client, weight in zip(np.asarray(chosen.client), np.asarray(chosen.weight)):
            if weight == 0:
                continue
            visit = Visit(keys, jnp.int32(client), jnp.float32(weight), jnp.int32(ROUND))
            how = (method, SCHEMES[scheme].scheme, jnp.int32(SIZES[client]))
            upload, new = visited(*how, visit, server[ch], memory[client, ch])
            uploads.append(upload)
            weights.append(weight)
            kept[client, ch] = new
            taken[client, ch] += 1
        stacked = Upload(jnp.stack([u.position for u in uploads]), jnp.stack([u.energy for u in uploads]))
        weights = np.array(weights, np.float32)
        view = Server.at(keys[0], jnp.int32(ROUND), jnp.asarray(weights))
        after.append(np.asarray(method.server_update(HYPER, server[ch], stacked, view)))
        found.append((weights, np.asarray(stacked.position), np.asarray(stacked.energy)))
    return np.stack(after), kept, found, taken


LAYOUTS = {
    "classes": (TWO, {}), "padded": (ONE, {}), "one by one": (TWO, {"one_by_one": True}),
    "chains together": (ONE, {"together": True}),
}  # fmt: skip


@pytest.mark.parametrize(
    ("scheme", "layout", "num_chains"),
    [
        ("full", "classes", 2),
        pytest.param("full", "padded", 1, marks=SLOW),
        pytest.param("full", "one by one", 2, marks=SLOW),
        ("I", "classes", 2),
        pytest.param("I", "padded", 1, marks=SLOW),
        pytest.param("II", "chains together", 2, marks=SLOW),
    ],
)
def test_a_round_is_that_of_its_chains_and_participants(scheme, layout, num_chains):
    (classes, class_of), how = LAYOUTS[layout]
    rounds = made(scheme, num_chains, classes, **how)
    state = start(scheme, num_chains)
    given = Given(tables(classes, class_of), HYPER, ROOTS)
    server, (memory, counters), uploads, drawn = jax.jit(rounds.whole)(
        given, state, jnp.int32(ROUND), first_chain=FIRST
    )
    expected, kept, found, taken = by_loops(scheme, num_chains, state)
    np.testing.assert_allclose(server, expected, rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(memory, kept, rtol=1e-5, atol=1e-6)
    if scheme == "full":
        assert counters == ()
    else:
        np.testing.assert_array_equal(counters, taken)
    values = rounds.kept(server, uploads, drawn)
    assert len(values) == (3 if scheme == "full" else 5)
    np.testing.assert_array_equal(values[0], server)
    for ch, (weights, positions, energies) in enumerate(found):
        here = np.asarray(drawn.weight[ch]) > 0
        np.testing.assert_allclose(np.asarray(uploads.position)[here, ch], positions, rtol=1e-5, atol=1e-6)
        assert float(values[1][ch]) == pytest.approx(float(weights @ energies), rel=1e-5)
        away = np.linalg.norm(positions - expected[ch], axis=1)
        np.testing.assert_allclose(np.asarray(values[2])[ch][here], away, rtol=1e-4, atol=1e-6)
        if scheme != "full":
            np.testing.assert_array_equal(values[3][ch], drawn.client[ch])
            np.testing.assert_array_equal(values[4][ch], drawn.weight[ch])
    assert rounds.everyone is (scheme == "full")
    assert rounds.num_slots == num_slots(SCHEMES[scheme], 4)


@pytest.mark.parametrize("scheme", ["full", pytest.param("I", marks=SLOW)])
def test_visits_in_parts_are_the_same_round(scheme):
    (classes, class_of), _ = LAYOUTS["classes"]
    rounds, state = made(scheme, 2, classes), start(scheme, 2)
    given = Given(tables(classes, class_of), HYPER, ROOTS)
    whole = jax.jit(rounds.whole)(given, state, jnp.int32(ROUND), first_chain=0)
    begun = jax.jit(rounds.begin)(ROOTS, given.tables.offsets, state[0], jnp.int32(ROUND))
    assert int(begun.round) == ROUND
    np.testing.assert_array_equal(begun.messages, state[0])
    work = (given, begun, state[1][0])
    visit = jax.jit(rounds.visit, static_argnums=(0, 1))
    pieces = [(0, 1, 0), (0, 1, 1), (1, 2, 0)] if scheme == "full" else [(0, 2, 0), (0, 1, 2)]
    parts = [visit(*piece, work) for piece in pieces]
    finished = jax.jit(rounds.finish)(given, begun, state, parts)
    for one, other in zip(jax.tree.leaves(finished), jax.tree.leaves(whole[:3])):
        np.testing.assert_allclose(one, other, rtol=1e-6)


def test_batches_are_those_of_the_client():
    """With a batch as large as a client, every row of it is used once, whatever the key."""
    batched, _ = Tracer(step_size=0.05, batch_size=3).split()
    classes = [SizeClass(0, False, 4)]
    rounds, state = made("full", 2, classes, method=batched), start("full", 2)
    given = Given(tables(classes, [0] * 4), HYPER, ROOTS)
    server = jax.jit(rounds.whole)(given, state, jnp.int32(ROUND), first_chain=FIRST)[0]
    np.testing.assert_allclose(server, by_loops("full", 2, state)[0], rtol=1e-4, atol=1e-5)


def test_numbers_of_a_row():
    assert row_numbers((np.zeros((9, 2, 3)), np.zeros(9), np.zeros((9, 4)))) == 11


def test_costs_that_uploads_say_are_counted_for_participants():
    rounds, state = made("II", 2, ONE[0]), start("II", 2)
    given = Given(tables(*ONE), HYPER, ROOTS)
    zeros = jnp.zeros((4, 2), jnp.uint32)
    begun = jax.jit(rounds.begin)(ROOTS, given.tables.offsets, state[0], jnp.int32(ROUND))
    parts = [jax.jit(rounds.visit, static_argnums=(0, 1))(0, 2, 0, (given, begun, state[1][0]))]
    spent = Spent(1, 12, 8, 3, 0)
    said = [(upload._replace(spent=Spent(*[jnp.full((2, 2), n) for n in spent])), m) for upload, m in parts]
    told = (state[0], (state[1][0], Spent(*[(zeros, zeros)] * 5)))
    counters = jax.jit(rounds.finish)(given, begun, told, said)[1][1]
    times = np.zeros((4, 2), int)
    for ch in range(2):
        times[np.asarray(begun.drawn.client[ch]), ch] += 1
    assert times.sum() == 4
    for (low, high), amount in zip(counters, spent):
        np.testing.assert_array_equal(low, times * amount)
        assert not np.any(high)
    assert isinstance(counters, Spent)


@dataclass(frozen=True, kw_only=True)
class Looker(Tracer):
    """Notes how many of its calls are laid side by side, each time that some are."""

    def client_update(self, hyper, local, message, memory):
        return super().client_update(hyper, local, message, beside(memory))


BESIDE = []


@jax.custom_batching.custom_vmap
def beside(x):
    return x


@beside.def_vmap
def _(axis_size, in_batched, x):
    BESIDE.append(axis_size)
    return beside(x), in_batched[0]


ALONE = [SizeClass(3, False, 4)]


@pytest.mark.parametrize(
    ("scheme", "num_chains", "classes", "how", "expected"),
    [
        ("full", 1, ALONE, {}, []),
        ("full", 2, ALONE, {}, [2]),
        ("full", 2, ALONE, {"one_by_one": True}, []),
        ("full", 1, [SizeClass(3, False, 4, 2)], {}, [2]),
        ("full", 2, [SizeClass(3, False, 4, 4)], {"one_by_one": True}, [4]),
        ("full", 3, [SizeClass(3, False, 4, 4)], {}, [3, 4]),
        ("II", 2, ALONE, {}, []),
        ("II", 1, ALONE, {"together": True}, []),
        ("II", 2, ALONE, {"together": True}, [2]),
        ("II", 2, ALONE, {"together": True, "one_by_one": True}, []),
    ],
)
def test_chains_and_clients_are_laid_side_by_side_as_the_layout_says(
    scheme, num_chains, classes, how, expected
):
    method, _ = Looker(step_size=0.05, batch_size=None).split()
    rounds = made(scheme, num_chains, classes, method=method, **how)
    given = Given(tables(classes, [0] * 4), HYPER, ROOTS)
    BESIDE.clear()
    jax.make_jaxpr(rounds.whole)(given, start(scheme, num_chains), jnp.int32(ROUND))
    assert sorted(set(BESIDE)) == expected


def test_clients_and_chains_are_apart_unless_a_layout_says_otherwise():
    assert SizeClass(3, True, 2).together == 1
    assert not Layout((), True, True, True, 1).one_by_one


@pytest.mark.parametrize(("batch_size", "times"), [(None, 1), (2, 0)])
def test_all_rows_of_a_client_are_taken_out_once_and_batches_where_they_are_used(
    monkeypatch, batch_size, times
):
    held = []
    hold = Rows.hold
    monkeypatch.setattr(Rows, "hold", lambda rows: held.append(rows) or hold(rows))
    method, _ = Tracer(step_size=0.05, batch_size=batch_size).split()
    rounds = made("full", 2, ALONE, method=method)
    given = Given(tables(ALONE, [0] * 4), HYPER, ROOTS)
    jax.make_jaxpr(rounds.whole)(given, start("full", 2), jnp.int32(ROUND))
    assert len(held) == times


@dataclass(frozen=True, kw_only=True)
class Shower(Peer):
    """Uploads the gradients of three batches, which show their rows where each has a direction of its own."""

    reveals = Reveals(("gradient", "nothing"), sums=True)

    def cost(self, dim):
        return Cost(Spent(3))

    def client_update(self, hyper, local, message, memory):
        return Upload(jnp.stack([local.grad(message, j) for j in range(3)]), jnp.zeros(())), memory

    def server_update(self, hyper, state, uploads, server):
        return state


@pytest.mark.parametrize("scheme", ["full", pytest.param("II", marks=SLOW)])
def test_numbers_of_rows_known_before_are_those_of_the_batches(scheme):
    """Of clients that have fewer rows than a batch, all."""
    model = fald.Model(lambda theta: jnp.zeros(()), lambda theta, row: theta @ row, jnp.zeros(10))
    method, _ = Shower(step_size=0.05, batch_size=2).split()
    layout = Layout((SizeClass(4, False, 4),), False, False, False, 1)
    sizes = (1, 3, 2, 4)
    offsets = jnp.asarray(np.concatenate([[0], np.cumsum(sizes)]), jnp.int32)
    rounds = Rounds(method, SCHEMES[scheme], 2, model=model, num_clients=4, layout=layout)
    given = Given(tables(*ONE)._replace(rows=jnp.eye(10), offsets=offsets), HYPER, ROOTS)
    counters = () if scheme == "full" else jnp.zeros((4, 2), jnp.uint32)
    state = jnp.zeros((2, 10)), (jnp.zeros((4, 2, 10)), counters)
    _, _, uploads, drawn = jax.jit(rounds.whole)(given, state, jnp.int32(ROUND))
    numbers = np.asarray(rounds.batches(ROOTS, offsets, jnp.int32(ROUND), 3))
    assert numbers.shape == (2, len(drawn.client[0]), 3, 2)
    shown = np.asarray(uploads.position)  # (slots, chains, steps, rows)
    for ch, slot, step in np.ndindex(numbers.shape[:3]):
        taken = set(np.flatnonzero(shown[slot, ch, step]))
        assert taken == set(numbers[ch, slot, step].tolist())
        assert len(taken) == min(2, sizes[int(drawn.client[ch, slot])])
    assert len({tuple(row) for row in numbers.reshape(-1, 2).tolist()}) > 6  # not always the same
