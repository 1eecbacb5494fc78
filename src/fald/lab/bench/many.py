"""Ragged clients, 1,000 and 100,000 of them: 50 a round, K = 10, batches of 20.

``python -m fald.lab.bench.many 100000`` prints how much memory a run holds, in multiples of its rows.
"""

from __future__ import annotations

import resource
import subprocess
import sys

import jax.numpy as jnp
import numpy as np

import fald
from fald.lab import methods as samplers
from fald.lab.bench.timing import Case, Contender, Goal
from fald.langevin.engine import Problem

_FEATURES, _CLASSES, _PER_CLIENT = 100, 10, 40
_SLOTS, _STEPS, _BATCH = 50, 10, 20


def federation(num_clients: int) -> fald.FederatedData:
    """Clients of 1 to some 500 rows, 40 on average."""
    rng = np.random.default_rng(0)
    sizes = 1 + rng.geometric(1 / (_PER_CLIENT - 1), num_clients)
    rows = {
        f"{client:06d}": (
            rng.integers(0, 256, (size, _FEATURES), dtype=np.uint8),
            rng.integers(0, _CLASSES, size, dtype=np.uint8),
        )
        for client, size in enumerate(sizes)
    }
    return fald.FederatedData.from_arrays(rows)


def _rounds(data: fald.FederatedData, count: int):
    """A function that runs ``count`` rounds, set up once as in a long run."""
    model = fald.models.softmax_regression(_FEATURES, _CLASSES)
    method = samplers.fald(local_steps=_STEPS, step_size=1e-9, batch_size=_BATCH)
    problem = Problem(
        rng_key=jnp.array([0, 1], jnp.uint32),
        model=model,
        data=data,
        method=method,
        participation=fald.with_replacement(_SLOTS),
        num_chains=1,
        num_warmup=count,
        thinning=1,
    )
    engine = fald.InProcess()
    state = engine.init(problem, model.flat_initial_position[None])
    return lambda: engine.advance(problem, state, count)


def cases(quick: bool) -> list[Case]:
    """E: the cost of a round must not grow with the number of clients."""
    few, many = 1000, 5000 if quick else 100_000
    rounds = 5 if quick else 40
    contenders = {
        f"{count:,} clients": Contender(_rounds(federation(count), rounds), rounds) for count in (few, many)
    }
    # in a process of its own: memory that others have given back would hide it
    command = [sys.executable, "-m", "fald.lab.bench.many", str(many)]
    held = float(subprocess.run(command, check=True, capture_output=True, text=True).stdout)

    def growth(field: str):
        names = f"{many:,} clients", f"{few:,} clients"
        return lambda timings, limits: getattr(timings[names[0]], field) / getattr(timings[names[1]], field)

    return [
        Case(
            "E",
            f"ragged clients, {_SLOTS} a round, K = {_STEPS}, batch {_BATCH}",
            "round",
            f"{few:,} clients",
            contenders,
            [
                Goal("time of a round, many clients to few", growth("median"), 1.2, at_most=True),
                Goal("CPU-seconds of a round, many clients to few", growth("cpu"), 1.2, at_most=True),
                Goal("memory, times the rows", lambda timings, limits: held, 1.5, at_most=True),
            ],
        )
    ]


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
