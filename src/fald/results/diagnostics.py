"""How far to trust a result: mixing, client drift, distance to a reference.

None of these sees the bias of the sampler itself: chains can agree with each other and be wrong
together. Only a smaller step, fewer local steps or a reference shows that.
"""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import numpy as np

from fald.core.errors import ConfigError
from fald.results.kinds import kind_of, require_posterior
from fald.results.tree import draws_by_row

if TYPE_CHECKING:
    import pandas as pd
    import xarray as xr

RHAT_LIMIT = 1.01
ESS_LIMIT = 400
STEP_LIMIT = 1.0


def convergence(tree: xr.DataTree) -> dict[str, dict[str, float]]:
    """Per parameter: ``mcse``, ``ess_bulk``, ``ess_tail`` and ``r_hat``; NaN where too few draws exist.

    Draws of ``fald.fit`` are no chain: their ``mcse`` and ``ess_bulk`` come from the importance weights, and
    ``ess_tail`` and ``r_hat`` are NaN.
    """
    if kind_of(tree).certified:  # weighted draws know their own
        missing = {"ess_tail": float("nan"), "r_hat": float("nan")}
        known = json.loads(tree.attrs["precision"])
        return {
            label: {"mcse": row["mcse"], "ess_bulk": row["ess"], **missing} for label, row in known.items()
        }
    from arviz_stats import base

    array_stats: Any = base.array_stats  # pyright: ignore[reportPrivateImportUsage]
    out = {}
    for label, (_, draws) in draws_by_row(tree).items():
        draws = draws.astype(np.float64)
        if draws.shape[1] < 4:
            out[label] = dict.fromkeys(("mcse", "ess_bulk", "ess_tail", "r_hat"), float("nan"))
            continue
        # chains that never move divide zero by zero, which is the answer
        with np.errstate(invalid="ignore", divide="ignore"):
            out[label] = {
                "mcse": float(array_stats.mcse(draws, method="mean", chain_axis=0, draw_axis=1)),
                "ess_bulk": float(array_stats.ess(draws, method="bulk", chain_axis=0, draw_axis=1)),
                "ess_tail": float(array_stats.ess(draws, method="tail", prob=0.9, chain_axis=0, draw_axis=1)),
                "r_hat": float(array_stats.rhat(draws, method="rank", chain_axis=0, draw_axis=1)),
            }
    return out


def ess(tree: xr.DataTree) -> dict[str, float]:
    """Bulk effective sample size of every parameter."""
    return {label: row["ess_bulk"] for label, row in convergence(require_posterior(tree)).items()}


def rhat(tree: xr.DataTree) -> dict[str, float]:
    """Rank-normalised split R-hat of every parameter."""
    return {label: row["r_hat"] for label, row in convergence(require_posterior(tree)).items()}


def client_drift(tree: xr.DataTree) -> pd.DataFrame:
    """How far each client ended from the average, over the kept rounds.

    Returns
    -------
    pandas.DataFrame
        Per client: rows, share p_c, in how many (chain, draw) pairs it took part, mean and largest
        distance ‖β^c − θ‖. Large drift at one client means its rows pull elsewhere, or that its
        share is so small that its steps are large: use fewer local steps or a smaller step.
    """
    import pandas as pd

    stats: Any = tree["sample_stats"]
    constant: Any = tree["constant_data"]
    if kind_of(tree).certified:  # sites sent sums in every round, and nothing of theirs moved
        names = pd.Index([str(n) for n in constant["client"].values], name="client")
        rows, share = constant["size"].values, constant["share"].values
        taken, none = int(tree.attrs["rounds_done"]), float("nan")
        return pd.DataFrame(
            {"rows": rows, "share": share, "took_part": taken, "mean_drift": none, "max_drift": none},
            index=names,
        )
    who, weight, apart = (stats[k].values.ravel() for k in ("participant", "weight", "drift"))
    active = weight > 0
    names = [str(n) for n in constant["client"].values]
    groups = pd.DataFrame({"client": who[active], "drift": apart[active]}).groupby("client")["drift"]
    table: Any = groups.agg(["size", "mean", "max"]).reindex(range(len(names)))
    return pd.DataFrame(
        {
            "rows": constant["size"].values,
            "share": constant["share"].values,
            "took_part": table["size"].fillna(0).astype(int).to_numpy(),
            "mean_drift": table["mean"].to_numpy(),
            "max_drift": table["max"].to_numpy(),
        },
        index=pd.Index(names, name="client"),
    )


