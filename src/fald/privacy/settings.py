"""The settings of a run on which its privacy depends."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from fald.core.errors import ConfigError, PrivacyError
from fald.settings.fald import Setting


@dataclass(frozen=True, kw_only=True)
class RunSettings(Setting):
    """The settings of a run on which its privacy depends: those of FA-LD, its length and its sites.

    Parameters
    ----------
    sizes
        Rows of each client; the weights are p_c = n_c / n.
    num_rounds
        Rounds in which clients answer from their data, warm-up and preparation included.
    local_steps, temperature, correlation, participation, noise, batch_size, clip_norm
        As in ``fald.planner.Setting``. With ``clip_norm`` C, Δ = 2C.
    step_size
        η, one number or one per local step of the run (``num_rounds * local_steps``).
    sensitivity
        Δ = sup ‖∇l(θ;x) − ∇l(θ;x')‖ over θ and any two rows. Give this or ``clip_norm``.
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
    num_rounds: int
    sensitivity: float | None = None
    num_chains: int = 1

    def __post_init__(self) -> None:
        def put(name: str, value: Any) -> None:
            object.__setattr__(self, name, value)

        sizes = np.asarray(self.sizes)
        if sizes.ndim != 1 or sizes.size == 0 or np.any(sizes < 1) or np.any(sizes != np.floor(sizes)):
            raise ConfigError(f"sizes must be whole numbers ≥ 1, one per client; got {self.sizes!r}")
        put("sizes", tuple(int(n) for n in sizes))
        steps = None if np.ndim(self.step_size) == 0 else self.step_size
        if steps is not None:  # one per local step: the largest stands for them while the rest is checked
            eta = np.asarray(steps, dtype=float)
            if eta.ndim != 1 or not eta.size or not np.all(np.isfinite(eta)) or np.any(eta <= 0):
                raise ConfigError(
                    "step-size must be > 0 and finite, one number or one per local step; "
                    f"got an array of shape {eta.shape}, least {eta.min() if eta.size else None}"
                )
            put("step_size", float(eta.max()))
        elif not callable(self.step_size):
            put("step_size", float(self.step_size))
        for name in ("sensitivity", "clip_norm"):
            if getattr(self, name) == math.inf:  # which bounds nothing
                put(name, None)
        super().__post_init__()
        if self.momentum or self.preconditioner is not None:
            raise ConfigError(
                "there is no privacy accounting for momentum and preconditioners",
                hint="leave momentum and preconditioner out",
            )
        if steps is not None or callable(self.step_size):
            schedule = self.step_size
            eta = np.array(
                [schedule(k) for k in range(self.num_steps)] if callable(schedule) else steps, float
            )
            if eta.size != self.num_steps:
                raise ConfigError(
                    f"step-size must have one value per local step, "
                    f"num-rounds × local-steps = {self.num_steps}; got {eta.size}"
                )
            put("step_size", tuple(eta.tolist()))
        if self.sensitivity is not None and self.clip_norm is not None:
            raise ConfigError(
                "give sensitivity or clip-norm, not both",
                hint="clipping to norm C already means a sensitivity of 2C",
            )
        self.participation.check(np.asarray(self.sizes))

    @classmethod
    def of(cls, setting: Setting, *, sensitivity: float | None = None, **run: Any) -> RunSettings:
        """A run with given settings of FA-LD, and with those in ``run`` that differ or are not among them.

        ``sensitivity`` is Δ of the model's own, which counts where nothing is clipped.
        """
        bound = None if setting.clip_norm is not None else sensitivity
        return cls(**{**setting.arguments(), "sensitivity": bound, **run})

    @classmethod
    def from_tree(cls, tree: Any) -> RunSettings:
        """The settings of a result of ``fald.sample``; warm-up and thinned rounds count like the others.

        Unbounded gradients of rows and step schedules of the user's own are refused.
        """
        run = json.loads(tree.attrs["settings"])
        try:
            setting = Setting.from_record(run)
        except ConfigError as error:
            raise PrivacyError(
                "the result does not record the step sizes of its schedule",
                hint="build RunSettings with one step size per local step",
            ) from error
        private = run["privacy"] is not None
        return cls.of(
            setting,
            sensitivity=json.loads(tree.attrs["privacy"])["settings"]["sensitivity"] if private else None,
            sizes=tree["constant_data"]["size"].values,
            num_rounds=run["num_rounds"],
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
        return self.participation.scheme

    @property
    def num_participants(self) -> int:
        """S; the number of clients under full participation."""
        part = self.participation
        return self.num_clients if part.scheme == "full" else int(part.num_participants or 0)

    @property
    def delta_gradient(self) -> float:
        """Δ, how far one replaced row can move a gradient sum; refused when nothing bounds it."""
        if self.clip_norm is not None:
            return 2.0 * self.clip_norm
        if self.sensitivity is not None:
            return self.sensitivity
        raise PrivacyError(
            "no bound on a row's gradient: its sensitivity is infinite, and so is ε",
            hint="set clip-norm, or state the sensitivity of a model whose gradients are bounded",
        )
