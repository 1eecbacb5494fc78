"""Scores of predicted class probabilities."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np


class Scores(NamedTuple):
    """Accuracy, Brier score and expected calibration error."""

    accuracy: float
    brier: float
    ece: float


def scores(probabilities: np.ndarray, labels: np.ndarray, bins: int = 15) -> Scores:
    r"""Score (rows, classes) probabilities against (rows,) labels.

    The Brier score is the mean over rows of Σ_j (p_j − 1{y=j})², between 0 and 2. The calibration error is
    Σ_b (n_b/n)·|accuracy_b − confidence_b| over bins of equal width of the largest probability.

    Examples
    --------
    >>> scores(np.array([[0.8, 0.2], [0.4, 0.6]]), np.array([0, 0]))
    Scores(accuracy=0.5, brier=0.4, ece=0.4)
    """
    p = np.asarray(probabilities, float)
    rows = np.arange(len(p))
    chosen, confidence = p.argmax(1), p.max(1)
    right = chosen == labels
    brier = float(np.mean((p**2).sum(1) - 2 * p[rows, labels] + 1))
    # a bin holds its upper end: confidence 1 belongs to the last
    place = np.clip(np.ceil(confidence * bins).astype(int) - 1, 0, bins - 1)
    gaps = np.bincount(place, weights=right - confidence, minlength=bins)
    return Scores(float(right.mean()), round(brier, 12), round(float(np.abs(gaps).sum() / len(p)), 12))


def paired(differences: Any) -> tuple[float, float]:
    """Mean of paired differences (pandas) and half the width of its 95% interval; infinite for one seed."""
    from scipy.stats import t

    count = len(differences)
    if count < 2:
        return float(differences.mean()), float("inf")
    return float(differences.mean()), float(t.ppf(0.975, count - 1) * differences.std() / np.sqrt(count))


def entropy(probabilities: np.ndarray) -> np.ndarray:
    """Entropy of each row of probabilities, in nats.

    Examples
    --------
    >>> entropy(np.array([[0.5, 0.5], [1.0, 0.0]])).round(4)
    array([0.6931, 0.    ])
    """
    from scipy.special import entr

    return entr(np.asarray(probabilities, float)).sum(axis=1)


def auroc(low: np.ndarray, high: np.ndarray) -> float:
    """Chance that a value of ``high`` exceeds one of ``low``; ties count half.

    Examples
    --------
    >>> auroc(np.array([0.0, 1.0]), np.array([1.0, 2.0]))
    0.875
    """
    from scipy.stats import mannwhitneyu

    return float(mannwhitneyu(high, low).statistic / (len(low) * len(high)))
