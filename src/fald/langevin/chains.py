"""Chains as a work of the run-time: what they do in a round, keep, save, and say of themselves."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import jax
import numpy as np

from fald.core.errors import ConfigError
from fald.core.files import damaged
from fald.langevin.divergence import explain, first_escape, up_to
from fald.langevin.engine import Assignment, Engine
from fald.langevin.guard import Guard
from fald.privacy.protection import Protection
from fald.results.positions import of_flat
from fald.results.sinks import Sink
from fald.runtime.checkpoint import Store
from fald.runtime.journal import replies
from fald.runtime.records import Records, RunState


class Asked(NamedTuple):
    """Where chains start (chains, dim), rounds in total, those of a checkpoint included, and privacy.

    Draws go to ``sinks`` where there are some, and only the last is held; ``callback`` sees each.
    """

    positions: jax.Array
    num_rounds: int
    privacy: Protection | None
    sinks: tuple[Sink, ...] = ()
    callback: Callable[[int, Any, dict[str, Any]], Any] | None = None


class Chains:
    """The chains of a sampler.

    ``build`` turns kept draws, the privacy guard (if any) and costs into the result, also of a run that
    fails; ``settling`` is what to say in the journal of the draws so far, now and then; ``remark`` is said
    after the energy in the progress line.
    """

    few = False

    def __init__(self, problem: Assignment, engine: Engine, asked: Asked, build: Callable[..., Any]):
        self.problem, self.engine, self.asked, self._build = problem, engine, asked, build
        self.settling: Callable[[list[Records]], dict[str, Any]] = lambda records: {}
        self.remark = ""
        self.total = asked.num_rounds
        self._state: RunState | None = None
        self._records: list[Records] = []
        self._guard: Guard | None = None
        self._store: Store | None = None
        self._energy = math.nan
        self._delivering = False

    @property
    def state(self) -> RunState:
        """Where the chains are."""
        assert self._state is not None, "begin first"
        return self._state

    @property
    def round(self) -> int:
        """Rounds done."""
        return 0 if self._state is None else self._state.round

    @property
    def done(self) -> bool:
        """Whether all rounds are done."""
        return self.round >= self.total

    @property
    def sites(self) -> Mapping[str, int]:
        """Rows of each site."""
        data = self.problem.data
        return {name: int(size) for name, size in zip(data.names, data.sizes)}

    def begin(self, store: Store | None) -> None:
        """Start the chains, or go on from the saved state; a private run finds out how long it may go on."""
        start = self.engine.init(self.problem, self.asked.positions)
        self._store = store
        for sink in self.asked.sinks:
            sink.begin(self.problem.model)
        if store is not None and store.has_state:
            start = self._resume(store, start)
        self._state = start
        if self.asked.privacy is not None:
            lost = 0 if store is None else max(0, store.begun_rounds() - self.round)
            self._guard = Guard(self.asked.privacy, self.problem, self.asked.num_rounds, lost)
            self._guard.rounds_begun = self.round
            self.total = self._guard.num_rounds

    def _resume(self, store: Store, start: RunState) -> RunState:
        state, records = store.load(start)
        if state.round > self.total:
            raise ConfigError(
                f"the checkpoint in {store.path} has {state.round} rounds already; "
                f"num-rounds is {self.total}",
                hint="ask for at least as many rounds, or choose another folder",
            )
        problem = self.problem
        if self.asked.sinks:
            self._restore(store)
            return state
        rounds = np.concatenate([np.zeros(0, int), *[r.round for r in records]])
        if not np.array_equal(rounds, problem.kept_rounds(0, problem.num_kept(state.round))):
            raise damaged(store.path / "state.npz", "the saved draws are not those of the saved state")
        self._records = records
        return state

    def _restore(self, store: Store) -> None:
        """Give sinks back what they had gathered."""
        for prefix, sink in self._named():
            saved = {k[len(prefix) :]: v for k, v in store.extra.items() if k.startswith(prefix)}
            if not saved:
                raise ConfigError(
                    f"the checkpoint in {store.path} was made without the sink {type(sink).__name__}",
                    hint="give the same sinks in the same order, or choose another folder",
                )
            sink.restore(saved)
        last = {
            name: store.extra[f"last.{name}"] for name in Records._fields if f"last.{name}" in store.extra
        }
        self._records = [Records(**last)] if last else []

    def _named(self) -> list[tuple[str, Sink]]:
        return [(f"{i}.{type(sink).__name__}.", sink) for i, sink in enumerate(self.asked.sinks)]

    def most_rounds(self) -> int:
        """What the engine has memory for; with a callback, up to the next draw, after which it may stop."""
        most, problem = self.engine.most_rounds(self.problem, self.state), self.problem
        if self.asked.callback is None:
            return most
        return max(1, min(most, problem.round_of(problem.num_kept(self.round)) - self.round))

    def advance(self, num_rounds: int) -> None:
        """Move the chains forward; where one leaves the finite numbers, say which, where and why."""
        before, guard = self.state, self._guard
        if guard is not None:
            guard.rounds_begun = before.round + num_rounds
            if self._store is not None:
                self._store.begin_rounds(guard.rounds_begun + guard.lost_rounds)
        after, new, self._energy = self.engine.advance(self.problem, before, num_rounds)
        escape = first_escape(self.problem, self.engine, before, (after, new))
        if escape is not None:
            error = explain(self.problem, self.asked.positions, escape)
            kept = [up_to(r, escape.last_good_round) for r in (*self._records, new)]
            # without costs: those of the rounds before the escape depend on where chunks end
            error.tree = self._built(kept)  # type: ignore[attr-defined]
            raise error
        self._delivering = True
        stop = self._deliver(new)
        # in this order an interruption between the two lines cannot lose draws
        self._records = self._held(new)
        self._state = after
        self._delivering = False
        if stop:
            self.total = after.round

    def _deliver(self, new: Records) -> bool:
        """Hand new draws to the sinks, and to the callback; whether it asked to stop."""
        stop, private = False, self._guard is not None
        for i, round_number in enumerate(new.round):
            for sink in self.asked.sinks:
                sink.add(int(round_number), new.position[i])
            if self.asked.callback is not None:
                stats = {} if private else {"energy": new.energy[i], "drift": new.drift[i]}
                position = of_flat(self.problem.model, new.position[i])
                stop = self.asked.callback(int(round_number), position, stats) is True or stop
        return stop

    def _held(self, new: Records) -> list[Records]:
        if not self.asked.sinks:
            self._records.append(new)
            return self._records
        return [Records(*[field[-1:].copy() for field in new])] if len(new.round) else self._records

    def save(self, store: Store) -> None:
        """Save new draws and the state; not where sinks were interrupted, and are ahead of it."""
        self.engine.before_save(self.state)
        if not self.asked.sinks:
            store.save(self.state, self._records)
        elif not self._delivering:
            gathered = {f"{at}{k}": v for at, sink in self._named() for k, v in sink.arrays().items()}
            last = {f"last.{k}": v for r in self._records for k, v in r._asdict().items()}
            store.save(self.state, [], {**gathered, **last})

    def note(self) -> str:
        """The energy, or ε so far."""
        if self._guard is None:
            return f"energy {self._energy:,.4g}{self.remark}"
        return f"ε ≤ {self._guard.epsilon(self.round):,.4g}"

    def line(self, summarise: bool) -> dict[str, Any]:
        """What the journal is told."""
        guard, spent = self._guard, self.engine.costs(self.problem, self.state)
        return {
            "round": self.round,
            "rounds_total": self.total,
            "energy": self._energy if guard is None else None,
            "draws": self.problem.num_kept(self.round) * self.problem.num_chains,
            "epsilon": None if guard is None else guard.epsilon(self.round),
            "bytes_up": int(spent["bytes_up"].sum()),
            "bytes_down": int(spent["bytes_down"].sum()),
            "sites": replies(self.engine),
            **(self.settling(self._records) if summarise else {}),
        }

    def draws(self) -> Any:
        """The result of the rounds so far; None before the first kept draw."""
        if self._state is None:
            return None
        return self._built(self._records, costs=self.engine.costs(self.problem, self.state))

    def end(self) -> None:
        """Refuse to call a run finished that its privacy budget ended before the last round."""
        for sink in self.asked.sinks:
            sink.end()
        if self._guard is not None and self.total < self.asked.num_rounds:
            raise self._guard.exceeded(self.asked.num_rounds)

    def _built(self, records: list[Records], **costs: Any) -> Any:
        if not any(len(r.round) for r in records):
            return None
        return self._build(records, guard=self._guard, **costs)
