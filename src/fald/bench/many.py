"""Ragged clients, 1,000 and 100,000 of them: 50 a round, K = 10, batches of 20."""

from __future__ import annotations

import resource
import sys

import jax.numpy as jnp
import numpy as np

import fald
from fald import samplers
from fald.bench.timing import Case, Contender, Goal
from fald.engines import Problem

_FEATURES, _CLASSES, _PER_CLIENT = 64, 10, 40
_SLOTS, _STEPS, _BATCH = 50, 10, 20


def federation(num_clients: int) -> fald.FederatedData:
    """Clients of 1 to some 500 rows, 40 on average."""
    rng = np.random.default_rng(0)
    sizes = 1 + rng.geometric(1 / (_PER_CLIENT - 1), num_clients)
    offsets = np.concatenate([[0], np.cumsum(sizes)])
    x = rng.integers(0, 256, (offsets[-1], _FEATURES), dtype=np.uint8)
    y = rng.integers(0, _CLASSES, len(x)).astype(np.uint8)
    return fald.FederatedData((x, y), offsets, tuple(f"{c:06d}" for c in range(num_clients)))


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
    large = federation(many)
    before = _most_memory()
    contenders = {
        f"{few:,} clients": Contender(_rounds(federation(few), rounds), rounds),
        f"{many:,} clients": Contender(_rounds(large, rounds), rounds),
    }
    for contender in contenders.values():
        contender.run()
    stored = sum(np.asarray(part).nbytes for part in large.rows)
    held = (stored + max(0, _most_memory() - before)) / stored

    def growth(timings, limits):
        return timings[f"{many:,} clients"].cpu / timings[f"{few:,} clients"].cpu

    return [
        Case(
            "E",
            f"ragged clients, {_SLOTS} a round, K = {_STEPS}, batch {_BATCH}",
            "round",
            f"{few:,} clients",
            contenders,
            [
                Goal("CPU-seconds per round, many clients to few", growth, 1.2, at_most=True),
                Goal("memory, times the rows", lambda timings, limits: held, 1.5, at_most=True),
            ],
        )
    ]


def _most_memory() -> int:
    """Most memory this process has held so far, in bytes."""
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024
