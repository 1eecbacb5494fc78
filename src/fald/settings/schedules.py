"""Step sizes that change along the run.

A schedule is data: a function of the step number whose numbers may change without compiling again. Schedules
are pytrees of their numbers, so that a compiled program gets these as arguments. Functions of a user's own
work as well; one with the same code and the same constants is compiled once.
"""

from __future__ import annotations

import types
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
import numpy as np

from fald.core.checks import check_count, check_number, check_positive
from fald.core.errors import ConfigError

_KINDS: dict[str, type] = {}


Kind = TypeVar("Kind", bound=type)


def _schedule(cls: Kind) -> Kind:
    """Make a dataclass a schedule: a pytree of its fields, written down by its name."""
    _KINDS[cls.__name__] = cls
    names = [field.name for field in fields(cls)]
    jax.tree_util.register_dataclass(cls, data_fields=names, meta_fields=[])
    return cls


@_schedule
@dataclass(frozen=True)
class PaperDecay:
    """η_k = 1/(2L + m k/12), the decaying step of the paper; made by ``paper_decay``."""

    smoothness: float
    strong_convexity: float

    def __call__(self, step):
        """Step size of the k-th local step, counted from the start of the run."""
        return 1.0 / (2.0 * self.smoothness + self.strong_convexity * step / 12.0)


@_schedule
@dataclass(frozen=True)
class Polynomial:
    """η_k = a (1 + k/b)^−γ; made by ``polynomial``."""

    first: float
    steps: float
    power: float

    def __call__(self, step):
        """Step size of the k-th local step."""
        return self.first * (1.0 + step / self.steps) ** -self.power


@_schedule
@dataclass(frozen=True)
class Cosine:
    """From a first to a last step along half a cosine, in every cycle; made by ``cosine``, ``cyclical``."""

    first: float
    last: float
    steps: float
    cycles: float  # after which it stays at the last step

    def __call__(self, step):
        """Step size of the k-th local step."""
        place = jnp.where(step < self.cycles * self.steps, jnp.mod(step, self.steps) / self.steps, 1.0)
        return self.last + (self.first - self.last) * 0.5 * (1.0 + jnp.cos(jnp.pi * place))


@_schedule
@dataclass(frozen=True)
class WarmUp:
    """A schedule that begins with a line from zero; made by ``warm_up``."""

    steps: float
    then: Any

    def __call__(self, step):
        """Step size of the k-th local step."""
        return jnp.minimum((step + 1.0) / self.steps, 1.0) * step_size_at(self.then, step)


@_schedule
@dataclass(frozen=True)
class Piecewise:
    """One schedule after the other, each of which begins at its own step zero; made by ``piecewise``."""

    parts: Any
    starts: Any

    def __call__(self, step):
        """Step size of the k-th local step."""
        found = step_size_at(self.parts[0], step)
        for part, start in zip(self.parts[1:], self.starts[1:]):
            begun = jnp.maximum(step - start, 0)  # no schedule is asked for steps before its first
            found = jnp.where(step >= start, step_size_at(part, begun), found)
        return found


@_schedule
@dataclass(frozen=True, eq=False)
class Phases:
    """The steps and temperatures of a run in phases; made by ``in_phases``.

    ``table`` has a row for each phase: its first local step, its local steps, its first and last step size,
    and its temperature, relative to the run's.
    """

    table: Any

    def _row(self, step: Any) -> Any:
        table = jnp.asarray(self.table)
        return jnp.moveaxis(table[jnp.sum(jnp.asarray(step)[..., None] >= table[:, 0], axis=-1) - 1], -1, 0)

    def __call__(self, step):
        """Step size of the k-th local step, along half a cosine in its phase."""
        start, steps, first, last, _ = self._row(step)
        place = jnp.minimum((step - start) / steps, 1.0)
        return last + (first - last) * 0.5 * (1.0 + jnp.cos(jnp.pi * place))

    def heat(self, step):
        """Temperature of the k-th local step, relative to the run's."""
        return self._row(step)[4]


