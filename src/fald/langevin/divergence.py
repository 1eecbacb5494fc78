"""The run loop: chunks of rounds, progress, checkpoints, interruption, divergence.

It knows no engine. Chunks grow until one takes about half a second, so that progress is live and
Ctrl-C is answered soon; results do not depend on where chunks end.
"""

from __future__ import annotations

import functools
import time
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from fald.checkpoint import Checkpoint, Store, damaged
from fald.console import Progress
from fald.engines.base import Engine, Problem, Records, RunState
from fald.errors import ConfigError, FaldError, FederationError, Interrupted, NonFiniteError, StorageError
from fald.gradients import client_rows, energy_fn, largest_curvatures, pooled_mode
from fald.journal import Journal, replies
from fald.privacy.guard import Guard, Protection

_CHUNK_SECONDS = 0.5
_CLIENTS_EXAMINED = 20


def run(
    problem: Problem,
    engine: Engine,
    positions: jax.Array,
    *,
    num_rounds: int,
    checkpoint: Checkpoint | None,
    description: dict[str, Any],
    progress: bool,
    build: Callable[..., Any],
    privacy: Protection | None = None,
    journal: Journal | None = None,
    settling: Callable[[list[Records]], dict[str, Any]] = lambda records: {},
) -> Any:
    """Run all rounds and return ``build(records)``.

    Parameters
    ----------
    problem, engine, positions
        What to sample, who does it, and where the chains start (chains, dim).
    num_rounds
        Rounds in total, those of a resumed checkpoint included.
    checkpoint, description
        Where to save, and what identifies the run there.
    progress
        Whether to report on standard error.
    build
        Turns kept draws, costs (and the privacy guard, if any) into the result; also used for the draws
        kept by a run that fails.
    privacy
        What a private run asked for.
    journal, settling
        Where to write down how the run goes, and what to say there of the draws so far, now and then.

    Raises
    ------
    Interrupted, NonFiniteError, StorageError, PrivacyError
        Each with the draws so far in its ``tree``, or None there if no draw was kept.
    """
    state = engine.init(problem, positions)
    records: list[Records] = []
    store = None
    if checkpoint is not None:
        store = Store(checkpoint.path, description)
        if store.open():
            state, records = _resume(store, problem, state, num_rounds)
    asked, guard = num_rounds, None
    if privacy is not None:
        lost = 0 if store is None else max(0, store.begun_rounds() - state.round)
        guard = Guard(privacy, problem, num_rounds, lost)
        guard.rounds_begun = state.round
        num_rounds = guard.num_rounds
        build = functools.partial(build, guard=guard)

    notes = _Notes(journal or Journal(None), problem, engine, num_rounds, guard, settling)

    def finished(records: list[Records]) -> Any:
        return build(records, costs=engine.costs(problem, state))

    def written(write: Callable[[], None]) -> None:
        try:
            write()
        except StorageError as error:
            raise _with_draws(error, finished, records) from error

    saved_at = time.monotonic()

    def save() -> None:
        nonlocal saved_at
        if store is not None and state.round > store.saved_round:
            written(functools.partial(store.save, state, records))
        saved_at = time.monotonic()

    chunk = 1
    try:
        with (
            notes.running(state.round),
            Progress(num_rounds, state.round, progress, "energy" if guard is None else "ε ≤") as display,
        ):
            while state.round < num_rounds:
                size = min(chunk, num_rounds - state.round, engine.most_rounds(problem, state))
                due = None
                if store is not None and checkpoint is not None and checkpoint.rounds is not None:
                    due = store.saved_round + checkpoint.rounds
                    size = min(size, due - state.round)
                if guard is not None:
                    guard.rounds_begun = state.round + size
                    if store is not None:
                        store.begin_rounds(guard.rounds_begun + guard.lost_rounds)
                began = time.monotonic()
                after, new, energy = engine.advance(problem, state, size)
                escape = _first_escape(problem, engine, state, after, new)
                if escape is not None:
                    save()
                    kept = [_up_to(r, escape.last_good_round) for r in (*records, new)]
                    # without costs: those of the rounds before the escape depend on where chunks end
                    raise _with_draws(_explain(problem, positions, escape), build, kept)
                # in this order an interruption between the two lines cannot lose draws
                records.append(new)
                state = after
                seconds = time.monotonic() - began
                chunk = max(1, min(2 * chunk, int(size * _CHUNK_SECONDS / max(seconds, 1e-6))))
                display.update(state.round, energy if guard is None else guard.epsilon(state.round))
                written(functools.partial(notes.round, state, records, energy))
                if state.round == due or (
                    checkpoint is not None and time.monotonic() - saved_at >= checkpoint.seconds
                ):
                    save()
            save()
            if guard is not None and num_rounds < asked:
                raise _with_draws(guard.exceeded(asked), finished, records)
    except FederationError as error:  # a site is gone: what was done is kept
        save()
        raise _with_draws(error, finished, records) from None
    except KeyboardInterrupt:
        save()
        error = Interrupted(
            f"interrupted after round {state.round} of {num_rounds}",
            hint="resume to go on from here" if store else "give a checkpoint to be able to resume",
        )
        raise _with_draws(error, finished, records) from None
    return finished(records)


