"""Generators of posteriors given by their density: mixtures, funnels, bananas, ridges, tails, edges."""

from __future__ import annotations

from functools import cache

import jax
import jax.numpy as jnp
import numpy as np
from jax.scipy.special import gammaln
from scipy.integrate import trapezoid
from scipy.stats import truncnorm

import fald
from benchmarks.verdict.problem import WIDE, Problem, generator, rotation, shared


def _prior(theta):
    return -0.5 * jnp.sum((theta / WIDE) ** 2)


def density_model(dim: int, density, prior=_prior, start: float = 0.0) -> fald.Model:
    """A model of ``dim`` parameters whose rows carry a share of a log density and what it depends on."""

    def loglikelihood_fn(theta, example):
        share, *parameters = example
        return share * density(theta, *parameters)

    return fald.Model(prior, loglikelihood_fn, np.full(dim, start))


@cache
def _normals(dim: int) -> fald.Model:
    """Two normals: log weights (2,), means (2, d), factors of their precisions (2, d, d)."""

    def density(theta, log_weights, means, roots):
        z = jnp.einsum("kij,kj->ki", roots, theta - means)
        halves = jnp.linalg.slogdet(roots)[1]
        return jax.nn.logsumexp(log_weights + halves - 0.5 * jnp.sum(z**2, axis=1))

    return density_model(dim, density)


def two_normals(weights, means, covariances, what: str) -> Problem:
    """Two normals with these weights (2,), means (2, d) and covariances (2, d, d)."""
    dim = len(means[0])
    roots = np.array([np.linalg.inv(np.linalg.cholesky(c)) for c in covariances]).astype(np.float32)
    covariances = [np.linalg.inv(r.astype(float).T @ r.astype(float)) for r in roots]
    means = np.asarray(means, np.float32).astype(float)
    weights = np.exp(np.log(np.asarray(weights)).astype(np.float32).astype(float))
    weights = weights / weights.sum()
    mean = weights @ means
    second = sum(w * (np.diag(c) + m**2) for w, c, m in zip(weights, covariances, means))
    data = shared(np.log(weights), means, roots)
    return Problem(_normals(dim), data, mean, np.sqrt(second - mean**2), what)


@generator
def mixtures(rng, dim: int | None = None) -> Problem:
    """Two normals of nearly equal or unequal weight and width, half an sd to 60 sds apart.

    Of many parameters none is narrower than the other: which is found would be chance (``detection``).
    """
    narrowest = 1.0 if dim else 0.7
    dim = dim or int(rng.choice([1, 2, 3, 5, 10]))
    minor, width = float(rng.uniform(0.05, 0.5)), float(rng.uniform(narrowest, 1.5))
    apart = float(np.exp(rng.uniform(np.log(0.5), np.log(60))))
    way = rotation(dim, rng)[0] * apart
    what = f"d={dim}, {minor:.2f} of the mass {apart:.1f} sds away, {width:.2f} times as wide"
    means = [rng.normal(0, 2, dim), np.zeros(dim)]
    means[1] = means[0] + way
    return two_normals([1 - minor, minor], means, [np.eye(dim), width**2 * np.eye(dim)], what)


@cache
def _heavy_side(dim: int) -> fald.Model:
    def density(theta, weight, degrees, width, centre):
        z2 = jnp.sum((theta - centre) ** 2) / width**2
        tail = gammaln((degrees + dim) / 2) - gammaln(degrees / 2) - dim / 2 * jnp.log(degrees / 2)
        tail -= (degrees + dim) / 2 * jnp.log1p(z2 / degrees) + dim * jnp.log(width)
        return jnp.logaddexp(jnp.log1p(-weight) - 0.5 * jnp.sum(theta**2), jnp.log(weight) + tail)

    return density_model(dim, density)


@generator
def heavy_modes(rng, dim: int | None = None) -> Problem:
    """A normal, and a Student t 6 to 60 sds away, up whose sides Newton's method climbs in small steps."""
    dim = dim or int(rng.choice([1, 2, 3, 5, 8]))
    weight, width = np.float32(rng.uniform(0.1, 0.5)), np.float32(rng.uniform(0.8, 2.0))
    degrees, apart = np.float32(rng.choice([4.0, 6.0, 10.0])), float(rng.uniform(6, 60))
    centre = (rotation(dim, rng)[0] * apart).astype(np.float32)
    spread = float(width) ** 2 * float(degrees) / (float(degrees) - 2)
    mean = float(weight) * centre.astype(float)
    second = 1 - float(weight) + float(weight) * (spread + centre.astype(float) ** 2)
    what = f"d={dim}, {weight:.2f} of the mass a t with {degrees:.0f} degrees {apart:.0f} sds away"
    data = shared(weight, degrees, width, centre)
    return Problem(_heavy_side(dim), data, mean, np.sqrt(second - mean**2), what)


