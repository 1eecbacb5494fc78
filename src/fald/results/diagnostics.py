"""How far to trust a result: mixing, client drift, distance to a reference.

None of these sees the bias of the sampler itself: chains can agree with each other and be wrong
together. Only a smaller step, fewer local steps or a reference shows that.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from fald.core.checks import check_count
from fald.core.errors import ConfigError
from fald.results.kinds import elsewhere, kind_of, require_posterior
from fald.results.positions import functionals as functionals  # part of this module's public names
from fald.results.tree import draws_by_row
from fald.theory import gaussian

if TYPE_CHECKING:
    import pandas as pd
    import xarray as xr

RHAT_LIMIT = 1.01
ESS_LIMIT = 400
STEP_LIMIT = 1.0
_MOST_JOINT = 1000  # parameters up to which covariances are compared


def convergence(tree: xr.DataTree, rows: Mapping[str, Any] | None = None) -> dict[str, dict[str, float]]:
    """Per parameter: ``mcse``, ``ess_bulk``, ``ess_tail`` and ``r_hat``; NaN where too few draws exist.

    Draws of ``fald.fit`` are no chain: their ``mcse`` and ``ess_bulk`` come from the importance weights, and
    ``ess_tail`` and ``r_hat`` are NaN. ``rows`` is what ``draws_by_row`` gave, where that is at hand.
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
    for label, (_, draws) in (draws_by_row(tree) if rows is None else rows).items():
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


