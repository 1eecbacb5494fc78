r"""All methods on one problem, tuned by one rule and held against one reference.

The rule, the same for every method and blind to the reference:

- step sizes are ``STEP_FACTORS`` divided by the largest curvature that a step of the method meets;
- each is tried for a quarter of the rounds, and the one of lowest Stein score is kept. With g = ∇f(θ) on all
  rows, draws of the posterior have E g_j = 0 and E (θ_j − E θ_j) g_j = 1; the score is the root mean square
  over parameters of both discrepancies, the first in units of 1/sd_j. Point estimates are scored by energy;
- the error of a result is the 2-Wasserstein distance between Gaussian marginals, in posterior standard
  deviations, root mean square over parameters: √(mean_j [(Δmean_j/sd_j)² + (Δsd_j/sd_j)²]). It is taken over
  the second half of the rounds done, so slow starts count.
"""

from __future__ import annotations

import json
import math
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
import numpy as np

from fald.calculus.gradients import largest_curvatures, pooled_mode
from fald.core.checks import check_count
from fald.core.errors import ConfigError, DataError, Interrupted, NonFiniteError, StorageError
from fald.core.files import write_atomically
from fald.lab.reference import Reference, flat_draws, longest_run, pooled_energy, pooled_nuts
from fald.langevin.method import Method
from fald.langevin.registry import METHODS, by_name, takes
from fald.langevin.sampling import sample
from fald.problem.data import FederatedData
from fald.problem.model import Model
from fald.runtime.checkpoint import Checkpoint
from fald.study.fit import fit

if TYPE_CHECKING:
    import xarray as xr

STEP_FACTORS = (0.5, 0.2, 0.1, 0.05, 0.02)
_PILOT_SHARE = 0.25
_MOST_NUMBERS = 2**23  # in the draws of a run
_SCORED_DRAWS = 100
_POINTS = 7  # of a curve, each at twice the rounds of the one before
_LARGEST_BUDGET = 16_384  # rounds, in a search for a target

FEW_ROUND = "few-round"  # the default of a study, beside the methods that take steps


@dataclass(frozen=True)
class ComparePlan:
    """What to compare; checked by ``compare``.

    Attributes
    ----------
    methods
        Names from ``fald.samplers.METHODS``, and ``few-round`` for ``fald.fit``.
    budget_rounds
        Engine rounds of every method.
    target_error
        Stop a method when its error is at most this; None: use the whole budget.
    local_steps, batch_size
        For the methods that have them.
    num_chains, seed
        For all.
    """

    methods: tuple[str, ...] = (FEW_ROUND, *METHODS)
    budget_rounds: int = 2000
    target_error: float | None = None
    local_steps: int = 10
    batch_size: int | None = None
    num_chains: int = 8
    seed: int = 0

    def __post_init__(self) -> None:
        unknown = [name for name in self.methods if name != FEW_ROUND and name not in METHODS]
        if unknown or not self.methods:
            raise ConfigError(
                f"no method named {unknown[0]!r}" if unknown else "no methods given",
                hint=f"there are: {', '.join((FEW_ROUND, *METHODS))}",
            )
        if len(set(self.methods)) < len(self.methods):
            raise ConfigError(f"methods are named twice: {', '.join(self.methods)}")
        for name, least in (("budget-rounds", 64), ("local-steps", 1), ("num-chains", 2)):
            field = name.replace("-", "_")
            object.__setattr__(self, field, check_count(name, getattr(self, field), least))
        if self.target_error is not None and not 0 < self.target_error < math.inf:
            raise ConfigError(f"target-error must be > 0 and finite; got {self.target_error!r}")

    @property
    def pilot_rounds(self) -> int:
        """Rounds for which each step size is tried."""
        return max(32, int(_PILOT_SHARE * self.budget_rounds))

    def thinning(self, dim: int, rounds: int | None = None) -> int:
        """As little as memory allows, for a run of so many rounds; None: of the longest."""
        longest = self.budget_rounds if self.target_error is None else _LARGEST_BUDGET
        return max(1, math.ceil((rounds or longest) * self.num_chains * dim / _MOST_NUMBERS))

    def reached(self, curve: list[dict[str, Any]]) -> bool:
        """Whether a curve has come to the error that was asked for."""
        return self.target_error is not None and bool(curve) and curve[-1]["error"] <= self.target_error


