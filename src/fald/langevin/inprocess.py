"""All clients in one process, compiled by JAX.

Clients that are not drawn are not touched. Rows are passed in as they are stored, so memory does not
grow with the number of clients. There are two ways to lay out the work, chosen by its amount:

- Small clients: one compiled function runs any number of rounds. As many clients as make a good array
  are visited side by side, each with all chains. Where there are many chains, groups of them run on
  threads of their own, which need not wait for each other.
- Large clients: each is visited on one thread by a function that uses no other, because one client's
  batch fits the cache of a core and all clients' batches do not.

Of rows that a function reads, those of one round are there, and those of the next are being read.
"""

from __future__ import annotations

import functools
import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from fald.calculus.convolutions import convolves
from fald.calculus.gradients import Split
from fald.core.checks import check_count
from fald.core.errors import ConfigError
from fald.core.memory import give_back
from fald.core.types import float_dtype
from fald.langevin import costs as tally
from fald.langevin.engine import Assignment, Failure
from fald.langevin.method import Method
from fald.langevin.reading import Reader, row_dtype
from fald.langevin.rounds import Given, Layout, Rounds, SizeClass, Tables, row_numbers
from fald.problem.data import FederatedData
from fald.problem.model import Model
from fald.runtime.compiler import options
from fald.runtime.records import Records, RunState
from fald.settings.participation import num_slots

