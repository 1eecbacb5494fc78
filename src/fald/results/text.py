"""Results as plain text and as JSON."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    import pandas as pd

BIAS_NOTE = "R-hat and ESS see mixing, not bias: what local steps and the step size shift stays unseen."


def number(value: Any) -> str:
    """Three significant digits, without exponents where they are short enough to read."""
    if not np.isfinite(value):
        return "-"
    if value == 0:
        return "0"
    size = abs(value)
    if 0.00005 <= size < 100_000:
        digits = min(4, max(0, 2 - int(np.floor(np.log10(size)))))
        return f"{value:.{digits}f}"
    return f"{value:.2e}"


def percent(value: float) -> str:
    """A share in per cent."""
    return f"{100 * value:.0f}%" if abs(value) >= 0.1 else f"{100 * value:.2g}%"


def labelled(label: str, units: Mapping[str, float]) -> str:
    """A parameter's name, with the units that one step of a scaled feature means."""
    unit = units.get(label, 1.0)
    return label if unit == 1 else f"{label} (per {unit:g})"


def align(header: list[str], rows: list[list[str]]) -> str:
    """Columns side by side: the first to the left, numbers to the right."""
    widths = [max(len(r[i]) for r in [header, *rows]) for i in range(len(header))]
    lines = [
        "  ".join(c.ljust(w) if i == 0 else c.rjust(w) for i, (c, w) in enumerate(zip(row, widths))).rstrip()
        for row in [header, *rows]
    ]
    lines.insert(1, "  ".join("-" * w for w in widths))
    return "\n".join(lines)


def summary_text(frame: pd.DataFrame, units: Mapping[str, float] | None = None) -> str:
    """The posterior table; ratios first, because they answer the question.

    ``units`` maps a scaled feature to the number of its own units that one step of it means.
    """
    level = frame.attrs["level"]
    tail = 100 * (1 - level) / 2
    low, high = f"{tail:g}%", f"{100 - tail:g}%"
    name = next((n for n in ("odds ratio", "rate ratio") if n in frame), None)
    header = ["parameter"]
    interval = f"{100 * level:g}% interval"
    if name:
        log = f"log {name.removesuffix(' ratio')}"
        header += [name, interval, log, "sd", f"{interval} ({log})", "ESS", "R-hat"]
    else:
        header += ["mean", "sd", interval, "ESS", "R-hat"]
    mixing = bool(np.isfinite(frame["r_hat"]).any())  # weighted draws have no R-hat
    header = header if mixing else header[:-1]
    rows = []
    for label, row in frame.iterrows():
        cells = [labelled(str(label), units or {})]
        if name:
            known = np.isfinite(row[name])
            cells += [
                number(row[name]) if known else "",
                f"{number(row[f'{name} {low}'])} to {number(row[f'{name} {high}'])}" if known else "",
            ]
        cells += [
            number(row["mean"]),
            number(row["sd"]),
            f"{number(row[low])} to {number(row[high])}",
            f"{row['ess_bulk']:.0f}" if np.isfinite(row["ess_bulk"]) else "-",
            f"{row['r_hat']:.3f}" if np.isfinite(row["r_hat"]) else "-",
        ]
        rows.append(cells if mixing else cells[:-1])
    return align(header, rows)


def drift_text(frame: pd.DataFrame) -> str:
    """The table of sites."""
    rows = [
        [
            str(name),
            f"{r['rows']:.0f}",
            f"{r['share']:.3f}",
            f"{r['took_part']:.0f}",
            number(r["mean_drift"]),
            number(r["max_drift"]),
        ]
        for name, r in frame.iterrows()
    ]
    return align(["site", "rows", "share", "times drawn", "mean drift", "largest drift"], rows)


def records(frame: pd.DataFrame) -> list[dict[str, Any]]:
    """A table as a list of plain mappings; missing numbers become null."""
    out = []
    for label, row in frame.iterrows():
        values = {str(k): (float(v) if np.isfinite(v) else None) for k, v in row.items()}
        out.append({str(frame.index.name or "row"): str(label), **values})
    return out
