r"""A site's part of corrected federated Langevin dynamics: local steps that do not drift to its own rows.

With ℓ^c the site's log likelihood, q_c its quadratic at an anchor and q = Σ_c q_c, the drift is

    ∇log π0 + ∇q + (∇ℓ^c − ∇q_c)/w_c,

whose average over sites with weights w_c is the gradient of the joint posterior, and which on Gaussian
posteriors is the same at every site. The weights are the sites' leverages λmax(Lᵀ(−H_c)L)/Σ, S = LLᵀ, so that
a site of three rows is not magnified by its share of the rows.
"""

from __future__ import annotations

import zlib
from collections.abc import Mapping
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from numpy.typing import NDArray

from fald.calculus.sums import Site, gradients, hessians
from fald.core.types import PyTree
from fald.problem.model import Model

Array = NDArray[Any]

_FRICTION = 2.0


def leverage(hessian: Array, factor: Array) -> float:
    """λmax(Lᵀ(−H_c)L): how much of the posterior's curvature is this site's; never zero."""
    return max(float(np.linalg.eigvalsh(-factor.T @ hessian @ factor)[-1]), 1e-6)


def normals(seed: int, site: str | None, shape: tuple[int, ...]) -> Array:
    """Standard normals of one round: the same at all sites, or one site's own."""
    words = [seed & (2**64 - 1), 1 if site is None else 2 + zlib.crc32(site.encode())]
    return np.random.Generator(np.random.Philox(words)).standard_normal(shape)


def local_steps(site: Site, request: Mapping[str, Array]) -> Array:
    """w_c·(z, v) (2, M, d) of all chains after K local steps, in whitened coordinates z = L⁻¹(θ − m).

    ``step_gradient`` is that of the log likelihood summed over sites at ``step_anchors``: (1, d) for all
    chains, or one per chain; ``step_hessian`` that at ``step_centre``.
    """
    mean, factor = request["step_mean"], request["step_factor"]
    at_mean, own = hessians(site, np.stack([mean, request["step_centre"]]))[2]
    anchors = request["step_anchors"]
    own_gradient = gradients(site, anchors)[1]
    weight = leverage(at_mean, factor) / float(request["step_leverage"])
    z, v = request["step_states"]
    count, seed = int(request["step_count"]), int(request["step_seed"])
    rho = float(request["step_correlation"])
    noise = rho * normals(seed, None, (count, *z.shape))
    if rho < 1:
        noise = noise + np.sqrt((1 - rho**2) / weight) * normals(seed, site.name, (count, *z.shape))
    residual = [g.astype(np.float64) for g in (own_gradient, own)]
    with jax.enable_x64(True):
        field = _Field(
            jnp.asarray(mean),
            jnp.asarray(factor),
            jnp.asarray(np.broadcast_to(anchors, z.shape)),
            jnp.asarray(np.broadcast_to(request["step_gradient"], z.shape)),
            jnp.asarray(request["step_hessian"]),
            jnp.asarray(np.broadcast_to(residual[0], z.shape)),
            jnp.asarray(residual[1]),
            weight,
        )
        ended = _integrate(
            site.model,
            tuple(site.parts),
            field,
            jnp.asarray(np.stack([z, v])),
            noise=jnp.asarray(noise),
            size=float(request["step_size"]),
        )
        return weight * np.asarray(ended)


class _Field(NamedTuple):
    """Frame θ = mean + factor·z, anchors, quadratics of all sites and of this one there, and w_c."""

    mean: Any
    factor: Any
    anchors: Any
    gradient: Any
    hessian: Any
    own_gradient: Any
    own_hessian: Any
    weight: Any


@partial(jax.jit, static_argnames="model")
def _integrate(model: Model, parts: PyTree, field: _Field, states, *, noise, size):
    mean, factor, anchors, gradient, hessian, own_gradient, own_hessian, weight = field

    def likelihood(theta):
        def part(rows, mask):
            return jnp.sum(jnp.where(mask, jax.vmap(model.flat_loglikelihood, (None, 0))(theta, rows), 0))

        return sum(part(*one) for one in parts)

    def drift(z, anchor, joint, own):
        theta = mean + factor @ z
        apart = theta - anchor
        residual = jax.grad(likelihood)(theta) - own - own_hessian @ apart
        whole = jax.grad(model.flat_logprior)(theta) + joint + hessian @ apart + residual / weight
        return factor.T @ whole

    def each(z):
        return jax.lax.map(
            lambda one: drift(*one), (z, anchors, gradient, own_gradient), batch_size=min(len(z), 64)
        )

    def step(carry, xi):  # BAOAB
        (z, v), force = carry
        v = v + size / 2 * force
        z = z + size / 2 * v
        keep = jnp.exp(-_FRICTION * size)
        v = keep * v + jnp.sqrt(1 - keep**2) * xi
        z = z + size / 2 * v
        force = each(z)
        return ((z, v + size / 2 * force), force), None

    start = ((states[0], states[1]), each(states[0]))
    ((z, v), _), _ = jax.lax.scan(step, start, noise)
    return jnp.stack([z, v])
