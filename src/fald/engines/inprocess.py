"""All clients in one process, compiled by JAX.

One compiled function runs any number of rounds. Clients are visited one after the other, each with
all chains at once, because one client's rows fit the cache and all clients' rows do not; matrix
products use all cores. Clients that are not drawn are not touched. Rows are passed in as they are
stored, so memory does not grow with the number of clients.
"""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from fald.client import Rows, local, whole_client
from fald.data import FederatedData
from fald.engines import tally
from fald.engines.base import Failure, Problem, Records, RunState
from fald.errors import ConfigError
from fald.gradients import Split
from fald.keys import Stream, chain_key, stream_key
from fald.models.base import Model
from fald.participation import Participation, draw, num_slots
from fald.samplers.base import Method
from fald.server import Server, drift
from fald.types import PyTree, float_dtype

_MAX_SIZE_CLASSES = 8
_DRAW_BYTES = 64 * 2**20
_MOST_DRAWS = 4096
_GATHER_BYTES = 16 * 2**20
_WORK_AT_ONCE = 2**15
_IN_PLACE_BYTES = 64 * 2**20
_BOUNDARY = 64
_SERVER_STREAMS = (Stream.SHARED_NOISE, Stream.SERVER_CHOICE)


class SizeClass(NamedTuple):
    """Clients whose rows are handled in arrays of one static length."""

    capacity: int
    exact: bool
    members: int


class Layout(NamedTuple):
    """Static shape of the work: size classes, and how chains are laid out under random participation."""

    classes: tuple[SizeClass, ...]
    chains_together: bool


class Tables(NamedTuple):
    """The clients' rows and where to find them, as arguments of the compiled function."""

    rows: PyTree
    offsets: jax.Array
    class_of: jax.Array
    members: tuple[jax.Array, ...]
    order: jax.Array


def size_classes(
    sizes: np.ndarray, capacities: tuple[int, ...] | None = None
) -> tuple[np.ndarray, list[SizeClass]]:
    """Sort clients into at most eight classes of similar size.

    Few distinct sizes get a class each, without any padding; otherwise capacities grow
    geometrically, so that padding costs work, never storage.
    """
    distinct = np.unique(sizes)
    if capacities is not None:
        ends = np.sort(capacities)
        if ends[-1] < distinct[-1]:
            raise ConfigError(
                f"capacities must reach the largest client, of {distinct[-1]} rows; got {ends[-1]}"
            )
    elif len(distinct) <= _MAX_SIZE_CLASSES:
        ends = distinct
    else:
        grid = np.ceil(np.geomspace(distinct[0], distinct[-1], _MAX_SIZE_CLASSES + 1)[1:])
        ends = np.unique([distinct[distinct <= g].max() for g in [*grid, distinct[-1]]])
    # a class without members could not be traced: its slices may be longer than the data
    ends = ends[np.unique(np.searchsorted(ends, distinct))]
    class_of = np.searchsorted(ends, sizes)
    classes = [
        SizeClass(int(end), bool(np.all(sizes[class_of == k] == end)), int(np.sum(class_of == k)))
        for k, end in enumerate(ends)
    ]
    return class_of, classes


