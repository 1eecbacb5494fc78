"""Figures 3 and 4: accuracy, Brier score and calibration error on image sets against rounds."""

from __future__ import annotations

from collections.abc import Mapping
from itertools import combinations
from typing import TYPE_CHECKING, Any

import numpy as np

from fald.lab.reproduce import plots
from fald.lab.reproduce.base import Findings, PanelRun, Table, Verdict, frame, joined, paired
from fald.lab.reproduce.images import ImageChain, chain_settings, run_chains, tune

if TYPE_CHECKING:
    from matplotlib.figure import Figure

_NAMES = {"mnist": "MNIST", "fashion-mnist": "Fashion-MNIST"}
_MEASURES = {"accuracy": "accuracy", "brier": "Brier score", "ece": "calibration error"}


def measure(run: PanelRun) -> Findings:
    """Tune η for every K on validation rows, then run every K with several seeds and score the test rows.

    Both figures come from the same chains; ``warmed-up`` says which average is shown.
    """
    s = run.settings
    tuned = {data: tune(run, data, s["local-steps"]) for data in s["sets"]}
    warmup = s["num-warmup"]
    chains = [
        ImageChain(
            data, K, tuned[data][K]["step-size"], s["num-rounds"], warmup, run.seed + i, "test",
            **chain_settings(s),
        )
        for data in s["sets"] for K in s["local-steps"] for i in range(s["num-seeds"])
    ]  # fmt: skip
    parts = []
    for chain, found in zip(chains, run_chains(run, chains, "energy")):
        part = frame(found)
        who = {"set": chain.data, "local_steps": chain.local_steps, "step_size": chain.step_size}
        parts.append(part.assign(**who, seed=chain.seed))
    columns = ["set", "local_steps", "step_size", "seed", "warmup", "round", *_MEASURES]
    both = joined(parts)[columns]
    table = both[both["warmup"] == (warmup if s["warmed-up"] else 0)].reset_index(drop=True)
    verdicts = [judge(table, claim) for claim in s["claims"] if claim["set"] in s["sets"]]
    if s["warmed-up"]:
        verdicts += shifts(both[both["warmup"] == 0], table)
    return Findings(table, verdicts, {"tuned": tuned})


def at_the_end(table: Table, data: str, measured: str) -> Table:
    """(seeds, K) values of one measure in the last round."""
    part = table[(table["set"] == data) & (table["round"] == table["round"].max())]
    return part.pivot(index="seed", columns="local_steps", values=measured)


def judge(table: Table, claim: Mapping[str, Any]) -> Verdict:
    """Hold one claim about the last round against all seeds.

    A claim is about a measure on a set: that some K is the ``worst``, is ``not-best``, that the ``best`` is
    among some K, or that the best is ``at-least`` a number. An order between two K counts only if it
    exceeds 95% limits of the paired differences between seeds.
    """
    values = at_the_end(table, claim["set"], claim["measure"])
    sign = 1 if claim["measure"] == "accuracy" else -1  # larger is better, after the sign
    means = (sign * values.mean()).sort_values(kind="stable")
    where = f"{_NAMES[claim['set']]}, {_MEASURES[claim['measure']]}"
    worst, best = means.index[0], means.index[-1]
    if "at-least" in claim:
        found = f"{values[best].mean():.4f} at K = {best}"
        return Verdict.of(
            f"{where}: the best K reaches {claim['at-least']}, our mark",
            found,
            bool(means[best] >= claim["at-least"]),
        )
    if "best" in claim:
        among = [K for K in claim["best"] if K in values]
        text = f"{where}: the best K is {' or '.join(map(str, claim['best']))}"
        if not among:
            return Verdict.of(text, "these K were not run", None)
        rival = max(among, key=lambda K: means[K])
        other = best if best not in among else max((K for K in values if K not in among), key=means.get)
        gap, limits = paired(sign * (values[rival] - values[other]))
        said = f"best: {_value(values, best)}; {_gap(rival, other, gap, limits)}"
        return Verdict.of(text, said, None if abs(gap) <= limits else gap > 0)
    if "not-best" in claim:
        K = claim["not-best"]
        gap, limits = paired(sign * (values[best] - values[K]))
        said = f"best: {_value(values, best)}; K = {K}: {values[K].mean():.4f}"
        return Verdict.of(
            f"{where}: K = {K} is not the best", said, None if abs(gap) <= limits and best != K else best != K
        )
    K = claim["worst"]
    rival = worst if worst != K else means.index[1]
    gap, limits = paired(sign * (values[rival] - values[K]))
    word = "worst" if worst != K else "next worst"
    said = f"{_value(values, K)}; {word} {_value(values, rival)}; {_gap(rival, K, gap, limits)}"
    return Verdict.of(
        f"{where}: K = {K} is the worst of all K", said, None if abs(gap) <= limits else gap > 0
    )