class _Notes:
    """What the journal of a run is told."""

    def __init__(
        self, journal: Journal, problem: Problem, engine: Engine, num_rounds: int, guard: Guard | None,
        settling: Callable[[list[Records]], dict[str, Any]],
    ):  # fmt: skip
        self.journal, self.problem, self.engine, self.guard = journal, problem, engine, guard
        self.num_rounds, self.settling = num_rounds, settling

    def running(self, round_number: int) -> Any:
        """The context in which the run goes."""
        data = self.problem.data
        sites = {name: int(size) for name, size in zip(data.names, data.sizes)}
        return self.journal.running(round=round_number, rounds_total=self.num_rounds, sites=sites)

    def round(self, state: RunState, records: list[Records], energy: float) -> None:
        """Write a line about the rounds just done, unless one was written a moment ago."""
        journal, last = self.journal, state.round == self.num_rounds
        if not (journal.due or (last and journal.path is not None)):
            return
        spent = self.engine.costs(self.problem, state)
        found: dict[str, Any] = {}
        if journal.summary_due() or last:
            began = time.monotonic()
            found = self.settling(records)
            journal.summarised(time.monotonic() - began)
        journal.write(
            round=state.round,
            rounds_total=self.num_rounds,
            energy=energy if self.guard is None else None,
            draws=sum(len(r.round) for r in records) * self.problem.num_chains,
            epsilon=None if self.guard is None else self.guard.epsilon(state.round),
            bytes_up=int(spent["bytes_up"].sum()),
            bytes_down=int(spent["bytes_down"].sum()),
            sites=replies(self.engine),
            **found,
        )


def _resume(
    store: Store, problem: Problem, start: RunState, num_rounds: int
) -> tuple[RunState, list[Records]]:
    state, records = store.load(start)
    if state.round > num_rounds:
        raise ConfigError(
            f"the checkpoint in {store.path} has {state.round} rounds already; num-rounds is {num_rounds}",
            hint="ask for at least as many rounds, or choose another folder",
        )
    rounds = np.concatenate([np.zeros(0, int), *[r.round for r in records]])
    expected = problem.num_warmup + problem.thinning * np.arange(1, problem.num_kept(state.round) + 1)
    if not np.array_equal(rounds, expected):
        raise damaged(store.path / "state.npz", "the saved draws are not those of the saved state")
    return state, records


def _with_draws(error: Any, build: Callable[..., Any], records: list[Records]) -> Any:
    error.tree = build(records) if any(len(r.round) for r in records) else None
    return error


class _Escape(NamedTuple):
    """A chain that left the finite numbers.

    ``position`` is the last finite position of the chain; from there the upload of ``client`` in
    ``round`` was not finite in ``parameter``, or, when ``parameter`` is None, its energy was not.
    """

    round: int
    chain: int
    client: int | None
    parameter: int | None
    position: jax.Array
    last_good_round: int


def _first_escape(
    problem: Problem, engine: Engine, state: RunState, after: RunState, new: Records
) -> _Escape | None:
    """Find where a chain first left the finite numbers in the rounds from ``state`` to ``after``.

    A gradient can stay finite where the energy is not, as that of log(θ) does for θ < 0; such a
    chain wanders outside the posterior without ever failing, so the energies of kept draws count.
    """
    size = after.round - state.round
    finite = all(bool(np.all(np.isfinite(np.asarray(leaf)))) for leaf in jax.tree.leaves(after.server))
    failure = None if finite else engine.locate(problem, state, size)
    bad = np.argwhere(~np.isfinite(new.energy))
    if len(bad) and (failure is None or new.round[bad[0][0]] <= failure.round):
        draw, chain = (int(i) for i in bad[0])
        round_number = int(new.round[draw])
        before = _position(problem, engine, state, round_number - 1, chain)
        took_part = new.client[draw, chain][new.weight[draw, chain] > 0]
        client = _client_without_energy(problem, took_part.tolist(), before)
        # the position whose energy it is was the draw of the round before
        return _Escape(round_number, chain, client, None, before, round_number - 2)
    if failure is None:
        return None
    before = _position(problem, engine, state, failure.round - 1, failure.chain)
    return _Escape(failure.round, failure.chain, failure.client, failure.parameter, before, failure.round - 1)


def _position(problem: Problem, engine: Engine, state: RunState, round_number: int, chain: int) -> jax.Array:
    """Position of a chain at the end of a round, by replaying rounds from ``state``."""
    while state.round < round_number:
        size = min(round_number - state.round, engine.most_rounds(problem, state))
        state, _, _ = engine.advance(problem, state, size)
    return problem.method.position(jax.tree.map(lambda leaf: leaf[chain], state.server))


def _client_without_energy(problem: Problem, clients: list[int], theta: jax.Array) -> int | None:
    data = problem.data
    capacity = int(data.sizes[clients].max())
    energy = energy_fn(problem.model, data.num_rows)
    value = jax.jit(lambda batch: energy(theta, batch))
    if not (data.present and np.isfinite(problem.model.flat_logprior(theta))):
        return None
    for client in clients:
        if not np.isfinite(value(client_rows(data, client, capacity))):
            return client
    return None


