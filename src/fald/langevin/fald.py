"""Federated averaging Langevin dynamics (FA-LD), with SGLD and FedAvg as special cases.

Local step, K times between synchronisations:

  β^c ← β^c − η ∇f̃^c(β^c) + √(2ητ)·(ρ ξ̇ + √((1−ρ²) v_c) ξ^c)

then θ = Σ_c w_c β^c at the server. Reference: Deng, Zhang, Ma, Song and Lin, "On
Convergence of Federated Averaging Langevin Dynamics", arXiv:2112.05120.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass, fields, is_dataclass, replace
from typing import Any, Self, TypeVar

import jax
import jax.numpy as jnp

from fald.core.errors import ConfigError, PrivacyError
from fald.core.reveals import Reveals
from fald.core.types import PyTree, StepSize, float_dtype
from fald.langevin.client import Local
from fald.langevin.compressors import Compressor, send
from fald.langevin.method import Base, Cost, Method, Spent, Upload, numbers_as_bytes
from fald.langevin.noise import NoiseScale, injected, langevin_steps, own_variance
from fald.langevin.registry import with_law
from fald.langevin.server import Server, average
from fald.settings.fald import Setting, method_settings


@dataclass(frozen=True)
class FALD(Base):
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
    compressor: Compressor | None = None

    participation = "any"
    client_steps = True
    meets = property(lambda self: "client" if self.local_steps > 1 else "joint")  # one step is averaged

    def _sent(self) -> Reveals:
        """Positions and energies, of which only sums are needed; a private client keeps its energy."""
        plain = self.compressor is None
        energy = "value" if self.shares_energy else "nothing"
        return Reveals(("position" if plain else "quantised", energy), sums=True, accounted=plain)

    reveals = property(_sent)  # not by a decorator: derived methods put their own declaration in its place

    def split(self) -> tuple[Self, dict[str, Any]]:
        """Apart: K, τ, ρ and a constant η. What shapes the computation stays: noises, schedule, batch."""
        numbers = {
            "local_steps": jnp.asarray(self.local_steps, jnp.int32),
            "temperature": jnp.asarray(self.temperature, float_dtype()),
            "correlation": jnp.asarray(self.correlation, float_dtype()),
        }
        if not callable(self.step_size):
            numbers["step_size"] = jnp.asarray(self.step_size, float_dtype())
        if self.clip_norm is not None:
            numbers["clip_norm"] = jnp.asarray(self.clip_norm, float_dtype())
        correlation = self.correlation if self.correlation in (0, 1) else 0.5
        skeleton = replace(
            self,
            local_steps=1,
            step_size=self.step_size if callable(self.step_size) else 1.0,
            temperature=float(self.temperature > 0),
            correlation=float(correlation),
            clip_norm=None if self.clip_norm is None else 1.0,
            name="",
        )
        return skeleton, numbers

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
            **({} if self.compressor is None else {"compressor": self.compressor.settings()}),
        }

    def without_energy(self) -> Self:
        """The same method with no energies in its uploads."""
        return replace(self, shares_energy=False)

    def cost(self, dim: int) -> Cost:
        """A position each way and K gradients; with a compressor the bytes vary, and uploads say them."""
        if self.compressor is not None:
            return Cost()
        return Cost(Spent(1, numbers_as_bytes(dim), numbers_as_bytes(dim), self.local_steps))

    def client_update(self, hyper, local: Local, message: PyTree, memory: PyTree):
        """K local steps from the broadcast position."""
        theta = self.steps(hyper, local, message)
        # an energy is an exact number about the client's rows, so a private client keeps it
        energy = local.energy(message, 0) if self.shares_energy else jnp.zeros((), message.dtype)
        if self.compressor is None:
            return Upload(theta, energy), memory
        change, sent = send(self.compressor, local.choice_key, theta - message)
        spent = Spent(1, sent, numbers_as_bytes(message.shape[0]), hyper["local_steps"])
        return Upload(message + change, energy, spent=spent), memory

    def steps(self, hyper, local: Local, start: jax.Array) -> jax.Array:
        """Where K local steps from ``start`` end."""
        variance = own_variance(self.noise, local.share, local.weight)

        def step_size(k):
            return self.step_size(local.first_step + k) if callable(self.step_size) else hyper["step_size"]

        def noise(k):
            if self.temperature == 0:
                return 0.0
            return injected(
                local.shared_key,
                local.own_key,
                k,
                start.shape[0],
                step_size=step_size(k),
                temperature=hyper["temperature"],
                correlation=hyper["correlation"],
                variance=variance,
                uses_shared=self.correlation > 0,
                uses_own=self.correlation < 1,
            )

        def drift(theta, k):
            return -step_size(k) * local.grad(theta, k)

        return langevin_steps(hyper["local_steps"], drift, noise, start)

    def server_update(
        self, hyper, state: PyTree, uploads: Upload, weights: jax.Array, server: Server
    ) -> PyTree:
        """The weighted average of the uploads."""
        return average(uploads.position, weights)


def private(method: Method) -> FALD:
    """The method of a private run, whose clients upload nothing that has no noise on it.

    Raises
    ------
    PrivacyError
        If privacy accounting does not cover what the method sends.
    """
    if not (method.about.reveals.accounted and isinstance(method, FALD)):
        raise PrivacyError(
            f"there is no privacy accounting for what {method.about.name} sends",
            hint=f"a private run is one of: {', '.join(with_law())}; without a compressor",
        )
    return method.without_energy()


Kind = TypeVar("Kind", bound=FALD)


def variant(kind: type[Kind], made: FALD, **changes: Any) -> Kind:
    """A method of another kind with the checked settings of ``made``."""
    return kind(**{**{f.name: getattr(made, f.name) for f in fields(made)}, **changes})


def check_compressor(compressor: Any) -> Compressor | None:
    """Return a compressor or None, or raise ``ConfigError``."""
    if compressor is None or isinstance(compressor, Compressor):
        return compressor
    raise ConfigError(f"compressor must come from fald.compressors; got {compressor!r}", hint="qsgd(16)")


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
    compressor: Compressor | None = None,
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
    compressor
        From ``fald.compressors``: clients upload Q(β^c − θ) instead of β^c. Its error is not corrected
        for, so a coarse one makes the chain hotter (``qsgd``) or biased (``top_k``).

    Examples
    --------
    >>> fald(local_steps=10, step_size=1e-3).name
    'fa-ld'
    """
    made = Setting(
        local_steps,
        step_size,
        correlation,
        noise=noise,
        temperature=temperature,
        batch_size=batch_size,
        clip_norm=clip_norm,
    )
    own = {name: getattr(made, name) for name in method_settings()}
    called = "fedavg" if made.temperature == 0 and name == "fa-ld" else name
    return FALD(**own, name=called, compressor=check_compressor(compressor))


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
