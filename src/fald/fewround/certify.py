"""When to say "reached": every condition by name, each able to say no."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray
from scipy.linalg import solve_triangular
from scipy.special import ndtri

from fald.fewround.proposal import cholesky
from fald.fewround.rays import Far, Rays
from fald.fewround.target import Derivatives
from fald.fewround.weights import Moments, Precision, Smoothed, distinct

Array = NDArray[Any]

KHAT_LIMIT = 0.7
PROBES = (100.0, 1000.0)  # posterior sds from the centre at which tails are looked at
_FALLEN = 200.0  # nats below the top at which a tail is of no consequence
_ARRIVED = 0.5  # Newton's step in sds at which a mode is found
_RHAT_LIMIT = 1.01
_QUARTERS = 4  # groups of chains, by where they began
_SPARE = 0.02  # of the mass, that may be missed around the top
ON_ITS_WAY = 1 / 3  # of the tolerance, by which chains may still remember where they began
_GAIN = 0.05  # nats by which a round must raise the top for it to be rising still


class Condition(NamedTuple):
    """One condition: whether it holds, and a sentence for when it does not."""

    name: str
    holds: bool
    sentence: str


def quantile(num_coordinates: int) -> float:
    """Normal quantile that covers means and sds of all coordinates together at 95%."""
    return float(ndtri(1 - 0.05 / (4 * num_coordinates)))


def labels(names: list[str], count: int) -> list[str]:
    """Names of parameters, and of the reported quantities that are certified with them."""
    return [*names, *[f"reported quantity {i + 1}" for i in range(count - len(names))]]


def khat_limit(count: int) -> float:
    """The largest k-hat at which this many draws are enough."""
    return min(KHAT_LIMIT, 1 - 1 / np.log10(count))


def needed_factor(precision: Precision, tolerance: float) -> float:
    """By how much the number of draws must grow for the wanted precision."""
    z = quantile(len(precision.mean))
    return float((z * max(precision.mean.max(), precision.sd.max()) / tolerance) ** 2)


def khat(newest: Smoothed, count: int) -> Condition:
    """Whether the weights of the newest draws rest on many of them; fewer draws need lighter tails."""
    limit = khat_limit(count)
    return Condition(
        "k-hat", newest.khat < limit, f"k-hat of the weights is {newest.khat:.2f}, not below {limit:.2f}"
    )


def pooled_khat(pooled: Smoothed) -> Condition:
    """Whether the weights of all recent rounds together do."""
    # nearly equal weights have a tail of no consequence, whatever its shape
    light = pooled.khat < KHAT_LIMIT or pooled.ess > 0.7 * len(pooled.weights)
    return Condition(
        "pooled k-hat", light, f"k-hat over all rounds is {pooled.khat:.2f}, not below {KHAT_LIMIT}"
    )


def means_precise(precision: Precision, tolerance: float, names: list[str]) -> Condition:
    """Whether Monte-Carlo errors of all means together are within the tolerance."""
    return _precise("mean", precision.mean, tolerance, names)


def sds_precise(precision: Precision, tolerance: float, names: list[str]) -> Condition:
    """Whether Monte-Carlo errors of all sds together are within the tolerance."""
    return _precise("sd", precision.sd, tolerance, names)


def _precise(what: str, errors: Array, tolerance: float, names: list[str]) -> Condition:
    worst = int(np.argmax(errors))
    error = float(quantile(len(errors)) * errors[worst])
    return Condition(
        f"precision of {what}s",
        error <= tolerance,
        f"the {what} of {names[worst]} is known to {error:.3f} sd at 95%, not to {tolerance:g}",
    )


def moments_exist(precision: Precision, names: list[str]) -> Condition:
    """Whether every sd rests on many draws: the tail of weight times squared distance."""
    heavy = int(np.argmax(precision.khat))
    return Condition(
        "moments",
        bool(precision.khat[heavy] < KHAT_LIMIT),
        f"the sd of {names[heavy]} rests on few draws (k-hat {precision.khat[heavy]:.2f})",
    )


def agreement(newest: Moments, pooled: Moments, tolerance: float, names: list[str]) -> Condition:
    """Whether the newest draws and those of all rounds give the same means and sds."""
    sd = np.maximum(newest.sd, np.finfo(float).tiny)  # a single draw may have all the weight
    shift = np.abs(newest.mean - pooled.mean) / sd
    stretch = np.abs(pooled.sd / sd - 1)
    worst = int(np.argmax(np.maximum(shift, stretch)))
    apart = float(max(shift[worst], stretch[worst]))
    return Condition(
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


def tails(values: Array, directions: Array, centre_value: float, sd: Array, *, names: list[str]) -> Condition:
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
    most = [
        names[i]
        for i in np.argsort(-size[worst], kind="stable")[:3]
        if size[worst][i] > 0.1 * size[worst].max()
    ]
    return Condition(
        "tails",
        bool(lacking[worst] > 0),
        f"the posterior hardly falls far out along {', '.join(most)}: its variance, or the posterior itself, "
        "may not exist",
    )


def falls(best: Derivatives | None) -> Condition:
    """Whether the tails of a concave log posterior are light by proof, because it has a strict top."""
    return Condition("tails", arrived(best), "no top is known from which the posterior falls on all sides")


def far_mass(rays: Rays, found: Far, tolerance: float, names: list[str]) -> Condition:
    """Whether all that lies far out is little, or sampled well: half of the tolerance is for it."""
    worst, share, along = _worst_ray(rays, found, names)
    return Condition(
        "far mass",
        bool(found.missed[worst].max() <= tolerance / 2),
        f"up to {share:.0%} of the variance along {along} lies far out, where draws are too few",
    )


def _worst_ray(rays: Rays, found: Far, names: list[str]) -> tuple[int, float, str]:
    """The ray on which most is missed, the share of the variance there, and the parameters that move."""
    worst = int(np.argmax(found.missed.max(axis=1)))
    moving = np.abs(rays.factor @ rays.directions[worst]) / np.sqrt(np.sum(rays.factor**2, axis=1))
    most = [names[i] for i in np.argsort(-moving, kind="stable")[:3] if moving[i] > 0.1 * moving.max()]
    return worst, float(found.share[worst].max()), ", ".join(most)


def unseen() -> Condition:
    """That nobody looked far out, because the proposal was not fitted to draws yet."""
    return Condition("far mass", False, "nobody has looked far out yet")


def defined(undefined: Array, expected: Array, distance: Array, tolerance: float) -> Condition:
    """Whether the log posterior is a number wherever the draws say that it matters.

    Parameters
    ----------
    undefined
        (C,) whether the log posterior of a draw is NaN or +∞. That of −∞ is known: there is no density.
    expected
        (C,) mass that a fit to the other draws expects at each draw, summing to about one.
    distance
        (C,) squared distance of each in sds, of the parameter that is furthest off.
    tolerance
        Wanted precision; half of it is what undefined draws may take from a variance.
    """
    lost = float(np.sum((expected * np.maximum(distance, 1.0))[undefined]))
    return Condition(
        "numbers",
        lost <= tolerance / 2,
        f"the likelihood is not a number (NaN or +∞) at {int(undefined.sum()):,} of {len(undefined):,} "
        f"draws, where about {min(float(np.sum(expected[undefined])), 1.0):.1%} of the posterior should be",
    )


def defined_far_out(rays: Rays, found: Far, tolerance: float, names: list[str]) -> Condition:
    """Whether little can lie far out where the log posterior is not a number, as ``far_mass``.

    ``found`` is what the rays say where values that are not numbers are filled in; no draw is known there.
    """
    worst, share, along = _worst_ray(rays, found, names)
    return Condition(
        "numbers",
        bool(found.missed[worst].max() <= tolerance / 2),
        f"the likelihood is not a number (NaN or +∞) far out along {along}, where up to {share:.0%} of the "
        "variance should be, as it falls before",
    )


def arrived(best: Derivatives | None) -> bool:
    """Whether Newton's method has found a top that curves downwards in every direction."""
    return best is not None and best.concave() and best.newton()[1] < _ARRIVED


