"""Beyond the paper: rounds to accuracy of FA-LD, SGLD and FedAvg with a Laplace approximation."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from fald.lab.reproduce import plots
from fald.lab.reproduce.base import Findings, Meter, PanelRun, Table, Verdict, frame, joined
from fald.lab.reproduce.simulations import along
from fald.langevin.engine import Assignment
from fald.langevin.fald import fald
from fald.problem.data import FederatedData
from fald.problem.models import Model, logistic_regression
from fald.settings.participation import full
from fald.study.datasets import load_bundled_study

if TYPE_CHECKING:
    from matplotlib.figure import Figure

_PRIOR_SCALE = 2.5
_METHODS = {"sgld": "SGLD", "fa-ld": "FA-LD", "laplace": "FedAvg + Laplace"}
_PROBLEMS = {"trial": "INDO trial, 4 unequal sites", "balanced": "simulated, 10 sites alike"}


class Regression(NamedTuple):
    """A federated logistic regression, its pooled design, and its posterior moments."""

    data: FederatedData
    model: Model
    design: np.ndarray
    outcome: np.ndarray
    mean: np.ndarray
    sd: np.ndarray
    effective: float


def _data(name: str, settings: Mapping[str, Any]) -> tuple[FederatedData, Model]:
    if name == "trial":
        study = load_bundled_study("indo")
        data = study.read_data()
        return data, study.build_model(data.features)
    rng = np.random.default_rng(settings["data-seed"])
    n, rows, d = settings["num-clients"], settings["rows-per-client"], settings["num-features"]
    shape = settings["feature-correlation"] ** np.abs(np.subtract.outer(np.arange(d), np.arange(d)))
    effects = rng.normal(0, 0.5, d)
    clients = {}
    for c in range(n):
        x = rng.standard_normal((rows, d)) @ np.linalg.cholesky(shape).T
        y = rng.random(rows) < 1 / (1 + np.exp(-(x @ effects - 0.5)))
        clients[f"site-{c}"] = (x.astype(np.float32), y.astype(np.float32))
    return FederatedData.from_arrays(clients), logistic_regression(d, prior_scale=_PRIOR_SCALE)


def curvature(theta: np.ndarray, design: np.ndarray) -> np.ndarray:
    """Hessian of the negative log posterior of a logistic regression."""
    p = 1 / (1 + np.exp(-design @ theta))
    return design.T @ (design * (p * (1 - p))[:, None]) + np.eye(len(theta)) / _PRIOR_SCALE**2


def regression(name: str, settings: Mapping[str, Any]) -> Regression:
    """A problem with its posterior moments by importance sampling from a t law around the mode."""
    data, model = _data(name, settings)
    x, y = (np.asarray(part, float) for part in data.rows)
    design = np.column_stack([x, np.ones(len(x))])  # the order of the model's flat position
    theta = np.zeros(design.shape[1])
    for _ in range(50):
        residual = y - 1 / (1 + np.exp(-design @ theta))
        theta += np.linalg.solve(curvature(theta, design), design.T @ residual - theta / _PRIOR_SCALE**2)
    d, dof, count = len(theta), 8, settings["reference-draws"]
    rng = np.random.default_rng(0)
    gaps = rng.standard_normal((count, d)) / np.sqrt(rng.chisquare(dof, count) / dof)[:, None]
    draws = theta + gaps @ np.linalg.cholesky(np.linalg.inv(curvature(theta, design))).T
    proposal = -(dof + d) / 2 * np.log1p((gaps**2).sum(1) / dof)
    logits = (part @ design.T for part in np.array_split(draws, max(1, count // 2000)))
    fit = np.concatenate([(z * y - np.logaddexp(0, z)).sum(1) for z in logits])
    weight = fit - 0.5 * (draws**2).sum(1) / _PRIOR_SCALE**2 - proposal
    weight = np.exp(weight - weight.max())
    weight /= weight.sum()
    mean = weight @ draws
    sd = np.sqrt(weight @ (draws - mean) ** 2)
    return Regression(data, model, design, y, mean, sd, float(1 / np.sum(weight**2)))


def error(problem: Regression, mean: np.ndarray, sd: np.ndarray) -> float:
    """The worst of all shifts of means, in posterior sds, and of all relative errors of sds."""
    return float(max(np.abs((mean - problem.mean) / problem.sd).max(), np.abs(sd / problem.sd - 1).max()))


def _curve(
    run: PanelRun, problem: Regression, name: str, *, eta: float, meter: Meter
) -> list[tuple[int, float]]:
    """(round, error) along a run; the curvature for the Laplace approximation costs one round more."""
    s, laplace = run.settings, name == "laplace"
    K, chains = 1 if name == "sgld" else s["local-steps"], 1 if laplace else s["num-runs"]
    method = fald(local_steps=K, step_size=eta, temperature=0.0 if laplace else 1.0)
    key = jax.random.fold_in(jax.random.key(run.seed), K)
    asked = Assignment(key, problem.model, problem.data, method, full(), chains, 0, 1)
    start = jnp.zeros((chains, problem.model.dim))
    found: list[tuple[int, float]] = []
    for _, newest, energy in along(asked, start, s["num-rounds"], max(1, 200 // K)):
        meter.add(len(newest) * K, energy)
        for at in newest:
            if laplace:
                sd = np.sqrt(np.diag(np.linalg.inv(curvature(at[0], problem.design))))
            else:
                sd = at.std(0, ddof=1)
            found.append((len(found) + 1 + laplace, error(problem, at.mean(0), sd)))
    return found


def measure(run: PanelRun) -> Findings:
    """Error of each method against rounds, on a trial and on equal sites; every step size of its grid."""
    s = run.settings
    problems = {name: regression(name, s) for name in s["problems"]}
    plan = [(p, m, eta) for p in problems for m in _METHODS for eta in s["step-sizes"][p][m]]
    steps = sum(s["num-rounds"] * (1 if m == "sgld" else s["local-steps"]) for _, m, _ in plan)
    parts = []
    with run.begin(steps, "energy") as meter:
        for p, m, eta in plan:
            rounds, errors = zip(*_curve(run, problems[p], m, eta=eta, meter=meter))
            about = {"problem": p, "method": m, "step_size": eta}
            parts.append(frame({**about, "round": rounds, "error": errors}))
    table = joined(parts)
    best = {p: {m: _best(table, p, m, s["tolerance"]) for m in _METHODS} for p in problems}
    verdicts = [v for p in problems for v in _verdicts(p, best[p], s)]
    named = {p: {m: dict(zip(("step-size", "rounds", "last"), best[p][m])) for m in _METHODS} for p in best}
    effective = {p: round(problem.effective) for p, problem in problems.items()}
    facts = {"effective reference draws": effective, "best": named}
    return Findings(table, verdicts, facts)


def _best(table: Table, problem: str, method: str, tolerance: float) -> tuple[float, int | None, float]:
    """Step size, rounds to the tolerance and last error, of the step size that needs the fewest rounds.

    Counted to the first round whose error is within the tolerance and, on average, stays so: a curve may dip
    and return.

    Where none gets there, that of the smallest error in the end.
    """
    part = table[(table["problem"] == problem) & (table["method"] == method)]
    found = []
    for eta, curve in part.groupby("step_size"):
        rest = curve["error"][::-1].expanding().mean()[::-1]  # from this round on, on average
        near = curve.loc[(curve["error"] <= tolerance) & (rest <= tolerance), "round"]
        last = float(curve["error"].iloc[-20:].mean())
        found.append((float(eta), int(near.iloc[0]) if len(near) else None, last))  # type: ignore[arg-type]
    return min(found, key=lambda f: (f[1] is None, f[1] or 0, f[2]))


def _verdicts(problem: str, best: Mapping[str, Any], s: Mapping[str, Any]) -> list[Verdict]:
    where, tolerance = _PROBLEMS[problem], s["tolerance"]

    def told(method: str) -> str:
        eta, rounds, last = best[method]
        reached = f"{rounds} rounds" if rounds is not None else "not reached"
        return f"{_METHODS[method]} {reached} (η = {eta:g}, error at the end {last:.2f})"

    ours, theirs, laplace = (best[m][1] for m in ("fa-ld", "sgld", "laplace"))
    fewer = _before(ours, theirs) if ours is not None or theirs is not None else None
    return [
        Verdict.of(
            f"{where}: FA-LD needs fewer rounds than SGLD to an error of {tolerance:g} posterior sd",
            f"{told('fa-ld')}; {told('sgld')}",
            fewer,
        ),
        Verdict.of(
            f"{where}: FedAvg + Laplace gets to that error, and in fewer rounds than FA-LD",
            f"{told('laplace')}; {told('fa-ld')}",
            _before(laplace, ours),
        ),
    ]


def _before(first: int | None, second: int | None) -> bool:
    """Whether one gets there, and the other later or never."""
    return first is not None and (second is None or first < second)


def draw(table: Table, record: Mapping[str, Any]) -> Figure:
    """An axis for each problem; each method with its best step size."""
    problems = list(dict.fromkeys(table["problem"]))
    figure, axes = plots.grid(1, len(problems), width=3.5 * len(problems), height=2.9)
    for ax, problem in zip(axes[0], problems):
        for i, (method, label) in enumerate(_METHODS.items()):
            eta = record["facts"]["best"][problem][method]["step-size"]
            chosen = (table["problem"] == problem) & (table["method"] == method)
            part = table[chosen & np.isclose(table["step_size"], eta)]
            K = 1 if method == "sgld" else record["settings"]["local-steps"]
            plots.line(ax, i, part["round"], part["error"], label=f"{label}, K = {K}")
        plots.level(ax, record["settings"]["tolerance"])
        plots.logarithmic(ax, "xy")
        ax.set(xlabel="rounds", ylabel="worst error (posterior sd)", title=_PROBLEMS[problem])
        ax.legend()
    return figure
