"""Figure 1, b to e: heterogeneity, correlated noise and densities on Gaussian clients, all taking part."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import numpy as np

from fald.lab.reproduce import plots
from fald.lab.reproduce import simulations as sim
from fald.lab.reproduce.base import Findings, PanelRun, Table, Verdict, frame, joined
from fald.lab.reproduce.simulations import Gaussians
from fald.theory import gaussian

if TYPE_CHECKING:
    from matplotlib.figure import Figure

_AGREES = "Monte Carlo follows the exact law"
_AXES = {"xlabel": "θ₁", "ylabel": "θ₂"}


def measure_heterogeneity(run: PanelRun) -> Findings:
    """Figure 1b: W2 against rounds for several α."""
    federations = {alpha: sim.paper_federation(alpha, run.settings) for alpha in run.settings["alphas"]}
    table, z = _curves(run, "alpha", {alpha: (f, {}) for alpha, f in federations.items()})
    epsilon = run.settings["epsilon"]
    rounds = {a: _first(part, epsilon) for a, part in table.groupby("alpha")}
    ordered = [rounds[a] for a in sorted(rounds)]
    slower = None if None in ordered else bool(np.all(np.diff(np.array(ordered, float)) > 0))
    last = table[table["round"] > 0.8 * table["round"].max()].groupby("alpha")[["w2_runs", "w2_law"]].mean()
    floor = _floor(run, next(iter(federations.values())))
    verdicts = [
        Verdict.of(
            "A larger heterogeneity γ slows the convergence down",
            f"rounds until the exact W2 is ≤ {epsilon:g}: "
            + ", ".join(f"{'not reached' if r is None else r} (α = {a:g})" for a, r in rounds.items()),
            slower,
        ),
        Verdict.of(
            "All distances end at a level near 1e-3 (2e-3 at most)",
            f"mean over the last fifth of the rounds, α = 0 … {max(federations):g}: "
            + ", ".join(f"{v:.1e}" for v in last["w2_runs"])
            + f"; {run.settings['num-runs']} runs from the posterior itself give {floor:.1e} on average; the "
            f"exact law ends at {last['w2_law'].min():.1e} to {last['w2_law'].max():.1e}",
            bool((last["w2_runs"] < 2e-3).all()) if (last["w2_law"] < floor).all() else None,
        ),
        Verdict.of(_AGREES, *sim.agreement(z)),
    ]
    gamma = {f"{a:g}": sim.heterogeneity(f) ** 2 for a, f in federations.items()}
    return Findings(table, verdicts, {"squared heterogeneity": gamma, "floor": floor})


def measure_correlation(run: PanelRun) -> Findings:
    """Figure 1c: W2 against rounds for several ρ."""
    s = run.settings
    federation = sim.paper_federation(s["alpha"], s)
    curves = {rho: (federation, {"correlation": rho}) for rho in s["correlations"]}
    table, z = _curves(run, "correlation", curves)
    by_round = table.pivot(index="round", columns="correlation", values="w2_law")
    spread = float((by_round.max(axis=1) / by_round.min(axis=1) - 1).max())
    epsilon = s["epsilon"]
    passed = {rho: _first(part, epsilon, "w2_runs") for rho, part in table.groupby("correlation")}
    verdicts = [
        Verdict.of(
            "A larger correlation ρ slightly speeds the convergence up",
            f"largest relative difference of the exact W2 between all ρ in any round: {spread:.1e}; first "
            f"round with an estimate ≤ {epsilon:g}: "
            + ", ".join(f"{r} (ρ = {rho:g})" for rho, r in passed.items())
            + "; with equal curvature and all clients the averaged noise is the same for every ρ",
            spread > 1e-6,
        ),
        Verdict.of(_AGREES, *sim.agreement(z)),
    ]
    return Findings(table, verdicts)


def _curves(
    run: PanelRun, name: str, curves: Mapping[float, tuple[Gaussians, dict[str, Any]]]
) -> tuple[Table, list[np.ndarray]]:
    """W2 by runs and by law for each curve, at some rounds, and the deviations at the later of them."""
    s = run.settings
    common = {"num_rounds": s["num-rounds"], "local_steps": s["local-steps"], "step_size": s["step-size"]}
    parts, z = [], []
    with run.begin(len(curves) * s["num-rounds"] * s["local-steps"], "W2") as meter:
        for value, (federation, options) in curves.items():
            columns, positions, path = sim.curve(
                run, f"{run.name} {value}", federation, meter, **common, **options
            )
            parts.append(frame({name: value, **columns}))
            for some in np.array_split(columns["round"], 3):
                z.append(sim.deviations(positions[some - 1], sim.at_rounds(path, some)))
    return joined(parts), z


def _first(part: Table, epsilon: float, column: str = "w2_law") -> int | None:
    near = part[part[column] <= epsilon]
    return int(near["round"].iloc[0]) if len(near) else None


def _floor(run: PanelRun, federation: Gaussians) -> float:
    """The mean W2 that so many exact draws from the posterior show."""
    goal = federation.goal
    levels = np.linspace(0.005, 0.995, 100)
    law = gaussian.Law(goal.mean[None], goal.covariance[None])
    return float(sim.expected_fit(law, goal, run.settings["num-runs"], levels).mean())


def draw_curves(table: Table, record: Mapping[str, Any]) -> Figure:
    """Runs as marks on lines, the exact law as a thin dark line, the band of the estimate under the law."""
    name, symbol = ("alpha", "α") if "alpha" in table else ("correlation", "ρ")
    figure, axes = plots.grid(1, 2, height=3.0)
    for i, (value, part) in enumerate(table.groupby(name)):
        for ax, column in zip(axes[0], ("w2_runs", "w2_law")):
            if column == "w2_runs" and (name == "alpha" or i == 0):  # one law for every correlation
                plots.band(ax, i, part["round"], (part["low"], part["high"]))
            plots.line(ax, i, part["round"], part[column], label=f"{symbol} = {value:g}", marks=10)
    runs = record["settings"]["num-runs"]
    for ax, title in zip(axes[0], (f"{runs} runs; bands: 95% under the law", "exact law")):
        plots.logarithmic(ax, "xy")
        ax.set(xlabel="rounds", ylabel="W2 to the posterior", title=title)
    axes[0, 1].legend()
    return figure


def measure_target(run: PanelRun) -> Findings:
    """Figure 1d: the density of the posterior on a grid."""
    federation = sim.paper_federation(run.settings["alpha"], run.settings)
    goal, count = federation.goal, run.settings["num-points"]
    x, y = np.meshgrid(*[np.linspace(*ends, count) for ends in _limits(goal)])
    gap = np.stack([x - goal.mean[0], y - goal.mean[1]], -1)
    exponent = np.einsum("...i,ij,...j->...", gap, np.linalg.inv(goal.covariance), gap)
    density = np.exp(-0.5 * exponent) / (2 * np.pi * np.sqrt(np.linalg.det(goal.covariance)))
    table = frame({"x": x.ravel(), "y": y.ravel(), "density": density.ravel()})
    cell = (x[0, 1] - x[0, 0]) * (y[1, 0] - y[0, 0])
    mass = float(table["density"].sum() * cell)
    verdicts = [
        Verdict.of(
            "The posterior is N(u, Σ/n), u the mean of all rows",
            f"the grid holds {mass:.4f} of its mass; its mean is {_pair(goal.mean)}, its standard "
            f"deviations {_pair(np.sqrt(np.diag(goal.covariance)))}",
            abs(mass - 1) < 0.01,
        )
    ]
    return Findings(table, verdicts)


def measure_draws(run: PanelRun) -> Findings:
    """Figure 1e: draws of the algorithm, late rounds of all runs."""
    s = run.settings
    federation = sim.paper_federation(s["alpha"], s)
    goal, runs = federation.goal, s["num-runs"]
    asked = {"num_rounds": s["num-rounds"], "local_steps": s["local-steps"], "step_size": s["step-size"]}
    with run.begin(s["num-rounds"] * s["local-steps"], "W2") as meter:
        positions = sim.simulate(run, run.name, federation, meter, every=s["every"], **asked)
    rounds = s["every"] * np.arange(1, len(positions) + 1)
    late = rounds > s["num-warmup"]
    kept, rounds = positions[late], rounds[late]
    path = sim.at_rounds(sim.law_of(federation, **asked), rounds)
    flat = kept.reshape(-1, 2)
    table = frame({"round": np.repeat(rounds, runs), "run": np.tile(np.arange(runs), len(rounds))})
    table = table.assign(x=flat[:, 0], y=flat[:, 1])
    gap = np.linalg.solve(np.linalg.cholesky(goal.covariance), (flat - goal.mean).T)
    inside = {p: float(np.mean((gap**2).sum(0) <= -2 * np.log(1 - p))) for p in (0.5, 0.9, 0.99)}
    w2 = float(sim.fitted_w2(flat, goal))
    scale = float(np.sqrt(np.trace(goal.covariance)))
    verdicts = [
        Verdict.of(
            "The density of the draws is close to the true one",
            f"W2 of {len(flat):,} draws to the posterior {w2:.1e}, {w2 / scale:.1%} of its sd; "
            + ", ".join(f"{v:.1%} inside the {p:.0%} ellipse" for p, v in inside.items()),
            bool(w2 < 0.1 * scale),
        ),
        Verdict.of(_AGREES, *sim.agreement([sim.deviations(kept, path)])),
    ]
    facts = {"mean": goal.mean.tolist(), "covariance": goal.covariance.tolist(), "inside": inside}
    return Findings(table, verdicts, facts)


def _pair(values: np.ndarray) -> str:
    return f"({values[0]:.4f}, {values[1]:.4f})"


def _limits(goal: gaussian.Law) -> list[tuple[float, float]]:
    """Four standard deviations around the mean, for both axes."""
    return [(m - 4 * s, m + 4 * s) for m, s in zip(goal.mean, np.sqrt(np.diag(goal.covariance)))]


def draw_target(table: Table, record: Mapping[str, Any]) -> Figure:
    """Filled contours of the density."""
    figure, axes = plots.grid(1, 1, width=3.6, height=3.2)
    shape = (table["y"].nunique(), table["x"].nunique())
    x, y, density = (table[c].to_numpy().reshape(shape) for c in ("x", "y", "density"))
    levels = np.linspace(0.02, 1, 8) * density.max()
    axes[0, 0].contourf(x, y, density, levels=levels, cmap="cividis")
    axes[0, 0].contour(x, y, density, levels=levels[:1], colors="#333333", linewidths=0.6)
    axes[0, 0].set(**_AXES, title="true density")
    return figure


def draw_draws(table: Table, record: Mapping[str, Any]) -> Figure:
    """Counts of the draws in cells, and ellipses that hold 50, 90 and 99% of the true mass."""
    figure, axes = plots.grid(1, 1, width=3.6, height=3.2)
    goal = gaussian.Law(*(np.array(record["facts"][k]) for k in ("mean", "covariance")))
    limits = _limits(goal)
    counts, xs, ys = np.histogram2d(table["x"], table["y"], bins=40, range=limits)
    counts[counts == 0] = np.nan
    axes[0, 0].pcolormesh(xs, ys, counts.T, cmap="cividis", rasterized=True)
    root, angle = np.linalg.cholesky(goal.covariance), np.linspace(0, 2 * np.pi, 200)
    for i, p in enumerate((0.5, 0.9, 0.99)):
        ring = goal.mean[:, None] + np.sqrt(-2 * np.log(1 - p)) * root @ [np.cos(angle), np.sin(angle)]
        dash = ("-", "--", ":")[i]
        axes[0, 0].plot(*ring, color="#D55E00", linestyle=dash, label=f"{p:.0%} of the true mass")
    axes[0, 0].legend(loc="upper right")
    axes[0, 0].set(**_AXES, title=f"{len(table):,} draws", xlim=limits[0], ylim=limits[1])
    return figure
