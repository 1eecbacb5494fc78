"""Predicted class probabilities: their scores, what they know, and the posterior's average of them."""

from __future__ import annotations

import functools
from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from fald.core.checks import check_count
from fald.core.errors import DataError
from fald.core.types import PyTree, as_floats
from fald.problem.model import Model
from fald.results.positions import positions

if TYPE_CHECKING:
    import xarray as xr

    from fald.results.sinks import DrawFiles


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


def nll(probabilities: np.ndarray, labels: np.ndarray) -> float:
    """Mean negative log probability of (rows,) labels.

    Examples
    --------
    >>> round(nll(np.array([[0.5, 0.5], [1.0, 0.0]]), np.array([0, 0])), 4)
    0.3466
    """
    of_label = np.asarray(probabilities, float)[np.arange(len(labels)), labels]
    return float(-np.mean(np.log(np.maximum(of_label, np.finfo(np.float32).tiny))))


@functools.lru_cache(maxsize=16)
def _predictor(model: Model) -> Any:
    return jax.jit(jax.vmap(model.predict_fn, in_axes=(None, 0)))  # type: ignore[arg-type]


def predicted(model: Model, position: PyTree, x: np.ndarray, batch_size: int = 500) -> np.ndarray:
    """Predictions of one position for many rows, so many at a time."""
    if model.predict_fn is None:
        raise DataError(f"model {model.name!r} has no predict_fn", hint="give the Model a predict_fn")
    parts, given = [], as_floats(position)
    for start in range(0, len(x), batch_size):
        part = x[start : start + batch_size]
        padded = np.concatenate([part, np.repeat(part[-1:], batch_size - len(part), axis=0)])  # one shape
        parts.append(np.asarray(_predictor(model)(given, jnp.asarray(padded)))[: len(part)])
    return np.concatenate(parts)


def classes_of(model: Model, x: np.ndarray, batch_size: int = 500) -> int:
    """How many classes a model predicts, found by a prediction for the first row at the model's start.

    Raises
    ------
    DataError
        If the model does not predict probabilities for such rows.
    """
    try:
        found = predicted(model, model.initial_position, x[:1], batch_size)
    except DataError:
        raise
    except Exception as error:
        raise DataError(
            f"model {model.name!r} cannot predict rows of shape {list(x.shape[1:])}: {error}",
            hint="predict_fn(position, features) gets ONE row: features without their leading axis",
        ) from error
    return PredictiveSums.none(1).plus(found).total.shape[1]


def labels_of(labels: Any, rows: int, classes: int) -> np.ndarray:
    """Labels as whole numbers, one of the classes for each row; or an error."""
    found = np.asarray(labels)
    whole = found.dtype.kind in "iubf" and np.array_equal(found, np.round(found))
    if found.shape != (rows,) or not whole:
        given = f"{found.dtype} of shape {found.shape}"
        raise DataError(f"labels must be {rows} whole numbers, one for each row; got {given}")
    found = found.astype(int)
    if rows and not 0 <= found.min() <= found.max() < classes:
        raise DataError(
            f"labels must be from 0 to {classes - 1}, as the model predicts {classes} classes; "
            f"got {found.min()} to {found.max()}"
        )
    return found


@dataclass(frozen=True, eq=False)
class Predictive:
    """The posterior's average of predicted probabilities; made by ``predictive``.

    ``mean`` (rows, classes); ``entropy`` (rows,) of the average, in nats; ``mutual_information`` (rows,), how
    much of it is due to draws that disagree: the rest no further data would take away.
    """

    mean: np.ndarray
    entropy: np.ndarray
    mutual_information: np.ndarray
    draws: int

    def scores(self, labels: Any) -> dict[str, float]:
        """``accuracy``, ``nll``, ``brier`` and ``ece`` against labels."""
        labels = labels_of(labels, *self.mean.shape)
        return {**scores(self.mean, labels)._asdict(), "nll": nll(self.mean, labels)}

    def reliability(self, labels: Any, bins: int = 15) -> np.ndarray:
        """(bins, 3): rows whose largest probability is in the bin, its mean, and the share that is right."""
        confidence, right = self.mean.max(1), self.mean.argmax(1) == labels_of(labels, *self.mean.shape)
        place = np.clip(np.ceil(confidence * bins).astype(int) - 1, 0, bins - 1)
        count = np.bincount(place, minlength=bins)
        sums = [np.bincount(place, weights=w, minlength=bins) for w in (confidence, right)]
        return np.stack([count, *[s / np.maximum(count, 1) for s in sums]], axis=1)

    def draw_reliability(self, labels: Any, axes: Any, bins: int = 15) -> None:
        """Draw the share that is right against the mean of the largest probability, on matplotlib's ``axes``.

        A point for each bin that has rows, larger where there are more; the dashed line is calibration.
        """
        table = self.reliability(labels, bins)
        count, confidence, right = table[table[:, 0] > 0].T
        axes.plot([0, 1], [0, 1], linestyle="--", color="0.5")
        axes.scatter(confidence, right, s=10 + 90 * count / count.max())
        axes.set(xlabel="largest probability", ylabel="share that is right", xlim=(0, 1), ylim=(0, 1))

    def detects(self, others: Predictive) -> float:
        """AUROC of telling rows of another kind from these by their entropy: 0.5 is chance, 1 is perfect."""
        return auroc(self.entropy, others.entropy)


