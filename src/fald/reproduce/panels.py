"""The collection, in the order in which it is run."""

from __future__ import annotations

from fald.reproduce import figure3
from fald.reproduce.base import Panel

PANELS: dict[str, Panel] = {
    panel.name: panel
    for panel in (
        Panel("fig3", figure3.measure, figure3.draw),
        Panel("fig4", figure3.measure, figure3.draw),
    )
}
