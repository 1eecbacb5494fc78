"""Federated averaging Langevin dynamics (FA-LD), with SGLD and FedAvg as special cases.

Local step, K times between synchronisations:

  β^c ← β^c − η ∇f̃^c(β^c) + √(2ητ)·(ρ ξ̇ + √((1−ρ²) v_c) ξ^c)

then θ = Σ_c w_c β^c at the server. With momentum a every round begins with a velocity drawn anew, and

  u ← a u − (1+a) √(η/2) ∇f̃^c(β^c) + √((1−a²)τ)·(the same noise),   β^c ← β^c + √(2η) u,

where the first step of a round has a = 0 and is FA-LD's: underdamped Langevin dynamics by half a kick, a
move, half a kick, and friction (OBABO). A preconditioner M multiplies ∇f̃^c by M and the noise by √M.
Reference: Deng, Zhang, Ma, Song and Lin, "On Convergence of Federated Averaging Langevin Dynamics",
arXiv:2112.05120.
"""

from __future__ import annotations

from dataclasses import dataclass, field, fields, replace
from typing import Any, Self, TypeVar

import jax
import jax.numpy as jnp
import numpy as np

from fald.calculus.gradients import squared_gradients
from fald.core.errors import ConfigError, DataError, PrivacyError
from fald.core.reveals import Reveals
from fald.core.types import PyTree, StepSize, as_floats
from fald.langevin.client import Local
from fald.langevin.compressors import Compressor, send
from fald.langevin.method import Answers, Cost, Method, Spent, Upload, digest, numbers_as_bytes
from fald.langevin.noise import NoiseScale, injected, langevin_steps, own_variance, underdamped_steps
from fald.langevin.registry import with_law
from fald.langevin.server import Server, average
from fald.problem.data import FederatedData
from fald.problem.model import Model
from fald.settings.fald import Preconditioner, checked, method_settings
from fald.settings.schedules import OwnFunction, Phases, heat_at, is_data, record, step_size_at


