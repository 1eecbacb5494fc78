"""One round of all chains, as functions for a compiler.

A round has three parts: ``begin`` draws who takes part and what is sent, ``visit`` does the clients'
work, ``finish`` is the server's. The engine compiles all three into one program, or ``visit`` apart, to
run it on several threads. Either way the arithmetic of a client is the same.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from fald.calculus.gradients import Fetched, Rows
from fald.core.keys import Stream, chain_key, stream_key
from fald.core.types import PyTree
from fald.langevin import costs as tally
from fald.langevin.client import Setup, Visit, client_round, own_key
from fald.langevin.method import Method, Upload
from fald.langevin.server import Server, drift
from fald.problem.model import Model
from fald.settings.participation import Drawn, Participation, draw, num_slots


class SizeClass(NamedTuple):
    """Clients whose rows are handled in arrays of one static length; ``together``: how many at once."""

    capacity: int
    exact: bool
    members: int
    together: int = 1


class Layout(NamedTuple):
    """Static shape of the work.

    ``chains_together`` lays chains side by side under random participation; ``full_batches`` says that
    no client has fewer rows than a batch; ``apart`` that clients are visited on threads; ``groups`` into
    how many groups chains are divided, each of which runs all rounds on one thread; ``one_by_one`` that
    chains and clients are never laid side by side, as convolutions with several kernels at once are slow.
    """

    classes: tuple[SizeClass, ...]
    chains_together: bool
    full_batches: bool
    apart: bool
    groups: int
    one_by_one: bool = False


class Tables(NamedTuple):
    """The clients' rows and where to find them, as arguments of the compiled function."""

    rows: PyTree
    offsets: jax.Array
    class_of: jax.Array
    members: tuple[jax.Array, ...]
    order: jax.Array


class Given(NamedTuple):
    """What all rounds of a run are given: rows, the method's numbers, and the roots of all keys.

    ``roots`` are the one that anybody may know, and the one of what nobody may predict in a private run:
    clients' noise and batches, and who takes part.
    """

    tables: Tables
    hyper: Any
    roots: tuple[jax.Array, jax.Array]


class Begun(NamedTuple):
    """A round before the clients' work: both keys of each chain, participants, and what they are sent."""

    keys: tuple[jax.Array, jax.Array]
    drawn: Drawn
    messages: PyTree
    round: jax.Array


def row_numbers(rows: PyTree) -> int:
    """Numbers in one row."""
    return sum(int(np.prod(np.shape(a)[1:])) for a in jax.tree.leaves(rows))


@dataclass(frozen=True)
class ServerRounds:
    """The server's part in rounds of all chains, wherever the clients are."""

    method: Method
    participation: Participation
    num_chains: int

    def begin(self, roots, offsets: jax.Array, server: PyTree, round_index, *, first_chain=0) -> Begun:
        """Who takes part, and what is sent to them."""
        keys, drawn = self.drawn(roots, offsets, round_index, first_chain)
        return Begun(keys, drawn, jax.vmap(self.method.broadcast)(server), round_index)

    def drawn(self, roots, offsets: jax.Array, round_index, first_chain=0) -> tuple[Any, Drawn]:
        """Both keys of each chain, and who takes part; what the chains have come to has no say."""
        chains = first_chain + jnp.arange(self.num_chains)
        keys = jax.tree.map(lambda root: jax.vmap(chain_key, (None, 0))(root, chains), roots)
        drawn = jax.vmap(
            lambda k: draw(self.participation, stream_key(k, round_index, Stream.PARTICIPATION), offsets)
        )(keys[1])
        return keys, drawn

    def update(self, hyper, begun: Begun, server: PyTree, uploads: Upload) -> PyTree:
        """New server state from the uploads (slots, chains, …)."""

        def one(state, own_uploads, weight, public):
            view = Server.at(public, begun.round, weight)
            return self.method.server_update(hyper, state, own_uploads, view)

        return jax.vmap(one, in_axes=(0, 1, 0, 0))(server, uploads, begun.drawn.weight, begun.keys[0])

    def record(self, server: PyTree, uploads: Upload, weights: jax.Array) -> tuple[jax.Array, ...]:
        """What is kept of a round: position, energy, and how far each client ended from the average."""
        position = jax.vmap(self.method.position)(server)
        energy = jnp.sum(jnp.where(weights > 0, weights * uploads.energy.T, 0), axis=1)
        return position, energy, jax.vmap(drift, in_axes=(1, 0, 0))(uploads.position, weights, position)


