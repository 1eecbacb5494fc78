"""Progress on standard error."""

from __future__ import annotations

import sys
import time


class Progress:
    """A progress display with rounds per second, time left and the current energy.

    On a terminal it is a live bar; elsewhere a line now and then, so that logs stay readable. Other work
    than sampling names its ``task`` and the ``unit`` it counts.
    """

    def __init__(
        self, total: int, done: int, shown: bool, label: str, unit: str = "round", task: str = "sampling"
    ):
        self.total, self.start, self.shown, self.label = total, done, shown, label
        self.unit, self.task_name = unit, task
        self.began = self.last_line = time.monotonic()
        self.bar = self.task = None

    def __enter__(self) -> Progress:
        if self.shown and sys.stderr.isatty():
            from rich.console import Console
            from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeRemainingColumn
            from rich.progress import Progress as Bar

            self.bar = Bar(
                TextColumn(self.task_name),
                BarColumn(),
                MofNCompleteColumn(),
                TextColumn(f"{self.unit}s"),
                TextColumn("{task.fields[note]}"),
                TimeRemainingColumn(),
                console=Console(stderr=True),
                transient=True,
            )
            self.bar.start()
            self.task = self.bar.add_task(self.task_name, total=self.total, completed=self.start, note="")
        return self

    def __exit__(self, *exception) -> None:
        if self.bar is not None:
            self.bar.stop()

    def update(self, done: int, value: float) -> None:
        """Show that ``done`` rounds are complete, with the energy, or ε so far, as ``value``."""
        if not self.shown:
            return
        now = time.monotonic()
        rate = (done - self.start) / max(now - self.began, 1e-9)
        note = f"{rate:,.0f} {self.unit}s/s, {self.label} {value:,.4g}"
        if self.bar is not None and self.task is not None:
            self.bar.update(self.task, completed=done, note=note)
        elif now - self.last_line >= 10 or done == self.total:
            self.last_line = now
            left = (self.total - done) / max(rate, 1e-9)
            task = "" if self.task_name == "sampling" else f"{self.task_name}: "
            print(
                f"{task}{self.unit} {done:,} of {self.total:,}: {note}, {left:,.0f} s left",
                file=sys.stderr,
                flush=True,
            )
