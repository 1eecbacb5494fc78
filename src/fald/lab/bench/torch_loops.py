"""Federated Langevin steps as people write them in PyTorch; needs the extra ``bench``."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np

Tensor = Any
Client = tuple[Tensor, Tensor]
_PRIOR_PRECISION = 1 / 2.5**2


def _torch() -> Any:
    """PyTorch, imported where it is used: the package does without it."""
    return importlib.import_module("torch")


def tensors(x: np.ndarray, y: np.ndarray, num_clients: int) -> list[Client]:
    """Each client's rows: float features and labels."""
    torch = _torch()
    parts = zip(np.split(x, num_clients), np.split(y, num_clients))
    return [(torch.tensor(a, dtype=torch.float32), torch.tensor(b, dtype=torch.int64)) for a, b in parts]


def with_threads(count: int, work: Callable[[], Any]) -> Any:
    """Run ``work`` with so many threads inside PyTorch."""
    torch = _torch()
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        return work()
    finally:
        torch.set_num_threads(before)


def _logits(parameters: Sequence[Tensor], x: Tensor) -> Tensor:
    torch = _torch()
    for weight, bias in zip(parameters[::2], parameters[1::2]):
        last = weight is parameters[-2]
        x = torch.nn.functional.linear(x, weight, bias)
        x = x if last else torch.tanh(x)
    return x


def _energy(parameters: Sequence[Tensor], x: Tensor, y: Tensor, scale: float):
    likelihood = scale * _torch().nn.functional.cross_entropy(_logits(parameters, x), y, reduction="sum")
    return likelihood + 0.5 * _PRIOR_PRECISION * sum((p**2).sum() for p in parameters)


def _steps(
    clients: Sequence[Client],
    batches: Callable[[Client], Iterator[Client]],
    shapes: Sequence[tuple[int, ...]],
    *,
    batch: int,
    steps: int,
    step_size: float,
    temperature: float,
) -> list[list[Tensor]]:
    """K steps of every client, one client after the other."""
    torch = _torch()
    total = sum(len(y) for _, y in clients)
    ends = []
    for client in clients:
        noise = float(np.sqrt(2 * step_size * temperature * total / len(client[1])))
        parameters = [torch.zeros(shape, requires_grad=True) for shape in shapes]
        for _, (x, y) in zip(range(steps), batches(client)):
            gradients = torch.autograd.grad(_energy(parameters, x, y, total / batch), parameters)
            with torch.no_grad():
                for p, g in zip(parameters, gradients):
                    p.add_(-step_size * g + noise * torch.randn_like(p))
        ends.append(parameters)
    return ends


def with_loader(clients, shapes, *, batch: int, **settings):
    """Batches from a shuffling ``DataLoader`` per client."""

    def batches(client: Client) -> Iterator[Client]:
        tools = _torch().utils.data
        loader = tools.DataLoader(
            tools.TensorDataset(*client), batch_size=batch, shuffle=True, drop_last=True
        )
        while True:
            yield from loader

    return _steps(clients, batches, shapes, batch=batch, **settings)


def indexed(clients, shapes, *, batch: int, **settings):
    """Batches by indexing the client's tensors."""

    def batches(client: Client) -> Iterator[Client]:
        torch = _torch()
        while True:
            index = torch.randperm(len(client[1]))[:batch]
            yield client[0][index], client[1][index]

    return _steps(clients, batches, shapes, batch=batch, **settings)


def vectorised(clients, shapes, *, batch: int, steps: int, step_size: float, temperature: float):
    """All clients at once by ``torch.func.vmap`` of a gradient."""
    torch = _torch()
    total = sum(len(y) for _, y in clients)
    noise = float(np.sqrt(2 * step_size * temperature * len(clients)))

    def energy(parameters, x, y):
        return _energy(parameters, x, y, total / batch)

    gradient = torch.func.vmap(torch.func.grad(energy))
    parameters = [torch.zeros((len(clients), *shape)) for shape in shapes]
    for _ in range(steps):
        index = [torch.randperm(len(y))[:batch] for _, y in clients]
        x = torch.stack([client[0][i] for client, i in zip(clients, index)])
        y = torch.stack([client[1][i] for client, i in zip(clients, index)])
        gradients = gradient(parameters, x, y)
        parameters = [p - step_size * g + noise * torch.randn_like(p) for p, g in zip(parameters, gradients)]
    return parameters
