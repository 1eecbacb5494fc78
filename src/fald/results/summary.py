"""The posterior as a table."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from fald.problem.model import Model
from fald.results.diagnostics import convergence
from fald.results.kinds import require_posterior
from fald.results.tree import check_level, draws_by_row, posterior_groups
from fald.runtime.journal import MOST_PARAMETERS
from fald.runtime.records import Records

if TYPE_CHECKING:
    import pandas as pd
    import xarray as xr

_MOST_NUMBERS = 2**24  # that a look at a run under way copies


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
        One row per parameter; of a model with more than 1,000, large arrays are represented by their norm and
        random projections (others by ``fald.diagnostics.functionals``). ``mcse`` is the Monte-Carlo standard
        error of the mean, ``ess_bulk`` and ``ess_tail`` effective sample sizes, ``r_hat`` the rank-normalised
        split R-hat. Models with odds or rate ratios get them, as posterior medians, with their interval.
        R-hat sees mixing, not bias.

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
    rows = draws_by_row(tree)
    diagnostics = convergence(tree, rows)
    table = []
    for label, (variable, draws) in rows.items():
        draws = draws.astype(np.float64)
        ends = np.quantile(draws, [tail, 1 - tail])
        row = {
            "parameter": label,
            "mean": draws.mean(),
            "sd": draws.std(ddof=1) if draws.size > 1 else np.nan,
            low: ends[0],
            high: ends[1],
            **diagnostics[label],
        }
        ratio = posterior[variable].attrs.get("ratio") if variable else None
        if ratio:
            row[ratio] = np.exp(np.median(draws))
            row[f"{ratio} {low}"], row[f"{ratio} {high}"] = np.exp(ends)
        table.append(row)
    frame = pd.DataFrame(table).set_index("parameter")
    frame.attrs["level"] = level
    return frame


def settling(model: Model, records: list[Records], most: int = 1024) -> dict[str, Any]:
    """A cheap look at a run under way: the largest R-hat and the 95% intervals of its first parameters.

    Parameters
    ----------
    model, records
        The model, and the draws kept so far.
    most
        Draws per chain that are looked at, evenly spaced; of fewer the largest power of two, so that
        transformed parameters are compiled for a few sizes only.

    Returns
    -------
    dict
        ``r_hat`` (NaN with too few draws or one chain) and ``intervals``, by parameter ``[mean, low,
        high]``; nothing without draws.
    """
    import xarray as xr

    draws = [r.position for r in records if len(r.round)]
    total = sum(len(d) for d in draws)
    if not total:
        return {}
    most = max(1, min(most, _MOST_NUMBERS // draws[0][0].size))
    taken = np.linspace(0, total - 1, min(most, 2 ** int(np.log2(total)))).round().astype(int)
    starts = np.cumsum([0, *[len(d) for d in draws]])
    parts = [d[taken[(a <= taken) & (taken < b)] - a] for d, a, b in zip(draws, starts, starts[1:])]
    flat = np.swapaxes(np.concatenate(parts), 0, 1)
    tree = xr.DataTree.from_dict(posterior_groups(model, flat))
    rows = dict(list(draws_by_row(tree).items())[:MOST_PARAMETERS])
    intervals = {
        label: [values.mean(), *np.quantile(values, [0.025, 0.975])] for label, (_, values) in rows.items()
    }
    return {"r_hat": _largest_rhat([values for _, values in rows.values()]), "intervals": intervals}


def _largest_rhat(draws: list[np.ndarray]) -> float:
    """The largest rank-normalised split R-hat of (chain, draw) arrays; NaN where there is none."""
    if draws[0].shape[0] < 2 or draws[0].shape[1] < 4:
        return float("nan")
    from arviz_stats import base

    array_stats: Any = base.array_stats  # pyright: ignore[reportPrivateImportUsage]
    with np.errstate(invalid="ignore", divide="ignore"):
        found = [array_stats.rhat(d.astype(float), method="rank", chain_axis=0, draw_axis=1) for d in draws]
    return float(np.max(found))
