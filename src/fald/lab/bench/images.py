"""Image classifiers of MNIST's shape: 10 clients of 6,000 images, batches of 200, K = 50.

Pixels are random, because speed does not depend on what is in the pictures. Rounds are timed at the engine,
as in a long run: what ``fald.sample`` does once, such as a look at the curvature, would be much of it.
"""

from __future__ import annotations

import functools
import importlib.util
from collections.abc import Callable

import jax.numpy as jnp
import numpy as np

import fald
from fald.lab import methods as samplers
from fald.lab.bench.timing import Case, Contender, Goal, fastest, times_faster
from fald.langevin.engine import Problem

_CLIENTS, _ROWS, _PIXELS, _CLASSES, _BATCH, _STEPS = 10, 6000, 784, 10, 200, 50
_HIDDEN = 100
_STEP, _TEMPERATURE = 1e-7, 0.05


def cases(quick: bool) -> list[Case]:
    """B: softmax regression; C: a network with one hidden layer."""
    rng = np.random.default_rng(0)
    x = rng.integers(0, 256, (_CLIENTS * _ROWS, _PIXELS), dtype=np.uint8)
    y = rng.integers(0, _CLASSES, len(x)).astype(np.uint8)
    rounds = 1 if quick else 12
    softmax = fald.models.softmax_regression(_PIXELS, _CLASSES)
    network = fald.models.mlp_classifier(_PIXELS, _CLASSES, hidden=(_HIDDEN,))
    torch_there = importlib.util.find_spec("torch") is not None
    missing = [] if torch_there else ["PyTorch"]
    loops, other_loops = ({}, {}) if not torch_there else _torch_contenders(x, y, 5 if quick else _STEPS)
    multiplications = _CLIENTS * _BATCH * 4 * _PIXELS * _CLASSES
    deep = _CLIENTS * _BATCH * (4 * _PIXELS * _HIDDEN + 6 * _HIDDEN * _CLASSES)

    def ours(model):
        return {"fald.InProcess": Contender(_rounds(model, x, y, rounds), rounds * _STEPS)}

    def against(start):
        return lambda t, limits: times_faster("fald.InProcess", fastest(t, start))(t, limits)

    def share(work, field):
        return lambda t, limits: work / getattr(t["fald.InProcess"], field) / (limits["sgemm"] * 1e9)

    goals = [Goal("share of sgemm (best)", share(multiplications, "best"), 0.2)]
    goals_c = [Goal("share of sgemm (best)", share(deep, "best"), 0.3)]
    if torch_there:
        goals = [
            Goal("times PyTorch with a DataLoader", against("PyTorch, DataLoader"), 15),
            Goal("times PyTorch with indices", against("PyTorch, indexed"), 6),
            *goals,
        ]
        goals_c = [Goal("times PyTorch with indices", against("PyTorch, indexed"), 3), *goals_c]
    base = "PyTorch, DataLoader, 1 thread" if torch_there else "fald.InProcess"
    base_c = "PyTorch, indexed, 1 thread" if torch_there else "fald.InProcess"
    title = "10 clients, batch 200, K = 50"
    return [
        Case("B", f"softmax regression 784-10, {title}", "step of all clients", base,
             {**loops, **ours(softmax)}, goals, missing),
        Case("C", f"network 784-100-10, {title}", "step of all clients", base_c,
             {**other_loops, **ours(network)}, goals_c, missing),
    ]  # fmt: skip


def _rounds(model: fald.Model, x: np.ndarray, y: np.ndarray, count: int) -> Callable[[], object]:
    """A function that runs ``count`` rounds, set up once as in a long run."""
    names = tuple(f"{c}" for c in range(_CLIENTS))
    data = fald.FederatedData((x, y), np.arange(_CLIENTS + 1) * _ROWS, names)
    method = samplers.fald(local_steps=_STEPS, step_size=_STEP, temperature=_TEMPERATURE, batch_size=_BATCH)
    engine = fald.InProcess()
    problem = Problem(
        rng_key=jnp.array([0, 1], jnp.uint32),
        model=model,
        data=data,
        method=method,
        participation=fald.full(),
        num_chains=1,
        num_warmup=count - 1,
        thinning=1,
    )
    state = engine.init(problem, model.flat_initial_position[None])
    return lambda: engine.advance(problem, state, count)


def _torch_contenders(x, y, steps) -> tuple[dict[str, Contender], dict[str, Contender]]:
    from fald.lab.bench import torch_loops

    clients = torch_loops.tensors(x, y, _CLIENTS)
    shapes = {
        "softmax": [(_CLASSES, _PIXELS), (_CLASSES,)],
        "network": [(_HIDDEN, _PIXELS), (_HIDDEN,), (_CLASSES, _HIDDEN), (_CLASSES,)],
    }

    def contender(work: Callable, model: str, threads: int) -> Contender:
        job = functools.partial(
            work, clients, shapes[model], batch=_BATCH, steps=steps, step_size=_STEP, temperature=_TEMPERATURE
        )
        return Contender(lambda: torch_loops.with_threads(threads, job), steps)

    kinds = {
        "PyTorch, DataLoader": torch_loops.with_loader,
        "PyTorch, indexed": torch_loops.indexed,
        "torch.func, clients vectorised": torch_loops.vectorised,
    }
    found = {}
    for model in shapes:
        found[model] = {
            f"{kind}, {threads} thread{'s' if threads > 1 else ''}": contender(work, model, threads)
            for kind, work in kinds.items()
            if model == "softmax" or kind == "PyTorch, indexed"
            for threads in (1, 2)
        }
    return found["softmax"], found["network"]
