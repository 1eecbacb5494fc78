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

from fald.core.keys import Stream, chain_key, stream_key
from fald.core.types import PyTree
from fald.langevin import costs as tally
from fald.langevin.client import Rows, client_round, whole_client
from fald.langevin.method import Method, Upload
from fald.langevin.server import Server, drift
from fald.problem.model import Model
from fald.settings.participation import Drawn, Participation, draw, num_slots

_SERVER_STREAMS = (Stream.SHARED_NOISE, Stream.SERVER_CHOICE)


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
    how many groups chains are divided, each of which runs all rounds on one thread.
    """

    classes: tuple[SizeClass, ...]
    chains_together: bool
    full_batches: bool
    apart: bool
    groups: int


class Tables(NamedTuple):
    """The clients' rows and where to find them, as arguments of the compiled function."""

    rows: PyTree
    offsets: jax.Array
    class_of: jax.Array
    members: tuple[jax.Array, ...]
    order: jax.Array


class Begun(NamedTuple):
    """A round before the clients' work: keys of each chain, participants, and what they are sent.

    ``keys`` are, of each chain, the one anybody may know, and the one of what a private run must not
    foretell: clients' noise and batches, and who takes part.
    """

    keys: tuple[jax.Array, jax.Array]
    drawn: Drawn
    messages: PyTree
    round: jax.Array


def row_numbers(rows: PyTree) -> int:
    """Numbers in one row."""
    return sum(int(np.prod(np.shape(a)[1:])) for a in jax.tree.leaves(rows))


