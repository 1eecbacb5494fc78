"""All that a client ever runs.

A client gets a message from the server, works on its own rows, and returns an upload. The rows stay
inside ``Local``; the method sees only energies and gradients.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from fald.calculus.gradients import Batch, all_rows, energy_fn, gradient_fn, random_rows
from fald.core.keys import Stream, client_key, stream_key
from fald.core.types import PyTree
from fald.problem.model import Model


class Rows(NamedTuple):
    """Where one client's rows are: the flat rows, its first row, how many, and the total of all clients."""

    flat: PyTree
    offset: jax.Array
    size: jax.Array
    total: jax.Array


class Local(NamedTuple):
    """What a method may use at one client in one round of one chain.

    Attributes
    ----------
    energy, grad
        ``(position, step) -> f̃^c`` and ``-> ∇f̃^c``; ``step`` counts within the round and addresses
        the batch.
    share, weight
        p_c, and w_c, the weight of this upload in this round's average.
    shared_key, own_key
        Noise keys: equal at all clients, and this client's own.
    first_step
        Local steps done in all rounds before this one.
    full_grad, hessian
        ``position -> ∇f^c`` and ``-> ∇²f^c`` on all rows, whatever the batch.
    prior_grad
        ``position -> −∇log π0``, which every ∇f^c contains in full.
    choice_key
        This client's key for what else a method draws, such as the rounding of a compressor.
    client, num_clients, round
        Index of this client, N, and the index of this round.
    chance
        E[w_c]; w_c/chance weighs an upload so that sums over participants are unbiased for sums over all.
    always
        Static: whether every client takes part in every round.
    """

    energy: Callable
    grad: Callable
    share: jax.Array
    weight: jax.Array
    shared_key: jax.Array
    own_key: jax.Array
    first_step: jax.Array
    full_grad: Callable
    hessian: Callable
    prior_grad: Callable
    choice_key: jax.Array
    client: jax.Array
    num_clients: int
    round: jax.Array
    chance: jax.Array
    always: bool


def local(
    model: Model,
    rows: Rows,
    chain_key: jax.Array,
    secret_key: jax.Array,
    client,
    weight,
    round_index,
    local_steps,
    batch_size: int | None,
    whole: Batch | None,
    clip_norm=None,
    *,
    all_rows_fn: Callable[[], Batch],
    num_clients: int,
    scheme: str = "full",
    full_batches: bool = False,
) -> Local:
    """Put together one client's view of one round.

    Parameters
    ----------
    model, rows
        The model and the client's rows.
    chain_key, client, round_index
        The address of this work, from which the randomness that the server may know follows.
    secret_key
        Key of the chain for what only the client may know, its own noise and its batches. The same
        as ``chain_key`` in a seeded run; from the client's own entropy in a private one.
    weight
        w_c of this round.
    local_steps
        K, to count steps across rounds.
    batch_size
        Rows per stochastic gradient, or None for all rows.
    whole
        The client's rows from ``whole_client``, when ``batch_size`` is None.
    clip_norm
        Norm to which each row's gradient is cut, or None.
    all_rows_fn
        Takes the client's rows out of the flat storage, for methods that look at all of them now and then.
    num_clients, scheme
        N, and how participants are chosen.
    full_batches
        Static: whether every client has at least ``batch_size`` rows.
    """
    energy = energy_fn(model, rows.total)
    gradient = gradient_fn(model, rows.total, clip_norm)
    batch_key = _own(secret_key, round_index, Stream.BATCH, client)

    def batch(step) -> Batch:
        if whole is not None:
            return whole
        assert batch_size is not None
        return random_rows(
            batch_key, step, rows.flat, rows.offset, rows.size, batch_size, always_full=full_batches
        )

    share = rows.size.astype(weight.dtype) / rows.total.astype(weight.dtype)
    return Local(
        energy=lambda theta, step: energy(theta, batch(step)),
        grad=lambda theta, step: gradient(theta, batch(step)),
        share=share,
        weight=weight,
        shared_key=stream_key(chain_key, round_index, Stream.SHARED_NOISE),
        own_key=_own(secret_key, round_index, Stream.CLIENT_NOISE, client),
        first_step=round_index * local_steps,
        full_grad=lambda theta: gradient(theta, all_rows_fn()),
        hessian=lambda theta: jax.hessian(energy)(theta, all_rows_fn()),
        prior_grad=jax.grad(lambda theta: -model.flat_logprior(theta)),
        choice_key=_own(secret_key, round_index, Stream.CLIENT_CHOICE, client),
        client=client,
        num_clients=num_clients,
        round=round_index,
        chance=jnp.full_like(share, 1 / num_clients) if scheme == "without-replacement" else share,
        always=scheme == "full",
    )


def client_round(
    model: Model,
    method: Any,
    hyper: Mapping[str, Any],
    rows: Rows,
    whole: Batch | None,
    keys: tuple[jax.Array, jax.Array],
    client,
    weight,
    round_index,
    message: PyTree,
    memory: PyTree,
    *,
    all_rows_fn: Callable[[], Batch],
    num_clients: int,
    scheme: str,
    full_batches: bool = False,
) -> Any:
    """What every engine runs at a client: its view of the round, then the method's part; upload and memory.

    ``keys`` are the chain's, the one the server may know and the client's own; the rest is as for ``local``.
    """
    view = local(
        model,
        rows,
        *keys,
        client,
        weight,
        round_index,
        hyper["local_steps"],
        method.about.batch_size,
        whole,
        hyper.get("clip_norm"),
        all_rows_fn=all_rows_fn,
        num_clients=num_clients,
        scheme=scheme,
        full_batches=full_batches,
    )
    return method.client_update(hyper, view, message, memory)


def _own(secret_key: jax.Array, round_index, stream: Stream, client) -> jax.Array:
    """A client's key, computed once: without the barrier every number drawn would compute it again."""
    return jax.lax.optimization_barrier(client_key(stream_key(secret_key, round_index, stream), client))


def whole_client(rows: Rows, capacity: int, exact: bool) -> Batch:
    """All rows of the client, taken out of the flat storage once per round."""
    return all_rows(rows.flat, rows.offset, rows.size, capacity, exact)