def distance(
    tree: xr.DataTree,
    reference: xr.DataTree | np.ndarray | tuple[Any, Any],
    *,
    window: int | None = None,
    points: int = 20,
) -> pd.DataFrame:
    """W2 distance to a reference and errors of means and sds, along a run.

    Parameters
    ----------
    tree
        A result. Draws of ``fald.fit`` are no chain: they give one line.
    reference
        A result with the same parameters, such as one of ``fald.fit``; draws (draws, dim); or mean and
        covariance, such as ``fald.gaussian.target`` gives them. Columns are in the order of ``fald.summary``.
    window
        Latest draws of each chain that a line is made from; None: the later half of all so far, which forgets
        the start. With 1 and some hundred chains, a line tells the law of the position after its round.
    points
        Lines at most, evenly spaced on the logarithmic scale.

    Returns
    -------
    pandas.DataFrame
        Per line ``round``, ``draws`` (of all chains, behind the line), ``w2``, ``mean_error`` (the largest
        shift of a mean, in sds of the reference) and ``sd_error`` (the largest relative error of an sd).

    Notes
    -----
    ``w2`` is the distance between Gaussians with the means and covariances of the two, as in the paper: a
    lower bound of the distance, and NaN above 1,000 parameters. Perfect draws have errors as well: about
    1/√(effective draws) in a mean.

    Examples
    --------
    >>> import fald
    >>> data = fald.FederatedData.from_arrays({"a": np.ones((30, 1)), "b": np.zeros((10, 1))})
    >>> tree = fald.sample(0, fald.models.gaussian_location([[1.0]]), data, num_rounds=64, local_steps=2,
    ...                    step_size=2e-3, num_chains=300, progress=False)
    >>> exact = fald.gaussian.Law(np.array([0.75]), np.array([[1 / 40]]))
    >>> fald.diagnostics.distance(tree, exact, window=1, points=4).round(2)
       round  draws    w2  mean_error  sd_error
    0      1    300  0.63        3.98      0.46
    1      4    300  0.38        2.43      0.10
    2     16    300  0.05        0.33      0.03
    3     64    300  0.00        0.01      0.01
    """
    import pandas as pd

    count = check_count("points", points)
    window = None if window is None else check_count("window", window)
    ours = draws_by_row(require_posterior(tree), every=True)
    goal = ReferenceLaw.of(reference, list(ours))
    chains = np.stack([draws for _, draws in ours.values()], axis=-1).astype(float)
    kept, dim = chains.shape[1:]
    if kind_of(tree).certified:
        ends, rounds, window = np.array([kept]), np.array([int(tree.attrs["rounds_done"])]), kept
    else:
        ends = np.unique(np.geomspace(kept, 1, count).round().astype(int))
        stats = tree.children.get("sample_stats", {})
        rounds = np.asarray(stats["round"].values)[ends - 1] if "round" in stats else ends
    lines = []
    for end, at in zip(ends, rounds):
        part = chains[:, end // 2 if window is None else max(0, end - window) : end].reshape(-1, dim)
        shift, ratio = goal.errors(part)
        worst = float(np.abs(shift).max()), float(np.abs(ratio - 1).max())
        lines.append((int(at), len(part), goal.w2(part), *worst))
    return pd.DataFrame(lines, columns=["round", "draws", "w2", "mean_error", "sd_error"])


class ReferenceLaw(NamedTuple):
    """Means, sds and, up to 1,000 parameters, the covariance of a reference."""

    mean: np.ndarray
    sd: np.ndarray
    covariance: np.ndarray | None

    @classmethod
    def of(cls, reference: Any, labels: list[str]) -> ReferenceLaw:
        """A reference as ``distance`` takes it, with its parameters in the order of ``labels``."""
        if isinstance(reference, tuple):
            mean, covariance = (np.asarray(part, float) for part in reference)
            if covariance.shape != (len(mean), len(mean)):
                raise ConfigError(f"a covariance must be a square matrix; got shape {covariance.shape}")
            goal = cls(mean, np.sqrt(np.diagonal(covariance)), covariance)
        else:
            sample = _columns(reference)
            if not isinstance(sample, np.ndarray):
                _require_same(labels, list(sample))
                sample = np.stack([sample[label] for label in labels], axis=1)
            sample = sample.astype(float)
            goal = cls(sample.mean(0), _sds(sample), _covariance(sample))
        if goal.mean.shape != (len(labels),):
            raise ConfigError(f"the result has {len(labels)} parameters, and the reference {len(goal.mean)}")
        if not np.all(goal.sd > 0):
            raise ConfigError("a reference must have two draws or more, and positive variances")
        return goal

    def errors(self, draws: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Shift of each mean in sds of the reference, and ratio of each sd to that of the reference."""
        return (draws.mean(axis=0) - self.mean) / self.sd, _sds(draws) / self.sd

    def w2(self, draws: np.ndarray) -> float:
        """Distance between Gaussians of the same moments; NaN where there is no covariance."""
        joint = _covariance(draws)
        if joint is None or self.covariance is None:
            return float("nan")
        return float(gaussian.wasserstein2(draws.mean(axis=0), joint, self.mean, self.covariance))


def _sds(draws: np.ndarray) -> np.ndarray:
    return draws.std(axis=0, ddof=1) if len(draws) > 1 else np.full(draws.shape[1], np.nan)


def _covariance(draws: np.ndarray) -> np.ndarray | None:
    count, dim = draws.shape
    return np.cov(draws, rowvar=False).reshape(dim, dim) if count > 1 and dim <= _MOST_JOINT else None


def _require_same(ours: list[str], theirs: list[str]) -> None:
    if set(ours) != set(theirs):
        raise ConfigError(f"the results have different parameters: {ours} and {theirs}")


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
    if len(labels) == 2:
        _require_same(*labels)
    a, b = (_matrix(s, labels, most) for s in samples)
    if a.shape[1] != b.shape[1]:
        raise ConfigError(f"the samples have {a.shape[1]} and {b.shape[1]} parameters")
    cost = ot.dist(a, b, metric="sqeuclidean")
    value = ot.emd2(np.full(len(a), 1 / len(a)), np.full(len(b), 1 / len(b)), cost, numItermax=1_000_000)
    return float(np.sqrt(max(value, 0.0)))  # type: ignore[arg-type]


def _columns(sample: Any) -> np.ndarray | dict[str, np.ndarray]:
    if hasattr(sample, "children"):
        return {label: draws.ravel() for label, (_, draws) in draws_by_row(sample, every=True).items()}
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
    if elsewhere(tree):
        return [f"{elsewhere(tree)}: mixing was not checked", *_too_large(tree)]
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
    return [c for c in complaints if c] + _too_large(tree)


def _too_large(tree: xr.DataTree) -> list[str]:
    """A sentence on a step size that is too large for the curvature."""
    unstable = tree.attrs.get("step_times_curvature", 0.0)
    if unstable <= STEP_LIMIT:
        return []
    return [
        f"step size times curvature is {unstable:.3g}: above {STEP_LIMIT:g} the result is badly biased, "
        f"above 2 local steps are unstable, and neither R-hat nor ESS shows it"
    ]


def _complaint(text: str, values: dict[str, float], excess: dict[str, float]) -> str:
    """A sentence on the values whose excess over a limit is positive or cannot be computed."""
    wrong = {label: np.nan_to_num(e, nan=np.inf) for label, e in excess.items() if not e <= 0}
    if not wrong:
        return ""
    worst = max(wrong, key=lambda label: wrong[label])
    return f"{text} for {len(wrong)} of {len(values)} parameters (worst: {worst} {values[worst]:.4g})"
