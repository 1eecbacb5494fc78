"""Do prior and rows agree? How the posterior moves when one of them counts for a little more or less."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
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

_LOWER, _UPPER = 0.99, 1.01
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
        If neither is there, or there are too few draws.

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
    from arviz_stats import base

    array_stats: Any = base.array_stats  # pyright: ignore[reportPrivateImportUsage]
    taken, parts = _log_densities(require_posterior(tree), model, data)
    weights = {}
    for name, logs in parts.items():
        if not np.isfinite(logs).all():
            raise DataError(f"the {name} of some draws is not finite")
        # a flat prior weighs all draws alike, whatever power it is raised to
        even = np.ptp(logs) == 0
        pair = [logs if even else array_stats.power_scale_lw(logs, alpha=a) for a in (_LOWER, _UPPER)]
        weights[name] = [np.exp(w - w.max()) / np.exp(w - w.max()).sum() for w in pair]
    return [
        {
            "parameter": label,
            **{
                name: float(
                    array_stats.power_scale_sense(
                        draws.ravel()[taken][None].astype(float), *[w[None] for w in pair], _LOWER, _UPPER
                    )
                )
                for name, pair in weights.items()
            },
        }
        for label, (_, draws) in draws_by_row(tree).items()
    ]


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
