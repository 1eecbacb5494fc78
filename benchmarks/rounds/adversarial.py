"""Posteriors whose mean and sd no sampler of a few rounds may claim to have found.

Several modes, a funnel, or moments that do not exist. Likelihoods are sums over sites like any other.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
from jax.nn import log_sigmoid
from jax.scipy.special import gammaln

import fald
from benchmarks.rounds.likelihoods import normal
from benchmarks.rounds.study import study
from benchmarks.rounds.tables import by_site, standardised, table

SITES = 4


def mixture(centers, weights=None, scales=None):
    """A posterior that is a mixture of normals, each of ``SITES`` sites holding its part of the logarithm.

    A site's row is its share of the log density; the shares add up to one. The prior is so wide that the
    mixture alone counts.
    """
    centers = np.asarray(centers, float)
    count, dim = centers.shape
    log_weights = np.log(np.full(count, 1 / count) if weights is None else np.asarray(weights, float))
    scales = np.ones(count) if scales is None else np.asarray(scales, float)

    def loglikelihood_fn(theta, example):
        gaps = (theta - centers) / scales[:, None]
        terms = log_weights - dim * np.log(scales) - 0.5 * jnp.sum(gaps**2, axis=1)
        return example[0] * jax.nn.logsumexp(terms)

    shares = np.array([0.1, 0.2, 0.3, 0.4])
    model = fald.Model(lambda theta: normal(theta, 1e3), loglikelihood_fn, np.zeros(dim), name="mixture")
    return model, by_site(np.arange(SITES), shares)


def on_circle(count: int, radius: float, dim: int = 2) -> np.ndarray:
    """Centres on a circle in the first two coordinates."""
    angle = 2 * np.pi * np.arange(count) / count + 0.3
    centers = np.zeros((count, dim))
    centers[:, :2] = radius * np.stack([np.cos(angle), np.sin(angle)], axis=1)
    return centers


@study("adversarial")
def two_modes_far():
    """Two equal modes, 12 sd apart, in two dimensions."""
    return mixture(on_circle(2, 6.0))


@study("adversarial")
def two_modes_near():
    """Two equal modes, 5 sd apart, in three dimensions."""
    return mixture(on_circle(2, 2.5, dim=3))


@study("adversarial")
def two_modes_minor():
    """A mode with 97% of the mass and one with 3%, 10 sd away."""
    return mixture([[0.0, 0.0, 0.0], [6.0, 6.0, 5.0]], weights=[0.97, 0.03])


@study("adversarial")
def two_modes_one_dimension():
    """Two modes, 8 sd apart, of one parameter."""
    return mixture([[-3.0], [5.0]], weights=[0.4, 0.6])


@study("adversarial")
def two_modes_twenty():
    """Nine tenths of the mass in one mode and a tenth in another, 6 sd away, in twenty dimensions."""
    return mixture([[0.0] * 20, [3.0] * 4 + [0.0] * 16], weights=[0.9, 0.1])


@study("adversarial")
def two_modes_wide():
    """A tenth of the mass in a mode 1.5 times as wide, 8 sd away, in ten dimensions."""
    return mixture([[0.0] * 10, [2.53] * 10], weights=[0.9, 0.1], scales=[1.0, 1.5])


@study("adversarial")
def two_modes_skewed():
    """A tenth of the mass in a second mode; ten parameters, each with a long tail to one side."""
    shape = np.tile([1.0, 2.0, 3.0, 5.0, 8.0], 2)
    shift = np.array([3, -1, 2, 4, -2, 1, -4, 3, 2, -2]) / np.sqrt(shape)

    def loglikelihood_fn(theta, example):
        hills = [jnp.sum(shape * x - jnp.exp(x)) for x in (theta, theta - shift)]
        return example[0] * jax.nn.logsumexp(jnp.stack(hills), b=jnp.array([0.9, 0.1]))

    model = fald.Model(lambda theta: normal(theta, 1e3), loglikelihood_fn, np.zeros(10), name="skewed")
    return model, by_site(np.arange(SITES), np.array([0.1, 0.2, 0.3, 0.4]))


@study("undetectable")
def narrow_mode():
    """Half of the mass in a mode a tenth as wide, inside the tail of the other; five dimensions."""
    return mixture([[0.0] * 5, [3.0] * 5], weights=[0.5, 0.5], scales=[1.0, 0.1])


@study("adversarial")
def three_modes():
    """Three unequal modes in four dimensions, 10 sd from each other."""
    return mixture(on_circle(3, 6.0, dim=4), weights=[0.5, 0.3, 0.2])


@study("adversarial")
def four_modes_near():
    """Four modes with neighbours 5 sd apart."""
    return mixture(on_circle(4, 3.6))


@study("adversarial")
def five_modes():
    """Five modes of different widths in five dimensions."""
    return mixture(8.0 * np.eye(5), weights=[0.3, 0.25, 0.2, 0.15, 0.1], scales=[1.0, 0.5, 1.5, 0.7, 1.0])


@study("adversarial")
def six_modes_far():
    """Six modes with neighbours 10 sd apart."""
    return mixture(on_circle(6, 10.0))


@study("adversarial")
def six_modes_near():
    """Six modes with neighbours 5 sd apart, in three dimensions."""
    return mixture(on_circle(6, 5.0, dim=3))


@study("adversarial")
def funnel():
    """Nine effects x ~ N(0, exp(v)²) with v ~ N(0, 3²), centred; each site measures one of them badly."""

    def logprior_fn(position):
        v, x = position["log_sd"], position["effect"]
        return normal(v, 3.0) - len(x) * v - 0.5 * jnp.sum(x**2) * jnp.exp(-2 * v)

    def loglikelihood_fn(position, example):
        which, measured = example
        chosen = (jnp.arange(9) == which).astype(position["effect"].dtype) @ position["effect"]
        return normal(measured - chosen, 10.0)

    model = fald.Model(
        logprior_fn, loglikelihood_fn, {"log_sd": np.zeros(()), "effect": np.zeros(9)}, name="funnel"
    )
    measured = np.array([3.0, -2.0, 5.0, 0.5, -4.0, 1.0, 6.0, -1.0, 2.0])
    return model, by_site(np.arange(9), np.arange(9), measured)


def _separable(logprior_fn, x, y, sites):
    def loglikelihood_fn(theta, example):
        row, outcome = example
        logit = theta[0] + row @ theta[1:]
        return log_sigmoid((2 * outcome - 1) * logit)

    model = fald.Model(logprior_fn, loglikelihood_fn, np.zeros(1 + x.shape[1]), name="separable")
    return model, by_site(sites, x, y)


def _separated_rows(seed: int, features: int):
    x = np.random.default_rng(seed).standard_normal((40, features))
    return x, (x[:, 0] > 0).astype(float), np.arange(40) % 3


@study("adversarial")
def cauchy_separation():
    """Separable logistic under Cauchy priors: the posterior mean does not exist."""
    return _separable(lambda t: -jnp.sum(jnp.log1p((t / 2.5) ** 2)), *_separated_rows(31, 1))


@study("adversarial")
def cauchy_separation_four():
    """The same with four features, one of which separates."""
    return _separable(lambda t: -jnp.sum(jnp.log1p((t / 2.5) ** 2)), *_separated_rows(32, 4))


@study("adversarial")
def barely_finite():
    """Separable logistic under Student-t priors with 2 degrees of freedom: a mean, but no variance."""
    return _separable(lambda t: -1.5 * jnp.sum(jnp.log1p(t**2 / 2 / 2.5**2)), *_separated_rows(33, 2))


@study("adversarial")
def improper_separable():
    """Separable logistic under a flat prior: no posterior."""
    return _separable(lambda t: 0.0 * jnp.sum(t), *_separated_rows(34, 2))


@study("adversarial")
def improper_collinear():
    """Two equal columns under a flat prior: no posterior along their difference."""
    rng = np.random.default_rng(35)
    x = rng.standard_normal((80, 1))
    y = (rng.random(80) < 1 / (1 + np.exp(-x[:, 0]))).astype(float)
    return _separable(lambda t: 0.0 * jnp.sum(t), np.repeat(x, 2, axis=1), y, np.arange(80) % 3)


@study("adversarial")
def improper_constant():
    """An outcome that never occurs under a flat prior of the intercept: no posterior."""
    return _separable(lambda t: 0.0 * jnp.sum(t), np.zeros((30, 0)), np.zeros(30), np.arange(30) % 2)


@study("adversarial", "psych/bfi")
def factor_signs():
    """Five questions on agreeableness, one factor integrated out: all loadings may change sign; education."""
    items = ["A1", "A2", "A3", "A4", "A5"]
    frame = table("psych/bfi").dropna(subset=[*items, "education"])
    rows = np.stack([standardised(frame[item]) for item in items], axis=1)

    def logprior_fn(position):
        return normal(position["loading"], 1.0) + normal(position["log_noise_scale"], 1.0)

    def loglikelihood_fn(position, example):
        (y,) = example
        noise = jnp.exp(-position["log_noise_scale"])
        a, z = position["loading"] * noise, y * noise
        scale = 1 + a @ a
        return -0.5 * (z @ z - (a @ z) ** 2 / scale) - 0.5 * jnp.log(scale) + jnp.sum(jnp.log(noise))

    # a start without preference for a sign would sit on the saddle between the modes
    start = {"loading": np.full(5, 0.1), "log_noise_scale": np.zeros(5)}
    model = fald.Model(logprior_fn, loglikelihood_fn, start, name="factor")
    return model, by_site(frame["education"].astype(int), rows)


@study("adversarial", "MASS/geyser")
def label_switching():
    """Waiting times of a geyser, two normal components without an order; blocks of 30 eruptions."""
    waiting = standardised(table("MASS/geyser")["waiting"])

    def logprior_fn(position):
        return sum(normal(position[name], 1.5) for name in ("center", "log_sd", "logit_share"))

    def loglikelihood_fn(position, example):
        log_sd, share = position["log_sd"], position["logit_share"]
        log_share = jnp.stack([log_sigmoid(share), log_sigmoid(-share)])
        z = (example[0] - position["center"]) * jnp.exp(-log_sd)
        return jax.nn.logsumexp(log_share - log_sd - 0.5 * z**2)

    start = {"center": np.array([-0.5, 0.5]), "log_sd": np.zeros(2), "logit_share": np.zeros(())}
    model = fald.Model(logprior_fn, loglikelihood_fn, start, name="two-normals")
    return model, by_site(np.arange(len(waiting)) // 30, waiting)


@study("adversarial")
def disagreeing_sites():
    """A location with Student-t noise of 2 degrees of freedom; two groups of sites around −6 and 6."""
    rng = np.random.default_rng(36)
    site = np.arange(24) % 4
    y = np.where(site < 2, -6.0, 6.0) + 0.5 * rng.standard_normal(24)

    def loglikelihood_fn(theta, example):
        dof = 2.0
        constant = gammaln((dof + 1) / 2) - gammaln(dof / 2) - 0.5 * jnp.log(dof * jnp.pi)
        return constant - (dof + 1) / 2 * jnp.log1p((example[0] - theta) ** 2 / dof)

    model = fald.Model(lambda theta: normal(theta, 10.0), loglikelihood_fn, np.zeros(()), name="t-location")
    return model, by_site(site, y)
