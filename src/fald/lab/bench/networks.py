"""Networks against the loops that one would write by hand: 10 clients, batches of 64, K = 10.

The loop by hand is JAX code of the user's own: one compiled step of one client, called from Python for every
client and step. Rounds of fald are timed at the engine, as in a long run.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import xarray as xr
from jax.flatten_util import ravel_pytree

import fald
from fald.lab import methods as samplers
from fald.lab import networks
from fald.lab.bench.many import images, rounds_of
from fald.lab.bench.timing import Case, Contender, Mark
from fald.results.tree import posterior_groups

_CLIENTS, _ROWS, _PIXELS, _BATCH, _STEPS = 10, 600, 784, 64, 10
_STEP, _TEMPERATURE = 1e-7, 0.1
_BY_HAND = "jitted step in a Python loop"
_CHAINS, _MOMENTUM = 2, 0.9


def cases(quick: bool) -> list[Case]:
    """G: a convolutional network; H: a residual one; I: a perceptron; J: results of many parameters."""
    rows = images(np.random.default_rng(0), _CLIENTS * _ROWS, _PIXELS)
    data = fald.FederatedData(rows, np.arange(_CLIENTS + 1) * _ROWS, tuple(map(str, range(_CLIENTS))))
    method = samplers.fald(local_steps=_STEPS, step_size=_STEP, temperature=_TEMPERATURE, batch_size=_BATCH)
    kicked = replace(method, momentum=_MOMENTUM)
    few, many = (1, 2) if quick else (2, 20)  # rounds of the perceptron are short for the clock
    models = {
        "G": ("convolutional network", networks.cnn(), few),
        "H": ("residual network", networks.resnet(width=4 if quick else 16), 1),
        "I": ("network 784-100-10", fald.models.mlp_classifier(_PIXELS, 10), many),
    }
    several, underdamped = f"fald.InProcess, {_CHAINS} chains", "fald.InProcess, momentum"

    def cpu(ours: str, other: str, times: float = 1) -> Callable[..., float]:
        return lambda t, limits: t[ours].cpu / times / t[other].cpu

    def case(name: str, title: str, model: fald.Model, rounds: int) -> Case:
        contenders = {
            _BY_HAND: Contender(_by_hand(model, rows, rounds), rounds),
            "fald.InProcess": Contender(rounds_of(model, data, method, fald.full(), count=rounds), rounds),
            several: Contender(
                rounds_of(model, data, method, fald.full(), count=rounds, chains=_CHAINS), rounds
            ),
            underdamped: Contender(rounds_of(model, data, kicked, fald.full(), count=rounds), rounds),
        }
        marks = [
            Mark("CPU-seconds, times the loop by hand", cpu("fald.InProcess", _BY_HAND), 1.1, at_most=True),
            Mark(
                f"CPU-seconds of {_CHAINS} chains, times {_CHAINS} runs of one",
                cpu(several, "fald.InProcess", _CHAINS),
                1.1,
                at_most=True,
            ),
            Mark(
                "CPU-seconds with momentum, times without",
                cpu(underdamped, "fald.InProcess"),
                1.2,
                at_most=True,
            ),
        ]
        about = f"{title}, {model.dim:,} parameters, {_CLIENTS} clients, batch {_BATCH}, K = {_STEPS}"
        return Case(name, about, "round of all clients", _BY_HAND, contenders, marks)

    return [*[case(name, *about) for name, about in models.items()], _summaries(quick)]


def _summaries(quick: bool) -> Case:
    """The table and the verdict of draws of a million parameters."""
    shape = (1000, 100 if quick else 1000)
    model = fald.Model(lambda p: jnp.zeros(()), lambda p, x: jnp.zeros(()), {"w": jnp.zeros(shape)})
    flat = np.random.default_rng(0).standard_normal((4, 30, model.dim), np.float32)
    tree = xr.DataTree.from_dict(posterior_groups(model, flat))
    contenders = {
        "sum of squares in NumPy": Contender(lambda: np.square(flat).sum(), 1),
        "fald.summary": Contender(lambda: fald.summary(tree), 1),
        "diagnostics.verdict": Contender(lambda: fald.diagnostics.verdict(tree), 1),
    }
    marks = [
        Mark(f"CPU-seconds of {name}", lambda t, limits, name=name: t[name].cpu, 3.0, at_most=True)
        for name in list(contenders)[1:]
    ]
    about = f"results of {model.dim:,} parameters, 4 chains of 30 draws"
    return Case("J", about, "all draws", "sum of squares in NumPy", contenders, marks)


def _by_hand(model: fald.Model, rows: Any, rounds: int) -> Callable[[], object]:
    """FA-LD as one would write it: nothing of this package but the densities of the model."""
    start, unravel = ravel_pytree(model.initial_position)
    x, y = (np.asarray(part).reshape(_CLIENTS, _ROWS, *part.shape[1:]) for part in rows)
    total = _CLIENTS * _ROWS

    def energy(position, x, y):
        terms = jax.vmap(lambda a, b: model.loglikelihood_fn(position, (a, b)))(x, y)
        return -model.logprior_fn(position) - total / _BATCH * jnp.sum(terms)

    @jax.jit
    def step(theta, key, x, y):
        gradient = ravel_pytree(jax.grad(energy)(unravel(theta), x, y))[0]
        noise = jax.random.normal(key, theta.shape)
        return theta - _STEP * gradient + jnp.sqrt(2 * _STEP * _TEMPERATURE * _CLIENTS) * noise

    def run():
        rng, key, theta = np.random.default_rng(0), jax.random.key(0), start
        for _ in range(rounds):
            ends = []
            for client in range(_CLIENTS):
                own = theta
                for _ in range(_STEPS):
                    key, noise_key = jax.random.split(key)
                    taken = rng.choice(_ROWS, _BATCH, replace=False)
                    own = step(own, noise_key, x[client][taken], y[client][taken])
                ends.append(own)
            theta = sum(ends) / _CLIENTS
        return jax.block_until_ready(theta)

    return run