_MAX_SIZE_CLASSES = 8
_DRAW_BYTES = 16 * 2**20
_MOST_DRAWS = 4096
_GATHER_BYTES = 16 * 2**20
_WORK_AT_ONCE = 2**17
_WORK_ON_THREADS = 2**18
_CHAINS_OF_GROUP = 128
_PARTS = 8
_IN_PLACE_BYTES = 64 * 2**20
_BOUNDARY = 64


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
    num_threads
        Threads that visit large clients or run groups of chains; by default one for each core that this
        process may use. Results do not depend on it.
    """

    def __init__(self, *, capacities: tuple[int, ...] | None = None, num_threads: int | None = None):
        self.capacities = capacities
        self.num_threads = _cores() if num_threads is None else check_count("num-threads", num_threads, 1)
        self._prepared: tuple[Assignment, Given, _Compiled] | None = None
        self._buffers: Any = None
        self._pool: ThreadPoolExecutor | None = None
        self._reader: Reader | None = None

    def init(self, problem: Assignment, positions: jax.Array) -> RunState:
        """State of chains that start at ``positions`` (chains, dim)."""
        server, memory = jax.vmap(problem.method.init)(positions)
        clients = problem.data.num_clients
        memory = jax.tree.map(lambda leaf: jnp.broadcast_to(leaf, (clients, *leaf.shape)), memory)
        return RunState(0, server, (memory, tally.start(problem)))

    def gather(self, method: Method, model: Model, data: FederatedData) -> dict[str, Any]:
        """What the clients send before the first round."""
        return method.offer(model, data)

    def costs(self, problem: Assignment, state: RunState) -> dict[str, np.ndarray]:
        """What the rounds so far have cost each client of each chain."""
        return tally.totals(problem, state.memory[1], state.round)

    def most_rounds(self, problem: Assignment, state: RunState) -> int:
        """Rounds until the draw buffer of one call is full; one where rows are read."""
        if problem.data.read is not None:
            return 1
        full = problem.num_kept(state.round) + _draw_capacity(problem)
        return max(1, problem.round_of(full - 1) - state.round)

    def before_save(self, state: RunState) -> None:
        """Nothing: all that a run needs is in its state."""

    def advance(
        self, problem: Assignment, state: RunState, num_rounds: int
    ) -> tuple[RunState, Records, float]:
        """Run rounds: in one compiled call, or visiting clients on threads."""
        end = state.round + num_rounds
        rounds = problem.kept_rounds(problem.num_kept(state.round), problem.num_kept(end))
        _, compiled = self._prepare(problem)
        move = self._advance_apart if compiled.rounds.layout.apart else self._advance_together
        server, memory, kept, energy = move(problem, state, num_rounds, len(rounds))
        if compiled.rounds.layout.one_by_one:
            give_back()  # convolutions take large rooms, on threads of their own
        position, of_draw, drift, *who = kept
        if not who:  # the same clients with the same weights in every round
            sizes = problem.data.sizes.astype(drift.dtype)
            fixed = np.arange(len(sizes), dtype=np.int32), sizes / sizes.dtype.type(problem.data.num_rows)
            who = [np.broadcast_to(each, drift.shape) for each in fixed]
        records = Records(rounds, position, of_draw, who[0], who[1], drift)
        return RunState(end, server, memory), records, float(energy)

    def layout(self, problem: Assignment) -> str:
        """How clients' work is laid out, in words, for the record."""
        layout = self._prepare(problem)[1].rounds.layout
        clients = "clients on threads" if layout.apart else "all clients in one program"
        if not layout.one_by_one:
            return clients
        return f"{clients}; convolutions with channels last, one chain and one client at a time"

    def _advance_together(self, problem: Assignment, state: RunState, num_rounds: int, num_kept: int):
        """All rounds of a group of chains in one compiled call; the next call takes over its draw buffers."""
        given, compiled = self._given(problem, state.round), self._prepare(problem)[1]
        groups = compiled.rounds.layout.groups
        buffers, self._buffers = self._buffers or [compiled.buffers() for _ in range(groups)], None
        numbers = (state.round, num_rounds, problem.num_warmup, problem.thinning)

        def run(group: int) -> Any:
            first_chain = group * problem.num_chains // groups
            span = _Span(*[np.int32(n) for n in (*numbers, first_chain)], kept=_padded(problem.kept))
            return compiled.run(given, (state.server, state.memory), buffers[group], span)

        done = self._on_threads([functools.partial(run, group) for group in range(groups)])
        servers, memories, self._buffers, energies = zip(*done)
        server, memory = compiled.join(servers, memories) if groups > 1 else (servers[0], memories[0])
        # copies, because the next call writes into the same buffers
        kept = [np.concatenate([np.asarray(b)[:num_kept] for b in each], 1) for each in zip(*self._buffers)]
        return server, memory, kept, np.mean(energies)

    def _advance_apart(self, problem: Assignment, state: RunState, num_rounds: int, num_kept: int):
        """Each client's work on one thread; ``num_kept`` follows from the rounds."""
        given, compiled = self._prepare(problem)
        server, memory = state.server, jax.tree.map(jnp.copy, state.memory)
        rows: list[tuple[jax.Array, ...]] = []
        values: Any = ()
        begun = compiled.begin(given.roots, given.tables.offsets, server, np.int32(state.round))
        for r in range(state.round, state.round + num_rounds):
            given = self._given(problem, r)
            work = (given, begun, memory[0])
            parts = self._on_threads([functools.partial(task, work) for task in compiled.tasks()])
            # the next round begins in the same call, because threads wait for it
            server, memory, values, begun = compiled.turn(given, (begun, server), memory, parts)
            if problem.num_kept(r + 1) > problem.num_kept(r):
                rows.append(values)
        kept = [np.stack(column) for column in zip(*rows)]
        if not rows:
            kept = [np.zeros((0, *value.shape), value.dtype) for value in values]
        return server, memory, kept, np.mean(np.asarray(values[1]))

    def _on_threads(self, tasks: list[Callable[[], Any]]) -> list[Any]:
        """Do tasks that need not wait for each other; the results in the order of the tasks."""
        if len(tasks) == 1:
            return [jax.block_until_ready(tasks[0]())]
        if self._pool is None:
            self._pool = ThreadPoolExecutor(self.num_threads, thread_name_prefix="fald-client")

        double = float_dtype() == jnp.float64  # which may hold in the calling thread alone

        def run(task: Callable[[], Any]) -> Any:
            with jax.enable_x64(double):
                return jax.block_until_ready(task())

        waiting = [self._pool.submit(run, task) for task in tasks]
        try:
            return [future.result() for future in waiting]
        finally:
            for future in waiting:
                future.cancel()

    def locate(self, problem: Assignment, state: RunState, num_rounds: int) -> Failure:
        """Replay round by round until something is not finite."""
        compiled = self._prepare(problem)[1]
        server, memory = state.server, state.memory
        for r in range(state.round, state.round + num_rounds):
            given = self._given(problem, r)
            server, memory, uploads, drawn = compiled.one_round(given, (server, memory), np.int32(r))
            bad = ~np.isfinite(np.asarray(uploads.position)) & (np.asarray(drawn.weight) > 0).T[:, :, None]
            if bad.any():
                slot, chain, parameter = (int(i) for i in np.argwhere(bad)[0])
                return Failure(r + 1, chain, int(np.asarray(drawn.client)[chain, slot]), parameter)
            thetas = np.asarray(jax.vmap(problem.method.position)(server))
            if not np.all(np.isfinite(thetas)):
                chain, parameter = (int(i) for i in np.argwhere(~np.isfinite(thetas))[0])
                return Failure(r + 1, chain, None, parameter)
        raise AssertionError("the replay of a non-finite chunk stayed finite")

    def close(self) -> None:
        """Wait until nothing is read."""
        if self._reader is not None:
            self._reader.close()

    def _given(self, problem: Assignment, round_index: int) -> Given:
        """What a round is given; rows that are read are those of this round."""
        given = self._prepare(problem)[0]
        if self._reader is None:
            return given
        return given._replace(tables=given.tables._replace(rows=self._reader.rows(round_index)))

    def _prepare(self, problem: Assignment) -> tuple[Given, _Compiled]:
        if self._prepared is None or self._prepared[0] is not problem:
            tables, layout = _layout(problem, self.capacities)
            skeleton, numbers = problem.method.split()
            rounds = Rounds(
                skeleton,
                problem.participation,
                problem.num_chains,
                model=problem.model,
                num_clients=problem.data.num_clients,
                layout=layout,
            )
            compiled = _compile(rounds, _draw_capacity(problem), str(float_dtype()))
            self._prepared = (problem, Given(tables, numbers, problem.roots), compiled)
            self._buffers, self._reader = None, None
            if problem.data.read is not None:
                numbers_of = functools.partial(compiled.batches, problem.roots, tables.offsets)
                self._reader = Reader(problem, numbers_of)
        return self._prepared[1:]


