"""Generators of posteriors with holes, shells, kinks and likelihoods that overflow; exact on a grid."""

from __future__ import annotations

from functools import cache

import jax
import jax.numpy as jnp
import numpy as np
from scipy.special import gammaln, logsumexp

import fald
from benchmarks.verdict.densities import density_model
from benchmarks.verdict.problem import Problem, generator, shared


def _radius(x):
    return jnp.sqrt(jnp.sum(x**2) + 1e-12)


def _radial(dim: int, radius: float, width: float) -> tuple[float, float]:
    """Logarithm of ∫ exp(−½((|x| − R)/w)²) dx, and the mean of |x|²."""
    r = np.linspace(1e-6, radius + 12 * width, 20_001)
    level = -0.5 * ((r - radius) / width) ** 2 + (dim - 1) * np.log(r)
    surface = np.log(2) + dim / 2 * np.log(np.pi) - gammaln(dim / 2)
    mass = np.asarray(logsumexp(level))
    return float(mass + np.log(r[1] - r[0]) + surface), float(
        np.exp(np.asarray(logsumexp(level + 2 * np.log(r))) - mass)
    )


@cache
def _ring(dim: int) -> fald.Model:
    return density_model(dim, lambda theta, radius, width: -0.5 * ((_radius(theta) - radius) / width) ** 2)


@generator
def rings(rng) -> Problem:
    """A ring or a hollow ball, from nearly filled to thin."""
    dim = int(rng.choice([2, 3, 5]))
    radius, width = np.float32(rng.uniform(1, 6)), np.float32(rng.uniform(0.4, 2))
    sd = np.full(dim, np.sqrt(_radial(dim, float(radius), float(width))[1] / dim))
    what = f"d={dim}, radius {radius:.1f}, width {width:.2f}"
    return Problem(_ring(dim), shared(radius, width), np.zeros(dim), sd, what)


@cache
def _shell(dim: int) -> fald.Model:
    def density(theta, share, centre, radius, width, log_mass):
        bulk = jnp.log1p(-share) - 0.5 * jnp.sum(theta**2) - dim / 2 * jnp.log(2 * jnp.pi)
        off = (_radius(theta - centre) - radius) / width
        return jnp.logaddexp(bulk, jnp.log(share) - 0.5 * off**2 - log_mass)

    return density_model(dim, density)


@generator
def shells(rng) -> Problem:
    """A normal with a little of its mass in a wide shell off centre."""
    dim = int(rng.choice([2, 3, 5]))
    share = np.float32(np.exp(rng.uniform(np.log(0.005), np.log(0.2))))
    radius, width = np.float32(rng.uniform(5, 30)), np.float32(rng.uniform(0.5, 4))
    return shell(rng.normal(0, 3, dim).astype(np.float32), share, radius, width)


def shell(centre, share, radius, width) -> Problem:
    """A standard normal, and a share of the mass in a shell around a centre (d,)."""
    dim = len(centre)
    log_mass, square = _radial(dim, float(radius), float(width))
    log_mass = float(np.float32(log_mass))
    mean = float(share) * centre.astype(float)
    second = 1 - float(share) + float(share) * (square / dim + centre.astype(float) ** 2)
    what = f"d={dim}, {share:.3f} of the mass in a shell of radius {radius:.0f}, width {width:.1f}"
    data = shared(share, centre, radius, width, log_mass)
    return Problem(_shell(dim), data, mean, np.sqrt(second - mean**2), what)


def on_grid(level, bounds) -> tuple[np.ndarray, np.ndarray]:
    """Mean and sd (2,) of a density of two parameters, from its logarithm on a grid."""
    axes = [np.linspace(low, high, 1201) for low, high in bounds]
    grid = np.stack(np.meshgrid(*axes, indexing="ij"), axis=-1).reshape(-1, 2)
    logs = level(grid)
    weights = np.exp(logs - logs.max())
    weights /= weights.sum()
    mean = weights @ grid
    return mean, np.sqrt(weights @ (grid - mean) ** 2)


@cache
def _lasso() -> fald.Model:
    def logprior_fn(theta):
        return -jnp.sum(jnp.abs(theta))

    def loglikelihood_fn(theta, example):
        share, matrix, vector = example
        return share * (vector @ theta - 0.5 * theta @ matrix @ theta)

    return fald.Model(logprior_fn, loglikelihood_fn, np.zeros(2))


@generator
def laplace_priors(rng) -> Problem:
    """Two correlated coefficients under Laplace priors, some with their top on a kink."""
    root = rng.normal(size=(3, 2)) * np.exp(rng.uniform(-2, 2))
    matrix = (root.T @ root).astype(np.float32)
    vector = (matrix @ rng.normal(0, 1, 2) + rng.normal(0, 1, 2)).astype(np.float32)

    def level(grid):
        rises = grid @ vector.astype(float) - 0.5 * np.einsum("ni,ij,nj->n", grid, matrix.astype(float), grid)
        return rises - np.abs(grid).sum(axis=1)

    mean, sd = on_grid(level, [(-30, 30)] * 2)
    mean, sd = on_grid(level, [(m - 14 * s, m + 14 * s) for m, s in zip(mean, sd)])
    return Problem(_lasso(), shared(matrix, vector), mean, sd, f"curvature {np.trace(matrix):.2g}")


@cache
def _naive(scale: float) -> fald.Model:
    def logprior_fn(theta):
        return -0.5 * jnp.sum((theta / scale) ** 2)

    def loglikelihood_fn(theta, example):
        x, y = example
        p = jax.nn.sigmoid(theta[0] + theta[1] * x)
        return y * jnp.log(p) + (1 - y) * jnp.log(1 - p)

    return fald.Model(logprior_fn, loglikelihood_fn, np.zeros(2))


@generator
def overflows(rng) -> Problem:
    """Logistic likelihoods by logarithms of what rounds to zero: not a number where it matters, or nearly."""
    scale, spread = float(rng.choice([2.5, 10.0, 40.0])), np.exp(rng.uniform(-1, 2))
    x = (spread * rng.normal(size=12)).astype(np.float32)
    y = (x + 0.3 * spread * rng.normal(size=12) > 0).astype(np.float32)

    def level(grid):
        eta = grid[:, :1] + grid[:, 1:] * x.astype(float)
        return np.sum(y * eta - np.logaddexp(0, eta), axis=1) - 0.5 * np.sum((grid / scale) ** 2, axis=1)

    mean, sd = on_grid(level, [(-6 * scale, 6 * scale)] * 2)
    mean, sd = on_grid(level, [(m - 10 * s, m + 10 * s) for m, s in zip(mean, sd)])
    data = fald.FederatedData.from_arrays({f"s{i}": (x[i::3], y[i::3]) for i in range(3)})
    return Problem(_naive(scale), data, mean, sd, f"prior ±{scale:g}, feature ±{spread:.2g}")
