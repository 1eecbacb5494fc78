"""When to say "reached": every condition by name, each able to say no."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray
from scipy.special import ndtri

from fald.fewround.weights import Moments, Precision, Smoothed

Array = NDArray[Any]

KHAT_LIMIT = 0.7
PROBES = (100.0, 1000.0)  # posterior sds from the centre at which tails are looked at


_FALLEN = 200.0


class Check(NamedTuple):
    """One condition: whether it holds, and a sentence for when it does not."""

    name: str
    holds: bool
    sentence: str


def quantile(num_coordinates: int) -> float:
    """Normal quantile that covers means and sds of all coordinates together at 95%."""
    return float(ndtri(1 - 0.05 / (4 * num_coordinates)))


def khat_limit(count: int) -> float:
    """The largest k-hat at which this many draws are enough."""
    return min(KHAT_LIMIT, 1 - 1 / np.log10(count))


def needed_factor(precision: Precision, tolerance: float) -> float:
    """By how much the number of draws must grow for the wanted precision."""
    z = quantile(len(precision.mean))
    return float((z * max(precision.mean.max(), precision.sd.max()) / tolerance) ** 2)


def draw_checks(
    newest: Smoothed, precision: Precision, pooled: Smoothed, count: int, tolerance: float, names: list[str]
) -> list[Check]:
    """Conditions on the weights: tails, and Monte-Carlo errors of every mean and sd."""
    z, worst = quantile(len(precision.mean)), int(np.argmax(np.maximum(precision.mean, precision.sd)))
    error = float(z * max(precision.mean[worst], precision.sd[worst]))
    limit, heavy = khat_limit(count), int(np.argmax(precision.khat))
    return [
        Check(
            "k-hat", newest.khat < limit, f"k-hat of the weights is {newest.khat:.2f}, not below {limit:.2f}"
        ),
        Check(
            "precision",
            error <= tolerance,
            f"{names[worst]} is known to {error:.3f} sd at 95%, not to {tolerance:g}",
        ),
        Check(
            "moments",
            bool(precision.khat[heavy] < KHAT_LIMIT),
            f"the sd of {names[heavy]} rests on few draws (k-hat {precision.khat[heavy]:.2f})",
        ),
        Check(
            "pooled k-hat",
            # nearly equal weights have a tail of no consequence, whatever its shape
            pooled.khat < KHAT_LIMIT or pooled.ess > 0.7 * len(pooled.weights),
            f"k-hat over all rounds is {pooled.khat:.2f}, not below {KHAT_LIMIT}",
        ),
    ]


def agreement(newest: Moments, pooled: Moments, tolerance: float, names: list[str]) -> Check:
    """Whether the newest draws and those of all rounds give the same means and sds."""
    sd = np.maximum(newest.sd, np.finfo(float).tiny)  # a single draw may have all the weight
    shift = np.abs(newest.mean - pooled.mean) / sd
    stretch = np.abs(pooled.sd / sd - 1)
    worst = int(np.argmax(np.maximum(shift, stretch)))
    apart = float(max(shift[worst], stretch[worst]))
    return Check(
        "agreement",
        apart <= tolerance,
        f"rounds disagree on {names[worst]} by {apart:.3f} sd, more than {tolerance:g}",
    )


def tail_directions(mean: Array, mode: Array, covariance: Array, far: Array) -> Array:
    """(K, d) directions one posterior sd long, along which to look at the tails, both ways.

    Coordinates alone and with all that moves with them, principal axes, the way from the mode to the mean,
    and the ways to far draws of large weight.
    """
    sd = np.sqrt(np.diag(covariance))
    values, vectors = np.linalg.eigh(covariance / np.outer(sd, sd))
    axes = (vectors * np.sqrt(np.maximum(values, 0))).T * sd
    ways = np.concatenate([np.diag(sd), covariance / sd[:, None], axes, (mean - mode)[None], far - mean])
    length = np.sqrt(np.sum((ways / sd) ** 2, axis=1))
    usable = np.isfinite(length) & (length > 1e-3)
    ways = ways[usable] / length[usable, None]
    return np.concatenate([ways, -ways])


def tail_points(mean: Array, directions: Array) -> Array:
    """(2K, d) positions at the two distances of ``PROBES``."""
    return np.concatenate([mean + distance * directions for distance in PROBES])


def tails(values: Array, directions: Array, centre_value: float, sd: Array, names: list[str]) -> Check:
    """Whether the posterior falls fast enough far out for its variances to exist.

    Along a direction in which k coordinates move, a density that falls like r^(−s) has a variance only if
    s > 3 + (k − 1). A tail that has fallen by 200 nats is of no consequence, whatever it does further out.
    """
    near, far = np.where(np.isnan(values), -np.inf, values).reshape(2, -1)
    with np.errstate(invalid="ignore"):  # −∞ from −∞ tells nothing
        slope = np.nan_to_num((near - far) / np.log(PROBES[1] / PROBES[0]), nan=0.0)
        fallen = centre_value - far > _FALLEN
    size = np.abs(directions) / sd
    moving = np.sum(size > 0.1 * size.max(axis=1, keepdims=True), axis=1)
    lacking = np.where(fallen, 1.0, slope - (2 + moving))
    worst = int(np.argmin(lacking))
    most = [names[i] for i in np.argsort(-size[worst])[:3] if size[worst][i] > 0.1 * size[worst].max()]
    return Check(
        "tails",
        bool(lacking[worst] > 0),
        f"the posterior hardly falls far out along {', '.join(most)}: its variance, or the posterior itself, "
        "may not exist",
    )
