"""The record of a site as a page for whoever watches over its data."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from fald.core.files import write_atomically
from fald.federation.site.record import as_rows
from fald.report.page import TEMPLATES, environment


def write_record(entries: Sequence[Mapping[str, Any]], site: str, path: Path) -> Path:
    """Write a checked record as one HTML page that needs nothing else."""
    from markupsafe import Markup

    heads, rows = as_rows(entries)
    style = Markup((TEMPLATES / "report.css").read_text(encoding="utf-8"))
    page = environment(html=True).get_template("record.html")
    refused = sum(bool(e.get("refused")) for e in entries)
    text = page.render(site=site, heads=heads, rows=rows, refused=refused, style=style)
    write_atomically(path, text.encode("utf-8"))
    return path
