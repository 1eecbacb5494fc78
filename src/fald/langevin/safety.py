"""Whether the arithmetic of a private run adds the noise that is accounted for.

Accounting is done in float64, sampling in the run's own precision, where small numbers vanish and large ones
swallow others. So ε is computed from the settings as the sampler has them, settings outside these bounds are
refused, and the noise is measured on what is really added to a position before a round begins.
"""

from __future__ import annotations

import functools
import math
from types import SimpleNamespace
from typing import Any, cast

import jax
import jax.numpy as jnp
import numpy as np

from fald.core.errors import PrivacyError
from fald.core.types import float_dtype
from fald.langevin.fald import FALD
from fald.langevin.noise import injected, own_variance
from fald.problem.model import Model
from fald.settings.fald import method_settings

# least and largest of the settings of a private run
BOUNDS = {
    "step_size": (2.0**-60, 2.0**20),
    "temperature": (2.0**-20, 2.0**20),
    "correlation": (0.0, 0.999),
    "clip_norm": (2.0**-30, 2.0**30),
}
_DRAWS = 4096
_ERRORS = 6.0  # standard errors by which the measured sd may be off: once in 10⁹ rounds by chance
_STEPS_OF_A_NUMBER = 256.0  # of the last digit of a position, that the noise must span


def as_used(method: FALD, step: int = 0) -> dict[str, Any]:
    """Settings of a method by name, as float64 of what the sampler computes with.

    Parameters
    ----------
    method
        The method.
    step
        At which step of the run, where the step size changes.

    Raises
    ------
    PrivacyError
        If one lies outside the bounds of a private run.
    """
    own = {name: getattr(method, name) for name in method_settings()}
    size: Any = own["step_size"]
    own["step_size"] = size(jnp.asarray(step, jnp.int32)) if callable(size) else size
    for name, (least, most) in BOUNDS.items():
        if own[name] is None:
            continue
        own[name] = float(jnp.asarray(own[name], float_dtype()))
        if not least <= own[name] <= most:
            raise PrivacyError(
                f"{name.replace('_', '-')} of a private run must be between {least:.3g} and {most:.3g}; "
                f"got {own[name]:g}",
                hint="beyond, rounding could take the noise away that privacy rests on",
            )
    return own


def accounted_sd(method: FALD, share: float, weight: float, step: int = 0) -> float:
    """√(2ητ(1−ρ²)v_c) of one local step, as accounting has it."""
    s = as_used(method, step)
    variance = 1.0 / (share if method.noise == "paper" else weight)
    rho = s["correlation"]
    return math.sqrt(2 * s["step_size"] * s["temperature"] * (1 - rho) * (1 + rho) * variance)


def farthest(model: Model, method: FALD, positions: Any, step: int = 0) -> float:
    """The largest number that a step's noise is added to, as far as no row has part in it.

    That is a parameter where the step begins, or what the prior alone moves it by: a narrow prior moves it
    anywhere. Not a number where the prior has no slope.
    """
    moved = as_used(method, step)["step_size"] * np.asarray(_prior_slopes(model, positions), float)
    return float(np.max(np.abs([np.asarray(positions, float), moved]), initial=0.0))


@functools.partial(jax.jit, static_argnums=0)
def _prior_slopes(model: Model, positions: jax.Array) -> jax.Array:
    return jax.vmap(jax.grad(model.flat_logprior))(positions)


def check_noise(method: FALD, share: float, weight: float, largest: float, *, step: int = 0) -> None:
    """Refuse a private round whose noise is not the one accounted for.

    Parameters
    ----------
    method
        The method.
    share, weight
        p_c and w_c of the client.
    largest
        The largest number that noise is added to; ``farthest`` of a round's broadcast.
    step
        Local steps of the run before this round.

    Raises
    ------
    PrivacyError
        If settings are out of bounds, if noise vanishes beside the positions, or if its measured sd is not
        the accounted one.

    Examples
    --------
    >>> from fald.langevin.fald import fald
    >>> check_noise(fald(local_steps=1, step_size=1e-3, clip_norm=1.0), 0.5, 0.5, largest=3.0)
    """
    sd = accounted_sd(method, share, weight, step)
    real = float_dtype()
    if not sd >= _STEPS_OF_A_NUMBER * float(jnp.finfo(real).eps) * max(largest, 1e-30):
        raise PrivacyError(
            f"the noise of a step, {sd:.3g}, is lost in the last digits of parameters, or of steps by the "
            f"prior, as large as {largest:.3g}",
            hint='use precision = "float64" or a wider prior, or scale the columns so that parameters are '
            "moderate",
        )
    place = jnp.full(_DRAWS, largest, real)
    added = np.asarray(place + _noise(method, share, weight, step), float) - np.asarray(place, float)
    found = float(np.sqrt(np.mean(added**2)))
    if not abs(found / sd - 1) < _ERRORS / math.sqrt(2 * _DRAWS):
        raise PrivacyError(
            f"the noise that is added has an sd of {found:.4g}, and {sd:.4g} is accounted for",
            hint="choose moderate step-size, temperature and correlation",
        )


def _noise(method: FALD, share: float, weight: float, step: int) -> jax.Array:
    """A client's own noise of one local step as ``FALD.steps`` makes it, in many coordinates."""
    _, hyper = method.split()
    real, size = float_dtype(), method.step_size
    key = jnp.array([0x9E3779B9, step], jnp.uint32)
    eta: Any = size(jnp.asarray(step, jnp.int32)) if callable(size) else hyper["step_size"]
    return injected(
        cast(Any, SimpleNamespace(own_key=key)),
        0,
        _DRAWS,
        scale=jnp.sqrt(2 * eta * hyper["temperature"]),
        correlation=hyper["correlation"],
        variance=own_variance(method.noise, jnp.asarray(share, real), jnp.asarray(weight, real)),
        uses_shared=False,
        uses_own=method.correlation < 1,
    )
