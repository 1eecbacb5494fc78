"""Step sizes that change along the run."""

from __future__ import annotations

from dataclasses import dataclass

from fald.core.errors import ConfigError


@dataclass(frozen=True)
class PaperDecay:
    """η_k = 1/(2L + m k/12), the decaying step of the paper; made by ``paper_decay``."""

    smoothness: float
    strong_convexity: float

    def __call__(self, step):
        """Step size of the k-th local step, counted from the start of the run."""
        return 1.0 / (2.0 * self.smoothness + self.strong_convexity * step / 12.0)


def paper_decay(smoothness: float, strong_convexity: float) -> PaperDecay:
    """Schedule η_k = 1/(2L + m k/12).

    Parameters
    ----------
    smoothness
        L, the largest curvature of any client energy f^c.
    strong_convexity
        m, the smallest.

    Examples
    --------
    >>> paper_decay(2.0, 1.0)(0), paper_decay(2.0, 1.0)(12)
    (0.25, 0.2)
    """
    if not 0 < strong_convexity <= smoothness < float("inf"):
        raise ConfigError(
            f"paper-decay needs 0 < strong-convexity ≤ smoothness; got {strong_convexity} and {smoothness}"
        )
    return PaperDecay(float(smoothness), float(strong_convexity))
