"""Federated averaging Langevin dynamics (FA-LD), with SGLD and FedAvg as special cases.

Local step, K times between synchronisations:

  β^c ← β^c − η ∇f̃^c(β^c) + √(2ητ)·(ρ ξ̇ + √((1−ρ²) v_c) ξ^c)

then θ = Σ_c w_c β^c at the server. Reference: Deng, Zhang, Ma, Song and Lin, "On
Convergence of Federated Averaging Langevin Dynamics", arXiv:2112.05120.
"""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass, is_dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp

from fald import server
from fald.client import Local
from fald.errors import ConfigError
from fald.noise import NoiseScale, injected, own_variance
from fald.samplers.base import Upload
from fald.types import StepSize


def _check_number(name: str, value: Any, low: float, high: float, rule: str) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
        raise ConfigError(f"{name} must be {rule}; got {value!r}")
    if not low <= value <= high:
        raise ConfigError(f"{name} must be {rule}; got {value!r}")
    return float(value)


def check_count(name: str, value: Any, least: int) -> int:
    """Return ``value`` as an int ≥ ``least``, or raise ``ConfigError`` naming it."""
    try:
        number = int(value)
    except (TypeError, ValueError):
        number = None
    if number is None or isinstance(value, bool) or number != value or number < least:
        raise ConfigError(f"{name} must be a whole number ≥ {least}; got {value!r}")
    return number


@dataclass(frozen=True)
class FALD:
    """The FA-LD method; made by ``fald``, ``sgld`` or ``fedavg`` below, which check the settings."""

    local_steps: int
    step_size: StepSize
    temperature: float = 1.0
    correlation: float = 0.0
    noise: NoiseScale = "realised"
    batch_size: int | None = None
    clip_norm: float | None = None
    name: str = "fa-ld"
    shares_energy: bool = True

    @property
    def point_estimate(self) -> bool:
        """True at temperature 0: the iterates are those of an optimiser."""
        return self.temperature == 0

    def traced(self) -> dict[str, Any]:
        """K, τ, ρ and a constant η: changing them does not recompile."""
        numbers = {
            "local_steps": jnp.asarray(self.local_steps, jnp.int32),
            "temperature": jnp.asarray(self.temperature, jnp.zeros(()).dtype),
            "correlation": jnp.asarray(self.correlation, jnp.zeros(()).dtype),
        }
        if not callable(self.step_size):
            numbers["step_size"] = jnp.asarray(self.step_size, jnp.zeros(()).dtype)
        if self.clip_norm is not None:
            numbers["clip_norm"] = jnp.asarray(self.clip_norm, jnp.zeros(()).dtype)
        return numbers

    def skeleton(self) -> FALD:
        """Keep what shapes the computation: which noises are drawn, the schedule, the batch."""
        correlation = self.correlation if self.correlation in (0, 1) else 0.5
        return replace(
            self,
            local_steps=1,
            step_size=self.step_size if callable(self.step_size) else 1.0,
            temperature=float(self.temperature > 0),
            correlation=float(correlation),
            clip_norm=None if self.clip_norm is None else 1.0,
            name="",
        )

    def without_energy(self) -> FALD:
        """The same method with no energies in its uploads."""
        return replace(self, shares_energy=False)

    def settings(self) -> dict[str, Any]:
        """Settings as plain values."""
        step = self.step_size
        if callable(step):
            step = {"schedule": type(step).__name__, **(asdict(step) if is_dataclass(step) else {})}  # type: ignore[arg-type]
        return {
            "method": self.name,
            "local_steps": self.local_steps,
            "step_size": step,
            "temperature": self.temperature,
            "correlation": self.correlation,
            "noise": self.noise,
            "batch_size": self.batch_size,
            "clip_norm": self.clip_norm,
        }

    def init_server(self, position: jax.Array) -> jax.Array:
        """The state is the position."""
        return position

    def init_client(self, position: jax.Array) -> tuple[()]:
        """Clients keep nothing between rounds."""
        return ()

    def broadcast(self, state: jax.Array) -> jax.Array:
        """The position travels."""
        return state

    def position(self, state: jax.Array) -> jax.Array:
        """The position is the draw."""
        return state

    def client_update(self, hyper, local: Local, message: jax.Array, memory: tuple[()]):
        """K local steps from the broadcast position."""
        variance = own_variance(self.noise, local.share, local.weight)

        def step(k, theta):
            eta = self.step_size(local.first_step + k) if callable(self.step_size) else hyper["step_size"]
            theta = theta - eta * local.grad(theta, k)
            if self.temperature > 0:
                theta = theta + injected(
                    local.shared_key,
                    local.own_key,
                    k,
                    theta.shape[0],
                    step_size=eta,
                    temperature=hyper["temperature"],
                    correlation=hyper["correlation"],
                    variance=variance,
                    uses_shared=self.correlation > 0,
                    uses_own=self.correlation < 1,
                )
            return theta.astype(message.dtype)

        theta = jax.lax.fori_loop(0, hyper["local_steps"], step, message)
        # an energy is an exact number about the client's rows, so a private client keeps it
        energy = local.energy(message, 0) if self.shares_energy else jnp.zeros((), message.dtype)
        return Upload(theta, energy), memory

    def server_update(self, hyper, state: jax.Array, uploads: Upload, weights: jax.Array) -> jax.Array:
        """The weighted average of the uploads."""
        return server.average(uploads.position, weights)


