"""Figure 2: W2 against rounds when only some clients take part, with noise as published and as realised."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import numpy as np

from fald.lab.reproduce import plots
from fald.lab.reproduce import simulations as sim
from fald.lab.reproduce.base import Findings, PanelRun, Table, Verdict, frame, joined
from fald.theory import gaussian

if TYPE_CHECKING:
    from matplotlib.figure import Figure

_NOISES = {"paper": "noise as published", "realised": "noise by realised weights"}
_TINY = 1e-3  # of the smallest step size: near enough to none


def measure(run: PanelRun) -> Findings:
    """Curves for every step size and noise, and what is left of the distance in the long run."""
    s = run.settings
    federation = sim.paper_federation(s["alpha"], s)
    K, tiny = s["local-steps"], _TINY * min(s["step-sizes"])
    who = sim.participation_of(s["scheme"], s["num-participants"])
    plan = [
        (noise, eta, rounds) for noise in s["noises"] for eta, rounds in zip(s["step-sizes"], s["num-rounds"])
    ]
    parts, z, ends = [], [], []
    with run.begin(K * sum(rounds for _, _, rounds in plan), "W2") as meter:
        for noise, eta, num_rounds in plan:
            options = {"local_steps": K, "step_size": eta, "participation": who, "noise": noise}
            columns, positions, path = sim.curve(
                run, f"{noise} {eta}", federation, meter, num_rounds=num_rounds, **options
            )
            parts.append(frame({"noise": noise, "step_size": eta, **columns}))
            late = np.arange(num_rounds - num_rounds // 4, num_rounds)
            z.append(sim.deviations(positions[late], sim.at_rounds(path, late + 1)))
            value, error = _pooled(positions[late], federation.goal)
            law = _long_run(federation, **options)
            runs = {"runs": value, "standard error": error}
            ends.append({"noise": noise, "step-size": eta, "law": law, **runs})
    no_step = {"local_steps": K, "step_size": tiny}
    limits = {n: _long_run(federation, participation=who, noise=n, **no_step) for n in s["noises"]}
    counts = sorted({*s.get("compared-participants", ()), s["num-participants"]}, reverse=True)
    schemes = {count: sim.participation_of(s["scheme"], count) for count in counts}
    biases = {c: _long_run(federation, participation=p, noise="paper", **no_step) for c, p in schemes.items()}
    verdicts = [
        *_verdicts(s, ends, limits, biases),
        Verdict.of("Monte Carlo follows the exact law in the long run", *sim.agreement(z)),
    ]
    return Findings(joined(parts), verdicts, {"long run": ends, "without step": limits})


def _pooled(positions: np.ndarray, goal: gaussian.Law) -> tuple[float, float]:
    """W2 of late rounds of all runs together, and its standard error by resampling runs."""
    rng = np.random.default_rng(0)
    runs = positions.shape[1]
    again = [positions[:, rng.integers(0, runs, runs)].reshape(-1, 2) for _ in range(100)]
    spread = np.std([sim.fitted_w2(sample, goal) for sample in again], ddof=1)
    return float(sim.fitted_w2(positions.reshape(-1, 2), goal)), float(spread)


def _long_run(federation: sim.Gaussians, **options: Any) -> float:
    """The distance that the law keeps in the long run."""
    return float(
        gaussian.wasserstein2(*gaussian.stationary(*federation.energies, **options), *federation.goal)
    )


def _verdicts(
    s: Mapping[str, Any],
    ends: list[dict[str, Any]],
    limits: Mapping[str, float],
    biases: Mapping[int, float],
) -> list[Verdict]:
    by_noise = {n: frame([e for e in ends if e["noise"] == n]) for n in limits}

    def told(noise: str) -> str:
        rows = by_noise[noise].itertuples(index=False)
        steps = "; ".join(f"η = {r[1]:g}: law {r[2]:.2e}, runs {r[3]:.2e} ± {r[4]:.0e}" for r in rows)
        return f"{steps}; law for η → 0: {limits[noise]:.1e}"

    def falls(noise: str) -> bool:
        law = by_noise[noise]["law"].to_numpy()
        return bool(np.all(np.diff(law) < 0) and limits[noise] < 0.05 * law[0])

    if s["scheme"] == "full":
        claim = "With all devices a larger step leaves a larger bias, which goes to zero with the step"
        return [Verdict.of(claim, told("paper"), falls("paper"))]
    law = by_noise["paper"]["law"].to_numpy()
    ratio = s["step-sizes"][-2] / s["step-sizes"][-1]
    flat = abs(law[-1] / law[-2] - 1)
    return [
        Verdict.of(
            "With noise as published the long-run distance stops depending on the step size",
            f"{told('paper')}; a {ratio:g} times smaller step changes the law's value by {flat:.0%}",
            bool(flat < 0.1 and limits["paper"] > 0.8 * law[-1]),
        ),
        Verdict.of(
            "Fewer devices leave a larger bias",
            "law with noise as published, η → 0: "
            + ", ".join(f"{b:.2e} (S = {c})" for c, b in biases.items()),
            bool(np.all(np.diff(list(biases.values())) > 0)),
        ),
        Verdict.of(
            "With noise by realised weights the long-run distance falls with the step size, to zero",
            told("realised"),
            falls("realised"),
        ),
    ]


def draw(table: Table, record: Mapping[str, Any]) -> Figure:
    """Columns: noises; above the runs with the band of such estimates under the law, below the law itself."""
    noises = list(dict.fromkeys(table["noise"]))
    figure, axes = plots.grid(2, len(noises), width=3.6 * len(noises), height=2.5)
    runs = record["settings"]["num-runs"]
    for row, column in zip(axes, ("w2_runs", "w2_law")):
        ends = table[["low", "high"] if column == "w2_runs" else [column]]
        limits = [ends.min(axis=None) / 1.3, ends.max(axis=None) * 1.3]
        for ax, noise in zip(row, noises):
            shown = table[table["noise"] == noise]
            for i, (eta, part) in enumerate(shown.groupby("step_size", sort=False)):
                if column == "w2_runs":
                    plots.band(ax, i, part["round"], (part["low"], part["high"]))
                plots.line(ax, i, part["round"], part[column], label=f"η = {eta:g}")
            plots.logarithmic(ax, "x")
            ax.set_ylim(limits)
            plots.logarithmic(ax, "y")
            which = _NOISES[noise] if len(noises) > 1 else "all devices"
            title = f"{which}: {f'{runs} runs' if column == 'w2_runs' else 'exact law'}"
            ax.set(xlabel="rounds", ylabel="W2 to the posterior", title=title)
    axes[0, 0].legend()
    return figure
