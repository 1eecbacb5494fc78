"""Numbers and tables as plain text and as JSON."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    import pandas as pd


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


def csv_text(frame: pd.DataFrame) -> str:
    """A table as CSV in which no cell is a formula for a spreadsheet.

    Examples
    --------
    >>> import pandas as pd
    >>> print(csv_text(pd.DataFrame({"=1+1": ["@x", "y"]})), end="")
    ,'=1+1
    0,'@x
    1,y
    """

    def plain(cell: Any) -> Any:
        if not isinstance(cell, str):
            return cell
        cell = cell.replace("\r", " ")  # which ends a line for some programs, and is not quoted
        return f"'{cell}" if cell.lstrip()[:1] in tuple("=+-@") else cell

    return frame.map(plain).rename(columns=plain, index=plain).to_csv()


def records(frame: pd.DataFrame) -> list[dict[str, Any]]:
    """A table as a list of plain mappings; missing numbers become null."""
    out = []
    for label, row in frame.iterrows():
        values = {str(k): (float(v) if np.isfinite(v) else None) for k, v in row.items()}
        out.append({str(frame.index.name or "row"): str(label), **values})
    return out
