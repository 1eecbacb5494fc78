"""Built-in models: regressions, a Gaussian location, a small neural classifier.

Every regression takes examples ``(x, y)`` with ``x`` the feature vector of one row, and has the
position ``{"intercept": (), "coefficient": (features,)}`` (with a class axis in front for the
classifiers). Priors are independent normals of scale ``prior_scale`` around zero.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
import numpy as np

from fald.errors import ConfigError, DataError
from fald.models.base import Model, takes_rows
from fald.types import float_dtype

if TYPE_CHECKING:
    from fald.data import FederatedData

Features = int | Sequence[str]


def _feature_names(features: Features) -> list[str]:
    names = [f"x{i}" for i in range(features)] if isinstance(features, int) else [str(f) for f in features]
    if len(set(names)) != len(names):
        raise ConfigError(f"features must be distinct; got {names}")
    return names


def _positive(name: str, value: float) -> float:
    if not (np.isfinite(value) and value > 0):
        raise ConfigError(f"{name} must be a finite number > 0; got {value!r}")
    return float(value)


def _normal_logprior(scale: float) -> Callable[[Any], Any]:
    def logprior_fn(position):
        squares = sum(jnp.sum(leaf**2) for leaf in jax.tree.leaves(position))
        return -0.5 * squares / scale**2

    return logprior_fn


def _linear_predictor(position, x):
    return position["intercept"] + jnp.asarray(x, float_dtype()) @ position["coefficient"]


@jax.custom_jvp
def _softplus(x):
    """log(1 + exp(x)); its derivative is one sigmoid, four times cheaper than that of JAX's own."""
    return jax.nn.softplus(x)


@_softplus.defjvp
def _softplus_jvp(primals, tangents):
    (x,), (dx,) = primals, tangents
    return _softplus(x), jax.nn.sigmoid(x) * dx


def _outcomes(data: FederatedData, features: Sequence[str]) -> np.ndarray:
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