class InProcess:
    """The engine for simulation and for data that already lies in one place.

    Parameters
    ----------
    capacities
        Row capacities of the size classes, ascending, the last at least the largest client; chosen
        from the sizes when None. Results do not depend on it beyond rounding.
    """

    def __init__(self, *, capacities: tuple[int, ...] | None = None):
        self.capacities = capacities
        self._prepared: tuple[Problem, Tables, Layout, Any] | None = None

    def init(self, problem: Problem, positions: jax.Array) -> RunState:
        """State of chains that start at ``positions`` (chains, dim)."""
        server = jax.vmap(problem.method.init_server)(positions)
        memory = jax.vmap(problem.method.init_client)(positions)
        memory = jax.tree.map(
            lambda leaf: jnp.broadcast_to(leaf, (problem.data.num_clients, *leaf.shape)), memory
        )
        counters = tally.start(
            problem.method,
            problem.participation,
            problem.model.dim,
            problem.data.num_clients,
            problem.num_chains,
        )
        return RunState(0, server, (memory, counters))

    def costs(self, problem: Problem, state: RunState) -> dict[str, np.ndarray]:
        """What the rounds so far have cost each client of each chain."""
        return tally.totals(problem, state.memory[1], state.round)

    def most_rounds(self, problem: Problem, state: RunState) -> int:
        """Rounds until the draw buffer of one call is full."""
        capacity = _draw_capacity(problem)
        full = problem.num_kept(state.round) + capacity
        return max(1, problem.num_warmup + full * problem.thinning - state.round)

    def advance(self, problem: Problem, state: RunState, num_rounds: int) -> tuple[RunState, Records, float]:
        """Run rounds in one compiled call."""
        tables, compiled, hyper, roots = self._prepare(problem)
        server, memory, buffers, energy = compiled.run(
            tables,
            hyper,
            roots,
            state.server,
            state.memory,
            jnp.asarray(state.round, jnp.int32),
            jnp.asarray(num_rounds, jnp.int32),
            jnp.asarray(problem.num_warmup, jnp.int32),
            jnp.asarray(problem.thinning, jnp.int32),
        )
        end = state.round + num_rounds
        first, last = problem.num_kept(state.round), problem.num_kept(end)
        kept = last - first
        rounds = problem.num_warmup + problem.thinning * np.arange(first + 1, last + 1)
        records = Records(rounds, *[np.asarray(b[:kept]) for b in buffers])
        return RunState(end, server, memory), records, float(energy)

    def locate(self, problem: Problem, state: RunState, num_rounds: int) -> Failure:
        """Replay round by round until something is not finite."""
        tables, compiled, hyper, roots = self._prepare(problem)
        server, memory = state.server, state.memory
        for r in range(state.round, state.round + num_rounds):
            server, memory, uploads, drawn = compiled.one_round(
                tables, hyper, roots, server, memory, jnp.asarray(r, jnp.int32)
            )
            betas = np.asarray(uploads.position)
            weights = np.asarray(drawn.weight)
            bad = ~np.isfinite(betas) & (weights > 0).T[:, :, None]
            if bad.any():
                slot, chain, parameter = (int(i) for i in np.argwhere(bad)[0])
                return Failure(r + 1, chain, int(np.asarray(drawn.client)[chain, slot]), parameter)
            thetas = np.asarray(jax.vmap(problem.method.position)(server))
            if not np.all(np.isfinite(thetas)):
                chain, parameter = (int(i) for i in np.argwhere(~np.isfinite(thetas))[0])
                return Failure(r + 1, chain, None, parameter)
        raise AssertionError("the replay of a non-finite chunk stayed finite")

    def _prepare(self, problem: Problem):
        if self._prepared is None or self._prepared[0] is not problem:
            tables, layout = _layout(problem, self.capacities)
            compiled = _compile(
                problem.model,
                problem.method.skeleton(),
                problem.participation,
                problem.num_chains,
                problem.data.num_clients,
                layout,
                _draw_capacity(problem),
                str(float_dtype()),
            )
            self._prepared = (problem, tables, layout, compiled)
        _, tables, _, compiled = self._prepared
        secret = problem.rng_key if problem.secret_key is None else problem.secret_key
        return tables, compiled, problem.method.traced(), (problem.rng_key, secret)


