"""Results of ``fald.fit`` as text and as JSON: the verdict first."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import numpy as np

from fald.diagnostics import verdict
from fald.results import settings_of
from fald.tables import align, number

if TYPE_CHECKING:
    import xarray as xr

UNSEEN = "What no check sees: a further mode that no explorer met, and a model that does not fit the rows."


def is_fit(tree: xr.DataTree) -> bool:
    """Whether a result comes from a few-round method and carries its verdict."""
    return "rounds" in tree.children


def rounds_table(tree: xr.DataTree) -> list[dict[str, Any]]:
    """What every round did: draws, k-hat, ESS, bytes per site, and kinds of uploads."""
    rounds = tree.children["rounds"].to_dataset()
    names = ("draws", "khat", "ess", "explorers", "bytes_down", "bytes_up")
    table = []
    for i, number_ in enumerate(rounds["round"].values):
        values = {name: float(rounds[name].values[i]) for name in names}
        row = {name: value if np.isfinite(value) else None for name, value in values.items()}
        table.append({"round": int(number_), **row, "uploads": str(rounds["uploads"].values[i]).split()})
    return table


def fit_document(tree: xr.DataTree) -> dict[str, Any]:
    """The part of a result's document that only few-round methods have."""
    khat = float(tree.attrs["khat"])
    return {
        "verdict": tree.attrs["verdict"],
        "reason": tree.attrs["reason"],
        "advice": tree.attrs["advice"],
        "complaints": verdict(tree),
        "chosen": tree.attrs["chosen"],
        "accuracy": settings_of(tree)["accuracy"],
        "khat": khat if np.isfinite(khat) else None,
        "effective_draws": float(tree.attrs["effective_draws"]),
        "rounds": rounds_table(tree),
        "uploads": tree.attrs["uploads"],
        "reveals": json.loads(tree.attrs["reveals"]),
        "exposed": json.loads(tree.attrs["exposed"]),
        "note": UNSEEN,
    }


def fit_lines(tree: xr.DataTree) -> list[str]:
    """One line on what was done."""
    done = int(tree.attrs["rounds_done"])
    return [f"{done} rounds of {tree.attrs['method']}"]


def verdict_lines(tree: xr.DataTree) -> list[str]:
    """The verdict, what it does not see, and who is exposed, for a terminal."""
    tolerance = settings_of(tree)["accuracy"]
    khat, proposed = float(tree.attrs["khat"]), int(tree.attrs["num_proposed"])
    if tree.attrs["verdict"] == "reached":
        weighed = f"k-hat {khat:.2f}, " if np.isfinite(khat) else ""
        counted = f"{tree.attrs['effective_draws']:,.0f} effective of {proposed:,} draws"
        lines = [
            f"Reached: means within {tolerance:g} posterior sd and sds within {100 * tolerance:g}%, all at "
            f"once at 95% ({weighed}{counted})."
        ]
    else:
        lines = [f"NOT REACHED: {tree.attrs['reason']}.", f"What to do: {tree.attrs['advice']}."]
    lines.append(UNSEEN)
    names = json.loads(tree.attrs["exposed"])
    if names:
        shown = ", ".join(names[:5]) + (f" and {len(names) - 5} more" if len(names) > 5 else "")
        lines.append(
            f"Exposed: {shown}. So few rows that sums over them describe single rows, unless a secure sum "
            "hides them among those of other sites."
        )
    return lines


def rounds_text(tree: xr.DataTree) -> str:
    """The rounds as a table."""
    cells = []
    for row in rounds_table(tree):
        shown = [
            "-" if row[name] is None else number(row[name]) if name == "khat" else f"{row[name]:,.0f}"
            for name in ("draws", "khat", "ess", "explorers", "bytes_down", "bytes_up")
        ]
        cells.append([str(row["round"]), *shown])
    return align(["round", "draws", "k-hat", "ESS", "explorers", "bytes down", "bytes up"], cells)


def reveals_text(tree: xr.DataTree) -> str:
    """What a site gave away, as a list; all of it summed over sites."""
    return "\n".join(f"  {line}" for line in json.loads(tree.attrs["reveals"]))
