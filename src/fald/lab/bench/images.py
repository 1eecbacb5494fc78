"""Image classifiers of MNIST's shape: 10 clients of 6,000 images, batches of 200, K = 50.

Rounds are timed at the engine, as in a long run: what ``fald.sample`` does once, such as a look at the
curvature, would be much of it.
"""

from __future__ import annotations

import functools
import importlib.util
import itertools

import numpy as np

import fald
from fald.lab import methods as samplers
from fald.lab.bench.many import images, rounds_of
from fald.lab.bench.timing import Case, Contender, Mark, fastest, times_faster

_CLIENTS, _ROWS, _PIXELS, _CLASSES, _BATCH, _STEPS = 10, 6000, 784, 10, 200, 50
_HIDDEN = 100
_STEP, _TEMPERATURE = 1e-7, 0.05


def cases(quick: bool) -> list[Case]:
    """B: softmax regression; C: a network with one hidden layer."""
    rows = images(np.random.default_rng(0), _CLIENTS * _ROWS, _PIXELS)
    data = fald.FederatedData(rows, np.arange(_CLIENTS + 1) * _ROWS, tuple(map(str, range(_CLIENTS))))
    method = samplers.fald(local_steps=_STEPS, step_size=_STEP, temperature=_TEMPERATURE, batch_size=_BATCH)
    softmax = fald.models.softmax_regression(_PIXELS, _CLASSES)
    network = fald.models.mlp_classifier(_PIXELS, _CLASSES, hidden=(_HIDDEN,))
    torch_there = importlib.util.find_spec("torch") is not None
    loops, other_loops = _torch_contenders(*rows, 5 if quick else _STEPS) if torch_there else ({}, {})
    shallow = _CLIENTS * _BATCH * 4 * _PIXELS * _CLASSES
    deep = _CLIENTS * _BATCH * (4 * _PIXELS * _HIDDEN + 6 * _HIDDEN * _CLASSES)

    def ours(model: fald.Model) -> dict[str, Contender]:
        rounds = 1 if quick else 12
        work = rounds_of(model, data, method, fald.full(), count=rounds)
        return {"fald.InProcess": Contender(work, rounds * _STEPS)}

    def against(words: str, start: str, limit: float) -> list[Mark]:
        value = lambda t, limits: times_faster("fald.InProcess", fastest(t, start))(t, limits)  # noqa: E731
        return [Mark(f"times PyTorch with {words}", value, limit)] if torch_there else []

    def share(work: int, limit: float) -> Mark:
        value = lambda t, limits: work / t["fald.InProcess"].best / (limits["sgemm"] * 1e9)  # noqa: E731
        return Mark("share of sgemm (best)", value, limit)

    loader, indexed = "PyTorch, DataLoader", "PyTorch, indexed"
    marks = [*against("a DataLoader", loader, 15), *against("indices", indexed, 6), share(shallow, 0.2)]
    marks_c = [*against("indices", indexed, 3), share(deep, 0.3)]
    bases = [f"{name}, 1 thread" if torch_there else "fald.InProcess" for name in (loader, indexed)]
    title, missing = "10 clients, batch 200, K = 50", [] if torch_there else ["PyTorch"]
    return [
        Case("B", f"softmax regression 784-10, {title}", "step of all clients", bases[0],
             {**loops, **ours(softmax)}, marks, missing),
        Case("C", f"network 784-100-10, {title}", "step of all clients", bases[1],
             {**other_loops, **ours(network)}, marks_c, missing),
    ]  # fmt: skip


def _torch_contenders(x, y, steps) -> tuple[dict[str, Contender], dict[str, Contender]]:
    from fald.lab.bench import torch_loops

    clients = torch_loops.tensors(x, y, _CLIENTS)
    settings = {"batch": _BATCH, "steps": steps, "step_size": _STEP, "temperature": _TEMPERATURE}
    shapes = {
        "softmax": [(_CLASSES, _PIXELS), (_CLASSES,)],
        "network": [(_HIDDEN, _PIXELS), (_HIDDEN,), (_CLASSES, _HIDDEN), (_CLASSES,)],
    }
    kinds = {
        "PyTorch, DataLoader": torch_loops.with_loader,
        "PyTorch, indexed": torch_loops.indexed,
        "torch.func, clients vectorised": torch_loops.vectorised,
    }
    found: dict[str, dict[str, Contender]] = {"softmax": {}, "network": {}}
    for model, kind, threads in itertools.product(shapes, kinds, (1, 2)):
        if model == "softmax" or kind == "PyTorch, indexed":
            job = functools.partial(kinds[kind], clients, shapes[model], **settings)
            run = functools.partial(torch_loops.with_threads, threads, job)
            found[model][f"{kind}, {threads} thread{'s' if threads > 1 else ''}"] = Contender(run, steps)
    return found["softmax"], found["network"]