def _cores() -> int:
    """Cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def _draw_capacity(problem: Assignment) -> int:
    slots = num_slots(problem.participation, problem.data.num_clients)
    fields = 1 if problem.participation.scheme == "full" else 3
    numbers = problem.num_chains * (problem.model.dim + 1 + fields * slots)
    return int(np.clip(_DRAW_BYTES // (numbers * float_dtype().itemsize), 1, _MOST_DRAWS))


def as_device(array: Any) -> jax.Array | Split:
    """Move rows to JAX; float rows get the run's type, everything else stays as stored.

    Large arrays are read in place where their layout allows it, so the caller's array must not
    change during a run.
    """
    array = np.asarray(array)
    if array.dtype.kind == "b":
        array = array.view(np.uint8)
    array = np.ascontiguousarray(array, row_dtype(array.dtype))
    head = _rows_before_boundary(array) if array.nbytes >= _IN_PLACE_BYTES else 0
    if head == 0:
        return jax.device_put(array)
    return Split(jax.device_put(array[:head]), jax.device_put(array[head:]))


def _rows_before_boundary(array: np.ndarray) -> int:
    """Rows until the first that starts at an address JAX can read in place; 0 if none does."""
    starts = array.ctypes.data + array.strides[0] * np.arange(min(_BOUNDARY, len(array)))
    return int(np.argmax(starts % _BOUNDARY == 0))


def _layout(problem: Assignment, capacities: tuple[int, ...] | None) -> tuple[Tables, Layout]:
    data, method = problem.data, problem.method.about
    sizes = data.sizes
    everyone = problem.participation.scheme == "full"
    batches_only = method.batch_size is not None and not method.all_rows
    full_batches = method.batch_size is not None and method.batch_size <= int(sizes.min())
    largest, one_class = int(sizes.max()), np.zeros(len(sizes), int)
    if batches_only:
        rows_at_once = min(method.batch_size or largest, largest)
        class_of, classes = one_class, [SizeClass(0, False, len(sizes))]
    else:
        rows_at_once = largest
        class_of, classes = size_classes(sizes, capacities)
    gathered = problem.num_chains * rows_at_once * row_numbers(data.rows) * float_dtype().itemsize
    chains_together = gathered <= _GATHER_BYTES
    if chains_together and not everyone and not batches_only:
        # chains at different clients side by side need one common length
        class_of, classes = one_class, [SizeClass(largest, bool(np.all(sizes == largest)), len(sizes))]
    one_by_one = convolves(problem.model, data.rows)
    for number, k in enumerate(classes):  # small clients side by side: a call for each would cost more
        numbers = _numbers_at_once(problem, rows_at_once if batches_only else k.capacity)
        at_once = 1 if one_by_one else max(1, _WORK_AT_ONCE // numbers)
        classes[number] = k._replace(together=min(k.members, at_once))
    members = tuple(np.flatnonzero(class_of == k).astype(np.int32) for k in range(len(classes)))
    tables = Tables(
        rows=jax.tree.map(as_device, data.rows) if data.read is None else (),
        offsets=jnp.asarray(data.offsets, jnp.int32),
        class_of=jnp.asarray(class_of, jnp.int32),
        members=tuple(jnp.asarray(m) for m in members),
        order=jnp.asarray(np.argsort(np.concatenate(members)), jnp.int32),
    )
    apart = _worth_threads(problem, classes, rows_at_once)
    groups = 1 if apart else _groups(problem, rows_at_once)
    return tables, Layout(tuple(classes), chains_together, full_batches, apart, groups, one_by_one)


def _numbers_at_once(problem: Assignment, rows: int) -> int:
    """Numbers that one step at one client reads, for all chains; a measure of its work."""
    return problem.num_chains * (max(rows, 1) * row_numbers(problem.data.rows) + problem.model.dim)


def _worth_threads(problem: Assignment, classes: list[SizeClass], rows: int) -> bool:
    """Whether a step has so much work that handing clients to threads costs little beside it.

    This must not depend on the machine: the layout is part of what makes results equal to the last bit. Nor
    on K, which would then have to be compiled again.
    """
    slots = num_slots(problem.participation, problem.data.num_clients)
    alone = problem.participation.scheme != "full" or all(k.together == 1 for k in classes)
    work = slots * _numbers_at_once(problem, rows)
    return alone and slots > 1 and work >= _WORK_ON_THREADS


def _groups(problem: Assignment, rows: int) -> int:
    """Into how many equal groups chains are divided, each large enough for good arrays.

    Threads that share the work of every step wait for each other in every step, which costs much where a
    step is short. As above, the machine has no say.
    """
    slots = num_slots(problem.participation, problem.data.num_clients)
    if slots * _numbers_at_once(problem, rows) > _WORK_AT_ONCE:
        return 1
    most = min(_PARTS, problem.num_chains // _CHAINS_OF_GROUP)
    return max((g for g in range(1, most + 1) if problem.num_chains % g == 0), default=1)


class _Compiled(NamedTuple):
    rounds: Rounds
    run: Any
    join: Any
    one_round: Any
    begin: Any
    turn: Any
    batches: Any
    buffers: Callable[[], tuple[jax.Array, ...]]
    tasks: Callable[[], list[Callable]]


class _Span(NamedTuple):
    """Which rounds a call covers, which of their draws it keeps, and the first chain of its group.

    ``kept``, where there are any, are the rounds to keep instead of those by warm-up and thinning.
    """

    first_round: Any
    num_rounds: Any
    num_warmup: Any
    thinning: Any
    first_chain: Any
    kept: np.ndarray


def _padded(kept: tuple[int, ...] | None) -> np.ndarray:
    """Rounds in an array whose length is a power of two, so that their number seldom compiles anew."""
    found = np.zeros(0 if kept is None else 1 << (len(kept) - 1).bit_length(), np.int32)
    found[: len(kept or ())] = kept or ()
    return found


@functools.lru_cache(maxsize=64)
def _compile(rounds: Rounds, capacity: int, dtype: str) -> _Compiled:
    """Build the compiled functions of one configuration; numbers that sweeps change are arguments."""
    groups, slots, real = rounds.layout.groups, rounds.num_slots, jnp.dtype(dtype)
    group = replace(rounds, num_chains=rounds.num_chains // groups)

    def buffers():
        shapes = [((rounds.model.dim,), real), ((), real), ((slots,), real)]
        if not rounds.everyone:
            shapes += [((slots,), jnp.int32), ((slots,), real)]
        return tuple(jnp.zeros((capacity, group.num_chains, *shape), kind) for shape, kind in shapes)

    def run(given, state, buffers, span: _Span):
        def own(axis, tree):
            return jax.tree.map(
                lambda a: jax.lax.dynamic_slice_in_dim(a, span.first_chain, group.num_chains, axis), tree
            )

        def body(i, carry):
            state, buffers, kept, _ = carry
            round_index = span.first_round + i
            server, memory, uploads, drawn = group.whole(
                given, state, round_index, first_chain=span.first_chain
            )
            values = jax.lax.optimization_barrier(group.kept(server, uploads, drawn))
            # always written to the next free place, which moves on only when the draw is kept
            buffers = tuple(
                jax.lax.dynamic_update_index_in_dim(b, v.astype(b.dtype), kept, 0)
                for b, v in zip(buffers, values)
            )
            done = round_index + 1 - span.num_warmup
            keep = (done > 0) & (done % span.thinning == 0)
            if len(span.kept):
                keep = jnp.any(span.kept == round_index + 1)
            return (server, memory), buffers, kept + keep.astype(jnp.int32), jnp.mean(values[1])

        start = (own(0, state[0]), own(1, state[1])), buffers, jnp.zeros((), jnp.int32), jnp.zeros((), dtype)
        state, buffers, _, energy = jax.lax.fori_loop(0, span.num_rounds, body, start)
        return *state, buffers, energy

    def join(servers, memories):
        def joined(axis, trees):
            return jax.tree.map(lambda *leaves: jnp.concatenate(leaves, axis), *trees)

        return joined(0, servers), joined(1, memories)

    def turn(given, before, memory, parts):
        begun, server = before
        server, memory, uploads = rounds.finish(given, begun, (server, memory), parts)
        values = rounds.kept(server, uploads, begun.drawn)
        return (
            server,
            memory,
            values,
            rounds.begin(given.roots, given.tables.offsets, server, begun.round + 1),
        )

    return _Compiled(
        rounds,
        jax.jit(run, donate_argnums=2, compiler_options=options(groups > 1)),
        jax.jit(join),
        jax.jit(rounds.whole, compiler_options=options()),
        jax.jit(rounds.begin, compiler_options=options()),
        jax.jit(turn, donate_argnums=2, compiler_options=options()),
        jax.jit(rounds.batches, static_argnums=3),
        buffers,
        functools.cache(functools.partial(_tasks, rounds)),
    )


def _tasks(rounds: Rounds) -> list[Callable]:
    """The clients' work of one round in parts of equal shape, so that one compilation serves all."""
    counts = [k.members for k in rounds.layout.classes] if rounds.everyone else [rounds.num_slots]
    tasks = []
    for number, count in enumerate(counts):
        # of one length, whatever the number of threads: another length rounds differently
        size = max((d for d in range(1, count + 1) if count % d == 0 and count // d >= _PARTS), default=1)
        visit = jax.jit(functools.partial(rounds.visit, number, size), compiler_options=options(True))
        tasks += [functools.partial(visit, jnp.asarray(start, jnp.int32)) for start in range(0, count, size)]
    return tasks
