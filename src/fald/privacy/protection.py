"""Privacy of a run while it runs: what it asked for, what it has spent, when it must stop."""

from __future__ import annotations

import secrets
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

import numpy as np

from fald.core.errors import ConfigError

if TYPE_CHECKING:
    from fald.problem.data import FederatedData
    from fald.problem.model import Model


@dataclass(frozen=True)
class Protection:
    """What a private run asks for; give it to ``fald.sample`` as ``privacy``.

    Parameters
    ----------
    delta
        δ of the guarantee; choose it well below one over the rows of a client.
    max_epsilon
        Budget: the run stops before a client's ε would exceed it. None: no limit, ε is only recorded.
    client_noise
        ``"entropy"``: each client's noise and batches come from the operating system and are kept
        nowhere, so a private run cannot be repeated bit for bit. ``"seeded"``: a simulation, which
        protects nobody and says so.
    sensitivity
        Δ, stated by the user for a model whose gradients are bounded. Needed only without
        ``clip_norm`` and without declared feature bounds.
    method
        Accountant, ``"pld"``, ``"rdp"`` or that of an installed package.
    view
        What is seen of uploads: ``"server"``, each of them; ``"summed"``, only sums over sites, where a
        secure sum carries them.

    Examples
    --------
    >>> Protection(delta=1e-5, max_epsilon=2.0).client_noise
    'entropy'
    """

    delta: float
    max_epsilon: float | None = None
    client_noise: Literal["entropy", "seeded"] = "entropy"
    sensitivity: float | None = None
    method: str = "pld"
    view: Literal["server", "summed"] = "server"

    def __post_init__(self) -> None:
        if self.client_noise not in ("entropy", "seeded"):
            raise ConfigError(f"client-noise must be 'entropy' or 'seeded'; got {self.client_noise!r}")
        if self.max_epsilon is not None and not 0 < self.max_epsilon < float("inf"):
            raise ConfigError(f"max-epsilon must be > 0 and finite; got {self.max_epsilon!r}")


def secret_words() -> np.ndarray:
    """Two words of operating-system entropy, the root of what only clients may know."""
    return np.frombuffer(secrets.token_bytes(8), np.uint32)


def bounded_sensitivity(model: Model, data: FederatedData) -> float | None:
    """Δ from declared feature bounds, where the model can derive it; else None."""
    if model.sensitivity_fn is None or data.bounds is None:
        return None
    return float(model.sensitivity_fn(data.bounds))