@dataclass(frozen=True)
class FALD(Method):
    """The FA-LD method; made by ``fald``, ``sgld`` or ``fedavg`` below."""

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
    momentum: float = 0.0
    preconditioner: Preconditioner | None = None
    root: Any = field(default=None, compare=False)  # √M, once clients have said what it rests on

    participation = "any"
    client_steps = True
    meets = property(lambda self: "client" if self.local_steps > 1 else "joint")  # one step is averaged

    def __post_init__(self) -> None:
        for name in method_settings():
            object.__setattr__(self, name, checked(name, getattr(self, name)))
        if not (self.compressor is None or isinstance(self.compressor, Compressor)):
            raise ConfigError(
                f"compressor must come from fald.compressors; got {self.compressor!r}", hint="qsgd(16)"
            )

    def _sent(self) -> Reveals:
        """Positions and energies, of which only sums are needed; a private client keeps its energy."""
        energy = "value" if self.shares_energy else "nothing"
        uploads = ("position" if self.compressor is None else "quantised", energy)
        if self.preconditioner is not None:
            return Reveals(uploads, preparation={"squares": "squares"})
        phases = isinstance(self.step_size, Phases)
        plain = self.compressor is None and self.momentum == 0 and not phases
        return Reveals(uploads, sums=True, accounted=plain)

    reveals = property(_sent)  # not by a decorator: derived methods put their own declaration in its place

    def split(self) -> tuple[Self, dict[str, Any]]:
        """Apart: K, τ, ρ, the norm of clipping, η or its schedule. What shapes the computation stays."""
        size: Any = self.step_size
        own = callable(size) and not is_data(size)
        names = ["temperature", "correlation"]
        names += [] if own else ["step_size"]
        names += [] if self.clip_norm is None else ["clip_norm"]
        names += ["momentum"] if self.momentum else []
        names += [] if self.preconditioner is None else ["root"]
        numbers = {name: as_floats(getattr(self, name)) for name in names}
        skeleton = replace(
            self,
            local_steps=1,
            step_size=OwnFunction(size) if own else 1.0,
            temperature=float(self.temperature > 0),
            correlation=float(self.correlation if self.correlation in (0, 1) else 0.5),
            clip_norm=None if self.clip_norm is None else 1.0,
            momentum=0.5 if self.momentum else 0.0,
            root=None,
            name="",
        )
        return skeleton, {"local_steps": jnp.asarray(self.local_steps, jnp.int32), **numbers}

    def settings(self) -> dict[str, Any]:
        """Settings as plain values."""
        own = {f.name: getattr(self, f.name) for f in fields(FALD) if f.name in method_settings()}
        own["step_size"] = record(self.step_size)
        compressed = {} if self.compressor is None else {"compressor": self.compressor.settings()}
        scaled = {} if self.root is None else {"preconditioned_by": digest([self.root])}
        return {"method": self.name, **own, **compressed, **scaled}

    def without_energy(self) -> Self:
        """The same method with no energies in its uploads."""
        return replace(self, shares_energy=False)

    def cost(self, dim: int) -> Cost:
        """A position each way and K gradients; with a compressor the bytes vary, and uploads say them."""
        if self.compressor is not None:
            return Cost()
        each = Spent(1, numbers_as_bytes(dim), numbers_as_bytes(dim), self.local_steps)
        once = Spent(1, numbers_as_bytes(dim), numbers_as_bytes(dim), 0, 1)
        return Cost(each) if self.preconditioner is None else Cost(each, once)

    def offer(self, model: Model, data: FederatedData) -> dict[str, Any]:
        """Squares of the rows' gradients at the model's start, if they are to precondition the steps."""
        return {} if self.preconditioner is None else {"squares": squared_gradients(model, data)}

    def prepare(self, model: Model, data: FederatedData, answers: Answers) -> Self:
        """Fix M = s̄/(s + s̄/10), s the root mean square of each derivative over all rows and s̄ that of all."""
        if self.preconditioner is None:
            return self
        squares = np.asarray(answers["squares"], float).sum(0)
        scale = np.sqrt(squares.mean())
        if not (np.isfinite(scale) and scale > 0):
            raise DataError(
                "the rows' gradients at the start are zero or not finite, and cannot precondition steps",
                hint="begin elsewhere (initial-position), or leave preconditioner out",
            )
        return replace(self, root=np.sqrt(scale / (np.sqrt(squares) + 0.1 * scale)))

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

        schedule = hyper.get("step_size", self.step_size)

        def step_size(k):
            return step_size_at(schedule, local.first_step + k)

        def temperature(k):
            return hyper["temperature"] * heat_at(schedule, local.first_step + k)

        root = hyper.get("root", 1.0)  # of the preconditioner

        def noise(k, scale=None):
            if self.temperature == 0:
                return 0.0
            return root * injected(
                local,
                k,
                start.shape[0],
                scale=jnp.sqrt((2 * step_size(k) if scale is None else scale) * temperature(k)),
                correlation=hyper["correlation"],
                variance=variance,
                uses_shared=self.correlation > 0,
                uses_own=self.correlation < 1,
            )

        def drift(theta, k):
            return -step_size(k) * (root**2 * local.grad(theta, k))

        if self.momentum:
            moves = (lambda theta, k: root**2 * local.grad(theta, k), noise, step_size)
            return underdamped_steps(hyper["local_steps"], hyper["momentum"], moves, start)
        return langevin_steps(hyper["local_steps"], drift, noise, start)

    def server_update(self, hyper, state: PyTree, uploads: Upload, server: Server) -> PyTree:
        """The weighted average of the uploads."""
        return average(uploads.position, server.weights)


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
            hint=f"a private run is one of: {', '.join(with_law())}; without compressor, momentum, "
            "preconditioner and phases",
        )
    return method.without_energy()


Kind = TypeVar("Kind", bound=FALD)


def variant(kind: type[Kind], made: FALD, **changes: Any) -> Kind:
    """A method of another kind with the checked settings of ``made``."""
    return kind(**{**{f.name: getattr(made, f.name) for f in fields(made)}, **changes})


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
    momentum: float = 0.0,
    preconditioner: Preconditioner | None = None,
) -> FALD:
    """FA-LD with checked settings.

    Parameters
    ----------
    local_steps, step_size, temperature, correlation, noise, batch_size, clip_norm, momentum, preconditioner
        As in ``fald.sample``. Temperature 0 turns the sampler into FedAvg; ρ = 1 gives no privacy.
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
    own = FALD(local_steps, step_size, temperature, correlation, noise, batch_size, clip_norm)
    called = "fedavg" if own.point_estimate and name == "fa-ld" else name
    steps = {"momentum": momentum, "preconditioner": preconditioner}
    return replace(own, name=called, compressor=compressor, **steps)


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