def _regression(
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
    names = _feature_names(features)
    scale = _positive("prior-scale", prior_scale)

    def check_fn(data: FederatedData) -> None:
        problem = check_outcome(_outcomes(data, names), not data.part)
        if problem:
            raise DataError(f"{name} regression: {problem}", hint="check the target column")

    return Model(
        logprior_fn=_normal_logprior(scale),
        loglikelihood_fn=loglikelihood_fn,
        initial_position={"intercept": jnp.array(0.0), "coefficient": jnp.zeros(len(names))},
        predict_fn=lambda position, x: mean_fn(_linear_predictor(position, x)),
        simulate_fn=simulate_fn,
        dims={"coefficient": ["feature"]},
        coords={"feature": names},
        ratios={"coefficient": ratio} if ratio else {},
        sensitivity_fn=None if residual_bound is None else _sensitivity(residual_bound),
        check_fn=check_fn,
        name=name,
    )


def _sensitivity(residual_bound: float) -> Callable[[np.ndarray], float]:
    """Δ of a regression whose gradient is residual × (1, x) with a bounded residual."""

    def sensitivity_fn(bounds: np.ndarray) -> float:
        largest = float(np.sqrt(1 + np.sum(np.max(np.abs(bounds), axis=1) ** 2)))
        return 2 * residual_bound * largest

    return sensitivity_fn


def logistic_regression(features: Features, *, prior_scale: float = 2.5) -> Model:
    """Binary outcome y ∈ {0, 1}: P(y=1) = 1/(1+exp(−(a + xᵀb))), with a, b_j ~ N(0, prior_scale²).

    Examples
    --------
    >>> logistic_regression(["age", "treatment"]).parameter_names
    ['coefficient[age]', 'coefficient[treatment]', 'intercept']
    """

    def loglikelihood_fn(position, example):
        x, y = example
        logit = _linear_predictor(position, x)
        return y * logit - _softplus(logit)

    def check_outcome(y, whole):
        values = np.unique(y)
        if not np.all(np.isin(values, (0, 1))):
            return f"outcomes must be 0 or 1; got {values[:5].tolist()}"
        if whole and len(values) < 2:
            return f"all outcomes are {values[0]}; with one class only the effects are not identified"
        return ""

    return _regression(
        features,
        prior_scale,
        loglikelihood_fn,
        jax.nn.sigmoid,
        check_outcome,
        None,
        "odds ratio",
        "logistic",
        residual_bound=1.0,
    )


def poisson_regression(features: Features, *, prior_scale: float = 2.5) -> Model:
    """Counts y ∈ {0, 1, 2, …} with rate exp(a + xᵀb), a, b_j ~ N(0, prior_scale²).

    Examples
    --------
    >>> poisson_regression(2).dim
    3
    """

    def loglikelihood_fn(position, example):
        x, y = example
        log_rate = _linear_predictor(position, x)
        return y * log_rate - jnp.exp(log_rate) - jax.scipy.special.gammaln(y + 1.0)

    def check_outcome(y, whole):
        if np.any(y < 0) or np.any(y != np.floor(y)):
            bad = y[(y < 0) | (y != np.floor(y))]
            return f"outcomes must be counts 0, 1, 2, …; got {bad[0]}"
        return ""

    return _regression(
        features,
        prior_scale,
        loglikelihood_fn,
        jnp.exp,
        check_outcome,
        lambda key, p, x: jax.random.poisson(key, jnp.exp(_linear_predictor(p, x))),
        "rate ratio",
        "poisson",
    )


def linear_regression(
    features: Features,
    *,
    noise_scale: float | None = None,
    prior_scale: float = 2.5,
    noise_prior_scale: float = 5.0,
) -> Model:
    """y = a + xᵀb + s·ε with ε standard normal.

    Parameters
    ----------
    features
        Number of features, or their names.
    noise_scale
        s when it is known; ``None`` makes it a parameter with a half-normal prior of scale
        ``noise_prior_scale``, sampled as log s and reported as ``noise_scale``.
    prior_scale
        Scale of the normal priors of a and b_j.
    noise_prior_scale
        Scale of the half-normal prior of s.

    Examples
    --------
    >>> linear_regression(2, noise_scale=1.0).dim, linear_regression(2).dim
    (3, 4)
    """
    names = _feature_names(features)
    scale = _positive("prior-scale", prior_scale)
    known = None if noise_scale is None else _positive("noise-scale", noise_scale)
    half_scale = _positive("noise-prior-scale", noise_prior_scale)
    prior = _normal_logprior(scale)
    position = {"intercept": jnp.array(0.0), "coefficient": jnp.zeros(len(names))}
    if known is None:
        position["log_noise_scale"] = jnp.array(0.0)

    def log_scale(p):
        return jnp.log(known) if known is not None else p["log_noise_scale"]

    def logprior_fn(p):
        value = prior({k: v for k, v in p.items() if k != "log_noise_scale"})
        if known is None:
            s = p["log_noise_scale"]
            value = value - 0.5 * jnp.exp(2 * s) / half_scale**2 + s
        return value

    def loglikelihood_fn(p, example):
        x, y = example
        s = log_scale(p)
        return -0.5 * ((y - _linear_predictor(p, x)) * jnp.exp(-s)) ** 2 - s - 0.5 * jnp.log(2 * jnp.pi)

    def constrain_fn(p):
        out = {k: v for k, v in p.items() if k != "log_noise_scale"}
        return out if known is not None else {**out, "noise_scale": jnp.exp(p["log_noise_scale"])}

    def check_fn(data: FederatedData) -> None:
        _outcomes(data, names)

    def simulate_fn(key, p, x):
        return _linear_predictor(p, x) + jnp.exp(log_scale(p)) * jax.random.normal(key, dtype=float_dtype())

    return Model(
        logprior_fn=logprior_fn,
        loglikelihood_fn=loglikelihood_fn,
        initial_position=position,
        predict_fn=_linear_predictor,
        simulate_fn=simulate_fn,
        constrain_fn=constrain_fn,
        dims={"coefficient": ["feature"]},
        coords={"feature": names},
        check_fn=check_fn,
        name="linear",
    )


def _check_classes(num_classes: int, names: Sequence[str]) -> Callable[[FederatedData], None]:
    def check_fn(data: FederatedData) -> None:
        y = _outcomes(data, names)
        if np.any(y != np.floor(y)) or np.any(y < 0) or np.any(y >= num_classes):
            raise DataError(
                f"labels must be whole numbers 0 to {num_classes - 1}; got {np.min(y)} to {np.max(y)}",
                hint="recode the target, or change num-classes",
            )
        if not data.part and len(np.unique(y)) < 2:
            raise DataError(f"all labels are {y[0]}; a classifier needs at least two classes")

    return check_fn


def _num_classes(num_classes: int) -> int:
    if not isinstance(num_classes, int) or num_classes < 2:
        raise ConfigError(f"num-classes must be a whole number ≥ 2; got {num_classes!r}")
    return num_classes


def _categorical_loglikelihood(logits_fn: Callable[[Any, Any], Any]):
    def loglikelihood_fn(position, example):
        x, y = example
        logits = logits_fn(position, jnp.asarray(x, float_dtype()).T)
        labels = jnp.expand_dims(jnp.arange(len(logits)), tuple(range(1, logits.ndim)))
        # a one-hot product keeps gradients free of scatters, which are slow on CPU
        chosen = jnp.sum(jnp.where(labels == y, logits, 0), axis=0)
        return chosen - jax.nn.logsumexp(logits, axis=0)

    return loglikelihood_fn


def softmax_regression(features: Features, num_classes: int, *, prior_scale: float = 2.5) -> Model:
    """Labels y ∈ {0, …, C−1}: P(y=j) ∝ exp(a_j + b_jᵀx), all a, b ~ N(0, prior_scale²).

    Coefficients are stored (classes, features): the transposed layout is several times slower. Logits of
    a batch are laid out (classes, rows), so that sums over classes run along rows.

    Examples
    --------
    >>> softmax_regression(784, 10).dim
    7850
    """
    names, classes = _feature_names(features), _num_classes(num_classes)

    def logits_fn(position, x):
        return position["coefficient"] @ x + jnp.expand_dims(position["intercept"], tuple(range(1, x.ndim)))

    return Model(
        logprior_fn=_normal_logprior(_positive("prior-scale", prior_scale)),
        loglikelihood_fn=takes_rows(_categorical_loglikelihood(logits_fn)),
        initial_position={"intercept": jnp.zeros(classes), "coefficient": jnp.zeros((classes, len(names)))},
        predict_fn=lambda p, x: jax.nn.softmax(logits_fn(p, jnp.asarray(x, float_dtype()))),
        dims={"coefficient": ["class", "feature"], "intercept": ["class"]},
        coords={"class": list(range(classes)), "feature": names},
        sensitivity_fn=_sensitivity(2.0**0.5),
        check_fn=_check_classes(classes, names),
        name="softmax",
    )


def mlp_classifier(
    features: Features, num_classes: int, *, hidden: Sequence[int] = (100,), prior_scale: float = 1.0
) -> Model:
    """A multilayer perceptron with tanh units.

    Weights ~ N(0, prior_scale²/fan-in), biases ~ N(0, prior_scale²).
    The posterior of a neural network has many modes; a chain explores the ones near its start, and
    R-hat of the weights means little. Judge it by its predictions.

    Examples
    --------
    >>> mlp_classifier(784, 10, hidden=(100,)).dim
    79510
    """
    names, classes = _feature_names(features), _num_classes(num_classes)
    scale = _positive("prior-scale", prior_scale)
    widths = [len(names), *[int(h) for h in hidden], classes]
    if min(widths) < 1:
        raise ConfigError(f"hidden layers must have at least one unit; got {list(hidden)}")
    keys = jax.random.split(jax.random.key(0), len(widths) - 1)
    position = {}
    for layer, (fan_in, fan_out) in enumerate(pairwise(widths)):
        position[f"weight_{layer}"] = jax.random.normal(keys[layer], (fan_out, fan_in)) / np.sqrt(fan_in)
        position[f"bias_{layer}"] = jnp.zeros(fan_out)

    def logprior_fn(p):
        value = jnp.array(0.0, float_dtype())
        for layer, fan_in in enumerate(widths[:-1]):
            value = value - 0.5 * fan_in * jnp.sum(p[f"weight_{layer}"] ** 2) / scale**2
            value = value - 0.5 * jnp.sum(p[f"bias_{layer}"] ** 2) / scale**2
        return value

    def logits_fn(p, x):
        for layer in range(len(widths) - 1):
            x = p[f"weight_{layer}"] @ x + p[f"bias_{layer}"]
            if layer < len(widths) - 2:
                x = jnp.tanh(x)
        return x

    return Model(
        logprior_fn=logprior_fn,
        loglikelihood_fn=_categorical_loglikelihood(logits_fn),
        initial_position=position,
        predict_fn=lambda p, x: jax.nn.softmax(logits_fn(p, jnp.asarray(x, float_dtype()))),
        check_fn=_check_classes(classes, names),
        name="mlp",
    )


def _quadratic(matrix: np.ndarray, x: jax.Array) -> jax.Array:
    """xᵀMx of a positive definite M; written out for few dimensions, where calling a product costs more.

    As a sum of squares, whose gradient takes the fewest operations.
    """
    if len(matrix) > 4:
        return x @ jnp.asarray(matrix, float_dtype()) @ x
    part = [x[i] for i in range(len(matrix))]
    total, rest = jnp.zeros((), x.dtype), np.array(matrix, float)
    for j in range(len(part)):
        scale = rest[j, j]
        column = rest[:, j] / scale
        turned = sum((float(column[i]) * part[i] for i in range(j + 1, len(part))), part[j])
        total += float(scale) * turned * turned
        rest -= scale * np.outer(column, column)
    return total


def gaussian_location(covariance: Any, *, prior_scale: float | None = None) -> Model:
    """Rows x ~ N(θ, Σ) with Σ known; flat prior, or θ_j ~ N(0, prior_scale²).

    An example is a vector, or a pair ``(mean, count)`` that stands for ``count`` rows with that
    mean: the posterior of θ depends on nothing else.

    Examples
    --------
    >>> gaussian_location([[2.0, 0.0], [0.0, 1.0]]).dim
    2
    """
    cov = np.asarray(covariance, float)
    if cov.ndim != 2 or cov.shape[0] != cov.shape[1] or not np.allclose(cov, cov.T):
        raise ConfigError(f"covariance must be a symmetric square matrix; got shape {cov.shape}")
    eigenvalues = np.linalg.eigvalsh(cov)
    if eigenvalues[0] <= 0:
        raise ConfigError(
            f"covariance must be positive definite; its smallest eigenvalue is {eigenvalues[0]:g}"
        )
    precision = np.linalg.inv(cov)
    constant = -0.5 * (len(cov) * np.log(2 * np.pi) + float(np.sum(np.log(eigenvalues))))
    scale = None if prior_scale is None else _positive("prior-scale", prior_scale)

    def loglikelihood_fn(theta, example):
        x, count = example if isinstance(example, tuple) else (example, 1.0)
        gap = jnp.asarray(x, float_dtype()) - theta
        return count * (constant - 0.5 * _quadratic(precision, gap))

    prior = _normal_logprior(scale) if scale is not None else lambda theta: 0.0 * jnp.sum(theta)
    return Model(
        logprior_fn=prior,
        loglikelihood_fn=loglikelihood_fn,
        initial_position=jnp.zeros(len(cov)),
        constrain_fn=lambda theta: {"location": theta},
        name="gaussian-location",
    )