@generator
def scale_mixtures(rng, dim: int | None = None) -> Problem:
    """A normal, and another with the same centre that is wide in some random directions."""
    dim = dim or int(rng.choice([1, 2, 3, 5, 10]))
    wide = int(rng.integers(1, dim + 1)) if rng.random() < 0.6 else dim
    weight = float(np.exp(rng.uniform(np.log(0.002), np.log(0.3))))
    width = float(np.exp(rng.uniform(np.log(3), np.log(300))))
    axes = rotation(dim, rng) if rng.random() < 0.6 else np.eye(dim)
    spread = axes.T @ np.diag([width**2] * wide + [1.0] * (dim - wide)) @ axes
    what = f"d={dim}, {weight:.3f} of the mass {width:.0f} times as wide in {wide} directions"
    return two_normals([1 - weight, weight], np.zeros((2, dim)), [np.eye(dim), spread], what)


@cache
def _star(dim: int, arms: int) -> fald.Model:
    def density(theta, share, length, ways):
        square, along = jnp.sum(theta**2), ways @ theta
        inside = jnp.log1p(-arms * share) - square / 2
        ridges = jnp.log(share / length) - (square - along**2 * (1 - length**-2)) / 2
        return jnp.logaddexp(inside, jax.nn.logsumexp(ridges))

    return density_model(dim, density)


@generator
def stars(rng) -> Problem:
    """A normal, and several thin ridges through its centre in random directions."""
    dim, arms = int(rng.choice([2, 4, 6, 8])), int(rng.choice([3, 7]))
    share = np.float32(np.exp(rng.uniform(np.log(0.002), np.log(0.03))))
    length = np.float32(np.exp(rng.uniform(np.log(5), np.log(100))))
    ways = rng.standard_normal((arms, dim))
    ways = (ways / np.linalg.norm(ways, axis=1)[:, None]).astype(np.float32)
    # unit vectors but for rounding, so that a ridge has the length that is meant
    variances = 1 + float(share) * (float(length) ** 2 - 1) * np.sum(ways.astype(float) ** 2, axis=0)
    what = f"d={dim}, {arms} ridges with {share:.3f} of the mass each, {length:.0f} times as long"
    return Problem(_star(dim, arms), shared(share, length, ways), np.zeros(dim), np.sqrt(variances), what)


@cache
def _slabs(dim: int) -> fald.Model:
    def density(theta, weight, width):
        spike = jnp.log1p(-weight) - 0.5 * theta**2
        slab = jnp.log(weight / width) - 0.5 * (theta / width) ** 2
        return jnp.sum(jnp.logaddexp(spike, slab))

    return density_model(dim, density)


@generator
def spikes_and_slabs(rng, dim: int | None = None) -> Problem:
    """Independent coordinates, each a narrow normal with some mass in a wide one."""
    dim = dim or int(rng.choice([2, 5, 10]))
    weight = np.float32(np.exp(rng.uniform(np.log(0.002), np.log(0.3))))
    width = np.float32(np.exp(rng.uniform(np.log(3), np.log(300))))
    return slabs(dim, weight, width)


def slabs(dim: int, weight, width) -> Problem:
    """So much of every coordinate in a normal so many times as wide."""
    weight, width = np.float32(weight), np.float32(width)
    sd = np.full(dim, np.sqrt(1 - float(weight) + float(weight) * float(width) ** 2))
    what = f"d={dim}, {weight:.3f} of each {width:.0f} times as wide"
    return Problem(_slabs(dim), shared(weight, width), np.zeros(dim), sd, what)


@cache
def _funnel(dim: int) -> fald.Model:
    def density(theta, spread):
        v, x = theta[0], theta[1:]
        return -0.5 * (v / spread) ** 2 - 0.5 * jnp.sum(x**2) * jnp.exp(-v) - len(x) * v / 2

    return density_model(dim, density)


@generator
def funnels(rng, dim: int | None = None) -> Problem:
    """Effects whose variance has a log-normal law, from nearly normal to a deep neck."""
    dim = dim or int(rng.choice([2, 4, 8]))
    spread = np.float32(rng.uniform(0.2, 2.5))
    sd = np.r_[float(spread), np.full(dim - 1, np.exp(float(spread) ** 2 / 4))]
    return Problem(_funnel(dim), shared(spread), np.zeros(dim), sd, f"d={dim}, log variance ±{spread:.2f}")


@cache
def _banana(dim: int) -> fald.Model:
    def density(theta, bend, thin, axes):
        z = axes @ theta
        off = (z[1] - bend * (z[0] ** 2 - 1)) / thin
        return -0.5 * (z[0] ** 2 + off**2 + jnp.sum(z[2:] ** 2))

    return density_model(dim, density)