def shifts(from_start: Table, warmed_up: Table) -> list[Verdict]:
    """Whether the best K depends on the measure, and on the warm-up, on any of the sets.

    It does if each of two ways of scoring has a best K of its own that beats the other's by more than its 95%
    limits.
    """
    ways = {"all samples": from_start, "after the warm-up": warmed_up}
    sets = list(dict.fromkeys(warmed_up["set"]))
    by_measure, by_warmup, best = [], [], {}
    for data in sets:
        scores = {
            (way, name): (1 if name == "accuracy" else -1) * at_the_end(table, data, name)
            for way, table in ways.items()
            for name in _MEASURES
        }
        for (way, name), values in scores.items():
            best[f"{_NAMES[data]}, {_MEASURES[name]}, {way}"] = values.mean().idxmax()
        for (a, first), (b, second) in combinations(scores.items(), 2):
            kinds = by_measure if a[0] == b[0] else by_warmup if a[1] == b[1] else None
            if kinds is not None:
                kinds.append(_moved(first, second))
    each = "; ".join(f"{where}: {K}" for where, K in best.items())
    same = f"{next(iter(best.values()))} on every set, by every measure, with and without the warm-up"
    said = f"best K: {each if len(set(best.values())) > 1 else same}"
    claims = {
        "The best K depends on the measure": by_measure,
        "The best K depends on the warm-up": by_warmup,
    }
    return [
        Verdict.of(
            claim,
            f"{said}. Beyond 95% limits over seeds it moves in {sum(found)} of {len(found)} comparisons",
            True if any(found) else None,
        )
        for claim, found in claims.items()
    ]


def _moved(first: Table, second: Table) -> bool:
    """Whether the best K by the first scores and the best by the second surely differ, each by its scores."""
    a, b = first.mean().idxmax(), second.mean().idxmax()
    return _surely(first[a] - first[b]) and _surely(second[b] - second[a])


def _surely(differences: Table) -> bool:
    gap, limits = paired(differences)
    return gap > limits


def _value(values: Table, K: int) -> str:
    return f"K = {K}: {values[K].mean():.4f}"


def _gap(a: int, b: int, gap: float, limits: float) -> str:
    word = "better" if gap >= 0 else "worse"
    known = "one seed" if np.isinf(limits) else f"95% limits ±{limits:.4f}"
    return f"K = {a} is {word} than K = {b} by {abs(gap):.4f} ({known})"


def draw(table: Table, document: Mapping[str, Any]) -> Figure:
    """Rows: sets; columns: measures; a line per K, the band over seeds."""
    sets = list(dict.fromkeys(table["set"]))
    figure, axes = plots.grid(len(sets), 3, height=2.3)
    for row, data in zip(axes, sets):
        for ax, (name, title) in zip(row, _MEASURES.items()):
            part = table[table["set"] == data]
            for i, (K, of_k) in enumerate(part.groupby("local_steps")):
                curve = of_k.groupby("round")[name].agg(["mean", "min", "max"])
                plots.line(ax, i, curve.index, curve["mean"], label=f"K = {K}", marks=6)
                plots.band(ax, i, curve.index, (curve["min"], curve["max"]))
            ax.set_title(f"{_NAMES[data]}: {title}", fontsize="small")
            ax.set_xlabel("rounds")
            if name != "accuracy":
                plots.logarithmic(ax, "y")
            else:  # the first samples are far below the rest
                last = part[part["round"] == part["round"].max()][name]
                ax.set_ylim(max(part[name].min(), 2.5 * last.min() - 1.5 * last.max() - 0.02))
    plots.legend_below(figure, axes[0, 0])
    return figure
