"""The settings of a run on which its privacy depends."""

from __future__ import annotations

import json
import math
import numbers
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

import numpy as np

from fald.errors import ConfigError, PrivacyError
from fald.participation import Participation


def whole(name: str, value: Any, least: int = 1) -> int:
    """``value`` as an integer, or an error that names it."""
    if isinstance(value, bool) or not isinstance(value, numbers.Integral) or value < least:
        raise ConfigError(f"{name} must be a whole number ≥ {least}; got {value!r}")
    return int(value)


def _real(name: str, value: Any, rule: str, holds: bool) -> float:
    if not holds:
        raise ConfigError(f"{name} must be {rule}; got {value!r}")
    return float(value)


@dataclass(frozen=True)
class RunSettings:
    """The settings of a run on which its privacy depends.

    Parameters
    ----------
    sizes
        Rows of each client; the weights are p_c = n_c / n.
    local_steps
        K, local steps per round.
    num_rounds
        Rounds in which clients answer from their data, warm-up and preparation included.
    step_size
        η, one number or one per local step of the run (``num_rounds * local_steps``).
    temperature
        τ.
    correlation
        ρ, the part of the noise that clients share and that protects nobody.
    batch_size
        Rows per local step, fixed, drawn afresh; ``None`` for all. A client with fewer rows uses all.
    participation
        ``fald.participation.Participation``; ``None`` for every client in every round.
    noise
        Scale of the own noise: ``"realised"`` (v_c = 1/w_c) or ``"paper"`` (v_c = 1/p_c).
    sensitivity
        Δ = sup ‖∇l(θ;x) − ∇l(θ;x')‖ over θ and any two rows. Give this or ``clip_norm``.
    clip_norm
        C, the norm to which each row's gradient is clipped; then Δ = 2C.
    num_chains
        Chains on the same data. Each is a release of its own: four chains leak what one chain of
        four times the rounds leaks.

    Raises
    ------
    ConfigError
        A value outside its range.

    Examples
    --------
    >>> run = RunSettings(sizes=[6000] * 10, local_steps=10, num_rounds=1000, step_size=1e-7,
    ...                   batch_size=200, clip_norm=1.0)
    >>> run.delta_gradient, run.num_clients, float(run.batch_fraction[0])
    (2.0, 10, 0.03333333333333333)
    """

    sizes: Sequence[int]
    local_steps: int
    num_rounds: int
    step_size: float | Sequence[float] | np.ndarray
    temperature: float = 1.0
    correlation: float = 0.0
    batch_size: int | None = None
    participation: Participation | None = None
    noise: Literal["realised", "paper"] = "realised"
    sensitivity: float | None = None
    clip_norm: float | None = None
    num_chains: int = 1

    def __post_init__(self) -> None:
        def put(name: str, value: Any) -> None:
            object.__setattr__(self, name, value)

        sizes = np.asarray(self.sizes)
        if sizes.ndim != 1 or sizes.size == 0 or np.any(sizes < 1) or np.any(sizes != np.floor(sizes)):
            raise ConfigError(f"sizes must be whole numbers ≥ 1, one per client; got {self.sizes!r}")
        put("sizes", tuple(int(n) for n in sizes))
        for name in ("local_steps", "num_rounds", "num_chains"):
            put(name, whole(name.replace("_", "-"), getattr(self, name)))
        if self.batch_size is not None:
            put("batch_size", whole("batch-size", self.batch_size))
        eta = np.asarray(self.step_size, dtype=float)
        if eta.ndim > 1 or not np.all(np.isfinite(eta)) or np.any(eta <= 0):
            raise ConfigError(
                "step-size must be > 0 and finite, one number or one per local step; "
                f"got {eta if eta.ndim == 0 else f'an array of shape {eta.shape}, least {eta.min()}'}"
            )
        if eta.ndim == 1 and eta.size != self.num_steps:
            raise ConfigError(
                f"step-size must have one value per local step, "
                f"num-rounds × local-steps = {self.num_steps}; got {eta.size}"
            )
        put("step_size", float(eta) if eta.ndim == 0 else tuple(eta.tolist()))
        tau, rho = self.temperature, self.correlation
        put("temperature", _real("temperature", tau, "≥ 0 and finite", 0 <= tau < math.inf))
        put("correlation", _real("correlation", rho, "between 0 and 1", 0 <= rho <= 1))
        if self.noise not in ("realised", "paper"):
            raise ConfigError(f"noise must be 'realised' or 'paper'; got {self.noise!r}")
        if self.sensitivity is not None and self.clip_norm is not None:
            raise ConfigError(
                "give sensitivity or clip-norm, not both",
                hint="clipping to norm C already means a sensitivity of 2C",
            )
        for name in ("sensitivity", "clip_norm"):
            value = getattr(self, name)
            if value is not None:
                put(name, _real(name.replace("_", "-"), value, "> 0", value > 0))
        if self.participation is not None:
            self.participation.check(np.asarray(self.sizes))

    @classmethod
    def from_tree(cls, tree: Any) -> RunSettings:
        """The settings of a result of ``fald.sample``; warm-up and thinned rounds count like the others.

        Raises
        ------
        PrivacyError
            If the run did not bound the gradients of rows, or used a step schedule of the user's own.
        """
        run = json.loads(tree.attrs["settings"])
        step = run["step_size"]
        if isinstance(step, dict):
            if step.get("schedule") != "PaperDecay":
                raise PrivacyError(
                    "the result does not record the step sizes of its schedule",
                    hint="build RunSettings with one step size per local step",
                )
            k = np.arange(run["num_rounds"] * run["local_steps"])
            step = 1.0 / (2.0 * step["smoothness"] + step["strong_convexity"] * k / 12.0)
        asked = run["privacy"] or {}
        sensitivity = json.loads(tree.attrs["privacy"])["settings"]["sensitivity"] if asked else None
        part = Participation(run["participation"], run["num_participants"], allow_unequal=True)
        return cls(
            sizes=tree["constant_data"]["size"].values,
            local_steps=run["local_steps"],
            num_rounds=run["num_rounds"],
            step_size=step,
            temperature=run["temperature"],
            correlation=run["correlation"],
            batch_size=run["batch_size"],
            participation=None if part.scheme == "full" else part,
            noise=run["noise"],
            clip_norm=run["clip_norm"],
            sensitivity=None if run["clip_norm"] is not None else sensitivity,
            num_chains=run["num_chains"],
        )

    def first_rounds(self, num_rounds: int) -> RunSettings:
        """The same run, ended after ``num_rounds`` rounds."""
        eta = self.step_size
        if isinstance(eta, tuple):
            eta = eta[: num_rounds * self.local_steps]
        return replace(self, num_rounds=num_rounds, step_size=eta)

    @property
    def num_clients(self) -> int:
        """N."""
        return len(self.sizes)

    @property
    def num_steps(self) -> int:
        """Local steps of one chain."""
        return self.num_rounds * self.local_steps

    @property
    def weights(self) -> np.ndarray:
        """(N,) p_c."""
        return np.asarray(self.sizes, float) / sum(self.sizes)

    @property
    def batch_rows(self) -> np.ndarray:
        """(N,) rows a client uses in one local step."""
        sizes = np.asarray(self.sizes)
        return sizes if self.batch_size is None else np.minimum(sizes, self.batch_size)

    @property
    def batch_fraction(self) -> np.ndarray:
        """(N,) share of its rows a client uses in one local step."""
        return self.batch_rows / np.asarray(self.sizes)

    @property
    def scheme(self) -> str:
        """Name of the participation scheme."""
        return "full" if self.participation is None else self.participation.scheme

    @property
    def num_participants(self) -> int:
        """S; the number of clients under full participation."""
        part = self.participation
        return self.num_clients if part is None or part.scheme == "full" else int(part.num_participants or 0)

    @property
    def delta_gradient(self) -> float:
        """Δ, how far one replaced row can move a gradient sum; refused when nothing bounds it."""
        if self.clip_norm is not None and math.isfinite(self.clip_norm):
            return 2.0 * self.clip_norm
        if self.sensitivity is not None and math.isfinite(self.sensitivity):
            return self.sensitivity
        raise PrivacyError(
            "no bound on a row's gradient: its sensitivity is infinite, and so is ε",
            hint="set clip-norm, or state the sensitivity of a model whose gradients are bounded",
        )