@dataclass(frozen=True)
class Phase:
    """Some rounds of a run with a step size and a temperature of their own; for ``fald.sample(phases=...)``.

    Parameters
    ----------
    rounds
        How many.
    step_size, last_step_size
        η at the first of their local steps, and at the end of the last, between which it follows half a
        cosine; by default it stays.
    temperature
        τ; 0 is FedAvg.
    draws
        How many of the rounds' positions are kept, evenly spaced, the last among them; by default none.

    Examples
    --------
    FedAvg as a start, then three cycles of cyclical SG-MCMC: each explores with large steps and without
    noise, then samples with falling steps, and keeps four draws.

    >>> start = Phase(100, 1e-5, temperature=0.0)
    >>> explore = Phase(30, 1e-5, temperature=0.0)
    >>> collect = Phase(20, 1e-5, last_step_size=1e-6, temperature=0.1, draws=4)
    >>> whole = [start, *3 * [explore, collect]]
    >>> sum(phase.rounds for phase in whole)
    250
    """

    rounds: int
    step_size: float
    last_step_size: float | None = None
    temperature: float = 1.0
    draws: int = 0

    def __post_init__(self) -> None:
        check_count("rounds of a phase", self.rounds)
        check_positive("step-size of a phase", self.step_size)
        if self.last_step_size is not None:
            check_positive("last-step-size of a phase", self.last_step_size)
        check_number("temperature of a phase", self.temperature, rule="a number ≥ 0")
        if check_count("draws of a phase", self.draws, 0) > self.rounds:
            raise ConfigError(f"a phase of {self.rounds} rounds cannot keep {self.draws} draws")


