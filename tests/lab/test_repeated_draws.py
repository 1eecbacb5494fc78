"""Methods with memory, where a client is drawn several times: the server knows the sum of what clients keep.

A client that is drawn twice in a round works once and enters with twice the weight; its memory moves once.
"""

from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from fald.lab.methods.qlsd_plus import qlsd_plus
from fald.lab.methods.scaffold import scaffold
from fald.langevin.compressors import Compressor, top_k
from fald.langevin.method import Upload
from fald.langevin.server import Server

SHARES = np.array([0.1, 0.2, 0.7])
CENTRES = jnp.array([[1.0, 0.0], [-2.0, 3.0], [0.5, 0.5]])
CURVATURES = jnp.array([[1.0, 2.0], [3.0, 0.5], [1.0, 1.0]])
KEYS = [jax.random.key_data(jax.random.key(i)) for i in range(4)]
# (client, weight) of every slot: once, twice and thrice of three, and slots left empty by that
ROUNDS = [
    [(0, 1 / 3), (1, 1 / 3), (2, 1 / 3)],
    [(2, 1.0), (2, 0.0), (2, 0.0)],
    [(1, 2 / 3), (1, 0.0), (2, 1 / 3)],
    [(0, 2 / 3), (0, 0.0), (1, 1 / 3)],
]


@pytest.fixture(autouse=True)
def by_hand():
    with jax.disable_jit():
        yield


class Client:
    """A quadratic energy, as a method sees it in one round."""

    def __new__(cls, c, weight):
        def grad(theta, k=0):
            return CURVATURES[c] * (theta - CENTRES[c])

        given = {
            "grad": grad, "full_grad": grad, "energy": lambda theta, k: jnp.zeros(()), "share": SHARES[c],
            "chance": SHARES[c], "weight": weight, "shared_key": KEYS[0], "own_key": KEYS[1],
            "choice_key": KEYS[2], "first_step": 0, "round": jnp.asarray(0), "always": False,
        }  # fmt: skip
        client = SimpleNamespace(**given)
        client._replace = lambda **changes: SimpleNamespace(**{**given, **changes})
        return client


def play(method, rounds=ROUNDS):
    """Rounds by hand: states of the server and memories of the clients, one after the other."""
    skeleton, hyper = method.split()
    state, empty = method.init(jnp.array([0.3, -0.4]))
    memories = [empty] * 3
    for slots in rounds:
        uploads, before, known = [], state, list(memories)
        for c, weight in slots:
            upload, memory = skeleton.client_update(
                hyper, Client(c, weight), skeleton.broadcast(state), memories[c]
            )
            if weight == 0:  # an empty slot may hold anything finite
                upload = jax.tree.map(lambda leaf: leaf + 77.0, upload)
            else:
                known[c] = memory
            uploads.append(upload)
        stacked = jax.tree.map(lambda *leaves: jnp.stack([jnp.asarray(leaf) for leaf in leaves]), *uploads)
        weights = jnp.array([weight for _, weight in slots])
        server = Server(KEYS[3], KEYS[2], jnp.asarray(0), weights)
        state = skeleton.server_update(hyper, state, Upload(*stacked), server)
        yield before, state, memories, known, stacked, weights, hyper
        memories = known


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_the_control_of_scaffold_is_that_of_all_clients(temperature):
    method = scaffold(local_steps=3, step_size=0.05, temperature=temperature)
    for (before, after, old, new, uploads, weights, _), slots in zip(play(method), ROUNDS):
        wanted = sum(p * h for p, h in zip(SHARES, new))
        np.testing.assert_allclose(after.control, wanted, rtol=1e-4, atol=1e-5)
        np.testing.assert_allclose(after.position, weights @ uploads.position, rtol=1e-5)
        for slot, (c, weight) in enumerate(slots):
            if weight > 0:  # h_c: the mean gradient of its steps, which h̄ − h_c has corrected
                moved = (before.position - uploads.position[slot]) / (3 * 0.05)
                np.testing.assert_allclose(new[c], old[c] + moved - before.control, rtol=1e-4, atol=1e-5)
    # the twin: memories counted by how often their client was drawn do not add up
    *_, (_, after, _, new, _, _, _) = play(method, ROUNDS[:3])
    wrong = sum(p * h for p, h in zip([0.1, 0.4, 0.7], new))
    assert np.max(np.abs(np.asarray(after.control) - wrong)) > 1e-2


@pytest.mark.parametrize("compressor", [Compressor(), top_k(0.5)], ids=["all", "half"])
def test_the_memory_of_qlsd_plus_is_that_of_all_clients(compressor):
    method = qlsd_plus(step_size=0.05, temperature=0.0, compressor=compressor)
    for before, after, old, new, uploads, weights, _ in play(method):
        wanted = sum(p * m.memory for p, m in zip(SHARES, new))
        np.testing.assert_allclose(after.memory, wanted, rtol=1e-4, atol=1e-6)
        news, learned = uploads.extra
        step = before.memory + sum(w * n for w, n in zip(weights, news))
        np.testing.assert_allclose(after.position, before.position - 0.05 * step, rtol=1e-5)
        assert learned.shape == news.shape
        if compressor == Compressor():
            # nothing is lost: memories of those who took part are their gradients at the broadcast position
            for c in range(3):
                if new[c] is not old[c]:
                    gradient = CURVATURES[c] * (before.position - CENTRES[c])
                    np.testing.assert_allclose(new[c].memory, gradient, rtol=1e-4, atol=1e-5)


def test_qlsd_plus_without_compression_steps_along_the_weighted_gradients():
    """Σ_c E[w_c] m_c + Σ_s w_s (g_s − m_s): unbiased whatever the memories are."""
    method = qlsd_plus(step_size=0.05, temperature=0.0, compressor=Compressor())
    for (before, after, old, _, _, weights, _), slots in zip(play(method), ROUNDS):
        step = sum(p * m.memory for p, m in zip(SHARES, old))
        for (c, _), w in zip(slots, weights):
            step = step + w * (CURVATURES[c] * (before.position - CENTRES[c]) - old[c].memory)
        np.testing.assert_allclose(after.position, before.position - 0.05 * step, rtol=1e-4)
