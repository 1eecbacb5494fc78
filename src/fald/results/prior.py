"""Do prior and rows agree? How the posterior moves when one of them counts for a little more or less."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import scipy  # whose parts load when they are first used
from numpy.typing import NDArray

from fald.calculus.sums import log_likelihoods, make_site, prior_gradients
from fald.core.errors import DataError
from fald.problem.data import FederatedData
from fald.problem.model import Model
from fald.results.kinds import require_posterior
from fald.results.predict import flat_positions
from fald.results.tree import draws_by_row

if TYPE_CHECKING:
    import xarray as xr

Array = NDArray[Any]

_POWERS = (0.99, 1.01)
_MOST_DRAWS, _FEWEST_DRAWS, _MOST_WORK = 4000, 100, 2e8


def prior_sensitivity(
    tree: xr.DataTree, model: Model | None = None, data: FederatedData | None = None
) -> list[dict[str, Any]]:
    """Power-scaling sensitivity of every parameter to the prior and to the likelihood.

    The posterior is π(θ)^a L(θ)^b at a = b = 1. Draws are reweighted to a or b a hundredth below and above
    one; how far their distribution function then moves (cumulative Jensen–Shannon distance, per doubling of
    the power) is the sensitivity. Above 0.05 for both, prior and rows pull in different directions.

    Log prior and log likelihood of the draws are those that the method has stored; otherwise they are
    computed from ``model`` and ``data``. No round is needed for it.

    Returns
    -------
    list of dict
        ``parameter``, ``prior`` and ``likelihood``.

    Raises
    ------
    DataError
        If neither is there, or there are too few draws, or those of a parameter are all alike.

    References
    ----------
    Kallioinen, Paananen, Bürkner and Vehtari (2024), Detecting and diagnosing prior and likelihood
    sensitivity with power-scaling.

    Examples
    --------
    >>> import fald
    >>> x = np.random.default_rng(0).normal(10.0, 1.0, (20, 1))
    >>> data = fald.FederatedData.from_arrays({"a": (x, x[:, 0]), "b": (x, x[:, 0])})
    >>> model = fald.models.linear_regression(["x"], noise_scale=1.0, prior_scale=0.1)
    >>> tree = fald.fit(0, model, data, progress=False)
    >>> prior_sensitivity(tree)[0]["parameter"]
    'x'
    """
    taken, parts = _log_densities(require_posterior(tree), model, data)
    weights = {}
    for name, logs in parts.items():
        if not np.isfinite(logs).all():
            raise DataError(f"the {name} of some draws is not finite")
        pair = [np.exp((power - 1) * (logs - logs.max())) for power in _POWERS]
        weights[name] = [own / own.sum() for own in pair]
    found = [
        {
            "parameter": label,
            **{
                name: _sensitivity(draws.ravel()[taken].astype(float), pair) for name, pair in weights.items()
            },
        }
        for label, (_, draws) in draws_by_row(tree).items()
    ]
    alike = [row["parameter"] for row in found if np.isnan([row["prior"], row["likelihood"]]).any()]
    if alike:
        raise DataError(f"the draws of {alike[0]} are all alike")
    return found


def _sensitivity(draws: Array, pair: list[Array]) -> float:
    """How far weights of both powers move draws (M,), per doubling of the power.

    Powers so close to one leave weights so even that, unlike larger ones, they need no smoothing.
    """
    moved = [max(_distance(draws, own), _distance(-draws, own)) for own in pair]
    return float(np.mean([far / abs(np.log2(power)) for far, power in zip(moved, _POWERS)]))


def _distance(draws: Array, weights: Array) -> float:
    """Cumulative Jensen–Shannon distance between draws (M,) and the same with weights."""
    order, count = np.argsort(draws), len(draws)
    widths = np.diff(draws[order])
    p, q = np.linspace(1 / count, 1 - 1 / count, count - 1), np.cumsum(weights[order])[:-1]
    gap = widths @ (q - p) / 2
    parts = [
        max(0.0, widths @ scipy.special.rel_entr(own, (p + q) / 2) + s * gap) for own, s in ((p, 1), (q, -1))
    ]
    with np.errstate(invalid="ignore"):  # draws that are all alike
        return float(np.sqrt(sum(parts) / np.log(2) / (widths @ (p + q))))


def _log_densities(
    tree: xr.DataTree, model: Model | None, data: FederatedData | None
) -> tuple[Array, dict[str, Array]]:
    """Which of all draws, and their log prior and log likelihood."""
    stats = tree.children["sample_stats"].to_dataset() if "sample_stats" in tree.children else {}
    sizes = tree.children["posterior"].sizes
    total = sizes["chain"] * sizes["draw"]
    if total < _FEWEST_DRAWS:
        raise DataError(f"it takes {_FEWEST_DRAWS} draws, and there are {total}")
    taken = np.unique(np.linspace(0, total - 1, _MOST_DRAWS).astype(int))
    if "log_prior" in stats:
        values = {name: stats[f"log_{name}"].values.ravel()[taken] for name in ("prior", "likelihood")}
        return taken, values
    if model is None or data is None:
        raise DataError("the run did not keep the likelihood of its draws, and the rows are not here")
    count = int(_MOST_WORK // (data.num_rows * model.dim))
    if count < _FEWEST_DRAWS:
        raise DataError(f"{data.num_rows:,} rows are too many to compute the likelihood of the draws again")
    taken = np.unique(np.linspace(0, total - 1, min(1000, count)).astype(int))
    positions = np.asarray(flat_positions(model, tree)[taken], np.float64)
    sites = [make_site(model, data.client(name), name) for name in data.names]
    likelihood = np.sum([log_likelihoods(site, positions) for site in sites], axis=0)
    return taken, {"prior": prior_gradients(model, positions)[0], "likelihood": likelihood}
