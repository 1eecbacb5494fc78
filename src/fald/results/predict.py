"""Predictions for new rows, averaged over the posterior."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
import numpy as np

from fald.core.checks import check_count
from fald.core.errors import DataError
from fald.core.types import PyTree, float_dtype
from fald.problem.model import Model
from fald.results.kinds import require_posterior
from fald.results.tree import check_level

if TYPE_CHECKING:
    import pandas as pd
    import xarray as xr


def flat_positions(model: Model, tree: xr.DataTree) -> np.ndarray:
    """All draws as unconstrained flat positions (chain·draw, dim).

    Raises
    ------
    DataError
        If the result has other parameters or features than the model.
    """
    posterior: Any = tree["posterior"]
    for name, value in jax.eval_shape(model.report, model.initial_position).items():
        if name not in posterior.data_vars:
            raise _other_model(tree, f"the result has no variable {name!r}")
        found = posterior[name]
        if found.shape[2:] != value.shape:
            raise _other_model(tree, f"{name!r} has shape {found.shape[2:]} there and {value.shape} here")
        for dim in model.dims.get(name, ()):
            if dim in model.coords and [str(v) for v in found[dim].values] != [
                str(v) for v in model.coords[dim]
            ]:
                raise _other_model(tree, f"the result has other labels of {dim!r}, or in another order")
    if model.constrain_fn is not None:
        unconstrained: Any = tree["unconstrained_posterior"]
        arrays = [unconstrained["position"].values]
        if arrays[0].shape[-1] != model.dim:
            raise _other_model(
                tree, f"the result has {arrays[0].shape[-1]} parameters, the model {model.dim}"
            )
    else:
        arrays = [posterior[name].values for name in model.report(model.initial_position)]
    return np.concatenate([a.reshape(a.shape[0] * a.shape[1], -1) for a in arrays], axis=1)


def _other_model(tree: xr.DataTree, what: str) -> DataError:
    return DataError(
        f"{what}; it was made with model {tree.attrs.get('model')!r}",
        hint="predict with the model the result was made with",
    )


def _feature_array(model: Model, features: Any) -> np.ndarray:
    """Rows of features; the columns of a table are put into the model's order by their names."""
    names = [str(n) for n in model.coords.get("input", model.coords.get("feature", ()))]
    columns = [str(c) for c in getattr(features, "columns", ())]
    if set(names) & set(columns):
        missing = [n for n in names if n not in columns]
        if missing:
            raise DataError(f"the table has no column {missing[0]!r}", hint=f"it needs {', '.join(names)}")
        features = features[names]
    array = np.asarray(features)
    if array.ndim == 0 or array.dtype.kind not in "fiub":
        raise DataError(f"features must be an array of numbers, a row per case; got {array.dtype}")
    if names and array.shape[1:] != (len(names),):
        raise DataError(
            f"features must have {len(names)} columns ({', '.join(names[:10])}); got shape {array.shape}",
            hint="give the features of the training data, in their order, without the target",
        )
    if array.dtype.kind == "f" and not np.all(np.isfinite(array)):
        row = int(np.argwhere(~np.isfinite(array))[0][0])
        raise DataError(f"features have a missing or infinite value in row {row + 1}")
    return array


def expected_outcomes(model: Model, positions: PyTree, x: jax.Array) -> jax.Array:
    """Expected outcomes (rows, draws, …) at many positions, row by row."""
    of_row = jax.vmap(model.predict_fn, in_axes=(0, None))  # type: ignore[arg-type]
    return jax.jit(lambda xs: jax.lax.map(lambda row: of_row(positions, row), xs))(x)


def simulated_outcomes(model: Model, positions: PyTree, x: jax.Array, seed: int) -> jax.Array:
    """One outcome (rows, draws) for each row and position."""
    of_row = jax.vmap(model.simulate_fn, in_axes=(0, 0, None))  # type: ignore[arg-type]
    keys = jax.random.split(jax.random.key(seed), (len(x), jax.tree.leaves(positions)[0].shape[0]))
    return jax.jit(lambda xs: jax.lax.map(lambda row: of_row(row[0], positions, row[1]), xs))((keys, x))


def predict(
    model: Model,
    tree: xr.DataTree,
    features: Any,
    *,
    level: float = 0.95,
    most_draws: int = 1000,
    seed: int = 0,
) -> pd.DataFrame:
    """Posterior predictive mean and interval for new rows.

    Parameters
    ----------
    model
        The model the result was made with.
    tree
        A result of ``fald.sample``.
    features
        (rows, features), the columns in the order of the training data, or a table whose columns
        have their names.
    level
        Probability of the intervals.
    most_draws
        Draws used, evenly spaced over the result.
    seed
        For the simulated outcomes.

    Returns
    -------
    pandas.DataFrame
        Per row: ``mean`` of the expected outcome (a probability for classifiers) and its credible
        interval; ``outcome`` columns hold the interval of a new observation, where the model can
        simulate a numeric one. Classifiers with several classes get a block of columns per class.
    """
    import pandas as pd

    require_posterior(tree)
    tail = (1 - check_level(level)) / 2
    if model.predict_fn is None:
        raise DataError(f"model {model.name!r} has no predict_fn", hint="give the Model a predict_fn")
    flat = flat_positions(model, tree)
    count = check_count("most-draws", most_draws)
    taken = np.unique(np.linspace(0, len(flat) - 1, count).astype(int))
    positions = jax.vmap(model.unravel)(jnp.asarray(flat[taken], float_dtype()))
    x = jnp.asarray(_feature_array(model, features))
    try:
        values = np.asarray(expected_outcomes(model, positions, x), np.float64)
    except (TypeError, ValueError) as error:
        raise DataError(
            f"the model cannot predict from rows of shape {x.shape[1:]}: {error}",
            hint="give the features of the training data, in their order, without the target",
        ) from error
    low, high = f"{100 * tail:g}%", f"{100 * (1 - tail):g}%"
    columns: dict[str, np.ndarray] = {}
    for k in np.ndindex(values.shape[2:]):
        prefix = f"class {k[0]} " if k else ""
        part = values[(slice(None), slice(None), *k)]
        columns[f"{prefix}mean"] = part.mean(axis=1)
        columns[f"{prefix}{low}"], columns[f"{prefix}{high}"] = np.quantile(part, [tail, 1 - tail], axis=1)
    if model.simulate_fn is not None and values.ndim == 2:
        outcomes = np.asarray(simulated_outcomes(model, positions, x, seed), np.float64)
        ends = np.quantile(outcomes, [tail, 1 - tail], axis=1)
        columns[f"outcome {low}"], columns[f"outcome {high}"] = ends
    frame = pd.DataFrame(columns)
    frame.attrs["level"] = level
    return frame