@dataclass(frozen=True)
class Pieces:
    """Finished pieces of a comparison, kept in a folder so that it can go on where it stopped."""

    folder: Path
    report: Callable[[str], None]

    def open(self, about: dict[str, Any], resume: bool) -> None:
        """Make the folder, or recognise the comparison that is in it."""
        if not (self.folder / "about.json").exists():
            try:
                self.folder.mkdir(parents=True, exist_ok=True)
            except OSError as error:
                raise StorageError(f"cannot make the folder {self.folder}: {error.strerror}") from error
            self.keep("about", about)
            return
        if not resume:
            raise ConfigError(
                f"{self.folder} already holds a comparison",
                hint="resume it, or choose another folder (--resume, --out)",
            )
        found = self.done("about")
        differing = [k for k in about if found.get(k) != json.loads(json.dumps(about[k]))]
        if differing:
            raise ConfigError(
                f"{self.folder} holds another comparison; different: {', '.join(differing)}",
                hint="use the settings it was made with, or choose another folder",
            )

    def done(self, name: str) -> Any:
        """A finished piece, or None."""
        path = self.folder / f"{name}.json"
        try:
            return json.loads(path.read_text()) if path.exists() else None
        except (OSError, ValueError) as error:
            hint = "delete it to do its part again"
            raise StorageError(f"{path} is damaged ({error})", hint=hint) from error

    def keep(self, name: str, value: Any) -> Any:
        """Keep a finished piece."""
        write_atomically(self.folder / f"{name}.json", json.dumps(value).encode())
        return value


def compare(
    model: Model,
    data: FederatedData,
    *,
    folder: str | Path,
    plan: ComparePlan | None = None,
    reference: str | Reference = "auto",
    resume: bool = False,
    report: Callable[[str], None] | None = None,
) -> dict[str, Any]:
    """Run methods on one problem and measure their errors against rounds, bytes and seconds.

    Parameters
    ----------
    model, data
        The problem; rows of all clients, because tuning and reference look at them together.
    folder
        Where finished pieces are kept.
    plan
        What to compare.
    reference
        ``"nuts"`` (on the pooled rows, needs NumPyro), ``"longest"`` (a long run of SGLD with a small step),
        ``"auto"`` (the first if NumPyro is installed), or a ``Reference``.
    resume
        Go on with the comparison in the folder.
    report
        Called with a line of text after every piece of work.

    Returns
    -------
    dict
        One JSON document: ``rule``, ``reference`` and ``methods``; each method has its ``step_size``, what it
        ``cost``, its ``curve`` (rounds, bytes, seconds, errors), or says why it was ``refused``.

    Raises
    ------
    ConfigError, StorageError
        If the plan or the folder cannot be used.
    Interrupted
        On Ctrl-C; what was finished is kept.
    """
    plan = ComparePlan() if plan is None else plan
    given = reference.name if isinstance(reference, Reference) else reference
    if not isinstance(reference, Reference) and reference not in ("auto", "nuts", "longest"):
        raise ConfigError(f"reference must be 'auto', 'nuts' or 'longest'; got {reference!r}")
    about = {"plan": asdict(plan), "data": data.fingerprint(), "model": model.name, "reference": given}
    about["dtype"] = str(model.flat_initial_position.dtype)
    pieces = Pieces(Path(folder), report or (lambda _: None))
    pieces.open(about, resume)
    try:
        return _Comparison(_Problem(model, data), plan, pieces, reference).run()
    except (KeyboardInterrupt, Interrupted):
        raise Interrupted("interrupted", hint="finished pieces are kept; go on with --resume") from None


