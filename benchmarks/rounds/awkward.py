"""Studies with one difficulty each, whose posterior still has one mode and finite moments."""

from __future__ import annotations

import jax.numpy as jnp
import numpy as np

import fald
from benchmarks.rounds.likelihoods import normal, regression
from benchmarks.rounds.study import study
from benchmarks.rounds.tables import by_site
from fald.problem.models import gaussian_location, linear_regression, logistic_regression


def _logistic_rows(rng, n, coefficients, intercept=0.0):
    x = rng.standard_normal((n, len(coefficients)))
    chance = 1 / (1 + np.exp(-(intercept + x @ np.asarray(coefficients))))
    return x, (rng.random(n) < chance).astype(float)


@study("awkward", "fald/indo")
def unequal_scales():
    """The bundled trial with features multiplied by 1e-4 to 1e4: posterior sds differ by as much."""
    data = fald.datasets.load("indo")
    x, y = data.rows
    scaled = x * np.logspace(-4, 4, x.shape[1])
    sites = np.repeat(data.names, data.sizes)
    return logistic_regression(list(data.features)), by_site(sites, scaled, y)


@study("awkward")
def near_collinear():
    """Three columns that agree to 1 in 1,000; linear with unknown scale; the prior alone tells them apart."""
    rng = np.random.default_rng(11)
    base = rng.standard_normal((200, 1))
    x = np.concatenate([base + 1e-3 * rng.standard_normal((200, 3)), rng.standard_normal((200, 1))], axis=1)
    y = 1 + x @ np.array([1.0, -0.5, 0.5, 2.0]) + rng.standard_normal(200)
    return linear_regression(4), by_site(np.arange(200) % 6, x, y)


@study("awkward")
def separable_normal():
    """A feature that separates the outcome; logistic; only the normal prior keeps it finite."""
    rng = np.random.default_rng(12)
    x = rng.standard_normal((60, 3))
    return logistic_regression(3), by_site(np.arange(60) % 4, x, x[:, 0] > 0.1)


@study("awkward")
def separable_wide():
    """The same with a prior four times as wide, which makes the posterior long and skewed."""
    rng = np.random.default_rng(13)
    x = rng.standard_normal((40, 2))
    return logistic_regression(2, prior_scale=10.0), by_site(np.arange(40) % 3, x, x[:, 0] + x[:, 1] > 0)


@study("awkward")
def intercept_only():
    """No feature at all; logistic; three sites."""
    rng = np.random.default_rng(14)
    y = (rng.random(90) < 0.2).astype(float)
    return logistic_regression(0), by_site(np.arange(90) % 3, np.zeros((90, 0)), y)


@study("awkward")
def one_parameter():
    """Waiting times with an unknown rate, kept as its logarithm; eight rows at three sites."""
    rng = np.random.default_rng(15)
    waits = rng.exponential(2.0, 8)
    model = fald.Model(
        lambda log_rate: normal(log_rate, 2.0),
        lambda log_rate, wait: log_rate - wait[0] * jnp.exp(log_rate),
        np.zeros(()),
        name="exponential",
    )
    return model, by_site(np.array([0, 0, 0, 0, 1, 1, 1, 2]), waits)


@study("awkward")
def gaussian_exact():
    """A Gaussian location, whose posterior is known exactly; ten sites of very different sizes."""
    rng = np.random.default_rng(16)
    covariance = np.array([[2.0, 0.9, 0.0], [0.9, 1.0, -0.3], [0.0, -0.3, 0.5]])
    rows = rng.multivariate_normal([3.0, -1.0, 0.5], covariance, 110)
    site = np.repeat(np.arange(10), [1, 1, 2, 3, 5, 8, 10, 15, 25, 40])
    clients = {f"{s}": rows[site == s] for s in range(10)}
    return gaussian_location(covariance, prior_scale=10.0), fald.FederatedData.from_arrays(clients)


@study("awkward")
def single_rows():
    """Logistic; forty sites with one row each, so that no site's outcome varies."""
    x, y = _logistic_rows(np.random.default_rng(17), 40, [1.0, -1.0])
    return logistic_regression(2), by_site([f"{i:02d}" for i in range(40)], x, y)


@study("awkward")
def site_is_outcome():
    """Logistic; one site has only cases, the other only controls."""
    x, y = _logistic_rows(np.random.default_rng(18), 120, [0.8, 0.0, -0.5])
    return logistic_regression(3), by_site(y.astype(int), x, y)


@study("awkward")
def few_events():
    """Four events among 400 rows; logistic under N(0, 5²); two binary features without any event."""
    rng = np.random.default_rng(19)
    x = (rng.random((400, 3)) < [0.5, 0.1, 0.05]).astype(float)
    y = np.zeros(400)
    y[np.flatnonzero((x[:, 1] == 0) & (x[:, 2] == 0))[[3, 90, 150, 222]]] = 1
    return logistic_regression(3, prior_scale=5.0), by_site(np.arange(400) % 8, x, y)


@study("awkward")
def empty_category():
    """A category that occurs nowhere; logistic; its coefficient keeps its prior."""
    rng = np.random.default_rng(20)
    x, y = _logistic_rows(rng, 150, [0.7, -0.4])
    return logistic_regression(3), by_site(np.arange(150) % 5, np.column_stack([x, np.zeros(150)]), y)


@study("awkward")
def five_rows():
    """Five rows at two sites for three parameters; linear with unknown scale, a heavy right tail."""
    rng = np.random.default_rng(21)
    x = rng.standard_normal((5, 1))
    y = 0.5 + x[:, 0] + 0.7 * rng.standard_normal(5)
    return linear_regression(1), by_site([0, 0, 0, 1, 1], x, y)


@study("awkward")
def conflicting_effects():
    """Poisson; two sites of equal size with opposite effects, so that the joint fits neither."""
    rng = np.random.default_rng(22)
    x = rng.standard_normal((200, 2))
    site = np.arange(200) % 2
    y = rng.poisson(np.exp(0.5 + np.where(site == 0, 1.0, -1.0) * x[:, 0]))
    return fald.models.poisson_regression(2), by_site(site, x, y)


@study("awkward")
def probit_thirty():
    """Probit; 29 features, 400 rows, twelve sites; tails fall faster than those of the logistic."""
    rng = np.random.default_rng(23)
    x = rng.standard_normal((400, 29))
    y = x @ rng.normal(0, 0.4, 29) + rng.standard_normal(400) > 0.5

    def row_fn(position, eta, rest):
        from jax.scipy.stats import norm

        return norm.logcdf((2 * rest[0] - 1) * eta)

    model = regression([f"x{i}" for i in range(29)], row_fn, "probit")
    return model, by_site(np.arange(400) % 12, x, y)
