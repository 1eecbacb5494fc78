"""A chain that left the finite numbers: where, why, and which step would not have."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from fald.calculus.gradients import client_rows, energy_fn, largest_curvatures, pooled_mode
from fald.core.errors import FaldError, NonFiniteError
from fald.core.types import float_dtype, incomplete
from fald.langevin.engine import Assignment, Engine
from fald.runtime.records import Records, RunState
from fald.settings.schedules import Phases, step_sizes_at

_CLIENTS_EXAMINED = 20


class Escape(NamedTuple):
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


def first_escape(
    problem: Assignment, engine: Engine, state: RunState, then: tuple[RunState, Records]
) -> Escape | None:
    """Find where a chain first left the finite numbers in the rounds from ``state`` to what came ``then``.

    A gradient can stay finite where the energy is not, as that of log(θ) does for θ < 0; such a
    chain wanders outside the posterior without ever failing, so the energies of kept draws count.
    """
    after, new = then
    size = after.round - state.round
    finite = all(bool(np.all(np.isfinite(np.asarray(leaf)))) for leaf in jax.tree.leaves(after.server))
    failure = None if finite else engine.locate(problem, state, size)
    bad = np.argwhere(~np.isfinite(new.energy))
    if len(bad) and (failure is None or new.round[bad[0][0]] <= failure.round):
        draw, chain = (int(i) for i in bad[0])
        round_number = int(new.round[draw])
        before = _position(problem, engine, state, (round_number - 1, chain))
        took_part = new.client[draw, chain][new.weight[draw, chain] > 0]
        client = _client_without_energy(problem, took_part.tolist(), before)
        # the position whose energy it is was the draw of the round before
        return Escape(round_number, chain, client, None, before, round_number - 2)
    if failure is None:
        return None
    before = _position(problem, engine, state, (failure.round - 1, failure.chain))
    return Escape(*failure, before, failure.round - 1)


def _position(problem: Assignment, engine: Engine, state: RunState, where: tuple[int, int]) -> jax.Array:
    """Position at the end of a round of a chain, by replaying rounds from ``state``."""
    round_number, chain = where
    while state.round < round_number:
        size = min(round_number - state.round, engine.most_rounds(problem, state))
        state, _, _ = engine.advance(problem, state, size)
    return problem.method.position(jax.tree.map(lambda leaf: leaf[chain], state.server))


def _client_without_energy(problem: Assignment, clients: list[int], theta: jax.Array) -> int | None:
    data = problem.data
    if not (data.readable and np.isfinite(problem.model.flat_logprior(theta))):
        return None
    capacity = int(data.sizes[clients].max())
    energy = energy_fn(problem.model, data.num_rows)
    value = jax.jit(lambda batch: energy(theta, batch))
    bad = (c for c in clients if not np.isfinite(value(client_rows(data, c, capacity))))
    return next(bad, None)


def up_to(records: Records, round_number: int) -> Records:
    """Draws of the rounds up to one."""
    good = int(np.sum(records.round <= round_number))
    return Records(*[field[:good] for field in records])


def explain(problem: Assignment, positions: jax.Array, escape: Escape) -> FaldError:
    """The error of a chain that escaped, with the step size that it is likely to need."""
    data, names = problem.data, problem.model.parameter_names

    def described(client: int) -> str:
        return f"client {data.names[client]!r} ({data.sizes[client]} of {data.num_rows} rows)"

    if escape.parameter is not None:
        what, otherwise = "value", "the server's average"
        tail = f"parameter {names[escape.parameter]!r}, chain {escape.chain}"
    else:
        what, otherwise = "energy", "the log prior"
        values = np.asarray(escape.position, float)
        largest = np.argsort(-np.abs(values), kind="stable")[:5]
        shown = ", ".join(f"{names[i]} = {values[i]:.4g}" for i in sorted(largest))
        tail = f"chain {escape.chain}, with parameters {shown}"
    where = otherwise if escape.client is None else described(escape.client)
    message = f"non-finite {what} in round {escape.round}, {where}, {tail}"
    if shares_energy(problem) and escape.client is not None:
        name = data.names[escape.client]
        row = incomplete(data.client(name))
        if row is not None:
            hint = "fill in or leave out such rows before the run"
            return NonFiniteError(f"{message}; there is a missing or infinite value in row {row}", hint=hint)
    step = _step_at(problem, escape.round)
    start = positions[escape.chain]
    worst, curvature = None, 0.0
    if shares_energy(problem):
        places = (start, pooled_mode(problem.model, data, start))
        clients = _some(np.arange(data.num_clients))
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
    advice = "a schedule that stays below" if callable(problem.method.about.step_size) else "step-size"
    return NonFiniteError(
        f"{message}: step-size {step:g} times the curvature {curvature:.4g} of {described(worst)} "
        f"is {step * curvature:.3g}, and steps are unstable above 2",
        hint=f"try {advice} {0.2 / curvature:.2g} (0.2 divided by the curvature)",
    )


def _step_at(problem: Assignment, round_number: int, *, of_draws: bool = False) -> float | None:
    """The largest step size up to the end of a round, as far as some looks at a schedule tell.

    ``of_draws``: of phases in which there is noise, if there are such; others only have to be stable.
    """
    step_size = problem.method.about.step_size
    if not callable(step_size):
        return step_size
    steps = np.unique(np.linspace(0, round_number * problem.method.about.local_steps - 1, 50).astype(int))
    if isinstance(step_size, Phases):
        starts = np.asarray(step_size.table)[:, 0]
        steps = np.unique([*steps, *starts[starts <= steps[-1]].astype(int)])
        hot = np.broadcast_to(np.asarray(step_size.heat(steps)) > 0, steps.shape)
        steps = steps[hot] if of_draws and hot.any() else steps
    return max([s for s in step_sizes_at(step_size, steps) if np.isfinite(s)], default=None)


def shares_energy(problem: Assignment) -> bool:
    """Whether exact numbers about clients' rows are at hand; not in a private run, nor on a federation."""
    return problem.data.readable and problem.method.about.reveals.energy


