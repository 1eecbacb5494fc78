r"""What is left of a log posterior beyond a Gaussian, learned from gradients at many states.

In coordinates z in which the Gaussian is standard, the rest is described by ridges and a quadratic,

.. math:: r(z) = \sum_k c_k\,\mathrm{softplus}(w_k^\top z + b_k) + z^\top Q z + g^\top z,

whose gradient is fitted to that of the posterior. Chains can then move along exp(r(z) − |z|²/2) without
asking any site. They need not be right: a Metropolis decision on the exact posterior follows.
"""

from __future__ import annotations

from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from numpy.typing import NDArray

Array = NDArray[Any]

_BATCH, _CHUNK = 256, 500  # states of one step of the fit, steps compiled together


class Surrogate(NamedTuple):
    """Ridges w (d, K) with offsets b (K,) and heights c (K,), the quadratic Q (d, d) and the slope g (d,)."""

    ridges: Any
    offsets: Any
    heights: Any
    quadratic: Any
    slope: Any


def blank(dim: int, rng: np.random.Generator) -> Surrogate:
    """A surrogate that has learned nothing: small ridges in random directions."""
    count = 64 + 3 * dim
    parts = (
        0.1 * rng.standard_normal((dim, count)),
        rng.standard_normal(count),
        np.full(count, -0.1),
        np.zeros((dim, dim)),
        np.zeros(dim),
    )
    return Surrogate(*(jnp.asarray(part, jnp.float32) for part in parts))


def _rest(surrogate: Surrogate, z: Any) -> Any:
    bent = jax.nn.softplus(z @ surrogate.ridges + surrogate.offsets) @ surrogate.heights
    return bent + jnp.sum(z @ surrogate.quadratic * z, axis=1) + z @ surrogate.slope


def _gradient(surrogate: Surrogate, z: Any) -> Any:
    slopes = jax.nn.sigmoid(z @ surrogate.ridges + surrogate.offsets) * surrogate.heights
    both = surrogate.quadratic + surrogate.quadratic.T
    return slopes @ surrogate.ridges.T + z @ both + surrogate.slope


def rest(surrogate: Surrogate, z: Array) -> Array:
    """r at states (M, d), up to a constant.

    Examples
    --------
    >>> flat = blank(2, np.random.default_rng(0))._replace(heights=jnp.zeros(70), slope=jnp.array([1.0, 0.0]))
    >>> rest(flat, np.array([[2.0, 5.0]]))
    array([2.])
    """
    return np.asarray(jax.jit(_rest)(surrogate, jnp.asarray(z, jnp.float32)), float)


def moved(surrogate: Surrogate, shift: Array, stretch: Array) -> Surrogate:
    """The surrogate of the same density in coordinates z' in which z = shift + stretch·z'.

    Examples
    --------
    >>> rng = np.random.default_rng(0)
    >>> old = blank(2, rng)
    >>> stretch, z = np.array([[2.0, 0.0], [1.0, 0.5]]), rng.normal(size=(2, 2))
    >>> new = moved(old, np.array([1.0, -1.0]), stretch)
    >>> there = np.array([1.0, -1.0]) + z @ stretch.T
    >>> before, after = (rest(*a) - np.sum(a[1] ** 2, axis=1) / 2 for a in ((old, there), (new, z)))
    >>> bool(abs(np.diff(before) - np.diff(after)) < 1e-4)
    True
    """
    ridges, offsets, heights, quadratic, slope = (np.asarray(part, float) for part in surrogate)
    half = np.eye(len(slope)) / 2
    parts = (
        stretch.T @ ridges,
        offsets + shift @ ridges,
        heights,
        stretch.T @ (quadratic - half) @ stretch + half,
        stretch.T @ (slope + (quadratic + quadratic.T) @ shift - shift),
    )
    return Surrogate(*(jnp.asarray(part, jnp.float32) for part in parts))


def _misfit(surrogate: Surrogate, z: Any, wanted: Any) -> Any:
    return jnp.mean(jnp.sum((_gradient(surrogate, z) - wanted) ** 2, axis=1))


