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
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
import numpy as np

from fald.calculus.gradients import Batch, energy_fn, largest_curvatures, pooled_mode
from fald.core.errors import ConfigError, DataError, Interrupted, NonFiniteError, StorageError
from fald.core.files import write_atomically
from fald.lab.reference import Reference, flat_draws, longest_run, pooled_nuts
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
_CURVES = 7  # points of a curve, each at twice the rounds of the one before
_LARGEST_BUDGET = 16_384  # rounds, in a search for a target

FEW_ROUND = "few-round"  # the default of a study, beside the methods that take steps

# the largest curvature that one step meets
_JOINT = {"sgld", "qlsd", "qlsd++", "marina", "elf"}  # of the joint energy
_NODE = {"vr-fald", "de-sgld"}  # of N p_c f^c; all others: of f^c


@dataclass(frozen=True)
class Plan:
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
        for name, least in (("budget_rounds", 64), ("local_steps", 1), ("num_chains", 2)):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int) or value < least:
                raise ConfigError(f"{name.replace('_', '-')} must be a whole number ≥ {least}; got {value!r}")
        if self.target_error is not None and not 0 < self.target_error < math.inf:
            raise ConfigError(f"target-error must be > 0 and finite; got {self.target_error!r}")


@dataclass
class Work:
    """Finished pieces of a comparison, kept in a folder so that it can go on where it stopped."""

    folder: Path
    about: dict[str, Any]
    report: Callable[[str], None] = field(default=lambda _: None)

    def open(self, resume: bool) -> None:
        """Make the folder, or recognise the comparison that is in it."""
        path = self.folder / "about.json"
        if not path.exists():
            try:
                self.folder.mkdir(parents=True, exist_ok=True)
            except OSError as error:
                raise StorageError(f"cannot make the folder {self.folder}: {error.strerror}") from error
            write_atomically(path, json.dumps(self.about, indent=1).encode())
            return
        if not resume:
            raise ConfigError(
                f"{self.folder} already holds a comparison",
                hint="resume it, or choose another folder (--resume, --out)",
            )
        found = self._read(path)
        differing = [k for k in self.about if found.get(k) != json.loads(json.dumps(self.about[k]))]
        if differing:
            raise ConfigError(
                f"{self.folder} holds another comparison; different: {', '.join(differing)}",
                hint="use the settings it was made with, or choose another folder",
            )

    def done(self, name: str) -> Any:
        """A finished piece, or None."""
        path = self.folder / f"{name}.json"
        return self._read(path) if path.exists() else None

    def keep(self, name: str, value: Any) -> Any:
        """Keep a finished piece."""
        write_atomically(self.folder / f"{name}.json", json.dumps(value).encode())
        return value

    @staticmethod
    def _read(path: Path) -> Any:
        try:
            return json.loads(path.read_text())
        except (OSError, ValueError) as error:
            raise StorageError(
                f"{path} is damaged ({error})", hint="delete it to do its part again"
            ) from error