def in_phases(phases: Sequence[Phase], local_steps: int) -> tuple[Phases, float, tuple[int, ...]]:
    """The schedule of phases, the run's temperature, the highest of theirs, and the rounds that are kept.

    Examples
    --------
    >>> schedule, temperature, kept = in_phases([Phase(4, 0.2, temperature=0.0), Phase(6, 0.1, draws=2)], 10)
    >>> temperature, kept, float(schedule.heat(39)), float(schedule.heat(40))
    (1.0, (7, 10), 0.0, 1.0)
    """
    if not phases or not all(isinstance(phase, Phase) for phase in phases):
        raise ConfigError(f"phases must be fald.schedules.Phase, one or more; got {phases!r}")
    if phases[-1].draws == 0:
        raise ConfigError("the last phase keeps no draws: its rounds would serve nothing", hint="draws=1")
    ends = np.cumsum([phase.rounds for phase in phases])
    if int(ends[-1]) * local_steps >= 2**24:  # counted in float32
        raise ConfigError(f"phases must have fewer than 2^24 local steps; got {ends[-1]} × {local_steps}")
    hottest = max(float(phase.temperature) for phase in phases)
    rows = []
    for phase, end in zip(phases, ends):
        last = phase.step_size if phase.last_step_size is None else phase.last_step_size
        begins, steps = (int(end) - phase.rounds) * local_steps, phase.rounds * local_steps
        rows.append((begins, steps, phase.step_size, last, phase.temperature / (hottest or 1.0)))
    # filled up to a power of two with rows that never begin: the number of phases then seldom compiles anew
    rows += [(2.0**31, *rows[-1][1:])] * ((1 << (len(rows) - 1).bit_length()) - len(rows))
    kept = [
        int(end) - phase.rounds + -(-phase.rounds * i // phase.draws)
        for phase, end in zip(phases, ends)
        for i in range(1, phase.draws + 1)
    ]
    return Phases(np.array(rows, float)), hottest, tuple(kept)


def heat_at(schedule: Any, step: Any) -> Any:
    """Temperature of a step relative to the run's, which only phases change."""
    return schedule.heat(step) if isinstance(schedule, Phases) else 1.0


def step_size_at(schedule: Any, step: Any) -> Any:
    """η of a step by a schedule, or η itself where it is constant."""
    return schedule(step) if callable(schedule) else schedule


def step_sizes_at(schedule: Any, steps: np.ndarray) -> np.ndarray:
    """η of several steps by a schedule, or a function."""
    if is_data(schedule):
        return np.asarray(schedule(steps), float)
    return np.array([float(np.asarray(schedule(jnp.asarray(k, jnp.int32)))) for k in steps])


def paper_decay(smoothness: float, strong_convexity: float) -> PaperDecay:
    """Schedule η_k = 1/(2L + m k/12).

    Parameters
    ----------
    smoothness
        L, the largest curvature of any client energy f^c.
    strong_convexity
        m, the smallest.

    Examples
    --------
    >>> paper_decay(2.0, 1.0)(0), paper_decay(2.0, 1.0)(12)
    (0.25, 0.2)
    """
    if not 0 < strong_convexity <= smoothness < float("inf"):
        raise ConfigError(
            f"paper-decay needs 0 < strong-convexity ≤ smoothness; got {strong_convexity} and {smoothness}"
        )
    return PaperDecay(float(smoothness), float(strong_convexity))


def polynomial(first: float, steps: float, power: float = 0.55) -> Polynomial:
    """Schedule η_k = first·(1 + k/steps)^−power; a power above 1/2 and up to 1 lets SGLD converge.

    Examples
    --------
    >>> polynomial(0.1, 10, power=1.0)(10)
    0.05
    """
    return Polynomial(
        check_positive("first", first), check_positive("steps", steps), check_positive("power", power)
    )


def cosine(first: float, steps: int, last: float = 0.0) -> Cosine:
    """Schedule from ``first`` to ``last`` along half a cosine in so many local steps, then ``last``.

    ``last`` must be above zero if the run goes on after these steps.

    Examples
    --------
    >>> [round(float(cosine(0.2, 10, last=0.1)(k)), 3) for k in (0, 5, 10, 20)]
    [0.2, 0.15, 0.1, 0.1]
    """
    return cyclical(first, steps, last, cycles=1)


def cyclical(first: float, steps: int, last: float = 0.0, cycles: int = 2**31) -> Cosine:
    """Schedule that begins anew every ``steps`` local steps: each cycle explores, then samples.

    For a temperature of its own in each part, and draws at the end of cycles, take ``Phase``.
    Reference: Zhang, Li, Zhang, Chen and Wilson, "Cyclical stochastic gradient MCMC for Bayesian deep
    learning", ICLR 2020.

    Examples
    --------
    >>> [round(float(cyclical(0.2, 4)(k)), 3) for k in (0, 2, 4)]
    [0.2, 0.1, 0.2]
    """
    first, steps = check_positive("first", first), check_count("steps", steps)
    return Cosine(first, check_number("last", last, rule="a number ≥ 0"), float(steps), float(cycles))


def warm_up(steps: int, then: float | Callable) -> WarmUp:
    """Schedule that grows in a line over so many local steps to another schedule, or number.

    Examples
    --------
    >>> [float(warm_up(4, 0.2)(k)) for k in (0, 3)]
    [0.05000000074505806, 0.20000000298023224]
    """
    return WarmUp(float(check_count("steps", steps)), _part(then))


def piecewise(parts: Sequence[tuple[int, float | Callable]]) -> Piecewise:
    """Schedule of several: pairs of the local step at which one begins, and the number or schedule.

    A schedule counts its steps from where it begins. The first pair begins at 0.

    Examples
    --------
    >>> two = piecewise([(0, 0.3), (10, cosine(0.2, 4))])
    >>> [round(float(two(k)), 3) for k in (9, 10, 12)]
    [0.3, 0.2, 0.1]
    """
    starts = [start for start, _ in parts]
    if not parts or starts[0] != 0 or sorted(set(starts)) != list(starts):
        raise ConfigError(f"the parts of a schedule must begin at 0 and at ascending steps; got {starts}")
    return Piecewise(tuple(_part(p) for _, p in parts), tuple(float(s) for s in starts))


def _part(schedule: Any) -> Any:
    if callable(schedule) and type(schedule).__name__ not in _KINDS:
        raise ConfigError("only schedules of fald.schedules and numbers can be put together")
    return schedule if callable(schedule) else check_positive("step-size", schedule)


def scaled(schedule: Any, factor: float) -> Any:
    """A schedule, or a number, all of whose steps are so many times as large.

    Examples
    --------
    >>> float(scaled(piecewise([(0, 0.3), (10, cosine(0.2, 4))]), 2.0)(10))
    0.4000000059604645
    """
    match schedule:
        case PaperDecay():
            return PaperDecay(schedule.smoothness / factor, schedule.strong_convexity / factor)
        case Polynomial():
            return replace(schedule, first=factor * schedule.first)
        case Cosine():
            return replace(schedule, first=factor * schedule.first, last=factor * schedule.last)
        case WarmUp():
            return replace(schedule, then=scaled(schedule.then, factor))
        case Piecewise():
            return replace(schedule, parts=tuple(scaled(part, factor) for part in schedule.parts))
        case int() | float():
            return factor * schedule
    raise ConfigError(f"only numbers and schedules of fald.schedules can be multiplied; got {schedule!r}")


def is_data(schedule: Any) -> bool:
    """Whether a step size is a schedule of this module, whose numbers can be taken out of it."""
    return type(schedule) in _KINDS.values()


def record(schedule: Any) -> Any:
    """A schedule as plain values; of a user's function only its name."""
    if isinstance(schedule, tuple):
        return [record(part) for part in schedule]
    if isinstance(schedule, np.ndarray):
        return schedule.tolist()
    if not callable(schedule):
        return schedule
    if not is_data(schedule):
        return {"schedule": type(schedule).__name__}
    own: Any = schedule
    written = {field.name: record(getattr(own, field.name)) for field in fields(own)}
    return {"schedule": type(schedule).__name__, **written}


def from_record(written: Any) -> Any:
    """The schedule that ``record`` wrote down.

    Raises
    ------
    ConfigError
        If it is a function of the user's own, which cannot be written down.

    Examples
    --------
    >>> from_record(record(warm_up(4, polynomial(0.1, 10)))) == warm_up(4, polynomial(0.1, 10))
    True
    """
    if isinstance(written, list):
        return tuple(from_record(part) for part in written)
    if not isinstance(written, Mapping):
        return written
    values = dict(written)
    kind = _KINDS.get(values.pop("schedule"))
    if kind is None:
        raise ConfigError(
            f"the step sizes of the schedule {written['schedule']!r} are not recorded: this needs a constant "
            "step size or a schedule of fald.schedules"
        )
    if kind is Phases:
        return Phases(np.array(values["table"]))
    return kind(**{name: from_record(value) for name, value in values.items()})


@dataclass(frozen=True, eq=False)
class OwnFunction:
    """A user's function, equal to another that has the same code and sees the same values."""

    function: Callable

    def __call__(self, step):
        """Step size of the k-th local step."""
        return self.function(step)

    def _key(self) -> tuple[Any, ...]:
        own = self.function
        if not isinstance(own, types.FunctionType):
            return (own,)
        if any(isinstance(constant, types.CodeType) for constant in own.__code__.co_consts):
            return (own,)  # what a function within it sees is not known
        seen = [own.__globals__.get(name, name) for name in own.__code__.co_names]
        closed = [cell.cell_contents for cell in own.__closure__ or ()]
        values = (*seen, *closed, *(own.__defaults__ or ()), *(own.__kwdefaults__ or {}).values())
        # what is no plain value counts as itself alone: it may have changed without being another
        plain = [(type(v), v) if isinstance(v, int | float | str) else id(v) for v in values]
        return (own.__code__, *plain)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, OwnFunction) and self._key() == other._key()

    def __hash__(self) -> int:
        return hash(self._key())