def _up_to(records: Records, round_number: int) -> Records:
    good = int(np.sum(records.round <= round_number))
    return Records(*[field[:good] for field in records])


def _explain(problem: Problem, positions: jax.Array, escape: _Escape) -> FaldError:
    data, names = problem.data, problem.model.parameter_names

    def described(client: int) -> str:
        return f"client {data.names[client]!r} ({data.sizes[client]} of {data.num_rows} rows)"

    if escape.client is not None:
        where = described(escape.client)
    else:
        where = "the log prior" if escape.parameter is None else "the server's average"
    values = np.asarray(escape.position, float)
    if escape.parameter is not None:
        message = (
            f"non-finite value in round {escape.round}, {where}, parameter {names[escape.parameter]!r}, "
            f"chain {escape.chain}"
        )
    else:
        largest = np.argsort(-np.abs(values), kind="stable")[:5]
        shown = ", ".join(f"{names[i]} = {values[i]:.4g}" for i in sorted(largest))
        message = (
            f"non-finite energy in round {escape.round}, {where}, chain {escape.chain}, "
            f"with parameters {shown}"
        )
    step = _step_at(problem, escape.round)
    start = positions[escape.chain]
    worst, curvature = None, 0.0
    if shares_energy(problem):
        places = (start, pooled_mode(problem.model, problem.data, start))
        clients = _some(np.arange(problem.data.num_clients))
        if escape.client is not None:
            clients = sorted({*clients, escape.client})
        worst, curvature = worst_curvature(problem, places, clients)
    if step is None or worst is None:
        hint = "try a ten times smaller step-size; if it persists, check the model for log(0) or overflow"
        return NonFiniteError(message, hint=hint)
    if step * curvature < 1:
        return NonFiniteError(
            f"{message}; step-size {step:g} times the largest curvature {curvature:.4g} is only "
            f"{step * curvature:.2g}, so the step is not the likely cause",
            hint="check the model at such values: log of a negative number, division by zero, overflow",
        )
    advice = "a schedule that stays below" if callable(_step_size(problem)) else "step-size"
    return NonFiniteError(
        f"{message}: step-size {step:g} times the curvature {curvature:.4g} of {described(worst)} "
        f"is {step * curvature:.3g}, and steps are unstable above 2",
        hint=f"try {advice} {0.2 / curvature:.2g} (0.2 divided by the curvature)",
    )


def _step_size(problem: Problem) -> Any:
    return getattr(problem.method, "step_size", None)


def _step_at(problem: Problem, round_number: int) -> float | None:
    """The largest step size up to the end of a round, as far as a few looks at a schedule tell."""
    step_size = _step_size(problem)
    if not callable(step_size):
        return step_size
    steps = np.unique(np.linspace(0, round_number * problem.method.local_steps - 1, 50).astype(int))
    sizes = [float(np.asarray(step_size(jnp.asarray(k, jnp.int32)))) for k in steps]
    return max([s for s in sizes if np.isfinite(s)], default=None)


def shares_energy(problem: Problem) -> bool:
    """Whether exact numbers about clients' rows are at hand; not in a private run, nor on a federation."""
    return problem.data.present and getattr(problem.method, "shares_energy", True)


def worst_curvature(
    problem: Problem, places: Sequence[jax.Array], clients: Sequence[int]
) -> tuple[int | None, float]:
    """The client of largest curvature at any of some places, and that value."""
    found = [largest_curvatures(problem.model, problem.data, clients, theta) for theta in places]
    worst = np.nan_to_num(np.max(np.where(np.isfinite(found), found, 0), axis=0))
    return (clients[int(np.argmax(worst))], float(worst.max())) if worst.max() > 0 else (None, 0.0)


def step_times_curvature(problem: Problem, start: jax.Array, records: list[Records]) -> float | None:
    """The last step size times the largest curvature at the start or at the mean of the draws.

    Local steps are unstable above 2, and the result is poor long before. A chain that is unstable
    need not leave the finite numbers: a logistic energy grows only linearly, and its chains then
    wander, mix well, and are wrong. None where clients keep their curvature, or
    the method has no step or takes it along the joint energy.
    """
    last = max((int(r.round[-1]) for r in records if len(r.round)), default=1)
    step = _step_at(problem, last)
    if step is None or not shares_energy(problem) or not getattr(problem.method, "client_steps", True):
        return None
    mean = np.mean([r.position.mean(axis=(0, 1)) for r in records if len(r.round)], axis=0)
    took_part = np.arange(problem.data.num_clients)
    if problem.participation.scheme != "full":
        took_part = np.unique(np.concatenate([r.client[r.weight > 0] for r in records]))
    _, curvature = worst_curvature(problem, (start, jnp.asarray(mean, start.dtype)), _some(took_part))
    return step * curvature


def _some(clients: np.ndarray) -> list[int]:
    """A few clients, evenly spaced."""
    taken = np.linspace(0, len(clients) - 1, min(len(clients), _CLIENTS_EXAMINED)).astype(int)
    return [int(c) for c in clients[taken]]