@jax.jit
def _steps(surrogate: Surrogate, moments: Any, *, z: Any, wanted: Any, picked: Any, rates: Any) -> Any:
    """Some steps of Adam; ``picked`` (steps, batch) says which states each sees."""
    adam = optax.scale_by_adam()

    def step(carry, given):
        surrogate, moments = carry
        rows, rate = given
        downhill = jax.grad(_misfit)(surrogate, z[rows], wanted[rows])
        update, moments = adam.update(downhill, moments)
        return (jax.tree.map(lambda a, u: a - rate * u, surrogate, update), moments), None

    return jax.lax.scan(step, (surrogate, moments), (picked, rates))[0]


def learn(
    surrogate: Surrogate, z: Array, gradients: Array, rng: np.random.Generator, *, steps: int, rate: float
) -> Surrogate:
    """Fit the gradient of r to those of the posterior without its Gaussian part.

    Parameters
    ----------
    surrogate
        Where the fit starts.
    z, gradients
        (M, d) states, and ∇ log π + z there.
    rng
        Picks the states of every step.
    steps, rate
        Steps of Adam, and the first of their rates, which fall to zero along a cosine.
    """
    states, wanted = jnp.asarray(z, jnp.float32), jnp.asarray(gradients, jnp.float32)
    rates = (rate / 2 * (1 + np.cos(np.pi * np.arange(steps) / steps))).astype(np.float32)
    moments = optax.scale_by_adam().init(surrogate)
    for start in range(0, steps, _CHUNK):
        part = rates[start : start + _CHUNK]
        picked = rng.integers(0, len(z), (len(part), _BATCH))
        surrogate, moments = _steps(surrogate, moments, z=states, wanted=wanted, picked=picked, rates=part)
    return surrogate


def wander(
    surrogate: Surrogate, z: Array, seed: int, *, trajectories: int, steps: int, bound: float = np.inf
) -> Array:
    """States (M, d) after some trajectories of split-HMC on exp(r(z) − |z|²/2), each with its own decision.

    Every trajectory is reversible with respect to that density, so all of them together are. States do not
    leave |z|² < bound.
    """
    key, start = jax.random.key(seed), jnp.asarray(z, jnp.float32)
    many = {"trajectories": trajectories, "steps": steps}
    return np.asarray(_wander(surrogate, start, key, **many, bound=np.float32(bound)), float)


@partial(jax.jit, static_argnames=("trajectories", "steps"))
def _wander(surrogate: Surrogate, z: Any, key: Any, *, trajectories: int, steps: int, bound: Any) -> Any:
    def level(z):
        return _rest(surrogate, z) - jnp.sum(z**2, axis=1) / 2

    def trajectory(carry, key):
        z, value, kick = carry
        keys = jax.random.split(key, 3)
        v = jax.random.normal(keys[0], z.shape, jnp.float32)
        # some steps short enough for a kink that was learned at few states and curves a hundred times as much
        turn = 0.15 * jax.random.uniform(keys[1], (len(z), 1), jnp.float32, 0.2, 1.2)

        def step(carry, _):
            at, going, kick = carry
            going = going + turn / 2 * kick
            at, going = (
                at * jnp.cos(turn) + going * jnp.sin(turn),
                going * jnp.cos(turn) - at * jnp.sin(turn),
            )
            kick = _gradient(surrogate, at)
            return (at, going + turn / 2 * kick, kick), None

        (at, going, there), _ = jax.lax.scan(step, (z, v, kick), None, length=steps)
        after = level(at)
        gain = after - jnp.sum(going**2, axis=1) / 2 - value + jnp.sum(v**2, axis=1) / 2
        chance = jnp.log(jax.random.uniform(keys[2], (len(z),), jnp.float32))
        taken = (chance < gain) & (jnp.sum(at**2, axis=1) < bound)
        pick = taken[:, None]
        return (jnp.where(pick, at, z), jnp.where(taken, after, value), jnp.where(pick, there, kick)), None

    first = (z, level(z), _gradient(surrogate, z))
    return jax.lax.scan(trajectory, first, jax.random.split(key, trajectories))[0][0]