def wasserstein2(
    tree: xr.DataTree | np.ndarray, reference: xr.DataTree | np.ndarray, *, most: int = 2000
) -> float:
    """2-Wasserstein distance between two samples, by optimal transport on at most ``most`` draws of each.

    Two samples of the same law are at a distance above zero; compare with the distance between two
    halves of the reference.

    Parameters
    ----------
    tree, reference
        Results, or arrays (draws, dim) with the columns in the order of ``fald.summary``.
    most
        Draws used of each, evenly spaced.
    """
    try:
        import ot
    except ModuleNotFoundError:
        raise ConfigError(
            "the distance between two samples needs the package POT", hint="pip install 'fald[lab]'"
        ) from None

    samples = [_columns(x) for x in (tree, reference)]
    labels = [list(s) for s in samples if not isinstance(s, np.ndarray)]
    if len(labels) == 2 and set(labels[0]) != set(labels[1]):
        raise ConfigError(f"the results have different parameters: {labels[0]} and {labels[1]}")
    a, b = (_matrix(s, labels, most) for s in samples)
    if a.shape[1] != b.shape[1]:
        raise ConfigError(f"the samples have {a.shape[1]} and {b.shape[1]} parameters")
    cost = ot.dist(a, b, metric="sqeuclidean")
    value = ot.emd2(np.full(len(a), 1 / len(a)), np.full(len(b), 1 / len(b)), cost, numItermax=1_000_000)
    return float(np.sqrt(max(value, 0.0)))  # type: ignore[arg-type]


def _columns(sample: Any) -> np.ndarray | dict[str, np.ndarray]:
    if hasattr(sample, "children"):
        return {label: draws.ravel() for label, (_, draws) in draws_by_row(sample).items()}
    sample = np.asarray(sample)
    if sample.ndim != 2 or len(sample) == 0:
        raise ConfigError(f"a sample must be an array (draws, dim); got shape {sample.shape}")
    return sample


def _matrix(sample: np.ndarray | dict[str, np.ndarray], labels: list[list[str]], most: int) -> np.ndarray:
    if not isinstance(sample, np.ndarray):
        sample = np.stack([sample[label] for label in labels[0]], axis=1)
    taken = np.linspace(0, len(sample) - 1, min(most, len(sample))).round().astype(int)
    return sample[taken].astype(np.float64)


def verdict(tree: xr.DataTree) -> list[str]:
    """What the diagnostics object to, in sentences; empty if nothing."""
    if kind_of(tree).certified:
        return (
            [] if tree.attrs["verdict"] == "reached" else [f"{tree.attrs['verdict']}: {tree.attrs['reason']}"]
        )
    rows = convergence(require_posterior(tree))
    rhats, sizes = ({label: row[key] for label, row in rows.items()} for key in ("r_hat", "ess_bulk"))
    single = tree.children["posterior"].sizes["chain"] < 2
    complaints = [
        "R-hat needs two chains or more, and there is one: mixing was not checked against another chain"
        if single
        else _complaint(f"R-hat above {RHAT_LIMIT}", rhats, {k: v - RHAT_LIMIT for k, v in rhats.items()}),
        _complaint(
            f"effective sample size below {ESS_LIMIT}", sizes, {k: ESS_LIMIT - v for k, v in sizes.items()}
        ),
    ]
    unstable = tree.attrs.get("step_times_curvature", 0.0)
    if unstable > STEP_LIMIT:
        complaints.append(
            f"step size times curvature is {unstable:.3g}: above {STEP_LIMIT:g} the result is badly biased, "
            f"above 2 local steps are unstable, and neither R-hat nor ESS shows it"
        )
    return [c for c in complaints if c]


def _complaint(text: str, values: dict[str, float], excess: dict[str, float]) -> str:
    """A sentence on the values whose excess over a limit is positive or cannot be computed."""
    wrong = {label: np.nan_to_num(e, nan=np.inf) for label, e in excess.items() if not e <= 0}
    if not wrong:
        return ""
    worst = max(wrong, key=lambda label: wrong[label])
    return f"{text} for {len(wrong)} of {len(values)} parameters (worst: {worst} {values[worst]:.4g})"
