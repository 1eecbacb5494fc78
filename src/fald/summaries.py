"""The posterior as a table."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from fald.diagnostics import convergence
from fald.results import check_level, draws_by_row, require_posterior

if TYPE_CHECKING:
    import pandas as pd
    import xarray as xr


def summary(tree: xr.DataTree, *, level: float = 0.95) -> pd.DataFrame:
    """Table of the posterior: mean, sd, interval, and how well it was sampled.

    Parameters
    ----------
    tree
        A result of ``fald.sample``.
    level
        Probability of the equal-tailed credible interval; the columns carry its ends in their
        names.

    Returns
    -------
    pandas.DataFrame
        One row per parameter. ``mcse`` is the Monte-Carlo standard error of the mean, ``ess_bulk``
        and ``ess_tail`` effective sample sizes, ``r_hat`` the rank-normalised split R-hat. Models
        with odds or rate ratios get them with their interval. R-hat sees mixing, not bias.

    Raises
    ------
    DataError
        If the result is a point estimate.
    """
    import pandas as pd

    require_posterior(tree)
    tail = (1 - check_level(level)) / 2
    low, high = f"{100 * tail:g}%", f"{100 * (1 - tail):g}%"
    posterior = tree["posterior"]
    diagnostics = convergence(tree)
    table = []
    for label, (variable, draws) in draws_by_row(tree).items():
        draws = draws.astype(np.float64)
        ends = np.quantile(draws, [tail, 1 - tail])
        row = {
            "parameter": label,
            "mean": draws.mean(),
            "sd": draws.std(ddof=1),
            low: ends[0],
            high: ends[1],
            **diagnostics[label],
        }
        ratio = posterior[variable].attrs.get("ratio")
        if ratio:
            row[ratio] = np.exp(np.median(draws))
            row[f"{ratio} {low}"], row[f"{ratio} {high}"] = np.exp(ends)
        table.append(row)
    frame = pd.DataFrame(table).set_index("parameter")
    frame.attrs["level"] = level
    return frame
