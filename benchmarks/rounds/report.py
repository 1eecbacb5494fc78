"""The measured runs as a table and as a picture."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

Row = dict[str, Any]

LIMIT = 0.05
_PLOTTED = ("indo", "lung", "bone-marrow", "breast-cancer-11", "breast-cancer-61", "breast-cancer-121")


def _worst(pairs: Iterable[tuple[float, float]]) -> str:
    pairs = list(pairs)
    return f"{max(p[0] for p in pairs):.3f} / {max(p[1] for p in pairs):.3f}" if pairs else "–"


def _span(values: Iterable[int]) -> str:
    low, high = min(values := list(values)), max(values)
    return f"{low}" if low == high else f"{low}–{high}"


def laplace_round(row: Row) -> tuple[float, float] | None:
    """Errors of the Laplace approximation: what Newton's method gave before the first local steps."""
    before = row.get("newton_rounds")
    return tuple(row["by_round"][before - 1]) if before else None  # type: ignore[return-value]


def table(rows: list[Row]) -> str:
    """A line per study: errors are the worst over parameters and seeds, mean in sds / sd relative."""
    lines = [
        "| study | d | sites | rows | sites' quadratics, 1 round | Laplace | "
        "corrected Langevin: verdict, rounds, error | `fald.fit`: verdict, rounds, error |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for name in dict.fromkeys(r["study"] for r in rows):
        own = [r for r in rows if r["study"] == name]
        auto = [r for r in own if r["method"] == "auto"]
        other = [r for r in own if r["method"] == "corrected"]
        known = [r for r in auto if r.get("by_round")]
        first, facts = [tuple(r["by_round"][0]) for r in known[:1]], own[0]
        mode = [e for e in map(laplace_round, [r for r in other if r.get("by_round")][:1]) if e]
        star = "\\*" if facts["holdout"] else ""
        lines.append(
            f"| {name}{star} | {facts['dim']} | {facts['sites']} | {facts['rows']:,} | {_worst(first)} | "
            f"{_worst(mode)} | {_cell(other)} | {_cell(auto)} |"
        )
    return "\n".join(lines) + "\n"


def _cell(rows: list[Row]) -> str:
    if not rows:
        return "–"
    counts: dict[str, int] = {}
    for row in rows:
        word = row["verdict"].partition(":")[0]
        counts[word] = counts.get(word, 0) + 1
    verdicts = next(iter(counts)) if len(counts) == 1 else ", ".join(f"{w} {c}×" for w, c in counts.items())
    rounds = [r["rounds"] for r in rows if "rounds" in r]
    errors = [(r["mean_error"], r["sd_error"]) for r in rows if "mean_error" in r]
    parts = [verdicts, _span(rounds) if rounds else "", _worst(errors) if errors else ""]
    return ", ".join(p for p in parts if p)


def false_verdicts(rows: list[Row], allowance: float = 0.0) -> list[Row]:
    """Runs that say "reached" although an error is above the limit, or where nothing can be reached."""

    def wrong(row: Row) -> bool:
        if row["verdict"] != "reached":
            return False
        if row["expects"] != "reached":
            return row["expects"] == "not-reached"
        return max(row["mean_error"], row["sd_error"]) > LIMIT + allowance

    return [row for row in rows if wrong(row)]


def picture(rows: list[Row], path: Path) -> None:
    """Error of the worst mean or sd against rounds, a line per seed."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    matplotlib.rcParams["svg.hashsalt"] = "fald"
    shown = [name for name in _PLOTTED if any(r["study"] == name and r.get("by_round") for r in rows)]
    if not shown:
        return
    across = min(3, len(shown))
    down = -(-len(shown) // across)
    figure, axes = plt.subplots(down, across, figsize=(3.4 * across, 2.7 * down), squeeze=False, sharey=True)
    looks = {"auto": ("#0072b2", "o", "fald.fit"), "corrected": ("#d55e00", "s", "corrected Langevin")}
    for place, axis in enumerate(axes.flat):
        if place >= len(shown):
            axis.axis("off")
            continue
        _panel(axis, shown[place], [r for r in rows if r["study"] == shown[place]], looks)
        if place % across == 0:
            axis.set_ylabel("worst error (sd)")
    for axis in axes[-1]:
        axis.set_xlabel("rounds")
    axes.flat[0].legend(frameon=False, fontsize=8)
    figure.tight_layout()
    figure.savefig(path, metadata={"Date": None})
    plt.close(figure)


def _panel(axis: Any, name: str, rows: list[Row], looks: dict[str, tuple[str, str, str]]) -> None:
    value: Callable[[list[float]], float] = max
    labelled = set()
    for row in rows:
        colour, marker, label = looks[row["method"]]
        errors = [max(value(e), 1e-3) for e in row.get("by_round", [])]
        first = label if label not in labelled else None
        labelled.add(label)
        axis.plot(
            range(1, len(errors) + 1),
            errors,
            color=colour,
            marker=marker,
            ms=3,
            lw=0.9,
            alpha=0.7,
            label=first,
        )
    axis.axhline(LIMIT, color="#5a5a5a", lw=0.8, ls="--")
    axis.set_yscale("log")
    axis.xaxis.get_major_locator().set_params(integer=True)
    axis.set_title(f"{name} (d = {rows[0]['dim']})", fontsize=9)
