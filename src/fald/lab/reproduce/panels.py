"""The collection, in the order in which it is run."""

from __future__ import annotations

from fald.lab.reproduce import calibration, communication, figure1, figure2, figure3, local_steps
from fald.lab.reproduce.base import Panel

PANELS: dict[str, Panel] = {
    panel.name: panel
    for panel in (
        Panel("fig1a", local_steps.measure, local_steps.draw),
        Panel("fig1b", figure1.measure_heterogeneity, figure1.draw_curves),
        Panel("fig1c", figure1.measure_correlation, figure1.draw_curves),
        Panel("fig1d", figure1.measure_target, figure1.draw_target),
        Panel("fig1e", figure1.measure_draws, figure1.draw_draws),
        *(Panel(f"fig2{letter}", figure2.measure, figure2.draw) for letter in "abcde"),
        Panel("communication", communication.measure, communication.draw),
        Panel("fig3", figure3.measure, figure3.draw),
        Panel("fig4", figure3.measure, figure3.draw),
        Panel("calibration", calibration.measure, calibration.draw),
    )
}
