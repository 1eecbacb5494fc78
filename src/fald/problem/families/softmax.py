"""Softmax regression of one of several classes."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np

from fald.core.checks import check_count, check_positive
from fald.core.types import float_dtype
from fald.problem.families.base import (
    Features,
    categorical_loglikelihood,
    check_classes,
    feature_names,
    normal_logprior,
    sensitivity,
)
from fald.problem.model import Model, bounded, predicted, takes_rows


def _chances(eta):
    """Probabilities of the classes."""
    chances = np.exp(eta - np.max(eta, axis=0))
    chances /= np.sum(chances, axis=0)
    return chances


def _values(eta, y, _, totals):
    top = np.max(eta, axis=0)
    chosen = eta[y[:, 0].astype(np.intp), np.arange(len(y))] - top
    np.exp(np.subtract(eta, top, out=eta), out=eta)
    return totals(chosen) - totals.of_logs(np.sum(eta, axis=0), most=len(eta))


def _slopes(eta, y, _):
    chances = _chances(eta)
    return [(y == j) - chance for j, chance in enumerate(chances)]


def _bends(eta, y, _):
    chances = _chances(eta)
    return [[one * (other - (i == j)) for j, other in enumerate(chances)] for i, one in enumerate(chances)]


def softmax_regression(features: Features, num_classes: int, *, prior_scale: float = 2.5) -> Model:
    """Labels y ∈ {0, …, C−1}: P(y=j) ∝ exp(a_j + b_jᵀx), all a, b ~ N(0, prior_scale²).

    Coefficients are stored (classes, features): the transposed layout is several times slower. Logits of
    a batch are laid out (classes, rows), so that sums over classes run along rows.

    Examples
    --------
    >>> softmax_regression(784, 10).dim
    7850
    """
    names, classes = feature_names(features), check_count("num-classes", num_classes, 2)

    def logits_fn(position, x):
        return position["coefficient"] @ x + jnp.expand_dims(position["intercept"], tuple(range(1, x.ndim)))

    bound = bounded(curvature=classes / 2, rows=2 * classes / (classes - 1))
    declared = predicted(_values, _slopes, _bends, single=True)
    return Model(
        logprior_fn=normal_logprior(check_positive("prior-scale", prior_scale)),
        loglikelihood_fn=declared(bound(takes_rows(categorical_loglikelihood(logits_fn)))),
        initial_position={"intercept": jnp.zeros(classes), "coefficient": jnp.zeros((classes, len(names)))},
        predict_fn=lambda p, x: jax.nn.softmax(logits_fn(p, jnp.asarray(x, float_dtype()))),
        dims={"coefficient": ["class", "feature"], "intercept": ["class"]},
        coords={"class": list(range(classes)), "feature": names},
        sensitivity_fn=sensitivity(2.0**0.5),
        check_fn=check_classes(classes, names),
        name="softmax",
    )
