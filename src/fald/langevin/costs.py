"""What a run has cost each client, counted while it runs.

A method that always spends the same is counted by how often a client took part, which is nothing to count
when all always do. Otherwise uploads say what they cost, and sums are kept in two 32-bit words, because
bytes of long runs pass 2³².
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from fald.core.types import PyTree
from fald.langevin.engine import Assignment
from fald.langevin.method import Spent
from fald.settings.participation import Drawn

_WORD = 2**32


def start(problem: Assignment) -> PyTree:
    """Counters (clients, chains) of a run that has not begun; ``()`` where rounds say all."""
    zeros = jnp.zeros((problem.data.num_clients, problem.num_chains), jnp.uint32)
    if problem.method.cost(problem.model.dim).each is None:
        return Spent(*[(zeros, zeros) for _ in Spent._fields])
    return () if problem.participation.scheme == "full" else zeros


def count(tally: PyTree, drawn: Drawn, spent: Any, num_clients: int) -> PyTree:
    """Add one round: ``spent`` (slots, chains) of the uploads, or 1 for every participant."""
    if not isinstance(tally, Spent):
        if isinstance(tally, tuple):
            return tally
        return tally.at[_places(drawn, num_clients)].add(1, mode="drop")
    each = Spent(*[jnp.broadcast_to(jnp.asarray(part), drawn.client.T.shape) for part in spent])
    return Spent(*[_add(sums, part, drawn, num_clients) for sums, part in zip(tally, each)])


def _add(sums: tuple[jax.Array, jax.Array], amount: jax.Array, drawn: Drawn, num_clients: int):
    low, high = sums
    place = _places(drawn, num_clients)
    before = low.at[place].get(mode="fill", fill_value=0)
    after = before + amount.astype(jnp.uint32)
    carry = (after < before).astype(jnp.uint32)
    return low.at[place].set(after, mode="drop"), high.at[place].add(carry, mode="drop")


def _places(drawn: Drawn, num_clients: int) -> tuple[jax.Array, jax.Array]:
    """(slots, chains) clients, out of range for empty slots, and chains: only participants are touched."""
    target = jnp.where(drawn.weight > 0, drawn.client, num_clients).T
    return target, jnp.broadcast_to(jnp.arange(target.shape[1]), target.shape)


def totals(problem: Assignment, tally: PyTree, rounds: int) -> dict[str, np.ndarray]:
    """Costs of a run: (chains, clients) per client, and ``rounds`` (chains,) that the server waited for.

    ``gradients`` counts evaluations, ``row_gradients`` the rows in them.
    """
    method, data, dim = problem.method, problem.data, problem.model.dim
    shape = (problem.num_chains, data.num_clients)
    fixed, setup = method.cost(dim)
    if fixed is None:
        spent = Spent(*[_whole(sums) for sums in tally])
    else:
        all_present = isinstance(tally, tuple)
        times = np.full(shape, rounds, np.int64) if all_present else np.asarray(tally, np.int64).T
        spent = Spent(*[times * part for part in fixed])
    waited = spent.exchanges.max(1) if problem.participation.scheme == "full" else np.full(shape[0], rounds)
    spent = Spent(*[sums + part for sums, part in zip(spent, setup)])
    sizes = np.asarray(data.sizes, np.int64)
    rows = method.about.batch_size
    batch = sizes if rows is None else np.minimum(sizes, rows)
    return {
        "rounds": waited + setup.exchanges,
        "bytes_up": spent.bytes_up,
        "bytes_down": spent.bytes_down,
        "gradients": spent.batch_gradients + spent.full_gradients,
        "row_gradients": spent.batch_gradients * batch + spent.full_gradients * sizes,
    }


def _whole(sums: tuple[jax.Array, jax.Array]) -> np.ndarray:
    low, high = (np.asarray(part, np.int64) for part in sums)
    return (low + _WORD * high).T
