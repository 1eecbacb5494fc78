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

from fald.core.errors import ConfigError, DataError
from fald.core.types import float_dtype
from fald.problem.model import Model

if TYPE_CHECKING:
    from fald.problem.data import FederatedData

Features = int | Sequence[str]


def feature_names(features: Features) -> list[str]:
    """Names of features from their number or names."""
    names = [f"x{i}" for i in range(features)] if isinstance(features, int) else [str(f) for f in features]
    if len(set(names)) != len(names):
        raise ConfigError(f"features must be distinct; got {names}")
    return names


def positive(name: str, value: float) -> float:
    """Return a finite number > 0, or raise ``ConfigError`` naming it."""
    if not (np.isfinite(value) and value > 0):
        raise ConfigError(f"{name} must be a finite number > 0; got {value!r}")
    return float(value)


def normal_logprior(scale: float) -> Callable[[Any], Any]:
    """Independent normals of one scale around zero, up to a constant."""

    def logprior_fn(position):
        squares = sum(jnp.sum(leaf**2) for leaf in jax.tree.leaves(position))
        return -0.5 * squares / scale**2

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
    if x.size and x.dtype.kind == "f" and float(np.max(np.abs(x))) > limit:
        row, column = divmod(int(np.argmax(np.abs(x))), x.shape[1])
        raise DataError(
            f"feature {features[column]!r} has the value {x[row, column]:g}, "
            f"too large to square in {float_dtype()}",
            hint="correct it, or declare a scaling for the column",
        )
    if np.ndim(y) != 1:
        raise DataError(
            f"outcomes must be one number per row; y has shape {np.shape(y)}", hint="pass y.ravel()"
        )
    return np.asarray(y)


def regression(
    features: Features,
    prior_scale: float,
    loglikelihood_fn: Callable[[Any, Any], Any],
    mean_fn: Callable[[Any], Any],
    check_outcome: Callable[[np.ndarray, bool], str],
    simulate_fn: Callable[[Any, Any, Any], Any] | None,
    ratio: str | None,
    name: str,
    residual_bound: float | None = None,
) -> Model:
    """A regression whose outcome depends on a + xᵀb alone.

    Parameters
    ----------
    features, prior_scale
        Number or names of the features, and the scale of the normal priors of a and b_j.
    loglikelihood_fn, mean_fn, simulate_fn
        Log likelihood of one example ``(x, y)``; expected outcome from a + xᵀb; simulated outcome of one row.
    check_outcome
        ``(y, whole) -> problem``: what is wrong with outcomes, of all clients or of one; empty if nothing.
    ratio
        What the exponential of a coefficient is called; None: nothing.
    name
        Name of the family.
    residual_bound
        Largest change of ∂log likelihood/∂(a + xᵀb) when y and x are replaced, where there is one.
    """
    names = feature_names(features)
    scale = positive("prior-scale", prior_scale)

    def check_fn(data: FederatedData) -> None:
        problem = check_outcome(outcomes(data, names), not data.part)
        if problem:
            raise DataError(f"{name} regression: {problem}", hint="check the target column")

    return Model(
        logprior_fn=normal_logprior(scale),
        loglikelihood_fn=loglikelihood_fn,
        initial_position={"intercept": jnp.array(0.0), "coefficient": jnp.zeros(len(names))},
        predict_fn=lambda position, x: mean_fn(linear_predictor(position, x)),
        simulate_fn=simulate_fn,
        dims={"coefficient": ["feature"]},
        coords={"feature": names},
        ratios={"coefficient": ratio} if ratio else {},
        sensitivity_fn=None if residual_bound is None else sensitivity(residual_bound),
        check_fn=check_fn,
        prior=f"intercept and every coefficient Normal(0, {scale:g})",
        name=name,
    )


def sensitivity(residual_bound: float) -> Callable[[np.ndarray], float]:
    """Δ of a regression whose gradient is residual × (1, x) with a bounded residual."""

    def sensitivity_fn(bounds: np.ndarray) -> float:
        largest = float(np.sqrt(1 + np.sum(np.max(np.abs(bounds), axis=1) ** 2)))
        return 2 * residual_bound * largest

    return sensitivity_fn


def check_classes(num_classes: int, names: Sequence[str]) -> Callable[[FederatedData], None]:
    """A ``check_fn`` for outcomes that are one of several classes."""

    def check_fn(data: FederatedData) -> None:
        y = outcomes(data, names)
        if np.any(y != np.floor(y)) or np.any(y < 0) or np.any(y >= num_classes):
            raise DataError(
                f"labels must be whole numbers 0 to {num_classes - 1}; got {np.min(y)} to {np.max(y)}",
                hint="recode the target, or change num-classes",
            )
        if not data.part and len(np.unique(y)) < 2:
            raise DataError(f"all labels are {y[0]}; a classifier needs at least two classes")

    return check_fn


def check_num_classes(num_classes: int) -> int:
    """Return a number of classes, or raise ``ConfigError``."""
    if not isinstance(num_classes, int) or num_classes < 2:
        raise ConfigError(f"num-classes must be a whole number ≥ 2; got {num_classes!r}")
    return num_classes


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