_LOOKS = 2**16  # steps at which a schedule is looked at: all of them in most runs


def check_schedule(schedule: Any, last_step: int) -> None:
    """Refuse a function that is no schedule; it is called with a traced number, as in a run."""
    try:
        jax.eval_shape(schedule, jax.ShapeDtypeStruct((), jnp.int32))
    except (jax.errors.ConcretizationTypeError, jax.errors.TracerBoolConversionError) as error:
        raise ConfigError(
            "the step-size schedule decides by the value of the step, as in `if step > 100`; it is compiled, "
            "and sees no values",
            hint="use jnp.where(step > 100, a, b), or fald.schedules.piecewise",
        ) from error
    except (TypeError, ValueError) as error:
        raise ConfigError(f"the step-size schedule gives no number: {error}") from error
    steps = np.unique(np.linspace(0, last_step, min(last_step + 1, _LOOKS)).astype(np.int32))
    try:
        values = np.asarray(jax.vmap(schedule)(jnp.asarray(steps)))
        if values.shape != steps.shape:
            raise TypeError(f"it gives an array of shape {values.shape[1:]}")
    except (TypeError, ValueError) as error:
        raise ConfigError(f"the step-size schedule gives no number: {error}") from error
    bad = np.flatnonzero(~(np.isfinite(values) & (values > 0)))
    if len(bad):
        raise ConfigError(
            f"the step-size schedule must give numbers > 0; got {values[bad[0]]:g} at step {steps[bad[0]]}"
        )