def mode(best: Derivatives | None, gain: float) -> Condition:
    """Whether the top of the posterior was found: Newton's method arrived, or leads no higher.

    Parameters
    ----------
    best
        The highest point known.
    gain
        Nats by which the last round's steps from it rose. At the edge of a uniform prior, at a kink and on a
        flat top no step rises, and Newton's method need not arrive.
    """
    if best is None:
        return Condition(
            "mode", False, "no point with a finite log posterior and finite derivatives was found"
        )
    return Condition(
        "mode",
        arrived(best) or gain < _GAIN,
        f"no mode of the posterior was found: Newton's method still rose by {gain:.3g} in the last round",
    )


def funnel(best: Derivatives | None, highest: float) -> Condition:
    """Whether no place that was seen is higher than the top, as places in the neck of a funnel are."""
    above = 0.0 if best is None else highest - best.value
    return Condition(
        "funnel",
        above < _GAIN,
        f"the posterior rises {above:.3g} nats above its top where it curves upwards, as in the neck of a "
        "funnel: a part so narrow that draws can miss it",
    )


def bulk(best: Derivatives | None, draws: Array, weights: Array, log_mass: float) -> Condition:
    """Whether draws were where the mass around the top must be, by its height and curvature (Laplace).

    A bulk that is far narrower than the draws is met by none of them, and all else looks perfect.
    """
    share = inside = 0.0
    if best is not None and best.concave():
        dim = draws.shape[1]
        off = draws - best.position
        near = np.einsum("ci,ij,cj->c", off, -best.hessian, off, optimize=True) < dim + 4 * np.sqrt(2 * dim)
        share = float(np.exp(min(best.log_mass() + dim / 2 * np.log(2 * np.pi) - log_mass, 0.0)))
        inside = float(weights[near].sum())
    return Condition(
        "bulk",
        share <= 2 * inside + _SPARE,
        f"about {share:.0%} of the mass should be around the top of the posterior, and draws found "
        f"{inside:.0%}: a part so narrow that draws miss it",
    )


