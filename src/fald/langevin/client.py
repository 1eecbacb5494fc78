"""All that a client ever runs.

A client gets a message from the server, works on its own rows, and returns an upload. The rows stay
inside ``Local``; the method sees only energies and gradients.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from fald.calculus.gradients import Rows, energy_fn, gradient_fn
from fald.core.keys import Stream, client_key, fold, stream_key
from fald.core.types import PyTree
from fald.problem.model import Model


class Local(NamedTuple):
    """What a method may use at one client in one round of one chain."""

    energy: Callable  # (position, step) -> f̃^c; the step counts within the round and addresses the batch
    grad: Callable  # (position, step) -> ∇f̃^c
    share: jax.Array  # p_c
    weight: jax.Array  # w_c, of this upload in this round's average
    shared_key: jax.Array  # of noise that is equal at all clients
    own_key: jax.Array  # of this client's own noise
    first_step: jax.Array  # local steps done in all rounds before this one
    full_grad: Callable  # position -> ∇f^c on all rows, whatever the batch
    hessian: Callable  # position -> ∇²f^c on all rows
    prior_grad: Callable  # position -> −∇log π0, which every ∇f^c contains in full
    choice_key: jax.Array  # of what else a method draws here, such as the rounding of a compressor
    client: jax.Array  # index of this client
    num_clients: int  # N
    round: jax.Array  # index of this round
    chance: jax.Array  # E[w_c]: weighed by w_c/chance, sums over participants are unbiased for sums over all
    always: bool  # static: whether every client takes part in every round


class Setup(NamedTuple):
    """What is the same at all clients and in all rounds, and static.

    ``scheme`` says who takes part, ``full_batches`` says that no client has fewer rows than a batch.
    """

    model: Model
    method: Any
    num_clients: int
    scheme: str
    full_batches: bool = False


class Visit(NamedTuple):
    """The address of a client's work, from which its randomness follows, and w_c of this round.

    ``keys`` are the chain's: one that the server may know, and one of what only the client may know, its own
    noise and its batches. They are the same in a seeded run; the second comes from the client's own entropy
    in a private one.
    """

    keys: tuple[jax.Array, jax.Array]
    client: Any
    weight: jax.Array
    round: Any


def own_key(visit: Visit, stream: Stream) -> jax.Array:
    """The key of what only the client may know."""
    return client_key(stream_key(visit.keys[1], visit.round, stream), visit.client)


def client_round(
    setup: Setup, hyper: Mapping[str, Any], rows: Rows, visit: Visit, *, message: PyTree, memory: PyTree
) -> Any:
    """What every engine runs at a client: its view of the round, then the method's part of it."""
    model, method = setup.model, setup.method
    energy, gradient = energy_fn(model, rows.total), gradient_fn(model, rows.total, hyper.get("clip_norm"))
    batch_size = method.about.batch_size

    def once(stream: Stream) -> jax.Array:
        # without the barrier every number drawn would compute the key again
        return jax.lax.optimization_barrier(own_key(visit, stream))

    batch_key = once(Stream.BATCH)
    model_key = once(Stream.MODEL) if model.takes_key else None

    def batch(step):
        if batch_size is None:
            taken = rows.all()
        else:
            taken = rows.some(batch_key, step, batch_size, always_full=setup.full_batches)
        return taken if model_key is None else taken._replace(key=fold(model_key, step, 0))

    share = rows.size.astype(visit.weight.dtype) / rows.total.astype(visit.weight.dtype)
    view = Local(
        energy=lambda theta, step: energy(theta, batch(step)),
        grad=lambda theta, step: gradient(theta, batch(step)),
        share=share,
        weight=visit.weight,
        shared_key=stream_key(visit.keys[0], visit.round, Stream.SHARED_NOISE),
        own_key=once(Stream.CLIENT_NOISE),
        first_step=visit.round * hyper["local_steps"],
        full_grad=lambda theta: gradient(theta, rows.all()),
        hessian=lambda theta: jax.hessian(energy)(theta, rows.all()),
        prior_grad=jax.grad(lambda theta: -model.flat_logprior(theta)),
        choice_key=once(Stream.CLIENT_CHOICE),
        client=visit.client,
        num_clients=setup.num_clients,
        round=visit.round,
        chance=jnp.full_like(share, 1 / setup.num_clients)
        if setup.scheme == "without-replacement"
        else share,
        always=setup.scheme == "full",
    )
    return method.client_update(hyper, view, message, memory)
