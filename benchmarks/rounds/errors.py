"""How far draws are from a reference, in the units a reader cares about."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from benchmarks.rounds.references import Reference


def errors(draws: np.ndarray, reference: Reference) -> tuple[float, float]:
    """Worst error over coordinates of the mean, in posterior sd, and of the sd, relative.

    Parameters
    ----------
    draws
        (…, dim) equally weighted draws in the flat coordinates of the model.
    reference
        Mean and sd to compare with. It has Monte-Carlo errors of its own.
    """
    flat = np.asarray(draws, np.float64).reshape(-1, len(reference.mean))
    of_mean = np.abs(flat.mean(0) - reference.mean) / reference.sd
    of_sd = np.abs(flat.std(0, ddof=1) / reference.sd - 1)
    return float(of_mean.max()), float(of_sd.max())