class PredictiveSums(NamedTuple):
    """Sums over draws of probabilities (rows, classes) and of their entropies (rows,), and the count."""

    total: np.ndarray
    entropies: np.ndarray
    count: int

    @classmethod
    def none(cls, rows: int) -> PredictiveSums:
        """Before the first draw."""
        return cls(np.zeros((rows, 0)), np.zeros(rows), 0)

    def plus(self, probabilities: np.ndarray) -> PredictiveSums:
        """With one draw more."""
        if probabilities.ndim == 1:  # of the second of two classes
            probabilities = np.stack([1 - probabilities, probabilities], axis=1)
        p = np.asarray(probabilities, float)
        bad = np.flatnonzero(~((p.min(axis=1) > -1e-4) & (np.abs(p.sum(axis=1) - 1) < 1e-3)))
        if len(bad):
            raise DataError(
                f"predict_fn must give probabilities, which add up to 1; row {bad[0]} got "
                f"{np.array2string(p[bad[0]], precision=3, threshold=6)}",
                hint="take jax.nn.softmax of logits",
            )
        return PredictiveSums(
            p if self.count == 0 else self.total + p, self.entropies + entropy(p), self.count + 1
        )

    def predictive(self) -> Predictive:
        """The average."""
        if self.count == 0:
            raise DataError("there is no draw yet")
        mean = self.total / self.count
        of_mean = entropy(mean)
        return Predictive(mean, of_mean, np.maximum(of_mean - self.entropies / self.count, 0), self.count)


def predictive(
    draws: xr.DataTree | DrawFiles | Iterable[PyTree],
    model: Model,
    x: Any,
    *,
    most_draws: int = 200,
    batch_size: int = 500,
) -> Predictive:
    """Class probabilities for new rows, averaged over draws, with what they know of their own doubt.

    Parameters
    ----------
    draws
        A result, of which ``most_draws`` are used, evenly spaced; the sink ``fald.sinks.DrawFiles``; or
        positions one by one.
    model
        The model, with a ``predict_fn`` that gives probabilities.
    x
        Rows of features.
    batch_size
        Rows that are predicted at a time.

    Examples
    --------
    >>> import numpy as np, fald
    >>> rng = np.random.default_rng(0)
    >>> x = rng.normal(size=(60, 2)); y = (x[:, 0] > 0).astype(int)
    >>> data = fald.FederatedData.from_arrays({"a": (x[:30], y[:30]), "b": (x[30:], y[30:])})
    >>> model = fald.models.softmax_regression(2, 2)
    >>> tree = fald.sample(0, model, data, num_rounds=60, local_steps=2, step_size=5e-3, progress=False)
    >>> found = fald.predictive(tree, model, x)
    >>> found.scores(y)["accuracy"] > 0.9, found.mutual_information.shape
    (True, (60,))
    """
    x, check = np.asarray(x), check_count("most-draws", most_draws)
    if not len(x):
        raise DataError("there are no rows to predict")
    classes_of(model, x, batch_size)
    if hasattr(draws, "children"):
        found = positions(draws, model)  # type: ignore[arg-type]
        places = np.unique(np.linspace(0, found.shape[0] * found.shape[1] - 1, check).round().astype(int))
        each: Any = (found[place // found.shape[1], place % found.shape[1]] for place in places)
    else:
        each = draws.positions(model) if hasattr(draws, "positions") else draws  # type: ignore[union-attr]
    sums = PredictiveSums.none(len(x))
    for position in each:
        sums = sums.plus(predicted(model, position, x, batch_size))
    return sums.predictive()