@dataclass(frozen=True)
class Rounds(ServerRounds):
    """Whole rounds of one configuration; numbers that sweeps change are arguments of its functions."""

    model: Model
    num_clients: int
    layout: Layout

    @property
    def num_slots(self) -> int:
        """Most clients that take part in a round."""
        return num_slots(self.participation, self.num_clients)

    @property
    def everyone(self) -> bool:
        """Whether all clients take part in every round."""
        return self.participation.scheme == "full"

    def batches(self, roots, offsets: jax.Array, round_index, steps: int) -> jax.Array:
        """Numbers of the rows in all batches of a round (chains, slots, steps, batch), known before it."""
        keys, drawn = self.drawn(roots, offsets, round_index)
        batch_size = self.method.about.batch_size
        assert batch_size is not None

        def one(own, client, step):
            offset = offsets[client]
            rows = Rows(Fetched(offsets, ()), offset, offsets[client + 1] - offset, offsets[-1])
            key = own_key(Visit(own, client, drawn.weight, round_index), Stream.BATCH)
            return offset + jnp.minimum(rows.chosen(key, step, batch_size), rows.size - 1)

        of_client = jax.vmap(one, (None, None, 0))
        of_chain = jax.vmap(of_client, (None, 0, None))
        return jax.vmap(of_chain, (0, 0, None))(keys, drawn.client, jnp.arange(steps))

    def whole(self, given: Given, state: tuple[PyTree, PyTree], round_index, *, first_chain=0):
        """All three parts: server and memory, uploads and participants."""
        server, memory = state
        begun = self.begin(given.roots, given.tables.offsets, server, round_index, first_chain=first_chain)
        work = (given, begun, memory[0])
        if self.everyone:
            members = enumerate(given.tables.members)
            parts = [self._visit_class(number, clients, work) for number, clients in members]
        else:
            parts = [self._visit_slots(jnp.arange(self.num_slots), work)]
        return *self.finish(given, begun, state, parts), begun.drawn

    def visit(
        self, number: int, size: int, start, work: tuple[Given, Begun, PyTree]
    ) -> tuple[Upload, PyTree]:
        """Visit ``size`` members of a size class, or slots, from ``start`` on."""
        if not self.everyone:
            return self._visit_slots(start + jnp.arange(size), work)
        members = work[0].tables.members[number]
        return self._visit_class(number, jax.lax.dynamic_slice_in_dim(members, start, size), work)

    def _visit_class(self, number: int, clients: jax.Array, work) -> tuple[Upload, PyTree]:
        """Full participation: some clients of one size class, all chains of a client together."""
        given, begun, memory = work
        size_class = self.layout.classes[number]

        def one(client):
            update = self._client(given, begun.round, client, size_class)
            own = jax.tree.map(lambda leaf: leaf[client], memory)
            weight = begun.drawn.weight[:, client]
            return self._over_chains(update)(begun.keys, weight, begun.messages, own)

        together = size_class.together
        return jax.lax.map(one, clients, batch_size=together if together > 1 else None)

    def _visit_slots(self, slots: jax.Array, work) -> tuple[Upload, PyTree]:
        """Random participation: in some slots, each chain visits its own client."""
        given, begun, memory = work
        chains = jnp.arange(self.num_chains)

        def one(chain, client, weight, size_class):
            update = self._client(given, begun.round, client, size_class)
            message, keys = jax.tree.map(lambda leaf: leaf[chain], (begun.messages, begun.keys))
            return update(keys, weight, message, jax.tree.map(lambda leaf: leaf[client, chain], memory))

        if self.layout.chains_together:
            (size_class,) = self.layout.classes
            side_by_side = self._over_chains(functools.partial(one, size_class=size_class))
            return jax.lax.map(
                lambda s: side_by_side(chains, begun.drawn.client[:, s], begun.drawn.weight[:, s]), slots
            )

        def visit(item):
            slot, chain = item
            client, weight = begun.drawn.client[chain, slot], begun.drawn.weight[chain, slot]
            branches = [functools.partial(one, size_class=size_class) for size_class in self.layout.classes]
            active = functools.partial(jax.lax.switch, given.tables.class_of[client], branches)
            shapes = jax.eval_shape(active, chain, client, weight)
            return jax.lax.cond(
                weight > 0,
                lambda: active(chain, client, weight),
                lambda: jax.tree.map(lambda s: jnp.zeros(s.shape, s.dtype), shapes),
            )

        count = slots.shape[0]
        results = jax.lax.map(visit, (jnp.repeat(slots, self.num_chains), jnp.tile(chains, count)))
        return jax.tree.map(lambda a: a.reshape(count, self.num_chains, *a.shape[1:]), results)

    def finish(
        self, given: Given, begun: Begun, state: tuple[PyTree, PyTree], parts: Sequence[tuple[Upload, PyTree]]
    ) -> tuple[PyTree, PyTree, Upload]:
        """The server's part: new server state, new memory, and the uploads (slots, chains, …)."""
        drawn, (server, (own, counters)) = begun.drawn, state
        uploads, changed = jax.tree.map(lambda *leaves: jnp.concatenate(leaves), *parts)
        # what uses the uploads must not compute them again
        uploads, changed = jax.lax.optimization_barrier((uploads, changed))
        if self.everyone:
            own = changed
            if len(self.layout.classes) > 1:
                uploads, own = jax.tree.map(lambda leaf: leaf[given.tables.order], (uploads, changed))
        else:
            target = jnp.where(drawn.weight > 0, drawn.client, self.num_clients).T
            chains = jnp.arange(self.num_chains)[None, :]
            own = jax.tree.map(lambda old, new: old.at[target, chains].set(new, mode="drop"), own, changed)
        counters = tally.count(counters, drawn, uploads.spent, self.num_clients)
        return self.update(given.hyper, begun, server, uploads), (own, counters), uploads

    def kept(self, server: PyTree, uploads: Upload, drawn: Drawn) -> tuple[jax.Array, ...]:
        """The record of a round and, where it is drawn, who took part."""
        who = () if self.everyone else (drawn.client, drawn.weight)
        return *self.record(server, uploads, drawn.weight), *who

    def _over_chains(self, function):
        """Over chains, side by side or one by one; a single chain is not laid out as an array of one."""
        if self.num_chains > 1 and self.layout.one_by_one:
            return lambda *args: jax.lax.map(lambda own: function(*own), args)
        if self.num_chains > 1:
            return jax.vmap(function)

        def alone(*args):
            only = jax.tree.map(lambda leaf: leaf[0], args)
            return jax.tree.map(lambda leaf: jnp.asarray(leaf)[None], function(*only))

        return alone

    def _client(self, given: Given, round_index, client, size_class: SizeClass):
        """A client's round, a function of one chain; rows are taken outside it, so that chains share them."""
        tables, batched = given.tables, self.method.about.batch_size is not None
        offset = tables.offsets[client]
        size = tables.offsets[client + 1] - offset
        rows = Rows(tables.rows, offset, size, tables.offsets[-1], size_class.capacity, size_class.exact)
        rows = rows if batched else rows.hold()
        scheme, full = self.participation.scheme, self.layout.full_batches
        setup = Setup(self.model, self.method, self.num_clients, scheme, full)

        def update(keys, weight, message, memory):
            visit = Visit(keys, client, weight, round_index)
            return client_round(setup, given.hyper, rows, visit, message=message, memory=memory)

        return update
