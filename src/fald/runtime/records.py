"""What a run keeps: where to go on, and the draws made so far."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from fald.core.types import PyTree


class RunState(NamedTuple):
    """All that is needed to continue: rounds done, server state per chain, client memory."""

    round: int
    server: PyTree
    memory: PyTree


class Records(NamedTuple):
    """Kept draws, the draw axis in front of the chain axis.

    ``client`` and ``weight`` (draws, chains, slots) say who took part and with what weight (zero:
    empty slot); ``drift`` how far each ended from the average. ``energy`` is that of the position
    broadcast at the start of the draw's round.
    """

    round: np.ndarray
    position: np.ndarray
    energy: np.ndarray
    client: np.ndarray
    weight: np.ndarray
    drift: np.ndarray
