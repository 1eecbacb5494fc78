"""Logistic regression with 50 parameters, full gradients, 256 chains: 20 clients, and one client."""

from __future__ import annotations

import functools
import importlib.util
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import fald
from fald.lab import methods as samplers
from fald.lab.bench.timing import Case, Contender, Mark, times_faster

_CLIENTS, _ROWS, _FEATURES, _CHAINS = 20, 100, 49, 256
_STEP, _STEPS = 1e-4, 5


def _federation(num_clients: int) -> fald.FederatedData:
    rng = np.random.default_rng(0)
    rows = {}
    for c in range(num_clients):
        x = rng.standard_normal((_ROWS, _FEATURES)).astype(np.float32)
        y = (rng.random(_ROWS) < 1 / (1 + np.exp(-x[:, 0]))).astype(np.float32)
        rows[f"{c:02d}"] = (x, y)
    return fald.FederatedData.from_arrays(rows)


def _energy(model: fald.Model, theta, rows, share):
    terms = jax.vmap(model.flat_loglikelihood, (None, 0))(theta, rows)
    return -model.flat_logprior(theta) - jnp.sum(terms) / share


def _python_loop(dim: int, clients, gradient, chains: int) -> np.ndarray:
    """One step: a compiled gradient, called for every client and chain."""
    generator = np.random.default_rng(0)
    theta, new = np.zeros((chains, dim), np.float32), np.zeros((chains, dim))
    for chain in range(chains):
        for rows, share in clients:
            noise = generator.standard_normal(dim) * np.sqrt(2 * _STEP / share)
            down = _STEP * np.asarray(gradient(theta[chain], rows, share))
            new[chain] += share * (theta[chain] - down + noise)
    return new


def _sample(model, data, rounds: int) -> None:
    method = samplers.fald(local_steps=_STEPS, step_size=_STEP)
    asked: dict[str, Any] = {"num_rounds": rounds, "num_warmup": rounds - 1, "num_chains": _CHAINS}
    fald.sample(0, model, data, method=method, progress=False, **asked)


def cases(quick: bool) -> list[Case]:
    """D: against a Python loop; with one client, against BlackJAX."""
    model = fald.models.logistic_regression(_FEATURES)
    data = _federation(_CLIENTS)
    clients = [(jax.tree.map(jnp.asarray, data.client(name)), p) for name, p in zip(data.names, data.weights)]
    gradient = jax.jit(jax.grad(functools.partial(_energy, model)))
    chains, rounds = (16, 10) if quick else (_CHAINS, 100)
    loop, work = "Python loop, compiled gradient", rounds * _STEPS * _CLIENTS * _CHAINS
    contenders = {
        loop: Contender(lambda: _python_loop(model.dim, clients, gradient, chains), chains * _CLIENTS),
        "fald.sample": Contender(lambda: _sample(model, data, rounds), work),
    }
    title = "logistic regression, d = 50, 20 clients of 100 rows, 256 chains"
    mark = Mark("times the Python loop", times_faster("fald.sample", loop), 10)
    many = Case("D", title, "gradient of one client and chain", loop, contenders, [mark])
    return [many, _one_client(model, 50 if quick else 1000)]


def _one_client(model: fald.Model, rounds: int) -> Case:
    data = _federation(1)
    work = rounds * _STEPS * _CHAINS
    contenders = {"fald.sample": Contender(lambda: _sample(model, data, rounds), work)}
    about = "D, one client", "the same with one client", "gradient"
    if importlib.util.find_spec("blackjax") is None:
        return Case(*about, "fald.sample", contenders, missing=["BlackJAX"])
    import blackjax

    rows = jax.tree.map(jnp.asarray, data.client(data.names[0]))
    algorithm: Any = blackjax.sgld(
        lambda theta, batch: -jax.grad(functools.partial(_energy, model))(theta, batch, 1.0)
    )

    @jax.jit
    def sgld(key):
        def chain(key):
            keys = jax.random.split(key, rounds * _STEPS)
            start = algorithm.init(model.flat_initial_position)
            step = lambda theta, k: (algorithm.step(k, theta, rows, _STEP), None)  # noqa: E731
            return jax.lax.scan(step, start, keys)[0]

        return jax.vmap(chain)(jax.random.split(key, _CHAINS))

    contenders["BlackJAX SGLD"] = Contender(lambda: jax.block_until_ready(sgld(jax.random.key(0))), work)
    mark = Mark("times BlackJAX SGLD", times_faster("fald.sample", "BlackJAX SGLD"), 1.0)
    return Case(*about, "BlackJAX SGLD", contenders, [mark])
