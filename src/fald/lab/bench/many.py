"""Ragged clients, 1,000 and 100,000 of them: 50 a round, K = 10, batches of 20.

``python -m fald.lab.bench.many 100000`` prints how much memory a run holds, in multiples of its rows.
"""

from __future__ import annotations

import resource
import subprocess
import sys
from collections.abc import Callable

import jax.numpy as jnp
import numpy as np

import fald
from fald.lab import methods as samplers
from fald.lab.bench.timing import Case, Contender, Mark
from fald.langevin.engine import Assignment

_FEATURES, _PER_CLIENT, _SLOTS, _STEPS, _BATCH = 100, 40, 50, 10, 20


def federation(num_clients: int) -> fald.FederatedData:
    """Clients of 1 to some 500 rows, 40 on average."""
    rng = np.random.default_rng(0)
    sizes = 1 + rng.geometric(1 / (_PER_CLIENT - 1), num_clients)
    return fald.FederatedData.from_arrays(
        {f"{client:06d}": images(rng, size, _FEATURES) for client, size in enumerate(sizes)}
    )


def images(rng: np.random.Generator, count: int, pixels: int) -> tuple[np.ndarray, np.ndarray]:
    """Random images and labels: speed does not depend on what is in the pictures."""
    return rng.integers(0, 256, (count, pixels), dtype=np.uint8), rng.integers(0, 10, count, dtype=np.uint8)


def rounds_of(
    model: fald.Model,
    data: fald.FederatedData,
    method: samplers.FALD,
    who: fald.Participation,
    *,
    count: int,
    chains: int = 1,
) -> Callable[[], object]:
    """A function that runs ``count`` rounds at the engine, set up once as in a long run."""
    problem = Assignment(jnp.array([0, 1], jnp.uint32), model, data, method, who, chains, count, 1)
    engine = fald.InProcess()
    state = engine.init(problem, jnp.tile(model.flat_initial_position, (chains, 1)))
    return lambda: engine.advance(problem, state, count)


def _rounds(data: fald.FederatedData, count: int) -> Callable[[], object]:
    model = fald.models.softmax_regression(_FEATURES, 10)
    method = samplers.fald(local_steps=_STEPS, step_size=1e-9, batch_size=_BATCH)
    return rounds_of(model, data, method, fald.with_replacement(_SLOTS), count=count)


def cases(quick: bool) -> list[Case]:
    """E: the cost of a round must not grow with the number of clients."""
    few, many, rounds = (1000, 5000, 5) if quick else (1000, 100_000, 40)
    names = f"{few:,} clients", f"{many:,} clients"
    contenders = {
        name: Contender(_rounds(federation(count), rounds), rounds) for name, count in zip(names, (few, many))
    }
    # in a process of its own: memory that others have given back would hide it
    command = [sys.executable, "-m", "fald.lab.bench.many", str(many)]
    held = float(subprocess.run(command, check=True, capture_output=True, text=True).stdout)

    def growth(field: str):
        return lambda timings, limits: getattr(timings[names[1]], field) / getattr(timings[names[0]], field)

    marks = [
        Mark("time of a round, many clients to few", growth("median"), 1.2, at_most=True),
        Mark("CPU-seconds of a round, many clients to few", growth("cpu"), 1.2, at_most=True),
        Mark("memory, times the rows", lambda timings, limits: held, 1.5, at_most=True),
    ]
    title = f"ragged clients, {_SLOTS} a round, K = {_STEPS}, batch {_BATCH}"
    return [Case("E", title, "round", names[0], contenders, marks)]


def _held(num_clients: int) -> float:
    """Most memory while rounds run, beyond that of a small federation, in multiples of the rows."""
    _rounds(federation(1000), 2)()
    data = federation(num_clients)
    stored = sum(np.asarray(part).nbytes for part in data.rows)
    before = _most_memory()
    _rounds(data, 2)()
    return (stored + max(0, _most_memory() - before)) / stored


def _most_memory() -> int:
    """Most memory this process has held so far, in bytes."""
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024


if __name__ == "__main__":
    print(_held(int(sys.argv[1])))