@generator
def bananas(rng, dim: int | None = None) -> Problem:
    """A normal bent along a parabola, in a random rotation."""
    dim = dim or int(rng.choice([2, 4, 8]))
    bend, thin = np.float32(rng.uniform(0.1, 2.0)), np.float32(rng.uniform(0.3, 1.0))
    axes = rotation(dim, rng)
    variances = np.r_[1.0, float(thin) ** 2 + 2 * float(bend) ** 2, np.ones(dim - 2)]
    inverse = np.linalg.inv(axes)
    sd = np.sqrt(np.einsum("ij,j,ij->i", inverse, variances, inverse))
    data = shared(bend, thin, axes)
    return Problem(_banana(dim), data, np.zeros(dim), sd, f"d={dim}, bend {bend:.2f}, thin {thin:.2f}")


@cache
def _ridge(dim: int) -> fald.Model:
    def density(theta, scales, axes, skew):
        z = axes @ theta / scales
        return jnp.sum(skew * z - jnp.exp(z) * skew)

    return density_model(dim, density)


@generator
def ridges(rng, dim: int | None = None) -> Problem:
    """Skewed coordinates of very different scales, rotated: thin ridges with a long tail to one side."""
    from scipy.special import polygamma, psi

    dim = dim or int(rng.choice([2, 4, 8]))
    scales = np.exp(rng.uniform(np.log(0.01), np.log(30), dim)).astype(np.float32)
    skew = np.float32(np.exp(rng.uniform(np.log(0.7), np.log(30))))
    axes = rotation(dim, rng)
    inverse = np.linalg.inv(axes)
    centre, spread = psi(float(skew)) - np.log(float(skew)), np.sqrt(polygamma(1, float(skew)))
    mean = inverse @ (centre * scales.astype(float))
    sd = np.sqrt(inverse**2 @ (spread * scales.astype(float)) ** 2)
    data = shared(scales, axes, skew)
    return Problem(_ridge(dim), data, mean, sd, f"d={dim}, shape {skew:.1f}, scales to {scales.max():.2g}")


@cache
def _student(dim: int) -> fald.Model:
    def density(theta, degrees):
        return -(degrees + len(theta)) / 2 * jnp.log1p(jnp.sum(theta**2) / degrees)

    return density_model(dim, density)


@generator
def heavy_tails(rng, dim: int | None = None) -> Problem:
    """Multivariate Student t with 2.5 to 20 degrees of freedom."""
    dim = dim or int(rng.choice([1, 2, 5, 10]))
    degrees = np.float32(np.exp(rng.uniform(np.log(2.5), np.log(20))))
    return student(dim, degrees)


def student(dim: int, degrees) -> Problem:
    """A multivariate Student t."""
    degrees = np.float32(degrees)
    sd = np.full(dim, np.sqrt(float(degrees) / (float(degrees) - 2)))
    return Problem(_student(dim), shared(degrees), np.zeros(dim), sd, f"d={dim}, {degrees:.1f} degrees")


@cache
def _edged(dim: int) -> fald.Model:
    def prior(theta):
        return jnp.where(jnp.all(jnp.abs(theta) < 1), 0.0, -jnp.inf)

    return density_model(dim, lambda theta, centre, sd: -0.5 * jnp.sum(((theta - centre) / sd) ** 2), prior)


@generator
def boundaries(rng) -> Problem:
    """Normals cut off by the edges of a uniform prior, some with their top outside."""
    dim = int(rng.choice([1, 2, 4]))
    centre = rng.uniform(-1.5, 1.5, dim).astype(np.float32)
    sd = np.exp(rng.uniform(np.log(0.2), np.log(3), dim)).astype(np.float32)
    law = truncnorm((-1 - centre) / sd, (1 - centre) / sd, centre.astype(float), sd.astype(float))
    return Problem(_edged(dim), shared(centre, sd), law.mean(), law.std(), f"d={dim}, tops {centre}")


@cache
def _powers(dim: int) -> fald.Model:
    return density_model(dim, lambda theta, power: -jnp.sum((theta**2 + 1e-12) ** (power / 2)))


@generator
def tops(rng, dim: int | None = None) -> Problem:
    """Flat tops and kinks: exp(−|x|^p) with p from 1 to 8."""
    dim = dim or int(rng.choice([1, 2, 5]))
    power = np.float32(np.exp(rng.uniform(0, np.log(8))))
    x = np.linspace(-60, 60, 400_001)
    level = np.exp(-((x**2 + 1e-12) ** (float(power) / 2)))
    sd = np.sqrt(trapezoid(level * x**2, x) / trapezoid(level, x))
    return Problem(
        _powers(dim), shared(power), np.zeros(dim), np.full(dim, sd), f"d={dim}, power {power:.2f}"
    )
