"""Posteriors of other kinds than those of the generators, each with its exact means and sds.

Most are a transformed or mixed law whose moments are known in closed form or by an integral of one dimension;
those of two parameters are summed on a grid.
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise

import jax
import jax.numpy as jnp
import numpy as np
from scipy.integrate import quad
from scipy.special import digamma, polygamma
from scipy.stats import norm

import fald
from benchmarks.verdict.densities import density_model, two_normals
from benchmarks.verdict.problem import Problem, rotation, shared
from benchmarks.verdict.shapes import on_grid

OTHERS: dict[str, Callable[[], Problem]] = {}


def _other(name: str):
    def enter(function: Callable[[], Problem]):
        OTHERS[name] = function
        return function

    return enter


def _axes(dim: int, seed: int = 0) -> np.ndarray:
    return rotation(dim, np.random.default_rng([dim, seed, 23]))


def _direction(dim: int) -> np.ndarray:
    return _axes(dim)[0].astype(np.float32).astype(float)


def _along(dim: int, level: Callable, law: tuple[float, float], what: str) -> Problem:
    """A standard normal, but for one random direction u, along which log density and (mean, sd) are given."""
    way = _direction(dim)

    def density(theta, way):
        t = way @ theta / jnp.sum(way**2)
        return level(t) - 0.5 * (jnp.sum(theta**2) - t**2 * jnp.sum(way**2))

    length = float(way @ way)
    mean, sd = law
    variances = 1 + way**2 * (sd**2 - 1 / length)
    return Problem(
        density_model(dim, density), shared(way), mean * way, np.sqrt(variances), f"d={dim}, {what}"
    )


def _moments(level: Callable[[float], float], low: float, high: float, breaks=()) -> tuple[float, float]:
    """Mean and sd of a density of one parameter, by its logarithm."""
    inner = [low, *breaks, high]

    def integral(power: int) -> float:
        pieces = pairwise(inner)
        return sum(quad(lambda t: t**power * np.exp(level(t)), a, b, limit=500)[0] for a, b in pieces)

    mass, mean, second = (integral(k) for k in range(3))
    return mean / mass, float(np.sqrt(second / mass - (mean / mass) ** 2))


@_other("two correlated funnels")
def correlated_funnels() -> Problem:
    correlation, spread = 0.8, 0.7

    def density(theta, correlation, spread):
        v = theta[:2] / spread
        quadratic = (v[0] ** 2 + v[1] ** 2 - 2 * correlation * v[0] * v[1]) / (1 - correlation**2)
        scales = jnp.repeat(theta[:2], 3)
        return -0.5 * quadratic - 0.5 * jnp.sum(theta[2:] ** 2 * jnp.exp(-scales)) - 0.5 * jnp.sum(scales)

    sd = np.r_[np.full(2, spread), np.full(6, np.exp(spread**2 / 4))]
    return Problem(density_model(8, density), shared(correlation, spread), np.zeros(8), sd, "d=8")


@_other("rotated Laplace laws, kinks everywhere")
def kinks() -> Problem:
    axes, scales = _axes(6), np.array([0.01, 0.1, 1, 1, 3, 30], np.float32)

    def density(theta, axes, scales):
        return -jnp.sum(jnp.abs(axes @ theta) / scales)

    inverse = np.linalg.inv(axes)
    sd = np.sqrt(inverse**2 @ (2 * scales.astype(float) ** 2))
    return Problem(density_model(6, density), shared(axes, scales), np.zeros(6), sd, "d=6")


@_other("horseshoe with a slab, outcomes separated")
def separated() -> Problem:
    x = np.array([0.3, 0.5, 0.9, 1.4, -0.2, -0.6, -1.0, -1.3], np.float32)

    def logprior(theta):  # coefficient and the logarithm of its local scale
        scale = 9 / (1 + 9 * jnp.exp(-2 * theta[1]))
        local = theta[1] - jnp.log1p(jnp.exp(2 * theta[1]))
        return local - 0.5 * theta[0] ** 2 / scale - 0.5 * jnp.log(scale)

    def loglikelihood(theta, example):
        return -jax.nn.softplus(-jnp.abs(example[0]) * theta[0])

    def level(grid):
        beta, own = grid.T
        scale = 9 / (1 + 9 * np.exp(-2 * own))
        rows = -np.logaddexp(0, -np.abs(x.astype(float)) * beta[:, None]).sum(axis=1)
        return rows + own - np.logaddexp(0, 2 * own) - 0.5 * beta**2 / scale - 0.5 * np.log(scale)

    data = fald.FederatedData.from_arrays({f"s{i}": (x[i::3],) for i in range(3)})
    mean, sd = on_grid(level, [(-8, 15), (-14, 16)])
    return Problem(fald.Model(logprior, loglikelihood, np.zeros(2)), data, mean, sd, "d=2")


@_other("two normals across each other")
def cross() -> Problem:
    one = _axes(4, 1)
    spreads = [a.T @ np.diag([100, 1, 0.1, 1]) @ a for a in (one, _axes(4, 2))]
    return two_normals([0.6, 0.4], np.zeros((2, 4)), spreads, "d=4")


@_other("Student t copula with light margins")
def copula() -> Problem:
    """θ = asinh z with z a correlated t of three degrees: z has hardly a variance, θ has every moment."""
    shape = np.float32(0.7 * np.ones((4, 4)) + 0.3 * np.eye(4))
    precision = np.linalg.inv(shape.astype(float)).astype(np.float32)

    def density(theta, precision):
        z = jnp.sinh(theta)
        return jnp.sum(jnp.log(jnp.cosh(theta))) - 3.5 * jnp.log1p(z @ precision @ z / 3)

    widths = np.sqrt(np.diag(np.linalg.inv(precision.astype(float))))
    sd = [
        _moments(lambda t, w=w: np.log(np.cosh(t)) - 2 * np.log1p((np.sinh(t) / w) ** 2 / 3), -12, 12)[1]
        for w in widths
    ]
    return Problem(density_model(4, density), shared(precision), np.zeros(4), np.array(sd), "d=4")


def _warped(dim: int) -> Problem:
    """s = sinh((asinh z + ε)/δ) of standard normals z, with ε and δ by coordinate, rotated."""
    rng = np.random.default_rng([dim, 3])
    lean = rng.uniform(-0.6, 0.6, dim).astype(np.float32)
    tail = rng.uniform(0.75, 1.3, dim).astype(np.float32)
    axes = _axes(dim)

    def density(theta, lean, tail, axes):
        s = axes @ theta
        inner = tail * jnp.arcsinh(s) - lean
        return jnp.sum(jnp.log(jnp.cosh(inner)) - 0.5 * jnp.log1p(s**2) - 0.5 * jnp.sinh(inner) ** 2)

    z = np.linspace(-9, 9, 200_001)
    weights = norm.pdf(z) / norm.pdf(z).sum()
    values = np.sinh((np.arcsinh(z)[:, None] + lean.astype(float)) / tail.astype(float))
    centre = weights @ values
    spread = weights @ (values - centre) ** 2
    inverse = np.linalg.inv(axes)
    data = shared(lean, tail, axes)
    sd = np.sqrt(inverse**2 @ spread)
    return Problem(density_model(dim, density), data, inverse @ centre, sd, f"d={dim}")


@_other("rotated sinh-arcsinh warps")
def warps() -> Problem:
    return _warped(6)


@_other("likelihood flat within a ball")
def flat() -> Problem:
    radius, width = 3.0, 0.5

    def density(theta, radius, width):
        off = jnp.maximum(jnp.sqrt(jnp.sum(theta**2) + 1e-12) - radius, 0.0) / width
        return -0.5 * off**2

    r = np.linspace(0, 10, 400_001)
    level = np.exp(-0.5 * (np.maximum(r - radius, 0) / width) ** 2) * r**2
    sd = np.full(3, np.sqrt((level * r**2).sum() / level.sum() / 3))
    return Problem(density_model(3, density), shared(radius, width), np.zeros(3), sd, "d=3")


@_other("corner of a box")
def corner() -> Problem:
    """Uniform between 0 and 1 a priori, pressed into a corner from two sides: truncated exponentials."""
    rates = np.array([40.0, -8.0, 1.0], np.float32)

    def prior(theta):
        return jnp.where(jnp.all((theta > 0) & (theta < 1)), 0.0, -jnp.inf)

    model = density_model(3, lambda theta, rates: -jnp.sum(rates * theta), prior, 0.5)
    known = [_moments(lambda t, r=r: -r * t, 0, 1) for r in rates.astype(float)]
    mean, sd = np.array(known).T
    return Problem(model, shared(rates), mean, sd, "d=3")


@_other("sum known, difference heavy-tailed")
def ridge() -> Problem:
    def density(theta, width):
        total, apart = theta[0] + theta[1], theta[0] - theta[1]
        return -0.5 * (total / width) ** 2 - 3.5 * jnp.log1p((apart / 10) ** 2 / 6) - 0.5 * theta[2] ** 2

    spread = np.sqrt((0.01**2 + 100 * 1.5) / 4)
    return Problem(density_model(3, density), shared(0.01), np.zeros(3), np.array([spread, spread, 1]), "d=3")


@_other("ring in three of eight dimensions")
def ring() -> Problem:
    radius, width = 4.0, 0.8

    def density(theta, radius, width, axes):
        z = axes @ theta
        off = (jnp.sqrt(jnp.sum(z[:3] ** 2) + 1e-12) - radius) / width
        return -0.5 * off**2 - 0.5 * jnp.sum(z[3:] ** 2)

    r = np.linspace(0, 16, 200_001)
    level = np.exp(-0.5 * ((r - radius) / width) ** 2) * r**2
    own = (level * r**2).sum() / level.sum() / 3
    inverse = np.linalg.inv(axes := _axes(8))
    sd = np.sqrt(inverse**2 @ np.r_[np.full(3, own), np.ones(5)])
    return Problem(density_model(8, density), shared(radius, width, axes), np.zeros(8), sd, "d=8")


@_other("Student t along one direction of thirty")
def heavy_direction() -> Problem:
    return _along(
        30, lambda t: -3 * jnp.log1p(t**2 / 5), (0.0, (5 / 3) ** 0.5), "5 degrees along one direction"
    )


def _slab(weight: float, width: float) -> Callable:
    def level(t):
        return jnp.logaddexp(
            jnp.log1p(-weight) - 0.5 * t**2, jnp.log(weight / width) - 0.5 * (t / width) ** 2
        )

    return level


@_other("slab along one direction of thirty")
def thin_slab() -> Problem:
    sd = float(np.sqrt(0.98 + 0.02 * 20**2))
    return _along(30, _slab(0.02, 20.0), (0.0, sd), "2% twenty times as wide along one direction")


@_other("1% four times as wide in thirty dimensions")
def wide_thirty() -> Problem:
    return two_normals([0.99, 0.01], np.zeros((2, 30)), [np.eye(30), 16 * np.eye(30)], "d=30")


@_other("one-sided tails, rotated")
def one_sided() -> Problem:
    """Logarithms of gamma variables of shape a half: tails like exp(θ/2) to one side."""
    axes = _axes(10)

    def density(theta, axes):
        z = axes @ theta
        return jnp.sum(0.5 * z - jnp.exp(z))

    inverse = np.linalg.inv(axes)
    mean, sd = inverse @ np.full(10, digamma(0.5)), np.sqrt(inverse**2 @ np.full(10, polygamma(1, 0.5)))
    return Problem(density_model(10, density), shared(axes), mean, sd, "d=10")


@_other("shoulder: a narrower normal on the side")
def shoulder() -> Problem:
    def level(t):
        return jnp.logaddexp(-0.5 * t**2, np.log(0.3) - 0.5 * ((t - 2.2) / 0.4) ** 2)

    law = _moments(
        lambda t: np.logaddexp(-0.5 * t**2, np.log(0.3) - 0.5 * ((t - 2.2) / 0.4) ** 2), -9, 9, (2.2,)
    )
    return _along(6, level, law, "along one direction")


@_other("cliff: four hundred times as high beyond 3.5 sds")
def cliff() -> Problem:
    law = _moments(lambda t: -0.5 * t**2 + 6 / (1 + np.exp(-20 * (t - 3.5))), -9, 9, (3.5,))
    return _along(10, lambda t: -0.5 * t**2 + 6 * jax.nn.sigmoid(20 * (t - 3.5)), law, "along one direction")


@_other("ripples along one direction")
def ripples() -> Problem:
    law = _moments(lambda t: -0.5 * t**2 + 0.5 * np.cos(6 * t + 1), -9, 9, (-3, 0, 3))
    return _along(4, lambda t: -0.5 * t**2 + 0.5 * jnp.cos(6 * t + 1), law, "along one direction")


@_other("spike of half the mass, a thirtieth as wide")
def spike() -> Problem:
    return two_normals([0.5, 0.5], np.zeros((2, 3)), [np.eye(3), np.eye(3) / 900], "d=3")


@_other("sheet: a fifth of the mass, a twentieth as wide along one direction")
def sheet() -> Problem:
    way = _direction(5)
    spread = np.eye(5) + (0.05**2 - 1) * np.outer(way, way) / (way @ way)
    return two_normals([0.8, 0.2], np.stack([np.zeros(5), 1.5 * way]), [np.eye(5), spread], "d=5")


@_other("log-normal in its own units")
def log_normal() -> Problem:
    widths = np.array([0.3, 0.5, 0.7], np.float32)

    def prior(theta):
        return jnp.where(jnp.all(theta > 0), 0.0, -jnp.inf)

    def density(theta, widths):
        logs = jnp.log(jnp.maximum(theta, 1e-30))
        return -jnp.sum(logs + 0.5 * (logs / widths) ** 2)

    square = widths.astype(float) ** 2
    mean, sd = np.exp(square / 2), np.sqrt((np.exp(square) - 1) * np.exp(square))
    return Problem(density_model(3, density, prior, 1.0), shared(widths), mean, sd, "d=3")


@_other("half of a normal")
def half() -> Problem:
    """A normal of correlation 0.95 cut by a plane through its middle."""
    spread = np.array([[1, 0.95], [0.95, 1]], np.float32)

    def prior(theta):
        return jnp.where(theta[0] > 0, 0.0, -jnp.inf)

    precision = np.linalg.inv(spread.astype(float)).astype(np.float32)
    covariance = np.linalg.inv(precision.astype(float))
    mean = np.sqrt(2 / np.pi) * covariance[0] / np.sqrt(covariance[0, 0])
    sd = np.sqrt(np.diag(covariance) - mean**2)
    model = density_model(2, lambda theta, p: -0.5 * theta @ p @ theta, prior, 1.0)
    return Problem(model, shared(precision), mean, sd, "d=2")


@_other("product of two parameters, observed")
def product() -> Problem:
    def level(grid):
        return -0.5 * (grid**2).sum(axis=1) / 4 - 0.5 * ((grid[:, 0] * grid[:, 1] - 1) / 0.5) ** 2

    def density(theta):
        return -0.5 * jnp.sum(theta**2) / 4 - 0.5 * ((theta[0] * theta[1] - 1) / 0.5) ** 2

    mean, sd = on_grid(level, [(-12, 12)] * 2)
    return Problem(density_model(2, density), shared(), mean, sd, "d=2")


@_other("orthant of a correlated normal, softly")
def soft_orthant() -> Problem:
    """N(0, Σ)·Φ(sx₁): a skew normal, whose moments are known."""
    slope = np.float32(8.0)
    axes = _axes(7)

    def density(theta, slope, axes):
        z = axes @ theta
        return -0.5 * jnp.sum(z**2) + jax.scipy.stats.norm.logcdf(slope * z[0])

    lean = np.sqrt(2 / np.pi) * 8 / np.sqrt(65)
    inverse = np.linalg.inv(axes)
    mean = inverse @ np.r_[lean, np.zeros(6)]
    sd = np.sqrt(inverse**2 @ np.r_[1 - lean**2, np.ones(6)])
    return Problem(density_model(7, density), shared(slope, axes), mean, sd, "d=7")


@_other("Student t along one direction of eighty")
def heavy_eighty() -> Problem:
    return _along(
        80, lambda t: -3 * jnp.log1p(t**2 / 5), (0.0, (5 / 3) ** 0.5), "5 degrees along one direction"
    )


@_other("slab along one direction of seventy")
def slab_seventy() -> Problem:
    sd = float(np.sqrt(0.97 + 0.03 * 15**2))
    return _along(70, _slab(0.03, 15.0), (0.0, sd), "3% fifteen times as wide along one direction")


@_other("seventy rotated sinh-arcsinh warps")
def warps_seventy() -> Problem:
    return _warped(70)