def one_mode(count: int) -> Condition:
    """Whether a single mode of relevant mass is known."""
    return Condition(
        "one mode",
        count == 1,
        f"the posterior is multimodal, or its top is bent around a hollow: {count} tops with a valley on the "
        "straight way between them were found, and whether these are all is unknown",
    )


def concave(excess: float, bend: float) -> Condition:
    """Whether nothing that was seen contradicts a log posterior that is declared concave.

    Parameters
    ----------
    excess
        Most nats by which a value lies above what concavity allows, less rounding.
    bend
        Largest curvature upwards at a place with derivatives, in units of the proposal.
    """
    by = f"lies {excess:.2g} nats above a tangent or below a chord"
    by = by if excess > 0 else f"bends upwards ({bend:.2g})"
    return Condition(
        "concavity",
        excess <= 0 and bend <= 0,
        "the model declares its log prior and log likelihood concave, and they are not: the log posterior "
        f"{by}",
    )


def explored(under_way: int) -> Condition:
    """Whether nobody who looks for further modes is still climbing."""
    searches = f"{under_way} search{'' if under_way == 1 else 'es'} for further solutions"
    return Condition(
        "explorers",
        under_way == 0,
        f"{searches} did not end: there may be solutions that nobody has seen",
    )


def two_rounds(count: int) -> Condition:
    """Whether at least two rounds of draws can be compared."""
    return Condition("rounds", count >= 2, "one round of draws is not enough to certify")