def compare(
    model: Model,
    data: FederatedData,
    *,
    folder: str | Path,
    plan: Plan | None = None,
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
    plan = Plan() if plan is None else plan
    given = reference.name if isinstance(reference, Reference) else reference
    if not isinstance(reference, Reference) and reference not in ("auto", "nuts", "longest"):
        raise ConfigError(f"reference must be 'auto', 'nuts' or 'longest'; got {reference!r}")
    about = {"plan": _plain(plan), "data": data.fingerprint(), "model": model.name, "reference": given}
    about["dtype"] = str(model.flat_initial_position.dtype)
    work = Work(Path(folder), about, report or (lambda _: None))
    work.open(resume)
    try:
        return _compare(model, data, work, plan, reference)
    except (KeyboardInterrupt, Interrupted):
        raise Interrupted("interrupted", hint="finished pieces are kept; go on with --resume") from None


def _compare(
    model: Model, data: FederatedData, work: Work, plan: Plan, reference: str | Reference
) -> dict[str, Any]:
    problem = _Problem(model, data)
    held_against = _reference(problem, work, plan, reference)
    total, results, began = len(plan.methods), {}, time.monotonic()
    for i, name in enumerate(plan.methods):
        one = _few_rounds if name == FEW_ROUND else _one_method
        results[name] = one(problem, work, plan, name, held_against)
        left = (time.monotonic() - began) / (i + 1) * (total - i - 1)
        work.report(f"{i + 1} of {total} methods done, about {left:,.0f} s left")
    return {
        "rule": {
            "step_factors": list(STEP_FACTORS),
            "curvatures": problem.curvatures,
            "pilot_rounds": _pilot_rounds(plan),
            **_plain(plan),
        },
        "reference": {
            "name": held_against.name,
            "num_draws": held_against.num_draws,
            "uncertainty": held_against.uncertainty,
        },
        "num_clients": data.num_clients,
        "num_rows": data.num_rows,
        "num_parameters": model.dim,
        "methods": results,
    }


def _plain(plan: Plan) -> dict[str, Any]:
    return {**plan.__dict__, "methods": list(plan.methods)}


class _Problem:
    """The problem with what the rule needs: a mode, curvatures and the joint gradient."""

    def __init__(self, model: Model, data: FederatedData):
        self.model, self.data = model, data
        self.mode = pooled_mode(model, data, model.flat_initial_position)
        clients = list(range(data.num_clients))
        each = largest_curvatures(model, data, clients, self.mode)
        share = data.num_clients * data.weights
        self.curvatures = {
            "joint": self._joint_curvature(),
            "client": float(each.max()),
            "node": float((share * each).max()),
        }
        if not all(math.isfinite(v) and v > 0 for v in self.curvatures.values()):
            raise DataError("the curvature of the posterior is not finite and positive at its mode")
        rows = jax.tree.map(jnp.asarray, data.rows)
        energy = energy_fn(model, data.num_rows)
        batch = Batch(rows, None, jnp.asarray(data.num_rows))
        self.energy = jax.jit(lambda theta: energy(theta, batch))
        self.gradients = jax.jit(lambda thetas: jax.lax.map(jax.grad(lambda t: energy(t, batch)), thetas))

    def _joint_curvature(self) -> float:
        """Of ∇²f, on at most 1,000 rows evenly spaced."""
        rows = self.data.num_rows
        taken = np.unique(np.linspace(0, rows - 1, min(rows, 1000)).round().astype(int))
        some = jax.tree.map(lambda a: np.asarray(a)[taken], self.data.rows)
        pooled = FederatedData(some, np.array([0, len(taken)]), ("all",))
        found = largest_curvatures(self.model, pooled, [0], self.mode)
        return float(found[0]) * rows / len(taken)

    def unit(self, name: str) -> float:
        """One over the largest curvature that a step of the method meets."""
        return 1 / self.curvatures["joint" if name in _JOINT else "node" if name in _NODE else "client"]

    def score(self, method: Method, flat: np.ndarray) -> float:
        """Stein score of draws (chains, draws, d); energy of the last iterates for a point estimate."""
        if method.about.point_estimate:
            return float(self.energy(jnp.asarray(flat[:, -1].mean(0), self.mode.dtype)))
        half = flat[:, flat.shape[1] // 2 :].reshape(-1, flat.shape[2])
        some = half[np.unique(np.linspace(0, len(half) - 1, _SCORED_DRAWS).astype(int))]
        gradients = np.asarray(self.gradients(jnp.asarray(some, self.mode.dtype)), float)
        apart = some - half.mean(0)
        first = gradients.mean(0) * half.std(0)
        second = (apart * gradients).mean(0) - 1
        return float(np.sqrt(np.mean(first**2 + second**2)))


def _reference(problem: _Problem, work: Work, plan: Plan, asked: str | Reference) -> Reference:
    if isinstance(asked, Reference):
        return asked
    kept = work.done("reference")
    if kept is not None:
        return Reference.from_json(kept)
    made = None if asked == "longest" else pooled_nuts(problem.model, problem.data, problem.mode, plan.seed)
    if made is None:
        if asked == "nuts":
            raise ConfigError("a NUTS reference needs NumPyro", hint="pip install 'fald[numpyro]'")
        step = 0.05 * problem.unit("sgld")
        made = longest_run(problem.model, problem.data, step, 10 * plan.budget_rounds, plan.seed + 1)
    work.keep("reference", made.to_json())
    work.report(f"reference done: {made.name}, {made.num_draws:,} draws")
    return made


def _build(problem: _Problem, plan: Plan, name: str, factor: float | None) -> Method:
    settings = {"local_steps": plan.local_steps, "batch_size": plan.batch_size}
    if factor is not None:
        settings["step_size"] = factor * problem.unit(name)
    chosen = {k: v for k, v in settings.items() if k in takes(name) and v is not None}
    method = by_name(name, **chosen)
    # large matrices are refused here, before any run
    method.prepare(problem.model, problem.data, method.offer(problem.model, problem.data))
    return method


def _arguments(problem: _Problem, method: Method, plan: Plan) -> dict[str, Any]:
    return {
        "method": method,
        "num_chains": plan.num_chains,
        "num_warmup": method.about.preparation_rounds,
        "thinning": _thinning(problem, plan, _budget(plan)),
        "progress": False,
    }


def _thinning(problem: _Problem, plan: Plan, rounds: int) -> int:
    """As little as memory allows."""
    return max(1, math.ceil(rounds * plan.num_chains * problem.model.dim / _MOST_NUMBERS))


def _budget(plan: Plan) -> int:
    return plan.budget_rounds if plan.target_error is None else _LARGEST_BUDGET


def _pilot_rounds(plan: Plan) -> int:
    return max(32, int(_PILOT_SHARE * plan.budget_rounds))


def _pilot(problem: _Problem, work: Work, plan: Plan, name: str, factor: float) -> dict[str, Any]:
    kept = work.done(f"pilot-{name}-{factor:g}")
    if kept is not None:
        return kept
    method = _build(problem, plan, name, factor)
    rounds = _pilot_rounds(plan) + method.about.preparation_rounds
    settings = {**_arguments(problem, method, plan), "thinning": _thinning(problem, plan, rounds)}
    try:
        tree = sample(plan.seed + 2, problem.model, problem.data, num_rounds=rounds, **settings)
        score = problem.score(method, flat_draws(tree))
    except NonFiniteError:
        score = math.inf
    made = {"factor": factor, "score": score if math.isfinite(score) else None}
    work.keep(f"pilot-{name}-{factor:g}", made)
    work.report(f"{name}: step {factor:g}/L, score {score:.3g}")
    return made


def _one_method(problem: _Problem, work: Work, plan: Plan, name: str, reference: Reference) -> dict[str, Any]:
    """Tune, run, measure; a method that cannot run says why."""
    try:
        _build(problem, plan, name, None if "step_size" not in takes(name) else STEP_FACTORS[-1])
        pilots = []
        if "step_size" in takes(name):
            pilots = [_pilot(problem, work, plan, name, factor) for factor in STEP_FACTORS]
        usable = [p for p in pilots if p["score"] is not None]
        if pilots and not usable:
            return {"refused": "it diverged at every step size tried"}
        best = min(usable, key=lambda p: p["score"])["factor"] if usable else None
        method = _build(problem, plan, name, best)
        curve = _curve(problem, work, plan, name, method, reference)
    except (ConfigError, DataError, NonFiniteError) as error:
        return {"refused": error.message}
    return {
        "point_estimate": method.about.point_estimate,
        "step_size": method.about.step_size if pilots else None,
        "step_factor": best,
        "settings": method.about.settings,
        "pilots": pilots,
        "curve": curve,
        "reached": plan.target_error is not None and curve[-1]["error"] <= plan.target_error,
    }


def _few_rounds(problem: _Problem, work: Work, plan: Plan, name: str, reference: Reference) -> dict[str, Any]:
    """``fald.fit`` with nothing to tune: one point, at the rounds that it took."""
    curve = work.done(f"curve-{name}")
    if curve is None:
        began = time.monotonic()
        try:
            tree = fit(plan.seed, problem.model, problem.data, progress=False)
        except (ConfigError, DataError, NonFiniteError) as error:
            return {"refused": error.message}
        seconds = time.monotonic() - began
        asked: Any = tree["rounds"].to_dataset()
        rounds = float(tree.attrs["rounds_done"])
        costs = {key: float(asked[key].sum()) for key in ("bytes_up", "bytes_down")}
        point = {
            "engine_rounds": int(rounds),
            "seconds": seconds,
            "rounds": rounds,
            "gradients": None,
            **costs,
        }
        curve = work.keep(f"curve-{name}", [{**point, **_errors(flat_draws(tree), False, reference)}])
    work.report(f"{name}: error {curve[-1]['error']:.3g} after {curve[-1]['rounds']:,.0f} rounds")
    return {
        "point_estimate": False,
        "step_size": None,
        "step_factor": None,
        "settings": {"method": name},
        "pilots": [],
        "curve": curve,
        "reached": plan.target_error is not None and curve[-1]["error"] <= plan.target_error,
    }


def grid(plan: Plan) -> list[int]:
    """Rounds at which errors are measured.

    Examples
    --------
    >>> grid(Plan(budget_rounds=640))
    [10, 20, 40, 80, 160, 320, 640]
    """
    if plan.target_error is not None:
        return [2**k for k in range(4, 15)]
    return sorted({-(-plan.budget_rounds // 2**k) for k in range(_CURVES)})


def _curve(
    problem: _Problem, work: Work, plan: Plan, name: str, method: Method, reference: Reference
) -> list[dict[str, Any]]:
    arguments = _arguments(problem, method, plan)
    curve = work.done(f"curve-{name}") or []
    least = arguments["num_warmup"] + 2 * arguments["thinning"]
    points = [r for r in grid(plan) if r >= least] or [least]
    for rounds in points[len(curve) :]:
        if plan.target_error is not None and curve and curve[-1]["error"] <= plan.target_error:
            break
        if not curve:  # compilation is not the method's time
            sample(plan.seed, problem.model, problem.data, num_rounds=least, **arguments)
        began = time.monotonic()
        where = Checkpoint(work.folder / f"run-{name}", seconds=60)
        tree = sample(
            plan.seed, problem.model, problem.data, num_rounds=rounds, checkpoint=where, **arguments
        )
        seconds = time.monotonic() - began + (curve[-1]["seconds"] if curve else 0.0)
        curve.append({"engine_rounds": rounds, "seconds": seconds, **_measure(tree, method, reference)})
        work.keep(f"curve-{name}", curve)
    work.report(f"{name}: error {curve[-1]['error']:.3g} after {curve[-1]['rounds']:,.0f} rounds")
    return curve


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


def as_methods(text: str | Sequence[str] | None) -> tuple[str, ...]:
    """Method names from ``"fa-ld,sgld"`` or a list; all methods for None.

    Examples
    --------
    >>> as_methods("fa-ld, sgld")
    ('fa-ld', 'sgld')
    """
    if text is None:
        return (FEW_ROUND, *METHODS)
    parts = text.split(",") if isinstance(text, str) else text
    return tuple(part.strip() for part in parts if part.strip())


__all__ = ["STEP_FACTORS", "Plan", "Reference", "as_methods", "compare", "grid"]
