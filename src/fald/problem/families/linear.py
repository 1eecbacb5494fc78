"""Linear regression with normal residuals."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from fald.core.checks import check_positive
from fald.core.errors import ConfigError
from fald.core.types import float_dtype
from fald.problem.data import FederatedData
from fald.problem.families.base import Features, feature_names, linear_predictor, outcomes
from fald.problem.model import Model, concave, derived, predicted

Pair = Sequence[float]


def linear_regression(
    features: Features,
    *,
    noise_scale: float | None = None,
    prior_scale: float = 2.5,
    noise_prior_scale: float = 5.0,
    scales: Mapping[str, Any] | None = None,
    outcome_scaling: Pair = (0.0, 1.0),
) -> Model:
    """(y − c)/k = a + xᵀb + s·ε with ε standard normal; a, b and s are reported in units of y.

    Parameters
    ----------
    features
        Number of features, or their names.
    noise_scale
        s when it is known; ``None`` makes it a parameter with a half-normal prior of scale
        ``noise_prior_scale``, sampled as log s and reported as ``noise_scale``.
    prior_scale
        Scale of the normal priors of a and b_j.
    noise_prior_scale
        Scale of the half-normal prior of s.
    scales
        What the priors are relative to: ``outcome``, its mean and sd, and ``features``, mean and sd by name.
        With m and v those of the outcome, m_j and v_j those of a feature, the expected outcome at average
        features is Normal(m, prior_scale·v), b_j is Normal(0, prior_scale·v/v_j), and s is half-normal with
        scale noise_prior_scale·v. None: m = m_j = 0 and v = v_j = 1.
    outcome_scaling
        c and k. Positions, priors and ``noise_scale`` are in these units.

    Examples
    --------
    >>> linear_regression(2, noise_scale=1.0).dim, linear_regression(2).dim
    (3, 4)
    >>> linear_regression(["dose"], scales={"outcome": (130, 20), "features": {"dose": (5, 2)}}).prior
    'expected outcome at average features Normal(130, 50); dose Normal(0, 25); residual sd half-normal(100)'
    """
    names = feature_names(features)
    known = None if noise_scale is None else check_positive("noise-scale", noise_scale)
    scale = check_positive("prior-scale", prior_scale)
    half = check_positive("noise-prior-scale", noise_prior_scale)
    centre, unit = float(outcome_scaling[0]), check_positive("the scale of the outcome", outcome_scaling[1])
    (middle, spread), means, sds = _scales(scales, names)
    widths, half = scale * spread / sds, half * spread
    start = {"intercept": jnp.array(middle), "coefficient": jnp.zeros(len(names))}
    if known is None:
        start["log_noise_scale"] = jnp.log(jnp.array(spread))

    def log_scale(p):
        return jnp.log(known) if known is not None else p["log_noise_scale"]

    row = np.append(means, 1.0)
    precision = np.outer(row, row) / (scale * spread) ** 2 + np.diag(np.append(widths**-2.0, 0.0))

    def derivatives(positions: np.ndarray, order: int) -> list[np.ndarray]:
        effects, s = (
            positions[:, : len(row)] - np.append(np.zeros(len(names)), middle),
            positions[:, len(row) :],
        )
        with np.errstate(over="ignore"):
            bend = np.exp(2 * s) / half**2  # nothing where s is known
        slopes = np.concatenate([-effects @ precision, 1 - bend], axis=1)
        value = np.sum(slopes[:, : len(row)] * effects, axis=1) / 2 + np.sum(s - bend / 2, axis=1)
        if order < 2:
            return [value, slopes][: order + 1]
        second = np.zeros((*positions.shape, positions.shape[1]))
        second[:, : len(row), : len(row)] = -precision
        second[:, len(row) :, len(row) :] = -2 * bend[:, :, None]
        return [value, slopes, second]

    @derived(derivatives)
    def logprior_fn(p):
        average = p["intercept"] + jnp.asarray(means, float_dtype()) @ p["coefficient"]
        value = -0.5 * ((average - middle) / (scale * spread)) ** 2
        value = value - 0.5 * jnp.sum((p["coefficient"] / jnp.asarray(widths, float_dtype())) ** 2)
        if known is None:
            s = p["log_noise_scale"]
            value = value - 0.5 * jnp.exp(2 * s) / half**2 + s
        return value

    constant = float(np.log(unit) + 0.5 * np.log(2 * np.pi))

    def residual(eta, y, others):
        s = np.log(known) if known is not None else others["log_noise_scale"]
        return ((y - centre) / unit - eta) * np.exp(-s), s

    def values(eta, y, others, totals):
        off, s = residual(eta, y, others)
        return -0.5 * totals(np.square(off, out=off)) - totals.counts * (s + constant)

    def slopes(eta, y, others):
        off, s = residual(eta, y, others)
        return [off * np.exp(-s), off**2 - 1][: 1 + len(others)]

    def bends(eta, y, others):
        off, s = residual(eta, y, others)
        cross = -2 * off * np.exp(-s)
        own = np.broadcast_to(-np.exp(-2 * s), off.shape)
        return [[own, cross], [cross, -2 * off**2]][: 1 + len(others)]

    @predicted(values, slopes, bends, squares=centre)
    def loglikelihood_fn(p, example):
        x, y = example
        s = log_scale(p)
        off = ((y - centre) / unit - linear_predictor(p, x)) * jnp.exp(-s)
        return -0.5 * off**2 - s - jnp.log(unit) - 0.5 * jnp.log(2 * jnp.pi)

    def predict_fn(p, x):
        return centre + unit * linear_predictor(p, x)

    def constrain_fn(p):
        out = {"intercept": centre + unit * p["intercept"], "coefficient": unit * p["coefficient"]}
        return out if known is not None else {**out, "noise_scale": unit * jnp.exp(p["log_noise_scale"])}

    def check_fn(data: FederatedData) -> None:
        outcomes(data, names)

    def simulate_fn(key, p, x):
        noise = jax.random.normal(key, dtype=float_dtype())
        return predict_fn(p, x) + unit * jnp.exp(log_scale(p)) * noise

    def scales_fn(values: np.ndarray, gradients: np.ndarray, rows: int) -> dict[str, Any]:
        factor = 1.0 if known is None else known**2  # at log s = 0, or the known s
        d = len(names)  # coefficients come first, then the intercept
        sums = factor * gradients[0, : d + 1]  # Σ (x, 1) y
        products = sums - factor * np.diag(gradients[1 : d + 2, : d + 1])  # Σ (x, 1)²
        firsts = sums[d] - factor * gradients[1 : d + 2, d]  # Σ (x, 1)
        constant = rows * (np.log(unit) + np.log(2 * np.pi) / 2 + (0.0 if known is None else np.log(known)))
        square = -2 * factor * (values[0] + constant)
        found = [_mean_and_sd(*one, rows) for one in zip(firsts[:d], products[:d])]
        return {"outcome": _mean_and_sd(sums[d], square, rows), "features": dict(zip(names, found))}

    if known is not None:  # with log s as a parameter neither is: (y − η)²/s² bends both ways
        logprior_fn, loglikelihood_fn = concave(logprior_fn), concave(loglikelihood_fn)
    said = [f"{n} Normal(0, {unit * w:.3g})" for n, w in zip(names[:12], widths)]
    said += [f"{len(names) - 12} more by the same rule"] if len(names) > 12 else []
    at = "at average features" if scales else "where features are 0"
    said.insert(0, f"expected outcome {at} Normal({centre + unit * middle:.3g}, {unit * scale * spread:.3g})")
    said += [] if known else [f"residual sd half-normal({unit * half:.3g})"]
    return Model(
        logprior_fn=logprior_fn,
        loglikelihood_fn=loglikelihood_fn,
        initial_position=start,
        predict_fn=predict_fn,
        simulate_fn=simulate_fn,
        constrain_fn=constrain_fn,
        dims={"coefficient": ["feature"]},
        coords={"feature": names},
        check_fn=check_fn,
        scales_fn=None if scales else scales_fn,
        prior="; ".join(said),
        name="linear",
    )


def _scales(scales: Mapping[str, Any] | None, names: Sequence[str]) -> tuple[Pair, np.ndarray, np.ndarray]:
    """Mean and sd of the outcome, means and sds (features,) of the features; checked."""
    given = scales or {"outcome": (0.0, 1.0), "features": dict.fromkeys(names, (0.0, 1.0))}
    odd = sorted(set(given["features"]) ^ set(names))
    if odd:
        lacks = "lack" if odd[0] in names else "name a column that is not there:"
        raise ConfigError(f"scales {lacks} {odd[0]!r}", hint=f"the columns are {', '.join(names)}")
    pairs = [given["outcome"], *[given["features"][name] for name in names]]
    for name, (mean, sd) in zip(["the outcome", *names], pairs):
        if not (np.isfinite(mean) and np.isfinite(sd) and sd > 0):
            raise ConfigError(f"scales: {name} needs a finite mean and an sd > 0; got {mean!r}, {sd!r}")
    table = np.array(pairs, float)
    return table[0].tolist(), table[1:, 0], table[1:, 1]


def _mean_and_sd(total: float, square: float, rows: int) -> list[float]:
    """Mean and sd from sums, to four digits; a column of one value counts as of scale 1."""
    mean = total / rows
    variance = square / rows - mean**2
    sd = np.sqrt(variance) if variance > 1e-9 * max(mean**2, 1e-300) else 1.0
    return [float(f"{mean:.4g}"), float(f"{sd:.4g}")]
