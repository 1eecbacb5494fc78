"""Random posteriors: a model, rows at sites, and the exact mean and sd of every parameter.

Models are made once for every shape, and what is random about a problem travels in its rows, so that
programs are compiled once for all problems of a shape.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

import fald

RESULTS = Path(__file__).parent / "results"
WIDE = 1e4  # sd of the prior of posteriors given by their density; it changes nothing
SHARES = np.array([0.2, 0.3, 0.5], np.float32)


class Problem(NamedTuple):
    """A posterior with known means and sds (d,), and what it is in a few words."""

    model: fald.Model
    data: fald.FederatedData
    mean: np.ndarray
    sd: np.ndarray
    what: str


GENERATORS: dict[str, Callable[[np.random.Generator], Problem]] = {}


def generator(function: Callable[[np.random.Generator], Problem]):
    """Register a generator under its name."""
    GENERATORS[function.__name__.replace("_", " ")] = function
    return function


def make(name: str, number: int) -> Problem:
    """The problem of this number: every one has a random stream of its own."""
    words = [sum(ord(c) * 31**i for i, c in enumerate(name)) % 2**32, number]
    return GENERATORS[name](np.random.default_rng(words))


def shared(*parameters: Any) -> fald.FederatedData:
    """Three sites, each with its share of one log density and the parameters of it."""
    arrays = [np.asarray(p, np.float32) for p in parameters]
    return fald.FederatedData.from_arrays(
        {f"s{i}": tuple(a[None] for a in (share, *arrays)) for i, share in enumerate(SHARES)}
    )


def rotation(dim: int, rng: np.random.Generator) -> np.ndarray:
    """A random rotation (d, d), rounded to what rows can carry."""
    return np.linalg.qr(rng.standard_normal((dim, dim)))[0].astype(np.float32).astype(float)