@dataclass(frozen=True)
class Rounds:
    """The functions of one configuration; numbers that sweeps change are arguments of them."""

    model: Model
    method: Method
    participation: Participation
    num_chains: int
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

    def begin(self, tables: Tables, roots, server: PyTree, round_index, first_chain=0) -> Begun:
        """Who takes part, and what is sent to them."""
        chains = first_chain + jnp.arange(self.num_chains)
        keys = jax.tree.map(lambda root: jax.vmap(chain_key, (None, 0))(root, chains), roots)
        drawn = jax.vmap(
            lambda k: draw(
                self.participation, stream_key(k, round_index, Stream.PARTICIPATION), tables.offsets
            )
        )(keys[1])
        return Begun(keys, drawn, jax.vmap(self.method.broadcast)(server), round_index)

    def visit_class(
        self, number: int, tables: Tables, hyper, begun: Begun, memory, clients
    ) -> tuple[Upload, PyTree]:
        """Full participation: some clients of one size class, all chains of a client together."""
        size_class = self.layout.classes[number]
        prepare, update = self._work(tables, hyper, begun.round, size_class)
        over_chains = self._over_chains(update, (None, 0, None, 0, 0, 0))

        def one(client):
            own = jax.tree.map(lambda leaf: leaf[client], memory)
            weight = begun.drawn.weight[:, client]
            return over_chains(prepare(client), begun.keys, client, weight, begun.messages, own)

        together = size_class.together
        return jax.lax.map(one, clients, batch_size=together if together > 1 else None)

    def visit_slots(self, tables: Tables, hyper, begun: Begun, memory, slots) -> tuple[Upload, PyTree]:
        """Random participation: in some slots, each chain visits its own client."""
        chains = jnp.arange(self.num_chains)

        def one(chain, client, weight, size_class):
            prepare, update = self._work(tables, hyper, begun.round, size_class)
            message, keys = jax.tree.map(lambda leaf: leaf[chain], (begun.messages, begun.keys))
            own = jax.tree.map(lambda leaf: leaf[client, chain], memory)
            return update(prepare(client), keys, client, weight, message, own)

        if self.layout.chains_together:
            (size_class,) = self.layout.classes
            side_by_side = self._over_chains(functools.partial(one, size_class=size_class), (0, 0, 0))
            return jax.lax.map(
                lambda s: side_by_side(chains, begun.drawn.client[:, s], begun.drawn.weight[:, s]), slots
            )

        def visit(item):
            slot, chain = item
            client, weight = begun.drawn.client[chain, slot], begun.drawn.weight[chain, slot]
            branches = [functools.partial(one, size_class=size_class) for size_class in self.layout.classes]
            active = functools.partial(jax.lax.switch, tables.class_of[client], branches)
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
        self, tables: Tables, hyper, begun: Begun, server, memory, parts: Sequence[tuple[Upload, PyTree]]
    ) -> tuple[PyTree, PyTree, Upload]:
        """The server's part: new server state, new memory, and the uploads (slots, chains, …)."""
        drawn, (own, counters) = begun.drawn, memory
        uploads, changed = jax.tree.map(lambda *leaves: jnp.concatenate(leaves), *parts)
        # what uses the uploads must not compute them again
        uploads, changed = jax.lax.optimization_barrier((uploads, changed))
        if self.everyone:
            own = changed
            if len(self.layout.classes) > 1:
                uploads, own = jax.tree.map(lambda leaf: leaf[tables.order], (uploads, changed))
        else:
            target = jnp.where(drawn.weight > 0, drawn.client, self.num_clients).T
            chains = jnp.arange(self.num_chains)[None, :]
            own = jax.tree.map(lambda old, new: old.at[target, chains].set(new, mode="drop"), own, changed)
        counters = tally.count(counters, drawn, uploads.spent, self.num_clients)

        def update(state, own_uploads, weight, public):
            keys = [stream_key(public, begun.round, s) for s in _SERVER_STREAMS]
            view = Server(*keys, round=begun.round)
            return self.method.server_update(hyper, state, own_uploads, weight, view)

        server = jax.vmap(update, in_axes=(0, 1, 0, 0))(server, uploads, drawn.weight, begun.keys[0])
        return server, (own, counters), uploads

    def whole(self, tables: Tables, hyper, roots, server, memory, round_index, first_chain=0):
        """All three parts: server, memory, uploads and participants."""
        begun = self.begin(tables, roots, server, round_index, first_chain)
        if self.everyone:
            parts = [
                self.visit_class(number, tables, hyper, begun, memory[0], members)
                for number, members in enumerate(tables.members)
            ]
        else:
            slots = jnp.arange(self.num_slots)
            parts = [self.visit_slots(tables, hyper, begun, memory[0], slots)]
        return *self.finish(tables, hyper, begun, server, memory, parts), begun.drawn

    def record(self, server, uploads: Upload, drawn: Drawn) -> tuple[jax.Array, ...]:
        """What is kept of a round: position, energy, drift and, where it is drawn, who took part."""
        position = jax.vmap(self.method.position)(server)
        energy = jnp.sum(jnp.where(drawn.weight > 0, drawn.weight * uploads.energy.T, 0), axis=1)
        apart = jax.vmap(drift, in_axes=(1, 0, 0))(uploads.position, drawn.weight, position)
        who = () if self.everyone else (drawn.client, drawn.weight)
        return position, energy, apart, *who

    def _over_chains(self, function, in_axes):
        """``jax.vmap`` over chains; a single chain is not laid out as an array of one."""
        if self.num_chains > 1:
            return jax.vmap(function, in_axes=in_axes)

        def alone(*args):
            pairs = zip(args, in_axes)
            only = [arg if axis is None else jax.tree.map(lambda leaf: leaf[0], arg) for arg, axis in pairs]
            return jax.tree.map(lambda leaf: jnp.asarray(leaf)[None], function(*only))

        return alone

    def _work(self, tables: Tables, hyper, round_index, size_class: SizeClass) -> tuple[Any, Any]:
        """A client's round for one chain, rows taken outside so that chains can share them."""
        method = self.method

        def prepare(client):
            offset = tables.offsets[client]
            rows = Rows(tables.rows, offset, tables.offsets[client + 1] - offset, tables.offsets[-1])
            if method.about.batch_size is not None:
                return rows, None
            return rows, whole_client(rows, size_class.capacity, size_class.exact)

        def update(prepared, keys, client, weight, message, memory):
            rows, whole = prepared

            def all_rows_fn():
                return whole_client(rows, size_class.capacity, size_class.exact) if whole is None else whole

            return client_round(
                self.model,
                method,
                hyper,
                rows,
                whole,
                keys,
                client,
                weight,
                round_index,
                message,
                memory,
                all_rows_fn=all_rows_fn,
                num_clients=self.num_clients,
                scheme=self.participation.scheme,
                full_batches=self.layout.full_batches,
            )

        return prepare, update
