"""Interleaved timing of contenders that do the same work."""

from __future__ import annotations

import os
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple


class Contender(NamedTuple):
    """Something to time: one call of ``run`` does ``units`` units of work."""

    run: Callable[[], Any]
    units: float


class Timing(NamedTuple):
    """Seconds per unit of work: best, median, and CPU-seconds of all threads and child processes (median)."""

    best: float
    median: float
    cpu: float


class Mark(NamedTuple):
    """What must hold: ``value`` from the timings and the machine's limits, at least or at most ``limit``."""

    text: str
    value: Callable[[Mapping[str, Timing], Mapping[str, float]], float]
    limit: float
    at_most: bool = False

    def holds(self, value: float) -> bool:
        """Whether a value reaches the mark."""
        return value <= self.limit if self.at_most else value >= self.limit


@dataclass(frozen=True)
class Case:
    """One workload: its contenders, the one others are compared with, and the marks to reach.

    ``missing`` names contenders that are not installed here.
    """

    name: str
    title: str
    unit: str
    baseline: str
    contenders: Mapping[str, Contender]
    marks: Sequence[Mark] = ()
    missing: Sequence[str] = ()


def interleave(
    contenders: Mapping[str, Contender],
    repeats: int,
    *,
    clock: Callable[[], float] = time.perf_counter,
    cpu_clock: Callable[[], float] = lambda: sum(os.times()[:4]),
) -> dict[str, Timing]:
    """Time each contender ``repeats`` times, in turns, after one untimed call of each.

    Examples
    --------
    >>> found = interleave({"nothing": Contender(lambda: None, 10)}, repeats=3)
    >>> found["nothing"].best <= found["nothing"].median
    True
    """
    for contender in contenders.values():
        contender.run()
    found: dict[str, list[tuple[float, float]]] = {name: [] for name in contenders}
    for _ in range(repeats):
        for name, (run, units) in contenders.items():
            began, used = clock(), cpu_clock()
            run()
            found[name].append(((clock() - began) / units, (cpu_clock() - used) / units))
    seconds = {name: tuple(zip(*pairs)) for name, pairs in found.items()}
    return {
        name: Timing(min(wall), statistics.median(wall), statistics.median(cpu))
        for name, (wall, cpu) in seconds.items()
    }


def times_faster(ours: str, other: str) -> Callable[[Mapping[str, Timing], Mapping[str, float]], float]:
    """How many times faster one contender is than another, by medians."""
    return lambda timings, limits: timings[other].median / timings[ours].median


def fastest(timings: Mapping[str, Timing], start: str) -> str:
    """The fastest, by median, of the contenders whose names begin with ``start``."""
    return min((name for name in timings if name.startswith(start)), key=lambda name: timings[name].median)
