"""Accountants by name: how the losses of local steps are carried and read off at δ.

Installed packages add their own through the entry-point group ``fald.accountants``.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple, Protocol

import numpy as np

from fald.core.registry import Registry
from fald.privacy.compose import Loss


class Releases(NamedTuple):
    """The local steps of one client that an accountant is made for.

    ``multipliers`` of noise that occur, and ``counts`` of how often each is expected to; ``rows`` of a batch
    and ``size`` of the client; how batches are drawn; the ``delta`` at which the result will be read.
    """

    multipliers: np.ndarray
    counts: np.ndarray
    rows: int
    size: int
    sampling: str
    delta: float


class Steps(Protocol):
    """What an accountant makes for one client."""

    def step(self, multiplier: float) -> Loss:
        """Loss of one local step."""
        ...

    def epsilon(self, loss: Loss, delta: float) -> float:
        """ε of a composed loss at δ, an upper bound."""
        ...

    def delta(self, loss: Loss, epsilon: float) -> float:
        """δ of a composed loss at ε, an upper bound."""
        ...

    def precision(self, loss: Loss, delta: float) -> tuple[float, float]:
        """Width of the grid of losses, and Rényi order that gave ε; NaN where there is none."""
        ...


@dataclass(frozen=True)
class Accountant:
    """One accountant: ``steps(releases, total)``, with ``total`` the loss of the run from candidate steps."""

    steps: Callable[[Releases, Callable[[Steps], Loss]], Steps]
    says: str  # in a privacy statement, of the method
    instead: str = ""  # added there where Rényi divergences had to take its place


ACCOUNTANTS = Registry(
    "accountant",
    "fald.accountants",
    {"pld": "fald.privacy.pld:accountant", "rdp": "fald.privacy.rdp:accountant"},
)
