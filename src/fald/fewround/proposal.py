r"""Proposals: where to draw parameters, with tails that defend against surprises.

A proposal is a mixture of Gaussian cores; each core N(m, S) is drawn from as

    70%  N(m, S)
    10%  a multivariate t with 5 degrees of freedom, centre m and shape S
    20%  (1/d) Σ_j N(m, S + 8 s_j s_jᵀ),  s_j = S e_j/√S_jj:  one coordinate three times as wide

so that a tail which the core misses is seen. Draws are quasi-random (scrambled Sobol points) in antithetic
pairs m ± x, and follow from the cores and a seed alone: a site makes them itself.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
import scipy  # whose parts load when they are first used
from numpy.typing import NDArray

from fald.fewround.sobol import scrambled

Array = NDArray[Any]

CORE, HEAVY, WIDE = 0.7, 0.1, 0.2
_DEGREES = 5.0
_STRETCH = 8.0


class Proposal(NamedTuple):
    """Gaussian cores: weights (k,), means (k, d), lower Cholesky factors (k, d, d)."""

    weights: Array
    means: Array
    factors: Array

    @property
    def dim(self) -> int:
        """Number of parameters."""
        return self.means.shape[1]


def gaussian(mean: Array, covariance: Array) -> Proposal:
    """One core."""
    return Proposal(np.ones(1), np.asarray(mean)[None], cholesky(covariance)[None])


def cholesky(covariance: Array) -> Array:
    """Lower Cholesky factor of a covariance, after lifting eigenvalues that rounding made negative."""
    scale = np.sqrt(np.maximum(np.diag(covariance), np.finfo(float).tiny))
    values, vectors = np.linalg.eigh(covariance / np.outer(scale, scale))
    floor = max(float(values[-1]), 1e-300) * 1e-12
    root = vectors * np.sqrt(np.maximum(values, floor))
    factor = np.asarray(np.linalg.qr((scale[:, None] * root).T, mode="r")).T
    return factor * np.where(np.diag(factor) < 0, -1.0, 1.0)


def overall(current: Proposal) -> tuple[Array, Array]:
    """Mean and covariance of the cores together."""
    centre = current.weights @ current.means
    own = np.einsum("k,kij,klj->il", current.weights, current.factors, current.factors)
    apart = current.means - centre
    return centre, own + (current.weights[:, None] * apart).T @ apart


class Strata(NamedTuple):
    """Draws per core: (k, 3) counts of the three parts, each even, the last a multiple of 2d."""

    counts: Array

    @property
    def total(self) -> int:
        """All draws."""
        return int(self.counts.sum())


def strata(proposal: Proposal, count: int) -> Strata:
    """Split about ``count`` draws over the parts of a proposal."""
    d, rows = proposal.dim, []
    for weight in proposal.weights:
        share = count * float(weight)
        wide = 2 * d * max(1, round(WIDE * share / (2 * d)))
        heavy = 2 * max(1, round(HEAVY * share / 2))
        rows.append((2 * max(1, round((share - wide - heavy) / 2)), heavy, wide))
    return Strata(np.array(rows, np.int64))


def _uniforms(count: int, dim: int, seed: int, part: int) -> Array:
    """(count, dim) scrambled Sobol points inside the unit cube."""
    generator = np.random.Generator(np.random.Philox([seed & (2**64 - 1), part]))
    return np.clip(scrambled(count, dim, generator), 1e-12, 1 - 1e-12)


def draw(proposal: Proposal, count: int, seed: int) -> Array:
    """(C, d) draws; rows 2i and 2i + 1 mirror each other about the mean of their core.

    Examples
    --------
    >>> x = draw(gaussian(np.zeros(2), np.eye(2)), 100, seed=3)
    >>> x.shape, bool(np.allclose(x[0], -x[1]))
    ((100, 2), True)
    """
    d, parts = proposal.dim, []
    for k, counts in enumerate(strata(proposal, count).counts):
        factor = proposal.factors[k]
        for part, size in enumerate(counts // 2):
            u = _uniforms(int(size), d + 1, seed, 3 * k + part)
            offset = scipy.special.ndtri(u[:, :d]) @ factor.T
            if part == 1:  # χ² by inversion
                offset *= np.sqrt(_DEGREES / (2 * scipy.special.gammaincinv(_DEGREES / 2, u[:, d])))[:, None]
            elif part == 2:
                covariance = factor @ factor.T
                directions = covariance / np.sqrt(np.diag(covariance))[:, None]
                which = np.arange(size) % d
                offset += np.sqrt(_STRETCH) * scipy.special.ndtri(u[:, d])[:, None] * directions[which]
            pairs = np.stack([proposal.means[k] + offset, proposal.means[k] - offset], axis=1)
            parts.append(pairs.reshape(-1, d))
    return np.concatenate(parts)


def log_density(proposal: Proposal, count: int, positions: Array) -> Array:
    """(C,) log density of the mixture that ``draw(proposal, count, …)`` draws from."""
    d = proposal.dim
    counts = strata(proposal, count).counts
    shares = np.log(counts / counts.sum())
    heavy = (
        scipy.special.gammaln((_DEGREES + d) / 2)
        - scipy.special.gammaln(_DEGREES / 2)
        - d / 2 * np.log(_DEGREES * np.pi)
    )
    terms = []
    for k, factor in enumerate(proposal.factors):
        offset = positions - proposal.means[k]
        z = scipy.linalg.solve_triangular(factor, offset.T, lower=True)
        square = np.sum(z**2, axis=0)
        half = np.sum(np.log(np.diag(factor)))
        core = -square / 2 - half - d / 2 * np.log(2 * np.pi)
        standard = offset / np.sqrt(np.sum(factor**2, axis=1))
        bend = _STRETCH / (2 * (1 + _STRETCH))
        wide = core - np.log(1 + _STRETCH) / 2 - np.log(d) + log_sum(bend * standard**2, 1)
        tail = heavy - half - (_DEGREES + d) / 2 * np.log1p(square / _DEGREES)
        terms += [core + shares[k, 0], tail + shares[k, 1], wide + shares[k, 2]]
    return log_sum(np.stack(terms), 0)


def log_sum(terms: Array, axis: int) -> Array:
    """Logarithm of the sum of exp(terms) along an axis: SciPy's takes three times as long.

    Examples
    --------
    >>> log_sum(np.array([[1000.0, 1000.0], [0.0, -np.inf], [-np.inf, -np.inf]]), 1).round(3).tolist()
    [1000.693, 0.0, -inf]
    """
    top = np.max(terms, axis=axis, keepdims=True)
    top = np.where(np.isfinite(top), top, 0.0)
    with np.errstate(divide="ignore"):
        return np.log(np.sum(np.exp(terms - top), axis=axis)) + np.squeeze(top, axis)
