"""Built-in models: regressions, a Gaussian location, a small neural classifier.

Every regression takes examples ``(x, y)`` with ``x`` the feature vector of one row, and has the
position ``{"intercept": (), "coefficient": (features,)}`` (with a class axis in front for the
classifiers). Priors are independent normals of scale ``prior_scale`` around zero.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
import numpy as np

from fald.core.checks import check_positive
from fald.core.errors import ConfigError, DataError
from fald.core.types import float_dtype
from fald.problem.model import Model, concave, derived

if TYPE_CHECKING:
    from fald.problem.data import FederatedData

Features = int | Sequence[str]
_PART = 1 << 20  # rows that are looked at at once


def feature_names(features: Features) -> list[str]:
    """Names of features from their number or names."""
    names = [f"x{i}" for i in range(features)] if isinstance(features, int) else [str(f) for f in features]
    if len(set(names)) != len(names):
        raise ConfigError(f"features must be distinct; got {names}")
    return names


def normal_logprior(scale: float) -> Callable[[Any], Any]:
    """Independent normals of one scale around zero, up to a constant."""

    def derivatives(positions: np.ndarray, order: int) -> list[np.ndarray]:
        slopes = -positions / scale**2
        second = np.broadcast_to(
            -np.eye(positions.shape[1]) / scale**2, (*positions.shape, positions.shape[1])
        )
        return [np.sum(slopes * positions, axis=1) / 2, slopes, second][: order + 1]

    @concave
    @derived(derivatives)
    def logprior_fn(p):
        return -0.5 * sum(jnp.sum(leaf**2) for leaf in jax.tree.leaves(p)) / scale**2

    return logprior_fn


def linear_predictor(position, x):
    """a + xᵀb of one row."""
    return position["intercept"] + jnp.asarray(x, float_dtype()) @ position["coefficient"]


def outcomes(data: FederatedData, features: Sequence[str]) -> np.ndarray:
    """The outcomes of rows ``(x, y)``; ``DataError`` if rows are others, or x does not fit the features."""
    rows = data.rows
    if not (isinstance(rows, tuple) and len(rows) == 2):
        raise DataError("this model needs examples (x, y)", hint="build the data from {name: (X, y)}")
    x, y = rows
    if np.ndim(x) != 2 or x.shape[1] != len(features):
        raise DataError(
            f"the model has {len(features)} features {list(features)}; the data's X has shape {np.shape(x)}",
            hint="give the model as many features as X has columns",
        )
    limit = float(np.sqrt(np.finfo(float_dtype()).max))
    for first in range(0, len(x), _PART) if x.size and x.dtype.kind == "f" else ():
        part = np.abs(x[first : first + _PART])
        if float(np.max(part)) > limit:
            row, column = divmod(int(np.argmax(part)), x.shape[1])
            raise DataError(
                f"feature {features[column]!r} has the value {x[first + row, column]:g}, "
                f"too large to square in {float_dtype()}",
                hint="correct it, or declare a scaling for the column",
            )
    if np.ndim(y) != 1:
        raise DataError(
            f"outcomes must be one number per row; y has shape {np.shape(y)}", hint="pass y.ravel()"
        )
    return np.asarray(y)


def distinct(y: np.ndarray) -> np.ndarray:
    """Distinct outcomes in ascending order, found part by part: rows may be mapped from a file."""
    parts = [np.unique(y[first : first + _PART]) for first in range(0, len(y), _PART)]
    return np.unique(np.concatenate(parts)) if parts else np.asarray(y)


def regression(
    features: Features,
    prior_scale: float,
    *,
    name: str,
    loglikelihood_fn: Callable[[Any, Any], Any],
    mean_fn: Callable[[Any], Any],
    check_outcome: Callable[[np.ndarray, bool], str],
    **others: Any,
) -> Model:
    """A regression whose outcome depends on a + xᵀb alone.

    Parameters
    ----------
    features, prior_scale
        Number or names of the features, and the scale of the normal priors of a and b_j.
    name
        Name of the family.
    loglikelihood_fn, mean_fn
        Log likelihood of one example ``(x, y)``; expected outcome from a + xᵀb.
    check_outcome
        ``(values, whole) -> problem``: what is wrong with distinct outcomes, of all clients or of one; empty
        if nothing.
    others
        What else the ``Model`` says of itself.
    """
    names = feature_names(features)

    def check_fn(data: FederatedData) -> None:
        problem = check_outcome(distinct(outcomes(data, names)), not data.part)
        if problem:
            raise DataError(f"{name} regression: {problem}", hint="check the target column")

    return Model(
        logprior_fn=normal_logprior(check_positive("prior-scale", prior_scale)),
        loglikelihood_fn=loglikelihood_fn,
        initial_position={"intercept": jnp.array(0.0), "coefficient": jnp.zeros(len(names))},
        predict_fn=lambda position, x: mean_fn(linear_predictor(position, x)),
        dims={"coefficient": ["feature"]},
        coords={"feature": names},
        check_fn=check_fn,
        prior=f"intercept and every coefficient Normal(0, {prior_scale:g})",
        name=name,
        **others,
    )


def sensitivity(residual_bound: float) -> Callable[[np.ndarray], float]:
    """Δ of a regression whose gradient is residual × (1, x) with a bounded residual."""
    return lambda bounds: 2 * residual_bound * float(np.sqrt(1 + np.sum(np.max(np.abs(bounds), axis=1) ** 2)))


def check_classes(num_classes: int, names: Sequence[str]) -> Callable[[FederatedData], None]:
    """A ``check_fn`` for outcomes that are one of several classes."""

    def check_fn(data: FederatedData) -> None:
        y = distinct(outcomes(data, names))
        if np.any(y != np.floor(y)) or np.any(y < 0) or np.any(y >= num_classes):
            raise DataError(
                f"labels must be whole numbers 0 to {num_classes - 1}; got {np.min(y)} to {np.max(y)}",
                hint="recode the target, or change num-classes",
            )
        if not data.part and len(y) < 2:
            raise DataError(f"all labels are {y[0]}; a classifier needs at least two classes")

    return check_fn


def categorical_loglikelihood(logits_fn: Callable[[Any, Any], Any]):
    """Log probability of the class y given logits of x, of one row or, classes in front, of many."""

    def loglikelihood_fn(position, example):
        x, y = example
        logits = logits_fn(position, jnp.asarray(x, float_dtype()).T)
        labels = jnp.expand_dims(jnp.arange(len(logits)), tuple(range(1, logits.ndim)))
        # a one-hot product keeps gradients free of scatters, which are slow on CPU
        chosen = jnp.sum(jnp.where(labels == y, logits, 0), axis=0)
        return chosen - jax.nn.logsumexp(logits, axis=0)

    return loglikelihood_fn
