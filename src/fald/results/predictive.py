"""Does the model describe the rows? Outcomes simulated from the posterior beside those that were seen."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
import numpy as np
from numpy.typing import NDArray

from fald.core.errors import DataError
from fald.core.types import float_dtype
from fald.problem.data import FederatedData
from fald.problem.model import Model
from fald.results.kinds import require_posterior
from fald.results.predict import expected_outcomes, flat_positions, simulated_outcomes
from fald.results.tree import check_level

if TYPE_CHECKING:
    import xarray as xr

Array = NDArray[Any]

SMALLEST_CELL = 10
"""Averages over fewer rows than this are not shown: they would describe single rows."""

_MOST_DRAWS, _FEWEST_DRAWS, _MOST_VALUES = 400, 100, 4e7
_SHARES = ("share of rows in their likeliest class", "share of rows with the outcome")
_MOST_BINS, _ROWS_PER_BIN = 10, 20


def predictive_checks(
    model: Model, tree: xr.DataTree, data: FederatedData, *, level: float = 0.95, seed: int = 0
) -> dict[str, Any]:
    """Compare the outcomes of the rows with outcomes simulated from the posterior.

    Three discrepancies are compared with their simulated values, each with a posterior predictive p-value:
    how far the means of the sites are from those expected, Σ_c (ȳ_c − e_c)²/v_c; the mean squared error,
    which grows when outcomes scatter more than the model says (two-sided); and the calibration error, the
    mean distance between predicted and seen averages over rows of similar prediction.

    Parameters
    ----------
    model, tree, data
        The model, its result, and the rows: (features, outcome) for every client.
    level
        Probability of the predictive intervals.
    seed
        For the simulated outcomes.

    Returns
    -------
    dict
        ``outcome`` (what is averaged), ``draws``, ``rows``; ``site_means``, ``squared_error`` and
        ``calibration_error``, each with what was ``seen`` and ``expected``, its ``p_value`` and its
        ``distance`` in simulated standard deviations; ``sites`` and ``bins`` with means and predictive
        intervals. Sites with fewer than ten rows have no ``seen``.

    Raises
    ------
    DataError
        If the rows are not pairs of features and outcomes, or the model cannot simulate them.

    Notes
    -----
    The rows are those that the posterior was made from, so p-values lean towards the middle: a small one
    counts, a large one proves little.

    Examples
    --------
    >>> import numpy as np, fald
    >>> rng = np.random.default_rng(0)
    >>> clients = {name: (rng.normal(size=(50, 1)), rng.poisson(3.0, 50)) for name in "ab"}
    >>> data, model = fald.FederatedData.from_arrays(clients), fald.models.poisson_regression(["x"])
    >>> found = predictive_checks(model, fald.fit(0, model, data, progress=False), data)
    >>> found["squared_error"]["p_value"] > 0.05, [site["client"] for site in found["sites"]]
    (True, ['a', 'b'])
    """
    tail = (1 - check_level(level)) / 2
    seen, chance, simulated, outcome = _outcomes(model, require_posterior(tree), data, seed)
    parts = dict(zip(data.names, map(slice, data.offsets[:-1], data.offsets[1:])))
    found = compare(seen, chance.mean(axis=1), simulated, parts=parts, tail=tail)
    if outcome in _SHARES:
        for site, rows in zip(found["sites"], parts.values()):
            if site["distance"] is not None:
                site |= _of_coins(site["seen"], chance[rows])
    return {"outcome": outcome, "level": level, **found}


def compare(
    seen: Array, expected: Array, simulated: Array, *, parts: dict[str, slice], tail: float
) -> dict[str, Any]:
    """Outcomes (n,) and their expectations (n,) beside simulated outcomes (n, draws), over sites and bins."""
    sites = [{"client": name, **_means(seen[p], simulated[p], tail)} for name, p in parts.items()]
    for site in sites:
        if site["rows"] < SMALLEST_CELL:
            site |= {"seen": None, "distance": None}
    bins = _bins(expected)
    errors = [
        float(np.mean((seen - expected) ** 2)),
        np.mean((simulated - expected[:, None]) ** 2, axis=0),
    ]
    apart = [_calibration(seen[:, None], expected, bins).item(), _calibration(simulated, expected, bins)]
    return {
        "draws": simulated.shape[1],
        "rows": len(seen),
        "site_means": _discrepancy(*_site_means(seen, simulated, list(parts.values())), two_sided=False),
        "squared_error": _discrepancy(*errors),
        "calibration_error": _discrepancy(*apart, two_sided=False),
        "sites": sites,
        "bins": [
            {"predicted": float(expected[rows].mean()), **_means(seen[rows], simulated[rows], tail)}
            for rows in bins
        ],
    }


def _outcomes(
    model: Model, tree: xr.DataTree, data: FederatedData, seed: int
) -> tuple[Array, Array, Array, str]:
    """Outcomes (n,), their expectations and simulated ones under every draw (n, draws), and what they are.

    With several classes an outcome is whether the most probable class of the row was the right one.
    """
    rows = data.rows
    if not (isinstance(rows, tuple) and len(rows) == 2 and np.ndim(rows[1]) == 1) or model.predict_fn is None:
        raise DataError("the model does not predict outcomes from features")
    if data.num_rows * _FEWEST_DRAWS > _MOST_VALUES:
        raise DataError(f"{data.num_rows:,} rows are too many to simulate outcomes for")
    flat = flat_positions(model, tree)
    if len(flat) < _FEWEST_DRAWS:
        raise DataError(f"it takes {_FEWEST_DRAWS} draws, and there are {len(flat)}")
    count = int(min(_MOST_DRAWS, _MOST_VALUES // data.num_rows, len(flat)))
    taken = np.linspace(0, len(flat) - 1, count).astype(int)
    positions = jax.vmap(model.unravel)(jnp.asarray(flat[taken], float_dtype()))
    x, seen = jnp.asarray(rows[0], float_dtype()), np.asarray(rows[1], float)
    means = np.asarray(expected_outcomes(model, positions, x), float)
    if means.ndim == 3:
        top = means.mean(axis=1).argmax(axis=1)
        chance = np.take_along_axis(means, top[:, None, None], axis=2)[:, :, 0]
        right = (seen == top).astype(float)
        return right, chance, _coins(chance, seed), _SHARES[0]
    if np.isin(seen, (0, 1)).all() and means.min() >= 0 and means.max() <= 1:
        return seen, means, _coins(means, seed), _SHARES[1]
    if model.simulate_fn is None:
        raise DataError("the model cannot simulate outcomes")
    return seen, means, np.asarray(simulated_outcomes(model, positions, x, seed), float), "mean outcome"


def _coins(chance: Array, seed: int) -> Array:
    """Outcomes 0 and 1: their mean is all there is to know about their law."""
    return (np.random.default_rng(seed).random(chance.shape) < chance).astype(float)


def _of_coins(seen: float, chance: Array) -> dict[str, float]:
    """Expectation and distance of the mean of 0s and 1s, whose law needs no simulation: chances (n, draws).

    Examples
    --------
    >>> _of_coins(0.75, np.full((100, 3), 0.5))
    {'expected': 0.5, 'distance': 5.0}
    """
    means = chance.mean(axis=0)
    variance = means.var() + np.mean(np.mean(chance * (1 - chance), axis=0)) / len(chance)
    expected = float(means.mean())
    return {"expected": expected, "distance": float((seen - expected) / max(np.sqrt(variance), 1e-12))}


def _means(seen: Array, simulated: Array, tail: float) -> dict[str, Any]:
    """The mean of some rows beside its simulated means."""
    means = simulated.mean(axis=0)
    low, high = np.quantile(means, [tail, 1 - tail])
    found = float(seen.mean())
    return {
        "rows": len(seen),
        "seen": found,
        "expected": float(means.mean()),
        "low": float(low),
        "high": float(high),
        "distance": _distance(found, means),
    }


def _site_means(seen: Array, simulated: Array, parts: list[slice]) -> tuple[float, Array]:
    """Σ_c (mean − expected mean)²/variance over sites, for the rows and for every simulation."""
    means = np.stack([simulated[p].mean(axis=0) for p in parts])
    found = np.array([seen[p].mean() for p in parts])[:, None]
    centre, variance = means.mean(axis=1, keepdims=True), means.var(axis=1, keepdims=True)
    variance = np.maximum(variance, 1e-12)  # a site whose outcomes are all but certain
    distances = [np.sum((m - centre) ** 2 / variance, axis=0) for m in (found, means)]
    return distances[0].item(), distances[1]


def _discrepancy(seen: float, simulated: Array, *, two_sided: bool = True) -> dict[str, float]:
    """A discrepancy beside its simulated values; the seen one counts as one of them."""
    slack = 1e-9 * max(1.0, abs(seen))  # equal means of equal counts differ by rounding
    above = (1 + np.sum(simulated >= seen - slack)) / (1 + len(simulated))
    below = (1 + np.sum(simulated <= seen + slack)) / (1 + len(simulated))
    return {
        "seen": seen,
        "expected": float(simulated.mean()),
        "p_value": float(min(1.0, 2 * min(above, below)) if two_sided else above),
        "distance": _distance(seen, simulated),
    }


def _distance(seen: float, simulated: Array) -> float:
    return float((seen - simulated.mean()) / max(simulated.std(), 1e-12))


def _bins(expected: Array) -> list[Array]:
    """Rows in groups of similar prediction, of nearly equal size."""
    count = int(np.clip(len(expected) // _ROWS_PER_BIN, 1, _MOST_BINS))
    return list(np.array_split(np.argsort(expected, kind="stable"), count))


def _calibration(outcomes: Array, expected: Array, bins: list[Array]) -> Array:
    """Σ_b n_b/n |mean outcome − mean prediction| for each column of outcomes (n, draws)."""
    parts = [len(b) * np.abs(outcomes[b].mean(axis=0) - expected[b].mean()) for b in bins]
    return np.sum(parts, axis=0) / len(expected)