def fald(
    *,
    local_steps: int,
    step_size: StepSize,
    temperature: float = 1.0,
    correlation: float = 0.0,
    noise: NoiseScale = "realised",
    batch_size: int | None = None,
    clip_norm: float | None = None,
    name: str = "fa-ld",
) -> FALD:
    """FA-LD with checked settings.

    Parameters
    ----------
    local_steps
        K ≥ 1, steps between synchronisations.
    step_size
        η > 0, or a function from the step number (counted over all rounds) to η.
    temperature
        τ ≥ 0; the target is exp(−f/τ), and 0 turns the sampler into FedAvg.
    correlation
        ρ ∈ [0, 1], correlation of the injected noise between clients. ρ = 1 gives no privacy.
    noise
        ``"realised"`` or ``"paper"``, see ``noise.own_variance``.
    batch_size
        Rows per stochastic gradient, drawn without replacement; None for exact gradients.
    clip_norm
        Norm C to which the gradient of each row is cut, as privacy accounting needs it; the target
        is then a pseudo-posterior. None: no clipping.
    name
        What results call the method.

    Examples
    --------
    >>> fald(local_steps=10, step_size=1e-3).name
    'fa-ld'
    """
    check_count("local-steps", local_steps, 1)
    if temperature == 0 and name == "fa-ld":
        name = "fedavg"
    if not callable(step_size):
        step_size = _check_number("step-size", step_size, 5e-324, math.inf, "a number > 0")
    _check_number("temperature", temperature, 0, math.inf, "a number ≥ 0")
    _check_number("correlation", correlation, 0, 1, "between 0 and 1")
    if noise not in ("realised", "paper"):
        raise ConfigError(f"noise must be 'realised' or 'paper'; got {noise!r}")
    if batch_size is not None:
        batch_size = check_count("batch-size", batch_size, 1)
    if clip_norm is not None:
        clip_norm = _check_number("clip-norm", clip_norm, 5e-324, math.inf, "a number > 0")
    return FALD(
        int(local_steps),
        step_size,
        float(temperature),
        float(correlation),
        noise,
        batch_size,
        clip_norm,
        name,
    )


def sgld(*, step_size: StepSize, temperature: float = 1.0, batch_size: int | None = None) -> FALD:
    """Stochastic gradient Langevin dynamics: FA-LD that synchronises after every step (K = 1).

    Examples
    --------
    >>> sgld(step_size=1e-3).local_steps
    1
    """
    return fald(
        local_steps=1, step_size=step_size, temperature=temperature, batch_size=batch_size, name="sgld"
    )


def fedavg(*, local_steps: int, step_size: StepSize, batch_size: int | None = None) -> FALD:
    """Federated averaging: FA-LD at temperature 0. A point estimate, not a posterior.

    Examples
    --------
    >>> fedavg(local_steps=5, step_size=1e-3).point_estimate
    True
    """
    return fald(
        local_steps=local_steps, step_size=step_size, temperature=0.0, batch_size=batch_size, name="fedavg"
    )