def forgotten(starts: Array, ends: Array, names: list[str]) -> Condition:
    """Whether chains that began in different places have the same law now, in place and in spread.

    The rank-normalised R-hat of every coordinate, and that of its distance from the middle (folded), between
    quarters of the chains by where they began.

    Parameters
    ----------
    starts, ends
        (M, k) of the same chains, at first and at last.
    names
        Of the k coordinates.
    """
    worst, where = 0.0, 0
    for j, (start, end) in enumerate(zip(starts.T, ends.T)):
        folds = [np.abs(x - np.median(x)) for x in (start, end)]
        here = max(_rhat(start, end), _rhat(*folds), _rhat(start, folds[1]))
        worst, where = max((worst, where), (here, j))
    return Condition(
        "R-hat",
        worst < _RHAT_LIMIT,
        f"chains that began apart still differ in {names[where]} (R-hat {worst:.3f}, not below "
        f"{_RHAT_LIMIT})",
    )


def _ranks(values: Array) -> Array:
    """Ranks from one on; equal values share the middle of theirs, and nothing has a rank beside a NaN."""
    _, place, counts = np.unique(values, return_inverse=True, return_counts=True)
    ranks = (np.cumsum(counts) - (counts - 1) / 2)[place]
    return np.full(len(values), np.nan) if np.isnan(values).any() else ranks


def _rhat(start: Array, end: Array) -> float:
    """R-hat of ranks between quarters of the chains by where they began."""
    ranks = ndtri((_ranks(end) - 0.375) / (len(end) + 0.25))
    group = np.empty(len(start), int)
    group[np.argsort(start, kind="stable")] = np.arange(len(start)) * _QUARTERS // len(start)
    parts = [ranks[group == k] for k in range(_QUARTERS)]
    within = float(np.mean([np.var(part, ddof=1) for part in parts]))
    between = float(np.var([part.mean() for part in parts], ddof=1))
    return float(np.sqrt(1 + between / within)) if within > 0 else np.inf


def scores(positions: Array, gradients: Array, tolerance: float, names: list[str]) -> Condition:
    """Whether draws obey E[∂_j log π] = 0 and E[(z_j − c) ∂_j log π] = −1, which hold for the posterior.

    They may be off by their standard errors, and by what chains may be on their way yet. They are looked at
    in coordinates z in which the draws have unit covariance: where parameters are strongly correlated, the
    same means along single parameters are too noisy to say anything.

    Parameters
    ----------
    positions, gradients
        (M, d) draws, and the gradient of the log posterior there. Distinct ones are independent; a chain that
        did not move, and copies of it, are one.
    tolerance
        Wanted precision of means and sds. The identities must be known well enough to be of use: what they
        say of a mean and of an sd to four times as much.
    names
        Of the parameters.
    """
    centred = positions - positions.mean(axis=0)
    factor = cholesky(np.cov(centred.T).reshape(2 * centred.shape[1:]))
    white, slopes = solve_triangular(factor, centred.T, lower=True).T, gradients @ factor
    first, shares = distinct(positions)
    terms = np.concatenate([slopes, 1 + white * slopes], axis=1)[first]
    mean = shares @ terms
    off, error = np.abs(mean), np.sqrt(shares**2 @ (terms - mean) ** 2)
    # that the second identity is off by 2x means that the sd is by x
    units = np.repeat([1.0, 2.0], positions.shape[1])
    spare = ON_ITS_WAY * tolerance * units
    # at 1% over all, so that it seldom refuses what is right
    most = float(ndtri(1 - 0.01 / (2 * len(off))))
    with np.errstate(invalid="ignore", divide="ignore"):
        ratio = np.nan_to_num(np.maximum(off - spare, 0.0) / error / most, nan=np.inf)
    worst, vague = int(np.argmax(ratio)), int(np.argmax(error / units))
    needed = 4 * tolerance * units[vague] / most
    if ratio[worst] <= 1 and error[vague] > needed:
        return Condition(
            "precision of scores",
            False,
            f"whether chains balance the gradient along {names[vague % len(names)]} is not known: a standard "
            f"error of {error[vague]:.3f} is more than {needed:.3f}",
        )
    return Condition(
        "scores",
        bool(ratio[worst] <= 1),
        f"chains do not balance the gradient along {names[worst % len(names)]}: off by {off[worst]:.3f} with "
        f"a standard error of {error[worst]:.3f}",
    )