def worst_curvature(
    problem: Assignment, places: Sequence[jax.Array], clients: Sequence[int]
) -> tuple[int | None, float]:
    """The client of largest curvature at any of some places, and that value."""
    root = getattr(problem.method, "root", None)
    looks = [largest_curvatures(problem.model, problem.data, clients, theta, root=root) for theta in places]
    found = [values for _, values in looks]
    worst = np.nan_to_num(np.max(np.where(np.isfinite(found), found, 0), axis=0))
    return (looks[0][0][int(np.argmax(worst))], float(worst.max())) if worst.max() > 0 else (None, 0.0)


class StepCheck(NamedTuple):
    """The largest step size of a run times the largest curvature found, at which client, and what it took."""

    product: float
    step: float
    client: str
    seconds: float

    def advice(self, limit: float) -> str:
        """What to do where the product is above a limit; empty otherwise."""
        if not self.product > limit:
            return ""
        curvature = self.product / self.step
        return (
            f"step-size {self.step:g} times the curvature {curvature:.3g} of client {self.client!r} is "
            f"{self.product:.3g}: above 1 draws are badly biased, above 2 local steps are unstable; "
            f"try step-size {0.2 / curvature:.2g}"
        )


def check_step(
    problem: Assignment, num_rounds: int, place: jax.Array, clients: np.ndarray
) -> StepCheck | None:
    """The largest step size up to a round times the largest curvature of some clients at a place.

    Local steps are unstable above 2, and the result is poor long before. A chain that is unstable need not
    leave the finite numbers: a logistic energy grows only linearly, and its chains then wander, mix well, and
    are wrong. None where clients keep their curvature, or the method has no step or takes it along the joint
    energy. It takes a second or so at most (``largest_curvatures``).
    """
    step = _step_at(problem, num_rounds, of_draws=True)
    if step is None or not shares_energy(problem) or not problem.method.about.client_steps:
        return None
    began = time.monotonic()
    worst, curvature = worst_curvature(problem, (place,), _some(clients))
    name = "" if worst is None else str(problem.data.names[worst])
    return StepCheck(step * curvature, step, name, time.monotonic() - began)


def step_at_draws(problem: Assignment, records: list[Records]) -> StepCheck | None:
    """``check_step`` at the mean of the draws."""
    kept = [r for r in records if len(r.round)]
    took_part = np.arange(problem.data.num_clients)
    if problem.participation.scheme != "full":
        took_part = np.unique(np.concatenate([r.client[r.weight > 0] for r in kept]))
    mean = np.mean([r.position.mean(axis=(0, 1)) for r in kept], axis=0)
    return check_step(problem, int(kept[-1].round[-1]), jnp.asarray(mean, float_dtype()), took_part)


def _some(clients: np.ndarray) -> list[int]:
    """A few clients, evenly spaced."""
    taken = np.linspace(0, len(clients) - 1, min(len(clients), _CLIENTS_EXAMINED)).astype(int)
    return [int(c) for c in clients[taken]]
