"""What an accounting found, and all it rests on."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np

from fald.privacy.events import StepNoise, View
from fald.privacy.settings import RunSettings

Method = str  # of ``fald.privacy.accountants.ACCOUNTANTS``
Sampling = Literal["without-replacement", "poisson"]
Shown = Literal["hidden", "realised"]

_SHAPE = ("num_clients", "local_steps", "num_rounds", "num_chains")
_NOISE = ("temperature", "correlation", "batch_size", "scheme", "num_participants", "noise")


@dataclass(frozen=True, eq=False)
class PrivacyReport:
    """What was accounted, how, and the ε that came out.

    Attributes
    ----------
    epsilon
        (N,) ε of each client's records at ``delta``; an upper bound.
    settings, noise
        The run, and the noise multipliers derived from it; how ε was obtained from them is in the rest.
    rounds_taken_part
        (N,) rounds, over all chains: expected where participation is hidden, else counted.
    grid_interval, rdp_order
        (N,) width of the grid of privacy losses, NaN where "rdp" gave ε; Rényi order that gave it, NaN where
        "pld" did.
    """

    epsilon: np.ndarray
    delta: float
    method: Method
    sampling: Sampling
    view: View
    num_colluders: int
    participation: Shown
    settings: RunSettings
    noise: StepNoise
    rounds_taken_part: np.ndarray
    grid_interval: np.ndarray
    rdp_order: np.ndarray

    @property
    def worst(self) -> float:
        """Largest ε of any client."""
        return float(np.max(self.epsilon))

    @property
    def worst_client(self) -> int:
        """Index of a client with the largest ε."""
        return int(np.argmax(self.epsilon))

    def to_dict(self) -> dict[str, Any]:
        """All of it in plain numbers, lists and strings."""
        s, z = self.settings, self.noise.multiplier
        steps = z if z.ndim == 1 else z.min(axis=1)
        clients = [
            {
                "client": c,
                "rows": s.sizes[c],
                "weight": float(s.weights[c]),
                "batch_fraction": float(self.noise.batch_fraction[c]),
                "inclusion": float(self.noise.inclusion[c]),
                "rounds_taken_part": float(self.rounds_taken_part[c]),
                "noise_multiplier": float(steps[c]),
                "epsilon": _plain(self.epsilon[c]),
                "grid_interval": _plain(self.grid_interval[c]),
                "rdp_order": _plain(self.rdp_order[c]),
            }
            for c in range(s.num_clients)
        ]
        eta = np.atleast_1d(s.step_size)
        return {
            "epsilon": _plain(self.worst),
            "delta": self.delta,
            "worst_client": self.worst_client,
            "method": self.method,
            "upper_bound": True,
            "sampling": self.sampling if s.batch_size is not None else "all rows",
            "view": self.view,
            "num_colluders": self.num_colluders,
            "participation": self.participation,
            "settings": {
                **{name: getattr(s, name) for name in _SHAPE},
                "step_size_least": float(eta.min()),
                "step_size_largest": float(eta.max()),
                **{name: getattr(s, name) for name in _NOISE},
                "sensitivity": s.delta_gradient,
                "clip_norm": s.clip_norm,
            },
            "clients": clients,
        }


def _plain(value: float) -> float | str | None:
    return None if math.isnan(value) else "infinite" if math.isinf(value) else float(value)