def _draw_capacity(problem: Problem) -> int:
    slots = num_slots(problem.participation, problem.data.num_clients)
    numbers = problem.num_chains * (problem.model.dim + 1 + 3 * slots)
    return int(np.clip(_DRAW_BYTES // (numbers * float_dtype().itemsize), 1, _MOST_DRAWS))


def row_numbers(rows: PyTree) -> int:
    """Numbers in one row."""
    return sum(int(np.prod(np.shape(a)[1:])) for a in jax.tree.leaves(rows))


def _row_bytes(data: FederatedData) -> int:
    return row_numbers(data.rows) * float_dtype().itemsize


def _as_device(array: Any) -> jax.Array | Split:
    """Move rows to JAX; float rows get the run's type, everything else stays as stored.

    Large arrays are read in place where their layout allows it, so the caller's array must not
    change during a run.
    """
    array = np.asarray(array)
    if array.dtype.kind == "b":
        array = array.view(np.uint8)
    wanted = float_dtype() if array.dtype.kind == "f" else jax.dtypes.canonicalize_dtype(array.dtype)
    array = np.ascontiguousarray(array, wanted)
    head = _rows_before_boundary(array) if array.nbytes >= _IN_PLACE_BYTES else 0
    if head == 0:
        return jax.device_put(array)
    return Split(jax.device_put(array[:head]), jax.device_put(array[head:]))


def _rows_before_boundary(array: np.ndarray) -> int:
    """Rows until the first that starts at an address JAX can read in place; 0 if none does."""
    starts = array.ctypes.data + array.strides[0] * np.arange(min(_BOUNDARY, len(array)))
    return int(np.argmax(starts % _BOUNDARY == 0))


def _layout(problem: Problem, capacities: tuple[int, ...] | None) -> tuple[Tables, Layout]:
    data, method = problem.data, problem.method
    sizes = data.sizes
    random = problem.participation.scheme != "full"
    batches_only = method.batch_size is not None and not method.needs_all_rows
    if batches_only:
        assert method.batch_size is not None
        rows_at_once = min(method.batch_size, int(sizes.max()))
        class_of, classes = np.zeros(len(sizes), int), [SizeClass(0, False, len(sizes))]
    else:
        rows_at_once = int(sizes.max())
        class_of, classes = size_classes(sizes, capacities)
    together = problem.num_chains * rows_at_once * _row_bytes(data) <= _GATHER_BYTES
    if random and together and not batches_only:
        # chains at different clients side by side need one common length
        cap = int(sizes.max())
        class_of, classes = (
            np.zeros(len(sizes), int),
            [SizeClass(cap, bool(np.all(sizes == cap)), len(sizes))],
        )
    members = tuple(np.flatnonzero(class_of == k).astype(np.int32) for k in range(len(classes)))
    tables = Tables(
        rows=jax.tree.map(_as_device, data.rows),
        offsets=jnp.asarray(data.offsets, jnp.int32),
        class_of=jnp.asarray(class_of, jnp.int32),
        members=tuple(jnp.asarray(m) for m in members),
        order=jnp.asarray(np.argsort(np.concatenate(members)), jnp.int32),
    )
    return tables, Layout(tuple(classes), together)


class _Compiled(NamedTuple):
    run: Any
    one_round: Any


@functools.lru_cache(maxsize=64)
def _compile(
    model: Model,
    method: Method,
    participation: Participation,
    num_chains: int,
    num_clients: int,
    layout: Layout,
    capacity: int,
    dtype: str,
) -> _Compiled:
    """Build the compiled functions of one configuration; numbers that sweeps change are arguments."""
    slots = num_slots(participation, num_clients)

    def rows_of(tables: Tables, client) -> Rows:
        offset = tables.offsets[client]
        return Rows(tables.rows, offset, tables.offsets[client + 1] - offset, tables.offsets[-1])

    def work(tables, hyper, round_index, size_class: SizeClass):
        """A client's round for one chain, rows taken outside so that chains can share them."""

        def prepare(client):
            rows = rows_of(tables, client)
            if method.batch_size is not None:
                return rows, None
            return rows, whole_client(rows, size_class.capacity, size_class.exact)

        def update(prepared, keys, client, weight, message, memory):
            rows, whole = prepared
            public, secret = keys

            def all_rows_fn():
                return whole_client(rows, size_class.capacity, size_class.exact) if whole is None else whole

            view = local(
                model,
                rows,
                public,
                secret,
                client,
                weight,
                round_index,
                hyper["local_steps"],
                method.batch_size,
                whole,
                hyper.get("clip_norm"),
                all_rows_fn=all_rows_fn,
                num_clients=num_clients,
                scheme=participation.scheme,
            )
            return method.client_update(hyper, view, message, memory)

        return prepare, update

    def everyone(tables, hyper, keys, round_index, drawn, messages, memory):
        """Full participation: client after client, all chains of a client together."""
        parts = []
        for size_class, members in zip(layout.classes, tables.members):
            prepare, update = work(tables, hyper, round_index, size_class)

            def one(client, prepare=prepare, update=update):
                own = jax.tree.map(lambda leaf: leaf[client], memory)
                together = jax.vmap(update, in_axes=(None, 0, None, 0, 0, 0))
                return together(prepare(client), keys, client, drawn.weight[:, client], messages, own)

            # small clients side by side: one call for each would cost more than its work
            numbers = num_chains * (max(size_class.capacity, 1) * row_numbers(tables.rows) + model.dim)
            together = min(size_class.members, max(1, _WORK_AT_ONCE // numbers))
            parts.append(jax.lax.map(one, members, batch_size=together if together > 1 else None))
        return jax.tree.map(lambda *leaves: jnp.concatenate(leaves)[tables.order], *parts)

    def drawn_only(tables, hyper, keys, round_index, drawn, messages, memory):
        """Random participation: each chain visits its own clients, slot after slot."""
        chains = jnp.arange(num_chains)

        def own_memory(chain, client):
            return jax.tree.map(lambda leaf: leaf[client, chain], memory)

        def one(chain, client, weight, size_class):
            prepare, update = work(tables, hyper, round_index, size_class)
            message = jax.tree.map(lambda leaf: leaf[chain], messages)
            own_keys = jax.tree.map(lambda leaf: leaf[chain], keys)
            return update(prepare(client), own_keys, client, weight, message, own_memory(chain, client))

        if layout.chains_together:
            (size_class,) = layout.classes
            results = jax.lax.map(
                lambda s: jax.vmap(functools.partial(one, size_class=size_class))(chains, s[0], s[1]),
                (drawn.client.T, drawn.weight.T),
            )
        else:

            def visit(item):
                chain, client, weight = item
                branches = [functools.partial(one, size_class=size_class) for size_class in layout.classes]
                active = functools.partial(jax.lax.switch, tables.class_of[client], branches)
                shapes = jax.eval_shape(active, chain, client, weight)
                return jax.lax.cond(
                    weight > 0,
                    lambda: active(chain, client, weight),
                    lambda: jax.tree.map(lambda s: jnp.zeros(s.shape, s.dtype), shapes),
                )

            flat = (jnp.tile(chains, slots), drawn.client.T.ravel(), drawn.weight.T.ravel())
            results = jax.lax.map(visit, flat)
            results = jax.tree.map(lambda a: a.reshape(slots, num_chains, *a.shape[1:]), results)
        uploads, changed = results
        target = jnp.where(drawn.weight > 0, drawn.client, num_clients).T
        memory = jax.tree.map(
            lambda old, new: old.at[target, chains[None, :]].set(new, mode="drop"), memory, changed
        )
        return uploads, memory

    def one_round(tables, hyper, roots, server, memory, round_index):
        # of each chain: the key anybody may know, and the one of what a private run must not foretell:
        # clients' noise and batches, and who takes part
        keys = jax.tree.map(lambda root: jax.vmap(chain_key, (None, 0))(root, jnp.arange(num_chains)), roots)
        drawn = jax.vmap(
            lambda k: draw(participation, stream_key(k, round_index, Stream.PARTICIPATION), tables.offsets)
        )(keys[1])
        messages = jax.vmap(method.broadcast)(server)
        visit = everyone if participation.scheme == "full" else drawn_only
        memory, counters = memory
        uploads, memory = visit(tables, hyper, keys, round_index, drawn, messages, memory)
        counters = tally.count(counters, drawn, uploads.spent, num_clients)

        def update(state, own_uploads, weight, public):
            view = Server(*[stream_key(public, round_index, s) for s in _SERVER_STREAMS], round=round_index)
            return method.server_update(hyper, state, own_uploads, weight, view)

        server = jax.vmap(update, in_axes=(0, 1, 0, 0))(server, uploads, drawn.weight, keys[0])
        return server, (memory, counters), uploads, drawn

    def run(tables, hyper, roots, server, memory, first_round, num_rounds, num_warmup, thinning):
        real = jnp.dtype(dtype)
        buffers = (
            jnp.zeros((capacity, num_chains, model.dim), real),
            jnp.zeros((capacity, num_chains), real),
            jnp.zeros((capacity, num_chains, slots), jnp.int32),
            jnp.zeros((capacity, num_chains, slots), real),
            jnp.zeros((capacity, num_chains, slots), real),
        )

        def body(i, carry):
            server, memory, buffers, kept, _ = carry
            round_index = first_round + i
            server, memory, uploads, drawn = one_round(tables, hyper, roots, server, memory, round_index)
            position = jax.vmap(method.position)(server)
            energy = jnp.sum(jnp.where(drawn.weight > 0, drawn.weight * uploads.energy.T, 0), axis=1)
            apart = jax.vmap(drift, in_axes=(1, 0, 0))(uploads.position, drawn.weight, position)
            values = (position, energy, drawn.client, drawn.weight, apart)
            # always written to the next free place, which moves on only when the draw is kept
            buffers = tuple(
                jax.lax.dynamic_update_index_in_dim(b, v.astype(b.dtype), kept, 0)
                for b, v in zip(buffers, values)
            )
            done = round_index + 1 - num_warmup
            keep = (done > 0) & (done % thinning == 0)
            return server, memory, buffers, kept + keep.astype(jnp.int32), jnp.mean(energy)

        start = (server, memory, buffers, jnp.zeros((), jnp.int32), jnp.zeros((), real))
        server, memory, buffers, _, energy = jax.lax.fori_loop(0, num_rounds, body, start)
        return server, memory, buffers, energy

    return _Compiled(jax.jit(run), jax.jit(one_round))
