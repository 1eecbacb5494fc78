"""Regressions of several families, against plain importance sampling at the pooled rows."""

from __future__ import annotations

from functools import cache

import jax
import jax.numpy as jnp
import numpy as np
from jax.scipy.special import gammaln
from scipy.optimize import minimize

import fald
from benchmarks.verdict.problem import Problem, generator
from fald.calculus.sums import gradients, log_likelihoods, make_site, prior_gradients

_DRAWS = 65_536
FAMILIES = ("logistic", "poisson", "normal", "student", "gamma", "negative binomial")


def _terms(family: str, eta, extra, y):
    if family == "logistic":
        return y * eta - jax.nn.softplus(eta)
    if family == "poisson":
        return y * eta - jnp.exp(eta)
    if family == "normal":
        return -0.5 * ((y - eta) * jnp.exp(-extra)) ** 2 - extra
    if family == "student":
        return -2.5 * jnp.log1p(((y - eta) * jnp.exp(-extra)) ** 2 / 4) - extra
    extra = jnp.minimum(extra, 12.0)  # beyond, differences of large logarithms would be rounding alone
    shape = jnp.exp(extra)
    if family == "gamma":
        return shape * (extra - eta) - gammaln(shape) + (shape - 1) * jnp.log(y) - shape * y * jnp.exp(-eta)
    return (
        gammaln(y + shape) - gammaln(shape) + shape * extra + y * eta
        - (y + shape) * jnp.logaddexp(eta, extra)
    )  # fmt: skip


@cache
def _model(family: str, columns: int) -> fald.Model:
    """Intercept, slopes, and the logarithm of a scale or shape, under normal priors."""
    plain = family in ("logistic", "poisson")

    def loglikelihood_fn(theta, example):
        x, y = example
        return _terms(family, theta[0] + x @ theta[1 : columns + 1], theta[-1], y)

    def logprior_fn(theta):
        return -0.5 * jnp.sum((theta / 2.5) ** 2)

    return fald.Model(logprior_fn, loglikelihood_fn, np.zeros(columns + (1 if plain else 2)))


def _outcomes(family: str, eta, rng):
    scale = rng.uniform(0.5, 2)
    return {
        "logistic": lambda: rng.random(len(eta)) < 1 / (1 + np.exp(-eta)),
        "poisson": lambda: rng.poisson(np.exp(np.minimum(eta, 5))),
        "normal": lambda: eta + scale * rng.normal(size=len(eta)),
        "student": lambda: eta + scale * rng.standard_t(3, len(eta)),
        "gamma": lambda: np.maximum(rng.gamma(2, np.exp(eta) / 2), 1e-6),
        "negative binomial": lambda: rng.poisson(np.exp(np.minimum(eta, 5)) * rng.gamma(2, 0.5, len(eta))),
    }[family]().astype(np.float32)


def reference(model: fald.Model, data: fald.FederatedData, rng) -> tuple[np.ndarray, np.ndarray] | None:
    """Means and sds, known to about 0.01 sd; None if plain importance sampling cannot tell."""
    site = make_site(model, data.rows, "all")

    def energy(theta):
        parts = gradients(site, theta[None]), prior_gradients(model, theta[None])
        value, slope = (sum(p[i][0] for p in parts) for i in (0, 1))
        return -float(value), -np.asarray(slope, float)

    found = minimize(energy, np.zeros(model.dim), jac=True, method="BFGS")
    mean, covariance = found.x, np.asarray(found.hess_inv) * 1.3
    for degrees in (4, 4, 5):
        root = np.linalg.cholesky(covariance)
        z = (
            rng.standard_normal((_DRAWS, model.dim))
            / np.sqrt(rng.chisquare(degrees, _DRAWS) / degrees)[:, None]
        )
        x = mean + z @ root.T
        logs = log_likelihoods(site, x) + prior_gradients(model, x)[0]
        logs = logs + (degrees + model.dim) / 2 * np.log1p(np.sum(z**2, axis=1) / degrees)
        weights = np.exp(logs - np.nanmax(logs))
        weights = np.nan_to_num(weights) / np.nansum(weights)
        mean = weights @ x
        covariance = (weights[:, None] * (x - mean)).T @ (x - mean)
    return (mean, np.sqrt(np.diag(covariance))) if 1 / np.sum(weights**2) > 20_000 else None


@generator
def regressions(rng) -> Problem:
    """Logistic, Poisson, normal, Student, gamma and negative binomial regressions of few or many rows."""
    family, columns = str(rng.choice(FAMILIES)), int(rng.choice([1, 4]))
    rows = int(rng.choice([15, 60, 300]))
    x = rng.standard_normal((rows, columns)) * np.exp(rng.uniform(-1, 1, columns))
    if columns > 1 and rng.random() < 0.3:  # nearly the same feature twice
        x[:, 1] = x[:, 0] + 0.1 * rng.standard_normal(rows)
    eta = rng.normal(0, 1) + x @ rng.normal(0, 0.7, columns)
    y = _outcomes(family, eta, rng)
    x = x.astype(np.float32)
    data = fald.FederatedData.from_arrays({f"s{i}": (x[i::3], y[i::3]) for i in range(3)})
    model = _model(family, columns)
    known = reference(model, data, rng)
    what = f"{family}, {columns} features, {rows} rows"
    if known is None:
        nothing = np.full(model.dim, np.nan)
        return Problem(model, data, nothing, nothing, what + ", no reference")
    return Problem(model, data, *known, what)
