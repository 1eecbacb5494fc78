"""Scores of predicted class probabilities, and differences of them."""

from __future__ import annotations

from typing import Any

import numpy as np

from fald.results.probabilities import Scores, auroc, entropy, scores

__all__ = ["Scores", "auroc", "entropy", "paired", "scores"]


def paired(differences: Any) -> tuple[float, float]:
    """Mean of paired differences (pandas) and half the width of its 95% interval; infinite for one seed."""
    from scipy.stats import t

    count = len(differences)
    if count < 2:
        return float(differences.mean()), float("inf")
    return float(differences.mean()), float(t.ppf(0.975, count - 1) * differences.std() / np.sqrt(count))