class _Problem:
    """The problem with what the rule needs: a mode, curvatures and the joint gradient."""

    def __init__(self, model: Model, data: FederatedData):
        self.model, self.data = model, data
        self.mode = pooled_mode(model, data, model.flat_initial_position)
        chosen, each = largest_curvatures(model, data, range(data.num_clients), self.mode)
        self.curvatures = {
            "joint": self._joint_curvature(),
            "client": float(each.max()),
            "node": float((data.num_clients * data.weights[chosen] * each).max()),
        }
        if not all(math.isfinite(v) and v > 0 for v in self.curvatures.values()):
            raise DataError("the curvature of the posterior is not finite and positive at its mode")
        energy = pooled_energy(model, data)
        self.energy = jax.jit(energy)
        self.gradients = jax.jit(lambda thetas: jax.lax.map(jax.grad(energy), thetas))

    def _joint_curvature(self) -> float:
        """Of ∇²f, on at most 1,000 rows evenly spaced."""
        rows = self.data.num_rows
        taken = np.unique(np.linspace(0, rows - 1, min(rows, 1000)).round().astype(int))
        some = jax.tree.map(lambda a: np.asarray(a)[taken], self.data.rows)
        pooled = FederatedData(some, np.array([0, len(taken)]), ("all",))
        _, found = largest_curvatures(self.model, pooled, [0], self.mode)
        return float(found[0]) * rows / len(taken)

    def score(self, method: Method, flat: np.ndarray) -> float:
        """Stein score of draws (chains, draws, d); energy of the last iterates for a point estimate."""
        if method.about.point_estimate:
            return float(self.energy(jnp.asarray(flat[:, -1].mean(0), self.mode.dtype)))
        half = flat[:, flat.shape[1] // 2 :].reshape(-1, flat.shape[2])
        some = half[np.unique(np.linspace(0, len(half) - 1, _SCORED_DRAWS).astype(int))]
        gradients = np.asarray(self.gradients(jnp.asarray(some, self.mode.dtype)), float)
        first = gradients.mean(0) * half.std(0)
        second = ((some - half.mean(0)) * gradients).mean(0) - 1
        return float(np.sqrt(np.mean(first**2 + second**2)))


class _Comparison:
    """One comparison: every method tuned, run and measured."""

    def __init__(self, problem: _Problem, plan: ComparePlan, pieces: Pieces, reference: str | Reference):
        self.problem, self.plan, self.pieces = problem, plan, pieces
        self.reference = reference if isinstance(reference, Reference) else self._reference(reference)

    def run(self) -> dict[str, Any]:
        plan, data, results, began = self.plan, self.problem.data, {}, time.monotonic()
        for done, name in enumerate(plan.methods, 1):
            results[name] = self._few_rounds() if name == FEW_ROUND else self._one_method(name)
            left = (time.monotonic() - began) / done * (len(plan.methods) - done)
            self.pieces.report(f"{done} of {len(plan.methods)} methods done, about {left:,.0f} s left")
        rule = {"step_factors": STEP_FACTORS, "curvatures": self.problem.curvatures}
        held_against = {key: getattr(self.reference, key) for key in ("name", "num_draws", "uncertainty")}
        document = {
            "rule": {**rule, "pilot_rounds": plan.pilot_rounds, **asdict(plan)},
            "reference": held_against,
            "num_clients": data.num_clients,
            "num_rows": data.num_rows,
            "num_parameters": self.problem.model.dim,
            "methods": results,
        }
        return json.loads(json.dumps(document))

    def _reference(self, asked: str) -> Reference:
        kept, problem, seed = self.pieces.done("reference"), self.problem, self.plan.seed
        if kept is not None:
            return Reference.from_json(kept)
        made = None if asked == "longest" else pooled_nuts(problem.model, problem.data, problem.mode, seed)
        if made is None:
            if asked == "nuts":
                raise ConfigError("a NUTS reference needs NumPyro", hint="pip install 'fald[numpyro]'")
            step, rounds = 0.05 * (1 / problem.curvatures["joint"]), 10 * self.plan.budget_rounds
            made = longest_run(problem.model, problem.data, step, rounds, seed=seed + 1)
        self.pieces.keep("reference", made.to_json())
        self.pieces.report(f"reference done: {made.name}, {made.num_draws:,} draws")
        return made

    def _build(self, name: str, factor: float | None) -> Method:
        """The method with this part of the step that its curvature would allow; None: it has no step."""
        problem, settings = self.problem, {"local_steps": self.plan.local_steps}
        settings |= {} if self.plan.batch_size is None else {"batch_size": self.plan.batch_size}
        chosen: dict[str, Any] = {k: v for k, v in settings.items() if k in takes(name)}
        if factor is not None:
            meets = by_name(name, step_size=1.0, **chosen).about.meets
            chosen["step_size"] = factor * (1 / problem.curvatures[meets])
        method = by_name(name, **chosen)
        # large matrices are refused here, before any run
        method.prepare(problem.model, problem.data, method.offer(problem.model, problem.data))
        return method

    def _sample(self, method: Method, rounds: int, **settings: Any) -> xr.DataTree:
        model, data = self.problem.model, self.problem.data
        common = {"num_chains": self.plan.num_chains, "num_warmup": method.about.preparation_rounds}
        given = {"seed": self.plan.seed, "thinning": self.plan.thinning(model.dim), **common, **settings}
        return sample(
            given.pop("seed"), model, data, method=method, num_rounds=rounds, progress=False, **given
        )

    def _pilot(self, name: str, factor: float) -> dict[str, Any]:
        piece = f"pilot-{name}-{factor:g}"
        kept = self.pieces.done(piece)
        if kept is not None:
            return kept
        method = self._build(name, factor)
        rounds = self.plan.pilot_rounds + method.about.preparation_rounds
        thinning = self.plan.thinning(self.problem.model.dim, rounds)
        try:
            tree = self._sample(method, rounds, seed=self.plan.seed + 2, thinning=thinning)
            score = self.problem.score(method, flat_draws(tree))
        except NonFiniteError:
            score = math.inf
        made = self.pieces.keep(piece, {"factor": factor, "score": score if math.isfinite(score) else None})
        self.pieces.report(f"{name}: step {factor:g}/L, score {score:.3g}")
        return made

    def _one_method(self, name: str) -> dict[str, Any]:
        """Tune, run, measure; a method that cannot run says why."""
        factors = STEP_FACTORS if "step_size" in takes(name) else ()
        try:
            self._build(name, factors[-1] if factors else None)
            pilots = [self._pilot(name, factor) for factor in factors]
            usable = [p for p in pilots if p["score"] is not None]
            if pilots and not usable:
                return {"refused": "it diverged at every step size tried"}
            best = min(usable, key=lambda p: p["score"])["factor"] if usable else None
            method = self._build(name, best)
            curve = self._curve(name, method)
        except (ConfigError, DataError, NonFiniteError) as error:
            return {"refused": error.message}
        about = method.about
        tuned = {"step_size": about.step_size if pilots else None, "step_factor": best, "pilots": pilots}
        return self._result(name, curve, about.settings, point_estimate=about.point_estimate, **tuned)

    def _result(
        self, name: str, curve: list[dict[str, Any]], settings: Any, **changes: Any
    ) -> dict[str, Any]:
        end = curve[-1]
        self.pieces.report(f"{name}: error {end['error']:.3g} after {end['rounds']:,.0f} rounds")
        plain = {"point_estimate": False, "step_size": None, "step_factor": None, "pilots": []}
        found = {"settings": settings, "curve": curve, "reached": self.plan.reached(curve)}
        return {**plain, **changes, **found}

    def _few_rounds(self) -> dict[str, Any]:
        """``fald.fit`` with nothing to tune: one point, at the rounds that it took."""
        curve = self.pieces.done(f"curve-{FEW_ROUND}")
        if curve is None:
            began = time.monotonic()
            try:
                tree = fit(self.plan.seed, self.problem.model, self.problem.data, progress=False)
            except (ConfigError, DataError, NonFiniteError) as error:
                return {"refused": error.message}
            rounds, asked = int(tree.attrs["rounds_done"]), tree["rounds"].to_dataset()
            point = {"engine_rounds": rounds, "seconds": time.monotonic() - began, "rounds": float(rounds)}
            point |= {"gradients": None, **{k: float(asked[k].sum()) for k in ("bytes_up", "bytes_down")}}
            point |= _errors(flat_draws(tree), False, self.reference)
            curve = self.pieces.keep(f"curve-{FEW_ROUND}", [point])
        return self._result(FEW_ROUND, curve, {"method": FEW_ROUND})

    def _curve(self, name: str, method: Method) -> list[dict[str, Any]]:
        curve = self.pieces.done(f"curve-{name}") or []
        least = method.about.preparation_rounds + 2 * self.plan.thinning(self.problem.model.dim)
        points = [r for r in grid(self.plan) if r >= least] or [least]
        for rounds in points[len(curve) :]:
            if self.plan.reached(curve):
                break
            if not curve:  # compilation is not the method's time
                self._sample(method, least)
            began = time.monotonic()
            where = Checkpoint(self.pieces.folder / f"run-{name}", seconds=60)
            tree = self._sample(method, rounds, checkpoint=where)
            seconds = time.monotonic() - began + (curve[-1]["seconds"] if curve else 0.0)
            measured = _measure(tree, method, self.reference)
            curve.append({"engine_rounds": rounds, "seconds": seconds, **measured})
            self.pieces.keep(f"curve-{name}", curve)
        return curve


def grid(plan: ComparePlan) -> list[int]:
    """Rounds at which errors are measured.

    Examples
    --------
    >>> grid(ComparePlan(budget_rounds=640))
    [10, 20, 40, 80, 160, 320, 640]
    """
    if plan.target_error is not None:
        return [2**k for k in range(4, 15)]
    return sorted({-(-plan.budget_rounds // 2**k) for k in range(_POINTS)})


def _measure(tree: xr.DataTree, method: Method, reference: Reference) -> dict[str, Any]:
    """Errors and costs of a result; costs are means over chains, bytes of the average client."""
    flat = flat_draws(tree)
    later = flat if method.about.point_estimate else flat[:, flat.shape[1] // 2 :]
    costs = {str(k): float(v) for k, v in tree["cost"].to_dataset().mean().items()}
    return {**_errors(later, method.about.point_estimate, reference), **costs}


def _errors(flat: np.ndarray, point: bool, reference: Reference) -> dict[str, Any]:
    """Errors of draws (chains, draws, d), or of the last of them for a point estimate."""
    mean = flat[:, -1].mean(0) if point else flat.mean((0, 1))
    of_means = (mean - reference.mean) / reference.sd
    of_sds = flat.std((0, 1)) / reference.sd - 1
    found = {
        "mean_error": float(np.sqrt(np.mean(of_means**2))),
        "worst_mean_error": float(np.abs(of_means).max()),
        "sd_error": None if point else float(np.sqrt(np.mean(of_sds**2))),
        "worst_sd_error": None if point else float(np.abs(of_sds).max()),
    }
    return {"error": math.hypot(found["mean_error"], found["sd_error"] or 0.0), **found}


__all__ = ["STEP_FACTORS", "ComparePlan", "Reference", "compare", "grid"]
