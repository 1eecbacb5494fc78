"""Figure 1a: rounds to a given W2 against K, where clients share their curvature and where they do not."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from fald.lab.reproduce import plots
from fald.lab.reproduce import simulations as sim
from fald.lab.reproduce.base import Findings, Meter, PanelRun, Table, Verdict, frame
from fald.lab.reproduce.simulations import Gaussians
from fald.theory import gaussian

if TYPE_CHECKING:
    from matplotlib.figure import Figure


def exact_rounds(federation: Gaussians, local_steps: int, settings: Mapping[str, Any]) -> int | None:
    """First round at which the exact law is within ε; None if not within ``most-steps`` local steps."""
    rounds = settings["most-steps"] // local_steps + 1
    path = sim.law_of(federation, rounds, local_steps=local_steps, step_size=settings["step-size"])
    return gaussian.rounds_to(settings["epsilon"], path, federation.goal)


class _Case(NamedTuple):
    """Clients that share their curvature or have their own, α, K, and rounds: by the law, and to try."""

    curvature: str
    alpha: float
    local_steps: int
    rounds_law: int | None
    rounds_tried: int
    federation: Gaussians


def _cases(s: Mapping[str, Any]) -> Iterator[_Case]:
    alike = [("equal", a, K, sim.paper_federation) for a in s["alphas"] for K in s["local-steps"]]
    own = [("own", s["curved-alpha"], K, sim.curved_federation) for K in s["curved-local-steps"]]
    for kind, alpha, K, made in alike + own:
        federation = made(alpha, s)
        exact = exact_rounds(federation, K, s)
        # a little longer than the law needs, because estimates scatter; or long enough to see the bias
        cap = math.ceil(1.3 * exact) + 3 if exact is not None else max(5, s["hopeless-steps"] // K)
        yield _Case(kind, alpha, K, exact, cap, federation)


def measure(run: PanelRun) -> Findings:
    """First passage below ε by law and by runs, and the distance that remains in the long run."""
    s = run.settings
    cases, lines, z = list(_cases(s)), [], []
    with run.begin(sum(case.rounds_tried * case.local_steps for case in cases), "W2") as meter:
        for case in cases:
            found, deviation = _passage(run, case, meter)
            z.append(deviation)
            options = {"step_size": s["step-size"], "local_steps": case.local_steps}
            fixed = gaussian.stationary(*case.federation.energies, **options)
            left = float(gaussian.wasserstein2(*fixed, *case.federation.goal))
            lines.append({**case._asdict(), "rounds_runs": found, "w2_long_run": left})
    columns = [
        "curvature",
        "alpha",
        "local_steps",
        "rounds_law",
        "rounds_runs",
        "rounds_tried",
        "w2_long_run",
    ]
    table = frame(lines)[columns].astype({"rounds_law": "Int64", "rounds_runs": "Int64"})
    gamma = {f"{a:g}": sim.heterogeneity(sim.paper_federation(a, s)) ** 2 for a in s["alphas"]}
    above = _chance_above(run)
    verdicts = [
        *_verdicts(table, s, gamma, above),
        Verdict.of("Monte Carlo follows the exact law", *sim.agreement(z)),
    ]
    return Findings(table, verdicts, {"squared heterogeneity": gamma, "chance above epsilon": above})


def _passage(run: PanelRun, case: _Case, meter: Meter) -> tuple[int | None, np.ndarray]:
    """First round in which the estimate from the runs is within ε, and deviations from the law.

    The latter in the round that the law names, not where the runs were stopped: runs that are stopped
    because they look good would look too good.
    """
    s, K, goal = run.settings, case.local_steps, case.federation.goal
    seen, reached = 0, False
    looked = case.rounds_tried if case.rounds_law is None else case.rounds_law

    def enough(newest: np.ndarray) -> bool:
        nonlocal seen, reached
        seen += len(newest)
        reached = reached or bool((sim.fitted_w2(newest, goal) <= s["epsilon"]).any())
        return reached and seen >= looked

    label, options = f"{case.curvature} {case.alpha} {K}", {"local_steps": K, "step_size": s["step-size"]}
    positions = sim.simulate(
        run, label, case.federation, meter, num_rounds=case.rounds_tried, enough=enough, **options
    )
    near = sim.fitted_w2(positions, goal) <= s["epsilon"]
    law = sim.at_rounds(sim.law_of(case.federation, looked, **options), np.array([looked]))
    deviation = sim.deviations(positions[looked - 1 : looked], law)
    return (int(np.argmax(near)) + 1 if near.any() else None), deviation


def _chance_above(run: PanelRun) -> float:
    """How often so many exact draws from the posterior look farther away than ε."""
    goal = sim.paper_federation(0.0, run.settings).goal
    law = gaussian.Law(goal.mean[None], goal.covariance[None])
    levels = np.linspace(0.0005, 0.9995, 1000)
    found = sim.expected_fit(law, goal, run.settings["num-runs"], levels, repeats=4000)
    return float(np.mean(found > run.settings["epsilon"]))


def _verdicts(table: Table, s: Mapping[str, Any], gamma: Mapping[str, float], above: float) -> list[Verdict]:
    equal, own = table[table["curvature"] == "equal"], table[table["curvature"] == "own"]
    by_k = equal.pivot(index="local_steps", columns="alpha", values="rounds_law")
    runs = equal.pivot(index="local_steps", columns="alpha", values="rounds_runs")
    first = by_k.index[0]
    low, high = by_k.columns[0], by_k.columns[-1]
    printed = dict(zip(s["alphas"], s["printed-heterogeneity"]))
    ratios = [gamma[f"{a:g}"] / printed[a] for a in s["alphas"]]
    never = own[own["rounds_law"].isna()]["local_steps"]
    grows = not bool((by_k.diff().iloc[1:] <= 0).all(axis=None))
    grow = "grow" if grows else "never grow"
    level = equal["w2_long_run"].max() < 1.01 * equal["w2_long_run"].min()
    bias = "so K adds no bias here" if level else "so K adds bias"
    said = "; ".join(f"α = {a:g}: {', '.join(map(_rounds, by_k[a]))}" for a in by_k)
    by_runs = "; ".join(f"α = {a:g}: {', '.join(map(_rounds, runs[a]))}" for a in runs)
    biased = f"{own['w2_long_run'].iloc[0]:.1e} at K = {own['local_steps'].iloc[0]}"
    return [
        Verdict.of(
            "A small K needs many more rounds",
            f"exact rounds at K = {', '.join(map(str, by_k.index))}: {said}",
            bool((by_k.loc[first] > 2 * by_k.min()).all()),
        ),
        _savings(by_k),
        Verdict.of(
            "A larger heterogeneity needs more rounds at the same K",
            f"K = {first}: {_rounds(by_k.loc[first, low])} rounds for α = {low:g}, "
            f"{_rounds(by_k.loc[first, high])} for α = {high:g}",
            bool(by_k.loc[first, low] < by_k.loc[first, high]),
        ),
        Verdict.of(
            "There is a best K (near 3000), and a larger one needs more rounds because of its bias",
            f"exact rounds {grow} with K; the long-run W2 is {equal['w2_long_run'].min():.2e} to "
            f"{equal['w2_long_run'].max():.2e} for every K, {bias}. "
            f"By the runs: {by_runs}. Estimates from {s['num-runs']} perfect draws exceed "
            f"{s['epsilon']:g} in {above:.0%} of cases, which can look like a bias",
            grows,
        ),
        Verdict.of(
            "Where clients differ in curvature, too large a K really hurts",
            f"long-run W2 {biased}, {own['w2_long_run'].iloc[-1]:.1e} at K = {own['local_steps'].iloc[-1]}; "
            f"{s['epsilon']:g} is never reached with K = {', '.join(map(str, never)) or 'none of these'}",
            bool(len(never) and own["w2_long_run"].iloc[-1] > 10 * own["w2_long_run"].iloc[0]),
        ),
        Verdict.of(
            "The values printed for the heterogeneity γ are values of γ²",
            "γ² here: "
            + ", ".join(f"{gamma[f'{a:g}']:.1e}" for a in s["alphas"])
            + "; printed: "
            + ", ".join(f"{printed[a]:.0e}" for a in s["alphas"]),
            bool(all(0.75 < ratio < 1.33 for ratio in ratios)),
        ),
    ]


def _savings(by_k: Table) -> Verdict:
    """Rounds saved by local steps; the paper does not say from which K to which its factor is."""
    best, highest = by_k.min(), by_k.columns[-1]
    near = 3000 if 3000 in by_k.index else by_k.index[-1]
    rounds = by_k[highest]
    from_k = ", ".join(
        f"{rounds[K] / rounds[near]:,.0f} from K = {K} ({_rounds(rounds[K])} rounds)"
        for K in by_k.index
        if near > K
    )
    saved = (by_k.iloc[0] / best).max()
    return Verdict.of(
        "Local steps save rounds by factors as large as 30",
        f"by the law, at α = {highest:g} to K = {near} ({_rounds(rounds[near])} rounds): {from_k}; "
        f"the largest of all is {saved:,.0f}. The paper does not say between which K it counts",
        bool(saved >= 30),
    )


def _rounds(value: Any) -> str:
    from pandas import isna

    return "never" if isna(value) else str(int(value))


def draw(table: Table, record: Mapping[str, Any]) -> Figure:
    """Rounds against K for equal and for own curvature, and the distance that remains."""
    figure, axes = plots.grid(1, 3, width=7.4, height=2.9)
    left, middle, right = axes[0]
    equal, own = table[table["curvature"] == "equal"], table[table["curvature"] == "own"]
    for i, (alpha, part) in enumerate(equal.groupby("alpha")):
        color, dash, marker = plots.look(i)
        left.plot(part["local_steps"], part["rounds_law"], color=color, linestyle=dash)
        left.plot(part["local_steps"], part["rounds_runs"], color=color, linestyle="", marker=marker)
        left.plot([], [], color=color, linestyle=dash, marker=marker, label=f"α = {alpha:g}")
    color, dash, marker = plots.look(0)
    steps, dots = own["local_steps"], {"linestyle": "", "marker": marker}
    middle.plot(steps, own["rounds_law"], color=color, linestyle=dash, label="exact law")
    middle.plot(steps, own["rounds_runs"], color=color, label="runs", **dots)
    never = own[own["rounds_law"].isna()]["local_steps"]
    top = 3 * float(own["rounds_law"].max())
    middle.plot(never, [top] * len(never), color="#D55E00", linestyle="", marker="x", label="never (law)")
    for i, (title, part) in enumerate({"equal": equal[equal["alpha"] == 0], "own": own}.items()):
        plots.line(right, i, part["local_steps"], part["w2_long_run"], label=f"{title} curvature", marks=20)
    epsilon, alpha = (record["settings"][key] for key in ("epsilon", "curved-alpha"))
    plots.level(right, epsilon)
    titles = "equal curvature (line: law)", f"own curvature, α = {alpha:g}", "W2 in the long run (exact)"
    for ax, title in zip(axes[0], titles):
        plots.logarithmic(ax, "xy")
        ax.set(xlabel="local steps K", title=title)
        ax.legend(**({"loc": "center right", "bbox_to_anchor": (1.0, 0.3)} if ax is right else {}))
        if ax is not right:
            ax.set_ylabel(f"rounds to W2 ≤ {epsilon:g}")
    return figure
