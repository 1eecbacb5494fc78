"""What a run is, to recognise it when it resumes."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from fald.core.version import __version__
from fald.problem.data import FederatedData
from fald.problem.model import Model


def identity(
    model: Model, data: FederatedData, settings: dict[str, Any], others: dict[str, Any] | None = None
) -> dict[str, Any]:
    """Settings, and fingerprints of what is too large to write down; ``others`` by what they are of."""
    known = {"the data": data.fingerprint(), "the densities of the model": density_probe(model, data)}
    package = {"package": model.origin} if model.origin else {}
    return {
        "settings": {**settings, "model": model.name, **package, "version": __version__},
        "fingerprints": {**known, **(others or {})},
    }


def density_probe(model: Model, data: FederatedData) -> list[str]:
    """Log prior and log likelihood at a point, which tell models of one name apart.

    The examples are made up, so that nothing of the rows gets into a file.
    """
    theta = model.flat_initial_position + 0.1 * jnp.cos(jnp.arange(model.dim))
    examples = [
        jax.tree.map(lambda a, v=v: jnp.asarray(np.full(a.shape[1:], v, a.dtype)), data.rows) for v in (0, 1)
    ]
    loglikelihood = jax.jit(model.flat_loglikelihood)
    return digits([model.flat_logprior(theta), *[loglikelihood(theta, example) for example in examples]])


def digits(values: Iterable[Any]) -> list[str]:
    """Numbers as text, with so few digits that they do not depend on the machine."""
    return [f"{float(v):.4g}" for v in values]


def array_hash(array: Any) -> str:
    """A short hash of an array's bytes."""
    return hashlib.sha256(np.asarray(array).tobytes()).hexdigest()[:16]
